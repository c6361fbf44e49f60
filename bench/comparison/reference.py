"""The layer in fp64 on the device, one expert after the other to save memory; and errors against it."""

import torch

from .inputs import gate_and_up

NAMES = ("O", "dX", "dW1", "dW2", "dS")


class _Error:
    """The relative Frobenius error of a tensor, added up part by part."""

    def __init__(self):
        self.difference = self.norm = 0.0

    def add(self, found, exact):
        self.difference += (found.double() - exact).square().sum().item()
        self.norm += exact.square().sum().item()

    def value(self):
        return (self.difference / self.norm) ** 0.5 if self.norm else 0.0


def _expert(x, dout, weight, w1, w2):
    """One expert on its rows, all fp64: x, dout (R, d), weight (R, 1), w1 (2n, d) gate rows first, w2 (d, n).
    Returns s Y (R, d), dX (R, d), dW1, dW2, dS (R)."""
    gate, up = (x @ w1.t()).chunk(2, -1)
    sigma = gate.sigmoid()
    silu = gate * sigma
    a = silu * up
    y = a @ w2.t()
    dy = weight * dout
    da = dy @ w2
    dgate = da * up * (sigma + silu * (1 - sigma))
    dh = torch.cat([dgate, da * silu], -1)
    return weight * y, dh @ w1, dh.t() @ x, dy.t() @ a, (y * dout).sum(-1)


@torch.no_grad()
def errors(inputs, found, w1_layout="concatenated", w2_layout=""):
    """{name: relative Frobenius error} of found = {"O", "dX" (T, d), "dW1", "dW2" in the layouts, "dS" (T, K)}."""
    E, parts = inputs.shape.E, {name: _Error() for name in NAMES}
    out = torch.zeros(inputs.x.shape, dtype=torch.float64, device=inputs.x.device)
    dx, ds = torch.zeros_like(out), torch.zeros(inputs.ids.shape, dtype=torch.float64, device=inputs.x.device)
    for e in range(E):
        token, slot = (inputs.ids == e).nonzero(as_tuple=True)
        w1, w2 = inputs.w1[e].double(), inputs.w2[e].double()
        weight = inputs.weights[token, slot, None].double()
        o_rows, dx_rows, dw1, dw2, ds_rows = _expert(
            inputs.x[token].double(), inputs.dout[token].double(), weight, w1, w2
        )
        out.index_add_(0, token, o_rows)
        dx.index_add_(0, token, dx_rows)
        ds[token, slot] = ds_rows
        for mine, exact in zip(gate_and_up(found["dW1"][e], w1_layout), dw1.chunk(2), strict=True):
            parts["dW1"].add(mine, exact)
        theirs = found["dW2"][e]
        parts["dW2"].add(theirs.t() if w2_layout.endswith("transposed") else theirs, dw2)
    for name, exact in (("O", out), ("dX", dx), ("dS", ds)):
        parts[name].add(found[name], exact)
    return {name: error.value() for name, error in parts.items()}
