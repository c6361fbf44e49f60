"""What docs/peers.md shows of the records: of every suite the newest commit that has it, and older ones for the layers that
it lacks, one number a cell. This module needs no torch."""

from .records import SETTLE_S, settle_of
from .tables import BASE, MIB, best, geometric_mean, grouped, ratio

NAMES = {"sonicmoe": "SonicMoE", "scattermoe": "ScatterMoE", "momoe": "MoMoE", "grouped_mm": "torch's grouped_mm",
         "transformers": "Transformers, grouped_mm", "deepgemm": "DeepGEMM", "smoe-portable": "smoe, portable",
         "scattermoe-mma": "ScatterMoE by mma.sync", "momoe-mma": "MoMoE by mma.sync", "liger": "Liger",
         "liger-mma": "Liger by mma.sync", "cublas": "cuBLAS, the GEMMs alone", BASE: BASE}  # fmt: skip
OTHERS = ("scattermoe", "momoe", "liger", "grouped_mm", "transformers", "deepgemm", "smoe-portable", "scattermoe-mma",
          "momoe-mma", "liger-mma", "cublas")  # fmt: skip
F8 = "smoe-f8"
BESIDE_F8 = {BASE: "smoe, bf16", "sonicmoe": "SonicMoE, bf16", "torchao-f8": "torchao, fp8"}
PASSES = ("forward", "backward", "both")
BY_LAYER = ("paper", "models")  # suites whose layers have rows of their own
ENOUGH = 0.75  # of the most layers that a commit has of a suite: newer ones with fewer are not shown


# ---- which records are shown ----


def _suite(record):
    return record["suite"], record["part"], record.get("routing")


def _newest_enough(records):
    """The records of the newest commit that has most of the layers; the layers that it lacks from older commits."""
    by_commit = grouped(sorted(records, key=lambda record: record["date"]), lambda record: record["commit"])
    layers = {commit: len({record["shape"] for record in some}) for commit, some in by_commit.items()}
    enough = [commit for commit, count in layers.items() if count >= ENOUGH * max(layers.values())]
    commits = list(by_commit)
    found = []
    for commit in reversed(commits[: commits.index(enough[-1]) + 1] if enough else []):
        have = {record["shape"] for record in found}
        found += [record for record in by_commit[commit] if record["shape"] not in have]
    return found


def _commits(records):
    return ", ".join(dict.fromkeys(record["commit"][:7] for record in records))


def _usual(records):
    return [r for r in records if settle_of(r) == SETTLE_S and r["dtype"] == "bf16" and "failed" not in r]


def chosen(records):
    """{(suite, part, routing, peer): (smoe's records, the peer's)}; steps by model instead of suite. Nothing is in fp8."""
    found = {}
    for (suite, part, routing), some in grouped(_usual(records), _suite).items():
        models = {r["shape"] for r in some} if part == "e2e" else {suite}
        for name in sorted(models):
            own = [r for r in some if part != "e2e" or r["shape"] == name]
            for peer in dict.fromkeys(r["peer"] for r in own if r["peer"] in NAMES and r["peer"] != BASE):
                theirs = _newest_enough([r for r in own if r["peer"] == peer])
                layers = {(r["shape"], r["commit"]) for r in theirs}
                mine = [r for r in own if r["peer"] == BASE and (r["shape"], r["commit"]) in layers]
                found[name, part, routing, peer] = mine, theirs
    return found


def beside_f8(records):
    """{peer: records}, suite `paper`: smoe in fp8 and what was measured beside it at the same commits."""
    usual = [r for r in _usual(records) if _suite(r) == ("paper", "experts", "random") and r["peer"] in (F8, *BESIDE_F8)]
    layers = {(r["shape"], r["commit"]) for r in _newest_enough([r for r in usual if r["peer"] == F8])}
    return grouped([r for r in usual if (r["shape"], r["commit"]) in layers], lambda r: r["peer"])


def used(records):
    """The records that the page is made of."""
    every = [*(some for pair in chosen(records).values() for some in pair), *beside_f8(records).values()]
    ids = {id(record) for some in every for record in some}
    return [record for record in records if id(record) in ids]


# ---- the tables ----


def _table(title, columns, rows):
    return [title, "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns),
            *("| " + " | ".join(row) + " |" for row in rows), ""]  # fmt: skip


def _ratios(theirs, measured):
    """One ratio for each layer: that of the best tuning."""
    tunings = grouped(theirs, lambda record: record["shape"]).values()
    found = [ratio(record, measured) for some in tunings if (record := best(some, measured))]
    return [one for one in found if one]


def _mean_and_least(values_of):
    """values_of: pass -> the layers' ratios."""
    cells = []
    for values in map(values_of, PASSES):
        cells += [f"{geometric_mean(values):.2f}", f"{min(values):.2f}"] if values else ["", ""]
    return cells


def _beside_smoe(theirs):
    return _mean_and_least(lambda measured: [one.value for one in _ratios(theirs, measured)])


def _memory(mine, theirs):
    """Geometric means over the layers of the other's kept bytes / smoe's, and of its peak / smoe's."""
    own = {record["shape"]: record for record in mine}
    cells = []
    for name in ("kept_bytes", "peak_bytes"):
        ratios = [record[name] / own[record["shape"]][name] for record in theirs
                  if record.get(name) and own.get(record["shape"], {}).get(name)]  # fmt: skip
        cells.append(f"{geometric_mean(ratios):.2f}" if ratios else "")
    return cells


def _what(suite, part, routing):
    return f"{suite}, with the router" if part == "layer" else suite if routing == "random" else f"{suite}, {routing} routing"


def _suites(found):
    rows = [[_what(*key[:3]), str(len({r["shape"] for r in theirs})), _commits(theirs), *_beside_smoe(theirs)]
            for key, (_, theirs) in found.items() if key[3] == "sonicmoe" and key[1] != "e2e"]  # fmt: skip
    columns = ["suite", "layers", "commit", "forward", "least", "backward", "least", "both", "least"]
    return _table("**SonicMoE's time / smoe's time**, geometric mean and least of each suite:", columns, rows)


def _layer_row(shape, mine, theirs):
    of = [record for record in theirs if record["shape"] == shape]
    own = [record for record in mine if record["shape"] == shape]
    times = [(best(own, measured) or {}).get(measured + "_ms") for measured in PASSES[:2]]
    cells = [shape] + ["" if ms is None else f"{ms:.3g}" for ms in times]
    for measured in PASSES[:2]:
        known = _ratios(of, measured)
        cells.append(f"{known[0].value:.2f}" if known else "")
    for some in (own, of):
        cells += [f"{some[0][name] / MIB:.0f}" if some[0].get(name) else "" for name in ("kept_bytes", "peak_bytes")]
    return cells


def _layers(suite, mine, theirs):
    shapes = list(dict.fromkeys(record["shape"] for record in mine))
    errors = [one.error for measured in PASSES[:2] for one in _ratios(theirs, measured) if one.error]
    spread = f"; standard error of a ratio: {max(errors):.2f} at most, {geometric_mean(errors):.3f} on average" if errors else ""
    columns = ["layer", "smoe forward, ms", "backward", "SonicMoE / smoe forward", "backward", "smoe kept, MiB", "peak",
               "SonicMoE kept", "peak"]  # fmt: skip
    title = f"**Suite {suite}** ({_commits(theirs)}{spread}):"
    return _table(title, columns, [_layer_row(shape, mine, theirs) for shape in shapes])


def _others(found):
    rows = []
    for peer in OTHERS:
        key = ("paper", "experts", "random", peer)
        if key in found:
            mine, theirs = found[key]
            rows.append([NAMES[peer], str(len({r["shape"] for r in theirs})), _commits(theirs), *_beside_smoe(theirs),
                         *_memory(mine, theirs)])  # fmt: skip
    columns = ["suite paper", "layers", "commit", "forward", "least", "backward", "least", "both", "least", "memory kept", "peak"]
    title = "**Other implementations / smoe**, times and memory, random routing:"
    return _table(title, columns, rows) if rows else []


def _over_f8(theirs, fast, measured):
    """The times of `theirs` / those of smoe in fp8, by layer: both are known as ratios to smoe in bf16."""
    of_f8 = {r["shape"]: one.value for r in fast if (one := ratio(r, measured))}
    of_others = {r["shape"]: 1.0 if r["peer"] == BASE else one.value for r in theirs if r["peer"] == BASE or (one := ratio(r, measured))}
    return [value / of_f8[shape] for shape, value in of_others.items() if shape in of_f8]


def _f8(beside):
    fast, rows = beside.get(F8, []), []
    for peer, name in BESIDE_F8.items():
        if theirs := beside.get(peer):
            cells = _mean_and_least(lambda measured, theirs=theirs: _over_f8(theirs, fast, measured))
            rows.append([name, str(len({r["shape"] for r in theirs})), _commits(theirs), *cells])
    columns = ["suite paper", "layers", "commit", "forward", "least", "backward", "least", "both", "least"]
    title = "**fp8 against bf16**: the other's time / that of `smoe-f8`, the weights quantised in every step:"
    return _table(title, columns, rows) if rows else []


def _steps(found):
    rows = []
    for (model, part, _, peer), (mine, theirs) in found.items():
        own, other = (min((r for r in some if "step_ms" in r), key=lambda r: r["step_ms"], default=None) for some in (mine, theirs))
        if part == "e2e" and own and other:
            rows.append([model, NAMES[peer], own["commit"], f"{own['tokens_per_s'] / 1e3:.1f}", f"{other['tokens_per_s'] / 1e3:.1f}",
                         f"{other['step_ms'] / own['step_ms']:.2f}"])  # fmt: skip
    columns = ["model", "beside", "commit", "smoe, k tokens/s", "the other", "its time / smoe's"]
    return _table("**A training step in PyTorch on one GPU**:", columns, rows) if rows else []


def block(records):
    """The generated part of docs/peers.md."""
    found = chosen(records)
    if not found:
        return "No records yet.\n"
    lines = _suites(found)
    for (suite, part, routing, peer), (mine, theirs) in found.items():
        if (part, routing, peer) == ("experts", "random", "sonicmoe") and suite in BY_LAYER:
            lines += _layers(suite, mine, theirs)
    return "\n".join([*lines, *_others(found), *_f8(beside_f8(records)), *_steps(found)])
