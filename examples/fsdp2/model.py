"""The language model of `smoe train` (OLMoE's decoder) in PyTorch, and where its weights come from.

d is the hidden size, n the intermediate size, E the number of experts, V that of tokens in the vocabulary. A batch of B
sequences is one matrix with B * context rows.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import RunError, UsageError, experts

LOSS_ROWS = 8192  # rows of the logits (rows, V) that are computed at a time


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    heads: int
    intermediate: int
    experts: int
    topk: int
    vocabulary: int = 50304
    context: int = 4096
    sequences: int = 10  # of each process in a step
    renormalize: bool = True  # the weights of a token's experts are divided by their sum
    tied: bool = True  # the head is the embedding
    theta: float = 10000.0
    epsilon: float = 1e-5
    deviation: float = 0.02  # standard deviation of the first weights

    def total_weights(self) -> int:
        d, attention = self.hidden, 4 * self.hidden**2 + 4 * self.hidden
        layer = attention + self.experts * (3 * self.intermediate * d + d)
        return self.layers * layer + d + (1 if self.tied else 2) * self.vocabulary * d

    def active_weights(self) -> int:
        """The weights that a token is multiplied with: K experts in each layer, and the head. An embedding that is not
        the head does not count, because it is only looked up."""
        unused = self.layers * (self.experts - self.topk) * 3 * self.intermediate * self.hidden
        return self.total_weights() - unused - (0 if self.tied else self.vocabulary * self.hidden)

    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward: 6 for each active weight, and for each layer 6 * context * d of causal
        attention (12 * context * d without a mask). Recomputation in the backward does not count."""
        return 6 * self.active_weights() + 6 * self.layers * self.context * self.hidden


CONFIGS = {  # 0.5B, 1.4B and 7B: the models of the SonicMoE paper, with the paper's number of tokens for each GPU. 30B: the
    # sizes of Qwen3-30B-A3B with the attention of these models
    "tiny": Config(2, 32, 4, 16, 8, 2, vocabulary=256, context=32, sequences=8, deviation=0.1),
    "0.5B": Config(12, 768, 12, 256, 64, 8),
    "1.4B": Config(18, 768, 12, 256, 128, 8),
    "7B": Config(45, 1536, 24, 256, 128, 8, sequences=6),
    "30B": Config(48, 2048, 16, 768, 128, 8, sequences=4),
}


# ---- the functions that torch.compile fuses ----


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE in float32: x (B, heads, context, head), the tables (context, head / 2)."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1).to(x.dtype)


def attention_half(x, norm, qkv, q_norm, k_norm, output, cosine, sine, heads: int, epsilon: float) -> Tensor:
    """x + attention(norm(x)), x (B * context, d)."""
    d, context = x.shape[1], cosine.shape[0]
    q, k, v = F.linear(F.rms_norm(x, (d,), norm, epsilon), qkv).chunk(3, dim=-1)
    q, k = F.rms_norm(q, (d,), q_norm, epsilon), F.rms_norm(k, (d,), k_norm, epsilon)
    q, k, v = (t.view(-1, context, heads, d // heads).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(_turn(q, cosine, sine), _turn(k, cosine, sine), v, is_causal=True)
    return x + F.linear(mixed.transpose(1, 2).reshape(x.shape), output)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[1],), weight, epsilon)


def summed_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, head).float(), targets, reduction="sum")


class Functions:
    """The three functions above, compiled or not."""

    def __init__(self, compiled: bool) -> None:
        wrap = torch.compile if compiled else lambda function: function
        self.attention_half, self.norm, self.summed_loss = wrap(attention_half), wrap(norm), wrap(summed_loss)


# ---- modules ----


def _matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


class Block(nn.Module):
    def __init__(self, config: Config, functions: Functions, moe: nn.Module, recompute: bool) -> None:
        super().__init__()
        d = config.hidden
        self.config, self.functions, self.recompute = config, functions, recompute
        self.input_norm, self.q_norm, self.k_norm, self.mlp_norm = (_matrix(d) for _ in range(4))
        self.qkv, self.output, self.moe = _matrix(3 * d, d), _matrix(d, d), moe

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        # The checkpoint is inside the forward that fully_shard hooks. So fully_shard's backward hook has gathered the
        # weights when the layer is computed again.
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer, x, cosine, sine, use_reentrant=False, preserve_rng_state=False)
        return self._layer(x, cosine, sine)

    def _layer(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        c, run = self.config, self.functions
        x = run.attention_half(
            x, self.input_norm, self.qkv, self.q_norm, self.k_norm, self.output, cosine, sine, c.heads, c.epsilon
        )
        return x + self.moe(run.norm(x, self.mlp_norm, c.epsilon))


class LanguageModel(nn.Module):
    """forward(tokens, targets), both (rows) int64, gives the mean cross-entropy in nats. The loss is computed in this
    forward because fully_shard gathers the head's weights only during it."""

    def __init__(self, config: Config, make_moe: Callable[[], nn.Module], compiled: bool, recompute: bool) -> None:
        super().__init__()
        c, functions = config, Functions(compiled)
        self.config, self.functions = c, functions
        self.embedding, self.norm = _matrix(c.vocabulary, c.hidden), _matrix(c.hidden)
        self.head = None if c.tied else _matrix(c.vocabulary, c.hidden)
        self.blocks = nn.ModuleList(Block(c, functions, make_moe(), recompute) for _ in range(c.layers))
        self.tables: tuple[Tensor, Tensor] | None = None

    def make_tables(self, device: torch.device) -> None:
        """cos and sin of RoPE, (context, d / heads / 2) float32."""
        c = self.config
        size = c.hidden // c.heads
        speeds = c.theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(c.context, dtype=torch.float64), speeds)
        self.tables = angles.cos().float().to(device), angles.sin().float().to(device)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, *self.tables)
        x = self.functions.norm(x, self.norm, self.config.epsilon)
        head, loss = self.embedding if self.head is None else self.head, 0.0
        for rows, wanted in zip(x.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True):
            run = self.functions.summed_loss
            loss = loss + checkpoint(run, rows, head, wanted, use_reentrant=False, preserve_rng_state=False)
        return loss / len(tokens)


# ---- first weights ----


def drawn(config: Config, seed: int, device: torch.device) -> Callable[[int, str, torch.Size], Tensor]:
    """Normal values for matrices, ones for the norms. Matrices whose results are added to the residual stream are
    divided by sqrt(2 layers). A parameter's values depend only on the seed and on the parameter's number, so a run with
    any number of processes starts from the same weights.
    """
    generator = torch.Generator(device)

    def give(index: int, name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device)
        small = name.endswith((".output", ".down_proj"))
        deviation = config.deviation / math.sqrt(2 * config.layers) if small else config.deviation
        generator.manual_seed(seed * 1_000_003 + index)
        return torch.randn(shape, generator=generator, device=device) * deviation

    return give


_NAMES = {  # of a block's parameters in a checkpoint of `smoe train`; {} is the expert
    "input_norm": ["input_layernorm"],
    "mlp_norm": ["post_attention_layernorm"],
    "q_norm": ["self_attn.q_norm"],
    "k_norm": ["self_attn.k_norm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "output": ["self_attn.o_proj"],
    "moe.gate.weight": ["mlp.gate"],
    "moe.experts.gate_up_proj": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
    "moe.experts.down_proj": ["mlp.experts.{}.down_proj"],
}
_TOP = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}


_READ = ("rope_theta", "rope_parameters", "rope_scaling", "original_max_position_embeddings")
_NEUTRAL = dict(rope_type="default", type="default", factor=1, attention_factor=1, partial_rotary_factor=1)
_NEUTRAL.update(rotary_pct=1, rope_ratio=1)


def _not_computed(keys: dict) -> str:
    """The first key of a configuration whose value this model does not compute, or an empty text."""
    heads = keys.get("num_attention_heads", 1)
    for key in "shared_expert_intermediate_size first_k_dense_replace clip_qkv attention_bias".split():
        if keys.get(key):
            return key
    wanted = dict(hidden_act="silu", num_key_value_heads=heads, head_dim=keys.get("hidden_size", 0) // heads)
    for key, value in wanted.items():
        if keys.get(key) not in (None, value):
            return key
    thetas = set()
    for where in ("", "rope_parameters", "rope_scaling"):
        rope = (keys.get(where) or {}) if where else {k: v for k, v in keys.items() if "rope" in k or "rotary" in k}
        if not isinstance(rope, dict):
            return where
        for key, value in rope.items():
            absent = value is None or value is False
            if not absent and key not in _READ and value != _NEUTRAL.get(key):
                return f"{where}.{key}".lstrip(".")
        thetas.add(rope.get("rope_theta"))
    return "rope_theta" if len(thetas - {None}) > 1 else ""


class Checkpoint:
    """A checkpoint of `smoe train`, or any OLMoE in safetensors: its configuration and its weights one by one."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        try:
            self.keys = json.loads((self.folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"--init {folder}: no readable config.json ({error})")
        what = _not_computed(self.keys)
        if self.keys.get("model_type") not in ("olmoe", "smoe"):
            what = f"model_type {self.keys.get('model_type')}"
        if what:
            raise UsageError(f"--init {folder}: {what} is not supported, only OLMoE's decoder")
        self._open()

    def _open(self) -> None:
        from safetensors import safe_open

        self.files = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = safe_open(path, "pt")
                names = file.keys()
            except Exception as error:  # the package has an exception type of its own
                raise RunError(f"{path}: {error}")
            self.files.update({name: file for name in names if name.startswith(("model.", "lm_head."))})
        if _TOP["embedding"] not in self.files:
            raise UsageError(f"--init {self.folder}: no *.safetensors with {_TOP['embedding']}")

    def config(self, like: Config) -> Config:
        keys = self.keys
        ropes = (keys, keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {})
        return replace(
            like,
            layers=keys["num_hidden_layers"],
            hidden=keys["hidden_size"],
            heads=keys["num_attention_heads"],
            intermediate=keys["intermediate_size"],
            experts=keys["num_experts"],
            topk=keys["num_experts_per_tok"],
            vocabulary=keys["vocab_size"],
            context=keys.get("max_position_embeddings", 4096),
            renormalize=bool(keys.get("norm_topk_prob", False)),
            tied=bool(keys.get("tie_word_embeddings", False)),
            theta=float(next((rope["rope_theta"] for rope in ropes if rope.get("rope_theta")), 10000.0)),
            epsilon=float(keys.get("rms_norm_eps", 1e-5)),
        )

    def _read(self, name: str) -> Tensor:
        if name not in self.files:
            raise RunError(f"--init {self.folder}: {name} is missing")
        return self.files[name].get_tensor(name).float()

    def _block(self, layer: str, name: str) -> Tensor:
        names = [f"model.layers.{layer}.{part}.weight" for part in _NAMES[name]]
        if "{}" not in names[0]:
            return torch.cat([self._read(part) for part in names])
        each = range(self.keys["num_experts"])
        return torch.stack([torch.cat([self._read(part.format(expert)) for part in names]) for expert in each])

    def give(self, index: int, name: str, shape: torch.Size) -> Tensor:
        if name in _TOP:
            value = self._read(_TOP[name])
        else:
            _, layer, rest = name.split(".", 2)
            value = self._block(layer, rest)
        if value.shape != shape:
            raise RunError(f"--init {self.folder}: {name} has shape {tuple(value.shape)}, expected {tuple(shape)}")
        return value


def named_shapes(model: LanguageModel) -> Iterator[tuple[int, str, nn.Parameter]]:
    for index, (name, parameter) in enumerate(model.named_parameters()):
        yield index, name, parameter


def _rows_here(value: Tensor, mesh) -> Tensor:
    """This process's rows of dimension 0: the experts of its group's rank, then as fully_shard cuts them. The last parts may be
    short or missing."""
    for dimension in reversed(range(mesh.ndim)):
        parts, place = value.chunk(mesh.size(dimension)), mesh.get_local_rank(dimension)
        value = parts[place] if place < len(parts) else value[:0]
    return value


@torch.no_grad()
def fill(model: LanguageModel, give: Callable, layout: str) -> None:
    """Fills every parameter; of a sharded one, this process's rows. At most one whole parameter is in memory at a
    time."""
    for index, name, parameter in named_shapes(model):
        value = give(index, name, parameter.shape)
        if layout == "interleaved" and name.endswith("gate_up_proj"):
            value = experts.interleave(value)
        local = getattr(parameter, "to_local", lambda: parameter)()
        local.copy_(value if local is parameter else _rows_here(value, parameter.device_mesh))


def described(config: Config) -> dict:
    """The settings of the model that a resumed run must share with its checkpoint."""
    kept = asdict(config)
    del kept["sequences"], kept["deviation"]
    return kept
