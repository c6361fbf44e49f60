"""torchtitan: a converter that lets smoe compute the routed experts of a model.

    converters=[SmoeConverter.Config()]

It replaces every RoutedExperts that has torchtitan's own grouped linears (w13 [E, 2, F, D], w2 [E, D, F]) and SwiGLU.
Parameters, their names and their sharding stay as they are. Without expert parallelism smoe reads the tokens with their
ids and scores directly, and no copy sorted by expert is made. With expert parallelism smoe computes the rows that the
dispatcher delivers. With Config(ep="smoe") smoe.ep moves the tokens itself, and the dispatcher only gives the mesh. For a dtype or a GPU that smoe does not support and for quantised weights torchtitan's own code
runs, with one warning.
"""

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

try:
    from torchtitan.models.common.activation import SwiGLU
    from torchtitan.models.common.linear import GroupedLinear
except ImportError as error:
    raise ImportError(
        "smoe.torchtitan: needs torchtitan with GroupedLinear (of September 2026, as commit 00a4c147), which keeps gate and up "
        "weights in one w13; up to release 0.3.0 they are two parameters, and joining them would cost a copy at every step"
    ) from error
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.protocols.model import ModelConfigConverter

from . import _checks, compat, ep, functional
from ._ep_shared import Shared, shared

__all__ = ["SmoeConverter", "SmoeRoutedExperts"]

_logger = logging.getLogger(__name__)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


@functools.cache
def _warn_once(reason: str) -> None:
    _logger.warning("smoe: RoutedExperts run as torchtitan's own: %s.", reason)


def _supported(x: Tensor, *weights: Tensor) -> bool:
    """Whether smoe computes with these tensors."""
    reason = _checks.why_not(x, *weights, casts=True)
    if reason and not torch.compiler.is_compiling():
        _warn_once(reason)
    return not reason


class SmoeRoutedExperts(RoutedExperts):
    """RoutedExperts with smoe in place of the grouped matrix products."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        ep: str | None = None
        max_tokens: int | None = None
        dtype: torch.dtype = torch.bfloat16

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ep, self.max_tokens, self.dtype = config.ep, config.max_tokens, config.dtype

    def parallelize(self, *dimensions) -> None:
        """With max_tokens the windows are made here, outside of what torch.compile traces."""
        super().parallelize(*dimensions)
        if self._ep_mesh() is not None and self.max_tokens:
            self._group(self.max_tokens, self.dtype)

    def _ep_mesh(self):
        return getattr(self.token_dispatcher, "ep_mesh", None) if self.ep else None

    def _group(self, tokens: int, dtype: torch.dtype) -> ep.Group:
        """torchtitan pads, so that all ranks have the same number of tokens."""
        mesh, w2 = self._ep_mesh(), _local(self.w2.weight)
        sizes = w2.shape[1], w2.shape[0] * mesh.size(), self.token_dispatcher.top_k, dtype
        return shared(Shared, mesh, *sizes).fit(max(tokens, self.max_tokens or 0))

    def forward(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        w13, w2 = _local(self.w13.weight), _local(self.w2.weight)
        if not _supported(x_TD, w13, w2):
            return super().forward(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        w13, w2 = w13.flatten(1, 2).to(x_TD.dtype), w2.to(x_TD.dtype)
        if type(self.token_dispatcher) is LocalTokenDispatcher:
            out = functional.experts(x_TD, topk_expert_ids_TK, topk_scores_TK, w13, w2)
            return out.type_as(x_TD)  # under autocast too, as the stock module
        if self._ep_mesh() is not None:
            group = self._group(x_TD.shape[0], x_TD.dtype)
            return ep.experts(x_TD, topk_expert_ids_TK, topk_scores_TK, w13, w2, group=group).type_as(x_TD)
        rows, counts, metadata = self.token_dispatcher.dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        out, _ = compat.te_grouped_mlp(rows, counts, None, w13, w2)
        return self.token_dispatcher.combine(out.type_as(rows), metadata, x_TD)


class SmoeConverter(ModelConfigConverter):
    """Replaces every stock routed-experts config of a model config.

    ep: None, or "smoe": with expert parallelism smoe.ep moves the tokens. max_tokens: the largest number of tokens of a rank
    in a call; without it the windows are made in the first forward, which torch.compile cannot trace. dtype: of x then.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        ep: str | None = None
        max_tokens: int | None = None
        dtype: torch.dtype = torch.bfloat16

    def __init__(self, config: Config) -> None:
        if config.ep not in (None, "smoe"):
            raise ValueError(f"smoe.torchtitan.SmoeConverter: ep is {config.ep!r}; expected None or 'smoe'")
        self.config = config

    def convert(self, model_config):
        targets = list(model_config.traverse(RoutedExperts.Config))
        for name, config, parent, attribute in targets:
            stock = type(config) is RoutedExperts.Config and type(config.activation_fn) is SwiGLU.Config
            if not stock or any(type(linear) is not GroupedLinear.Config for linear in (config.w13, config.w2)):
                raise TypeError(
                    f"smoe: {name} is a {type(config).__qualname__} of {type(config.w13).__qualname__} with "
                    f"{type(config.activation_fn).__qualname__}; expected the stock grouped linears and SwiGLU"
                )
            fields = {field: getattr(config, field) for field in type(config).__dataclass_fields__}
            chosen = {field: getattr(self.config, field) for field in ("ep", "max_tokens", "dtype")}
            replacement = SmoeRoutedExperts.Config(**fields, **chosen)
            if parent is None:
                model_config = replacement
            elif isinstance(parent, list):
                parent[attribute] = replacement
            else:
                setattr(parent, attribute, replacement)
        _logger.info("smoe computes %d routed-experts modules", len(targets))
        return model_config
