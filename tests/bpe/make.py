#!/usr/bin/env python3
"""Writes the table, the text and the tokens of tests/test_bpe.c into this folder, with the package `tokenizers`.

Run it again only if the rules of tools/make_tokens.py have changed.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TEXT = """The weights of a token's experts are the softmax over the kept logits, and the other experts have none.
\tfor (int i = 0; i < 1234567; i++)\r
        out[i] = in[i] * 0.5f;   // ====================================================================== the end

  Grüße, naïve café; это модель, 模型と言語。 🙂🙂 The the THE 3.14159 1e-5  x=7\tand\u00a0so on"""

with tempfile.TemporaryDirectory() as folder:
    tool = HERE.parents[1] / "tools" / "make_tokens.py"
    text = Path(folder) / "text.txt"
    text.write_bytes(TEXT.encode())
    subprocess.run([sys.executable, tool, folder, text, text, "--vocab", "320", "--quiet"], check=True)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    (HERE / "table.txt").write_bytes((Path(folder) / "bpe.txt").read_bytes())
(HERE / "text.txt").write_bytes(TEXT.encode())
(HERE / "tokens.txt").write_text("\n".join(map(str, tokenizer.encode(TEXT).ids)) + "\n")
