"""The layer by DeepGEMM's grouped GEMMs in bf16. What DeepGEMM does not have stands around them: sorting, gather, activation
and scatter, each compiled by torch.compile where `load` says so.

DeepGEMM wants each expert's rows padded to a multiple of its alignment (128), and for each row its expert, or -1. So R rows
are allocated, which is enough for any counts, and no count is read by the host in the forward. The backward reads the
counts, because Hopper's GEMMs with groups of K take them on the host. Blocks that no expert needs are not computed.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Rows(NamedTuple):
    """Rows sorted by expert, each expert's padded."""

    token: torch.Tensor  # (R) int64, -1: padding
    expert: torch.Tensor  # (R) int32, -1: padding
    place: torch.Tensor  # (T, K) the row of a pair
    padded: torch.Tensor  # (E) int32 rows of an expert with its padding


def sort(ids, experts, alignment):
    flat, K = ids.flatten().long(), ids.shape[1]
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + alignment - 1) // alignment * alignment
    order = flat.argsort(stable=True)
    expert = flat[order]
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    row = torch.arange(flat.numel(), device=ids.device) + shift[expert]
    size = (flat.numel() + min(experts, flat.numel()) * (alignment - 1)) // alignment * alignment
    none = torch.full((size,), -1, dtype=torch.int64, device=ids.device)
    place = torch.empty_like(flat).scatter_(0, order, row).view(ids.shape)
    return Rows(none.scatter(0, row, order // K), none.scatter(0, row, expert).int(), place, padded.int())


def gather(x, token):
    """x (T, d) by row. Padding is token 0: its weight is 0, so nothing comes of it."""
    return x[token.clamp(min=0)]


def activate(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def activate_backward(h, da, row_weight):
    """dH, A' and dS (R) from H (R, 2n) and dA (R, n) = dO W2, which the weights do not multiply."""
    gate, up = h.float().chunk(2, -1)
    da, s, sigma = da.float(), row_weight[:, None], gate.sigmoid()
    silu = gate * sigma
    dh = torch.cat([s * da * up * (sigma + silu * (1 - sigma)), s * da * silu], -1)
    return dh.to(h.dtype), (s * silu * up).to(h.dtype), (da * silu * up).sum(-1)


def scatter(y, place, weights):
    """(T, d): the weighted sum of each token's rows of y."""
    return (y[place].float() * weights.float()[..., None]).sum(1).to(y.dtype)


class Experts(torch.autograd.Function):
    """apply(x, ids, weights, w1, w2, made): w1 (E, 2n, d) gate rows first, w2 (E, d, n); `made` has the module `gemm` and
    this file's functions, compiled or not."""

    @staticmethod
    def forward(ctx, x, ids, weights, w1, w2, made):
        rows = made.sort(ids, w2.shape[0], made.gemm.get_mk_alignment_for_contiguous_layout())
        h, y = (x.new_empty(len(rows.token), width) for width in w1.shape[1:])
        made.gemm.m_grouped_bf16_gemm_nt_contiguous(made.gather(x, rows.token), w1, h, rows.expert)
        made.gemm.m_grouped_bf16_gemm_nt_contiguous(made.activate(h), w2, y, rows.expert)
        ctx.save_for_backward(x, weights, w1, w2, h, *rows)
        ctx.made = made
        return made.scatter(y, rows.place, weights)

    @staticmethod
    def backward(ctx, dout):
        x, weights, w1, w2, h, *rows = ctx.saved_tensors
        made, rows = ctx.made, Rows(*rows)
        dy = made.gather(dout, rows.token)
        da, dx = (x.new_empty(len(rows.token), width) for width in (w2.shape[2], x.shape[1]))
        made.gemm.m_grouped_bf16_gemm_nn_contiguous(dy, w2, da, rows.expert)
        row_weight = torch.zeros(len(rows.token), device=x.device).scatter(0, rows.place.flatten(), weights.flatten().float())
        dh, a, ds = made.activate_backward(h, da, row_weight)
        made.gemm.m_grouped_bf16_gemm_nn_contiguous(dh, w1, dx, rows.expert)
        counts = rows.padded.tolist()
        end, gradients = sum(counts), []
        for left, right, weight in ((dh, made.gather(x, rows.token), w1), (dy, a, w2)):
            total = torch.zeros(weight.shape, device=x.device)  # DeepGEMM adds to float32
            made.gemm.k_grouped_bf16_gemm_tn_contiguous(left[:end], right[:end], total, counts, rows.padded, total)
            gradients.append(total.to(weight.dtype))
        return made.scatter(dx, rows.place, torch.ones_like(weights)), None, ds[rows.place].to(weights.dtype), *gradients, None
