"""Part of gpu.py: the host time of a call, split into the C calls, PyTorch's autograd, and smoe's Python code."""

import ctypes
import time

import torch
import torch.nn.functional as F
from gpu_parts import find, layer, part, randn, synchronize, target

import smoe
from smoe import _autograd, _context, _ops, native

CALLS, BATCHES = 20, 60  # the device's queue holds the work of one batch


def host_us(cases):
    """The host microseconds of a call of each case: the least over BATCHES batches. The cases run by turns."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(BATCHES):
        for name, function in cases.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    synchronize()
    return best


def record(method, function):
    """Runs `function`. Returns (context, layer, arguments) of its last call of a Context method, and its result. The
    result keeps the memory at the addresses in the arguments."""
    taken, real = [], getattr(_context.Context, method)
    setattr(_context.Context, method, lambda *call: taken.append(call) or real(*call))
    try:
        kept = function()
    finally:
        setattr(_context.Context, method, real)
    return taken[-1], kept


def c_call(function, context, layer, arguments, layout):
    """A function that makes only the C call, with recorded arguments. It has new scratch memory, because that of the
    recorded call has been freed."""
    struct = layout.from_buffer_copy(arguments)
    scratch = torch.empty(struct.scratch_size, dtype=torch.uint8, device=target.device)
    struct.scratch = scratch.data_ptr()
    at, stream = ctypes.addressof(struct), context.stream()
    return lambda _kept=(struct, scratch): function(context.handle, layer, at, stream)


def empty_function(saved, gradients, in_forward=None, in_backward=None):
    """A torch.autograd.Function with the inputs, output, saved tensors and gradients of smoe.experts that computes and
    allocates nothing. Its time is that of PyTorch and of the two given functions."""
    call_forward, call_backward = in_forward or (lambda: None), in_backward or (lambda: None)

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ids, weights, w1, b1, w2, b2, call):
            call_forward()
            ctx.save_for_backward(x, ids, w1, w2, b2, saved)
            return x.detach()

        @staticmethod
        def backward(ctx, dout):
            _ = ctx.saved_tensors
            call_backward()
            return gradients

    return Empty.apply


def on_this_thread(function):
    """`function`, with its backward on the calling thread instead of the autograd engine's thread for the device."""

    def run():
        with torch.autograd.set_multithreading_enabled(False):
            function()

    return run


@part()
def host():
    T, H, I, E, K = (64, 256, 64, 8, 2) if target.device == "cuda" else (1, 8, 8, 1, 1)
    made = layer(T, H, I, E, K)
    made["ids"] = made["ids"].int()
    x, ids, weights, w1, w2 = (made[name] for name in ("x", "ids", "weights", "w1", "w2"))
    leaves, dout = [x, weights, w1, w2], torch.ones(T, H, device=target.device, dtype=target.dtype)
    grad = torch.autograd.grad
    smoe.experts(**made)
    recorded, out = record("forward", lambda: smoe.experts(**made))
    recorded_back, found = record("backward", lambda: grad(out, leaves, dout, retain_graph=True))
    c_forward = c_call(native.library.smoe_layer_forward, *recorded, native.ForwardArgs)
    c_backward = c_call(native.library.smoe_layer_backward, *recorded_back, native.BackwardArgs)
    dx, dweights, dw1, dw2 = found
    saved, gradients = out.grad_fn.saved_tensors[-1], (dx, None, dweights, dw1, None, dw2, None, None)
    empty, with_c = empty_function(saved, gradients), empty_function(saved, gradients, c_forward, c_backward)
    call = out.grad_fn.call
    inputs = (x, ids, weights, w1, None, w2, None, call)
    with torch.no_grad():
        _autograd.Experts.backward(out.grad_fn, dout)  # makes this thread's context

    def without_gradients(function):
        def run():
            with torch.no_grad():
                function()

        return run

    weight = randn(H, H, grad=True)
    module = smoe.MoE(H, I, E, K, device=target.device, dtype=target.dtype)
    parameters = [x, *module.parameters()]
    forward_and_backward = {
        "smoe.experts": lambda: grad(smoe.experts(**made), leaves, dout),
        "an empty Function": lambda: grad(empty(*inputs), leaves, dout),
        "with C": lambda: grad(with_c(*inputs), leaves, dout),
        "F.linear": lambda: grad(F.linear(x, weight), [x, weight], dout),
        "smoe.MoE": lambda: grad(module(x), parameters, dout),
    }
    us = host_us({
        "C forward": c_forward,
        "C backward": c_backward,
        "forward": lambda: smoe.experts(**made),
        "empty forward": lambda: empty(*inputs),
        "inference": without_gradients(lambda: smoe.experts(**made)),
        "operator": lambda: torch.ops.smoe.experts_forward.default(*inputs[:-1], True, *call.record),
        "backward's Python": without_gradients(lambda: _autograd.Experts.backward(out.grad_fn, dout)),
        "module forward": lambda: module(x),
        **forward_and_backward,
        **{f"{name}, this thread": on_this_thread(run) for name, run in forward_and_backward.items()},
    })  # fmt: skip
    report(us)


def report(us):
    """The limits are shares of F.linear's time, forward and backward, because hosts differ by 1.6 times."""

    def line(what, value, share=None):
        limited = share and target.device == "cuda"
        limit = share * us["F.linear"] if limited else 0
        find(what, not limited or value <= limit, f"{value:.1f}", f"{limit:.1f}" if limited else "")

    line("C forward call, us", us["C forward"], 0.13)
    line("smoe.experts, us above C", us["forward"] - us["C forward"], 0.25)
    line("   of it: the forward of an empty Function", us["empty forward"])
    line("C backward call, us", us["C backward"], 0.3)
    c = us["C forward"] + us["C backward"]
    for where in ("", ", this thread"):
        ours, empty = us["smoe.experts" + where] - c, us["an empty Function" + where]
        line(f"forward and backward{where}, us above C", ours, None if where else 1.5)
        line("   of it: an empty Function, PyTorch's part", empty)
        line("   of it: the C calls, slower there than in a loop", us["with C" + where] - empty - c)
        line("   of it: smoe's Python and its buffers", ours - us["with C" + where] + c)
        line("   for comparison: all of F.linear's", us["F.linear" + where])
        line("   for comparison: all of smoe.MoE's", us["smoe.MoE" + where])
    line("the Python function of the backward alone, us above C", us["backward's Python"] - us["C backward"])
    line("smoe.experts without gradients, us above C", us["inference"] - us["C forward"])
    line("the operator alone through the dispatcher, us", us["operator"])
    line("smoe.MoE forward, us", us["module forward"])
