"""The layer in plain PyTorch, to be used in float64: slow, differentiable by autograd, with every option of smoe.moe
except stochastic rounding. W is the dense (T, E) matrix of pair weights, zero where a pair is not selected."""

import torch
import torch.nn.functional as F

GATES = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "reglu": F.relu,
}
PLAIN = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": lambda h: F.relu(h).square()}


def activate(h, activation, layout="concatenated"):
    if activation in PLAIN:
        return PLAIN[activation](h)
    gate, up = h.chunk(2, -1) if layout == "concatenated" else (h[..., ::2], h[..., 1::2])
    if activation == "swiglu_capped":  # with gpt-oss's values, the defaults of smoe.Gate
        gate = 7 * torch.tanh(gate / 7) * torch.sigmoid(1.702 * gate)
        return gate * (7 * torch.tanh(up / 7) + 1)
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return GATES[activation](gate) * up


def expert(x, e, w1, w2, b1, b2, activation, layout):
    h = x @ w1[e].T + (b1[e] if b1 is not None else 0)
    return activate(h, activation, layout) @ w2[e].T + (b2[e] if b2 is not None else 0)


def from_pairs(x, pairs, w1, w2, b1=None, b2=None, activation="swiglu", layout="concatenated"):
    """out[t] = sum over e of pairs[t, e] expert e of x[t]; pairs (T, E)."""
    every = [expert(x, e, w1, w2, b1, b2, activation, layout) for e in range(w2.shape[0])]
    return sum(pairs[:, e, None] * out for e, out in enumerate(every))


def pairs_of(ids, weights, count):
    """The matrix (T, E) of weights from ids and weights (T, K). Ids outside of 0..E-1 are skipped. If a token has equal
    ids, the first counts."""
    columns = []
    for e in range(count):
        hit = (ids == e).to(weights.dtype)
        first = hit * (hit.cumsum(-1) == 1)
        columns.append((first * weights).sum(-1))
    return torch.stack(columns, -1)


def experts(x, ids, weights, w1, w2, **options):
    return from_pairs(x, pairs_of(ids, weights, w2.shape[0]), w1, w2, **options)


def experts_rows(rows, offsets, w1, w2, row_weights=None, b1=None, b2=None, activation="swiglu", layout="concatenated"):
    outs = []
    for e in range(w2.shape[0]):
        chunk = rows[offsets[e] : offsets[e + 1]]
        out = expert(chunk, e, w1, w2, b1, b2, activation, layout)
        outs.append(out if row_weights is None else out * row_weights[offsets[e] : offsets[e + 1], None])
    rest = rows.shape[0] - int(offsets[-1])
    return torch.cat([*outs, rows.new_zeros(rest, rows.shape[1])])


def select(choice, top_k, n_group, topk_group):
    """The mask (T, E) of the top_k largest elements of `choice` within the best groups."""
    if n_group > 1:
        grouped = choice.unflatten(1, (n_group, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(topk_group, -1).indices
        keep = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best, True)
        choice = grouped.masked_fill(~keep[..., None], -torch.inf).flatten(1)
    ids = choice.topk(top_k, -1).indices
    return torch.zeros(choice.shape, dtype=torch.bool).scatter(1, ids, True)


def _picked_count(rounding, count, tile, residual, ranked):
    low, high = count // tile * tile, -(-count // tile) * tile
    if high > len(ranked):
        high = low
    if rounding == "up":
        return high
    if rounding == "down":
        return low
    if rounding == "nr_f":
        return high if count - low > tile / 2 else low
    if rounding == "balance_f":
        return high if count + residual - low > tile / 2 else low
    total = lambda m: float(ranked[:m].sum())
    return high if total(high) - total(count) < total(count) - total(low) else low  # nr_s


def rounded(mask, scores, rounding, tile):
    result, residual = mask.clone(), 0
    for e in range(mask.shape[1]):
        order = sorted(range(len(mask)), key=lambda t: (not mask[t, e], -scores[t, e].item(), t))
        count = int(mask[:, e].sum())
        picked = _picked_count(rounding, count, tile, residual, scores[order, e])
        residual += count - picked
        result[:, e] = False
        result[order[:picked], e] = True
    return result


def moe(x, router_weight, w1, w2, *, top_k, logits=None, router_bias=None, selection_bias=None, score="softmax_topk",
        norm_topk_prob=False, n_group=1, topk_group=1, routed_scaling_factor=1.0, rounding="none", tile=128,
        **experts_options):  # fmt: skip
    """out, losses (2), counts (E)"""
    if logits is None:
        logits = x @ router_weight.T + (0 if router_bias is None else router_bias)
    p, sigma = logits.softmax(-1), logits.sigmoid()
    free = sigma if score == "sigmoid" else p
    choice = sigma + (0 if selection_bias is None else selection_bias) if score == "sigmoid" else logits
    kept = select(choice.detach(), top_k, n_group, topk_group)
    if score == "topk_softmax":
        weights = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    else:
        weights = free * kept
        if norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
    mask = kept
    if rounding != "none":
        ranking = choice if score == "sigmoid" else p
        mask = rounded(kept, ranking.detach(), rounding, tile)
    pairs = torch.where(kept, weights, free) * mask * routed_scaling_factor
    counts = kept.sum(0)
    balance = w2.shape[0] * (counts / len(x) * p.mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    return from_pairs(x, pairs, w1, w2, **experts_options), torch.stack([balance, z]), counts
