#!/usr/bin/env python3
"""Expert parallelism over several nodes: rows travel by torch's all_to_all, and smoe.experts_rows computes them.

  torchrun --nproc-per-node 4 examples/ep_all_to_all.py

Inside a node use smoe.ep, which sends a token once to each process and not once for each of its experts, and waits for no sizes
on the host. A dispatcher that delivers tokens with ids, such as DeepEP's, needs neither sorting nor offsets: smoe.experts(tokens,
ids, weights, w1, w2) computes them, where ids are local and those of other processes are -1.

Run as a program it compares output and gradients with one process. Exit status: 0 equal, 1 not.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


class Exchange:
    """The way of a batch's rows: x (T, H), one row for each of the T K pairs, sorted by expert; from there to the process of
    the expert, where the rows of all processes are sorted by expert again; and back. `count` is the number of all experts."""

    def __init__(self, ids: Tensor, count: int, group=None) -> None:
        self.group = group or dist.group.WORLD
        ranks, self.pairs, self.topk = dist.get_world_size(self.group), ids.numel(), ids.shape[1]
        self.order = ids.flatten().argsort(stable=True)
        sent = torch.bincount(ids.flatten(), minlength=count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        received = received.view(ranks, -1)  # rows by process and by expert of this process
        sizes = torch.stack([sent.view(ranks, -1).sum(1), received.sum(1)])
        self.sent, self.received = sizes.tolist()  # the host waits here
        experts = torch.arange(received.shape[1], device=ids.device).repeat(ranks)
        self.place = experts.repeat_interleave(received.flatten(), output_size=sum(self.received)).argsort(stable=True)
        ends = received.sum(0).cumsum(0)
        self.offsets = torch.cat([ends.new_zeros(1), ends]).int()

    def dispatch(self, x: Tensor) -> Tensor:
        """The rows of this process's experts: expert e has rows offsets[e] to offsets[e + 1] - 1."""
        rows = all_to_all_single_autograd(x[self.order // self.topk], self.received, self.sent, self.group)
        return rows[self.place]

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """(T, H) from what the experts computed, weighted on the process of the token."""
        back = torch.empty_like(rows).index_copy(0, self.place, rows)
        pairs = all_to_all_single_autograd(back, self.sent, self.received, self.group)
        pairs = torch.empty_like(pairs).index_copy(0, self.order, pairs).view(-1, self.topk, rows.shape[1])
        return (pairs * weights[..., None].to(pairs.dtype)).sum(1)


def experts(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, group=None) -> Tensor:
    """smoe.experts with global ids, where w1 and w2 have this process's experts."""
    import smoe

    way = Exchange(ids, w2.shape[0] * dist.get_world_size(group), group)
    return way.combine(smoe.experts_rows(way.dispatch(x), way.offsets, w1, w2), weights)


# ---- the program ----


def layer(seed: int, tokens: int, device: torch.device, hidden=64, intermediate=32, count=8, topk=3) -> list[Tensor]:
    """x, ids, weights, w1, w2"""
    draw = torch.Generator().manual_seed(seed)
    make = lambda *shape: (0.3 * torch.randn(*shape, generator=draw)).to(device, DTYPES[device.type])
    ids = torch.rand(tokens, count, generator=draw).topk(topk).indices.to(device)
    weights = torch.rand(tokens, topk, generator=draw).to(device)
    return [make(tokens, hidden), ids, weights, make(count, 2 * intermediate, hidden), make(count, hidden, intermediate)]


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}


def results(run, given: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
    out = run(*leaves)
    out.square().sum().backward()
    return [out.detach(), *[leaf.grad for leaf in leaves if leaf.requires_grad]]


def main() -> int:
    import smoe

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = layer(0, 32 * ranks, device)
    parts = [t.chunk(ranks)[rank] for t in given]
    found = results(experts, parts)
    wanted = [t.chunk(ranks)[rank] for t in results(smoe.experts, given)]
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
    print(f"process {rank} of {ranks}: largest relative difference {apart:.1e}", flush=True)
    dist.destroy_process_group()
    return int(apart > TOLERANCE[kind])


if __name__ == "__main__":
    sys.exit(main())
