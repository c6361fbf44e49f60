"""Triton's autotuner compiles a configuration, times it for an eighth of a second, and goes on with the next. Liger's fused MoE
has 359 configurations for a layer and MoMoE 50, of which each takes about half a second to compile. Here all of a kernel are
compiled side by side before the first is timed, so the tuner finds them compiled. Then each is timed for some milliseconds,
and the tuner times and chooses only among the fastest."""

import collections
import contextlib
import functools
import os
import statistics
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 32
BRIEF_MS, MOST_RUNS = 8.0, 16  # of the brief timing of a configuration
FINALISTS, CLOSE = 8, 1.25  # the tuner gets at most so many configurations, none slower than CLOSE times the fastest


def briefly(driver):
    """A function as Triton's do_bench, for a long list: one untimed run, one timed one, and more of a fast kernel."""
    device, cache = driver.get_device_interface(), driver.get_empty_cache_for_benchmark()

    def spans(call, runs):
        events = [[device.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, end in events:
            driver.clear_cache(cache)  # as do_bench; it also hides the time of the launch
            start.record()
            call()
            end.record()
        device.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def timed(call, **_):
        call()
        first = spans(call, 1)
        more = min(MOST_RUNS, int(BRIEF_MS / max(first[0], 1e-3))) - 1
        return [statistics.median(first + spans(call, more))] if more > 0 else first

    return timed


@contextlib.contextmanager
def _do_bench(tuner, function):
    """Within this, the tuner times by `function`. `do_bench` is an attribute that some versions of Triton make when it is read."""
    before = vars(tuner).get("do_bench")
    tuner.do_bench = function
    try:
        yield
    finally:
        del tuner.do_bench
        if before is not None:
            tuner.do_bench = before


def _compile(tuner, configs, kwargs, mode):
    given = {name: value for name, value in kwargs.items() if name != "warmup"}
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        with mode(threads, ignore_errors=True):  # the tuner meets the same errors again
            for config in configs:
                if config.pre_hook is None:  # it may change the arguments, and so what is compiled
                    tuner.fn.warmup(*tuner.nargs.values(), **given, **config.all_kwargs())


def _finalists(tuner, configs, kwargs, function):
    """The configurations, the fastest first, that the tuner should time."""
    with _do_bench(tuner, function):
        times = {config: tuner._bench(*tuner.nargs.values(), config=config, **kwargs)[0] for config in configs}
    limit = CLOSE * min(times.values())  # infinite if none can run; the tuner then meets that again
    return sorted((config for config in configs if times[config] <= limit), key=times.get)[:FINALISTS]


def tune_fast():
    """Changes Triton's autotuner in this process, if there is a Triton that can compile in several threads. Returns a counter
    that grows as kernels are tuned: `configurations`, and `finalists`, those that the tuner timed itself."""
    try:
        from triton import AsyncCompileMode
        from triton.runtime import driver
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return collections.Counter()
    plain = Autotuner.prune_configs
    if hasattr(plain, "counted"):
        return plain.counted

    @functools.wraps(plain)
    def prune_configs(self, kwargs):
        configs = plain(self, kwargs)
        if kwargs.get("warmup") is not False:  # not called by `run`, for a key that is not tuned yet
            return configs
        _compile(self, configs, kwargs, AsyncCompileMode)
        chosen = configs
        if len(configs) > FINALISTS:
            chosen = _finalists(self, configs, kwargs, briefly(driver.active))
        prune_configs.counted.update(configurations=len(configs), finalists=len(chosen))
        return chosen

    prune_configs.counted = collections.Counter()
    Autotuner.prune_configs = prune_configs
    return prune_configs.counted
