#!/usr/bin/env python3
"""Transformers' own test of experts functions, with smoe in place of one of them.

usage: SMOE_LIBRARY=libsmoe.so tools/transformers_experts_test.py FOLDER [pytest's options]

FOLDER is a checkout of Transformers, or its unpacked source distribution (pip download --no-binary :all: --no-deps
transformers==5.23.0), of the installed version. The test, test_eager_matches_batched_and_grouped_inference of
tests/test_modeling_common.py, compares every experts function with "eager" in float32, float16 and bfloat16. Here "batched_mm"
is smoe's function, for tiny models of five types. Needs torch, transformers, parameterized and pytest. A case in which smoe's
function computed nothing itself (float16 on the CPU and float32 on a GPU run as eager) is skipped. The test of 5.17 compares bfloat16 to
1e-4, less than its last digit, and fails at times; that of 5.23 allows 5e-3. Exit status: pytest's.
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path

HERE = Path(__file__).resolve()
SIZES = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2)
TYPES = {  # model type: classes' prefix, what its config calls the sizes
    "olmoe": ("Olmoe", dict(intermediate_size=16, **EXPERTS)),
    "qwen3_moe": ("Qwen3Moe", dict(intermediate_size=16, moe_intermediate_size=16, head_dim=8, **EXPERTS)),
    "mixtral": ("Mixtral", dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2)),
    "deepseek_v3": ("DeepseekV3", dict(
        intermediate_size=16, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)),
    "gpt_oss": ("GptOss", dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, head_dim=8)),
}  # fmt: skip


def common_tests(folder: Path):
    """Transformers' tests/test_modeling_common.py. A source distribution lacks two modules that it imports mixins from."""
    sys.path.insert(0, str(folder))
    for name, mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
        if not (folder / "tests" / (name.replace(".", "/") + ".py")).exists():
            module = types.ModuleType(f"tests.{name}")
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules[f"tests.{name.split('.')[0]}"] = types.ModuleType(f"tests.{name.split('.')[0]}")
            sys.modules[f"tests.{name}"] = module
    return importlib.import_module("tests.test_modeling_common")


def make_tests(folder: Path) -> dict[str, type]:
    """One unittest class for each model type."""
    import transformers

    import smoe.functional
    import smoe.transformers

    common = common_tests(folder)
    common.batched_mm_experts_forward = smoe.transformers.experts_forward
    calls, real = [], smoe.functional.experts
    smoe.functional.experts = lambda *arguments, **options: calls.append(1) or real(*arguments, **options)

    class Inputs:
        def __init__(self, config):
            self.config = config

        def prepare_config_and_inputs_for_common(self):
            ids = common.ids_tensor([3, 7], SIZES["vocab_size"])
            return self.config, {"input_ids": ids, "attention_mask": (ids > -1).long()}

    def make(model_type: str, prefix: str, sizes: dict) -> type:
        class Test(common.ModelTesterMixin, unittest.TestCase):
            all_model_classes = (getattr(transformers, f"{prefix}Model"), getattr(transformers, f"{prefix}ForCausalLM"))

            def setUp(self):
                # With weights of deviation 0.02 the experts change the outputs by less than the test tolerates, so that
                # the test finds only crashes. In half precision a deviation of 0.2 is too large: rounding then changes
                # the routing in the second layer, whichever function computes the experts of the first.
                scale = 0.2 if self._testMethodName.endswith("fp32") else 0.02
                config = transformers.AutoConfig.for_model(model_type, initializer_range=scale, **SIZES, **sizes)
                self.model_tester = Inputs(config)
                calls.clear()

            def tearDown(self):
                if not calls:
                    self.skipTest("smoe computed nothing: the model ran as eager")

        Test.__name__ = Test.__qualname__ = f"Test{prefix}"
        return Test

    return {f"Test{prefix}": make(model_type, prefix, sizes) for model_type, (prefix, sizes) in TYPES.items()}


if __name__ == "__main__":
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "tests/test_modeling_common.py").exists():
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    import pytest

    os.environ.update(TRANSFORMERS_CHECKOUT=str(Path(sys.argv[1]).resolve()), HF_HUB_OFFLINE="1")
    chosen = ["-k", "test_eager_matches_batched_and_grouped_inference"]
    python_files = ["-o", f"python_files={HERE.name}", "-p", "no:cacheprovider", "--rootdir", str(HERE.parents[1])]
    sys.exit(pytest.main(["-q", "-rs", *python_files, *chosen, *sys.argv[2:], str(HERE)]))
elif "TRANSFORMERS_CHECKOUT" in os.environ:  # imported by pytest
    sys.path.insert(0, str(HERE.parents[1] / "python"))
    globals().update(make_tests(Path(os.environ["TRANSFORMERS_CHECKOUT"])))
