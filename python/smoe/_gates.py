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

_FAR = 1e4  # past every limit that is not infinite
_NEAR = 1 / 16  # where a limit of at least 1/16 does not act
_RELATIVE = 2e-5
_ROUNDING = 5e-7  # of (|g| + 1) (|u| + 1): what gates reach that compute in f32 inside


class Gate(NamedTuple):
    """An activation by the header's name, its layout, and its values."""

    activation: str
    layout: str
    gate_limit: float = 7.0
    up_limit: float = 7.0
    gate_alpha: float = 1.702
    up_offset: float = 1.0


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
            low, high = (middle, high) if middle / (1 + math.exp(-alpha * middle)) < gate_limit else (low, middle)
        gate_limit = high
    limits = [math.inf if limit >= 0.99 * _FAR else _short(limit) for limit in (gate_limit, up_limit)]
    if not all(limit > 0 for limit in limits) or (activation == "swiglu_capped" and math.inf in limits):
        return None
    return Gate(activation, "", *limits, _short(alpha), _short(up_offset))


def _points(of: Gate) -> Tensor:
    """Numbers around 0 and on both sides of the limits and of numbers past them."""
    limits = [x for x in (of.gate_limit, of.up_limit) if x < _FAR]
    marks = [x * (1 + e) for x in (*limits, 7.0, 30.0, 100.0) for e in (-1e-3, 1e-3)]
    inner = torch.linspace(-9, 9, 31, dtype=torch.float64).tolist()
    return torch.tensor([*inner, *marks, *(-x for x in marks)], dtype=torch.float64)


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
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view_as(y)
        found.append((y, *torch.autograd.grad((y * weights).sum(), x)))
    if found[0][0].shape != found[1][0].shape:
        return False
    bounds = [_RELATIVE * want.detach().abs() + _ROUNDING * most for want, most in zip(found[1], sizes)]
    return all(bool(((a - b).abs() <= bound).all()) for a, b, bound in zip(*found, bounds))


def _candidates(function: Callable[[Tensor], Tensor]) -> Iterator[Gate]:
    for layout in ("concatenated", "interleaved"):
        for name in ("swiglu", "geglu", "geglu_tanh", "reglu"):
            yield Gate(name, layout)

        def at(g: float, u: float) -> float:
            halves = torch.full((2, 4), 0.5, dtype=torch.float64)
            halves[0, 1], halves[1, 1] = g, u
            return function(_join(*halves, layout)[None])[0, 1].item()

        for name in ("swiglu_clamped", "swiglu_capped"):
            values = _values(at, name)
            if values is not None:
                yield values._replace(layout=layout)


def recognise(function: Callable[[Tensor], Tensor], gated: bool) -> Gate | None:
    """The activation that `function` computes, rows of H (N, 2I or I) to rows of A (N, I), or None. An error that the
    function raises goes to the caller."""
    with torch.enable_grad(), torch.inference_mode(False):
        if not gated:
            points = _points(Gate("", ""))[None]
            for name, plain in _PLAIN.items():
                if _same(function, plain, points, ((points.abs() + 1).square(),) * 2):
                    return Gate(name, "concatenated")
            return None
        for gate in _candidates(function):
            points = _points(gate)
            pairs = torch.cartesian_prod(points, points)
            g, u = pairs.T.reshape(2, -1, points.numel())  # rows whose features have many pairs
            rows = torch.stack([_join(a, b, gate.layout) for a, b in zip(g, u)])
            size = (g.abs() + 1) * (u.abs() + 1)
            sizes = size, torch.stack([_join(row, row, gate.layout) for row in size])
            wanted = _GATED[gate.activation]
            order = gate.layout == "concatenated"

            def reference(x: Tensor) -> Tensor:
                halves = x.chunk(2, -1) if order else (x[..., ::2], x[..., 1::2])
                return wanted(*halves, gate)

            if _same(function, reference, rows, sizes):
                return gate
    return None
