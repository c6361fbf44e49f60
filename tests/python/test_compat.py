"""smoe's functions with the signatures of SonicMoE 0.1.2.post1, Megatron-Core 0.19.2 (TEGroupedMLP.forward), prime-rl
049a80af (GroupedExperts.forward) and torchtitan 00a4c147 (RoutedExperts, ModelConfigConverter). PyPI does not have
the last two. So this file repeats the signatures, and the results are compared with reference.py. test_fetched.py
compares with the code of the first two."""

import inspect
import sys
import types
from dataclasses import dataclass, field

import pytest
import reference
import torch

import smoe
from smoe import compat

H, I, E, K, T = 32, 16, 8, 2, 40


def near(ours, theirs, tolerance=1e-5):
    return (ours - theirs).norm() <= tolerance * theirs.norm()


def gradients(out, leaves):
    generator = torch.Generator().manual_seed(0)
    return torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator).to(out.dtype))


SIGNATURES = {
    compat.moe_TC_softmax_topk_layer: "x router_w w1 b1 w2 b2 K stream_id activation_type is_inference_mode_enabled "
    "is_softmax_over_topk norm_topk_probs concat_layout",
    compat.moe_general_routing_inputs: "x router_scores token_indices expert_indices w1 b1 w2 b2 E stream_id "
    "activation_type is_inference_mode_enabled concat_layout",
    compat.te_grouped_mlp: "permuted_local_hidden_states tokens_per_expert permuted_probs w1 w2 output_buffer "
    "grad_input_buffer options",
    compat.grouped_experts: "x num_tokens_per_expert w1 w2 w3",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures_are_those_of_the_originals(function):
    assert list(inspect.signature(function).parameters) == SIGNATURES[function].split()


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("score", ["topk_softmax", "softmax_topk", "renormalised"])
def test_sonicmoes_layer_equals_the_reference(layer, concat, score):
    made = layer(biases=True)
    leaves = [made[name] for name in ("x", "router_weight", "w1", "w2", "b1", "b2")]
    x, router, w1, w2, b1, b2 = leaves
    out, logits, counts = compat.moe_TC_softmax_topk_layer(
        x, router, w1.permute(1, 2, 0), b1, w2.permute(1, 2, 0), b2, K, 0, concat_layout=concat,
        is_softmax_over_topk=score == "topk_softmax", norm_topk_probs=score != "softmax_topk",
    )  # fmt: skip
    wanted, _, wanted_counts = reference.moe(
        x, router, w1, w2, top_k=K, b1=b1, b2=b2, layout="concatenated" if concat else "interleaved",
        score="topk_softmax" if score == "topk_softmax" else "softmax_topk", norm_topk_prob=score == "renormalised",
    )  # fmt: skip
    assert near(out, wanted) and torch.equal(counts, wanted_counts.int())
    # The sum includes the logits, because they must be differentiable too.
    ours = gradients(torch.cat([out.flatten(), logits.flatten()]), leaves)
    theirs = gradients(torch.cat([wanted.flatten(), (x @ router.T).flatten()]), leaves)
    assert all(near(a, b, 1e-4) for a, b in zip(ours, theirs))


def test_sonicmoes_activations_are_those_of_smoe(layer):
    """SonicMoE's GEGLU is a kernel of QuACK with the tanh approximation; its ReGLU is the same as smoe's."""
    made = layer()
    x, router, w1, w2 = (made[name].detach() for name in ("x", "router_weight", "w1", "w2"))
    for theirs, ours in (("geglu", "geglu_tanh"), ("reglu", "reglu")):
        kind = types.SimpleNamespace(value=theirs)  # an ActivationType
        out = compat.moe_TC_softmax_topk_layer(
            x, router, w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, K, 0, kind, concat_layout=True
        )[0]
        logits = x @ router.T
        assert torch.equal(out, smoe.moe(x, None, w1, w2, top_k=K, logits=logits, score="topk_softmax", activation=ours).out)


def test_sonicmoes_general_routing_equals_the_reference(layer):
    """Tokens with no pair, one pair and several pairs. A pair with an expert outside of 0..E-1 is skipped."""
    made = layer()
    tokens = torch.tensor([0, 0, 0, 2, 3, 3, 9, 9], dtype=torch.int32)
    ids = torch.tensor([1, 5, 2, 7, 0, 8, 5, 1], dtype=torch.int32)
    scores = torch.rand(8, requires_grad=True)
    leaves = [made["x"], made["w1"], made["w2"], scores]
    x, w1, w2, _ = leaves
    out, counts = compat.moe_general_routing_inputs(
        x, scores, tokens, ids, w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, E, 0, "swiglu", concat_layout=True
    )
    pairs = torch.zeros(len(x), E + 1).index_put((tokens.long(), ids.long()), scores)[:, :E]
    wanted = reference.from_pairs(x, pairs, w1, w2)
    assert near(out, wanted) and counts.tolist() == [1, 2, 1, 0, 0, 2, 0, 1]
    assert all(near(a, b, 1e-4) for a, b in zip(gradients(out, leaves), gradients(wanted, leaves)))


def test_other_layouts_are_refused(layer):
    made = layer()
    with pytest.raises(ValueError, match="w1 of shape .* expected a view parameter.permute"):
        compat.moe_TC_softmax_topk_layer(
            made["x"], made["router_weight"], made["w1"].permute(1, 2, 0).contiguous(), None,
            made["w2"].permute(1, 2, 0), None, K, 0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="keep them in one parameter"):
        compat.joined(made["w1"][:, :I], made["w1"][:, :I])
    with pytest.raises(ValueError, match="keep them in one parameter"):
        compat.joined(torch.randn(E, I, H), torch.randn(E, I, H))


@pytest.mark.parametrize("probs", [False, True])
def test_megatrons_experts_equal_the_reference(layer, probs):
    made = layer()
    counts = torch.tensor([3, 0, 7, 10, 1, 9, 10, 8])
    weights = torch.rand(48, requires_grad=True) if probs else None
    leaves = [made["x"], made["w1"], made["w2"]] + ([weights] if probs else [])
    out, bias = compat.te_grouped_mlp(made["x"], counts, weights, made["w1"], made["w2"])
    offsets = [0, *counts.cumsum(0).tolist()]
    wanted = reference.experts_rows(made["x"], offsets, made["w1"], made["w2"], weights)
    assert bias is None and near(out, wanted)
    assert all(near(a, b, 1e-4) for a, b in zip(gradients(out, leaves), gradients(wanted, leaves)))
    with pytest.raises(NotImplementedError, match="grad_input_buffer must be None"):
        compat.te_grouped_mlp(made["x"], counts, weights, made["w1"], made["w2"], output_buffer=None, grad_input_buffer=out)


def test_prime_rls_experts_equal_the_reference(layer):
    made = layer()
    counts = torch.tensor([3, 0, 7, 10, 1, 9, 10, 5], dtype=torch.float32).int()  # three rows are padding
    w13 = made["w1"].detach().view(E, 2, I, H).clone().requires_grad_()
    out = compat.grouped_experts(made["x"], counts, w13[:, 0], made["w2"], w13[:, 1])
    offsets = [0, *counts.cumsum(0).tolist()]
    wanted = reference.experts_rows(made["x"], offsets, made["w1"], made["w2"])
    assert near(out, wanted) and torch.all(out[45:] == 0)
    (ours,), (theirs,) = gradients(out, [w13]), gradients(wanted, [made["w1"]])
    assert near(ours.view_as(theirs), theirs, 1e-4)


def test_prime_rls_compiled_experts_have_the_same_bits(layer):
    """prime-rl compiles its layers. That w1 and w3 are views of one parameter is checked outside of the graph."""
    torch._dynamo.reset()
    made, counts = layer(T=40), torch.full((E,), 5)
    w13 = made["w1"].detach().view(E, 2, I, H).clone().requires_grad_()
    run = lambda x: compat.grouped_experts(x * 2, counts, w13[:, 0], made["w2"], w13[:, 1]) + 1
    x = made["x"].detach()
    out, again = run(x), torch.compile(run, backend="aot_eager")(x)
    assert torch.equal(out, again)
    (plain,), (compiled,) = gradients(out, [w13]), gradients(again, [w13])
    assert torch.equal(plain, compiled)


# ---- torchtitan: stand-ins with torchtitan's names and signatures ----


class _Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self):
            return self._owner(self)

        def traverse(self, kind, name="", parent=None, attribute=None):
            if isinstance(self, kind):
                yield name, self, parent, attribute
            for key in type(self).__dataclass_fields__:
                value = getattr(self, key)
                for index, item in enumerate(value if isinstance(value, list) else [value]):
                    if isinstance(item, _Configurable.Config):
                        at = (value, index) if isinstance(value, list) else (self, key)
                        yield from item.traverse(kind, f"{name}.{key}", *at)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            cls.Config._owner = cls


class _Module(torch.nn.Module, _Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(_Configurable.Config):
        pass


class _GroupedLinear(_Module):
    @dataclass(kw_only=True, slots=True)
    class Config(_Module.Config):
        group_size: int
        in_features: int
        out_features: int
        num_linears: int = 1

    def __init__(self, config):
        super().__init__()
        shape = (config.group_size, config.num_linears, config.out_features, config.in_features)
        self.weight = torch.nn.Parameter(torch.randn(*shape[: 1], *shape[1 + (config.num_linears == 1) :]) * 0.3)


class _SwiGLU(_Module):
    @dataclass(kw_only=True, slots=True)
    class Config(_Module.Config):
        pass


class _LocalTokenDispatcher(_Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(_Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config):
        self.config, self.top_k, self.ep_mesh = config, config.top_k, None

    def wire_meshes(self, *, ep_mesh):
        self.ep_mesh = ep_mesh


class _AllToAll(_LocalTokenDispatcher):
    """A dispatcher for one rank: it sorts the rows by expert and pads the buffer with NaN rows; combine multiplies by
    the scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(_LocalTokenDispatcher.Config):
        pass

    def dispatch(self, x, scores, ids, counts):
        order = ids.flatten().argsort(stable=True)
        tokens = order // ids.shape[1]
        padding = torch.full((5, x.shape[1]), torch.nan)
        return torch.cat([x[tokens], padding]), counts, (tokens, scores.flatten()[order])

    def combine(self, out, metadata, x):
        tokens, scores = metadata
        return torch.zeros_like(x).index_add(0, tokens, out[: len(tokens)] * scores[:, None])


class _RoutedExperts(_Module):
    @dataclass(kw_only=True, slots=True)
    class Config(_Module.Config):
        w13: _GroupedLinear.Config
        w2: _GroupedLinear.Config
        activation_fn: _SwiGLU.Config
        token_dispatcher: _LocalTokenDispatcher.Config

    def __init__(self, config):
        super().__init__()
        self.w13, self.w2 = config.w13.build(), config.w2.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def parallelize(self, parallel_dims):
        self.token_dispatcher.wire_meshes(ep_mesh=parallel_dims.get_optional_mesh("ep"))

    def forward(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        w13 = self.w13.weight.flatten(1, 2)
        return reference.experts(x_TD, topk_expert_ids_TK, topk_scores_TK, w13, self.w2.weight)


@dataclass(kw_only=True, slots=True)
class _Model(_Configurable.Config):
    layers: list = field(default_factory=list)


def stand_ins(monkeypatch):
    """smoe.torchtitan with these classes in place of torchtitan's"""
    names = {
        "models.common.activation": dict(SwiGLU=_SwiGLU),
        "models.common.linear": dict(GroupedLinear=_GroupedLinear),
        "models.common.moe": dict(RoutedExperts=_RoutedExperts),
        "models.common.token_dispatcher": dict(LocalTokenDispatcher=_LocalTokenDispatcher),
        "protocols.model": dict(ModelConfigConverter=_Configurable),
    }
    for name, content in names.items():
        parts = ("torchtitan." + name).split(".")
        for length in range(1, len(parts) + 1):
            module = ".".join(parts[:length])
            if module not in sys.modules:
                monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        vars(sys.modules[".".join(parts)]).update(content)
    monkeypatch.delitem(sys.modules, "smoe.torchtitan", raising=False)
    import smoe.torchtitan as module

    return module


@pytest.fixture
def titan(monkeypatch):
    yield stand_ins(monkeypatch)
    sys.modules.pop("smoe.torchtitan")


def routed(dispatcher=_LocalTokenDispatcher, activation=_SwiGLU):
    return _RoutedExperts.Config(
        w13=_GroupedLinear.Config(group_size=E, in_features=H, out_features=I, num_linears=2),
        w2=_GroupedLinear.Config(group_size=E, in_features=I, out_features=H),
        activation_fn=activation.Config(),
        token_dispatcher=dispatcher.Config(num_experts=E, top_k=K),
    )


@pytest.mark.parametrize("dispatcher", [_LocalTokenDispatcher, _AllToAll])
def test_torchtitans_converted_experts_equal_the_stock_ones(titan, dispatcher):
    model = _Model(layers=[routed(dispatcher), routed(dispatcher)])
    stock = [config.build() for config in model.layers]
    converted = titan.SmoeConverter(titan.SmoeConverter.Config()).convert(model)
    assert all(type(config) is titan.SmoeRoutedExperts.Config for config in converted.layers)
    ours = converted.layers[1].build()
    ours.load_state_dict(stock[1].state_dict())
    x, scores = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
    ids = torch.rand(T, E).topk(K).indices
    counts = torch.bincount(ids.flatten(), minlength=E)
    out, wanted = ours(x, scores, ids, counts), stock[1](x, scores, ids, counts)
    assert near(out, wanted)
    inputs = [x, scores]
    found = gradients(out, inputs + list(ours.parameters()))
    exact = gradients(wanted, inputs + list(stock[1].parameters()))
    assert all(near(a, b, 1e-4) for a, b in zip(found, exact, strict=True))
    assert found[2].shape == (E, 2, I, H)
    with torch.autocast("cpu", torch.bfloat16):  # as torchtitan runs on one GPU
        assert ours(x, scores, ids, counts).dtype == x.dtype


class _Dimensions:
    """torchtitan's ParallelDims, with expert parallelism over all processes"""

    def get_optional_mesh(self, name):
        return torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=(name,))


def titan_rank(rank, ranks, folder):
    """Writes what this rank has of the outputs and gradients: eager, then compiled with windows made by parallelize()."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    with pytest.MonkeyPatch.context() as patch:
        module, found = stand_ins(patch), []
        for max_tokens in (None, T):
            config = module.SmoeConverter.Config(ep="smoe", max_tokens=max_tokens, dtype=torch.float32)
            experts = module.SmoeConverter(config).convert(_Model(layers=[routed(_AllToAll)])).layers[0].build()
            weights = torch.load(f"{folder}/weights")
            for linear, name in ((experts.w13, "w13.weight"), (experts.w2, "w2.weight")):
                linear.weight = torch.nn.Parameter(weights[name].chunk(ranks)[rank].clone())
            experts.parallelize(_Dimensions())
            run = torch.compile(experts.forward, backend="aot_eager", fullgraph=True) if max_tokens else experts
            x, scores, ids, counts = [t.chunk(ranks)[rank].detach() for t in torch.load(f"{folder}/inputs")]
            inputs = [x.requires_grad_(), scores.requires_grad_(), *experts.parameters()]
            out = run(x, scores, ids, counts)
            found.append([out.detach(), *torch.autograd.grad(out, inputs, out.detach())])
    torch.save(found, f"{folder}/{rank}")
    torch.distributed.barrier()


def test_torchtitans_ranks_give_the_results_of_one_process(titan, tmp_path):
    stock = routed().build()
    x, scores = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
    ids = torch.rand(T, E).topk(K).indices
    counts = torch.bincount(ids.flatten(), minlength=E)
    out = stock(x, scores, ids, counts)
    torch.save(stock.state_dict(), tmp_path / "weights")
    torch.save([x, scores, ids, counts], tmp_path / "inputs")
    torch.multiprocessing.spawn(titan_rank, (2, tmp_path), nprocs=2)
    each = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    whole = [out, *torch.autograd.grad(out, [x, scores, *stock.parameters()], out.detach())]
    for found in zip(*each, strict=True):
        for mine, want in zip(zip(*found, strict=True), whole, strict=True):
            assert near(torch.cat(mine), want, 1e-4)
    with pytest.raises(ValueError, match="ep is 'deepep'; expected None or 'smoe'"):
        titan.SmoeConverter(titan.SmoeConverter.Config(ep="deepep"))


def test_torchtitan_runs_its_own_code_for_other_dtypes(titan, caplog):
    """float64 tensors, which smoe does not support: torchtitan's code and one warning."""
    converted = titan.SmoeConverter(titan.SmoeConverter.Config()).convert(_Model(layers=[routed()])).layers[0].build().double()
    stock = routed().build().double()
    stock.load_state_dict(converted.state_dict())
    x, scores = torch.randn(T, H, dtype=torch.float64), torch.rand(T, K)
    ids = torch.rand(T, E).topk(K).indices
    given = x, scores, ids, torch.bincount(ids.flatten(), minlength=E)
    assert torch.equal(converted(*given), stock(*given)) and torch.equal(converted(*given), stock(*given))
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages == ["smoe: RoutedExperts run as torchtitan's own: torch.float64 on cpu is not supported."]


def test_torchtitan_refuses_what_is_not_stock(titan):
    class Other(_SwiGLU):
        @dataclass(kw_only=True, slots=True)
        class Config(_SwiGLU.Config):
            pass

    with pytest.raises(TypeError, match="expected the stock grouped linears and SwiGLU"):
        titan.SmoeConverter(titan.SmoeConverter.Config()).convert(_Model(layers=[routed(activation=Other)]))
