"""Times jobs by turns. In its turn a job runs a while untimed and then timed. The order of the jobs rotates and
reverses from round to round."""

import statistics
import time

import torch


class CudaClock:
    """Times a job on the device, between two events. If the host cannot enqueue the job's kernels fast enough, the time
    includes the waiting."""

    def synchronize(self):
        torch.cuda.synchronize()

    def each(self, job, count):
        """ms of `count` runs, enqueued one after the other."""
        pairs = []
        for _ in range(count):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            job()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


class CpuClock:
    def synchronize(self):
        pass

    def each(self, job, count):
        times = []
        for _ in range(count):
            start = time.perf_counter()
            job()
            times.append((time.perf_counter() - start) * 1e3)
        return times


def clock_of(device):
    return CudaClock() if device == "cuda" else CpuClock()


MOST_RUNS, LEAST_RUNS = 200, 3


def turn(clock, job, settle_s, timed_s):
    """The median ms of a job in one turn: about settle_s seconds of untimed runs, then about timed_s of timed ones."""
    begin = time.perf_counter()
    ran = 0
    while ran == 0 or time.perf_counter() - begin < settle_s:
        last = time.perf_counter()
        job()
        clock.synchronize()
        last = time.perf_counter() - last
        ran += 1
    count = min(MOST_RUNS, max(LEAST_RUNS, int(timed_s / max(last, 1e-9))))
    return statistics.median(clock.each(job, count))


def order_of(names, round_index):
    """The order of the jobs in a round. Each pair of rounds starts one job later than the pair before; the second round
    of a pair has the reverse order of the first."""
    start = (round_index // 2) % max(1, len(names))
    order = names[start:] + names[:start]
    return order[::-1] if round_index % 2 else order


def one_round(clock, jobs, round_index, settle_s, timed_s):
    """{name: ms}, one turn for every job."""
    return {name: turn(clock, jobs[name], settle_s, timed_s) for name in order_of(list(jobs), round_index)}
