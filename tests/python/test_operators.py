"""What lies between a tensor and C: the operators' schemas, the layer's record, packed arguments, what is kept."""

import ctypes
import sys

import pytest
import torch
from test_torch import E, H, I, K, same
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import smoe
import smoe.functional  # registers torch.ops.smoe
from smoe import _context, _ops, _record, native


def record(**fields):
    """The arguments of an operator that describe the layer of these tests."""
    fields = dict(activation="swiglu", hidden=H, intermediate=I, experts=E, topk=K, dtype="f32", gradient_type="f32") | fields
    return _record.record("test", **fields)


def test_operators_pass_torchs_own_checks():
    """Schemas and fake kernels, by torch.library.opcheck. (Its comparison of values would read the padding of `saved`.)"""
    x, w1, w2 = torch.randn(9, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    ids, weights, layer = torch.randint(0, E, (9, K)), torch.rand(9, K), record(entry="from_topk", index_type="i64")
    ops, tests = torch.ops.smoe, ("test_schema", "test_faketensor")
    _, saved = ops.experts_forward(x, ids, weights, w1, None, w2, None, True, *layer)
    given = (x, ids, weights, w1, None, w2, None)
    torch.library.opcheck(ops.experts_forward.default, (*given, True, *layer), test_utils=tests)
    torch.library.opcheck(ops.experts_backward.default, (x, x, ids, w1, w2, None, saved, 43, *layer), test_utils=tests)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, ids, w1, w2)]
    torch.library.opcheck(ops.experts_backward.default, (x, *strided, None, saved, 43, *layer), test_utils=tests)
    offsets, layer = torch.arange(E + 1), record(entry="from_rows", index_type="i64", topk=1)
    _, saved = ops.rows_forward(x, offsets, None, w1, None, w2, None, True, *layer)
    given = (x, offsets, None, w1, None, w2, None)
    torch.library.opcheck(ops.rows_forward.default, (*given, True, *layer), test_utils=tests)
    torch.library.opcheck(ops.rows_backward.default, (x, x, w1, w2, None, saved, 11, *layer), test_utils=tests)
    router, layer = torch.randn(E, H), record(rounding="nr_f", tile=8)
    given = (x, router, None, None, None, torch.rand(9) < 0.5, w1, None, w2, None, 0, True, True, True, *layer)
    _, saved, logits, _, _ = ops.moe_forward(*given)
    torch.library.opcheck(ops.moe_forward.default, given, test_utils=tests)
    given = (x, x, router, logits, torch.rand(2), torch.rand(9) < 0.5, w1, w2, None, saved, 0.1, 0.0, 11 + 64, *layer)
    torch.library.opcheck(ops.moe_backward.default, given, test_utils=tests)


LOGITS_READ = [
    ({"score": "softmax_topk", "norm_topk_prob": True}, False),
    ({"score": "topk_softmax"}, False),
    ({"score": "softmax_topk"}, True),
    ({"score": "sigmoid", "norm_topk_prob": True}, True),
    ({"score": "topk_softmax", "rounding": "nr_f", "tile": 8}, True),
    ({"score": "topk_softmax", "balance_coefficient": 0.1}, True),
    ({"score": "topk_softmax", "z_coefficient": 0.1}, True),
]


@pytest.mark.parametrize("options, read", LOGITS_READ)
@pytest.mark.parametrize("given", [False, True])
def test_logits_are_kept_only_if_read(options, read, given):
    """A layer must keep its logits for the backward if and only if the library's backward requires them."""
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(9, H, requires_grad=True), torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    router = None if given else torch.randn(E, H)
    logits = torch.randn(9, E, dtype=torch.bfloat16, requires_grad=True) if given else None
    out = smoe.moe(x, router, w1, w2, top_k=K, logits=logits, **options).out
    _, _, kept, _, _, _, _, saved = out.grad_fn.saved_tensors
    assert (kept is not None) == read
    needs = 1 if router is not None else 1 + 32
    node = out.grad_fn
    demand = (out, x.detach(), router, None, None, None, w1, w2, None, saved, node.balance, node.z, needs, *node.call.record)
    if read:
        with pytest.raises(ValueError, match="logits is NULL"):
            torch.ops.smoe.moe_backward(*demand)
    else:
        wanted = torch.autograd.grad(out, [x, logits] if given else [x], out.detach(), retain_graph=True)
        assert same(torch.ops.smoe.moe_backward(*demand), wanted)
        assert wanted[-1].dtype == (torch.bfloat16 if given else torch.float32)


@pytest.mark.parametrize("rounding", ["none", "nr_f", "sr_f", "nr_s", "balance_f", "up", "down"])
def test_the_bound_of_saved_is_never_too_small(rounding):
    """The affine bound must not be below the size that the library asks for (smoe itself checks this at every new
    shape). With 24576 tokens it must be at most 0.1 % and 4096 bytes above that size."""
    context = _context.context_of(torch.empty(0))
    for experts in (1, 7, 64, 300):
        for tokens in (1, 2, 63, 64, 65, 1000, 24576):
            for entry, topk in (("from_logits", 1), ("from_topk", min(experts, 4)), ("from_rows", 1)):
                if entry != "from_logits" and rounding != "none":
                    continue
                made = record(
                    entry=entry, topk=topk, rounding=rounding, experts=experts, hidden=16, intermediate=256, dtype="bf16"
                )  # fmt: skip
                needed = context.query(_record.layer(tokens, made)).saved_buffer_bytes
                bound = _record.bounds(made).saved(tokens)
                assert bound >= needed
                if tokens == 24576 and experts > 1:  # with one expert token rounding cannot add rows: it has all tokens
                    assert bound <= 1.001 * needed + 4096


@pytest.mark.parametrize("entry", ["experts", "rows", "moe"])
def test_no_file_is_entered_twice(entry):
    """From a tensor to C: a known call must go from file to file without coming back to one, in the forward and in the
    backward."""
    x, w1, w2 = [torch.randn(*shape, requires_grad=True) for shape in ((9, H), (E, 2 * I, H), (E, H, I))]
    call = {
        "experts": lambda: smoe.experts(x, torch.arange(9 * K).view(9, K) % E, torch.rand(9, K), w1, w2),
        "rows": lambda: smoe.experts_rows(x, torch.tensor([0, *range(2, E + 2)]), w1, w2),
        "moe": lambda: smoe.moe(x, torch.randn(E, H), w1, w2, topk=K, losses=True).out,
    }[entry]
    call().sum().backward()
    ways, package = [], smoe.__path__[0]

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        comprehension = frame.f_code.co_name.startswith("<")  # a frame of its own before Python 3.12
        if event == "call" and file.startswith(package) and not comprehension and (not ways[-1] or ways[-1][-1] != file):
            ways[-1].append(file)

    for part in (call, lambda: out.sum().backward()):
        ways.append([])
        sys.setprofile(watch)
        try:
            out = part()
        finally:
            sys.setprofile(None)
    assert [len(way) for way in ways] == [4, 3], ways  # functional, _autograd, _ops, _context; the backward begins in _autograd
    assert all(len(set(way)) == len(way) for way in ways), ways


def test_a_large_backward_that_overwrites_has_two_chunks():
    """If dX~ is larger than 1 GiB, a backward that overwrites `saved` must have at least two chunks. All other calls
    must have the given number."""
    context = _context.context_of(torch.empty(0))
    for tokens, asked, chunks in ((2**18 - 1, 1, 1), (2**18, 1, 1), (2**18 + 1, 1, 2), (2**18 + 1, 4, 4)):
        layer = record(entry="from_topk", hidden=1024, intermediate=64, dtype="bf16", chunks=asked)
        call = _ops.call_of(layer, tokens)
        assert call.describe(context, True).layer.chunks == call.describe(context, False).layer.chunks == asked
        assert call.describe(context, True, reuse=True).layer.chunks == chunks


def test_arguments_are_packed_into_their_fields():
    """Every value must be packed into its named field; all other fields must be zero."""
    structs = {native.ForwardArgs: ("pack_forward", "pack_moe_forward"), native.BackwardArgs: ("pack_backward", "pack_moe_backward")}
    for layout, packers in structs.items():
        named = []
        for packer in packers:
            pack = getattr(_context, packer)
            count = sum(code in "Qf" for code in pack.func.__self__.format) - 1
            packed = layout.from_buffer_copy(pack(*range(1, count + 1)))
            values = [getattr(packed, name) for name, _ in layout._fields_]
            assert values[0] == ctypes.sizeof(layout)
            assert [value for value in values[1:] if value] == list(range(1, count + 1))
            named.append({name for name, _ in layout._fields_ if getattr(packed, name)})
        assert {"x", "w2", "saved_size", "scratch", "scratch_size"} <= named[0] & named[1]
        assert not {"topk_ids", "topk_weights", "dtopk_weights"} & named[1]
        assert not {"logits", "router_weight", "dlogits"} & named[0]


def test_fake_tensors_have_the_shapes_of_real_ones():
    """Fake tensors in eager mode, and with a symbolic number of tokens in a traced graph."""
    def both(x, ids, weights, w1, w2):
        out = smoe.experts(x, ids, weights, w1, w2)
        return out, *torch.autograd.grad(out.sum(), (x, weights, w1, w2))

    def inputs(tokens):
        torch.manual_seed(0)
        leaves = [torch.randn(*shape, requires_grad=True) for shape in ((tokens, H), (tokens, K), (E, 2 * I, H), (E, H, I))]
        return leaves[0], torch.rand(tokens, E).topk(K).indices, *leaves[1:]

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = both(*inputs(9))
    real = both(*inputs(9))
    assert [fake.shape for fake in fakes] == [tensor.shape for tensor in real]
    graph = make_fx(both, tracing_mode="symbolic")(*inputs(9))
    assert same(graph(*inputs(21)), both(*inputs(21)))


SAVED_BYTES = {  # what the backward keeps besides x, w1, w2 and `saved`
    "experts": ("ids",),
    "rows": (),
    "moe": ("router", "logits"),
    "moe, logits not read": ("router",),
}


@pytest.mark.parametrize("entry", SAVED_BYTES)
def test_the_backward_keeps_only_what_it_reads(entry):
    """The backward must keep only X, the weights, ids, logits that it reads, and `saved`, whose size is that of
    smoe_query_sizes and some padding."""
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    made = dict(x=torch.randn(1000, H), w1=torch.randn(E, 2 * I, H), w2=torch.randn(E, H, I), router=torch.randn(E, H))
    x, w1, w2, router = (tensor.requires_grad_() for tensor in made.values())
    made["ids"], weights = torch.rand(1000, E).topk(K).indices, torch.rand(1000, K, requires_grad=True)
    made["logits"] = torch.empty(1000, E)  # of that size
    offsets = torch.tensor([0, *[125 * e for e in range(1, E + 1)]])
    renormalised = entry == "moe, logits not read"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if entry == "experts":
            smoe.experts(x, made["ids"], weights, w1, w2)
        elif entry == "rows":
            smoe.experts_rows(x, offsets, w1, w2)
        else:
            smoe.moe(x, router, w1, w2, top_k=K, norm_topk_prob=renormalised)
    size = lambda name: made[name].numel() * made[name].element_size()
    others = sum(size(name) for name in ("x", "w1", "w2", *SAVED_BYTES[entry]))
    name, topk, index = {"experts": ("from_topk", K, "i64"), "rows": ("from_rows", 1, "i64")}.get(entry, ("from_logits", K, "i32"))
    layer = _record.layer(1000, record(entry=name, topk=topk, index_type=index, renormalize=renormalised))
    needed = _context.context_of(x).query(layer).saved_buffer_bytes
    assert needed <= sum(kept.values()) - others <= needed + 12 * 256
