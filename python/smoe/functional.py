"""Mixture-of-Experts layers as differentiable functions of PyTorch tensors.

T is the number of tokens, H the hidden size, I the intermediate size, E the number of experts, K that of each token. A
gated activation (swiglu, geglu, geglu_tanh, reglu, swiglu_clamped) has w1 (E, 2I, H), one without a gate (silu, gelu, relu,
relu2) has w1 (E, I, H); w2 is (E, H, I). CPU tensors are float32 or bfloat16, CUDA tensors bfloat16 or float16. Under
autocast the matrices and x are cast as for a matmul.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad  # its level is -1 outside dual_level; inside, the Functions refuse tangents

from . import _activation, _checks
from . import _ops as ops
from ._activation import Gate

if TYPE_CHECKING:
    from ._lora import LoRA

_call = torch.ops.smoe


class MoEOutput(NamedTuple):
    """What smoe.moe returns. `out` and `losses` are differentiable, the router's logits and the counts are not."""

    out: Tensor  # (T, H)
    logits: Tensor  # (T, E), the router's or those that were given
    losses: Tensor | None  # (2) float32: load balance and z
    counts: Tensor | None  # (E) int32: tokens of each expert under plain top-K


# ---- what every entry does with its arguments ----


_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # one call for all device types


def _autocast(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts floating-point tensors to autocast's dtype if autocast is on for x's device."""
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in (x, *others))


_Known = tuple[str, ops.Call | None]  # the operators' options, and the Call of tensors that need no dispatcher
# Maps the signature of an eager call that passed all checks. A signature has everything that the checks read.
_checked: dict[tuple, _Known] = {}
_KEPT_SIGNATURES = 4096
_NONE = None, None


def _traits(tensor: Tensor | None) -> tuple:
    """What a signature has of an optional tensor. For the other tensors it is written out, because the time of a small layer
    is host time and each Python call takes about 0.4 us of it."""
    if tensor is None:
        return _NONE
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


_PLAIN = (Tensor, torch.nn.Parameter)


def _remember(
    signature: tuple | None, options: str, tensors: tuple[Tensor | None, ...], entry: str, topk: int, w2: Tensor,
    index: torch.dtype = torch.int32,
) -> ops.Call | None:  # fmt: skip
    """The checks passed. Subclasses of tensors and tensors without memory go through PyTorch's dispatcher."""
    if signature is None:
        return None
    if len(_checked) >= _KEPT_SIGNATURES:
        _checked.clear()
    plain = all(t is None or (type(t) in _PLAIN and not t.is_meta) for t in tensors)
    call = ops.call_of(entry, options, tensors[0], topk, w2, index) if plain else None
    _checked[signature] = options, call
    return call


def _has_address(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() is not None
    except RuntimeError:
        return False


def _apply(
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


def _dispatched(operator, wanted: tuple[bool, ...], *arguments) -> list[Tensor | None]:
    """A backward through the dispatcher: the gradients in the order of the bits, None for those not wanted."""
    needs = 0
    for bit, want in zip(ops.NEEDS, wanted):
        needs += bit if want else 0
    found = operator(*arguments, needs)
    spread, position = [], 0
    for want in wanted:
        spread.append(found[position] if want else None)
        position += 1 if want else 0
    return spread


# These say whether an eager call has to go through PyTorch's dispatcher: dispatch modes (selective checkpointing, fake
# tensors, FLOP counters), the profiler, and the transforms of torch.func, which the dispatcher refuses. Otherwise no code
# observes the dispatcher, and calling the functions behind the operators directly saves about 20 us in a forward and backward.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_profiled = torch.autograd._profiler_enabled
_transforms = getattr(torch._C._functorch, "maybe_current_level", lambda: 0)  # the level, None without a transform
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_captures = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)


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
    if torch.compiler.is_dynamo_compiling() or ctx.call is None or type(dout) not in _PLAIN or _modes() or _profiled():
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


# ---- given ids and weights ----


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, w1, b1, w2, b2, options, call):
        if call is None:
            out, saved = _call.experts_forward.default(x, ids, weights, w1, b1, w2, b2, options, True)
        else:
            out, saved = ops.forward(call, True, x, ids, weights, w1, b1, w2, b2)
        ctx.save_for_backward(x, ids, w1, w2, b2, saved)
        ctx.options, ctx.call, ctx.readers, ctx.overwritten = options, call, 0, False
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():  # with create_graph
            return _once(_Experts, ctx, dout)
        wants_x, _, wants_weights, wants_w1, wants_b1, wants_w2, wants_b2, *_ = ctx.needs_input_grad
        wanted = (wants_x, wants_w1, wants_b1, wants_w2, wants_b2, wants_weights, False, False)
        x, ids, w1, w2, b2, saved = ctx.saved_tensors
        found = _backward(ctx, wanted, dout, (x, w1, w2, b2, saved, ids))
        if found is None:
            kept = x, ids, w1, w2, b2, saved, ctx.options
            found = _dispatched(_call.experts_backward.default, wanted, dout.contiguous(), *kept)
        dx, dw1, db1, dw2, db2, dweights, _, _ = found
        return dx, None, dweights, dw1, db1, dw2, db2, None, None


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str | Gate = "swiglu",
    layout: str = "concatenated",
    chunks: int = 1,
    gradient_dtype: torch.dtype | None = None,
    copy_weights: bool = False,
    lora: "LoRA | Sequence[LoRA] | None" = None,
) -> Tensor:
    """The experts on given routing: out[t] = sum over k of weights[t, k] expert[ids[t, k]](x[t]), (T, H).

    x (T, H); ids (T, K) int32 or int64: pairs outside 0..E-1 are skipped; if a token has equal ids, the first counts;
    weights (T, K); w1, w2 and the biases b1 (E, 2I or I), b2 (E, H) contiguous and in x's dtype.
    layout: where w1's gate rows stand, "concatenated" (first) or "interleaved" (every other row).
    chunks: 1, 2, 4, ... 64 column chunks. More chunks need less scratch memory; the results have the same bits.
    gradient_dtype: torch.float32 makes the kernels write the weights' gradients in float32.
    copy_weights: True lets w1 and w2 have any strides. If they are not contiguous, the forward and the backward each
    make a contiguous copy of them and free it.
    lora: an smoe.LoRA, or several whose terms add up. Not with gradient_dtype.
    """
    if lora is not None:
        return _experts_with_lora(
            x, ids, weights, w1, w2, b1, b2, activation, layout, chunks, gradient_dtype, copy_weights, lora
        )
    traced = torch.compiler.is_dynamo_compiling()
    if traced or _any_autocast():
        x, w1, b1, w2, b2 = _autocast(x, w1, b1, w2, b2)
    options = signature = None
    if not traced:
        try:
            signature = (
                "experts", activation, layout, chunks, gradient_dtype, copy_weights,
                type(x), x.shape, x.dtype, x.device,
                type(ids), ids.shape, ids.dtype, ids.device,
                type(weights), weights.shape, weights.dtype, weights.device,
                type(w1), w1.shape, w1.dtype, w1.device, w1.is_contiguous(),
                type(w2), w2.shape, w2.dtype, w2.device, w2.is_contiguous(),
                None if b1 is None else _traits(b1), None if b2 is None else _traits(b2),
            )  # fmt: skip
            options, call = _checked.get(signature, _NONE)
        except (AttributeError, TypeError, RuntimeError):  # the checks say which argument is no tensor
            signature = None
    if options is None:
        function = "smoe.experts"
        _checks.flag(function, "copy_weights", copy_weights)
        _checks.experts(function, "x", x, w1, b1, w2, b2, activation, layout, chunks, gradient_dtype, copy_weights)
        _checks.ids(function, ids, x, w2.shape[0])
        _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
        options = f"{_activation.word(activation)} {layout} {chunks} {int(gradient_dtype is torch.float32)}"
        given = (x, ids, weights, w1, b1, w2, b2)
        call = _remember(signature, options, given, "from_topk", ids.shape[1], w2, ids.dtype)
    if call is not None and (_modes() or _profiled() or _transforms() is not None):
        call = None
    if weights.dtype is not torch.float32:
        weights = weights.float()
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and (x.requires_grad or w1.requires_grad or _any_requires_grad(w2, weights, b1, b2))
    ):
        return _apply(_Experts, call, (x, ids, weights, w1, b1, w2, b2, options, call))
    if call is None:
        return _call.experts_forward.default(x, ids, weights, w1, b1, w2, b2, options, False)[0]
    return ops.forward(call, False, x, ids, weights, w1, b1, w2, b2)[0]


def _experts_with_lora(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
    activation: str | Gate, layout: str, chunks: int, gradient_dtype: torch.dtype | None, copy_weights: bool,
    lora: "LoRA | Sequence[LoRA]",
) -> Tensor:  # fmt: skip
    from . import _lora

    x, w1, b1, w2, b2 = _autocast(x, w1, b1, w2, b2)
    function = "smoe.experts"
    _checks.experts(function, "x", x, w1, b1, w2, b2, activation, layout, chunks, gradient_dtype, copy_weights)
    _checks.ids(function, ids, x, w2.shape[0])
    _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
    if gradient_dtype not in (None, x.dtype):
        raise ValueError(f"{function}: gradient_dtype is {gradient_dtype} with lora; expected None")
    return _lora.experts(x, ids, weights, w1, b1, w2, b2, lora, activation, layout, chunks)


# ---- rows sorted by expert ----


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, offsets, row_weights, w1, b1, w2, b2, options, call):
        if call is None:
            out, saved = _call.rows_forward.default(rows, offsets, row_weights, w1, b1, w2, b2, options, True)
        else:
            out, saved = ops.forward(call, True, rows, offsets, row_weights, w1, b1, w2, b2)
        ctx.save_for_backward(rows, w1, w2, b2, saved)
        ctx.options, ctx.call, ctx.readers, ctx.overwritten = options, call, 0, False
        return out

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():  # with create_graph
            return _once(_Rows, ctx, dout)
        wants_rows, _, wants_weights, wants_w1, wants_b1, wants_w2, wants_b2, *_ = ctx.needs_input_grad
        wanted = (wants_rows, wants_w1, wants_b1, wants_w2, wants_b2, wants_weights, False, False)
        rows, w1, w2, b2, saved = ctx.saved_tensors
        found = _backward(ctx, wanted, dout, (rows, w1, w2, b2, saved))
        if found is None:
            kept = rows, w1, w2, b2, saved, ctx.options
            found = _dispatched(_call.rows_backward.default, wanted, dout.contiguous(), *kept)
        drows, dw1, db1, dw2, db2, dweights, _, _ = found
        return drows, None, dweights, dw1, db1, dw2, db2, None, None


def experts_rows(
    rows: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w2: Tensor,
    row_weights: Tensor | None = None,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str | Gate = "swiglu",
    layout: str = "concatenated",
    chunks: int = 1,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts on rows that a dispatcher has sorted by expert: expert e has rows offsets[e] to offsets[e + 1] - 1.

    rows (R, H); offsets (E + 1) int32 or int64, on the rows' device, from 0 and never falling; row_weights (R), or None
    for ones. Returns (R, H) in the rows' order. Rows past offsets[E] may hold anything, NaN too: their outputs and
    gradients are zero. The other arguments are those of smoe.experts.
    """
    traced = torch.compiler.is_dynamo_compiling()
    if traced or _any_autocast():
        rows, w1, b1, w2, b2 = _autocast(rows, w1, b1, w2, b2)
    options = signature = None
    if not traced:
        try:
            signature = (
                "rows", activation, layout, chunks, gradient_dtype,
                type(rows), rows.shape, rows.dtype, rows.device,
                type(offsets), offsets.shape, offsets.dtype, offsets.device,
                type(w1), w1.shape, w1.dtype, w1.device, w1.is_contiguous(),
                type(w2), w2.shape, w2.dtype, w2.device, w2.is_contiguous(),
                _traits(b1), _traits(b2), _traits(row_weights),
            )  # fmt: skip
            options, call = _checked.get(signature, _NONE)
        except (AttributeError, TypeError, RuntimeError):
            signature = None
    if options is None:
        function = "smoe.experts_rows"
        _checks.experts(function, "rows", rows, w1, b1, w2, b2, activation, layout, chunks, gradient_dtype)
        _checks.offsets(function, offsets, rows, w2.shape[0])
        if row_weights is not None:
            _checks.weights(function, "row_weights", row_weights, rows, (rows.shape[0],), "(R)")
        options = f"{_activation.word(activation)} {layout} {chunks} {int(gradient_dtype is torch.float32)}"
        given = (rows, offsets, row_weights, w1, b1, w2, b2)
        call = _remember(signature, options, given, "from_rows", 1, w2, offsets.dtype)
    if call is not None and (_modes() or _profiled() or _transforms() is not None):
        call = None
    if row_weights is not None and row_weights.dtype is not torch.float32:
        row_weights = row_weights.float()
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and (rows.requires_grad or w1.requires_grad or _any_requires_grad(w2, row_weights, b1, b2))
    ):
        return _apply(_Rows, call, (rows, offsets, row_weights, w1, b1, w2, b2, options, call))
    if call is None:
        return _call.rows_forward.default(rows, offsets, row_weights, w1, b1, w2, b2, options, False)[0]
    return ops.forward(call, False, rows, offsets, row_weights, w1, b1, w2, b2)[0]


# ---- the whole layer ----


def _unpack(found: list[Tensor], save: bool, router: bool, losses: bool, counts: bool) -> tuple[Tensor | None, ...]:
    """out, saved, logits, losses, counts from a list that has only those that are there."""
    unpacked, position = [found[0]], 1
    for there in (save, router, losses, counts):
        unpacked.append(found[position] if there else None)
        position += 1 if there else 0
    return tuple(unpacked)


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, router_weight, router_bias, given_logits, selection_bias, token_mask, w1, b1, w2, b2, top_k, options, step,
        wants_losses, wants_counts, call,
    ):  # fmt: skip
        given = (x, router_weight, router_bias, given_logits, selection_bias, token_mask, w1, b1, w2, b2)
        if call is None:
            found = _call.moe_forward.default(*given, top_k, options, step, True)
            found = _unpack(found, True, router_weight is not None, wants_losses, wants_counts)
        else:
            found = ops.moe_forward(call, True, *given, step)
        out, saved, logits, losses, counts = found
        reads_logits = ops.reads_logits(options) if call is None else call.options.reads_logits
        kept = (given_logits if logits is None else logits) if reads_logits else None
        ctx.save_for_backward(x, router_weight, kept, token_mask, w1, w2, b2, saved)
        ctx.top_k, ctx.options, ctx.call, ctx.readers, ctx.overwritten = top_k, options, call, 0, False
        ctx.mark_non_differentiable(*[t for t in (logits, counts) if t is not None])
        ctx.wants_losses = wants_losses
        ctx.losses_at = 1 if logits is None else 2  # the position among what is returned
        if torch.compiler.is_dynamo_compiling():
            return tuple([t for t in (out, logits, losses, counts) if t is not None])  # torch 2.6 traces no None here
        ctx.losses_at = 2
        ctx.set_materialize_grads(False)  # otherwise autograd allocates a zero gradient of the logits in every backward
        return out, logits, losses, counts

    @staticmethod
    def backward(ctx, dout, *others):
        if torch.is_grad_enabled():  # with create_graph
            return _once(_Moe, ctx, dout, *others)
        dlosses = others[ctx.losses_at - 1] if ctx.wants_losses else None
        if dout is None and dlosses is None:  # what follows the layer has no gradient for it
            return (None,) * 16
        wants_x, wants_router, wants_router_bias, wants_logits, _, _, wants_w1, wants_b1, wants_w2, wants_b2, *_ = (
            ctx.needs_input_grad
        )
        wanted = (wants_x, wants_w1, wants_b1, wants_w2, wants_b2, wants_logits, wants_router, wants_router_bias)
        x, router_weight, logits, token_mask, w1, w2, b2, saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(x)
        found = _backward(ctx, wanted, dout, (x, w1, w2, b2, saved, None, router_weight, logits, dlosses, token_mask))
        if found is None:
            kept = x, router_weight, logits, dlosses, token_mask, w1, w2, b2, saved, ctx.top_k, ctx.options
            found = _dispatched(_call.moe_backward.default, wanted, dout.contiguous(), *kept)
        dx, dw1, db1, dw2, db2, dlogits, dweight, dbias = found
        return dx, dweight, dbias, dlogits, None, None, dw1, db1, dw2, db2, None, None, None, None, None, None


def moe_options(
    function: str, given: tuple, count: int, top_k: int, activation: str | Gate, layout: str, score: str, norm_topk_prob: bool,
    n_group: int, topk_group: int, routed_scaling_factor: float, rounding: str, tile: int, seed: int,
    balance_coefficient: float, z_coefficient: float, losses: bool, counts: bool, chunks: int, logits_dtype: torch.dtype,
    gradient_dtype: torch.dtype | None,
) -> str:  # fmt: skip
    """Checks the arguments of `function`, whose router has `count` experts, and returns the operators' options. `given` are
    the tensors in the operators' order."""
    x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2 = given
    _checks.experts(function, "x", x, w1, b1, w2, b2, activation, layout, chunks, gradient_dtype)
    _checks.router(function, x, count, router_weight, logits, router_bias, selection_bias, score)
    if token_mask is not None:
        _checks.token_mask(function, token_mask, x)
    coefficients = dict(balance_coefficient=balance_coefficient, z_coefficient=z_coefficient)
    flags = dict(norm_topk_prob=norm_topk_prob, losses=losses, counts=counts)
    _checks.routing(
        function, count, top_k, score, n_group, topk_group, rounding, tile, seed, logits_dtype, routed_scaling_factor,
        coefficients, flags,
    )  # fmt: skip
    if logits is not None:
        logits_dtype = logits.dtype
    return (
        f"{_activation.word(activation)} {layout} {chunks} {int(gradient_dtype is torch.float32)} {score} {int(norm_topk_prob)} "
        f"{n_group} {topk_group} {float(routed_scaling_factor)} {rounding} {tile} {seed} "
        f"{int(logits_dtype is torch.bfloat16)} {float(balance_coefficient)} {float(z_coefficient)} {int(losses)} "
        f"{int(counts)}"
    )


def moe(
    x: Tensor,
    router_weight: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    *,
    top_k: int,
    logits: Tensor | None = None,
    router_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    token_mask: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str | Gate = "swiglu",
    layout: str = "concatenated",
    score: str = "softmax_topk",
    norm_topk_prob: bool = False,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    rounding: str = "none",
    tile: int = 128,
    seed: int = 0,
    step: int = 0,
    balance_coefficient: float = 0.0,
    z_coefficient: float = 0.0,
    losses: bool = False,
    counts: bool = False,
    chunks: int = 1,
    logits_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype | None = None,
) -> MoEOutput:
    """Router and experts in one call; see MoEOutput for what comes back.

    x (T, H); either router_weight (E, H) and optionally router_bias (E), in x's dtype, or logits (T, E) in float32 or
    bfloat16; the experts' arguments as in smoe.experts.
    score: "softmax_topk" (softmax over all E, then top-K; norm_topk_prob divides by the sum of the K),
    "topk_softmax" (softmax of the K best logits), or "sigmoid" (with selection_bias (E), which moves the selection and
    not the weights, norm_topk_prob, n_group and topk_group). routed_scaling_factor multiplies every weight.
    rounding: token rounding with tiles of `tile` rows: "none", "nr_f", "sr_f" (drawn from `seed` and `step`), "nr_s",
    "balance_f", "up", "down".
    token_mask (T) bool: tokens that are False are computed as all others, but losses and counts are over the rest.
    The backward itself adds the gradient of balance_coefficient losses[0] + z_coefficient losses[1], whatever the caller's
    loss is multiplied by; the gradient that reaches the returned losses is added too. For a loss of your own on the logits
    compute them outside and pass `logits`.
    """
    traced = torch.compiler.is_dynamo_compiling()
    if traced or _any_autocast():
        x, router_weight, router_bias, w1, b1, w2, b2 = _autocast(x, router_weight, router_bias, w1, b1, w2, b2)
    function = "smoe.moe"
    if type(step) is not int or not 0 <= step < 2**64:
        _checks.between(function, "step", step, 0, 2**64 - 1)
    options = signature = None
    if not traced:
        try:
            signature = (
                "moe", top_k, activation, layout, score, norm_topk_prob, n_group, topk_group, routed_scaling_factor,
                rounding, tile, seed, balance_coefficient, z_coefficient, losses, counts, chunks, logits_dtype,
                gradient_dtype,
                type(x), x.shape, x.dtype, x.device,
                type(w1), w1.shape, w1.dtype, w1.device, w1.is_contiguous(),
                type(w2), w2.shape, w2.dtype, w2.device, w2.is_contiguous(),
                _traits(b1), _traits(b2), _traits(router_weight), _traits(router_bias), _traits(logits),
                _traits(selection_bias), _traits(token_mask),
            )  # fmt: skip
            options, call = _checked.get(signature, _NONE)
        except (AttributeError, TypeError, RuntimeError):
            signature = None
    given = (x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2)
    if options is None:
        options = moe_options(
            function, given, w2.shape[0], top_k, activation, layout, score, norm_topk_prob, n_group, topk_group,
            routed_scaling_factor, rounding, tile, seed, balance_coefficient, z_coefficient, losses, counts, chunks,
            logits_dtype, gradient_dtype,
        )  # fmt: skip
        call = _remember(signature, options, given, "from_logits", top_k, w2)
    if call is not None and (_modes() or _profiled() or _transforms() is not None):
        call = None
    if selection_bias is not None:
        given = (*given[:4], selection_bias.detach().float(), *given[5:])
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and (x.requires_grad or w1.requires_grad or _any_requires_grad(w2, router_weight, router_bias, logits, b1, b2))
    ):
        found = _apply(_Moe, call, (*given, top_k, options, step, losses, counts, call))
        if traced:
            out, _, made, losses_, counts_ = _unpack(found, False, logits is None, losses, counts)
        else:
            out, made, losses_, counts_ = found
    elif call is None:
        found = _call.moe_forward.default(*given, top_k, options, step, False)
        out, _, made, losses_, counts_ = _unpack(found, False, logits is None, losses, counts)
    else:
        out, _, made, losses_, counts_ = ops.moe_forward(call, False, *given, step)
    return MoEOutput(out, logits if made is None else made, losses_, counts_)


def update_selection_bias(bias: Tensor, counts: Tensor, gamma: float) -> None:
    """The aux-free balancing step, in place: bias[e] += gamma sign(mean(counts) - counts[e]).

    bias (E) float32, counts (E) int32 as smoe.moe(..., counts=True) returns them."""
    function = "smoe.update_selection_bias"
    _checks.tensor(function, "bias", bias)
    _checks.tensor(function, "counts", counts)
    _checks.dtype(function, "bias", bias, (torch.float32,))
    _checks.dtype(function, "counts", counts, (torch.int32,))
    _checks.dimensions(function, "bias", bias, "(E)", 1)
    _checks.shape(function, "counts", counts, tuple(bias.shape), "(E), the shape of bias,")
    if counts.device != bias.device:
        raise ValueError(f"{function}: counts is on {counts.device}; expected {bias.device}, where bias is")
    for name, value in (("bias", bias), ("counts", counts)):
        _checks.contiguous(function, name, value)
    _checks.number(function, "gamma", gamma, -1e30)
    with torch.no_grad():
        _call.update_selection_bias.default(bias, counts, gamma)


# `apply` of the base class of torch.autograd.Function, looked up once
_IN_C = {function: super(torch.autograd.Function, function).apply for function in (_Experts, _Rows, _Moe)}
