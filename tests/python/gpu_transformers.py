"""Part of gpu.py: Transformers' models with smoe's experts."""

import torch
from gpu_parts import error, find, part, randn, target


@part()
def hugging_face():
    import test_transformers as cases

    tokens = cases.tokens

    def tiny(name, dtype, **more):
        return cases.tiny(name, dtype, **more).to(target.device)

    def one_step(model, implementation, function=None):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        ids = tokens(8, 64).to(target.device)
        found = (model if function is None else function)(input_ids=ids, labels=ids)
        found.loss.backward()
        return {"logits": found.logits.detach(), "loss": found.loss.detach()} | {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }

    for name in cases.MODELS:
        exact = one_step(tiny(name, torch.float32), "eager")
        model = tiny(name, target.dtype)
        eager_, ours = one_step(model, "eager"), one_step(model, "smoe")
        together = lambda found: torch.cat(
            [found[k].double().flatten() / exact[k].double().norm().clamp(1e-12) for k in exact]
        )
        mine, theirs = (error(together(found), together(exact)) for found in (ours, eager_))
        find(
            f"{name}: error of smoe / of eager bf16",
            mine <= 1.25 * max(theirs, 1e-5),
            f"{mine:.2e}/{theirs:.2e}",
            "1.25",
        )
    for name in ("qwen3_moe", "gpt_oss"):
        model = tiny(name, target.dtype).train()
        plain = one_step(model, "smoe")
        model.gradient_checkpointing_enable()
        again = one_step(model, "smoe")
        find(f"{name}: gradient checkpointing, equal bits", all(torch.equal(plain[k], again[k]) for k in plain))
        model.gradient_checkpointing_disable()
        model.eval()
        with torch.no_grad():
            text = model.generate(tokens(2, 6).to(target.device), max_new_tokens=8, do_sample=False)
        find(f"{name}: generate", text.shape[1] >= 7)
    torch._dynamo.reset()
    import smoe.transformers

    model = smoe.transformers.prepare(tiny("gpt_oss", target.dtype, num_hidden_layers=1))
    with torch.no_grad():  # small weights, biases 0.5 apart: rounding of the logits cannot change a token's experts
        for module in model.modules():
            if type(module).__name__ == "GptOssTopKRouter":
                module.weight.mul_(0.02)
                module.bias.copy_(torch.tensor([5, 2, 7, 0, 3, 6, 1, 4]) * 0.5)
    plain = one_step(model, "smoe")
    again = one_step(model, "smoe", torch.compile(model, fullgraph=True, dynamic=True))
    worst = max((error(again[k], plain[k]), k) for k in plain if plain[k].norm() > 0)
    find(
        "gpt_oss: torch.compile, fullgraph, separated logits",
        worst[0] < 0.05,
        f"{worst[0]:.1e} ({worst[1][-30:]})",
        0.05,
    )
    torch._dynamo.reset()
    experts = model.model.layers[0].mlp.experts
    x, ids = randn(512, 32, seed=1, grad=True), randn(512, 8, seed=2, dtype=torch.float32).topk(2).indices
    weights, dout = randn(512, 2, seed=3, grad=True), randn(512, 32, seed=4)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True)
    leaves = [x, weights, *experts.parameters()]
    found, wanted = (
        [out, *torch.autograd.grad(out, leaves, dout)] for out in (f(x, ids, weights) for f in (compiled, experts))
    )
    worst = max(error(a, b) for a, b in zip(found, wanted, strict=True))
    find("gpt_oss's experts: torch.compile, given routing", worst < 0.01, f"{worst:.1e}", 0.01)


@part()
def lora():
    """LoRA on experts through PEFT: beside PEFT's own way in float32, and the peak of memory beside that of the frozen layer."""
    import peft
    import smoe.peft
    import smoe.transformers
    from peft.tuners.lora.layer import ParamWrapper
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = OlmoeConfig(hidden_size=256, intermediate_size=512, num_experts=64, num_experts_per_tok=8)
            config._experts_implementation = "smoe"
            self.experts = OlmoeExperts(config).to(target.device, target.dtype)
            for parameter in self.experts.parameters():
                torch.nn.init.normal_(parameter.data, std=0.05).requires_grad_(False)

        def forward(self, *given):
            return self.experts(*given)

    tokens, rank = 512, 4
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=rank, target_modules=[], target_parameters=names, init_lora_weights=False)
    frozen = Holder()
    model = peft.get_peft_model(Holder(), config)
    weights, ids = torch.rand(tokens, 64, device=target.device).topk(8, -1)
    given, dout = randn(tokens, 256), randn(tokens, 256)

    def step(module, dtype=target.dtype):
        module.zero_grad()
        x = given.to(dtype, copy=True).requires_grad_()
        out = module(x, ids, weights)
        out.backward(dout.to(dtype))
        return [out.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    def peak(module):
        step(module)
        if target.device == "cpu":
            return 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(module)
        return torch.cuda.max_memory_allocated() - before

    ours, most = step(model), peak(model) - peak(frozen)
    activate = ParamWrapper._activate_lora
    ParamWrapper._activate_lora = smoe.peft._build_weight
    built = step(model)
    model.base_model.model.experts.get_base_layer().config._experts_implementation = "eager"
    exact = step(model.float(), torch.float32)
    ParamWrapper._activate_lora = activate
    mine, theirs = (max(error(a, b) for a, b in zip(found, exact, strict=True)) for found in (ours, built))
    good = mine <= max(1.25 * theirs, 1e-5)
    find("LoRA: error of smoe / of PEFT's own way, from that in f32", good, f"{mine:.2e}/{theirs:.2e}", "1.25")
    factors = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # rows of small rank, P and Q, with their pad rows; factors and gradients in both types
    limit = 4 * (tokens * 8 + 63 * 64) * 8 * 2 + 16 * factors  # ranks are padded to 8
    find("LoRA: memory above the frozen layer's", most <= limit < frozen.experts.gate_up_proj.nbytes, f"{most}", f"{limit}")
