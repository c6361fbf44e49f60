"""Shared by the tests, which import the package from python/ and load the library that SMOE_LIBRARY names."""

import sys
from pathlib import Path

import pytest

try:
    import torch

    torch.set_num_threads(2)
except ImportError:  # test_tokenize.py runs without torch
    torch = None

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def layer():
    """Random float32 inputs of a layer, leaves that require gradients: layer(T=..., ...) -> dict."""
    return make_layer


def make_layer(T=48, H=32, I=16, E=8, K=2, gated=True, biases=False, dtype=None, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or torch.float32

    def leaf(*shape, scale=0.4):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype).requires_grad_()

    width = 2 * I if gated else I
    made = dict(x=leaf(T, H, scale=1), w1=leaf(E, width, H), w2=leaf(E, H, I))
    made["weights"] = torch.rand(T, K, generator=generator).to(device).requires_grad_()
    made["ids"] = torch.rand(T, E, generator=generator).topk(K, -1).indices.to(device)
    made["router_weight"] = leaf(E, H)
    made["b1"] = leaf(E, width) if biases else None
    made["b2"] = leaf(E, H) if biases else None
    return made


@pytest.fixture
def calls(monkeypatch):
    """A list with one item for each forward of the library, so that a silent fallback to eager fails the test."""
    from smoe._context import Context

    counted, forward = [], Context.forward
    monkeypatch.setattr(Context, "forward", lambda self, *fields: counted.append(1) or forward(self, *fields))
    return counted
