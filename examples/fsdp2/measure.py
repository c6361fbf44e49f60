"""Measures step times, peak memory and, with the profiler, the share of communication."""

import contextlib
import resource
import statistics
import time

import torch
import torch.distributed as dist

PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4}  # bf16, dense, of SXM boards as NVIDIA states it


def peak_of(device: torch.device) -> float | None:
    """Peak TFLOP/s of one GPU, found by the GPU's name; None if the name is not in PEAK_TFLOPS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name and "PCIe" not in name), None)


class StepClock:
    """Marks the ends of steps without waiting for the GPU; the times are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self, counts: bool) -> None:
        """Marks the end of a step. The time since the mark before is used as a step's time only if `counts` is true."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self.marks.append((event, counts))

    def milliseconds(self) -> list[float]:
        if self.cuda:
            torch.cuda.synchronize()
        between = zip(self.marks, self.marks[1:])
        if self.cuda:
            return [a.elapsed_time(b) for (a, _), (b, counts) in between if counts]
        return [(b - a) * 1e3 for (a, _), (b, counts) in between if counts]


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB, the largest of all processes: on CUDA that of all tensors, on the CPU that of the process."""
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    if device.type != "cuda":
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most = torch.tensor(used / 2**30, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


# ---- the profiler ----


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of the spans."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _is_communication(name: str) -> bool:
    return name.startswith(("ncclDevKernel", "ncclKernel", "gloo:"))


class Profile:
    """The events of some steps of this process: on CUDA all kernels, on the CPU gloo's collectives alone."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.elapsed = device.type == "cuda", 0.0
        self.spans: list[tuple[str, float, float]] = []  # name, start, end in us

    @contextlib.contextmanager
    def watch(self):
        kind = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kind.CUDA if self.cuda else kind.CPU], acc_events=True) as profiler:
            started = time.perf_counter()
            yield
            if self.cuda:
                torch.cuda.synchronize()
            self.elapsed = (time.perf_counter() - started) * 1e6
        wanted = torch.autograd.DeviceType.CUDA if self.cuda else torch.autograd.DeviceType.CPU
        for event in profiler.events():
            kernel = self.cuda and not getattr(event, "is_user_annotation", False)
            if event.device_type == wanted and (kernel or _is_communication(event.name)):
                self.spans.append((event.name, event.time_range.start, event.time_range.end))
        if self.cuda and self.spans:  # counts from the first kernel, because the profiler delays the first launch
            self.elapsed = max(end for _, _, end in self.spans) - min(start for _, start, _ in self.spans)

    def summary(self) -> dict:
        """Shares of the watched time. communication: a collective runs, which includes waiting for other GPUs. exposed:
        a collective runs and no other kernel does. idle: no kernel runs. On the CPU exposed and idle are None."""
        talk = [(a, b) for name, a, b in self.spans if _is_communication(name)]
        work = [(a, b) for name, a, b in self.spans if not _is_communication(name)]
        total = self.elapsed or float("nan")
        exposed = (_covered(talk + work) - _covered(work)) / total if self.cuda else None
        idle = 1 - _covered(talk + work) / total if self.cuda else None
        return {"communication": _covered(talk) / total, "exposed": exposed, "idle": idle}

    def longest(self, count: int) -> list[tuple[str, float]]:
        """The names of the longest kernels, and their milliseconds, summed over the watched steps."""
        sums: dict[str, float] = {}
        for name, first, last in self.spans:
            sums[name] = sums.get(name, 0.0) + (last - first) / 1e3
        return sorted(sums.items(), key=lambda pair: -pair[1])[:count]
