"""Layers whose GEMMs multiply e4m3 numbers: smoe.experts and smoe.moe with compute=, smoe.MoE, Transformers. The values are those of
C's tests; here they are near those without fp8, and equal among the ways to the same call."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

import smoe
import smoe._f8

COMPUTES = ("f8", "f8_dgrad")
CALL = ("x", "ids", "weights", "w1", "w2")
SOURCES = ("x", "weights", "w1", "w2", "b1", "b2")


def error(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def outputs(given, **options):
    out = smoe.experts(*[given[name] for name in CALL], b1=given["b1"], b2=given["b2"], **options)
    return [out, *torch.autograd.grad(out.float().square().sum(), [given[name] for name in SOURCES])]


def same(found, exact):
    return all(torch.equal(a, b) for a, b in zip(found, exact))


@pytest.fixture
def quantised(monkeypatch):
    """A list with one item for each quantisation of weights."""
    made, make = [], smoe._f8.quantize_weights
    monkeypatch.setattr(smoe._f8, "quantize_weights", lambda *given, **options: made.append(1) or make(*given, **options))
    return made


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_near_those_without_fp8(layer, layout, dtype):
    given = layer(T=200, H=64, I=48, biases=True, dtype=dtype)
    exact = outputs(given, layout=layout)
    found = {compute: outputs(given, layout=layout, compute=compute) for compute in COMPUTES}
    for compute in COMPUTES:
        assert all(1e-3 < error(a, b) < 0.12 for a, b in zip(found[compute], exact))
        assert all(a.dtype == b.dtype for a, b in zip(found[compute], exact))
    assert torch.equal(found["f8"][0], found["f8_dgrad"][0]) and not torch.equal(found["f8"][3], found["f8_dgrad"][3])


@pytest.mark.parametrize("compute", COMPUTES)
def test_given_bytes_count_and_weights_do_not(layer, compute):
    given = layer(T=60, biases=True)
    whole = outputs(given, compute=compute)
    made = smoe.quantize_weights(given["w1"], given["w2"])
    assert made.dtype == torch.uint8 and not made.requires_grad
    other = given | {name: torch.full_like(given[name], torch.nan).requires_grad_() for name in ("w1", "w2")}
    assert same(outputs(other, compute=compute, weights_f8=made), whole)
    with torch.no_grad():
        assert torch.equal(smoe.experts(*[given[name] for name in CALL], b1=given["b1"], b2=given["b2"], compute=compute), whole[0])
    empty = layer(T=0, biases=True)
    assert outputs(empty, compute=compute)[3].abs().max() == 0


def test_float32_master_weights_stand_beside_bfloat16_inputs(layer):
    given = layer(biases=True, dtype=torch.bfloat16)
    masters = given | {name: (given[name].detach().float() * 1.001).requires_grad_() for name in ("w1", "w2")}
    found = outputs(masters, compute="f8")
    assert found[3].dtype == torch.float32 and found[1].dtype == torch.bfloat16
    assert all(error(a, b) < 0.05 for a, b in zip(found, outputs(given, compute="f8")))
    wide = given | {name: given[name].detach().float().requires_grad_() for name in ("x", "w1", "w2", "b1", "b2")}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(outputs(wide, compute="f8")[0], outputs(given, compute="f8")[0])


@pytest.mark.parametrize("compute", COMPUTES)
def test_the_whole_layer_with_its_router(layer, compute):
    given = layer(T=64)
    options = dict(topk=2, balance_coefficient=0.01, losses=True, counts=True)
    sources = [given[name] for name in ("x", "router_weight", "w1", "w2")]
    results = []
    for more in ({}, {"compute": compute}):
        out, logits, losses, counts = smoe.moe(*sources, **options, **more)
        results.append([out, logits, losses, counts, *torch.autograd.grad(out.square().sum() + losses.sum(), sources)])
    exact, found = results
    assert same(found[1:4], exact[1:4])
    assert all(1e-3 < error(a, b) < 0.12 for a, b in zip([found[0], *found[4:]], [exact[0], *exact[4:]]))
    alone = smoe.moe(given["x"].detach(), None, given["w1"], given["w2"], topk=2, logits=exact[1].detach(), compute=compute)
    assert torch.equal(alone.out, found[0])


def test_wrong_arguments_are_named(layer):
    given, narrow = layer(), layer(H=24)
    call = [given[name] for name in CALL]
    with pytest.raises(ValueError, match="smoe.experts: compute is 'fp8'; expected None or one of f8, f8_dgrad"):
        smoe.experts(*call, compute="fp8")
    with pytest.raises(ValueError, match="compute is None"):
        smoe.experts(*call, weights_f8=smoe.quantize_weights(given["w1"], given["w2"]))
    with pytest.raises(ValueError, match="hidden is 24, with SMOE_COMPUTE_F8 it must be a multiple of 16"):
        smoe.experts(*[narrow[name] for name in CALL], compute="f8")
    with pytest.raises(ValueError, match="weights_f8 has shape"):
        smoe.experts(*call, compute="f8", weights_f8=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="lora is given with compute"):
        smoe.experts(*call, compute="f8", lora=smoe.LoRA())
    for given_dtype, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        w1, w2 = (given[name].detach().to(other) for name in ("w1", "w2"))
        with pytest.raises(TypeError, match=f"smoe.experts: w1 has dtype {other}; expected .*, the dtype of x"):
            smoe.experts(given["x"].detach().to(given_dtype), given["ids"], given["weights"], w1, w2, compute="f8")
    with pytest.raises(TypeError, match="quantize_weights: w1 has dtype torch.float16; expected torch.float32 or torch.bfloat16$"):
        smoe.quantize_weights(given["w1"].half(), given["w2"].half())
    for compute in ("fp8", "storage", 1):
        with pytest.raises(ValueError, match=f"smoe.MoE: compute is {compute!r}; expected None or one of f8, f8_dgrad"):
            smoe.MoE(32, 16, 8, 2, compute=compute)
    with pytest.raises(ValueError, match="smoe.MoE: .*intermediate is 24"):
        smoe.MoE(32, 24, 8, 2, compute="f8")
    out = smoe.experts(*call, compute="f8")
    (gradient,) = torch.autograd.grad(out.sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot differentiate twice"):
        gradient.sum().backward()


# ---- smoe.MoE ----


def make(**options):
    torch.manual_seed(0)
    return smoe.MoE(32, 16, 8, 2, initializer_range=0.4, **{"compute": "f8", **options})


def step(module, x):
    x = x.detach().requires_grad_()
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


def test_a_module_quantises_when_its_weights_have_changed(quantised):
    moe, x = make(), torch.randn(3, 5, 32)
    first = step(moe, x)
    assert same(step(moe, x), first) and len(quantised) == 1
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.1)
    moe(x).sum().backward()
    optimizer.step()
    second = step(moe, x)
    assert not torch.equal(second[0], first[0]) and len(quantised) == 2
    assert same(second, step(copy.deepcopy(moe), x)) and len(quantised) == 3
    moe.load_state_dict(make().state_dict())
    assert same(step(moe, x), first)
    moe.experts.down_proj = torch.nn.Parameter(moe.experts.down_proj.detach() * 2)
    assert torch.equal(moe(x), 2 * first[0])
    moe.experts.down_proj.data.mul_(2)  # which counts nothing
    assert torch.equal(moe(x), 2 * first[0])
    moe.forget_quantized()
    assert torch.equal(moe(x), 4 * first[0])
    assert torch.equal(pickle.loads(pickle.dumps(moe))(x), 4 * first[0])
    moe.experts = CheckpointWrapper(moe.experts)
    wrapped = moe(x)
    moe.experts._checkpoint_wrapped_module.down_proj.data.mul_(2)
    moe.forget_quantized()
    assert torch.equal(moe(x), 2 * wrapped)


def test_weights_quantised_in_inference_mode_also_train(quantised):
    moe, x = make(), torch.randn(24, 32)
    with torch.inference_mode():
        found = moe(x)
        assert torch.equal(make()(x), found)  # its weights have no counter
    assert torch.equal(step(moe, x)[0], found) and len(quantised) == 2


def test_other_weights_in_the_place_of_freed_ones_are_seen():
    """An allocator gives a freed place again, for example when .to(dtype) is followed by another."""
    moe, x = make(), torch.randn(24, 32)
    weight, first, place = moe.experts.down_proj, moe(x), bytearray(moe.experts.down_proj.nbytes)
    values = weight.detach().clone()
    for factor in (1, 2):
        at_place = torch.frombuffer(place, dtype=torch.float32).view_as(values)
        at_place.copy_(factor * values)
        weight.data = at_place
        assert torch.equal(moe(x), factor * first)


@pytest.mark.parametrize("kind", ["for loop", "foreach", "fused"])
def test_a_module_sees_the_step_of_each_kind_of_optimizer(quantised, kind):
    """A fused step does not count in the version counters of the weights."""
    moe, x = make(), torch.randn(24, 32)
    options = {} if kind == "for loop" else {kind: True}
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.1, **options)
    moe(x).sum().backward()
    optimizer.step()
    found = moe(x)
    assert torch.equal(moe(x), found) and len(quantised) == 2
    moe.forget_quantized()
    assert torch.equal(moe(x), found)


@pytest.mark.parametrize("compute", COMPUTES)
def test_compile_checkpointing_and_hooks_give_the_same(compute, quantised):
    moe, x = make(compute=compute), torch.randn(24, 32)
    plain = step(moe, x)
    assert same(step(lambda_module(moe, lambda y: checkpoint(moe, y, use_reentrant=False)), x), plain)
    assert len(quantised) == 1
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    assert same(step(lambda_module(moe, compiled), x), plain)
    assert torch.equal(compiled(x[:7]), moe(x[:7]))
    handle = moe.experts.register_forward_hook(lambda *_: None)  # the layer then calls its parts
    found = step(moe, x)
    handle.remove()
    assert error(found[0], plain[0]) < 1e-5


class lambda_module(torch.nn.Module):
    """A module with the parameters of another and a forward of its own."""

    def __init__(self, module, function):
        super().__init__()
        self.function, self.of = function, [module]

    def parameters(self, recurse=True):
        return self.of[0].parameters()

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_sharded_layer_sees_each_update(tmp_path, reshard):
    """fully_shard keeps the version counter of the weights that it gathers, and their place in memory may be the same."""
    if torch.__version__.startswith("2.6."):
        pytest.skip("fully_shard of torch 2.6 needs a GPU")
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def train(moe):
        optimizer, losses = torch.optim.SGD(moe.parameters(), lr=0.05), []
        for _ in range(3):
            losses.append(moe(x).square().mean())
            losses[-1].backward()
            assert dist.is_initialized() != (smoe._f8.KEPT in moe.experts.__dict__)  # forgotten, or kept
            optimizer.step()
        return losses

    x = torch.randn(24, 32)
    plain = train(make())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert same(train(fully_shard(make(), reshard_after_forward=reshard)), plain)
    finally:
        dist.destroy_process_group()


# ---- Transformers ----


def test_transformers_takes_it_by_one_option(quantised):
    pytest.importorskip("transformers")
    import smoe.transformers
    from models import tiny, tokens

    model = tiny("qwen3_moe", moe_intermediate_size=32)
    exact = model(tokens()).logits
    model.set_experts_implementation("smoe_f8")
    found = model(tokens()).logits
    assert 1e-3 < error(found, exact) < 0.3  # some tokens get other experts
    count = len(quantised)
    assert torch.equal(model(tokens()).logits, found) and len(quantised) == count > 0
    model.set_experts_implementation("smoe_f8_dgrad")
    model(tokens()).logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "experts" in name)


def test_transformers_compiled_and_checkpointed_gives_the_same(quantised):
    pytest.importorskip("transformers")
    import smoe.transformers
    from models import step as trained
    from models import tiny

    model = tiny("qwen3_moe", moe_intermediate_size=32)
    plain, count = trained(model, "smoe_f8"), len(quantised)
    model.gradient_checkpointing_enable()
    model.train()
    found = trained(model, "smoe_f8")
    assert all(torch.equal(found[name], plain[name]) for name in plain) and len(quantised) == count
    experts, x = model.model.layers[0].mlp.experts, torch.randn(12, 32)
    weights, ids = torch.rand(12, 8).topk(2)
    found = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")(x, ids, weights)
    assert torch.equal(found, experts(x, ids, weights))


def test_lora_is_in_16_bits_or_pefts_own():
    """smoe.MoE refuses it, as the library does. Behind Transformers' door PEFT builds the weights, which are quantised at each call."""
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    import smoe.peft
    from models import step as trained
    from models import tiny

    config = dict(r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(torch.nn.Sequential(make()), peft.LoraConfig(**config))
    with pytest.raises(NotImplementedError, match="smoe.MoE: compute is set, which LoRA does not have"):
        model(torch.randn(5, 32))
    model = peft.get_peft_model(tiny("qwen3_moe", moe_intermediate_size=32), peft.LoraConfig(**config)).base_model.model
    exact, found = trained(model, "smoe"), trained(model, "smoe_f8")
    assert set(found) == set(exact) and any("lora" in name for name in exact)
    assert 1e-4 < error(found["logits"], exact["logits"]) < 0.3 and all(g.isfinite().all() and g.any() for g in found.values())


def test_expert_parallelism_is_refused():
    with pytest.raises(NotImplementedError, match="smoe.MoE: compute is 'f8', which ep does not have"):
        make(ep=SimpleNamespace(size=2))
