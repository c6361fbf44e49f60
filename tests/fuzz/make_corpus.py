#!/usr/bin/env python3
"""Writes the regression corpus of the fuzz targets: tests/fuzz/corpus/NAME/{good,bad}-*.

Each file is small and has one thing right or wrong. The files are the same in every run; only the standard library is
needed. Files that a fuzzer found and that were added by hand have other names and are kept. After changing this script,
run it and commit the files that it wrote.
"""
import gzip
import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"


def put(area, name, data):
    folder = CORPUS / area
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


# ---- safetensors ----

def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors():
    def good(name, *args, **more):
        put("safetensors", f"good-{name}", packed(*args, **more))

    def bad(name, *args, **more):
        put("safetensors", f"bad-{name}", packed(*args, **more))

    two = {"a": tensor("F32", [2], 0, 8), "b": tensor("BF16", [1, 2], 8, 12)}
    data = struct.pack("<ff", 1, -2) + bytes(4)
    good("two", two, data)
    good("metadata", {"__metadata__": {"format": "pt"}, **two}, data)
    good("padded", json.dumps(two).encode() + b" " * 13, data)
    good("no-tensors", {})
    good("scalar", {"s": tensor("F64", [], 0, 8)}, bytes(8))
    good("order", {"b": two["b"], "a": two["a"]}, data)
    good("empty-tensors", {"e": tensor("F32", [0, 5], 0, 0), "f": tensor("I8", [0], 8, 8), "a": two["a"]}, data[:8])
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
    at, every = 0, {}
    for dtype, size in sizes.items():
        every[dtype] = tensor(dtype, [3], at, at + 3 * size)
        at += 3 * size
    good("dtypes", every, bytes(i * 37 % 256 for i in range(at)))
    good("rank-8", {"a": tensor("U8", [1, 1, 2, 1, 1, 2, 1, 1], 0, 4)}, bytes(4))

    put("safetensors", "bad-empty", b"")
    put("safetensors", "bad-seven-bytes", bytes(7))
    put("safetensors", "bad-length-only", struct.pack("<Q", 100))
    bad("no-header", b"")
    bad("length-past-file", two, data, length=100000)
    bad("length-past-limit", two, data, length=100000001)
    bad("length-huge", two, data, length=2**64 - 1)
    bad("length-short", two, data, length=20)
    bad("truncated-data", two, data[:-1])
    bad("trailing-data", two, data + b"x")
    bad("overlap", {"a": two["a"], "b": tensor("F32", [2], 4, 12)}, data)
    bad("same-place", {"a": two["a"], "b": two["a"], "c": tensor("F32", [1], 8, 12)}, data)
    bad("hole", {"a": two["a"], "b": tensor("BF16", [2], 10, 14)}, data + bytes(2))
    bad("hole-first", {"a": tensor("F32", [2], 4, 12)}, data)
    bad("empty-inside", {"a": two["a"], "e": tensor("F32", [0], 4, 4), "b": two["b"]}, data)
    bad("backwards", {"a": tensor("F32", [2], 8, 0)}, data)
    bad("negative-begin", {"a": tensor("F32", [2], -8, 0)}, data)
    bad("shape-too-small", {"a": tensor("F32", [2], 0, 12)}, data)
    bad("shape-overflow", {"a": tensor("F32", [2**62, 4], 0, 0)})
    bad("shape-overflow-wraps", {"a": tensor("F32", [2**32, 2**32, 2], 0, 0)})
    bad("shape-overflow-zero", {"a": tensor("F32", [0, 2**62, 8], 0, 0)})
    bad("shape-negative", {"a": tensor("F32", [-2, -1], 0, 8)}, data[:8])
    bad("shape-real", {"a": tensor("F32", [2.0], 0, 8)}, data[:8])
    bad("shape-past-int64", {"a": tensor("F32", [2**64], 0, 8)}, data[:8])
    bad("rank-9", {"a": tensor("U8", [1] * 9, 0, 1)}, b"x")
    bad("dtype-unknown", {"a": tensor("F8_E4M3", [8], 0, 8)}, data[:8])
    bad("dtype-number", {"a": tensor(32, [2], 0, 8)}, data[:8])
    bad("three-offsets", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, data[:8])
    bad("no-shape", {"a": {"dtype": "F32", "data_offsets": [0, 8]}}, data[:8])
    bad("another-key", {"a": {**two["a"], "more": 1}}, data[:8])
    bad("tensor-is-list", {"a": [1, 2]}, data[:8])
    bad("metadata-number", {"__metadata__": {"step": 1}, **two}, data)
    bad("metadata-list", {"__metadata__": [], **two}, data)
    a = json.dumps(two["a"]).encode()
    bad("duplicate-key", b'{"a":' + a + b',"a":' + a + b"}", data[:8])
    bad("duplicate-inner-key", b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', data[:8])
    bad("array", b"[]")
    bad("leading-space", b" {}")
    bad("garbage-after", b"{} x")
    bad("not-utf8", b'{"\xff":' + a + b"}", data[:8])
    bad("nul-in-name", b'{"a\\u0000b":' + a + b"}", data[:8])
    bad("deep", b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}")


# ---- index of a sharded checkpoint ----

def index():
    def good(name, weight_map, **more):
        put("index", f"good-{name}.json", json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map, **more}))

    def bad(name, whole):
        put("index", f"bad-{name}.json", whole if isinstance(whole, bytes) else json.dumps(whole))

    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    good("two", {"a": one, "b": two, "c": two, "d": one})
    good("empty", {})
    good("other-keys", {"a": one}, anything=[1, None])
    put("index", "good-no-metadata.json", json.dumps({"weight_map": {"a": one}}))
    bad("no-map", {"metadata": {}})
    bad("map-is-list", {"weight_map": [one]})
    bad("file-number", {"weight_map": {"a": 1}})
    bad("file-null", {"weight_map": {"a": one, "b": None}})
    bad("file-empty", {"weight_map": {"a": ""}})
    bad("file-hidden", {"weight_map": {"a": ".model.safetensors"}})
    bad("file-above", {"weight_map": {"a": "../model.safetensors"}})
    bad("file-root", {"weight_map": {"a": "/model.safetensors"}})
    bad("file-folder", {"weight_map": {"a": "shards/model.safetensors"}})
    bad("file-nul", b'{"weight_map": {"a": "model\\u0000.safetensors"}}')
    bad("duplicate", b'{"weight_map": {"a": "x", "a": "y"}}')
    bad("array", [])
    bad("truncated", b'{"weight_map": {"a": "x"')
    bad("trailing", b'{"weight_map": {"a": "x"}} x')
    bad("not-utf8", b'{"weight_map": {"a": "\xff"}}')
    bad("blank", b"")
    bad("deep", b'{"weight_map": ' + b"[" * 3000 + b"]" * 3000 + b"}")


# ---- config ----

def config():
    base = {
        "model_type": "olmoe", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 128, "rope_theta": 10000.0, "rms_norm_eps": 1e-05,
        "norm_topk_prob": False, "tie_word_embeddings": False,
    }

    def good(name, **change):
        put("config", f"good-{name}.json", json.dumps({**base, **change}, indent=1))

    def bad(name, without=(), **change):
        whole = {**base, **change}
        for key in without:
            del whole[key]
        put("config", f"bad-{name}.json", json.dumps(whole, indent=1))

    good("base")
    # the values of allenai/OLMoE-1B-7B's published configuration
    good("olmoe-1b-7b", architectures=["OlmoeForCausalLM"], hidden_size=2048, intermediate_size=1024,
         num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, num_experts=64,
         num_experts_per_tok=8, vocab_size=50304, max_position_embeddings=4096, clip_qkv=None, rope_scaling=None,
         attention_bias=False, attention_dropout=0.0, hidden_act="silu", initializer_range=0.02,
         router_aux_loss_coef=0.01, pad_token_id=1, eos_token_id=50279, torch_dtype="bfloat16")
    good("rope-parameters", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    good("rope-neutral", rope_scaling={"type": "default", "factor": 1.0}, partial_rotary_factor=1.0)
    good("shared", model_type="smoe", shared_expert_intermediate_size=16)
    good("dense", model_type="smoe", first_k_dense_replace=1, dense_intermediate_size=96)
    good("unknown-keys", anything={"a": [1, None]})
    good("integer-theta", rope_theta=500000)

    bad("shared-in-olmoe", shared_expert_intermediate_size=16)
    bad("dense-in-olmoe", first_k_dense_replace=1, dense_intermediate_size=96)
    bad("dense-no-width", model_type="smoe", first_k_dense_replace=1)
    bad("dense-too-many", model_type="smoe", first_k_dense_replace=3, dense_intermediate_size=96)
    bad("model-type", model_type="mixtral")
    bad("no-model-type", without=["model_type"])
    bad("no-hidden", without=["hidden_size"])
    bad("topk-past-experts", num_experts_per_tok=9)
    bad("topk-zero", num_experts_per_tok=0)
    bad("hidden-odd", hidden_size=60)
    bad("hidden-zero", hidden_size=0)
    bad("hidden-huge", hidden_size=2**40)
    bad("hidden-past-int64", hidden_size=2**70)
    bad("hidden-real", hidden_size=64.0)
    bad("hidden-text", hidden_size="64")
    bad("layers-negative", num_hidden_layers=-1)
    bad("heads-zero", num_attention_heads=0, num_key_value_heads=0)
    bad("grouped-heads", num_key_value_heads=2)
    bad("head-dim", head_dim=32)
    bad("eps-zero", rms_norm_eps=0)
    bad("theta-zero", rope_theta=0)
    bad("theta-differs", rope_parameters={"rope_type": "default", "rope_theta": 1.0e6})
    bad("rope-type", rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0})
    bad("rope-legacy-type", rope_parameters={"type": "linear", "factor": 2.0})
    bad("rope-nested", rope_parameters={"full_attention": {"rope_theta": 10000.0}})
    bad("rope-interleaved", rope_interleaved=True)
    bad("rope-scaling", rope_scaling={"type": "linear", "factor": 2.0})
    bad("act", hidden_act="gelu")
    bad("bias", attention_bias=True)
    bad("clip", clip_qkv=8.0)
    bad("tied-number", tie_word_embeddings=1)
    text = json.dumps(base)
    put("config", "bad-empty.json", b"")
    put("config", "bad-truncated.json", text[:-20])
    put("config", "bad-trailing.json", text + "}")
    put("config", "bad-array.json", "[" + text + "]")
    put("config", "bad-duplicate.json", text[:-1] + ', "hidden_size": 64}')
    put("config", "bad-theta-overflow.json", text.replace("10000.0", "1e999"))
    put("config", "bad-nan.json", text.replace("10000.0", "NaN"))
    put("config", "bad-not-utf8.json", b'{"\xff\xfe": 1}')


# ---- tokens: kind (0 text, 1 .bin, 2 .gz, 3 .bin.gz; + 4 evaluation, + 8 whole), context, (vocabulary - 1) / 257, the file ----

TEXT, BIN, GZ, BIN_GZ, EVAL, WHOLE = 0, 1, 2, 3, 4, 8


def token_file(tokens, magic=20240520, version=1, count=None):
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


def tokens():
    def case(name, kind, context, vocab, data):
        put("tokens", name, bytes([kind, context, vocab]) + data)

    text = bytes(range(32, 127)) * 4
    ids = [i * 577 % 1000 for i in range(300)]
    zipped = gzip.compress(text, mtime=0)
    case("good-text", TEXT, 8, 1, text)
    case("good-text-bytes", TEXT, 4, 1, bytes(range(256)))
    case("good-text-smallest", TEXT, 1, 1, b"x" * 40)
    case("good-text-eval", TEXT + EVAL, 8, 1, b"123456789")
    case("good-text-eval-rest", TEXT + EVAL, 8, 1, b"123456789012")
    case("good-text-eval-short", TEXT + EVAL, 8, 1, b"12")
    case("good-text-whole", TEXT + WHOLE, 8, 1, b"123456789")
    case("good-bin", BIN, 8, 4, token_file(ids))
    case("good-bin-eval", BIN + EVAL, 200, 4, token_file(ids))
    case("good-gz", GZ, 8, 1, zipped)
    case("good-gz-members", GZ, 8, 1, zipped + zipped)
    case("good-bin-gz", BIN_GZ, 8, 4, gzip.compress(token_file(ids), mtime=0))

    case("bad-empty", TEXT, 8, 1, b"")
    case("bad-context-zero", TEXT, 0, 1, text)
    case("bad-text-short", TEXT, 8, 1, text[:100])
    case("bad-text-eval-short", TEXT + EVAL, 8, 1, b"1")
    case("bad-text-whole-short", TEXT + WHOLE, 8, 1, b"12345678")
    case("bad-text-vocab", TEXT, 8, 0, text)
    case("bad-bin-empty", BIN, 8, 4, b"")
    case("bad-bin-header-cut", BIN, 8, 4, token_file(ids)[:1023])
    case("bad-bin-truncated", BIN, 8, 4, token_file(ids)[:-1])
    case("bad-bin-trailing", BIN, 8, 4, token_file(ids) + b"x")
    case("bad-bin-magic", BIN, 8, 4, token_file(ids, magic=20240521))
    case("bad-bin-version", BIN, 8, 4, token_file(ids, version=2))
    case("bad-bin-count-zero", BIN, 8, 4, token_file([]))
    case("bad-bin-count-negative", BIN, 8, 4, token_file(ids, count=-1))
    case("bad-bin-count-huge", BIN, 8, 4, token_file(ids, count=2**31 - 1))
    case("bad-bin-vocab", BIN, 8, 4, token_file(ids + [1029]))
    case("bad-gz-empty", GZ, 8, 1, b"")
    case("bad-gz-truncated", GZ, 8, 1, zipped[:-9])
    case("bad-gz-crc", GZ, 8, 1, zipped[:-8] + b"\0\0\0\0" + zipped[-4:])
    case("bad-gz-trailing", GZ, 8, 1, zipped + b"x")
    case("bad-gz-is-text", GZ, 8, 1, text)
    case("bad-bin-gz-truncated", BIN_GZ, 8, 4, gzip.compress(token_file(ids)[:-2], mtime=0))


# ---- tables of tokens: the table, a zero byte, a text that it encodes ----

def bpe():
    def table(merges, tokens=None):
        made = 256 + len({merge[2] for merge in merges})
        lines = [f"smoe-bpe 1 {made + 1 if tokens is None else tokens} {len(merges)}"]
        return "".join(line + "\n" for line in lines + [" ".join(map(str, merge)) for merge in merges]).encode()

    def doubled(times):  # each token twice the one before
        return [(97, 97, 256)] + [(255 + i, 255 + i, 256 + i) for i in range(1, times)]

    the = [(116, 104, 256), (256, 101, 257), (32, 257, 258)]
    twice = [(97, 98, 256), (256, 99, 257), (98, 99, 258), (97, 258, 257)]
    text = b"\0the end of the  end\n\n  12345 ,;. \xc3\xa9\xff\x80\x80"
    put("bpe", "good-merges", table(the) + text)
    put("bpe", "good-no-merge", table([]) + text)
    put("bpe", "good-no-end", table(the, 259) + text)
    put("bpe", "good-two-ways", table(twice) + b"\0abc abcbc aabc")
    put("bpe", "good-longest", table(doubled(8)) + b"\0" + b"a" * 700)
    put("bpe", "good-no-utf8", table(the) + b"\0" + b"\x80" * 700)

    lines = table(the).decode()
    put("bpe", "bad-empty", b"")
    put("bpe", "bad-magic", lines.replace("bpe", "bp"))
    put("bpe", "bad-version", lines.replace("bpe 1", "bpe 2"))
    put("bpe", "bad-no-size", "smoe-bpe 1 ")
    put("bpe", "bad-few-tokens", table([], 255))
    put("bpe", "bad-many-tokens", table([], 65537))
    put("bpe", "bad-tokens-past-merges", table(the, 261))
    put("bpe", "bad-token-past-tokens", table(the, 258))
    put("bpe", "bad-truncated", lines[:-1])
    put("bpe", "bad-line-missing", table(the)[: -len("32 257 258\n")])
    put("bpe", "bad-line-too-many", lines + "32 32 259\n")
    put("bpe", "bad-merges-huge", "smoe-bpe 1 300 9999999\n" + "1 1 256\n")
    put("bpe", "bad-number-huge", lines.replace("116", "11111111"))
    put("bpe", "bad-negative", lines.replace("116", "-1"))
    put("bpe", "bad-letters", lines.replace("116", "x"))
    put("bpe", "bad-two-numbers", lines.replace("116 104", "116"))
    put("bpe", "bad-left-unknown", table([(256, 104, 256)]))
    put("bpe", "bad-right-unknown", table([(104, 256, 256)]))
    put("bpe", "bad-end-in-merge", table([(116, 104, 256), (257, 104, 257)], 258))
    put("bpe", "bad-token-skipped", table([(116, 104, 257)]))
    put("bpe", "bad-same-pair", table([(116, 104, 256), (116, 104, 256)]))
    put("bpe", "bad-other-bytes", table([(116, 104, 256), (104, 116, 256)]))
    put("bpe", "bad-too-long", table(doubled(9)))


if __name__ == "__main__":
    safetensors()
    index()
    config()
    tokens()
    bpe()
