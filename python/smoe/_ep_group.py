"""smoe.ep.Group: the C group of this rank, its windows and its context."""

import ctypes
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import _context, _ep_windows, native
from ._context import TYPE_CODES
from ._record import Record, layer as layer_of


class PeerError(RuntimeError):
    """Another rank is late, has failed, or has other options. The group cannot be used any more."""


groups: dict[int, "Group"] = {}  # those that are open, by the integer that stands for a group in a traced graph


class Group:
    """The ranks of a process group or of a one-dimensional device mesh, with memory through which they exchange tokens.

    Collective: all ranks make it with the same arguments. Layers may share it if they run one after the other.
    max_tokens, hidden, num_experts (of all ranks), top_k, dtype: the largest of the layers. rounding, tile: of layers with
    token rounding. device: None: the mesh's, or that of the process group's backend. waves: parts in which tokens travel,
    0: chosen. row_capacity: received rows whose H is kept for the backward, which computes H of the others again; 0: 1.25 times
    the mean. timeout: seconds that a rank waits for another. threads: of a call on the CPU, None: torch's number.
    """

    _made = 0

    def __init__(
        self, process_group=None, *, max_tokens: int, hidden: int, num_experts: int, top_k: int,
        dtype: torch.dtype = torch.float32, rounding: str = "none", tile: int = 128, device: torch.device | str | None = None,
        waves: int = 0, row_capacity: int = 0, timeout: float = 120.0, threads: int | None = None,
    ) -> None:  # fmt: skip
        self.mesh = process_group if hasattr(process_group, "get_group") else None
        self.process_group = self.mesh.get_group() if self.mesh else process_group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self.max_tokens, self.num_experts, self.dtype = max_tokens, num_experts, dtype
        self.device = self._device(device)
        self._compare(
            max_tokens=max_tokens, hidden=hidden, num_experts=num_experts, top_k=top_k, dtype=dtype, rounding=rounding, tile=tile,
            waves=waves, row_capacity=row_capacity, device=self.device.type,
        )  # fmt: skip
        self.context = self.ep = self.windows = None
        self._sizes: dict[tuple, native.Sizes] = {}
        if num_experts % self.size:
            raise ValueError(f"smoe.ep.Group: num_experts is {num_experts}; expected a multiple of the {self.size} ranks")
        # of the record of each layer
        self.fields = dict(ranks=self.size, waves=waves, max_tokens=max_tokens, row_capacity=row_capacity)
        layer = native.Layer(
            tokens=max_tokens, hidden=hidden, intermediate=8, experts=num_experts, topk=top_k, dtype=TYPE_CODES[dtype],
            gradient_type=TYPE_CODES[dtype], rounding=native.ROUNDINGS[rounding], tile=tile, **self.fields,
        )  # fmt: skip
        self.timeout, self.name = timeout, self._gather(uuid.uuid4().hex)[0]
        self._create(layer, timeout, threads)
        self.handle = Group._made
        Group._made += 1
        groups[self.handle] = self

    def _device(self, given: torch.device | str | None) -> torch.device:
        nccl = "nccl" in dist.get_backend(self.process_group)
        device = torch.device(given or (self.mesh.device_type if self.mesh else "cuda" if nccl else "cpu"))
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device

    def _compare(self, **own) -> None:
        for rank, others in enumerate(self._gather(own)):
            for name, value in own.items():
                if others[name] != value:
                    pairs = sorted([(self.rank, value), (rank, others[name])], key=lambda pair: pair[0])
                    (low, first), (high, second) = pairs
                    raise ValueError(f"smoe.ep.Group: {name} is {first} on rank {low} and {second} on rank {high}")

    def _create(self, layer: native.Layer, timeout: float, threads: int | None) -> None:
        def start():
            self.context = native.create_context(self.device.type, self.device.index or 0, threads or torch.get_num_threads())
            return self._query(layer).window_bytes

        def create():
            made, table = ctypes.c_void_p(), (ctypes.c_void_p * self.size)(*self.windows.addresses)
            options = native.EpOptions(rank=self.rank, timeout_ms=int(timeout * 1000), windows=ctypes.addressof(table))
            self.call(native.library.smoe_ep_create, ctypes.byref(made), self.context, ctypes.byref(layer), ctypes.byref(options))
            self.ep = made.value

        try:
            self.window_bytes = self._together(start)
            self.windows = _ep_windows.connect(self.window_bytes, self.rank, self.size, self.device, self.process_group, self._gather)
            self._together(create)
        except Exception:  # perhaps of another rank, when this one has made its group
            self._free(True)
            raise

    def _together(self, function):
        """function(). If it fails on any rank, all ranks raise an error."""
        value = error = None
        try:
            value = function()
        except Exception as found:  # of any kind, because the other ranks wait for the answer
            error = found
        reasons = self._gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise RuntimeError(f"smoe.ep.Group: rank {rank}: {reason}")
        return value

    def _gather(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def call(self, function, *arguments) -> None:
        status = function(*arguments)
        if status == native.STATUSES["error_peer"]:
            raise PeerError(str(native.last_error(self.context, status)))
        if status:
            raise native.last_error(self.context, status)

    def _query(self, layer: native.Layer) -> native.Sizes:
        return native.query_sizes(self.context, layer)

    def __deepcopy__(self, memo: dict) -> "Group":
        return self  # a copy of a module has the same ranks

    def sizes(self, record: Record, save: bool) -> native.Sizes:
        """Those of max_tokens tokens, so that they do not depend on the number of tokens, which may be symbolic."""
        if (record, save) not in self._sizes:
            self._sizes[record, save] = self._query(layer_of(self.max_tokens, record, inference=not save))
        return self._sizes[record, save]

    def stream(self) -> int | None:
        return _context._raw_stream(self.device.index) if self.device.type == "cuda" else None

    def check(self) -> None:
        """Raises PeerError if a rank has failed. Waits for nothing."""
        self.call(native.library.smoe_ep_status, self.ep)

    def abort(self) -> None:
        """Ends this rank's wait, from any thread; the group fails."""
        native.library.smoe_ep_abort(self.ep)

    def close(self) -> None:
        """Frees the group; no rank may be in a call. On GPUs it waits until the others have closed theirs, at most `timeout`, and
        not at all if the group has failed here. Without them this rank's window stays until the process ends."""
        if self.ep is None:
            return
        works = native.library.smoe_ep_status(self.ep) == native.STATUSES["ok"]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        del groups[self.handle]
        self._free(works)

    def _free(self, wait: bool) -> None:
        native.library.smoe_ep_destroy(self.ep)
        native.library.smoe_destroy(self.context)
        self.ep = None
        if self.windows:
            self.windows.close(lambda: self._others_closed(wait))

    def _others_closed(self, wait: bool) -> bool:
        """By the store and not a collective, because a rank may be the only one to know of a failure."""
        ranks = [f"smoe.ep.Group {self.name} closed by {rank}" for rank in range(self.size)]
        try:
            store = distributed_c10d._get_default_store()
            store.set(ranks[self.rank], "")
            if not wait:
                return store.check(ranks)
            store.wait(ranks, timedelta(seconds=self.timeout))
            return True
        except (RuntimeError, ValueError):  # a late rank, or the store has ended
            return False


def check() -> None:
    """Raises PeerError if a rank of any open group has failed. Waits for nothing, for the GPU neither."""
    for group in list(groups.values()):
        group.check()
