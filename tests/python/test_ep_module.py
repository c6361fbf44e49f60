"""smoe.MoE(ep=group) on 2 and 4 gloo processes: the losses and all gradients of one process that has the tokens and the
experts of all, under checkpointing, torch.compile, DistributedDataParallel, fully_shard, and clipping. The ranks of
several nodes are the mesh (2, 2): experts inside a node, data parallelism between the nodes. On GPUs gpu_ep.py runs it, with
torch's default device and type."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import checkpoint

import smoe

E, K, H, I, T = 8, 3, 32, 16, 12
CLIP = 0.05


class Model(torch.nn.Module):
    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(3)
        common = dict(ep=group, initializer_range=0.3, device="cpu", dtype=torch.float32)  # the same numbers on every device
        make = lambda **options: smoe.MoE(H, I, E, K, **common, **options)
        self.layers = torch.nn.ModuleList([make(bias=True, rounding="nr_f", tile=4), make(score="sigmoid", selection_bias=True)])
        self.last = torch.nn.Linear(H, H, device="cpu", dtype=torch.float32)
        self.around = lambda layer, x: layer(x)
        self.to(torch.get_default_device(), torch.get_default_dtype())

    def forward(self, x):
        for layer in self.layers:
            x = x + self.around(layer, x)
        return self.last(x).square().mean()


def batch(rank):
    """It requires a gradient, as the first layer must have under reentrant checkpointing."""
    x = torch.randn(2, T // 2, H, generator=torch.Generator().manual_seed(rank), device="cpu", dtype=torch.float32)
    return x.to(torch.get_default_device(), torch.get_default_dtype()).requires_grad_()


def single(ranks):
    """Losses by rank, gradients, the norm and the clipped gradients."""
    model = Model()
    losses = [model(batch(rank)) for rank in range(ranks)]
    (sum(losses) / ranks).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return [loss.item() for loss in losses], gradients, norm, {name: p.grad for name, p in model.named_parameters()}


# ---- in each process: a name, the model, and what makes its gradients those of the mean over all ranks ----


def summed(model, group):
    """Without a wrapper: what a user's own loop does."""
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def saves_experts(ctx, operator, *_, **__):
    kept = operator is torch.ops.smoe.ep_moe_forward.default
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def plain(group):
    for reentrant in (False, True):
        model = Model(group)
        model.around = functools.partial(checkpoint.checkpoint, use_reentrant=reentrant)
        yield f"checkpoint, reentrant {reentrant}", model, summed
    model = Model(group)
    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, saves_experts)
    model.around = functools.partial(checkpoint.checkpoint, use_reentrant=False, context_fn=contexts)
    yield "selective checkpoint", model, summed
    model = Model(group)
    backend = "inductor" if torch.get_default_device().type == "cuda" else "aot_eager"
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    yield "compiled", model, summed


def wrapped(group, mesh):
    nothing = lambda *_: None
    model = Model(group)
    smoe.ep.data_parallel(model, mesh.get_group("efsdp") if mesh.size(0) > 1 else None)
    model.ddp = [torch.nn.parallel.DistributedDataParallel(model)]
    yield "ddp", model, nothing
    model = Model(group)
    smoe.ep.fully_shard(model, mesh["efsdp"])
    everyone = init_device_mesh(mesh.device_type, (dist.get_world_size(),))
    for layer in model.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=everyone)
    yield "fsdp", torch.distributed.fsdp.fully_shard(model, mesh=everyone), nothing


def gradients(model):
    """On rank 0, where those of experts are of all ranks, {} elsewhere."""
    found = {}
    for name, p in model.named_parameters():
        value = p.grad
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        elif ".experts." in name:
            group = model.layers[0].experts.ep
            parts = [torch.empty_like(value) for _ in range(group.size)]
            dist.all_gather(parts, value, group=group.process_group)
            value = torch.cat(parts)
        found[name] = value.clone()
    return found


def results(rank, ranks, shapes):
    """A name, the loss, gradients, the norm and the clipped gradients of every way."""
    found = []
    for shape in shapes:
        mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("efsdp", "ep"))
        sizes = dict(max_tokens=T, hidden=H, num_experts=E, top_k=K, dtype=torch.get_default_dtype(), timeout=600.0)
        sizes |= dict(rounding="nr_f", tile=4)
        group = smoe.ep.Group(mesh["ep"], **sizes, threads=1)
        ways = [("eager", Model(group), summed)] if shape[0] == 1 else []
        for name, model, finish in [*ways, *(plain(group) if ranks == 2 else []), *wrapped(group, mesh)]:
            loss = model.ddp[0](batch(rank)) if hasattr(model, "ddp") else model(batch(rank))
            loss.backward()
            finish(model, group)
            before = gradients(model)
            norm = smoe.ep.clip_grad_norm_(model, CLIP)
            found.append((f"{name} on {shape}", loss.item(), before, norm, gradients(model)))
        smoe.ep.check()
        group.close()
    return found


def work(rank, shapes, folder):
    torch.set_num_threads(1)
    ranks = shapes[0][0] * shapes[0][1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(results(rank, ranks, shapes), f"{folder}/{rank}")


@pytest.mark.parametrize("ranks, shapes", [(2, [(1, 2)]), (4, [(1, 4), (2, 2)])])
def test_every_wrapper_gives_the_results_of_one_process(ranks, shapes, tmp_path):
    mp.spawn(work, (shapes, tmp_path), nprocs=ranks)
    losses, before, norm, clipped = single(ranks)
    for rank in range(ranks):
        found = torch.load(tmp_path / str(rank))
        assert len(found) == (7 if ranks == 2 else 5)
        for name, loss, *ours in found:
            assert loss == pytest.approx(losses[rank], rel=1e-5), name
            for mine, want in zip(ours, (before, norm, clipped), strict=True):
                torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_group_of_one_rank_serves_a_module(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = smoe.ep.Group(max_tokens=T, hidden=H, num_experts=E, top_k=K, threads=1)
        layer, x = smoe.MoE(H, I, E, K, ep=group), batch(0)
        layer.load_state_dict(smoe.MoE(H, I, E, K).state_dict())
        found = layer(x, losses=True, counts=True, token_mask=torch.rand(2, T // 2) > 0.3)
        assert found.losses.shape == (2,) and found.counts.shape == (E,) and 0 < found.counts.sum() < T * K
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16
        with pytest.raises(ValueError, match="was made from a process group; expected one of a mesh"):
            smoe.ep.fully_shard(layer, None)
        group.close()
        group.close()
    finally:
        dist.destroy_process_group()
