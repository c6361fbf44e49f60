"""tools/gpu_train.py, which tools/gpu.sh calls, and limits of gpu.py. (tests/tools/run.sh tests gpu.sh.)"""

import json
import subprocess
import sys
from pathlib import Path

import gpu_host
import gpu_parts
import gpu_speed
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_share_below_95_percent_of_one_gpu_fails(tmp_path):
    """The first two lines of a log do not count; 0.95 of as many single GPUs is enough, less is not."""
    for name, rate in (("one", 100.0), ("enough", 381.0), ("less", 379.0)):
        lines = [1.0, 1.0, rate, rate - 1, rate + 1]
        (tmp_path / name).write_text("".join(json.dumps({"tokens_per_s": x}) + "\n" for x in lines))
    command = [sys.executable, ROOT / "tools/gpu_train.py", "share", tmp_path / "one"]
    done = [subprocess.run([*command, tmp_path / log, "4"], capture_output=True, text=True) for log in ("enough", "less")]
    assert [run.returncode for run in done] == [0, 1] and "each of 4: 0.95" in done[0].stdout


def test_means_over_lines_compare_the_curves(tmp_path):
    """A single loss that is off does not count, a curve that is off does."""
    smooth = [3 - i / 30 for i in range(30)]
    curves = {"smooth": smooth, "one": [1.02 * x if i == 7 else x for i, x in enumerate(smooth)]}
    curves |= {"higher": [x * (1.015 if i >= 10 else 1) for i, x in enumerate(smooth)], "short": smooth[:4]}
    for name, losses in curves.items():
        (tmp_path / name).write_text("".join(json.dumps({"loss": x}) + "\n" for x in losses))

    def compare(other, *arguments):
        line = [sys.executable, ROOT / "tools/gpu_train.py", "compare", tmp_path / "smooth", tmp_path / other, "0.01"]
        done = subprocess.run([*line, *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout

    assert [compare(other)[0] for other in ("smooth", "one", "higher", "short")] == [0, 1, 1, 1]
    assert [compare(other, "5")[0] for other in ("smooth", "one", "higher", "short")] == [0, 0, 1, 1]
    assert "means over 5 lines 4.0" in compare("one", "5")[1] and "1.96e-02 of single lines" in compare("one", "5")[1]


@pytest.fixture
def failed(monkeypatch):
    """The findings that failed, as on a GPU."""
    monkeypatch.setattr(gpu_parts.target, "device", "cuda")
    monkeypatch.setattr(gpu_parts, "FINDINGS", [])
    return lambda: [what for _, what, _, _, good in gpu_parts.FINDINGS if not good]


# Measured on three days, us: C forward, C backward, smoe.experts' forward above C, forward and backward above C, F.linear
HOSTS = {
    "24 November": (14.1, 24.3, 22.0, 161.0, 122.7),
    "23 November": (14.9, 25.7, 30.1, 183.9, 134.0),
    "before its Python was cut": (15.1, 25.4, 34.8, 209.0, 130.0),
}


@pytest.mark.parametrize("host", HOSTS)
def test_host_limits_follow_the_host(host, failed):
    c_forward, c_backward, forward, both, linear = HOSTS[host]
    us = dict.fromkeys(("empty forward", "inference", "operator", "backward's Python", "module forward"), 50.0)
    us |= {"C forward": c_forward, "C backward": c_backward, "forward": forward + c_forward}
    for where in ("", ", this thread"):
        us |= {name + where: 80.0 for name in ("an empty Function", "with C", "smoe.MoE")}
        us |= {"smoe.experts" + where: both + c_forward + c_backward, "F.linear" + where: linear}
    gpu_host.report(us)
    assert failed() == (["smoe.experts, us above C", "forward and backward, us above C"] if host.startswith("before") else [])


@pytest.mark.parametrize("late, good", [(5, True), (6, False)])
def test_new_token_counts_may_be_late_a_few_times(late, good, failed):
    gpu_speed.report_new_tokens([(2.6, 0.5)] * late + [(0.6, 0.5)] * (100 - late))
    assert (failed() == []) == good
