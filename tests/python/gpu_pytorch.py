"""Parts of gpu.py: ways in which PyTorch runs a layer: eager, compiled, on another stream, in a CUDA graph."""

import contextlib
import copy
import os
import resource

import torch
import torch._dynamo.testing
import torch.nn.functional as F
from gpu_parts import error, find, layer, part, randn, run, same, target

import smoe
from smoe import _context


class Block(torch.nn.Module):
    def __init__(self, H=256, I=128, E=16, K=4):
        super().__init__()
        torch.manual_seed(0)
        self.H, self.K = H, K
        self.router = torch.nn.Parameter(randn(E, H, scale=0.1))
        self.w1, self.w2 = torch.nn.Parameter(randn(E, 2 * I, H, scale=0.05)), torch.nn.Parameter(
            randn(E, H, I, scale=0.05)
        )
        self.moe = smoe.MoE(
            H, I, E, K, device=target.device, dtype=target.dtype, balance_coefficient=0.01, rounding="nr_f", tile=64
        )

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
    with torch.autocast(target.device, torch.bfloat16):
        half = copy.deepcopy(model).float()
        found = step(half, half, 1000, torch.float32)
    find(
        "autocast: float32 gradients near bf16's", error(found[1], plain[1]) < 0.05 and found[2].dtype == torch.float32
    )
    find("T = 0", all(float(g.float().abs().sum()) == 0 for g in run(smoe.experts, layer(T=0)).values()))
    made = layer()
    for frozen in ({"w1", "w2"}, {"x"}, {"weights"}, {"w1", "w2", "weights"}):
        some = {n: v.detach() if n in frozen else v for n, v in made.items() if v is not None}
        fewer, whole = run(smoe.experts, some), run(smoe.experts, made)
        find(
            f"frozen {'+'.join(sorted(frozen))}: the others' bits", all(torch.equal(fewer[n], whole[n]) for n in fewer)
        )
    out = smoe.experts(**made)
    broadcast = torch.autograd.grad(out.sum(), made["x"], retain_graph=True)[0]
    dense = torch.autograd.grad(out, made["x"], torch.ones_like(out))[0]
    find("broadcast gradient", torch.equal(broadcast, dense))
    flat = torch.cat([torch.zeros(1, device=target.device, dtype=target.dtype), made["w1"].detach().flatten()])[
        1:
    ].view_as(made["w1"])
    find("a weight off its alignment", torch.equal(smoe.experts(**(made | dict(w1=flat))), out))
    first = torch.autograd.grad(smoe.experts(**made).float().square().sum(), made["x"], create_graph=True)[0]
    find("double backward says so", raises(RuntimeError, "differentiate twice", first.sum().backward))
    with contextlib.suppress(ImportError):
        from torch.distributed.fsdp import fully_shard

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        torch.distributed.init_process_group("nccl" if target.device == "cuda" else "gloo")
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
    find(
        "float32 on CUDA: TypeError",
        raises(
            TypeError,
            "torch.float32",
            smoe.experts,
            **{k: v.float() if v is not None and v.dtype == target.dtype else v for k, v in made.items()},
        ),
    )
    find(
        "ids on the CPU: ValueError",
        raises(ValueError, "ids is on cpu; expected cuda:0", smoe.experts, **(made | dict(ids=made["ids"].cpu()))),
    )
    find(
        "w1 on the CPU: ValueError",
        raises(ValueError, "w1 is on cpu", smoe.experts, **(made | dict(w1=made["w1"].cpu()))),
    )
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
        x = torch.empty(500, 256, device=target.device, dtype=target.dtype, requires_grad=True)
        warm(x).sum().backward()
        find("no host synchronisation in forward and backward", True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # In a forked worker CPU layers must work, and CUDA must raise an error with the reason.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dumping the memory of a process with CUDA takes minutes
        moe = smoe.MoE(32, 16, 8, 2)
        good = bool(torch.isfinite(moe(torch.randn(100, 32))).all())
        good = good and raises(RuntimeError, "forked", _context._make, 0)
        os.write(writer, b"1" if good else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    find("a fork: the CPU works, CUDA raises", os.read(reader, 1) == b"1")


class GivenRouting(Block):
    """Block with given routing, so that rounding differences of a compiled router cannot change the experts of a
    token."""

    def forward(self, x, ids, weights, logits):
        x = x + smoe.experts(F.rms_norm(x, (self.H,)), ids, weights, self.w1, self.w2)
        experts = self.moe.experts
        options = dict(top_k=self.K, logits=logits, **self.moe.options)
        return x + smoe.moe(F.rms_norm(x, (self.H,)), None, experts.gate_up_proj, experts.down_proj, **options).out


def given_step(function, model, T):
    """The output and all gradients, for inputs that depend only on T."""
    x, logits = randn(T, model.H, seed=T, grad=True), randn(T, 16, seed=T + 1, dtype=torch.float32, grad=True)
    ids = randn(T, 16, seed=T + 2, dtype=torch.float32).topk(model.K, -1).indices
    weights = randn(T, model.K, seed=T + 3, dtype=torch.float32).softmax(-1).requires_grad_()
    out = function(x, ids, weights, logits)
    matrices = [model.w1, model.w2, model.moe.experts.gate_up_proj, model.moe.experts.down_proj]
    loss = (out * randn(T, model.H, seed=T + 4)).float().sum()
    return [out.detach().clone(), *(g.clone() for g in torch.autograd.grad(loss, [x, weights, logits, *matrices]))]


class OwnRouting(Block):
    """Block with its routers, but without token rounding, with which one token's experts depend on other tokens. Also
    returns the ids."""

    def forward(self, x):
        h = F.rms_norm(x, (self.H,))
        values, ids = F.linear(h, self.router).float().topk(self.K, -1)
        x = x + smoe.experts(h, ids, values.softmax(-1), self.w1, self.w2)
        experts, gate = self.moe.experts, self.moe.gate.weight
        options = self.moe.options | dict(rounding="none", balance_coefficient=0.0)
        found = smoe.moe(
            F.rms_norm(x, (self.H,)), gate, experts.gate_up_proj, experts.down_proj, top_k=self.K, **options
        )
        return x + found.out, torch.cat(
            [ids.sort(-1).values, found.logits.topk(self.K, -1).indices.sort(-1).values], -1
        )


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
    """A compiled router rounds differently and may select other experts at near ties. Such tokens are counted; the
    others are compared."""
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
    if target.device == "cuda":
        T = TOKEN_COUNTS[0]
        x, weights = randn(T, model.H, grad=True), torch.rand(T, model.K, device=target.device).requires_grad_()
        ids = torch.rand(T, 16, device=target.device).topk(model.K, -1).indices
        logits = randn(T, 16, dtype=torch.float32, grad=True)
        compiled(x, ids, weights, logits).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            compiled(x, ids, weights, logits).sum().backward()
            find("compiled: no host synchronisation in forward and backward", True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    find("compilations after the first token count", counter.frame_count == first, counter.frame_count - first, 0)
    torch._dynamo.reset()
    own = OwnRouting()
    own_routing("own routers", torch.compile(own, fullgraph=True, dynamic=True), own, TOKEN_COUNTS)
    if target.device == "cuda":
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


@part()
def lora_scaled():
    """smoe.experts(lora=) in float16 (on the CPU float32) with factors in float32, dropout, checkpointing and a GradScaler."""
    from torch.utils.checkpoint import checkpoint

    dtype = torch.float16 if target.device == "cuda" else torch.float32
    made = layer(dtype=dtype)
    x, ids, weights, w1, w2 = (made[name].detach() for name in ("x", "ids", "weights", "w1", "w2"))
    shapes = ((16, 8, 256), (16, 256, 8), (16, 8, 128), (16, 256, 8))
    factors = [randn(*shape, scale=0.05, dtype=torch.float32, grad=True) for shape in shapes]
    dout = randn(*x.shape, dtype=torch.float32, scale=1e-4)

    def given(double):
        return [t.detach().double().requires_grad_(t.requires_grad) if double else t for t in (x, w1, w2, *factors)]

    def with_lora(x, dropout=0.0):
        return smoe.experts(x, ids, weights, w1, w2, lora=smoe.LoRA(*factors, 2.0, 0.5, dropout))

    x64, w1_64, w2_64, *exact = given(True)
    merged = w1_64 + 2.0 * exact[1] @ exact[0], w2_64 + 0.5 * exact[3] @ exact[2]
    total = 0
    for e in range(16):
        gate, up = (x64 @ merged[0][e].T).chunk(2, -1)
        total = total + ((ids == e) * weights.double()).sum(-1, keepdim=True) * ((F.silu(gate) * up) @ merged[1][e].T)
    wanted = torch.autograd.grad((total * dout).sum(), exact)
    optimizer, scaler = torch.optim.SGD(factors, lr=0.0), torch.amp.GradScaler(target.device, init_scale=2.0**12)
    for kind, more, kept in (("finite", 1.0, 2.0**12), ("infinite", float("inf"), 2.0**11)):
        optimizer.zero_grad()
        scaler.scale((with_lora(x).float() * dout).sum() * more).backward()
        scaler.unscale_(optimizer)
        if kind == "finite":
            off = max(error(factor.grad, gradient) for factor, gradient in zip(factors, wanted, strict=True))
            find("LoRA, GradScaler: error of the gradients", off < 0.005, f"{off:.1e}", 0.005)
        scaler.step(optimizer)
        scaler.update()
        find(f"LoRA, GradScaler after {kind} gradients", scaler.get_scale() == kept, scaler.get_scale(), kept)

    def dropped(run):
        torch.manual_seed(2)
        out = run(x, 0.3)
        torch.rand(1, device=target.device)
        return [out.detach(), *torch.autograd.grad((out.float() * dout).sum() * 2.0**12, factors)]

    kept = lambda x, p: checkpoint(with_lora, x, p, use_reentrant=False)
    find("LoRA with dropout: checkpointing, equal bits", same(dropped(kept), dropped(with_lora)))
