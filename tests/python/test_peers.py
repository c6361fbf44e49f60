"""bench/peers.py without a GPU: suites, records, ratios, tables, the document. test_peers_measured.py tests what is
measured, test_peers_run.py the processes and the command."""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import peers  # noqa: E402
from comparison import implementations, inputs, page, records, run, step, suites, tables  # noqa: E402

EVERY = suites.read(ROOT / "docs/shapes.csv")
TINY = suites.TINY[0]

# ---- suites ----


def test_a_suite_has_its_shapes():
    paper = suites.choose(EVERY, "paper")
    assert len(paper) == 12 and paper[3] == suites.Shape("paper", "7B-n256", 24576, 1536, 256, 128, 8)
    assert paper[3].flops == 6 * 24576 * 1536 * 256 * 8
    small = suites.choose(EVERY, "small")
    assert {shape.T for shape in small} == {1, 2, 4, 8, 16, 64, 256, 1024, 4096} and small[0].d == 2048
    both = suites.choose(EVERY, "paper,models")
    assert [shape.suite for shape in both] == ["paper"] * 12 + ["models"] * 8
    assert not {"small", "tiny"} & {shape.suite for shape in suites.choose(EVERY, "all")}


def test_shapes_are_chosen_by_name_and_size():
    assert [s.name for s in suites.choose(EVERY, "", "7B-n256,30B-n512")] == ["7B-n256", "30B-n512"]
    assert [s.T for s in suites.choose(EVERY, "rounding", "Qwen3-Next-80B-A3B")] == [16384]
    assert suites.choose(EVERY, thieks=["5,64,32,8,2"])[0][1:] == ("5x64x32x8x2", 5, 64, 32, 8, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("nosuch",), "--suite nosuch: the suites are paper, "),
        (("paper", "OLMoE-1B-7B"), "--shape OLMoE-1B-7B: no such shape in paper"),
        (("", "", ["1,2,3"]), "--thiek 1,2,3: five positive integers"),
        (("", "", ["5,64,32,8,9"]), "K <= E"),
        (("", "", ["5,64,x,8,2"]), "five positive integers"),
    ],
)
def test_an_unknown_shape_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        suites.choose(EVERY, *arguments)


def test_every_list_of_names_is_the_same():
    assert set(run.PEERS) == set(implementations.ALL) and set(peers.MODELS) == set(step.MODELS)
    assert peers.ROUTINGS == inputs.ROUTINGS
    for implementation in implementations.ALL.values():
        assert implementation.install and implementation.packages


# ---- records ----


def a_record(peer="sonicmoe", tuning=0, **more):
    made = dict(commit="c1", device="GPU", suite="paper", shape="7B-n256", T=24576, d=1536, n=256, E=128, K=8)
    return made | dict(
        part="experts", routing="random", dtype="bf16", peer=peer, tuning=tuning, date="2026-01-02T00:00:00Z",
        versions={"torch": "2.11"},
    ) | more  # fmt: skip


def test_records_are_appended_and_found(tmp_path):
    path = tmp_path / "new" / "peers.jsonl"
    records.append(path, [a_record()])
    records.append(path, [a_record("momoe"), a_record(tuning=1)])
    assert [(r["peer"], r["tuning"]) for r in records.read(path)] == [("sonicmoe", 0), ("momoe", 0), ("sonicmoe", 1)]
    records.append(path, [a_record(rounds=7)])  # measured again: the new record replaces the old one
    assert [r.get("rounds") for r in records.read(path)] == [None, None, 7]
    assert [file.name for file in path.parent.iterdir()] == ["peers.jsonl"]
    fields = {key: value for key, value in a_record().items() if key in records.KEY and key != "peer"}
    assert records.missing(records.read(path), fields, ["smoe", "sonicmoe", "momoe"]) == ["smoe"]
    changes = {"commit": "c2", "device": "other", "suite": "models", "tuning": 2, "part": "layer", "settle_s": 0.4}
    for name, value in changes.items():
        assert records.missing(records.read(path), fields | {name: value}, ["momoe"]) == ["momoe"], name
    assert not records.missing(records.read(path), fields | {"settle_s": 0.03}, ["momoe"])  # the default


def test_a_written_file_is_on_the_disk(tmp_path, monkeypatch):
    """The file must be flushed before it gets its name, and the folder after that."""
    done, path, real = [], tmp_path / "peers.jsonl", os.replace
    monkeypatch.setattr(records.os, "fsync", lambda handle: done.append(os.path.isdir(f"/proc/self/fd/{handle}")))
    monkeypatch.setattr(records.os, "replace", lambda *names: done.append("named") or real(*names))
    records.write_file(path, "text")
    assert done == [False, "named", True] and path.read_text() == "text"


def test_a_failing_write_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "peers.jsonl"
    records.append(path, [a_record()])
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(records.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        records.append(path, [a_record("momoe")])
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "line, why",
    [
        (b'{"peer"', "not a JSON object"),
        (b"3", "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        (b'{"peer": "smoe"}', "a record without commit, date, device, part, shape, suite"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, why):
    path = tmp_path / "peers.jsonl"
    path.write_bytes(json.dumps(a_record()).encode() + b"\n" + line + b"\n")
    with pytest.raises(records.Broken, match=f"line 2: {why}"):
        records.read(path)


def test_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real" / "peers.jsonl", tmp_path / "peers.jsonl"
    real.parent.mkdir()
    real.touch()
    link.symlink_to(real)
    records.append(link, [a_record()])
    assert link.is_symlink() and len(records.read(real)) == 1


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        for write in (records.check_writable, lambda path: records.write_file(path, "text")):
            with pytest.raises(OSError, match="not a regular file"):
                write(place)
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_two_programs_append_to_one_file(tmp_path):
    path, each = tmp_path / "peers.jsonl", 40
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from comparison import records\n"
        "for i in range(int(sys.argv[4])):\n"
        "    records.append(sys.argv[2], [json.loads(sys.argv[3]) | {'shape': f'{sys.argv[5]} {i}'}])"
    )
    start = lambda name: subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT / "bench"), str(path), json.dumps(a_record()), str(each), name]
    )
    assert [one.wait(120) for one in [start("a"), start("b")]] == [0, 0]
    assert len({record["shape"] for record in records.read(path)}) == 2 * each


# ---- ratios and tables ----


def timed(peer, forward, backward, mine=(2.0, 4.0), **more):
    smoe = {"forward_ms": mine[0], "backward_ms": mine[1], "both_ms": sum(mine)}
    times = {"forward_ms": forward, "backward_ms": backward, "both_ms": forward + backward}
    return a_record(peer, smoe=smoe, **times, **more)


def test_a_ratio_needs_two_positive_times():
    record = timed("sonicmoe", 3.0, 5.0)
    assert tables.ratio(record, "forward") == (1.5, None) and tables.ratio(record, "both").value == pytest.approx(8 / 6)
    assert tables.ratio(record, "inference") is None
    for theirs, mine in ((-1.0, -4.0), (-1.0, 4.0), (1.0, -4.0)):  # differences of two times, on a noisy machine
        assert tables.ratio(timed("sonicmoe", 3.0, theirs, (2.0, mine)), "backward") is None
    assert tables.geometric_mean([1, 4]) == pytest.approx(2)
    assert tables.geometric_mean([1.1, 1.2, 1.3]) == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))


def in_rounds(record, theirs, mine):
    record["round_ms"], record["smoe"]["round_ms"] = ({"forward": f, "both": b} for f, b in (theirs, mine))
    return record


def test_a_ratio_is_of_the_same_round():
    """The GPU's clock differs from round to round: here by a factor of 4. Medians that come from different rounds would
    say 3.0 / 1.0."""
    record = timed("sonicmoe", 3.0, 6.0, (1.0, 2.0))
    record = in_rounds(record, ([1.1, 4.8, 3.0], [3.3, 14.4, 9.0]), ([1.0, 4.0, 2.0], [3.0, 12.0, 8.0]))
    forward, backward = tables.ratio(record, "forward"), tables.ratio(record, "backward")
    assert forward.value == pytest.approx(1.2) and backward.value == pytest.approx(1.1)  # of 1.1 1.2 1.5; 1.1 1.2 1.0
    # The quartiles of 1.1, 1.2, 1.5 are 1.1 and 1.5.
    assert forward.error == pytest.approx(1.2533 * 0.4 / 1.349 / 3**0.5) and str(forward) == "1.200 ± 0.215"


def test_a_backwards_own_times_make_its_ratio():
    """The forward alone may run at another clock than in `both`, so the difference would be another time."""
    record = timed("sonicmoe", 3.0, 6.0, (1.0, 2.0))
    record = in_rounds(record, ([1.0, 1.0], [9.0, 9.0]), ([1.0, 1.0], [5.0, 5.0]))
    assert tables.ratio(record, "backward") == (2.0, 0.0)
    record["round_ms"]["backward"], record["smoe"]["round_ms"]["backward"] = [3.0, 3.0], [2.0, 2.0]
    assert tables.ratio(record, "backward") == (1.5, 0.0)


def test_negative_backwards_count_in_the_median():
    """No round is left out, so the median is the middle of all of them."""
    ratio = lambda theirs, mine: tables.ratio(
        in_rounds(timed("x", 1.0, 1.0), ([0.0] * 3, theirs), ([0.0] * 3, mine)), "backward")  # fmt: skip
    assert ratio([2.0, 3.0, -1.0], [1.0, 1.0, 1.0]).value == 2.0  # of -1, 2 and 3; 2.5 without the negative one
    assert ratio([2.0, 3.0, 4.0], [1.0, 1.0, -1.0]) == (3.0, None)
    assert ratio([2.0, 3.0, 4.0], [1.0, -1.0, -1.0]) is None and ratio([-2.0, -3.0, 4.0], [1.0] * 3) is None


def test_errors_of_ratios_make_the_error_of_their_mean():
    known = [tables.Ratio(1.0, 0.03), tables.Ratio(4.0, 0.16)]
    mean = tables.mean_of(known)
    assert mean.value == pytest.approx(2) and mean.error == pytest.approx(2 * math.hypot(0.03, 0.04) / 2)
    assert tables.mean_of([*known, tables.Ratio(1.0, None)]).error is None


def test_rounds_count_in_which_both_had_their_turn():
    whole = {"smoe forward": 1.0, "smoe both": 3.0, "x forward": 1.5, "x both": 4.0}
    rounds = [whole, {"smoe forward": 9.0, "smoe both": 9.0}]
    assert run.in_rounds(rounds, "x", "smoe", 2.0) == {"both": [8.0], "forward": [3.0]}
    assert run.in_rounds(rounds, "smoe", "x") == {"both": [3.0], "forward": [1.0]}
    assert run.in_rounds(rounds, "smoe", "smoe") == {"both": [3.0, 9.0], "forward": [1.0, 9.0]}
    # A peer that lost one pass keeps the rounds of the others.
    rounds = [whole | {"smoe graph": 1.0, "x graph": 5.0}, whole | {"smoe graph": 1.0}]
    assert run.in_rounds(rounds, "x", "smoe") == {"both": [4.0] * 2, "forward": [1.5] * 2, "graph": [5.0]}
    assert run.in_rounds(rounds, "smoe", "x")["graph"] == [1.0]
    rounds = [whole | {"smoe backward": 1.5, "x backward": 2.0}]
    assert run.in_rounds(rounds, "x", "smoe", 3.0)["backward"] == [6.0]


def test_a_peers_best_tuning_counts():
    # The least ratio to smoe's time in the same process counts. The second tuning has more ms, but on a slower GPU.
    tunings = [timed("sonicmoe", 3.0, 9.0), timed("sonicmoe", 3.2, 4.4, (2.4, 4.0), tuning=1)]
    assert tables.best(tunings, "forward")["tuning"] == 1 and tables.best(tunings, "backward")["tuning"] == 1
    tunings.append(timed("sonicmoe", 2.2, 8.0, tuning=2))
    assert tables.best(tunings, "forward")["tuning"] == 2 and tables.best(tunings, "backward")["tuning"] == 1
    assert tables.best([a_record(failed="no")], "forward") is None
    own = [timed("smoe", ms, 4.0, (ms, 4.0), tuning=i) for i, ms in enumerate((2.3, 2.1, 2.2))]
    assert tables.best(own, "forward")["forward_ms"] == 2.2


def test_the_foot_has_the_means_over_layers():
    by_layer = {
        ("a", "c1", "x"): [timed("x", 2.2, 4.0)],
        ("b", "c1", "x"): [timed("x", 2.4, 8.0)],
        ("a", "c1", "smoe"): [timed("smoe", 2, 4)],
    }
    (sentence,) = tables.means(by_layer, ["forward", "backward"])
    forward, backward = (1.1 * 1.2) ** 0.5, 2**0.5
    assert sentence == (
        f"x / smoe, geometric mean: forward {forward:.3f} (least 1.100, 2 layers), backward {backward:.3f} "
        "(least 1.000, 2 layers)"
    )


def some_records():
    first = {"first_call_s": {"forward": 1.0, "backward": 0.5}, "first_in_process": True, "new_t_s": 0.25}
    more = first | {"kept_bytes": 266 * 2**20, "peak_bytes": 1213 * 2**20}
    errors = dict(O=3.7e-3, dX=3.4e-3, dW1=1e-3, dW2=2e-3, dS=3e-3)
    return [
        timed("smoe", 2.0, 4.0, **more, errors=errors),
        timed("sonicmoe", 2.2, 4.4, **more, errors=errors),
        a_record("momoe", failed="OutOfMemoryError: too large"),
    ]


def test_the_text_table_is_aligned():
    text = tables.as_text(tables.make(some_records()))
    lines = text.splitlines()
    assert lines[0] == "Suite paper, experts, random routing, GPU, commit c1, 2026-01-02"
    head, ours, theirs, failed = lines[1:5]
    assert head.split("  ")[0] == "layer" and ours.index("2.0000") == theirs.index("2.2000")  # aligned
    tflops = 6 * 24576 * 8 * 256 * 1536 / 2e-3 / 1e12
    assert ours.split() == [
        "7B-n256",
        "smoe",
        "2.0000",
        f"{tflops:.0f}",
        "4.0000",
        f"{tflops:.0f}",
        "6.0000",
        f"{tflops:.0f}",
    ]
    assert [theirs.split()[i] for i in (4, 7, 10)] == ["1.100"] * 3
    assert failed.split() == ["7B-n256", "momoe", "failed"]
    assert "sonicmoe / smoe, geometric mean: forward 1.100 (least 1.100, 1 layers)" in text
    assert "7B-n256  sonicmoe       266      1213         1.50*     0.25" in text
    assert "3.70e-03" in text and "momoe / smoe" not in text


def test_times_of_settling_have_tables_of_their_own():
    """With a longer one a job is at its own clock, so the ratios are others."""
    short, long = some_records(), [record | {"settle_s": 0.4, "commit": "c2"} for record in some_records()]
    titles = [table.title for table in tables.make(short + long)]
    assert titles[0] == "Suite paper, experts, random routing, GPU, commit c1, 2026-01-02"
    assert titles[3] == "Suite paper, experts, random routing, settled for 0.4 s, GPU, commit c2, 2026-01-02"
    assert len(titles) == 6


def test_each_kernel_has_the_median_of_its_rounds():
    turns = [[["a", 1, us], ["b", 2, 5.0]] for us in (1.0, 9.0, 6.0)]
    rounds = [{"smoe both": turn} for turn in turns] + [{"smoe both": [["a", 1, 6.0]], "smoe forward": []}]
    assert run.median_kernels(rounds) == {"smoe both": [["a", 1, 6.0], ["b", 2, 5.0]]} and run.median_kernels([]) == {}


def test_the_time_of_a_pass_is_the_sum_of_its_kernels():
    """Of each pass the sum of its kernels; the backward is both less the forward. Two tables: sums, and every kernel."""
    launched = {
        "smoe forward": [["up", 1, 1500.0], ["down", 1, 500.0]],
        "smoe both": [["dw", 2, 4000.0]],
        "sonicmoe forward": [["k" * 100, 1, 2200.0]],
        "sonicmoe both": [["k", 1, 4500.0]],
    }
    ours, theirs = (run.times_of_kernels(launched, peer) for peer in ("smoe", "sonicmoe"))
    assert [ours[f"gpu_{name}_ms"] for name in ("forward", "both", "backward")] == [2.0, 4.0, 2.0]
    assert run.times_of_kernels({}, "smoe") == {} and run.times_of_kernels(launched, "smoe", 1.5)["gpu_both_ms"] == 6.0
    made = [timed("smoe", 3.0, 5.0) | ours, timed("sonicmoe", 9.0, 9.0) | theirs]
    for record in made:
        record["smoe"] = record["smoe"] | {key: ms for key, ms in ours.items() if key != "kernels"}
    _, alone = tables.make([*made, timed("smoe", 3.0, 5.0) | {"shape": "without kernels"}])
    assert [row[:2] for row in alone.rows] == [["7B-n256", "smoe"], ["7B-n256", "sonicmoe"]]
    assert alone.title.endswith(": the kernels' times alone") and alone.columns[2] == "forward ms"
    assert alone.rows[1][2:5] == ["2.2000", f"{6 * 24576 * 8 * 256 * 1536 / 2.2e-3 / 1e12:.0f}", "1.100"]
    assert alone.foot[0].startswith("sonicmoe / smoe, geometric mean: forward 1.100 (least 1.100, 1 layers), backward 1.150")
    (table,) = tables.of_kernels(made)
    assert table.rows[0] == ["7B-n256", "c1", "smoe", "0.03", "0", "forward", "up", "1", "1500.0", "75.0"]
    assert table.rows[3][6] == "k" * tables.KERNEL_NAME and tables.of_kernels([a_record()]) == []
    assert "kernels" not in tables.as_csv(made)


def test_markdown_and_csv_have_every_column():
    lines = tables.as_markdown(tables.make(some_records())).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert rows[0].startswith("| layer | peer | forward ms |") and set(rows[1]) == {"|", "-"}
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|") == rows[4].count("|")
    rows = tables.as_csv(some_records()).splitlines()
    assert rows[0].startswith("commit,device,suite,shape,T,d,n,E,K,part") and "errors.dW1" in rows[0] and len(rows) == 4


def test_small_numbers_keep_digits_and_lists_are_words():
    """TFLOP/s of tiny layers must not be 0, and a list must be words in CSV."""
    tiny = timed("smoe", 2.0, 4.0) | dict(T=96, d=64, n=32, E=8, K=2, passes=["forward", "both"])
    assert tables.make([tiny])[0].rows[0][3] == f"{6 * 96 * 2 * 32 * 64 / 2e-3 / 1e12:.2g}" == "0.0012"
    assert ",forward both,0.03\n" in tables.as_csv([tiny, a_record()])


def test_newest_commit_is_shown():
    old, new = a_record(), a_record(commit="c2", date="2026-02-01T00:00:00Z")
    layer = a_record(part="layer")
    assert tables.newest([old, new, layer]) == [new, layer]
    assert tables.newest([new, old]) == [new]


def test_a_peer_of_an_older_commit_is_shown_beside_its_smoe():
    smoe, peer, gone = a_record("smoe"), a_record("sonicmoe"), a_record("scattermoe")
    newer = dict(commit="c2", date="2026-02-01T00:00:00Z")
    new = [a_record("smoe", **newer), a_record("sonicmoe", **newer)]
    assert tables.newest([smoe, peer, gone, *new]) == [smoe, gone, *new]
    assert tables.newest([smoe, peer, *new]) == new
    profiled = [smoe | {"kernels": {}}, peer | {"kernels": {}}]  # the newer records have none
    assert tables.newest([*profiled, *new]) == [*profiled, *new]


def test_each_layer_is_shown_at_its_newest_commit():
    """One table: a layer that only an older commit has, and of a layer that both have the newer records. The commits get
    a column; a ratio is to smoe at the same commit."""
    layers = ("first", "second")
    old = [timed(peer, ms, 2 * ms, (2.0, 4.0), shape=shape) for shape in layers for peer, ms in (("smoe", 2.0), ("sonicmoe", 3.0))]
    newer = dict(commit="c2", date="2026-02-01T00:00:00Z", shape="second")
    new = [timed("smoe", 4.0, 8.0, (4.0, 8.0), **newer), timed("sonicmoe", 5.0, 10.0, (4.0, 8.0), **newer)]
    (table,) = tables.make(tables.newest([*new, *old]))
    assert table.columns[:3] == ["layer", "commit", "peer"] and ", 2026-01-02 to 2026-02-01" in table.title
    assert [row[:4] for row in table.rows] == [
        ["second", "c2", "smoe", "4.0000"],
        ["second", "c2", "sonicmoe", "5.0000"],
        ["first", "c1", "smoe", "2.0000"],
        ["first", "c1", "sonicmoe", "3.0000"],
    ]
    assert [row[5] for row in table.rows] == ["", "1.250", "", "1.500"]
    assert "(least 1.250, 2 layers of 2 commits)" in table.foot[0]
    assert "second  c2      sonicmoe" in tables.as_text([table])


def test_the_kernels_times_may_be_older_than_the_passes():
    sums = {"gpu_forward_ms": 1.0, "kernels": {}}
    old = [timed(peer, 2.0, 4.0) | sums | {"smoe": sums} for peer in ("smoe", "sonicmoe")]
    new = [timed(peer, 3.0, 6.0, commit="c2", date="2026-02-01T00:00:00Z") for peer in ("smoe", "sonicmoe")]
    times, kernels = tables.make(tables.newest([*old, *new]))
    assert [row[:3] for row in times.rows] == [["7B-n256", "smoe", "3.0000"], ["7B-n256", "sonicmoe", "3.0000"]]
    assert [row[:3] for row in kernels.rows] == [["7B-n256", "smoe", "1.0000"], ["7B-n256", "sonicmoe", "1.0000"]]
    assert ", commit c2, 2026-02-01" in times.title and ", commit c1, 2026-01-02" in kernels.title


def test_peers_at_different_commits_have_smoe_of_their_own():
    """smoe has a row for each commit, and a ratio is to smoe at the same commit."""
    newer = dict(commit="c2", date="2026-02-01T00:00:00Z")
    old = [timed("smoe", 2.0, 4.0, (2.0, 4.0)), timed("momoe", 3.0, 6.0, (2.0, 4.0))]
    new = [timed("smoe", 4.0, 8.0, (4.0, 8.0), **newer), timed("sonicmoe", 5.0, 10.0, (4.0, 8.0), **newer)]
    (table,) = tables.make(tables.newest([*old, *new]))
    assert [(row[1], row[2], row[5]) for row in table.rows] == [
        ("c1", "smoe", ""),
        ("c1", "momoe", "1.500"),
        ("c2", "smoe", ""),
        ("c2", "sonicmoe", "1.250"),
    ]


def test_types_have_tables_of_their_own():
    half = timed("smoe", 2.0, 4.0)
    single = timed("smoe", 1.0, 2.0, dtype="f32", commit="c0", date="2025-01-01T00:00:00Z")
    assert tables.newest([half, single]) == [half, single]
    of_half, of_single = tables.make([half, single])
    assert of_half.title == "Suite paper, experts, random routing, GPU, commit c1, 2026-01-02"
    assert of_single.title == "Suite paper, experts, random routing, f32, GPU, commit c0, 2025-01-01"
    assert (of_half.rows[0][2], of_single.rows[0][2]) == ("2.0000", "1.0000")


def test_the_step_table_has_ratios_of_each_commit():
    numbers = dict(tokens_per_s=250600.0, step_tflops=337.0, peak_bytes=2**30, driver_bytes=2e9, first_step_s=10.0)
    steps = [a_record(peer, suite="e2e", part="e2e", shape="1.4B", step_ms=ms, tuning=i, **numbers)
             for peer, ms, i in (("smoe", 160.0, 0), ("sonicmoe", 176.0, 0), ("sonicmoe", 168.0, 1))]  # fmt: skip
    (table,) = tables.make(steps)
    assert table.rows[0][2:] == ["160.0", "250.6", "21.65", "337", "1.0", "2.00", "10", ""]
    assert table.rows[1][2] == "168.0" and table.rows[1][-1] == "1.050"
    newer = dict(suite="e2e", part="e2e", shape="1.4B", commit="c2", date="2026-02-01T00:00:00Z", tuning=0, **numbers)
    new = [a_record("smoe", step_ms=150.0, **newer), a_record("scattermoe", step_ms=300.0, **newer)]
    (table,) = tables.make([*steps, *new])
    assert table.columns[:3] == ["model", "commit", "peer"]
    assert [(*row[1:4], row[-1]) for row in table.rows] == [
        ("c1", "smoe", "160.0", ""),
        ("c1", "sonicmoe", "168.0", "1.050"),
        ("c2", "smoe", "150.0", ""),
        ("c2", "scattermoe", "300.0", "2.000"),
    ]


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    tables.plot(some_records(), tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_labels_of_bars_name_what_differs():
    layers = [record for record in some_records() if "failed" not in record]
    assert list(tables._by_label(layers)) == [("7B-n256", "smoe"), ("7B-n256", "sonicmoe")]
    other = [record | {"settle_s": 0.4, "part": "layer"} for record in layers]
    labels = [label for label, _ in tables._by_label(layers + other)]
    assert labels[::2] == ["7B-n256 experts settled for 0.03 s", "7B-n256 layer settled for 0.4 s"]


def test_steps_alone_are_shown_without_a_picture(monkeypatch, capsys):
    monkeypatch.setattr(tables, "plot", lambda *arguments: pytest.fail("the picture shows layers"))
    numbers = dict(step_ms=160.0, tokens_per_s=250600.0, step_tflops=337.0, peak_bytes=2**30, first_step_s=10.0)
    options = argparse.Namespace(csv=False, markdown=False, docs=None, kernels=False, plot="ratios.png")
    peers.show(options, [a_record(suite="e2e", part="e2e", shape="1.4B", **numbers)])
    assert "250.6" in capsys.readouterr().out


# ---- the document ----


def test_the_document_shows_the_records():
    text, every = (ROOT / "docs/peers.md").read_text(), records.read(ROOT / "docs/results/peers.jsonl")
    block = peers.docs_block(every)
    assert peers.renewed(text, block) == text, "run bench/peers.py --docs docs/peers.md"
    assert block.count("\n") <= 80
    assert len(page.used(every)) == len(every), "docs/results/peers.jsonl has records that the page does not show"


def test_the_page_has_the_newest_commit_with_most_layers():
    """A newer one with one layer of two is not shown; with three of four it is, and the fourth is the older one's."""
    old = [a_record(peer, shape=shape, commit="c1", date="2026-01-01T00:00:00Z", **times)
           for shape in ("7B-n256", "7B-n512")
           for peer, times in (("smoe", {"forward_ms": 1.0}), ("sonicmoe", {"forward_ms": 1.5, "smoe": {"forward_ms": 1.0}}))]  # fmt: skip
    new = [record | {"commit": "c2", "date": "2026-02-01T00:00:00Z"} for record in old]
    assert page.used([*old, *new]) == new
    assert page.used([*old, *new[:2]]) == old
    newer = {"commit": "c2", "date": "2026-02-01T00:00:00Z"}
    third = [record | newer | {"shape": "1.4B-n256"} for record in old[:2]]
    fourth = [record | {"shape": "1.4B-n512"} for record in old[:2]]
    assert page.used([*old, *fourth, *new, *third]) == [*fourth, *new, *third]
    assert "| paper | 4 | c2, c1 | 1.50 | 1.50 |  |  |  |  |" in page.block([*old, *fourth, *new, *third]).splitlines()
    lines = page.block([*old, *new]).splitlines()
    assert "| paper | 2 | c2 | 1.50 | 1.50 |  |  |  |  |" in lines and "c1" not in "".join(lines)
    assert any(line.startswith("| 7B-n512 | 1 |  | 1.50 |") for line in lines)


def test_fp8_stands_beside_bf16_in_a_table_of_its_own():
    """smoe in bf16 takes 2 and 4 ms, in fp8 1.6 and 3.2; SonicMoE 2.4 and 4.8; torchao in fp8 1.6 and 8."""
    bf16 = [timed("smoe", 2.0, 4.0), timed("sonicmoe", 2.4, 4.8)]
    f8 = [timed("smoe-f8", 1.6, 3.2), timed("torchao-f8", 1.6, 8.0)]
    alone, lines = ([line for line in page.block(some).splitlines() if line.strip("|-")] for some in (bf16, bf16 + f8))
    assert page.used(bf16 + f8) == bf16 + f8 and page.used(f8) == f8
    new = [line for line in lines if line not in alone]
    assert [line for line in lines if line in alone] == alone
    assert new[0].startswith("**fp8 against bf16**") and new[2:] == [
        "| smoe, bf16 | 1 | c1 | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 |",
        "| SonicMoE, bf16 | 1 | c1 | 1.50 | 1.50 | 1.50 | 1.50 | 1.50 | 1.50 |",
        "| torchao, fp8 | 1 | c1 | 1.00 | 1.00 | 2.50 | 2.50 | 2.00 | 2.00 |",
    ]


def test_the_page_without_records_says_so():
    assert page.block([]) == "No records yet.\n"
