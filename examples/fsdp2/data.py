"""Batches of tokens in the order of `smoe train`: the same files, seed, batch and context give the same sequences.

How a batch is drawn: row `row` of a step's batch is the run's sample number step * batch + row. A sample is a window of
`context` tokens, and its targets are the tokens one place later. The training stream is cut into adjoining windows from
a random start. One pass over the data visits each window once, in random order; the next pass has another start and
another order. All random numbers come from a counter-based generator, so a batch depends on (seed, step) alone, and a
resumed run needs nothing but its step. train/data/tokens.h describes the files and how they are split into training and
validation. This module repeats the code of train/data/tokens.c and base/random.h.
"""

import gzip
import os
import re
import zlib

import numpy
import torch
from torch import Tensor

from . import RunError, UsageError

MASK = (1 << 64) - 1
MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4  # of llm.c's token files
SPLIT = 20  # one token of 20, or one file of 20, is for validation
LOOKED_AT = 8192  # a file with a zero byte among its first LOOKED_AT bytes is binary
VALIDATES = re.compile(r"(^|[_.0-9-])(val|valid|validation)($|[_.0-9-])", re.IGNORECASE)  # a word of a name


def random_bits(seed: int, index: int) -> int:
    """Value number `index` of the stream `seed`, 64 bits."""
    z = (seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def permuted(index: int, count: int, key: int) -> int:
    """Element `index` of a random permutation of 0..count-1. A Feistel network permutes the numbers below a power of
    four that is at least count; it is applied until the result is below count."""
    half = 1
    while half < 31 and 1 << 2 * half < count:
        half += 1
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (random_bits((key + turn) & MASK, right) & mask)
        index = left << half | right
        if index < count:
            return index


# ---- files ----


class Source:
    """The tokens of one file: `tokens` (count) uint8 or uint16."""

    def __init__(self, path: str, named: bool) -> None:
        self.text, self.binary = not path.removesuffix(".gz").endswith(".bin"), False
        try:
            data = numpy.memmap(path, numpy.uint8, "r") if os.path.getsize(path) else numpy.empty(0, numpy.uint8)
            if path.endswith(".gz"):
                data = numpy.frombuffer(gzip.decompress(data.tobytes()), numpy.uint8)
        except (OSError, EOFError, zlib.error) as error:
            raise RunError(f"{path}: {error.strerror if isinstance(error, OSError) and error.strerror else error}")
        if self.text:
            self.tokens, self.binary = data, bool((data[:LOOKED_AT] == 0).any())
        else:
            problem = self._read_tokens(data)
            self.binary = bool(problem) and problem.startswith("not a token file")
            if problem and (named or not self.binary):
                raise RunError(f"{path}: {problem}")
        self.validates = not self.text and any(map(VALIDATES.search, path.split("/")[-2:]))  # its name, its folder's

    def _read_tokens(self, data: numpy.ndarray) -> str:
        if len(data) < 4 or int(data[:4].view("<i4")[0]) != MAGIC:
            return f"not a token file: expected the magic number {MAGIC} at its start"
        if len(data) < HEADER:
            return f"truncated token file: {len(data)} bytes, the header has {HEADER}"
        _, version, count = (int(value) for value in data[:12].view("<i4"))
        if version != VERSION:
            return f"token file of version {version}, expected {VERSION}"
        if count < 1 or len(data) != HEADER + 2 * count:
            return f"the header counts {count} tokens, expected {HEADER + 2 * max(count, 1)} bytes, found {len(data)}"
        self.tokens = data[HEADER:].view("<u2")
        return ""


def list_files(path: str) -> list[str]:
    """The file itself, or the regular files below a folder, names sorted by bytes at every level."""
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise RunError(f"{path}: no such file or folder")
        return [path]
    found: list[str] = []
    for entry in sorted(os.scandir(path), key=lambda entry: os.fsencode(entry.name)):
        if entry.is_dir(follow_symlinks=False):
            found += list_files(entry.path)
        elif entry.is_file(follow_symlinks=False):
            found.append(entry.path)
    return found


def open_sources(paths: list[str]) -> list[Source]:
    """All files, except those that were found in a folder and are empty or binary."""
    named, sources = set(paths), []
    for path in (file for root in paths for file in list_files(root)):
        if os.path.getsize(path) == 0 and path not in named:
            continue
        source = Source(path, path in named)
        if not source.binary or path in named:
            sources.append(source)
    if not sources:
        raise RunError(f"{', '.join(paths)}: holds no file with data")
    if len({source.text for source in sources}) > 1:
        raise RunError(f"{', '.join(paths)}: text and token files (*.bin) cannot be mixed")
    return sources


def training_parts(sources: list[Source]) -> list[numpy.ndarray]:
    """The tokens that `smoe train` trains on, unless it makes no validations. It validates on the others."""
    validates = [source.validates for source in sources]
    if any(validates) and not all(validates):
        return [source.tokens for source in sources if not source.validates]
    if len(sources) >= SPLIT:
        kept = [source.tokens for i, source in enumerate(sources) if i % SPLIT != SPLIT // 2]
        total, train = sum(len(source.tokens) for source in sources), sum(map(len, kept))
        if 0.02 <= (total - train) / total <= 0.10:
            return kept
    return [source.tokens[: len(source.tokens) - len(source.tokens) // SPLIT] for source in sources]


# ---- batches ----


class FileTokens:
    """The training stream of files and folders."""

    def __init__(self, paths: list[str], vocabulary: int, context: int, seed: int) -> None:
        self.parts = [part for part in training_parts(open_sources(paths)) if len(part)]
        self.starts = numpy.cumsum([0] + [len(part) for part in self.parts])
        self.total, self.context, self.seed = int(self.starts[-1]), context, seed
        name = ", ".join(paths)
        if self.total <= context:
            raise RunError(f"{name}: {self.total} tokens to train on, context {context} needs {context + 1}")
        for part in self.parts:
            if vocabulary < 1 << 8 * part.itemsize and int(part.max()) >= vocabulary:
                raise RunError(f"{name}: token {int(part.max())} is outside the vocabulary of {vocabulary}")

    def position(self, sample: int) -> int:
        windows = max(self.total // self.context - 1, 1)
        slack = self.total - 1 - windows * self.context
        key = random_bits(self.seed, sample // windows)  # of this pass over the data
        start = random_bits(key, 0) % (slack + 1)
        return start + permuted(sample % windows, windows, key) * self.context

    def window(self, position: int, count: int) -> numpy.ndarray:
        pieces, part = [], int(numpy.searchsorted(self.starts, position, "right")) - 1
        while count > 0:
            first = position - int(self.starts[part])
            piece = self.parts[part][first : first + count]
            pieces.append(piece.astype(numpy.int64))
            position, count, part = position + len(piece), count - len(piece), part + 1
        return numpy.concatenate(pieces)

    def rows(self, step: int, batch: int, first: int, count: int) -> Tensor:
        """Rows first..first + count - 1 of the batch of `step`, (count, context + 1) int64."""
        samples = range(step * batch + first, step * batch + first + count)
        return torch.from_numpy(numpy.stack([self.window(self.position(s), self.context + 1) for s in samples]))


class RandomTokens:
    """Uniform random tokens, for measurements. A model can learn nothing from them but their frequencies."""

    def __init__(self, vocabulary: int, context: int, seed: int) -> None:
        self.vocabulary, self.context, self.seed = vocabulary, context, seed

    def rows(self, step: int, batch: int, first: int, count: int) -> Tensor:
        rows = []
        for sample in range(step * batch + first, step * batch + first + count):
            generator = torch.Generator().manual_seed(random_bits(self.seed, sample) >> 1)
            rows.append(torch.randint(0, self.vocabulary, (self.context + 1,), generator=generator))
        return torch.stack(rows)


def open_tokens(paths: list[str], random: bool, vocabulary: int, context: int, seed: int):
    if random == bool(paths):
        raise UsageError("name text files, folders or token files, or give --random; not both")
    if random:
        return RandomTokens(vocabulary, context, seed)
    return FileTokens(paths, vocabulary, context, seed)
