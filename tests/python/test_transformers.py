"""experts_implementation="smoe" compared with "eager" on tiny models with random weights; smoe's own model type."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
import smoe.transformers  # noqa: E402
from models import EXPERTS, MODELS, error, step, tiny, tokens  # noqa: E402
from torch.utils.checkpoint import create_selective_checkpoint_contexts  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(name, calls):
    model = tiny(name)
    eager, ours = step(model, "eager"), step(model, "smoe")
    assert len(calls) == 2 - model.config.to_dict().get("first_k_dense_replace", 0)
    assert eager.keys() == ours.keys()
    for key in eager:
        assert error(ours[key], eager[key]) < 2e-5, key


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_about_as_exact_as_eager(name):
    """In bf16 the error of all gradients together, against eager float32, must be below 1.25 times that of eager."""
    exact = step(tiny(name), "eager")
    model = tiny(name, torch.bfloat16)
    eager, ours = step(model, "eager"), step(model, "smoe")
    together = lambda found: torch.cat([found[key].double().flatten() / exact[key].double().norm().clamp(1e-12) for key in exact])
    wanted = together(exact)
    assert error(together(ours), wanted) < 1.25 * error(together(eager), wanted)
    assert error(ours["logits"], exact["logits"]) < 1.25 * error(eager["logits"], exact["logits"])


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_eager(name, calls):
    model = tiny(name).eval()
    texts = []
    for implementation in ("eager", "smoe"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(tokens(2, 6), max_new_tokens=8, do_sample=False))
    assert torch.equal(*texts) and len(calls) > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradient_checkpointing_changes_no_bit(name):
    model = tiny(name).train()
    plain = step(model, "smoe")
    model.gradient_checkpointing_enable()
    again = step(model, "smoe")
    assert all(torch.equal(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("kind", ["plain", "selective", "reentrant"])
def test_gates_are_recognised_inside_of_checkpointing(kind, calls, monkeypatch):
    """The first call recognises the gate, with PyTorch's operators and a backward, which checkpointing must not count."""
    monkeypatch.setattr(smoe.transformers, "_known_gates", {})
    model = tiny("qwen3_moe").train()
    selective = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])
    more = dict(context_fn=selective) if kind == "selective" else {}
    model.gradient_checkpointing_enable(dict(use_reentrant=kind == "reentrant", **more))
    step(model, "smoe")
    assert len(calls) == 4  # two layers, forward and forward again


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_a_compiled_model_gives_the_same_results(name, calls):
    torch._dynamo.reset()
    model = tiny(name, num_hidden_layers=1)
    plain = step(model, "smoe")
    before = len(calls)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    again = step(model, "smoe", compiled)
    assert len(calls) - before == 1
    assert all(error(again[key], plain[key]) < 1e-5 for key in plain)


def test_trainer_has_the_losses_of_eager(tmp_path):
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in tokens(24, 16)]
    losses = {}
    for implementation in ("eager", "smoe"):
        model = tiny("qwen3_moe")
        model.set_experts_implementation(implementation)
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path / implementation, max_steps=3, per_device_train_batch_size=4, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-2, seed=0,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        losses[implementation] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses["smoe"]) == 3
    assert losses["smoe"] == pytest.approx(losses["eager"], abs=1e-3)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_lora_on_expert_weights_has_the_gradients_of_eager(name, calls):
    """With LoRA on the expert weights PEFT computes W + B A at every forward, in its own subclass."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    gradients = {}
    for implementation in ("eager", "smoe"):
        model = tiny(name)
        torch.manual_seed(7)
        adapted = peft.get_peft_model(model, config)
        gradients[implementation] = step(model, implementation, adapted)
    assert len(calls) == 2 and any("lora_A" in name for name in gradients["eager"])
    for key, wanted in gradients["eager"].items():
        assert error(gradients["smoe"][key], wanted) < 2e-5, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_dtype(dtype, calls):
    """float32 weights under autocast, and an input in float32 or in autocast's dtype. The output must have the input's
    dtype, as with every implementation of Transformers."""
    experts = tiny("olmoe").model.layers[0].mlp.experts
    x, ids, weights = torch.randn(30, 32, dtype=dtype), torch.rand(30, 8).topk(2).indices, torch.rand(30, 2)
    found = {}
    for implementation in ("eager", "smoe"):
        experts.config._experts_implementation = implementation
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            found[implementation] = experts(x, ids, weights)
    assert len(calls) == 1 and found["smoe"].dtype == found["eager"].dtype == dtype
    assert error(found["smoe"], found["eager"]) < 2e-2


# ---- what smoe does not support runs as eager, with one warning ----


def warned(caplog, model, ids):
    transformers.utils.logging.warning_once.cache_clear()
    with torch.no_grad():
        for _ in range(2):
            found = model(input_ids=ids).logits
    return found, [record.getMessage() for record in caplog.records if record.name == "smoe.transformers"]


UNSUPPORTED = {
    "activation": (dict(hidden_act="tanh"), None, "no activation Tanh"),
    "sizes": (dict(moe_intermediate_size=20), None, "not multiples of 8"),
    "dtype": ({}, torch.float64, "torch.float64 on cpu"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_smoe_lacks_runs_as_eager_with_one_warning(what, caplog):
    more, dtype, text = UNSUPPORTED[what]
    model = tiny("qwen3_moe", dtype or torch.float32, **more)
    with torch.no_grad():
        wanted = model(input_ids=tokens()).logits
    model.set_experts_implementation("smoe")
    found, messages = warned(caplog, model, tokens())
    assert torch.equal(found, wanted)
    assert len(messages) == 1 and text in messages[0], messages


class Quantised(torch.Tensor):
    """A weight-only int8 tensor: it has the class and the outer dtype of a quantised weight, and any operator on it first
    computes the numbers that it stands for."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def plain(self):
        return self.numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, function, types, given=(), named=None):
        if function is torch.ops.aten.detach.default:
            return cls(given[0].numbers, given[0].scale)
        plain = lambda value: value.plain() if isinstance(value, cls) else value
        return function(*map(plain, given), **(named or {}))


def quantise(experts, *names):
    for name in names:
        weight = getattr(experts, name).detach()
        scale = weight.abs().amax(-1, keepdim=True) / 127
        made = Quantised((weight / scale).round().to(torch.int8), scale)
        setattr(experts, name, torch.nn.Parameter(made, requires_grad=False))


@pytest.mark.parametrize(
    "name, which, cast",
    [
        ("qwen3_moe", ["gate_up_proj"], False),
        ("qwen3_moe", ["down_proj"], True),
        ("gpt_oss", ["gate_up_proj", "down_proj"], False),
        ("gpt_oss", ["down_proj"], True),
    ],
)
def test_quantised_experts_run_as_eager(name, which, cast, caplog):
    """One of the two weights suffices, under autocast too."""
    model = tiny(name)
    for layer in model.model.layers:
        quantise(layer.mlp.experts, *which)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        with torch.no_grad():
            wanted = model(input_ids=tokens()).logits
        model.set_experts_implementation("smoe")
        found, messages = warned(caplog, model, tokens())
    assert torch.equal(found, wanted)
    assert len(messages) == 1 and "its weights are of the class Quantised" in messages[0], messages


def test_packed_weights_run_as_eager():
    """Weights whose elements are integers, under autocast, which casts floating-point numbers alone."""
    experts = tiny("olmoe").model.layers[0].mlp.experts
    x, packed = torch.randn(30, 32), torch.zeros(8, 48, 16, dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        reason = smoe.transformers._why_not(x, packed, None, experts.down_proj, None)
    assert reason == "its inputs are torch.float32 and its weights torch.uint8"


def test_on_a_gpu_that_smoe_does_not_serve_eager_runs(caplog, monkeypatch):
    """The library says of a GPU that it cannot be used. Then Transformers' own code runs, with one warning."""
    from smoe import _checks, _context, native

    def create(backend, device=0, threads=0):
        raise RuntimeError(f"smoe_create: device {device} has compute capability 7.5")

    _context.why_no_context.cache_clear()
    monkeypatch.setattr(native, "create_context", create)
    assert _context.why_no_context(63) == "smoe_create: device 63 has compute capability 7.5"
    _context.why_no_context.cache_clear()

    class OnAGpu(torch.Tensor):
        device, get_device = torch.device("cuda:63"), lambda self: 63

    x = torch.zeros(2, 8, dtype=torch.bfloat16).as_subclass(OnAGpu)
    assert _checks.why_not(x) == "smoe_create: device 63 has compute capability 7.5"
    _context.why_no_context.cache_clear()
    monkeypatch.undo()

    model = tiny("qwen3_moe")
    with torch.no_grad():
        wanted = model(input_ids=tokens()).logits
    monkeypatch.setattr(_checks, "why_not", lambda *given: _context.why_no_context(63))
    monkeypatch.setattr(native, "create_context", create)
    model.set_experts_implementation("smoe")
    found, messages = warned(caplog, model, tokens())
    assert torch.equal(found, wanted) and len(messages) == 1 and "compute capability 7.5" in messages[0]
    _context.why_no_context.cache_clear()


def test_other_gates_run_as_eager(caplog, monkeypatch):
    """A gate changed by one per cent, which no activation of smoe is."""
    model = tiny("gpt_oss")
    experts = type(model.model.layers[0].mlp.experts)
    gate = experts._apply_gate
    monkeypatch.setattr(experts, "_apply_gate", lambda self, h: 1.01 * gate(self, h))
    with torch.no_grad():
        wanted = model(input_ids=tokens()).logits
    model.set_experts_implementation("smoe")
    found, messages = warned(caplog, model, tokens())
    assert torch.equal(found, wanted) and len(messages) == 1 and "none of smoe's activations" in messages[0]


@pytest.mark.parametrize("implementation", ["smoe", "smoe_f8", "smoe_f8_dgrad"])
def test_fp8_runs_as_eager(caplog, implementation):
    """Transformers has a separate list of functions for the experts of an FP8 checkpoint. The weights here are float,
    so that no FP8 kernel is needed. The class is wrapped once for each layer, as Transformers does."""
    from transformers.integrations import finegrained_fp8 as fp8

    config = tiny("qwen3_moe").config
    for _ in range(2):
        wrapped = fp8.use_experts_implementation(
            experts_class=fp8.FP8Experts, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS
        )
    experts = wrapped(config, block_size=(8, 8))
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(torch.randn(getattr(experts, name).shape) * 0.2))
    arguments = torch.randn(30, 32), torch.rand(30, 8).topk(2).indices, torch.rand(30, 2)
    config._experts_implementation = "eager"
    wanted = experts(*arguments)
    config._experts_implementation = implementation
    transformers.utils.logging.warning_once.cache_clear()
    found = experts(*arguments)
    messages = [record.getMessage() for record in caplog.records if record.name == "smoe.transformers"]
    assert torch.equal(found, wanted) and len(messages) == 1 and "FP8" in messages[0]


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "5.17.0.dev0"])
def test_an_old_transformers_is_refused(version):
    """pyproject.toml names the same version as the message. A development version has the interface of its release."""
    alone = f"import sys, transformers; transformers.__version__ = {version!r}; sys.modules['transformers.models'] = None; "
    run = subprocess.run([sys.executable, "-c", alone + "import smoe.transformers"], capture_output=True, text=True)
    refused = f"ImportError: smoe.transformers: needs transformers 5.17 or later, this is {version}" in run.stderr
    assert refused == (version != "5.17.0.dev0") and run.returncode
    assert "transformers>=5.17" in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_post_expert_norm_runs_as_eager():
    experts = tiny("olmoe").model.layers[0].mlp.experts
    experts.has_post_expert_norm = True
    assert smoe.transformers._math_of(experts)[0] is None


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_every_activation_gives_the_results_of_eager(hidden_act, calls):
    model = tiny("qwen3_moe", hidden_act=hidden_act)
    eager, ours = step(model, "eager"), step(model, "smoe")
    assert len(calls) == 2
    assert all(error(ours[key], eager[key]) < 2e-5 for key in eager)


# ---- expert parallelism ----


def test_the_parts_of_all_ranks_sum_to_the_whole():
    """A rank with 3 of 8 experts gets all K = 4 ids of a token. The ids of other ranks' experts are replaced by 3."""
    whole = tiny("qwen3_moe", num_experts_per_tok=4).model.layers[0].mlp.experts
    x = torch.randn(30, 32)
    ids, weights = torch.rand(30, 8).topk(4).indices, torch.rand(30, 4, requires_grad=True)
    wanted = smoe.transformers.experts_forward(whole, x, ids, weights)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), weights)
    parts, gradient = [], 0
    for start in (0, 3, 6):
        share = copy.deepcopy(whole)
        share.gate_up_proj = torch.nn.Parameter(whole.gate_up_proj[start : start + 3].clone())
        share.down_proj = torch.nn.Parameter(whole.down_proj[start : start + 3].clone())
        share.num_experts = len(share.down_proj)
        here = ids - start
        here = torch.where((here < 0) | (here >= share.num_experts), share.num_experts, here)
        parts.append(smoe.transformers.experts_forward(share, x, here, weights))
        gradient = gradient + torch.autograd.grad(parts[-1].sum(), weights)[0]
    assert torch.allclose(sum(parts), wanted, atol=1e-5)
    assert torch.allclose(gradient, wanted_gradient, atol=1e-5)


# ---- smoe's own model type ----


def test_a_saved_model_of_smoes_type_loads_again(tmp_path):
    model = tiny("smoe").eval()
    names = set(model.state_dict())
    assert "model.layers.0.mlp.gate_proj.weight" in names and "model.layers.1.mlp.shared_expert.up_proj.weight" in names
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="smoe")
    assert isinstance(loaded, smoe.transformers.SmoeForCausalLM)
    with torch.no_grad():
        assert error(loaded(tokens()).logits, model(tokens()).logits) < 1e-5


def test_the_byte_tokenizer_gives_the_text_back(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="smoe")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Zoë said: \"3 €\"\n\tand\x00 left.  "
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids and again.decode(ids) == text


def test_the_byte_tokenizer_pads_a_batch():
    """A batch with an added padding token, and an id above 255, which a model with a larger vocabulary may generate."""
    tokenizer = smoe.transformers.ByteTokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    ids = tokenizer(["a", "€"], padding=True)["input_ids"]
    assert ids == [[97, 256, 256], list("€".encode())]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == ["a", "€"]
    assert tokenizer.batch_decode(ids) == ["a<pad><pad>", "€"]
    assert tokenizer.decode([97, 300, 98]) == "a\ufffdb"


def test_a_byte_checkpoint_generates_with_padding_and_eos(tmp_path):
    """The recipe of docs/python.md: prompts of different lengths in a batch, and the byte 0 as the end of a text."""
    program = os.environ.get("SMOE_PROGRAM")
    if not program:
        pytest.skip("SMOE_PROGRAM does not name the smoe program")
    text = tmp_path / "text"
    text.write_bytes(b"the cat sat on the mat\0a dog ran\0" * 40)
    options = "--device=cpu --quiet --steps=250 --lr=0.01 --context=32 --hidden=32 --intermediate=16 --layers=1".split()
    subprocess.run([program, "train", f"--out={tmp_path / 'run'}", *options, text], check=True, capture_output=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "latest")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "latest")

    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    batch = tokenizer(["the cat sa", "a d"], padding=True, padding_side="left", return_tensors="pt")
    batch["input_ids"].clamp_(max=255)
    made = model.generate(**batch, max_new_tokens=40, do_sample=False, eos_token_id=0, pad_token_id=0)
    texts = [bytes(row.tolist()).lstrip(b"\xff") for row in made]
    assert [row.split(b"\0")[0] for row in texts] == [b"the cat sat on the mat", b"a dog ran"]
    assert all(row.endswith(b"\0") for row in texts) and made.shape[1] < 30


KINDS = {
    "olmoe": ("olmoe", []),
    "smoe": ("smoe", ["--shared=24", "--dense-layers=1", "--tied"]),
    "dense twin": ("smoe", ["--dense-twin"]),
    "sigmoid": ("smoe", ["--score=sigmoid", "--experts=12", "--topk=3", "--groups=4", "--groups-kept=2", "--route-scale=1.5",
                         "--bias-rate=0.01", "--renormalize", "--micro-batches=2"]),
    "topk-softmax": ("smoe", ["--score=topk-softmax", "--route-scale=0.7", "--shared=24"]),
    "dense twin, shared": ("smoe", ["--dense-twin", "--shared=24", "--tied"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_smoe_train_have_the_loss_of_smoe_eval(kind, tmp_path):
    model_type, options = KINDS[kind]
    program = os.environ.get("SMOE_PROGRAM")
    if not program:
        pytest.skip("SMOE_PROGRAM does not name the smoe program")
    text = tmp_path / "text.txt"
    text.write_bytes(Path(__file__).read_bytes())
    run = [program, "train", f"--out={tmp_path / 'run'}", "--steps=20", "--context=64", "--hidden=32", "--intermediate=16"]
    subprocess.run([*run, "--device=cpu", "--quiet", *options, text], check=True, capture_output=True)
    windows = 40
    part = tmp_path / "part.txt"
    part.write_bytes(text.read_bytes()[: windows * 64 + 1])
    checkpoint = tmp_path / "run" / "latest"
    found = subprocess.run(
        [program, "eval", "--json", "--device=cpu", "-c", checkpoint, part], check=True, capture_output=True
    )
    theirs = json.loads(found.stdout)["loss"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    data = torch.tensor(tokenizer(part.read_text())["input_ids"])
    assert data.tolist() == list(part.read_bytes()) and tokenizer.decode(data) == part.read_text()
    assert len(data) == windows * 64 + 1
    for implementation in ("eager", "smoe"):
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, experts_implementation=implementation
        )
        assert model.config.model_type == model_type
        if "--bias-rate=0.01" in options:
            for layer in model.model.layers:
                assert layer.mlp.gate.e_score_correction_bias.abs().max() > 0.02
        with torch.no_grad():
            logits = model(data[:-1].view(windows, 64)).logits
        ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[1:]).item()
        assert ours == pytest.approx(theirs, rel=1e-5), implementation


def test_transformers_alone_encodes_for_a_byte_checkpoint(tmp_path):
    """Transformers alone, without smoe's package, must encode text for a checkpoint of bytes: every byte that UTF-8
    text can have, and single bytes decode. Token files without a tokenizer have none to save."""
    program = os.environ.get("SMOE_PROGRAM")
    if not program:
        pytest.skip("SMOE_PROGRAM does not name the smoe program")
    text = "".join(map(chr, range(0x800))) + "\u20ac\U0001f600 \r\n\t \\\" left.  "
    (tmp_path / "text.txt").write_bytes(text.encode() * 3)
    token_file(tmp_path / "ids.bin", torch.randint(256, (4000,)))
    run = [program, "train", "--steps=2", "--context=16", "--hidden=16", "--intermediate=8", "--device=cpu", "--quiet"]
    for name in ("text.txt", "ids.bin"):
        subprocess.run([*run, f"--out={tmp_path / 'run' / name}", tmp_path / name], check=True, capture_output=True)
    checkpoint = tmp_path / "run" / "text.txt" / "latest"
    assert not list((tmp_path / "run" / "ids.bin" / "latest").glob("tokenizer*"))
    alone = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = open(sys.argv[2], newline="").read()
ids = tokenizer(text)["input_ids"]
assert tokenizer.vocab_size == 256 and ids == list(text.encode()) and tokenizer.decode(ids) == text
assert sorted(tokenizer.get_vocab().values()) == list(range(256))
assert tokenizer.decode([104, 0xFF, 105]) == "h\\ufffdi"
assert not any(name.startswith("smoe") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", alone, checkpoint, tmp_path / "text.txt"], check=True, text=True)


def token_file(path, data):
    """llm.c's format, which `smoe` reads (train/data/tokens.h)."""
    header = torch.zeros(256, dtype=torch.int32)
    header[:3] = torch.tensor([20240520, 1, len(data)])
    path.write_bytes(header.numpy().tobytes() + data.to(torch.int32).numpy().astype("uint16").tobytes())


def test_eval_and_train_open_an_olmoe_in_bf16_shards(tmp_path):
    program = os.environ.get("SMOE_PROGRAM")
    if not program:
        pytest.skip("SMOE_PROGRAM does not name the smoe program")
    torch.manual_seed(5)
    sizes = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model(
        "olmoe", **sizes, **EXPERTS, vocab_size=320, max_position_embeddings=64, initializer_range=0.3
    )
    assert config.norm_topk_prob is False and config.clip_qkv is None and config.tie_word_embeddings is False
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    windows, data = 8, torch.randint(320, (8 * 64 + 1,))
    token_file(tmp_path / "data.bin", data)
    found = subprocess.run(
        [program, "eval", "--json", "--device=cpu", "-c", tmp_path / "model", tmp_path / "data.bin"],
        check=True,
        capture_output=True,
    )
    with torch.no_grad():
        logits = model.float()(data[:-1].view(windows, 64)).logits
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[1:]).item()
    assert json.loads(found.stdout)["loss"] == pytest.approx(ours, rel=1e-5)
    token_file(tmp_path / "train.bin", data.repeat(3))
    run = [program, "train", f"--from={tmp_path / 'model'}", f"--out={tmp_path / 'run'}", "--device=cpu", "--quiet"]
    run += ["--steps=5", "--batch=4", "--lr=1e-3", "--clip=1", tmp_path / "train.bin"]
    subprocess.run(run, check=True, capture_output=True)
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "latest", dtype=torch.float32)
    with torch.no_grad():
        logits = tuned(data[:-1].view(windows, 64)).logits
    assert torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[1:]).item() < ours
