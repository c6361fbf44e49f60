"""The router by PyTorch's own operators: what smoe.moe computes inside, for callers that need the ids and weights."""

import torch
from torch import Tensor

from . import _checks

_SCORES = ("softmax_topk", "topk_softmax", "sigmoid")


def _choose(ranked: Tensor, top_k: int, n_group: int, topk_group: int) -> Tensor:
    """The ids (T, K) of the highest `ranked` (T, E), among the groups whose two best have the highest sum."""
    if n_group > 1:
        by_group = ranked.unflatten(-1, (n_group, -1))
        kept = by_group.topk(2).values.sum(-1).topk(topk_group).indices
        keep = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, kept, True)
        ranked = by_group.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
    return ranked.topk(top_k).indices


def route(
    logits: Tensor,
    *,
    top_k: int,
    score: str = "softmax_topk",
    norm_topk_prob: bool = False,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    selection_bias: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ids (T, K) int64 and weights (T, K) float32 that smoe.experts takes, from the router's logits (T, E). The
    weights are differentiable. The options are those of smoe.moe.

    With `ids` (T, K), of an earlier call or of an inference engine (router replay), nothing is selected: the weights are
    these experts'. A pair whose id is outside 0..E-1 has the weight 0 and does not count in a sum."""
    function = "smoe.route"
    _checks.tensor(function, "logits", logits)
    _checks.dimensions(function, "logits", logits, "(T, E)", 2)
    if score not in _SCORES:
        raise ValueError(f"{function}: score is {score!r}; expected one of {', '.join(_SCORES)}")
    if score != "sigmoid" and (selection_bias is not None or n_group != 1):
        raise ValueError(f"{function}: selection_bias and n_group need score='sigmoid'; score is {score!r}")
    if ids is not None and tuple(ids.shape) != (logits.shape[0], top_k):
        raise ValueError(f"{function}: ids has the shape {tuple(ids.shape)}; expected (T, K) = ({logits.shape[0]}, {top_k})")
    values = logits.float()
    values = values.sigmoid() if score == "sigmoid" else values.softmax(-1) if score == "softmax_topk" else values
    if ids is None:
        ranked = values if score == "sigmoid" else logits  # of the logits, which softmax may round to equal values
        ids = _choose(ranked if selection_bias is None else ranked + selection_bias, top_k, n_group, topk_group)
    ids = ids.long()
    there = (ids >= 0) & (ids < logits.shape[1])
    weights = values.gather(-1, ids.clamp(0, logits.shape[1] - 1))
    if score == "topk_softmax":
        weights = weights.masked_fill(~there, float("-inf")).softmax(-1).masked_fill(~there, 0)
    else:
        weights = weights.masked_fill(~there, 0)
        if norm_topk_prob:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.masked_fill(~there.any(-1, keepdim=True), 1)  # a token may have no expert
    return ids, weights * routed_scaling_factor
