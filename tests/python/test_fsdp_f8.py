"""smoe.fsdp: fully_shard that gathers the quantised weights must give the bits of fully_shard that gathers the weights, which each
rank quantises afterwards, with half the bytes."""

import copy
import os
import pickle
import traceback
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import smoe

RANKS, H, I, E = 4, 32, 272, 8  # with I above 256 an expert has two scales of groups

shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="fully_shard of torch 2.6 needs a GPU: it records an event of the CPU's stream, which has none",
)


class Model(torch.nn.Sequential):
    recompute = False

    def forward(self, x):
        for layer in self:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def make(dtype=torch.bfloat16, compute="f8", experts=E, **options):
    torch.manual_seed(0)
    new = lambda: smoe.MoE(H, I, experts, 2, initializer_range=0.2, compute=compute, dtype=dtype, **options)
    return Model(new(), new())


def batch(step, dtype=torch.bfloat16):
    return torch.randn(12, H, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(dtype)


# ---- on four ranks ----

RUNS = [  # ranks that share the weights, reshard_after_forward, recomputation, options of the layers
    (4, True, False, {}),
    (4, False, False, dict(dtype=torch.float32, layout="interleaved")),
    (2, True, True, dict(compute="f8_dgrad", bias=True)),
    (2, True, False, dict(activation="gelu")),
]


def sharded(mesh, reshard, gather, options, **more):
    from torch.distributed.fsdp import fully_shard

    model = make(**options)
    if gather:
        smoe.fsdp.gather_quantized(model)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **more)
    return fully_shard(model, mesh=mesh)


def train(model):
    """Losses, gradients and weights of two steps."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), []
    for step in range(2):
        loss = model(batch(step, next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        found += [loss.detach(), *[p.grad.full_tensor() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.full_tensor().detach() for p in model.parameters()]


class Watched:
    """What the first layer of a model receives and reads, and the bytes that the rank gives to all gathers meanwhile."""

    def __init__(self, patch, model):
        self.bytes, self.put, self.wrong = 0, [], []
        layer, own = model[0].experts, model[0].experts.__dict__.get(smoe.fsdp._LAYER)
        put, weights = smoe.fsdp._Layer.put, smoe.fsdp._Layer.weights
        full = [p.full_tensor().detach() for p in (getattr(layer, layer.up_name), layer.down_proj)]

        def putting(this, name, *others):
            self.put += [name] if this is own else []
            put(this, name, *others)

        def reading(this, backward):
            found = weights(this, backward)
            if this is own:
                exact = smoe.quantize_weights(*full, **own.of_weights)
                exact = smoe.fsdp._views(exact, *[value.shape for value in full])
                same = {name for name in exact if torch.equal(exact[name], this.views[name])}
                self.wrong += [sorted((this.have | {"scale1", "scale2", "group1", "group2"}) - same)]
            return found

        patch.setattr(smoe.fsdp._Layer, "put", putting)
        patch.setattr(smoe.fsdp._Layer, "weights", reading)
        for name in ("all_gather_into_tensor", "all_gather_single"):  # what fully_shard calls depends on torch's version
            if hasattr(dist, name):
                patch.setattr(dist, name, self.counting(getattr(dist, name)))

    def counting(self, real):
        def gather(output_tensor, input_tensor, **options):
            self.bytes += input_tensor.nbytes
            return real(output_tensor, input_tensor, **options)

        return gather


def compare(mesh, reshard, recompute, options):
    """The facts of one run as (what, whether it holds)."""
    results, counted = [], []
    for gather in (False, True):
        model = sharded(mesh, reshard, gather, options)
        model.recompute = recompute
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch, model)
            model(batch(0, next(model.parameters()).dtype)).float().square().mean().backward()
        counted.append(watched.bytes)
        model.zero_grad()
        results.append(train(model))
    one = make(**options)[0]
    size, ranks = one.gate.weight.itemsize, mesh.size()
    every = sum(p.numel() for p in one.parameters())
    matrices = sum(p.numel() for p in one.experts.parameters() if p.dim() == 3)
    scales = 4 * E * 2 * (1 + 2)  # of a matrix and of its groups
    gathers = 2 * (2 if reshard else 1)  # two layers
    expected = [gathers * size * every // ranks, gathers * (size * (every - matrices) + matrices + scales) // ranks]
    share = counted[1] / counted[0]
    sent = ["w1", "w2", "w1_t", "w2_t"] if reshard else ["w1", "w2"]
    return [
        ("losses, gradients and weights have equal bits", all(torch.equal(a, b) for a, b in zip(*results, strict=True))),
        ("they are finite, and not zero", all(t.isfinite().all() and t.any() for t in results[0])),
        (f"each matrix is right when it is read: wrong {watched.wrong}", watched.wrong == [[]] * (2 + recompute)),
        (f"a gather sends what is read next: {watched.put}", watched.put == sent),
        (f"a rank sends {counted} bytes, expected {expected}", counted == expected),
        (f"the share of the bytes: {share}", 1 / size < share < 1 / size + 0.02),
    ]


def refused(mesh, options=None, **more):
    try:
        sharded(mesh, True, True, options or {}, **more)(batch(0))
    except ValueError as error:
        return str(error)
    return ""


def facts():
    """Of one rank: those of the runs, and two messages."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    meshes = {4: init_device_mesh("cpu", (4,)), 2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))["shards"]}
    found = [compare(meshes[ranks], *run) for ranks, *run in RUNS]
    return found, refused(meshes[4], dict(experts=6)), refused(meshes[4], shard_placement_fn=lambda p: Shard(1))


def work(rank, folder, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    try:
        results.put(facts())
    except Exception:
        results.put(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank has found."""
    folder, context = tmp_path_factory.mktemp("ranks"), get_context("forkserver")  # imports torch once for all ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        context.set_forkserver_preload(["test_fsdp_f8", "torch._dynamo"])
        results = context.Queue()
        crew = [context.Process(target=work, args=(rank, str(folder), results)) for rank in range(RANKS)]
        for process in crew:
            process.start()
    found = []
    try:
        while len(found) < RANKS and not any(type(one) is str for one in found):
            found.append(results.get(timeout=200))
    finally:
        for process in crew:
            process.join(10 if len(found) == RANKS else 0)
            process.kill()
    assert not any(type(one) is str for one in found), found[-1]
    return found


@shards
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_gathered_bytes_give_the_bits_of_gathered_weights(ranks, run):
    for found, *_ in ranks:
        assert all(holds for _, holds in found[run]), found[run]


@shards
def test_parts_of_experts_are_refused_on_every_rank(ranks):
    for _, uneven, rows in ranks:
        assert f"of a weight of shape (6, {2 * I}, {H}) one of 4 ranks has" in uneven and "whole experts" in uneven
        assert f"of a weight of shape ({E}, {2 * I}, {H}) one of 4 ranks has ({E}, {I // 2}, {H})" in rows


# ---- in one process ----


def test_a_prepared_layer_is_the_same_without_fully_shard(tmp_path):
    plain, x = make(), torch.randn(12, H).bfloat16()
    prepared = copy.deepcopy(plain)
    smoe.fsdp.gather_quantized(prepared)
    for model in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(model(x), plain(x))
    torch.save(prepared.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values()) and make().load_state_dict(state)
    other = make()
    other[0].experts.down_proj.data.mul_(2)
    prepared.load_state_dict(other.state_dict())
    assert torch.equal(prepared(x), other(x)) and not torch.equal(other(x), plain(x))


def test_wrong_models_are_named():
    with pytest.raises(ValueError, match="the model has no smoe.MoE with compute"):
        smoe.fsdp.gather_quantized(make(compute=None))
    model = make()
    smoe.fsdp.gather_quantized(model)
    with pytest.raises(TypeError, match=r"gather_quantized: 0.experts.gate_up_proj is a _Shard; expected an nn.Parameter"):
        smoe.fsdp.gather_quantized(model)


@shards
def test_one_rank_and_weights_without_values(tmp_path):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = make()
        exact = model(batch(0))
        smoe.fsdp.gather_quantized(model)
        for layer in model:
            fully_shard(layer, reshard_after_forward=True)
        assert torch.equal(model(batch(0)), exact)
        with pytest.raises(RuntimeError, match="the weights of the layer are not gathered"):
            model[0].experts.__dict__[smoe.fsdp._LAYER].weights(True)
        with torch.device("meta"):
            empty = make()
        smoe.fsdp.gather_quantized(empty)
        fully_shard(empty).to_empty(device="cpu")
        assert type(empty[0].experts.down_proj.to_local()) is smoe.fsdp._Shard
        model[0].unshard()
        with pytest.raises(NotImplementedError, match="aten.mul.Tensor of a weight that was gathered in 8 bits"):
            model[0].experts.down_proj * 2
    finally:
        dist.destroy_process_group()
