"""python -m smoe.check MODEL: does this model compute with smoe what it computes with Transformers' own code?

MODEL is a folder, a config.json, or a name that Transformers has locally. With experts_implementation="smoe" the output of each
layer's experts for the same input, the logits, the loss, every gradient and the greedy tokens are compared with eager in a
wider type: float32, or float64 for a check in float32. An error may be at most twice the error of eager in the checked type. A model without weights gets random ones.

Exit status: 0 the check passed, 1 it failed or smoe ran in no layer, 2 wrong usage, 3 the model cannot be loaded or run.
"""

import argparse
import contextlib
import copy
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import torch
    from torch import Tensor, nn
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f"smoe.check: {error}; it needs PyTorch and Transformers", file=sys.stderr)
    sys.exit(3)

from . import transformers as ours

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
_FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}  # errors below are rounding of any order of sums
_LARGE = 2_000_000_000  # parameters; a larger model is checked with two layers


# ---- loading ----


def _config(path: str, layers: int | None):
    """The model's config, cut to `layers` layers; without that, a large model is cut to two."""
    config = AutoConfig.from_pretrained(path)
    if layers is None:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        count = sum(parameter.numel() for parameter in whole.parameters())
        if count <= _LARGE:
            return config
        layers = 2
        print(f"{count / 1e9:.1f}e9 parameters: the first two layers are checked (--layers N: more)")
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def load(path: str, dtype: torch.dtype, layers: int | None) -> nn.Module:
    config, folder = _config(path, layers), Path(path)
    if folder.is_file() or (folder.is_dir() and not any((*folder.glob("*.safetensors*"), *folder.glob("*.bin*")))):
        print("no weights: random ones are used")
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, experts_implementation="eager")


# ---- what ran ----


def _experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with Transformers' interface of experts, and others that are called experts."""
    named = {name: module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "experts"}
    return named | {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}


@contextlib.contextmanager
def _recorded(reached: set[int], reasons: dict[int, str]) -> Iterator[None]:
    """Meanwhile the experts that smoe is called for are added to `reached`, with the reason if they run as eager."""
    forward, eager = ours.ALL_EXPERTS_FUNCTIONS["smoe"], ours._eager

    def record(experts, *given):
        reached.add(id(experts))
        return forward(experts, *given)

    def record_eager(experts, reason, *given):
        reached.add(id(experts))
        reasons[id(experts)] = reason
        return eager(experts, reason, *given)

    ours.ALL_EXPERTS_FUNCTIONS["smoe"], ours._eager = record, record_eager
    try:
        yield
    finally:
        ours.ALL_EXPERTS_FUNCTIONS["smoe"], ours._eager = forward, eager


def _wrapper(model: nn.Module, name: str) -> str:
    """What is wrapped around the module, as text."""
    module, (parent, _, last) = model.get_submodule(name), name.rpartition(".")
    if last == "base_layer":  # PEFT's name
        return f", wrapped by {type(model.get_submodule(parent)).__name__}"
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return ", wrapped by hooks"
    return ""


def report_layers(model: nn.Module, ids: Tensor) -> list[str]:
    """Prints for each layer's experts whether smoe computes them, and why not. Returns the names of those it computes."""
    reached, reasons, computed = set(), {}, []
    model.set_experts_implementation("smoe")
    with _recorded(reached, reasons), torch.no_grad():
        model(input_ids=ids)
    for name, module in _experts_of(model).items():
        kind = f"{name} ({type(module).__name__}{_wrapper(model, name)})"
        if id(module) in reasons:
            print(f"{kind}: eager, {reasons[id(module)]}")
        elif id(module) in reached:
            print(f"{kind}: smoe")
            computed.append(name)
        elif not any(id(inner) in reached for inner in module.modules()):
            print(f"{kind}: not through Transformers' interface of experts")
    return computed


# ---- comparing ----


def _results(model: nn.Module, implementation: str, ids: Tensor) -> dict[str, Tensor]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    results = {"loss": found.loss, "logits": found.logits, **gradients}
    return {name: value.detach().to("cpu", torch.float64) for name, value in results.items()}


def _layer_results(model: nn.Module, names: list[str], ids: Tensor) -> Iterator[tuple[str, dict, dict, dict]]:
    """For each named experts module, with the inputs that it gets from eager: its name, and the output and the gradient of
    its input of eager in the wider type, of eager, and of smoe."""
    for name in names:
        module, given = model.get_submodule(name), []
        model.set_experts_implementation("eager")
        hook = module.register_forward_pre_hook(lambda module, inputs: given.append(inputs))
        with torch.no_grad():
            model(input_ids=ids)
        hook.remove()
        x, choice, weights = given[0]
        exact = copy.deepcopy(module).to(_WIDER[x.dtype])

        def run(experts, dtype):
            leaf = x.detach().to(dtype).requires_grad_()
            out = experts(leaf, choice, weights.detach().to(dtype) if weights.is_floating_point() else weights)
            (gradient,) = torch.autograd.grad(out, leaf, torch.sin(torch.arange(out.numel(), device=out.device)).view_as(out).to(dtype))
            return {f"output of {name}": out.detach().double().cpu(), f"gradient of {name}'s input": gradient.double().cpu()}

        results = [run(exact, _WIDER[x.dtype]), run(module, x.dtype)]
        model.set_experts_implementation("smoe")
        yield name, *results, run(module, x.dtype)


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative Frobenius errors. A gradient that is absent, or that is there without being in `exact`, has an infinite
    one."""
    scale = max((float(value.norm()) for name, value in exact.items() if name.startswith("gradient")), default=1.0)
    errors = {}
    for name in exact.keys() | found.keys():
        if name not in found or name not in exact:
            errors[name] = float("inf")
            continue
        least = 1e-9 * scale if name.startswith("gradient") else 1e-30
        error = float((found[name] - exact[name]).norm()) / max(float(exact[name].norm()), least)
        errors[name] = error if error == error else float("inf")
    return errors


def _compare(exact, eager, found, floor: float) -> list[tuple[str, float, float, float]]:
    """Name, eager's error, smoe's error and its limit for each result. A small tensor's error varies, so eager's is taken to
    be at least the median of its kind."""
    own, smoes = _errors(eager, exact), _errors(found, exact)
    typical = statistics.median([error for name, error in own.items() if name.startswith("gradient")] or [0.0])
    rows = []
    for name in exact:
        least = typical if name.startswith("gradient") else own.get("logits", 0.0)
        rows.append((name, own[name], smoes[name], 2 * max(own[name], least, floor)))
    return rows + [(name, 0.0, smoes[name], 0.0) for name in smoes.keys() - exact.keys()]


@torch.no_grad()
def _greedy(exact: nn.Module, model: nn.Module, ids: Tensor, count: int, error: float) -> str:
    """"" if smoe's greedy tokens are those of `exact`, or differ first where the two best logits are closer than twice the
    error that a logit may have; else what differs."""
    prompt = ids[:1, : max(1, ids.shape[1] // 4)]
    generate = lambda m: m.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)[0]
    wanted, found = generate(exact), generate(model)
    differs = (wanted != found).nonzero()
    if not len(differs):
        return ""
    at = int(differs[0])
    best = exact(input_ids=wanted[None, :at]).logits[0, -1].double().topk(2).values
    margin = float(best[0] - best[1])
    if margin <= 2 * error:
        return ""
    return f"token {at - prompt.shape[1]} is {int(found[at])}, not {int(wanted[at])}; margin {margin:.2g}, error {error:.2g}"


def compare(model: nn.Module, ids: Tensor, names: list[str], new_tokens: int, verbose: bool = False) -> bool:
    """Whether smoe's results are those of eager; prints them. `names` are the experts modules that smoe computes."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    model.set_experts_implementation("eager")
    exact = copy.deepcopy(model).to(_WIDER[dtype])
    wanted, eager = _results(exact, "eager", ids), _results(model, "eager", ids)
    layers = [row for _, *results in _layer_results(model, names, ids) for row in _compare(*results, _FLOOR[dtype])]
    rows = _compare(wanted, eager, _results(model, "smoe", ids), _FLOOR[dtype]) + layers
    failed = [row for row in rows if not row[2] <= row[3]]
    print(f"{'':60} {'eager':>9} {'smoe':>9} {'limit':>9}")
    worst = sorted(rows[2:], key=lambda row: row[2] / max(row[3], 1e-30))[-3:]
    shown = [row for row in rows if row in failed or row in worst or row[0] in ("loss", "logits")]
    for row in rows if verbose else shown:
        print(f"{row[0]:60} {row[1]:9.2e} {row[2]:9.2e} {row[3]:9.2e}  {'ok' if row[2] <= row[3] else 'FAILED'}")
    print(f"{len(rows)} results compared, {len(failed)} failed")
    most = float(wanted["logits"].abs().max())
    error = 2 * max(float((eager["logits"] - wanted["logits"]).abs().max()), _FLOOR[dtype] * most)
    said = _greedy(exact, model, ids, new_tokens, error)
    print(f"greedy tokens: {said + '  FAILED' if said else 'ok'}")
    return not failed and not said


# ---- the command ----


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m smoe.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a name that Transformers has locally")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=_DTYPES, help="float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument("--layers", type=_positive, help="check the first so many layers (a large model: 2)")
    parser.add_argument("--tokens", type=_positive, default=256, help="tokens of the batch of two (256)")
    parser.add_argument("--new-tokens", type=_positive, default=16, help="greedy tokens (16)")
    parser.add_argument("--verbose", action="store_true", help="a line for every gradient")
    options = parser.parse_args(arguments)
    dtype = _DTYPES[options.dtype or ("float32" if options.device == "cpu" else "bfloat16")]
    logging.set_verbosity_error()
    try:
        model = load(options.model, dtype, options.layers).to(options.device).eval()
        generator = torch.Generator().manual_seed(1)
        length = max(2, options.tokens // 2)
        ids = torch.randint(model.config.get_text_config().vocab_size, (2, length), generator=generator).to(options.device)
        names = report_layers(model, ids)
        if not names:
            print("smoe runs in no layer: there is nothing to compare")
            return 1
        good = compare(model, ids, names, options.new_tokens, options.verbose)
    except Exception as error:
        print(f"smoe.check: {type(error).__name__}: {error}", file=sys.stderr)
        return 3
    print("the model is right with smoe" if good else "the model is WRONG with smoe")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
