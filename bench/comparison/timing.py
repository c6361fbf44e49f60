"""Times jobs by turns. In its turn a job runs a while untimed and then timed. The order of the jobs is drawn anew for
every round.

A job is a function without arguments, or a pair of functions. The second one of a pair gets what the first returns, and
its own time is measured too.
"""

import random
import statistics
import time

import torch


def run(job, mark=lambda: None):
    """Runs a job. Calls mark() before it, after it, and between the functions of a pair."""
    first, *second = job if isinstance(job, tuple) else (job,)
    mark()
    value = first()
    mark()
    for last in second:
        value = last(value)
        mark()


def _spans(marks, elapsed):
    """[ms of the whole run], and for a pair [that, ms of the second function]. elapsed(a, b): ms from a to b."""
    return [elapsed(mark, marks[-1]) for mark in marks[:-1]]


class CudaClock:
    """Times a job on the device, between events. If the host cannot enqueue the job's kernels fast enough, the time
    includes the waiting."""

    def synchronize(self):
        torch.cuda.synchronize()

    def each(self, job, count):
        """_spans of each of `count` runs, enqueued one after the other."""
        runs = []
        for _ in range(count):
            runs.append([])
            run(job, lambda: runs[-1].append(self._now()))
        torch.cuda.synchronize()
        return [_spans(marks, lambda a, b: a.elapsed_time(b)) for marks in runs]

    def _now(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class CpuClock:
    def synchronize(self):
        pass

    def each(self, job, count):
        runs = []
        for _ in range(count):
            runs.append([])
            run(job, lambda: runs[-1].append(time.perf_counter()))
        return [_spans(marks, lambda a, b: (b - a) * 1e3) for marks in runs]


def clock_of(device):
    return CudaClock() if device == "cuda" else CpuClock()


MOST_RUNS, LEAST_RUNS = 200, 3


def settle(clock, job, seconds):
    """Runs a job untimed for so many seconds, at least once. Returns the seconds that the last run took."""
    begin, last = time.perf_counter(), None
    while last is None or time.perf_counter() - begin < seconds:
        last = time.perf_counter()
        run(job)
        clock.synchronize()
        last = time.perf_counter() - last
    return last


def turn(clock, job, settle_s, timed_s):
    """The median ms of a job in one turn, of a pair also those of its second function: about settle_s seconds of untimed
    runs, then about timed_s of timed ones."""
    last = settle(clock, job, settle_s)
    count = min(MOST_RUNS, max(LEAST_RUNS, int(timed_s / max(last, 1e-9))))
    return [statistics.median(times) for times in zip(*clock.each(job, count), strict=True)]


def kernels_of(clock, job, settle_s, runs):
    """What one run of a job executes on the GPU, as CUPTI records it: a list of [kernel or copy, launches, us]. Unlike
    the times of `turn` these do not include that the GPU waits for the host."""
    settle(clock, job, settle_s)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(runs):
            run(job)
        clock.synchronize()
    on_gpu = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [[event.key, event.count / runs, event.self_device_time_total / runs] for event in on_gpu]


def order_of(names, round_index, layer):
    """The order of the jobs in a round: drawn anew for each round and layer, the same on every call. In a fixed cycle
    every job would always follow the same job, and the clock frequency after that job could favour the same
    implementation in every round. layer: a text; with one order for all layers, their errors would not be
    independent."""
    order = list(names)
    random.Random(f"{layer} {round_index}").shuffle(order)
    return order
