"""Which of smoe's activations a gate function computes, found by calling it.

`recognise` calls the function in f64 on the CPU, takes the values of the clamped and the capped SwiGLU from what it
returns, and compares values and derivatives with every activation, on both sides of every limit. It looks at no name.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activation import Gate

_FAR = 1e4  # past every limit that is not infinite
_NEAR = 1 / 16  # where a limit of at least 1/16 does not act
_RELATIVE = 2e-5
_ROUNDING = 5e-7  # of (|g| + 1) (|u| + 1): what gates reach that compute in f32 inside


class Found(NamedTuple):
    activation: str | Gate
    layout: str


def _join(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """One row of H (2I) from its halves (I)."""
    return torch.cat((gate, up)) if layout == "concatenated" else torch.stack((gate, up), -1).flatten()


def _clamped(g: Tensor, u: Tensor, of: Gate) -> Tensor:
    x = g.clamp(max=of.gate_limit)
    return x * torch.sigmoid(of.gate_alpha * x) * (u.clamp(-of.up_limit, of.up_limit) + of.up_offset)


def _capped(g: Tensor, u: Tensor, of: Gate) -> Tensor:
    gate = of.gate_limit * torch.tanh(g / of.gate_limit) * torch.sigmoid(of.gate_alpha * g)
    return gate * (of.up_limit * torch.tanh(u / of.up_limit) + of.up_offset)


_GATED = {
    "swiglu": lambda g, u, of: F.silu(g) * u,
    "geglu": lambda g, u, of: F.gelu(g) * u,
    "geglu_tanh": lambda g, u, of: F.gelu(g, approximate="tanh") * u,
    "reglu": lambda g, u, of: F.relu(g) * u,
    "swiglu_clamped": _clamped,
    "swiglu_capped": _capped,
}
_PLAIN = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": lambda h: F.relu(h).square()}


def _short(value: float) -> float:
    """The nearest number of few digits, if it is as near as the estimate is good."""
    for digits in range(1, 5):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded - value) <= 1e-5 * abs(value) + 1e-6:
            return rounded
    return value


def _values(at: Callable[[float, float], float], activation: str) -> Gate | None:
    """The values with which the clamped or the capped SwiGLU would return what `at` (gate, up) returns."""
    near = (at(1.0, _NEAR) - at(1.0, -_NEAR)) / 2
    far = (at(1.0, _FAR) - at(1.0, -_FAR)) / 2
    if not 0 < abs(near) <= abs(far):
        return None
    share = near / far  # of the up half's limit that _NEAR is, as the clamp or the cap has it
    up_limit = _NEAR / share if activation == "swiglu_clamped" else _NEAR / math.atanh(min(share, 1 - 1e-15))
    up_offset = at(1.0, 0.0) * up_limit / far
    factor = _NEAR + up_offset if activation == "swiglu_clamped" else up_limit * share + up_offset
    if factor == 0:
        return None

    def gate(g: float) -> float:
        return at(g, _NEAR) / factor

    odd, even = gate(_NEAR * 4) - gate(-_NEAR * 4), gate(_NEAR * 4) + gate(-_NEAR * 4)
    if odd == 0 or abs(even) >= abs(odd):
        return None
    alpha = 2 * math.atanh(even / odd) / (_NEAR * 4)
    gate_limit = gate(_FAR)
    if activation == "swiglu_clamped" and gate_limit < 0.99 * _FAR:
        low, high = 0.0, 2 * abs(gate_limit) + 2  # x sigmoid(alpha x) rises for x > 0
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if middle / (1 + math.exp(min(-alpha * middle, 700.0))) < gate_limit else (low, middle)
        gate_limit = high
    limits = [math.inf if limit >= 0.99 * _FAR else _short(limit) for limit in (gate_limit, up_limit)]
    if not all(limit > 0 for limit in limits) or (activation == "swiglu_capped" and math.inf in limits):
        return None
    return Gate(activation, *limits, _short(alpha), _short(up_offset))


def _points(limits: tuple[float, ...]) -> Tensor:
    """Numbers around 0, on both sides of the limits, and far past them."""
    marks = [x * (1 + e) for x in (*limits, 7.0, 30.0, 100.0) if x < _FAR for e in (-1e-3, 1e-3)]
    inner = torch.linspace(-9, 9, 31, dtype=torch.float64, device="cpu").tolist()
    return torch.tensor([*inner, *marks, *(-x for x in marks)], dtype=torch.float64, device="cpu")


def _same(
    function: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor], rows: Tensor, sizes: tuple[Tensor, Tensor]
) -> bool:
    """Equal values, and equal gradients of a weighted sum, up to rounding? sizes: what values and gradients may reach."""
    found = []
    for f in (function, wanted):
        x = rows.clone().requires_grad_()
        y = f(x)
        if not y.requires_grad:
            return False
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64, device="cpu").view_as(y)
        found.append((y, *torch.autograd.grad((y * weights).sum(), x)))
    if found[0][0].shape != found[1][0].shape:
        return False
    bounds = [_RELATIVE * want.detach().abs() + _ROUNDING * most for want, most in zip(found[1], sizes)]
    return all(bool(((a - b).abs() <= bound).all()) for a, b, bound in zip(*found, bounds))


def _candidates(function: Callable[[Tensor], Tensor]) -> Iterator[Found]:
    for layout in ("concatenated", "interleaved"):
        for name in ("swiglu", "geglu", "geglu_tanh", "reglu"):
            yield Found(name, layout)

        def at(g: float, u: float) -> float:
            halves = torch.full((2, 4), 0.5, dtype=torch.float64, device="cpu")
            halves[0, 1], halves[1, 1] = g, u
            return function(_join(*halves, layout)[None])[0, 1].item()

        for name in ("swiglu_clamped", "swiglu_capped"):
            gate = _values(at, name)
            if gate is not None:
                yield Found(gate, layout)


def _is(function: Callable[[Tensor], Tensor], found: Found) -> bool:
    """Does the gated function compute this?"""
    of, layout = found
    gate = of if isinstance(of, Gate) else Gate(of)
    points = _points((gate.gate_limit, gate.up_limit))
    g, u = torch.cartesian_prod(points, points).T.reshape(2, -1, points.numel())
    size = (g.abs() + 1) * (u.abs() + 1)
    rows, sizes = (torch.stack([_join(a, b, layout) for a, b in zip(*pair)]) for pair in ((g, u), (size, size)))

    def wanted(x: Tensor) -> Tensor:
        halves = x.chunk(2, -1) if layout == "concatenated" else (x[..., ::2], x[..., 1::2])
        return _GATED[gate.activation](*halves, gate)

    return _same(function, wanted, rows, (size, sizes))


def recognise(function: Callable[[Tensor], Tensor], gated: bool) -> Found | None:
    """What `function` computes, from rows of H (N, 2I or I) to rows of A (N, I), or None. An error that the function
    raises goes to the caller."""
    with torch.enable_grad(), torch.inference_mode(False):
        if gated:
            return next((found for found in _candidates(function) if _is(function, found)), None)
        points = _points(())[None]
        sizes = ((points.abs() + 1).square(),) * 2
        names = (name for name, plain in _PLAIN.items() if _same(function, plain, points, sizes))
        return next((Found(name, "concatenated") for name in names), None)
