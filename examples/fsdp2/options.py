"""The command line of train_fsdp2.py."""

import argparse
import os
import sys

from . import UsageError
from .experts import MAKERS
from .model import CONFIGS


class Parser(argparse.ArgumentParser):
    """Only process 0 prints what is wrong with the arguments."""

    def error(self, message: str):
        if int(os.environ.get("RANK", 0)) == 0:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def _whole(text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def _count(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def parser(description: str) -> argparse.ArgumentParser:
    p = Parser(prog="train_fsdp2.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = p.add_argument_group("data")
    data.add_argument(
        "data", nargs="*", help="text files, folders of them, or token files (*.bin) as smoe train reads them"
    )
    data.add_argument("--random", action="store_true", help="uniform random tokens instead")
    data.add_argument(
        "--batch", type=_count,
        help="sequences in a step of all processes together (the model's for each process; with --resume the checkpoint's)",
    )  # fmt: skip
    data.add_argument("--seed", type=int, default=1, help="seed of the first weights and of the samples (1)")
    model = p.add_argument_group("model")
    model.add_argument("--model", choices=CONFIGS, default="tiny", help="the paper's 0.5B, 1.4B, 7B, a 30B, or tiny")
    model.add_argument("--layers", type=_count, help="number of layers, if not the model's")
    model.add_argument("--context", type=_count, help="tokens in a sequence, if not the model's")
    model.add_argument("--vocabulary", type=_count, help="size of the vocabulary, if not the model's")
    model.add_argument(
        "--init", metavar="CHECKPOINT", help="first weights and model shape: a checkpoint of smoe train, or any OLMoE"
    )
    model.add_argument("--experts", choices=MAKERS, default="smoe", help="implementation of the experts (smoe)")
    model.add_argument(
        "--balance", type=_not_negative, default=0.0, help="coefficient of each process's own load-balance loss (0)"
    )
    step = p.add_argument_group("step")
    step.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    step.add_argument("--precision", choices=("f32", "bf16"), default="f32", help="type of weights and AdamW (f32)")
    step.add_argument(
        "--compute", choices=("f32", "bf16", "f8"),
        help="type of the arithmetic (bf16 on CUDA, on the CPU --precision's); f8: bf16, smoe's experts e4m3 with gathers in 8 bits",
    )  # fmt: skip
    step.add_argument("--reduce", choices=("f32", "bf16"), help="type in which gradients are summed (--precision's)")
    step.add_argument(
        "--checkpoint", choices=("none", "full"), default="none", help="full: the backward computes layers again"
    )
    step.add_argument(
        "--zero", type=int, choices=(2, 3), default=3, help="3: weights are freed after a layer's forward; 2: not (3)"
    )
    step.add_argument(
        "--no-shard", action="store_true", help="no fully_shard; needs one process and --compute equal to --precision"
    )
    step.add_argument(
        "--ep", type=_count, default=1, metavar="W", help="spread the experts of a layer over W processes of one host (1)"
    )
    step.add_argument("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (on CUDA)")
    optimizer = p.add_argument_group("optimizer, AdamW with warm-up and cosine")
    optimizer.add_argument(
        "--steps", type=_count, default=100, help="length of the run, steps before a --resume included (100)"
    )
    optimizer.add_argument("--lr", type=_not_negative, default=4e-4, help="peak learning rate (4e-4)")
    optimizer.add_argument("--end-lr", type=_not_negative, default=0.1, help="last rate as a fraction of --lr (0.1)")
    optimizer.add_argument("--warmup", type=_not_negative, default=0.05, help="length, as a fraction of the run (0.05)")
    optimizer.add_argument("--beta1", type=_not_negative, default=0.9, help="AdamW's decay of the first moment (0.9)")
    optimizer.add_argument("--beta2", type=_not_negative, default=0.95, help="AdamW's decay of the second moment (0.95)")
    optimizer.add_argument("--weight-decay", type=_not_negative, default=0.1, help="for the matrices (0.1)")
    optimizer.add_argument("--clip", type=_not_negative, default=1.0, help="largest norm of the gradient, 0: any (1)")
    out = p.add_argument_group("output")
    out.add_argument("--out", help="folder of the checkpoints; none without it")
    out.add_argument("--resume", action="store_true", help="go on from OUT/latest, on any number of processes")
    out.add_argument("--save-every", type=_count, help="steps between checkpoints; the last step has one too")
    out.add_argument("--keep", type=_count, default=2, help="number of checkpoints that are kept (2)")
    out.add_argument("--log-every", type=_count, default=10, help="steps between printed lines (10)")
    out.add_argument("--json", metavar="FILE", help="appends a JSON object for the start, every step and the end")
    out.add_argument("--skip", type=_whole, default=5, help="first steps that the median step time leaves out (5)")
    out.add_argument("--profile", type=_count, nargs="?", const=3, default=0, metavar="STEPS",
                     help="profiles the last STEPS (3) steps: share of communication, longest kernels. "
                          "Without STEPS it must not stand before a file")  # fmt: skip
    out.add_argument(
        "--compare", metavar="LOG", help="JSON lines of another run (train.jsonl of smoe train, or --json's)"
    )
    out.add_argument(
        "--tolerance", type=_not_negative, default=0.02, help="largest difference of a loss from LOG's, nats (0.02)"
    )
    return p


def parse(arguments: list[str] | None, description: str) -> argparse.Namespace:
    options = parser(description).parse_args(arguments)
    if options.random == bool(options.data):
        raise UsageError("name text files, folders or token files, or give --random, not both")
    if options.resume and not options.out:
        raise UsageError("--resume needs --out")
    if options.save_every and not options.out:
        raise UsageError("--save-every needs --out")
    if options.init and (options.layers or options.vocabulary):
        raise UsageError("--init brings the model's shape: no --layers and no --vocabulary beside it")
    if options.profile and options.profile >= options.steps:
        raise UsageError(f"--profile {options.profile} leaves no step of --steps {options.steps} to time")
    return options


def settle(options: argparse.Namespace, device: str, processes: int) -> None:
    """Sets the defaults that depend on the device, and checks that the options fit together."""
    options.device = device
    if options.compute is None:
        options.compute = "bf16" if device == "cuda" else options.precision
    if options.reduce is None:
        options.reduce = options.precision
    if options.compile is None:
        options.compile = device == "cuda"
    if options.precision == "bf16" and options.compute == "f32":
        raise UsageError("--compute f32 with --precision bf16: the arithmetic is at most as wide as the weights")
    if device == "cuda" and options.compute == "f32" and options.experts != "eager":
        raise UsageError(f"--compute f32: {options.experts} has bf16 alone on CUDA")
    if options.ep > 1 and (options.experts != "smoe" or options.no_shard):
        raise UsageError(f"--ep {options.ep}: it needs --experts smoe and no --no-shard")
    if options.compute == "f8" and (options.experts != "smoe" or options.ep > 1):
        raise UsageError("--compute f8: it needs --experts smoe and no --ep")
    if processes % options.ep:
        raise UsageError(f"--ep {options.ep} does not divide the {processes} processes")
    if options.no_shard and (processes > 1 or options.compute != options.precision):
        have = f"{processes} processes, --compute {options.compute}, --precision {options.precision}"
        raise UsageError(f"--no-shard with {have}: it is for one process whose weights have the arithmetic's type")
