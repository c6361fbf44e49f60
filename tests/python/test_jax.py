"""smoe.jax on the CPU compared with a dense JAX layer in float32, under jit and grad; python/xla/xla_ffi.h compared
with jaxlib's header."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import jaxlib  # noqa: E402
import numpy as np  # noqa: E402

import smoe.jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 2)  # for shard_map

ROOT = Path(__file__).parents[2]
T, H, I, E, K = 40, 32, 16, 8, 2


def made(dtype=jnp.float32, T=T):
    keys = iter(jax.random.split(jax.random.key(0), 10))
    normal = lambda *shape: (jax.random.normal(next(keys), shape) * 0.4).astype(dtype)
    values = dict(x=normal(T, H), w1=normal(E, 2 * I, H), w2=normal(E, H, I), b1=normal(E, 2 * I), b2=normal(E, H))
    values["router_weight"] = normal(E, H)
    values["ids"] = jax.lax.top_k(jax.random.uniform(next(keys), (T, E)), K)[1]
    values["weights"] = jax.random.uniform(next(keys), (T, K))
    return values


def every_expert(x, w1, w2, b1=None, b2=None):
    """The outputs (E, T, H) of all experts for all tokens."""
    h = jnp.einsum("th,enh->etn", x, w1) + (0 if b1 is None else b1[:, None])
    gate, up = jnp.split(h, 2, -1)
    return jnp.einsum("etn,ehn->eth", jax.nn.silu(gate) * up, w2) + (0 if b2 is None else b2[:, None])


def dense_experts(x, ids, weights, w1, w2, b1=None, b2=None):
    pairs = jnp.zeros((len(x), E)).at[jnp.arange(len(x))[:, None], ids].add(weights, mode="drop")
    return jnp.einsum("te,eth->th", pairs, every_expert(x, w1, w2, b1, b2))


def compare(ours, theirs, arguments, names, tolerance=1e-4):
    weigh = jax.random.normal(jax.random.key(9), (len(arguments["x"]), H))
    loss = lambda function: lambda leaves: (function(**(arguments | leaves)) * weigh).sum()
    leaves = {name: arguments[name] for name in names}
    found, exact = (jax.jit(jax.value_and_grad(loss(function)))(leaves) for function in (ours, theirs))
    np.testing.assert_allclose(found[0], exact[0], rtol=tolerance, atol=tolerance)
    for name in names:
        a, b = np.asarray(found[1][name], np.float64), np.asarray(exact[1][name], np.float64)
        assert a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name


@pytest.mark.parametrize("biases", [False, True])
def test_experts_equal_a_dense_layer(biases):
    given = made()
    del given["router_weight"]
    if not biases:
        del given["b1"], given["b2"]
    given["ids"] = given["ids"].at[3, 1].set(E)
    names = [name for name in given if name != "ids"]
    compare(smoe.jax.experts, dense_experts, given, names)
    eager = smoe.jax.experts(**given)
    assert jnp.array_equal(eager, jax.jit(smoe.jax.experts)(**given))


def test_rows_equal_a_dense_layer():
    given = made()
    offsets = jnp.array([0, 3, 3, 10, 10, 11, 30, 35, 37], jnp.int32)
    of_row = jnp.searchsorted(offsets[1:], jnp.arange(T), side="right")
    arguments = dict(x=given["x"], w1=given["w1"], w2=given["w2"], row_weights=jax.random.uniform(jax.random.key(3), (T,)))
    ours = lambda x, w1, w2, row_weights: smoe.jax.experts_rows(x, offsets, w1, w2, row_weights)

    def theirs(x, w1, w2, row_weights):
        every = jnp.concatenate([every_expert(x, w1, w2), jnp.zeros((1, T, H))])
        return every[of_row, jnp.arange(T)] * row_weights[:, None]

    compare(ours, theirs, arguments, list(arguments))


@pytest.mark.parametrize("options", [{}, dict(norm_topk_prob=True), dict(score="topk_softmax")])
def test_the_layer_equals_a_dense_layer(options):
    given = {name: value for name, value in made().items() if name in ("x", "router_weight", "w1", "w2")}
    ours = lambda **a: smoe.jax.moe(**a, top_k=K, **options)[0]

    def theirs(x, router_weight, w1, w2):
        logits = x @ router_weight.T
        p = jax.nn.softmax(logits)
        values, ids = jax.lax.top_k(logits, K)
        weights = jnp.take_along_axis(p, ids, -1)
        if options.get("norm_topk_prob"):
            weights = weights / weights.sum(-1, keepdims=True)
        if options.get("score"):
            weights = jax.nn.softmax(values)
        return dense_experts(x, ids, weights, w1, w2)

    compare(ours, theirs, given, list(given))


def test_the_losses_equal_their_formulas():
    given = {name: value for name, value in made().items() if name in ("x", "router_weight", "w1", "w2")}
    _, losses = jax.jit(lambda **a: smoe.jax.moe(**a, top_k=K))(**given)
    logits = given["x"] @ given["router_weight"].T
    z = jnp.square(jax.nn.logsumexp(logits, -1)).mean()
    counts = jnp.zeros(E).at[jax.lax.top_k(logits, K)[1].ravel()].add(1)
    balance = E * (counts / T * jax.nn.softmax(logits).mean(0)).sum()
    np.testing.assert_allclose(losses, jnp.stack([balance, z]), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, dict(norm_topk_prob=True), dict(score="sigmoid"), dict(rounding="up", tile=8)])
def test_the_losses_gradient_is_that_of_coefficients(options):
    """test_sigmoid_with_coefficients_equals_a_dense_layer compares that of coefficients with a dense layer."""
    given = {name: value for name, value in made().items() if name in ("x", "router_weight", "w1", "w2")}

    def through_losses(given):
        out, losses = smoe.jax.moe(**given, top_k=K, **options)
        return jnp.square(out).sum() + 3 * losses[0] + 2 * losses[1]

    def through_coefficients(given):
        out, losses = smoe.jax.moe(**given, top_k=K, balance_coefficient=3, z_coefficient=2, losses=False, **options)
        assert losses is None
        return jnp.square(out).sum()

    found, wanted = (jax.jit(jax.grad(function))(given) for function in (through_losses, through_coefficients))
    for name in given:
        assert jnp.array_equal(found[name], wanted[name]), name
    alone = jax.grad(lambda weight: smoe.jax.moe(**(given | dict(router_weight=weight)), top_k=K)[1][0])(given["router_weight"])
    assert jnp.linalg.norm(alone) > 0


@pytest.mark.parametrize("activation", ["relu2", "geglu_tanh"])
def test_interleaved_and_plain_experts_equal_a_dense_layer(activation):
    gated, given = activation == "geglu_tanh", made()
    arguments = {name: given[name] for name in ("x", "ids", "weights", "w1", "w2")}
    arguments["w1"] = given["w1"] if gated else given["w1"][:, :I]
    layout = "interleaved" if gated else "concatenated"
    ours = lambda **a: smoe.jax.experts(**a, activation=activation, layout=layout)

    def theirs(x, ids, weights, w1, w2):
        h = jnp.einsum("th,enh->etn", x, w1)
        h = jax.nn.gelu(h[..., ::2], approximate=True) * h[..., 1::2] if gated else jnp.square(jax.nn.relu(h))
        pairs = jnp.zeros((len(x), E)).at[jnp.arange(len(x))[:, None], ids].add(weights)
        return jnp.einsum("te,eth->th", pairs, jnp.einsum("etn,ehn->eth", h, w2))

    compare(ours, theirs, arguments, ["x", "weights", "w1", "w2"])


def test_sigmoid_with_coefficients_equals_a_dense_layer():
    """Sigmoid scores with a selection bias, renormalised and scaled; the backward adds the losses' gradients."""
    given = {name: value for name, value in made().items() if name in ("x", "router_weight", "w1", "w2")}
    bias = jnp.linspace(-0.3, 0.3, E)
    options = dict(score="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5, selection_bias=bias)
    ours = lambda **a: smoe.jax.moe(**a, top_k=K, balance_coefficient=0.3, z_coefficient=0.2, **options)[0]

    @jax.custom_vjp
    def with_loss(out, loss):
        return out

    with_loss.defvjp(lambda out, loss: (out, None), lambda _, dout: (dout, jnp.ones(())))

    def theirs(x, router_weight, w1, w2):
        logits = x @ router_weight.T
        ids = jax.lax.top_k(jax.nn.sigmoid(logits) + bias, K)[1]
        weights = jnp.take_along_axis(jax.nn.sigmoid(logits), ids, -1)
        counts = jnp.zeros(E).at[ids.ravel()].add(1)
        balance = E * (counts / T * jax.nn.softmax(logits).mean(0)).sum()
        loss = 0.3 * balance + 0.2 * jnp.square(jax.nn.logsumexp(logits, -1)).mean()
        return with_loss(dense_experts(x, ids, 2.5 * weights / weights.sum(-1, keepdims=True), w1, w2), loss)

    compare(ours, theirs, given, list(given))


def test_rounding_down_drops_pairs_and_chunks_change_no_bit():
    """Rounding down to whole tiles is plain top-K without the pairs that it drops; chunks change no bit."""
    given = {name: value for name, value in made().items() if name in ("x", "router_weight", "w1", "w2")}
    p = jax.nn.softmax(given["x"] @ given["router_weight"].T)
    values, ids = jax.lax.top_k(p, K)
    kept = np.zeros((T, K), bool)
    for e in range(E):
        pairs = sorted(((-float(values[t, k]), t, k) for t, k in zip(*np.nonzero(np.asarray(ids) == e))))
        for _, t, k in pairs[: len(pairs) // 4 * 4]:
            kept[t, k] = True
    assert 0 < kept.sum() < T * K
    out = smoe.jax.moe(**given, top_k=K, rounding="down", tile=4)[0]
    exact = dense_experts(given["x"], ids, values * kept, given["w1"], given["w2"])
    assert jnp.linalg.norm(out - exact) < 1e-5 * jnp.linalg.norm(exact)
    wide = dict(x=jnp.tile(given["x"], 16), w1=jnp.tile(given["w1"], 16), w2=jnp.tile(given["w2"], (1, 16, 1)))
    run = lambda chunks: smoe.jax.experts(**wide, ids=ids, weights=values, chunks=chunks)
    assert jnp.array_equal(run(1), run(4))


def test_experts_in_bf16_are_near_float32():
    given = made(jnp.bfloat16)
    arguments = {name: given[name] for name in ("x", "ids", "weights", "w1", "w2")}
    as_float = {name: value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value for name, value in arguments.items()}
    out = smoe.jax.experts(**arguments)
    exact = dense_experts(**as_float)
    assert out.dtype == jnp.bfloat16 and jnp.linalg.norm(out - exact) < 0.02 * jnp.linalg.norm(exact)


def test_a_scan_over_layers_has_the_gradients_of_a_dense_layer():
    """XLA stacks and slices the residuals of a scan, so that the backward gets them at other addresses."""
    given, layers = made(), 5
    stack = lambda name: jnp.stack([given[name] * (1 + 0.1 * layer) for layer in range(layers)])
    weights = dict(w1=stack("w1"), w2=stack("w2"))

    def model(function, weights):
        layer = lambda x, w: (x + function(x, given["ids"], given["weights"], w["w1"], w["w2"]) * 0.1, None)
        return jax.lax.scan(layer, given["x"], weights)[0].sum()

    ours = jax.jit(jax.grad(lambda w: model(smoe.jax.experts, w)))(weights)
    theirs = jax.jit(jax.grad(lambda w: model(dense_experts, w)))(weights)
    for name in weights:
        assert jnp.linalg.norm(ours[name] - theirs[name]) < 1e-4 * jnp.linalg.norm(theirs[name])


def test_wrong_weights_and_top_k_are_refused():
    given = made()
    with pytest.raises(ValueError, match=r"w1 has shape \(8, 16, 32\); expected \(8, 32, 32\)"):
        smoe.jax.experts(given["x"], given["ids"], given["weights"], given["w1"][:, :I], given["w2"])
    with pytest.raises(TypeError, match="w2 has dtype bfloat16; expected float32"):
        smoe.jax.experts(given["x"], given["ids"], given["weights"], given["w1"], given["w2"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="topk is 9|experts"):
        smoe.jax.moe(given["x"], given["router_weight"], given["w1"], given["w2"], top_k=9)


def test_wrong_shapes_dtypes_and_options_are_refused():
    """Arguments with which the library would access memory past a buffer's end, or read numbers as another type."""
    given, half = made(), jnp.bfloat16
    router, biases = given["router_weight"], dict(b1=given["b1"], b2=given["b2"])
    moe, experts, rows = smoe.jax.moe, smoe.jax.experts, smoe.jax.experts_rows
    x_w = (given["x"], given["w1"], given["w2"])
    ids, weights, offsets = given["ids"], given["weights"], jnp.arange(E + 1)
    with_router = lambda router_weight, **more: lambda: moe(x_w[0], router_weight, *x_w[1:], top_k=K, **more)
    with_ids = lambda ids, **more: lambda: experts(x_w[0], ids, weights, *x_w[1:], **more)
    with_rows = lambda offsets, *more: lambda: rows(x_w[0], offsets, *x_w[1:], *more)
    sigmoid = dict(score="sigmoid")
    cases = [
        (with_router(router[:4]), ValueError, "router_weight has shape"),
        (with_router(router.astype(half)), TypeError, "router_weight has dtype bfloat16; expected float32"),
        (with_router(router, router_bias=jnp.ones(2)), ValueError, "router_bias has shape"),
        (with_router(router, router_bias=jnp.ones(E, half)), TypeError, "router_bias has dtype"),
        (with_router(router, selection_bias=jnp.ones(2), **sigmoid), ValueError, "selection_bias has shape"),
        (with_router(router, selection_bias=jnp.ones(E)), jax.errors.JaxRuntimeError, "only SMOE_SCORE_SIGMOID has one"),
        (with_router(router, hidden=H), TypeError, "hidden is no option; expected one of topk, activation"),
        (with_router(router, no_such=1), TypeError, "smoe.jax.moe: no_such is no option"),
        (with_router(router, score="soft"), ValueError, "score is 'soft'"),
        (with_router(router, rounding="nrs"), ValueError, "rounding is 'nrs'"),
        (with_ids(ids, b1=biases["b1"][:2]), ValueError, "b1 has shape"),
        (with_ids(ids, b2=biases["b2"].astype(half)), TypeError, "b2 has dtype"),
        (with_ids(ids[:, 0]), ValueError, "ids has shape"),
        (with_ids(ids.astype(jnp.int16)), TypeError, "ids has dtype int16"),
        (with_ids(ids, layout="rows"), ValueError, "layout is 'rows'"),
        (with_rows(offsets.astype(jnp.float32)), TypeError, "offsets has dtype"),
        (with_rows(offsets, jnp.ones(3)), ValueError, "row_weights has shape"),
    ]
    for call, exception, text in cases:
        with pytest.raises(exception, match=text):
            call()


def test_a_bf16_selection_bias_gives_the_bits_of_float32():
    given, bias = made(), jnp.linspace(0, 1, E)
    call = lambda bias: smoe.jax.moe(
        given["x"], given["router_weight"], given["w1"], given["w2"], top_k=K, score="sigmoid", selection_bias=bias
    )[0]
    half = bias.astype(jnp.bfloat16)
    assert jnp.array_equal(call(half), call(half.astype(jnp.float32)))


def test_a_missing_library_of_handlers_is_an_import_error(tmp_path):
    """A folder with libsmoe.so but without libsmoe_xla.so, as `cmake --install` makes it."""
    alone = tmp_path / "libsmoe.so"
    alone.symlink_to(smoe.native.path.resolve())
    code = (
        "import jax.numpy as jnp, smoe.jax\n"
        "ids, one = jnp.zeros((1, 1), jnp.int32), jnp.ones\n"
        "smoe.jax.experts(one((1, 8)), ids, one((1, 1)), one((2, 16, 8)), one((2, 8, 8)))"
    )
    environment = os.environ | dict(SMOE_LIBRARY=str(alone), JAX_PLATFORMS="cpu")
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.returncode == 1 and "ImportError: smoe.jax: the XLA handlers" in found.stderr, found.stderr


def test_no_tokens_give_an_empty_output():
    given = made(T=0)
    out, losses = smoe.jax.moe(given["x"], given["router_weight"], given["w1"], given["w2"], top_k=K)
    assert out.shape == (0, H) and losses.tolist() == [0, 0]
    assert smoe.jax.experts(*(given[name] for name in ("x", "ids", "weights", "w1", "w2"))).shape == (0, H)


def test_vmap_over_tokens_has_the_gradients_of_a_dense_layer():
    """vmap over batches of tokens and ids, with the weights of one layer and their gradients."""
    given, batch = made(), 3
    x = jnp.stack([given["x"] * (1 + index) for index in range(batch)])
    ids = jnp.stack([(given["ids"] + index) % E for index in range(batch)])

    def loss(function, x, w1, w2):
        return (jax.vmap(lambda x, ids: function(x, ids, given["weights"], w1, w2))(x, ids) ** 2).sum()

    arguments = (x, given["w1"], given["w2"])
    ours = jax.jit(jax.grad(lambda *a: loss(smoe.jax.experts, *a), (0, 1, 2)))(*arguments)
    theirs = jax.jit(jax.grad(lambda *a: loss(dense_experts, *a), (0, 1, 2)))(*arguments)
    for found, exact in zip(ours, theirs):
        assert jnp.linalg.norm(found - exact) < 1e-4 * jnp.linalg.norm(exact)


def over_experts(x, ids, weights, w1, w2):
    """Expert parallelism: this device has half of the experts. The ids of the others are outside of 0..E/2-1."""
    return jax.lax.psum(smoe.jax.experts(x, ids - E // 2 * jax.lax.axis_index("d"), weights, w1, w2), "d")


def routed(x, ids, weights, w1, w2, **options):
    """The whole layer. w2[:, :, 0] is the weight of its router."""
    return smoe.jax.moe(x, w2[:, :, 0], w1, w2, top_k=K, **options)[0]


each, whole = jax.P("d"), jax.P()  # cut into one part for each device, or replicated
SHARDED = {  # what runs on each device, on all devices as one, the specs of x, ids, weights, w1, w2, and of the output
    "tokens": (smoe.jax.experts, smoe.jax.experts, (each, each, each, whole, whole), each),
    "tokens with a router": (routed, routed, (each, whole, whole, whole, whole), each),
    "experts": (over_experts, smoe.jax.experts, (whole, whole, whole, each, each), whole),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("check", [True, False])
def test_a_sharded_layer_has_the_gradients_of_one_device(name, check):
    """The layer over two devices: its gradients are those of one device. `check` is JAX's default."""
    part, all, inputs, output = SHARDED[name]
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    sharded = jax.shard_map(part, mesh=mesh, in_specs=inputs, out_specs=output, check_vma=check)
    given = made()
    del given["b1"], given["b2"], given["router_weight"]
    order = lambda function: lambda x, ids, weights, w1, w2: function(x, ids, weights, w1, w2)
    compare(order(sharded), order(all), given, ["x", "weights", "w1", "w2"])


def test_shard_map_refuses_a_wrong_spec():
    """An output that differs between the devices cannot be declared as replicated."""
    given, mesh = made(), jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    part = lambda x: smoe.jax.experts(x, *(given[name][: T // 2] for name in ("ids", "weights")), given["w1"], given["w2"])
    with pytest.raises(ValueError, match="replication"):
        jax.shard_map(part, mesh=mesh, in_specs=each, out_specs=whole)(given["x"])


def test_an_old_jax_is_refused():
    """It would crash. pyproject.toml names the same version as the message."""
    alone = "import jax; jax.__version_info__, jax.__version__ = (0, 8, 0), '0.8.0'; import smoe.jax"
    run = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
    assert "ImportError: smoe.jax: needs jax 0.8.1 or later, this is 0.8.0" in run.stderr
    assert "jax>=0.8.1" in (ROOT / "pyproject.toml").read_text()


# Our structs and jaxlib's, and the names of their fields.
STRUCTS = {
    "xla_extension XLA_FFI_InternalExtension": "struct_size type next",
    "xla_version XLA_FFI_Api_Version": "struct_size extensions=extension_start major_version minor_version",
    "xla_buffer XLA_FFI_Buffer": "struct_size extensions=extension_start type=dtype data rank dims",
    "xla_array XLA_FFI_Array": "type=dtype size data",
    "xla_span XLA_FFI_ByteSpan": "text=ptr length=len",
    "xla_attributes XLA_FFI_Attrs": "struct_size extensions=extension_start size types names values=attrs",
    "xla_error_create_args XLA_FFI_Error_Create_Args": "struct_size extensions=extension_start message code=errc",
    "xla_stream_get_args XLA_FFI_Stream_Get_Args": "struct_size extensions=extension_start context=ctx stream",
    "xla_ordinal_get_args XLA_FFI_DeviceOrdinal_Get_Args": "struct_size context=ctx ordinal=device_ordinal",
    "xla_metadata_extension XLA_FFI_Metadata_Extension": "base=extension_base metadata",
}
PREFIXES = {  # structs of which ours may have fewer fields at the end than jaxlib's
    "xla_buffers XLA_FFI_Args": "struct_size size types buffers=args",
    "xla_buffers XLA_FFI_Rets": "struct_size size types buffers=rets",
    "xla_metadata XLA_FFI_Metadata": "struct_size api_version traits",
    "xla_api XLA_FFI_Api": "struct_size api_version internal=internal_api error_create=XLA_FFI_Error_Create "
    "stream_get=XLA_FFI_Stream_Get ordinal_get=XLA_FFI_DeviceOrdinal_Get",
    "xla_call XLA_FFI_CallFrame": "struct_size extensions=extension_start api context=ctx stage arguments=args results=rets "
    "attributes=attrs",
}
VALUES = {
    "XLA_EXTENSION_METADATA": "XLA_FFI_Extension_Metadata", "XLA_STAGE_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "XLA_ATTR_ARRAY": "XLA_FFI_AttrType_ARRAY", "XLA_TYPE_U8": "XLA_FFI_DataType_U8", "XLA_TYPE_S64": "XLA_FFI_DataType_S64",
    "XLA_ERROR_INVALID_ARGUMENT": "XLA_FFI_Error_Code_INVALID_ARGUMENT", "XLA_ERROR_INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
    "XLA_ERROR_RESOURCE_EXHAUSTED": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "XLA_ERROR_UNIMPLEMENTED": "XLA_FFI_Error_Code_UNIMPLEMENTED",
}  # fmt: skip


def test_masked_tokens_do_not_count_in_the_losses():
    """Losses and their gradient are those of a layer that has only the counted tokens."""
    keys = jax.random.split(jax.random.key(0), 5)
    x, router = jax.random.normal(keys[0], (40, 16)), jax.random.normal(keys[1], (8, 16))
    w1, w2 = jax.random.normal(keys[2], (8, 16, 16)), jax.random.normal(keys[3], (8, 16, 8))
    mask = jax.random.uniform(keys[4], (40,)) < 0.6
    loss = lambda router, x, mask: smoe.jax.moe(x, router, w1, w2, top_k=2, token_mask=mask)[1] @ jnp.array([0.3, 0.2])
    out = smoe.jax.moe(x, router, w1, w2, top_k=2, token_mask=mask)[0]
    assert jnp.array_equal(out, smoe.jax.moe(x, router, w1, w2, top_k=2)[0])
    (got, slope), (wanted, expected) = (jax.value_and_grad(loss)(router, *given) for given in ((x, mask), (x[mask], None)))
    assert jnp.allclose(got, wanted, rtol=1e-5) and jnp.allclose(slope, expected, rtol=1e-3, atol=1e-5)
    assert loss(router, x, jnp.zeros(40, bool)) == 0


def test_declarations_are_jaxlibs(tmp_path):
    lines = ['#include "xla_ffi.h"', '#include "xla/ffi/api/c_api.h"']
    lines += ["#if XLA_FFI_API_MINOR < 4 // its name before", "#define XLA_FFI_InternalExtension XLA_FFI_Extension_Base", "#endif"]
    for names, fields in (STRUCTS | PREFIXES).items():
        ours, theirs = names.split()
        if names in STRUCTS:
            lines.append(f'_Static_assert(sizeof({ours}) == sizeof({theirs}), "{ours}");')
        for field in fields.split():
            a, b = (field.split("=") * 2)[:2]
            lines.append(f'_Static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}), "{ours}.{a}");')
            lines.append(f'_Static_assert(sizeof((({ours} *)0)->{a}) == sizeof((({theirs} *)0)->{b}), "{ours}.{a}");')
    lines += [f'_Static_assert((int){a} == (int){b}, "{a}");' for a, b in VALUES.items()]
    source = tmp_path / "check.c"
    source.write_text("\n".join(lines))
    include = Path(jaxlib.__file__).parent / "include"
    subprocess.run(["cc", "-std=c11", "-fsyntax-only", "-I", ROOT / "python" / "xla", "-I", include, source], check=True)
    declared = set(re.findall(r"\b(XLA_[A-Z0-9_]+) =", (ROOT / "python" / "xla" / "xla_ffi.h").read_text()))
    assert declared == set(VALUES)
