"""Tables, geometric means and the plot, made from the records. This module needs no torch."""

import csv
import io
import math
import statistics
from typing import NamedTuple

from .records import SETTLE_S, settle_of

BASE = "smoe"
RATIO_PASSES = ("forward", "backward", "both", "inference", "graph")
GPU_PASSES = tuple("gpu_" + name for name in RATIO_PASSES)
MIB = 2**20
KERNEL_NAME = 70  # characters that are shown


class Table(NamedTuple):
    title: str
    columns: list
    rows: list  # of lists of strings, one for each column
    foot: list  # of sentences


# ---- arithmetic ----


class Ratio(NamedTuple):
    value: float
    error: float | None  # standard error; None if the record has no times of single rounds

    def __str__(self):
        return f"{self.value:.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")


def _round_ms(of, measured):
    """The ms of a pass in every round, from a record or from its part `smoe`; [] if they are not known. In records
    without its times the backward is both less the forward."""
    known = of.get("round_ms") or {}
    if measured != "backward" or measured in known:
        return known.get(measured, [])
    if not known.keys() >= {"forward", "both"}:
        return []
    return [both - forward for both, forward in zip(known["both"], known["forward"], strict=True)]


def _standard_error(values):
    """Of the median of `values`, from their quartiles: for normally distributed values 1.2533 sigma / sqrt(n), and sigma
    is the distance of the quartiles / 1.349. None for one value, or if a quartile is infinite."""
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4)
    return 1.2533 / 1.349 * (high - low) / math.sqrt(len(values)) if math.isfinite(high - low) else None


def ratio(record, measured):
    """The peer's time divided by smoe's time in the same round: the median over the rounds. Above 1 smoe is faster. From
    a record without the times of single rounds: the ratio of the medians. None if one was not measured, or if a
    backward's time is a difference of two times and not positive. In a single round it may be negative; there smoe's
    counts as infinitely short, so that the median stays the middle of all rounds."""
    base = record.get(BASE) or {}
    mine, theirs = base.get(measured + "_ms"), record.get(measured + "_ms")
    if not ((mine or 0) > 0 and (theirs or 0) > 0):
        return None
    pairs = zip(_round_ms(record, measured), _round_ms(base, measured), strict=True)
    ratios = [t / m if m > 0 else math.inf for t, m in pairs]
    if not ratios:
        return Ratio(theirs / mine, None)
    middle = statistics.median(ratios)
    return Ratio(middle, _standard_error(ratios)) if 0 < middle < math.inf else None


def mean_of(ratios):
    """The geometric mean of some layers' ratios. Its standard error is known if every ratio's is."""
    mean = geometric_mean([one.value for one in ratios])
    if any(one.error is None for one in ratios):
        return Ratio(mean, None)
    return Ratio(mean, mean * math.hypot(*(one.error / one.value for one in ratios)) / len(ratios))


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def best(tunings, measured):
    """The record with the least ratio among those of one peer: the tuning in which the peer was best. For smoe itself
    the record with the median time."""
    with_time = [record for record in tunings if record.get(measured + "_ms") is not None]
    if not with_time:
        return None
    if with_time[0]["peer"] == BASE:
        return sorted(with_time, key=lambda record: record[measured + "_ms"])[(len(with_time) - 1) // 2]
    return min(with_time, key=lambda record: getattr(ratio(record, measured), "value", math.inf))


def tflops(record, measured):
    """Model FLOPs divided by the time, in TFLOP/s: 6TKnd FLOPs forward, twice as many backward."""
    forward = 6 * record["T"] * record["K"] * record["n"] * record["d"]
    factor = {"backward": 2, "both": 3}.get(measured.removeprefix("gpu_"), 1)
    return factor * forward / record[measured + "_ms"] / 1e9


# ---- which records belong together ----


def _kind(record):
    """The fields that all records of a table have in common."""
    names = ("device", "suite", "part", "routing", "dtype")
    return (*(record.get(name) for name in names), settle_of(record))


def _layer(record):
    return _kind(record), record["shape"]


def _latest(records):
    """Of each layer and peer the records of the newest commit, and smoe's records of the same layers and commits."""
    by_date = sorted(records, key=lambda record: record["date"])
    commits = {(_layer(record), record["peer"]): record["commit"] for record in by_date}
    beside = {(layer, commit) for (layer, _), commit in commits.items()}
    return [
        record
        for record in records
        if record["commit"] == commits[_layer(record), record["peer"]]
        or (record["peer"] == BASE and (_layer(record), record["commit"]) in beside)
    ]


def _with_kernels(records):
    return _latest([record for record in records if "kernels" in record])


def newest(records):
    """The records that tables are made of: the latest ones, and the latest ones that have the kernels' times."""
    shown = {id(record) for record in _latest(records) + _with_kernels(records)}
    return [record for record in records if id(record) in shown]


def grouped(records, key):
    """{key(record): records}, in order of first appearance."""
    groups = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


# ---- cells ----


def _ms(value):
    return f"{value:.4f}" if value < 100 else f"{value:.1f}"


def _tflops(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _cell(form, value):
    return "" if value is None else form(value)


def _times(peer, tunings, passes):
    if all("failed" in record for record in tunings):
        return ["failed"] + [""] * (3 * len(passes) - 1)
    cells = []
    for measured in passes:
        record = best(tunings, measured)
        cells.append(_cell(lambda r: _ms(r[measured + "_ms"]), record))
        cells.append(_cell(lambda r: _tflops(tflops(r, measured)), record))
        known = None if record is None or peer == BASE else ratio(record, measured)
        cells.append(_cell(str, known))
    return cells


def means(rows, passes):
    """One sentence for each peer: of each pass the geometric mean and the least of the ratios."""
    sentences = []
    for peer in dict.fromkeys(peer for *_, peer in rows if peer != BASE):
        found = []
        for measured in passes:
            records = [best(tunings, measured) for (*_, name), tunings in rows.items() if name == peer]
            values = [value for record in records if record and (value := ratio(record, measured))]
            if values:
                least = min(values, key=lambda one: one.value)
                name = measured.removeprefix("gpu_")
                commits = {record["commit"] for record in records if record}
                of = f"{len(values)} layers" + (f" of {len(commits)} commits" if len(commits) > 1 else "")
                found.append(f"{name} {mean_of(values)} (least {least}, {of})")
        if found:
            sentences.append(f"{peer} / {BASE}, geometric mean: " + ", ".join(found))
    return sentences


def _once(record):
    """The cells with the memory and the first calls of a record."""
    first, new = record.get("first_call_s"), record.get("new_t_s")
    mark = "*" if record.get("first_in_process") else ""
    return [
        _cell(lambda b: f"{b / MIB:.0f}", record.get("kept_bytes")),
        _cell(lambda b: f"{b / MIB:.0f}", record.get("peak_bytes")),
        _cell(lambda s: f"{s['forward'] + s['backward']:.2f}{mark}", first),
        _cell("{:.2f}".format, new),
    ]  # fmt: skip


def _errors(record):
    errors = record.get("errors") or {}
    return [_cell("{:.2e}".format, errors.get(key)) for key in ("O", "dX", "dW1", "dW2", "dS")]


# ---- tables ----


def _rows(records):
    """{(layer, commit, peer): tunings}: each layer's records of a commit stand together, smoe's first."""
    order = {name: i for i, name in enumerate(dict.fromkeys(record["shape"] for record in records))}
    commits = {commit: i for i, commit in enumerate(dict.fromkeys(record["commit"] for record in records))}
    place = lambda record: (order[record["shape"]], commits[record["commit"]], record["peer"] != BASE)
    return grouped(sorted(records, key=place), lambda record: (record["shape"], record["commit"], record["peer"]))


def _when(records):
    """The commit, if there is one only, and the days of the measurement."""
    commits = {record["commit"] for record in records}
    days = sorted({record["date"][:10] for record in records})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return when if len(commits) > 1 else f"commit {commits.pop()}, {when}"


def _table(title, first, columns, rows, cells, foot=()):
    """title: text around {when}. first: the name of the first column. cells: {row: strings} of some of the rows. Rows of
    several commits get a column with the commit."""
    several = len({commit for _, commit, _ in cells}) > 1
    names = lambda row: list(row) if several else [row[0], row[2]]
    when = _when([record for row in cells for record in rows[row]])
    return Table(title.format(when=when), names((first, "commit", "peer")) + columns,
                 [names(row) + own for row, own in cells.items()], list(foot))  # fmt: skip


def _times_tables(title, rows, known):
    """A table of those of the passes `known` that were measured; none if no pass was."""
    records = [record for tunings in rows.values() for record in tunings]
    passes = [p for p in known if any(record.get(p + "_ms") is not None for record in records)]
    if not passes:
        return []
    columns = [column for p in passes for column in (f"{p.removeprefix('gpu_')} ms", "TFLOP/s", "ratio")]
    cells = {row: _times(row[2], tunings, passes) for row, tunings in rows.items()}
    return [_table(title, "layer", columns, rows, cells, means(rows, passes))]


def _layer_tables(title, records):
    rows = _rows(_latest(records))
    made = _times_tables(title, rows, RATIO_PASSES)
    made += _times_tables(title + ": the kernels' times alone", _rows(_with_kernels(records)), GPU_PASSES)
    whole = {row: tunings[0] for row, tunings in rows.items() if "first_call_s" in tunings[0]}
    if whole:
        once = {row: _once(record) for row, record in whole.items()}
        columns = ["kept MiB", "peak MiB", "first call s", "new T s"]
        made.append(_table(title + ": memory and first calls", "layer", columns, rows, once))
    errors = {row: _errors(record) for row, record in whole.items() if record.get("errors")}
    if errors:
        columns = ["O", "dX", "dW1", "dW2", "dS"]
        made.append(_table(title + ": relative error against fp64", "layer", columns, rows, errors))
    return made


STEP_COLUMNS = ["ms a step", "k tokens/s", "B tokens/day", "TFLOP/s", "peak GiB", "GB by the driver", "first step s",
                "ratio"]  # fmt: skip


def _step(record, mine):
    """mine: smoe's record, or None."""
    if record is None:
        return ["failed"] + [""] * (len(STEP_COLUMNS) - 1)
    return [
        f"{record['step_ms']:.1f}", f"{record['tokens_per_s'] / 1e3:.1f}",
        f"{record['tokens_per_s'] * 86400 / 1e9:.2f}", _tflops(record["step_tflops"]),
        _cell(lambda b: f"{b / 2**30:.1f}", record["peak_bytes"]),
        _cell(lambda b: f"{b / 1e9:.2f}", record.get("driver_bytes")), f"{record['first_step_s']:.0f}",
        "" if mine is None or mine is record else f"{record['step_ms'] / mine['step_ms']:.3f}",
    ]  # fmt: skip


def _step_table(title, records):
    rows = _rows(_latest(records))
    least = {row: min((r for r in tunings if "step_ms" in r), key=lambda r: r["step_ms"], default=None)
             for row, tunings in rows.items()}  # fmt: skip
    cells = {row: _step(record, least.get((*row[:2], BASE))) for row, record in least.items()}
    return _table(title, "model", STEP_COLUMNS, rows, cells)


def make(records):
    """The tables of each device, suite, part, routing, type and time of settling. Of the records they show the newest of
    each layer and peer; those of the kernels' times may be older than the others."""
    made = []
    for (device, suite, part, routing, dtype, settle_s), together in grouped(records, _kind).items():
        where = f"{device}, {{when}}"
        if part == "e2e":
            made.append(_step_table(f"A whole training step, {where}", together))
        else:
            other = "" if dtype == "bf16" else f"{dtype}, "
            other += "" if settle_s == SETTLE_S else f"settled for {settle_s:g} s, "
            made += _layer_tables(f"Suite {suite}, {part}, {routing} routing, {other}{where}", together)
    return made


def of_kernels(records):
    """One table of every kernel of the records that have them: its time, and its share of the pass."""
    rows = []
    for record in records:
        for measured, kernels in (record.get("kernels") or {}).items():
            whole = sum(us for *_, us in kernels)
            rows += [
                [record["shape"], record["commit"], record["peer"], f"{settle_of(record):g}", str(record["tuning"]), measured,
                 kernel[:KERNEL_NAME], f"{launches:g}", f"{us:.1f}", f"{100 * us / whole:.1f}"]
                for kernel, launches, us in kernels
            ]  # fmt: skip
    columns = ["layer", "commit", "peer", "settled s", "tuning", "pass", "kernel", "launches", "us", "%"]
    return [Table("Kernels", columns, rows, [])] if rows else []


def versions(records):
    """One sentence: the versions of every peer, as the records have them."""
    found = {}
    for record in records:
        for package, version in (record.get("versions") or {}).items():
            found.setdefault(package, dict.fromkeys(()))[version] = None
    return ", ".join(f"{package} {' and '.join(seen)}" for package, seen in sorted(found.items()))


# ---- forms ----


def as_text(tables):
    """Aligned columns, for a terminal."""
    out = []
    for table in tables:
        lines = [table.columns] + table.rows
        widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
        out.append(table.title)
        for line in lines:
            names = 3 if "commit" in table.columns else 2
            cells = [c.ljust(w) if i < names else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
            out.append("  ".join(cells).rstrip())
        out += table.foot + [""]
    return "\n".join(out)


def as_markdown(tables):
    out = []
    for table in tables:
        out += [table.title, ""]
        out.append("| " + " | ".join(table.columns) + " |")
        out.append("|" + "---|" * len(table.columns))
        out += ["| " + " | ".join(row) + " |" for row in table.rows]
        out.append("")
        for sentence in table.foot:
            out += [sentence + ".", ""]
    return "\n".join(out)


def as_csv(records):
    """A line for each record, with nested fields as `errors.O`, without the times of kernels and of single rounds."""
    flat = [_flat(record | {"settle_s": settle_of(record)}) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for one in flat for name in one)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(record, prefix=""):
    found = {}
    for name, value in record.items():
        if name in ("kernels", "round_ms"):
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return found


def _by_label(layers):
    """{(label, peer): tunings}. A label is the shape and those of the other words that are not the same for all layers."""
    names = ("shape", "part", "routing", "dtype", "device")
    words = lambda record: (*(record[name] for name in names), f"settled for {settle_of(record):g} s")
    differ = [i for i, seen in enumerate(zip(*map(words, layers), strict=True)) if i == 0 or len(set(seen)) > 1]
    return grouped(layers, lambda record: (" ".join(words(record)[i] for i in differ), record["peer"]))


def plot(records, path):
    """Draws the ratios by layer as bars from 1, with a logarithmic scale: forward above, backward below, one colour for
    each peer. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    layers = _latest([record for record in records if record["part"] != "e2e"])
    by_layer = _by_label(layers)
    names = list(dict.fromkeys(name for name, _ in by_layer))
    peers = list(dict.fromkeys(peer for _, peer in by_layer if peer != BASE))
    figure, panels = pyplot.subplots(2, 1, sharex=True, figsize=(max(8, 0.9 * len(names)), 7))
    for panel, measured in zip(panels, ("forward", "backward"), strict=True):
        for position, peer in enumerate(peers):
            records_of = [best(by_layer.get((name, peer), []), measured) for name in names]
            ratios = [ratio(record, measured) if record else None for record in records_of]
            heights = [one.value - 1 if one else 0 for one in ratios]
            errors = [(one.error if one else None) or 0 for one in ratios]
            places = [i + 0.8 * (position + 0.5) / len(peers) - 0.4 for i in range(len(names))]
            panel.bar(places, heights, 0.8 / len(peers), bottom=1, yerr=errors if any(errors) else None, label=peer)
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5)))
        panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_ylabel(f"{measured}: time / smoe's time")
    panels[0].legend(ncols=len(peers), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    panels[1].set_xticks(range(len(names)), names, rotation=45, ha="right")
    first = layers[0]
    figure.suptitle(f"{first['device']}, {_when(layers)}; above 1: smoe is faster")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
