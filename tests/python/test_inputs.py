"""Bad arguments must raise an exception of the right type that names argument, value and what was expected. Nothing may
be printed."""

import pytest
import torch

import smoe

T, H, I, E, K = 6, 16, 8, 4, 2


def good():
    return dict(
        x=torch.randn(T, H), ids=torch.zeros(T, K, dtype=torch.int64), weights=torch.rand(T, K),
        w1=torch.randn(E, 2 * I, H), w2=torch.randn(E, H, I),
    )  # fmt: skip


def good_rows():
    given = good()
    return dict(rows=given["x"], offsets=torch.zeros(E + 1, dtype=torch.int32), w1=given["w1"], w2=given["w2"])


def good_moe():
    given = good()
    return dict(x=given["x"], router_weight=torch.randn(E, H), w1=given["w1"], w2=given["w2"], top_k=K)


def meta(*shape):
    return torch.empty(*shape, device="meta")


def nested(rows, columns):
    return torch.nested.nested_tensor([torch.randn(columns)] * rows, layout=torch.jagged)


EXPERTS = [
    (dict(x=[1, 2]), TypeError, "x is a list; expected a torch.Tensor"),
    (dict(x=torch.randn(T, H, dtype=torch.float64)), TypeError, "x has dtype torch.float64; expected torch.bfloat16"),
    (dict(x=torch.randn(T, H, dtype=torch.float16)), TypeError, "x has dtype torch.float16; .* on cpu"),
    (dict(x=torch.randn(H)), ValueError, r"x has shape \(16,\); expected \(T, H\)"),
    (dict(x=torch.randn(T, 24)), ValueError, r"x has shape \(6, 24\); expected \(T, H\) = \(6, 16\)"),
    (dict(w1=None), TypeError, "w1 is a NoneType"),
    (dict(w1=torch.randn(E, I, H)), ValueError, r"w1 has shape \(4, 8, 16\); expected \(E, 2I, H\) = \(4, 16, 16\)"),
    (dict(w1=torch.randn(E, 2 * I, H, dtype=torch.bfloat16)), TypeError, "w1 has dtype torch.bfloat16; expected torch.float32"),
    (dict(w1=torch.randn(E, H, 2 * I).transpose(1, 2)), ValueError, "w1 of shape .* has strides .*contiguous"),
    (dict(w1=meta(E, 2 * I, H)), ValueError, "w1 is on meta; expected cpu, where x is"),
    (dict(w2=torch.randn(H, I)), ValueError, r"w2 has shape \(16, 8\); expected \(E, H, I\)"),
    (dict(w1=torch.randn(E, 24, H), w2=torch.randn(E, H, 12)), ValueError, "smoe.experts: intermediate is 12, it must be a multiple of 8"),
    (dict(b1=torch.randn(E, I)), ValueError, r"b1 has shape \(4, 8\); expected \(E, 2I\) = \(4, 16\)"),
    (dict(b2=torch.randn(E)), ValueError, r"b2 has shape \(4,\); expected \(E, H\)"),
    (dict(ids=torch.zeros(T, K)), TypeError, "ids has dtype torch.float32; expected torch.int32 or torch.int64"),
    (dict(ids=torch.zeros(T, dtype=torch.int32)), ValueError, r"ids has shape \(6,\); expected \(T, K\)"),
    (dict(ids=torch.zeros(T + 1, K, dtype=torch.int32)), ValueError, r"ids has shape \(7, 2\); expected"),
    (dict(ids=torch.zeros(T, 5, dtype=torch.int32), weights=torch.rand(T, 5)), ValueError, "topk is 5, the range is 1 to 4"),
    (dict(ids=torch.zeros(T, K, dtype=torch.int32, device="meta")), ValueError, "ids is on meta; expected cpu"),
    (dict(weights=torch.rand(T, 1)), ValueError, r"weights has shape \(6, 1\); expected .* = \(6, 2\)"),
    (dict(weights=torch.rand(T, K).double()), TypeError, "weights has dtype torch.float64"),
    (dict(activation="tanh"), ValueError, "activation is 'tanh'; expected one of swiglu, geglu"),
    (dict(layout="transposed"), ValueError, "layout is 'transposed'; expected one of concatenated, interleaved"),
    (dict(activation=["swiglu"]), ValueError, r"activation is \['swiglu'\]; expected one of swiglu, geglu"),
    (dict(chunks=3), ValueError, "smoe.experts: chunks is 3, it must be a power of two"),
    (dict(chunks="2"), ValueError, "chunks is '2'; expected an integer"),
    (dict(chunks=2**32 + 1), ValueError, "chunks is 4294967297; expected -2147483648..2147483647"),
    (dict(x=torch.randn(T, H).to_sparse()), TypeError, "smoe.experts: x has layout torch.sparse_coo; expected a dense tensor"),
    (dict(ids=torch.ones(T, K, dtype=torch.int64).to_sparse()), TypeError, "ids has layout torch.sparse_coo"),
    (dict(w2=torch.randn(E, H, I).to_mkldnn()), TypeError, "w2 has layout torch._mkldnn; expected a dense tensor"),
    (dict(b1=torch.randn(E, 2 * I).to_sparse()), TypeError, "b1 has layout torch.sparse_coo; expected a dense tensor"),
    (dict(x=nested(T, H)), TypeError, "x is a nested tensor; expected a dense tensor"),
    (dict(weights=nested(T, K)), TypeError, "weights is a nested tensor; expected a dense tensor"),
    (dict(gradient_dtype=torch.float64), TypeError, "gradient_dtype is torch.float64"),
]  # fmt: skip

ROWS = [
    (dict(rows=torch.randn(T, H).double()), TypeError, "rows has dtype torch.float64"),
    (dict(offsets=torch.zeros(E, dtype=torch.int32)), ValueError, r"offsets has shape \(4,\); expected \(E \+ 1\) = \(5,\)"),
    (dict(offsets=torch.zeros(E + 1)), TypeError, "offsets has dtype torch.float32"),
    (dict(offsets=torch.ones(E + 1, dtype=torch.int32).to_sparse()), TypeError, "smoe.experts_rows: offsets has layout"),
    (dict(offsets=torch.tensor([0, 3, 1, 4, 6])), ValueError, r"offsets\[2\] is 1, below offsets\[1\], 3"),
    (dict(offsets=torch.tensor([0, 3, 4, 5, 7])), ValueError, r"offsets\[4\] is 7, but the layer has 6 rows"),
    (dict(row_weights=torch.rand(T + 1)), ValueError, r"row_weights has shape \(7,\); expected \(R\) = \(6,\)"),
]  # fmt: skip

MOE = [
    (dict(top_k=5), ValueError, "smoe.moe: topk is 5, the range is 1 to 4"),
    (dict(top_k=0), ValueError, "topk is 0"),
    (dict(top_k=None), TypeError, "topk is None; expected an integer"),
    (dict(router_weight=None), ValueError, "either router_weight or logits; neither was given"),
    (dict(logits=torch.randn(T, E)), ValueError, "either router_weight or logits; both were given"),
    (dict(router_weight=None, logits=torch.randn(T, E).double()), TypeError, "logits has dtype torch.float64"),
    (dict(router_weight=None, logits=torch.randn(T, 3)), ValueError, r"logits has shape \(6, 3\); expected \(T, E\)"),
    (dict(router_weight=torch.randn(E, H).bfloat16()), TypeError, "router_weight has dtype torch.bfloat16; .*the dtype of x"),
    (dict(router_bias=torch.randn(3)), ValueError, r"router_bias has shape \(3,\)"),
    (dict(selection_bias=torch.zeros(E)), ValueError, "selection_bias is given, but only SMOE_SCORE_SIGMOID has one"),
    (dict(score="softmax"), ValueError, "score is 'softmax'; expected one of softmax_topk, topk_softmax, sigmoid"),
    (dict(rounding="nearest"), ValueError, "rounding is 'nearest'"),
    (dict(tile=0), ValueError, "tile is 0, the range is 1 to 4096"),
    (dict(step=-1), ValueError, "step is -1"),
    (dict(n_group=2, topk_group=3, score="sigmoid"), ValueError, "groups_kept is 3, the range is 1 to 2"),
    (dict(n_group=3, score="sigmoid"), ValueError, r"groups is 3, it must divide experts \(4\)"),
    (dict(n_group=2), ValueError, "groups is 2, but groups need SMOE_SCORE_SIGMOID"),
    (dict(n_group=2, top_k=3, score="sigmoid"), ValueError, "topk is 3, but the 1 groups kept hold 2 experts"),
    (dict(score="topk_softmax", norm_topk_prob=True), ValueError, "renormalize is 1, but the weights of SMOE_SCORE_TOPK_SOFTMAX"),
    (dict(routed_scaling_factor=0.0), ValueError, "route_scale is 0, it must be positive"),
    (dict(routed_scaling_factor=float("nan")), ValueError, "route_scale is nan, it must be positive"),
    (dict(balance_coefficient=float("nan")), ValueError, "balance_coefficient is nan; expected a number"),
    (dict(z_coefficient=float("inf")), ValueError, "z_coefficient is inf; expected a number"),
    (dict(losses="yes"), TypeError, "losses is 'yes'; expected True or False"),
    (dict(counts=torch.tensor(True)), TypeError, r"counts is tensor\(True\); expected True or False"),
    (dict(router_weight=torch.randn(E, H).to_sparse()), TypeError, "smoe.moe: router_weight has layout torch.sparse_coo"),
    (dict(selection_bias=torch.randn(E).to_sparse(), score="sigmoid"), TypeError, "selection_bias has layout"),
    (dict(logits_dtype=torch.float16), TypeError, "logits_dtype is torch.float16"),
    (dict(routed_scaling_factor=torch.tensor(2.0)), TypeError, "route_scale is a Tensor; expected a number"),
    (dict(balance_coefficient=torch.tensor(0.1)), TypeError, "balance_coefficient is a Tensor; expected a number"),
    (dict(z_coefficient=None), TypeError, "z_coefficient is a NoneType; expected a number"),
    (dict(renormalize=None), TypeError, "renormalize is None; expected an integer"),
    (dict(chunks=2.0), TypeError, "chunks is 2.0; expected an integer"),
    (dict(gradient_dtype=torch.float16), TypeError, "gradient_dtype is torch.float16; expected None or torch.float32$"),
]  # fmt: skip

CASES = [(smoe.experts, good, *case) for case in EXPERTS]
CASES += [(smoe.experts_rows, good_rows, *case) for case in ROWS] + [(smoe.moe, good_moe, *case) for case in MOE]


@pytest.mark.parametrize("function, given, change, kind, text", CASES, ids=lambda value: value if type(value) is str else "")
def test_a_bad_argument_is_named_and_nothing_is_printed(function, given, change, kind, text, capfd):
    arguments = given()
    function(**arguments)
    with pytest.raises(kind, match=text) as caught:
        function(**(arguments | change))
    assert type(caught.value) is kind
    assert capfd.readouterr() == ("", "")


def test_update_selection_bias_names_a_bad_argument():
    bias, counts = torch.zeros(E), torch.zeros(E, dtype=torch.int32)
    with pytest.raises(TypeError, match="counts has dtype torch.int64"):
        smoe.update_selection_bias(bias, counts.long(), 0.1)
    with pytest.raises(ValueError, match="counts has shape"):
        smoe.update_selection_bias(bias, counts[1:], 0.1)
    for gamma in (None, torch.tensor(0.1)):
        with pytest.raises(TypeError, match="gamma is a .*; expected a number"):
            smoe.update_selection_bias(bias, counts, gamma)
    with pytest.raises(ValueError, match="gamma is nan"):
        smoe.update_selection_bias(bias, counts, float("nan"))


def test_a_bad_argument_is_named_under_autocast():
    with torch.autocast("cpu"), pytest.raises(TypeError, match="smoe.experts: w1 is a list; expected a torch.Tensor"):
        smoe.experts(**(good() | dict(w1=[1])))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'expert'"):
        smoe.expert


MODULE = [
    (dict(hidden_size=12), ValueError, "smoe.MoE: hidden is 12, it must be a multiple of 8"),
    (dict(hidden_size=-16), ValueError, "hidden is -16, the range is"),
    (dict(intermediate_size=8.0), TypeError, "intermediate is 8.0; expected an integer"),
    (dict(num_experts=None), TypeError, "experts is None; expected an integer"),
    (dict(top_k=5), ValueError, "topk is 5, the range is 1 to 4"),
    (dict(activation="swish"), ValueError, "activation is 'swish'; expected one of swiglu"),
    (dict(selection_bias=torch.zeros(E)), TypeError, "selection_bias is tensor.*; expected True or False"),
    (dict(no_such_option=1), TypeError, "no_such_option is no option; expected one of activation, balance_coefficient"),
    (dict(losses=True), TypeError, "losses is no option"),
    (dict(layout="transposed"), ValueError, "layout is 'transposed'; expected one of concatenated, interleaved"),
    (dict(chunks=3), ValueError, "smoe.MoE: chunks is 3, it must be a power of two"),
    (dict(score="softmax"), ValueError, "score is 'softmax'; expected one of softmax_topk, topk_softmax, sigmoid"),
    (dict(rounding="nearest"), ValueError, "rounding is 'nearest'; expected one of none, nr_f"),
    (dict(tile=0), ValueError, "tile is 0, the range is 1 to 4096"),
    (dict(seed=-1), ValueError, "seed is -1; expected 0.."),
    (dict(n_group=2), ValueError, "groups is 2, but groups need SMOE_SCORE_SIGMOID"),
    (dict(score="topk_softmax", renormalize=True), ValueError, "renormalize is 1, but the weights of"),
    (dict(balance_coefficient="x"), TypeError, "balance_coefficient is a str; expected a number"),
    (dict(routed_scaling_factor=0), ValueError, "route_scale is 0, it must be positive"),
    (dict(logits_dtype=torch.float16), TypeError, "logits_dtype is torch.float16"),
    (dict(gradient_dtype="f32"), TypeError, "gradient_dtype is 'f32'; expected None or a floating-point dtype"),
]  # fmt: skip


@pytest.mark.parametrize("change, kind, text", MODULE)
def test_the_module_names_a_bad_option(change, kind, text):
    with pytest.raises(kind, match=text):
        smoe.MoE(**(dict(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K) | change))


def test_the_module_names_a_bad_input():
    layer = smoe.MoE(H, I, E, K)
    layer(torch.randn(T, H))
    with pytest.raises(TypeError, match="smoe.MoE: x is a NoneType; expected a torch.Tensor"):
        layer(None)
    with pytest.raises(ValueError, match=r"smoe.MoE: x has shape \(\); expected \(..., H\)"):
        layer(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"smoe.moe: x has shape \(6, 15\); expected \(T, H\) = \(6, 16\)"):
        layer(torch.randn(2, 3, 15))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_has_no_shape():
    x = torch.nested.nested_tensor([torch.randn(H)] * T)
    with pytest.raises(TypeError, match="smoe.experts: x is a nested tensor"):
        smoe.experts(**(good() | dict(x=x)))


def test_sizes_are_integers_also_after_a_failed_call():
    layer, x = smoe.MoE(32, 16, 8, 2), torch.randn(3, 32)
    layer.top_k = 2.0
    with pytest.raises(TypeError, match="topk is 2.0; expected an integer"):
        layer(x)
    layer.top_k = 2
    layer(x)
    given = dict(top_k=2, w1=torch.randn(8, 32, 32), w2=torch.randn(8, 32, 16))
    for step in (1.5, None, True, torch.tensor(3)):
        with pytest.raises(TypeError, match="smoe.moe: step is"):
            smoe.moe(x, torch.randn(8, 32), step=step, **given)
