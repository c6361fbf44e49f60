"""The router by PyTorch's own operators: what smoe.moe computes inside, for callers that need the ids and weights."""

from typing import Any

import torch
from torch import Tensor

from . import _checks, _record

# Of each score of the header: what the weights are gathered from; whether it ranks by it (and else by the logits, which softmax
# may round to equal values), and takes a selection bias
_SCORES = {
    "softmax_topk": (lambda logits: logits.softmax(-1), False),
    "topk_softmax": (lambda logits: logits, False),
    "sigmoid": (torch.sigmoid, True),
}


def _choose(ranked: Tensor, topk: int, groups: int, groups_kept: int) -> Tensor:
    """The ids (T, K) of the highest `ranked` (T, E), among the groups whose two best have the highest sum."""
    if groups > 1:
        by_group = ranked.unflatten(-1, (groups, -1))
        kept = by_group.topk(2).values.sum(-1).topk(groups_kept).indices
        keep = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, kept, True)
        ranked = by_group.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
    return ranked.topk(topk).indices


def route(
    logits: Tensor,
    *,
    topk: int | None = None,
    score: str = "softmax_topk",
    renormalize: bool = False,
    groups: int = 1,
    groups_kept: int = 1,
    route_scale: float = 1.0,
    selection_bias: Tensor | None = None,
    ids: Tensor | None = None,
    **theirs: Any,
) -> tuple[Tensor, Tensor]:
    """The ids (T, K) int64 and weights (T, K) float32 that smoe.experts takes, from the router's logits (T, E). The
    weights are differentiable. The options are those of smoe.moe, by these or Hugging Face's names.

    With `ids` (T, K), of an earlier call or of an inference engine (router replay), nothing is selected: the weights are
    these experts'. A pair whose id is outside 0..E-1 has the weight 0 and does not count in a sum."""
    function = "smoe.route"
    _checks.tensor(function, "logits", logits)
    _checks.dimensions(function, "logits", logits, "(T, E)", 2)
    for name in theirs:
        if name not in _record.HUGGING_FACE:
            raise TypeError(f"{function}: {name} is no option")
    options = dict(topk=topk, renormalize=renormalize, groups=groups, groups_kept=groups_kept, route_scale=route_scale)
    options |= _record.options_of(function, theirs)
    topk, renormalize, groups, groups_kept, route_scale = options.values()
    sizes = dict(hidden=8, intermediate=8, experts=logits.shape[1], entry="from_logits")  # of any layer with these logits
    _record.record(function, activation="swiglu", score=score, **sizes, **options)
    values_of, biased = _SCORES[score]
    if selection_bias is not None and not biased:
        raise ValueError(f"{function}: selection_bias needs score='sigmoid'; score is {score!r}")
    if ids is not None and tuple(ids.shape) != (logits.shape[0], topk):
        raise ValueError(f"{function}: ids has the shape {tuple(ids.shape)}; expected (T, K) = ({logits.shape[0]}, {topk})")
    values = values_of(logits.float())
    if ids is None:
        ranked = values if biased else logits
        ids = _choose(ranked if selection_bias is None else ranked + selection_bias, topk, groups, groups_kept)
    ids = ids.long()
    there = (ids >= 0) & (ids < logits.shape[1])
    weights = values.gather(-1, ids.clamp(0, logits.shape[1] - 1))
    if score == "topk_softmax":
        weights = weights.masked_fill(~there, float("-inf")).softmax(-1).masked_fill(~there, 0)
    else:
        weights = weights.masked_fill(~there, 0)
        if renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.masked_fill(~there.any(-1, keepdim=True), 1)  # a token may have no expert
    return ids, weights * route_scale
