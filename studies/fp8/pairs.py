#!/usr/bin/env python3
"""The plan and the result of README.md, "Does it train as well?".

Usage: pairs.py RECORDS...      the table, from files with JSON lines of pairs.sh, such as OUT/*.json
       pairs.py --plan OUT      the runs that pairs.sh is to make in the folder OUT, in their order
A difference is the last validation loss of a run less that of the bf16 run with the same seed, in nats a token. Its mean has a
95 % interval from Student's t. The plan begins with CHANCE pairs of bf16 runs. When all of them are made, the standard deviation
of their differences fixes the number of fp8 pairs, and OUT/plan.txt tells it; before this no fp8 run is in the plan.
The bound is that the upper end of the interval is at most 0.25 % of the mean loss of these seeds in bf16.
Exit status: 0, 1 an arm of fp8 misses the bound, 2 usage, 3 no pair.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

sys.path.append(str(Path(__file__).resolve().parents[1] / "rounding"))
from rounding_study import interval, student_t  # noqa: E402

ARMS = ("higher", "f8", "f8-dgrad")
HALF, LEAST, MOST, BOUND = 0.004, 14, 32, 0.0025
CHANCE, BEFORE = 8, 20  # pairs that measure chance; seeds that run in bf16 while these are not finished

Losses = dict[tuple[str, int], float]


def read_losses(files: list[Path]) -> Losses:
    runs = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {(run["arm"], run["seed"]): run["val_loss"] for run in runs}


def differences(losses: Losses, arm: str) -> dict[int, float]:
    """By seed."""
    seeds = sorted(seed for name, seed in losses if name == arm and ("bf16", seed) in losses)
    return {seed: losses[arm, seed] - losses["bf16", seed] for seed in seeds}


def pairs_needed(deviation: float) -> int:
    """The smallest number of pairs, in LEAST to MOST, whose mean has an interval of at most HALF to either side."""
    return next((n for n in range(LEAST, MOST) if student_t(n - 1) * deviation / math.sqrt(n) <= HALF), MOST)


def plan(out: Path) -> list[str]:
    fixed = out / "plan.txt"
    if not fixed.exists():
        found = differences(read_losses(sorted(out.glob("*.[0-9]*.json"))), "higher")
        if len(found) < CHANCE:
            chance = [f"{arm}.{seed}" for seed in range(1, CHANCE + 1) for arm in ("bf16", "higher")]
            return chance + [f"bf16.{seed}" for seed in range(CHANCE + 1, BEFORE + 1)]
        deviation = stdev(found.values())
        said = time.strftime(f"{pairs_needed(deviation)} pairs, fixed on %Y-%m-%d %H:%M:%S UTC: deviation {deviation:.5f}\n", time.gmtime())
        temporary = out / f"plan.{time.time_ns()}.tmp"
        temporary.write_text(said)
        temporary.rename(fixed)
    seeds = range(1, int(fixed.read_text().split()[0]) + 1)
    return [f"{arm}.{seed}" for seed in seeds for arm in ("bf16", "f8")] + [f"f8-dgrad.{seed}" for seed in seeds]


def print_table(losses: Losses) -> int:
    print("| arm | pairs | bf16's loss | mean difference | 95 % | sd | pairs needed | worst (seed) | upper end, % of the loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    arms = missed = 0
    for arm in ARMS:
        by_seed = differences(losses, arm)
        if len(by_seed) < 2:
            continue
        values = list(by_seed.values())
        loss, mean, half = fmean(losses["bf16", seed] for seed in by_seed), fmean(values), interval(values)
        worst = max(by_seed, key=lambda seed: by_seed[seed])
        upper = (mean + half) / loss
        arms += 1
        missed += arm != "higher" and upper > BOUND
        print(
            f"| {arm} | {len(values)} | {loss:.4f} | {mean:+.4f} | ± {half:.4f} | {stdev(values):.4f} "
            f"| {pairs_needed(stdev(values))} | {by_seed[worst]:+.4f} ({worst}) | {100 * upper:+.3f} |"
        )
    return 3 if not arms else 1 if missed else 0


def main() -> int:
    if len(sys.argv) < 2 or (sys.argv[1] == "--plan" and len(sys.argv) != 3):
        print(__doc__, file=sys.stderr)
        return 2
    if sys.argv[1] == "--plan":
        print(*plan(Path(sys.argv[2])), sep="\n")
        return 0
    return print_table(read_losses([Path(name) for name in sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
