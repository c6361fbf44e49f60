"""FSDP-2 that gathers the quantised weights of fp8 layers: one byte for each weight of the experts.

    layer = smoe.MoE(H, I, E, K, compute="f8")
    smoe.fsdp.gather_quantized(layer)  # before fully_shard
    fully_shard(layer)

Each rank quantises its own experts before a gather, from the type in which it stores them. The ranks exchange bytes and scales,
from which each makes weights_f8 of all experts: the same bits as quantising weights that were gathered in that type. Gradients,
optimizer and checkpoints stay as they are.

weights_f8 has each matrix twice, as it is and transposed. The forward reads the first, CUDA's backward the other, so a gather
sends what is read next. If more is read before the next gather, a rank transposes the bytes itself: where fully_shard keeps the
weights after the forward, where a checkpoint computes the forward again, and on the CPU.
"""

import functools

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from . import _f8, functional
from .module import MoE

__all__ = ["gather_quantized"]

_aten = torch.ops.aten
_LAYER = "_smoe_gathered"  # the attribute of the module with the parameters: its _Layer
_ALIGN, _GROUP = 256, 256  # MOE_PART_ALIGN, MOE_F8_DH_FEATURES of the library


def _views(buffer: Tensor, w1: tuple[int, ...], w2: tuple[int, ...]) -> dict[str, Tensor]:
    """The parts of weights_f8 of matrices with these shapes: moe_f8_weights_at of src/f8.h."""
    (experts, width, hidden), intermediate = w1, w2[2]
    groups = -(-intermediate // _GROUP)
    shapes = dict(
        w1=w1, w1_t=(experts, hidden, width), w2=w2, w2_t=(experts, intermediate, hidden), scale1=(experts, 1), scale2=(experts, 1),
        group1=(experts, groups), group2=(experts, groups),
    )  # fmt: skip
    found, start = {}, 0
    for name, shape in shapes.items():
        dtype = torch.uint8 if name.startswith("w") else torch.float32
        size = torch.Size(shape).numel() * dtype.itemsize
        found[name] = buffer[start : start + size].view(dtype).view(shape)
        start += -(-size // _ALIGN) * _ALIGN
    return found


class _Layer:
    """weights_f8 of a layer whose weights are gathered. `have` names the matrices that are in it; w1_t is w1 transposed."""

    def __init__(self, of_weights: dict) -> None:
        self.of_weights = of_weights
        self.waiting: dict[str, tuple] = {}
        self.buffer, self.views, self.have = None, {}, set()

    def __reduce__(self) -> tuple:  # a copy of the module, or one from a file, has other weights
        return _Layer, (self.of_weights,)

    def inputs(self, name: str, experts: nn.Module, ranks: int) -> tuple[tuple[Tensor, Tensor], tuple]:
        """What this rank sends of w1 or w2, bytes and scales, and what its fsdp_post_all_gather gets besides. One call quantises
        both; the other matrix waits for its own call."""
        if name not in self.waiting:
            shards = [getattr(getattr(experts, label), "_local_tensor", None) for label in (experts.up_name, "down_proj")]
            if not all(isinstance(shard, _Shard) for shard in shards):
                raise ValueError("smoe.fsdp: one weight of a layer is sharded without the other; expected fully_shard(layer)")
            w1, w2 = (shard.plain for shard in shards)
            parts = _views(_f8.quantize_weights(w1, w2, **self.of_weights), w1.shape, w2.shape)
            shapes = [(ranks * shape[0], *shape[1:]) for shape in (w1.shape, w2.shape)]
            side = "_t" if torch._C._current_graph_task_id() != -1 else ""  # whether a backward runs
            for one in ("w1", "w2"):
                scales = torch.cat([parts["scale" + one[1]], parts["group" + one[1]]], 1)
                self.waiting[one] = (parts[one + side], scales), (self, one + side, shapes, scales)
        return self.waiting.pop(name)

    def put(self, name: str, shapes: list, matrix: Tensor, scales: Tensor) -> None:
        """Writes what was gathered of all ranks into weights_f8."""
        if self.buffer is None:
            like = torch.empty(shapes[1], dtype=torch.bfloat16, device="meta")
            record = functional.layer_record("smoe.fsdp", like, like, None, entry="from_topk", topk=1, compute="f8", **self.of_weights)
            self.buffer = matrix.new_empty(_f8.weights_bytes(record))
            self.views = _views(self.buffer, *shapes)
        self.views[name].copy_(matrix)
        self.views["scale" + name[1]].copy_(scales[:, :1])
        self.views["group" + name[1]].copy_(scales[:, 1:])
        self.have -= {name[:2], name[:2] + "_t"}
        self.have.add(name)

    def weights(self, backward: bool) -> Tensor:
        """weights_f8 with all that the forward, or the backward, reads of it."""
        if self.buffer.untyped_storage().size() == 0:
            raise RuntimeError("smoe.fsdp: the weights of the layer are not gathered; expected a call by fully_shard's hooks")
        names = ["w1", "w2"] if not backward or self.buffer.device.type == "cpu" else []
        for name in names + (["w1_t", "w2_t"] if backward else []):
            if name not in self.have:
                other = name[:2] if name.endswith("_t") else name + "_t"
                self.views[name].copy_(self.views[other].transpose(1, 2))
                self.have.add(name)
        return self.buffer


class _Shard(Tensor):
    """`plain`, a parameter or this rank's part of it, with the two functions by which fully_shard gathers it. Every operation
    computes with `plain`; those by which fully_shard and nn.Module make one parameter of another keep the class."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _KEEP = {
        _aten.detach.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.view.default, _aten.as_strided.default,
        _aten.new_zeros.default, _aten.new_empty.default, _aten.empty_like.default, _aten.clone.default, _aten.copy_.default,
        _aten._to_copy.default, _aten._pin_memory.default,
    }  # fmt: skip

    @staticmethod
    def __new__(cls, plain: Tensor, which: str) -> "_Shard":
        return cls._make_wrapper_subclass(cls, plain.size(), strides=plain.stride(), dtype=plain.dtype, device=plain.device)

    def __init__(self, plain: Tensor, which: str) -> None:
        self.plain, self.which = plain, which

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = functools.partial(tree_map_only, cls, lambda shard: shard.plain)
        found = func(*plain(args), **plain(kwargs or {}))
        if func not in cls._KEEP or not isinstance(args[0], cls):
            return found
        return tree_map_only(Tensor, lambda made: cls(made, args[0].which), found)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.plain.__reduce_ex__(protocol)  # files have plain tensors

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        if (self.shape[0] * mesh.size(), *self.shape[1:]) != tuple(outer_size):
            raise ValueError(
                f"smoe.fsdp: of a weight of shape {tuple(outer_size)} one of {mesh.size()} ranks has {tuple(self.shape)}; expected "
                "the same number of whole experts on each rank"
            )
        return module.__dict__[_LAYER].inputs(self.which, module, mesh.size())

    def fsdp_post_all_gather(self, outputs, sent, param_dtype, *, out=None):
        layer, name, shapes, scales = sent
        layer.put(name, shapes, outputs[0], outputs[1] if len(outputs) > 1 else scales)  # one rank gets its first tensor alone
        if out is None:
            return _Gathered(layer, torch.Size(shapes[self.which == "w2"]), param_dtype), (layer.buffer,)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class _Gathered(Tensor):
    """A parameter of all experts, without values: the layer's weights_f8 has its bytes. Gradients belong to it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, gathered_f8: _Layer, size: torch.Size, dtype: torch.dtype) -> "_Gathered":
        return cls._make_wrapper_subclass(cls, size, dtype=dtype, device=gathered_f8.buffer.device)

    def __init__(self, gathered_f8: _Layer, size: torch.Size, dtype: torch.dtype) -> None:
        self.gathered_f8 = gathered_f8

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (_aten.detach.default, _aten.as_strided.default):  # by which fully_shard makes a parameter
            return cls(args[0].gathered_f8, args[0].shape, args[0].dtype)
        if func is _aten.zeros_like.default:  # the gradient of a weight that no token needed
            return torch.zeros(args[0].shape, dtype=(kwargs or {}).get("dtype") or args[0].dtype, device=args[0].device)
        raise NotImplementedError(f"smoe.fsdp: {func} of a weight that was gathered in 8 bits; its values are in the ranks' shards alone")


def gather_quantized(model: nn.Module) -> None:
    """Prepares each smoe.MoE of the model that has `compute` for fully_shard, which is to be called afterwards: it will gather the
    experts' matrices as bytes. The ranks of fully_shard's mesh must divide the experts."""
    function, found = "smoe.fsdp.gather_quantized", False
    for name, layer in model.named_modules():
        if not isinstance(layer, MoE) or layer.options.get("compute") is None:
            continue
        experts, found = layer.experts, True
        for which, label in (("w1", experts.up_name), ("w2", "down_proj")):
            value = getattr(experts, label)
            if type(value) is not nn.Parameter:
                where = ".".join(part for part in (name, "experts", label) if part)
                raise TypeError(f"{function}: {where} is a {type(value).__name__}; expected an nn.Parameter, as before fully_shard")
            setattr(experts, label, nn.Parameter(_Shard(value.detach(), which), value.requires_grad))
        options = {"activation": "swiglu", "layout": "concatenated"} | layer.options
        experts.__dict__[_LAYER] = _Layer({name: options[name] for name in ("activation", "layout")})
    if not found:
        raise ValueError(f"{function}: the model has no smoe.MoE with compute")
