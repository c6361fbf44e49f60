"""The gradient that reaches the losses of smoe.moe: against the reference, through scaling and accumulation, compiled."""

import pytest
import reference
import torch

import smoe

ROUTERS = {
    "softmax": {},
    "renormalised": dict(norm_topk_prob=True),
    "topk_softmax": dict(score="topk_softmax"),
    "sigmoid": dict(score="sigmoid", norm_topk_prob=True),
    "nr_f": dict(rounding="nr_f", tile=8),
}
NAMES = ("x", "router_weight", "w1", "w2")


def loss_of(out, losses):
    """Both losses, one of them through a gradient whose strides are zero."""
    return out.square().sum() + 3 * losses[0] + 2 * losses.sum()


def gradients(function, made, **options):
    out, losses = function(**made, top_k=2, **options)
    return torch.autograd.grad(loss_of(out, losses), [tensor for tensor in made.values() if tensor is not None])


def ours(**given):
    found = smoe.moe(**given, losses=True)
    return found.out, found.losses


def error(found, wanted):
    return (found.double() - wanted).norm() / wanted.norm()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("logits", [False, True])
def test_gradients_of_the_losses_equal_the_reference(layer, router, logits):
    made = {name: layer()[name] for name in NAMES}
    if logits:
        made |= dict(logits=(made["x"] @ made["router_weight"].T).detach().requires_grad_(), router_weight=None)
    exact = {name: None if value is None else value.detach().double().requires_grad_() for name, value in made.items()}
    wanted = gradients(lambda **a: reference.moe(**a)[:2], exact, **ROUTERS[router])
    for name, a, b in zip(made, gradients(ours, made, **ROUTERS[router]), wanted):
        assert error(a, b) < 1e-5, name


def test_the_losses_alone_have_a_gradient(layer):
    """The output has no gradient then. With the options' coefficients both gradients add up."""
    made = {name: layer()[name] for name in NAMES}
    leaves = made["x"], made["router_weight"]
    (alone,) = torch.autograd.grad(ours(**made, top_k=2)[1][0], leaves[1])
    exact = {name: value.detach().double().requires_grad_() for name, value in made.items()}
    (wanted,) = torch.autograd.grad(reference.moe(**exact, top_k=2)[1][0], exact["router_weight"])
    assert error(alone, wanted) < 1e-5

    def total(given, option):
        out, losses = ours(**made, top_k=2, balance_coefficient=option)
        return torch.autograd.grad(out.sum() + given * losses[0], leaves)

    for a, b in zip(total(0.2, 0.1), total(0.0, 0.3)):
        assert error(a, b.double()) < 1e-6


def test_losses_are_read_without_gradients(layer):
    made = {name: layer()[name] for name in NAMES}
    losses = smoe.moe(**made, top_k=2, losses=True).losses
    assert losses.requires_grad and losses[0].item() > 0 and torch.isfinite(losses.detach()).all()
    with torch.no_grad():
        assert torch.equal(smoe.moe(**made, top_k=2, losses=True).losses, losses) and not ours(**made, top_k=2)[1].requires_grad


def test_second_derivatives_are_refused(layer):
    made = {name: layer()[name] for name in NAMES}
    (gradient,) = torch.autograd.grad(ours(**made, top_k=2)[1].sum(), made["router_weight"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_and_accumulation_keep_the_weight_of_a_loss(dtype):
    scaled_and_accumulated("cpu", dtype)


def scaled_and_accumulated(device, dtype):
    torch.manual_seed(0)
    moe = smoe.MoE(32, 16, 8, 2, initializer_range=0.3, device=device, dtype=dtype)
    x = torch.randn(2, 40, 32).to(device, dtype)
    found = {}
    for name, scale in (("plain", 1.0), ("scaled", 2.0**10)):
        scaler = torch.amp.GradScaler(device, init_scale=scale)
        moe.zero_grad()
        for part in x:
            out = moe(part, losses=True)
            scaler.scale((out.out.float().square().mean() + 10 * out.losses[0]) / 2).backward()
        found[name] = moe.gate.weight.grad.double() / scale  # unscale_ knows no bf16 on a GPU, and refuses fp16
    moe.zero_grad()
    for part in x:
        (moe(part).float().square().mean() / 2).backward()
    without = moe.gate.weight.grad.double()
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    assert error(found["scaled"], found["plain"]) < tolerance
    assert (found["plain"] - without).norm() > 0.1 * without.norm()  # the balance loss is not lost in the rest


@pytest.mark.parametrize("given", ["router_weight", "logits"])
def test_compiled_losses_have_the_same_gradients(layer, given):
    torch._dynamo.reset()
    made = {name: layer()[name] for name in NAMES}
    if given == "logits":
        made |= dict(logits=(made["x"] @ made["router_weight"].T).detach().requires_grad_(), router_weight=None)
    compiled = torch.compile(lambda **a: ours(**a, norm_topk_prob=True), fullgraph=True, backend="aot_eager")
    plain = gradients(ours, made, norm_topk_prob=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, made), plain))
