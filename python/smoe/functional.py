"""Mixture-of-Experts layers as differentiable functions of PyTorch tensors.

T is the number of tokens, H the hidden size, I the intermediate size, E the number of experts, K that of each token. A
gated activation (swiglu, geglu, geglu_tanh, reglu, swiglu_clamped) has w1 (E, 2I, H), one without a gate (silu, gelu, relu,
relu2) has w1 (E, I, H); w2 is (E, H, I). CPU tensors are float32 or bfloat16, CUDA tensors bfloat16 or float16. Under
autocast the matrices and x are cast as for a matmul.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad  # its level is -1 outside dual_level; inside, the Functions refuse tangents

from . import _checks
from . import _ops as ops
from ._activation import Gate
from ._autograd import PLAIN, Experts, Moe, Rows, apply, modes, profiled, transforms, unpack
from ._context import TYPE_CODES
from ._record import Record, record as record_of

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


_Known = tuple[Record, ops.Call | None]  # the layer's record, and the Call of tensors that need no dispatcher
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


def layer_record(function: str, x: Tensor, w2: Tensor, gradient_dtype: torch.dtype | None, experts: int = 0, **fields) -> Record:
    """The record of a layer with these tensors. `experts`: those of all ranks, 0: those of w2."""
    here, hidden, intermediate = w2.shape
    return record_of(
        function, hidden=hidden, intermediate=intermediate, experts=experts or here, dtype=TYPE_CODES[x.dtype],
        gradient_type=TYPE_CODES[gradient_dtype or x.dtype], **fields,
    )  # fmt: skip


def _remember(signature: tuple | None, record: Record, tensors: tuple[Tensor | None, ...]) -> ops.Call | None:
    """The checks passed. Subclasses of tensors and tensors without memory go through PyTorch's dispatcher."""
    if signature is None:
        return None
    if len(_checked) >= _KEPT_SIGNATURES:
        _checked.clear()
    plain = all(t is None or (type(t) in PLAIN and not t.is_meta) for t in tensors)
    call = ops.call_of(record, tensors[0].shape[0]) if plain else None
    _checked[signature] = record, call
    return call


# ---- given ids and weights ----


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
    compute: str | None = None,
    weights_f8: Tensor | None = None,
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
    compute: "f8" (experimental): the GEMMs multiply e4m3 numbers, for H and I that are multiples of 16; "f8_dgrad": all but
    those of the weights' gradients. weights_f8: smoe.quantize_weights(w1, w2), or None: made by each call. w1 and w2 may then
    be float32 beside a bfloat16 x. Not with lora.
    """
    if compute is not None or weights_f8 is not None:
        if lora is not None:
            raise ValueError("smoe.experts: lora is given with compute or weights_f8; expected one of them")
        from . import _f8

        return _f8.experts(
            x, ids, weights, w1, w2, b1, b2, compute, weights_f8, activation, layout, chunks, gradient_dtype, copy_weights
        )
    if lora is not None:
        return _experts_with_lora(
            x, ids, weights, w1, w2, b1, b2, activation, layout, chunks, gradient_dtype, copy_weights, lora
        )
    traced = torch.compiler.is_dynamo_compiling()
    if traced or _any_autocast():
        x, w1, b1, w2, b2 = _autocast(x, w1, b1, w2, b2)
    record = signature = None
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
            record, call = _checked.get(signature, _NONE)
        except (AttributeError, TypeError, RuntimeError):  # the checks say which argument is no tensor
            signature = None
    if record is None:
        function = "smoe.experts"
        _checks.flag(function, "copy_weights", copy_weights)
        _checks.experts(function, "x", x, w1, b1, w2, b2, activation, gradient_dtype, copy_weights)
        _checks.ids(function, ids, x)
        _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
        record = layer_record(
            function, x, w2, gradient_dtype, activation=activation, entry="from_topk", topk=ids.shape[1],
            index_type=TYPE_CODES[ids.dtype], layout=layout, chunks=chunks,
        )  # fmt: skip
        call = _remember(signature, record, (x, ids, weights, w1, b1, w2, b2))
    if call is not None and (modes() or profiled() or transforms() is not None):
        call = None
    if weights.dtype is not torch.float32:
        weights = weights.float()
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and (x.requires_grad or w1.requires_grad or _any_requires_grad(w2, weights, b1, b2))
    ):
        numbers = record if call is None else ()
        return apply(Experts, call, (x, ids, weights, w1, b1, w2, b2, call, *numbers))
    if call is None:
        return _call.experts_forward.default(x, ids, weights, w1, b1, w2, b2, False, *record)[0]
    return ops.forward(call, False, x, ids, weights, w1, b1, w2, b2)[0]


def _experts_with_lora(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
    activation: str | Gate, layout: str, chunks: int, gradient_dtype: torch.dtype | None, copy_weights: bool,
    lora: "LoRA | Sequence[LoRA]",
) -> Tensor:  # fmt: skip
    from . import _lora

    x, w1, b1, w2, b2 = _autocast(x, w1, b1, w2, b2)
    function = "smoe.experts"
    _checks.experts(function, "x", x, w1, b1, w2, b2, activation, gradient_dtype, copy_weights)
    _checks.ids(function, ids, x)
    _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
    if gradient_dtype not in (None, x.dtype):
        raise ValueError(f"{function}: gradient_dtype is {gradient_dtype} with lora; expected None")
    return _lora.experts(x, ids, weights, w1, b1, w2, b2, lora, activation, layout, chunks)


# ---- rows sorted by expert ----


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
    record = signature = None
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
            record, call = _checked.get(signature, _NONE)
        except (AttributeError, TypeError, RuntimeError):
            signature = None
    if record is None:
        function = "smoe.experts_rows"
        _checks.experts(function, "rows", rows, w1, b1, w2, b2, activation, gradient_dtype)
        _checks.offsets(function, offsets, rows, w2.shape[0])
        if row_weights is not None:
            _checks.weights(function, "row_weights", row_weights, rows, (rows.shape[0],), "(R)")
        record = layer_record(
            function, rows, w2, gradient_dtype, activation=activation, entry="from_rows", index_type=TYPE_CODES[offsets.dtype],
            layout=layout, chunks=chunks,
        )  # fmt: skip
        call = _remember(signature, record, (rows, offsets, row_weights, w1, b1, w2, b2))
    if call is not None and (modes() or profiled() or transforms() is not None):
        call = None
    if row_weights is not None and row_weights.dtype is not torch.float32:
        row_weights = row_weights.float()
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and (rows.requires_grad or w1.requires_grad or _any_requires_grad(w2, row_weights, b1, b2))
    ):
        numbers = record if call is None else ()
        return apply(Rows, call, (rows, offsets, row_weights, w1, b1, w2, b2, call, *numbers))
    if call is None:
        return _call.rows_forward.default(rows, offsets, row_weights, w1, b1, w2, b2, False, *record)[0]
    return ops.forward(call, False, rows, offsets, row_weights, w1, b1, w2, b2)[0]


# ---- the whole layer ----


def moe_record(
    function: str, given: tuple, experts: int, activation: str | Gate, balance_coefficient: float, z_coefficient: float,
    losses: bool, counts: bool, logits_dtype: torch.dtype, gradient_dtype: torch.dtype | None,
    weight_dtypes: Sequence[torch.dtype] = (), **options,
) -> Record:  # fmt: skip
    """Checks the arguments of `function`, whose router has so many experts. `given` are the tensors in the operators' order,
    `options` the other fields of the record."""
    x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2 = given
    _checks.experts(function, "x", x, w1, b1, w2, b2, activation, gradient_dtype, False, weight_dtypes)
    _checks.router(function, x, experts, router_weight, logits, router_bias, selection_bias)
    if token_mask is not None:
        _checks.token_mask(function, token_mask, x)
    _checks.coefficients(function, balance_coefficient, z_coefficient)
    for name, value in (("losses", losses), ("counts", counts)):
        _checks.flag(function, name, value)
    _checks.logits_dtype(function, logits_dtype)
    logits_type = TYPE_CODES[logits_dtype if logits is None else logits.dtype]
    return layer_record(function, x, w2, gradient_dtype, experts, activation=activation, logits_type=logits_type, **options)


def moe(
    x: Tensor,
    router_weight: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    *,
    topk: int | None = None,
    logits: Tensor | None = None,
    router_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    token_mask: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str | Gate = "swiglu",
    layout: str = "concatenated",
    score: str = "softmax_topk",
    renormalize: bool = False,
    groups: int = 1,
    groups_kept: int = 1,
    route_scale: float = 1.0,
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
    top_k: int | None = None,
    norm_topk_prob: bool | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float | None = None,
    compute: str | None = None,
    weights_f8: Tensor | None = None,
) -> MoEOutput:
    """Router and experts in one call; see MoEOutput for what comes back.

    x (T, H); either router_weight (E, H) and optionally router_bias (E), in x's dtype, or logits (T, E) in float32 or
    bfloat16; the experts' arguments as in smoe.experts.
    score: "softmax_topk" (softmax over all E, then top-K; renormalize divides by the sum of the K),
    "topk_softmax" (softmax of the K best logits), or "sigmoid" (with selection_bias (E), which moves the selection and
    not the weights, renormalize, groups and groups_kept). route_scale multiplies every weight.
    rounding: token rounding with tiles of `tile` rows: "none", "nr_f", "sr_f" (drawn from `seed` and `step`), "nr_s",
    "balance_f", "up", "down".
    token_mask (T) bool: tokens that are False are computed as all others, but losses and counts are over the rest.
    The backward itself adds the gradient of balance_coefficient losses[0] + z_coefficient losses[1], whatever the caller's
    loss is multiplied by; the gradient that reaches the returned losses is added too. For a loss of your own on the logits
    compute them outside and pass `logits`.
    compute and weights_f8 are those of smoe.experts.
    top_k, norm_topk_prob, n_group, topk_group and routed_scaling_factor are Hugging Face's names of topk, renormalize,
    groups, groups_kept and route_scale; one that is given counts.
    """
    if top_k is not None:
        topk = top_k
    if norm_topk_prob is not None:
        renormalize = norm_topk_prob
    if n_group is not None:
        groups = n_group
    if topk_group is not None:
        groups_kept = topk_group
    if routed_scaling_factor is not None:
        route_scale = routed_scaling_factor
    if compute is not None or weights_f8 is not None:
        from . import _f8

        return _f8.moe(
            (x, router_weight, router_bias, logits, selection_bias, token_mask, b1, b2), w1, w2, compute, weights_f8, step,
            balance_coefficient, z_coefficient, losses, counts, gradient_dtype, logits_dtype, activation=activation, topk=topk,
            layout=layout, chunks=chunks, score=score, renormalize=renormalize, groups=groups, groups_kept=groups_kept,
            route_scale=route_scale, rounding=rounding, tile=tile, seed=seed,
        )  # fmt: skip
    traced = torch.compiler.is_dynamo_compiling()
    if traced or _any_autocast():
        x, router_weight, router_bias, w1, b1, w2, b2 = _autocast(x, router_weight, router_bias, w1, b1, w2, b2)
    function = "smoe.moe"
    if type(step) is not int or not 0 <= step < 2**64:
        _checks.between(function, "step", step, 0, 2**64 - 1)
    record = signature = None
    if not traced:
        try:
            signature = (
                "moe", topk, activation, layout, score, renormalize, groups, groups_kept, route_scale,
                rounding, tile, seed, balance_coefficient, z_coefficient, losses, counts, chunks, logits_dtype,
                gradient_dtype,
                type(x), x.shape, x.dtype, x.device,
                type(w1), w1.shape, w1.dtype, w1.device, w1.is_contiguous(),
                type(w2), w2.shape, w2.dtype, w2.device, w2.is_contiguous(),
                _traits(b1), _traits(b2), _traits(router_weight), _traits(router_bias), _traits(logits),
                _traits(selection_bias), _traits(token_mask),
            )  # fmt: skip
            record, call = _checked.get(signature, _NONE)
        except (AttributeError, TypeError, RuntimeError):
            signature = None
    given = (x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2)
    if record is None:
        record = moe_record(
            function, given, w2.shape[0], activation, balance_coefficient, z_coefficient, losses, counts, logits_dtype,
            gradient_dtype, topk=topk, layout=layout, chunks=chunks, score=score, renormalize=renormalize, groups=groups,
            groups_kept=groups_kept, route_scale=route_scale, rounding=rounding, tile=tile, seed=seed,
        )  # fmt: skip
        call = _remember(signature, record, given)
    if call is not None and (modes() or profiled() or transforms() is not None):
        call = None
    if selection_bias is not None:
        given = (*given[:4], selection_bias.detach().float(), *given[5:])
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and (x.requires_grad or w1.requires_grad or _any_requires_grad(w2, router_weight, router_bias, logits, b1, b2))
    ):
        numbers = record if call is None else ()
        found = apply(Moe, call, (*given, step, balance_coefficient, z_coefficient, losses, counts, call, *numbers))
        if traced:
            out, _, made, losses_, counts_ = unpack(found, False, logits is None, losses, counts)
        else:
            out, made, losses_, counts_ = found
    elif call is None:
        found = _call.moe_forward.default(*given, step, losses, counts, False, *record)
        out, _, made, losses_, counts_ = unpack(found, False, logits is None, losses, counts)
    else:
        out, _, made, losses_, counts_ = ops.moe_forward(call, False, *given, step, losses, counts)
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

