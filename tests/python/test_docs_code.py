"""The Python code that the documents show: every block runs on the CPU, in a process of its own, and every name of smoe in the
text exists."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]

# What runs before a block that needs this package: the values that the reader has.
GIVEN = {
    "transformers": """
import sys, transformers
path = sys.argv[1]  # an empty folder
sizes = dict(vocab_size=256, hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=24, num_experts=8)
transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes)).save_pretrained(path)
del sys, transformers
""",
    "jax": """
import jax
x, weights, ids = jax.numpy.ones((6, 16)), jax.numpy.ones((6, 2)), jax.numpy.zeros((6, 2), int)
router_weight, w1, w2 = jax.numpy.ones((8, 16)), jax.numpy.ones((8, 16, 16)), jax.numpy.ones((8, 16, 8))
del jax
""",
}


def needed(block):
    """The package that a block needs besides smoe."""
    return next((module for module in GIVEN if f"import smoe.{module}" in block), "torch")


def blocks():
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, block.start()) + 1
            found.append(pytest.param(block[1], id=f"{document}:{line}:{needed(block[1])}"))
    return found


@pytest.mark.parametrize("block", blocks())
def test_every_block_runs(block, tmp_path):
    compile(block, "block", "exec")
    package = needed(block)
    pytest.importorskip(package)
    command = [sys.executable, "-c", GIVEN.get(package, "") + block, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr


def names():
    """The names of smoe in the documents' code, such as smoe.compat.grouped_experts."""
    found = set()
    for document in DOCUMENTS:
        for code in re.findall(r"`([^`\n]+)`", (ROOT / document).read_text()):
            listed = re.match(r"from (smoe[\w.]*) import ([\w, ]+)$", code)
            parts = [f"{listed[1]}.{name}" for name in listed[2].split(", ")] if listed else []
            found.update(parts or re.findall(r"(?<![\w./:])smoe(?!\.h\b)(?:\.[A-Za-z_]\w*)+", code))
    return sorted(found)


@pytest.mark.parametrize("name", names())
def test_every_name_exists(name):
    module = name.split(".")[1]
    pytest.importorskip(module if module in ("transformers", "torchtitan", "jax") else "torch")
    pkgutil.resolve_name(name)
