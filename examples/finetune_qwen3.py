#!/usr/bin/env python3
"""Fine-tunes Qwen3-30B-A3B, every weight, with Transformers' Trainer and FSDP-2 on N GPUs. Times implementations of the experts.

  torchrun --nproc-per-node 8 examples/finetune_qwen3.py --experts smoe,grouped_mm --profile
  torchrun --nproc-per-node 2 examples/finetune_qwen3.py --layers 12
  python examples/finetune_qwen3.py --tiny        on the CPU, in seconds; with torchrun on several processes

The sizes are the published ones, weights and tokens are random. Weights, gradients and AdamW states are bf16: 31 GB a GPU on
eight, 61 on four. The implementations take turns of --steps steps within one training. With --profile the last step of each one's first
turn is profiled; the time of the experts in it gives the bound: how much faster the step can get if only the experts change.
Needs accelerate and Transformers 5.17 or later. Exit status: 0 ok, 2 usage, 3 failure; torchrun turns both into 1.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp2_prepare_model
from fsdp2 import UsageError, measure
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils import logging

import smoe.transformers  # noqa: F401, registers "smoe"

SIZES = dict(
    hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936, norm_topk_prob=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=40960, use_cache=False,
)  # fmt: skip
TINY = dict(hidden_size=64, moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
TINY |= dict(num_experts=8, num_experts_per_tok=2, vocab_size=512)
PIECE = 2048  # tokens of the loss at a time: 1.2 GB of float32 logits


def parse(arguments: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--experts", default="smoe", help="implementations, separated by commas; the first is the base (smoe)")
    p.add_argument("--layers", type=int, help="layers of the model (48; with --tiny 2)")
    p.add_argument("--sequence", type=int, help="tokens of a sequence (4096; with --tiny 32)")
    p.add_argument("--batch", type=int, default=4, help="sequences of a GPU in a step (4)")
    p.add_argument("--steps", type=int, default=10, help="steps of a turn; the first three are not timed (10)")
    p.add_argument("--turns", type=int, default=2, help="turns of each implementation (2)")
    p.add_argument("--attention", default="sdpa", help="Transformers' attn_implementation (sdpa)")
    p.add_argument("--keep-activations", action="store_true", help="do not compute layers again in the backward")
    p.add_argument("--profile", action="store_true", help="profile a step of each implementation")
    p.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    p.add_argument("--json", metavar="FILE", help="appends a JSON object for every turn")
    o = p.parse_args(arguments)
    o.layers, o.sequence = o.layers or (2 if o.tiny else 48), o.sequence or (32 if o.tiny else 4096)
    o.experts, o.sharded = o.experts.split(","), "WORLD_SIZE" in os.environ
    known = ("eager", *ALL_EXPERTS_FUNCTIONS.valid_keys())
    for name in o.experts:
        if name not in known:
            raise UsageError(f"--experts {name}: expected {', '.join(known)}")
    for name, least in dict(layers=1, sequence=2, batch=1, steps=5, turns=1).items():
        if getattr(o, name) < least:
            raise UsageError(f"--{name} {getattr(o, name)} is less than {least}")
    if not o.tiny and not (o.sharded and torch.cuda.is_available()):
        raise UsageError("needs GPUs and torchrun, or --tiny")
    return o


class RandomTokens(Dataset):
    def __init__(self, o: argparse.Namespace, vocabulary: int) -> None:
        self.o, self.vocabulary = o, vocabulary

    def __len__(self) -> int:
        o = self.o
        return o.batch * o.steps * o.turns * len(o.experts) * int(os.environ.get("WORLD_SIZE", 1))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(self.vocabulary, (self.o.sequence,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def loss_in_pieces(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | None = None, **_) -> Tensor:
    """Transformers' ForCausalLMLoss with float32 logits of PIECE tokens at a time. For 16,384 tokens and this vocabulary, all
    float32 logits with their softmax and gradient would be 30 GB."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    piece = lambda rows, target: F.cross_entropy(rows.float(), target, reduction="sum")
    pairs = zip(logits.flatten(0, -2).split(PIECE), targets.split(PIECE), strict=True)
    total = sum(checkpoint(piece, rows, target, use_reentrant=False) for rows, target in pairs)
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class MetaTrainer(Trainer):
    """Trains a model that was made on the meta device."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.args.use_cpu:  # accelerate itself shards on GPUs only
            plugin, state = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args), self.accelerator.state
            state.distributed_type, state.fsdp_plugin, self.is_fsdp_enabled = DistributedType.FSDP, plugin, True

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Shards and fills the model first. Trainer creates the optimizer before accelerate shards, and accelerate then
        finds the optimizer's parameters by their addresses, which are all 0 on the meta device."""
        if self.is_fsdp_enabled:
            fsdp2_prepare_model(self.accelerator, self.model)
        self.model.to_empty(device=self.args.device)
        self.model.apply(self.model._init_weights)
        return super().create_optimizer()


class _Mark(torch.autograd.Function):
    """The identity, which calls `mark` in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x, mark):
        ctx.mark = mark
        ctx.save_for_backward(x)
        mark()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        _ = ctx.saved_tensors  # so that a layer that is computed again is so before the mark
        ctx.mark()
        return dx, None


class ExpertsClock:
    """Time of all experts modules in a step: forward, forward again and backward. Each mark is the begin or the end of one."""

    def __init__(self, model: torch.nn.Module, cuda: bool) -> None:
        self.cuda, self.marks, self.hooks = cuda, [], []
        for module in model.modules():
            if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
                before = lambda _, arguments: (_Mark.apply(arguments[0], self.mark), *arguments[1:])
                self.hooks.append(module.register_forward_pre_hook(before))
                self.hooks.append(module.register_forward_hook(lambda _, __, out: _Mark.apply(out, self.mark)))

    def mark(self) -> None:
        self.marks.append(torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter())
        if self.cuda:
            self.marks[-1].record()

    def milliseconds(self) -> float:
        """To be called once, after the step."""
        for hook in self.hooks:
            hook.remove()
        if self.cuda:
            torch.cuda.synchronize()
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        return sum(a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs)


class Turns(TrainerCallback):
    """Changes the implementation of the experts from turn to turn, and measures."""

    def __init__(self, o: argparse.Namespace, device: torch.device) -> None:
        self.o, self.device, self.found = o, device, []
        self.order = o.experts * o.turns

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        turn, step = divmod(state.global_step, self.o.steps)
        if step == 0:
            # model.set_experts_implementation has no effect after fully_shard
            model.config._experts_implementation = self.order[turn]
            self.clock = measure.StepClock(self.device)
            self.clock.mark(False)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        self.profiled = self.o.profile and turn < len(self.o.experts) and step == self.o.steps - 1
        if self.profiled:
            self.experts, self.stack = ExpertsClock(model, self.device.type == "cuda"), contextlib.ExitStack()
            self.profile = measure.Profile(self.device)
            if state.is_world_process_zero:
                self.stack.enter_context(self.profile.watch())

    def on_step_end(self, args, state, control, **kwargs):
        turn, step = divmod(state.global_step - 1, self.o.steps)
        self.clock.mark(step >= 3 and not self.profiled)
        if self.profiled:
            self.stack.close()
        if step == self.o.steps - 1:
            self.found.append(self.measured(turn, state.is_world_process_zero))

    def measured(self, turn: int, first: bool) -> dict:
        """What was measured in a turn; the losses are added at the end."""
        step_ms = measure.median(self.clock.milliseconds())
        peak = measure.peak_memory(self.device) if dist.is_initialized() else math.nan
        found = dict(experts=self.order[turn], step_ms=step_ms, peak_gib=peak)
        found["tokens_per_s"] = self.o.batch * self.o.sequence / step_ms * 1e3
        if self.profiled:
            found["experts_ms"] = self.experts.milliseconds()
            if first:
                found |= dict(shares=self.profile.summary(), kernels=self.profile.longest(12))
        return found


def train(o: argparse.Namespace) -> tuple[list[dict], dict]:
    """Returns what each turn measured, and facts about the run."""
    with tempfile.TemporaryDirectory() as folder:
        # FSDP's own activation_checkpointing looks for the layers by their class's name, which sharding changes
        more = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False))
        more = ({} if o.keep_activations else more) | (dict(fsdp=True, fsdp_config=dict(version=2)) if o.sharded else {})
        args = TrainingArguments(
            folder, max_steps=o.steps * o.turns * len(o.experts), per_device_train_batch_size=o.batch, learning_rate=1e-5,
            lr_scheduler_type="constant", optim="adamw_torch_fused", bf16=False, logging_steps=o.steps,
            logging_nan_inf_filter=False, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=o.tiny, **more,
        )  # fmt: skip
        config = Qwen3MoeConfig(**(SIZES | (TINY if o.tiny else {})), num_hidden_layers=o.layers)
        with torch.device("meta" if o.sharded else args.device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=o.attention, experts_implementation=o.experts[0]
            )
        model.loss_function = loss_in_pieces
        weights, turns = sum(p.numel() for p in model.parameters()), Turns(o, args.device)
        trainer = MetaTrainer(model, args, train_dataset=RandomTokens(o, config.vocab_size), callbacks=[turns])
        with contextlib.redirect_stdout(sys.stderr):  # Trainer prints its logs
            trainer.train()
    for found, loss in zip(turns.found, [e["loss"] for e in trainer.state.log_history if "loss" in e], strict=True):
        found["loss"] = float(loss)
    states: dict[str, int] = {}  # bytes of this process by dtype
    for state in (v for of in trainer.optimizer.state.values() for v in of.values() if v.dim()):
        local = state.to_local() if hasattr(state, "to_local") else state
        states[str(state.dtype)] = states.get(str(state.dtype), 0) + local.nbytes
    facts = dict(weights=weights, processes=args.world_size, dtype=str(model.dtype), states=states)
    return turns.found, facts


def tell(o: argparse.Namespace, found: list[dict], facts: dict) -> None:
    where = torch.cuda.get_device_name() if not o.tiny else "CPU"
    again = "kept" if o.keep_activations else "computed again for each layer"
    states = ", ".join(f"{dtype} ({size / 1e9:.1f} GB a GPU)" for dtype, size in facts["states"].items())
    print(f"Qwen3-MoE, {o.layers} layers, {facts['weights'] / 1e9:.2f} B weights, on {facts['processes']} x {where}, torch "
          f"{torch.__version__}\nweights {facts['dtype']}, states {states}; {o.batch} x {o.sequence} "
          f"tokens a GPU a step; activations {again}; attention {o.attention}")  # fmt: skip
    print(f"{'experts':<12} {'ms a step':>10} {'tokens/s a GPU':>15} {'peak GiB':>9} {'loss':>8}")
    for f in found:
        print(f"{f['experts']:<12} {f['step_ms']:10.1f} {f['tokens_per_s']:15.0f} {f['peak_gib']:9.2f} {f['loss']:8.4f}")
    profiled = {f["experts"]: f for f in found if "experts_ms" in f}
    middle = {name: measure.median([f["step_ms"] for f in found if f["experts"] == name]) for name in o.experts}
    for name, f in profiled.items():
        shares = ", ".join(f"{key} {100 * share:.1f} %" for key, share in f["shares"].items() if share is not None)
        print(f"{name}: experts {f['experts_ms']:.1f} ms, {100 * f['experts_ms'] / middle[name]:.1f} % of a step; {shares}")
        for kernel, ms in f["kernels"]:
            print(f"  {ms:9.1f} ms {kernel[:100]}")
    base = o.experts[0]
    for name in o.experts[1:] if profiled else ():
        # the step of `name` with the experts' time of the base, the rest as it is
        bound = middle[name] / (middle[name] - profiled[name]["experts_ms"] + profiled[base]["experts_ms"])
        ratio = middle[name] / middle[base]
        print(f"{base} against {name}: {ratio:.3f} times the tokens/s, {ratio / bound:.3f} of the bound {bound:.3f}")


def main(arguments: list[str] | None = None) -> int:
    logging.set_verbosity_error()
    first = os.environ.get("RANK", "0") == "0"
    try:
        o = parse(arguments)
        found, facts = train(o)
        if first:
            tell(o, found, facts)
        if first and o.json:
            with open(o.json, "a") as file:
                for one in found:
                    print(json.dumps({**facts, **vars(o), **one}), file=file)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0 if all(math.isfinite(one["loss"]) for one in found) else 3
    except UsageError as error:
        if first:
            print(f"finetune_qwen3.py: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return 3


if __name__ == "__main__":
    sys.exit(main())
