"""The C library through ctypes: loading, the structs and enums of include/smoe.h, errors. This module needs no torch.

The structs repeat the header's fields in order. tests/python/test_native.py compares every offset, size and enumerator
with the header's, so a change of the header that is not repeated here fails a test.
"""

import ctypes
import json
import os
from pathlib import Path

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_I32, _I64, _U64, _F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float
_ENUM = ctypes.c_int

# ---- enums: the header's values by the names that Python callers use ----

OK, ERROR_ARGUMENT, ERROR_SHAPE, ERROR_ALIGNMENT = 0, 100, 110, 120
ERROR_BUFFER, ERROR_UNSUPPORTED, ERROR_MEMORY, ERROR_DEVICE, ERROR_PEER = 130, 140, 150, 160, 170

BACKENDS = {"cpu": 0, "cuda": 10}
KERNELS = {"best": 0, "portable": 1}
TYPES = {"f32": 0, "bf16": 1, "f16": 2, "i32": 10, "i64": 11}
GATED_ACTIVATIONS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2, "reglu": 3, "swiglu_clamped": 4, "swiglu_capped": 5}
PLAIN_ACTIVATIONS = {"silu": 10, "gelu": 11, "relu": 12, "relu2": 13}
ACTIVATIONS = GATED_ACTIVATIONS | PLAIN_ACTIVATIONS
LAYOUTS = {"concatenated": 0, "interleaved": 1}
ENTRIES = {"from_logits": 0, "from_topk": 1, "from_rows": 2}
SCORES = {"softmax_topk": 0, "topk_softmax": 1, "sigmoid": 2}
ROUNDINGS = {"none": 0, "nr_f": 1, "sr_f": 2, "nr_s": 3, "balance_f": 4, "up": 5, "down": 6}

# ---- structs ----


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, _POINTER) for name in names.split()]


class ContextOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        ("backend", _ENUM),
        ("device", _I32),
        ("threads", _I32),
        *_pointers("on_stage on_stage_user error_text"),
        ("error_size", _SIZE),
        ("check_offsets", _I32),
        ("sms", _I32),
        ("kernels", _ENUM),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        *[(name, _I64) for name in "tokens hidden intermediate experts topk".split()],
        *[(name, _ENUM) for name in "dtype activation layout entry index_type logits_type gradient_type".split()],
        *[(name, _I32) for name in "accumulate inference reuse_saved chunks".split()],
        ("score", _ENUM),
        *[(name, _I32) for name in "renormalize groups groups_kept".split()],
        ("route_scale", _F32),
        ("rounding", _ENUM),
        ("tile", _I32),
        ("seed", _U64),
        *[(name, _F32) for name in "gate_limit up_limit gate_alpha up_offset".split()],
        ("ranks", _I32),
        ("waves", _I32),
        ("max_tokens", _I64),
        ("row_capacity", _I64),
    ]


class Sizes(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        ("rows", _I64),
        ("padded_rows", _I64),
        ("saved_bytes", _U64),
        ("metadata_bytes", _U64),
        ("saved_buffer_bytes", _U64),
        ("scratch_forward_bytes", _U64),
        ("scratch_backward_bytes", _U64),
        ("window_bytes", _U64),
        ("saved_constant_bytes", _U64),
        ("saved_token_bytes", _U64),
        ("backward_reads_logits", _I32),
    ]


class ForwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        *_pointers("x router_weight router_bias logits selection_bias"),
        ("step", _U64),
        *_pointers("losses topk_ids topk_weights offsets row_weights w1 b1 w2 b2 out saved"),
        ("saved_size", _U64),
        ("scratch", _POINTER),
        ("scratch_size", _U64),
        ("ep", _POINTER),
        ("token_mask", _POINTER),
    ]


class BackwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        *_pointers("x router_weight logits topk_ids w1 w2 b2 saved"),
        ("saved_size", _U64),
        ("dout", _POINTER),
        ("balance_coefficient", _F32),
        ("z_coefficient", _F32),
        *_pointers("dx dw1 dw2 db1 db2 drouter_weight drouter_bias dlogits dtopk_weights drow_weights scratch"),
        ("scratch_size", _U64),
        ("loss_gradients", _POINTER),
        ("ep", _POINTER),
        ("token_mask", _POINTER),
    ]


class PlanView(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        *_pointers("topk_ids topk_weights topk_counts counts offsets block_offsets order"),
        *_pointers("row_token row_weight token_offsets token_rows h"),
    ]


STRUCTS = {  # by the header's names
    "smoe_context_options": ContextOptions,
    "smoe_layer": Layer,
    "smoe_sizes": Sizes,
    "smoe_forward_args": ForwardArgs,
    "smoe_plan_view": PlanView,
    "smoe_backward_args": BackwardArgs,
}

# ---- loading ----


def _library_path() -> Path:
    """SMOE_LIBRARY, or the library that the package was installed with."""
    given = os.environ.get("SMOE_LIBRARY")
    if given:
        return Path(given)
    folder = Path(__file__).parent / "lib"
    return next(folder.glob("libsmoe.so*"), folder / "libsmoe.so")


def _load(path: Path) -> ctypes.CDLL:
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:  # not a library, or a library without smoe's functions
        raise ImportError(
            f"smoe: the C library {path} does not load: {error}. Install the package with `pip install .`, or let "
            "the environment variable SMOE_LIBRARY name a libsmoe.so"
        ) from error


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    calls = {
        "smoe_create": 2,
        "smoe_supports": 2,
        "smoe_query_sizes": 3,
        "smoe_layer_forward": 4,
        "smoe_layer_backward": 4,
        "smoe_view_plan": 4,
    }
    for name, count in calls.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_POINTER] * count, ctypes.c_int
    library.smoe_update_selection_bias.argtypes = [_POINTER] * 4 + [_F32, _POINTER]
    library.smoe_update_selection_bias.restype = ctypes.c_int
    library.smoe_destroy.argtypes, library.smoe_destroy.restype = [_POINTER], None
    library.smoe_last_error.argtypes, library.smoe_last_error.restype = [_POINTER], ctypes.c_char_p
    library.smoe_status_string.argtypes, library.smoe_status_string.restype = [ctypes.c_int], ctypes.c_char_p
    library.smoe_version.argtypes, library.smoe_version.restype = [], ctypes.c_int
    return library


path = _library_path()
library = _load(path)


def version() -> str:
    """The library's version, "major.minor.patch"."""
    number = library.smoe_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def build_info() -> dict[str, str | None]:
    """A dict with version and library (its path). If build_info.json stands beside the library, it also has cuda (the
    toolkit's version, None for a library that has only the CPU backend), compiler and build_type."""
    info: dict[str, str | None] = {"version": version(), "library": str(path)}
    try:
        built = json.loads(path.with_name("build_info.json").read_text())
    except FileNotFoundError:  # a library that SMOE_LIBRARY names, outside a build folder
        return info
    return info | {key: value or None for key, value in built.items()}


# ---- errors and contexts ----

_EXCEPTIONS = {
    ERROR_ARGUMENT: ValueError,
    ERROR_SHAPE: ValueError,
    ERROR_ALIGNMENT: ValueError,
    ERROR_UNSUPPORTED: NotImplementedError,
    ERROR_MEMORY: MemoryError,
}


def error(status: int, text: str) -> Exception:
    """The exception of the fitting type for a status other than OK."""
    reason = text or library.smoe_status_string(status).decode()
    return _EXCEPTIONS.get(status, RuntimeError)(reason)


def last_error(context: int, status: int) -> Exception:
    """The exception for a call on `context` that returned `status`."""
    return error(status, (library.smoe_last_error(context) or b"").decode())


MOST_THREADS = 512  # limit of a context; a machine may have more processors


def kernels_of_environment() -> int:
    """smoe_context_options.kernels as SMOE_KERNELS in the environment names it."""
    name = os.environ.get("SMOE_KERNELS", "best")
    if name not in KERNELS:
        raise ValueError(f"SMOE_KERNELS is {name!r}; it is one of {', '.join(KERNELS)}")
    return KERNELS[name]


def create_context(backend: str, device: int = 0, threads: int = 0) -> int:
    """The address of a new smoe_context. `device` is the GPU of a cuda context; `threads` is the number of OpenMP
    threads of a cpu context (0: OpenMP's default), at most MOST_THREADS."""
    threads = min(threads, MOST_THREADS)
    text = ctypes.create_string_buffer(512)
    options = ContextOptions(ctypes.sizeof(ContextOptions), BACKENDS[backend], device, threads)
    options.kernels = kernels_of_environment()
    options.error_text, options.error_size = ctypes.addressof(text), len(text)
    context = ctypes.c_void_p()
    status = library.smoe_create(ctypes.byref(context), ctypes.byref(options))
    if status != OK:
        raise error(status, text.value.decode())
    return context.value
