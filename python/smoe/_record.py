"""The record of a layer: what a smoe_layer has but its number of tokens, as a tuple of numbers in the header's order.

PyTorch's operators take the numbers of a record as arguments of their own, by the header's names, so a traced graph
contains them; the number of tokens may be symbolic. This module needs no torch.
"""

import functools
import operator
from typing import Any, NamedTuple

from . import native
from ._activation import Gate, fields_of

Record = tuple[int | float, ...]

HUGGING_FACE = {  # names of options in configurations of Hugging Face's models, and the header's
    "top_k": "topk",
    "norm_topk_prob": "renormalize",
    "n_group": "groups",
    "topk_group": "groups_kept",
    "routed_scaling_factor": "route_scale",
}

_FIELDS = native._declared["structs"]["smoe_layer"][2:]  # without struct_size and tokens
_NAMES = tuple(name for name, _, _ in _FIELDS)
_ENUMS = {
    "smoe_activation": native.ACTIVATIONS, "smoe_layout": native.LAYOUTS, "smoe_entry": native.ENTRIES,
    "smoe_type": native.TYPES, "smoe_score": native.SCORES, "smoe_rounding": native.ROUNDINGS,
    "smoe_compute": native.COMPUTES,
}  # fmt: skip
# Fields that follow from a call's tensors, or that the adapters of this package set
_OF_CALL = (
    "hidden intermediate experts dtype entry index_type logits_type gradient_type accumulate inference reuse_saved gate_limit "
    "up_limit gate_alpha up_offset ranks waves max_tokens row_capacity lora_rank1 lora_rank2 compute"
).split()
OPTIONS = [name for name in _NAMES if name not in _OF_CALL]
SCHEMA = ", ".join(f"{'float' if kind == 'float' else 'int'} {name}" for name, kind, _ in _FIELDS)


class Bounds(NamedTuple):
    """What follows from a record alone (smoe_sizes)."""

    saved_constant: int
    saved_token: int
    reads_logits: bool  # in the backward, also if no loss has a coefficient or a gradient
    weights_f8: int  # bytes, 0 without fp8

    def saved(self, tokens: int) -> int:
        """Bytes to allocate as `saved`. At least what the library asks for; affine in `tokens`, which may be symbolic."""
        return self.saved_constant + tokens * self.saved_token


@functools.lru_cache(maxsize=1024)
def bounds(record: Record) -> Bounds:
    """The answer of the CPU backend, which depends on no device. It knows no f16, so bf16 stands for it. Raises the
    library's error if there is no such layer."""
    f16, bf16 = native.TYPES["f16"], native.TYPES["bf16"]
    made = layer(1, record)
    made.dtype, made.gradient_type = [bf16 if code == f16 else code for code in (made.dtype, made.gradient_type)]
    context = native.create_context("cpu", threads=1)
    try:
        sizes = native.query_sizes(context, made)
    finally:
        native.library.smoe_destroy(context)
    return Bounds(sizes.saved_constant_bytes, sizes.saved_token_bytes, bool(sizes.backward_reads_logits), sizes.weights_f8_bytes)


def check(function: str, record: Record) -> None:
    """Raises an error in the name of `function` unless the library knows such a layer."""
    try:
        bounds(record)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(str(error).replace("smoe_query_sizes", function)) from None


check._dynamo_marked_constant = True  # traced code calls it with constants, once


_RANGES = {"int64_t": (-(2**63), 2**63 - 1), "uint64_t": (0, 2**64 - 1)}  # of all others: that of int32_t


def _converts(value: Any, method: str) -> bool:
    """Whether this method makes a number of the value. No tensor does: it would wait for its device."""
    return hasattr(value, method) and not hasattr(value, "data_ptr")


def _numbers(text: str) -> Record:
    return tuple([float(word) if kind == "float" else int(word) for word, (_, kind, _) in zip(text.split(), _FIELDS)])


_numbers._dynamo_marked_constant = True  # through a text, which makes constants of numbers that torch.compile holds for symbolic


def _number(function: str, name: str, kind: str, value: Any) -> int | float:
    """The value of a field. A number that torch.compile holds for symbolic becomes a constant."""
    if kind == "float":
        if isinstance(value, bool) or not (isinstance(value, (int, float)) or _converts(value, "__float__")):
            raise TypeError(f"{function}: {name} is a {type(value).__name__}; expected a number")
        return float(value)
    expected = f"one of {', '.join(_ENUMS[kind])}" if kind in _ENUMS else "an integer"
    if isinstance(value, str):
        if value not in _ENUMS.get(kind, ()):
            raise ValueError(f"{function}: {name} is {value!r}; expected {expected}")
        return _ENUMS[kind][value]
    if not isinstance(value, int) and not _converts(value, "__index__"):
        raise TypeError(f"{function}: {name} is {value!r}; expected {expected}")
    number = operator.index(value)
    low, high = _RANGES.get(kind, (-(2**31), 2**31 - 1))
    if not low <= number <= high:
        raise ValueError(f"{function}: {name} is {number}; expected {low}..{high}")
    return number - 2**64 if number >= 2**63 else number  # operators take signed integers


def record(function: str, *, activation: str | Gate, **fields) -> Record:
    """The record with these fields, for `function`. The value of an enum is its name or its number. The other fields have
    the header's defaults. Raises an error, with this name, if the library refuses it."""
    given = {**fields, **fields_of(function, activation)}
    for name in given:
        if name not in _NAMES:
            raise TypeError(f"{function}: {name} is no option")
    made = _numbers(" ".join([f"{_number(function, name, kind, given.get(name, default))}" for name, kind, default in _FIELDS]))
    check(function, made)
    return made


def options_of(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options by the header's names, from those or Hugging Face's. A field that a call sets itself is no option."""
    renamed = {HUGGING_FACE.get(name, name): value for name, value in given.items()}
    for name in given:
        if HUGGING_FACE.get(name, name) not in OPTIONS:
            raise TypeError(f"{function}: {name} is no option; expected one of {', '.join(OPTIONS)}")
    return renamed


def layer(tokens: int, record: Record, **others) -> native.Layer:
    """The C description. `others` are fields with other values than the record's."""
    return native.Layer(tokens=tokens, **{**dict(zip(_NAMES, record)), **others})
