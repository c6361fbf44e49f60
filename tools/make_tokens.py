#!/usr/bin/env python3
"""Trains a byte-level BPE on text and writes the text as token files for `smoe train`.

Usage: make_tokens.py OUT TEXT...      TEXT: files, folders (all files in them), or - for standard input
Into the folder OUT:
    bpe.txt                 the table by which smoe encodes and decodes (train/data/bpe.h): smoe train --tokenizer OUT/bpe.txt
    tokenizer.json, tokenizer_config.json      the same for Transformers
    train_NNN.bin, val_NNN.bin                 llm.c's token files; `smoe train OUT/*.bin` validates on val_*
A file is a document: <|endoftext|> and then its text. Files that end in .gz are inflated, those with a zero byte are
skipped, and bytes that are not UTF-8 become U+FFFD. Needs the package `tokenizers` (pip install tokenizers).
Exit status: 0, 2 wrong arguments, 3 no text or a file that cannot be read, 77 the package is not installed.
"""
from __future__ import annotations

import argparse
import array
import gzip
import json
import os
import re
import struct
import sys
from pathlib import Path
from typing import Iterable, Iterator

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as missing:
    print(f"skipped: {missing}", file=sys.stderr)
    sys.exit(77)

END = "<|endoftext|>"
MAGIC, VERSION, HEADER = 20240520, 1, 256  # llm.c's token file; HEADER int32
CHUNK = 1 << 20  # characters that are encoded as one string
BATCH = 16  # chunks that are encoded at once

# The words of train/data/bpe.h. A letter is a letter of ASCII, or any character outside of ASCII.
LETTER = r"[^\x00-@\[-`{-\x7F]"
SIGN = r"[\x00-\x08\x0E-\x1F!-/:-@\[-`{-\x7F]"
SPACE, OTHER_SPACE, NO_SPACE = r"[\t-\r ]", r"[\t-\r]", r"[^\t-\r ]"
WORDS = (
    f" ?{LETTER}{{1,64}}| ?[0-9]{{1,3}}| ?{SIGN}{{1,64}}"
    f"|{SPACE}{{0,63}}{OTHER_SPACE}(?!{SPACE})|{SPACE}{{1,64}}(?!{NO_SPACE})"
)
# A word always ends where white space follows another character, so the text can be cut there.
CUT = re.compile(f"{NO_SPACE}(?={SPACE})")


# ---- documents ----


def list_files(paths: list[str]) -> list[str]:
    """The files of all paths, folders recursively in sorted order, without names that start with a dot."""
    files = []
    for path in paths:
        if path != "-" and not os.path.exists(path):
            raise OSError(f"{path}: no such file or folder")
        if not os.path.isdir(path):
            files.append(path)
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            files += [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]
    return files


def read_text(path: str) -> str:
    """A document's text; "" for one that is no text."""
    if path == "-":
        data = sys.stdin.buffer.read()
    elif not os.path.isfile(path):
        return ""  # a pipe, or a link to nothing
    else:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            data = file.read()
    return "" if b"\0" in data else data.decode("utf-8", errors="replace")


class Documents:
    """Iterates over the texts of files; standard input is read once and kept."""

    def __init__(self, paths: list[str]):
        self.files = list_files(paths)
        self.kept: dict[str, str] = {}
        self.size = sum(os.path.getsize(path) for path in self.files if os.path.isfile(path))
        if "-" in self.files:
            self.kept["-"] = read_text("-")
            self.size += len(self.kept["-"])

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            text = self.kept[path] if path in self.kept else read_text(path)
            if text:
                yield text

    def sample(self, most: int) -> Iterator[str]:
        """About `most` bytes, in chunks spread evenly over all documents."""
        every, taken = max(1.0, self.size / most), 0
        for number, chunk in enumerate(chunk for text in self for chunk in chunks(text, CHUNK // 16)):
            if number >= taken * every:
                taken += 1
                yield chunk


def chunks(text: str, size: int = CHUNK) -> Iterator[str]:
    """Cuts a text where a word ends, after `size` characters or more."""
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + size)
        end = cut.end() if cut else len(text)
        yield text[start:end]
        start = end


# ---- tokenizer ----


def new_tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_characters() -> list[str]:
    """The character that stands for each byte in tokenizer.json, as in GPT-2: the byte itself if it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte) if byte in printed else chr(256 + others.index(byte)) for byte in range(256)]


def train(texts: Iterable[str], vocab: int, progress: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges. Tokens 0..255 are the bytes; the others are numbered in the order of the merges."""
    tokenizer = new_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1, initial_alphabet=byte_characters(), special_tokens=[], show_progress=progress
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    ids = {character: byte for byte, character in enumerate(byte_characters())}
    for left, right in merges:
        ids.setdefault(left + right, len(ids))
    return ids, merges


def write_tokenizer(out: Path, ids: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    lines = [f"smoe-bpe 1 {len(ids) + 1} {len(merges)}"]
    lines += [f"{ids[left]} {ids[right]} {ids[left + right]}" for left, right in merges]
    replace(out / "bpe.txt", ("\n".join(lines) + "\n").encode())
    tokenizer = new_tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    replace(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    replace(out / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())
    return tokenizer


def replace(path: Path, data: bytes) -> None:
    """Writes a file under another name and renames it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def copy_tokenizer(made: Path, out: Path) -> Tokenizer:
    """The tokenizer that another run wrote into the folder `made`."""
    for name in ("bpe.txt", "tokenizer.json", "tokenizer_config.json"):
        replace(out / name, (made / name).read_bytes())
    return Tokenizer.from_file(str(out / "tokenizer.json"))


# ---- token files ----


class TokenFiles:
    """Writes tokens to OUT/NAME_000.bin, NAME_001.bin and so on. Each file gets its name when it is complete."""

    def __init__(self, out: Path, name: str, most: int):
        self.out, self.name, self.most = out, name, most
        self.number = self.total = self.count = 0
        self.file = None
        for old in out.glob(f"{name}_[0-9]*.bin"):
            old.unlink()

    def path(self) -> Path:
        return self.out / f"{self.name}_{self.number:03}.bin"

    def write(self, tokens: array.array) -> None:
        for start in range(0, len(tokens), self.most):
            self.write_some(tokens[start : start + self.most])

    def write_some(self, tokens: array.array) -> None:
        if self.file and self.count + len(tokens) > self.most:
            self.close()
        if not self.file:
            self.file = open(f"{self.path()}.tmp", "wb")
            self.file.write(bytes(4 * HEADER))
        if sys.byteorder == "big":
            tokens.byteswap()
        tokens.tofile(self.file)
        self.count += len(tokens)

    def close(self) -> None:
        if not self.file:
            return
        self.file.seek(0)
        self.file.write(struct.pack("<3i", MAGIC, VERSION, self.count))
        self.file.close()
        os.replace(f"{self.path()}.tmp", self.path())
        self.total += self.count
        self.number, self.count, self.file = self.number + 1, 0, None


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[array.array]:
    """The tokens of each document, which start with the token <|endoftext|>. Where a document contains this word, it is
    encoded like other text."""
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(END)
    waiting: list[tuple[bool, str]] = []  # (whether it is the first of its document, chunk)
    tokens = array.array("H")

    def flush() -> Iterator[array.array]:
        nonlocal tokens
        encoded = tokenizer.encode_batch_fast([chunk for _, chunk in waiting], add_special_tokens=False)
        for (first, _), part in zip(waiting, encoded):
            if first and tokens:
                yield tokens
                tokens = array.array("H")
            tokens.extend([end, *part.ids] if first else part.ids)
        waiting.clear()

    size = 0
    for text in documents:
        for number, chunk in enumerate(chunks(text)):
            waiting.append((number == 0, chunk))
            size += len(chunk)
            if size >= BATCH * CHUNK:
                yield from flush()
                size = 0
    yield from flush()
    if tokens:
        yield tokens


def write_tokens(out: Path, tokenizer: Tokenizer, documents: Documents, options: argparse.Namespace) -> tuple[int, int]:
    """Writes the token files. Validation gets whole documents, or the end of each. Returns the numbers of tokens to
    train and to validate on."""
    train_files = TokenFiles(out, "train", options.file_tokens)
    validation_files = TokenFiles(out, "val", options.file_tokens)
    share = options.validation
    for number, tokens in enumerate(encode(tokenizer, documents)):
        cut = len(tokens) - round(len(tokens) * share)
        if options.split == "file":
            validates = int((number + 0.5) * share + 0.5) < int((number + 1.5) * share + 0.5)
            cut = 0 if validates else len(tokens)
        train_files.write(tokens[:cut])
        validation_files.write(tokens[cut:])
    train_files.close()
    validation_files.close()
    return train_files.total, validation_files.total


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("texts", metavar="TEXT", nargs="+")
    parser.add_argument("--vocab", type=int, default=32768, help="tokens, 257..65536 (default 32768)")
    parser.add_argument(
        "--sample", type=float, default=256, help="MB of the text, spread evenly, that the BPE is trained on (default 256)"
    )
    parser.add_argument(
        "--split", choices=["file", "share"], help="validate on whole files, or on the end of each (default: file from 20 files on)"
    )
    parser.add_argument("--validation", type=float, default=0.05, help="share that validates, 0..0.5 (default 0.05)")
    parser.add_argument(
        "--file-tokens", type=int, default=1 << 28, help="most tokens of a file, 1..2147483647 (default 268435456)"
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", type=Path, help="takes the tokenizer that make_tokens.py wrote there and trains none"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args()
    for name, low, high in [("vocab", 257, 65536), ("sample", 1e-3, 1e6), ("validation", 0, 0.5), ("file_tokens", 1, 2**31 - 1)]:
        if not low <= getattr(options, name) <= high:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} is outside {low:g}..{high:g}")
    return options


def main() -> None:
    options = parse_arguments()
    documents = Documents(options.texts)
    options.split = options.split or ("file" if len(documents.files) >= 20 else "share")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tokenizer:
        tokenizer = copy_tokenizer(options.tokenizer, options.out)
    else:
        ids, merges = train(documents.sample(int(options.sample * 1e6)), options.vocab, not options.quiet)
        tokenizer = write_tokenizer(options.out, ids, merges)
    train_tokens, validation_tokens = write_tokens(options.out, tokenizer, documents, options)
    if train_tokens + validation_tokens == 0:
        raise OSError("no text in " + ", ".join(options.texts))
    print(
        f"{options.out}: {tokenizer.get_vocab_size()} tokens in the vocabulary, "
        f"{train_tokens} to train on, {validation_tokens} to validate on"
    )


if __name__ == "__main__":
    try:
        main()
    except (OSError, EOFError) as problem:
        print(f"make_tokens.py: {problem}", file=sys.stderr)
        sys.exit(3)
