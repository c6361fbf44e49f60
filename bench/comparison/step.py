"""A whole training step of the paper's models on one GPU, with the experts of each implementation.

Weights, gradients and AdamW's states are bf16. Attention and norms are compiled. The head is the embedding. The
cross-entropy is computed for some of the tokens at a time and again in the backward. Tokens are random. The block is
OLMoE's: RMS norm, attention with normed q and k and RoPE, RMS norm, Mixture-of-Experts layer.
"""

import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import timing
from .inputs import arrange_w1, arrange_w2


class Model(NamedTuple):
    """Numbers of layers and heads, and the context. The other sizes are those of suites.Shape; T is the tokens of a
    step."""

    layers: int
    heads: int
    context: int
    T: int
    d: int
    n: int
    E: int
    K: int


MODELS = {
    "0.5B": Model(12, 12, 4096, 40960, 768, 256, 64, 8),
    "1.4B": Model(18, 12, 4096, 40960, 768, 256, 128, 8),
    "7B": Model(45, 24, 4096, 24576, 1536, 256, 128, 8),
    "tiny": Model(2, 2, 32, 64, 32, 16, 8, 2),
}
VOCABULARY, LOSS_TOKENS, SCALE, WARM_STEPS = 50304, 8192, 0.02, 2


def _normal(device, *size):
    return torch.empty(*size, device=device, dtype=torch.bfloat16).normal_(0, SCALE)


def _parameter(device, *size):
    return nn.Parameter(_normal(device, *size))


class Experts(nn.Module):
    def __init__(self, model, implementation, device):
        super().__init__()
        E, d, n = model.E, model.d, model.n
        self.w1 = nn.Parameter(arrange_w1(_normal(device, E, 2 * n, d), implementation.w1_layout))
        self.w2 = nn.Parameter(arrange_w2(_normal(device, E, d, n), implementation.w2_layout))
        self.router = _parameter(device, E, d)
        self.layer = implementation.bind_layer(model, self.w1, self.w2, self.router)

    def forward(self, x):
        return self.layer(x)


@torch.compile
def _norm(x, weight):
    return F.rms_norm(x, weight.shape, weight)


def _turn(x, cos, sin):
    """RoPE on (B, heads, context, head size)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@torch.compile
def _attention(x, norm, qkv, q_norm, k_norm, out, cos, sin, heads):
    """x (T, d) plus causal attention inside each context; cos and sin (context, head size / 2)."""
    T, d = x.shape
    q, k, v = F.linear(F.rms_norm(x, (d,), norm), qkv).chunk(3, -1)
    q, k = F.rms_norm(q, (d,), q_norm), F.rms_norm(k, (d,), k_norm)
    context = cos.shape[0]
    q, k, v = (t.view(T // context, context, heads, d // heads).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(_turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True)
    return x + F.linear(mixed.transpose(1, 2).reshape(T, d), out)


@torch.compile
def _loss(x, head, target):
    return F.cross_entropy(F.linear(x, head).float(), target, reduction="sum")


class Block(nn.Module):
    def __init__(self, model, implementation, device):
        super().__init__()
        ones = lambda: nn.Parameter(torch.ones(model.d, device=device, dtype=torch.bfloat16))
        self.qkv, self.out = _parameter(device, 3 * model.d, model.d), _parameter(device, model.d, model.d)
        self.attention_norm, self.experts_norm, self.q_norm, self.k_norm = ones(), ones(), ones(), ones()
        self.experts, self.heads = Experts(model, implementation, device), model.heads

    def forward(self, x, cos, sin):
        x = _attention(
            x, self.attention_norm, self.qkv, self.q_norm, self.k_norm, self.out, cos, sin, self.heads
        )  # fmt: skip
        return x + self.experts(_norm(x, self.experts_norm))


class LanguageModel(nn.Module):
    def __init__(self, model, implementation, device):
        super().__init__()
        self.embedding = _parameter(device, VOCABULARY, model.d)
        self.blocks = nn.ModuleList(Block(model, implementation, device) for _ in range(model.layers))
        self.norm = nn.Parameter(torch.ones(model.d, device=device, dtype=torch.bfloat16))
        size = model.d // model.heads
        rates = 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(model.context, device=device).float(), rates)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def forward(self, tokens, targets):
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = _norm(x, self.norm)
        parts = [
            checkpoint(_loss, rows, self.embedding, target, use_reentrant=False)
            for rows, target in zip(x.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
        ]
        return torch.stack(parts).sum() / len(tokens)


def step_flops(model, parameters):
    """FLOPs of a step's forward and backward: 6 for each token and active parameter, and causal attention, counted at
    half of all pairs. An expert counts only for the tokens that it computes."""
    active = parameters - model.layers * (model.E - model.K) * 3 * model.n * model.d
    return 6 * model.T * (active + model.layers * model.context * model.d)


def measure(name, implementation, device, seconds):
    """The median step time over about `seconds`, tokens/s, memory, the first step's time and losses."""
    model = MODELS[name]
    torch.manual_seed(0)
    network = LanguageModel(model, implementation, device)
    parameters = list(network.parameters())
    tokens = torch.randint(0, VOCABULARY, (model.T + 1,), device=device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step():
        loss = network(tokens[:-1], tokens[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    start = time.perf_counter()
    first_loss = step().item()
    first_s = time.perf_counter() - start
    for _ in range(WARM_STEPS):
        step()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock, times, begin = timing.clock_of(device), [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        times += clock.each(step, 1)[0]
    ms, last_loss = statistics.median(times), step().item()
    free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
    return {
        "step_ms": ms,
        "steps": len(times),
        "tokens_per_s": model.T / ms * 1e3,
        "step_tflops": step_flops(model, sum(p.numel() for p in parameters)) / ms / 1e9,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "driver_bytes": total - free if cuda else None,  # of all processes on the GPU
        "first_step_s": first_s,
        "losses": [first_loss, last_loss],
    }
