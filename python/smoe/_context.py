"""Contexts and descriptions for the PyTorch operators.

Each thread has its own context for each device, made at the thread's first call for that device. (PyTorch's autograd
engine runs backward passes in its own threads.) When a thread ends, its contexts go to the next thread that needs one.
Contexts are never destroyed, because work that they enqueued may still run. smoe/_ops.py keeps the C description of
each layer and the buffer sizes that the library asks for, so that a call with a known shape builds neither.
"""

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable

import torch

from . import native

TYPE_CODES = {
    torch.float32: native.TYPES["f32"],
    torch.bfloat16: native.TYPES["bf16"],
    torch.float16: native.TYPES["f16"],
    torch.int32: native.TYPES["i32"],
    torch.int64: native.TYPES["i64"],
}
DTYPES = {code: dtype for dtype, code in TYPE_CODES.items()}


try:  # the stream as an integer, without building a torch.cuda.Stream
    _raw_stream = torch._C._cuda_getCurrentRawStream
except AttributeError:  # a torch without CUDA, or one that renamed it

    def _raw_stream(device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream


def _packer(layout: type[ctypes.Structure], names: str) -> Callable[..., bytes]:
    """Returns a function that packs the values of the named fields into the bytes of the ctypes struct `layout`.
    `names` has the struct's order; all other fields are zero. Packing is several times faster than filling a ctypes
    struct, and ctypes accepts bytes where a C function takes a pointer."""
    codes = {ctypes.c_void_p: "Q", ctypes.c_size_t: "Q", ctypes.c_uint64: "Q", ctypes.c_float: "f"}
    named, format = ["struct_size", *names.split()], "@"
    for name, kind in layout._fields_:
        format += codes[kind] if name in named else f"{ctypes.sizeof(kind)}x"
    packed = struct.Struct(format)
    order = [name for name, _ in layout._fields_ if name in named]
    assert order == named and packed.size == ctypes.sizeof(layout), (order, named)
    return functools.partial(packed.pack, packed.size)


# The fields that each kind of call fills. The moe calls are those of layers with a router.
_EXPERTS = "w1 b1 w2 b2 out saved saved_size scratch scratch_size"
pack_forward = _packer(native.ForwardArgs, f"x topk_ids topk_weights offsets row_weights {_EXPERTS}")
pack_moe_forward = _packer(
    native.ForwardArgs, f"x router_weight router_bias logits selection_bias step losses {_EXPERTS} token_mask"
)
_READ, _WRITTEN = "w1 w2 b2 saved saved_size dout", "dx dw1 dw2 db1 db2"
pack_backward = _packer(
    native.BackwardArgs, f"x topk_ids {_READ} {_WRITTEN} dtopk_weights drow_weights scratch scratch_size"
)
pack_moe_backward = _packer(
    native.BackwardArgs,
    f"x router_weight logits {_READ} balance_coefficient z_coefficient {_WRITTEN} drouter_weight drouter_bias dlogits "
    "scratch scratch_size loss_gradients token_mask",
)

_layer_forward, _layer_backward = native.library.smoe_layer_forward, native.library.smoe_layer_backward


class Description:
    """One layer at one shape: the address of the C struct, and the buffer sizes in bytes that the library asks for."""

    __slots__ = ("layer", "address", "saved", "saved_needed", "scratch_forward", "scratch_backward")

    def __init__(self, layer: native.Layer, sizes: native.Sizes, saved: int) -> None:
        self.layer = layer  # keeps the memory at `address`
        self.address = ctypes.addressof(layer)
        self.saved = saved
        self.saved_needed = sizes.saved_buffer_bytes
        self.scratch_forward = sizes.scratch_forward_bytes
        self.scratch_backward = sizes.scratch_backward_bytes


class Context:
    """A smoe_context of a device."""

    __slots__ = ("handle", "device", "new_bytes")

    def __init__(self, handle: int, device: int) -> None:
        """`device`: CUDA's ordinal, negative for the CPU."""
        self.handle, self.device = handle, device
        # Allocates a buffer of so many bytes. Without the arguments dtype and device an allocation takes 0.2 us less.
        self.new_bytes = torch.empty(0, dtype=torch.uint8, device=device if device >= 0 else "cpu").new_empty

    def stream(self) -> int:
        """The device's current stream."""
        return _raw_stream(self.device) if self.device >= 0 else 0

    def query(self, layer: native.Layer) -> native.Sizes:
        return native.query_sizes(self.handle, layer)

    def describe(self, layer: native.Layer, saved: int) -> Description:
        """`saved` is the number of bytes that the operators allocate for the buffer of that name, 0 for inference. The
        fake kernels use the same number, which is a bound affine in the number of tokens. It must not be below the size
        that the library asks for."""
        made = Description(layer, self.query(layer), saved)
        if saved < made.saved_needed:
            raise RuntimeError(
                f"smoe: saved needs {made.saved_needed} bytes, but its bound is {saved}: moe_saved_bound in src/problem.c is "
                "wrong"
            )
        return made

    def forward(self, layer: int, arguments: bytes) -> None:
        """smoe_layer_forward on the current stream; `arguments` from pack_forward or pack_moe_forward."""
        stream = _raw_stream(self.device) if self.device >= 0 else 0
        status = _layer_forward(self.handle, layer, arguments, stream)
        if status:
            raise native.last_error(self.handle, status)

    def backward(self, layer: int, arguments: bytes) -> None:
        """smoe_layer_backward on the current stream; `arguments` from pack_backward or pack_moe_backward."""
        stream = _raw_stream(self.device) if self.device >= 0 else 0
        status = _layer_backward(self.handle, layer, arguments, stream)
        if status:
            raise native.last_error(self.handle, status)

    def plan_view(self, layer: int, arguments: bytes) -> native.PlanView:
        """smoe_view_plan on a forward's arguments."""
        view = native.PlanView()
        status = native.library.smoe_view_plan(self.handle, layer, arguments, ctypes.addressof(view))
        if status:
            raise native.last_error(self.handle, status)
        return view

    def quantize_weights(self, layer: int, arguments: int) -> None:
        status = native.library.smoe_quantize_weights(self.handle, layer, arguments, self.stream())
        if status:
            raise native.last_error(self.handle, status)

    def update_selection_bias(self, layer: int, counts: int, bias: int, gamma: float) -> None:
        status = native.library.smoe_update_selection_bias(self.handle, layer, counts, bias, gamma, self.stream())
        if status:
            raise native.last_error(self.handle, status)


_idle: dict[int, list[Context]] = {}  # contexts of threads that ended; the keys are those of _OfThread


class _OfThread(dict):
    """Contexts of one thread. The key is the device ordinal for CUDA, and minus the number of OpenMP threads for the
    CPU."""

    def __del__(self, idle: dict[int, list[Context]] = _idle) -> None:
        for key, context in self.items():
            idle.setdefault(key, []).append(context)


_local = threading.local()
_forked = False


def _forget_parent() -> None:
    """Drops the parent's contexts after a fork: they may need OpenMP threads or a CUDA context that the child process
    does not have."""
    global _local, _forked
    _local, _forked = threading.local(), True
    _idle.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _make(key: int) -> Context:
    try:
        return _idle[key].pop()  # no check before: another thread may take the last context at any moment
    except (KeyError, IndexError):
        pass
    if key < 0:
        return Context(native.create_context("cpu", threads=1 if _forked else -key), key)
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "smoe: this process was forked after CUDA was initialised and cannot use the GPU; start workers with the "
            "'spawn' method, or give the fork only CPU tensors"
        )
    return Context(native.create_context("cuda", device=key), key)


@functools.cache
def why_no_context(device: int) -> str:
    """Why the library cannot use this GPU, "" if it can."""
    if torch.cuda._is_in_bad_fork():
        return ""  # context_of raises the error that says so
    try:
        _idle.setdefault(device, []).append(_make(device))
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return ""


why_no_context._dynamo_marked_constant = True  # a traced call keeps the answer


def context_of(tensor: torch.Tensor) -> Context:
    """This thread's context for the tensor's device."""
    key = tensor.get_device()
    if key < 0:
        key = -torch.get_num_threads()
    try:
        return _local.contexts[key]
    except AttributeError:
        _local.contexts = _OfThread()
    except KeyError:
        pass
    context = _local.contexts[key] = _make(key)
    return context
