"""LoRA on experts: smoe.experts(lora=...) beside merged weights, and behind PEFT's target_parameters beside PEFT's own way, which
builds the weights. No call makes a tensor as large as a weight of the experts."""

import pytest
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import smoe
import smoe._lora

peft = pytest.importorskip("peft")

import smoe.peft
from models import MODELS, error, tiny, tokens

NAMES = {  # parameters of the experts, by model
    "olmoe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "deepseek_v3": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],  # stored transposed, interleaved, with biases
}


class Largest(TorchDispatchMode):
    """The elements of the largest floating-point tensor that is made. (The library's scratch and `saved` are bytes; what LoRA
    adds to them is in test_lora.c.)"""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        inputs = {t.data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.data_ptr() not in inputs:
                self.largest = max(self.largest, tensor.numel())
        return found


@pytest.fixture
def builds(monkeypatch):
    """A list with one item for each weight that PEFT builds."""
    built, build = [], smoe.peft._build_weight
    monkeypatch.setattr(smoe.peft, "_build_weight", lambda wrapper, names: built.append(wrapper.parameter_name) or build(wrapper, names))
    return built


# ---- smoe.experts(lora=...) ----


def factors(layer, r1, r2, dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = layer["w1"], layer["w2"]
    shapes = [(w1.shape[0], r1, w1.shape[2]), (*w1.shape[:2], r1), (w2.shape[0], r2, w2.shape[2]), (*w2.shape[:2], r2)]
    return [(torch.randn(*shape, generator=generator) * 0.3).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("ranks", [(8, 8), (16, 64), (3, 12)])
@pytest.mark.parametrize("adapters", [1, 2])
def test_adapters_equal_merged_weights(layer, layout, ranks, adapters):
    given = layer(biases=True)
    lora = [smoe.LoRA(*factors(given, *ranks, seed=i), 2.0, 0.25 + i) for i in range(adapters)]
    x, ids, weights, b1, b2 = (given[name] for name in ("x", "ids", "weights", "b1", "b2"))
    w1, w2 = given["w1"].detach(), given["w2"].detach()
    sources = [x, weights, b1, b2, *(factor for one in lora for factor in one[:4])]
    out = smoe.experts(x, ids, weights, w1, w2, b1=b1, b2=b2, layout=layout, lora=lora if adapters > 1 else lora[0])
    found = torch.autograd.grad(out.square().sum(), sources)
    for one in lora:
        w1, w2 = w1 + one.scaling1 * one.b1 @ one.a1, w2 + one.scaling2 * one.b2 @ one.a2
    merged = smoe.experts(x, ids, weights, w1, w2, b1=b1, b2=b2, layout=layout)
    exact = torch.autograd.grad(merged.square().sum(), sources)
    assert error(out, merged) < 1e-5 and all(error(a, b) < 1e-5 for a, b in zip(found, exact))
    with torch.no_grad():
        assert torch.equal(smoe.experts(x, ids, weights, given["w1"], given["w2"], b1=b1, b2=b2, layout=layout, lora=lora), out)


def test_adapters_in_bf16_and_of_one_weight_are_near_merged_ones(layer):
    given = layer(dtype=torch.bfloat16)
    a1, b1, a2, b2 = factors(given, 8, 8)  # float32 factors beside bf16 weights, as PEFT has them
    x, ids, weights, w1, w2 = (given[name].detach() for name in ("x", "ids", "weights", "w1", "w2"))
    for lora in (smoe.LoRA(a1, b1), smoe.LoRA(a2=a2, b2=b2, scaling2=3.0), smoe.LoRA(a1, b1, a2, b2)):
        out = smoe.experts(x, ids, weights, w1, w2, lora=lora)
        up = 0 if lora.a1 is None else lora.b1 @ lora.a1
        down = 0 if lora.a2 is None else lora.scaling2 * lora.b2 @ lora.a2
        merged = smoe.experts(x.float(), ids, weights, w1.float() + up, w2.float() + down)
        used = [factor for factor in lora[:4] if factor is not None]
        found = torch.autograd.grad(out.float().square().sum(), used)
        exact = torch.autograd.grad(merged.square().sum(), used)
        assert error(out, merged) < 2e-2 and all(a.dtype == torch.float32 and error(a, b) < 3e-2 for a, b in zip(found, exact))
        assert not any(torch.equal(a, a.bfloat16().float()) for a in found)  # not rounded on their way
    dw1, da1 = torch.autograd.grad(smoe.experts(x, ids, weights, w1.requires_grad_(), w2, lora=lora).float().square().sum(), (w1, a1))
    assert dw1.dtype == torch.bfloat16 and error(da1, exact[0]) < 3e-2
    merged = w1.detach().float().requires_grad_()
    out = smoe.experts(x.float(), ids, weights, merged + up, w2.float() + down)
    assert error(dw1, torch.autograd.grad(out.square().sum(), merged)[0]) < 3e-2


def test_a_wrong_argument_is_named(layer):
    given = layer()
    a1, b1, a2, b2 = factors(given, 8, 8)
    names = ("x", "ids", "weights", "w1", "w2")

    def call(lora, **more):
        return smoe.experts(*[given[name] for name in names], lora=lora, **more)

    with pytest.raises(ValueError, match=r"lora.a1 is given without lora.b1"):
        call(smoe.LoRA(a1))
    with pytest.raises(ValueError, match=r"lora.b1 has shape \(8, 32, 7\)"):
        call(smoe.LoRA(a1, b1[:, :, :7]))
    with pytest.raises(TypeError, match="lora is a dict"):
        call([{}])
    for dropout in (1.0, -0.1, float("nan"), True):
        with pytest.raises(ValueError, match="lora.dropout is"):
            call(smoe.LoRA(a1, b1, dropout=dropout))
    with pytest.raises(TypeError, match="scaling of lora.a1 is a Tensor"):
        call(smoe.LoRA(a1, b1, scaling1=torch.tensor(2.0)))
    with pytest.raises(ValueError, match="sum to 264"):
        call([smoe.LoRA(*factors(given, 88, 88))] * 3)
    call(smoe.LoRA(a1, b1), chunks=2)
    for chunks in (2.0, [2]):  # equal to a number of an earlier call, and without a hash
        with pytest.raises(TypeError, match="smoe.experts: chunks is"):
            call(smoe.LoRA(a1, b1), chunks=chunks)
    given = layer(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="gradient_dtype"):
        call(smoe.LoRA(a1, b1), gradient_dtype=torch.float32)


@pytest.mark.parametrize("adapters", [1, 2])
def test_no_gradient_of_a_fixed_factor_is_computed(layer, adapters, monkeypatch):
    given = layer()
    lora = [smoe.LoRA(*factors(given, 8, 8, seed=i), 1.0, float(adapters)) for i in range(adapters)]  # one: nothing to cast
    arguments = [given[name].detach() for name in ("x", "ids", "weights", "w1", "w2")]
    moving = [factor for one in lora for factor in (one.a1, one.b2)]
    exact = torch.autograd.grad(smoe.experts(*arguments, lora=lora).square().sum(), moving)
    for one in lora:
        one.b1.requires_grad_(False), one.a2.requires_grad_(False)
    wanted, backward = [], smoe._lora._run_backward
    monkeypatch.setattr(smoe._lora, "_run_backward", lambda spec, tensors, names, *rest: wanted.extend(names) or backward(spec, tensors, names, *rest))
    found = torch.autograd.grad(smoe.experts(*arguments, lora=lora).square().sum(), moving)
    assert wanted == ["lora_a1", "lora_b2"] and all(torch.equal(a, b) for a, b in zip(found, exact))
    out, made, gradient = smoe.experts(*arguments, lora=[lora[0]._replace(b2=lora[0].b2.detach()), lora[-1]]), [], smoe._lora._gradient_b
    monkeypatch.setattr(smoe._lora, "_gradient_b", lambda *given: made.append(given) or gradient(*given))
    out.sum().backward()
    assert len(made) == 1  # of b2 of the second adapter


def test_no_tensor_as_large_as_a_weight_is_made(layer):
    given = layer(T=4, H=64, I=64, E=16)
    lora = smoe.LoRA(*factors(given, 2, 2))
    x, weights, w1, w2 = given["x"], given["weights"], given["w1"].detach(), given["w2"].detach()
    with Largest() as seen:
        smoe.experts(x, given["ids"], weights, w1, w2, lora=lora).sum().backward()
    assert seen.largest < w1.numel() / 4 and lora.a1.grad.norm() > 0
    assert w1.grad is None and w2.grad is None


def test_a_second_backward_has_the_same_bits_and_a_third_raises(layer):
    given = layer()
    lora = smoe.LoRA(*factors(given, 8, 8))
    out = smoe.experts(*[given[name] for name in ("x", "ids", "weights", "w1", "w2")], lora=lora).square().sum()
    first = torch.autograd.grad(out, [lora.a1, given["w1"]], retain_graph=True)
    again = torch.autograd.grad(out, [lora.a1, given["w1"]])
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(out, [lora.a1])


# ---- dropout ----


def with_dropout(given, adapters, dropouts=(0.5, 0.25)):
    """Adapters of an even and of an odd rank with dropout; and a function of x: smoe.experts with them."""
    lora = [smoe.LoRA(*factors(given, 8 - i, 5 + i, seed=i), 2.0, 0.5, dropouts[i]) for i in range(adapters)]
    rest = [given[name].detach() for name in ("ids", "weights", "w1", "w2")]
    return lora, lambda x: smoe.experts(x, *rest, lora=lora)


def plain_dropout(x, given, lora, kept):
    """The layer in plain PyTorch, rows masked before they are multiplied by A. kept: for each adapter two masks (E, in)."""
    out = 0
    for e in range(given["w2"].shape[0]):
        h = x @ given["w1"][e].T
        for one, (first, _) in zip(lora, kept):
            h = h + one.scaling1 / (1 - one.dropout) * (x * first[e]) @ one.a1[e].T @ one.b1[e].T
        gate, up = h.chunk(2, -1)
        a = torch.nn.functional.silu(gate) * up
        y = a @ given["w2"][e].T
        for one, (_, second) in zip(lora, kept):
            y = y + one.scaling2 / (1 - one.dropout) * (a * second[e]) @ one.a2[e].T @ one.b2[e].T
        out = out + (given["weights"] * (given["ids"] == e)).sum(-1, keepdim=True) * y
    return out


@pytest.mark.parametrize("adapters", [1, 2])
def test_dropout_equals_masked_rows_in_plain_pytorch(layer, adapters):
    given = layer()
    lora, call = with_dropout(given, adapters)
    sources = [given["x"], *(factor for one in lora for factor in one[:4])]
    torch.manual_seed(3)
    out = call(given["x"])
    found = torch.autograd.grad(out.square().sum(), sources)
    torch.manual_seed(3)
    sizes = [(one, factor.shape[0], factor.shape[2]) for one in lora for factor in (one.a1, one.a2)]
    masks = [torch.rand(count, 1, width)[:, 0] >= one.dropout for one, count, width in sizes]
    exact = plain_dropout(given["x"], given, lora, [masks[i : i + 2] for i in range(0, len(masks), 2)])
    gradients = torch.autograd.grad(exact.square().sum(), sources)
    assert error(out, exact) < 1e-5 and all(error(a, b) < 1e-5 for a, b in zip(found, gradients))


def test_dropout_is_drawn_by_pytorch(layer):
    """The same seed gives the same bits, the next call others; without dropout nothing is drawn."""
    given = layer()
    _, call = with_dropout(given, 2)
    torch.manual_seed(4)
    with torch.no_grad():
        first, second = call(given["x"]), call(given["x"])
        torch.manual_seed(4)
        assert torch.equal(call(given["x"]), first) and not torch.equal(first, second)
        _, call = with_dropout(given, 2, (0, 0.0))
        state = torch.get_rng_state()
        assert torch.equal(call(given["x"]), call(given["x"])) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["reentrant", "checkpoint", "compile"])
def test_a_recomputed_forward_has_the_same_mask(layer, way):
    """A checkpoint computes the forward again, with the same mask; a compiled function calls smoe.experts as it is."""
    given = layer()
    lora, call = with_dropout(given, 2)
    sources = [given["x"], *(factor for one in lora for factor in one[:4])]

    def step(run):
        torch.manual_seed(5)
        out = run(given["x"])
        torch.rand(3)  # after the forward, so that a backward without the kept state draws another mask
        return [out, *(g.clone() for g in _gradients(out, sources))]

    def block(x):
        return call(x * 2) + torch.nn.functional.dropout(x, 0.5)

    if way == "compile":
        torch._dynamo.reset()
        found, exact = step(torch.compile(call)), step(call)
    else:
        found, exact = step(lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=way == "reentrant")), step(block)
    assert all(torch.equal(a, b) for a, b in zip(found, exact))


def _gradients(out, sources):
    for source in sources:
        source.grad = None
    out.square().sum().backward()
    return [source.grad for source in sources]


def test_a_gradient_scaler_changes_no_gradient(layer):
    """Factors in float32 under a GradScaler: the same gradients, and a step with an infinite gradient is left out."""
    given = layer()
    lora, call = with_dropout(given, 1, (0.0,))
    exact = [g.clone() for g in _gradients(call(given["x"]), lora[0][:4])]
    optimizer, scaler = torch.optim.SGD(lora[0][:4], lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for dout, scale in ((1.0, 1024.0), (float("inf"), 512.0)):
        optimizer.zero_grad()
        scaler.scale(call(given["x"]).square().sum() * dout).backward()
        scaler.unscale_(optimizer)
        if dout == 1:
            assert all(error(factor.grad, gradient) < 1e-6 for factor, gradient in zip(lora[0][:4], exact))
        before = lora[0].a1.clone()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale and torch.equal(lora[0].a1, before) == (dout != 1)


# ---- PEFT's target_parameters ----


def adapt(name, model=None, seed=5, adapter="default", **more):
    config = dict(r=4, lora_alpha=12, target_modules=[], target_parameters=NAMES[name], init_lora_weights=False) | more
    torch.manual_seed(seed)
    if model is None:
        return peft.get_peft_model(tiny(name), peft.LoraConfig(**config), adapter_name=adapter)
    model.add_adapter(adapter, peft.LoraConfig(**config))
    return model


def run(model, implementation, names=()):
    """Logits and gradients of the adapters."""
    model.base_model.model.set_experts_implementation(implementation)
    model.zero_grad()
    found = model(input_ids=tokens(), labels=tokens())
    found.loss.backward()
    lora = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert all("lora_" in key for key in lora)  # the experts are frozen
    return {"logits": found.logits.detach()} | lora


def near(found, exact, tolerance=2e-5):
    assert found.keys() == exact.keys()
    return all(error(found[key], exact[key]) < tolerance for key in exact)


@pytest.mark.parametrize("name", NAMES)
def test_adapted_models_have_the_gradients_of_peft(name, calls, builds):
    model = adapt(name)
    exact = run(model, "eager")
    assert len(exact) == 1 + 4 * sum(type(m).__name__.endswith("Experts") for m in model.modules()) and not calls and builds
    builds.clear()
    found = run(model, "smoe")
    assert near(found, exact) and calls and not builds
    with torch.no_grad(), model.disable_adapter():
        plain = model(input_ids=tokens()).logits
    assert error(plain, exact["logits"]) > 0.01


@pytest.mark.parametrize("more", [dict(use_rslora=True), dict(r=8, lora_alpha=8), dict(r=64), dict(r=5)])
def test_every_rank_and_scaling_has_the_gradients_of_peft(more, builds):
    model = adapt("qwen3_moe", **more)
    exact = run(model, "eager")
    builds.clear()
    assert near(run(model, "smoe"), exact) and not builds


def test_one_adapted_parameter_has_the_gradients_of_peft(builds):
    for targets in (["experts.gate_up_proj"], ["experts.down_proj"]):
        model = adapt("olmoe", target_parameters=targets)
        exact = run(model, "eager")
        builds.clear()
        assert near(run(model, "smoe"), exact) and not builds


def test_several_adapters_have_the_gradients_of_peft(builds):
    model = adapt("olmoe", r=4)
    adapt("olmoe", model, seed=6, adapter="other", r=6)
    for active in ("other", "default", ["default", "other"]):
        model.base_model.set_adapter(active)
        exact = run(model, "eager")
        builds.clear()
        assert near(run(model, "smoe"), exact) and not builds


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_merging_saving_and_loading_keep_the_results(name, tmp_path, builds):
    model = adapt(name)
    found = run(model, "smoe")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.merge_adapter()
    with torch.no_grad():
        assert error(model(input_ids=tokens()).logits, found["logits"]) < 2e-5
    model.unmerge_adapter()
    assert all(error(value.float(), before[key].float()) < 1e-5 for key, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny(name), tmp_path, is_trainable=True)
    assert near(run(loaded, "smoe"), found) and not builds
    assert near(run(loaded, "eager"), found) and builds  # PEFT's own way reads the same file
    merged = loaded.merge_and_unload()
    with torch.no_grad():
        assert error(merged(input_ids=tokens()).logits, found["logits"]) < 2e-5


def test_state_stays_pefts():
    """Keys and shapes are those of PEFT without smoe.peft, and nothing is left on the experts after a call."""
    model = adapt("olmoe")
    keys = [key for key in peft.get_peft_model_state_dict(model) if "layers.0." in key]
    prefix = "base_model.model.model.layers.0.mlp.experts"
    assert sorted(keys) == sorted(f"{prefix}.{inner}lora_{ab}.weight" for inner in ("", "base_layer.") for ab in "AB")
    run(model, "smoe")
    assert not any("_smoe_lora" in vars(module) or hasattr(module, "parametrizations") for module in model.modules())
    a, b = next((m.lora_A["default"].weight, m.lora_B["default"].weight) for m in model.modules() if isinstance(m, peft.tuners.lora.ParamWrapper))
    assert a.shape[0] == 4 * 8 and b.shape[1] == 4 * 8  # (r E, in) and (out, r E)


@pytest.mark.parametrize("more, text", [(dict(use_dora=True), "use_dora"), (dict(lora_dropout=0.1), "lora_dropout"), (dict(lora_bias=True), "lora_bias")])
def test_dora_dropout_and_bias_are_refused(more, text):
    with pytest.raises(ValueError, match=text):
        adapt("olmoe", **more)


def test_no_weight_is_built():
    model = adapt("olmoe", r=1)
    weight = model.base_model.model.model.layers[0].mlp.experts.get_base_layer().gate_up_proj
    ids = tokens(1, 2)
    for implementation, builds_it in (("eager", True), ("smoe", False)):
        model.base_model.model.set_experts_implementation(implementation)
        with Largest() as seen:
            model(input_ids=ids).logits.sum().backward()
        assert (seen.largest >= weight.numel()) == builds_it


def test_experts_that_smoe_does_not_compute_run_as_pefts(calls, builds):
    """An activation that smoe lacks: PEFT's own way, with the result of eager."""
    model = adapt("olmoe")
    for module in model.modules():
        if type(module).__name__ == "OlmoeExperts":
            module.act_fn = torch.nn.Mish()
    exact = run(model, "eager")
    builds.clear()
    assert near(run(model, "smoe"), exact) and not calls and builds


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("options", [dict(), dict(score="sigmoid", selection_bias=True, rounding="nr_f", tile=8), dict(bias=True, activation="geglu")])
def test_adapters_of_the_module_give_the_results_of_peft(layout, options, calls, builds, monkeypatch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.moe = smoe.MoE(32, 16, 8, 2, initializer_range=0.3, layout=layout, balance_coefficient=0.1, **options)

        def forward(self, x):
            return self.moe(x, losses=True, counts=True)

    names = ["experts.gate_up_proj" + ("_interleaved" if layout == "interleaved" else ""), "experts.down_proj"]
    torch.manual_seed(1)
    model = peft.get_peft_model(Model(), peft.LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False))

    def step():
        x = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        model.zero_grad()
        found = model(x)
        (found.out.square().sum() + 0.3 * found.losses.sum()).backward()
        return {"out": found.out.detach(), "losses": found.losses.detach(), "counts": found.counts, "x": x.grad} | {
            key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None
        }

    found = step()
    assert len(calls) == 1 and not builds
    monkeypatch.setattr(peft.tuners.lora.ParamWrapper, "_activate_lora", smoe.peft._build_weight)
    assert near(found, step()) and set(MODELS) >= set(NAMES)


def test_peft_may_be_imported_later():
    """`import peft` after `import smoe.transformers`: the first call builds the weights, and no later one."""
    import subprocess
    import sys
    from pathlib import Path

    program = """
import sys
sys.path.insert(0, sys.argv[1])
from models import tiny, tokens
assert "peft" not in sys.modules
import peft, torch
config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"], init_lora_weights=False)
model = peft.get_peft_model(tiny("olmoe"), config)
model.base_model.model.set_experts_implementation("smoe")
first = model(input_ids=tokens()).logits
import smoe.peft
smoe.peft._build_weight = None
later = model(input_ids=tokens()).logits
assert (first - later).norm() <= 1e-5 * first.norm()
"""
    folder = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
