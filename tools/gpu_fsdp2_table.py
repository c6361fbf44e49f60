#!/usr/bin/env python3
"""Tables of the runs of tools/gpu_fsdp2.sh: step times, ratios of tokens/s for each GPU, differences of losses.

Usage: gpu_fsdp2_table.py LOGS      LOGS: a folder with a JSON-lines file for each run, as train_fsdp2.py --json writes it
Exit status: 0, 2 usage.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = "run | GPUs | ms a step | k tokens/s | k tokens/s a GPU | G tokens a day a GPU | MFU | peak GiB | communication | exposed"


def read(folder: Path) -> dict[str, list[dict]]:
    """The lines of every training run, by the run's name."""
    files = sorted(path for path in folder.glob("*.jsonl") if not path.stem.startswith("finetune"))
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def row(name: str, end: dict) -> str:
    share = [f"{end[key]:.1%}" if end.get(key) is not None else "" for key in ("mfu", "communication", "exposed")]
    cells = [name, end["processes"], f"{end['step_ms']:.1f}"]
    cells += [f"{end['tokens_per_s'] / 1e3:.2f}", f"{end['tokens_per_s_each'] / 1e3:.2f}"]
    cells += [f"{end['tokens_per_day_each'] / 1e9:.3f}", share[0], f"{end['memory_gib']:.1f}", *share[1:]]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def pairs(names: list[str]) -> list[tuple[str, str]]:
    """Pairs of runs to compare: smoe and a peer on equally many GPUs, an implementation on several GPUs and on one, and
    smoe with and without fully_shard."""
    found = []
    for name in names:
        if "smoe" in name.split("_"):
            found += [(name, name.replace("smoe", peer).removesuffix("_again")) for peer in ("sonicmoe", "scattermoe")]
        if name.startswith("two_"):
            found.append((name, name.replace("two", "one").removesuffix("_again")))
        if name.startswith("many_") and not name.endswith("_1"):
            found.append((name, name.rsplit("_", 1)[0] + "_1"))
    found += [("two_smoe", "plain_smoe"), ("one_smoe", "plain_smoe")]
    return [(a, b) for a, b in found if a in names and b in names]


def difference(a: list[dict], b: list[dict]) -> str:
    losses = [{line["step"]: line["loss"] for line in run if line["kind"] == "step"} for run in (a, b)]
    both = sorted(losses[0].keys() & losses[1].keys())
    if not both:
        return "no losses"
    step = max(both, key=lambda each: abs(losses[0][each] - losses[1][each]))
    most = abs(losses[0][step] - losses[1][step])
    last = both[-1]
    return f"{len(both)} losses, at most {most:.4f} apart (step {step}); at step {last} {losses[0][last]:.4f} and {losses[1][last]:.4f}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    runs = read(Path(sys.argv[1]))
    ends = {name: line for name, lines in runs.items() for line in lines if line["kind"] == "end"}
    print(f"| {HEAD} |\n|{'---|' * (HEAD.count('|') + 1)}")
    for name, end in ends.items():
        print(row(name, end))
    print()
    for a, b in pairs(list(ends)):
        print(f"{a} / {b}, tokens/s a GPU: {ends[a]['tokens_per_s_each'] / ends[b]['tokens_per_s_each']:.3f}")
    for name in runs:
        if name.startswith("loss_") and name != "loss_smoe" and "loss_smoe" in runs:
            print(f"{name} and loss_smoe: {difference(runs[name], runs['loss_smoe'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
