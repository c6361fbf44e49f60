"""Parts of gpu.py: new token counts, memory and device times."""

import statistics
import time

import reference
import torch
from gpu_host import c_call, record
from gpu_parts import against_f64, find, layer, part, randn, run, synchronize, target

import smoe
import smoe.functional  # noqa: F401, registers torch.ops.smoe
from smoe import _context, _record, native

@part()
def new_tokens():
    """100 different token counts one after the other, in eager mode, after one call with the largest."""
    made = layer(4096 if target.device == "cuda" else 256)
    inputs = lambda T: {n: v[:T].detach().requires_grad_(v.requires_grad) if n in ("x", "weights") else v[:T] if n == "ids" else v
                        for n, v in made.items()}  # fmt: skip
    run(smoe.experts, inputs(len(made["x"])))
    counts = torch.randperm(len(made["x"]) // 2, generator=torch.Generator().manual_seed(0))[:100] + len(made["x"]) // 2
    pairs = []
    for T in counts.tolist():
        given = inputs(T)
        dout = torch.ones_like(given["x"])
        pairs.append([milliseconds(lambda: smoe.experts(**given).backward(dout)) for _ in range(2)])
    report_new_tokens(pairs)


def milliseconds(function):
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def report_new_tokens(pairs):
    """`pairs`: milliseconds of the first and of the second call with a number of tokens. A busy host delays a few calls."""
    first, second = zip(*pairs)
    late = sum(a - b > 1 for a, b in pairs)
    limited = target.device == "cuda"
    find("100 new token counts: first calls over 1 ms later", late <= 5 or not limited, late, 5 if limited else "")
    find("   median of the first and the second calls, ms", True, f"{statistics.median(first):.3f}, {statistics.median(second):.3f}")


# ---- memory and speed at a training size ----

SHAPE = dict(T=24576, H=1536, I=256, E=128, K=8)  # the 7B n256 model of the paper


def shape():
    return SHAPE if target.device == "cuda" else dict(T=512, H=64, I=32, E=8, K=2)


def sizes(entry, index, T, H, I, E, K):
    of = dict(hidden=H, intermediate=I, experts=E, topk=K, entry=entry, index_type=index, gradient_type="bf16")
    described = _record.layer(T, _record.record("sizes", activation="swiglu", **of))
    return _context.context_of(torch.empty(1, device=target.device)).query(described)


@part(cuda_only=True)
def memory():
    """Bytes kept for the backward and peaks, against the query's bytes: smoe.experts, and a step of smoe.MoE, which also
    keeps its logits."""
    s = shape()
    made = layer(**s)
    leaves = [made[n] for n in ("x", "weights", "w1", "w2")]
    peaks("smoe.experts", lambda: smoe.experts(**made), leaves, sizes("from_topk", "i64", **s), 0)
    del made, leaves
    moe = smoe.MoE(s["H"], s["I"], s["E"], s["K"], device=target.device, dtype=target.dtype)
    x = randn(s["T"], s["H"], grad=True)
    peaks("smoe.MoE", lambda: moe(x), [x, *moe.parameters()], sizes("from_logits", "i32", **s), 4 * s["T"] * s["E"])


def peaks(name, forward, leaves, asked, logits):
    """`logits`: the bytes of the router's logits, which the caller of the library allocates."""
    torch.autograd.grad(forward().sum(), leaves)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    requested = lambda: torch.cuda.memory_stats()["requested_bytes.all.current"]  # without what allocations leave unused
    before, before_requested = torch.cuda.memory_allocated(), requested()
    out = forward()
    forward_peak = torch.cuda.max_memory_allocated() - before
    kept = requested() - before_requested - out.numel() * 2
    need = asked.saved_buffer_bytes + logits
    find(f"{name}: kept for the backward, bytes over the query's", need <= kept <= need + 16384, kept - need, "16384")
    dout = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before_backward = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, leaves, dout)
    backward_peak = torch.cuda.max_memory_allocated() - before_backward
    outputs = sum(g.numel() * g.element_size() for g in gradients)
    wanted = out.numel() * 2 + need + asked.scratch_forward_bytes
    find(f"{name}: forward peak of the query's", forward_peak <= 1.02 * wanted, f"{forward_peak / wanted:.4f}", 1.02)
    wanted = outputs + asked.scratch_backward_bytes
    find(f"{name}: backward peak of the query's", backward_peak <= 1.02 * wanted, f"{backward_peak / wanted:.4f}", 1.02)
    find("   saved and scratch, MiB", True, f"{need / 2**20:.0f}, {asked.scratch_backward_bytes / 2**20:.0f}")


@part(cuda_only=True)
def speed():
    """Compares a step of eager PyTorch with smoe.MoE with the same C calls, by turns in one process."""
    s = shape()
    moe = smoe.MoE(s["H"], s["I"], s["E"], s["K"], device=target.device, dtype=target.dtype)
    x, dout = randn(s["T"], s["H"], grad=True), randn(s["T"], s["H"])
    leaves = [x, *moe.parameters()]
    eager_step = lambda: torch.autograd.grad(moe(x), leaves, dout)
    eager_step()
    recorded, out = record("forward", lambda: moe(x))
    recorded_back, _gradients = record("backward", lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    c_forward = c_call(native.library.smoe_layer_forward, *recorded, native.ForwardArgs)
    c_backward = c_call(native.library.smoe_layer_backward, *recorded_back, native.BackwardArgs)

    def c_step():
        c_forward()
        c_backward()

    def once(function, steps=20):
        """Device milliseconds of a step, as in training, where the host is ahead of the device: one untimed step comes
        first, so that the device has work when the timing starts."""
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
    for turn in range(20):  # each is the first in every second turn
        order = (c_step, eager_step) if turn % 2 == 0 else (eager_step, c_step)
        took = {function: once(function) for function in order}
        pairs.append((took[c_step][0], took[eager_step][0], took[eager_step][1]))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    c, python, enqueued = (statistics.median(column) for column in zip(*pairs))
    find(
        "a step of smoe.MoE against the C calls, 7B n256", ratio <= 1.02, f"{ratio:.4f} ({python:.3f}/{c:.3f} ms)", 1.02
    )
    find("   the host enqueues a step in, ms", enqueued < c, f"{enqueued:.3f}", f"{c:.3f}")
    ours, wanted = device_work(eager_step), device_work(c_step)
    more = {name: count - wanted.get(name, 0) for name, count in ours.items() if count > wanted.get(name, 0)}
    listed = ", ".join(f"{count} {name[:40]}" for name, count in more.items())
    find(
        "   kernels, copies and fills of a step besides C's",
        bool(wanted) and not more,
        listed or f"none of {sum(ours.values())}",
        0,
    )


def device_work(function):
    """The number of runs of each kernel, copy and fill on the device during `function`."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    ran = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {name: ran.count(name) for name in set(ran)}


@part(cuda_only=True)
def top_1():
    """Forward and backward with K = 1, unit weights and unsorted ids must not take longer for a row than with K = 8 and
    equally many rows, except for what eight times as many tokens cost: 0.6 GB of x, out and their gradients, 7 % here.
    The two are timed in turns."""
    H, I, E, T = 2048, 768, 128, 4096
    works = {}
    for K, tokens in ((8, T), (1, 8 * T)):
        made = layer(tokens, H, I, E, K)
        if K == 1:
            made["weights"] = torch.ones(tokens, 1, device=target.device)
        dout, leaves = randn(tokens, H), [made[n] for n in ("x", "w1", "w2")]
        works[K] = lambda made=made, dout=dout, leaves=leaves: torch.autograd.grad(smoe.experts(**made), leaves, dout)
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    times = dict.fromkeys(works, float("inf"))
    for turn in range(13):
        for K, work in works.items():
            start.record()
            for _ in range(3):
                work()
            end.record()
            end.synchronize()
            if turn > 2:
                times[K] = min(times[K], start.elapsed_time(end) / 3)
    find(
        "K = 1 against K = 8 on as many rows",
        times[1] <= 1.1 * times[8],
        f"{times[1]:.3f}/{times[8]:.3f} ms",
        "no slower a row",
    )
    one = layer(1, 256, 128, 16, 1)
    against_f64("one dummy row", smoe.experts, reference.experts, one)
