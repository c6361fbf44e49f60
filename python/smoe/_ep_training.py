"""smoe.MoE with expert parallelism under fully_shard, DistributedDataParallel and gradient clipping.

The other weights' gradients are means over all ranks. A rank's experts compute the tokens of the whole group, so these
functions divide their gradients by the number of all ranks too.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .module import MoE


def _layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    for name, module in model.named_modules():
        if isinstance(module, MoE) and module.experts.ep:
            yield name, module


def fully_shard(model: nn.Module, mesh, **options) -> None:
    """torch's fully_shard for the experts of every layer, over `mesh`, the ranks that have the same experts; mesh and the
    group's are dimensions of one mesh, as of init_device_mesh(kind, (N // W, W), mesh_dim_names=("efsdp", "ep")). To be
    called before fully_shard of the modules around the experts. `options` are fully_shard's."""
    from torch.distributed import fsdp
    from torch.distributed.tensor import DTensor, Shard

    for name, layer in _layers(model):
        experts, group = layer.experts, layer.experts.ep
        if group.mesh is None:
            raise ValueError(f"smoe.ep.fully_shard: the group of {name or 'the layer'} was made from a process group; expected one of a mesh")
        for label, value in list(experts.named_parameters(recurse=False)):
            spread = DTensor.from_local(value.detach(), group.mesh, [Shard(0)], run_check=False)
            setattr(experts, label, nn.Parameter(spread, value.requires_grad))
        fsdp.fully_shard(experts, mesh=mesh, **options)
        experts.set_gradient_divide_factor(float(group.size * mesh.size()))
        if mesh.size() > 1:  # a factor other than the mesh's size is an operation that gloo does not have
            experts.set_force_sum_reduction_for_comms(True)


def data_parallel(model: nn.Module, replicas: dist.ProcessGroup | None = None) -> None:
    """To be called before DistributedDataParallel(model), which then leaves the experts alone: their gradients are averaged
    in the backward. `replicas` are the ranks that have the same experts; None: no other rank has them."""
    copies = dist.get_world_size(replicas) if replicas else 1
    ignored = []
    for name, layer in _layers(model):
        ranks = layer.experts.ep.size * copies

        def mean(gradient: Tensor, ranks=ranks) -> Tensor:
            gradient = gradient / ranks
            if replicas:
                dist.all_reduce(gradient, group=replicas)
            return gradient

        for label, value in layer.experts.named_parameters(f"{name}.experts" if name else "experts"):
            ignored.append(label)
            if value.requires_grad:
                value.register_hook(mean)
    kept = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*kept, *ignored])


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a model that has layers with expert parallelism. Collective. Returns the norm over
    the weights of all ranks."""
    of_rank = {id(value): layer.experts.ep for _, layer in _layers(model) for value in layer.experts.parameters()}
    parts: dict[tuple, list[nn.Parameter]] = {}  # of one mesh, or of one group, or on every rank
    for value in model.parameters():
        if value.grad is not None:
            mesh = getattr(value, "device_mesh", None)
            parts.setdefault((mesh, None if mesh else of_rank.get(id(value))), []).append(value)
    squares = []
    for (mesh, group), values in parts.items():
        norm = torch.nn.utils.get_total_norm([value.grad for value in values])
        square = (norm.full_tensor() if mesh else norm).float().square()
        if group:
            dist.all_reduce(square, group=group.process_group)
        squares.append(square)
    total = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    for values in parts.values():
        torch.nn.utils.clip_grads_with_norm_(values, max_norm, total)
    return total
