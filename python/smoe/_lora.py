"""LoRA on experts: products of small rank beside w1 and w2, computed with the experts' rows. No weight is built.

out[t] = sum over k of weights[t, k] expert(x[t]) with w1[e] + scaling1 b1[e] a1[e] and w2[e] + scaling2 b2[e] a2[e]. Weights
that need no gradient get none, and nothing is allocated for it. Dynamo does not trace these calls: a compiled model breaks
its graph here.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _autograd, _checks, functional, native
from ._activation import Gate
from ._context import TYPE_CODES, Context, context_of
from ._record import OPTIONS, Record, layer as layer_of, record as record_of


class LoRA(NamedTuple):
    """The factors of one adapter; a1 and b1 or a2 and b2 may be None. Any strides, any floating-point dtype: they are
    cast to the experts' dtype. PEFT's lora_A (r E, in) and lora_B (out, r E) are views of them: from_peft."""

    a1: Tensor | None = None  # (E, r, H)
    b1: Tensor | None = None  # (E, 2I, r), rows in w1's order; without a gate (E, I, r)
    a2: Tensor | None = None  # (E, r, I)
    b2: Tensor | None = None  # (E, H, r)
    scaling1: float = 1.0  # such as alpha / r, or alpha / sqrt(r) (rslora)
    scaling2: float = 1.0
    dropout: float = 0.0  # during training: the share of the inputs of a1 and of a2 that a call leaves out (_kept)

    @classmethod
    def from_peft(
        cls, experts: int, up: tuple[Tensor, Tensor, float] | None, down: tuple[Tensor, Tensor, float] | None
    ) -> "LoRA":
        """`up` and `down`: the weights of lora_A and lora_B and the scaling of the adapter beside w1 and w2, or None."""
        a1, b1, scaling1 = (*of_peft(experts, *up[:2]), up[2]) if up else (None, None, 1.0)
        a2, b2, scaling2 = (*of_peft(experts, *down[:2]), down[2]) if down else (None, None, 1.0)
        return cls(a1, b1, a2, b2, scaling1, scaling2)


def of_peft(experts: int, lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
    """Views (E, r, in) and (E, out, r) of PEFT's lora_A (r E, in) and lora_B (out, r E)."""
    a = lora_a.reshape(experts, -1, lora_a.shape[-1])
    return a, lora_b.reshape(lora_b.shape[0], -1, experts).permute(2, 0, 1)


# ---- from adapters to the library's factors ----


class _Side(NamedTuple):
    """The adapters beside one weight. There may be none."""

    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    interleaved: bool  # the rows of w1 and of an adapter's b; the library's B1 has the gate rows first

    def part(self, factor: Tensor, dim: int, i: int) -> Tensor:
        """Of a factor for all adapters, or its gradient: what belongs to adapter i. dim: that of the ranks."""
        if self.ranks[i] == factor.shape[dim]:
            return factor
        return factor.narrow(dim, sum(self.ranks[:i]), self.ranks[i])


def _by_feature(b: Tensor) -> Tensor:
    """A view (E, I, 2, r) of b (E, 2I, r), whose gate rows come first: the order of an interleaved w1's rows."""
    return b.unflatten(1, (2, -1)).transpose(1, 2)


def _pair(side: _Side, given: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """One pair of factors for the sum of all adapters, whose a and b are `given` in turn: their ranks side by side, padded
    to a multiple of 8 with zeros. The second contains the scalings. One kernel for each factor of an adapter."""
    if not given:
        return None, None
    (a, b), total = given[:2], sum(side.ranks)
    if side.scalings == (1,) and total % 8 == 0 and a.dtype == b.dtype == dtype and not side.interleaved:
        return a.contiguous(), b.contiguous()
    rank = total + -total % 8
    made_a = a.new_empty((a.shape[0], rank, a.shape[2]), dtype=dtype)
    made_b = b.new_empty((b.shape[0], b.shape[1], rank), dtype=dtype)
    if rank > total:
        made_a[:, total:], made_b[:, :, total:] = 0, 0
    for i, scaling in enumerate(side.scalings):
        b, part = given[2 * i + 1], side.part(made_b, 2, i)
        if side.interleaved:
            b, part = b.unflatten(1, (-1, 2)), _by_feature(part)
        side.part(made_a, 1, i).copy_(given[2 * i])
        torch.mul(b, scaling, out=part)
    return made_a, made_b


class _Cast(torch.autograd.Function):
    """The library's factors A1, B1, A2, B2 from those of the adapters."""

    @staticmethod
    def forward(ctx, dtype, sides, *given):
        """sides: beside w1 and beside w2; given: a and b of each adapter in this order."""
        ctx.set_materialize_grads(False)
        ctx.sides, ctx.given = sides, [(factor.dtype, factor.stride()) for factor in given]
        needs, first = ctx.needs_input_grad[2:], 2 * len(sides[0].ranks)
        made = *_pair(sides[0], given[:first], dtype), *_pair(sides[1], given[first:], dtype)
        needed = [needs[0:first:2], needs[1:first:2], needs[first::2], needs[first + 1 :: 2]]
        ctx.mark_non_differentiable(*[one for one, any_of in zip(made, needed) if one is not None and not any(any_of)])
        return made

    @staticmethod
    def backward(ctx, *gradients):
        found, given = [], iter(ctx.given)
        for side, da, db in zip(ctx.sides, gradients[::2], gradients[1::2]):
            for i, scaling in enumerate(side.scalings):
                (of_a, _), of_b = next(given), next(given)
                a, b = ctx.needs_input_grad[len(found) + 2 : len(found) + 4]
                found.append(side.part(da, 1, i).to(of_a) if a and da is not None else None)
                b = b and db is not None
                found.append(_gradient_b(side.part(db, 2, i), side.interleaved, scaling, *of_b) if b else None)
        return None, None, *found


def _gradient_b(part: Tensor, interleaved: bool, scaling: float, dtype: torch.dtype, strides: tuple[int, ...]) -> Tensor:
    """The library's gradient (E, out, r) with the rows of an adapter's b, and in the order of b's memory, so that PyTorch
    copies it no more where b is a view of a parameter."""
    order = sorted(range(3), key=strides.__getitem__, reverse=True)
    made = torch.empty([part.shape[i] for i in order], dtype=dtype, device=part.device)
    made = made.permute([order.index(i) for i in range(3)])
    (made.unflatten(1, (-1, 2)) if interleaved else made).copy_(_by_feature(part) if interleaved else part)
    return made if scaling == 1 else made.mul_(scaling)


def _kept(a: Tensor, dropout: float) -> Tensor:
    """a (E, r, in) with zeros for the inputs that are left out: of each expert others, the same for all of its rows. They are
    drawn from PyTorch's generator for the device. So the mask has E in values, and the kernels read nothing more."""
    return a.masked_fill(torch.rand(a.shape[0], 1, a.shape[2], device=a.device) < dropout, 0) if dropout else a


def _check_pair(function: str, names: tuple[str, str], a: Any, b: Any, experts: int, sizes: tuple[int, int], like: Tensor) -> None:
    """sizes: rows and columns of the weight."""
    for name, value in zip(names, (a, b)):
        _checks.tensor(function, name, value)
        _checks.device(function, name, value, like)
        if not value.is_floating_point():
            raise TypeError(f"{function}: {name} has dtype {value.dtype}; expected a floating-point dtype")
        _checks.dimensions(function, name, value, "three dimensions", 3)
    rank = a.shape[1]
    _checks.shape(function, names[0], a, (experts, rank, sizes[1]), "(E, r, the weight's columns)")
    _checks.shape(function, names[1], b, (experts, sizes[0], rank), "(E, the weight's rows, r)")


def factors(
    function: str, lora: LoRA | Sequence[LoRA], x: Tensor, w1: Tensor, w2: Tensor, layout: str
) -> tuple[Tensor | None, ...]:
    """The library's A1, B1, A2, B2 for an adapter or several."""
    adapters = [lora] if isinstance(lora, LoRA) else list(lora)
    first, second = [], []
    for adapter in adapters:
        if not isinstance(adapter, LoRA):
            raise TypeError(f"{function}: lora is a {type(adapter).__name__}; expected an smoe.LoRA or a sequence of them")
        dropout = adapter.dropout
        if isinstance(dropout, (bool, Tensor)) or not 0 <= dropout < 1:
            raise ValueError(f"{function}: lora.dropout is {dropout!r}; expected a number from 0 up to 1, without 1")
        for pairs, names, a, b, scaling, weight in (
            (first, ("lora.a1", "lora.b1"), adapter.a1, adapter.b1, adapter.scaling1, w1),
            (second, ("lora.a2", "lora.b2"), adapter.a2, adapter.b2, adapter.scaling2, w2),
        ):
            if (a is None) != (b is None):
                raise ValueError(f"{function}: {names[0]} is given without {names[1]}, or the other way round")
            if a is not None:
                if isinstance(scaling, Tensor):
                    raise TypeError(f"{function}: the scaling of {names[0]} is a Tensor; expected a number")
                _check_pair(function, names, a, b, w2.shape[0], tuple(weight.shape[1:]), x)
                pairs.append((_kept(a, dropout), b, scaling / (1 - dropout)))
    sides = []
    for name, pairs, interleaved in (("lora.a1", first, layout == "interleaved"), ("lora.a2", second, False)):
        sides.append(_Side(tuple([a.shape[1] for a, _, _ in pairs]), tuple([one[2] for one in pairs]), interleaved))
        total = sum(sides[-1].ranks)
        if total + -total % 8 > _checks.MAX_LORA_RANK:
            raise ValueError(f"{function}: the ranks of {name} sum to {total}; expected {_checks.MAX_LORA_RANK} at most")
    return _Cast.apply(x.dtype, sides, *[factor for a, b, _ in first + second for factor in (a, b)])


# ---- calls of the library ----


class _Spec(NamedTuple):
    """What a call needs besides its tensors."""

    record: Record
    step: int = 0
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    losses: bool = False
    counts: bool = False


_remembered = functools.lru_cache(maxsize=1024, typed=True)(record_of)


def _record(function: str, x: Tensor, w2: Tensor, a1: Tensor | None, a2: Tensor | None, **fields: Any) -> Record:
    """The layer's record. It takes 50 us to make, and the GPU waits for it."""
    experts, hidden, intermediate = w2.shape
    code = TYPE_CODES[x.dtype]
    fields |= dict(hidden=hidden, intermediate=intermediate, experts=experts, dtype=code, gradient_type=code)
    fields |= dict(lora_rank1=0 if a1 is None else a1.shape[1], lora_rank2=0 if a2 is None else a2.shape[1])
    try:
        return _remembered(function, **fields)
    except TypeError:  # a wrong value, which may have no hash
        return record_of(function, **fields)


@functools.lru_cache(maxsize=1024)
def _described(context: Context, tokens: int, record: Record, inference: bool, reuse: bool) -> tuple[native.Layer, native.Sizes]:
    layer = layer_of(tokens, record, inference=inference, reuse_saved=reuse)
    return layer, context.query(layer)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _run_forward(spec: _Spec, given: dict[str, Tensor | None], save: bool) -> tuple[Tensor | None, ...]:
    """out, saved (None without `save`), losses, counts"""
    given = {name: _aligned(tensor) for name, tensor in given.items()}
    x, experts = given["x"], given["w2"].shape[0]
    out = torch.empty_like(x)
    losses = torch.zeros(2, dtype=torch.float32, device=x.device) if spec.losses else None
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device) if spec.counts else None
    if x.shape[0] == 0:
        return out, x.new_empty(0, dtype=torch.uint8) if save else None, losses, counts
    context = context_of(x)
    layer, sizes = _described(context, x.shape[0], spec.record, not save, False)
    saved = context.new_bytes(sizes.saved_buffer_bytes) if save else None
    scratch = context.new_bytes(sizes.scratch_forward_bytes)
    args = native.ForwardArgs(
        **{name: _at(tensor) for name, tensor in given.items()}, step=spec.step, losses=_at(losses), out=_at(out),
        saved=_at(saved), saved_size=sizes.saved_buffer_bytes if save else 0, scratch=_at(scratch),
        scratch_size=sizes.scratch_forward_bytes,
    )  # fmt: skip
    context.forward(ctypes.addressof(layer), ctypes.addressof(args))
    if counts is not None:
        plan = saved if save else scratch
        start = context.plan_view(ctypes.addressof(layer), ctypes.addressof(args)).topk_counts - plan.data_ptr()
        counts.copy_(plan[start : start + 4 * experts].view(torch.int32))
    return out, saved, losses, counts


_GRADIENT_OF = dict(  # the backward's results, by the names of the forward's inputs
    x="dx", w1="dw1", b1="db1", w2="dw2", b2="db2", topk_weights="dtopk_weights", logits="dlogits", lora_a1="dlora_a1",
    lora_b1="dlora_b1", lora_a2="dlora_a2", lora_b2="dlora_b2",
)  # fmt: skip
_READ = "x logits topk_ids w1 w2 b2 token_mask lora_a1 lora_b1 lora_a2 lora_b2".split()


def _run_backward(
    spec: _Spec, given: dict[str, Tensor | None], wanted: list[str], dout: Tensor, dlosses: Tensor | None, saved: Tensor,
    reuse: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients of the inputs whose names are in `wanted`."""
    given = {name: _aligned(tensor) for name, tensor in given.items()}
    x = given["x"]
    gradients = {name: torch.empty_like(given[name]) for name in wanted}
    if x.shape[0] == 0:
        return {name: gradient.zero_() for name, gradient in gradients.items()}
    context = context_of(x)
    layer, sizes = _described(context, x.shape[0], spec.record, False, reuse)
    scratch = context.new_bytes(sizes.scratch_backward_bytes)
    dout, dlosses = _aligned(dout), _aligned(dlosses)
    args = native.BackwardArgs(
        **{name: _at(given[name]) for name in _READ}, dout=_at(dout), saved=_at(saved), saved_size=saved.numel(),
        scratch=_at(scratch), scratch_size=sizes.scratch_backward_bytes, balance_coefficient=spec.balance_coefficient,
        z_coefficient=spec.z_coefficient, loss_gradients=_at(dlosses),
        **{_GRADIENT_OF[name]: _at(gradient) for name, gradient in gradients.items()},
    )  # fmt: skip
    context.backward(ctypes.addressof(layer), ctypes.addressof(args))
    return gradients


_NAMES = "x topk_ids topk_weights logits selection_bias token_mask w1 b1 w2 b2 lora_a1 lora_b1 lora_a2 lora_b2".split()


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, *tensors):
        out, saved, losses, counts = _run_forward(spec, dict(zip(_NAMES, tensors)), True)
        ctx.save_for_backward(*tensors, saved)
        ctx.spec, ctx.readers, ctx.overwritten = spec, 0, False
        ctx.mark_non_differentiable(*[t for t in (counts,) if t is not None])
        ctx.set_materialize_grads(False)
        return out, losses, counts

    @staticmethod
    def backward(ctx, dout, dlosses, _):
        if torch.is_grad_enabled():  # with create_graph
            return _autograd._once(_Experts, ctx, dout, dlosses, _)
        none = (None,) * (len(_NAMES) + 1)
        if dout is None and dlosses is None:
            return none
        *tensors, saved = ctx.saved_tensors
        given = dict(zip(_NAMES, tensors))
        wanted = [name for name, needs in zip(_NAMES, ctx.needs_input_grad[1:]) if needs]
        dout = torch.zeros_like(given["x"]) if dout is None else dout
        reuse = _autograd._claim(ctx, dout)
        try:
            found = _run_backward(ctx.spec, given, wanted, dout, dlosses, saved, reuse)
        finally:
            with _autograd._claims:
                ctx.readers -= 1
        return None, *[found.get(name) for name in _NAMES]


def _call(spec: _Spec, given: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    """out, losses, counts"""
    tensors = [given.get(name) for name in _NAMES]
    if torch.is_grad_enabled() and functional._any_requires_grad(*tensors):
        return _Experts.apply(spec, *tensors)
    out, _, losses, counts = _run_forward(spec, dict(zip(_NAMES, tensors)), False)
    return out, losses, counts


@torch.compiler.disable
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    lora: LoRA | Sequence[LoRA], activation: str | Gate, layout: str, chunks: int,
) -> Tensor:  # fmt: skip
    """smoe.experts with LoRA. What is not checked: lora, layout, and what the library checks."""
    _checks.choice("smoe.experts", "layout", layout, native.LAYOUTS)
    a1, lb1, a2, lb2 = factors("smoe.experts", lora, x, w1, w2, layout)
    record = _record(
        "smoe.experts", x, w2, a1, a2, activation=activation, layout=layout, chunks=chunks, entry="from_topk",
        topk=ids.shape[1], index_type=TYPE_CODES[ids.dtype],
    )  # fmt: skip
    given = dict(
        x=x, topk_ids=ids, topk_weights=weights.float(), w1=w1, b1=b1, w2=w2, b2=b2, lora_a1=a1, lora_b1=lb1, lora_a2=a2,
        lora_b2=lb2,
    )  # fmt: skip
    return _call(_Spec(record), given)[0]


@torch.compiler.disable
def moe(
    x: Tensor, logits: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, lora: LoRA | Sequence[LoRA], *,
    selection_bias: Tensor | None, token_mask: Tensor | None = None, step: int = 0, losses: bool = False,
    counts: bool = False, activation: str | Gate = "swiglu", layout: str = "concatenated", balance_coefficient: float = 0.0,
    z_coefficient: float = 0.0, **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """smoe.moe with given logits and LoRA: out, losses, counts. For smoe.MoE, which has checked the options."""
    x, w1, b1, w2, b2 = functional._autocast(x, w1, b1, w2, b2)
    a1, lb1, a2, lb2 = factors("smoe.MoE", lora, x, w1, w2, layout)
    record = _record(
        "smoe.MoE", x, w2, a1, a2, activation=activation, layout=layout, logits_type=TYPE_CODES[logits.dtype],
        **{name: value for name, value in options.items() if name in OPTIONS},
    )  # fmt: skip
    given = dict(
        x=x, logits=logits, selection_bias=None if selection_bias is None else selection_bias.detach().float(),
        token_mask=token_mask, w1=w1, b1=b1, w2=w2, b2=b2, lora_a1=a1, lora_b1=lb1, lora_a2=a2, lora_b2=lb2,
    )  # fmt: skip
    return _call(_Spec(record, step, balance_coefficient, z_coefficient, losses, counts), given)
