"""The PyTorch operators over the C calls: torch.ops.smoe.{experts,rows,moe}_{forward,backward}.

Every buffer is a torch tensor: outputs, `saved` and scratch come from torch.empty, so the caching allocator and the pools
of CUDA graphs own them. The operators only enqueue on the current stream and never read from the device. They take what
smoe/functional.py has checked; a tensor that is not contiguous or not aligned to 16 bytes is copied.

Operators return a list that leaves out what is not wanted: forward [out], then `saved` when something is differentiated;
backward the gradients of the bits in `needs`, in the order of the constants below. `options` is the string of
smoe/_layout.py. Sizes are bounds affine in the number of tokens, the same in the fake kernels and in the real ones.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._context import TYPE_CODES, Context, Description, context_of
from ._layout import Options, parse

# Bits of `needs`, in the order in which a backward returns gradients.
NEEDS_X, NEEDS_W1, NEEDS_B1, NEEDS_W2, NEEDS_B2 = 1, 2, 4, 8, 16
NEEDS_ROUTING = 32  # the top-k weights, the row weights or the logits
NEEDS_ROUTER_WEIGHT, NEEDS_ROUTER_BIAS = 64, 128
NEEDS = (1, 2, 4, 8, 16, 32, 64, 128)

_BUFFER_ALIGN = 64  # what the library wants of saved and scratch

try:  # the stream as an integer, without building a torch.cuda.Stream
    _raw_stream = torch._C._cuda_getCurrentRawStream
except AttributeError:  # a torch without CUDA, or one that renamed it

    def _raw_stream(device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream


def _stream(tensor: Tensor) -> int:
    return _raw_stream(tensor.get_device()) if tensor.is_cuda else 0


def _buffer(size: int, like: Tensor) -> Tensor:
    """`size` bytes on the tensor's device; torch aligns what it allocates to 64 bytes at least."""
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def _new_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A new contiguous tensor of its shape; from Python this takes half the time of torch.empty with a shape."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _addresses(copies: list[Tensor], tensors: Iterable[Tensor | None]) -> list[int]:
    """Addresses of tensors, 0 for None. What the library cannot read in place is copied; `copies` keeps the copies."""
    found = []
    for tensor in tensors:
        if tensor is None:
            found.append(0)
            continue
        address = tensor.data_ptr()
        if address & 15 or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            copies.append(tensor)
            address = tensor.data_ptr()
        found.append(address)
    return found


def _saved_address(copies: list[Tensor], saved: Tensor) -> int:
    """Of `saved`, copied if hooks on saved tensors brought it back at a lesser alignment."""
    address = saved.data_ptr()
    if address % _BUFFER_ALIGN:
        copy = _buffer(saved.numel(), saved)
        copies.append(copy.copy_(saved))
        address = copy.data_ptr()
    return address


def _describe(
    context: Context, entry: str, options: str, save: bool, x: Tensor, topk: int, w2: Tensor, index: torch.dtype
) -> Description:
    tokens, shape = x.shape[0], w2.shape
    key = (entry, options, save, tokens, topk, shape, x.dtype, index)
    known = context.descriptions.get(key)
    if known is not None:
        return known
    parsed, code = parse(options), TYPE_CODES[x.dtype]
    saved = parsed.saved_bytes(entry, tokens, topk, shape, x.element_size()) if save else 0
    return context.describe(
        key, parsed.layer(entry, tokens, topk, shape, code, TYPE_CODES.get(index, TYPE_CODES[torch.int32]), save), saved
    )


def _saved_without_tokens(entry: str, options: str, x: Tensor, topk: int, w2: Tensor) -> Tensor:
    return _buffer(parse(options).saved_bytes(entry, 0, topk, w2.shape, x.element_size()), x)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


# ---- gradients ----


def _expert_gradients(options: str, needs: int, x: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor | None]:
    """dx, dw1, db1, dw2, db2: new tensors for those wanted."""
    device, dtype = x.device, torch.float32 if parse(options).f32_gradients else x.dtype
    return [
        _new_like(x) if needs & NEEDS_X else None,
        _new_like(w1, dtype) if needs & NEEDS_W1 else None,
        torch.empty(w1.shape[:2], dtype=dtype, device=device) if needs & NEEDS_B1 else None,
        _new_like(w2, dtype) if needs & NEEDS_W2 else None,
        torch.empty(w2.shape[:2], dtype=dtype, device=device) if needs & NEEDS_B2 else None,
    ]


def _finish(
    entry: str, gradients: list[Tensor | None], dout: Tensor, x: Tensor, router_weight: Tensor | None,
    logits: Tensor | None, ids: Tensor | None, w1: Tensor, w2: Tensor, b2: Tensor | None, saved: Tensor, options: str,
    topk: int,
) -> list[Tensor | None]:  # fmt: skip
    """Runs smoe_layer_backward into `gradients` (in the order of the bits, None where not wanted) and returns them."""
    if x.shape[0] == 0:
        for gradient in _given(*gradients):
            gradient.zero_()
        return gradients
    context = context_of(x)
    layer = _describe(context, entry, options, True, x, topk, w2, ids.dtype if ids is not None else torch.int32)
    parsed = parse(options)
    scratch = _buffer(layer.scratch_backward, x)
    copies: list[Tensor] = []
    x_at, router_at, logits_at, ids_at, w1_at, w2_at, b2_at, dout_at = _addresses(
        copies, (x, router_weight, logits, ids, w1, w2, b2, dout)
    )
    dx, dw1, db1, dw2, db2, drouting, drouter_weight, drouter_bias = (
        0 if gradient is None else gradient.data_ptr() for gradient in gradients
    )
    dlogits = drouting if entry == "from_logits" else 0
    dtopk_weights = drouting if entry == "from_topk" else 0
    drow_weights = drouting if entry == "from_rows" else 0
    context.backward(
        layer.address, _stream(x),
        x_at, router_at, logits_at, 0, ids_at, 0, 0, 0, w1_at, 0, w2_at, b2_at,
        _saved_address(copies, saved), saved.numel(), dout_at, parsed.balance_coefficient, parsed.z_coefficient,
        dx, dw1, dw2, db1, db2, drouter_weight, drouter_bias, dlogits, dtopk_weights, drow_weights,
        scratch.data_ptr(), layer.scratch_backward,
    )  # fmt: skip
    return gradients


# ---- given ids and weights ----


def experts_forward(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    options: str, save: bool,
) -> list[Tensor]:  # fmt: skip
    out = _new_like(x)
    topk = ids.shape[1]
    if x.shape[0] == 0:
        return [out, _saved_without_tokens("from_topk", options, x, topk, w2)] if save else [out]
    context = context_of(x)
    layer = _describe(context, "from_topk", options, save, x, topk, w2, ids.dtype)
    saved = _buffer(layer.saved, x) if save else None
    scratch = _buffer(layer.scratch_forward, x)
    copies: list[Tensor] = []
    x_at, ids_at, weights_at, w1_at, b1_at, w2_at, b2_at = _addresses(copies, (x, ids, weights, w1, b1, w2, b2))
    context.forward(
        layer.address, _stream(x),
        x_at, 0, 0, 0, 0, 0, 0, ids_at, weights_at, 0, 0, w1_at, b1_at, w2_at, b2_at,
        out.data_ptr(), saved.data_ptr() if save else 0, layer.saved, scratch.data_ptr(), layer.scratch_forward,
    )  # fmt: skip
    return [out, saved] if save else [out]


def _new_experts_gradients(needs: int, x: Tensor, ids: Tensor, w1: Tensor, w2: Tensor, options: str):
    dweights = _new_like(ids, torch.float32) if needs & NEEDS_ROUTING else None
    return [*_expert_gradients(options, needs, x, w1, w2), dweights, None, None]


def experts_gradients(
    dout: Tensor, x: Tensor, ids: Tensor, w1: Tensor, w2: Tensor, b2: Tensor | None, saved: Tensor, options: str, needs: int
) -> list[Tensor | None]:
    """What experts_backward returns, with None for what is not wanted; the same for rows_gradients and moe_gradients."""
    gradients = _new_experts_gradients(needs, x, ids, w1, w2, options)
    return _finish("from_topk", gradients, dout, x, None, None, ids, w1, w2, b2, saved, options, ids.shape[1])


# ---- rows sorted by expert ----


def rows_forward(
    rows: Tensor, offsets: Tensor, row_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    b2: Tensor | None, options: str, save: bool,
) -> list[Tensor]:  # fmt: skip
    out = _new_like(rows)
    if rows.shape[0] == 0:
        return [out, _saved_without_tokens("from_rows", options, rows, 1, w2)] if save else [out]
    context = context_of(rows)
    layer = _describe(context, "from_rows", options, save, rows, 1, w2, offsets.dtype)
    saved = _buffer(layer.saved, rows) if save else None
    scratch = _buffer(layer.scratch_forward, rows)
    copies: list[Tensor] = []
    given = (offsets, row_weights, w1, b1, w2, b2)
    context.forward(
        layer.address, _stream(rows), *_addresses(copies, (rows,)), 0, 0, 0, 0, 0, 0, 0, 0, *_addresses(copies, given),
        out.data_ptr(), saved.data_ptr() if save else 0, layer.saved, scratch.data_ptr(), layer.scratch_forward,
    )  # fmt: skip
    return [out, saved] if save else [out]


def _new_rows_gradients(needs: int, rows: Tensor, w1: Tensor, w2: Tensor, options: str) -> list[Tensor | None]:
    dweights = torch.empty(rows.shape[:1], dtype=torch.float32, device=rows.device) if needs & NEEDS_ROUTING else None
    return [*_expert_gradients(options, needs, rows, w1, w2), dweights, None, None]


def rows_gradients(
    dout: Tensor, rows: Tensor, w1: Tensor, w2: Tensor, b2: Tensor | None, saved: Tensor, options: str, needs: int
) -> list[Tensor | None]:
    gradients = _new_rows_gradients(needs, rows, w1, w2, options)
    return _finish("from_rows", gradients, dout, rows, None, None, None, w1, w2, b2, saved, options, 1)


# ---- the whole layer, from the router's weight or its logits ----


def _logits_dtype(options: Options) -> torch.dtype:
    return torch.bfloat16 if options.bf16_logits else torch.float32


def _moe_outputs(x: Tensor, router_weight: Tensor | None, w2: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """logits, losses, counts: new tensors for those that the call computes."""
    experts = w2.shape[0]
    logits = losses = counts = None
    if router_weight is not None:
        logits = torch.empty((x.shape[0], experts), dtype=_logits_dtype(options), device=x.device)
    if options.losses:
        losses = torch.empty(2, dtype=torch.float32, device=x.device)
    if options.counts:
        counts = torch.empty(experts, dtype=torch.int32, device=x.device)
    return logits, losses, counts


def moe_forward(
    x: Tensor, router_weight: Tensor | None, router_bias: Tensor | None, given_logits: Tensor | None,
    selection_bias: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, topk: int,
    options: str, step: int, save: bool,
) -> list[Tensor]:  # fmt: skip
    """[out], saved with `save`, logits with router_weight, losses and counts with those options."""
    parsed = parse(options)
    out = _new_like(x)
    logits, losses, counts = _moe_outputs(x, router_weight, w2, parsed)
    if x.shape[0] == 0:
        saved = _saved_without_tokens("from_logits", options, x, topk, w2) if save else None
        return _given(out, saved, logits, *(t.zero_() for t in _given(losses, counts)))
    context = context_of(x)
    layer = _describe(context, "from_logits", options, save, x, topk, w2, torch.int32)
    saved = _buffer(layer.saved, x) if save else None
    scratch = _buffer(layer.scratch_forward, x)
    copies: list[Tensor] = []
    read = (x, router_weight, router_bias, given_logits if logits is None else logits, selection_bias)
    fields = (
        *_addresses(copies, read), step, 0 if losses is None else losses.data_ptr(), 0, 0, 0, 0,
        *_addresses(copies, (w1, b1, w2, b2)), out.data_ptr(), saved.data_ptr() if save else 0, layer.saved,
        scratch.data_ptr(), layer.scratch_forward,
    )  # fmt: skip
    context.forward(layer.address, _stream(x), *fields)
    if counts is not None:
        plan = saved if save else scratch
        start = context.plan_view(layer.address, *fields).topk_counts - plan.data_ptr()
        counts.copy_(plan[start : start + 4 * counts.numel()].view(torch.int32))
    return _given(out, saved, logits, losses, counts)


def _new_moe_gradients(needs: int, x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, options: str) -> list[Tensor | None]:
    (count, hidden, _), device = w2.shape, x.device
    dtype = torch.float32 if parse(options).f32_gradients else x.dtype
    return [
        *_expert_gradients(options, needs, x, w1, w2),
        _new_like(logits) if needs & NEEDS_ROUTING else None,
        torch.empty((count, hidden), dtype=dtype, device=device) if needs & NEEDS_ROUTER_WEIGHT else None,
        torch.empty(count, dtype=dtype, device=device) if needs & NEEDS_ROUTER_BIAS else None,
    ]


def moe_gradients(
    dout: Tensor, x: Tensor, router_weight: Tensor | None, logits: Tensor, w1: Tensor, w2: Tensor, b2: Tensor | None,
    saved: Tensor, topk: int, options: str, needs: int,
) -> list[Tensor | None]:  # fmt: skip
    gradients = _new_moe_gradients(needs, x, logits, w1, w2, options)
    return _finish("from_logits", gradients, dout, x, router_weight, logits, None, w1, w2, b2, saved, options, topk)


def update_selection_bias(bias: Tensor, counts: Tensor, gamma: float) -> None:
    """bias[e] += gamma sign(mean count - counts[e]), in place."""
    context = context_of(bias)
    experts = bias.shape[0]
    options = "swiglu concatenated 1 0 sigmoid"
    key = ("bias", experts)
    layer = context.descriptions.get(key)
    if layer is None:  # every size but the number of experts is arbitrary
        dtype = TYPE_CODES[torch.bfloat16]
        layer = context.describe(
            key, parse(options).layer("from_logits", 1, 1, (experts, 64, 64), dtype, TYPE_CODES[torch.int32], False), 0
        )
    context.update_selection_bias(layer.address, counts.data_ptr(), bias.data_ptr(), gamma, _stream(bias))


# ---- fake kernels: shapes and dtypes alone, the number of tokens may be symbolic ----


def _fake_saved(entry: str, options: str, x: Tensor, topk: int, w2: Tensor) -> Tensor:
    size = parse(options).saved_bytes(entry, x.shape[0], topk, tuple(w2.shape), x.element_size())
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def _fake_out(x: Tensor) -> Tensor:
    return _new_like(x)


def _fake_experts_forward(x, ids, weights, w1, b1, w2, b2, options, save):
    return [_fake_out(x)] + ([_fake_saved("from_topk", options, x, ids.shape[1], w2)] if save else [])


def _fake_experts_backward(dout, x, ids, w1, w2, b2, saved, options, needs):
    return _given(*_new_experts_gradients(needs, x, ids, w1, w2, options))


def _fake_rows_forward(rows, offsets, row_weights, w1, b1, w2, b2, options, save):
    return [_fake_out(rows)] + ([_fake_saved("from_rows", options, rows, 1, w2)] if save else [])


def _fake_rows_backward(dout, rows, w1, w2, b2, saved, options, needs):
    return _given(*_new_rows_gradients(needs, rows, w1, w2, options))


def _fake_moe_forward(
    x, router_weight, router_bias, given_logits, selection_bias, w1, b1, w2, b2, topk, options, step, save
):
    saved = _fake_saved("from_logits", options, x, topk, w2) if save else None
    return _given(_fake_out(x), saved, *_moe_outputs(x, router_weight, w2, parse(options)))


def _fake_moe_backward(dout, x, router_weight, logits, w1, w2, b2, saved, topk, options, needs):
    return _given(*_new_moe_gradients(needs, x, logits, w1, w2, options))


# ---- registration ----

_EXPERTS = "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2"
_KEPT = "Tensor w1, Tensor w2, Tensor? b2, Tensor saved"  # what a backward reads besides its own
_OPERATORS = {
    f"experts_forward(Tensor x, Tensor ids, Tensor weights, {_EXPERTS}, str options, bool save) -> Tensor[]": (
        experts_forward, _fake_experts_forward),
    f"experts_backward(Tensor dout, Tensor x, Tensor ids, {_KEPT}, str options, int needs) -> Tensor[]": (
        lambda *arguments: _given(*experts_gradients(*arguments)), _fake_experts_backward),
    f"rows_forward(Tensor rows, Tensor offsets, Tensor? row_weights, {_EXPERTS}, str options, bool save) -> Tensor[]": (
        rows_forward, _fake_rows_forward),
    f"rows_backward(Tensor dout, Tensor rows, {_KEPT}, str options, int needs) -> Tensor[]": (
        lambda *arguments: _given(*rows_gradients(*arguments)), _fake_rows_backward),
    f"moe_forward(Tensor x, Tensor? router_weight, Tensor? router_bias, Tensor? logits, Tensor? selection_bias, {_EXPERTS}, "
    "int topk, str options, SymInt step, bool save) -> Tensor[]": (moe_forward, _fake_moe_forward),
    f"moe_backward(Tensor dout, Tensor x, Tensor? router_weight, Tensor logits, {_KEPT}, int topk, str options, int needs) "
    "-> Tensor[]": (lambda *arguments: _given(*moe_gradients(*arguments)), _fake_moe_backward),
}  # fmt: skip
_library = torch.library.Library("smoe", "DEF")
_library.define("update_selection_bias(Tensor(a!) bias, Tensor counts, float gamma) -> ()")
for _key in ("CPU", "CUDA"):
    _library.impl("update_selection_bias", update_selection_bias, _key)
torch.library.register_fake("smoe::update_selection_bias", lambda bias, counts, gamma: None, lib=_library)
for _schema, (_real, _fake) in _OPERATORS.items():
    _name = _schema.split("(")[0]
    _library.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _real, _key)
    torch.library.register_fake(f"smoe::{_name}", _fake, lib=_library)
