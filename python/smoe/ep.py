"""Expert parallelism: the experts of a layer spread over the processes of a torch.distributed group.

    group = smoe.ep.Group(mesh["ep"], max_tokens=T, hidden=H, num_experts=E, top_k=K)
    out = smoe.ep.experts(x, ids, weights, w1, w2, group=group)  # w1 (E/W, 2I, H), w2 (E/W, H, I): this rank's experts
    layer = smoe.MoE(H, I, E, K, ep=group)

include/smoe_ep.h has the rules. All ranks make the same calls in the same order, also in the backward, with the same options, and
want the same gradients. Their numbers of tokens may differ, and may be 0. The gradient of an expert is the sum over the tokens of all
ranks of the group: to average over the ranks, divide by their number.
"""

import torch
from torch import Tensor

from . import _checks, _ep_ops, functional
from ._activation import Gate
from ._autograd import unpack
from ._context import TYPE_CODES
from ._ep_group import Group, PeerError, check
from ._ep_training import clip_grad_norm_, data_parallel, fully_shard
from ._record import HUGGING_FACE

__all__ = ["Group", "PeerError", "check", "clip_grad_norm_", "data_parallel", "experts", "fully_shard", "moe"]


def _check_device(function: str, x: Tensor, group: Group) -> None:
    if x.device != group.device:
        raise ValueError(f"{function}: x is on {x.device}; expected {group.device}, where the group is")


def _differentiable(given: tuple) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, *, group: Group, b1: Tensor | None = None,
    b2: Tensor | None = None, activation: str | Gate = "swiglu", layout: str = "concatenated", copy_weights: bool = False,
) -> Tensor:  # fmt: skip
    """smoe.experts with global ids, where w1, w2, b1 and b2 have this rank's experts: those from rank * E/W on."""
    function = "smoe.ep.experts"
    x, w1, b1, w2, b2 = functional._autocast(x, w1, b1, w2, b2)
    _checks.experts(function, "x", x, w1, b1, w2, b2, activation, None, copy_weights)
    _check_device(function, x, group)
    _checks.ids(function, ids, x)
    _checks.weights(function, "weights", weights, x, tuple(ids.shape), "(T, K), the shape of ids,")
    record = functional.layer_record(
        function, x, w2, None, w2.shape[0] * group.size, activation=activation, layout=layout, entry="from_topk",
        topk=ids.shape[1], index_type=TYPE_CODES[ids.dtype], **group.fields,
    )  # fmt: skip
    given = (x, ids, weights.float(), w1, b1, w2, b2)
    if _differentiable(given):
        return _ep_ops.Experts.apply(*given, group.handle, *record)
    return torch.ops.smoe.ep_experts_forward.default(*given, group.handle, False, *record)[0]


def moe(
    x: Tensor, router_weight: Tensor | None, w1: Tensor, w2: Tensor, *, group: Group, logits: Tensor | None = None,
    router_bias: Tensor | None = None, selection_bias: Tensor | None = None, token_mask: Tensor | None = None,
    b1: Tensor | None = None, b2: Tensor | None = None, step: int = 0, **options,
) -> functional.MoEOutput:  # fmt: skip
    """smoe.moe, where the router has all E experts, and w1, w2, b1 and b2 this rank's. Rounding, losses and counts are those
    of this rank's tokens. `options` are the others of smoe.moe."""
    function = "smoe.ep.moe"
    x, router_weight, router_bias, w1, b1, w2, b2 = functional._autocast(x, router_weight, router_bias, w1, b1, w2, b2)
    given = (x, router_weight, router_bias, logits, selection_bias, token_mask, w1, b1, w2, b2)
    options = _OPTIONS | {HUGGING_FACE.get(name, name): value for name, value in options.items()}
    losses, counts = options["losses"], options["counts"]
    record = functional.moe_record(function, given, w2.shape[0] * group.size, **options, **group.fields)
    _check_device(function, x, group)
    if selection_bias is not None:
        given = (*given[:4], selection_bias.detach().float(), *given[5:])
    others = step, group.handle
    if _differentiable(given):
        coefficients = options["balance_coefficient"], options["z_coefficient"]
        found = _ep_ops.Moe.apply(*given, *others, *coefficients, losses, counts, *record)
    else:
        found = torch.ops.smoe.ep_moe_forward.default(*given, *others, losses, counts, False, *record)
    out, _, made, losses_, counts_ = unpack(list(found), False, logits is None, losses, counts)
    return functional.MoEOutput(out, logits if made is None else made, losses_, counts_)


_GIVEN = ["logits", "router_bias", "selection_bias", "token_mask", "b1", "b2", "step", "compute", "weights_f8", *HUGGING_FACE]
_OPTIONS = {name: default for name, default in functional.moe.__kwdefaults__.items() if name not in _GIVEN}
