#!/usr/bin/env python3
"""The Python package on a GPU: right answers under everything PyTorch does, host times, memory, Transformers.

usage: SMOE_LIBRARY=libsmoe.so tests/python/gpu.py [--only NAME[,NAME...]] [--list] [--device cpu [--bf16]]

Needs torch; the parts on Transformers need it too. One line a finding: part, what, figure, limit, verdict. A part that
raises is one finding that failed; the next part runs. Exit 0: nothing failed, 1: something did. --device cpu runs what can
run there, in float32: a dry run of the script itself. Meant to take under four minutes on one H200.
"""

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

import reference  # noqa: E402
import torch  # noqa: E402
import torch._dynamo.testing  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import smoe  # noqa: E402
import smoe.functional  # noqa: E402, registers torch.ops.smoe
from smoe import _context, _layout, _ops, native  # noqa: E402

DEVICE, DTYPE = "cuda", torch.bfloat16
PARTS, FINDINGS, CURRENT = {}, [], ""


def part(cuda_only=False):
    def register(function):
        PARTS[function.__name__] = (function, cuda_only)
        return function

    return register


def find(what, good, figure="", limit=""):
    FINDINGS.append((CURRENT, what, figure, limit, bool(good)))
    print(f"{CURRENT:14} {what:58} {figure!s:>24} {limit!s:>16}  {'ok' if good else 'FAILED'}", flush=True)


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def randn(*shape, scale=1.0, dtype=None, grad=False, seed=None):
    generator = torch.Generator(DEVICE).manual_seed(seed) if seed is not None else None
    made = torch.randn(*shape, device=DEVICE, generator=generator) * scale
    return made.to(dtype or DTYPE).requires_grad_(grad)


def error(found, exact):
    return ((found.double() - exact.double()).norm() / (exact.double().norm() + 1e-30)).item()


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def layer(T=512, H=256, I=128, E=16, K=4, gated=True, biases=False, dtype=None, seed=0):
    torch.manual_seed(seed)
    width = 2 * I if gated else I
    leaf = lambda *shape, scale: randn(*shape, scale=scale, dtype=dtype, grad=True)
    made = dict(x=leaf(T, H, scale=1), w1=leaf(E, width, H, scale=H**-0.5), w2=leaf(E, H, I, scale=I**-0.5))
    made["ids"] = torch.rand(T, E, device=DEVICE).topk(K, -1).indices
    made["weights"] = torch.rand(T, K, device=DEVICE).requires_grad_()
    made["b1"] = leaf(E, width, scale=0.5) if biases else None
    made["b2"] = leaf(E, H, scale=0.5) if biases else None
    return made


def run(function, inputs, seed=1, **options):
    """Output and gradients of all leaves under a fixed dout."""
    out = function(**inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    dout = randn(*out.shape, dtype=torch.float32, seed=seed).to(out.dtype)
    names = [name for name, value in inputs.items() if value is not None and value.requires_grad]
    return dict(zip(["out", *names], [out.detach(), *torch.autograd.grad(out, [inputs[n] for n in names], dout)]))


def doubled(inputs):
    as_double = lambda v: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
    return {name: None if value is None else as_double(value) for name, value in inputs.items()}


# ---- numerics ----


def against_f64(what, ours, theirs, inputs, **options):
    """No further from float64 than 1.2 times eager PyTorch in the same dtype, or 2e-3 (2e-5 in float32)."""
    exact = run(theirs, doubled(inputs), **options)
    found, eager = run(ours, inputs, **options), run(theirs, inputs, **options)
    floor = 2e-5 if inputs["w1"].dtype == torch.float32 else 2e-3
    worst = max((error(found[n], exact[n]) / max(error(eager[n], exact[n]) * 1.2, floor), n) for n in found)
    find(what, worst[0] <= 1, f"{worst[0]:.2f} ({worst[1]})", "1 of eager's")


@part()
def experts():
    for dtype in [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]:
        for activation in native.ACTIVATIONS:
            made = layer(gated=activation in native.GATED_ACTIVATIONS, biases=True, dtype=dtype)
            name = f"{activation} {str(dtype)[6:]}"
            against_f64(name, smoe.experts, reference.experts, made, activation=activation)
    made = layer(biases=True)
    against_f64("interleaved", smoe.experts, reference.experts, made, layout="interleaved")
    made["ids"] = torch.where(torch.rand(made["ids"].shape, device=DEVICE) < 0.2, 16, made["ids"]).int()
    against_f64("int32 ids, a fifth of them sentinels", smoe.experts, reference.experts, made)
    large = layer(H=1024)
    whole, chunked = run(smoe.experts, large), run(smoe.experts, large, chunks=4)
    find("chunks=4 changes no bit", same(whole.values(), chunked.values()))


@part()
def rows():
    made = layer(T=700, biases=True)
    bounds = [0] + sorted(torch.randint(0, 650, (15,), generator=torch.Generator().manual_seed(0)).tolist()) + [650]
    with torch.no_grad():
        made["x"][650:] = 0
    for dtype in (torch.int32, torch.int64):
        inputs = dict(rows=made["x"], offsets=torch.tensor(bounds, device=DEVICE, dtype=dtype))
        inputs |= dict(row_weights=torch.rand(700, device=DEVICE).requires_grad_()) | {k: made[k] for k in ("w1", "w2", "b1", "b2")}
        against_f64(f"rows, offsets {str(dtype)[6:]}", smoe.experts_rows, reference.experts_rows, inputs)
    clean = run(smoe.experts_rows, inputs)
    with torch.no_grad():
        made["x"][650:] = torch.nan
    found = run(smoe.experts_rows, inputs)
    find("a tail of NaN stays out", same(found.values(), clean.values()) and bool((found["out"][650:] == 0).all()))


@part()
def routers():
    cases = {
        "softmax": {}, "renormalised": dict(norm_topk_prob=True), "topk_softmax": dict(score="topk_softmax"),
        "sigmoid": dict(score="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5),
        "groups": dict(score="sigmoid", n_group=4, topk_group=2), "nr_f": dict(rounding="nr_f", tile=64),
        "up": dict(rounding="up", tile=64), "down": dict(rounding="down", tile=64), "balance_f": dict(rounding="balance_f", tile=64),
    }  # fmt: skip
    for name, options in cases.items():
        made = layer()
        inputs = dict(x=made["x"], router_weight=randn(16, 256, scale=0.2, grad=True, seed=5), w1=made["w1"], w2=made["w2"])
        found = run(smoe.moe, inputs, top_k=4, **options)
        exact = exact_moe({key: value.detach().cpu().double().requires_grad_() for key, value in inputs.items()}, **options)
        worst = max((error(found[n].to("cpu"), exact[n]), n) for n in found)
        find(f"{name} against float64", worst[0] < 0.02, f"{worst[0]:.1e} ({worst[1]})", 0.02)
    router = randn(16, 256, seed=5)
    found = smoe.moe(made["x"], router, made["w1"], made["w2"], top_k=4, losses=True, counts=True)
    with torch.no_grad():
        _, losses, counts = reference.moe(
            made["x"].cpu().double(), router.cpu().double(), made["w1"].cpu().double(), made["w2"].cpu().double(), top_k=4
        )  # fmt: skip
    find("losses", error(found.losses.cpu(), losses) < 1e-3, f"{error(found.losses.cpu(), losses):.1e}", 1e-3)
    find("counts", int((found.counts.cpu() - counts).abs().sum()) <= 2)
    again = smoe.moe(made["x"], router, made["w1"], made["w2"], top_k=4, rounding="sr_f", step=3).out
    find("sr_f repeats", torch.equal(again, smoe.moe(made["x"], router, made["w1"], made["w2"], top_k=4, rounding="sr_f", step=3).out))
    bias = torch.zeros(16, device=DEVICE)
    smoe.update_selection_bias(bias, found.counts, 0.5)
    find("update_selection_bias", torch.equal(bias.sign(), (found.counts.float().mean() - found.counts).sign()))


def exact_moe(inputs, **options):
    """The reference on the CPU, under the dout that run() gave the device."""
    out = reference.moe(**inputs, top_k=4, **options)[0]
    dout = randn(*out.shape, dtype=torch.float32, seed=1).to(DTYPE).cpu().double()
    gradients = torch.autograd.grad(out, list(inputs.values()), dout)
    return dict(zip(["out", *inputs], [out.detach(), *gradients]))


# ---- what PyTorch does with a layer ----


class Block(torch.nn.Module):
    def __init__(self, H=256, I=128, E=16, K=4):
        super().__init__()
        torch.manual_seed(0)
        self.H, self.K = H, K
        self.router = torch.nn.Parameter(randn(E, H, scale=0.1))
        self.w1, self.w2 = torch.nn.Parameter(randn(E, 2 * I, H, scale=0.05)), torch.nn.Parameter(randn(E, H, I, scale=0.05))
        self.moe = smoe.MoE(H, I, E, K, device=DEVICE, dtype=DTYPE, balance_coefficient=0.01, rounding="nr_f", tile=64)

    def forward(self, x):
        h = F.rms_norm(x, (self.H,))
        values, ids = F.linear(h, self.router).float().topk(self.K, -1)
        x = x + smoe.experts(h, ids, values.softmax(-1), self.w1, self.w2)
        return x + self.moe(F.rms_norm(x, (self.H,)))


def step(function, model, T, dtype=None):
    x = randn(T, model.H, seed=T, dtype=dtype, grad=True)
    model.zero_grad()
    out = function(x)
    out.float().square().mean().backward()
    return [out.detach().clone(), x.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]


@part()
def eager():
    from torch.utils.checkpoint import checkpoint

    model = Block()
    plain = step(model, model, 1000)
    find("repeats bit for bit", same(step(model, model, 1000), plain))
    for reentrant in (False, True):
        wrapped = lambda x: checkpoint(model, x, use_reentrant=reentrant)
        find(f"checkpointing, use_reentrant={reentrant}: equal bits", same(step(wrapped, model, 1000), plain))
    torch.use_deterministic_algorithms(True)
    try:
        find("deterministic algorithms: equal bits", same(step(model, model, 1000), plain))
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        find("inference_mode: equal bits", torch.equal(model(randn(1000, 256, seed=1000)), plain[0]))
    with torch.autograd.graph.save_on_cpu():
        find("saved tensors on the CPU meanwhile: equal bits", same(step(model, model, 1000), plain))

    def moved(tensor):
        """The same values at an address that is a multiple of 64 bytes and not of 128."""
        size = tensor.numel() * tensor.element_size()
        block = torch.empty(size + 512, dtype=torch.uint8, device=tensor.device)
        start = (64 - block.data_ptr()) % 128
        return block[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().contiguous(), moved):
        find("saved tensors at multiples of 64 bytes: equal bits", same(step(model, model, 1000), plain))
    with torch.autocast(DEVICE, torch.bfloat16):
        half = copy.deepcopy(model).float()
        found = step(half, half, 1000, torch.float32)
    find("autocast: float32 gradients near bf16's", error(found[1], plain[1]) < 0.05 and found[2].dtype == torch.float32)
    find("T = 0", all(float(g.float().abs().sum()) == 0 for g in run(smoe.experts, layer(T=0)).values()))
    made = layer()
    for frozen in ({"w1", "w2"}, {"x"}, {"weights"}, {"w1", "w2", "weights"}):
        some = {n: v.detach() if n in frozen else v for n, v in made.items() if v is not None}
        fewer, whole = run(smoe.experts, some), run(smoe.experts, made)
        find(f"frozen {'+'.join(sorted(frozen))}: the others' bits", all(torch.equal(fewer[n], whole[n]) for n in fewer))
    out = smoe.experts(**made)
    broadcast = torch.autograd.grad(out.sum(), made["x"], retain_graph=True)[0]
    dense = torch.autograd.grad(out, made["x"], torch.ones_like(out))[0]
    find("broadcast gradient", torch.equal(broadcast, dense))
    flat = torch.cat([torch.zeros(1, device=DEVICE, dtype=DTYPE), made["w1"].detach().flatten()])[1:].view_as(made["w1"])
    find("a weight off its alignment", torch.equal(smoe.experts(**(made | dict(w1=flat))), out))
    first = torch.autograd.grad(smoe.experts(**made).float().square().sum(), made["x"], create_graph=True)[0]
    find("double backward says so", raises(RuntimeError, "differentiate twice", first.sum().backward))
    with contextlib.suppress(ImportError):
        from torch.distributed.fsdp import fully_shard

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
        sharded = fully_shard(copy.deepcopy(model))
        x = randn(1000, 256, seed=1000, grad=True)
        sharded(x).float().square().mean().backward()
        gradients = [p.grad.full_tensor() for p in sharded.parameters()]
        find("fully_shard on one rank: equal bits", same([x.grad, *gradients], plain[1:]))
        torch.distributed.destroy_process_group()


def raises(kind, text, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except kind as caught:
        return type(caught) is kind and text in str(caught)
    return False


@part(cuda_only=True)
def devices():
    made = layer(T=64)
    find("float32 on CUDA: TypeError", raises(TypeError, "torch.float32", smoe.experts, **{k: v.float() if v is not None and v.dtype == DTYPE else v for k, v in made.items()}))
    find("ids on the CPU: ValueError", raises(ValueError, "ids is on cpu; expected cuda:0", smoe.experts, **(made | dict(ids=made["ids"].cpu()))))
    find("w1 on the CPU: ValueError", raises(ValueError, "w1 is on cpu", smoe.experts, **(made | dict(w1=made["w1"].cpu()))))
    plain = run(smoe.experts, made)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = run(smoe.experts, made)
    torch.cuda.synchronize()
    find("another stream: equal bits", same(plain.values(), other.values()))
    warm = Block()
    step(warm, warm, 500)
    torch.cuda.set_sync_debug_mode("error")
    try:
        x = torch.empty(500, 256, device=DEVICE, dtype=DTYPE, requires_grad=True)
        warm(x).sum().backward()
        find("no host synchronisation in forward and backward", True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # A forked worker: CPU layers run, CUDA says why not.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        moe = smoe.MoE(32, 16, 8, 2)
        good = bool(torch.isfinite(moe(torch.randn(100, 32))).all())
        good = good and raises(RuntimeError, "forked", _context._make, 0)
        os.write(writer, b"1" if good else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    find("a fork: the CPU works, CUDA raises", os.read(reader, 1) == b"1")


class GivenRouting(Block):
    """Block with its routing from outside: rounding differences of a compiled router cannot change which experts run."""

    def forward(self, x, ids, weights, logits):
        x = x + smoe.experts(F.rms_norm(x, (self.H,)), ids, weights, self.w1, self.w2)
        experts = self.moe.experts
        options = dict(top_k=self.K, logits=logits, **self.moe.options)
        return x + smoe.moe(F.rms_norm(x, (self.H,)), None, experts.gate_up_proj, experts.down_proj, **options).out


def given_step(function, model, T):
    """Output and all gradients, from x, ids, weights and logits that only T decides."""
    x, logits = randn(T, model.H, seed=T, grad=True), randn(T, 16, seed=T + 1, dtype=torch.float32, grad=True)
    ids = randn(T, 16, seed=T + 2, dtype=torch.float32).topk(model.K, -1).indices
    weights = randn(T, model.K, seed=T + 3, dtype=torch.float32).softmax(-1).requires_grad_()
    out = function(x, ids, weights, logits)
    matrices = [model.w1, model.w2, model.moe.experts.gate_up_proj, model.moe.experts.down_proj]
    loss = (out * randn(T, model.H, seed=T + 4)).float().sum()
    return [out.detach().clone(), *(g.clone() for g in torch.autograd.grad(loss, [x, weights, logits, *matrices]))]


class OwnRouting(Block):
    """Block with its routers inside, without token rounding (there one token's choice moves others'); also returns the ids."""

    def forward(self, x):
        h = F.rms_norm(x, (self.H,))
        values, ids = F.linear(h, self.router).float().topk(self.K, -1)
        x = x + smoe.experts(h, ids, values.softmax(-1), self.w1, self.w2)
        experts, gate = self.moe.experts, self.moe.gate.weight
        options = self.moe.options | dict(rounding="none", balance_coefficient=0.0)
        found = smoe.moe(F.rms_norm(x, (self.H,)), gate, experts.gate_up_proj, experts.down_proj, top_k=self.K, **options)
        return x + found.out, torch.cat([ids.sort(-1).values, found.logits.topk(self.K, -1).indices.sort(-1).values], -1)


def own_step(function, T):
    """Output, dx and ids."""
    x = randn(T, 256, seed=T, grad=True)
    out, ids = function(x)
    dx = torch.autograd.grad((out * randn(T, 256, seed=T + 4)).float().sum(), x)[0]
    return out.detach().clone(), dx.clone(), ids.clone()


TOKEN_COUNTS = (1024, 1000, 3000, 512, 777, 2048)


def same_routing(what, function, model, counts, repeats=1):
    worst = 0.0
    for T in counts:
        for _ in range(repeats):
            if repeats > 1:
                torch.compiler.cudagraph_mark_step_begin()
            found = given_step(function, model, T)
        worst = max(worst, *(error(a, b) for a, b in zip(found, given_step(model, model, T), strict=True)))
    find(what, worst < 0.02, f"{worst:.1e}", 0.02)


def own_routing(what, function, model, counts):
    """A router compiled with other roundings decides near-ties otherwise: those tokens are counted, the others compared."""
    worst, moved = 0.0, 0
    for T in counts:
        (out, dx, ids), (wanted_out, wanted_dx, wanted_ids) = own_step(function, T), own_step(model, T)
        kept = (ids == wanted_ids).all(-1)
        moved += int((~kept).sum())
        worst = max(worst, error(out[kept], wanted_out[kept]), error(dx[kept], wanted_dx[kept]))
    share = moved / sum(counts)
    find(f"{what}: tokens with other experts", share < 0.1, f"{share:.2%}", "10 %")
    find(f"{what}: the other tokens", worst < 0.03, f"{worst:.1e}", 0.03)


@part()
def compile():
    torch._dynamo.reset()
    model = GivenRouting()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    given_step(compiled, model, TOKEN_COUNTS[0])
    first = counter.frame_count
    same_routing("inductor, fullgraph, dynamic, six token counts, given routing", compiled, model, TOKEN_COUNTS)
    find("compilations after the first token count", counter.frame_count == first, counter.frame_count - first, 0)
    torch._dynamo.reset()
    own = OwnRouting()
    own_routing("own routers", torch.compile(own, fullgraph=True, dynamic=True), own, TOKEN_COUNTS)
    if DEVICE == "cuda":
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        same_routing("reduce-overhead (CUDA-graph trees), given routing", compiled, model, [2048], repeats=4)


@part(cuda_only=True)
def graph():
    model, x = Block(), randn(2048, 256, seed=1, grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            x.grad = None
            model(x).float().square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    x.grad = None
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = model(x)
        out.float().square().mean().backward()
    for seed in (2, 3):
        x.data.copy_(randn(2048, 256, seed=seed))
        captured.replay()
        torch.cuda.synchronize()
        found = [out.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        fresh = copy.deepcopy(model)
        fresh.zero_grad(set_to_none=True)
        other = x.detach().clone().requires_grad_()
        result = fresh(other)
        result.float().square().mean().backward()
        wanted = [result.detach(), other.grad, *(p.grad for p in fresh.parameters())]
        find(f"torch.cuda.graph, replay with data {seed}: equal bits", same(found, wanted))


# ---- host times ----


def host_us(function, calls=20, batches=40):
    """Least host microseconds a call over repeated batches whose work the queue can hold."""
    best = float("inf")
    for _ in range(batches):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    synchronize()
    return best


def record(method, function):
    """(context, the arguments) of the last call of a Context method while `function` runs, and everything that those
    addresses need to stay valid: what the function returned and its buffers."""
    taken, buffers, real, buffer = [], [], getattr(_context.Context, method), _ops._buffer

    def keeping(size, like):
        buffers.append(buffer(size, like))
        return buffers[-1]

    setattr(_context.Context, method, lambda self, *fields: taken.append((self, fields)) or real(self, *fields))
    _ops._buffer = keeping
    try:
        kept = function()
    finally:
        setattr(_context.Context, method, real)
        _ops._buffer = buffer
    return taken[-1], kept, buffers


class Idle(torch.autograd.Function):
    """What PyTorch's engine takes for a Python Function of the same four inputs, buffers allocated, nothing computed."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


@part()
def host():
    T, H, I, E, K = (64, 256, 64, 8, 2) if DEVICE == "cuda" else (1, 8, 8, 1, 1)
    made = layer(T, H, I, E, K)
    made["ids"] = made["ids"].int()
    names = ("x", "weights", "w1", "w2")
    leaves, dout = [made[name] for name in names], torch.ones(T, H, device=DEVICE, dtype=DTYPE)
    smoe.experts(**made)
    (forward, fields), out, *keep = record("forward", lambda: smoe.experts(**made))
    (backward, back), *keep_too = record("backward", lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    library = native.library
    c_forward = host_us(lambda: library.smoe_layer_forward(forward.handle, fields[0], forward._forward_at, fields[1]))
    c_backward = host_us(lambda: library.smoe_layer_backward(backward.handle, back[0], backward._backward_at, back[1]))
    limit = (lambda value: value) if DEVICE == "cuda" else (lambda value: "")
    find("C forward call, us", c_forward <= 15 or DEVICE == "cpu", f"{c_forward:.1f}", limit(15))
    find("C backward call, us", c_backward <= 40 or DEVICE == "cpu", f"{c_backward:.1f}", limit(40))
    with torch.no_grad():
        inference = host_us(lambda: smoe.experts(**made))
    find("smoe.experts without gradients, us", True, f"{inference:.1f}")
    op = host_us(lambda: torch.ops.smoe.experts_forward.default(
        made["x"], made["ids"], made["weights"], made["w1"], None, made["w2"], None, "swiglu concatenated 1 0", True))  # fmt: skip
    find("the operator alone, us", True, f"{op:.1f}")
    training = host_us(lambda: smoe.experts(**made))
    find("smoe.experts, us above C", training - c_forward <= 25 or DEVICE == "cpu", f"{training - c_forward:.1f}", limit(25))
    both = host_us(lambda: torch.autograd.grad(smoe.experts(**made), leaves, dout))
    above = both - c_forward - c_backward
    find("forward and backward, us above C", above <= 70 or DEVICE == "cpu", f"{above:.1f}", limit(70))
    weight = randn(H, H, grad=True)
    linear = host_us(lambda: torch.autograd.grad(F.linear(made["x"], weight), [made["x"], weight], dout))
    find("for comparison: F.linear forward and backward, us", True, f"{linear:.1f}")
    idle = host_us(lambda: torch.autograd.grad(Idle.apply(*leaves), leaves, dout))
    find("for comparison: a torch.autograd.Function that does nothing, us", True, f"{idle:.1f}")
    find("   ours above C and above that Function, us", True, f"{above - idle:.1f}")
    find("   ours above C less all of F.linear's, us", True, f"{above - linear:.1f}")
    module = smoe.MoE(H, I, E, K, device=DEVICE, dtype=DTYPE)
    parameters = [made["x"], *module.parameters()]
    find("smoe.MoE forward, us", True, f"{host_us(lambda: module(made['x'])):.1f}")
    find("smoe.MoE forward and backward, us", True, f"{host_us(lambda: torch.autograd.grad(module(made['x']), parameters, dout)):.1f}")


@part()
def new_tokens():
    """100 different token counts in a row, eager, after one call at the largest."""
    made = layer(4096 if DEVICE == "cuda" else 256)
    inputs = lambda T: {n: v[:T].detach().requires_grad_(v.requires_grad) if n in ("x", "weights") else v[:T] if n == "ids" else v
                        for n, v in made.items()}  # fmt: skip
    run(smoe.experts, inputs(len(made["x"])))
    counts = torch.randperm(len(made["x"]) // 2, generator=torch.Generator().manual_seed(0))[:100] + len(made["x"]) // 2
    times = []
    for T in counts.tolist():
        given = inputs(T)
        dout = torch.ones_like(given["x"])
        synchronize()
        start = time.perf_counter()
        smoe.experts(**given).backward(dout)
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    jumps = max(abs(a - b) for a, b in zip(times, times[1:]))
    find("100 new token counts: slowest above its neighbour, ms", jumps <= 1 or DEVICE == "cpu", f"{jumps:.3f}", "1")
    find("   median and slowest, ms", True, f"{statistics.median(times):.3f}, {max(times):.3f}")


# ---- memory and speed at a training size ----

SHAPE = dict(T=24576, H=1536, I=256, E=128, K=8)  # the 7B n256 model of the paper


def shape():
    return SHAPE if DEVICE == "cuda" else dict(T=512, H=64, I=32, E=8, K=2)


def sizes(entry="from_topk", dtype=None, **s):
    parsed = _layout.parse("swiglu concatenated 1 0")
    described = parsed.layer(entry, s["T"], s["K"], (s["E"], s["H"], s["I"]), native.TYPES["bf16"], native.TYPES["i64"], True)
    return _context.context_of(torch.empty(1, device=DEVICE)).query(described)


@part(cuda_only=True)
def memory():
    s = shape()
    made = layer(**s)
    asked = sizes(**s)
    run(smoe.experts, made)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = smoe.experts(**made)
    forward_peak = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_allocated() - before - out.numel() * 2
    need = asked.saved_buffer_bytes
    find("kept for the backward, bytes over the query's", need <= kept <= need + 16384, kept - need, "16384")
    dout = torch.ones_like(out)
    leaves = [made[n] for n in ("x", "weights", "w1", "w2")]
    torch.cuda.reset_peak_memory_stats()
    before_backward = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, leaves, dout)
    backward_peak = torch.cuda.max_memory_allocated() - before_backward
    outputs = sum(g.numel() * g.element_size() for g in gradients)
    wanted = out.numel() * 2 + need + asked.scratch_forward_bytes
    find("forward peak against the query's bytes", forward_peak <= 1.02 * wanted, f"{forward_peak / wanted:.4f}", 1.02)
    wanted = outputs + asked.scratch_backward_bytes
    find("backward peak against the query's bytes", backward_peak <= 1.02 * wanted, f"{backward_peak / wanted:.4f}", 1.02)
    find("   saved and scratch, MiB", True, f"{need / 2**20:.0f}, {asked.scratch_backward_bytes / 2**20:.0f}")


@part(cuda_only=True)
def speed():
    """A step of eager PyTorch with smoe.MoE beside the same C calls, in turns in one process."""
    s = shape()
    moe = smoe.MoE(s["H"], s["I"], s["E"], s["K"], device=DEVICE, dtype=DTYPE)
    x, dout = randn(s["T"], s["H"], grad=True), randn(s["T"], s["H"])
    leaves = [x, *moe.parameters()]
    eager_step = lambda: torch.autograd.grad(moe(x), leaves, dout)
    eager_step()
    (forward, fields), out, *keep = record("forward", lambda: moe(x))
    (backward, back), *keep_too = record("backward", lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))

    def c_step():
        forward.forward(*fields)
        backward.backward(*back)

    def once(function, steps=20):
        """Device ms a step as in training, where the host runs ahead: one step of the same kind goes first, so that the
        queue is not empty when the clock starts."""
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        function()
        start.record()
        begin = time.perf_counter()
        for _ in range(steps):
            function()
        enqueued = (time.perf_counter() - begin) / steps * 1e3
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps, enqueued

    once(c_step), once(eager_step)
    pairs = []
    for turn in range(20):  # each goes first in every other turn
        order = (c_step, eager_step) if turn % 2 == 0 else (eager_step, c_step)
        took = {function: once(function) for function in order}
        pairs.append((took[c_step][0], took[eager_step][0], took[eager_step][1]))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    c, python, enqueued = (statistics.median(column) for column in zip(*pairs))
    find("a step of smoe.MoE against the C calls, 7B n256", ratio <= 1.02, f"{ratio:.4f} ({python:.3f}/{c:.3f} ms)", 1.02)
    find("   the host enqueues a step in, ms", enqueued < c, f"{enqueued:.3f}", f"{c:.3f}")
    ours, wanted = device_work(eager_step), device_work(c_step)
    more = {name: count - wanted.get(name, 0) for name, count in ours.items() if count > wanted.get(name, 0)}
    listed = ", ".join(f"{count} {name[:40]}" for name, count in more.items())
    find("   kernels, copies and fills of a step besides C's", bool(wanted) and not more, listed or f"none of {sum(ours.values())}", 0)


def device_work(function):
    """How often each kernel, copy or fill ran on the device while `function` did."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    ran = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {name: ran.count(name) for name in set(ran)}


@part(cuda_only=True)
def top_1():
    """K = 1 with unit weights and unsorted ids against K = 8 on as many rows: time a row, forward and backward."""
    H, I, E, T = 2048, 768, 128, 4096
    times = {}
    for K, tokens in ((8, T), (1, 8 * T)):
        made = layer(tokens, H, I, E, K)
        if K == 1:
            made["weights"] = torch.ones(tokens, 1, device=DEVICE)
        dout = randn(tokens, H)
        leaves = [made[n] for n in ("x", "w1", "w2")]
        work = lambda: torch.autograd.grad(smoe.experts(**made), leaves, dout)
        for _ in range(3):
            work()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        best = float("inf")
        for _ in range(10):
            start.record()
            for _ in range(3):
                work()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 3)
        times[K] = best
    find("K = 1 against K = 8 on as many rows", times[1] <= 1.1 * times[8], f"{times[1]:.3f}/{times[8]:.3f} ms", "no slower a row")
    one = layer(1, 256, 128, 16, 1)
    against_f64("one dummy row", smoe.experts, reference.experts, one)


# ---- Transformers ----


@part()
def hugging_face():
    import test_transformers as cases

    tokens = cases.tokens

    def tiny(name, dtype, **more):
        return cases.tiny(name, dtype, **more).to(DEVICE)

    def one_step(model, implementation, function=None):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        ids = tokens(8, 64).to(DEVICE)
        found = (model if function is None else function)(input_ids=ids, labels=ids)
        found.loss.backward()
        return {"logits": found.logits.detach(), "loss": found.loss.detach()} | {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }

    for name in cases.MODELS:
        exact = one_step(tiny(name, torch.float32), "eager")
        model = tiny(name, DTYPE)
        eager_, ours = one_step(model, "eager"), one_step(model, "smoe")
        together = lambda found: torch.cat([found[k].double().flatten() / exact[k].double().norm().clamp(1e-12) for k in exact])
        mine, theirs = (error(together(found), together(exact)) for found in (ours, eager_))
        find(f"{name}: error of smoe / of eager bf16", mine <= 1.25 * max(theirs, 1e-5), f"{mine:.2e}/{theirs:.2e}", "1.25")
    for name in ("qwen3_moe", "gpt_oss"):
        model = tiny(name, DTYPE).train()
        plain = one_step(model, "smoe")
        model.gradient_checkpointing_enable()
        again = one_step(model, "smoe")
        find(f"{name}: gradient checkpointing, equal bits", all(torch.equal(plain[k], again[k]) for k in plain))
        model.gradient_checkpointing_disable()
        model.eval()
        with torch.no_grad():
            text = model.generate(tokens(2, 6).to(DEVICE), max_new_tokens=8, do_sample=False)
        find(f"{name}: generate", text.shape[1] >= 7)
    torch._dynamo.reset()
    import smoe.transformers

    model = smoe.transformers.prepare(tiny("gpt_oss", DTYPE, num_hidden_layers=1))
    with torch.no_grad():  # logits 0.5 apart whatever the token: roundings change no choice
        for module in model.modules():
            if type(module).__name__ == "GptOssTopKRouter":
                module.weight.mul_(0.02)
                module.bias.copy_(torch.tensor([5, 2, 7, 0, 3, 6, 1, 4]) * 0.5)
    plain = one_step(model, "smoe")
    again = one_step(model, "smoe", torch.compile(model, fullgraph=True, dynamic=True))
    worst = max((error(again[k], plain[k]), k) for k in plain if plain[k].norm() > 0)
    find("gpt_oss: torch.compile, fullgraph, separated logits", worst[0] < 0.05, f"{worst[0]:.1e} ({worst[1][-30:]})", 0.05)
    torch._dynamo.reset()
    experts = model.model.layers[0].mlp.experts
    x, ids = randn(512, 32, seed=1, grad=True), randn(512, 8, seed=2, dtype=torch.float32).topk(2).indices
    weights, dout = randn(512, 2, seed=3, grad=True), randn(512, 32, seed=4)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True)
    leaves = [x, weights, *experts.parameters()]
    found, wanted = ([out, *torch.autograd.grad(out, leaves, dout)] for out in (f(x, ids, weights) for f in (compiled, experts)))
    worst = max(error(a, b) for a, b in zip(found, wanted, strict=True))
    find("gpt_oss's experts: torch.compile, given routing", worst < 0.01, f"{worst:.1e}", 0.01)


def main():
    global DEVICE, DTYPE, CURRENT
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts by name, joined by commas")
    parser.add_argument("--list", action="store_true", help="the parts")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--bf16", action="store_true", help="on the CPU bfloat16 instead of float32")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(PARTS))
        return 0
    if arguments.device == "cpu":
        DEVICE, DTYPE = "cpu", torch.bfloat16 if arguments.bf16 else torch.float32
    elif not torch.cuda.is_available():
        print("no GPU")
        return 77
    chosen = [name for name in arguments.only.split(",") if name] or list(PARTS)
    print("torch", torch.__version__, "python", sys.version.split()[0], smoe.build_info(), torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu")  # fmt: skip
    begin = time.perf_counter()
    for name in chosen:
        function, cuda_only = PARTS[name]
        if cuda_only and DEVICE != "cuda":
            continue
        CURRENT, start = name, time.perf_counter()
        try:
            function()
        except Exception as caught:
            traceback.print_exc()
            find(f"raised {type(caught).__name__}", False, str(caught).splitlines()[0][:60] if str(caught) else "")
        print(f"{name:14} took {time.perf_counter() - start:.1f} s", flush=True)
    failed = [finding for finding in FINDINGS if not finding[-1]]
    print(f"\n{time.perf_counter() - begin:.0f} s. {len(FINDINGS) - len(failed)} passed, {len(failed)} failed")
    for name, what, figure, limit, _ in failed:
        print(f"  FAILED {name}: {what} {figure} (limit {limit})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
