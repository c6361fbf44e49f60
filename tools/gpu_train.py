#!/usr/bin/env python3
"""Small jobs of tools/gpu.sh. Needs numpy for `tokens`.

Usage: gpu_train.py tokens FILE COUNT VOCABULARY     writes COUNT random tokens as a token file
       gpu_train.py compare LOG LOG LIMIT [LINES]    largest relative difference of the losses of two train.jsonl; with
                                                     LINES of the means over LINES lines in a row
       gpu_train.py share ONE ALL N                  tokens/s of the log of N GPUs / N times those of one: at least 0.95
       gpu_train.py speed LOG                        median tokens/s of a train.jsonl without its first two lines
       gpu_train.py checkpoint OPTIONS...            runs `OPTIONS... --out checkpoint` (smoe train) and times its
                                                     checkpoints beside dd, which copies their files
Exit status: 0, 1 a limit is exceeded, 2 usage, 3 the program failed.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

LEAST = 0.95  # share of N single GPUs that N GPUs must reach
MOST = 1.2  # largest ratio of the seconds of a checkpoint to those of dd


def read(log: str) -> list[dict]:
    with open(log) as lines:
        return [json.loads(line) for line in lines]


def write_tokens(path: str, count: int, vocabulary: int) -> int:
    import numpy as np

    header = np.zeros(256, np.int32)  # llm.c's: magic number, version, tokens
    header[:3] = 20240520, 1, count
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(np.random.default_rng(1).integers(0, vocabulary, count, dtype=np.uint16).tobytes())
    return 0


def difference(a: list[float], b: list[float], lines: int) -> float:
    """The largest relative difference between the means of a and b over `lines` values in a row."""
    means = [[statistics.fmean(c[i : i + lines]) for i in range(len(c) - lines + 1)] for c in (a, b)]
    return max(abs(x / y - 1) for x, y in zip(*means, strict=True))


def compare(first: str, second: str, limit: float, lines: int) -> int:
    a, b = ([line["loss"] for line in read(log)] for log in (first, second))
    if len(a) != len(b) or not 1 <= lines <= len(a):
        print(f"{len(a)} and {len(b)} lines; expected as many in both, at least {lines}")
        return 1
    worst = difference(a, b, lines)
    single = f", {difference(a, b, 1):.2e} of single lines" if lines > 1 else ""
    means = f"means over {lines} lines" if lines > 1 else "loss"
    print(f"{len(a)} lines, largest relative difference of the {means} {worst:.2e} (limit {limit:g}){single}")
    return 0 if worst <= limit else 1


def rates(log: str) -> list[float]:
    return [line["tokens_per_s"] for line in read(log)[2:]]


def speed(log: str) -> int:
    found = rates(log)
    print(f"{statistics.median(found) / 1e3:.1f} k tokens/s, median of {len(found)} lines")
    return 0


def share(one: str, many: str, gpus: int) -> int:
    single, each = (statistics.median(rates(log)) / n / 1e3 for log, n in ((one, 1), (many, gpus)))
    print(f"{single:.1f} k tokens/s of one GPU, {each:.1f} k of each of {gpus}: {each / single:.3f} (least {LEAST})")
    return 0 if each >= LEAST * single else 1


def memory(process: int) -> tuple[float, float]:
    """The peak of a process's resident memory, and its present anonymous memory, in GB."""
    with open(f"/proc/{process}/status") as file:
        status = file.read()
    found = [re.search(rf"{key}:\s+(\d+)", status) for key in ("VmHWM", "RssAnon")]
    return tuple(int(each.group(1)) * 1024 / 1e9 if each else 0.0 for each in found)


def watch(run: subprocess.Popen, folder: str) -> tuple[list[float], float, float]:
    """Watches a run until it ends. Returns for each checkpoint the seconds from its first file to its rename, and the
    peaks of resident and of anonymous memory in GB."""
    begun, ended, peak, anonymous = {}, {}, 0.0, 0.0
    while run.poll() is None:
        try:
            for name in os.listdir(folder):
                if name.startswith("step") and name.endswith(".tmp"):
                    begun.setdefault(name[: -len(".tmp")], time.time())
            ended.setdefault(os.readlink(f"{folder}/latest"), time.time())
        except OSError:
            pass  # the folder or the link does not exist yet
        try:
            most, now = memory(run.pid)
            peak, anonymous = max(peak, most), max(anonymous, now)
        except OSError:
            pass  # the process has just ended
        time.sleep(0.01)
    return [ended[name] - begun[name] for name in ended if name in begun], peak, anonymous


def time_dd(folder: str) -> float:
    """Seconds that dd takes for copies of the folder's files, which are in the page cache."""
    start = time.time()
    for entry in os.scandir(folder):
        command = ["dd", f"if={entry.path}", "of=dd.out", "bs=1M", "conv=fsync"]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=True)
    seconds = time.time() - start
    os.remove("dd.out")
    return seconds


def checkpoint(command: list[str]) -> int:
    folder = "checkpoint"
    run = subprocess.Popen([*command, "--out", folder], stdout=subprocess.DEVNULL)
    ours, peak, anonymous = watch(run, folder)
    if run.returncode != 0 or not ours:
        print(f"smoe train: exit status {run.returncode}, {len(ours)} checkpoints seen")
        return 3
    size = sum(entry.stat().st_size for entry in os.scandir(f"{folder}/latest/"))
    theirs = [time_dd(f"{folder}/latest/") for _ in range(2)]
    shutil.rmtree(folder)
    ratio = statistics.median(ours) / statistics.mean(theirs)
    seconds = [", ".join(f"{each:.2f}" for each in times) for times in (ours, theirs)]
    print(f"{size / 1e9:.2f} GB: {seconds[0]} s, dd with fsync {seconds[1]} s, ratio {ratio:.2f} (limit {MOST})")
    print(f"host memory at most {peak:.2f} GB, of it anonymous {anonymous:.2f} GB")
    return 0 if ratio <= MOST else 1


def main() -> int:
    match sys.argv[1:]:
        case ["tokens", path, count, vocabulary]:
            return write_tokens(path, int(count), int(vocabulary))
        case ["compare", first, second, limit]:
            return compare(first, second, float(limit), 1)
        case ["compare", first, second, limit, lines]:
            return compare(first, second, float(limit), int(lines))
        case ["share", one, many, gpus]:
            return share(one, many, int(gpus))
        case ["speed", log]:
            return speed(log)
        case ["checkpoint", *command] if command:
            return checkpoint(command)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
