"""python -m smoe.check: models that are right pass, every kind of error fails, and what smoe does not compute is named."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
import smoe.transformers  # noqa: E402
from models import tiny, tokens  # noqa: E402
from test_transformers import quantise  # noqa: E402

from smoe import check  # noqa: E402

INFINITE = float("inf")


def saved(name, folder, **more):
    model = tiny(name, num_hidden_layers=1, **more)
    for parameter, value in model.named_parameters():
        if parameter.endswith("bias"):  # zeros otherwise
            torch.nn.init.normal_(value, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name, dtype", [("qwen3_moe", "float32"), ("gpt_oss", "bfloat16")])
def test_right_models_pass(name, dtype, tmp_path, capsys):
    assert check.main([saved(name, tmp_path), "--dtype", dtype, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "mlp.experts (" in said and "): smoe\n" in said and " 0 failed" in said and "the model is right" in said


def change(what, monkeypatch):
    math, weights = smoe.transformers._math_of, smoe.transformers._weights_of
    if what == "gate":  # the sigmoid of 1.01 times the gate
        gate = smoe.Gate("swiglu_clamped", INFINITE, INFINITE, 1.01, 0.0)
        monkeypatch.setattr(smoe.transformers, "_math_of", lambda experts: (gate, *math(experts)[1:]))
        return
    changed = {
        "gate rows": lambda w1, b1, w2, b2: (torch.cat([1.01 * w1[:, :24], w1[:, 24:]], 1), b1, w2, b2),
        "halves": lambda w1, b1, w2, b2: (torch.cat(w1.chunk(2, 1)[::-1], 1), b1, w2, b2),
        "bias": lambda w1, b1, w2, b2: (w1, None, w2, b2),
        "last bias": lambda w1, b1, w2, b2: (w1, b1, w2, None),
    }[what]
    monkeypatch.setattr(smoe.transformers, "_weights_of", lambda experts: changed(*weights(experts)))


ERRORS = ["gate float32", "gate rows bfloat16", "halves float32", "bias float32", "last bias float32"]


@pytest.mark.parametrize("what, dtype", [error.rsplit(" ", 1) for error in ERRORS])
def test_every_kind_of_error_fails(what, dtype, tmp_path, monkeypatch, capsys):
    folder = saved("gpt_oss" if "bias" in what else "qwen3_moe", tmp_path, initializer_range=0.5)
    change(what, monkeypatch)
    assert check.main([folder, "--dtype", dtype, "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "output of model.layers.0.mlp.experts" in said and "FAILED" in said and "the model is WRONG" in said


def test_another_greedy_token_fails_beyond_its_margin(monkeypatch):
    exact, other = tiny("qwen3_moe", num_hidden_layers=1).eval(), tiny("qwen3_moe", num_hidden_layers=1, seed=1).eval()
    assert check._greedy(exact, exact, tokens(), 8, 1e-6) == ""
    assert "not" in check._greedy(exact, other, tokens(), 8, 1e-6) and check._greedy(exact, other, tokens(), 8, 1e6) == ""


def test_a_config_without_weights_gets_random_ones(tmp_path, capsys):
    tiny("qwen3_moe").config.save_pretrained(tmp_path)
    assert check.main([str(tmp_path / "config.json"), "--layers", "1", "--device", "cpu", "--tokens", "32"]) == 0
    said = capsys.readouterr().out
    assert "random ones" in said and "layers.0.mlp.experts" in said and "layers.1" not in said


def test_what_does_not_run_is_named(tmp_path, monkeypatch, capsys):
    model = tiny("qwen3_moe")
    quantise(model.model.layers[0].mlp.experts, "down_proj")
    model.model.layers[1].mlp.experts.register_forward_hook(lambda *given: None)
    assert check.report_layers(model, tokens()) == ["model.layers.1.mlp.experts"]
    said = capsys.readouterr().out
    assert "eager, its weights are of the class Quantised" in said and "wrapped by hooks): smoe" in said
    folder = saved("qwen3_moe", tmp_path)
    monkeypatch.setattr(smoe.transformers._checks, "why_not", lambda *given: "smoe_create: no usable CUDA device")
    assert check.main([folder, "--device", "cpu"]) == 1
    assert "eager, smoe_create: no usable CUDA device" in capsys.readouterr().out


def test_experts_wrapped_by_peft_are_reported(capsys):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    model = peft.get_peft_model(tiny("qwen3_moe", num_hidden_layers=1), config)
    assert len(check.report_layers(model, tokens())) == 1
    assert "wrapped by ParamWrapper" in capsys.readouterr().out


def test_the_exit_status_tells_usage_from_failure(tmp_path, capsys):
    assert check.main([str(tmp_path / "none")]) == 3
    run = subprocess.run([sys.executable, "-m", "smoe.check", "--layers", "0", "x"], capture_output=True, text=True)
    assert run.returncode == 2 and "0 is not a positive whole number" in run.stderr
