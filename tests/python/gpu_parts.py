"""Shared by the files of parts: the registry, the findings, the device and type under test, inputs and comparisons."""

import torch

PARTS, FINDINGS = {}, []


class Target:
    """The device and type in which the parts run, and the part that runs now. gpu.py sets them before the first
    part."""

    device, dtype, part = "cuda", torch.bfloat16, ""


target = Target()


def part(cuda_only=False):
    def register(function):
        PARTS[function.__name__] = (function, cuda_only)
        return function

    return register


def find(what, good, figure="", limit=""):
    FINDINGS.append((target.part, what, figure, limit, bool(good)))
    print(f"{target.part:14} {what:58} {figure!s:>24} {limit!s:>16}  {'ok' if good else 'FAILED'}", flush=True)


def synchronize():
    if target.device == "cuda":
        torch.cuda.synchronize()


def randn(*shape, scale=1.0, dtype=None, grad=False, seed=None):
    generator = torch.Generator(target.device).manual_seed(seed) if seed is not None else None
    made = torch.randn(*shape, device=target.device, generator=generator) * scale
    return made.to(dtype or target.dtype).requires_grad_(grad)


def error(found, exact):
    return ((found.double() - exact.double()).norm() / (exact.double().norm() + 1e-30)).item()


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def layer(T=512, H=256, I=128, E=16, K=4, gated=True, biases=False, dtype=None, seed=0):
    torch.manual_seed(seed)
    width = 2 * I if gated else I
    leaf = lambda *shape, scale: randn(*shape, scale=scale, dtype=dtype, grad=True)
    made = dict(x=leaf(T, H, scale=1), w1=leaf(E, width, H, scale=H**-0.5), w2=leaf(E, H, I, scale=I**-0.5))
    made["ids"] = torch.rand(T, E, device=target.device).topk(K, -1).indices
    made["weights"] = torch.rand(T, K, device=target.device).requires_grad_()
    made["b1"] = leaf(E, width, scale=0.5) if biases else None
    made["b2"] = leaf(E, H, scale=0.5) if biases else None
    return made


def run(function, inputs, seed=1, **options):
    """The output, and the gradients of all leaves for a fixed dout."""
    out = function(**inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    dout = randn(*out.shape, dtype=torch.float32, seed=seed).to(out)
    names = [name for name, value in inputs.items() if value is not None and value.requires_grad]
    return dict(zip(["out", *names], [out.detach(), *torch.autograd.grad(out, [inputs[n] for n in names], dout)]))


def doubled(inputs):
    as_double = lambda v: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
    return {name: None if value is None else as_double(value) for name, value in inputs.items()}


def against_f64(what, ours, theirs, inputs, **options):
    """Checks that the errors against float64 are at most 1.2 times those of eager PyTorch in the same dtype, or at most
    2e-3 (2e-5 in float32)."""
    exact = run(theirs, doubled(inputs), **options)
    found, eager = run(ours, inputs, **options), run(theirs, inputs, **options)
    floor = 2e-5 if inputs["w1"].dtype == torch.float32 else 2e-3
    worst = max((error(found[n], exact[n]) / max(error(eager[n], exact[n]) * 1.2, floor), n) for n in found)
    find(what, worst[0] <= 1, f"{worst[0]:.2f} ({worst[1]})", "1 of eager's")
