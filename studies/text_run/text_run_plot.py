#!/usr/bin/env python3
"""Draws the two runs of text_run.sh in one picture and says when the MoE model passes its dense twin's last loss.

Usage: text_run_plot.py OUT PICTURE.png [RESULTS]      needs the package matplotlib
OUT is text_run.sh's folder. RESULTS, a folder, receives the logs as text_run_moe.jsonl and text_run_twin.jsonl.
Exit status: 0, 2 usage, 3 a log is missing or has no validation.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

RUNS = {"moe": ("MoE, 8 of 64 experts", "#c0392b"), "twin": ("dense twin", "#2c6fa6")}


def read_log(path: Path) -> list[dict]:
    """The lines with a validation: step, tokens, seconds of training, val_loss."""
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    validated = [line for line in lines if line.get("val_loss") is not None]
    if not validated:
        raise ValueError(f"{path}: no line has a val_loss")
    return validated


def first_below(lines: list[dict], loss: float, what: str) -> float | None:
    """The value of `what` at which the validation loss first falls to `loss`, interpolated linearly between
    validations. None if it never does."""
    before = None
    for line in lines:
        if line["val_loss"] <= loss:
            if before is None:
                return line[what]
            share = (before["val_loss"] - loss) / (before["val_loss"] - line["val_loss"])
            return before[what] + share * (line[what] - before[what])
        before = line
    return None


def draw(runs: dict[str, list[dict]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    last = runs["twin"][-1]["val_loss"]
    for axis, what, unit, label in (
        (axes[0], "seconds", 1, "seconds of training"),
        (axes[1], "tokens", 1e6, "tokens, millions"),
    ):
        for name, lines in runs.items():
            text, color = RUNS[name]
            axis.plot(
                [line[what] / unit for line in lines],
                [line["val_loss"] for line in lines],
                ".-",
                color=color,
                label=text,
            )
        axis.axhline(last, color=RUNS["twin"][1], linewidth=0.8, linestyle=":")
        passed = first_below(runs["moe"], last, what)
        if passed is not None:
            axis.axvline(passed / unit, color="#555555", linewidth=0.8, linestyle=":")
            axis.annotate(f"{passed / unit:.0f}", (passed / unit, last), (4, 6), textcoords="offset points", fontsize=9)
        axis.set_xlabel(label)
        axis.grid(color="#dddddd")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    # The first validations would squeeze the rest into the lower half.
    highest = sorted(line["val_loss"] for lines in runs.values() for line in lines)
    axes[0].set_ylim(highest[0] - 0.05, highest[int(0.92 * (len(highest) - 1))])
    axes[0].set_ylabel("validation loss, nats a token")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> int:
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    out, picture = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        runs = {name: read_log(out / name / "train.jsonl") for name in RUNS}
    except ValueError as problem:
        print(f"text_run_plot.py: {problem}", file=sys.stderr)
        return 3
    print("| | seconds | tokens, M | tokens/s | validation loss |\n|---|---|---|---|---|")
    for name, lines in runs.items():
        end = lines[-1]
        rate = end["tokens"] / end["seconds"]
        print(
            f"| {RUNS[name][0]} | {end['seconds']:.1f} | {end['tokens'] / 1e6:.1f} | {rate:.0f} | {end['val_loss']:.4f} |"
        )
    last = runs["twin"][-1]
    for what, unit, text in (("seconds", 1, "s"), ("tokens", 1e6, "M tokens")):
        passed = first_below(runs["moe"], last["val_loss"], what)
        when = "never" if passed is None else f"at {passed / unit:.1f} {text}, {passed / last[what]:.2f} of the twin's"
        print(f"the MoE model passes the twin's last loss, {last['val_loss']:.4f}: {when}")
    draw(runs, picture)
    if len(sys.argv) == 4:
        for name in RUNS:
            shutil.copy(out / name / "train.jsonl", Path(sys.argv[3]) / f"text_run_{name}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
