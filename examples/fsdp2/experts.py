"""The MoE layer by smoe and by its peers, the other implementations. All have the same parameters and compute the same
function, so that all can start from the same weights and should give the same losses: router weight wr (E, d),
w1 (E, 2n, d), w2 (E, d, n), from x (T, d) to (T, d)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import UsageError


@dataclass(frozen=True)
class Routing:
    topk: int
    renormalize: bool  # the weights of a token's experts are divided by their sum
    balance: float  # coefficient of the load-balance loss

    @property
    def score(self) -> str:
        """In smoe."""
        return "topk_softmax" if self.renormalize else "softmax_topk"

    def route(self, x: Tensor, wr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids (T, K), weights (T, K) float32, logits (T, E) float32."""
        logits = F.linear(x, wr).float()
        if self.renormalize:
            best, ids = logits.topk(self.topk, dim=-1)
            return ids, best.softmax(-1), logits
        weights, ids = logits.softmax(-1).topk(self.topk, dim=-1)
        return ids, weights, logits

    def balanced(self, out: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        """Returns `out`. Its backward adds the gradient of the load-balance loss too, which smoe adds inside the
        layer."""
        if not self.balance:
            return out
        count = logits.shape[1]
        flat = ids.flatten()
        share = torch.zeros(count, device=ids.device).index_add(0, flat, torch.ones_like(flat, dtype=torch.float32))
        loss = count * (share / len(ids) * logits.float().softmax(-1).mean(0)).sum()
        return _WithLoss.apply(out, self.balance * loss)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, loss):
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dout):
        return dout, dout.new_ones((), dtype=torch.float32)


# ---- peers: make(routing, compiled) returns run(x, wr, w1, w2) ----


def _smoe(routing: Routing, compiled: bool) -> Callable:
    import smoe

    def run(x, wr, w1, w2):
        return smoe.moe(x, wr, w1, w2, top_k=routing.topk, score=routing.score, balance_coefficient=routing.balance).out

    return run


def _sonicmoe(routing: Routing, compiled: bool) -> Callable:
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    def run(x, wr, w1, w2):
        stream, act, over_topk = torch.cuda.current_stream().cuda_stream, ActivationType.SWIGLU, routing.renormalize
        w1, w2 = w1.permute(1, 2, 0), w2.permute(1, 2, 0)
        out, logits, _ = moe_TC_softmax_topk_layer(
            x, wr, w1, None, w2, None, routing.topk, stream, act, False, is_softmax_over_topk=over_topk
        )
        if routing.balance:
            out = routing.balanced(out, logits, logits.topk(routing.topk, dim=-1).indices)
        return out

    return run


def _scattermoe(routing: Routing, compiled: bool) -> Callable:
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    def run(x, wr, w1, w2):
        ids, weights, logits = routing.route(x, wr)
        order = flatten_sort_count(ids, num_experts=len(w2))
        h = parallel_linear(x, w1.permute(0, 2, 1), routing.topk, *order, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        a = F.silu(gate) * up
        out = parallel_linear(a, w2.permute(0, 2, 1), 1, *order, gates=weights.to(x.dtype), grouped_in=True)
        return routing.balanced(out, logits, ids)

    return run


def _grouped_mm(routing: Routing, compiled: bool) -> Callable:
    """torch's grouped GEMM on a sorted copy of the rows, as torchtitan calls it."""

    def run(x, wr, w1, w2):
        ids, weights, logits = routing.route(x, wr)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.histc(flat.float(), bins=len(w2), min=0, max=len(w2))
        offsets = counts.cumsum(0).int()
        h = torch._grouped_mm(x[order // routing.topk], w1.transpose(1, 2), offs=offsets)
        gate, up = h.chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
        y = torch.empty_like(y).index_copy(0, order, y).view(*ids.shape, -1)
        out = (y * weights[..., None].to(y.dtype)).sum(1)
        return routing.balanced(out, logits, ids)

    return torch.compile(run) if compiled else run


def _eager(routing: Routing, compiled: bool) -> Callable:
    """A loop over the experts in plain PyTorch."""

    def run(x, wr, w1, w2):
        ids, weights, logits = routing.route(x, wr)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(len(w2)):
            tokens, place = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], w1[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, w2[expert]).float() * weights[tokens, place][:, None]
            out = out.index_add(0, tokens, y)
        return routing.balanced(out.to(x.dtype), logits, ids)

    return run


MAKERS = {
    "smoe": _smoe,
    "sonicmoe": _sonicmoe,
    "scattermoe": _scattermoe,
    "grouped_mm": _grouped_mm,
    "eager": _eager,
}
INSTALL = {
    "smoe": "pip install . in a clone of smoe",
    "sonicmoe": "pip install sonic-moe",
    "scattermoe": "pip install git+https://github.com/shawntan/scattermoe",
}
CUDA_ALONE = ("sonicmoe", "scattermoe")


def layout_of(peer: str) -> str:
    """Where w1 has the gate rows. SonicMoE's kernels are fastest if every other row is a gate row."""
    return "interleaved" if peer == "sonicmoe" else "concatenated"


def interleave(w1: Tensor) -> Tensor:
    """Reorders w1 (E, 2n, d), which has all gate rows first, so that every other row is a gate row."""
    experts, rows, columns = w1.shape
    return w1.view(experts, 2, rows // 2, columns).transpose(1, 2).reshape(experts, rows, columns)


def make_experts(peer: str, routing: Routing, device: str, compiled: bool) -> Callable:
    if peer in CUDA_ALONE and device != "cuda":
        raise UsageError(f"--experts {peer} needs a CUDA device, the run is on {device}")
    try:
        return MAKERS[peer](routing, compiled)
    except ImportError as error:
        raise UsageError(f"--experts {peer} cannot be imported ({error}); to install it: {INSTALL[peer]}")


def make_f8(routing: Routing, hidden: int, intermediate: int, count: int) -> Callable[[], nn.Module]:
    """Makes layers whose experts multiply e4m3 numbers."""
    import smoe

    options = dict(score=routing.score, balance_coefficient=routing.balance, compute="f8")
    return lambda: smoe.MoE(hidden, intermediate, count, routing.topk, **options)


def make_spread(
    routing: Routing, hidden: int, intermediate: int, count: int, mesh, tokens: int, dtype: torch.dtype
) -> Callable[[], nn.Module]:
    """Makes layers whose experts are spread over the processes of the mesh, each of which has so many tokens."""
    import smoe

    group = smoe.ep.Group(mesh, max_tokens=tokens, hidden=hidden, num_experts=count, top_k=routing.topk, dtype=dtype)
    options = dict(score=routing.score, balance_coefficient=routing.balance)
    return lambda: smoe.MoE(hidden, intermediate, count, routing.topk, ep=group, **options)


class MoE(nn.Module):
    """The parameters of a layer under the names that smoe.MoE and Hugging Face's OLMoE give them."""

    def __init__(self, hidden: int, intermediate: int, experts: int, run: Callable) -> None:
        super().__init__()
        self.gate, self.experts, self.run = nn.Module(), nn.Module(), run
        self.gate.weight = nn.Parameter(torch.empty(experts, hidden))
        self.experts.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.experts.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.gate.weight, self.experts.gate_up_proj, self.experts.down_proj)
