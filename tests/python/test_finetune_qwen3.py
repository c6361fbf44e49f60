"""examples/finetune_qwen3.py on the CPU: in one process, and in two with FSDP-2 and gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
pytest.importorskip("accelerate")
import finetune_qwen3  # noqa: E402

TINY = ["--tiny", "--experts", "smoe,grouped_mm", "--steps", "5", "--turns", "1", "--profile"]


def check(out: str, log: Path, processes: int) -> None:
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    assert [run["experts"] for run in runs] == ["smoe", "grouped_mm"]
    for run in runs:
        assert run["tokens_per_s"] > 0 and 0 < run["experts_ms"] and abs(run["loss"] - 6.24) < 0.1  # log 512
        assert run["processes"] == processes and run["dtype"] == "torch.bfloat16"
        # Two bf16 moments for every weight. A shard of a small tensor may be empty, so not exactly half of them.
        assert abs(run["states"]["torch.bfloat16"] * processes / (4 * run["weights"]) - 1) < 0.02
    assert "of the bound" in out


def test_one_process_trains_with_every_implementation(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert finetune_qwen3.main([*TINY, "--json", str(tmp_path / "log")]) == 0
    check(capsys.readouterr().out, tmp_path / "log", 1)


def test_two_processes_train_with_fsdp2(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]  # at a free port
    command += [str(ROOT / "examples/finetune_qwen3.py"), *TINY, "--json", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "runs as eager" not in done.stderr
    check(done.stdout, tmp_path / "log", 2)


def test_the_loss_in_pieces_is_that_of_transformers(monkeypatch):
    """Value and gradient of Transformers' own loss, with ignored labels, for either count of tokens."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    monkeypatch.setattr(finetune_qwen3, "PIECE", 7)
    logits, labels = torch.randn(2, 10, 33), torch.randint(33, (2, 10))
    labels[0, 4:6] = -100
    for items in (None, torch.tensor(40)):
        found = []
        for loss in (finetune_qwen3.loss_in_pieces, ForCausalLMLoss):
            x = logits.clone().requires_grad_()
            value = loss(x, labels, vocab_size=33, num_items_in_batch=items)
            found.append((value, *torch.autograd.grad(value, x)))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("wrong", [["--experts", "smoe,fast"], ["--steps", "4"], ["--layers", "-1"]])
def test_a_usage_error_ends_with_status_2(wrong, capsys):
    assert finetune_qwen3.main(["--tiny", *wrong]) == 2
    assert "finetune_qwen3.py: " in capsys.readouterr().err
