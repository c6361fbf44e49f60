"""Experts whose GEMMs multiply numbers of 8 bits (e4m3): smoe_compute of include/smoe.h. Experimental.

The calls read the weights from one buffer of bytes, which quantize makes, and neither w1 nor w2. These are arguments of the
autograd Function alone, so that gradients reach them, and are not kept for the backward.
"""

import ctypes
import weakref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from . import _autograd, _checks, functional, native
from . import _ops as ops
from ._activation import Gate
from ._autograd import PLAIN, dispatched, modes, profiled, unpack
from ._context import TYPE_CODES, context_of
from ._lora import _aligned, _at, _described
from ._record import Record, bounds, layer as layer_of

_call = torch.ops.smoe


def weights_bytes(record: Record) -> int:
    return bounds(record).weights_f8


weights_bytes._dynamo_marked_constant = True


# ---- the operators ----


def _op_quantize(w1, w2, *record):
    w1, w2 = _aligned(w1), _aligned(w2)
    made = torch.empty(weights_bytes(record), dtype=torch.uint8, device=w1.device)
    args = native.QuantizeArgs(
        w1=_at(w1), w2=_at(w2), weight_type=TYPE_CODES[w1.dtype], experts=w2.shape[0], weights_f8=_at(made),
        weights_f8_size=made.numel(),
    )  # fmt: skip
    layer = layer_of(1, record)
    context_of(w1).quantize_weights(ctypes.addressof(layer), ctypes.addressof(args))
    return [made]


def _fake_quantize(w1, w2, *record):
    return [torch.empty(weights_bytes(record), dtype=torch.uint8, device=w1.device)]


def _op_forward(
    x, ids, weights, router_weight, router_bias, logits, selection_bias, token_mask, b1, b2, weights_f8, step, losses, counts, save,
    *record,
):  # fmt: skip
    given = dict(
        x=x, topk_ids=ids, topk_weights=weights, router_weight=router_weight, router_bias=router_bias, logits=logits,
        selection_bias=selection_bias, token_mask=token_mask, b1=b1, b2=b2, weights_f8=weights_f8,
    )  # fmt: skip
    given = {name: _aligned(tensor) for name, tensor in given.items()}
    out = torch.empty_like(given["x"])
    made, found, counted = ops.moe_outputs(x, router_weight, losses, counts, record)
    if x.shape[0] == 0:
        for empty in ops._given(found, counted):
            empty.zero_()
        return ops._given(out, x.new_empty(bounds(record).saved(0), dtype=torch.uint8) if save else None, made, found, counted)
    context = context_of(x)
    layer, sizes = _described(context, x.shape[0], record, not save, False)
    saved = context.new_bytes(bounds(record).saved(x.shape[0])) if save else None
    scratch = context.new_bytes(sizes.scratch_forward_bytes)
    if made is not None:
        given["logits"] = made
    args = native.ForwardArgs(
        **{name: _at(tensor) for name, tensor in given.items()}, weights_f8_size=weights_f8.numel(), step=step,
        losses=_at(found), out=_at(out), saved=_at(saved), saved_size=saved.numel() if save else 0, scratch=_at(scratch),
        scratch_size=scratch.numel(),
    )  # fmt: skip
    context.forward(ctypes.addressof(layer), ctypes.addressof(args))
    if counted is not None:
        plan = saved if save else scratch
        start = context.plan_view(ctypes.addressof(layer), ctypes.addressof(args)).topk_counts - plan.data_ptr()
        counted.copy_(plan[start : start + 4 * counted.numel()].view(torch.int32))
    return ops._given(out, saved, made, found, counted)


def _fake_forward(
    x, ids, weights, router_weight, router_bias, logits, selection_bias, token_mask, b1, b2, weights_f8, step, losses, counts, save,
    *record,
):  # fmt: skip
    saved = ops._fake_saved(record, x) if save else None
    return ops._given(ops._fake_out(x), saved, *ops.moe_outputs(x, router_weight, losses, counts, record))


def _gradients(wanted: tuple[bool, ...], record: Record, x: Tensor, ids: Tensor | None) -> tuple[Tensor | None, ...]:
    """New tensors for those `wanted`. The shapes of w1 and w2 follow from the record."""
    layer, (dtype, *routed) = layer_of(1, record), ops._results_of(record)
    width = layer.intermediate * (1 if layer.activation in native.PLAIN_ACTIVATIONS.values() else 2)
    w1 = x.new_empty(1).expand(layer.experts, width, layer.hidden)
    w2 = x.new_empty(1).expand(layer.experts, layer.hidden, layer.intermediate)
    made = ops._gradients((wanted[0], False, wanted[2], False, *wanted[4:]), dtype, x, w1, w2, ids, *routed)
    dw1 = torch.empty(w1.shape, dtype=dtype, device=x.device) if wanted[1] else None
    dw2 = torch.empty(w2.shape, dtype=dtype, device=x.device) if wanted[3] else None
    return made[0], dw1, made[2], dw2, *made[4:]


def _backward(
    wanted: tuple[bool, ...], reuse: bool, record: Record, dout: Tensor, x: Tensor, ids: Tensor | None, router_weight: Tensor | None,
    logits: Tensor | None, dlosses: Tensor | None, token_mask: Tensor | None, b2: Tensor | None, weights_f8: Tensor, saved: Tensor,
    balance: float, z: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients in the order of the bits, None where `wanted` is false."""
    given = dict(
        dout=dout, x=x, topk_ids=ids, router_weight=router_weight, logits=logits, loss_gradients=dlosses, token_mask=token_mask, b2=b2,
        weights_f8=weights_f8, saved=saved,
    )  # fmt: skip
    given = {name: _aligned(tensor) for name, tensor in given.items()}
    made = _gradients(wanted, record, given["x"], given["topk_ids"])
    if x.shape[0] == 0:
        for gradient in ops._given(*made):
            gradient.zero_()
        return made
    context = context_of(x)
    layer, sizes = _described(context, x.shape[0], record, False, reuse)
    scratch = context.new_bytes(sizes.scratch_backward_bytes)
    dx, dw1, db1, dw2, db2, drouting, drouter_weight, drouter_bias = [_at(gradient) for gradient in made]
    args = native.BackwardArgs(
        **{name: _at(tensor) for name, tensor in given.items()}, saved_size=saved.numel(), weights_f8_size=weights_f8.numel(),
        scratch=_at(scratch), scratch_size=scratch.numel(), balance_coefficient=balance, z_coefficient=z, dx=dx, dw1=dw1, db1=db1,
        dw2=dw2, db2=db2, drouter_weight=drouter_weight, drouter_bias=drouter_bias,
        **{"dlogits" if ids is None else "dtopk_weights": drouting},
    )  # fmt: skip
    context.backward(ctypes.addressof(layer), ctypes.addressof(args))
    return made


def _op_backward(
    dout, x, ids, router_weight, logits, dlosses, token_mask, b2, weights_f8, saved, balance, z, needs, *record
):
    given = dout, x, ids, router_weight, logits, dlosses, token_mask, b2, weights_f8, saved, balance, z
    return ops._given(*_backward(ops._wanted(needs), False, record, *given))


def _fake_backward(
    dout, x, ids, router_weight, logits, dlosses, token_mask, b2, weights_f8, saved, balance, z, needs, *record
):
    ids = None if ids is None else ids.contiguous()
    return ops._given(*_gradients(ops._wanted(needs), record, x.contiguous(), ids))


ops.define("f8_quantize(Tensor w1, Tensor w2", _op_quantize, _fake_quantize)
ops.define(
    "f8_forward(Tensor x, Tensor? ids, Tensor? weights, Tensor? router_weight, Tensor? router_bias, Tensor? logits, "
    "Tensor? selection_bias, Tensor? token_mask, Tensor? b1, Tensor? b2, Tensor weights_f8, SymInt step, bool losses, bool counts, "
    "bool save", _op_forward, _fake_forward,
)  # fmt: skip
ops.define(
    "f8_backward(Tensor dout, Tensor x, Tensor? ids, Tensor? router_weight, Tensor? logits, Tensor? dlosses, Tensor? token_mask, "
    "Tensor? b2, Tensor weights_f8, Tensor saved, float balance_coefficient, float z_coefficient, int needs",
    _op_backward, _fake_backward,
)  # fmt: skip


# ---- the autograd Function ----


def gathered(w1: Tensor):
    """What smoe.fsdp has gathered of the layer in place of w1 and w2, or None."""
    return None if torch.compiler.is_dynamo_compiling() else getattr(w1, "gathered_f8", None)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, ids, weights, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2, weights_f8, step,
        balance, z, wants_losses, wants_counts, *record,
    ):  # fmt: skip
        given = x, ids, weights, router_weight, router_bias, logits, selection_bias, token_mask, b1, b2, weights_f8
        found = _call.f8_forward.default(*given, step, wants_losses, wants_counts, True, *record)
        out, saved, made, losses, counts = unpack(found, True, router_weight is not None, wants_losses, wants_counts)
        kept = None
        if ids is None and (_autograd.reads_logits(record) or wants_losses or balance or z):
            kept = logits if made is None else made
        ctx.gathered = gathered(w1)
        ctx.save_for_backward(x, ids, router_weight, kept, token_mask, b2, None if ctx.gathered else weights_f8, saved)
        ctx.record, ctx.readers, ctx.overwritten = record, 0, False
        ctx.mark_non_differentiable(*[t for t in (made, counts) if t is not None])
        ctx.balance, ctx.z, ctx.losses_at = balance, z, 1 + (made is not None) if wants_losses else 0
        ctx.set_materialize_grads(False)
        return tuple([t for t in (out, made, losses, counts) if t is not None])

    @staticmethod
    def backward(ctx, dout, *others):
        if torch.is_grad_enabled():  # with create_graph
            return _autograd._once(_Experts, ctx, dout, *others)
        dlosses = others[ctx.losses_at - 1] if ctx.losses_at else None
        if dout is None and dlosses is None:
            return (None,) * len(ctx.needs_input_grad)
        wants_x, _, wants_weights, wants_router, wants_bias, wants_logits, _, _, wants_w1, wants_b1, wants_w2, wants_b2, *rest = (
            ctx.needs_input_grad
        )
        x, ids, router_weight, logits, token_mask, b2, weights_f8, saved = ctx.saved_tensors
        if ctx.gathered:
            weights_f8 = ctx.gathered.weights(True)
        routing = wants_logits if ids is None else wants_weights
        wanted = (wants_x, wants_w1, wants_b1, wants_w2, wants_b2, routing, wants_router, wants_bias)
        dout = torch.zeros_like(x) if dout is None else dout
        given = dout.contiguous(), x, ids, router_weight, logits, dlosses, token_mask, b2, weights_f8, saved, ctx.balance, ctx.z
        if torch.compiler.is_dynamo_compiling() or type(dout) not in PLAIN or modes() or profiled():
            found = dispatched(_call.f8_backward.default, wanted, given, ctx.record)
        else:
            reuse = _autograd._claim(ctx, dout)
            try:
                found = _backward(wanted, reuse, ctx.record, *given)
            finally:
                with _autograd._claims:
                    ctx.readers -= 1
        dx, dw1, db1, dw2, db2, drouting, dweight, dbias = found
        dweights, dlogits = (None, drouting) if ids is None else (drouting, None)
        return (dx, None, dweights, dweight, dbias, dlogits, None, None, dw1, db1, dw2, db2) + (None,) * len(rest)


def _run(record: Record, given: tuple, w1: Tensor, w2: Tensor, weights_f8: Tensor, numbers: tuple) -> list[Tensor | None]:
    """out, logits, losses, counts. given: x, ids, weights, router_weight, router_bias, logits, selection_bias, token_mask, b1, b2;
    numbers: step, balance, z, losses, counts."""
    step, balance, z, losses, counts = numbers
    router = given[3] is not None
    if torch.is_grad_enabled() and functional._any_requires_grad(w1, w2, *given):
        *before, b1, b2 = given
        found = _Experts.apply(*before, w1, b1, w2, b2, weights_f8, *numbers, *record)
    else:
        found = _call.f8_forward.default(*given, weights_f8, step, losses, counts, False, *record)
    out, _, made, losses_, counts_ = unpack(list(found), False, router, losses, counts)
    return [out, made, losses_, counts_]


# ---- for functional.py and module.py ----


def quantize_weights(w1: Tensor, w2: Tensor, *, activation: str | Gate = "swiglu", layout: str = "concatenated") -> Tensor:
    """The bytes of w1 and w2 that smoe.experts and smoe.moe read with compute="f8" or "f8_dgrad": a uint8 tensor with about 2
    bytes for each weight. They are bfloat16 or, such as master weights, float32. To be called after each change of the weights."""
    function = "smoe.quantize_weights"
    for name, value in (("w1", w1), ("w2", w2)):
        _checks.tensor(function, name, value)
        _checks.dimensions(function, name, value, "three dimensions", 3)
        _checks.dtype(function, name, value, (torch.float32, torch.bfloat16))
    like = w1.new_empty((1, w2.shape[1]), dtype=w1.dtype if w1.device.type == "cpu" else torch.bfloat16)
    _checks.experts(function, "x", like, w1, None, w2, None, activation, None, True, _MASTERS)
    if w1.dtype is not w2.dtype:
        raise TypeError(f"{function}: w2 has dtype {w2.dtype}; expected {w1.dtype}, the dtype of w1")
    record = functional.layer_record(
        function, like, w2, None, activation=activation, entry="from_topk", topk=1, layout=layout, compute="f8"
    )
    with torch.no_grad():
        return _call.f8_quantize.default(w1, w2, *record)[0]


_MASTERS = (torch.float32,)  # types of weights besides that of x


def _bytes(function: str, w1: Tensor, w2: Tensor, weights_f8: Tensor | None, record: Record, **of_weights) -> Tensor:
    if weights_f8 is None:
        return gathered(w1).weights(False) if gathered(w1) else quantize_weights(w1, w2, **of_weights)
    _checks.tensor(function, "weights_f8", weights_f8)
    _checks.dtype(function, "weights_f8", weights_f8, (torch.uint8,))
    _checks.device(function, "weights_f8", weights_f8, w1)
    _checks.shape(function, "weights_f8", weights_f8, (weights_bytes(record),), "that of smoe.quantize_weights")
    return weights_f8


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, compute: str,
    weights_f8: Tensor | None, activation: str | Gate, layout: str, chunks: int, gradient_dtype: torch.dtype | None, copy_weights: bool,
) -> Tensor:  # fmt: skip
    """smoe.experts with `compute`. Under autocast w1 and w2 stay as they are."""
    function = "smoe.experts"
    _checks.compute(function, compute)
    x, b1, b2 = functional._autocast(x, b1, b2)
    _checks.experts(function, "x", x, w1, b1, w2, b2, activation, gradient_dtype, copy_weights, _MASTERS)
    _checks.ids(function, ids, x)
    _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
    record = functional.layer_record(
        function, x, w2, gradient_dtype or w1.dtype, activation=activation, entry="from_topk", topk=ids.shape[1],
        index_type=TYPE_CODES[ids.dtype], layout=layout, chunks=chunks, compute=compute,
    )  # fmt: skip
    weights_f8 = _bytes(function, w1, w2, weights_f8, record, activation=activation, layout=layout)
    given = x, ids, weights.float(), None, None, None, None, None, b1, b2
    return _run(record, given, w1, w2, weights_f8, (0, 0.0, 0.0, False, False))[0]


def moe(
    given: tuple, w1: Tensor, w2: Tensor, compute: str, weights_f8: Tensor | None, step: int, balance: float, z: float, losses: bool,
    counts: bool, gradient_dtype: torch.dtype | None, logits_dtype: torch.dtype, **options,
) -> functional.MoEOutput:  # fmt: skip
    """smoe.moe with `compute`. given: x, router_weight, router_bias, logits, selection_bias, token_mask, b1, b2."""
    function = "smoe.moe"
    _checks.compute(function, compute)
    x, router_weight, router_bias, logits, selection_bias, token_mask, b1, b2 = given
    x, router_weight, router_bias, b1, b2 = functional._autocast(x, router_weight, router_bias, b1, b2)
    tensors = x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2
    record = functional.moe_record(
        function, tensors, w2.shape[0], balance_coefficient=balance, z_coefficient=z, losses=losses, counts=counts,
        logits_dtype=logits_dtype, gradient_dtype=gradient_dtype or w1.dtype, weight_dtypes=_MASTERS, compute=compute, **options,
    )  # fmt: skip
    weights_f8 = _bytes(function, w1, w2, weights_f8, record, activation=options["activation"], layout=options["layout"])
    bias = None if selection_bias is None else selection_bias.detach().float()
    run = x, None, None, router_weight, router_bias, logits, bias, token_mask, b1, b2
    out, made, losses_, counts_ = _run(record, run, w1, w2, weights_f8, (step, balance, z, losses, counts))
    return functional.MoEOutput(out, logits if made is None else made, losses_, counts_)


class _Kept:
    """The quantised weights of a module, and what they were made of."""

    steps = 0  # of all optimizers: a fused one does not count in the version counter of what it writes

    @classmethod
    def count_step(cls, optimizer: Optimizer, *_) -> None:
        cls.steps += 1

    def __init__(self) -> None:
        self.weights, self.storages, self.key, self.made = (), (), None, None

    def __reduce__(self) -> tuple:  # a copy of the module, or one from a file, has other weights
        return _Kept, ()

    def get(self, w1: Tensor, w2: Tensor, **of_weights) -> Tensor:
        weights = w1, w2
        places = [(w._version, w.data_ptr(), w.untyped_storage()._cdata) for w in weights]
        stream = torch.cuda.current_stream(w1.device) if w1.is_cuda else None  # another one would not wait for the bytes
        key = self.steps, places, stream, of_weights
        if key != self.key or any(old() is not new for old, new in zip(self.weights, weights)):
            self.key = self.made = None  # frees the old bytes, unless a backward waits for them
            with torch.inference_mode(False):  # a backward may read it later
                self.made = quantize_weights(w1, w2, **of_weights)
            self.storages = [StorageWeakRef(w.untyped_storage()) for w in weights]  # no other gets their _cdata
            self.key, self.weights = key, [weakref.ref(w) for w in weights]
        return self.made


register_optimizer_step_post_hook(_Kept.count_step)
KEPT = "_smoe_f8"  # the attribute of a module


def of_module(module: torch.nn.Module, w1: Tensor, w2: Tensor, **of_weights) -> Tensor:
    """quantize_weights of a module's parameters, called again when one has changed, by PyTorch's version counter, or an
    optimizer has made a step. In a traced graph and in the capture of a CUDA graph it is called every time, because nothing
    else runs before a replay."""
    if gathered(w1):
        return gathered(w1).weights(False)
    if (
        torch.compiler.is_dynamo_compiling()
        or modes()
        or (w1.is_cuda and torch.cuda.is_current_stream_capturing())
        or w1.is_inference()  # has no counter
        or w2.is_inference()
    ):
        return quantize_weights(w1, w2, **of_weights)
    return module.__dict__.setdefault(KEPT, _Kept()).get(w1, w2, **of_weights)
