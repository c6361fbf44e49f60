"""tools/make_tokens.py and train/data/bpe.c: train/data/bpe.c must give the same tokens as the package `tokenizers`.

The C side is the program bpe_encode of a CMake build: SMOE_BUILD names the build folder (default build/release).
"""
import array
import gzip
import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("SMOE_BUILD", ROOT / "build" / "release"))
ENCODER = BUILD / "tests" / "bpe_encode"
MEGABYTES = 4  # of random text

needs_encoder = pytest.mark.skipif(not ENCODER.exists(), reason=f"{ENCODER} is not built (SMOE_BUILD)")


def make_tokens(*arguments, stdin=None, status=0):
    tool = ROOT / "tools" / "make_tokens.py"
    done = subprocess.run([sys.executable, tool, *map(str, arguments)], input=stdin, capture_output=True, timeout=300)
    assert done.returncode == status, done.stderr.decode()
    return done


def read_tokens(path):
    data = path.read_bytes()
    header = array.array("i", data[:1024])
    tokens = array.array("H", data[1024:])
    assert list(header[:3]) == [20240520, 1, len(tokens)] and not any(header[3:])
    return list(tokens)


def encode_in_c(table, data):
    done = subprocess.run([ENCODER, table], input=data, capture_output=True, check=True, timeout=300)
    return list(array.array("H", done.stdout)), json.loads(done.stderr)


def sources():
    """Text of this repository: prose, C, Python, CMake."""
    kinds = ("*.md", "*.c", "*.h", "*.cu", "*.cuh", "*.py", "*.txt")
    folders = ("docs", "src", "train", "cli", "oracle", "include", "tests", "tools")
    files = [path for folder in folders for kind in kinds for path in sorted((ROOT / folder).rglob(kind))]
    return [path for path in files if b"\0" not in path.read_bytes()]


def random_text(size, seed):
    """Words, numbers, signs, control characters, runs longer than a word of train/data/bpe.h, letters of two to four
    bytes."""
    choose = random.Random(seed)
    parts = (
        lambda: choose.choice(["the", "of", "static", "int", "Größe", "naïve", "это", "モデル", "模型", "🙂🙃", "e\u0301"]),
        lambda: choose.choice([" ", " ", " ", "\n", "\t", "\r\n", "\v", "\f", "\u00a0", "\u2003", "\u0085"]),
        lambda: str(choose.randrange(10 ** choose.randrange(1, 12))),
        lambda: "".join(choose.choices("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", k=choose.randrange(1, 5))),
        lambda: choose.choice(" \n\tax7=é字😀") * choose.choice([2, 3, 62, 63, 64, 65, 66, 127, 128, 129, 300]),
        lambda: chr(choose.choice([0x1, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFD, 0xFFFF, 0x10000, 0x10FFFF])),
        lambda: "".join(choose.choices(" \n", k=choose.randrange(1, 130))),
        lambda: "<|endoftext|>",
    )
    text, length = [], 0
    while length < size:
        text.append(choose.choices(parts, weights=(40, 40, 8, 10, 1, 1, 1, 1))[0]())
        length += len(text[-1])
    return "".join(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer that was trained on this repository's text and some random text."""
    folder = tmp_path_factory.mktemp("tokens")
    extra = folder / "extra.txt"
    extra.write_text(random_text(200_000, 1), newline="")
    make_tokens(folder / "out", extra, *sources(), "--vocab", 6000, "--split", "share", "--quiet")
    return folder / "out"


@needs_encoder
def test_c_encodes_as_tokenizers_does(made):
    ours = [path.read_text(errors="replace") for path in sources()]
    texts = ours + [random_text(100_000, seed) for seed in range(2, 2 + 10 * MEGABYTES)]
    assert sum(len(text.encode()) for text in texts) > MEGABYTES * 1_000_000
    theirs = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    theirs.encode_special_tokens = True
    seconds = size = 0
    for text, encoded in zip(texts, theirs.encode_batch_fast(texts, add_special_tokens=False)):
        tokens, took = encode_in_c(made / "bpe.txt", text.encode())
        assert tokens == encoded.ids
        assert theirs.decode(tokens) == text
        seconds += took["seconds"]
        size += took["bytes"]
    print(f"{size / 1e6 / seconds:.1f} MB/s in C on one core")


@needs_encoder
def test_pieces_end_wherever_those_of_tokenizers_do(made):
    """All strings of four characters of the kinds that train/data/bpe.h distinguishes, separated by a sign; several
    endings."""
    theirs = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    texts = ["".join(text) for text in itertools.product(" \na7=é", repeat=4)]
    for ending in ["", " ", "\n", "  ", "\n ", " \n", "é", "1", "="]:
        text = "\x01".join(texts) + ending
        assert encode_in_c(made / "bpe.txt", text.encode())[0] == theirs.encode(text).ids


def test_table_is_the_tokenizer(made):
    first, *lines = (made / "bpe.txt").read_text().splitlines()
    model = json.loads((made / "tokenizer.json").read_text())["model"]
    ids = model["vocab"]
    assert first == f"smoe-bpe 1 {len(ids) + 1} {len(model['merges'])}" and len(ids) == 5999
    assert lines == [f"{ids[a]} {ids[b]} {ids[a + b]}" for a, b in model["merges"]]


def test_a_share_of_each_document_is_for_validation(made):
    """Every document has the token <|endoftext|> and then its own. The last 5 % of each document are for validation."""
    theirs = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    train, validation = read_tokens(made / "train_000.bin"), read_tokens(made / "val_000.bin")
    assert train.count(5999) + validation.count(5999) == train.count(5999) == len(sources()) + 1
    assert 0.045 < len(validation) / (len(train) + len(validation)) < 0.055
    text = theirs.decode(train, skip_special_tokens=False)
    assert text.startswith("<|endoftext|>" + random_text(200_000, 1)[:1000])


def test_split_by_file_keeps_documents_whole(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"document number {number}\n" * 50)
    (texts / ".hidden").write_text("hidden")
    (texts / "binary").write_bytes(b"a\0b")
    (texts / "zipped.gz").write_bytes(gzip.compress(b"inflated text\n" * 50))
    make_tokens(tmp_path / "out", texts, "--vocab", 400, "--split", "file", "--quiet")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    train, validation = (
        theirs.decode(read_tokens(tmp_path / "out" / f"{name}_000.bin"), skip_special_tokens=False).split("<|endoftext|>")[1:]
        for name in ("train", "val")
    )
    documents = [f"document number {number}\n" * 50 for number in range(40)] + ["inflated text\n" * 50]
    assert sorted(train + validation) == sorted(documents)
    assert len(validation) == 2 and not set(train) & set(validation)


def test_a_tokenizer_that_is_there_is_used_and_copied(made, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox, and a text that the tokenizer was not trained on. " * 20)
    make_tokens(tmp_path / "out", text, "--tokenizer", made, "--quiet")
    for name in ("bpe.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (made / name).read_bytes()
    tokens = read_tokens(tmp_path / "out" / "train_000.bin") + read_tokens(tmp_path / "out" / "val_000.bin")
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokens == [5999, *tokenizer.encode(text.read_text()).ids]
    assert b"bpe.txt" in make_tokens(tmp_path / "out", text, "--tokenizer", tmp_path, status=3).stderr


def test_standard_input_is_cut_into_files_of_the_limit(tmp_path):
    text = random_text(3_000_000, 99)  # longer than two chunks
    make_tokens(tmp_path, "-", "--vocab", 1000, "--file-tokens", 100_000, "--quiet", stdin=text.encode())
    files = sorted(tmp_path.glob("train_*.bin")) + sorted(tmp_path.glob("val_*.bin"))
    tokens = [token for path in files for token in read_tokens(path)]
    assert len(files) > 4 and max(len(read_tokens(path)) for path in files) <= 100_000
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert tokens == [999] + theirs.encode(text).ids


@pytest.mark.skipif(not (BUILD / "smoe").exists(), reason=f"{BUILD}/smoe is not built (SMOE_BUILD)")
def test_token_files_give_the_loss_of_their_text(tmp_path):
    """The checkpoint must contain the tokenizer."""
    text, out, run = tmp_path / "text.txt", tmp_path / "out", tmp_path / "run"
    text.write_text(random_text(60_000, 5), newline="")
    make_tokens(out, text, "--vocab", 500, "--quiet")
    shape = "--hidden 16 --intermediate 8 --experts 4 --heads 2 --layers 1 --context 16 --batch 2 -q --steps 3".split()
    files = sorted(out.glob("*.bin"))

    def smoe(*arguments):
        return subprocess.run([BUILD / "smoe", *arguments], check=True, capture_output=True, timeout=300).stdout

    smoe("train", *shape, "--tokenizer", out / "bpe.txt", "--out", run, *files)
    for name in ("bpe.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (run / "latest" / name).read_bytes() == (out / name).read_bytes()
    make_tokens(out, text, "--vocab", 500, "--validation", 0, "--quiet")
    by_text = json.loads(smoe("eval", "--json", "-c", run, text))
    assert by_text == json.loads(smoe("eval", "--json", "-c", run, out / "train_000.bin"))
    nats = by_text["loss"] * by_text["tokens"]
    assert by_text["bits_per_byte"] == pytest.approx(nats / math.log(2) / text.stat().st_size, rel=1e-4)
    assert smoe("generate", "-c", run, "-n", "5", "--prompt", "naïve").startswith("naïve".encode())


def test_transformers_reads_it(made):
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(made)
    text = random_text(10_000, 3).replace("<|endoftext|>", "")
    ids = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json")).encode(text).ids
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.eos_token_id == 5999 and theirs.decode(ids) == text


@pytest.mark.skipif(not (BUILD / "smoe").exists(), reason=f"{BUILD}/smoe is not built (SMOE_BUILD)")
def test_generation_ends_at_the_end_of_text(tmp_path):
    """Transformers' generate must stop at the end-of-text token, as `smoe generate` does."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    texts, out, run = tmp_path / "texts", tmp_path / "out", tmp_path / "run"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}").write_text("the cat sat on the mat")
    make_tokens(out, texts, "--vocab", 280, "--quiet")
    shape = "--hidden 32 --intermediate 16 --experts 4 --heads 2 --layers 1 --context 10 --batch 8 -q --steps 150 --lr 0.01".split()
    smoe = [BUILD / "smoe"]
    files = sorted(out.glob("*.bin"))
    subprocess.run([*smoe, "train", *shape, "--device", "cpu", "--out", run, "--tokenizer", out / "bpe.txt", *files], check=True)
    text = subprocess.run(
        [*smoe, "generate", "-c", run, "-n", "60", "--temperature", "0", "--device", "cpu"], check=True, capture_output=True
    ).stdout
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "latest")
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "latest")
    ids = model.generate(max_new_tokens=60, do_sample=False)[0]  # begins with the bos token
    assert ids[0] == ids[-1] == tokenizer.eos_token_id and len(ids) < 40
    assert tokenizer.decode(ids[1:-1]) == text.decode().removesuffix("\n").removesuffix("<|endoftext|>")


def test_wrong_input_ends_with_its_exit_status(tmp_path):
    make_tokens(tmp_path, "--vocab", 70000, "x", status=2)
    assert b"missing: no such file" in make_tokens(tmp_path, tmp_path / "missing", status=3).stderr
    assert b"no text in" in make_tokens(tmp_path, "-", "--quiet", stdin=b"", status=3).stderr
