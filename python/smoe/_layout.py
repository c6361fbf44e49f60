"""What a layer's options mean for the C description and for the size of `saved`.

The operators take the options as one string of words in the order of `_WORDS`, so that a traced graph contains their
values. smoe/functional.py and smoe/jax.py write the string.
"""

import ctypes
import functools

from . import _activation, native

_ROW_BLOCK = 64  # every expert's rows are padded to a multiple of this
_ALIGN = 256  # alignment in bytes of every part of `saved`
_PLAN_PARTS = 12  # H and the plan's parts, each rounded up to _ALIGN

_WORDS = (
    "activation", "layout", "chunks", "f32_gradients", "score", "renormalize", "groups", "groups_kept", "route_scale",
    "rounding", "tile", "seed", "bf16_logits", "balance_coefficient", "z_coefficient", "losses", "counts",
)  # fmt: skip


class Options:
    """The parsed options. A name is stored as the value of the header's enumerator."""

    def __init__(self, text: str) -> None:
        words = dict(zip(_WORDS, text.split()))
        self.gate = _activation.parse(words["activation"])
        self.gated = self.gate.activation in native.GATED_ACTIVATIONS
        self.activation = native.ACTIVATIONS[self.gate.activation]
        self.layout = native.LAYOUTS[words["layout"]]
        self.chunks = int(words["chunks"])
        self.f32_gradients = bool(int(words["f32_gradients"]))
        self.score = native.SCORES[words.get("score", "softmax_topk")]
        self.renormalize = int(words.get("renormalize", 0))
        self.groups = int(words.get("groups", 1))
        self.groups_kept = int(words.get("groups_kept", 1))
        self.route_scale = float(words.get("route_scale", 1))
        self.rounding_name = words.get("rounding", "none")
        self.rounding = native.ROUNDINGS[self.rounding_name]
        self.tile = int(words.get("tile", 128))
        self.seed = int(words.get("seed", 0))
        self.bf16_logits = bool(int(words.get("bf16_logits", 0)))
        self.balance_coefficient = float(words.get("balance_coefficient", 0))
        self.z_coefficient = float(words.get("z_coefficient", 0))
        self.losses = bool(int(words.get("losses", 0)))
        self.counts = bool(int(words.get("counts", 0)))
        # Whether the backward of a layer from logits may read the logits: the same rule as moe_reads_logits in
        # src/wanted.h, where the losses that were returned may get a gradient.
        over_all = self.score == native.SCORES["softmax_topk"] and not self.renormalize
        dense = over_all or self.rounding_name != "none" or self.balance_coefficient != 0 or self.z_coefficient != 0
        self.reads_logits = dense or self.losses or self.score == native.SCORES["sigmoid"]

    def rows_added_at_most(self, experts: int) -> int:
        """The most rows that token rounding can add to the T K rows of plain top-K (src/problem.c has the reasons)."""
        if self.rounding_name == "nr_f":
            return experts * ((self.tile - 1) // 2)
        if self.rounding_name == "balance_f":
            return self.tile // 2
        return experts * (self.tile - 1) if self.rounding_name in ("sr_f", "nr_s", "up") else 0

    def saved_bytes(self, entry: str, tokens: int, topk: int, w2: tuple[int, int, int], element: int) -> int:
        """Bytes to allocate as `saved`. The number is affine in `tokens`, which may be symbolic. It is never below the
        size that smoe_query_sizes asks for; smoe/_context.py checks this for every shape. w2 is the shape (E, H, I)."""
        experts, _, intermediate = w2
        width = (2 if self.gated else 1) * intermediate
        rows = tokens * topk + self.rows_added_at_most(experts)
        padded = rows + (_ROW_BLOCK - 1) * experts
        plan = 2 * padded + rows + tokens + 4 * experts + 3
        if entry == "from_logits":
            plan = plan + 2 * tokens * topk + experts
        return padded * width * element + 4 * plan + _PLAN_PARTS * _ALIGN

    def layer(
        self, entry: str, tokens: int, topk: int, w2: tuple[int, int, int], dtype: int, index_type: int, save: bool
    ) -> native.Layer:
        experts, hidden, intermediate = w2
        return native.Layer(
            tokens=tokens,
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            topk=topk,
            dtype=dtype,
            activation=self.activation,
            layout=self.layout,
            entry=native.ENTRIES[entry],
            index_type=index_type,
            logits_type=native.TYPES["bf16" if self.bf16_logits else "f32"],
            gradient_type=native.TYPES["f32"] if self.f32_gradients else dtype,
            inference=not save,
            chunks=self.chunks,
            score=self.score,
            renormalize=self.renormalize,
            groups=self.groups,
            groups_kept=self.groups_kept,
            route_scale=self.route_scale,
            rounding=self.rounding,
            tile=self.tile,
            seed=self.seed,
            gate_limit=self.gate.gate_limit,
            up_limit=self.gate.up_limit,
            gate_alpha=self.gate.gate_alpha,
            up_offset=self.gate.up_offset,
        )


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Options:
    return Options(text)
