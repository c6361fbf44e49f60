#!/usr/bin/env python3
"""Trains an MoE language model on several GPUs with FSDP-2 (fully_shard), the experts by smoe or by a peer.

  torchrun --nproc-per-node 8 examples/train_fsdp2.py --model 7B --precision bf16 --random --steps 50
  torchrun --nproc-per-node 2 examples/train_fsdp2.py --model 1.4B data/*.bin --out run --save-every 500
  torchrun --nproc-per-node 4 examples/train_fsdp2.py --model 1.4B data/*.bin --out run --resume
  torchrun --nproc-per-node 8 examples/train_fsdp2.py --model 30B --ep 8 --precision bf16 --random --steps 20
  torchrun --nproc-per-node 8 examples/train_fsdp2.py --model 7B --precision bf16 --compute f8 --random --steps 50
  python examples/train_fsdp2.py --init run/step-0000000 text.txt --compare run/train.jsonl

Model, data order, optimizer and schedule are those of `smoe train` with validations: from the same weights, files,
seed and batch both print the same losses within rounding. It runs on one process without torchrun, and on the CPU with
gloo. Needs torch 2.6 or later; 2.11 and 2.15 were tried.

Exit status: 0 ok, 1 --compare found a difference, 2 usage, 3 run-time failure. torchrun turns the last three into 1.
docs/python.md, "FSDP-2", has what to know about fully_shard and expert layers.
"""

import json
import math
import os
import sys
import time
import traceback
from dataclasses import replace

# NVLink multicast (NVLS) was off on the machines where this program was measured. NCCL_NVLS_ENABLE=1 in the environment
# turns it on.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from fsdp2 import RunError, UsageError, checkpoints, data, experts, measure, options
from fsdp2 import model as models
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f8": torch.bfloat16}  # of activations
NAN = float("nan")


# ---- processes ----


def start_processes(wanted: str) -> torch.device:
    """Joins torchrun's process group, or makes a group of one process. Returns this process's device."""
    kind = wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    place = int(os.environ.get("LOCAL_RANK", 0))
    if kind == "cuda" and place >= torch.cuda.device_count():
        raise RunError(f"process {place} of this host has no GPU: {torch.cuda.device_count()} are there")
    device = torch.device("cuda", place) if kind == "cuda" else torch.device("cpu")
    extra = {"device_id": device} if kind == "cuda" else {}
    if "WORLD_SIZE" not in os.environ:
        extra.update(store=dist.HashStore(), rank=0, world_size=1)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **extra)
    dist.barrier()  # if a process ended before all are connected, the others would report the lost connection
    return device


# ---- model and optimizer ----


def configure(o, source: models.Checkpoint | None) -> models.Config:
    config = models.CONFIGS[o.model]
    if source:
        config = source.config(config)
    changed = {key: getattr(o, key) for key in ("layers", "context", "vocabulary") if getattr(o, key)}
    return replace(config, **changed)


def expert_mesh(o, device: torch.device):
    """Processes with the same experts are a column, those that exchange tokens a row."""
    shape = (dist.get_world_size() // o.ep, o.ep)
    return init_device_mesh(device.type, shape, mesh_dim_names=("efsdp", "ep"))


def shard(model: models.LanguageModel, o, device: torch.device, spread) -> None:
    """The weights of a block are gathered and freed together. Embedding, head and last norm belong to the root
    module. With expert parallelism (the mesh `spread`) a process gathers its own experts alone."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Without cast_forward_inputs=False the hooks would round RoPE's float32 tables to bf16 on their way into a block.
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[o.compute], reduce_dtype=DTYPES[o.reduce], cast_forward_inputs=False
    )
    if spread:
        from smoe import ep

        ep.fully_shard(model, spread["efsdp"], mp_policy=policy, reshard_after_forward=o.zero == 3)
    last = model.blocks[-1]
    for block in model.blocks:  # the last one keeps its weights, because the backward starts with it
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=o.zero == 3 and block is not last)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # Without prefetching, a block's weights are gathered only when the host reaches the block. This is late if the
    # experts of the block before made the host wait.
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following, following.moe.experts] if spread else [following])


def build(o, config: models.Config, source: models.Checkpoint | None, device: torch.device, tokens: int) -> models.LanguageModel:
    """Builds the model without memory (on the meta device) and shards it. Then each process allocates and fills its own
    shards on its device. `tokens` are those of a process in a step."""
    routing = experts.Routing(config.topk, config.renormalize, o.balance)
    sizes = config.hidden, config.intermediate, config.experts
    spread = expert_mesh(o, device) if o.ep > 1 else None
    if spread:
        layer = experts.make_spread(routing, *sizes, spread["ep"], tokens, DTYPES[o.compute])
    elif o.compute == "f8":
        layer = experts.make_f8(routing, *sizes)
    else:
        run = experts.make_experts(o.experts, routing, device.type, o.compile)
        layer = lambda: experts.MoE(*sizes, run)
    with torch.device("meta"):
        model = models.LanguageModel(config, layer, o.compile, o.checkpoint == "full").to(DTYPES[o.precision])
    if o.compute == "f8":
        from smoe import fsdp

        fsdp.gather_quantized(model)
    if not o.no_shard:
        shard(model, o, device, spread)
    model.to_empty(device=device)
    model.make_tables(device)
    give = source.give if source else models.drawn(config, o.seed, device)
    models.fill(model, give, experts.layout_of(o.experts))
    return model


def make_optimizer(model: torch.nn.Module, o) -> torch.optim.Optimizer:
    """To be called after fully_shard, which replaces the parameters. The norms' weights have no weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=o.weight_decay), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=1e-8, fused=True)


def learning_rate(o, step: int) -> float:
    """Linear warm-up, then a cosine, as in train/run/schedule.h. The first step's rate is above 0, so the step has an
    effect."""
    progress = step / o.steps
    if progress < o.warmup:
        progress = min(progress + 1 / o.steps, o.warmup)
    if progress < o.warmup:
        return o.lr * progress / o.warmup
    turn = math.pi * (progress - o.warmup) / (1 - o.warmup) if o.warmup < 1 else 0.0
    return o.lr * (o.end_lr + (1 - o.end_lr) * 0.5 * (1 + math.cos(turn)))


# ---- output ----


class Report:
    """Lines on stdout and in the JSON file, from process 0."""

    def __init__(self, path: str | None) -> None:
        self.speaks = dist.get_rank() == 0
        try:
            self.file = open(path, "a") if path and self.speaks else None
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}")

    def say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    def fact(self, name: str, text: str) -> None:
        self.say(f"{name:<14} {text}")

    def record(self, kind: str, **fields) -> None:
        if self.file:
            known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
            print(json.dumps({"kind": kind, **known}), file=self.file, flush=True)


# ---- the run ----


def read_log(path: str) -> list[dict]:
    """The lines of another run that have the loss of a step. A loss that is not finite is NaN."""
    found = []
    try:
        with open(path) as file:
            for number, text in enumerate(file, 1):
                line = json.loads(text)
                if line.get("kind", "step") == "step":
                    loss = NAN if line["loss"] is None else float(line["loss"])
                    found.append({**line, "step": int(line["step"]), "loss": loss})
    except OSError as error:
        raise RunError(f"--compare {path}: {error}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"--compare {path}, line {number}: not a line of a run: {type(error).__name__}: {error}")
    return found


class Run:
    def __init__(self, o) -> None:
        self.o = o
        self.compared = read_log(o.compare) if o.compare else []
        self.device = start_processes(o.device)
        self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        options.settle(o, self.device.type, self.processes)
        source = models.Checkpoint(o.init) if o.init else None
        self.config = configure(o, source)
        if self.config.experts % o.ep:
            raise UsageError(f"--ep {o.ep} does not divide the {self.config.experts} experts")
        if o.compute == "f8" and self.config.experts % self.processes:
            raise UsageError(f"--compute f8: {self.processes} processes do not divide the {self.config.experts} experts")
        found = checkpoints.read_note(o.out) if o.resume else {}
        self.batch = o.batch or found.get("batch") or self.config.sequences * self.processes
        if self.batch % self.processes:
            raise UsageError(f"--batch {self.batch} is not a multiple of the {self.processes} processes")
        self.tokens_a_step = self.batch * self.config.context
        self.data = data.open_tokens(o.data, o.random, self.config.vocabulary, self.config.context, o.seed)
        self.step = self.find_start(found)
        self.report = Report(o.json)
        tokens = self.tokens_a_step // self.processes
        self.model = build(o, self.config, None if o.resume else source, self.device, tokens)
        self.optimizer = make_optimizer(self.model, o)
        if o.resume:
            checkpoints.load(o.out, self.model, self.optimizer)
        self.clock = measure.StepClock(self.device)
        self.pending: list = []  # (step, loss, norm) of this process, on the device
        self.losses: dict[int, float] = {}
        self.first, self.line_at, self.line_step = self.step, time.perf_counter(), self.step

    def note(self) -> dict:
        return dict(
            model=models.described(self.config), seed=self.o.seed, batch=self.batch, precision=self.o.precision,
            layout=experts.layout_of(self.o.experts),
        )  # fmt: skip

    def find_start(self, found: dict) -> int:
        """The step of the checkpoint whose note is `found`; 0 if `found` is empty."""
        o = self.o
        if o.out and not o.resume:
            checkpoints.check_new(o.out)
        if not found:
            return 0
        checkpoints.check_same(o.out, found, self.note())
        step = found["step"]
        if step >= o.steps:
            raise UsageError(f"--resume: {o.out} has {step} steps done of --steps {o.steps}")
        if o.profile >= o.steps - step:
            raise UsageError(f"--profile {o.profile} leaves no step of the {o.steps - step} after step {step} to time")
        return step

    def tell_start(self) -> None:
        o, c, fact = self.o, self.config, self.report.fact
        fact("model", f"{o.model if not o.init else o.init}: {c.layers} layers, d {c.hidden}, {c.experts} experts of n "
             f"{c.intermediate}, K {c.topk}, vocabulary {c.vocabulary}, context {c.context}")  # fmt: skip
        fact("weights", f"{c.total_weights() / 1e9:.3f} B, active {c.active_weights() / 1e9:.3f} B")
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        fact("processes", f"{self.processes} on {where}, torch {torch.__version__}")
        sharding = "not sharded" if o.no_shard else f"ZeRO-{o.zero}"
        sharding += f", experts over {o.ep} processes" if o.ep > 1 else ""
        types = f"weights {o.precision}, arithmetic {o.compute}, gradient sum {o.reduce}"
        ways = f"{sharding}, checkpointing {o.checkpoint}, compile {'on' if o.compile else 'off'}"
        fact("step", f"{self.batch} sequences, {self.tokens_a_step} tokens; {types}; {ways}")
        fact("experts", o.experts)
        self.report.record(
            "start", options=vars(o), config=models.described(c), processes=self.processes, sequences=self.batch,
            first_step=self.step,
        )  # fmt: skip
        self.report.say(f"{'step':>8} {'loss':>9} {'norm':>9} {'lr':>9} {'k tokens/s':>11}")

    def take_step(self) -> None:
        o, share = self.o, self.batch // self.processes
        rows = self.data.rows(self.step, self.batch, self.rank * share, share)
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        loss = self.model(rows[:, :-1].flatten(), rows[:, 1:].flatten())
        loss.backward()
        norm = self.clip() if o.clip else None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(o, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.pending.append((self.step, loss.detach(), norm))

    def clip(self) -> torch.Tensor:
        if self.o.ep == 1:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.o.clip)
        from smoe import ep

        return ep.clip_grad_norm_(self.model, self.o.clip)

    def check_peers(self) -> None:
        from smoe import ep

        try:
            ep.check()
        except ep.PeerError as error:  # then the losses are NaN
            raise RunError(f"step {self.step}: {error}")

    def write_line(self) -> None:
        """Records all steps since the last line and prints the last one. Waits for the GPU. A step's loss is the mean
        over the processes, each of which has an equal share of the batch."""
        if not self.pending:
            return
        if self.o.ep > 1:
            self.check_peers()
        sums = torch.stack([loss for _, loss, _ in self.pending]).double()
        dist.all_reduce(sums)
        norms = [NAN if n is None else getattr(n, "full_tensor", lambda n=n: n)().item() for _, _, n in self.pending]
        now, speed = time.perf_counter(), 0.0
        speed = (self.step - self.line_step) * self.tokens_a_step / (now - self.line_at)
        for (step, _, _), loss, norm in zip(self.pending, (sums / self.processes).tolist(), norms, strict=True):
            self.losses[step] = loss
            self.report.record("step", step=step, tokens=step * self.tokens_a_step, loss=loss, grad_norm=norm)
            if not math.isfinite(loss) or (self.o.clip and not math.isfinite(norm)):
                newest = self.o.out and checkpoints.newest(self.o.out)
                kept = f"; the newest checkpoint is {newest}" if newest else ""
                raise RunError(f"step {step}: the loss is {loss:g}, the gradient's norm {norm:g}{kept}")
        rate = learning_rate(self.o, self.step - 1)
        shown = f"{norms[-1]:9.4f}" if self.o.clip else f"{'-':>9}"
        self.report.say(f"{self.step:8d} {loss:9.4f} {shown} {rate:9.2e} {speed / 1e3:11.2f}")
        self.pending.clear()
        self.line_at, self.line_step = time.perf_counter(), self.step

    def save(self) -> None:
        self.write_line()  # a loss that is not finite ends the run before anything is written
        checkpoints.save(self.o.out, self.step, self.model, self.optimizer, self.note(), self.o.keep)
        self.line_at, self.line_step = time.perf_counter(), self.step
        self.clock.mark(False)

    def timed(self) -> bool:
        left = self.o.steps - self.o.profile - self.first
        return self.step > self.first + min(self.o.skip, left // 2)

    def train(self) -> None:
        o, watched = self.o, self.o.steps - self.o.profile
        self.clock.mark(False)
        while self.step < watched:
            self.take_step()
            self.clock.mark(self.timed())
            if self.step % o.log_every == 0:
                self.write_line()
            if o.save_every and self.step % o.save_every == 0 and self.step < o.steps:
                self.save()
        self.write_line()
        self.profile = None
        if o.profile:
            self.profile = measure.Profile(self.device)
            with self.profile.watch():
                while self.step < o.steps:
                    self.take_step()
            self.write_line()
        if o.out:
            self.save()

    def tell_end(self) -> None:
        times, c, fact = self.clock.milliseconds(), self.config, self.report.fact
        step_ms, memory = measure.median(times), measure.peak_memory(self.device)
        speed = self.tokens_a_step / step_ms * 1e3
        each, peak = speed / self.processes, measure.peak_of(self.device)
        tflops = c.flops_per_token() * each / 1e12
        fact("step time", f"{step_ms:.1f} ms, the median of {len(times)} steps")
        fact("tokens/s", f"{speed / 1e3:.2f} k, {each / 1e3:.2f} k a process")
        fact("tokens/day", f"{speed * 86400 / 1e9:.3f} B, {each * 86400 / 1e9:.3f} B a process")
        flops = "6 active weights + 6 layers context d FLOPs a token"
        share = f", MFU {tflops / peak:.1%} of {peak:g} TFLOP/s bf16" if peak else ""
        fact("FLOPs", f"{tflops:.4g} TFLOP/s a process ({flops}){share}")
        fact("peak memory", f"{memory:.2f} GiB a process")
        found = self.tell_profile()
        self.report.record(
            "end",
            step=self.step,
            loss=self.losses[self.step],
            step_ms=step_ms,
            tokens_per_s=speed,
            tokens_per_s_each=each,
            tokens_per_day=speed * 86400,
            tokens_per_day_each=each * 86400,
            tflops_each=tflops,
            mfu=tflops / peak if peak else None,
            memory_gib=memory,
            processes=self.processes,
            experts=self.o.experts,
            **found,
        )

    def tell_profile(self) -> dict:
        if not self.profile:
            return {}
        found = self.profile.summary()
        text = f"{found['communication']:.1%} of the time of process 0's last {self.o.profile} steps"
        if found["exposed"] is not None:
            text += f", {found['exposed']:.1%} with no other kernel running; no kernel at all {found['idle']:.1%}"
        self.report.fact("communication", text)
        for name, milliseconds in self.profile.longest(15):
            self.report.say(f"  {milliseconds / self.o.profile:9.2f} ms a step  {name[:100]}")
        return found

    def paired(self, lines: list[dict]) -> list[tuple[float, float]]:
        """For each line of the other run: (this run's loss, the other run's loss). A line of smoe train has the mean
        loss of the steps since the line before; this run's losses are averaged over the same steps."""
        pairs, before = [], 0
        for line in lines:
            steps = [line["step"]] if "kind" in line else range(before + 1, line["step"] + 1)
            before = line["step"]
            if steps and all(step in self.losses for step in steps):
                pairs.append((sum(self.losses[step] for step in steps) / len(steps), line["loss"]))
        return pairs

    def compare(self) -> bool:
        """Compares all losses that both runs have. Returns whether they differ by at most --tolerance."""
        if not self.o.compare:
            return True
        pairs = self.paired(self.compared)
        if not pairs:
            raise RunError(f"--compare {self.o.compare}: no step of it is in this run")
        apart = [abs(ours - theirs) for ours, theirs in pairs]
        good = all(one <= self.o.tolerance for one in apart)  # false for NaN
        most = NAN if any(math.isnan(one) for one in apart) else max(apart)
        verdict = "within" if good else "NOT within"
        self.report.fact(
            "compared", f"{len(pairs)} losses, largest difference {most:.2e}, {verdict} {self.o.tolerance:g}"
        )
        self.report.record("compare", log=self.o.compare, steps=len(pairs), largest=most, within=good)
        return good


def main(arguments: list[str] | None = None) -> int:
    rank = int(os.environ.get("RANK", 0))
    try:
        run = Run(options.parse(arguments, __doc__))
        run.tell_start()
        run.train()
        run.tell_end()
        good = run.compare()
        dist.barrier()
        dist.destroy_process_group()
        return 0 if good else 1
    except UsageError as error:
        if rank == 0:
            print(f"train_fsdp2.py: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"train_fsdp2.py: process {rank}: {error}", file=sys.stderr)
        return 3
    except OSError as error:  # of a file that is written
        print(f"train_fsdp2.py: process {rank}: {error}", file=sys.stderr)
        return 3
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError):
            traceback.print_exc()
            return 3
        hint = "--checkpoint full, a smaller --batch or --precision bf16 need less"
        print(f"train_fsdp2.py: process {rank}: out of memory ({hint}): {str(error).splitlines()[0]}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's shutdown: model and mesh still hold gloo's process group, whose threads can then end
    # the process by SIGABRT (seen once, on a busy machine; github.com/pytorch/pytorch/issues/190489).
    os._exit(status)
