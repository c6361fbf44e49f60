"""The layer by torchao's grouped GEMMs in fp8 (recipe `rowwise`): each call quantises both operands, and its backward quantises
them again for the gradients. What torchao does not have stands around them, as in deepgemm.py: sorting, gather, activation and
scatter, the last three compiled.

torchao wants each expert's rows padded to a multiple of 16. Padding is zeros. Rows behind the last expert's stay unwritten, so
their values are read by nothing that counts.
"""

import torch

from . import deepgemm

ALIGNMENT = 16  # rows of an expert


def gather(x, token):
    """x (T, d) by row; zeros where a row is padding."""
    return torch.where((token >= 0)[:, None], x[token.clamp(min=0)], 0)


def scatter_backward(dout, y, token, place, row_weight):
    """dY (R, d), zeros in padding, and dS (T, K), of deepgemm.scatter."""
    dy = (gather(dout, token).float() * row_weight[:, None]).to(y.dtype)
    return dy, (y[place].float() * dout[:, None].float()).sum(-1)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, place, made):
        ctx.save_for_backward(place)
        ctx.made = made
        return made.gather(x, token)

    @staticmethod
    def backward(ctx, dx):
        (place,) = ctx.saved_tensors
        return ctx.made.scatter(dx, place, torch.ones_like(place)), None, None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, token, place, made):
        ctx.save_for_backward(y, weights, token, place)
        ctx.made = made
        return made.scatter(y, place, weights)

    @staticmethod
    def backward(ctx, dout):
        y, weights, token, place = ctx.saved_tensors
        row_weight = torch.zeros(len(token), device=y.device).scatter(0, place.flatten(), weights.flatten().float())
        dy, ds = ctx.made.scatter_backward(dout, y, token, place, row_weight)
        return dy, ds.to(weights.dtype), None, None, None


def experts(x, ids, weights, w1, w2, made):
    """w1 (E, 2n, d) gate rows first, w2 (E, d, n). `made` has torchao's function `grouped_mm` and the functions of this file
    and of deepgemm.py, compiled or not."""
    rows = deepgemm.sort(ids, w2.shape[0], ALIGNMENT)
    ends = rows.padded.cumsum(0).int()

    def multiplied(a, w):
        return made.grouped_mm(a, w.transpose(1, 2), ends, out_dtype=x.dtype, pad_token_groups_for_grouped_mm=False)

    h = multiplied(Gather.apply(x, rows.token, rows.place, made), w1)
    y = multiplied(made.activate(h), w2)
    return Scatter.apply(y, weights, rows.token, rows.place, made)
