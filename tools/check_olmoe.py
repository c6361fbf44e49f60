#!/usr/bin/env python3
"""Checks smoe with a full-size OLMoE-1B-7B with random weights, on a GPU. Transformers writes the model in bf16 shards
and evaluates it, `smoe eval` evaluates the same files, and `smoe train --from` takes five steps.

Usage: check_olmoe.py SMOE [tiny]      tiny: two small layers on the CPU
Works in the folder where it is called, and leaves olmoe/ (14 GB) and olmoe_run/ there. At most 110 s on an H200 (the limit of
tools/gpu.sh). Needs torch, Transformers and numpy.
Exit status: 0 the losses agree to 2e-3 relative and training worked, 1 they do not, 2 usage, 3 smoe failed, 77 a package is missing.
"""
from __future__ import annotations

import json
import subprocess
import sys
import time

try:
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

WINDOWS, VOCABULARY, LIMIT = 4, 50304, 2e-3
FULL = dict(num_hidden_layers=16, hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
            num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=4096)  # fmt: skip
TINY = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_experts=8, num_experts_per_tok=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128)  # fmt: skip


def draw_model(sizes: dict, device: str):
    """Random bf16 weights, drawn on the device."""
    config = AutoConfig.for_model(
        "olmoe", **sizes, vocab_size=VOCABULARY, norm_topk_prob=False, clip_qkv=None, tie_word_embeddings=False
    )
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def write_tokens(path: str, tokens: np.ndarray) -> None:
    header = np.zeros(256, np.int32)  # llm.c's: magic number, version, tokens
    header[:3] = 20240520, 1, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.astype(np.uint16).tobytes())


def transformers_loss(model, tokens: np.ndarray, context: int, device: str) -> float:
    """Mean loss over adjoining windows, as `smoe eval` cuts them. tokens: (WINDOWS * context + 1)."""
    ids = torch.tensor(tokens, device=device)
    losses = []
    with torch.no_grad():
        for first in range(0, WINDOWS * context, context):
            logits = model(ids[None, first : first + context]).logits[0].float()  # (context, VOCABULARY)
            losses.append(torch.nn.functional.cross_entropy(logits, ids[first + 1 : first + context + 1]).item())
    return sum(losses) / WINDOWS


def call(*command: str) -> dict:
    """Runs smoe and returns the JSON object that it writes. Ends the program with status 3 if smoe fails."""
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(command[:2])}: exit status {done.returncode}: {done.stderr[-300:]}")
        sys.exit(3)
    print(f"{' '.join(command[1:2])}: {time.time() - start:.1f} s")
    return json.loads(done.stdout)


def evaluate(smoe: str, device: str, theirs: float) -> bool:
    ours = call(smoe, "eval", "--json", f"--device={device}", "-c", "olmoe", "data.bin")["loss"]
    difference = abs(ours / theirs - 1)
    print(f"loss by Transformers {theirs:.5f}, by smoe {ours:.5f}, relative difference {difference:.2e} (limit {LIMIT:g})")
    return difference < LIMIT


def train(smoe: str, device: str) -> bool:
    """Five steps on the evaluated tokens, repeated: the losses have to be finite."""
    precision = ["--precision", "bf16"] if device == "cuda" else []
    options = "--batch 2 --steps 5 --logs 5 --lr 1e-5 --warmup 0 --checkpoints 0 --evaluations 0".split()
    run = ["--from", "olmoe", "--out", "olmoe_run", f"--device={device}", *precision, *options, "train.bin"]
    result = call(smoe, "train", "--json", "-q", *run)
    with open("olmoe_run/train.jsonl") as lines:
        losses = [json.loads(line)["loss"] for line in lines]
    print("five steps:", *(f"{loss:.4f}" for loss in losses), f"with {result.get('device_gb')} GB of GPU memory")
    return all(np.isfinite(losses))


def main() -> int:
    smoe, tiny = sys.argv[1], sys.argv[2:] == ["tiny"]
    sizes, device = (TINY, "cpu") if tiny else (FULL, "cuda")
    context = sizes["max_position_embeddings"]
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, WINDOWS * context + 1)
    write_tokens("data.bin", tokens)
    write_tokens("train.bin", np.tile(tokens, 8))
    start = time.time()
    model = draw_model(sizes, device)
    model.save_pretrained("olmoe", max_shard_size="100KB" if tiny else "4GB")
    count = sum(weights.numel() for weights in model.parameters())
    print(f"{count / 1e9:.2f} G weights drawn and written in {time.time() - start:.1f} s")
    theirs = transformers_loss(model, tokens, context, device)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return 0 if evaluate(smoe, device, theirs) and train(smoe, device) else 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["tiny"]):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
