"""smoe.experts, smoe.experts_rows, smoe.moe and smoe.MoE compared with eager PyTorch in float64, option by option."""

import pytest
import reference
import torch

import smoe
from smoe import native

GATED, PLAIN = list(native.GATED_ACTIVATIONS), list(native.PLAIN_ACTIVATIONS)


def run(function, inputs, options, seed=1):
    """The function's output, and the gradients of every leaf that requires one, for a fixed dout."""
    found = function(**inputs, **options)
    out = found[0] if isinstance(found, tuple) else found
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    names = [name for name, value in inputs.items() if value is not None and value.requires_grad]
    gradients = torch.autograd.grad(out, [inputs[name] for name in names], dout)
    return found, dict(zip(names, gradients))


def doubled(inputs):
    def double(value):
        return value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value

    return {name: None if value is None else double(value) for name, value in inputs.items()}


def close(ours, theirs, tolerance, name=""):
    scale = theirs.abs().max().item() + 1e-6
    assert (ours.double() - theirs).abs().max().item() <= tolerance * scale, name


def compare(ours, theirs, inputs, options, tolerance=1e-5):
    (found, gradients), (wanted, exact) = run(ours, inputs, options), run(theirs, doubled(inputs), options)
    out, out_exact = (found.out, wanted[0]) if isinstance(found, tuple) else (found, wanted)
    close(out, out_exact, tolerance, "out")
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == inputs[name].dtype
        close(gradient, exact[name], tolerance, "d" + name)
    return found, wanted


def pick(made, *names):
    return {name: made[name] for name in names}


EXPERTS = ("x", "ids", "weights", "w1", "w2", "b1", "b2")


@pytest.mark.parametrize("activation", GATED + PLAIN)
@pytest.mark.parametrize("biases", [False, True])
def test_experts_equal_the_reference_in_every_activation(layer, activation, biases):
    made = layer(gated=activation in GATED, biases=biases)
    compare(smoe.experts, reference.experts, pick(made, *EXPERTS), dict(activation=activation))


@pytest.mark.parametrize("activation", GATED)
def test_interleaved_experts_equal_the_reference(layer, activation):
    made = layer(biases=True)
    compare(smoe.experts, reference.experts, pick(made, *EXPERTS), dict(activation=activation, layout="interleaved"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_no_expert_and_repeated_ids_are_skipped(layer, dtype):
    """Ids below 0 and ids from E on are skipped. If a token has equal ids, the first counts."""
    made = layer(K=3)
    ids = made["ids"].clone()
    ids[3, 1], ids[5], ids[7, 0], ids[9, 2], ids[11] = 8, 8, -1, 2**31 - 1, ids[11, 0]
    made["ids"] = ids.to(dtype)
    _, _ = compare(smoe.experts, reference.experts, pick(made, *EXPERTS), {})
    assert torch.all(smoe.experts(**pick(made, *EXPERTS))[5] == 0)


def test_experts_in_bf16_are_about_as_exact_as_eager(layer):
    """The errors in bf16, against float64, must be at most 1.1 times those of eager PyTorch in bf16."""
    made = pick(layer(T=200, H=64, I=64, dtype=torch.bfloat16), *EXPERTS)
    (ours, mine), (eager, theirs) = run(smoe.experts, made, {}), run(reference.experts, made, {})
    exact_out, exact = run(reference.experts, doubled(made), {})
    error = lambda a, b: (a.double() - b).norm() / b.norm()
    assert error(ours, exact_out) <= 1.1 * error(eager, exact_out)
    for name in mine:
        assert error(mine[name], exact[name]) <= 1.1 * error(theirs[name], exact[name]), name


def test_chunks_of_experts_change_no_bit(layer):
    made = pick(layer(H=512, dtype=torch.bfloat16), *EXPERTS)
    (out, gradients), (chunked, others) = run(smoe.experts, made, {}), run(smoe.experts, made, dict(chunks=4))
    assert torch.equal(out, chunked) and all(torch.equal(gradients[n], others[n]) for n in gradients)


def test_a_parameter_of_grad_dtype_f32_gets_the_f32_sums(layer):
    made = pick(layer(T=300, dtype=torch.bfloat16), *EXPERTS)
    _, exact = run(reference.experts, doubled(made), {})
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has no Tensor.grad_dtype")
    for name in ("w1", "w2"):
        made[name].grad_dtype = torch.float32
    generator = torch.Generator().manual_seed(1)
    smoe.experts(**made, gradient_dtype=torch.float32).backward(
        torch.randn(made["x"].shape, generator=generator).bfloat16()
    )
    for name in ("w1", "w2"):
        fine = made[name].grad
        assert fine.dtype == torch.float32 and not torch.equal(fine, fine.bfloat16().float())
        close(fine, exact[name], 0.02, name)


# ---- rows ----


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "relu2"])
def test_rows_equal_the_reference_and_padding_has_no_effect(layer, weighted, dtype, activation):
    """Rows after the last offset contain NaN, which must have no effect on any result."""
    made = layer(gated=activation in GATED, biases=True)
    offsets = torch.tensor([0, 3, 3, 10, 10, 11, 30, 40, 41], dtype=dtype)
    with torch.no_grad():
        made["x"][41:] = 0
    inputs = dict(rows=made["x"], offsets=offsets, row_weights=None, **pick(made, "w1", "w2", "b1", "b2"))
    if weighted:
        inputs["row_weights"] = torch.rand(48).requires_grad_()
    compare(smoe.experts_rows, reference.experts_rows, inputs, dict(activation=activation))
    clean, gradients = run(smoe.experts_rows, inputs, dict(activation=activation))
    with torch.no_grad():
        made["x"][41:] = torch.nan
    out = smoe.experts_rows(**inputs, activation=activation)
    dout = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    dout[41:] = torch.nan
    leaves = {name: value for name, value in inputs.items() if value is not None and value.requires_grad}
    again = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout)))
    assert torch.equal(out, clean) and torch.all(out[41:] == 0)
    for name in again:
        assert torch.equal(again[name], gradients[name]), name
    assert torch.all(again["rows"][41:] == 0)


def test_dispatched_rows_with_top_1_equal_the_reference(layer):
    """The calls of expert-parallel code: K = 1, unit weights, ids that are not sorted; and a single dummy row."""
    made = layer(K=1)
    made["weights"] = torch.ones(48, 1)
    compare(smoe.experts, reference.experts, pick(made, *EXPERTS), {})
    one = layer(T=1, K=1)
    compare(smoe.experts, reference.experts, pick(one, *EXPERTS), {})


def test_skipped_rows_may_hold_anything(layer):
    """Rows of a padded buffer whose ids are skipped contain NaN, in x and in dout. No other result may change."""
    made = layer(K=1)
    made["ids"][40:] = 8
    results = []
    for filling in (0.0, torch.nan):
        with torch.no_grad():
            made["x"][40:] = filling
        leaves = [made[name] for name in ("x", "weights", "w1", "w2")]
        dout = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
        dout[40:] = filling
        out = smoe.experts(**pick(made, *EXPERTS))
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


# ---- the whole layer ----

ROUTERS = {
    "softmax": {},
    "renormalised": dict(norm_topk_prob=True),
    "topk_softmax": dict(score="topk_softmax"),
    "sigmoid": dict(score="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5),
    "groups": dict(score="sigmoid", n_group=4, topk_group=2),
    "nr_f": dict(rounding="nr_f", tile=8),
    "nr_s": dict(rounding="nr_s", tile=8),
    "balance_f": dict(rounding="balance_f", tile=8),
    "up": dict(rounding="up", tile=8, norm_topk_prob=True),
    "down": dict(rounding="down", tile=4, score="sigmoid", routed_scaling_factor=2.0),
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("given", ["router_weight", "router_bias", "logits"])
def test_the_layer_equals_the_reference_with_every_router(layer, router, given):
    made = layer(K=2, biases=True)
    inputs = pick(made, "x", "router_weight", "w1", "w2", "b1", "b2")
    if given == "logits":
        inputs["logits"] = (made["x"] @ made["router_weight"].T).detach().requires_grad_()
        inputs["router_weight"] = None
    if given == "router_bias":
        inputs["router_bias"] = torch.linspace(-1, 1, 8).requires_grad_()
    if ROUTERS[router].get("score") == "sigmoid":
        inputs["selection_bias"] = torch.linspace(-0.1, 0.1, 8)
    ours = lambda **a: smoe.moe(**a, losses=True, counts=True)
    found, (_, losses, counts) = compare(ours, reference.moe, inputs, dict(top_k=2, **ROUTERS[router]))
    close(found.losses, losses, 1e-5, "losses")
    assert torch.equal(found.counts, counts.int())


def test_stochastic_rounding_follows_seed_and_step(layer):
    """The draws depend on seed and step: equal for an equal step, different for another. Every expert has the number of
    tokens below or above its count that is a multiple of the tile, those with the highest scores, and the results are
    those of these pairs."""
    made = pick(layer(T=500), "x", "router_weight", "w1", "w2")
    options = dict(top_k=2, rounding="sr_f", tile=64)
    at = lambda **a: smoe.moe(**made, **options, **a).out
    assert torch.equal(at(seed=3, step=5), at(seed=3, step=5))
    assert not torch.equal(at(seed=3, step=5), at(seed=3, step=6))
    assert not torch.equal(at(seed=3, step=5), at(seed=4, step=5))
    found, exact = at(seed=3, step=5).double(), {name: value.detach() for name, value in doubled(made).items()}
    p = (exact["x"] @ exact["router_weight"].T).softmax(-1)
    kept = reference.select(p, 2, 1, 1)
    math = exact["w1"], exact["w2"], None, None, "swiglu", "concatenated"
    values = torch.stack([reference.expert(exact["x"], e, *math) for e in range(8)])
    ways = []  # for each expert the masks with the lower and with the higher multiple
    for e in range(8):
        order = sorted(range(500), key=lambda t: (not kept[t, e], -p[t, e].item(), t))
        count = int(kept[:, e].sum())
        ways.append([torch.zeros(500, dtype=torch.bool).index_fill(0, torch.tensor(order[:m], dtype=torch.int64), True)
                     for m in (count // 64 * 64, -(-count // 64) * 64)])  # fmt: skip
    chosen = 0
    for choice in range(2**8):
        mask = torch.stack([ways[e][choice >> e & 1] for e in range(8)], -1)
        out = torch.einsum("te,eth->th", p * mask, values)
        chosen += bool((found - out).abs().max() <= 1e-5 * out.abs().max())
    assert chosen == 1


def test_coefficients_add_the_gradients_of_the_losses(layer):
    made = pick(layer(), "x", "router_weight", "w1", "w2")

    def ours(**a):
        return smoe.moe(**a, top_k=2, balance_coefficient=0.3, z_coefficient=0.2)

    def theirs(**a):
        out, losses, _ = reference.moe(**a, top_k=2)
        weights = torch.tensor([0.3, 0.2], dtype=torch.float64)
        return (out + _with_gradient((losses * weights).sum(), out),)

    compare(ours, theirs, made, {})


class _OneGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, like):
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx, dout):
        return torch.ones((), dtype=dout.dtype), None


def _with_gradient(value, like):
    """Zeros with the shape of `like`, whose backward gives `value` the gradient 1."""
    return _OneGradient.apply(value, like)


def test_bf16_logits_get_a_bf16_gradient(layer):
    made = pick(layer(), "x", "w1", "w2") | dict(router_weight=None)
    order = torch.rand(48, 8).argsort(-1)  # no equal logits, of which the reference may choose another
    made["logits"] = (order / 2 - 2).bfloat16().requires_grad_()
    found, gradients = run(smoe.moe, made, dict(top_k=2))
    assert gradients["logits"].dtype == torch.bfloat16
    _, exact = run(reference.moe, doubled(made), dict(top_k=2))
    close(gradients["logits"], exact["logits"], 0.02)


def test_logits_dtype_rounds_the_logits_of_the_router(layer):
    """The router's logits in bf16, with their gradient through the router."""
    made = pick(layer(dtype=torch.bfloat16), "x", "router_weight", "w1", "w2")
    found, gradients = run(smoe.moe, made, dict(top_k=8, logits_dtype=torch.bfloat16))
    wide = smoe.moe(**made, top_k=8).logits
    assert found.logits.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert torch.equal(found.logits, wide.bfloat16())
    _, exact = run(reference.moe, doubled(made), dict(top_k=8))
    for name in gradients:
        assert (gradients[name].double() - exact[name]).norm() <= 0.02 * exact[name].norm(), name


@pytest.mark.parametrize("score", ["softmax_topk", "topk_softmax", "sigmoid"])
def test_the_layer_in_bf16_is_about_as_exact_as_eager(layer, score):
    """The whole layer with bf16 tensors; every token has all experts, so that rounding changes no selection."""
    made = pick(layer(T=200, H=64, I=64, dtype=torch.bfloat16), "x", "router_weight", "w1", "w2")
    options = dict(top_k=8, score=score)
    (ours, mine), (eager, theirs) = run(smoe.moe, made, options), run(reference.moe, made, options)
    exact_out, exact = run(reference.moe, doubled(made), options)
    error = lambda a, b: (a.double() - b).norm() / b.norm()
    assert error(ours.out, exact_out[0]) <= 1.1 * error(eager[0], exact_out[0])
    for name in mine:
        assert error(mine[name], exact[name]) <= 1.1 * error(theirs[name], exact[name]), name


def test_rows_in_bf16_are_about_as_exact_as_eager(layer):
    made = layer(T=200, H=64, I=64, dtype=torch.bfloat16)
    inputs = dict(rows=made["x"], offsets=torch.tensor([0, 30, 30, 70, 100, 101, 150, 180, 190]), **pick(made, "w1", "w2"))
    (ours, mine), (eager, theirs) = run(smoe.experts_rows, inputs, {}), run(reference.experts_rows, inputs, {})
    exact_out, exact = run(reference.experts_rows, doubled(inputs), {})
    error = lambda a, b: (a.double() - b).norm() / b.norm()
    assert error(ours, exact_out) <= 1.1 * error(eager, exact_out)
    for name in mine:
        assert error(mine[name], exact[name]) <= 1.1 * error(theirs[name], exact[name]), name


def test_the_selection_bias_moves_towards_equal_counts():
    bias, counts = torch.zeros(4), torch.tensor([1, 9, 5, 5], dtype=torch.int32)
    smoe.update_selection_bias(bias, counts, 0.5)
    assert bias.tolist() == [0.5, -0.5, 0.0, 0.0]


# ---- without tokens, without gradients ----


@pytest.mark.parametrize("entry", ["experts", "rows", "moe"])
def test_no_tokens_give_empty_output_and_zero_gradients(layer, entry):
    made = layer(T=0, biases=True)
    calls = {
        "experts": (smoe.experts, pick(made, *EXPERTS)),
        "rows": (
            smoe.experts_rows,
            dict(rows=made["x"], offsets=torch.zeros(9, dtype=torch.int32), row_weights=torch.rand(0).requires_grad_())
            | pick(made, "w1", "w2", "b1", "b2"),
        ),
        "moe": (
            lambda **a: smoe.moe(**a, top_k=2, losses=True, counts=True, balance_coefficient=0.1),
            pick(made, "x", "router_weight", "w1", "w2", "b1", "b2"),
        ),
    }
    found, gradients = run(*calls[entry], {})
    out = found.out if entry == "moe" else found
    assert out.shape == (0, 32)
    for name, gradient in gradients.items():
        assert gradient.shape == calls[entry][1][name].shape and torch.all(gradient == 0), name
    if entry == "moe":
        assert torch.all(found.losses == 0) and torch.all(found.counts == 0) and found.logits.shape == (0, 8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_bits_are_the_same(layer, mode):
    made = layer()
    experts, moe = pick(made, *EXPERTS), pick(made, "x", "router_weight", "w1", "w2")
    with mode():
        assert torch.equal(smoe.experts(**experts), smoe.experts(**experts).clone())
        quiet = smoe.experts(**experts), smoe.moe(**moe, top_k=2, losses=True, counts=True)
    loud = smoe.experts(**experts), smoe.moe(**moe, top_k=2, losses=True, counts=True)
    assert torch.equal(quiet[0], loud[0]) and not quiet[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(quiet[1], loud[1]))


FROZEN = [{"w1", "w2"}, {"x"}, {"weights"}, {"w1", "b1"}, {"w2"}, {"x", "w1", "w2", "b1", "b2"}, {"w1", "w2", "weights"}]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda f: "+".join(sorted(f)))
def test_freezing_tensors_keeps_the_bits_of_other_gradients(layer, frozen):
    made = pick(layer(biases=True), *EXPERTS)
    out, gradients = run(smoe.experts, made, {})
    some = {n: v.detach() if n in frozen else v for n, v in made.items()}
    again, fewer = run(smoe.experts, some, {})
    assert torch.equal(out, again) and fewer.keys() == gradients.keys() - frozen
    assert all(torch.equal(fewer[name], gradients[name]) for name in fewer)


@pytest.mark.parametrize("frozen", [{"router_weight"}, {"router_weight", "router_bias", "w1", "w2"}, {"router_bias"}, {"x"}])
def test_freezing_the_router_keeps_the_bits_of_other_gradients(layer, frozen):
    made = pick(layer(), "x", "router_weight", "w1", "w2") | dict(router_bias=torch.zeros(8).requires_grad_())
    call = lambda **a: smoe.moe(**a, top_k=2)
    _, gradients = run(call, made, {})
    _, fewer = run(call, {n: v.detach() if n in frozen else v for n, v in made.items()}, {})
    assert fewer.keys() == gradients.keys() - frozen
    assert all(torch.equal(fewer[name], gradients[name]) for name in fewer)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid"}, {"norm_topk_prob": True, "rounding": "nr_f", "tile": 8}])
def test_masked_tokens_do_not_count_in_the_losses(options):
    """Losses, counts and the gradients of losses are those of a layer that has only the counted tokens; the output has
    the bits of a layer without a mask."""
    torch.manual_seed(0)
    layer = smoe.MoE(16, 8, 8, 2, initializer_range=0.5, **options)
    x, mask = torch.randn(5, 10, 16), torch.rand(5, 10) < 0.6
    plain = layer(x, losses=True)
    masked = layer(x, losses=True, counts=True, token_mask=mask)
    fewer = layer(x[mask], losses=True, counts=True)
    assert torch.equal(masked.out, plain.out) and torch.equal(masked.counts, fewer.counts)
    torch.testing.assert_close(masked.losses, fewer.losses, rtol=1e-5, atol=1e-6)
    weigh = torch.tensor([0.3, 0.2])
    got = torch.autograd.grad(masked.losses @ weigh, layer.gate.weight)[0]
    torch.testing.assert_close(got, torch.autograd.grad(fewer.losses @ weigh, layer.gate.weight)[0], rtol=1e-4, atol=1e-6)
    none = layer(x, losses=True, counts=True, token_mask=torch.zeros_like(mask))
    assert not none.losses.any() and not none.counts.any() and torch.equal(none.out, plain.out)
    assert not torch.autograd.grad(none.losses.sum(), layer.gate.weight)[0].any()
    with pytest.raises(TypeError, match="token_mask has dtype torch.int64"):
        layer(x, token_mask=mask.long())
    with pytest.raises(ValueError, match=r"token_mask has shape \(9,\); expected \(T\)"):
        layer(x[0], token_mask=mask.flatten()[:9])
