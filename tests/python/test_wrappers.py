"""What wraps the router or the experts of smoe.MoE takes part in its forward: PEFT's adapters, accelerate's offload, hooks,
fully_shard on a part. Without them one call of the library computes both."""

import pytest
import torch

import smoe

H, I, E, K = 32, 16, 8, 2
LAYERS = {
    "plain": {},
    "biases": dict(bias=True, router_bias=True, norm_topk_prob=True, layout="interleaved"),
    "selection bias": dict(score="sigmoid", selection_bias=True, routed_scaling_factor=2.0),
    "rounding": dict(rounding="nr_f", tile=8, balance_coefficient=0.1),
    "no gate": dict(activation="relu2", logits_dtype=torch.bfloat16),
}


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    moe = smoe.MoE(H, I, E, K, initializer_range=0.3, dtype=dtype, **options)
    for name, value in (*moe.named_parameters(), *moe.named_buffers()):
        if name.endswith("bias"):
            torch.nn.init.uniform_(value, -0.2, 0.2)
    return moe


def step(moe, dtype=torch.float32):
    """The output and all gradients."""
    x = torch.randn(3, 20, H, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    moe.zero_grad()
    out = moe(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in moe.parameters() if p.grad is not None)]


def near(ours, theirs, tolerance=1e-5):
    return all((a - b).norm() <= tolerance * b.norm() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("part", ["gate", "experts"])
def test_hooks_run_and_change_nothing_else(layer, part, calls):
    moe, seen = make(**LAYERS[layer]), []
    plain = step(moe)
    hook = getattr(moe, part).register_forward_hook(lambda module, given, out: seen.append(given[0].shape))
    hooked = step(moe)
    # Logits that are rounded to bf16 differ in the last bit where their float32 sums do.
    assert seen == [(60, H)] and near(hooked, plain, 2e-2 if "logits_dtype" in LAYERS[layer] else 1e-5)
    found = moe(torch.randn(20, H), losses=True, counts=True)
    assert found.losses.shape == (2,) and found.counts.sum() == 40 and found.logits.shape == (20, E)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(step(moe), plain))
    assert len(seen) == 2 and len(calls) == 4


def test_every_kind_of_hook_runs_and_may_replace_values():
    moe, seen = make(), []
    for part in (moe.gate, moe.experts):
        part.register_forward_pre_hook(lambda module, given: seen.append("before"))
        part.register_full_backward_hook(lambda module, given, out: seen.append("backward"))
    plain = step(moe)
    assert seen == ["before", "before", "backward", "backward"] and near(plain, step(make()))
    moe.experts.register_forward_hook(lambda module, given, out: 2 * out)
    assert near(step(moe)[:1], [2 * plain[0]])
    moe.gate.register_forward_hook(lambda module, given, out: (out[0] * 0, out[1]))  # logits that all are equal
    assert step(moe)[0].shape == plain[0].shape and not near(step(moe)[:1], [2 * plain[0]], 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hook_changes_nothing_under_autocast(dtype):
    moe = make()
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(moe, dtype)
        moe.gate.register_forward_hook(lambda *given: None)
        assert near(step(moe, dtype), plain, 0.02)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_peft_adapts_experts_and_router(layout, calls, tmp_path):
    """LoRA on the weights of the experts and of the router: the gradients of the adapters, and the merged layer."""
    peft = pytest.importorskip("peft")
    options = dict(layout=layout, score="sigmoid", selection_bias=True)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = make(**options)

        def forward(self, x):
            return self.moe(x)

    names = ["experts." + ("gate_up_proj" if layout == "concatenated" else "gate_up_proj_interleaved")]
    names += ["experts.down_proj", "gate.weight"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    torch.manual_seed(3)
    model = peft.get_peft_model(Model(), config)
    found = step(model)
    assert sum("lora_" in name and p.grad is not None and p.grad.norm() > 0 for name, p in model.named_parameters()) == 6
    assert not near(found[:1], step(make(**options))[:1], 0.1) and repr(model)
    model.base_model.model.moe.update_selection_bias(torch.ones(E, dtype=torch.int32))
    merged = model.merge_and_unload()
    assert type(merged.moe.experts) is type(make().experts) and near(step(merged)[:2], found[:2], 1e-4)


def test_accelerate_offloads_the_parts(calls):
    """The weights are on the meta device but for the time of the parts' forwards."""
    accelerate = pytest.importorskip("accelerate")
    moe = make(score="sigmoid", selection_bias=True)
    x = torch.randn(20, H)
    with torch.no_grad():
        plain = moe(x)
        accelerate.cpu_offload(moe, execution_device="cpu", offload_buffers=True)
        assert all(p.is_meta for p in moe.parameters())
        assert (moe(x) - plain).norm() <= 1e-5 * plain.norm() and len(calls) == 2


def test_sharded_experts_change_no_result(tmp_path):
    if torch.__version__.startswith("2.6."):
        pytest.skip("fully_shard of torch 2.6 needs a GPU")
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    plain = step(make())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        moe = make()
        fully_shard(moe.experts)
        fully_shard(moe)
        full = [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in step(moe)]
        assert near(full, plain)
    finally:
        dist.destroy_process_group()
