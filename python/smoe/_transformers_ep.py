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

_logger = logging.get_logger(__name__)


class _Shared:
    """The smoe.ep.Group of layers of the same sizes, which run one after the other."""

    def __init__(self, mesh, hidden: int, experts: int, dtype: torch.dtype) -> None:
        self.mesh, self.sizes, self.first, self.group = mesh, dict(hidden=hidden, num_experts=experts, dtype=dtype), None, None
        # The ranks agree on numbers of tokens through the host, so that no GPU has to wait.
        ranks = dist.get_process_group_ranks(mesh.get_group())
        self.hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def fitting(self, layer: object, tokens: int, top_k: int, most: int | None) -> ep.Group:
        """The group for a call of the layer. `most`: the number of tokens that no call exceeds, None: not known. Then the
        first layer that called asks all ranks, once in each pass."""
        self.first = self.first or weakref.ref(layer)
        if self.group is None or (most is None and self.first() is layer):
            self.agree(tokens if most is None else most, top_k)
        if tokens > self.group.max_tokens:
            raise ValueError(
                f"smoe: {tokens} tokens, but the windows of expert parallelism have room for {self.group.max_tokens}; set "
                "smoe.transformers.SmoeEP.max_tokens to the largest number of tokens of a rank"
            )
        return self.group

    @torch.compiler.disable
    def agree(self, tokens: int, top_k: int) -> None:
        """Makes the group larger if a rank has more tokens than fit. A smaller one stays open, since a backward may need it; to
        bound the memory of all, each is at least twice as large as the one before."""
        most = torch.tensor([tokens])
        dist.all_reduce(most, dist.ReduceOp.MAX, self.hosts)
        if self.group is None or most.item() > self.group.max_tokens:
            least = 1 if self.group is None else 2 * self.group.max_tokens
            self.group = ep.Group(self.mesh, max_tokens=max(most.item(), least), top_k=top_k, **self.sizes)


_shared: dict[tuple, _Shared] = {}


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
        key = (self.ep_mesh, x.shape[1], self.num_local_experts, ids.shape[1], dtype)
        if key not in _shared:
            _shared[key] = _Shared(self.ep_mesh, x.shape[1], self.num_local_experts * self.ep_mesh.size(), dtype)
        group = _shared[key].fitting(self, x.shape[0], ids.shape[1], SmoeEP.max_tokens)
        out = ep.experts(
            x, ids, scores, w1, w2, group=group, b1=b1, b2=b2, activation=activation, layout=layout, copy_weights=True
        )
        return out.to(x.dtype)


EPImplementationInterface.register("smoe", SmoeEP)
