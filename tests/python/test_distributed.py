"""Two ranks on gloo: fully_shard and DistributedDataParallel must give the results of one process with the whole
batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import smoe

RANKS, TOKENS, H = 2, 24, 32


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        make = lambda: smoe.MoE(H, 16, 8, 2, initializer_range=0.3)
        self.layers = torch.nn.ModuleList([make(), make()])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch(rank):
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(rank))


def single(steps=2):
    """The losses and weights of one process that trains on the batches of both ranks."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = [model(batch(rank)).square().mean() for rank in range(RANKS)]
        (sum(parts) / RANKS).backward()
        losses.append([part.item() for part in parts])
        optimizer.step()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def wrap(model, kind):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def work(rank, kind, address, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=RANKS)
    model = wrap(Model(), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batch(rank)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    full = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    torch.save((losses, full), f"{results}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_ranks_train_as_one_process(kind, tmp_path):
    if kind == "fsdp" and torch.__version__.startswith("2.6."):
        pytest.skip("fully_shard of torch 2.6 needs a GPU: it records an event of the CPU's stream, which has none")
    mp.spawn(work, (kind, tmp_path / "store", tmp_path / "result"), nprocs=RANKS)
    losses, weights = single()
    for rank in range(RANKS):
        ours, full = torch.load(f"{tmp_path / 'result'}.{rank}")
        assert ours == pytest.approx([both[rank] for both in losses], rel=1e-5)
        for a, b in zip(full, weights, strict=True):
            assert torch.allclose(a, b, atol=1e-6), kind
