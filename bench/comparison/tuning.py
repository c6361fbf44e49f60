"""Triton's autotuner compiles a configuration, times it, and goes on with the next. Liger's fused MoE has 359 configurations
for a layer and MoMoE 50, of which each takes about half a second to compile. Here all of a kernel are compiled side by side
before the first is timed, so the tuner finds them compiled. What it times and chooses stays as it was."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 32


def compile_side_by_side():
    """Changes Triton's autotuner in this process, if there is a Triton that can compile in several threads."""
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    plain = Autotuner.prune_configs
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def prune_configs(self, kwargs):
        configs = plain(self, kwargs)
        if kwargs.get("warmup") is False:  # called by `run`, for a key that is not tuned yet
            given = {name: value for name, value in kwargs.items() if name != "warmup"}
            with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
                with AsyncCompileMode(threads, ignore_errors=True):  # the tuner meets the same errors again
                    for config in configs:
                        if config.pre_hook is None:  # it may change the arguments, and so what is compiled
                            self.fn.warmup(*self.nargs.values(), **given, **config.all_kwargs())
        return configs

    Autotuner.prune_configs = prune_configs
