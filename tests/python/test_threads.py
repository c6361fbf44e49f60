"""Layers in several threads, in forked workers, and after a fork."""

import os
import threading

import pytest
import torch
from test_torch import E, H, I, K, Block

import smoe
from smoe import _context


def test_a_context_is_made_if_another_thread_took_the_last(monkeypatch):
    """Another thread takes the last idle context after the list was checked and before its pop."""
    from smoe import _context

    class Emptied(list):
        def __bool__(self):
            return True

    monkeypatch.setattr(_context, "_idle", {-1: Emptied()})
    assert _context._make(-1).handle


def test_threads_run_side_by_side():
    model = Block()
    x = torch.randn(64, H)
    with torch.no_grad():
        wanted = model(x)
    wrong = []

    def work():
        with torch.no_grad():
            wrong.extend(1 for _ in range(30) if not torch.equal(model(x), wanted))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class _Data(torch.utils.data.Dataset):
    """A data set whose items run a layer in the worker process."""

    def __init__(self):
        torch.manual_seed(0)
        self.moe = smoe.MoE(H, I, E, K, initializer_range=0.3)
        self.x = torch.randn(8, 200, H)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        with torch.no_grad():
            return self.moe(self.x[index])


def test_forked_workers_compute_the_same_bits():
    """DataLoader workers that are forked after the parent has used OpenMP threads."""
    data = _Data()
    wanted = torch.stack([data[index] for index in range(len(data))])
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=600)
    assert torch.equal(torch.cat(list(loader)), wanted)


def test_the_child_of_a_plain_fork_computes_the_same_bits():
    """In a child of os.fork torch still has two threads, but the child's context must have one."""
    data = _Data()
    wanted = data[0]
    assert torch.get_num_threads() == 2
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, b"1" if torch.equal(data[0], wanted) else b"0")
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"


def test_cuda_after_a_fork_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="forked after CUDA was initialised and cannot use the GPU; start workers with"):
        _context._make(0)
