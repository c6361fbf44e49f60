"""Parts of gpu.py: outputs and gradients compared with float64."""

import reference
import torch
from gpu_parts import against_f64, doubled, error, find, layer, part, randn, run, same, target

import smoe
from smoe import native


@part()
def experts():
    for dtype in [torch.bfloat16, torch.float16] if target.device == "cuda" else [torch.float32]:
        for activation in native.ACTIVATIONS:
            made = layer(gated=activation in native.GATED_ACTIVATIONS, biases=True, dtype=dtype)
            name = f"{activation} {str(dtype)[6:]}"
            against_f64(name, smoe.experts, reference.experts, made, activation=activation)
    made = layer(biases=True)
    against_f64("interleaved", smoe.experts, reference.experts, made, layout="interleaved")
    made["ids"] = torch.where(torch.rand(made["ids"].shape, device=target.device) < 0.2, 16, made["ids"]).int()
    against_f64("int32 ids, a fifth of them sentinels", smoe.experts, reference.experts, made)
    large = layer(H=1024)
    whole, chunked = run(smoe.experts, large), run(smoe.experts, large, chunks=4)
    find("chunks=4 changes no bit", same(whole.values(), chunked.values()))


@part()
def f8():
    """Against the CPU in fp8, and how far both are from float64: studies/fp8 has 6.9 % at most for such data."""
    on_cpu = lambda made: {n: v if v is None else v.detach().cpu().requires_grad_(v.requires_grad) for n, v in made.items()}
    for compute in ("f8", "f8_dgrad"):
        made = layer(T=2048, H=768, I=256, biases=True)
        exact, found = run(reference.experts, doubled(made)), run(smoe.experts, made, compute=compute)
        cpu = run(smoe.experts, on_cpu(made), compute=compute)
        for name in exact:
            other, own = error(found[name].cpu(), cpu[name]), error(found[name], exact[name])
            find(f"{compute}: {name} against the CPU", other < 0.02, f"{other:.1e}", 0.02)
            find(f"{compute}: {name} against float64", 1e-3 < own < 0.12, f"{own:.1e}", 0.12)
        compiled = torch.compile(smoe.experts, fullgraph=True)
        find(f"{compute}: compiled", same(run(compiled, made, compute=compute).values(), found.values()))
    if target.device != "cuda":
        return
    graph, x = torch.cuda.CUDAGraph(), made["x"].detach()
    weights = smoe.quantize_weights(made["w1"].detach(), made["w2"].detach())
    given = {name: value if value is None else value.detach() for name, value in made.items()} | {"x": x}
    wanted = smoe.experts(**given, compute="f8", weights_f8=weights)
    with torch.cuda.graph(graph):
        out = smoe.experts(**given, compute="f8", weights_f8=weights)
    graph.replay()
    find("in a CUDA graph: equal bits", torch.equal(out, wanted))


@part()
def rows():
    made = layer(T=700, biases=True)
    bounds = [0] + sorted(torch.randint(0, 650, (15,), generator=torch.Generator().manual_seed(0)).tolist()) + [650]
    with torch.no_grad():
        made["x"][650:] = 0
    for dtype in (torch.int32, torch.int64):
        inputs = dict(rows=made["x"], offsets=torch.tensor(bounds, device=target.device, dtype=dtype))
        inputs |= dict(row_weights=torch.rand(700, device=target.device).requires_grad_()) | {
            k: made[k] for k in ("w1", "w2", "b1", "b2")
        }
        against_f64(f"rows, offsets {str(dtype)[6:]}", smoe.experts_rows, reference.experts_rows, inputs)
    if target.device == "cuda":
        half = {n: v if n == "offsets" else v.detach().half().requires_grad_() for n, v in inputs.items()}
        against_f64("rows, float16", smoe.experts_rows, reference.experts_rows, half)
    clean = run(smoe.experts_rows, inputs)
    with torch.no_grad():
        made["x"][650:] = torch.nan
    found = run(smoe.experts_rows, inputs)
    find("a tail of NaN stays out", same(found.values(), clean.values()) and bool((found["out"][650:] == 0).all()))


@part()
def routers():
    cases = {
        "softmax": {}, "renormalised": dict(norm_topk_prob=True), "topk_softmax": dict(score="topk_softmax"),
        "sigmoid": dict(score="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5),
        "groups": dict(score="sigmoid", n_group=4, topk_group=2), "nr_f": dict(rounding="nr_f", tile=64),
        "up": dict(rounding="up", tile=64), "down": dict(rounding="down", tile=64), "balance_f": dict(rounding="balance_f", tile=64),
    }  # fmt: skip
    for name, options in cases.items():
        made = layer()
        inputs = dict(
            x=made["x"], router_weight=randn(16, 256, scale=0.2, grad=True, seed=5), w1=made["w1"], w2=made["w2"]
        )
        found = run(smoe.moe, inputs, top_k=4, **options)
        exact = exact_moe(
            {key: value.detach().cpu().double().requires_grad_() for key, value in inputs.items()}, **options
        )
        worst = max((error(found[n].to("cpu"), exact[n]), n) for n in found)
        find(f"{name} against float64", worst[0] < 0.02, f"{worst[0]:.1e} ({worst[1]})", 0.02)
    if target.device == "cuda":
        half = {name: value.detach().half().requires_grad_() for name, value in inputs.items()}
        found = run(smoe.moe, half, top_k=4)
        exact = exact_moe({n: v.detach().cpu().double().requires_grad_() for n, v in half.items()}, torch.float16)
        worst = max((error(found[n].to("cpu"), exact[n]), n) for n in found)
        find("float16 against float64", worst[0] < 0.02, f"{worst[0]:.1e} ({worst[1]})", 0.02)
    router = randn(16, 256, seed=5)
    found = smoe.moe(made["x"], router, made["w1"], made["w2"], top_k=4, losses=True, counts=True)
    with torch.no_grad():
        _, losses, counts = reference.moe(
            made["x"].cpu().double(), router.cpu().double(), made["w1"].cpu().double(), made["w2"].cpu().double(), top_k=4
        )  # fmt: skip
    find("losses", error(found.losses.cpu(), losses) < 1e-3, f"{error(found.losses.cpu(), losses):.1e}", 1e-3)
    find("counts", int((found.counts.cpu() - counts).abs().sum()) <= 2)
    again = smoe.moe(made["x"], router, made["w1"], made["w2"], top_k=4, rounding="sr_f", step=3).out
    find(
        "sr_f repeats",
        torch.equal(again, smoe.moe(made["x"], router, made["w1"], made["w2"], top_k=4, rounding="sr_f", step=3).out),
    )
    bias = torch.zeros(16, device=target.device)
    smoe.update_selection_bias(bias, found.counts, 0.5)
    find("update_selection_bias", torch.equal(bias.sign(), (found.counts.float().mean() - found.counts).sign()))


def exact_moe(inputs, dtype=None, **options):
    """The reference's output and gradients on the CPU, for the same dout, of `dtype`, that run() uses on the device."""
    out = reference.moe(**inputs, top_k=4, **options)[0]
    dout = randn(*out.shape, dtype=torch.float32, seed=1).to(dtype or target.dtype).cpu().double()
    gradients = torch.autograd.grad(out, list(inputs.values()), dout)
    return dict(zip(["out", *inputs], [out.detach(), *gradients]))


@part()
def loss_gradients():
    """In fp16 and bf16, with a gradient scaler and accumulation, and in a CUDA graph."""
    import test_losses

    for dtype in (torch.bfloat16, torch.float16) if target.device == "cuda" else (torch.bfloat16,):
        test_losses.scaled_and_accumulated(target.device, dtype)
        find(f"the balance loss's gradient scales with the loss, {str(dtype)[6:]}", True)
    if target.device != "cuda":
        return
    moe = smoe.MoE(256, 128, 16, 4, device="cuda", dtype=target.dtype)
    x = randn(512, 256, seed=1)

    def step():
        out = moe(x, losses=True)
        (out.out.float().square().mean() + out.losses[0]).backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    wanted = moe.gate.weight.grad.clone()
    moe.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    find("in a CUDA graph: equal bits", torch.equal(moe.gate.weight.grad, wanted))
