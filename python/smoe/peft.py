"""PEFT's LoRA on the weights of experts (LoraConfig(target_parameters=...)), computed without building these weights.

PEFT wraps a module in a ParamWrapper for each targeted parameter; its forward makes the whole weight W + scaling B A for
the time of the call. `import smoe.peft` makes the wrappers of experts that smoe computes hand their factors to smoe instead:
those of Transformers with experts_implementation="smoe", and those of smoe.MoE. Everything else stays PEFT's: which
parameters are wrapped, keys, initialisation, merging, saving, what raises. `import smoe.transformers` does it if PEFT has been
imported before.
"""

import contextlib
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ._lora import LoRA, of_peft
from .module import _Experts

__all__ = ["LoRA"]

_build_weight = ParamWrapper._activate_lora  # PEFT's own way: a context in which the parameter is W + scaling B A

Held = dict[str, tuple[ParamWrapper, list[str]]]  # by the parameter's name: its wrapper and the adapters to apply


def _up_name(experts: nn.Module) -> str:
    if isinstance(experts, _Experts):
        return experts.up_name
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"


def _smoe_computes(experts: nn.Module) -> bool:
    if "forward" in vars(experts):  # not the class's, for example that of Transformers' expert parallelism
        return False
    config = getattr(experts, "config", None)
    if isinstance(experts, _Experts):
        return experts.ep is None
    return (
        getattr(config, "_experts_implementation", None) == "smoe" and hasattr(experts, "down_proj")
    )


@contextlib.contextmanager
def _activate(wrapper: ParamWrapper, adapters: list[str]) -> Iterator[None]:
    """Takes the place of ParamWrapper._activate_lora."""
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    chosen = [adapter for adapter in adapters if adapter in wrapper.lora_A]
    if not chosen or wrapper.num_experts == 1 or not _smoe_computes(experts) or name not in (_up_name(experts), "down_proj"):
        with _build_weight(wrapper, adapters):
            yield
        return
    held = experts.__dict__.setdefault("_smoe_lora", {})
    held[name] = wrapper, chosen
    try:
        yield
    finally:
        del held[name]
        if not held:
            del experts.__dict__["_smoe_lora"]


ParamWrapper._activate_lora = _activate


def _factors(experts: nn.Module, wrapper: ParamWrapper, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The factors (E, r, in) and (E, out, r) of a weight (E, out, in) as smoe reads it, and the scaling."""
    a, b = of_peft(wrapper.num_experts, wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight)
    if not getattr(wrapper, "_did_swap_in_out_features", False) and not getattr(experts, "is_transposed", False):
        a, b = b.transpose(1, 2), a.transpose(1, 2)  # PEFT up to 0.18 took the weight's rows for its inputs
    return a, b, wrapper.scaling[adapter]


def adapters_of(experts: nn.Module, held: Held) -> list[LoRA]:
    """The adapters to apply to these experts."""
    found = []
    for name, fields in ((_up_name(experts), ("a1", "b1", "scaling1")), ("down_proj", ("a2", "b2", "scaling2"))):
        wrapper, adapters = held.get(name, (None, []))
        found += [LoRA(**dict(zip(fields, _factors(experts, wrapper, adapter)))) for adapter in adapters]
    return found


@contextlib.contextmanager
def built_weights(held: Held) -> Iterator[None]:
    """PEFT's own way, for experts that smoe turns out not to compute."""
    with contextlib.ExitStack() as stack:
        for wrapper, adapters in held.values():
            stack.enter_context(_build_weight(wrapper, adapters))
        yield
