"""smoe._gates: which activation a gate function computes. The functions below are written again here, not taken from
smoe; what differs from every activation in one region, in one derivative or by one per cent must not be recognised."""

import math

import pytest
import torch
import torch.nn.functional as F

from smoe import _gates


def halves(function, interleaved=False):
    """A function of rows of H from a function of gate and up."""
    if interleaved:
        return lambda h: function(h[..., ::2], h[..., 1::2])
    return lambda h: function(*h.chunk(2, -1))


def clamped(limit, alpha, offset, up_limit=None):
    def gate(g, u):
        g, u = g.clamp(max=limit), u.clamp(-(up_limit or limit), up_limit or limit)
        return g * torch.sigmoid(alpha * g) * (u + offset)

    return gate


def capped(gate_cap, up_cap):
    return lambda g, u: gate_cap * torch.tanh(g / gate_cap) * torch.sigmoid(g) * up_cap * torch.tanh(u / up_cap)


def in_f32(function):
    return lambda g, u: function(g.float(), u.float()).to(g.dtype)


@pytest.mark.parametrize(
    "name, function",
    [
        ("swiglu", lambda g, u: F.silu(g) * u),
        ("swiglu", in_f32(lambda g, u: F.silu(g) * u)),
        ("geglu", lambda g, u: F.gelu(g) * u),
        ("geglu_tanh", lambda g, u: F.gelu(g, approximate="tanh") * u),
        ("reglu", lambda g, u: F.relu(g) * u),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gates_without_values(name, function, interleaved):
    found = _gates.recognise(halves(function, interleaved), gated=True)
    assert found == _gates.Gate(name, "interleaved" if interleaved else "concatenated")


@pytest.mark.parametrize("limit, alpha, offset, up_limit", [
    (7.0, 1.702, 1.0, None), (10.0, 1.0, 0.0, None), (7.3, 1.5, 0.25, 2.0), (0.5, 1.0, -1.0, 0.25), (math.inf, 1.5, 0.0, 3.0),
])  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda f: f, in_f32])
def test_clamped_gates(limit, alpha, offset, up_limit, wrap):
    found = _gates.recognise(halves(wrap(clamped(limit, alpha, offset, up_limit))), gated=True)
    assert found == ("swiglu_clamped", "concatenated", limit, up_limit or limit, alpha, offset)


def test_a_clamp_after_the_curve_is_a_clamp_before_it():
    found = _gates.recognise(halves(lambda g, u: F.silu(g).clamp(max=2.0) * u.clamp(-2, 2)), gated=True)
    assert found.activation == "swiglu_clamped" and found.up_limit == 2.0
    assert abs(found.gate_limit / (1 + math.exp(-found.gate_limit)) - 2.0) < 1e-5


@pytest.mark.parametrize("wrap", [lambda f: f, in_f32])
def test_capped_gates(wrap):
    found = _gates.recognise(halves(wrap(capped(4.0, 25.0)), True), gated=True)
    assert found == ("swiglu_capped", "interleaved", 4.0, 25.0, 1.0, 0.0)


@pytest.mark.parametrize("name, function", [
    ("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu), ("relu2", lambda h: F.relu(h).square()),
])  # fmt: skip
def test_activations_without_gate(name, function):
    assert _gates.recognise(function, gated=False).activation == name


swiglu = clamped(math.inf, 1.0, 0.0, math.inf)


@pytest.mark.parametrize("function", [
    halves(lambda g, u: 1.01 * swiglu(g, u)),  # one per cent more
    halves(lambda g, u: swiglu(1.01 * g, u)),
    halves(lambda g, u: swiglu(g, 1.01 * u)),
    halves(lambda g, u: swiglu(u, g)),  # swapped halves
    halves(lambda g, u: swiglu(g, u.detach())),  # a derivative is missing
    halves(lambda g, u: clamped(7, 1.702, 1)(g.clamp(min=-7), u)),  # a second clamp
    halves(lambda g, u: F.gelu(g.clamp(max=7)) * u.clamp(-7, 7)),  # clamps around another curve
    halves(lambda g, u: capped(4, 25)(g.clamp(max=20), u.clamp(max=90))),  # differs only far past the caps
    halves(lambda g, u: torch.sigmoid(g) * u),
    halves(lambda g, u: swiglu(g, u).roll(1, -1)),
    lambda h: swiglu(*h.flip(-1).chunk(2, -1)),
    halves(lambda g, u: torch.zeros_like(g)),
])  # fmt: skip
def test_other_gates_are_refused(function):
    assert _gates.recognise(function, gated=True) is None
