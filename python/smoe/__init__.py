"""smoe: Mixture-of-Experts layers, forward and backward, with little memory and deterministic results.

`import smoe` needs no torch: it loads the C library and gives `__version__`, `build_info()` and the ctypes interface
(`smoe.native`). The PyTorch functions and the module smoe.MoE are imported when they are first used.
"""

from typing import Any

from . import native
from ._activation import Gate
from .native import build_info

__version__ = native.version()

_TORCH_NAMES = {
    "moe": "functional",
    "experts": "functional",
    "experts_rows": "functional",
    "update_selection_bias": "functional",
    "route": "_route",
    "MoEOutput": "functional",
    "MoE": "module",
    "LoRA": "_lora",
    "quantize_weights": "_f8",
}

__all__ = ["Gate", "__version__", "build_info", "native", *_TORCH_NAMES]


def __getattr__(name: str) -> Any:
    if name in ("ep", "fsdp"):
        from importlib import import_module

        return import_module("." + name, __name__)
    if name not in _TORCH_NAMES:
        raise AttributeError(f"module 'smoe' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(f".{_TORCH_NAMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"smoe.{name} needs PyTorch: pip install torch", name="torch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
