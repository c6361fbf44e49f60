#!/usr/bin/env python3
"""smoe.jax on a GPU: output and gradients compared with a dense layer in float32, under jit; equal bits at every call.

usage: SMOE_LIBRARY=libsmoe.so tests/python/jax_gpu.py [--device cpu]

Needs jax with CUDA, and libsmoe_xla.so beside libsmoe.so. Not part of gpu.py, because JAX and PyTorch each reserve a
share of the GPU's memory. Prints one line for each finding. Exit 0: nothing failed, 1: something did, 77: JAX finds no
GPU. --device cpu tests this script itself.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
DEVICE = parser.parse_args().device
os.environ["JAX_PLATFORMS"] = DEVICE
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import smoe.jax  # noqa: E402

T, H, I, E, K = 1000, 256, 128, 16, 4
LIMIT = 0.02  # relative error of bf16 and f16 against float32
FAILED = []


def find(what, good, figure=""):
    print(f"{what:50} {figure:>40}  {'ok' if good else 'FAILED'}", flush=True)
    if not good:
        FAILED.append(what)


def made(dtype):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda scale, *shape: (jax.random.normal(next(keys), shape) * scale).astype(dtype)
    values = dict(x=normal(1, T, H), w1=normal(H**-0.5, E, 2 * I, H), w2=normal(I**-0.5, E, H, I))
    return values | dict(router_weight=normal(H**-0.5, E, H), weights=jax.random.uniform(next(keys), (T, K)))


def dense(x, pairs, w1, w2):
    """out[t] = sum over e of pairs[t, e] expert[e](x[t])"""
    gate, up = jnp.split(jnp.einsum("th,enh->etn", x, w1), 2, -1)
    return jnp.einsum("te,etn,ehn->th", pairs, jax.nn.silu(gate) * up, w2)


def dense_experts(x, weights, w1, w2, ids):
    return dense(x, jnp.zeros((T, E)).at[jnp.arange(T)[:, None], ids].add(weights), w1, w2)


def dense_moe(x, router_weight, w1, w2):
    p = jax.nn.softmax(x @ router_weight.T)
    values, ids = jax.lax.top_k(p, K)
    return dense_experts(x, values, w1, w2, ids)


def compare(what, ours, theirs, leaves):
    """The output and the gradients of all leaves under a fixed dout."""
    dout = jax.random.normal(jax.random.key(9), (T, H)).astype(jnp.bfloat16).astype(jnp.float32)

    def both(function):
        def loss(leaves):
            out = function(**leaves).astype(jnp.float32)
            return (out * dout).sum(), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(leaves)
        return {"out": out} | gradients

    found, again = both(ours), both(ours)
    find(f"{what}: repeats bit for bit", all(bool((found[name] == again[name]).all()) for name in found))
    leaves = {name: value.astype(jnp.float32) for name, value in leaves.items()}
    with jax.default_matmul_precision("highest"):
        exact = both(theirs)
    distance = lambda a, b: float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
    errors = {name: distance(found[name].astype(jnp.float32), exact[name]) for name in exact}
    good = max(errors.values()) < LIMIT and all(error == error for error in errors.values())
    find(f"{what}: output and gradients", good, ", ".join(f"{error:.1e}" for error in errors.values()))


def main():
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        print("no GPU:", str(error).splitlines()[0])
        return 77
    print("jax", jax.__version__, smoe.build_info(), device)
    ids = jax.lax.top_k(jax.random.uniform(jax.random.key(5), (T, E)), K)[1]
    for dtype in (jnp.bfloat16, jnp.float16 if DEVICE == "cuda" else jnp.float32):
        values = made(dtype)
        pick = lambda *names: {name: values[name] for name in names}
        compare(
            f"experts {jnp.dtype(dtype).name}", lambda x, weights, w1, w2: smoe.jax.experts(x, ids, weights, w1, w2),
            lambda **leaves: dense_experts(**leaves, ids=ids), pick("x", "weights", "w1", "w2"),
        )  # fmt: skip
        compare(
            f"moe {jnp.dtype(dtype).name}", lambda **leaves: smoe.jax.moe(**leaves, top_k=K)[0],
            dense_moe, pick("x", "router_weight", "w1", "w2"),
        )  # fmt: skip
    print(f"{len(FAILED)} failed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
