"""Activations as Python callers give them: a name, or a Gate if the activation takes values. This module needs no torch."""

import math
from typing import Any, NamedTuple

from . import native


class Gate(NamedTuple):
    """An activation with the values that it takes, by the header's names; the defaults are gpt-oss's clamped SwiGLU.

    swiglu_clamped: x sigmoid(gate_alpha x) (y + up_offset), x = min(g, gate_limit), y = u clamped to +-up_limit.
    swiglu_capped: gate_limit tanh(g / gate_limit) sigmoid(gate_alpha g) (up_limit tanh(u / up_limit) + up_offset)."""

    activation: str
    gate_limit: float = 7.0
    up_limit: float = 7.0
    gate_alpha: float = 1.702
    up_offset: float = 1.0


def _check_gate(function: str, gate: Gate) -> None:
    if gate.activation not in ("swiglu_clamped", "swiglu_capped"):
        raise ValueError(
            f"{function}: activation is a Gate of {gate.activation!r}; expected swiglu_clamped or swiglu_capped, the others "
            "take no values and are given by name"
        )
    for name, value in zip(gate._fields[1:], gate[1:]):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{function}: {name} is a {type(value).__name__}; expected a number")
        limit = name in ("gate_limit", "up_limit")
        if limit and not value > 0:
            raise ValueError(f"{function}: {name} is {value!r}; expected a positive number")
        if not math.isfinite(value) and not (limit and value > 0 and gate.activation == "swiglu_clamped"):
            raise ValueError(f"{function}: {name} is {value!r}; expected a finite number")


def fields_of(function: str, activation: Any) -> dict[str, Any]:
    """The fields of a smoe_layer that an activation sets."""
    if isinstance(activation, Gate):
        _check_gate(function, activation)
        return {  # written out, because torch.compile does not trace _asdict
            "activation": activation.activation, "gate_limit": activation.gate_limit, "up_limit": activation.up_limit,
            "gate_alpha": activation.gate_alpha, "up_offset": activation.up_offset,
        }  # fmt: skip
    if not isinstance(activation, str) or activation not in native.ACTIVATIONS:
        raise ValueError(f"{function}: activation is {activation!r}; expected one of {', '.join(native.ACTIVATIONS)}")
    return {"activation": activation}
