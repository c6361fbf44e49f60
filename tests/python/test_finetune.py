"""examples/finetune_transformers.py on the CPU: both modes, both implementations, and the message if their losses
differ."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
pytest.importorskip("accelerate")
import finetune_transformers  # noqa: E402

from smoe import functional  # noqa: E402

TINY = ["--tiny", "--steps", "4", "--lr", "0.02", str(ROOT / "LICENSE")]


def test_every_mode_trains_with_both_implementations(tmp_path, monkeypatch, capsys):
    calls = []
    real = functional.experts

    def count(x, ids, weights, w1, *others, **options):
        calls.append(w1.requires_grad)
        return real(x, ids, weights, w1, *others, **options)

    monkeypatch.setattr(functional, "experts", count)
    modes = ["full", "lora"] if importlib.util.find_spec("peft") else ["full"]
    log = tmp_path / "log.jsonl"
    options = ["--modes", ",".join(modes), "--json", str(log), "--tolerance", "2e-4"]
    assert finetune_transformers.main([*TINY, *options]) == 0
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    pairs = [(mode, implementation) for mode in modes for implementation in ("smoe", "grouped_mm")]
    assert [(run["mode"], run["implementation"]) for run in runs] == pairs
    assert len({run["trained"] for run in runs}) == len(modes) and all(run["tokens_per_s"] > 0 for run in runs)
    assert all(len(run["losses"]) == 4 and run["losses"][-1] < run["losses"][0] - 0.01 for run in runs)
    assert calls == [True] * 8 + [False] * (8 * (len(modes) - 1))  # 2 layers, 4 steps; lora freezes the experts
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("vocabulary, text", [(64, []), (256, [__file__])], ids=["random", "bytes"])
def test_a_checkpoint_gives_its_weights_and_vocabulary(vocabulary, text, tmp_path, monkeypatch):
    """--model uses the checkpoint's weights and vocabulary. Only one of the two runs calls smoe. A checkpoint without a
    tokenizer and with a vocabulary of 256 takes text as bytes."""
    sizes = dict(layers=1, hidden=32, intermediate=16, experts=4, topk=2, heads=2, vocabulary=vocabulary, context=16)
    o = argparse.Namespace(**sizes, model=None, device="cpu", seed=3)
    finetune_transformers.build(o, "eager").save_pretrained(tmp_path / "model")
    calls, real = [], functional.experts
    monkeypatch.setattr(functional, "experts", lambda *a, **k: calls.append(1) or real(*a, **k))
    short = ["--modes", "full", "--context", "16", "--batch", "2", "--steps", "2", "--json", str(tmp_path / "log")]
    monkeypatch.setattr(finetune_transformers.torch.cuda, "is_available", lambda: False)
    assert finetune_transformers.main(["--model", str(tmp_path / "model"), *text, *short, "--tolerance", "2e-4"]) == 0
    assert len(calls) == 2


def test_differing_losses_end_with_status_1(monkeypatch, capsys):
    real = functional.experts
    monkeypatch.setattr(functional, "experts", lambda *a, **k: 1.5 * real(*a, **k))
    assert finetune_transformers.main([*TINY, "--modes", "full", "--tolerance", "2e-4"]) == 1
    assert "losses differ" in capsys.readouterr().err


def test_losses_that_are_no_numbers_do_not_agree(capsys):
    o = finetune_transformers.argparse.Namespace(tolerance=0.05)
    nan = float("nan")
    for other in ([1.0, 2.0, nan], [nan, 2.0, 2.0], [1.0, 2.0, 2.06]):
        assert not finetune_transformers.agree(o, [{"mode": "full", "losses": each} for each in ([1.0, 2.0, 2.0], other)])
    assert not finetune_transformers.agree(o, [{"mode": "full", "losses": [1.0, nan]}] * 2)
    assert finetune_transformers.agree(o, [{"mode": "full", "losses": [1.0, 2.0]}, {"mode": "full", "losses": [1.01, 2.0]}])
    assert capsys.readouterr().err.count("losses differ by") == 4


WRONG = [["--modes", "half"], ["--layers", "0"], ["missing.txt"], ["--context", "99999999", __file__], ["--model", "x"]]
WRONG += [["--implementations", "smoe,fast"], ["--json", "/"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_a_usage_error_ends_with_status_2(arguments, capsys):
    assert finetune_transformers.main(["--tiny", *arguments]) == 2
    assert "finetune_transformers.py: " in capsys.readouterr().err


def test_lora_without_peft_says_what_to_install(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else find(name, *a))
    assert finetune_transformers.main([*TINY, "--modes", "lora"]) == 2
    assert "pip install peft" in capsys.readouterr().err
