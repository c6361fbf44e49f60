#!/usr/bin/env python3
"""Opens a checkpoint of `smoe train` with Hugging Face transformers and compares its loss with `smoe eval`'s.

Usage: check_transformers.py SMOE CHECKPOINT FILE
Exit status: 0 the losses agree to 1e-4 relative, 1 they do not, 77 transformers or torch is not installed.
"""
import json
import subprocess
import sys

try:
    import torch
    from transformers import AutoModelForCausalLM
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)


def transformers_loss(checkpoint, data):
    """Mean loss over adjoining windows of the context, as train/data/tokens.h cuts them."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    context = model.config.max_position_embeddings
    windows = (len(data) - 1) // context
    tokens = torch.tensor(list(data[: windows * context + 1]))
    total = 0.0
    with torch.no_grad():
        for first in range(0, windows, 32):
            count = min(32, windows - first)
            inputs = tokens[first * context : (first + count) * context].view(count, context)
            targets = tokens[first * context + 1 : (first + count) * context + 1].reshape(-1)
            logits = model(inputs).logits.reshape(count * context, -1)
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return total / (windows * context)


def main():
    smoe, checkpoint, path = sys.argv[1:]
    with open(path, "rb") as file:
        theirs = transformers_loss(checkpoint, file.read())
    line = subprocess.run([smoe, "eval", "--json", "-c", checkpoint, path], capture_output=True, check=True).stdout
    ours = json.loads(line)["loss"]
    print(f"smoe {ours:.8f}  transformers {theirs:.8f}  relative difference {abs(ours / theirs - 1):.2e}")
    return 0 if abs(ours / theirs - 1) < 1e-4 else 1


if __name__ == "__main__":
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
