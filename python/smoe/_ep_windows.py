"""The windows of smoe.ep.Group: memory of each rank that all ranks can address, in one of several ways.

A way is a class. `Way(size, device, process_group)` makes this rank's window, zeroed, and raises an exception if it cannot.
`offer` is what the other ranks need to open the window, `open` does so, and `write` and `read` move 8 bytes of a window.
`opened` is called when all ranks have opened all windows or have given up, `close` when this rank uses none any more. Where
`frees` is true, this rank's window must stay until the other ranks have closed it; then `free` is called.
"""

import ctypes
import mmap
import os
import uuid
from collections.abc import Callable
from typing import Any

import torch

FOLDER = "/dev/shm"  # files here live in memory


class SharedFile:
    """For the CPU: a file in memory, which every rank maps."""

    name, frees = "shared memory", False
    expected = "the ranks of a group must be on one host"

    def __init__(self, size: int, device: torch.device, process_group) -> None:
        self.size, self.offer, self._views = size, f"{FOLDER}/smoe-ep-{uuid.uuid4().hex}", []
        try:
            with open(self.offer, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # so that a full folder is an error here, not a signal later
        except OSError:
            self.opened()
            raise

    def open(self, rank: int, offer: Any) -> int:
        with open(offer, "r+b") as file:
            window = mmap.mmap(file.fileno(), self.size)
        self._views.append((ctypes.c_char * self.size).from_buffer(window))
        return ctypes.addressof(self._views[-1])

    def opened(self) -> None:
        """The memory stays until the last rank unmaps it."""
        if os.path.exists(self.offer):
            os.unlink(self.offer)

    def write(self, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def read(self, address: int) -> int:
        return ctypes.c_int64.from_address(address).value

    def close(self) -> None:
        self._views = []


class _Runtime:
    """The CUDA runtime that torch has loaded."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        self.library.cudaGetErrorString.restype = ctypes.c_char_p

    def __call__(self, function: str, *arguments) -> None:
        status = getattr(self.library, function)(*arguments)
        if status:
            self.library.cudaGetLastError()  # or the next call of torch would report it
            raise RuntimeError(f"{function}: {self.library.cudaGetErrorString(status).decode()}")


class _OnDevice:
    frees = True
    expected = "the GPUs of a group must be of one host and reach each other's memory"

    def __init__(self, size: int, device: torch.device, process_group) -> None:
        self.size, self.device, self.process_group, self.offer = size, device, process_group, None
        with torch.cuda.device(device):
            self.cuda = _Runtime()
            try:
                self.make()
                self.cuda("cudaDeviceSynchronize")  # it is zero now
            except Exception:
                self.free()
                raise

    def opened(self) -> None:
        pass

    def _move(self, to: int, start: int) -> None:
        with torch.cuda.device(self.device):
            self.cuda("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(start), ctypes.c_size_t(8), 4)  # cudaMemcpyDefault
            self.cuda("cudaDeviceSynchronize")

    def write(self, address: int, value: int) -> None:
        number = ctypes.c_int64(value)
        self._move(address, ctypes.addressof(number))

    def read(self, address: int) -> int:
        number = ctypes.c_int64()
        self._move(ctypes.addressof(number), address)
        return number.value


class SymmetricMemory(_OnDevice):
    """torch's symmetric memory. Multicast is not used."""

    name = "torch's symmetric memory"

    def make(self) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.buffer = self.handle = None
        self.buffer = symmetric.empty(self.size, dtype=torch.uint8, device=self.device).zero_()

    def open(self, rank: int, offer: Any) -> int:
        import torch.distributed._symmetric_memory as symmetric

        if self.handle is None:
            self.handle = symmetric.rendezvous(self.buffer, self.process_group)
        return self.handle.buffer_ptrs[rank] + getattr(self.handle, "offset", 0)  # in an old torch it is 0

    def close(self) -> None:
        self.handle = None

    def free(self) -> None:
        self.buffer = None


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t"""

    _fields_ = [("bytes", ctypes.c_char * 64)]


class CudaIpc(_OnDevice):
    """Memory of cudaMalloc, because torch's allocator may have memory that IPC cannot share. cudaMalloc takes small
    allocations from a common block, which IPC would share as a whole, so NVIDIA recommends multiples of 2 MiB."""

    name, block = "CUDA IPC", 2 << 20

    def make(self) -> None:
        self.own, self.others = ctypes.c_void_p(), []
        self.cuda("cudaMalloc", ctypes.byref(self.own), ctypes.c_size_t(-(-self.size // self.block) * self.block))
        self.cuda("cudaMemset", self.own, 0, ctypes.c_size_t(self.size))
        handle = _Handle()
        self.cuda("cudaIpcGetMemHandle", ctypes.byref(handle), self.own)
        self.offer = bytes(handle)

    def open(self, rank: int, offer: Any) -> int:
        if offer == self.offer:
            return self.own.value
        address = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            self.cuda("cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(offer), 1)  # with peer access
        self.others.append(address)
        return address.value

    def close(self) -> None:
        with torch.cuda.device(self.device):
            for address in self.others:
                self.cuda("cudaIpcCloseMemHandle", address)
        self.others = []

    def free(self) -> None:
        with torch.cuda.device(self.device):
            self.cuda("cudaFree", self.own)


WAYS = {"cpu": (SharedFile,), "cuda": (SymmetricMemory, CudaIpc)}
_MARK = 0x536D6F65
_abandoned: list[_OnDevice] = []  # windows to which other ranks may still write, kept until the process ends


class Windows:
    """The windows of all ranks in one way; `addresses` is where this rank has them. All ranks call the same methods.
    `gather(value)` returns the values of all ranks."""

    def __init__(self, way: type, rank: int, ranks: int, gather: Callable[[Any], list]) -> None:
        self.way, self.rank, self.ranks, self.gather = way, rank, ranks, gather
        self.own, self.addresses = None, []

    def _all(self, what: str, function: Callable, *each: Any) -> str | None:
        """Calls function(), or function(rank) for `each` rank. Returns the first reason of all ranks why it failed."""
        reason = None
        for rank in each or ("",):
            try:
                function(*([rank] if each else []))
            except Exception as error:  # of any kind, because the other ranks wait for the answer
                reason = f"rank {self.rank} cannot {what}{rank}: {error}"
                break
        return next((why for why in self.gather(reason) if why), None)

    def connect(self, size: int, device: torch.device, process_group) -> str | None:
        """Why this way does not work, the same on all ranks; None if every rank reaches every window."""

        def make():
            self.own = self.way(size, device, process_group)

        reason = self._all(f"make its window of {size} bytes", make)
        if reason is None:
            offers, each = self.gather(self.own.offer), range(self.ranks)
            take = lambda rank: self.addresses.append(self.own.open(rank, offers[rank]))
            reason = self._all("open the window of rank ", take, *each)
            reason = reason or self._all("write to the window of rank ", self._mark, *each)
            reason = reason or self._all("see what was written to its window by rank ", self._check, *each)
        if self.own:
            self.own.opened()
        return reason

    def _mark(self, rank: int) -> None:
        self.own.write(self.addresses[rank] + 8 * self.rank, _MARK + self.rank)

    def _check(self, rank: int) -> None:
        """Leaves the window as it was, zeroed."""
        place = self.addresses[self.rank] + 8 * rank
        found = self.own.read(place)
        if found != _MARK + rank:
            raise RuntimeError(f"it has {found:#x}, not {_MARK + rank:#x}")
        self.own.write(place, 0)

    def close(self, others_closed: Callable[[], bool]) -> None:
        """others_closed() is called when this rank uses no window any more. Where it says no, this rank's window stays,
        because the others may write to it."""
        if self.own:
            self.own.close()
        if self.way.frees:
            closed = others_closed()
            if self.own and closed:
                self.own.free()
            elif self.own:
                _abandoned.append(self.own)


def connect(size: int, rank: int, ranks: int, device: torch.device, process_group, gather: Callable[[Any], list]) -> Windows:
    """The windows of all ranks in the first way that works between every pair of ranks. Either all ranks take the same
    way, or all raise the same error."""
    refused = []
    for way in WAYS[device.type]:
        windows = Windows(way, rank, ranks, gather)
        reason = windows.connect(size, device, process_group)
        if reason is None:
            return windows
        windows.close(lambda: bool(gather(None)))
        refused.append(f"{way.name}: {reason}")
    raise RuntimeError(f"smoe.ep.Group: {'; '.join(refused)}; {way.expected}")
