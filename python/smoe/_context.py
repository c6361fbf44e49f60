"""Contexts and descriptions for the PyTorch operators.

A thread has its own context for each device (the autograd engine runs backwards in threads of its own), made at the
first call. A context keeps, by shape, the C description of the layer and the sizes that the library asks for, so that a
call with a known shape builds neither. When a thread ends its contexts go to the next thread that needs one: they are
never destroyed, because work that they enqueued may still run.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Hashable

import torch

from . import native

_KEPT_DESCRIPTIONS = 4096  # then all are dropped: a bound on memory, not a tuning

TYPE_CODES = {
    torch.float32: native.TYPES["f32"],
    torch.bfloat16: native.TYPES["bf16"],
    torch.float16: native.TYPES["f16"],
    torch.int32: native.TYPES["i32"],
    torch.int64: native.TYPES["i64"],
}


def _pack_format(layout: type[ctypes.Structure]) -> str:
    """The struct-module format of a ctypes struct: packing all fields at once is several times faster than ctypes."""
    codes = {ctypes.c_void_p: "Q", ctypes.c_size_t: "Q", ctypes.c_uint64: "Q", ctypes.c_float: "f"}
    return "@" + "".join(codes[kind] for _, kind in layout._fields_)


_FORWARD = struct.Struct(_pack_format(native.ForwardArgs))
_BACKWARD = struct.Struct(_pack_format(native.BackwardArgs))
assert _FORWARD.size == ctypes.sizeof(native.ForwardArgs)
assert _BACKWARD.size == ctypes.sizeof(native.BackwardArgs)


class Description:
    """One layer at one shape: the C struct's address and what the library asks for."""

    __slots__ = ("layer", "address", "saved", "saved_needed", "scratch_forward", "scratch_backward")

    def __init__(self, layer: native.Layer, sizes: native.Sizes, saved: int) -> None:
        self.layer = layer  # keeps the memory at `address`
        self.address = ctypes.addressof(layer)
        self.saved = saved
        self.saved_needed = sizes.saved_buffer_bytes
        self.scratch_forward = sizes.scratch_forward_bytes
        self.scratch_backward = sizes.scratch_backward_bytes


class Context:
    """A smoe_context, its descriptions by shape, and memory for the argument structs of one call at a time."""

    __slots__ = ("handle", "descriptions", "_forward", "_backward", "_forward_at", "_backward_at")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.descriptions: dict[Hashable, Description] = {}
        self._forward = ctypes.create_string_buffer(_FORWARD.size)
        self._backward = ctypes.create_string_buffer(_BACKWARD.size)
        self._forward_at = ctypes.addressof(self._forward)
        self._backward_at = ctypes.addressof(self._backward)

    def query(self, layer: native.Layer) -> native.Sizes:
        sizes = native.Sizes(ctypes.sizeof(native.Sizes))
        status = native.library.smoe_query_sizes(self.handle, ctypes.addressof(layer), ctypes.addressof(sizes))
        if status:
            raise native.last_error(self.handle, status)
        return sizes

    def describe(self, key: Hashable, layer: native.Layer, saved: int) -> Description:
        """Keeps the description of `layer` under `key`. `saved` is the affine bound that the operators allocate (0 for
        inference); the fake kernels state the same number, so it must cover what the library asks for."""
        made = Description(layer, self.query(layer), saved)
        if saved < made.saved_needed:
            raise RuntimeError(
                f"smoe: saved needs {made.saved_needed} bytes, but its bound is {saved}: smoe/_layout.py and "
                "src/problem.c disagree"
            )
        if len(self.descriptions) >= _KEPT_DESCRIPTIONS:
            self.descriptions.clear()
        self.descriptions[key] = made
        return made

    def forward(self, layer: int, stream: int, *fields: int) -> None:
        """smoe_layer_forward; `fields` are those of smoe_forward_args after struct_size, pointers as addresses."""
        _FORWARD.pack_into(self._forward, 0, _FORWARD.size, *fields)
        status = native.library.smoe_layer_forward(self.handle, layer, self._forward_at, stream)
        if status:
            raise native.last_error(self.handle, status)

    def backward(self, layer: int, stream: int, *fields: int | float) -> None:
        """smoe_layer_backward; `fields` are those of smoe_backward_args after struct_size."""
        _BACKWARD.pack_into(self._backward, 0, _BACKWARD.size, *fields)
        status = native.library.smoe_layer_backward(self.handle, layer, self._backward_at, stream)
        if status:
            raise native.last_error(self.handle, status)

    def plan_view(self, layer: int, *fields: int) -> native.PlanView:
        """smoe_view_plan on the forward's fields."""
        _FORWARD.pack_into(self._forward, 0, _FORWARD.size, *fields)
        view = native.PlanView(ctypes.sizeof(native.PlanView))
        status = native.library.smoe_view_plan(self.handle, layer, self._forward_at, ctypes.addressof(view))
        if status:
            raise native.last_error(self.handle, status)
        return view

    def update_selection_bias(self, layer: int, counts: int, bias: int, gamma: float, stream: int) -> None:
        status = native.library.smoe_update_selection_bias(self.handle, layer, counts, bias, gamma, stream)
        if status:
            raise native.last_error(self.handle, status)


_idle: dict[int, list[Context]] = {}  # of threads that ended, by the key below


class _OfThread(dict):
    """Contexts of one thread: by device ordinal for CUDA, by minus the number of threads for the CPU."""

    def __del__(self, idle: dict[int, list[Context]] = _idle) -> None:
        for key, context in self.items():
            idle.setdefault(key, []).append(context)


_local = threading.local()
_forked = False


def _forget_parent() -> None:
    """After a fork: the parent's contexts may hold a team of threads or a CUDA context that the child does not have."""
    global _local, _forked
    _local, _forked = threading.local(), True
    _idle.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _make(key: int) -> Context:
    if idle := _idle.get(key):
        return idle.pop()
    if key < 0:
        return Context(native.create_context("cpu", threads=1 if _forked else -key))
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "smoe: this process was forked after CUDA was initialised and cannot use the GPU; start workers with the "
            "'spawn' method, or give the fork only CPU tensors"
        )
    return Context(native.create_context("cuda", device=key))


def context_of(tensor: torch.Tensor) -> Context:
    """This thread's context for the tensor's device."""
    key = tensor.get_device() if tensor.is_cuda else -torch.get_num_threads()
    try:
        return _local.contexts[key]
    except AttributeError:
        _local.contexts = _OfThread()
    except KeyError:
        pass
    context = _local.contexts[key] = _make(key)
    return context
