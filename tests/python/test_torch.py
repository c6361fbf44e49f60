"""Ways in which PyTorch runs a layer: compile, checkpointing, autocast, hooks, modes, threads, forks."""

import threading

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import smoe
import smoe.functional  # registers torch.ops.smoe
from smoe import _context, native

H, I, E, K = 32, 16, 8, 2


class Block(torch.nn.Module):
    """A module that runs all three entries one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        leaf = lambda *shape: torch.nn.Parameter(torch.randn(*shape) * 0.3)
        self.router, self.w1, self.w2 = leaf(E, H), leaf(E, 2 * I, H), leaf(E, H, I)
        self.moe = smoe.MoE(H, I, E, K, initializer_range=0.3, rounding="nr_f", tile=8, balance_coefficient=0.01)
        self.register_buffer("offsets", torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8]))

    def forward(self, x):
        h = F.rms_norm(x, (H,))
        values, ids = F.linear(h, self.router).topk(K, -1)
        x = x + smoe.experts(h, ids, values.softmax(-1), self.w1, self.w2)
        found = self.moe(F.rms_norm(x, (H,)), losses=True, counts=True)
        x = x + found.out
        return x + smoe.experts_rows(F.rms_norm(x, (H,)), self.offsets, self.w1, self.w2)


def step(function, model, tokens, dtype=torch.float32):
    """The output, dx, and the gradient of every parameter."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).to(dtype).requires_grad_()
    model.zero_grad()
    out = function(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def near(ours, theirs, tolerance=1e-5):
    return all((a - b).norm() <= tolerance * b.norm() for a, b in zip(ours, theirs, strict=True))


# ---- compile ----


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_new_number_of_tokens_compiles_nothing(backend):
    torch._dynamo.reset()
    model = Block()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    check = same if backend == "aot_eager" else near
    assert check(step(compiled, model, 40), step(model, model, 40))
    first = counter.frame_count
    for tokens in (17, 33, 100, 57, 64):
        assert check(step(compiled, model, tokens), step(model, model, tokens)), tokens
    assert counter.frame_count == first


def test_without_gradients_a_compiled_layer_has_the_same_bits():
    torch._dynamo.reset()
    model = Block()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        x = torch.randn(21, H)
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("frozen", [("w1", "w2"), ("router",)])
def test_with_frozen_tensors_a_compiled_layer_has_the_same_bits(frozen):
    torch._dynamo.reset()
    model = Block()
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    left = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = []
    for function in (compiled, model):
        x = torch.randn(21, H, generator=torch.Generator().manual_seed(0))
        gradients.append(torch.autograd.grad(function(x).square().sum(), left))
    assert same(*gradients)


def test_without_kept_logits_a_compiled_layer_has_the_same_bits():
    torch._dynamo.reset()
    model = smoe.MoE(H, I, E, K, initializer_range=0.3, norm_topk_prob=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (21, 40):
        assert same(step(compiled, model, tokens), step(model, model, tokens))


# ---- checkpointing, hooks, modes ----


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(reentrant):
    model = Block()
    wrapped = lambda x: checkpoint(model, x, use_reentrant=reentrant)
    assert same(step(wrapped, model, 50), step(model, model, 50))


def test_selective_checkpointing_keeps_the_experts(monkeypatch):
    """A policy keeps the outputs of one operator. This operator must run once, those of the other two entries twice."""
    from smoe._context import Context

    model, calls, forward = Block(), [], Context.forward
    monkeypatch.setattr(Context, "forward", lambda self, *fields: calls.append(1) or forward(self, *fields))

    def policy(ctx, op, *args, **kwargs):
        kept = op == torch.ops.smoe.experts_forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)
    found = step(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts), model, 50)
    assert len(calls) == 5
    assert same(found, step(model, model, 50))


def test_saved_tensors_may_move():
    """Hooks that return saved tensors at another address and alignment."""
    model = Block()

    def unpack(packed):
        block = torch.empty(packed.numel() * packed.element_size() + 64, dtype=torch.uint8)
        moved = block[16 : 16 + packed.numel() * packed.element_size()].view(packed.dtype).view(packed.shape)
        return moved.copy_(packed)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), unpack):
        ours = step(model, model, 50)
    assert same(ours, step(model, model, 50))
    with torch.autograd.graph.save_on_cpu():
        ours = step(model, model, 50)
    assert same(ours, step(model, model, 50))


@pytest.mark.parametrize("entry", ["experts", "moe"])
@pytest.mark.parametrize("frozen", [("w1", "w2"), ("w1", "w2", "weights", "router"), ("x",), ("w2", "x")])
def test_frozen_tensors_have_no_gradient_in_the_call(entry, frozen, monkeypatch):
    """For a frozen tensor the C call must get no place for a gradient: the library launches what the others need. (The
    library's side is `smoe verify --check gradients`.)"""
    given, real = [], _context.Context.backward

    def watched(self, layer, arguments):
        given.append(native.BackwardArgs.from_buffer_copy(arguments))
        real(self, layer, arguments)

    monkeypatch.setattr(_context.Context, "backward", watched)
    shapes = dict(x=(9, H), weights=(9, K), w1=(E, 2 * I, H), w2=(E, H, I), router=(E, H))
    made = {name: torch.rand(*shape).requires_grad_(name not in frozen) for name, shape in shapes.items()}
    x, weights, w1, w2, router = made.values()
    if entry == "experts":
        out = smoe.experts(x, torch.arange(9 * K).view(9, K) % E, weights, w1, w2)
        names = {"x": "dx", "weights": "dtopk_weights", "w1": "dw1", "w2": "dw2"}
    else:
        out = smoe.moe(x, router, w1, w2, top_k=K).out
        names = {"x": "dx", "router": "drouter_weight", "w1": "dw1", "w2": "dw2"}
    out.sum().backward()
    written = {field for field, _ in native.BackwardArgs._fields_ if field.startswith("d") and getattr(given[0], field)}
    assert written - {"dout"} == {field for name, field in names.items() if name not in frozen}


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast_computes_in_its_dtype(dtype):
    """Under autocast the layer must compute in autocast's dtype, as a matmul does. Its float32 parameters must get
    float32 gradients."""
    model = Block()

    def cast(x):
        with torch.autocast("cpu", dtype):
            return model(x)

    found = step(cast, model, 50)
    exact = step(model, model, 50)
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])
    x = torch.randn(50, H)
    ids, weights = torch.rand(50, E).topk(K).indices, torch.rand(50, K)
    with torch.autocast("cpu", dtype):
        out = smoe.experts(x, ids, weights, model.w1, model.w2)
    low = [t.detach().to(dtype) for t in (x, model.w1, model.w2)]
    assert out.dtype == dtype and torch.equal(out, smoe.experts(low[0], ids, weights, low[1], low[2]))
    assert near(found[1:2], exact[1:2], 0.3)


def test_strides_of_gradients_and_inputs_change_no_bit():
    """Broadcast (sum), transposed and strided gradients; inputs that are views."""
    model = Block()
    x = torch.randn(50, H, requires_grad=True)
    ids, weights = torch.rand(50, E).topk(K).indices, torch.rand(50, K)
    run = lambda dout: torch.autograd.grad(smoe.experts(x, ids, weights, model.w1, model.w2), x, dout)[0]
    dense = torch.randn(50, H)
    assert torch.equal(run(dense.T.contiguous().T), run(dense))
    ones = torch.ones(()).expand(50, H)
    assert torch.equal(run(ones), run(torch.ones(50, H)))
    wide, far = torch.randn(50, 3 * H), torch.randn(51, K + 1)
    views = smoe.experts(wide[:, H : 2 * H], ids.T.contiguous().T, far[1:, 1:], model.w1, model.w2)
    copies = smoe.experts(wide[:, H : 2 * H].contiguous(), ids, far[1:, 1:].contiguous(), model.w1, model.w2)
    assert torch.equal(views, copies)
    flat = torch.randn(E * 2 * I * H + 1)[1:].view(E, 2 * I, H)  # four bytes from an aligned address
    assert torch.equal(smoe.experts(dense, ids, weights, flat, model.w2), smoe.experts(dense, ids, weights, flat.clone(), model.w2))


def test_deterministic_algorithms_change_no_bit():
    model = Block()
    plain = step(model, model, 50)
    torch.use_deterministic_algorithms(True)
    try:
        assert same(step(model, model, 50), plain)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_bits_do_not_depend_on_threads():
    model, threads = Block(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = step(model, model, 300)
        torch.set_num_threads(2)
        assert same(step(model, model, 300), single)
    finally:
        torch.set_num_threads(threads)


def test_a_second_derivative_is_refused():
    model, x = Block(), torch.randn(9, H, requires_grad=True)
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def entries():
    """Each of the three entries, as a function of x."""
    model = Block()
    router, w1, w2 = (p.detach() for p in (model.router, model.w1, model.w2))
    ids, weights = torch.arange(9 * K).view(9, K) % E, torch.rand(9, K)
    offsets = torch.tensor([0, 2, 3, 4, 5, 6, 7, 8, 9])
    return [
        lambda x: smoe.experts(x, ids, weights, w1, w2),
        lambda x: smoe.experts_rows(x, offsets, w1, w2),
        lambda x: smoe.moe(x, router, w1, w2, top_k=K).out,
    ]


@pytest.mark.parametrize("entry", range(3))
def test_a_penalty_on_a_gradient_is_refused(entry):
    """The gradient of a sum is not a constant. Its derivative must raise an error and must not be treated as zero."""
    x = torch.randn(9, H, requires_grad=True)
    (gradient,) = torch.autograd.grad(entries()[entry](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (gradient.square().sum() + x.sum()).backward()


@pytest.mark.parametrize("entry", range(3))
def test_transforms_are_refused(entry):
    """torch.func and forward-mode derivatives must raise an error. A derivative without smoe's part would be wrong."""
    function, x = entries()[entry], torch.randn(9, H)
    function(x)  # this call remembers that its arguments passed the checks; the calls below must still be refused
    with pytest.raises(RuntimeError, match="Batching rule not implemented for smoe::"):
        torch.vmap(function)(torch.stack([x, x]))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: function(x).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        assert same([function(x)], [function(x.clone())])
        with pytest.raises(NotImplementedError, match="jvp"):
            function(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("entry", range(3))
def test_a_tensor_that_a_transform_left_behind_is_taken(entry):
    """After torch.func.grad its tensors have no address of their own, but PyTorch's functions still take them."""
    function, x, left = entries()[entry], torch.randn(9, H, requires_grad=True), []
    torch.func.grad(lambda x: left.append(x) or x.sum())(x)
    assert same(torch.autograd.grad(function(left[0]).sum(), x), torch.autograd.grad(function(x).sum(), x))
    assert same(torch.autograd.grad(function(left[0]).sum(), x), torch.autograd.grad(function(x).sum(), x))  # checked before


@pytest.mark.parametrize("entry", range(3))
@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_trace_is_refused(entry):
    """A traced module could have the sizes of the traced call as constants. The error names what to use instead."""
    function, x = entries()[entry], torch.randn(9, H)
    function(x)
    with pytest.raises(NotImplementedError, match="smoe.* torch.jit.trace is not supported; use torch.compile or torch.export"):
        torch.jit.trace(function, x)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_takes_any_number_of_tokens(strict):
    """Without gradients it keeps nothing for a backward."""
    model = Block()
    tokens = {0: torch.export.Dim("tokens", min=2)}
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(40, H),), dynamic_shapes=(tokens,), strict=strict)
        for x in (torch.randn(17, H), torch.randn(64, H)):
            assert torch.equal(program.module()(x), model(x))
    calls = [node for node in program.graph.nodes if "smoe" in str(node.target)]
    assert calls and not any(node.args[-1] for node in calls)  # their last argument is `save`


def test_a_second_backward_gives_the_same_gradient():
    model, x = Block(), torch.randn(9, H, requires_grad=True)
    out = model(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    assert same(first, torch.autograd.grad(out, x))


def test_the_last_backward_overwrites_what_was_saved(monkeypatch):
    reused, real = [], _context.Context.backward

    def watched(self, layer, arguments):
        reused.append(native.Layer.from_address(layer).reuse_saved)
        real(self, layer, arguments)

    monkeypatch.setattr(_context.Context, "backward", watched)
    model, x = Block(), torch.randn(9, H, requires_grad=True)
    leaves = [x, *model.parameters()]
    out = model(x).sum()
    kept = [torch.autograd.grad(out, leaves, retain_graph=True) for _ in range(2)]
    assert reused == [0] * 6 and same(*kept)  # three entries, two backwards
    assert same(kept[0], torch.autograd.grad(out, leaves)) and reused[6:] == [1] * 3
    out = checkpoint(model, x, use_reentrant=False).sum()  # each backward makes the graph of the layer again
    assert same(kept[0], torch.autograd.grad(out, leaves)) and reused[9:] == [1] * 3


def test_a_retried_backward_says_that_saved_is_overwritten():
    """A post-hook that raises ends the backward before the engine frees the saved tensors, so the same node can run
    again. The second backward must raise an error, because the first has overwritten `saved`."""
    model, x = Block(), torch.randn(9, H, requires_grad=True)
    out = smoe.experts(x, torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1), model.w1, model.w2)
    hook = out.grad_fn.register_hook(lambda *gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(out.sum(), x)
    hook.remove()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(out.sum(), x)


def test_backwards_of_two_threads_do_not_overwrite_saved(monkeypatch):
    """A backward without retain_graph must not overwrite `saved` while the backward of another thread reads it."""
    model, x = Block(), torch.randn(9, H, requires_grad=True)
    out = smoe.experts(x, torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1), model.w1, model.w2)
    reused, real, inside = [], _context.Context.backward, []

    def watched(self, layer, arguments):
        reused.append(native.Layer.from_address(layer).reuse_saved)
        if len(reused) == 1:  # the second backward runs while the first, with retain_graph, has not returned
            second = threading.Thread(target=lambda: inside.append(torch.autograd.grad(out.sum(), x)))
            second.start()
            second.join()
        real(self, layer, arguments)

    monkeypatch.setattr(_context.Context, "backward", watched)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert reused == [0, 0] and same(first, inside[0])


# ---- the operators of a step ----


def test_a_step_runs_nothing_besides_the_calls():
    """PyTorch's own operators in a step of smoe.MoE must only allocate: no copy, fill or cast."""
    moe = smoe.MoE(H, I, E, K)
    x, dout = torch.randn(40, H, requires_grad=True), torch.randn(40, H)
    leaves = [x, *moe.parameters()]
    step = lambda: torch.autograd.grad(moe(x), leaves, dout)
    step()
    with torch.profiler.profile() as profiler:
        step()
    ran = {event.key for event in profiler.key_averages() if event.key.startswith(("aten::", "smoe::"))}
    assert {"smoe::moe_forward", "smoe::moe_backward"} <= ran
    allocations = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
    assert ran <= {"smoe::moe_forward", "smoe::moe_backward"} | allocations


def test_an_output_without_a_gradient_gives_its_inputs_none():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            ctx.set_materialize_grads(False)
            return out.clone()

        @staticmethod
        def backward(ctx, dout):
            return None

    moe, x = smoe.MoE(H, I, E, K), torch.randn(9, H, requires_grad=True)
    Stop.apply(moe(x)).sum().backward()
    assert x.grad is None and moe.gate.weight.grad is None
