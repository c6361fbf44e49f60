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

    @property
    def rank(self) -> int:
        """The library's, a multiple of 8."""
        return (sum(self.ranks) + 7) // 8 * 8

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
    (a, b), total, rank = given[:2], sum(side.ranks), side.rank
    if side.scalings == (1,) and total == rank and a.dtype == b.dtype == dtype and not side.interleaved:
        return a.contiguous(), b.contiguous()
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


def _by_adapter(sides: Sequence[_Side], given: Sequence[Any]) -> list[list[Any]]:
    """Of a1, b1, a2, b2: what is given for each adapter."""
    first = 2 * len(sides[0].ranks)
    return [list(part[i::2]) for part in (given[:first], given[first:]) for i in (0, 1)]


def _gradients(
    sides: Sequence[_Side], given: Sequence[tuple[torch.dtype, tuple[int, ...]]], needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Of the adapters' a and b, whose dtypes and strides are given, from those of A1, B1, A2, B2."""
    found, given = [], iter(given)
    for side, da, db in zip(sides, gradients[::2], gradients[1::2]):
        for i, scaling in enumerate(side.scalings):
            (of_a, _), of_b = next(given), next(given)
            a, b = needs[len(found) : len(found) + 2]
            found.append(side.part(da, 1, i).to(of_a) if a else None)
            found.append(_gradient_b(side.part(db, 2, i), side.interleaved, scaling, *of_b) if b else None)
    return found


def _gradient_b(part: Tensor, interleaved: bool, scaling: float, dtype: torch.dtype, strides: tuple[int, ...]) -> Tensor:
    """The library's gradient (E, out, r) with the rows of an adapter's b, and in the order of b's memory, so that PyTorch
    copies it no more where b is a view of a parameter."""
    order = sorted(range(3), key=strides.__getitem__, reverse=True)
    made = torch.empty([part.shape[i] for i in order], dtype=dtype, device=part.device)
    made = made.permute([order.index(i) for i in range(3)])
    part = part.to(torch.promote_types(part.dtype, dtype))  # the product's type
    torch.mul(_by_feature(part) if interleaved else part, scaling, out=made.unflatten(1, (-1, 2)) if interleaved else made)
    return made


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
) -> tuple[tuple[_Side, _Side], list[Tensor]]:
    """What stands beside w1 and w2, and a and b of each adapter in this order."""
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
        if sides[-1].rank > _checks.MAX_LORA_RANK:
            raise ValueError(f"{function}: the ranks of {name} sum to {sum(sides[-1].ranks)}; expected {_checks.MAX_LORA_RANK} at most")
    return tuple(sides), [factor for a, b, _ in first + second for factor in (a, b)]


# ---- calls of the library ----


class _Spec(NamedTuple):
    """What a call needs besides its tensors."""

    record: Record
    sides: tuple[_Side, _Side]
    gradients: torch.dtype  # of the library's factors
    step: int = 0
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    losses: bool = False
    counts: bool = False


_remembered = functools.lru_cache(maxsize=1024, typed=True)(record_of)


def _gradients_type(x: Tensor, weights: Sequence[Tensor | None], adapters: Sequence[Tensor]) -> torch.dtype:
    """float32 where an adapter has it: the sums need no rounding, and no cast follows. The library has one type for these
    gradients and those of the weights, which have x's."""
    fixed = not any(weight is not None and weight.requires_grad for weight in weights)
    return torch.float32 if fixed and any(factor.dtype == torch.float32 for factor in adapters) else x.dtype


def _record(function: str, x: Tensor, w2: Tensor, sides: tuple[_Side, _Side], gradients: torch.dtype, **fields: Any) -> Record:
    """The layer's record. It takes 50 us to make, and the GPU waits for it."""
    experts, hidden, intermediate = w2.shape
    fields |= dict(hidden=hidden, intermediate=intermediate, experts=experts, dtype=TYPE_CODES[x.dtype])
    fields |= dict(gradient_type=TYPE_CODES[gradients], lora_rank1=sides[0].rank, lora_rank2=sides[1].rank)
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
    gradients = {name: torch.empty_like(given[name], dtype=spec.gradients if name in _LORA else None) for name in wanted}
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


_NAMES = "x topk_ids topk_weights logits selection_bias token_mask w1 b1 w2 b2".split()
_LORA = "lora_a1 lora_b1 lora_a2 lora_b2".split()


def _with_factors(spec: _Spec, given: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """The library's inputs. given: those of _NAMES, then a and b of each adapter."""
    tensors, adapters = given[: len(_NAMES)], given[len(_NAMES) :]
    first, dtype = 2 * len(spec.sides[0].ranks), given[0].dtype
    made = *_pair(spec.sides[0], adapters[:first], dtype), *_pair(spec.sides[1], adapters[first:], dtype)
    return dict(zip(_NAMES + _LORA, (*tensors, *made)))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, *given):
        inputs = _with_factors(spec, given)
        ctx.given = [(factor.dtype, factor.stride()) for factor in given[len(_NAMES) :]]
        out, saved, losses, counts = _run_forward(spec, inputs, True)
        ctx.save_for_backward(*inputs.values(), saved)
        ctx.spec, ctx.readers, ctx.overwritten = spec, 0, False
        ctx.mark_non_differentiable(*[t for t in (counts,) if t is not None])
        ctx.set_materialize_grads(False)
        return out, losses, counts

    @staticmethod
    def backward(ctx, dout, dlosses, _):
        if torch.is_grad_enabled():  # with create_graph
            return _autograd._once(_Experts, ctx, dout, dlosses, _)
        if dout is None and dlosses is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, saved = ctx.saved_tensors
        given, needs = dict(zip(_NAMES + _LORA, tensors)), ctx.needs_input_grad[1:]
        needs, of_adapters = needs[: len(_NAMES)], needs[len(_NAMES) :]
        needs_lora = map(any, _by_adapter(ctx.spec.sides, of_adapters))
        wanted = [name for name, is_wanted in zip(_NAMES + _LORA, (*needs, *needs_lora)) if is_wanted]
        dout = torch.zeros_like(given["x"]) if dout is None else dout
        reuse = _autograd._claim(ctx, dout)
        try:
            found = _run_backward(ctx.spec, given, wanted, dout, dlosses, saved, reuse)
        finally:
            with _autograd._claims:
                ctx.readers -= 1
        gradients = _gradients(ctx.spec.sides, ctx.given, of_adapters, [found.get(name) for name in _LORA])
        return None, *[found.get(name) for name in _NAMES], *gradients


def _call(spec: _Spec, given: dict[str, Tensor | None], adapters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """out, losses, counts"""
    tensors = [given.get(name) for name in _NAMES] + adapters
    if torch.is_grad_enabled() and functional._any_requires_grad(*tensors):
        return _Experts.apply(spec, *tensors)
    out, _, losses, counts = _run_forward(spec, _with_factors(spec, tensors), False)
    return out, losses, counts


@torch.compiler.disable
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    lora: LoRA | Sequence[LoRA], activation: str | Gate, layout: str, chunks: int,
) -> Tensor:  # fmt: skip
    """smoe.experts with LoRA. What is not checked: lora, layout, and what the library checks."""
    _checks.choice("smoe.experts", "layout", layout, native.LAYOUTS)
    sides, adapters = factors("smoe.experts", lora, x, w1, w2, layout)
    gradients = _gradients_type(x, (w1, b1, w2, b2), adapters)
    record = _record(
        "smoe.experts", x, w2, sides, gradients, activation=activation, layout=layout, chunks=chunks, entry="from_topk",
        topk=ids.shape[1], index_type=TYPE_CODES[ids.dtype],
    )  # fmt: skip
    given = dict(x=x, topk_ids=ids, topk_weights=weights.float(), w1=w1, b1=b1, w2=w2, b2=b2)
    return _call(_Spec(record, sides, gradients), given, adapters)[0]


@torch.compiler.disable
def moe(
    x: Tensor, logits: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, lora: LoRA | Sequence[LoRA], *,
    selection_bias: Tensor | None, token_mask: Tensor | None = None, step: int = 0, losses: bool = False,
    counts: bool = False, activation: str | Gate = "swiglu", layout: str = "concatenated", balance_coefficient: float = 0.0,
    z_coefficient: float = 0.0, **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """smoe.moe with given logits and LoRA: out, losses, counts. For smoe.MoE, which has checked the options."""
    x, w1, b1, w2, b2 = functional._autocast(x, w1, b1, w2, b2)
    sides, adapters = factors("smoe.MoE", lora, x, w1, w2, layout)
    gradients = _gradients_type(x, (w1, b1, w2, b2), adapters)
    record = _record(
        "smoe.MoE", x, w2, sides, gradients, activation=activation, layout=layout, logits_type=TYPE_CODES[logits.dtype],
        **{name: value for name, value in options.items() if name in OPTIONS},
    )  # fmt: skip
    given = dict(
        x=x, logits=logits, selection_bias=None if selection_bias is None else selection_bias.detach().float(),
        token_mask=token_mask, w1=w1, b1=b1, w2=w2, b2=b2,
    )  # fmt: skip
    return _call(_Spec(record, sides, gradients, step, balance_coefficient, z_coefficient, losses, counts), given, adapters)
