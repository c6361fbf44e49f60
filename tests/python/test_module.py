"""smoe.MoE: names and layouts of its state dict, its output, and the aux-free bias update. Nothing may be printed."""

import pytest
import reference
import torch

import smoe


def test_state_dict_has_hugging_faces_names():
    plain = smoe.MoE(32, 16, 8, 2)
    assert {name: tuple(value.shape) for name, value in plain.state_dict().items()} == {
        "gate.weight": (8, 32),
        "experts.gate_up_proj": (8, 32, 32),
        "experts.down_proj": (8, 32, 16),
    }
    clamped = smoe.MoE(32, 16, 8, 2, activation=smoe.Gate("swiglu_clamped"))
    assert clamped.state_dict().keys() == plain.state_dict().keys()
    full = smoe.MoE(32, 16, 8, 2, activation="relu2", score="sigmoid", bias=True, router_bias=True, selection_bias=True)
    assert {name: tuple(value.shape) for name, value in full.state_dict().items()} == {
        "gate.weight": (8, 32),
        "gate.bias": (8,),
        "gate.e_score_correction_bias": (8,),
        "experts.up_proj": (8, 16, 32),
        "experts.up_proj_bias": (8, 16),
        "experts.down_proj": (8, 32, 16),
        "experts.down_proj_bias": (8, 32),
    }
    for name, value in full.state_dict().items():
        assert torch.all(value == 0) == name.endswith("bias"), name


def interleaved(weight):
    """The rows of a concatenated weight or bias (E, 2I, ...), gate and up rows in turns."""
    return weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("bias", [False, True])
def test_layouts_have_different_names(bias):
    """Their shapes are equal. A state dict of the other layout must not load, with both orders of the two layers."""
    torch.manual_seed(0)
    make = lambda layout: smoe.MoE(32, 16, 8, 2, layout=layout, bias=bias, initializer_range=0.3)
    there, here = make("concatenated"), make("interleaved")
    for first, second in ((there, here), (here, there)):
        with pytest.raises(RuntimeError, match="Missing key.*gate_up_proj"):
            first.load_state_dict(second.state_dict())
    turned = {}
    for name, value in there.state_dict().items():
        turned[name.replace("gate_up_proj", "gate_up_proj_interleaved")] = interleaved(value) if "gate_up" in name else value
    here.load_state_dict(turned)
    x = torch.randn(20, 32)
    assert torch.allclose(here(x), there(x), atol=1e-6)
    plain = [smoe.MoE(32, 16, 8, 2, layout=layout, activation="relu") for layout in ("concatenated", "interleaved")]
    plain[1].load_state_dict(plain[0].state_dict())  # without a gate there is one order


def test_layouts_have_different_names_when_sharded(tmp_path):
    """FSDP-2's sharded state dicts, through load_state_dict and through the functions for distributed checkpoints."""
    if torch.__version__.startswith("2.6."):
        pytest.skip("fully_shard of torch 2.6 needs a GPU")
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        there, here = (fully_shard(smoe.MoE(32, 16, 8, 2, layout=layout)) for layout in ("concatenated", "interleaved"))
        with pytest.raises(RuntimeError, match="Missing key.*gate_up_proj_interleaved"):
            here.load_state_dict(there.state_dict())
        with pytest.raises(RuntimeError, match="Missing key.*gate_up_proj_interleaved"):
            set_model_state_dict(here, get_model_state_dict(there))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 7, 32)])
def test_the_output_equals_the_reference_for_any_shape(shape):
    torch.manual_seed(0)
    moe, x = smoe.MoE(32, 16, 8, 2, norm_topk_prob=True, initializer_range=0.3), torch.randn(shape)
    weights = (moe.gate.weight, moe.experts.gate_up_proj, moe.experts.down_proj)
    wanted, losses, counts = reference.moe(
        x.reshape(-1, 32).double(), *[w.double() for w in weights], top_k=2, norm_topk_prob=True
    )
    assert torch.allclose(moe(x).double(), wanted.view(shape), atol=1e-5)
    found = moe(x, losses=True, counts=True)
    assert torch.equal(found.out, moe(x)) and torch.equal(found.counts, counts.int())
    assert torch.allclose(found.losses.double(), losses, rtol=1e-5)


def test_aux_free_bias_balances():
    """The aux-free bias update must move tokens from a favoured expert to the others."""
    torch.manual_seed(0)
    moe = smoe.MoE(32, 16, 8, 2, score="sigmoid", selection_bias=True, router_bias=True, initializer_range=0.1)
    with torch.no_grad():
        moe.gate.bias[3] = 2.0
    x = torch.randn(400, 32)
    before = moe(x, counts=True).counts
    for _ in range(200):
        moe.update_selection_bias(moe(x, counts=True).counts, 0.01)
    after = moe(x, counts=True).counts
    assert before.max() > 390 and after.max() < 130 and after.sum() == 800


def test_the_selection_bias_stays_float32():
    moe = smoe.MoE(32, 16, 8, 2, score="sigmoid", selection_bias=True)
    moe.gate.e_score_correction_bias.copy_(torch.linspace(0, 1, 8))
    before = moe.gate.e_score_correction_bias.clone()
    moe.to(torch.bfloat16)
    assert moe.gate.weight.dtype == torch.bfloat16 and torch.equal(moe.gate.e_score_correction_bias, before)
    counts = moe(torch.randn(40, 32, dtype=torch.bfloat16), counts=True).counts
    moe.update_selection_bias(counts, 0.001)
    assert not torch.equal(moe.gate.e_score_correction_bias, before)


def test_reset_parameters_sets_every_tensor_after_meta():
    """reset_parameters must set the selection bias too, because to_empty leaves arbitrary values in all tensors."""
    with torch.device("meta"):
        moe = smoe.MoE(32, 16, 8, 2, score="sigmoid", selection_bias=True, bias=True)
    moe.to_empty(device="cpu")
    for value in moe.state_dict().values():
        value.fill_(7)
    moe.reset_parameters()
    for name, value in moe.state_dict().items():
        assert torch.all(value == 0) == name.endswith("bias") and value.abs().max() < 1, name


def test_repr_names_sizes_and_options():
    assert "hidden_size=32, intermediate_size=16, num_experts=8, top_k=2, tile=64" in repr(smoe.MoE(32, 16, 8, 2, tile=64))


def test_options_have_two_names_and_no_third():
    ours = dict(renormalize=True, groups=4, groups_kept=2, route_scale=2.5)
    theirs = dict(norm_topk_prob=True, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    x, router, w1, w2 = torch.randn(9, 16), torch.randn(8, 16), torch.randn(8, 16, 16), torch.randn(8, 16, 8)
    call = lambda **options: smoe.moe(x, router, w1, w2, score="sigmoid", **options).out
    expected = call(topk=3, **ours)
    assert torch.equal(call(top_k=3, **theirs), expected) and not torch.equal(call(topk=3), expected)
    made = [smoe.MoE(16, 8, 8, 3, score="sigmoid", **options) for options in (ours, theirs)]
    assert made[0].options == made[1].options == dict(score="sigmoid", **ours)
    with pytest.raises(TypeError, match="smoe.MoE: top_k_groups is no option; expected one of activation, balance_coefficient"):
        smoe.MoE(16, 8, 8, 3, top_k_groups=2)
