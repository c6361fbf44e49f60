"""Mixture-of-Experts layers as differentiable functions of PyTorch tensors.

T tokens, H hidden, I intermediate, E experts, K experts of a token. A gated activation (swiglu, geglu, geglu_tanh, reglu,
swiglu_oai) has w1 (E, 2I, H), one without a gate (silu, gelu, relu, relu2) has w1 (E, I, H); w2 is (E, H, I). CPU tensors
are float32 or bfloat16, CUDA tensors bfloat16 or float16. Under autocast the matrices and x are cast as for a matmul.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _checks
from . import _ops as ops

_call = torch.ops.smoe


class MoEOutput(NamedTuple):
    """What smoe.moe returns. Only `out` is differentiable."""

    out: Tensor  # (T, H)
    logits: Tensor  # (T, E), the router's
    losses: Tensor | None  # (2) float32: load balance and z
    counts: Tensor | None  # (E) int32: tokens of each expert under plain top-K


# ---- what every entry does with its arguments ----


_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # one look instead of one by device type


def _autocasts(x: Tensor) -> bool:
    if not torch.compiler.is_compiling() and not _any_autocast():
        return False
    return isinstance(x, Tensor) and torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type)


def _autocast(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in (x, *others))


def _differentiates(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


_checked: dict[tuple, str] = {}  # signatures of eager calls that passed every check, and their options string
_KEPT_SIGNATURES = 4096


def _signature(tensors: tuple[Tensor | None, ...], matrices: tuple[Tensor | None, ...], options: tuple) -> tuple | None:
    """What the checks look at: equal signatures pass or fail alike. None where no signature can be made, and while a graph
    is traced: there the checks are evaluated once and leave nothing in the graph. Of `matrices` the checks want contiguous
    memory too."""
    if torch.compiler.is_compiling():
        return None
    made = [*options]
    try:
        for t in tensors:
            made += (None,) if t is None else (t.shape, t.dtype, t.device)
        for t in matrices:
            made += (None,) if t is None else (t.shape, t.dtype, t.device, t.is_contiguous())
    except AttributeError:  # not a tensor: the checks say which
        return None
    return tuple(made)


def _remember(signature: tuple | None, options: str) -> str:
    if signature is not None:
        if len(_checked) >= _KEPT_SIGNATURES:
            _checked.clear()
        _checked[signature] = options
    return options


def _needs(x: bool, w1: bool, b1: bool, w2: bool, b2: bool, routing: bool) -> int:
    return (
        ops.NEEDS_X * x
        + ops.NEEDS_W1 * w1
        + ops.NEEDS_B1 * b1
        + ops.NEEDS_W2 * w2
        + ops.NEEDS_B2 * b2
        + ops.NEEDS_ROUTING * routing
    )


def _spread(found: list[Tensor], needs: int) -> list[Tensor | None]:
    """The gradients in the order of the bits, None for those not wanted."""
    spread, position = [], 0
    for bit in ops.NEEDS:
        spread.append(found[position] if needs & bit else None)
        position += 1 if needs & bit else 0
    return spread


_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_PLAIN = (Tensor, torch.nn.Parameter)


def _operators(*tensors: Tensor | None):
    """Where a call finds its operators: PyTorch's dispatcher while a graph is traced, under a dispatch mode (selective
    checkpointing, fake tensors, FLOP counters), under the profiler, for tensor subclasses and for tensors without memory;
    otherwise, where nobody looks, the functions behind them, which saves about 20 us of a forward and backward."""
    if torch.compiler.is_compiling() or _modes is None or _modes() or torch.autograd._profiler_enabled():
        return _DISPATCHED
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return _DISPATCHED
    return ops


class _Dispatched:
    """The operators under the names that their functions have in smoe/_ops.py."""

    experts_forward = _call.experts_forward.default
    rows_forward = _call.rows_forward.default
    moe_forward = _call.moe_forward.default

    @staticmethod
    def experts_gradients(*arguments):
        return _spread(_call.experts_backward.default(*arguments), arguments[-1])

    @staticmethod
    def rows_gradients(*arguments):
        return _spread(_call.rows_backward.default(*arguments), arguments[-1])

    @staticmethod
    def moe_gradients(*arguments):
        return _spread(_call.moe_backward.default(*arguments), arguments[-1])


_DISPATCHED = _Dispatched()


def _backward(function, ctx, dout: Tensor):
    """A second differentiation is refused; the wrapper that does it is only needed where one could come."""
    return (once_differentiable(function) if torch.is_grad_enabled() else function)(ctx, dout)


# ---- given ids and weights ----


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, w1, b1, w2, b2, options):
        run = _operators(x, ids, weights, w1, b1, w2, b2).experts_forward
        out, saved = run(x, ids, weights, w1, b1, w2, b2, options, True)
        ctx.save_for_backward(x, ids, w1, w2, b2, saved)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        return _backward(_experts_backward, ctx, dout)


def _experts_backward(ctx, dout):
    x, _, weights, w1, b1, w2, b2, _ = ctx.needs_input_grad
    needs = _needs(x, w1, b1, w2, b2, weights)
    run = _operators(dout).experts_gradients
    dx, dw1, db1, dw2, db2, dweights, *_ = run(dout.contiguous(), *ctx.saved_tensors, ctx.options, needs)
    return dx, None, dweights, dw1, db1, dw2, db2, None


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "concatenated",
    chunks: int = 1,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts on given routing: out[t] = sum over k of weights[t, k] expert[ids[t, k]](x[t]), (T, H).

    x (T, H); ids (T, K) int32 or int64: pairs outside 0..E-1 are skipped, of a token's equal ids the first counts;
    weights (T, K); w1, w2 and the biases b1 (E, 2I or I), b2 (E, H) contiguous and in x's dtype.
    layout: where w1's gate rows stand, "concatenated" (first) or "interleaved" (every other row).
    chunks: 1, 2, 4, ... 64 column chunks; scratch memory falls, the bits of the results stay.
    gradient_dtype: torch.float32 makes the kernels write the weights' gradients in float32.
    """
    if _autocasts(x):
        x, w1, b1, w2, b2 = _autocast(x, w1, b1, w2, b2)
    chosen = ("experts", activation, layout, chunks, gradient_dtype)
    signature = _signature((x, ids, weights), (w1, b1, w2, b2), chosen)
    options = _checked.get(signature) if signature is not None else None
    if options is None:
        function = "smoe.experts"
        _checks.experts(function, "x", x, w1, b1, w2, b2, activation, layout, chunks, gradient_dtype)
        _checks.ids(function, ids, x, w2.shape[0])
        _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
        options = _remember(signature, f"{activation} {layout} {chunks} {int(gradient_dtype is torch.float32)}")
    if weights.dtype is not torch.float32:
        weights = weights.float()
    if _differentiates(x, weights, w1, b1, w2, b2):
        return _Experts.apply(x, ids, weights, w1, b1, w2, b2, options)
    run = _operators(x, ids, weights, w1, b1, w2, b2).experts_forward
    return run(x, ids, weights, w1, b1, w2, b2, options, False)[0]


# ---- rows sorted by expert ----


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, offsets, row_weights, w1, b1, w2, b2, options):
        run = _operators(rows, offsets, row_weights, w1, b1, w2, b2).rows_forward
        out, saved = run(rows, offsets, row_weights, w1, b1, w2, b2, options, True)
        ctx.save_for_backward(rows, w1, w2, b2, saved)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        return _backward(_rows_backward, ctx, dout)


def _rows_backward(ctx, dout):
    rows, _, row_weights, w1, b1, w2, b2, _ = ctx.needs_input_grad
    needs = _needs(rows, w1, b1, w2, b2, row_weights)
    run = _operators(dout).rows_gradients
    drows, dw1, db1, dw2, db2, dweights, *_ = run(dout.contiguous(), *ctx.saved_tensors, ctx.options, needs)
    return drows, None, dweights, dw1, db1, dw2, db2, None


def experts_rows(
    rows: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w2: Tensor,
    row_weights: Tensor | None = None,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "concatenated",
    chunks: int = 1,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts on rows that a dispatcher has sorted by expert: expert e has rows offsets[e] to offsets[e + 1] - 1.

    rows (R, H); offsets (E + 1) int32 or int64, on the rows' device, from 0 and never falling; row_weights (R), or None
    for ones. Returns (R, H) in the rows' order. Rows past offsets[E] may hold anything, NaN too: their outputs and
    gradients are zero. The other arguments are those of smoe.experts.
    """
    if _autocasts(rows):
        rows, w1, b1, w2, b2 = _autocast(rows, w1, b1, w2, b2)
    function = "smoe.experts_rows"
    chosen = ("rows", activation, layout, chunks, gradient_dtype)
    signature = _signature((rows, offsets, row_weights), (w1, b1, w2, b2), chosen)
    options = _checked.get(signature) if signature is not None else None
    if options is None:
        _checks.experts(function, "rows", rows, w1, b1, w2, b2, activation, layout, chunks, gradient_dtype)
        _checks.offsets(function, offsets, rows, w2.shape[0])
        if row_weights is not None:
            _checks.weights(function, "row_weights", row_weights, rows, (rows.shape[0],), "(R)")
        options = _remember(signature, f"{activation} {layout} {chunks} {int(gradient_dtype is torch.float32)}")
    if row_weights is not None and row_weights.dtype is not torch.float32:
        row_weights = row_weights.float()
    if _differentiates(rows, row_weights, w1, b1, w2, b2):
        return _Rows.apply(rows, offsets, row_weights, w1, b1, w2, b2, options)
    run = _operators(rows, offsets, row_weights, w1, b1, w2, b2).rows_forward
    return run(rows, offsets, row_weights, w1, b1, w2, b2, options, False)[0]


# ---- the whole layer ----


def _unpack(found: list[Tensor], save: bool, router: bool, losses: bool, counts: bool) -> tuple[Tensor | None, ...]:
    """saved, logits, losses, counts of moe_forward's list after out."""
    unpacked, position = [], 1
    for there in (save, router, losses, counts):
        unpacked.append(found[position] if there else None)
        position += 1 if there else 0
    return tuple(unpacked)


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, router_weight, router_bias, given_logits, selection_bias, w1, b1, w2, b2, top_k, options, step,
        wants_losses, wants_counts,
    ):  # fmt: skip
        given = (x, router_weight, router_bias, given_logits, selection_bias, w1, b1, w2, b2)
        found = _operators(*given).moe_forward(*given, top_k, options, step, True)
        saved, logits, losses, counts = _unpack(found, True, router_weight is not None, wants_losses, wants_counts)
        kept = given_logits if logits is None else logits
        ctx.save_for_backward(x, router_weight, kept, w1, w2, b2, saved)
        ctx.top_k, ctx.options = top_k, options
        ctx.mark_non_differentiable(*[t for t in (logits, losses, counts) if t is not None])
        if not torch.compiler.is_compiling():  # else the engine fills a zero gradient of the logits in every backward
            ctx.set_materialize_grads(False)
        return found[0], logits, losses, counts

    @staticmethod
    def backward(ctx, dout, *_):
        return _backward(_moe_backward, ctx, dout)


def _moe_backward(ctx, dout):
    if dout is None:  # what follows the layer has no gradient for it
        return (None,) * 14
    x, router_weight, router_bias, logits, _, w1, b1, w2, b2 = ctx.needs_input_grad[:9]
    needs = _needs(x, w1, b1, w2, b2, logits)
    needs += ops.NEEDS_ROUTER_WEIGHT * router_weight + ops.NEEDS_ROUTER_BIAS * router_bias
    run = _operators(dout).moe_gradients
    dx, dw1, db1, dw2, db2, dlogits, dweight, dbias = run(
        dout.contiguous(), *ctx.saved_tensors, ctx.top_k, ctx.options, needs
    )
    return dx, dweight, dbias, dlogits, None, dw1, db1, dw2, db2, None, None, None, None, None


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
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "swiglu",
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
    The gradient of balance_coefficient losses[0] + z_coefficient losses[1] is added in the backward, with weight 1: the
    returned losses are values to log. For a loss of your own on the logits compute them outside and pass `logits`.
    """
    if _autocasts(x):
        x, router_weight, router_bias, w1, b1, w2, b2 = _autocast(x, router_weight, router_bias, w1, b1, w2, b2)
    function = "smoe.moe"
    _checks.between(function, "step", step, 0, 2**64 - 1)
    chosen = (
        "moe", top_k, activation, layout, score, norm_topk_prob, n_group, topk_group, routed_scaling_factor, rounding, tile,
        seed, balance_coefficient, z_coefficient, losses, counts, chunks, logits_dtype, gradient_dtype,
    )  # fmt: skip
    signature = _signature((x, router_weight, logits, router_bias, selection_bias), (w1, b1, w2, b2), chosen)
    options = _checked.get(signature) if signature is not None else None
    if options is None:
        _checks.experts(function, "x", x, w1, b1, w2, b2, activation, layout, chunks, gradient_dtype)
        count = w2.shape[0]
        _checks.router(function, x, count, router_weight, logits, router_bias, selection_bias, score)
        _checks.routing(function, count, top_k, score, n_group, topk_group, rounding, tile, seed, logits_dtype)
        if logits is not None:
            logits_dtype = logits.dtype
        options = _remember(signature, (
            f"{activation} {layout} {chunks} {int(gradient_dtype is torch.float32)} {score} {int(norm_topk_prob)} "
            f"{n_group} {topk_group} {float(routed_scaling_factor)} {rounding} {tile} {seed} "
            f"{int(logits_dtype is torch.bfloat16)} {float(balance_coefficient)} {float(z_coefficient)} {int(losses)} "
            f"{int(counts)}"
        ))  # fmt: skip
    if selection_bias is not None:
        selection_bias = selection_bias.detach().float()
    arguments = (x, router_weight, router_bias, logits, selection_bias, w1, b1, w2, b2, top_k, options, step)
    if _differentiates(x, router_weight, router_bias, logits, w1, b1, w2, b2):
        out, made, losses_, counts_ = _Moe.apply(*arguments, losses, counts)
    else:
        found = _operators(*arguments[:9]).moe_forward(*arguments, False)
        out, (_, made, losses_, counts_) = found[0], _unpack(found, False, logits is None, losses, counts)
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
    with torch.no_grad():
        _call.update_selection_bias.default(bias, counts, gamma)
