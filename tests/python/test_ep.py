"""smoe.ep on gloo: the results and all gradients of one process with the tokens and experts of all ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import smoe
from smoe import _ep_ops, _ep_windows, native

E, K, H, I = 8, 3, 32, 16
TOKENS = (21, 0, 40, 3)
DIFFERS = r"activation is (0 on rank 0 and 1 on rank 1|1 on rank 1 and 0 on rank \d)"


def inputs(ranks):
    """Of all ranks together: x, ids, weights, w1, w2, b1, b2."""
    torch.manual_seed(5)
    tokens = sum(TOKENS[:ranks])
    ids = torch.rand(tokens, E).topk(K).indices
    draw = lambda *shape: 0.5 * torch.randn(*shape)
    return draw(tokens, H), ids, torch.rand(tokens, K), draw(E, 2 * I, H), draw(E, H, I), draw(E, 2 * I), draw(E, H)


def part(rank, ranks):
    start, own = sum(TOKENS[:rank]), E // ranks
    x, ids, weights, *experts = inputs(ranks)
    tokens, mine = slice(start, start + TOKENS[rank]), slice(rank * own, (rank + 1) * own)
    return [x[tokens], ids[tokens], weights[tokens], *[t[mine] for t in experts]]


def run(function, given):
    """out and the gradients of all but ids, for a loss whose gradient is not constant"""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    x, ids, weights, w1, w2, b1, b2 = leaves
    out = function(x, ids, weights, w1, w2, b1=b1, b2=b2)
    out.square().sum().backward()
    return [out.detach()] + [t.grad for t in leaves if t.requires_grad]


def group_of(timeout=600.0, **options):
    sizes = dict(max_tokens=max(TOKENS), hidden=H, num_experts=E, top_k=K)
    return smoe.ep.Group(**sizes | options, threads=1, timeout=timeout)


def start(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def calls(group):
    """smoe.ep.experts as users call it."""
    plain = lambda *given, **options: smoe.ep.experts(*given, group=group, **options)
    yield plain
    yield lambda *given, **options: torch.utils.checkpoint.checkpoint(plain, *given, use_reentrant=False, **options)
    if group.size == 2:
        yield torch.compile(plain, backend="aot_eager", fullgraph=True)


def compared(rank, ranks, folder):
    start(rank, ranks, folder)
    group = group_of(waves=2, row_capacity=64)  # of the other rows H is computed again
    given = part(rank, ranks)
    torch.save([run(call, given) for call in calls(group)], f"{folder}/{rank}")
    group.check()
    with pytest.raises(smoe.ep.PeerError, match=DIFFERS):
        smoe.ep.experts(*given[:5], group=group, activation="geglu" if rank == 1 else "swiglu")
    with pytest.raises(smoe.ep.PeerError, match=DIFFERS):
        smoe.ep.check()  # of all groups
    dist.barrier()
    group.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_results_of_one_process(ranks, tmp_path):
    """Then one rank has another activation, and every rank says so."""
    mp.spawn(compared, (ranks, tmp_path), nprocs=ranks)
    each = [torch.load(tmp_path / str(rank)) for rank in range(ranks)]
    whole = run(smoe.experts, inputs(ranks))
    for found in zip(*each, strict=True):  # of one way to call it, by rank
        for i, want in enumerate(whole):
            torch.testing.assert_close(torch.cat([one[i] for one in found]), want, rtol=1e-5, atol=1e-5)


def failing(rank, ranks, folder):
    start(rank, ranks, folder)
    with pytest.raises(ValueError, match="top_k is 3 on rank 0 and 2 on rank 1"):
        group_of(top_k=3 - rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(native, "query_sizes", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises((MemoryError, RuntimeError), match="^no room" if rank == 1 else "smoe.ep.Group: rank 1: no room"):
            group_of()
    kept, _ep_windows.FOLDER = _ep_windows.FOLDER, f"{folder}/missing" if rank == 1 else _ep_windows.FOLDER
    with pytest.raises(RuntimeError, match="rank 1 cannot make its window of .* bytes: .*missing.*must be on one host"):
        group_of()
    _ep_windows.FOLDER = kept
    group = group_of(timeout=0.5)
    torch.save([], f"{folder}/{rank}")
    if rank == 1:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(smoe.ep.PeerError, match="rank 0 waited 500 ms for .* of rank 1"):
        smoe.ep.experts(*part(rank, ranks)[:5], group=group)
    assert time.monotonic() - begin < 100
    torch.save([], f"{folder}/ended")
    os._exit(0)  # without the other rank gloo cannot end


def test_a_missing_window_and_a_dead_rank_are_named(tmp_path):
    mp.spawn(failing, (2, tmp_path), nprocs=2)
    assert (tmp_path / "1").exists() and (tmp_path / "ended").exists()


class Freed(_ep_windows.SharedFile):
    """As on a GPU a rank's window must stay until the others have closed it."""

    frees, freed = True, 0

    def free(self):
        Freed.freed += 1


def closing(rank, ranks, folder):
    start(rank, ranks, folder)
    _ep_windows.WAYS["cpu"] = (Freed,)
    group_of().close()
    assert Freed.freed == 1
    alone = group_of()
    if rank == 1:
        alone.abort()
        with pytest.raises(smoe.ep.PeerError, match="rank 1 was stopped"):
            smoe.ep.experts(*part(rank, ranks)[:5], group=alone)
    else:
        alone.check()  # it does not know
    alone.close()
    left = group_of(timeout=0.5)
    if rank == 0:
        left.close()
        assert Freed.freed == 2 and len(_ep_windows._abandoned) == 1
    os._exit(0)  # without the other rank gloo may not end


def test_a_rank_closes_a_group_that_another_knows_to_have_failed(tmp_path):
    """Nobody waits for a rank that knows of a failure alone, and for one that does not close a group only for its timeout."""
    mp.spawn(closing, (2, tmp_path), nprocs=2)


def refusing(rank, ranks, folder):
    start(rank, ranks, folder)
    _ep_windows.WAYS["cpu"] = (Freed,)
    connect, log = _ep_windows.connect, []

    def misplace(*given):
        made = connect(*given)
        made.addresses[0] += 8 * rank
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ep_windows, "connect", misplace)
        for name in ("smoe_ep_destroy", "smoe_destroy"):
            real = getattr(native.library, name)
            patch.setattr(native.library, name, lambda made, name=name, real=real: (made and log.append(name), real(made)))
        with pytest.raises((ValueError, RuntimeError), match=r"smoe_ep_create: windows\[0\] is .* must be aligned to 64 bytes"):
            group_of()
    assert log == (["smoe_destroy"] if rank == 1 else ["smoe_ep_destroy", "smoe_destroy"])
    assert Freed.freed == 1


def test_a_group_that_one_rank_cannot_make_is_freed_on_all(tmp_path):
    """Where smoe_ep_create fails on rank 1, rank 0 has a group already, and both have windows."""
    mp.spawn(refusing, (2, tmp_path), nprocs=2)


def test_compiled_calls_all_happen(monkeypatch, tmp_path):
    """Also one whose result is not used: the other ranks wait for it."""
    made, run = [], _ep_ops._run_forward
    monkeypatch.setattr(_ep_ops, "_run_forward", lambda *given, **numbers: made.append(1) or run(*given, **numbers))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group, given = group_of(), inputs(1)[:5]

        def twice(x, *others):
            smoe.ep.experts(x, *others, group=group)
            return smoe.ep.experts(2 * x, *others, group=group)

        with torch.no_grad():
            torch.compile(twice, backend="aot_eager", fullgraph=True)(*given)
        assert len(made) == 2
        group.close()
    finally:
        dist.destroy_process_group()


def test_one_rank_equals_a_layer_without_a_group():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        group = group_of()
        x, ids, weights, w1, w2, *_ = inputs(1)
        ours, want = smoe.ep.experts(x, ids, weights, w1, w2, group=group), smoe.experts(x, ids, weights, w1, w2)
        torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="tokens is 41, the range is 0 to 40"):
            smoe.ep.experts(torch.zeros(41, H), torch.zeros(41, K, dtype=torch.long), torch.zeros(41, K), w1, w2, group=group)
        group.device = torch.device("cuda", 1)
        with pytest.raises(ValueError, match="smoe.ep.experts: x is on cpu; expected cuda:1, where the group is"):
            smoe.ep.experts(x, ids, weights, w1, w2, group=group)
        group.device = torch.device("cpu")
        with pytest.raises(ValueError, match="w1"):
            smoe.ep.experts(x, ids, weights, w1[:, :, :8], w2, group=group)
        group.close()
    finally:
        dist.destroy_process_group()
