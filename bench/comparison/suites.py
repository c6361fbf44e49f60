"""The layers that are measured: docs/shapes.csv, few tokens, and tiny layers for a test without a GPU."""

import csv
from typing import NamedTuple


class Shape(NamedTuple):
    """One layer: T tokens, hidden size d, intermediate size n, E experts, K experts for each token."""

    suite: str
    name: str
    T: int
    d: int
    n: int
    E: int
    K: int

    @property
    def flops(self):
        """Model FLOPs of a forward; a backward has twice as many."""
        return 6 * self.T * self.K * self.n * self.d


SMALL_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
SMALL_MODELS = ("OLMoE-1B-7B", "Qwen3-30B-A3B", "DeepSeek-V3.2")
# Expert parallelism: layers of the suites paper and models, with the tokens of each GPU
RANKS = (("7B-n256", 24576), ("30B-n512", 32768), ("120B-n2048", 32768), ("Qwen3-30B-A3B", 16384), ("DeepSeek-V3.2", 8192))
RANKS_FEW = ("Qwen3-30B-A3B", (1, 8, 64))
TINY = (Shape("tiny", "tiny-a", 96, 64, 32, 8, 2), Shape("tiny", "tiny-b", 33, 32, 16, 4, 1))


def read(path):
    """Every layer of shapes.csv, and the suites `small`, `ranks` and `tiny`."""
    with open(path, newline="") as file:
        listed = [
            Shape(row["suite"], row["name"], *(int(row[size]) for size in ("T", "d", "n", "E", "K")))
            for row in csv.DictReader(file)
        ]
    models = {shape.name: shape for shape in listed if shape.suite == "models"}
    small = [
        models[name]._replace(suite="small", name=f"{name}-T{tokens}", T=tokens)
        for name in SMALL_MODELS
        for tokens in SMALL_TOKENS
    ]
    named = {shape.name: shape for shape in listed if shape.suite in ("paper", "models")}
    name, few = RANKS_FEW
    ranks = [named[name]._replace(suite="ranks", name=f"{name}-ranks", T=tokens) for name, tokens in RANKS]
    ranks += [named[name]._replace(suite="ranks", name=f"{name}-ranks-T{tokens}", T=tokens) for tokens in few]
    return listed + small + ranks + list(TINY)


def _thiek(text):
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != 5 or min(sizes) < 1 or sizes[4] > sizes[3]:
        raise ValueError(f"--thiek {text}: five positive integers T,d,n,E,K with K <= E are expected")
    return Shape("thiek", "x".join(map(str, sizes)), *sizes)


def choose(every, suites="", names="", thieks=()):
    """The layers of the suites (comma-separated; `all` for every suite of shapes.csv), those with one of the names
    (comma-separated; of the suites if suites are given), and those of --thiek. ValueError says what is unknown."""
    wanted_suites = [word for word in suites.split(",") if word]
    wanted_names = [word for word in names.split(",") if word]
    known = list(dict.fromkeys(shape.suite for shape in every))
    if "all" in wanted_suites:
        wanted_suites = [suite for suite in known if suite not in ("small", "ranks", "tiny")]
    for suite in wanted_suites:
        if suite not in known:
            raise ValueError(f"--suite {suite}: the suites are {', '.join(known)} and all")
    pool = [shape for suite in wanted_suites for shape in every if shape.suite == suite] if wanted_suites else every
    for name in wanted_names:
        if name not in {shape.name for shape in pool}:
            raise ValueError(f"--shape {name}: no such shape in {suites or 'any suite'}")
    if wanted_names:
        chosen = [shape for shape in pool if shape.name in wanted_names]
    else:
        chosen = list(pool) if wanted_suites else []
    return chosen + [_thiek(text) for text in thieks]
