"""Tiny models of Transformers with random weights, and a training step with one of the implementations of the experts."""

import torch

import smoe.transformers  # noqa: F401  registers the model type smoe
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(max_position_embeddings=128, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2)
MODELS = {
    "olmoe": dict(intermediate_size=24, **EXPERTS),
    "qwen3_moe": dict(intermediate_size=32, moe_intermediate_size=24, norm_topk_prob=True, head_dim=8, **EXPERTS),
    "mixtral": dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v3": dict(
        intermediate_size=32, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        num_key_value_heads=4,
    ),
    "gpt_oss": dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, head_dim=8, sliding_window=16),
    "smoe": dict(intermediate_size=24, shared_expert_intermediate_size=16, first_k_dense_replace=1,
                 dense_intermediate_size=40, num_key_value_heads=4, **EXPERTS),
}  # fmt: skip


def tiny(name, dtype=torch.float32, seed=0, **more):
    torch.manual_seed(seed)
    if name == "gpt_oss" and "num_hidden_layers" in more:
        more = more | dict(layer_types=["sliding_attention"] * more["num_hidden_layers"])
    config = AutoConfig.for_model(name, **(SMALL | MODELS[name] | more))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model.to(dtype)


def tokens(rows=3, length=20, seed=1):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed), device="cpu")


def step(model, implementation, compiled=None):
    model.set_experts_implementation(implementation)
    model.zero_grad()
    ids = tokens()
    found = (model if compiled is None else compiled)(input_ids=ids, labels=ids)
    found.loss.backward()
    return {"logits": found.logits.detach(), "loss": found.loss.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def error(found, exact):
    return (found.double() - exact.double()).norm() / (exact.double().norm() + 1e-30)
