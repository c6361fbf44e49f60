"""Hugging Face Transformers: `import smoe.transformers`, then `experts_implementation="smoe"`.

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="smoe")

It registers the experts function, and the model type of `smoe train` ("smoe": OLMoE with a shared expert and dense
first layers) with its byte tokenizer. Experts that smoe cannot compute, because of their activation, a norm after the
experts, their dtype, quantised weights or the GPU, run as Transformers' own eager code. One warning states the reason.
With Transformers 5.23 or later it also registers ep_implementation="smoe" (smoe/_transformers_ep.py).
"""

import ctypes
import functools
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from packaging.version import Version  # a requirement of Transformers
from torch import Tensor, nn

if Version(transformers.__version__).release < (5, 17):
    raise ImportError(f"smoe.transformers: needs transformers 5.17 or later, this is {transformers.__version__}")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizer,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.models.olmoe import modeling_olmoe
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
from transformers.utils import logging

from . import _checks, _gates, functional, native
from ._activation import Gate
from ._route import route

__all__ = ["ByteTokenizer", "SmoeConfig", "SmoeForCausalLM", "SmoeModel", "experts_forward", "prepare"]

_logger = logging.get_logger(__name__)

# ---- the experts function ----


def _scalars_of(thing: Any) -> tuple:
    """The types and plain values of a module and of all modules in it; a function is itself. Equal gates have equal ones."""
    modules = list(thing.modules()) if isinstance(thing, nn.Module) else [thing]
    plain = (bool, int, float, str, type(None))
    return tuple(
        (type(module), *((name, value) for name, value in vars(module).items() if isinstance(value, plain)))
        if hasattr(module, "__dict__") and not inspect.isroutine(module)
        else module
        for module in modules
    )


_known_gates: dict[tuple, tuple[str | Gate | None, str, str]] = {}


def _probe(experts: nn.Module, gated: bool) -> tuple[str | Gate | None, str, str]:
    """What _math_of returns, from calling the gate."""
    function = experts._apply_gate if gated else experts.act_fn
    try:
        found = _gates.recognise(function, gated)
        with torch.enable_grad(), torch.inference_mode(False):
            out = function(torch.ones(1, 8, dtype=torch.float64, device="cpu", requires_grad=True)).sum()
            weights = [weight for weight in experts.parameters() if weight.requires_grad]
            if weights and any(used is not None for used in torch.autograd.grad(out, weights, allow_unused=True)):
                return None, "", "its gate has weights of its own"
    except Exception as error:
        return None, "", f"its gate cannot be called with float64 on the CPU ({error})"
    if found is not None:
        return found.activation, found.layout, ""
    if gated and type(experts)._apply_gate is not _default_apply_gate:
        return None, "", "its _apply_gate is none of smoe's activations"
    return None, "", f"smoe has no activation {type(experts.act_fn).__name__}"


def _math_of(experts: nn.Module) -> tuple[str | Gate | None, str, str]:
    """smoe's activation and layout for these experts. If smoe cannot compute them, the activation is None and the third
    value is the reason."""
    if getattr(experts, "has_post_expert_norm", False):
        return None, "", "it has a norm after each expert"
    gated = getattr(experts, "has_gate", True)
    # PEFT's LoRA on expert weights makes a subclass, but does not change the function. A module may have a gate of its own.
    gate = getattr(experts, "_apply_gate", None)
    key = getattr(gate, "__func__", gate), gated, _scalars_of(experts), _scalars_of(getattr(experts, "act_fn", None))
    if key not in _known_gates:
        # A thread of its own has neither the saved-tensor hooks of a checkpoint around this call nor its dispatch modes.
        with ThreadPoolExecutor(1) as thread:
            _known_gates[key] = thread.submit(_probe, experts, gated).result()
    return _known_gates[key]


@torch.compiler.assume_constant_result
def _math_at(number: int) -> tuple[str | Gate | None, str, str]:
    """_math_of the experts with this id. Dynamo calls it once and makes the result a constant; in torch 2.11 a module is no
    argument of such a function."""
    return _math_of(ctypes.cast(number, ctypes.py_object).value)


def _weights_of(experts: nn.Module) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The parameters w1, b1, w2, b2, as the module stores them."""
    up = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
    w1, w2 = getattr(experts, up), experts.down_proj
    if not getattr(experts, "has_bias", False):
        return w1, None, w2, None
    return w1, getattr(experts, up + "_bias"), w2, experts.down_proj_bias


def _local(tensor: Tensor | None) -> Tensor | None:
    """The local shard of a DTensor, which tensor- and expert-parallel plans make of a weight; any other tensor as it
    is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _why_not(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> str:
    """Why these tensors cannot go to smoe, "" if they can."""
    reason = _checks.why_not(x, w1, b1, w2, b2)
    if reason:
        return reason
    if w2.shape[1] % 8 or w2.shape[2] % 8:
        return f"its sizes {w2.shape[1]} and {w2.shape[2]} are not multiples of 8"
    if w2.shape[0] > _checks.MAX_EXPERTS:
        return f"it has {w2.shape[0]} experts, {_checks.MAX_EXPERTS} is the most"
    return ""


def _valid(ids: Tensor, count: int) -> Tensor:
    """Which of the ids (T, K) count: those in 0..count-1 that their token did not have before."""
    repeated = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
    return (ids >= 0) & (ids < count) & ~repeated


def _keep_possible(ids: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cuts ids and weights (T, K) to `count` columns, where a token has more ids than this rank has experts (`count`,
    its share of a larger layer). At most `count` ids of a token are valid; they come first, in their order. The others
    become `count`, which smoe skips."""
    valid = _valid(ids, count)
    ids = ids.masked_fill(~valid, count)
    first = (~valid).to(torch.int8).argsort(dim=-1, stable=True)[:, :count]
    return ids.gather(1, first), weights.gather(1, first)


def _gather_experts(ids: Tensor, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """New ids, and contiguous copies of the weights of the T K pairs' experts alone, an expert as often as it has
    pairs. For few tokens this is less than a copy of all experts."""
    pairs, experts = ids.numel(), weights[0].shape[0]
    valid = _valid(ids, experts).flatten()
    chosen = ids.flatten().clamp(0, experts - 1)
    ids = torch.arange(pairs, device=ids.device).masked_fill(~valid, pairs).view_as(ids)
    return ids, *[None if weight is None else weight.index_select(0, chosen) for weight in weights]


def _eager(experts: nn.Module, reason: str, *arguments: Tensor) -> Tensor:
    """Runs the class's own forward, without the wrappers that choose an implementation."""
    _logger.warning_once(f"smoe: {type(experts).__name__} runs as eager: {reason}.")
    return inspect.unwrap(type(experts).forward)(experts, *arguments)


def _use_peft() -> None:
    from . import peft  # noqa: F401


if "peft" in sys.modules:
    _use_peft()


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, compute: str | None = None
) -> Tensor:
    """The function behind experts_implementation="smoe": hidden_states (T, H), ids and weights (T, K) to (T, H) in the dtype
    of hidden_states. `compute` is that of smoe.experts: "smoe_f8" and "smoe_f8_dgrad" give it."""
    held = self.__dict__.get("_smoe_lora")  # by smoe.peft
    if "parametrizations" in self._modules and "peft" in sys.modules:
        _use_peft()  # PEFT was imported after this module: of this call alone it has built the weights
    traced = torch.compiler.is_dynamo_compiling()
    activation, layout, reason = _math_at(id(self)) if traced else _math_of(self)
    if activation is not None:
        w1, b1, w2, b2 = map(_local, _weights_of(self))
        reason = _why_not(hidden_states, w1, b1, w2, b2)
    if held and (activation is None or reason):
        with sys.modules["smoe.peft"].built_weights(held):
            return _eager(self, reason, hidden_states, top_k_index, top_k_weights)
    if activation is None or reason:
        return _eager(self, reason, hidden_states, top_k_index, top_k_weights)
    if getattr(self, "is_transposed", False):
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    if top_k_index.shape[1] > w2.shape[0]:
        top_k_index, top_k_weights = _keep_possible(top_k_index, top_k_weights, w2.shape[0])
    transposed = not (w1.is_contiguous() and w2.is_contiguous())
    if transposed and not held and not torch.is_grad_enabled() and 0 < top_k_index.numel() < w2.shape[0]:
        top_k_index, w1, b1, w2, b2 = _gather_experts(top_k_index, w1, b1, w2, b2)
    out = functional.experts(
        hidden_states, top_k_index, top_k_weights, w1, w2, b1=b1, b2=b2, activation=activation, layout=layout,
        copy_weights=transposed, compute=compute, weights_f8=_quantized(self, w1, w2, activation, layout) if compute else None,
        lora=sys.modules["smoe.peft"].adapters_of(self, held) if held else None,
    )  # fmt: skip
    return out.to(hidden_states.dtype)  # under autocast too, as Transformers' own experts functions do


def _quantized(experts: nn.Module, w1: Tensor, w2: Tensor, activation: str | Gate, layout: str) -> Tensor | None:
    """The quantised weights that the module keeps. None: smoe.experts makes them, of weights that are no parameters (a view, a
    part), and in a process group, because fully_shard fills a parameter without counting that."""
    from . import _f8

    if not (isinstance(w1, nn.Parameter) and isinstance(w2, nn.Parameter)) or dist.is_available() and dist.is_initialized():
        return None
    return _f8.of_module(experts, w1, w2, activation=activation, layout=layout)


# ---- weights stored [E, H, 2I], [E, I, H] (gpt-oss) ----


@torch.no_grad()
def _turn(parameter: nn.Parameter, states: dict[str, Any]) -> None:
    """Changes the memory layout so that the transpose of dimensions 1 and 2 is contiguous; shape, name and values
    stay. The gradient and the optimizer's states of the parameter change with it, because fused optimizers on the CPU
    read all of them in memory order."""
    for tensor in (parameter, parameter.grad, *states.values()):
        same = isinstance(tensor, Tensor) and tensor.shape == parameter.shape
        if same and not tensor.transpose(1, 2).is_contiguous():
            # Inference tensors stay inference tensors, and no other tensor becomes one: a backward could not use it.
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = tensor.data.transpose(1, 2).contiguous().transpose(1, 2)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Changes the memory layout of expert weights that are stored transposed (gpt-oss), so that smoe reads them in place
    and not through a copy. Each weight is rewritten once; shapes, names and values stay. After it the weights are not
    contiguous: safetensors' save_file, parameters_to_vector, LBFGS and fully_shard refuse them, and states that an
    optimizer loads must be prepared too. Call it before torch.compile and before DistributedDataParallel. If the
    optimizer has taken steps or has loaded states, pass it: its states change with their weights."""
    for module in model.modules():
        if getattr(module, "is_transposed", False) and _math_of(module)[0] is not None:
            up = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
            for parameter in (getattr(module, up), module.down_proj):
                _turn(parameter, {} if optimizer is None else optimizer.state.get(parameter, {}))
    return model


def _quantized_forward(self: nn.Module, *arguments: Tensor) -> Tensor:
    """The function behind experts_implementation="smoe" for the experts of an FP8 checkpoint, for which Transformers
    has a separate list of functions."""
    return _eager(self, "its weights are FP8; dequantize=True in the quantization config makes them bf16", *arguments)


for _name, _compute in (("smoe", None), ("smoe_f8", "f8"), ("smoe_f8_dgrad", "f8_dgrad")):
    ALL_EXPERTS_FUNCTIONS.register(_name, functools.partial(experts_forward, compute=_compute) if _compute else experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(_name, _quantized_forward)

# ---- smoe's own model type ----


class SmoeConfig(OlmoeConfig):
    """OLMoE's configuration with more fields: shared_expert_intermediate_size (0: no shared expert),
    first_k_dense_replace (the number of dense layers, which come before the sparse ones), dense_intermediate_size; and
    of the router scoring_func ("softmax", "topk-softmax" or "sigmoid"), n_group, topk_group and routed_scaling_factor as
    in DeepSeek-V3, and selection_bias (with sigmoid: gate.e_score_correction_bias is added to the scores that top-K
    compares)."""

    model_type = "smoe"

    shared_expert_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    dense_intermediate_size: int = 0
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    selection_bias: bool = False


class _SwiGLU(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Router(modeling_olmoe.OlmoeTopKRouter):
    """The router of any score; OLMoE's own has softmax alone."""

    def __init__(self, config: SmoeConfig) -> None:
        super().__init__(config)
        scores = {"softmax" if name == "softmax_topk" else name.replace("_", "-"): name for name in native.SCORES}
        if config.scoring_func not in scores:
            raise ValueError(f"scoring_func is {config.scoring_func!r}; expected one of {', '.join(scores)}")
        self.score = scores[config.scoring_func]
        self.scale = config.routed_scaling_factor
        self.groups, self.groups_kept = config.n_group, config.topk_group
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        ids, weights = route(
            logits, topk=self.top_k, score=self.score, renormalize=self.norm_topk_prob and self.score != "topk_softmax",
            groups=self.groups, groups_kept=self.groups_kept, route_scale=self.scale,
            selection_bias=self.e_score_correction_bias,
        )  # fmt: skip
        return logits, weights.to(logits.dtype), ids


class _SharedAndSparse(modeling_olmoe.OlmoeSparseMoeBlock):
    def __init__(self, config: SmoeConfig) -> None:
        super().__init__(config)
        self.shared_expert = _SwiGLU(config.hidden_size, config.shared_expert_intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.shared_expert(hidden_states)


class _Pretrained:
    config_class = SmoeConfig
    config: SmoeConfig

    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, _Router) and module.e_score_correction_bias is not None:
            torch.nn.init.zeros_(module.e_score_correction_bias)


class SmoeModel(_Pretrained, modeling_olmoe.OlmoeModel):
    def __init__(self, config: SmoeConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            if index < config.first_k_dense_replace:
                layer.mlp = _SwiGLU(config.hidden_size, config.dense_intermediate_size)
                continue
            if config.shared_expert_intermediate_size:
                layer.mlp = _SharedAndSparse(config)
            layer.mlp.gate = _Router(config)
        self.post_init()


class SmoeForCausalLM(_Pretrained, modeling_olmoe.OlmoeForCausalLM):
    def __init__(self, config: SmoeConfig) -> None:
        super().__init__(config)
        self.model = SmoeModel(config)
        self.post_init()


class ByteTokenizer(PreTrainedTokenizer):
    """Every byte of the UTF-8 text is a token, as `smoe train` reads text."""

    model_input_names = ["input_ids", "attention_mask"]

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index) if index < 256 else "\ufffd"  # a model may have a larger vocabulary

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Decodes bytes; added tokens between them, for example a padding token, stay as their text."""
        latin = lambda token: len(token) == 1 and ord(token) < 256
        return b"".join(bytes([ord(t)]) if latin(t) else t.encode() for t in tokens).decode(errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()


register_checkpoint_conversion_mapping("smoe", get_checkpoint_conversion_mapping("olmoe"), overwrite=True)
AutoConfig.register("smoe", SmoeConfig, exist_ok=True)
AutoModel.register(SmoeConfig, SmoeModel, exist_ok=True)
AutoModelForCausalLM.register(SmoeConfig, SmoeForCausalLM, exist_ok=True)
AutoTokenizer.register(SmoeConfig, slow_tokenizer_class=ByteTokenizer, exist_ok=True)

# ---- expert parallelism ----

if Version(transformers.__version__).release >= (5, 23):
    from ._transformers_ep import SmoeEP  # noqa: F401  registers it
else:

    def __getattr__(name: str) -> Any:
        if name == "SmoeEP":
            raise ImportError(f"smoe.transformers: expert parallelism needs transformers 5.23 or later, this is {transformers.__version__}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
