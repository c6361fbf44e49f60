"""smoe's functions with the signatures of other projects, so that a caller changes only the import.

Weights are read in place. A weight with another memory layout raises ValueError, because converting it would cost a
copy at every step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional

_SONICMOE_ACTIVATIONS = {"relu_sq": "relu2", "geglu": "geglu_tanh"}  # SonicMoE's GEGLU uses the tanh approximation


def _activation(name) -> str:
    """smoe's name for SonicMoE's ActivationType or for the value of one."""
    name = str(getattr(name, "value", name))
    return _SONICMOE_ACTIVATIONS.get(name, name)


def _expert_major(function: str, name: str, weight: Tensor) -> Tensor:
    """The contiguous parameter [E, rows, columns] of which `weight` is SonicMoE's view (rows, columns, E)."""
    turned = weight.permute(2, 0, 1)
    if not turned.is_contiguous():
        raise ValueError(
            f"{function}: {name} of shape {tuple(weight.shape)} has strides {weight.stride()}; expected a view "
            "parameter.permute(1, 2, 0) of a contiguous parameter [E, rows, columns]"
        )
    return turned


def _layout(concat_layout: bool) -> str:
    return "concatenated" if concat_layout else "interleaved"


def moe_TC_softmax_topk_layer(
    x: Tensor, router_w: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, K: int, stream_id: int,
    activation_type="swiglu", is_inference_mode_enabled: bool = False, is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False, concat_layout: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """SonicMoE's layer, which lm-engine calls too: x (T, H), router_w (E, H), w1 (2I, H, E), w2 (H, I, E).

    Returns out (T, H), the router logits (T, E), which are differentiable, and the number of tokens of each expert (E)
    int32. The work goes to the current stream: stream_id is ignored. is_inference_mode_enabled is ignored too; under
    torch.no_grad() nothing is kept for a backward."""
    function = "smoe.compat.moe_TC_softmax_topk_layer"
    logits = F.linear(x, router_w)
    found = functional.moe(
        x, None, _expert_major(function, "w1", w1), _expert_major(function, "w2", w2), topk=K, b1=b1, b2=b2,
        logits=logits if logits.dtype == torch.bfloat16 else logits.float(), activation=_activation(activation_type),
        layout=_layout(concat_layout), score="topk_softmax" if is_softmax_over_topk else "softmax_topk",
        renormalize=norm_topk_probs and not is_softmax_over_topk, counts=True,
    )  # fmt: skip
    return found.out, logits, found.counts


def moe_general_routing_inputs(
    x: Tensor, router_scores: Tensor, token_indices: Tensor, expert_indices: Tensor, w1: Tensor, b1: Tensor | None,
    w2: Tensor, b2: Tensor | None, E: int, stream_id: int, activation_type="swiglu",
    is_inference_mode_enabled: bool = False, concat_layout: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """SonicMoE's function for any number of pairs for each token: pair i sends token token_indices[i] to expert
    expert_indices[i] with the weight router_scores[i]. Returns out (T, H) and the number of pairs of each expert (E)
    int32. The rows of x are copied, one for each pair; if every token has K pairs, smoe.experts is faster."""
    function = "smoe.compat.moe_general_routing_inputs"
    tokens = token_indices.long()
    rows = functional.experts(
        x[tokens], expert_indices[:, None], router_scores[:, None],
        _expert_major(function, "w1", w1), _expert_major(function, "w2", w2), b1=b1, b2=b2,
        activation=_activation(activation_type), layout=_layout(concat_layout),
    )  # fmt: skip
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add(0, tokens, rows.float())
    ones = torch.ones_like(expert_indices, dtype=torch.int32)
    inside = (expert_indices >= 0) & (expert_indices < E)
    counts = torch.zeros(E + 1, dtype=torch.int32, device=x.device)
    counts = counts.index_add(0, torch.where(inside, expert_indices, E).long(), ones)[:E]
    return out.to(x.dtype), counts


def _offsets(tokens_per_expert: Tensor, like: Tensor) -> Tensor:
    """The offsets (E + 1) int32 on the device of `like`, made without waiting for the device."""
    counts = tokens_per_expert.to(device=like.device, non_blocking=True)
    return F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def te_grouped_mlp(
    permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor | None, w1: Tensor, w2: Tensor,
    *, output_buffer: None = None, grad_input_buffer: None = None, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """Megatron-Core's TEGroupedMLP.forward with the weights as arguments: permuted_local_hidden_states (R, H) sorted by
    expert, tokens_per_expert (E), permuted_probs (R), w1 [E, 2I, H] (gate rows first), w2 [E, H, I]. Returns out (R,
    H), and None in place of a bias. `options` are those of smoe.experts_rows. The buffers, which Megatron-Core 0.19 passes
    for NCCL's zero-copy expert parallelism, must be None, as Megatron-Core's own code without Transformer Engine's fused
    path wants them."""
    for name, buffer in (("output_buffer", output_buffer), ("grad_input_buffer", grad_input_buffer)):
        if buffer is not None:
            raise NotImplementedError(f"smoe.compat.te_grouped_mlp: {name} must be None; smoe allocates what it returns")
    rows = permuted_local_hidden_states
    probs = None if permuted_probs is None else permuted_probs.reshape(-1)
    return functional.experts_rows(rows, _offsets(tokens_per_expert, rows), w1, w2, probs, **options), None


def joined(w1: Tensor, w3: Tensor) -> Tensor:
    """The view [E, 2I, H] of a contiguous w13 [E, 2, I, H], given the gate weights w1 = w13[:, 0] and the up weights
    w3 = w13[:, 1]. Other tensors raise ValueError. torch.compile has a graph break at this function."""
    if torch.compiler.is_dynamo_compiling():  # a traced graph does not know of which tensor w1 and w3 are views
        return torch.compiler.disable(_joined)(w1, w3)  # not as a decorator: it imports torch._dynamo, which takes 2 s
    return _joined(w1, w3)


def _joined(w1: Tensor, w3: Tensor) -> Tensor:
    whole = w1._base
    experts, rows, columns = w1.shape
    if (
        whole is None
        or whole is not w3._base
        or not whole.is_contiguous()
        or whole.numel() != 2 * w1.numel()
        or whole[:].view(experts, 2, rows, columns)[:, 0].data_ptr() != w1.data_ptr()
        or whole[:].view(experts, 2, rows, columns)[:, 1].data_ptr() != w3.data_ptr()
        or w1.stride() != w3.stride()
        or w1.stride() != (2 * rows * columns, columns, 1)
    ):
        raise ValueError(
            f"smoe.compat.joined: w1 and w3 of shape {tuple(w1.shape)} are not w13[:, 0] and w13[:, 1] of one contiguous "
            "w13 [E, 2, I, H]; keep them in one parameter"
        )
    return whole.view(experts, 2 * rows, columns)


def grouped_experts(x: Tensor, num_tokens_per_expert: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The forward of torchtitan's and prime-rl's GroupedExperts: rows x (R, H) that a dispatcher sorted by expert,
    num_tokens_per_expert (E), w1 and w3 [E, I, H] views of one parameter (see joined), w2 [E, H, I]. Returns (R, H)."""
    return functional.experts_rows(x, _offsets(num_tokens_per_expert, x), joined(w1, w3), w2)
