"""smoe.route beside the router inside of smoe.moe, and router replay."""

import pytest
import torch
import torch.nn.functional as F

import smoe
from smoe import _route

K, SCORES = 2, {
    "softmax": dict(),
    "softmax_norm": dict(norm_topk_prob=True),
    "topk": dict(score="topk_softmax", route_scale=2.5),
    "sigmoid": dict(score="sigmoid", renormalize=True, groups=4, groups_kept=2, routed_scaling_factor=0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("replayed", [False, True])
def test_route_and_experts_equal_the_whole_layer(name, replayed, layer):
    """Outputs and all gradients of route and experts are those of moe, also if the ids come from an earlier call."""
    made, options = layer(), SCORES[name]
    bias = torch.linspace(-0.2, 0.2, 8) if name == "sigmoid" else None
    leaves = [made[key] for key in ("x", "router_weight", "w1", "w2")]
    x, router, w1, w2 = leaves
    ids = smoe.route(F.linear(x, router).detach(), top_k=K, selection_bias=bias, **options)[0] if replayed else None
    ids, weights = smoe.route(F.linear(x, router), top_k=K, selection_bias=None if replayed else bias, ids=ids, **options)
    out = smoe.experts(x, ids, weights, w1, w2)
    wanted = smoe.moe(x, router, w1, w2, top_k=K, selection_bias=bias, **options).out
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip((out, *torch.autograd.grad(out, leaves, dout)), (wanted, *torch.autograd.grad(wanted, leaves, dout)), strict=True)
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in pairs)


def test_replay_keeps_the_ids_and_skips_pairs():
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[7, 0]] * 4 + [[3, -1]], dtype=torch.int32)
    for options in SCORES.values():
        found, weights = smoe.route(logits, top_k=K, ids=ids, **options)
        assert torch.equal(found, ids.long()) and weights[4, 1] == 0 and weights[4, 0] > 0
    norm = smoe.route(logits, top_k=K, ids=ids, norm_topk_prob=True)[1]
    assert torch.allclose(norm.sum(-1), torch.ones(5)) and norm[4, 0] == 1


@pytest.mark.parametrize("name", SCORES)
def test_a_replayed_token_without_experts_has_weights_of_0(name):
    """Padding of an inference engine: the weights are 0, and no gradient is NaN."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = smoe.route(logits, top_k=K, ids=torch.tensor([[1, 2], [-1, -1], [8, 3]]), **SCORES[name])[1]
    weights.sum().backward()
    assert torch.equal(weights[1], torch.zeros(K)) and weights[2, 0] == 0 and weights[2, 1] > 0
    assert logits.grad.isfinite().all() and not logits.grad[1].any()


def test_a_wrong_argument_is_named():
    logits = torch.randn(5, 8)
    with pytest.raises(ValueError, match="selection_bias needs score='sigmoid'"):
        smoe.route(logits, topk=K, selection_bias=torch.zeros(8))
    with pytest.raises(ValueError, match="smoe.route: groups is 2, but groups need SMOE_SCORE_SIGMOID"):
        smoe.route(logits, topk=K, n_group=2)
    with pytest.raises(ValueError, match="smoe.route: topk is 9"):
        smoe.route(logits, top_k=9)
    with pytest.raises(TypeError, match="smoe.route: topk is None"):
        smoe.route(logits)
    with pytest.raises(TypeError, match="smoe.route: rounding is no option"):
        smoe.route(logits, topk=K, rounding="up")
    with pytest.raises(ValueError, match=r"expected \(T, K\) = \(5, 2\)"):
        smoe.route(logits, top_k=K, ids=torch.zeros(5, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="score is 'softmax'"):
        smoe.route(logits, top_k=K, score="softmax")


def test_every_score_of_the_header_is_here():
    assert set(_route._SCORES) == set(smoe.native.SCORES)
