"""The tensors that every implementation gets: the same values, and each its own layout of the weights.

The layout of W1 names the order of its rows. `concatenated`: gate rows, then up rows. `interleaved`: gate and up rows
in turn. `up_first`: up rows, then gate rows. With ` transposed` at its end W1 is (E, d, 2n) instead of (E, 2n, d). W2
is (E, d, n), or (E, n, d) with ` transposed`.
"""

import torch

ROUTINGS = ("random", "uniform", "skewed")


def arrange_w1(w1, layout):
    """w1 (E, 2n, d), which is concatenated, in the given layout; a new tensor unless this is `concatenated`."""
    rows, _, transposed = layout.partition(" ")
    halves = w1.unflatten(1, (2, -1))  # (E, 2, n, d)
    if rows == "interleaved":
        w1 = halves.transpose(1, 2).flatten(1, 2)
    elif rows == "up_first":
        w1 = halves.flip(1).flatten(1, 2)
    elif rows != "concatenated":
        raise ValueError(f"W1 has no layout {layout!r}")
    return w1.transpose(1, 2).contiguous() if transposed else w1


def gate_and_up(w1, layout):
    """The gate rows and the up rows, (n, d) each, of one expert's matrix in a layout."""
    rows, _, transposed = layout.partition(" ")
    if transposed:
        w1 = w1.t()
    if rows == "interleaved":
        return w1[0::2], w1[1::2]
    first, second = w1.chunk(2)
    return (second, first) if rows == "up_first" else (first, second)


def arrange_w2(w2, layout):
    return w2.transpose(1, 2).contiguous() if layout.endswith("transposed") else w2


def make_ids(T, E, K, routing, generator):
    """(T, K) int64, the K experts of a token all different. `random`: all equally likely. `uniform`: equal counts
    within one. `skewed`: drawn with Zipf weights 1/rank, the ranks shuffled over the experts."""
    device = generator.device
    if routing == "uniform":
        order = torch.randperm(E, generator=generator, device=device)
        return order[torch.arange(T * K, device=device).remainder(E)].view(T, K)
    noise = -torch.rand(T, E, generator=generator, device=device).clamp_min(1e-30).log()  # exponential
    if routing == "skewed":
        noise /= 1 / (1 + torch.randperm(E, generator=generator, device=device))
    elif routing != "random":
        raise ValueError(f"--routing {routing}: the routings are {', '.join(ROUTINGS)}")
    return noise.topk(K, dim=-1, largest=False).indices


class Inputs:
    """X, dO (T, d), ids and weights (T, K), W1 (E, 2n, d) concatenated, W2 (E, d, n), Wr (E, d). X, dO, W1, W2 are
    normal numbers (W1 scaled by 1/sqrt(d), W2 by 1/sqrt(n)) of `dtype`. The weights are f32 numbers that bf16 holds
    exactly, so that an implementation that takes bf16 weights gets the same values."""

    def __init__(self, shape, device, dtype, routing="random", seed=0):
        T, d, n, E, K = shape.T, shape.d, shape.n, shape.E, shape.K
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size, scale=1.0):
            return torch.empty(*size, device=device, dtype=dtype).normal_(0, scale, generator=generator)

        self.shape = shape
        self.x, self.dout = normal(T, d), normal(T, d)
        self.w1, self.w2 = normal(E, 2 * n, d, scale=d**-0.5), normal(E, d, n, scale=n**-0.5)
        self.router_weight = normal(E, d, scale=d**-0.5)
        self.ids = make_ids(T, E, K, routing, generator)
        values = torch.randn(T, K, device=device, generator=generator)
        self.weights = values.softmax(-1).bfloat16().float()
        self._arranged = {}

    def first(self, tokens):
        """The same layer with only its first `tokens` tokens. The weights are shared."""
        fewer = object.__new__(Inputs)
        fewer.__dict__ |= self.__dict__ | {"shape": self.shape._replace(T=tokens)}
        for name in ("x", "dout", "ids", "weights"):
            setattr(fewer, name, getattr(self, name)[:tokens].clone())
        return fewer

    def arranged(self, w1_layout, w2_layout):
        """W1 and W2 in these layouts as parameters, made once for all implementations that share a layout."""
        for name, layout, arrange in (("w1", w1_layout, arrange_w1), ("w2", w2_layout, arrange_w2)):
            if (name, layout) not in self._arranged:
                self._arranged[name, layout] = torch.nn.Parameter(arrange(getattr(self, name), layout))
        return self._arranged["w1", w1_layout], self._arranged["w2", w2_layout]
