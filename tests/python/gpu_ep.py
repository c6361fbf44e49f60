"""Part of gpu.py: expert parallelism from Python, with a process for each of 2, 4 or 8 GPUs; on the CPU two, with gloo. Every
process compares with the layer or model that it computes alone, and rank 0 reports the worst of all."""

import functools
import os
import tempfile

import torch
import torch.distributed as dist
from gpu_parts import error, find, part, target
from torch.utils.checkpoint import checkpoint

E, K, H, I, MOST = 16, 4, 256, 128, 160


def report(what, value, limit):
    """A finding: the worst value of all ranks is at most the limit."""
    worst = torch.tensor(float(value), dtype=torch.float64, device=target.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        find(what, worst.item() <= limit, f"{worst.item():.2e}", limit)


def apart(ours, theirs):
    together = lambda tensors: torch.cat([t.detach().double().flatten() for t in tensors])
    return error(together(ours), together(theirs))


# ---- smoe.ep.experts ----


def inputs(tokens):
    """x, ids, weights, w1, w2, b1, b2 of all ranks together."""
    generator = torch.Generator().manual_seed(5)

    def normal(*size, scale=1.0):
        return (torch.randn(*size, generator=generator, device="cpu") * scale).to(target.device, target.dtype)

    rows = sum(tokens)
    ids = torch.rand(rows, E, generator=generator, device="cpu").topk(K).indices.to(target.device)
    weights = torch.rand(rows, K, generator=generator, device="cpu").to(target.device)
    w1, w2 = normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
    return normal(rows, H), ids, weights, w1, w2, normal(E, 2 * I), normal(E, H)


def leaves(given):
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]


def forward(function, given):
    x, ids, weights, w1, w2, b1, b2 = given
    return function(x, ids, weights, w1, w2, b1=b1, b2=b2)


def step(function, given, dout):
    """out and all gradients"""
    out = forward(function, given)
    return [out, *torch.autograd.grad(out, [t for t in given if t.requires_grad], dout)]


def replayed(function, given, dout):
    """The results of the second launch of a CUDA graph of forward and backward."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        given = leaves(given)  # new ones: PyTorch accumulates the gradient of a tensor in the stream that first used it
        for _ in range(3):
            step(function, given, dout)
    torch.cuda.current_stream().wait_stream(stream)
    dist.barrier()
    with torch.cuda.graph(graph):
        made = step(function, given, dout)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return made


def experts(rank, ranks):
    import smoe

    tokens = [MOST - 24 * r if r != 1 else 0 for r in range(ranks)]
    own, start, limit = E // ranks, sum(tokens[:rank]), 1e-5 if target.dtype == torch.float32 else 8e-3
    mine, local = slice(start, start + tokens[rank]), slice(rank * own, (rank + 1) * own)
    everything = inputs(tokens)
    dout = torch.randn(sum(tokens), H, generator=torch.Generator().manual_seed(6), device="cpu").to(target.device, target.dtype)
    out, dx, dweights, *dexperts = step(smoe.experts, leaves(everything), dout)
    want = [out[mine], dx[mine], dweights[mine], *[t[local] for t in dexperts]]
    given, dout = leaves([t[mine] for t in everything[:3]] + [t[local] for t in everything[3:]]), dout[mine]
    sizes = dict(max_tokens=MOST, hidden=H, num_experts=E, top_k=K, dtype=target.dtype, timeout=60.0)
    first = None
    for options in (dict(waves=1), dict(waves=4), dict(waves=1, row_capacity=64)):
        group = smoe.ep.Group(**sizes, **options)
        call = functools.partial(smoe.ep.experts, group=group)
        name = ", ".join(f"{key} {value}" for key, value in options.items())
        if first is None and rank == 0:
            print("windows by", group.windows.way.name, flush=True)
        found = step(call, given, dout)
        report(f"experts, {name}: difference", apart(found, want), limit)
        same = lambda made, found=found: sum(not torch.equal(a, b) for a, b in zip(made, found, strict=True))
        if "row_capacity" in options:
            report("results with other bits if H is computed again", same(first), 0)
        first = first or found
        report(f"experts, {name}: other bits when called again", same(step(call, given, dout)), 0)
        again = lambda *a, call=call, **o: checkpoint(call, *a, use_reentrant=False, **o)
        report(f"experts, {name}: other bits under checkpoint", same(step(again, given, dout)), 0)
        if target.device != "cpu":
            report(f"experts, {name}: other bits in a CUDA graph", same(replayed(call, given, dout)), 0)
        smoe.ep.check()
        group.close()
    torch._dynamo.reset()
    group = smoe.ep.Group(**sizes)
    backend = "aot_eager" if target.device == "cpu" else "inductor"
    compiled = torch.compile(functools.partial(smoe.ep.experts, group=group), backend=backend, fullgraph=True)
    report("experts, compiled: difference", apart(step(compiled, given, dout), want), limit)
    failed = 0
    try:
        smoe.ep.experts(*given[:5], group=group, activation="geglu" if rank == 1 else "swiglu")
        if target.device != "cpu":
            torch.cuda.synchronize()
        smoe.ep.check()
    except smoe.ep.PeerError as reason:
        failed = "activation" in str(reason)
    report("ranks that do not name another's activation", not failed, 0)
    dist.barrier()
    group.close()


# ---- models ----


def modules(rank, ranks):
    """smoe.MoE(ep=group): eager, checkpointed, compiled, DDP, FSDP-2, and clipped."""
    import test_ep_module as cases

    losses, *want = cases.single(ranks)
    limits = (1e-5, 1e-4) if target.dtype == torch.float32 else (2e-2, 0.1)  # 0.1: a token may get other experts
    shapes = [(1, ranks)] + ([(2, ranks // 2)] if ranks > 2 else [])
    for name, loss, *found in cases.results(rank, ranks, shapes):
        report(f"MoE, {name}: loss", abs(loss / losses[rank] - 1), limits[0])
        for what, ours, exact in zip(("gradients", "norm", "clipped"), found, want, strict=True):
            ours, exact = ([t.values() if isinstance(t, dict) else [t]][0] for t in (ours, exact))
            report(f"MoE, {name}: {what}", apart(ours, exact), limits[1])


def transformers(rank, ranks, folder):
    import models
    import pytest

    try:
        import test_transformers_ep as cases
    except pytest.skip.Exception as reason:
        if rank == 0:
            print(f"ep: Transformers' expert parallelism is left out, it {reason}")
        return
    if rank == 0:
        for name in cases.NAMES:
            models.tiny(name, **cases.SEED).save_pretrained(f"{folder}/{name}")
    dist.barrier()
    found = cases.results(rank, ranks, folder)
    limits = (1e-5, 1e-4) if target.dtype == torch.float32 else (2e-2, 0.3)  # a missing sum over ranks is 0.5 or more
    for name, config, of, loss, gradients in found[: len(list(cases.cases(ranks)))]:
        model = models.tiny(name, **cases.SEED).to(torch.get_default_device(), torch.get_default_dtype())
        losses, exact = cases.run(model, range(config["fsdp_size"]))
        name = f"{name} ({config['fsdp_size']}, {config['tp_size']}, {config['ep_size']}, {config['ep_implementation']})"
        report(f"{name}: loss", abs(loss / losses[of] - 1), limits[0])
        report(f"{name}: gradients", apart([gradients[key] for key in exact], exact.values()), limits[1])


# ---- processes ----


def work(rank, ranks, device, dtype, folder):
    target.device, target.dtype, target.part = (f"cuda:{rank}" if device == "cuda" else "cpu"), dtype, "ep"
    backend = "gloo"
    os.environ["LOCAL_RANK"] = str(rank)  # Transformers makes this GPU the current one
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_default_device(target.device)
    torch.set_default_dtype(dtype)
    import gpu_parts

    for run in (experts, modules, functools.partial(transformers, folder=folder)):
        run(rank, ranks)
    dist.barrier()
    if rank == 0:
        torch.save(gpu_parts.FINDINGS, f"{folder}/findings")
    dist.barrier()
    os._exit(0)


@part()
def ep():
    from gpu_parts import FINDINGS

    there = 2 if target.device == "cpu" else torch.cuda.device_count()
    if there < 2:
        print("ep: one GPU; it needs two")
        return
    ranks = max(n for n in (2, 4, 8) if n <= there)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (ranks, target.device, target.dtype, folder), nprocs=ranks)
        FINDINGS.extend(torch.load(f"{folder}/findings"))
