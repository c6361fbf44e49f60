"""The part f8_module of gpu.py: smoe.MoE(compute=) in the ways in which PyTorch runs it. (f8 checks the numbers.)"""

import copy

import torch
from gpu_parts import find, part, randn, same, target
from torch.utils.checkpoint import checkpoint

import smoe


def make(compute):
    torch.manual_seed(0)
    return smoe.MoE(256, 384, 16, 4, initializer_range=0.05, compute=compute, device=target.device, dtype=target.dtype)


def step(function, moe, x):
    x = x.detach().requires_grad_()
    out = function(x)
    return [out, *torch.autograd.grad(out.float().square().mean(), [x, *moe.parameters()])]


def graphed(moe, x):
    """A CUDA graph of step. Returns its results and a function that replays it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(moe, moe, x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = step(moe, moe, x)
    return found, graph.replay


def sharded(moe, x, gather):
    """The results of a step under fully_shard on one rank."""
    from torch.distributed.fsdp import fully_shard

    moe = copy.deepcopy(moe)
    if gather:
        smoe.fsdp.gather_quantized(moe)
    fully_shard(moe, reshard_after_forward=True)
    x = x.detach().requires_grad_()
    out = moe(x)
    out.float().square().mean().backward()
    return [out, x.grad, *[p.grad.full_tensor() for p in moe.parameters()]]


@part()
def f8_module():
    if target.device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return  # Hopper's kernels alone have fp8
    x = randn(1000, 256, seed=1)
    for compute in ("f8", "f8_dgrad"):
        moe = make(compute)
        plain = step(moe, moe, x)
        find(f"{compute}: repeats bit for bit", same(step(moe, moe, x), plain))
        again = step(lambda y: checkpoint(moe, y, use_reentrant=False), moe, x)
        find(f"{compute}: checkpointing: equal bits", same(again, plain))
        compiled = torch.compile(moe, fullgraph=True, dynamic=True)
        find(f"{compute}: torch.compile, fullgraph: equal bits", same(step(compiled, moe, x), plain))
        if target.device == "cuda":
            found, replay = graphed(moe, x)
            with torch.no_grad():
                moe.experts.down_proj.mul_(2)
            replay()
            find(f"{compute}: CUDA graph, weights changed: equal bits", same(found, step(moe, moe, x)))
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl" if target.device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            find(f"{compute}: fully_shard, gathered bytes: equal bits", same(sharded(moe, x, True), sharded(moe, x, False)))
        finally:
            torch.distributed.destroy_process_group()
