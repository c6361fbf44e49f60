"""Checks of the functions' arguments. They raise TypeError for a wrong type or dtype, for a sparse or nested tensor and for
a device that smoe does not support, and ValueError for everything else. Each message names the function, the argument,
its value and what was expected."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from . import _activation, _context, _record, native
from ._activation import Gate

DTYPES = {
    "cpu": (torch.bfloat16, torch.float32),
    "cuda": (torch.bfloat16, torch.float16),
    "meta": (torch.bfloat16, torch.float16, torch.float32),
}
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_EXPERTS, MAX_LORA_RANK = 4096, 256  # of include/smoe.h


def name_of(values: Collection[torch.dtype]) -> str:
    return " or ".join(str(value) for value in values)


def tensor(function: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}: {name} is a {type(value).__name__}; expected a torch.Tensor")
    if value.is_nested or value.layout is not torch.strided:
        kind = "is a nested tensor" if value.is_nested else f"has layout {value.layout}"
        raise TypeError(f"{function}: {name} {kind}; expected a dense tensor")


def dtype(function: str, name: str, value: Tensor, expected: Collection[torch.dtype], why: str = "") -> None:
    if value.dtype not in expected:
        raise TypeError(f"{function}: {name} has dtype {value.dtype}; expected {name_of(expected)}{why}")


def device(function: str, name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"{function}: {name} is on {value.device}; expected {x.device}, where x is")


def shape(function: str, name: str, value: Tensor, expected: tuple, meaning: str) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"{function}: {name} has shape {tuple(value.shape)}; expected {meaning} = {expected}")


def dimensions(function: str, name: str, value: Tensor, meaning: str, count: int) -> None:
    if value.dim() != count:
        raise ValueError(f"{function}: {name} has shape {tuple(value.shape)}; expected {meaning}")


def contiguous(function: str, name: str, value: Tensor) -> None:
    if not value.is_contiguous():
        raise ValueError(
            f"{function}: {name} of shape {tuple(value.shape)} has strides {value.stride()}; expected a contiguous "
            "tensor, since a copy at every call would be hidden"
        )


def choice(function: str, name: str, value: Any, allowed: Collection[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{function}: {name} is {value!r}; expected one of {', '.join(allowed)}")


def between(function: str, name: str, value: int, low: int, high: int, meaning: str = "") -> None:
    if type(value) is not int and (isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__")):
        raise TypeError(f"{function}: {name} is {value!r}; expected an integer")
    if not low <= value <= high:
        raise ValueError(f"{function}: {name} is {value}; expected {low}..{high}{meaning}")


def flag(function: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor) or value not in (False, True):
        raise TypeError(f"{function}: {name} is {value!r}; expected True or False")


def number(function: str, name: str, value: Any, low: float, high: float = 1e30) -> None:
    # torch.compile makes floats symbolic, and torch 2.11 cannot ask these for an attribute.
    real = torch.compiler.is_compiling() or hasattr(value, "__float__")
    if isinstance(value, (bool, Tensor)) or not real:
        raise TypeError(f"{function}: {name} is a {type(value).__name__}; expected a number")
    if not low < value < high:
        raise ValueError(f"{function}: {name} is {value!r}; expected a number above {low:g} and below {high:g}")


def experts_dtype(function: str, name: str, x: Tensor) -> None:
    """Checks that smoe has a backend for x's device, and that this backend supports x's dtype."""
    kind = x.device.type
    if kind not in DTYPES:
        raise TypeError(f"{function}: {name} is on {x.device}; expected a tensor on the CPU or a CUDA device")
    dtype(function, name, x, DTYPES[kind], f" on {kind}")


def _wraps(value: Tensor) -> bool:
    """Whether the tensor is of a class that computes by its own rules, such as a quantised weight. The library would read
    its memory as plain numbers."""
    kind = type(value)
    if kind in (Tensor, torch.nn.Parameter) or kind.__module__.startswith("torch._subclasses"):
        return False
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def why_not(x: Tensor, *weights: Tensor | None, casts: bool = False) -> str:
    """Why the library cannot compute with x and these weights on x's device, "" if it can. Before it computes, autocast
    casts all of them to its dtype; `casts` says that the caller casts the weights to x's."""
    kind = x.device.type
    autocasts = torch.is_autocast_enabled(kind)
    expected = torch.get_autocast_dtype(kind) if autocasts else x.dtype
    if expected not in DTYPES.get(kind, ()):
        return f"{expected} on {kind} is not supported"
    if kind == "cuda" and (reason := _context.why_no_context(x.get_device())):
        return reason
    for weight in weights:
        if weight is None:
            continue
        if _wraps(weight):
            return f"its weights are of the class {type(weight).__name__}, not plain tensors"
        if weight.dtype != x.dtype and not ((casts or autocasts) and weight.is_floating_point()):
            return f"its inputs are {x.dtype} and its weights {weight.dtype}"
    return ""


def experts(
    function: str, name: str, x: Any, w1: Any, b1: Any, w2: Any, b2: Any, activation: str | Gate,
    gradient_dtype: torch.dtype | None, copy_weights: bool = False, weight_dtypes: Collection[torch.dtype] = (),
) -> None:  # fmt: skip
    """The checks that all three entries share. `name` is the name of the argument x in the function's signature. w1 and w2
    may also have one of weight_dtypes."""
    if torch.jit.is_tracing():  # every call comes here then, because the tracer makes each size a new tensor
        raise NotImplementedError(f"{function}: torch.jit.trace is not supported; use torch.compile or torch.export")
    biases = [(label, bias) for label, bias in (("b1", b1), ("b2", b2)) if bias is not None]
    for label, value in ((name, x), ("w1", w1), ("w2", w2), *biases):
        tensor(function, label, value)
    experts_dtype(function, name, x)
    _activation.fields_of(function, activation)
    dimensions(function, name, x, "(T, H)", 2)
    dimensions(function, "w2", w2, "(E, H, I)", 3)
    (count, hidden, intermediate), tokens = w2.shape, x.shape[0]
    gated = activation not in native.PLAIN_ACTIVATIONS
    width, meaning = (2 * intermediate, "2I") if gated else (intermediate, "I")
    shape(function, name, x, (tokens, hidden), "(T, H)")
    shape(function, "w1", w1, (count, width, hidden), f"(E, {meaning}, H)")
    expected = {"b1": ((count, width), f"(E, {meaning})"), "b2": ((count, hidden), "(E, H)")}
    for label, bias in biases:
        shape(function, label, bias, *expected[label])
    for label, value in (("w1", w1), ("w2", w2), *biases):
        device(function, label, value, x)
        if label not in ("w1", "w2") or value.dtype not in weight_dtypes:
            dtype(function, label, value, (x.dtype,), f", the dtype of {name}")
        if not copy_weights or label in ("b1", "b2"):
            contiguous(function, label, value)
    if gradient_dtype not in (None, x.dtype, torch.float32):
        others = name_of(dict.fromkeys((x.dtype, torch.float32)))
        raise TypeError(f"{function}: gradient_dtype is {gradient_dtype!r}; expected None or {others}")


def ids(function: str, value: Any, x: Tensor) -> None:
    tensor(function, "ids", value)
    dtype(function, "ids", value, INDEX_DTYPES)
    device(function, "ids", value, x)
    dimensions(function, "ids", value, "(T, K)", 2)
    shape(function, "ids", value, (x.shape[0], value.shape[1]), "(T, K)")


def weights(function: str, name: str, value: Any, x: Tensor, expected: tuple, meaning: str) -> None:
    """Weights of rows or of (token, expert) pairs. The functions convert float16 and bfloat16 to float32."""
    tensor(function, name, value)
    dtype(function, name, value, (torch.float32, torch.bfloat16, torch.float16))
    device(function, name, value, x)
    shape(function, name, value, expected, meaning)


def offsets(function: str, value: Any, x: Tensor, count: int) -> None:
    tensor(function, "offsets", value)
    dtype(function, "offsets", value, INDEX_DTYPES)
    device(function, "offsets", value, x)
    shape(function, "offsets", value, (count + 1,), "(E + 1)")


def token_mask(function: str, value: Any, x: Tensor) -> None:
    tensor(function, "token_mask", value)
    dtype(function, "token_mask", value, (torch.bool,))
    device(function, "token_mask", value, x)
    shape(function, "token_mask", value, (x.shape[0],), "(T)")


def router(
    function: str, x: Tensor, count: int, router_weight: Any, logits: Any, router_bias: Any, selection_bias: Any
) -> None:
    if (router_weight is None) == (logits is None):
        given = "both were given" if logits is not None else "neither was given"
        raise ValueError(f"{function}: expected either router_weight or logits; {given}")
    if router_bias is not None and router_weight is None:
        raise ValueError(f"{function}: router_bias is given without router_weight")
    hidden = x.shape[1]
    same = ", the dtype of x (or compute the logits and pass logits=)"
    if router_weight is not None:
        _router_tensor(function, "router_weight", router_weight, x, (count, hidden), "(E, H)", (x.dtype,), same)
    if router_bias is not None:
        _router_tensor(function, "router_bias", router_bias, x, (count,), "(E)", (x.dtype,), same)
    if logits is not None:
        both = (torch.float32, torch.bfloat16)
        _router_tensor(function, "logits", logits, x, (x.shape[0], count), "(T, E)", both, "")
    if selection_bias is not None:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        _router_tensor(function, "selection_bias", selection_bias, x, (count,), "(E)", floats, "")


def _router_tensor(
    function: str, name: str, value: Any, x: Tensor, expected: tuple, meaning: str,
    dtypes: Collection[torch.dtype], why: str,
) -> None:  # fmt: skip
    tensor(function, name, value)
    device(function, name, value, x)
    dtype(function, name, value, dtypes, why)
    shape(function, name, value, expected, meaning)


def coefficients(function: str, balance_coefficient: float, z_coefficient: float) -> None:
    number(function, "balance_coefficient", balance_coefficient, -1e30)
    number(function, "z_coefficient", z_coefficient, -1e30)


def logits_dtype(function: str, value: Any) -> None:
    if value not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{function}: logits_dtype is {value!r}; expected torch.float32 or torch.bfloat16")


def compute(function: str, value: Any) -> None:
    names = [name for name in native.COMPUTES if name != "storage"]
    if value not in names:
        raise ValueError(f"{function}: compute is {value!r}; expected None or one of {', '.join(names)}")


def module(
    function: str, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, flags: dict[str, bool],
    options: dict[str, Any],
) -> None:  # fmt: skip
    """The arguments of smoe.MoE. `options` has all that smoe.moe takes, by the header's names."""
    for name, value in flags.items():
        flag(function, name, value)
    if options["gradient_dtype"] not in (None, torch.float32, torch.bfloat16, torch.float16):
        kind = options["gradient_dtype"]
        raise TypeError(f"{function}: gradient_dtype is {kind!r}; expected None or a floating-point dtype")
    coefficients(function, options["balance_coefficient"], options["z_coefficient"])
    logits_dtype(function, options["logits_dtype"])
    if options["compute"] is not None:
        compute(function, options["compute"])
    of_layer = {name: value for name, value in options.items() if name in _record.OPTIONS}
    sizes = dict(hidden=hidden_size, intermediate=intermediate_size, experts=num_experts, topk=top_k)
    _record.record(function, **sizes, **of_layer, compute=options["compute"] or "storage")
