"""smoe.MoE: the layer as an nn.Module, with Hugging Face's weight names and layouts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _checks, functional, native
from ._activation import Gate
from ._record import HUGGING_FACE

# What smoe.moe takes by name, with the default, without what forward() gives it and without Hugging Face's names.
_GIVEN = ["topk", "logits", "router_bias", "selection_bias", "token_mask", "b1", "b2", "step", "losses", "counts", "weights_f8", *HUGGING_FACE]
_OPTIONS = {name: default for name, default in functional.moe.__kwdefaults__.items() if name not in _GIVEN}


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether nothing is wrapped around the module's forward: no other class (PEFT, fully_shard), no forward of its own
    (accelerate), no hooks. Then MoE reads its parameters and does not call it."""
    return type(module) is kind and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or "forward" in module.__dict__
    )  # fmt: skip


class _Router(nn.Module):
    """`gate.weight` (E, H), and on request `gate.bias` (E) and `gate.e_score_correction_bias` (E) float32."""

    def __init__(self, experts: int, hidden: int, bias: bool, selection_bias: bool, **kind) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden, **kind))
        self.bias = nn.Parameter(torch.empty(experts, **kind)) if bias else None
        shift = torch.zeros(experts, dtype=torch.float32, device=kind["device"]) if selection_bias else None
        self.register_buffer("e_score_correction_bias", shift)

    def forward(self, x: Tensor, logits_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """x (T, H) to the logits (T, E), computed in float32 as the library does, and the selection bias."""
        weight, bias = self.weight, self.bias
        x, weight, bias = functional._autocast(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return logits.to(logits_dtype), self.e_score_correction_bias

    def _apply(self, fn, recurse=True):
        """Keeps the selection bias in float32 under `.to(dtype)` and `.bfloat16()`, because the steps of gamma by which
        it is updated are too small for bfloat16."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if after is not None and after.dtype is not torch.float32:
            self.e_score_correction_bias = before.to(after.device)
        return self


class _Experts(nn.Module):
    """`gate_up_proj` (E, 2I, H) (without a gate `up_proj` (E, I, H)), `down_proj` (E, H, I), and their biases. With
    interleaved rows the first is `gate_up_proj_interleaved`, so that a state dict in the other order does not load: its
    shapes are the same. With expert parallelism all have the E/W experts of this rank."""

    def __init__(
        self, experts: int, hidden: int, intermediate: int, activation: str | Gate, layout: str, bias: bool, ep, **kind
    ) -> None:
        super().__init__()
        self.ep, experts = ep, experts // (ep.size if ep else 1)
        gated = activation not in native.PLAIN_ACTIVATIONS
        width = 2 * intermediate if gated else intermediate
        interleaved = "_interleaved" if layout == "interleaved" else ""
        self.up_name = "gate_up_proj" + interleaved if gated else "up_proj"
        self.up_bias_name = self.up_name + "_bias"  # kept, because looking up a name that is built at each call is slow
        self.register_parameter(self.up_name, nn.Parameter(torch.empty(experts, width, hidden, **kind)))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate, **kind))
        up_bias = nn.Parameter(torch.empty(experts, width, **kind)) if bias else None
        self.register_parameter(self.up_bias_name, up_bias)
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden, **kind)) if bias else None

    def weights(self) -> dict[str, Tensor | None]:
        """The parameters by the names of smoe.moe."""
        b1 = getattr(self, self.up_bias_name)
        found = dict(w1=getattr(self, self.up_name), w2=self.down_proj, b1=b1, b2=self.down_proj_bias)
        if self.ep:  # smoe.ep.fully_shard makes them DTensors on the mesh of the group
            found = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in found.items()}
        return found

    def __setattr__(self, name, value) -> None:
        """Forgets quantised weights. fully_shard sets the weights of every forward here, with a counter that does not count."""
        self.__dict__.pop("_smoe_f8", None)
        super().__setattr__(name, value)

    def _quantized(self, w1: Tensor, w2: Tensor, activation: str | Gate = "swiglu", layout: str = "concatenated", **_) -> Tensor:
        from . import _f8

        return _f8.of_module(self, w1, w2, activation=activation, layout=layout)

    def compute(self, x: Tensor, router_weight: Tensor | None, **options) -> functional.MoEOutput:
        if self.ep is None:
            given = self.weights()
            if options.get("compute") is not None:
                given["weights_f8"] = self._quantized(given["w1"], given["w2"], **options)
            return functional.moe(x, router_weight, **given, **options)
        from . import ep

        return ep.moe(x, router_weight, **self.weights(), group=self.ep, **options)

    def _load_from_state_dict(self, state_dict, prefix, *others) -> None:
        """With expert parallelism the weights of all E experts load too."""
        if self.ep:
            for name, own in self.named_parameters(recurse=False):
                given = state_dict.get(prefix + name)
                if given is not None and type(own) is nn.Parameter and given.shape[0] == own.shape[0] * self.ep.size:
                    state_dict[prefix + name] = given.chunk(self.ep.size)[self.ep.rank]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x: Tensor, logits: Tensor, selection_bias: Tensor | None = None, **options):
        """x (T, H) and the router's logits (T, E) to out (T, H), or to an smoe.MoEOutput with `losses` or `counts`."""
        held = self.__dict__.get("_smoe_lora")  # by smoe.peft
        if held:
            if options.pop("compute", None) is not None:
                raise NotImplementedError("smoe.MoE: compute is set, which LoRA does not have")
            from . import _lora, peft

            adapters = peft.adapters_of(self, held)
            out, *others = _lora.moe(x, logits, **self.weights(), lora=adapters, selection_bias=selection_bias, **options)
            found = functional.MoEOutput(out, logits, *others)
        else:
            found = self.compute(x, None, logits=logits, selection_bias=selection_bias, **options)
        return found if options.get("losses") or options.get("counts") else found.out


class MoE(nn.Module):
    """A Mixture-of-Experts layer with its router.

    The state dict has Hugging Face's names: gate.weight (E, H), experts.gate_up_proj (E, 2I, H), experts.down_proj
    (E, H, I), and with the options gate.bias, gate.e_score_correction_bias, experts.gate_up_proj_bias,
    experts.down_proj_bias. With layout="interleaved" the rows of gate_up_proj have another order, so the names are
    experts.gate_up_proj_interleaved and experts.gate_up_proj_interleaved_bias.

    The forward reads the parameters of `gate` and `experts` and computes both in one call. Where one of them is wrapped
    or has hooks, it calls them: gate(x) gives the logits and the selection bias, experts(x, logits, ...) the output.

    `options` are those of smoe.moe that do not change from call to call: activation, layout, score, renormalize, groups,
    groups_kept, route_scale, rounding, tile, seed, balance_coefficient, z_coefficient, chunks, logits_dtype, gradient_dtype,
    compute, also by Hugging Face's names. With compute="f8" the weights are quantised when they have changed, which an
    optimizer's step or PyTorch's version counter tells: writing through `.data`, by a collective or by a CUDA graph needs
    forget_quantized(). bias, router_bias and selection_bias give the experts, the router and the selection a bias. With `ep`,
    an smoe.ep.Group, the module has all of the router and this rank's experts; a seed gives the weights of the whole layer.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        router_bias: bool = False,
        selection_bias: bool = False,
        initializer_range: float = 0.02,
        ep=None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options,
    ) -> None:
        flags = dict(bias=bias, router_bias=router_bias, selection_bias=selection_bias)
        options = {HUGGING_FACE.get(name, name): value for name, value in options.items()}
        for name in options:
            if name not in _OPTIONS:
                raise TypeError(f"smoe.MoE: {name} is no option; expected one of {', '.join(sorted(_OPTIONS))}")
        every = _OPTIONS | options
        _checks.module("smoe.MoE", hidden_size, intermediate_size, num_experts, top_k, flags, every)
        if ep and num_experts % ep.size:
            raise ValueError(f"smoe.MoE: num_experts is {num_experts}; expected a multiple of the {ep.size} ranks of ep")
        if ep and every["compute"] is not None:
            raise NotImplementedError(f"smoe.MoE: compute is {every['compute']!r}, which ep does not have")
        super().__init__()
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.top_k, self.options, self.initializer_range = top_k, options, initializer_range
        activation, layout, kind = every["activation"], every["layout"], dict(device=device, dtype=dtype)
        self.gate = _Router(num_experts, hidden_size, router_bias, selection_bias, **kind)
        self.experts = _Experts(num_experts, hidden_size, intermediate_size, activation, layout, bias, ep, **kind)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws matrices from a normal distribution with standard deviation initializer_range; sets biases to zero, the
        selection bias too."""
        ep = self.experts.ep
        for name, value in (*self.named_parameters(), *self.named_buffers()):
            if name.endswith("bias"):
                nn.init.zeros_(value)
            elif ep and name.startswith("experts."):  # every rank draws those of all ranks, or all would have the same experts
                for rank in range(ep.size):
                    nn.init.normal_(value if rank == ep.rank else torch.empty_like(value), std=self.initializer_range)
            else:
                nn.init.normal_(value, std=self.initializer_range)

    def forward(
        self, x: Tensor, *, step: int = 0, losses: bool = False, counts: bool = False, token_mask: Tensor | None = None
    ):
        """Maps x (..., H) to out (..., H). With `losses` or `counts` it returns an smoe.MoEOutput, whose logits (T, E)
        are those of the flattened tokens. `step` is used by stochastic token rounding. token_mask (...) bool leaves
        tokens out of losses and counts (smoe.moe)."""
        if not isinstance(x, Tensor):
            _checks.tensor("smoe.MoE", "x", x)
        gate, experts, dimensions = self.gate, self.experts, x.dim()
        if dimensions == 0:
            raise ValueError("smoe.MoE: x has shape (); expected (..., H)")
        flat = dimensions == 2
        tokens = x if flat else x.reshape(-1, x.shape[-1])
        mask = token_mask if flat or token_mask is None else token_mask.reshape(-1)
        if not (_is_plain(gate, _Router) and _is_plain(experts, _Experts)):
            found = self._call_parts(tokens, step=step, losses=losses, counts=counts, token_mask=mask)
        else:
            found = experts.compute(
                tokens,
                gate.weight,
                topk=self.top_k,
                router_bias=gate.bias,
                selection_bias=gate.e_score_correction_bias,
                step=step,
                losses=losses,
                counts=counts,
                token_mask=mask,
                **self.options,
            )
        out = found.out if flat else found.out.view_as(x)
        if not (losses or counts):
            return out
        return functional.MoEOutput(out, found.logits, found.losses, found.counts)  # torch 2.6 does not trace _replace

    def _call_parts(self, x: Tensor, **given) -> functional.MoEOutput:
        logits, selection_bias = self.gate(x, self.options.get("logits_dtype", torch.float32))
        found = self.experts(x, logits, selection_bias, topk=self.top_k, **given, **self.options)
        if isinstance(found, Tensor):
            return functional.MoEOutput(found, logits, None, None)
        return functional.MoEOutput(*found)

    def forget_quantized(self) -> None:
        """The next forward quantises the weights again (compute)."""
        for module in self.experts.modules():  # perhaps within a wrapper
            module.__dict__.pop("_smoe_f8", None)

    def update_selection_bias(self, counts: Tensor, gamma: float = 1e-3) -> None:
        """The aux-free bias update, to be called after an optimizer step. `counts` are those of forward(counts=True),
        or their sum over micro-batches and ranks."""
        bias = getattr(self.gate, "e_score_correction_bias", None)
        if bias is None:  # a wrapper may not show the attributes of what it wraps
            bias = next((value for name, value in self.gate.named_buffers() if name.endswith("e_score_correction_bias")), None)
        functional.update_selection_bias(bias, counts, gamma)

    def extra_repr(self) -> str:
        names = ("hidden_size", "intermediate_size", "num_experts", "top_k")
        return ", ".join([*(f"{name}={getattr(self, name)}" for name in names), *(f"{key}={value!r}" for key, value in self.options.items())])
