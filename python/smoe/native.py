"""The C library through ctypes: loading, the structs, enums and functions of its headers, errors. This module needs no
torch.

All declarations come from the library that is loaded: smoe_declarations gives those of the headers with which it was
built. So none is repeated here, and none can be of another version than the library.
"""

import ctypes
import json
import os
from pathlib import Path


def _library_path() -> Path:
    """SMOE_LIBRARY, or the library that the package was installed with."""
    given = os.environ.get("SMOE_LIBRARY")
    if given:
        return Path(given)
    folder = Path(__file__).parent / "lib"
    return next(folder.glob("libsmoe.so*"), folder / "libsmoe.so")


def _load(path: Path) -> tuple[ctypes.CDLL, dict]:
    """The library and what it declares."""
    try:
        library = ctypes.CDLL(str(path))
        library.smoe_declarations.restype = ctypes.c_char_p
        text = library.smoe_declarations()
        if not text:
            raise OSError("it was built without Python and declares nothing")
    except (OSError, AttributeError) as error:  # not a library, or not this one
        raise ImportError(
            f"smoe: the C library {path} does not load: {error}. Install the package with `pip install .`, or let "
            "the environment variable SMOE_LIBRARY name a libsmoe.so"
        ) from error
    return library, json.loads(text)


path = _library_path()
library, _declared = _load(path)

# ---- enums: the header's values; the names without their prefix, in lower case ----


def _values(enum: str) -> dict[str, int]:
    prefix = "SMOE_" if enum == "smoe_status" else enum.upper() + "_"
    return {name.removeprefix(prefix).lower(): value for name, value in _declared["enums"][enum].items()}


STATUSES = _values("smoe_status")
BACKENDS = _values("smoe_backend")
KERNELS = _values("smoe_kernels")
TYPES = _values("smoe_type")
ACTIVATIONS = _values("smoe_activation")
PLAIN_ACTIVATIONS = {name: value for name, value in ACTIVATIONS.items() if value >= ACTIVATIONS["silu"]}
GATED_ACTIVATIONS = {name: value for name, value in ACTIVATIONS.items() if name not in PLAIN_ACTIVATIONS}
LAYOUTS = _values("smoe_layout")
ENTRIES = _values("smoe_entry")
SCORES = _values("smoe_score")
ROUNDINGS = _values("smoe_rounding")
COMPUTES = _values("smoe_compute")

# ---- structs ----

_KINDS = {
    "pointer": ctypes.c_void_p, "string": ctypes.c_char_p, "void": None, "size_t": ctypes.c_size_t, "int": ctypes.c_int,
    "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
} | dict.fromkeys(_declared["enums"], ctypes.c_int)  # fmt: skip


class _Struct(ctypes.Structure):
    """A struct of the header. A new one has the values of its _INIT macro, besides those that are given."""

    def __init__(self, **values) -> None:
        super().__init__(**{**self.defaults, "struct_size": ctypes.sizeof(self), **values})


def _struct(name: str) -> type[_Struct]:
    fields = _declared["structs"][name]
    body = {"_fields_": [(field, _KINDS[kind]) for field, kind, _ in fields]}
    return type(name, (_Struct,), body | {"defaults": {field: default for field, _, default in fields if default}})


STRUCTS = {name: _struct(name) for name in _declared["structs"]}
ContextOptions = STRUCTS["smoe_context_options"]
Layer = STRUCTS["smoe_layer"]
Sizes = STRUCTS["smoe_sizes"]
ForwardArgs = STRUCTS["smoe_forward_args"]
BackwardArgs = STRUCTS["smoe_backward_args"]
PlanView = STRUCTS["smoe_plan_view"]
QuantizeArgs = STRUCTS["smoe_quantize_args"]
EpOptions = STRUCTS["smoe_ep_options"]

# ---- functions ----

for _name, (_result, *_parameters) in _declared["functions"].items():
    _function = getattr(library, _name)
    _function.restype, _function.argtypes = _KINDS[_result], [_KINDS[kind] for kind in _parameters]


def version() -> str:
    """The library's version, "major.minor.patch"."""
    number = library.smoe_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def build_info() -> dict[str, str | None]:
    """A dict with version and library (its path). If build_info.json stands beside the library, it also has compiler,
    build_type, and cuda, cuda_code and cuda_driver: the toolkit's version, the architectures with machine code and the
    oldest driver that will do, each None for a library that has only the CPU backend."""
    info: dict[str, str | None] = {"version": version(), "library": str(path)}
    try:
        built = json.loads(path.with_name("build_info.json").read_text())
    except FileNotFoundError:  # a library that SMOE_LIBRARY names, outside a build folder
        return info
    return info | {key: value or None for key, value in built.items()}


# ---- errors and contexts ----

_EXCEPTIONS = {
    STATUSES["error_argument"]: ValueError,
    STATUSES["error_shape"]: ValueError,
    STATUSES["error_alignment"]: ValueError,
    STATUSES["error_unsupported"]: NotImplementedError,
    STATUSES["error_memory"]: MemoryError,
}


def error(status: int, text: str) -> Exception:
    """The exception of the fitting type for a status other than SMOE_OK."""
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


def query_sizes(context: int, layer: Layer) -> Sizes:
    sizes = Sizes()
    status = library.smoe_query_sizes(context, ctypes.addressof(layer), ctypes.addressof(sizes))
    if status:
        raise last_error(context, status)
    return sizes


def create_context(backend: str, device: int = 0, threads: int = 0) -> int:
    """The address of a new smoe_context. `device` is the GPU of a cuda context; `threads` is the number of OpenMP
    threads of a cpu context (0: OpenMP's default), at most MOST_THREADS."""
    threads = min(threads, MOST_THREADS)
    text = ctypes.create_string_buffer(512)
    options = ContextOptions(
        backend=BACKENDS[backend], device=device, threads=threads, kernels=kernels_of_environment(),
        error_text=ctypes.addressof(text), error_size=len(text),
    )  # fmt: skip
    context = ctypes.c_void_p()
    status = library.smoe_create(ctypes.byref(context), ctypes.byref(options))
    if status:
        raise error(status, text.value.decode())
    return context.value
