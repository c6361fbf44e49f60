"""smoe in JAX: the experts and the whole layer as functions under jit and grad, through XLA's foreign function interface.

Arrays are float32 or bfloat16 on the CPU, bfloat16 or float16 on CUDA. As in smoe.functional, T is the number of
tokens, H the hidden size, I the intermediate size, E the number of experts and K that of a token. Every option is a
static Python value.
"""

import ctypes
import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import native
from ._activation import Gate, fields_of
from ._record import Record, bounds, layer as layer_of, options_of, record as record_of

if jax.__version_info__ < (0, 8, 1):
    raise ImportError(
        f"smoe.jax: needs jax 0.8.1 or later, this is {jax.__version__}: earlier ones crash when they register its XLA handlers"
    )

__all__ = ["experts", "experts_rows", "moe"]

_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "int64": "i64"}
_INDEX_DTYPES = ("int32", "int64")
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # smoe's backends and XLA's names


@functools.cache
def _register() -> None:
    """Registers the handlers with XLA, once. libsmoe_xla.so needs libsmoe, which is already loaded, so that the dynamic
    loader finds it by its soname."""
    path = native.path.with_name("libsmoe_xla.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"smoe.jax: the XLA handlers {path} do not load: {error}. They stand beside libsmoe.so in the installed package and "
            "in a build's src folder"
        ) from error
    for backend, platform in _PLATFORMS.items():
        for direction in ("forward", "backward"):
            name = f"smoe_xla_{backend}_{direction}"
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, capsule, platform=platform)


@functools.cache
def _context(backend: str) -> int:
    """A context for smoe_query_sizes alone. It has as many threads as the contexts of the handlers."""
    return native.create_context(backend, threads=_threads(backend))


def _threads(backend: str) -> int:
    return min(len(os.sched_getaffinity(0)), native.MOST_THREADS) if backend == "cpu" else 0


def _backend() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "cuda"


class _Problem(NamedTuple):
    """The static part of a call."""

    record: Record
    step: int = 0
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    losses: bool = False

    @property
    def routed(self) -> bool:
        return layer_of(1, self.record).entry == native.ENTRIES["from_logits"]

    @property
    def reads_logits(self) -> bool:
        losses = self.losses or self.balance_coefficient != 0 or self.z_coefficient != 0
        return self.routed and (losses or bounds(self.record).reads_logits)


def _axes(array) -> frozenset[str]:
    """The mesh axes over whose devices the array varies, inside of a jax.shard_map that checks them. Empty elsewhere."""
    return getattr(getattr(jax.typeof(array), "manual_axis_type", None), "varying", frozenset())


def _varying(array, axes: frozenset[str]):
    """The array, marked as varying over these axes too. The transpose of the mark sums a gradient over the devices."""
    missing = tuple(sorted(axes - _axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _call(direction: str, backend: str, layer: native.Layer, struct, scalars: dict, arguments: dict, results: dict) -> dict:
    """Calls a handler once and returns its results by field. arguments: field of `struct` -> array or None; results:
    field -> (shape, dtype) or None. If `struct` has a field <field>_size too, it is filled with the buffer's size in
    bytes."""
    arguments = {field: value for field, value in arguments.items() if value is not None}
    results = {field: shape for field, shape in results.items() if shape is not None}
    template = struct(**scalars)
    fields = [*arguments, *results]
    offset = lambda field: getattr(struct, field).offset if hasattr(struct, field) else -1
    call = jax.ffi.ffi_call(
        f"smoe_xla_{backend}_{direction}",
        [jax.ShapeDtypeStruct(*shape) for shape in results.values()],
        vmap_method="sequential",
    )
    found = call(
        *arguments.values(),
        layer=np.frombuffer(bytes(layer), np.uint8),
        arguments=np.frombuffer(bytes(template), np.uint8),
        pointers=np.array([offset(field) for field in fields], np.int64),
        sizes=np.array([offset(field + "_size") for field in fields], np.int64),
        threads=np.array([_threads(backend)], np.int64),
    )
    axes = _axes(arguments["x"])
    return {field: _varying(value, axes) for field, value in zip(results, found)}


def _sizes(backend: str, layer: native.Layer) -> native.Sizes:
    return native.query_sizes(_context(backend), layer)


def _forward(problem: _Problem, operands: dict, save: bool) -> dict:
    """A dict with `out` and `scratch`; with `save` also `saved`; with a router also `logits` and, if wanted,
    `losses`."""
    _register()
    x, w2, backend = operands["x"], operands["w2"], _backend()
    layer = layer_of(x.shape[0], problem.record, inference=not save)
    sizes = _sizes(backend, layer)
    results = dict(
        out=(x.shape, x.dtype),
        saved=((sizes.saved_buffer_bytes,), jnp.uint8) if save else None,
        scratch=((sizes.scratch_forward_bytes,), jnp.uint8),
        logits=((x.shape[0], w2.shape[0]), jnp.float32) if problem.routed else None,
        losses=((2,), jnp.float32) if problem.losses else None,
    )
    return _call("forward", backend, layer, native.ForwardArgs, dict(step=problem.step), operands, results)


_GRADIENTS = {"dx": "x", "dw1": "w1", "dw2": "w2", "db1": "b1", "db2": "b2", "drouter_weight": "router_weight"}
_GRADIENTS |= {"drouter_bias": "router_bias", "dtopk_weights": "topk_weights", "drow_weights": "row_weights"}


def _backward(problem: _Problem, operands: dict, saved, logits, dout, dlosses) -> dict:
    """The gradients, each under the name of its operand. `dlosses` is the gradient of the losses, or None."""
    x, backend = operands["x"], _backend()
    layer = layer_of(x.shape[0], problem.record)
    results = {
        gradient: (operands[name].shape, operands[name].dtype)
        for gradient, name in _GRADIENTS.items()
        if operands.get(name) is not None
    }
    read = {name: operands.get(name) for name in ("x", "router_weight", "topk_ids", "token_mask", "w1", "w2", "b2")}
    given = read | dict(logits=logits, saved=saved, dout=dout.astype(x.dtype), loss_gradients=dlosses)
    results["scratch"] = ((_sizes(backend, layer).scratch_backward_bytes,), jnp.uint8)
    scalars = dict(balance_coefficient=problem.balance_coefficient, z_coefficient=problem.z_coefficient)
    found = _call("backward", backend, layer, native.BackwardArgs, scalars, given, results)
    return {name: found.get(gradient) for gradient, name in _GRADIENTS.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_same_axes(problem: _Problem, operands: dict):
    """Returns out, and the losses, or None without a router."""
    found = _forward(problem, operands, save=False)
    return found["out"], found.get("losses")


def _run_forward(problem: _Problem, operands: dict):
    found = _forward(problem, operands, save=True)
    logits = found.get("logits") if problem.reads_logits else None
    return (found["out"], found.get("losses")), (operands, found["saved"], logits)


def _run_backward(problem: _Problem, kept, cotangents):
    operands, saved, logits = kept
    gradients = _backward(problem, operands, saved, logits, *cotangents)
    return ({name: gradients.get(name) for name in operands},)


_run_same_axes.defvjp(_run_forward, _run_backward)


def _run(problem: _Problem, operands: dict):
    """_run_same_axes for operands that vary over different mesh axes, for example x over that of the data and w1 over
    none."""
    axes = frozenset().union(*[_axes(value) for value in operands.values() if value is not None])
    marked = {name: value if value is None else _varying(value, axes) for name, value in operands.items()}
    return _run_same_axes(problem, marked)


def _expect(function: str, name: str, value, shape: tuple, dtypes: tuple[str, ...]) -> None:
    """Checks an array's shape and dtype. The library gets only its address, so with another shape or dtype it would
    access memory past the array's end."""
    if value.shape != shape:
        raise ValueError(f"{function}: {name} has shape {value.shape}; expected {shape}")
    if value.dtype.name not in dtypes:
        raise TypeError(f"{function}: {name} has dtype {value.dtype}; expected {' or '.join(dtypes)}")


def _operands(function: str, x, w1, w2, b1, b2, activation: str | Gate) -> dict:
    """Checks the operands that all functions share, and returns them as arrays."""
    fields_of(function, activation)
    operands = dict(x=x, w1=w1, w2=w2, b1=b1, b2=b2)
    operands = {name: None if value is None else jnp.asarray(value) for name, value in operands.items()}
    x, w2 = operands["x"], operands["w2"]
    if w2.ndim != 3:
        raise ValueError(f"{function}: w2 has shape {w2.shape}; expected (E, H, I)")
    count, hidden, intermediate = w2.shape
    if x.ndim != 2 or x.shape[1] != hidden:
        raise ValueError(f"{function}: x has shape {x.shape}; expected (T, {hidden})")
    _expect(function, "x", x, x.shape, ("float32", "bfloat16", "float16"))
    width = (1 if activation in native.PLAIN_ACTIVATIONS else 2) * intermediate
    shapes = dict(w1=(count, width, hidden), w2=w2.shape, b1=(count, width), b2=(count, hidden))
    for name, shape in shapes.items():
        if operands[name] is not None:
            _expect(function, name, operands[name], shape, (x.dtype.name,))
    return operands


def _record(function: str, operands: dict, index_dtype=np.dtype(np.int32), **options) -> Record:
    code = native.TYPES[_TYPES[operands["x"].dtype.name]]
    count, hidden, intermediate = operands["w2"].shape
    return record_of(
        function, hidden=hidden, intermediate=intermediate, experts=count, dtype=code, gradient_type=code,
        index_type=_TYPES[index_dtype.name], **options,
    )  # fmt: skip


def experts(
    x, ids, weights, w1, w2, *, b1=None, b2=None, activation="swiglu", layout="concatenated", chunks=1
) -> jax.Array:
    """out[t] = sum over k of weights[t, k] expert[ids[t, k]](x[t]); x (T, H), ids (T, K) int32 or int64, weights (T, K),
    w1 (E, 2I or I, H), w2 (E, H, I), b1 (E, 2I or I), b2 (E, H)."""
    function = "smoe.jax.experts"
    operands = _operands(function, x, w1, w2, b1, b2, activation)
    x, ids, weights = operands["x"], jnp.asarray(ids), jnp.asarray(weights, jnp.float32)
    if ids.ndim != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"{function}: ids has shape {ids.shape} and weights {weights.shape}; expected (T, K) of both")
    _expect(function, "ids", ids, ids.shape, _INDEX_DTYPES)
    options = dict(activation=activation, layout=layout, chunks=chunks, entry="from_topk", topk=ids.shape[1])
    problem = _Problem(_record(function, operands, ids.dtype, **options))
    return _run(problem, operands | dict(topk_ids=ids, topk_weights=weights))[0] if x.shape[0] else jnp.zeros_like(x)


def experts_rows(
    rows, offsets, w1, w2, row_weights=None, *, b1=None, b2=None, activation="swiglu", layout="concatenated", chunks=1
) -> jax.Array:
    """The experts on rows (R, H) sorted by expert: expert e has rows offsets[e] to offsets[e + 1] - 1, offsets (E + 1)
    int32 or int64; row_weights (R) or None for ones. Rows past offsets[E] give zeros."""
    function = "smoe.jax.experts_rows"
    operands = _operands(function, rows, w1, w2, b1, b2, activation)
    rows, offsets = operands["x"], jnp.asarray(offsets)
    _expect(function, "offsets", offsets, (operands["w2"].shape[0] + 1,), _INDEX_DTYPES)
    weights = None if row_weights is None else jnp.asarray(row_weights, jnp.float32)
    if weights is not None:
        _expect(function, "row_weights", weights, rows.shape[:1], ("float32",))
    options = dict(activation=activation, layout=layout, chunks=chunks, entry="from_rows")
    problem = _Problem(_record(function, operands, offsets.dtype, **options))
    operands |= dict(offsets=offsets, row_weights=weights)
    return _run(problem, operands)[0] if rows.shape[0] else jnp.zeros_like(rows)


def _router(function: str, operands: dict, router_weight, router_bias, selection_bias, token_mask) -> dict:
    (count, hidden, _), dtype = operands["w2"].shape, operands["x"].dtype.name
    router = dict(
        router_weight=router_weight, router_bias=router_bias, selection_bias=selection_bias, token_mask=token_mask
    )
    router = {name: None if value is None else jnp.asarray(value) for name, value in router.items()}
    _expect(function, "router_weight", router["router_weight"], (count, hidden), (dtype,))
    if router_bias is not None:
        _expect(function, "router_bias", router["router_bias"], (count,), (dtype,))
    if token_mask is not None:
        _expect(function, "token_mask", router["token_mask"], operands["x"].shape[:1], ("bool",))
        router["token_mask"] = router["token_mask"].astype(jnp.uint8)
    if selection_bias is not None:
        router["selection_bias"] = router["selection_bias"].astype(jnp.float32)
        _expect(function, "selection_bias", router["selection_bias"], (count,), ("float32",))
    return router


def moe(
    x, router_weight, w1, w2, *, router_bias=None, b1=None, b2=None, selection_bias=None, token_mask=None, activation="swiglu",
    step=0, balance_coefficient=0.0, z_coefficient=0.0, losses=True, **options,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Router and experts: x (T, H), router_weight (E, H), router_bias (E), selection_bias (E), token_mask (T) bool; `options`
    are those of smoe.moe that describe the layer: topk, layout, score, renormalize, groups, groups_kept, route_scale,
    rounding, tile, seed, chunks, also by Hugging Face's names.
    Returns out (T, H) and the losses (2) float32, load balance and z. The backward adds the gradient that reaches the
    losses, and that of balance_coefficient losses[0] + z_coefficient losses[1]. Without `losses` they are None, and the
    backward of scores that are renormalised or topk_softmax takes less time and keeps no logits."""
    function = "smoe.jax.moe"
    operands = _operands(function, x, w1, w2, b1, b2, activation)
    record = _record(function, operands, activation=activation, **options_of(function, options))
    operands |= _router(function, operands, router_weight, router_bias, selection_bias, token_mask)
    if not operands["x"].shape[0]:
        return jnp.zeros_like(operands["x"]), jnp.zeros(2, jnp.float32) if losses else None
    problem = _Problem(record, step, float(balance_coefficient), float(z_coefficient), bool(losses))
    return _run(problem, operands)
