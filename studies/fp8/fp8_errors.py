#!/usr/bin/env python3
"""Errors of a layer's output and gradients in fp8 against f32, on the CPU: the library itself (SMOE_COMPUTE_F8 and _F8_DGRAD of
src/smoe_f8.h), and an emulation in PyTorch in which each operand may be left in 16 bits or quantised in another way.

Usage: fp8_errors.py [--records FILE] [--only TABLE] [--quick]     SMOE_LIBRARY names libsmoe.so, PYTHONPATH has python/
  --records FILE   appends one JSON line a result
  --only TABLE     choices, stress, exponents or means
  --quick          small layers, few micro-batches: shows that the library agrees with the emulation; no other limit

Errors are relative Frobenius norms in percent. Exit status: 0 every limit holds, 1 one does not.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import sys

import torch
from smoe import native
from torch import Tensor

F8, F8_DGRAD = 10, 11
A_FEATURES, DH_FEATURES = 128, 256
TENSORS = ("out", "dx", "ds", "dw1", "db1", "dw2", "db2")
LIMIT, MEAN_LIMIT, STRESS_FACTOR = 12.0, 1.5, 1.3
OUTLIERS = ("4 channels x 1000", "3 features x 100", "3 features x 100, W2 / 10^4")
KINDS = ("plain", "tokens exp(3 N)", "8 tokens x 100", *OUTLIERS)


# ---- e4m3 ----


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def scale_of(amax: Tensor) -> Tensor:
    """2^k, the least with amax / 2^k <= 448."""
    fraction, exponent = torch.frexp(amax)
    k = (exponent - 9 + (fraction > 0.875)).clamp_min(-126)
    return torch.ldexp(torch.ones_like(amax), torch.where(amax == 0, torch.full_like(k, -126), k))


def groups(x: Tensor, size: int) -> Tensor:
    """(rows, groups, size), filled with zeros"""
    rows, columns = x.shape
    count = -(-columns // size)
    return torch.nn.functional.pad(x, (0, count * size - columns)).view(rows, count, size)


def ungroup(x: Tensor, columns: int) -> Tensor:
    return x.reshape(x.shape[0], -1)[:, :columns]


def rounded_by_groups(x: Tensor, size: int) -> Tensor:
    grouped = groups(x, size)
    scale = scale_of(grouped.abs().amax(-1, keepdim=True))
    return ungroup(e4m3(grouped / scale) * scale, x.shape[1])


def rounded_dh(dh: Tensor, size: int) -> Tensor:
    """Gate and up columns of a group of features have one scale."""
    n = dh.shape[1] // 2
    both = torch.cat([groups(dh[:, :n], size), groups(dh[:, n:], size)], -1)
    scale = scale_of(both.abs().amax(-1, keepdim=True))
    gate, up = (e4m3(both / scale) * scale).split(size, -1)
    return torch.cat([ungroup(gate, n), ungroup(up, n)], 1)


def rounded_matrix(w: Tensor, size: int = 0) -> Tensor:
    """With one scale, or in blocks of size x size."""
    if size:
        blocks = [rounded_matrix(block) for rows in w.split(size) for block in rows.split(size, 1)]
        count = -(-w.shape[1] // size)
        return torch.cat([torch.cat(blocks[i : i + count], 1) for i in range(0, len(blocks), count)])
    scale = scale_of(w.abs().amax())
    return e4m3(w / scale) * scale


# ---- Inputs ----


class Batch:
    """A layer with SwiGLU, its tokens and the gradient of its output; what is stored in bf16 is rounded to it."""

    def __init__(self, kind: str, tokens: int, hidden: int, features: int, seed: int = 1, experts: int = 4, topk: int = 2):
        weights, draw = torch.Generator().manual_seed(1000), torch.Generator().manual_seed(seed)
        self.w1 = torch.randn(experts, 2 * features, hidden, generator=weights) / math.sqrt(hidden)
        self.w2 = torch.randn(experts, hidden, features, generator=weights) / math.sqrt(features)
        self.b1 = 0.1 * torch.randn(experts, 2 * features, generator=weights)
        self.b2 = 0.1 * torch.randn(experts, hidden, generator=weights)
        gains = torch.exp(0.5 * torch.randn(hidden, generator=weights))
        wr = torch.randn(experts, hidden, generator=weights) / math.sqrt(hidden)
        x = gains * torch.randn(tokens, hidden, generator=draw)
        x /= x.pow(2).mean(1, keepdim=True).sqrt()
        self.weights, self.ids = (x @ wr.T).softmax(1).topk(topk, 1)
        self.ids = self.ids.int()
        dout = 1e-4 * torch.randn(tokens, hidden, generator=draw)
        of_token = torch.randn(tokens, 1, generator=draw)
        dout *= torch.exp((3 if kind == "tokens exp(3 N)" else 1) * of_token)
        if kind == "dO from X":  # gradients of all batches have a part in common
            dout = 1e-4 * x @ torch.randn(hidden, hidden, generator=weights) / math.sqrt(hidden)
        if kind == "tokens exp(3 N)":
            x *= torch.exp(0.5 * torch.randn(tokens, 1, generator=draw))
        if kind == "8 tokens x 100":
            x[:8] *= 100
            dout[:8] *= 100
        if kind == "4 channels x 1000":
            x[:, :4] *= 1000
        if kind.startswith("3 features"):
            for first in (0, features):
                self.w1[:, first : first + 3] *= 100
        if kind.endswith("10^4"):
            self.w2[:, :, :3] /= 1e4
        self.x, self.dout = x, dout
        for name in ("x", "dout", "w1", "w2", "b1", "b2"):
            setattr(self, name, getattr(self, name).bfloat16().float())

    def with_rounded_weights(self) -> Batch:
        batch = copy.copy(self)
        batch.w1, batch.w2 = (torch.stack([rounded_matrix(w) for w in all_w]) for all_w in (self.w1, self.w2))
        return batch

    def rows(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of an expert's rows, the index of each among the token's experts, and the row weights."""
        tokens, k = (self.ids == expert).nonzero(as_tuple=True)
        return tokens, k, self.weights[tokens, k]


# ---- The library ----


class LayerF8(ctypes.Structure):
    _fields_ = [("layer", native.Layer), ("compute", ctypes.c_int)]


class SizesF8(ctypes.Structure):
    _fields_ = [("sizes", native.Sizes), ("weights_f8_bytes", ctypes.c_uint64)]


class ForwardF8(ctypes.Structure):
    _fields_ = [("args", native.ForwardArgs), ("weights_f8", ctypes.c_void_p), ("weights_f8_size", ctypes.c_uint64)]


class BackwardF8(ctypes.Structure):
    _fields_ = [("args", native.BackwardArgs), ("weights_f8", ctypes.c_void_p), ("weights_f8_size", ctypes.c_uint64)]


def aligned(size: int) -> Tensor:
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    skip = -memory.data_ptr() % 64
    return memory[skip : skip + size]


def quantized_weights(batch: Batch, size: int) -> Tensor:
    """What moe_quantize_weights writes, which libsmoe.so does not export yet, without the transposed copies, which the CPU does not
    read."""
    memory, at = aligned(size), 0
    scales = [scale_of(w.abs().amax((1, 2))) for w in (batch.w1, batch.w2)]
    for w, scale in zip((batch.w1, batch.w2), scales, strict=True):
        codes = (w / scale[:, None, None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten()
        memory[at : at + len(codes)] = codes
        at += 2 * (-(-len(codes) // 256) * 256)
    experts, hidden, features = batch.w2.shape
    of_rows = groups(batch.w1.abs().amax(2).view(experts, 2, features).amax(1), DH_FEATURES).amax(2)
    of_columns = groups(batch.w2.abs().amax(1), DH_FEATURES).amax(2)
    for scale in (*scales, scale_of(of_rows).flatten(), scale_of(of_columns).flatten()):
        memory[at : at + 4 * len(scale)] = scale.view(torch.uint8)
        at += -(-4 * len(scale) // 256) * 256
    assert at < size  # what the CUDA backend works with follows
    return memory


class Library:
    def __init__(self) -> None:
        self.context = native.create_context("cpu", threads=1)

    def check(self, status: int) -> None:
        if status:
            raise native.last_error(self.context, status)

    def run(self, batch: Batch, dtype: torch.dtype, compute: int = 0) -> dict[str, Tensor]:
        tokens, hidden = batch.x.shape
        experts, _, features = batch.w2.shape
        kind = native.TYPES["bf16" if dtype == torch.bfloat16 else "f32"]
        layer = LayerF8(native.Layer(), compute)
        for name, value in dict(
            tokens=tokens, hidden=hidden, intermediate=features, experts=experts, topk=batch.ids.shape[1], dtype=kind,
            entry=native.ENTRIES["from_topk"], gradient_type=native.TYPES["f32"],
        ).items():  # fmt: skip
            setattr(layer.layer, name, value)
        sizes, forward, backward = SizesF8(native.Sizes()), ForwardF8(native.ForwardArgs()), BackwardF8(native.BackwardArgs())
        if compute:
            for whole, part in ((layer, layer.layer), (sizes, sizes.sizes), (forward, forward.args), (backward, backward.args)):
                part.struct_size = ctypes.sizeof(whole)
        self.check(native.library.smoe_query_sizes(self.context, ctypes.byref(layer), ctypes.byref(sizes)))
        given = {name: getattr(batch, name).to(dtype) for name in ("x", "dout", "w1", "w2", "b1", "b2")}
        of_token = {"topk_ids": batch.ids, "topk_weights": batch.weights}
        wanted = {f"d{name}": torch.zeros_like(given[name], dtype=torch.float32) for name in ("w1", "b1", "w2", "b2")}
        wanted |= {"dx": torch.zeros_like(given["x"]), "dtopk_weights": torch.zeros_like(batch.weights)}
        out, saved = torch.zeros_like(given["x"]), aligned(sizes.sizes.saved_buffer_bytes)
        f, b = forward.args, backward.args
        for name in ("x", "w1", "b1", "w2", "b2"):
            setattr(f, name, given[name].data_ptr())
        for name, tensor in of_token.items():
            setattr(f, name, tensor.data_ptr())
        for name in ("x", "w1", "w2", "b2", "dout"):
            setattr(b, name, given[name].data_ptr())
        for name, tensor in wanted.items():
            setattr(b, name, tensor.data_ptr())
        b.topk_ids, f.out = batch.ids.data_ptr(), out.data_ptr()
        scratch = [aligned(sizes.sizes.scratch_forward_bytes), aligned(sizes.sizes.scratch_backward_bytes)]
        for args, memory in zip((f, b), scratch, strict=True):
            args.saved, args.saved_size = saved.data_ptr(), len(saved)
            args.scratch, args.scratch_size = memory.data_ptr(), len(memory)
        if compute:
            weights = quantized_weights(batch, sizes.weights_f8_bytes)
            for args in (forward, backward):
                args.weights_f8, args.weights_f8_size = weights.data_ptr(), len(weights)
        run = native.library
        self.check(run.smoe_layer_forward(self.context, ctypes.byref(layer), ctypes.byref(forward), None))
        self.check(run.smoe_layer_backward(self.context, ctypes.byref(layer), ctypes.byref(backward), None))
        wanted["ds"] = wanted.pop("dtopk_weights")
        return {name: tensor.float() for name, tensor in (wanted | {"out": out}).items()}


# ---- The emulation: every operand may be quantised or stay in bf16 ----

RECIPE = {"x": True, "dout": True, "w": True, "a": A_FEATURES, "dh": DH_FEATURES, "dw": "rows"}


CHANGES = {
    "F8": {},
    "X in bf16 (not in dw)": {"x": False},
    "dO in bf16 (not in dw)": {"dout": False},
    "W in bf16": {"w": False},
    "A in bf16": {"a": None},
    "dH in bf16 (not in dw)": {"dh": None},
    "X, W in bf16 (not in dw)": {"x": False, "w": False},
    "up in bf16": {"x": False, "up": False},
    "dw in bf16 (F8_DGRAD)": {"dw": None},
    "A: 256 features a scale": {"a": 256},
    "A: 64 features a scale": {"a": 64},
    "dH: 128 features a scale": {"dh": 128},
    "1x128, W 128x128, dw in bf16": {"tokens": 128, "block": 128, "dh": 128, "dw": None},
}
EXPONENTS = {f"dw: one exponent, 2^{above} above": {"dw": "common", "above": above} for above in (0, 2, 4, 6, 8, 10)}


def dw_operands(values: Tensor, tokens: Tensor, token_scale: Tensor, choice: dict) -> Tensor:
    """sum over the rows of values^T tokens, quantised as src/f8.h says: one exponent for all rows, `above` over the least."""
    own = scale_of(values.abs().amax(1)) * token_scale
    common = own.max() * 2.0 ** choice.get("above", 0) if choice["dw"] == "common" else own.min()
    w = torch.maximum(own, common)
    right = e4m3(values * (token_scale / w)[:, None])
    left = e4m3(e4m3(tokens / token_scale[:, None]) * (w / w.max())[:, None])
    return w.max() * (right.T @ left)


def emulate(batch: Batch, choice: dict) -> dict[str, Tensor]:
    hidden, n = batch.x.shape[1], batch.w2.shape[2]

    def half(t: Tensor) -> Tensor:
        return t.bfloat16().float() if choice.get("bf16", True) else t

    of_token = {name: scale_of(getattr(batch, name).abs().amax(1)) for name in ("x", "dout")}
    size = choice.get("tokens", hidden)  # columns of X and dO that have one scale
    x, dout = (rounded_by_groups(getattr(batch, name), size) if choice.get(name) else getattr(batch, name) for name in ("x", "dout"))
    got = {name: torch.zeros_like(getattr(batch, name[1:])) for name in ("dw1", "db1", "dw2", "db2")}
    got |= {"out": torch.zeros_like(batch.x), "dx": torch.zeros_like(batch.x), "ds": torch.zeros_like(batch.weights)}
    for e in range(len(batch.w1)):
        t, k, s = batch.rows(e)
        w1, w2 = (rounded_matrix(w[e], choice.get("block", 0)) if choice.get("w") else w[e] for w in (batch.w1, batch.w2))
        h = half(x[t] @ (w1 if choice.get("up", True) else batch.w1[e]).T + batch.b1[e])
        gate, up = h.split(n, 1)
        sigmoid = gate.sigmoid()
        a = gate * sigmoid * up
        a8 = rounded_by_groups(a, choice["a"]) if choice.get("a") else half(a)
        got["out"].index_add_(0, t, s[:, None] * half(a8 @ w2.T + batch.b2[e]))
        da = dout[t] @ w2
        got["ds"][t, k] = (da * a).sum(1) + batch.dout[t] @ batch.b2[e]
        da = da * s[:, None]
        dh = torch.cat([da * up * sigmoid * (1 + gate * (1 - sigmoid)), da * gate * sigmoid], 1)
        dh8 = rounded_dh(dh, choice["dh"]) if choice.get("dh") else half(dh)
        weighted = s[:, None] * a
        got["dx"].index_add_(0, t, half(dh8 @ w1))
        got["db2"][e] = (s[:, None] * batch.dout[t]).sum(0)
        if not choice.get("dw"):
            got["dw1"][e], got["db1"][e] = half(dh).T @ batch.x[t], half(dh).sum(0)
            got["dw2"][e] = batch.dout[t].T @ half(weighted)
            continue
        got["db1"][e] = dh8.sum(0)
        for j in range(0, n, DH_FEATURES):
            columns = torch.arange(j, min(n, j + DH_FEATURES))
            both = torch.cat([columns, columns + n])
            got["dw1"][e][both] = dw_operands(dh[:, both], batch.x[t], of_token["x"][t], choice)
            got["dw2"][e][:, columns] = dw_operands(weighted[:, columns], batch.dout[t], of_token["dout"][t], choice).T
    return got


def spare_exponents(batch: Batch) -> Tensor:
    """(2, experts x groups): of dW1 and of dW2"""
    d, n = batch.x.shape[1], batch.w2.shape[2]
    scale_x, scale_dout = (scale_of(t.abs().amax(1)) for t in (batch.x, batch.dout))
    spare: list[list[float]] = [[], []]
    for e in range(len(batch.w1)):
        t, _, s = batch.rows(e)
        size = (scale_dout[t].log2() + s.log2().floor() + 2 * scale_x[t].log2()).max() + math.ceil(math.log2(d)) + 19
        gate, up = (batch.x[t] @ batch.w1[e].T + batch.b1[e]).split(n, 1)
        sigmoid, da = gate.sigmoid(), s[:, None] * (batch.dout[t] @ batch.w2[e])
        both = torch.cat([da * up * sigmoid * (1 + gate * (1 - sigmoid)), da * gate * sigmoid], 1).view(-1, 2, n)
        for j in range(0, n, DH_FEATURES):
            columns = slice(j, min(n, j + DH_FEATURES))
            of_features = batch.w1[e].view(2, n, d)[:, columns], batch.w2[e][:, columns]
            log_w1, log_w2 = (scale_of(w.abs().amax()).log2() for w in of_features)
            of_dh = scale_of(both[:, :, j : j + DH_FEATURES].abs().amax((1, 2))) * scale_x[t]
            of_a = scale_of((s[:, None] * gate * sigmoid * up)[:, j : j + DH_FEATURES].abs().amax(1)) * scale_dout[t]
            spare[0].append(float(size + log_w1 + log_w2 - of_dh.max().log2()))
            spare[1].append(float(size + 2 * log_w1 - of_a.max().log2()))
    return torch.tensor(spare)


# ---- Tables ----


def percent(got: Tensor, want: Tensor) -> float:
    return 100 * float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300))


class Study:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.library, self.records, self.quick, self.missed = Library(), arguments.records, arguments.quick, []
        self.shape = (256, 128, 64) if self.quick else (2048, 768, 256)

    def record(self, table: str, name: str, errors: dict[str, float]) -> None:
        print(f"{name:60s}" + "".join(f"{errors[key]:9.2f}" for key in errors), flush=True)
        if self.records:
            with open(self.records, "a", encoding="utf-8") as file:
                line = {key: float(f"{value:.4g}") for key, value in errors.items()}
                file.write(json.dumps({"table": table, "name": name} | line) + "\n")

    def head(self, title: str, columns: tuple[str, ...]) -> None:
        print(f"\n{title}\n{'':60s}" + "".join(f"{name:>9s}" for name in columns))

    def limit(self, what: str, value: float, limit: float, always: bool = False) -> None:
        if not value <= limit and (always or not self.quick):
            self.missed.append(f"{what}: {value:.2f} %, limit {limit:.2f} %")

    def errors(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
        return {name: percent(got[name], want[name]) for name in TENSORS}

    def choices(self) -> None:
        batch = Batch("plain", *self.shape)
        want = self.library.run(batch, torch.float32)
        self.head("Plain data: the library, then choices (emulated)", TENSORS)
        kept = {}
        for name, compute in (("library, bf16", 0), ("library, F8_DGRAD", F8_DGRAD), ("library, F8", F8)):
            kept[name] = self.library.run(batch, torch.bfloat16, compute)
            self.record("choices", name, self.errors(kept[name], want))
        recipe = emulate(batch, RECIPE)
        apart = self.errors(kept["library, F8"], recipe)
        self.record("choices", "library, F8, against the emulation", apart)
        for name in TENSORS:
            self.limit(f"the library's {name} against the emulation", apart[name], 2.0, always=True)
        for name, change in (CHANGES | EXPONENTS).items():
            self.record("choices", name, self.errors(emulate(batch, RECIPE | change), want))

    def stress(self) -> None:
        self.head("Stress: the library", TENSORS)
        plain = None
        for kind in KINDS:
            batch = Batch(kind, *self.shape)
            want = self.library.run(batch, torch.float32)
            for name, compute in (("F8", F8), ("F8_DGRAD", F8_DGRAD)):
                errors = self.errors(self.library.run(batch, torch.bfloat16, compute), want)
                self.record("stress", f"{kind}: {name}", errors)
                if compute == F8 and plain is None:
                    plain = errors
                for tensor in TENSORS:
                    limit = STRESS_FACTOR * plain[tensor] + 0.01 if kind in OUTLIERS else LIMIT
                    self.limit(f"{kind}, {name}, {tensor}", errors[tensor], min(limit, LIMIT))
            if kind in OUTLIERS:
                for name, change in CHANGES.items():
                    self.record("stress", f"{kind}: emulated, {name}", self.errors(emulate(batch, RECIPE | change), want))

    def exponents(self) -> None:
        """How far the exponent that src/f8.h expects for all rows of an expert is above the one that the largest row needs; below 0
        dw needs row factors."""
        columns = ("dw1 least", "dw1 most", "dw2 least", "dw2 most", "factors")
        self.head("Expected exponents, less the needed ones; % of tiles with row factors", columns)
        shapes = (self.shape,) if self.quick else (self.shape, (1024, 1536, 256), (1024, 2048, 1024), (1024, 4096, 512))
        for kind in KINDS:
            for shape in shapes:
                spare = spare_exponents(Batch(kind, *shape))
                values = [*torch.aminmax(spare[0]), *torch.aminmax(spare[1]), 100 * (spare < 0).float().mean()]
                name = f"{kind}, d {shape[1]}, n {shape[2]}"
                self.record("exponents", name, dict(zip(columns, map(float, values), strict=True)))

    def means(self) -> None:
        """The error of the mean gradient of M micro-batches in units of one micro-batch's gradient: an unbiased error falls as
        1 / sqrt(M). `of the mean` is in units of the mean gradient; with dO from X all gradients have a part in common, and the
        weights' own rounding, which is the same in every batch, remains. `rounded W` is the error against f32 with rounded weights."""
        tensors = ("dw1", "db1", "dw2", "db2")
        self.head("The mean of M micro-batches: the library, F8", tensors)
        count = 4 if self.quick else 64
        tokens, hidden, features = self.shape
        for kind in (*KINDS[:3], "dO from X"):
            common = kind == "dO from X"
            wrong, of_rounded, right = ({name: 0.0 for name in tensors} for _ in range(3))
            one = {name: 0.0 for name in tensors}
            for m in range(1, count + 1):
                batch = Batch(kind, tokens // 4, hidden, features, seed=m)
                want, got = self.library.run(batch, torch.float32), self.library.run(batch, torch.bfloat16, F8)
                rounded = self.library.run(batch.with_rounded_weights(), torch.float32) if common else want
                for name in tensors:
                    wrong[name] = wrong[name] + got[name].double() - want[name].double()
                    of_rounded[name] = of_rounded[name] + got[name].double() - rounded[name].double()
                    right[name] = right[name] + want[name].double()
                    one[name] += float(want[name].double().norm() ** 2)
                if m not in (1, 4, 16, count):
                    continue
                errors = {name: 100 * float(wrong[name].norm()) / m / math.sqrt(one[name] / m) for name in tensors}
                self.record("means", f"{kind}, M {m}", errors)
                for what, sums in (("of the mean", wrong), ("of the mean, rounded W", of_rounded)):
                    if common:
                        of_mean = {name: 100 * float(sums[name].norm() / right[name].norm()) for name in tensors}
                        self.record("means", f"{kind}, M {m}, {what}", of_mean)
                if m == count and not common:
                    for name in tensors:
                        self.limit(f"mean of {m}, {kind}, {name}", errors[name], MEAN_LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--records")
    parser.add_argument("--only", choices=("choices", "stress", "exponents", "means"))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    study = Study(arguments)
    torch.set_num_threads(1)
    for table in (study.choices, study.stress, study.exponents, study.means):
        if arguments.only in (None, table.__name__):
            table()
    print("\n" + ("\n".join(["missed:", *study.missed]) if study.missed else "every limit holds"))
    return 1 if study.missed else 0


if __name__ == "__main__":
    sys.exit(main())
