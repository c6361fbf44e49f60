"""The PyTorch operators of expert parallelism, and their autograd Functions. A group is an integer in them."""

import ctypes

import torch
from torch import Tensor

from . import _autograd, _ops, native
from ._ep_group import groups
from ._record import Record, layer as layer_of

_call = torch.ops.smoe


def _address(tensor: Tensor | None, absent: int = 0) -> int:
    """`absent` for an empty tensor, which has no address."""
    return 0 if tensor is None else tensor.data_ptr() or absent


def _bytes(size: int, like: Tensor) -> Tensor:
    return like.new_empty(size, dtype=torch.uint8)


class _Call:
    """One call of the library: the group, and the layer for these tensors."""

    def __init__(self, group: int, record: Record, x: Tensor, save: bool):
        self.owner = groups[group]
        self.layer = layer_of(x.shape[0], record, inference=not save)
        self.sizes = self.owner.sizes(record, save)

    def __call__(self, function, arguments: ctypes.Structure) -> None:
        owner, arguments.ep = self.owner, self.owner.ep
        owner.call(function, owner.context, ctypes.byref(self.layer), ctypes.byref(arguments), owner.stream())


def _run_forward(call: _Call, x: Tensor, save: bool, given: dict[str, Tensor | None], **numbers):
    """out, saved or None, scratch. `given` are tensors by the names of smoe_forward_args."""
    made = dict(out=torch.empty_like(x), scratch=_bytes(call.sizes.scratch_forward_bytes, x))
    made["saved"] = _bytes(call.sizes.saved_buffer_bytes, x) if save else None
    fields = {name: _address(tensor) for name, tensor in (given | made).items()}
    arguments = native.ForwardArgs(
        **fields, **numbers, saved_size=call.sizes.saved_buffer_bytes, scratch_size=call.sizes.scratch_forward_bytes
    )
    call(native.library.smoe_layer_forward, arguments)
    return made["out"], made["saved"], made["scratch"], arguments


def _run_backward(call: _Call, saved: Tensor, given: dict[str, Tensor | None], wanted: dict[str, Tensor | None], **numbers) -> None:
    scratch = _bytes(call.sizes.scratch_backward_bytes, saved)
    there = _address(saved)  # a gradient is wanted also where this rank has no tokens, and so no memory for it
    fields = {name: _address(tensor) for name, tensor in given.items()}
    fields |= {name: _address(tensor, there) for name, tensor in wanted.items()}
    call(native.library.smoe_layer_backward, native.BackwardArgs(
        **fields, **numbers, saved=there, saved_size=saved.numel(), scratch=_address(scratch),
        scratch_size=call.sizes.scratch_backward_bytes,
    ))  # fmt: skip


def _readable(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    return {name: _ops._readable(tensor) for name, tensor in tensors.items()}


# ---- given ids and weights ----


def _experts_forward(x, ids, weights, w1, b1, w2, b2, group, save, *record):
    given = _readable(x=x, topk_ids=ids, topk_weights=weights, w1=w1, b1=b1, w2=w2, b2=b2)
    call = _Call(group, record, x, save)
    out, saved, *_ = _run_forward(call, given["x"], save, given)
    return _ops._given(out, saved)


def _experts_backward(dout, x, ids, w1, w2, b2, saved, group, needs, *record):
    given = _readable(dout=dout, x=x, topk_ids=ids, w1=w1, w2=w2, b2=b2)
    saved = _ops._readable(saved, _ops._BUFFER_ALIGN)
    call = _Call(group, record, x, True)
    dtype, *_ = _ops._results_of(record)
    made = _ops._gradients(_ops._wanted(needs), dtype, given["x"], given["w1"], given["w2"], given["topk_ids"], None)
    _run_backward(call, saved, given, dict(zip("dx dw1 db1 dw2 db2 dtopk_weights".split(), made)))
    return _ops._given(*made)


def _fake_saved(group: int, record: Record, x: Tensor) -> Tensor:
    return torch.empty(groups[group].sizes(record, True).saved_buffer_bytes, dtype=torch.uint8, device=x.device)


def _fake_experts_forward(x, ids, weights, w1, b1, w2, b2, group, save, *record):
    return _ops._given(_ops._fake_out(x), _fake_saved(group, record, x) if save else None)


def _fake_experts_backward(dout, x, ids, w1, w2, b2, saved, group, needs, *record):
    return _ops._fake_gradients(needs, record, x, w1, w2, ids)


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, w1, b1, w2, b2, group, *record):
        out, saved = _call.ep_experts_forward.default(x, ids, weights, w1, b1, w2, b2, group, True, *record)
        ctx.save_for_backward(x, ids, w1, w2, b2, saved)
        ctx.group, ctx.record = group, record
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        x, _, weights, w1, b1, w2, b2, *others = ctx.needs_input_grad
        wanted = (x, w1, b1, w2, b2, weights, False, False)
        given = dout, *ctx.saved_tensors, ctx.group
        found = _autograd.dispatched(_call.ep_experts_backward.default, wanted, given, ctx.record)
        dx, dw1, db1, dw2, db2, dweights, _, _ = found
        return (dx, None, dweights, dw1, db1, dw2, db2) + (None,) * len(others)


# ---- the whole layer ----


def _moe_forward(
    x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2, step, group, losses, counts, save,
    *record,
):  # fmt: skip
    given = _readable(
        x=x, router_weight=router_weight, router_bias=router_bias, logits=logits, selection_bias=selection_bias,
        token_mask=token_mask, w1=w1, b1=b1, w2=w2, b2=b2,
    )  # fmt: skip
    call = _Call(group, record, x, save)
    made, losses, counts = _ops.moe_outputs(x, router_weight, losses, counts, record)
    if made is not None:
        given["logits"] = made
    out, saved, scratch, arguments = _run_forward(call, given["x"], save, given | dict(losses=losses), step=step)
    if counts is not None:
        _copy_counts(call, arguments, saved if save else scratch, counts)
    return _ops._given(out, saved, made, losses, counts)


def _copy_counts(call: _Call, arguments: native.ForwardArgs, plan: Tensor, counts: Tensor) -> None:
    """From the plan of this rank's tokens."""
    view = native.PlanView()
    owner = call.owner
    owner.call(
        native.library.smoe_view_plan, owner.context, ctypes.byref(call.layer), ctypes.byref(arguments), ctypes.byref(view)
    )
    start = view.topk_counts - plan.data_ptr()
    counts.copy_(plan[start : start + 4 * counts.numel()].view(torch.int32))


def _moe_backward(
    dout, x, router_weight, logits, dlosses, token_mask, w1, w2, b2, saved, group, balance, z, needs, *record
):
    given = _readable(
        dout=dout, x=x, router_weight=router_weight, logits=logits, loss_gradients=dlosses, token_mask=token_mask, w1=w1, w2=w2,
        b2=b2,
    )  # fmt: skip
    saved, call = _ops._readable(saved, _ops._BUFFER_ALIGN), _Call(group, record, x, True)
    dtype, *routed = _ops._results_of(record)
    made = _ops._gradients(_ops._wanted(needs), dtype, given["x"], given["w1"], given["w2"], None, *routed)
    coefficients = dict(balance_coefficient=balance, z_coefficient=z)
    names = "dx dw1 db1 dw2 db2 dlogits drouter_weight drouter_bias".split()
    _run_backward(call, saved, given, dict(zip(names, made)), **coefficients)
    return _ops._given(*made)


def _fake_moe_forward(
    x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2, step, group, losses, counts, save,
    *record,
):  # fmt: skip
    saved = _fake_saved(group, record, x) if save else None
    return _ops._given(_ops._fake_out(x), saved, *_ops.moe_outputs(x, router_weight, losses, counts, record))


def _fake_moe_backward(
    dout, x, router_weight, logits, dlosses, token_mask, w1, w2, b2, saved, group, balance, z, needs, *record
):
    return _ops._fake_gradients(needs, record, x, w1, w2)


class Moe(torch.autograd.Function):
    """Returns those of out, logits, losses and counts that are there."""

    @staticmethod
    def forward(
        ctx, x, router_weight, router_bias, given_logits, selection_bias, token_mask, w1, b1, w2, b2, step, group, balance, z,
        wants_losses, wants_counts, *record,
    ):  # fmt: skip
        tensors = x, router_weight, router_bias, given_logits, selection_bias, token_mask, w1, b1, w2, b2
        out, saved, *more = _call.ep_moe_forward.default(*tensors, step, group, wants_losses, wants_counts, True, *record)
        made = more[0] if router_weight is not None else None
        kept = given_logits if made is None else made
        read = wants_losses or balance or z or _autograd.reads_logits(record)
        ctx.save_for_backward(x, router_weight, kept if read else None, token_mask, w1, w2, b2, saved)
        ctx.group, ctx.record, ctx.balance, ctx.z = group, record, balance, z
        ctx.losses_at = (2 if made is not None else 1) if wants_losses else 0
        ctx.mark_non_differentiable(*[t for i, t in enumerate(more, 1) if i != ctx.losses_at])
        return (out, *more)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *others):
        x, router, router_bias, logits, _, _, w1, b1, w2, b2, *rest = ctx.needs_input_grad
        wanted = (x, w1, b1, w2, b2, logits, router, router_bias)
        dlosses = others[ctx.losses_at - 1] if ctx.losses_at else None
        x, router_weight, logits, token_mask, w1, w2, b2, saved = ctx.saved_tensors
        kept = x, router_weight, logits, dlosses, token_mask, w1, w2, b2, saved
        given = dout, *kept, ctx.group, ctx.balance, ctx.z
        found = _autograd.dispatched(_call.ep_moe_backward.default, wanted, given, ctx.record)
        dx, dw1, db1, dw2, db2, dlogits, drouter, dbias = found
        return (dx, drouter, dbias, dlogits, None, None, dw1, db1, dw2, db2) + (None,) * len(rest)


# ---- registration ----

_EXPERTS, _KEPT = "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2", "Tensor w1, Tensor w2, Tensor? b2, Tensor saved"
_ops.define(
    f"ep_experts_forward(Tensor x, Tensor ids, Tensor weights, {_EXPERTS}, int group, bool save",
    _experts_forward, _fake_experts_forward,
)  # fmt: skip
_ops.define(
    f"ep_experts_backward(Tensor dout, Tensor x, Tensor ids, {_KEPT}, int group, int needs",
    _experts_backward, _fake_experts_backward,
)  # fmt: skip
_ops.define(
    "ep_moe_forward(Tensor x, Tensor? router_weight, Tensor? router_bias, Tensor? logits, Tensor? selection_bias, "
    f"Tensor? token_mask, {_EXPERTS}, SymInt step, int group, bool losses, bool counts, bool save",
    _moe_forward, _fake_moe_forward,
)  # fmt: skip
_ops.define(
    f"ep_moe_backward(Tensor dout, Tensor x, Tensor? router_weight, Tensor? logits, Tensor? dlosses, Tensor? token_mask, {_KEPT}, "
    "int group, float balance_coefficient, float z_coefficient, int needs",
    _moe_backward, _fake_moe_backward,
)  # fmt: skip

try:  # torch.compile keeps all calls, in their order, because the ranks meet in them
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
except ImportError:  # a torch that orders them by their data alone
    pass
else:
    for _name in ("experts_forward", "experts_backward", "moe_forward", "moe_backward"):
        _register_effectful_op(getattr(_call, f"ep_{_name}").default, _EffectType.ORDERED)
