"""LoRA on experts beside other ways to compute it: time and memory of one layer's experts, forward and backward, with all weights
frozen and adapters of PEFT on gate_up_proj and down_proj; and tokens/s of a whole OLMoE model.

    python bench/lora.py [--layers olmoe qwen3] [--tokens 16384] [--rank 16] [--json FILE] [--model LAYERS]

    frozen          smoe without LoRA: what the frozen layer takes
    smoe            PEFT with smoe.peft
    peft-smoe       PEFT's own way (the weights are built) with smoe
    peft-grouped_mm PEFT's own way with Transformers' grouped_mm
    axolotl         ScatterMoE's parallel linear with LoRA, as axolotl calls it; needs its package scattermoe_lora

They run in turns. "graph" is the GPU's time alone, for the first two: a CUDA graph of both passes is replayed. The errors are those
against the smoe row: of the output and of the adapters' gradients.
"""

import argparse
import contextlib
import json
import statistics
import time

import torch
from torch import nn

import smoe.transformers  # noqa: F401  registers "smoe"

import peft
import smoe.peft
from comparison.tuning import tune_fast
from peft.tuners.lora.layer import ParamWrapper
from transformers import OlmoeConfig, Qwen3MoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts, OlmoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

TOP_K = 8
LAYERS = {
    "olmoe": (OlmoeExperts, OlmoeConfig(hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=TOP_K)),
    "qwen3": (
        Qwen3MoeExperts,
        Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=TOP_K),
    ),
    "tiny": (OlmoeExperts, OlmoeConfig(hidden_size=64, intermediate_size=32, num_experts=8, num_experts_per_tok=TOP_K)),
}


class Holder(nn.Module):
    """PEFT does not adapt parameters of the module that it is given itself."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *given):
        return self.experts(*given)


def adapter(rank: int, names: list[str]) -> peft.LoraConfig:
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=names, init_lora_weights=False)


@contextlib.contextmanager
def pefts_own_way():
    ours = ParamWrapper._activate_lora
    ParamWrapper._activate_lora = smoe.peft._build_weight
    try:
        yield
    finally:
        ParamWrapper._activate_lora = ours


class Case:
    """A layer's experts with inputs, and each implementation as a function of the inputs."""

    def __init__(self, name: str, tokens: int, rank: int, device: str, dtype: torch.dtype) -> None:
        kind, config = LAYERS[name]
        torch.manual_seed(0)
        config._experts_implementation = "smoe"
        experts = kind(config).to(device, dtype)
        for parameter in experts.parameters():
            nn.init.normal_(parameter.data, std=0.02).requires_grad_(False)
        self.config, self.experts = config, experts
        self.x = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype).requires_grad_()
        scores = torch.rand(tokens, experts.num_experts, device=device)
        self.weights, self.ids = scores.softmax(-1).topk(TOP_K, -1)
        self.weights = self.weights.detach().requires_grad_()
        self.dout = torch.randn_like(self.x) * 0.1
        self.model = peft.get_peft_model(Holder(experts), adapter(rank, ["experts.gate_up_proj", "experts.down_proj"]))
        self.factors = [p for p in self.model.parameters() if p.requires_grad]
        for factor in self.factors:
            nn.init.normal_(factor.data, std=0.02)

    def implementations(self) -> dict:
        return {
            "frozen": lambda: self.experts(self.x, self.ids, self.weights),
            "smoe": lambda: self.model(self.x, self.ids, self.weights),
            "peft-smoe": self.pefts,
            "peft-grouped_mm": self.pefts,
            "axolotl": self.axolotl,
        }

    def prepare(self, label: str) -> None:
        """Before a call of this implementation, whose time it is no part of."""
        self.config._experts_implementation = "grouped_mm" if label == "peft-grouped_mm" else "smoe"
        for tensor in (self.x, self.weights, *self.factors):
            tensor.grad = None

    def pefts(self):
        with pefts_own_way():
            return self.model(self.x, self.ids, self.weights)

    def axolotl(self):
        from axolotl.integrations.kernels.libs.scattermoe_lora import layers
        from axolotl.integrations.kernels.libs.scattermoe_lora.parallel_experts import flatten_sort_count
        from axolotl.integrations.kernels.libs.scattermoe_lora.parallel_linear_lora import parallel_linear_lora

        count, lora = self.experts.num_experts, {}
        for wrapper in (m for m in self.model.modules() if isinstance(m, ParamWrapper)):
            a, b = (getattr(wrapper, "lora_" + ab)["default"].weight.to(self.x.dtype) for ab in "AB")
            pair = layers.peft_lora_to_scattermoe(a, b, count, wrapper.r["default"])
            lora[wrapper.parameter_name] = dict(lora_A=pair[0], lora_B=pair[1], scaling=wrapper.scaling["default"])
        sorted_ids, places, offsets = flatten_sort_count(self.ids, num_experts=count)
        routing = sorted_ids, places, offsets
        up, down = (p.transpose(1, 2) for p in (self.experts.gate_up_proj, self.experts.down_proj))
        h = parallel_linear_lora(self.x, up, TOP_K, *routing, grouped_in=False, grouped_out=True, **lora["gate_up_proj"])
        gate, value = h.chunk(2, dim=-1)
        gates = self.weights.to(self.x.dtype)
        return parallel_linear_lora(
            nn.functional.silu(gate) * value, down, 1, *routing, grouped_in=True, grouped_out=False, gates=gates,
            **lora["down_proj"],
        )  # fmt: skip


class Clock:
    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def time(self, run, ahead: bool = False) -> float:
        """Milliseconds. ahead: the GPU begins late, so that it never waits for the host, as in a model of many layers."""
        if not self.cuda:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        if ahead:
            torch.cuda._sleep(20_000_000)  # clocks, about 10 ms
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def graph_of(case: Case, label: str) -> torch.cuda.CUDAGraph:
    """Both passes, recorded after calls that allocate what later ones keep."""
    run, side = case.implementations()[label], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            case.prepare(label)
            run().backward(case.dout)
    torch.cuda.current_stream().wait_stream(side)
    case.prepare(label)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run().backward(case.dout)
    return graph


def memory(case: Case, label: str, cuda: bool) -> tuple[float, float]:
    """MiB kept from forward to backward, and the peak of both passes above what was there before."""
    case.prepare(label)
    if not cuda:
        return 0.0, 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = case.implementations()[label]()
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    out.backward(case.dout)
    torch.cuda.synchronize()
    return kept / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20


def results(case: Case, label: str) -> list[torch.Tensor]:
    case.prepare(label)
    out = case.implementations()[label]()
    out.backward(case.dout)
    return [out.detach(), *(factor.grad.clone() for factor in case.factors if factor.grad is not None)]


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, exact))


def measure(name: str, options: argparse.Namespace, dtype: torch.dtype) -> list[dict]:
    case = Case(name, options.tokens, options.rank, options.device, dtype)
    clock, exact, rows = Clock(options.device), None, {}
    everything, graphs = case.implementations(), {}
    for label in everything:
        if label not in options.implementations:
            continue
        row = {"layer": name, "implementation": label, "tokens": options.tokens, "rank": options.rank, "ms": [], "forward_ms": [], "ahead_ms": [], "graph_ms": []}
        try:
            start = time.perf_counter()
            found = results(case, label)
            if label == "smoe":
                exact = found
            row["error"] = error(found, exact) if exact and label != "frozen" else None
            row["first_call_s"] = time.perf_counter() - start
            row["kept_mib"], row["peak_mib"] = memory(case, label, clock.cuda)
            rows[label] = row
            if clock.cuda and label in ("frozen", "smoe"):
                graphs[label] = graph_of(case, label)
        except Exception as reason:  # a peer that is not there, or does not fit
            print(f"{name} {label}: {type(reason).__name__}: {str(reason)[:300]}", flush=True)
    deadline = time.perf_counter() + options.seconds
    while time.perf_counter() < deadline or any(len(row["ms"]) < 3 for row in rows.values()):
        for label, row in rows.items():
            forward = everything[label]
            case.prepare(label)
            row["forward_ms"].append(clock.time(lambda: row.__setitem__("out", forward())))
            out = row.pop("out")
            backward_ms = clock.time(lambda: out.backward(case.dout))
            row["ms"].append(row["forward_ms"][-1] + backward_ms)
            del out
            case.prepare(label)
            row["ahead_ms"].append(clock.time(lambda: forward().backward(case.dout), ahead=True))
            if label in graphs:
                row["graph_ms"].append(clock.time(graphs[label].replay, ahead=True))
    for row in rows.values():
        row["runs"] = len(row["ms"])
        for name in ("ms", "forward_ms", "ahead_ms", "graph_ms"):
            row[name] = statistics.median(row[name]) if row[name] else None
    for label, row in rows.items():
        row["of_frozen"] = row["ms"] / rows["frozen"]["ms"] if "frozen" in rows else None
        row["graph_of_frozen"] = row["graph_ms"] / rows["frozen"]["graph_ms"] if {label, "frozen"} <= graphs.keys() else None
    return list(rows.values())


def model_rates(layers: int, options: argparse.Namespace, dtype: torch.dtype) -> list[dict]:
    """Training steps of OLMoE-1B-7B with so many of its 16 layers, LoRA on attention and experts."""
    config = OlmoeConfig(num_hidden_layers=layers, use_cache=False) if options.device == "cuda" else OlmoeConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=32, num_experts=8, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(options.device):
        model = OlmoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config_ = adapter(options.rank, names)
    config_.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = peft.get_peft_model(model, config_)
    ids = torch.randint(0, config.vocab_size, (options.model_tokens // options.context, options.context), device=options.device)
    ways = {"smoe": ("smoe", contextlib.nullcontext), "peft-grouped_mm": ("grouped_mm", pefts_own_way), "peft-smoe": ("smoe", pefts_own_way)}
    found, clock = {label: [] for label in ways}, Clock(options.device)
    peaks = {}
    for turn in range(4):
        for label, (implementation, around) in ways.items():
            model.base_model.model.set_experts_implementation(implementation)
            model.zero_grad(set_to_none=True)

            def step():
                with around():
                    model(input_ids=ids, labels=ids).loss.backward()

            if clock.cuda:
                torch.cuda.reset_peak_memory_stats()
            ms = clock.time(step)
            if turn:  # the first call warms up
                found[label].append(ms)
            peaks[label] = torch.cuda.max_memory_allocated() / 2**30 if clock.cuda else 0.0
    rows = []
    for label, times in found.items():
        ms = statistics.median(times)
        rows.append(dict(model=f"OLMoE, {layers} layers", implementation=label, ms=ms, tokens_s=ids.numel() / ms * 1e3, peak_gib=peaks[label]))
    return rows


def show(rows: list[dict]) -> None:
    for row in rows:
        if "model" in row:
            print(f"{row['model']:18} {row['implementation']:16} {row['ms']:9.1f} ms {row['tokens_s']:10.0f} tokens/s  peak {row['peak_gib']:.1f} GiB", flush=True)
            continue
        of = f"{row['of_frozen']:.3f}" if row["of_frozen"] else "-"
        graph = f" graph {row['graph_ms']:.3f} ms, of frozen {row['graph_of_frozen']:.4f}" if row["graph_of_frozen"] else ""
        off = f"{row['error']:.1e}" if row["error"] is not None else "-"
        print(
            f"{row['layer']:6} {row['implementation']:16} {row['ms']:9.3f} ms (forward {row['forward_ms']:7.3f}, host ahead {row['ahead_ms']:7.3f}) of frozen {of:6}{graph} "
            f"kept {row['kept_mib']:7.0f} MiB peak {row['peak_mib']:7.0f} MiB error {off} first {row['first_call_s']:.1f} s, "
            f"{row['runs']} runs", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", nargs="*", default=["olmoe", "qwen3"], choices=LAYERS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--implementations", nargs="+", default=["frozen", "smoe", "peft-smoe", "peft-grouped_mm", "axolotl"])
    parser.add_argument("--seconds", type=float, default=5, help="of turns for each layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="appended to, a line for each row")
    parser.add_argument("--model", type=int, default=0, metavar="LAYERS", help="then train OLMoE-1B-7B with so many layers")
    parser.add_argument("--model-tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    options = parser.parse_args()
    tune_fast()  # axolotl's kernel has 84 configurations
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, "peft", peft.__version__, flush=True)
    for name in options.layers:
        rows = measure(name, options, dtype)
        show(rows)
        if options.json:
            with open(options.json, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    if options.model:
        rows = model_rates(options.model, options, dtype)
        show(rows)
        if options.json:
            with open(options.json, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
