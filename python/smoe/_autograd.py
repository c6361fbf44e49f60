"""The autograd Functions behind smoe/functional.py. They call the functions of smoe/_ops.py directly where nothing observes
PyTorch's dispatcher, and otherwise its operators."""

import threading

import torch
from torch import Tensor

from . import _ops as ops
from ._record import Record, bounds

_call = torch.ops.smoe
PLAIN = (Tensor, torch.nn.Parameter)

# ---- when the dispatcher is needed ----

# These say whether an eager call has to go through PyTorch's dispatcher: dispatch modes (selective checkpointing, fake
# tensors, FLOP counters), the profiler, and the transforms of torch.func, which the dispatcher refuses. Otherwise no code
# observes the dispatcher, and calling the functions behind the operators directly saves about 20 us in a forward and backward.
modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
profiled = torch.autograd._profiler_enabled
transforms = getattr(torch._C._functorch, "maybe_current_level", lambda: 0)  # the level, None without a transform
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_captures = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)


# ---- what every Function does ----

def _has_address(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() is not None
    except RuntimeError:
        return False


def apply(
    function: type[torch.autograd.Function], call: ops.Call | None, given: tuple
) -> Tensor | tuple[Tensor | None, ...]:
    """function.apply(*given). With a Call, the `apply` in C of its base class is called directly, because what
    torch.autograd.Function.apply does before in Python takes 2.7 us in torch 2.11. It is needed in two cases: during the
    transforms of torch.func, when there is no Call, and for tensors that such a transform left behind. These have no
    address, so `function` raises an error for them, and the call is repeated with function.apply."""
    if call is not None:
        try:
            return _IN_C[function](*given)
        except RuntimeError:
            if all(_has_address(value) for value in given if isinstance(value, Tensor)):
                raise
    return function.apply(*given)


def dispatched(operator, wanted: tuple[bool, ...], arguments: tuple, record: Record) -> list[Tensor | None]:
    """A backward through the dispatcher: the gradients in the order of the bits, None for those not wanted."""
    needs = 0
    for bit, want in zip(ops.NEEDS, wanted):
        needs += bit if want else 0
    found = operator(*arguments, needs, *record)
    spread, position = [], 0
    for want in wanted:
        spread.append(found[position] if want else None)
        position += 1 if want else 0
    return spread


_claims = threading.Lock()


def _claim(ctx, dout: Tensor) -> bool:
    """Returns whether this backward may overwrite what `ctx` saved. It may if it is the last to read it and no other thread
    reads it now. It is not the last with retain_graph, nor in the capture of a CUDA graph, which may be replayed several
    times after one replay of the forward's."""
    last = not (_keeps_graph() or (dout.is_cuda and _captures()))
    with _claims:
        if ctx.overwritten:
            raise RuntimeError(
                "smoe: a backward through this call has overwritten what its forward saved; give every backward but the last "
                "retain_graph=True"
            )
        ctx.readers += 1
        ctx.overwritten = last and ctx.readers == 1
        return ctx.overwritten


def _backward(ctx, wanted: tuple[bool, ...], dout: Tensor, kept: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """The gradients in the order of the bits, or None if the backward has to go through the dispatcher."""
    if torch.compiler.is_dynamo_compiling() or ctx.call is None or type(dout) not in PLAIN or modes() or profiled():
        return None
    reuse = _claim(ctx, dout)
    try:
        return ops.backward(ctx.call, wanted, reuse, dout, *kept)
    except torch.OutOfMemoryError:  # of a buffer, before anything was overwritten
        ctx.overwritten = False
        raise
    finally:
        with _claims:
            ctx.readers -= 1


def _once(function: type[torch.autograd.Function], ctx, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    """A backward whose gradients raise an error when they are differentiated. PyTorch's once_differentiable does the same only
    if dout has a gradient; otherwise it treats the gradients as constants, which is wrong because H depends on x."""
    with torch.no_grad():
        found = function.backward(ctx, *given)
    error = torch._C._functions.DelayedError(b"smoe: cannot differentiate twice: the backward has no backward", len(found))
    return error(*[None if gradient is None else gradient.detach().requires_grad_() for gradient in found])


# ---- the Functions ----


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, w1, b1, w2, b2, call, *record):
        if call is None:
            out, saved = _call.experts_forward.default(x, ids, weights, w1, b1, w2, b2, True, *record)
        else:
            out, saved = ops.forward(call, True, x, ids, weights, w1, b1, w2, b2)
        ctx.save_for_backward(x, ids, w1, w2, b2, saved)
        ctx.record, ctx.call, ctx.readers, ctx.overwritten = record, call, 0, False
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():  # with create_graph
            return _once(Experts, ctx, dout)
        wants_x, _, wants_weights, wants_w1, wants_b1, wants_w2, wants_b2, *others = ctx.needs_input_grad
        wanted = (wants_x, wants_w1, wants_b1, wants_w2, wants_b2, wants_weights, False, False)
        x, ids, w1, w2, b2, saved = ctx.saved_tensors
        found = _backward(ctx, wanted, dout, (x, w1, w2, b2, saved, ids))
        if found is None:
            given = dout.contiguous(), x, ids, w1, w2, b2, saved
            found = dispatched(_call.experts_backward.default, wanted, given, ctx.record)
        dx, dw1, db1, dw2, db2, dweights, _, _ = found
        return (dx, None, dweights, dw1, db1, dw2, db2) + (None,) * len(others)


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, offsets, row_weights, w1, b1, w2, b2, call, *record):
        if call is None:
            out, saved = _call.rows_forward.default(rows, offsets, row_weights, w1, b1, w2, b2, True, *record)
        else:
            out, saved = ops.forward(call, True, rows, offsets, row_weights, w1, b1, w2, b2)
        ctx.save_for_backward(rows, w1, w2, b2, saved)
        ctx.record, ctx.call, ctx.readers, ctx.overwritten = record, call, 0, False
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():  # with create_graph
            return _once(Rows, ctx, dout)
        wants_rows, _, wants_weights, wants_w1, wants_b1, wants_w2, wants_b2, *others = ctx.needs_input_grad
        wanted = (wants_rows, wants_w1, wants_b1, wants_w2, wants_b2, wants_weights, False, False)
        rows, w1, w2, b2, saved = ctx.saved_tensors
        found = _backward(ctx, wanted, dout, (rows, w1, w2, b2, saved))
        if found is None:
            given = dout.contiguous(), rows, w1, w2, b2, saved
            found = dispatched(_call.rows_backward.default, wanted, given, ctx.record)
        drows, dw1, db1, dw2, db2, dweights, _, _ = found
        return (drows, None, dweights, dw1, db1, dw2, db2) + (None,) * len(others)


def unpack(found: list[Tensor], save: bool, router: bool, losses: bool, counts: bool) -> tuple[Tensor | None, ...]:
    """out, saved, logits, losses, counts from a list that has only those that are there."""
    unpacked, position = [found[0]], 1
    for there in (save, router, losses, counts):
        unpacked.append(found[position] if there else None)
        position += 1 if there else 0
    return tuple(unpacked)


def reads_logits(record: Record) -> bool:
    return bounds(record).reads_logits


# This is all that torch.compiler.assume_constant_result does, besides an import of torch._dynamo, which takes 2 s.
reads_logits._dynamo_marked_constant = True


class Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, router_weight, router_bias, given_logits, selection_bias, token_mask, w1, b1, w2, b2, step, balance, z,
        wants_losses, wants_counts, call, *record,
    ):  # fmt: skip
        given = (x, router_weight, router_bias, given_logits, selection_bias, token_mask, w1, b1, w2, b2)
        if call is None:
            found = _call.moe_forward.default(*given, step, wants_losses, wants_counts, True, *record)
            found = unpack(found, True, router_weight is not None, wants_losses, wants_counts)
        else:
            found = ops.moe_forward(call, True, *given, step, wants_losses, wants_counts)
        out, saved, logits, losses, counts = found
        read = reads_logits(record) if call is None else call.reads_logits
        kept = (given_logits if logits is None else logits) if read or wants_losses or balance or z else None
        ctx.save_for_backward(x, router_weight, kept, token_mask, w1, w2, b2, saved)
        ctx.record, ctx.call, ctx.readers, ctx.overwritten = record, call, 0, False
        ctx.mark_non_differentiable(*[t for t in (logits, counts) if t is not None])
        ctx.balance, ctx.z, ctx.wants_losses = balance, z, wants_losses
        ctx.losses_at = 2  # the position among what is returned
        if torch.compiler.is_dynamo_compiling():
            ctx.losses_at = 1 if logits is None else 2
            return tuple([t for t in (out, logits, losses, counts) if t is not None])  # torch 2.6 traces no None here
        ctx.set_materialize_grads(False)  # otherwise autograd allocates a zero gradient of the logits in every backward
        return out, logits, losses, counts

    @staticmethod
    def backward(ctx, dout, *others):
        if torch.is_grad_enabled():  # with create_graph
            return _once(Moe, ctx, dout, *others)
        dlosses = others[ctx.losses_at - 1] if ctx.wants_losses else None
        if dout is None and dlosses is None:  # what follows the layer has no gradient for it
            return (None,) * len(ctx.needs_input_grad)
        wants_x, wants_router, wants_router_bias, wants_logits, _, _, wants_w1, wants_b1, wants_w2, wants_b2, *rest = (
            ctx.needs_input_grad
        )
        wanted = (wants_x, wants_w1, wants_b1, wants_w2, wants_b2, wants_logits, wants_router, wants_router_bias)
        x, router_weight, logits, token_mask, w1, w2, b2, saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(x)
        kept = x, w1, w2, b2, saved, None, router_weight, logits, dlosses, token_mask, ctx.balance, ctx.z
        found = _backward(ctx, wanted, dout, kept)
        if found is None:
            given = dout.contiguous(), x, router_weight, logits, dlosses, token_mask, w1, w2, b2, saved, ctx.balance, ctx.z
            found = dispatched(_call.moe_backward.default, wanted, given, ctx.record)
        dx, dw1, db1, dw2, db2, dlogits, dweight, dbias = found
        return (dx, dweight, dbias, dlogits, None, None, dw1, db1, dw2, db2) + (None,) * len(rest)


# `apply` of the base class of torch.autograd.Function, looked up once
_IN_C = {function: super(torch.autograd.Function, function).apply for function in (Experts, Rows, Moe)}
