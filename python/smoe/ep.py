"""Expert parallelism: the experts of a layer spread over the processes of a torch.distributed group. On the CPU so far.

    group = smoe.ep.Group(mesh["ep"], max_tokens=T, hidden=H, num_experts=E, top_k=K)
    out = smoe.ep.experts(x, ids, weights, w1, w2, group=group)  # w1 (E/W, 2I, H), w2 (E/W, H, I): this rank's experts

include/smoe_ep.h has the rules. All ranks make the same calls in the same order, also in the backward, with the same options, and
want the same gradients. Their numbers of tokens may differ, and may be 0. The gradient of an expert is the sum over the tokens of all
ranks of the group: to average over the ranks, divide by their number.
"""

import ctypes
import mmap
import os
import uuid

import torch
import torch.distributed as dist
from torch import Tensor

from . import _activation, _checks, _ops, native
from ._activation import Gate
from ._context import TYPE_CODES
from ._layout import parse

_FOLDER = "/dev/shm"  # windows are files here, which live in memory


class PeerError(RuntimeError):
    """Another rank is late, has failed, or has other options. The group cannot be used any more."""


_groups: dict[int, "Group"] = {}  # by the integer that stands for a group in a traced graph


class Group:
    """The ranks of a process group or of a one-dimensional device mesh, with memory through which they exchange tokens.

    Collective: all ranks make it with the same arguments. Layers may share it if they run one after the other.
    max_tokens, hidden, num_experts (of all ranks), top_k, dtype: the largest of the layers. waves: parts in which tokens travel,
    0: chosen. timeout: seconds that a rank waits for another. threads: of a call, None: torch's number.
    """

    def __init__(
        self, process_group=None, *, max_tokens: int, hidden: int, num_experts: int, top_k: int,
        dtype: torch.dtype = torch.float32, waves: int = 0, timeout: float = 120.0, threads: int | None = None,
    ) -> None:  # fmt: skip
        self.process_group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self.max_tokens, self.num_experts, self.waves, self.dtype = max_tokens, num_experts, waves, dtype
        self.context = self.ep = None
        self._sizes: dict[tuple, native.Sizes] = {}
        if num_experts % self.size:
            raise ValueError(f"smoe.ep.Group: num_experts is {num_experts}; expected a multiple of the {self.size} ranks")
        w2 = (num_experts // self.size, hidden, 8)
        self.context = native.create_context("cpu", threads=threads or torch.get_num_threads())
        layer = self.layer("swiglu concatenated 1 0", max_tokens, top_k, w2, dtype, torch.int64, True)
        self._open(self._query(layer).window_bytes)
        windows = (ctypes.c_void_p * self.size)(*[ctypes.addressof(view) for view in self._views])
        options = native.EpOptions(
            rank=self.rank, timeout_ms=int(timeout * 1000), windows=ctypes.addressof(windows)
        )
        made = ctypes.c_void_p()
        self._call(native.library.smoe_ep_create, ctypes.byref(made), self.context, ctypes.byref(layer), ctypes.byref(options))
        self.ep = made.value
        self.handle = len(_groups)
        _groups[self.handle] = self

    def _open(self, size: int) -> None:
        """This rank's window and those of all others. Either every rank has all, or every rank raises the same error."""
        path = f"{_FOLDER}/smoe-ep-{uuid.uuid4().hex}"
        reason = None
        try:
            with open(path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # so that a full folder is an error here, not a signal later
        except OSError as error:
            reason = f"rank {self.rank} cannot make its window of {size} bytes: {error}"
        try:
            names = self._gather((path, reason))
            reason = next((why for _, why in names if why), None)
            self._views = []
            for rank, (name, _) in enumerate(names if reason is None else []):
                try:
                    with open(name, "r+b") as file:
                        window = mmap.mmap(file.fileno(), size)
                except (OSError, ValueError) as error:
                    reason = f"rank {self.rank} cannot open the window of rank {rank}: {error}"
                    break
                self._views.append((ctypes.c_char * size).from_buffer(window))
            reason = next((why for why in self._gather(reason) if why), None)
        finally:
            if os.path.exists(path):
                os.unlink(path)  # the memory stays until the last rank unmaps it
        if reason:
            raise RuntimeError(f"smoe.ep.Group: {reason}; the ranks of a group must be on one host")

    def _gather(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def _call(self, function, *arguments) -> None:
        status = function(*arguments)
        if status == native.STATUSES["error_peer"]:
            raise PeerError(str(native.last_error(self.context, status)))
        if status:
            raise native.last_error(self.context, status)

    def _query(self, layer: native.Layer) -> native.Sizes:
        sizes = native.Sizes()
        self._call(native.library.smoe_query_sizes, self.context, ctypes.byref(layer), ctypes.byref(sizes))
        return sizes

    def layer(
        self, options: str, tokens: int, top_k: int, w2: tuple[int, int, int], dtype: torch.dtype, index: torch.dtype, save: bool
    ) -> native.Layer:
        """w2 is the shape (E/W, H, I) of this rank's experts."""
        codes = TYPE_CODES[dtype], TYPE_CODES[index]
        layer = parse(options).layer("from_topk", tokens, top_k, w2, *codes, save)
        layer.experts, layer.ranks, layer.waves, layer.max_tokens = w2[0] * self.size, self.size, self.waves, self.max_tokens
        return layer

    def sizes(
        self, options: str, top_k: int, w2: tuple[int, int, int], dtype: torch.dtype, index: torch.dtype, save: bool
    ) -> native.Sizes:
        """Those of max_tokens tokens, so that they do not depend on the number of tokens, which may be symbolic."""
        key = (options, top_k, w2, dtype, index, save)
        if key not in self._sizes:
            self._sizes[key] = self._query(self.layer(options, self.max_tokens, top_k, w2, dtype, index, save))
        return self._sizes[key]

    def check(self) -> None:
        """Raises PeerError if a rank has failed. Waits for nothing."""
        self._call(native.library.smoe_ep_status, self.ep)

    def abort(self) -> None:
        """Ends this rank's wait, from any thread; the group fails."""
        native.library.smoe_ep_abort(self.ep)

    def close(self) -> None:
        """Frees the group; no rank may be in a call, and none may call it again."""
        if self.ep is not None:
            native.library.smoe_ep_destroy(self.ep)
            native.library.smoe_destroy(self.context)
            self.ep = None
            del _groups[self.handle]
            self._views = []


# ---- the operators ----


def _address(tensor: Tensor | None, absent: int = 0) -> int:
    """`absent` for an empty tensor, which has no address."""
    return 0 if tensor is None else tensor.data_ptr() or absent


def _forward(x, ids, weights, w1, b1, w2, b2, group, options, save):
    owner = _groups[group]
    x, ids, weights, w1, b1, w2, b2 = [_ops._readable(t) for t in (x, ids, weights, w1, b1, w2, b2)]
    kind = (ids.shape[1], tuple(w2.shape), x.dtype, ids.dtype, save)
    layer, sizes = owner.layer(options, x.shape[0], *kind), owner.sizes(options, *kind)
    out = torch.empty_like(x)
    saved = x.new_empty(sizes.saved_buffer_bytes, dtype=torch.uint8) if save else None
    scratch = x.new_empty(sizes.scratch_forward_bytes, dtype=torch.uint8)
    arguments = native.ForwardArgs(
        x=_address(x), topk_ids=_address(ids), topk_weights=_address(weights),
        w1=_address(w1), b1=_address(b1), w2=_address(w2), b2=_address(b2), out=_address(out),
        saved=_address(saved), saved_size=sizes.saved_buffer_bytes,
        scratch=_address(scratch), scratch_size=sizes.scratch_forward_bytes, ep=owner.ep,
    )  # fmt: skip
    owner._call(native.library.smoe_layer_forward, owner.context, ctypes.byref(layer), ctypes.byref(arguments), None)
    return [out, saved] if save else [out]


def _backward(dout, x, ids, w1, w2, b2, saved, group, options, needs):
    owner = _groups[group]
    dout, x, ids, w1, w2, b2 = [_ops._readable(t) for t in (dout, x, ids, w1, w2, b2)]
    saved = _ops._readable(saved, _ops._BUFFER_ALIGN)
    kind = (ids.shape[1], tuple(w2.shape), x.dtype, ids.dtype, True)
    layer, sizes = owner.layer(options, x.shape[0], *kind), owner.sizes(options, *kind)
    made = _ops._gradients(_ops._wanted(needs), _ops._gradient_dtype(parse(options), x), x, w1, w2, ids, None)
    dx, dw1, db1, dw2, db2, dweights, _, _ = made
    scratch = x.new_empty(sizes.scratch_backward_bytes, dtype=torch.uint8)
    wanted = _address(saved)  # a gradient is wanted also where this rank has no tokens, and so no memory for it
    arguments = native.BackwardArgs(
        x=_address(x), topk_ids=_address(ids), w1=_address(w1),
        w2=_address(w2), b2=_address(b2), saved=_address(saved), saved_size=saved.numel(), dout=_address(dout),
        dx=_address(dx, wanted), dw1=_address(dw1), dw2=_address(dw2), db1=_address(db1), db2=_address(db2),
        dtopk_weights=_address(dweights, wanted), scratch=_address(scratch), scratch_size=sizes.scratch_backward_bytes,
        ep=owner.ep,
    )  # fmt: skip
    owner._call(native.library.smoe_layer_backward, owner.context, ctypes.byref(layer), ctypes.byref(arguments), None)
    return _ops._given(*made)


def _fake_forward(x, ids, weights, w1, b1, w2, b2, group, options, save):
    out = [torch.empty_like(x, memory_format=torch.contiguous_format)]
    if save:
        sizes = _groups[group].sizes(options, ids.shape[1], tuple(w2.shape), x.dtype, ids.dtype, True)
        out.append(torch.empty(sizes.saved_buffer_bytes, dtype=torch.uint8, device=x.device))
    return out


def _fake_backward(dout, x, ids, w1, w2, b2, saved, group, options, needs):
    return _ops._fake_gradients(needs, parse(options), x, w1, w2, ids)


_WEIGHTS = "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2"
for _schema, _real, _fake in (
    (f"ep_forward(Tensor x, Tensor ids, Tensor weights, {_WEIGHTS}, int group, str options, bool save) -> Tensor[]",
     _forward, _fake_forward),
    ("ep_backward(Tensor dout, Tensor x, Tensor ids, Tensor w1, Tensor w2, Tensor? b2, Tensor saved, int group, str options, "
     "int needs) -> Tensor[]", _backward, _fake_backward),
):  # fmt: skip
    _name = _schema.split("(")[0]
    _ops._library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _ops._library.impl(_name, _real, "CPU")
    torch.library.register_fake(f"smoe::{_name}", _fake, lib=_ops._library)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, w1, b1, w2, b2, group, options):
        out, saved = torch.ops.smoe.ep_forward.default(x, ids, weights, w1, b1, w2, b2, group, options, True)
        ctx.save_for_backward(x, ids, w1, w2, b2, saved)
        ctx.group, ctx.options = group, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        x, _, weights, w1, b1, w2, b2, *_ = ctx.needs_input_grad
        wanted = (x, w1, b1, w2, b2, weights, False, False)
        needs = sum(bit for bit, want in zip(_ops.NEEDS, wanted) if want)
        found = iter(torch.ops.smoe.ep_backward.default(dout, *ctx.saved_tensors, ctx.group, ctx.options, needs))
        dx, dw1, db1, dw2, db2, dweights, _, _ = [next(found) if want else None for want in wanted]
        return dx, None, dweights, dw1, db1, dw2, db2, None, None


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, *, group: Group, b1: Tensor | None = None,
    b2: Tensor | None = None, activation: str | Gate = "swiglu", layout: str = "concatenated",
) -> Tensor:  # fmt: skip
    """smoe.experts with global ids, where w1, w2, b1 and b2 have this rank's experts: those from rank * E/W on."""
    function = "smoe.ep.experts"
    _checks.experts(function, "x", x, w1, b1, w2, b2, activation, layout, 1, None)
    _checks.ids(function, ids, x, group.num_experts)
    _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
    if x.device.type != "cpu":
        raise NotImplementedError(f"{function}: x is on {x.device}; expert parallelism is for the CPU so far")
    options = f"{_activation.word(activation)} {layout} 1 0"
    given = (x, ids, weights.float(), w1, b1, w2, b2)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        return _Experts.apply(*given, group.handle, options)
    return torch.ops.smoe.ep_forward.default(*given, group.handle, options, False)[0]
