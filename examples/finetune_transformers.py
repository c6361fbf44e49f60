#!/usr/bin/env python3
"""Fine-tunes an OLMoE-shaped model with Transformers' Trainer, the experts by smoe and by grouped_mm in one run.

  python examples/finetune_transformers.py --steps 30             random weights in OLMoE-1B-7B's shape, random tokens
  python examples/finetune_transformers.py --model PATH text.txt  a checkpoint and its tokenizer
  python examples/finetune_transformers.py --tiny README.md       on the CPU, in seconds

There are two modes. `full` trains every weight. `lora` (needs peft) trains low-rank updates of the attention and
freezes all other weights; smoe then computes no gradient of the experts' weights. Each pair of mode and implementation
is one run. All runs of a mode start from the same weights and see the same batches. With --rounds N every run is
repeated N times; every other round takes the implementations in reverse order, and the table has the medians.
Needs torch 2.6 and Transformers 5.17 or later.

Exit status: 0 ok, 1 the implementations' losses differ by more than --tolerance, 2 usage, 3 run-time failure.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable

if "WORLD_SIZE" not in os.environ:  # with several GPUs Trainer would spread the batch over them with DataParallel
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    OlmoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils import logging

import smoe.transformers  # noqa: F401, registers "smoe"

TINY = dict(
    layers=2, hidden=32, intermediate=16, experts=8, topk=2, heads=4, vocabulary=256, context=32, batch=4, steps=8
)
BYTES = 256  # number of values of a byte
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class UsageError(Exception):
    pass


def parse(arguments: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("text", nargs="*", help="text files to train on; without them random tokens")
    p.add_argument(
        "--model", help="a checkpoint for AutoModelForCausalLM; without it random weights of the sizes below"
    )
    p.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    for name, value in dict(
        layers=16, hidden=2048, intermediate=1024, experts=64, topk=8, heads=16, vocabulary=50304
    ).items():
        p.add_argument(f"--{name}", type=int, help=f"value for the model with random weights ({value})", default=None)
        p.set_defaults(**{f"default_{name}": value})
    p.add_argument("--context", type=int, help="tokens of a sequence (4096)")
    p.add_argument("--batch", type=int, help="sequences of a step (2)")
    p.add_argument("--steps", type=int, help="steps of each run (20)")
    p.set_defaults(default_context=4096, default_batch=2, default_steps=20)
    p.add_argument("--lr", type=float, default=1e-4, help="peak learning rate (1e-4)")
    p.add_argument("--rank", type=int, default=16, help="rank of the low-rank updates (16)")
    p.add_argument("--modes", default="full,lora", help="full, lora or both (full,lora)")
    p.add_argument(
        "--implementations", default="smoe,grouped_mm", help="values of experts_implementation (smoe,grouped_mm)"
    )
    p.add_argument("--rounds", type=int, default=1, help="number of runs of each mode and implementation (1)")
    p.add_argument("--seed", type=int, default=1, help="seed of the weights and the data (1)")
    p.add_argument(
        "--tolerance", type=float, default=0.05, help="largest difference of two runs' losses at a step, nats (0.05)"
    )
    p.add_argument("--json", metavar="FILE", help="appends a JSON object for every run")
    o = p.parse_args(arguments)
    for name in (*TINY,):
        value = getattr(o, name)
        if value is None:
            setattr(o, name, TINY[name] if o.tiny else getattr(o, f"default_{name}"))
        elif value < 1:
            raise UsageError(f"--{name} {value} is less than 1")
    o.modes, o.implementations = o.modes.split(","), o.implementations.split(",")
    known = ("eager", *ALL_EXPERTS_FUNCTIONS.valid_keys())
    strange = [name for name in o.implementations if name not in known]
    if strange:
        raise UsageError(f"--implementations {strange[0]}: expected {', '.join(known)}")
    if o.json:
        try:
            open(o.json, "a").close()
        except OSError as error:
            raise UsageError(f"--json {o.json}: {error.strerror}")
    unknown = [mode for mode in o.modes if mode not in ("full", "lora")]
    if unknown or o.rounds < 1:
        raise UsageError(
            f"--modes {unknown[0]}: expected full or lora" if unknown else f"--rounds {o.rounds} is less than 1"
        )
    if o.tiny and o.model:
        raise UsageError("--tiny and --model: a checkpoint has its own sizes")
    o.device = "cuda" if torch.cuda.is_available() and not o.tiny else "cpu"
    return o


# ---- data ----


class Windows(Dataset):
    """Sample i is a window of `context` tokens at a random place, drawn from the seed and i."""

    def __init__(self, o: argparse.Namespace) -> None:
        self.o, self.vocabulary = o, o.vocabulary
        self.tokens = read_text(o) if o.text else None
        if self.tokens is not None and len(self.tokens) < o.context:
            raise UsageError(f"{', '.join(o.text)}: {len(self.tokens)} tokens, a sequence has {o.context}")

    def __len__(self) -> int:
        return self.o.batch * self.o.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.o.seed * 1_000_003 + index)
        if self.tokens is None:
            ids = torch.randint(0, self.vocabulary, (self.o.context,), generator=generator)
        else:
            start = int(torch.randint(0, len(self.tokens) - self.o.context + 1, (1,), generator=generator))
            ids = self.tokens[start : start + self.o.context]
        return {"input_ids": ids, "labels": ids}


def read_text(o: argparse.Namespace) -> torch.Tensor:
    """The tokens of the files: with --model those of the checkpoint's tokenizer, else the bytes. If the checkpoint's
    vocabulary is 256, the tokens are also the bytes, because `smoe train` without --tokenizer makes such checkpoints, and
    its earlier versions saved no tokenizer with them."""
    try:
        text = b"".join(open(path, "rb").read() for path in o.text)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}")
    if o.model and o.vocabulary != BYTES:
        return torch.tensor(AutoTokenizer.from_pretrained(o.model)(text.decode(errors="replace"))["input_ids"])
    if o.vocabulary < BYTES:
        raise UsageError(f"--vocabulary {o.vocabulary}: text needs {BYTES}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


# ---- one run ----


def build(o: argparse.Namespace, implementation: str) -> torch.nn.Module:
    """The model, with the same weights for every implementation."""
    dtype = torch.bfloat16 if o.device == "cuda" else torch.float32
    if o.model:
        model = AutoModelForCausalLM.from_pretrained(o.model, dtype=dtype, experts_implementation=implementation)
        return model.to(o.device)
    config = OlmoeConfig(
        vocab_size=o.vocabulary, hidden_size=o.hidden, intermediate_size=o.intermediate, num_hidden_layers=o.layers,
        num_attention_heads=o.heads, num_key_value_heads=o.heads, num_experts=o.experts, num_experts_per_tok=o.topk,
        max_position_embeddings=o.context, use_cache=False, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    set_seed(o.seed)
    with torch.device(o.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=implementation)


def with_lora(model: torch.nn.Module, o: argparse.Namespace) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    set_seed(o.seed)
    return get_peft_model(
        model, LoraConfig(r=o.rank, lora_alpha=2 * o.rank, target_modules=ATTENTION, task_type="CAUSAL_LM")
    )


class Watch(TrainerCallback):
    """Records the end and the loss of each step. Recording an end does not make the host wait for the GPU."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.marks, self.losses = cuda, [], []

    def on_step_end(self, args, state, control, **kwargs):
        mark = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            mark.record()
        self.marks.append(mark)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def milliseconds(self) -> float:
        """The median time of a step. The first third of the steps is left out."""
        if self.cuda:
            torch.cuda.synchronize()
        pairs = list(zip(self.marks, self.marks[1:], strict=False))[len(self.marks) // 3 :]
        times = [a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs]
        return statistics.median(times) if times else float("nan")


def train(o: argparse.Namespace, data: Windows, mode: str, implementation: str) -> dict:
    model = build(o, implementation)
    if mode == "lora":
        model = with_lora(model, o)
    watch = Watch(o.device == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=o.steps, per_device_train_batch_size=o.batch, learning_rate=o.lr, seed=o.seed,
            data_seed=o.seed, optim="adamw_torch_fused", bf16=False, logging_steps=1, logging_nan_inf_filter=False,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=o.device == "cpu", dataloader_num_workers=0,
        )  # fmt: skip
        if o.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[watch])
        with contextlib.redirect_stdout(sys.stderr):  # Trainer prints its logs
            trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if o.device == "cuda" else None
    found = dict(
        mode=mode, implementation=implementation, step_ms=watch.milliseconds(), memory_gib=peak, losses=watch.losses
    )
    found["tokens_per_s"] = o.batch * o.context / found["step_ms"] * 1e3
    found["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    del trainer, model
    gc.collect()
    if o.device == "cuda":
        torch.cuda.empty_cache()
    return found


# ---- all runs ----


def choose_modes(o: argparse.Namespace) -> list[str]:
    if "lora" not in o.modes or importlib.util.find_spec("peft"):
        return o.modes
    if o.modes == ["lora"]:
        raise UsageError("--modes lora needs peft: pip install peft")
    print("lora is left out: peft is not installed (pip install peft)", flush=True)
    return [mode for mode in o.modes if mode != "lora"]


def run_all(o: argparse.Namespace) -> list[dict]:
    if o.model:
        o.vocabulary = AutoConfig.from_pretrained(o.model).vocab_size
    data, runs, modes = Windows(o), [], choose_modes(o)
    for turn in range(o.rounds):
        for mode in modes:
            for implementation in o.implementations[:: 1 if turn % 2 == 0 else -1]:
                runs.append(train(o, data, mode, implementation))
                if o.json:
                    with open(o.json, "a") as file:
                        print(json.dumps({"round": turn, **runs[-1]}), file=file)
    return runs


COLUMNS = (("mode", -6), ("experts", -12), ("trained", 14), ("ms a step", 10), ("tokens/s", 10), ("peak GiB", 9))
COLUMNS += (("first loss", 11), ("last loss", 10))


def line(cells: Iterable[str]) -> str:
    return " ".join(f"{cell:{'<' if w < 0 else '>'}{abs(w)}}" for cell, (_, w) in zip(cells, COLUMNS, strict=True))


def table(o: argparse.Namespace, runs: list[dict]) -> None:
    """Prints a line for each mode and implementation: medians over the rounds, and the losses of the first round."""
    print(line(name for name, _ in COLUMNS))
    for mode in dict.fromkeys(run["mode"] for run in runs):
        for kind in o.implementations:
            same = [run for run in runs if (run["mode"], run["implementation"]) == (mode, kind)]
            middle = lambda key: statistics.median(run[key] for run in same)
            memory = "-" if same[0]["memory_gib"] is None else f"{middle('memory_gib'):.2f}"
            speed, losses = (f"{middle('step_ms'):.1f}", f"{middle('tokens_per_s'):.0f}"), same[0]["losses"]
            print(line((mode, kind, str(same[0]["trained"]), *speed, memory, f"{losses[0]:.4f}", f"{losses[-1]:.4f}")))


def agree(o: argparse.Namespace, runs: list[dict]) -> bool:
    """Compares the losses of every run, step by step, with those of the first run of the same mode."""
    good = True
    for mode in dict.fromkeys(run["mode"] for run in runs):
        first, *others = [run["losses"] for run in runs if run["mode"] == mode]
        for other in others:
            apart = [abs(a - b) for a, b in zip(first, other, strict=True)]
            wrong = [one for one in apart if not one <= o.tolerance]  # NaN, too
            if wrong:
                print(f"{mode}: losses differ by {wrong[0]:.4f}, more than --tolerance {o.tolerance:g}", file=sys.stderr)
                good = False
    return good


def main(arguments: list[str] | None = None) -> int:
    logging.set_verbosity_error()
    try:
        o = parse(arguments)
        runs = run_all(o)
        table(o, runs)
        return 0 if agree(o, runs) else 1
    except UsageError as error:
        print(f"finetune_transformers.py: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return 3


if __name__ == "__main__":
    sys.exit(main())
