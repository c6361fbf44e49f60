"""One implementation on one layer: its jobs, and the measurements that are made once: first calls, memory, errors."""

import time

import torch

from . import reference, timing


class Measured:
    """The jobs of an implementation on the inputs' layer. Part `experts` starts from given routing, part `layer` from
    the router's weight. A forward keeps what its backward needs; `both` is a forward and a backward with all gradients.
    """

    def __init__(self, implementation, inputs, part):
        shape = inputs.shape
        self.implementation, self.inputs, self.part = implementation, inputs, part
        w1, w2 = inputs.arranged(implementation.w1_layout, implementation.w2_layout)
        x = inputs.x.detach().requires_grad_()
        if part == "layer":
            last = inputs.router_weight.detach().requires_grad_()
            layer = implementation.bind_layer(shape, w1, w2, last)
            self.forward = lambda: layer(x)
        else:
            *given, weights = implementation.given(inputs.ids, inputs.weights, shape.E, x.dtype)
            last = weights.detach().requires_grad_()
            experts = implementation.bind(shape, w1, w2)
            self.forward = lambda: experts(x, *given, last)
        self.leaves = [x, w1, w2, last]

    def backward(self, out):
        return torch.autograd.grad(out, self.leaves, self.inputs.dout)

    @property
    def both(self):
        return self.forward, self.backward

    def inference(self):
        with torch.no_grad():
            return self.forward()

    def captured(self):
        """Captures the inference in a CUDA graph. Returns the job that replays the graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.inference()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.inference()
        return graph.replay

    def jobs(self, passes):
        """{pass: job}, as timing.py runs them. The pass `graph` is left out if the implementation cannot be captured."""
        made = {}
        for name in passes:
            if name == "graph":
                try:
                    made[name] = self.captured()
                except Exception:  # noqa: BLE001, an implementation has exceptions of its own
                    torch.cuda.synchronize()
            else:
                made[name] = getattr(self, name)
        return made

    # ---- measured once ----

    def first_call(self, clock):
        """Seconds of the first forward and backward, and their results."""
        start = time.perf_counter()
        out = self.forward()
        clock.synchronize()
        middle = time.perf_counter()
        gradients = self.backward(out)
        clock.synchronize()
        times = {"forward": middle - start, "backward": time.perf_counter() - middle}
        return times, out.detach(), gradients

    def errors(self, out, gradients):
        """Relative Frobenius errors against fp64. None for the whole layer: routers whose logits differ by rounding
        choose different experts at near ties, so that the errors would mostly show the routing."""
        if self.part == "layer":
            return None
        dx, dw1, dw2, dlast = gradients
        implementation = self.implementation
        found = {"O": out, "dX": dx, "dW1": dw1, "dW2": dw2}
        found["dS"] = implementation.by_token(dlast, self.inputs.ids)
        return reference.errors(self.inputs, found, implementation.w1_layout, implementation.w2_layout)

    def memory(self):
        """Bytes that are kept from forward to backward, with X and without O, and the peak of forward and backward
        without X, dO, the routing and the weights. None on the CPU."""
        if not self.inputs.x.is_cuda:
            return None, None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = self.forward()
        kept = torch.cuda.memory_allocated() - before - out.nbytes + self.inputs.x.nbytes
        gradients = self.backward(out)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del out, gradients
        return kept, peak


def new_tokens(shape):
    """Another number of tokens for the same weights: an eighth less. None for one token."""
    return shape.T - max(1, shape.T // 8) or None


def new_t_seconds(implementation, inputs, part, clock):
    """Seconds of the first forward and backward with new_tokens(shape) tokens. None if that is None."""
    tokens = new_tokens(inputs.shape)
    if tokens is None:
        return None
    measured = Measured(implementation, inputs.first(tokens), part)
    clock.synchronize()
    start = time.perf_counter()
    timing.run(measured.both)
    clock.synchronize()
    return time.perf_counter() - start
