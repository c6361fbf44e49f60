"""bench/peers.py --ranks on the CPU: every job runs on two processes and computes what smoe.ep computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = ["alone", "smoe-ep", "a2a-smoe", "a2a-grouped_mm", "torch"]


def run(*arguments):
    command = [sys.executable, str(ROOT / "bench/peers.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_every_job_agrees_on_two_processes(tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel")
    file = tmp_path / "ranks.jsonl"
    quick = ["--shape-seconds", "0", "--least-rounds", "1", "--settle", "0", "--timed", "0", "--shape", "tiny-a"]
    done = run("--ranks", "2", "--device", "cpu", "--dtype", "f32", "--suite", "tiny", *quick, "--records", str(file))
    assert done.returncode == 0, done.stderr
    found = {record["peer"]: record for record in map(json.loads, file.read_text().splitlines())}
    assert list(found) == JOBS and not [record["failed"] for record in found.values() if "failed" in record]
    for job, record in found.items():
        assert min(record["forward_ms"], record["backward_ms"], record["both_ms"]) > 0
        assert job in ("alone", "smoe-ep") or 0 < max(record["apart"]) < 1e-5, record
    # Of the 96 tokens with two of eight experts each, four of them here: about 96 pairs go to the other process, and about 75
    # tokens have such a pair.
    row = 4 * found["smoe-ep"]["d"]
    assert 60 < found["smoe-ep"]["sent_bytes"] / row < 96 < found["torch"]["sent_bytes"] / row + 30 < 150
    assert found["smoe-ep"]["window_bytes"] > 0
    shown = [line.split()[0] for line in done.stdout.splitlines() if line and line.split()[0] in JOBS]
    assert shown == JOBS and "2 x CPU" in done.stdout


def test_wrong_numbers_of_ranks_are_refused(tmp_path):
    file = str(tmp_path / "ranks.jsonl")
    done = run("--ranks", "3", "--device", "cpu", "--records", file)
    assert done.returncode == 2 and "--ranks 3: tiny-a has 8 experts; expected a multiple" in done.stderr
    done = run("--ranks", "2", "--records", file)
    assert done.returncode == 3 and "--ranks 2: torch finds 0 CUDA devices" in done.stderr
