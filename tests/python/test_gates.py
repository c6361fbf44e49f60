"""smoe._gates: which activation a gate function computes. The functions below are written again here, not taken from
smoe; what differs from every activation in one region, in one derivative or by one per cent must not be recognised."""

import math
import types

import pytest
import torch
import torch.nn.functional as F

import smoe.transformers
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
def test_gates_without_values_are_recognised(name, function, interleaved):
    found = _gates.recognise(halves(function, interleaved), gated=True)
    assert found == (name, "interleaved" if interleaved else "concatenated")


@pytest.mark.parametrize("limit, alpha, offset, up_limit", [
    (7.0, 1.702, 1.0, None), (10.0, 1.0, 0.0, None), (7.3, 1.5, 0.25, 2.0), (0.5, 1.0, -1.0, 0.25), (math.inf, 1.5, 0.0, 3.0),
])  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda f: f, in_f32])
def test_clamped_gates_are_recognised_with_their_values(limit, alpha, offset, up_limit, wrap):
    found = _gates.recognise(halves(wrap(clamped(limit, alpha, offset, up_limit))), gated=True)
    assert found == (smoe.Gate("swiglu_clamped", limit, up_limit or limit, alpha, offset), "concatenated")


def test_a_clamp_after_the_curve_is_a_clamp_before_it():
    found = _gates.recognise(halves(lambda g, u: F.silu(g).clamp(max=2.0) * u.clamp(-2, 2)), gated=True)
    gate = found.activation
    assert gate.activation == "swiglu_clamped" and gate.up_limit == 2.0
    assert abs(gate.gate_limit / (1 + math.exp(-gate.gate_limit)) - 2.0) < 1e-5


@pytest.mark.parametrize("wrap", [lambda f: f, in_f32])
def test_capped_gates_are_recognised_with_their_values(wrap):
    found = _gates.recognise(halves(wrap(capped(4.0, 25.0)), True), gated=True)
    assert found == (smoe.Gate("swiglu_capped", 4.0, 25.0, 1.0, 0.0), "interleaved")


@pytest.mark.parametrize("name, function", [
    ("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu), ("relu2", lambda h: F.relu(h).square()),
])  # fmt: skip
def test_activations_without_a_gate_are_recognised(name, function):
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


# ---- Transformers' classes of experts with a gate of their own, beside eager ----

CLASSES = {
    "beam": "BeamExperts",
    "deepseek_v4": "DeepseekV4Experts",
    "glm5_next": "Glm5NextTextExperts",
    "gpt_oss": "GptOssExperts",
    "hy_v4": "HYV4Experts",
    "inkling2": "Inkling2Experts",
    "minimax_m3_vl": "MiniMaxM3VLExperts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
}
CONFIG = dict(
    num_local_experts=6, n_routed_experts=6, num_experts=6, hidden_size=32, intermediate_size=24, moe_intermediate_size=24,
    hidden_act="silu", swiglu_limit=0.4, swiglu_alpha=1.3, mlp_gate_softcap=0.5, mlp_up_softcap=1.5,
)  # fmt: skip


def of_transformers(name, implementation):
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    experts = getattr(module, CLASSES[name])(types.SimpleNamespace(_experts_implementation=implementation, **CONFIG))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for name in ("limit", "swiglu_limit"):  # gpt-oss has its values in the code, not in the config
        if hasattr(experts, name):
            setattr(experts, name, CONFIG["swiglu_limit"])
    return experts


def results(experts):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 32, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(40)])
    weights = torch.rand(40, 2, generator=generator, requires_grad=True)
    out = experts(x, ids, weights)
    loss = (out * torch.randn(out.shape, generator=generator)).sum()
    return [out, *torch.autograd.grad(loss, [x, weights, *experts.parameters()])]


@pytest.mark.parametrize("name", CLASSES)
def test_classes_with_a_gate_of_their_own_equal_eager(name, caplog):
    wanted = results(of_transformers(name, "eager"))
    experts = of_transformers(name, "smoe")
    activation, _, reason = smoe.transformers._math_of(experts)
    assert activation is not None, reason
    assert (activation == "swiglu") == (name == "beam")
    for found, want in zip(results(experts), wanted):
        assert (found - want).norm() < 2e-5 * want.norm()
    assert not [record for record in caplog.records if record.name == "smoe.transformers"]


def test_a_gate_is_probed_once_for_each_class_and_values(monkeypatch):
    calls = []
    recognise = _gates.recognise
    monkeypatch.setattr(_gates, "recognise", lambda *given: calls.append(1) or recognise(*given))
    monkeypatch.setattr(smoe.transformers, "_known_gates", {})
    first, second = of_transformers("hy_v4", "smoe"), of_transformers("hy_v4", "smoe")
    assert smoe.transformers._math_of(first) == smoe.transformers._math_of(second) and len(calls) == 1
    second.swiglu_limit = 0.75
    assert smoe.transformers._math_of(second)[0] == smoe.Gate("swiglu_clamped", 0.75, 0.75, 1.0, 0.0) and len(calls) == 2


def test_a_gate_of_one_module_is_not_taken_for_its_class():
    first, second = of_transformers("hy_v4", "smoe"), of_transformers("hy_v4", "smoe")
    assert smoe.transformers._math_of(first)[0] is not None
    gate = second._apply_gate
    second._apply_gate = lambda h: 1.01 * gate(h)
    assert smoe.transformers._math_of(second)[0] is None


def test_a_gate_with_a_weight_is_refused():
    experts = of_transformers("deepseek_v4", "smoe")
    experts.act_fn = torch.nn.PReLU(init=0.0)  # relu, until it is trained
    experts._apply_gate = lambda h: experts.act_fn(h.chunk(2, -1)[0].float()).to(h.dtype) * h.chunk(2, -1)[1]
    activation, _, reason = smoe.transformers._math_of(experts)
    assert activation is None and "weights of its own" in reason


def test_compiled_experts_have_the_same_bits():
    experts = of_transformers("glm5_next", "smoe")
    for found, want in zip(results(torch.compile(experts, fullgraph=True, backend="aot_eager")), results(experts)):
        assert torch.equal(found, want)
