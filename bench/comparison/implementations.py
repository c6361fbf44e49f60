"""The implementations of the layer. Each imports its packages in `load`, in the process that measures it.

All compute O (T, d) from X (T, d), ids and weights (T, K), W1 and W2, with SwiGLU, in the type of X. The gradients of
the weights have that type too.
"""

import contextlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from . import deepgemm, torchao_f8


class Job:
    """What is measured by turns."""

    def turn(self):
        """A context manager that is entered for each of its turns."""
        return contextlib.nullcontext()


class Implementation(Job):
    """One implementation. `load` imports it (ImportError: not installed), `bind` returns the function for a layer's
    weights. The class attributes are the command that installs it, the packages whose versions are recorded, the
    devices on which it runs, and the layouts of its weights (inputs.py)."""

    name, install, packages, devices = "", "", ("torch",), ("cuda",)
    w1_layout, w2_layout = "concatenated", ""

    def load(self):
        pass

    def check_code(self):
        """Raises an error if what was compiled in the first call is not what should be measured."""

    def given(self, ids, weights, E, dtype):
        """The routing in the form that `bind`'s function takes, for X of `dtype`. The last tensor is the one that has a
        gradient."""
        return ids, weights.to(dtype)

    def by_token(self, gradient, ids):
        """dS (T, K), made from the gradient of the last tensor of `given`."""
        return gradient

    def bind(self, shape, w1, w2):
        """A function (x, *given) -> O; w1 and w2 are parameters in this implementation's layouts."""
        raise NotImplementedError

    def bind_layer(self, shape, w1, w2, router_weight):
        """A function x -> O of the whole layer: router, softmax over the K best logits, experts."""
        experts = self.bind(shape, w1, w2)

        def layer(x):
            values, ids = F.linear(x, router_weight).float().topk(shape.K, dim=-1)
            return experts(x, *self.given(ids, values.softmax(-1), shape.E, x.dtype))

        return layer


class Smoe(Implementation):
    name, install, packages, devices = "smoe", "pip install .", ("smoe", "torch"), ("cuda", "cpu")
    w1_layout, options = "interleaved", {}

    def load(self):
        import smoe

        self.package = smoe
        smoe.experts  # noqa: B018, loads the library

    def given(self, ids, weights, E, dtype):
        return ids.int(), weights.float()

    def bind(self, shape, w1, w2):
        experts, options = self.package.experts, {"layout": self.w1_layout} | self.options
        return lambda x, ids, weights: experts(x, ids, weights, w1, w2, **options)

    def bind_layer(self, shape, w1, w2, router_weight):
        moe, options = self.package.moe, {"top_k": shape.K, "score": "topk_softmax", "layout": self.w1_layout} | self.options
        return lambda x: moe(x, router_weight, w1, w2, **options).out


class SmoeConcatenated(Smoe):
    """smoe with the other layout of W1: gate rows, then up rows."""

    name, w1_layout = "smoe-concatenated", "concatenated"


class SmoePortable(Smoe):
    """smoe's portable kernels on a GPU that has kernels of its own: its turns have contexts of their own."""

    name, devices = "smoe-portable", ("cuda",)

    def load(self):
        super().load()
        from smoe import _context

        self.module, self.contexts = _context, (threading.local(), {})

    @contextlib.contextmanager
    def turn(self):
        module, before = self.module, (self.module._local, self.module._idle, os.environ.get("SMOE_KERNELS", "best"))
        (module._local, module._idle), os.environ["SMOE_KERNELS"] = self.contexts, "portable"
        try:
            yield
        finally:
            module._local, module._idle, os.environ["SMOE_KERNELS"] = before

    def check_code(self):
        for context in self.module._local.contexts.values():
            kernels = self.package.native.library.smoe_kernels_string(context.handle).decode()
            if "portable" not in kernels:
                raise RuntimeError(f"the kernels are {kernels!r}")


class SmoeF8(Smoe):
    """smoe's fp8, beside the bf16 of the others: all GEMMs in e4m3, the weights quantised in every forward."""

    name, options = "smoe-f8", {"compute": "f8"}


class SonicMoe(Implementation):
    name, packages = "sonicmoe", ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "torch")
    install = (
        "pip install --no-deps sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2 "
        "nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5"
    )
    w1_layout = "interleaved"

    def load(self):
        from sonicmoe import functional
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

        self.functional, self.metadata, self.swiglu = functional, TC_topk_router_metadata_triton, ActivationType.SWIGLU

    def given(self, ids, weights, E, dtype):
        return ids.int(), weights.float()

    def bind(self, shape, w1, w2):
        """SonicMoE's two autograd functions on given routing, with the metadata that SonicMoE's layer would make."""
        E, K, functional = shape.E, shape.K, self.functional
        up_weight, down_weight = w1.permute(1, 2, 0), w2.permute(1, 2, 0)

        def experts(x, ids, weights):
            rows, T = ids.numel(), x.shape[0]
            integers = lambda count: torch.empty(count, dtype=torch.int32, device=x.device)
            counts, offsets = integers(E), integers(E + 1)
            gather, scatter, reverse = integers(rows), integers(rows), integers(rows)
            self.metadata(ids, E, counts, offsets, gather, scatter, reverse)
            maps = (gather, scatter, reverse, None, False, self.swiglu)
            alone = not torch.is_grad_enabled()  # SonicMoE's inference mode, which does not write H
            a, h = functional._UpProjection.apply(x, up_weight, None, offsets, rows, K, *maps, alone, False)
            return functional._DownProjection.apply(a, h, down_weight, None, weights, offsets, T, K, *maps)

        return experts

    def bind_layer(self, shape, w1, w2, router_weight):
        call, K = self.functional.moe_TC_softmax_topk_layer, shape.K
        up_weight, down_weight = w1.permute(1, 2, 0), w2.permute(1, 2, 0)

        def layer(x):
            stream = torch.cuda.current_stream().cuda_stream
            alone = not torch.is_grad_enabled()
            return call(x, router_weight, up_weight, None, down_weight, None, K, stream, self.swiglu, alone)[0]

        return layer


class ScatterMoe(Implementation):
    name, packages = "scattermoe", ("scattermoe", "triton", "torch")
    install = "pip install a clone of github.com/shawntan/scattermoe at 47b5e15"
    w1_layout = "up_first"

    def load(self):
        from scattermoe.mlp import GLUMLP

        self.module = GLUMLP

    def bind(self, shape, w1, w2):
        with torch.device("meta"):
            module = self.module(shape.d, shape.n, shape.E, shape.K)
        module.experts.weight, module.output_experts.weight = w1, w2
        return lambda x, ids, weights: module(x, weights, ids)


class Momoe(Implementation):
    name, packages = "momoe", ("momoe", "triton", "torch")
    install = "pip install einops and a clone of github.com/tilde-research/MoMoE-impl at d6e2d68"
    w1_layout, w2_layout = "up_first transposed", "transposed"
    SAVE_PERCENT = 100  # MoMoE's fastest setting: everything is kept for the backward

    def load(self):
        from momoe.momoe import MoEFunction

        self.function = MoEFunction

    def given(self, ids, weights, E, dtype):
        """A mask (E, T) of ones and zeros, and the weights (E, T), which are zero where the mask is zero."""
        chosen, size = ids.t(), (E, ids.shape[0])
        mask = torch.zeros(size, dtype=torch.int32, device=ids.device).scatter(0, chosen, 1)
        dense = torch.zeros(size, dtype=dtype, device=ids.device)
        return mask, dense.scatter(0, chosen, weights.t().to(dtype))

    def by_token(self, gradient, ids):
        return gradient.t().gather(1, ids)

    def bind(self, shape, w1, w2):
        def experts(x, mask, weights):
            return self.function.apply(x[None], w1, w2, mask, weights, shape.K, self.SAVE_PERCENT)[0].flatten(0, 1)

        return experts


class Liger(Implementation):
    name, packages = "liger", ("liger_kernel", "triton", "torch")
    install = "pip install a clone of github.com/linkedin/Liger-Kernel at the head of pull request 1294"

    def load(self):
        from liger_kernel.ops import LigerFusedMoEFunction

        self.function = LigerFusedMoEFunction

    def given(self, ids, weights, E, dtype):
        return ids.int(), weights.to(dtype)

    def bind(self, shape, w1, w2):
        return lambda x, ids, weights: self.function.apply(x, w1, w2, ids, weights)


class DeepGemm(Implementation):
    """DeepGEMM's grouped GEMMs, and what is around them (deepgemm.py)."""

    name, packages, install = "deepgemm", ("sgl-deep-gemm", "torch"), "pip install sgl-deep-gemm==0.1.5.post1"

    def load(self):
        import deep_gemm

        self.use(deep_gemm, torch.compile)

    def use(self, gemm, compiled):
        functions = (deepgemm.gather, deepgemm.activate, deepgemm.activate_backward, deepgemm.scatter)
        self.made = SimpleNamespace(gemm=gemm, sort=deepgemm.sort, **{one.__name__: compiled(one) for one in functions})

    def bind(self, shape, w1, w2):
        return lambda x, ids, weights: deepgemm.Experts.apply(x, ids, weights, w1, w2, self.made)


class TorchaoF8(Implementation):
    """torchao's grouped GEMMs in fp8, and what is around them (torchao_f8.py)."""

    name, packages, install = "torchao-f8", ("torchao", "torch"), "pip install torchao==0.18.0"

    def load(self):
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

        self.use(_to_fp8_rowwise_then_scaled_grouped_mm, torch.compile)

    def use(self, grouped_mm, compiled):
        functions = (torchao_f8.gather, deepgemm.activate, torchao_f8.scatter_backward, deepgemm.scatter)
        self.made = SimpleNamespace(grouped_mm=grouped_mm, **{one.__name__: compiled(one) for one in functions})

    def bind(self, shape, w1, w2):
        return lambda x, ids, weights: torchao_f8.experts(x, ids, weights, w1, w2, self.made)


class ByMmaSync:
    """The same implementation in a process whose variables make Triton multiply by mma.sync (processes.py)."""

    def check_code(self):
        codes = [path.read_text() for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.ptx")]
        if any("wgmma" in code for code in codes) or not any("mma.sync" in code for code in codes):
            raise RuntimeError(f"{len(codes)} kernels of Triton: not by mma.sync, or also by wgmma")


class ScatterMoeMma(ByMmaSync, ScatterMoe):
    name = "scattermoe-mma"


class MomoeMma(ByMmaSync, Momoe):
    name = "momoe-mma"


class LigerMma(ByMmaSync, Liger):
    name = "liger-mma"


class GroupedMm(Implementation):
    """What torchtitan does: sort the pairs by expert, gather, torch._grouped_mm, scatter; compiled."""

    name, install = "grouped_mm", "pip install 'torch>=2.8'"

    def load(self):
        if not hasattr(torch, "_grouped_mm"):
            raise ImportError("this torch has no torch._grouped_mm")

    @staticmethod
    def _experts(shape, w1, w2):
        E, K = shape.E, shape.K

        def experts(x, ids, weights):
            flat = ids.flatten()
            order = flat.argsort()
            token = order // K
            offsets = torch.bincount(flat, minlength=E).cumsum(0).int()
            gate, up = torch._grouped_mm(x[token], w1.transpose(1, 2), offs=offsets).chunk(2, -1)
            y = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
            return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order][:, None])

        return experts

    def bind(self, shape, w1, w2):
        return torch.compile(self._experts(shape, w1, w2))

    def bind_layer(self, shape, w1, w2, router_weight):
        experts = self._experts(shape, w1, w2)

        def layer(x):
            values, ids = F.linear(x, router_weight).float().topk(shape.K, dim=-1)
            return experts(x, ids, values.softmax(-1).to(x.dtype))

        return torch.compile(layer)


class Transformers(Implementation):
    """Transformers' OLMoE experts with experts_implementation="grouped_mm", as a model runs them: eager."""

    name, packages, install = "transformers", ("transformers", "torch"), "pip install 'transformers>=5.17'"
    devices = ("cuda", "cpu")

    def load(self):
        from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

        self.module, self.config = OlmoeExperts, OlmoeConfig

    def bind(self, shape, w1, w2):
        config = self.config(
            hidden_size=shape.d, intermediate_size=shape.n, num_experts=shape.E, num_experts_per_tok=shape.K
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            module = self.module(config)
        module.gate_up_proj, module.down_proj = w1, w2
        return lambda x, ids, weights: module(x, ids, weights)


class Loop(Implementation):
    """A loop over the experts in plain PyTorch, for comparisons on the CPU."""

    name, install, devices = "loop", "pip install torch", ("cpu",)

    def bind(self, shape, w1, w2):
        def experts(x, ids, weights):
            out = torch.zeros_like(x)
            for e in range(shape.E):
                token, slot = (ids == e).nonzero(as_tuple=True)
                gate, up = F.linear(x[token], w1[e]).chunk(2, -1)
                y = F.linear(F.silu(gate) * up, w2[e])
                out = out.index_add(0, token, weights[token, slot, None] * y)
            return out

        return experts


class Bound(Job):
    """Not an implementation of the layer: only batched GEMMs (torch.bmm, cuBLAS) with the layer's FLOPs and equal
    counts."""

    name, install, packages, devices = "cublas", "pip install torch", ("torch",), ("cuda", "cpu")

    def load(self):
        pass

    def jobs(self, inputs):
        """{pass: job} for "forward" and "both", and a factor for the times. The factor is above 1 if the rows do not
        divide by the number of experts, since the GEMMs then have fewer rows."""
        shape, rows = inputs.shape, inputs.shape.T * inputs.shape.K
        batch = min(shape.E, rows)
        each = max(1, rows // batch)
        normal = lambda columns: torch.randn(batch, each, columns, device=inputs.x.device, dtype=inputs.x.dtype)
        x, a, h = normal(shape.d), normal(shape.n), normal(2 * shape.n)
        w1, w2 = inputs.w1[:batch], inputs.w2[:batch]

        def forward():
            torch.bmm(x, w1.transpose(1, 2))
            torch.bmm(a, w2.transpose(1, 2))

        def backward(_):
            torch.bmm(x, w2)  # dA
            torch.bmm(x.transpose(1, 2), a)  # dW2
            torch.bmm(h, w1)  # dX by row
            torch.bmm(h.transpose(1, 2), x)  # dW1

        return {"forward": forward, "both": (forward, backward)}, rows / (batch * each)


ALL = {
    made.name: made
    for made in (
        Smoe(), SmoeConcatenated(), SmoePortable(), SmoeF8(), SonicMoe(), ScatterMoe(), ScatterMoeMma(), Momoe(), MomoeMma(), Liger(),
        LigerMma(), DeepGemm(), TorchaoF8(), GroupedMm(), Transformers(), Loop(), Bound()
    )
}  # fmt: skip
