"""Expert parallelism in Transformers: DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="smoe")."""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP, EPImplementation, EPImplementationInterface
from transformers.utils import logging

from . import ep
from . import transformers as doors
from ._ep_shared import Shared, shared

_logger = logging.get_logger(__name__)


class _Agreed(Shared):
    """The ranks have different numbers of tokens. The first layer that called asks all of them, once in each pass."""

    def __init__(self, mesh, *sizes) -> None:
        super().__init__(mesh, *sizes)
        self.first = None
        # Through the host, so that no GPU has to wait.
        ranks = dist.get_process_group_ranks(mesh.get_group())
        self.hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def of_call(self, layer: object, tokens: int) -> ep.Group:
        self.first = self.first or weakref.ref(layer)
        if self.group is None or self.first() is layer:
            self.ask(tokens)
        if tokens > self.group.max_tokens:
            raise ValueError(
                f"smoe: {tokens} tokens, but the windows of expert parallelism have room for {self.group.max_tokens}; set "
                "smoe.transformers.SmoeEP.max_tokens to the largest number of tokens of a rank"
            )
        return self.group

    @torch.compiler.disable
    def ask(self, tokens: int) -> None:
        most = torch.tensor([tokens], device="cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX, self.hosts)
        self.fit(most.item())


class SmoeEP(EPImplementation):
    """Experts, and the way of their tokens, by smoe.ep. `max_tokens` is the largest number of tokens of a rank. Without it
    the ranks agree on it in the first layer of each pass, which torch.compile cannot trace."""

    max_tokens: int | None = None

    def __init__(self, experts, ep_mesh, tp_mesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.others = AllToAllEP(experts, ep_mesh, tp_mesh)  # for experts that smoe cannot compute
        self.same_batch = AllReduceEP(experts, ep_mesh, tp_mesh) if self.shares_batch else None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.same_batch and not (torch.is_grad_enabled() and hidden_states.requires_grad):
            return self.same_batch(hidden_states, top_k_index, top_k_weights)
        math = doors._math_at(id(self.experts)) if torch.compiler.is_dynamo_compiling() else doors._math_of(self.experts)
        activation, layout, reason = math
        weights = doors._weights_of(self.experts)
        reason = reason or doors._why_not(hidden_states, *weights)
        if reason:
            _logger.warning_once(f'smoe: {type(self.experts).__name__} runs with ep_implementation="all_to_all": {reason}.')
            return self.others(hidden_states, top_k_index, top_k_weights)
        return self.sliced(weights, activation, layout, hidden_states, top_k_index, top_k_weights)

    def sliced(self, weights, activation, layout, *tokens: Tensor) -> Tensor:
        """Each rank of a group that shares a batch sends a slice of it, and gets all results."""
        if self.tp_mesh.size() == 1:
            return self.compute(weights, activation, layout, *tokens)
        whole = [DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False) for tensor in tokens]
        out = self.compute(weights, activation, layout, *[t.redistribute(self.tp_mesh, [Shard(0)]).to_local() for t in whole])
        shape = tokens[0].shape
        return DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)).full_tensor()

    def compute(self, weights, activation, layout, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        w1, b1, w2, b2 = weights
        if getattr(self.experts, "is_transposed", False):
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        sizes = x.shape[1], self.num_local_experts * self.ep_mesh.size(), ids.shape[1], dtype
        if SmoeEP.max_tokens is None:
            group = shared(_Agreed, self.ep_mesh, *sizes).of_call(self, x.shape[0])
        else:
            group = shared(Shared, self.ep_mesh, *sizes).fit(SmoeEP.max_tokens)
        out = ep.experts(
            x, ids, scores, w1, w2, group=group, b1=b1, b2=b2, activation=activation, layout=layout, copy_weights=True
        )
        return out.to(x.dtype)


EPImplementationInterface.register("smoe", SmoeEP)
