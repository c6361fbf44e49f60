"""The PyTorch operators over the C calls: torch.ops.smoe.{experts,rows,moe}_{forward,backward}.

Every buffer is a torch tensor: outputs, `saved` and scratch are torch's empty tensors, so the caching allocator and the
pools of CUDA graphs own them. The operators only enqueue on the current stream and never read from the device. They take what
smoe/functional.py has checked; a tensor that is not contiguous or not aligned to 16 bytes is copied.

Operators return a list that leaves out what is not wanted: forward [out], then `saved` when something is differentiated;
backward the gradients of the bits in `needs`, in the order of NEEDS. Their last arguments are the numbers of the layer's record
(smoe/_record.py). Sizes are bounds affine in the number of tokens, the same in the fake kernels and in the real ones.

The functions behind the operators, `forward`, `moe_forward` and `backward`, take a Call, which holds what follows from
record and number of tokens. smoe/_autograd.py calls them directly where nothing observes the dispatcher. They call
few Python functions on purpose: a small layer is bound by the host, and a function called between PyTorch's own code
costs about 0.4 us.
"""

import ctypes
import functools

import torch
from torch import Tensor

from . import _checks, native
from ._context import DTYPES, Context, Description, context_of
from ._context import pack_backward, pack_forward, pack_moe_backward, pack_moe_forward
from ._record import SCHEMA, Record, bounds, layer as layer_of

# Bits of `needs`, in the order in which a backward returns gradients: of x, w1, b1, w2, b2, of the routing (the top-k
# weights, the row weights or the logits), of the router's weight and of its bias.
NEEDS = (1, 2, 4, 8, 16, 32, 64, 128)

_ALIGN, _BUFFER_ALIGN = 16, 64  # in bytes; what the library requires of tensors, and of saved and scratch
_CONTIGUOUS = torch.contiguous_format

# If dX~ is larger than this many bytes, an eager backward has at least two column chunks. dX~ is then the largest buffer of a
# backward, and two chunks take no longer than one (30B-n256); below, they take up to 1 % longer.
_LARGE = 2**30


def _buffer(size: int, like: Tensor) -> Tensor:
    """`size` bytes on the tensor's device; torch aligns what it allocates to 64 bytes at least."""
    return like.new_empty(size, dtype=torch.uint8)


def _readable(tensor: Tensor | None, align: int = _ALIGN) -> Tensor | None:
    """The tensor, or a copy that the library can read in place."""
    if tensor is None or (tensor.data_ptr() % align == 0 and tensor.is_contiguous()):
        return tensor
    return tensor.clone(memory_format=_CONTIGUOUS)


class Call:
    """A layer at one number of tokens: what a call needs besides its tensors, worked out once."""

    __slots__ = (
        "record", "tokens", "from_logits", "from_rows", "gradient_dtype", "logits_dtype", "saved_bytes", "reads_logits",
        "training", "reusing", "inference",
    )  # fmt: skip

    def __init__(self, record: Record, tokens: int) -> None:
        layer, known = layer_of(tokens, record), bounds(record)
        self.record, self.tokens = record, tokens
        self.from_logits = layer.entry == native.ENTRIES["from_logits"]
        self.from_rows = layer.entry == native.ENTRIES["from_rows"]
        self.gradient_dtype, self.logits_dtype, _ = _results_of(record)
        self.saved_bytes, self.reads_logits = known.saved(tokens), known.reads_logits
        self.training: dict[Context, Description] = {}
        self.reusing: dict[Context, Description] = {}  # of a backward that overwrites H in `saved` with dH
        self.inference: dict[Context, Description] = {}

    def describe(self, context: Context, save: bool, reuse: bool = False) -> Description:
        """Makes the Description for this context and stores it in `training`, `reusing` or `inference`."""
        layer = layer_of(self.tokens, self.record, inference=not save, reuse_saved=reuse)
        dx_rows = self.tokens * layer.topk * layer.hidden * DTYPES[layer.dtype].itemsize  # bytes of dX~
        if reuse and dx_rows > _LARGE:
            layer.chunks = max(layer.chunks, 2)
        made = context.describe(layer, self.saved_bytes if save else 0)
        (self.reusing if reuse else self.training if save else self.inference)[context] = made
        return made


_calls: dict[tuple[Record, int], Call] = {}
_KEPT_CALLS = 4096  # if there are more, all are dropped, to bound memory


def call_of(record: Record, tokens: int) -> Call:
    call = _calls.get((record, tokens))
    if call is None:
        if len(_calls) >= _KEPT_CALLS:
            _calls.clear()
        call = _calls[record, tokens] = Call(record, tokens)
    return call


def _results_of(record: Record) -> tuple[torch.dtype, torch.dtype | None, int]:
    """The dtypes of the weights' gradients and of the logits, None for a layer without logits; the router's experts."""
    layer = layer_of(1, record)
    routed = layer.entry == native.ENTRIES["from_logits"]
    return DTYPES[layer.gradient_type], DTYPES[layer.logits_type] if routed else None, layer.experts


def _refuse(call: Call, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """Raises the error for a tensor without an address, such as a sparse one. The kept signatures of calls have no
    layout, because to ask every tensor for it costs time."""
    function = "smoe.moe" if call.from_logits else "smoe.experts_rows" if call.from_rows else "smoe.experts"
    for name, tensor in zip(names, tensors):
        if tensor is not None:
            _checks.tensor(function, name, tensor)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


# ---- forward ----


def forward(
    call: Call, save: bool, x: Tensor, routing: Tensor, weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    b2: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out and saved from given ids and weights, or from offsets and row weights. b1 and b2 are contiguous."""
    try:
        x_at, routing_at, w1_at, w2_at = x.data_ptr(), routing.data_ptr(), w1.data_ptr(), w2.data_ptr()
        weights_at = 0 if weights is None else weights.data_ptr()
        b1_at = 0 if b1 is None else b1.data_ptr()
        b2_at = 0 if b2 is None else b2.data_ptr()
    except RuntimeError:
        names = ("rows", "offsets", "row_weights") if call.from_rows else ("x", "ids", "weights")
        _refuse(call, (*names, "w1", "b1", "w2", "b2"), (x, routing, weights, w1, b1, w2, b2))
        raise
    if (
        (x_at | routing_at | weights_at | w1_at | b1_at | w2_at | b2_at) % _ALIGN
        or not (x.is_contiguous() and routing.is_contiguous() and w1.is_contiguous() and w2.is_contiguous())
        or not (weights is None or weights.is_contiguous())
    ):
        return forward(call, save, *[_readable(t) for t in (x, routing, weights, w1, b1, w2, b2)])
    out = torch.empty_like(x)
    if call.tokens == 0:
        return out, _buffer(call.saved_bytes, x) if save else None
    context = context_of(x)
    layer = (call.training if save else call.inference).get(context) or call.describe(context, save)
    saved = context.new_bytes(layer.saved) if save else None
    scratch = context.new_bytes(layer.scratch_forward)
    ids_at, ids_weights_at, offsets_at, row_weights_at = (
        (0, 0, routing_at, weights_at) if call.from_rows else (routing_at, weights_at, 0, 0)
    )
    context.forward(layer.address, pack_forward(
        x_at, ids_at, ids_weights_at, offsets_at, row_weights_at, w1_at, b1_at, w2_at, b2_at,
        out.data_ptr(), saved.data_ptr() if save else 0, layer.saved, scratch.data_ptr(), layer.scratch_forward,
    ))  # fmt: skip
    return out, saved


def _outputs(
    x: Tensor, router_weight: Tensor | None, experts: int, logits_dtype: torch.dtype, wants_losses: bool, wants_counts: bool
) -> tuple[Tensor | None, ...]:
    """logits, losses, counts: new tensors for those that the call computes."""
    logits = losses = counts = None
    if router_weight is not None:
        logits = torch.empty(x.shape[0], experts, dtype=logits_dtype, device=x.device)
    if wants_losses:
        losses = torch.empty(2, dtype=torch.float32, device=x.device)
    if wants_counts:
        counts = torch.empty(experts, dtype=torch.int32, device=x.device)
    return logits, losses, counts


def moe_outputs(x: Tensor, router_weight: Tensor | None, losses: bool, counts: bool, record: Record) -> tuple[Tensor | None, ...]:
    _, logits_dtype, experts = _results_of(record)
    return _outputs(x, router_weight, experts, logits_dtype, losses, counts)


def moe_forward(
    call: Call, save: bool, x: Tensor, router_weight: Tensor | None, router_bias: Tensor | None, given_logits: Tensor | None,
    selection_bias: Tensor | None, token_mask: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    step: int, wants_losses: bool, wants_counts: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """out, saved with `save`, logits with router_weight, losses and counts if wanted."""
    given = (x, router_weight, router_bias, given_logits, selection_bias, token_mask, w1, b1, w2, b2)
    at, bits = [], 0
    try:
        for tensor in given:
            address = 0 if tensor is None else tensor.data_ptr()
            bits |= address if address == 0 or tensor.is_contiguous() else 1
            at.append(address)
    except RuntimeError:
        names = ("x", "router_weight", "router_bias", "logits", "selection_bias", "token_mask", "w1", "b1", "w2", "b2")
        _refuse(call, names, given)
        raise
    if bits % _ALIGN:
        return moe_forward(call, save, *[_readable(tensor) for tensor in given], step, wants_losses, wants_counts)
    out = torch.empty_like(x)
    logits, losses, counts = _outputs(x, router_weight, w2.shape[0], call.logits_dtype, wants_losses, wants_counts)
    if call.tokens == 0:
        for empty in _given(losses, counts):
            empty.zero_()
        return out, _buffer(call.saved_bytes, x) if save else None, logits, losses, counts
    context = context_of(x)
    layer = (call.training if save else call.inference).get(context) or call.describe(context, save)
    saved = context.new_bytes(layer.saved) if save else None
    scratch = context.new_bytes(layer.scratch_forward)
    x_at, router_at, bias_at, logits_at, selection_at, mask_at, w1_at, b1_at, w2_at, b2_at = at
    arguments = pack_moe_forward(
        x_at, router_at, bias_at, logits_at if logits is None else logits.data_ptr(),
        selection_at, step, 0 if losses is None else losses.data_ptr(), w1_at, b1_at, w2_at, b2_at,
        out.data_ptr(), saved.data_ptr() if save else 0, layer.saved, scratch.data_ptr(), layer.scratch_forward, mask_at,
    )  # fmt: skip
    context.forward(layer.address, arguments)
    if counts is not None:
        plan = saved if save else scratch
        start = context.plan_view(layer.address, arguments).topk_counts - plan.data_ptr()
        counts.copy_(plan[start : start + 4 * counts.numel()].view(torch.int32))
    return out, saved, logits, losses, counts


# ---- backward ----


def _gradients(
    wanted: tuple[bool, ...], dtype: torch.dtype, x: Tensor, w1: Tensor, w2: Tensor, ids: Tensor | None,
    logits_dtype: torch.dtype | None, experts: int | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """New tensors for those `wanted`, in the order of the bits. x, w1, w2 and ids are contiguous. `logits_dtype` is that of a
    layer from logits, else None. `experts` are the router's, by default those of w2."""
    like = torch.empty_like if dtype is x.dtype else functools.partial(torch.empty_like, dtype=dtype)
    dx = dw1 = db1 = dw2 = db2 = drouting = drouter_weight = drouter_bias = None
    wants_x, wants_w1, wants_b1, wants_w2, wants_b2, wants_routing, wants_router_weight, wants_router_bias = wanted
    if wants_x:
        dx = torch.empty_like(x)
    if wants_w1:
        dw1 = like(w1)
    if wants_b1:
        db1 = torch.empty(w1.shape[0], w1.shape[1], dtype=dtype, device=x.device)
    if wants_w2:
        dw2 = like(w2)
    if wants_b2:
        db2 = torch.empty(w2.shape[0], w2.shape[1], dtype=dtype, device=x.device)
    if wants_routing:
        if logits_dtype is not None:
            drouting = torch.empty(x.shape[0], experts or w2.shape[0], dtype=logits_dtype, device=x.device)
        elif ids is not None:
            drouting = torch.empty_like(ids, dtype=torch.float32)
        else:
            drouting = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if wants_router_weight:
        drouter_weight = torch.empty(experts or w2.shape[0], w2.shape[1], dtype=dtype, device=x.device)
    if wants_router_bias:
        drouter_bias = torch.empty(experts or w2.shape[0], dtype=dtype, device=x.device)
    return dx, dw1, db1, dw2, db2, drouting, drouter_weight, drouter_bias


def backward(
    call: Call, wanted: tuple[bool, ...], reuse: bool, dout: Tensor, x: Tensor, w1: Tensor, w2: Tensor, b2: Tensor | None,
    saved: Tensor, ids: Tensor | None = None, router_weight: Tensor | None = None, logits: Tensor | None = None,
    dlosses: Tensor | None = None, token_mask: Tensor | None = None, balance: float = 0.0, z: float = 0.0,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients in the order of the bits, None where `wanted` is false. Hooks on saved tensors may have brought
    anything that was saved back at another address and alignment. With `reuse` no later call reads `saved`, and dH
    takes the place of H there."""
    dout_at, x_at, w1_at, w2_at = dout.data_ptr(), x.data_ptr(), w1.data_ptr(), w2.data_ptr()
    saved_at = saved.data_ptr()
    b2_at = 0 if b2 is None else b2.data_ptr()
    ids_at = 0 if ids is None else ids.data_ptr()
    router_at = 0 if router_weight is None else router_weight.data_ptr()
    logits_at = 0 if logits is None else logits.data_ptr()
    dlosses_at = 0 if dlosses is None else dlosses.data_ptr()
    mask_at = 0 if token_mask is None else token_mask.data_ptr()
    if (
        (dout_at | x_at | w1_at | w2_at | b2_at | ids_at | router_at | logits_at | dlosses_at | mask_at) % _ALIGN
        or saved_at % _BUFFER_ALIGN
        or not (dout.is_contiguous() and x.is_contiguous() and w1.is_contiguous() and w2.is_contiguous())
        or not (b2 is None or b2.is_contiguous())
        or not (ids is None or ids.is_contiguous())
        or not (router_weight is None or router_weight.is_contiguous())
        or not (logits is None or logits.is_contiguous())
        or not (dlosses is None or dlosses.is_contiguous())
        or not (token_mask is None or token_mask.is_contiguous())
    ):
        dout, x, w1, w2, b2, ids, router_weight, logits, dlosses, token_mask = [
            _readable(t) for t in (dout, x, w1, w2, b2, ids, router_weight, logits, dlosses, token_mask)
        ]
        saved = _readable(saved, _BUFFER_ALIGN)
        given = dout, x, w1, w2, b2, saved, ids, router_weight, logits, dlosses, token_mask
        return backward(call, wanted, reuse, *given, balance, z)
    made = _gradients(wanted, call.gradient_dtype, x, w1, w2, ids, call.logits_dtype)
    if call.tokens == 0:
        for gradient in _given(*made):
            gradient.zero_()
        return made
    context = context_of(x)
    layer = (call.reusing if reuse else call.training).get(context) or call.describe(context, True, reuse)
    scratch = context.new_bytes(layer.scratch_backward)
    dx, dw1, db1, dw2, db2, drouting, drouter_weight, drouter_bias = made
    dx_at = 0 if dx is None else dx.data_ptr()
    dw1_at = 0 if dw1 is None else dw1.data_ptr()
    dw2_at = 0 if dw2 is None else dw2.data_ptr()
    db1_at = 0 if db1 is None else db1.data_ptr()
    db2_at = 0 if db2 is None else db2.data_ptr()
    drouting_at = 0 if drouting is None else drouting.data_ptr()
    if call.from_logits:
        drouter_weight_at = 0 if drouter_weight is None else drouter_weight.data_ptr()
        drouter_bias_at = 0 if drouter_bias is None else drouter_bias.data_ptr()
        context.backward(layer.address, pack_moe_backward(
            x_at, router_at, logits_at, w1_at, w2_at, b2_at, saved_at, saved.numel(), dout_at,
            balance, z, dx_at, dw1_at, dw2_at, db1_at, db2_at,
            drouter_weight_at, drouter_bias_at, drouting_at, scratch.data_ptr(), layer.scratch_backward, dlosses_at,
            mask_at,
        ))  # fmt: skip
    else:
        dweights_at, drow_weights_at = (0, drouting_at) if call.from_rows else (drouting_at, 0)
        context.backward(layer.address, pack_backward(
            x_at, ids_at, w1_at, w2_at, b2_at, saved_at, saved.numel(), dout_at, dx_at, dw1_at, dw2_at, db1_at, db2_at,
            dweights_at, drow_weights_at, scratch.data_ptr(), layer.scratch_backward,
        ))  # fmt: skip
    return made


# ---- the bias of the selection ----


@functools.lru_cache(maxsize=64)
def _bias_layer(experts: int) -> native.Layer:
    """Every size but the number of experts is arbitrary."""
    return native.Layer(
        tokens=1, hidden=64, intermediate=64, experts=experts, topk=1, score=native.SCORES["sigmoid"], inference=1
    )


def update_selection_bias(bias: Tensor, counts: Tensor, gamma: float) -> None:
    """bias[e] += gamma sign(mean count - counts[e]), in place."""
    layer = _bias_layer(bias.shape[0])
    context_of(bias).update_selection_bias(ctypes.addressof(layer), counts.data_ptr(), bias.data_ptr(), gamma)


# ---- fake kernels: shapes and dtypes alone, the number of tokens may be symbolic ----


def _fake_saved(record: Record, x: Tensor) -> Tensor:
    return torch.empty(bounds(record).saved(x.shape[0]), dtype=torch.uint8, device=x.device)


def _fake_out(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=_CONTIGUOUS)


def _wanted(needs: int) -> tuple[bool, ...]:
    """`needs` as the functions take it."""
    return tuple([bool(needs & bit) for bit in NEEDS])


def _fake_gradients(needs, record, x, w1, w2, ids=None):
    x, w1, w2, ids = [None if tensor is None else tensor.contiguous() for tensor in (x, w1, w2, ids)]
    gradient_dtype, *routed = _results_of(record)
    return _given(*_gradients(_wanted(needs), gradient_dtype, x, w1, w2, ids, *routed))


def _fake_forward(x, routing, weights, w1, b1, w2, b2, save, *record):
    return [_fake_out(x)] + ([_fake_saved(record, x)] if save else [])


def _fake_experts_backward(dout, x, ids, w1, w2, b2, saved, needs, *record):
    return _fake_gradients(needs, record, x, w1, w2, ids)


def _fake_rows_backward(dout, rows, w1, w2, b2, saved, needs, *record):
    return _fake_gradients(needs, record, rows, w1, w2)


def _fake_moe_forward(
    x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2, step, losses, counts, save, *record
):
    return _given(_fake_out(x), _fake_saved(record, x) if save else None, *moe_outputs(x, router_weight, losses, counts, record))


def _fake_moe_backward(dout, x, router_weight, logits, dlosses, token_mask, w1, w2, b2, saved, balance, z, needs, *record):
    return _fake_gradients(needs, record, x, w1, w2)


# ---- the operators ----


def _op_forward(x, routing, weights, w1, b1, w2, b2, save, *record):
    return _given(*forward(call_of(record, x.shape[0]), save, x, routing, weights, *map(_readable, (w1, b1, w2, b2))))


def _op_experts_backward(dout, x, ids, w1, w2, b2, saved, needs, *record):
    call = call_of(record, x.shape[0])
    return _given(*backward(call, _wanted(needs), False, dout, x, w1, w2, b2, saved, ids))


def _op_rows_backward(dout, rows, w1, w2, b2, saved, needs, *record):
    call = call_of(record, rows.shape[0])
    return _given(*backward(call, _wanted(needs), False, dout, rows, w1, w2, b2, saved))


def _op_moe_forward(
    x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2, step, losses, counts, save, *record
):
    given = (x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2)
    return _given(*moe_forward(call_of(record, x.shape[0]), save, *given, step, losses, counts))


def _op_moe_backward(dout, x, router_weight, logits, dlosses, token_mask, w1, w2, b2, saved, balance, z, needs, *record):
    given = dout, x, w1, w2, b2, saved, None, router_weight, logits, dlosses, token_mask
    return _given(*backward(call_of(record, x.shape[0]), _wanted(needs), False, *given, balance, z))


# ---- registration ----

_EXPERTS = "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2"
_KEPT = "Tensor w1, Tensor w2, Tensor? b2, Tensor saved"  # what a backward reads besides its own
_OPERATORS = {
    f"experts_forward(Tensor x, Tensor ids, Tensor weights, {_EXPERTS}, bool save": (_op_forward, _fake_forward),
    f"experts_backward(Tensor dout, Tensor x, Tensor ids, {_KEPT}, int needs": (_op_experts_backward, _fake_experts_backward),
    f"rows_forward(Tensor rows, Tensor offsets, Tensor? row_weights, {_EXPERTS}, bool save": (_op_forward, _fake_forward),
    f"rows_backward(Tensor dout, Tensor rows, {_KEPT}, int needs": (_op_rows_backward, _fake_rows_backward),
    "moe_forward(Tensor x, Tensor? router_weight, Tensor? router_bias, Tensor? logits, Tensor? selection_bias, "
    f"Tensor? token_mask, {_EXPERTS}, SymInt step, bool losses, bool counts, bool save": (_op_moe_forward, _fake_moe_forward),
    f"moe_backward(Tensor dout, Tensor x, Tensor? router_weight, Tensor? logits, Tensor? dlosses, Tensor? token_mask, {_KEPT}, "
    "float balance_coefficient, float z_coefficient, int needs": (_op_moe_backward, _fake_moe_backward),
}  # fmt: skip


def define(schema: str, real, fake, devices: tuple[str, ...] = ("CPU", "CUDA")) -> None:
    """Defines an operator. `schema` has no record and no result: every operator takes the one, and returns a list."""
    name = schema.split("(")[0]
    _library.define(f"{schema}, {SCHEMA}) -> Tensor[]", tags=(torch.Tag.needs_fixed_stride_order,))
    for device in devices:
        _library.impl(name, real, device)
    torch.library.register_fake(f"smoe::{name}", fake, lib=_library)


_library = torch.library.Library("smoe", "DEF")
_library.define("update_selection_bias(Tensor(a!) bias, Tensor counts, float gamma) -> ()")
for _key in ("CPU", "CUDA"):
    _library.impl("update_selection_bias", update_selection_bias, _key)
torch.library.register_fake("smoe::update_selection_bias", lambda bias, counts, gamma: None, lib=_library)
for _schema, (_real, _fake) in _OPERATORS.items():
    define(_schema, _real, _fake)
