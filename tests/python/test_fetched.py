"""smoe.compat beside the code of SonicMoE and Megatron-Core, whose wheels tools/test_python.sh unpacks into the folder that
SMOE_FETCHED names. Their packages cannot be imported without a GPU, so signatures are read from the source, and of
SonicMoE only its module moe.py runs, whose kernels are replaced by smoe."""

import ast
import importlib
import inspect
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from smoe import compat

FETCHED = Path(os.environ.get("SMOE_FETCHED", "nowhere"))
pytestmark = pytest.mark.skipif(not FETCHED.is_dir(), reason="SMOE_FETCHED names no folder with the packages")


def signature_of(file: str, name: str) -> dict:
    """The parameters of a function or method in a source file, and their default values (None where there is none or
    where it is not a constant)."""
    place, _, method = name.partition(".")
    (found,) = [node for node in ast.parse((FETCHED / file).read_text()).body if getattr(node, "name", "") == place]
    if method:
        (found,) = [node for node in found.body if getattr(node, "name", "") == method]
    names = [parameter.arg for parameter in found.args.args]
    defaults = [None] * (len(names) - len(found.args.defaults)) + [getattr(d, "value", None) for d in found.args.defaults]
    return {name: d if isinstance(d, (bool, int, str)) else None for name, d in zip(names, defaults)}


@pytest.mark.parametrize("function", [compat.moe_TC_softmax_topk_layer, compat.moe_general_routing_inputs])
def test_signatures_are_sonicmoes(function):
    theirs = signature_of("sonicmoe/functional/__init__.py", function.__name__)
    ours = inspect.signature(function).parameters
    assert list(ours) == list(theirs)
    assert all(ours[name].default == default for name, default in theirs.items() if default is not None)


def test_signature_is_megatrons():
    theirs = signature_of("megatron/core/transformer/moe/experts.py", "TEGroupedMLP.forward")
    ours = list(inspect.signature(compat.te_grouped_mlp).parameters)
    buffers = ["output_buffer", "grad_input_buffer"]
    assert ["self", *ours[:3], *buffers] == list(theirs) and ours[3:] == ["w1", "w2", *buffers, "options"]


@pytest.fixture
def sonicmoe(monkeypatch):
    """SonicMoE's module moe.py with compat's function in place of its own."""
    package, functional = types.ModuleType("sonicmoe"), types.ModuleType("sonicmoe.functional")
    package.__path__ = [str(FETCHED / "sonicmoe")]
    functional.moe_TC_softmax_topk_layer = compat.moe_TC_softmax_topk_layer
    monkeypatch.setitem(sys.modules, "sonicmoe", package)
    monkeypatch.setitem(sys.modules, "sonicmoe.functional", functional)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    yield importlib.import_module("sonicmoe.moe")
    for name in [name for name in sys.modules if name.startswith("sonicmoe.")]:
        monkeypatch.delitem(sys.modules, name)


# SonicMoE's code for PyTorch has the exact GELU for GEGLU, its kernels and compat have the tanh approximation.
ACTIVATIONS = {"SWIGLU": 1e-5, "REGLU": 1e-5, "GEGLU": 1e-2, "RELU_SQ": 1e-5, "RELU": 1e-5, "GELU": 1e-5, "SILU": 1e-5}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_sonicmoes_module_gives_the_same_results_on_smoe(sonicmoe, activation, bias):
    """SonicMoE's module with its own code for PyTorch and with smoe: output, auxiliary loss and all gradients."""
    torch.manual_seed(0)
    module = sonicmoe.MoE(8, 2, 32, 16, sonicmoe.ActivationType[activation], bias, 0.3)
    if bias:
        for experts in (module.c_fc, module.c_proj):
            torch.nn.init.normal_(experts.bias, std=0.3)
    results = []
    for backend in (sonicmoe.KernelBackendMoE.torch, sonicmoe.KernelBackendMoE.sonicmoe):
        x = torch.randn(4, 20, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out, loss = module(x, backend)
        gradients = torch.autograd.grad(out.square().sum() + loss, [x, *module.parameters()])
        results.append([out, loss, *gradients])
    for theirs, ours in zip(*results):
        assert (theirs - ours).norm() <= ACTIVATIONS[activation] * theirs.norm()
