#!/usr/bin/env python3
"""What token rounding does to the experts of checkpoints of `smoe train`: by layer and by popularity of the expert.

Usage: rounding_by_expert.py [OPTION...] TOKENS.bin CHECKPOINT...     needs the packages torch and transformers
  --rule RULE       nr-f, up or down (default nr-f)
  --tile M          tile of the rule (default 16)
  --sequences S     sequences of a pass, as in training: --batch divided by --micro-batches (default 2)
  --passes N        use the first N passes only (default: all)
  --losses          also measure the validation loss with other routed pairs, which takes twelve times as long

TOKENS.bin is a token file for validation (docs/training.md, "Tokens"). Its windows are put into passes in a random
order, which is the same in every call. The tables say what the rule would do to plain top-K's routing of these passes.
An expert that loses more than half of its pairs to the rule is called a losing expert. "mean < M/2" are the experts
with a mean count below half a tile. For the table by popularity the experts of each layer are sorted by their mean
count and cut into quarters; quarter 1 has the smallest counts. Exit status: 0, 2 usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from array import array
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import OlmoeForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

RULES = {
    "nr-f": lambda above, tile: 2 * above > tile,
    "up": lambda above, tile: above > 0,
    "down": lambda above, tile: above < 0,
}
# The sums over the passes, each (layers, E). "lone" are the tokens without an expert, divided by E.
SUMS = ("pairs", "added", "dropped", "emptied", "weight", "dropped weight", "lone")


def top_k(scores: Tensor, k: int) -> Tensor:
    """The pairs that plain top-K selects, (T, E). Ties go to the lower expert."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :k], True)


def round_pairs(scores: Tensor, selected: Tensor, rule: str, tile: int) -> Tensor:
    """The pairs (T, E) that are routed after token rounding, as include/smoe.h defines it."""
    tokens, counts = len(scores), selected.sum(0)
    low = counts - counts % tile
    wanted = low + tile * (RULES[rule](counts % tile, tile) & (low + tile <= tokens))
    rank = scores.double() + 2 * selected  # the selected tokens come first; a score is at most 1
    order = rank.sort(dim=0, descending=True, stable=True).indices
    return torch.zeros_like(selected).scatter_(0, order, torch.arange(tokens)[:, None] < wanted)


class Experts:
    """A checkpoint whose routers count what the rule would do, and can route other pairs than those of plain top-K."""

    def __init__(self, checkpoint: str, rule: str, tile: int) -> None:
        self.model = OlmoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
        self.rule, self.tile = rule, tile
        routers = [module for module in self.model.modules() if isinstance(module, OlmoeTopKRouter)]
        self.shape = len(routers), routers[0].num_experts
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda router, inputs, out, layer=layer: self._hook(layer, router, out[0]))

    def _hook(self, layer: int, router: OlmoeTopKRouter, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = logits.float().softmax(-1)
        selected = top_k(scores, router.top_k)
        rounded = round_pairs(scores, selected, self.rule, self.tile)
        dropped = selected & ~rounded
        whole = (scores * selected).sum(1, keepdim=True) if router.norm_topk_prob else 1
        weights = torch.where(selected, scores / whole, scores)
        found = (selected.sum(0), (rounded & ~selected).sum(0), dropped.sum(0), selected.any(0) & ~rounded.any(0))
        found += ((weights * selected).sum(0), (weights * dropped).sum(0), (~rounded.any(1)).sum() / self.shape[1])
        for name, value in zip(SUMS, found, strict=True):
            self.sums[name][layer] += value
        routed = self.route(layer, selected, rounded)
        order = routed.sort(dim=1, descending=True, stable=True).indices[:, : max(1, int(routed.sum(1).max()))]
        # A token with fewer pairs than others has further experts with weight 0.
        return logits, weights.gather(1, order) * routed.gather(1, order), order

    @torch.no_grad()
    def loss(self, passes: Tensor, route=lambda layer, selected, rounded: selected) -> float:
        """Mean loss over passes (N, sequences, context + 1). `route` gives the pairs that are routed. The sums over the
        passes are left in self.sums."""
        self.route = route
        self.sums = {name: torch.zeros(self.shape, dtype=torch.float64) for name in SUMS}
        total = 0.0
        for tokens in passes:
            logits = self.model(tokens[:, :-1]).logits
            total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
        return total / len(passes)


def read_passes(path: str, context: int, sequences: int) -> Tensor:
    """The windows of a token file in a random order that is always the same: (passes, sequences, context + 1)."""
    data = Path(path).read_bytes()
    windows = torch.tensor(array("H", data[1024:]).tolist()).unfold(0, context + 1, context)  # after the header: uint16
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order[: len(order) // sequences * sequences]].unflatten(0, (-1, sequences))


def percent(part: Tensor, whole: Tensor | float) -> str:
    return f"{100 * float(part.sum()) / float(whole):.1f}"


def shares(sums: dict[str, Tensor], passes: Tensor, tile: int) -> dict[str, str]:
    """The row of one layer, or of several: means over them."""
    pairs, weight = sums["pairs"], sums["weight"].sum()
    load = pairs / pairs.sum(1, keepdim=True)
    entropy = -(load * load.clamp(min=1e-30).log()).sum(1).mean() / math.log(pairs.shape[1])
    losing = sums["dropped"] > pairs / 2
    return {
        "added %": percent(sums["added"], pairs.sum()),
        "dropped %": percent(sums["dropped"], pairs.sum()),
        "dropped weight %": percent(sums["dropped weight"], weight),
        "emptied %": percent(sums["emptied"], pairs.numel() * len(passes)),
        "tokens without expert %": percent(sums["lone"], len(pairs) * passes[:, :, 1:].numel()),
        "losing experts %": percent(losing, pairs.numel()),
        "their weight %": percent(sums["weight"][losing], weight),
        "mean < M/2 %": percent(pairs / len(passes) < tile / 2, pairs.numel()),
        "busiest": f"{load.max(1).values.mean().item() * pairs.shape[1]:.2f}",
        "entropy": f"{entropy.item():.4f}",
    }


def by_quarter(sums: dict[str, Tensor], passes: int) -> tuple[list[dict[str, str]], list[Tensor]]:
    """The table by popularity, and the mask (layers, E) of each quarter."""
    pairs = sums["pairs"]
    place = pairs.argsort(dim=1, stable=True).argsort(dim=1)
    masks = [place * 4 // pairs.shape[1] == quarter for quarter in range(4)]
    rows = []
    for number, mask in enumerate(masks, 1):
        part = {name: x[mask] for name, x in sums.items()}
        rows.append({
            "quarter": str(number),
            "mean count": f"{part['pairs'].mean().item() / passes:.1f}",
            "of all pairs %": percent(part["pairs"], pairs.sum()),
            "of all weight %": percent(part["weight"], sums["weight"].sum()),
            "emptied %": percent(part["emptied"], passes * int(mask.sum())),
            "added, of their pairs %": percent(part["added"], part["pairs"].sum()),
            "dropped %": percent(part["dropped"], part["pairs"].sum()),
            "dropped, of their weight %": percent(part["dropped weight"], part["weight"].sum()),
        })  # fmt: skip
    return rows, masks


def losses(experts: Experts, passes: Tensor, plain: float, losing: Tensor, quarters: list[Tensor]) -> list[dict]:
    """The validation loss with other pairs than those of plain top-K."""
    routes = {
        "rounded by the rule": lambda layer, selected, rounded: rounded,
        "dropped by the rule, none added": lambda layer, selected, rounded: selected & rounded,
        "the same, only of experts that are emptied": lambda layer, selected, rounded: selected & rounded.any(0),
        "the same, only of the other experts": lambda layer, selected, rounded: selected & (rounded | ~rounded.any(0)),
        "added by the rule, none dropped": lambda layer, selected, rounded: selected | rounded,
    }
    for name, mask in zip(("losing experts", *(f"quarter {i}" for i in range(1, 5))), (losing, *quarters), strict=True):
        routes[f"without those of {name}"] = lambda layer, selected, rounded, mask=mask: selected & ~mask[layer]
    found = {"plain top-K": plain} | {name: experts.loss(passes, route) for name, route in routes.items()}
    texts = {name: (f"{loss:.4f}", f"{loss - plain:+.4f}") for name, loss in found.items()}
    return [{"routed pairs": name, "loss": loss, "less plain top-K": rise} for name, (loss, rise) in texts.items()]


def print_table(title: str, rows: list[dict[str, str]]) -> None:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    print("", title, "", *("| " + " | ".join(map(str.rjust, cells, widths)) + " |" for cells in lines), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__.replace("%", "%%"))
    parser.add_argument("--rule", choices=RULES, default="nr-f")
    for name, default in (("--tile", 16), ("--sequences", 2), ("--passes", None)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("tokens")
    parser.add_argument("checkpoints", nargs="+")
    given = parser.parse_args()
    for checkpoint in given.checkpoints:
        experts = Experts(checkpoint, given.rule, given.tile)
        context = experts.model.config.max_position_embeddings
        passes = read_passes(given.tokens, context, given.sequences)[: given.passes]
        plain, sums = experts.loss(passes), experts.sums
        layers = {"all": slice(None)} | {str(layer): slice(layer, layer + 1) for layer in range(experts.shape[0])}
        rows = {layer: {name: x[part] for name, x in sums.items()} for layer, part in layers.items()}
        table = [{"layer": layer} | shares(row, passes, given.tile) for layer, row in rows.items()]
        print_table(f"{checkpoint}: validation loss {plain:.4f} with plain top-K, {len(passes)} passes", table)
        table, quarters = by_quarter(sums, len(passes))
        print_table("by popularity", table)
        if given.losses:
            losing = sums["dropped"] > sums["pairs"] / 2
            print_table("validation loss", losses(experts, passes, plain, losing, quarters))
    return 0


if __name__ == "__main__":
    sys.exit(main())
