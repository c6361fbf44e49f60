"""rounding_study.py and text_run_plot.py with invented records whose results are known; and the studies'
scripts from end to end with a tiny model on the CPU: train, stop, resume, repeat.

SMOE_BUILD names the build folder with the program smoe (default build/release).
"""

import array
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).resolve().parent
ROOT, ROUNDING, TEXT_RUN = STUDIES.parent, STUDIES / "rounding", STUDIES / "text_run"
SMOE = Path(os.environ.get("SMOE_BUILD", ROOT / "build" / "release")) / "smoe"
sys.path[:0] = [str(ROUNDING), str(TEXT_RUN), str(STUDIES / "fp8")]

import pairs  # noqa: E402
import rounding_study  # noqa: E402
import text_run_plot  # noqa: E402

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_smoe = pytest.mark.skipif(not SMOE.exists(), reason=f"{SMOE} is not built (SMOE_BUILD)")


def call(*command, status=0, **environment):
    done = subprocess.run(
        list(map(str, command)), env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@needs_smoe
def test_the_library_agrees_with_the_emulation_of_fp8(tmp_path):
    environment = {"SMOE_LIBRARY": str(SMOE.parent / "src" / "libsmoe.so"), "PYTHONPATH": str(ROOT / "python")}
    records = tmp_path / "records.jsonl"
    assert "every limit holds" in call(sys.executable, STUDIES / "fp8" / "fp8_errors.py", "--quick", "--records", records, **environment)
    tables = [json.loads(line)["table"] for line in records.read_text().splitlines()]
    assert [tables.count(table) for table in ("choices", "stress", "exponents", "means")] == [23, 51, 6, 12]


def write_losses(out, arm, losses):
    for seed, loss in enumerate(losses, 1):
        (out / f"{arm}.{seed}.json").write_text(json.dumps({"arm": arm, "seed": seed, "val_loss": loss}) + "\n")


def test_pairs_of_fp8_are_planned_from_chance_and_compared_by_seed(tmp_path):
    # t is 2.1604 for 14 pairs, 2.0452 for 30: 14 are enough for a deviation of 0.00692, 30 for one of 0.01071
    assert [pairs.pairs_needed(deviation) for deviation in (0, 0.0069, 0.00695, 0.0107, 1)] == [14, 14, 15, 30, 32]
    program = STUDIES / "fp8" / "pairs.py"
    plan = [program, "--plan", tmp_path]
    write_losses(tmp_path, "bf16", [4.0] * 8)
    write_losses(tmp_path, "higher", [4.0107, 3.9893] * 3 + [4.0])
    runs = call(*plan).split()
    assert runs[:3] == ["bf16.1", "higher.1", "bf16.2"] and runs[-1] == "bf16.20" and "f8.1" not in runs
    write_losses(tmp_path, "higher", [4.0107, 3.9893] * 4)  # deviation 0.0107 sqrt(8 / 7) = 0.01144: 32 pairs, since 0.00419 with 31
    runs = call(*plan).split()
    assert runs[:4] == ["bf16.1", "f8.1", "bf16.2", "f8.2"] and len(runs) == 3 * 32
    assert (tmp_path / "plan.txt").read_text().startswith("32 pairs, fixed on ")
    write_losses(tmp_path, "higher", [4.0] * 8)
    assert len(call(*plan).split()) == 3 * 32  # a plan stays
    write_losses(tmp_path, "f8", [4.001, 4.002, 4.003])
    files = sorted(tmp_path.glob("*.json"))
    # mean 0.002, deviation 0.001: 4.3027 * 0.001 / sqrt(3); (0.002 + 0.00248) / 4 = 0.112 %
    row = "| f8 | 3 | 4.0000 | +0.0020 | ± 0.0025 | 0.0010 | 14 | +0.0030 (3) | +0.112 |"
    assert row in call(program, *files).splitlines()
    write_losses(tmp_path, "f8", [4.01, 4.02, 4.03])
    call(program, *files, status=1)  # beyond the bound
    call(program, files[0], status=3)


def test_records_of_fp8_pairs_give_the_table_of_their_page():
    table = call(STUDIES / "fp8" / "pairs.py", STUDIES / "fp8" / "pairs.jsonl", status=1)
    assert table in (STUDIES / "fp8" / "README.md").read_text()


@needs_smoe
def test_pairs_of_fp8_are_trained_and_resumed(tmp_path, data):
    environment = {"SMOE": str(SMOE), "DATA": str(data), "OMP_NUM_THREADS": "1", "GPUS": "0 1", "STEPS": "3", "TAKES": "2"}
    environment |= {"CONTEXT": "32", "BATCH": "2", "TOKENS": "512"}
    environment["SIZES"] = "--layers 1 --hidden 16 --heads 2 --intermediate 16 --experts 4 --topk 2 --tied"
    program, out = STUDIES / "fp8" / "pairs.sh", tmp_path / "out"
    call(program, out, "1", "bf16.1", status=1, **environment)  # no run would end in 1 s
    call(program, out, "9", "f16.1", status=2, **environment)
    said = call(program, out, "60", "bf16.1", "higher.1", "f8.1", "f8-dgrad.2", **environment)
    assert said.count("done on GPU") == 4 and "0 runs are left" in said
    runs = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    assert [runs[name]["arm"] for name in sorted(runs)] == ["bf16", "f8-dgrad", "f8", "higher"]
    assert runs["higher.1"]["lr"] / runs["bf16.1"]["lr"] == pytest.approx(1.00025, rel=1e-7)
    assert "val_loss_f8" in runs["f8.1"] and "val_loss_f8" not in runs["bf16.1"] and runs["f8-dgrad.2"]["seed"] == 2
    (out / "f8.1.json").unlink()
    assert call(program, out, "60", "bf16.1", "f8.1", **environment).count("done on GPU") == 1
    call(program, out, "60", "f8.3", status=3, **(environment | {"SIZES": "--hidden 7"}))


def write_run(out, name, perplexity, added):
    result = {
        "val_loss": math.log(perplexity),
        "loss": 1.0,
        "val_tokens": 10,
        "tokens": 100,
        "seconds": 2,
        "tokens_per_s": 50,
    }
    (out / f"{name}.json").write_text(json.dumps(result))
    (out / name).mkdir()
    lines = [{"step": step, "added": 9.0 if step < 2 else added, "dropped": 0.5, "emptied": 0.01, "busiest": 2.0} for step in range(4)]
    (out / name / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_differences_are_those_of_equal_seeds(tmp_path):
    for seed, plain, rounded in ((1, 20.0, 20.1), (2, 21.0, 21.2), (3, 22.0, 22.3)):
        write_run(tmp_path, f"two.none.{seed}", plain, 0.0)
        write_run(tmp_path, f"two.nr-f.{seed}", rounded, 0.25)
    write_run(tmp_path, "two.nr-f.4", 50.0, 0.25)  # no plain run has this seed, so it is not part of the difference
    records = tmp_path / "records.jsonl"
    text = call(sys.executable, ROUNDING / "rounding_study.py", tmp_path)
    rows = {
        line.split(" | ")[0]: line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| n")
    }
    assert rows["| none"][4:6] == ["21.000", "1.000"]
    # mean 0.2, deviation 0.1: 4.3027 * 0.1 / sqrt(3); 99 seeds, since 1.9845 * 0.1 / sqrt(99) < 0.02
    assert rows["| nr-f"][1] == "4" and rows["| nr-f"][7:11] == ["+0.200 ± 0.248", "99", "25.00", "50.00"]
    assert rows["| nr-f"][11:] == ["1.00", "2.00", "50"]
    if HAS_MATPLOTLIB:
        call(sys.executable, ROUNDING / "rounding_study.py", tmp_path, tmp_path / "study.png", records)
        assert (tmp_path / "study.png").stat().st_size > 1000 and len(records.read_text().splitlines()) == 7


def test_student_t_is_that_of_the_tables():
    tables = {1: 12.7062, 4: 2.7764, 10: 2.2281, 11: 2.2010, 20: 2.0860, 60: 2.0003, 120: 1.9799}
    for freedom, value in tables.items():
        assert rounding_study.student_t(freedom) == pytest.approx(value, abs=1e-3)
    assert rounding_study.seeds_needed(0.001) == 2 and rounding_study.seeds_needed(math.nan) is None
    call(sys.executable, ROUNDING / "rounding_study.py", STUDIES, status=3)


def test_the_place_is_found_where_a_curve_passes_a_loss():
    lines = [{"seconds": 10, "val_loss": 5.0}, {"seconds": 20, "val_loss": 4.0}, {"seconds": 30, "val_loss": 3.0}]
    assert text_run_plot.first_below(lines, 3.75, "seconds") == 22.5
    assert text_run_plot.first_below(lines, 5.0, "seconds") == 10
    assert text_run_plot.first_below(lines, 2.9, "seconds") is None


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Token files whose tokens are bytes, and the table of tokens, as tools/make_tokens.py writes them."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "bpe.txt").write_text("smoe-bpe 1 257 0\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    for name, part in (("train", text[4000:]), ("val", text[:4000])):
        header = struct.pack("<3i", 20240520, 1, len(part)).ljust(1024, b"\0")
        (folder / f"{name}_000.bin").write_bytes(header + array.array("H", list(part)).tobytes())
    return folder


@needs_smoe
def test_text_run_stops_and_resumes(tmp_path, data):
    sizes = "--layers 1 --hidden 16 --heads 2 --intermediate 8 --experts 4 --topk 2 --context 32 --tied"
    environment = {"SMOE": str(SMOE), "DATA": str(data), "SIZES": sizes, "BATCH": "2", "EVALUATION_TOKENS": "512"}
    environment |= {"OMP_NUM_THREADS": "1", "BUDGET": "6", "EVALUATIONS": "6", "LEAVE": "3"}
    run = [TEXT_RUN / "text_run.sh", tmp_path]
    call(*run, "3", status=2, **environment)  # nothing would be left to train
    said = call(*run, "6", **environment)
    assert "moe: interrupted" in said and "twin: interrupted" in said
    for _ in range(5):  # several calls, because on a busy machine one may be too short
        if not said.count("interrupted"):
            break
        said = call(*run, "12", **environment)
    assert "moe: finished" in said and "twin: finished" in said
    for name in ("moe", "twin"):
        lines = [json.loads(line) for line in (tmp_path / name / "train.jsonl").read_text().splitlines()]
        assert 6 <= lines[-1]["seconds"] < 12 and sum("val_loss" in line for line in lines) >= 4
        assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
        assert json.loads((tmp_path / f"{name}.eval.json").read_text())["tokens"] == 3999
        assert (tmp_path / f"{name}.samples.txt").read_bytes().count(b"--------") == 4  # samples may be no UTF-8
        assert ("busiest" in lines[-1]) == (name == "moe")
    assert "finished" in call(*run, "6", **environment)  # and the call trains no more
    if HAS_MATPLOTLIB:
        said = call(sys.executable, TEXT_RUN / "text_run_plot.py", tmp_path, tmp_path / "run.png", tmp_path)
        assert "passes the twin's last loss" in said and (tmp_path / "text_run_moe.jsonl").exists()


@needs_smoe
def test_rounding_study_resumes_by_whole_runs(tmp_path, data):
    cases = "two 8 2 1 1000000\none 8 1 1 1000000\nfour 8 4 1 1000000\ncoarse 2 1 1 1000000"
    environment = {"SMOE": str(SMOE), "DATA": str(data), "SIZES": "--layers 2 --hidden 16 --heads 2 --intermediate 8"}
    environment |= {"CASES": cases, "STEPS": "4", "BATCH": "4", "CONTEXT": "32"}
    environment |= {"TILE": "8", "OMP_NUM_THREADS": "1"}
    study = [ROUNDING / "rounding_study.sh", tmp_path]
    (tmp_path / "two.none.1").mkdir()  # an interrupted run
    (tmp_path / "two.none.1" / "train.jsonl").write_text('{"step":1,"tokens":1,"loss":77.0}\n')
    assert "38 runs are left" in call(*study, "4", status=1, **environment)  # no run would end in 4 s
    assert "36 runs are left" in call(*study, "40", status=1, MOST="2", **environment)
    first = (tmp_path / "two.none.1.json").read_text()
    assert "77.0" not in (tmp_path / "two.none.1" / "train.jsonl").read_text()
    assert "34 runs are left" in call(*study, "40", status=1, MOST="2", **environment)
    assert (tmp_path / "two.none.1.json").read_text() == first
    plan = call(ROUNDING / "rounding_study.sh", "--plan", tmp_path, **environment)
    assert plan.count(" done\n") == 4 and "38 runs" in plan.splitlines()[-1]
    records = tmp_path / "records.jsonl"
    text = call(sys.executable, ROUNDING / "rounding_study.py", tmp_path, "-", records)
    elsewhere = tmp_path / "elsewhere"  # as on another machine, which has only the records
    plan = call(ROUNDING / "rounding_study.sh", "--plan", elsewhere, RECORDS=str(records), **environment)
    assert plan.count(" done\n") == 4
    elsewhere.mkdir()
    assert call(sys.executable, ROUNDING / "rounding_study.py", elsewhere, "-", records) == text
    plain, rounded = (
        next(line for line in text.splitlines() if line.startswith(f"| {rule}")) for rule in ("none", "nr-f")
    )
    assert "| 0.00 | 0.00 |" in plain and "| 0.00 | 0.00 |" not in rounded
    call(*study, "40", status=3, MOST="1", **(environment | {"SIZES": "--hidden 7"}))
