#!/usr/bin/env python3
"""Tables and a picture of what rounding_study.sh trained.

Usage: rounding_study.py OUT [PICTURE.png [RECORDS.jsonl]]      the picture needs the package matplotlib; - for none OUT
is rounding_study.sh's folder. RECORDS.jsonl receives a line for each finished run of OUT. Lines of other runs stay in
it, and the tables count them too. A difference is a rule's value less that of plain top-K with the same case and seed.
Its 95 % interval is from Student's t. "seeds" is the number of paired seeds for which the interval would be 0.02
perplexity to either side, given the measured standard deviation. Exit status: 0, 2 usage, 3 no finished run.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import NormalDist, fmean, stdev

RULES = ("none", "nr-f", "sr-f", "nr-s", "balance-f", "up", "down")
CASES = {
    "one": "one tile of rows a mean expert",
    "two": "two tiles",
    "four": "four tiles",
    "coarse": "coarse model, 32 tiles",
}
SHOWN = 0.02  # half width, in perplexity, of the interval for which "seeds" is computed
MOST_SEEDS = 100_000
# The 97.5 % quantile of Student's t for 1 to 10 degrees of freedom. For more, student_t expands around the normal
# distribution.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def student_t(freedom: int) -> float:
    if freedom <= len(T):
        return T[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def read_run(result: Path) -> dict:
    """A finished run: its result, and the means of `added`, `dropped` and `busiest` over the second half of its log."""
    case, rule, seed = result.name.removesuffix(".json").split(".")
    run = json.loads(result.read_text())
    lines = [
        json.loads(line) for line in (result.parent / f"{case}.{rule}.{seed}" / "train.jsonl").read_text().splitlines()
    ]
    record = {"case": case, "rounding": rule, "seed": int(seed), "perplexity": math.exp(run["val_loss"])}
    record |= {key: run[key] for key in ("val_loss", "loss", "val_tokens", "tokens", "seconds", "tokens_per_s")}
    for key in ("added", "dropped", "emptied", "busiest"):
        values = [line[key] for line in lines[len(lines) // 2 :] if key in line]
        record[key] = fmean(values) if values else None
    return record


def read_runs(out: Path, kept: Path | None) -> list[dict]:
    """The finished runs of `out`, and those of the file `kept` that `out` does not have."""
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    found = [json.loads(line) for line in lines] + [read_run(result) for result in out.glob("*.*.[0-9]*.json")]
    return sorted(
        {(run["case"], run["rounding"], run["seed"]): run for run in found}.values(),
        key=lambda run: (list(CASES).index(run["case"]), RULES.index(run["rounding"]), run["seed"]),
    )


def spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def interval(values: list[float]) -> float:
    """Half of the 95 % interval of the mean; NaN for one value."""
    return student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def seeds_needed(deviation: float) -> int | None:
    """The smallest number of values with this standard deviation whose mean has an interval of at most SHOWN to either
    side."""
    if math.isnan(deviation):
        return None
    return next((n for n in range(2, MOST_SEEDS) if student_t(n - 1) * deviation / math.sqrt(n) <= SHOWN), MOST_SEEDS)


def differences(runs: dict[int, dict], plain: dict[int, dict], key: str) -> list[float]:
    return [runs[seed][key] - plain[seed][key] for seed in sorted(runs) if seed in plain]


def number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def mean(runs: dict[int, dict], key: str) -> float | None:
    values = [run[key] for run in runs.values() if run.get(key) is not None]
    return fmean(values) if values else None


def row(case: str, rule: str, runs: dict[int, dict], plain: dict[int, dict]) -> str:
    losses, perplexities = ([run[key] for run in runs.values()] for key in ("val_loss", "perplexity"))
    cells = [rule, str(len(runs)), f"{fmean(losses):.4f}", number(spread(losses), ".4f"), f"{fmean(perplexities):.3f}"]
    cells += [number(spread(perplexities), ".3f")]
    found = [] if rule == "none" else differences(runs, plain, "perplexity")
    if found:
        half = interval(found)
        needed = seeds_needed(spread(found))
        loss = differences(runs, plain, "val_loss")
        cells += [f"{fmean(loss):+.4f}", f"{fmean(found):+.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")]
        cells += ["" if needed is None else f"{needed}{'+' if needed == MOST_SEEDS else ''}"]
    else:
        cells += ["", "", ""]
    shares = (mean(runs, "added"), mean(runs, "dropped"), mean(runs, "emptied"))
    cells += [number(None if share is None else 100 * share, ".2f") for share in shares]
    cells += [number(mean(runs, "busiest"), ".2f"), number(mean(runs, "tokens_per_s"), ".0f")]
    return "| " + " | ".join(cells) + " |"


def print_tables(arms: dict[tuple[str, str], dict[int, dict]]) -> None:
    head = (
        "| rule | runs | loss, nats | sd | perplexity | sd | paired difference, nats | in perplexity, 95 % | seeds | added, % | dropped, % "
        "| emptied experts, % | busiest expert | tokens/s |"
    )
    for case, text in CASES.items():
        rules = [rule for rule in RULES if (case, rule) in arms]
        if not rules:
            continue
        print(f"\n{case}: {text}\n\n{head}\n{'|---' * 14}|")
        for rule in rules:
            print(row(case, rule, arms[case, rule], arms.get((case, "none"), {})))


def draw(arms: dict[tuple[str, str], dict[int, dict]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {}
    for case in CASES:
        for rule in RULES[1:]:
            values = differences(arms.get((case, rule), {}), arms.get((case, "none"), {}), "perplexity")
            if values:
                found[f"{CASES[case].split(' of ')[0]}, {rule}"] = values
    figure, axis = pyplot.subplots(figsize=(8, 0.8 + 0.4 * max(1, len(found))))
    for place, values in enumerate(found.values()):
        axis.plot(values, [place] * len(values), "o", color="#9ab8d8", markersize=5)
        half = interval(values)
        axis.errorbar(
            fmean(values),
            place,
            xerr=None if math.isnan(half) else half,
            fmt="D",
            color="#c0392b",
            capsize=4,
            markersize=5,
        )
    axis.axvline(0, color="#555555", linewidth=0.8)
    axis.set_yticks(range(len(found)), list(found))
    axis.set_ylim(len(found) - 0.5, -0.5)
    axis.set_xlabel("perplexity less plain top-K's with the same seed; diamond: mean, 95 % interval")
    axis.grid(axis="x", color="#dddddd")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> int:
    if len(sys.argv) not in (2, 3, 4) or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    records = read_runs(Path(sys.argv[1]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
    if not records:
        print(f"rounding_study.py: {sys.argv[1]} has no finished run", file=sys.stderr)
        return 3
    arms: dict[tuple[str, str], dict[int, dict]] = {}
    for record in records:
        arms.setdefault((record["case"], record["rounding"]), {})[record["seed"]] = record
    print_tables(arms)
    if len(sys.argv) > 3:
        made = Path(sys.argv[3] + ".tmp")
        made.write_text("".join(json.dumps(record) + "\n" for record in records))
        made.rename(sys.argv[3])
    if len(sys.argv) > 2 and sys.argv[2] != "-":
        draw(arms, Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
