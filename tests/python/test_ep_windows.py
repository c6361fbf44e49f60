"""How smoe.ep.Group gets its windows: every way, each refusal on one rank or between one pair, and that all ranks take the
same way or none. The ranks are threads; CUDA's calls are stand-ins, which copy in this process's memory."""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from smoe import _ep_windows as windows

RANKS, SIZE = 3, 4096


class Meeting:
    """gather() of threads"""

    def __init__(self):
        self.barrier, self.values = threading.Barrier(RANKS, timeout=600), [None] * RANKS

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def together(kind="cpu", then=lambda made: made.way.name):
    """What then(windows) gives, or the text of the error, by rank. The process group of a rank is its number."""
    meeting, found = Meeting(), [None] * RANKS

    def work(rank):
        try:
            gather = lambda value: meeting.gather(rank, value)
            found[rank] = then(windows.connect(SIZE, rank, RANKS, torch.device(kind, 0), rank, gather))
        except Exception as error:
            found[rank] = str(error)

    crew = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return found


def same(found):
    assert found == found[:1] * RANKS
    return found[0]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(windows, "FOLDER", str(tmp_path))
    return tmp_path


class MakesNone(windows.SharedFile):
    name = "a way that one rank has not"

    def __init__(self, size, device, rank):
        if rank == 1:
            raise OSError("it is full")
        super().__init__(size, device, rank)


class OpensNone(windows.SharedFile):
    name = "a way that does not open"

    def __init__(self, size, device, rank):
        super().__init__(size, device, rank)
        self.of = rank

    def open(self, rank, offer):
        if (self.of, rank) == (2, 0):
            raise PermissionError("not allowed")
        return super().open(rank, offer)


class WritesNone(OpensNone):
    name = "a way that does not write"
    open = windows.SharedFile.open

    def write(self, address, value):
        if self.of == 1 and value == windows._MARK + 1:
            raise RuntimeError("no access")
        super().write(address, value)


class Copies(OpensNone):
    name = "a way that copies"

    def open(self, rank, offer):
        if (self.of, rank) != (0, 2):
            return windows.SharedFile.open(self, rank, offer)
        with open(offer, "r+b") as file:
            self._views.append((ctypes.c_char * SIZE).from_buffer(mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_COPY)))
        return ctypes.addressof(self._views[-1])


REFUSED = {
    MakesNone: "rank 1 cannot make its window of 4096 bytes: it is full",
    OpensNone: "rank 2 cannot open the window of rank 0: not allowed",
    WritesNone: "rank 1 cannot write to the window of rank 0: no access",
    Copies: "rank 2 cannot see what was written to its window by rank 0: it has 0x0, not 0x536d6f65",
}


@pytest.mark.parametrize("way", REFUSED)
def test_a_refusal_names_the_pair_and_the_reason(way, folder, monkeypatch):
    """Every rank names the pair and the reason. With another way, all take that."""
    monkeypatch.setitem(windows.WAYS, "cpu", (way,))
    expected = f"smoe.ep.Group: {way.name}: {REFUSED[way]}; the ranks of a group must be on one host"
    assert same(together()) == expected and not os.listdir(folder)
    monkeypatch.setitem(windows.WAYS, "cpu", (way, windows.SharedFile))
    assert same(together()) == "shared memory" and not os.listdir(folder)


def test_shared_memory_is_zero_and_the_same_on_all_ranks(folder):
    """The windows are zero at the start, and one window is the same memory on all ranks."""
    ends = threading.Barrier(RANKS, timeout=600)

    def use(made):
        before = [bytes(made.own._views[rank]) for rank in range(RANKS)]
        ends.wait()
        made.own.write(made.addresses[(made.rank + 1) % RANKS], made.rank)
        ends.wait()
        return before == [bytes(SIZE)] * RANKS, made.own.read(made.addresses[made.rank])

    assert together(then=use) == [(True, 2), (True, 0), (True, 1)]


# ---- CUDA ----


class Runtime:
    """Some functions of the CUDA runtime. `refuses` has the names of those that fail."""

    memory, log, refuses, sizes = {}, [], set(), []

    def __call__(self, function, *arguments):
        self.log.append(function)
        if function in self.refuses:
            raise RuntimeError(f"{function}: peer access is not supported")
        if function == "cudaMalloc":
            self.sizes.append(arguments[1].value)
            made = ctypes.create_string_buffer(b"\xff" * SIZE, SIZE)
            arguments[0]._obj.value = ctypes.addressof(made)
            self.memory[ctypes.addressof(made)] = made
        elif function == "cudaMemset":
            ctypes.memset(*[getattr(value, "value", value) for value in arguments])
        elif function == "cudaIpcGetMemHandle":
            ctypes.memmove(arguments[0], ctypes.byref(arguments[1]), 8)
        elif function == "cudaIpcOpenMemHandle":
            arguments[0]._obj.value = ctypes.c_int64.from_buffer_copy(arguments[1]).value
        elif function == "cudaMemcpy":
            ctypes.memmove(*[value.value for value in arguments[:3]])


@pytest.fixture
def cuda(monkeypatch):
    """A host whose symmetric memory works, until a test says otherwise."""
    monkeypatch.setattr(windows, "_Runtime", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for name, empty in (("memory", {}), ("log", []), ("refuses", set()), ("sizes", [])):
        monkeypatch.setattr(Runtime, name, empty)
    buffers = {}

    class Handle:
        offset = 64  # of a tensor in its buffer

        def __init__(self):
            self.buffer_ptrs = [buffers[rank].data_ptr() - self.offset for rank in range(RANKS)]

    def rendezvous(buffer, group):
        buffers[group] = buffer
        met.wait()
        return Handle()

    met = threading.Barrier(RANKS, timeout=600)
    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.empty(size + Handle.offset, dtype=dtype)[Handle.offset :])
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    return monkeypatch


def test_gpus_take_symmetric_memory_first(cuda):
    """A window begins where its tensor does. Torch takes it back only if no rank can write to it any more."""

    def use(made):
        begins = made.addresses[made.rank] == made.own.buffer.data_ptr()
        made.close(lambda: False)
        return made.way.name, begins, weakref.ref(made.own)

    found = together("cuda", use)
    assert same([kept[:2] for kept in found]) == ("torch's symmetric memory", True) and "cudaMalloc" not in Runtime.log
    assert all(window() for *_, window in found)


def test_cuda_ipc_serves_where_symmetric_memory_does_not(cuda):
    """Where torch has no symmetric memory. No window is freed before all ranks have closed all, and none shares a block with
    other allocations."""

    def refuse(size, dtype, device):
        raise RuntimeError("CUDASymmetricMemory: not supported")

    cuda.setattr(symmetric, "empty", refuse)

    def use(made):
        made.close(lambda: bool(made.gather(None)))
        return made.way.name

    assert same(together("cuda", use)) == "CUDA IPC"
    calls = [name for name in Runtime.log if name in ("cudaIpcCloseMemHandle", "cudaFree")]
    assert calls == ["cudaIpcCloseMemHandle"] * RANKS * (RANKS - 1) + ["cudaFree"] * RANKS
    assert Runtime.sizes == [2 << 20] * RANKS


def test_without_a_way_between_gpus_both_reasons_are_named(cuda):
    def refuse(buffer, group):
        raise RuntimeError("rendezvous failed")

    cuda.setattr(symmetric, "rendezvous", refuse)
    Runtime.refuses.add("cudaIpcOpenMemHandle")
    assert same(together("cuda")) == (
        "smoe.ep.Group: torch's symmetric memory: rank 0 cannot open the window of rank 0: rendezvous failed; CUDA IPC: rank 0 cannot "
        "open the window of rank 1: cudaIpcOpenMemHandle: peer access is not supported; the GPUs of a group must be of one host and "
        "reach each other's memory"
    )
    assert Runtime.log.count("cudaFree") == RANKS
