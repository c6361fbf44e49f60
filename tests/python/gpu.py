#!/usr/bin/env python3
"""Checks the Python package on a GPU: results in all ways in which PyTorch runs a layer, host times, memory,
Transformers.

usage: SMOE_LIBRARY=libsmoe.so tests/python/gpu.py [--only NAME[,NAME...]] [--list] [--device cpu [--bf16]]

Needs torch; the part on Transformers also needs Transformers. Prints one line for each finding: part, what was checked,
figure, limit, verdict. A part that raises an exception is one failed finding, and the next part runs. Exit 0: nothing
failed, 1: something did. --device cpu runs the parts that can run there, in float32, to test this script itself. A run
should take less than four minutes on one H200; the part `ep`, on several GPUs, two more. The parts are functions in
gpu_numerics.py, gpu_pytorch.py, gpu_host.py, gpu_speed.py, gpu_transformers.py, gpu_f8.py and gpu_ep.py, which share gpu_parts.py.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

# Each of these files registers its parts in PARTS; they run in the order of these imports.
import gpu_ep  # noqa: E402, F401
import gpu_f8  # noqa: E402, F401
import gpu_host  # noqa: E402, F401
import gpu_numerics  # noqa: E402, F401
import gpu_pytorch  # noqa: E402, F401
import gpu_speed  # noqa: E402, F401
import gpu_transformers  # noqa: E402, F401
import torch  # noqa: E402
from gpu_parts import FINDINGS, PARTS, find, target  # noqa: E402

import smoe  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts by name, joined by commas")
    parser.add_argument("--list", action="store_true", help="the parts")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--bf16", action="store_true", help="on the CPU bfloat16 instead of float32")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(PARTS))
        return 0
    if arguments.device == "cpu":
        target.device, target.dtype = "cpu", torch.bfloat16 if arguments.bf16 else torch.float32
    elif not torch.cuda.is_available():
        print("no GPU")
        return 77
    chosen = [name for name in arguments.only.split(",") if name] or list(PARTS)
    print("torch", torch.__version__, "python", sys.version.split()[0], smoe.build_info(), torch.cuda.get_device_name() if target.device == "cuda" else "cpu")  # fmt: skip
    begin = time.perf_counter()
    for name in chosen:
        function, cuda_only = PARTS[name]
        if cuda_only and target.device != "cuda":
            continue
        target.part, start = name, time.perf_counter()
        try:
            function()
        except Exception as caught:
            traceback.print_exc()
            find(f"raised {type(caught).__name__}", False, str(caught).splitlines()[0][:60] if str(caught) else "")
        print(f"{name:14} took {time.perf_counter() - start:.1f} s", flush=True)
    failed = [finding for finding in FINDINGS if not finding[-1]]
    print(f"\n{time.perf_counter() - begin:.0f} s. {len(FINDINGS) - len(failed)} passed, {len(failed)} failed")
    for name, what, figure, limit, _ in failed:
        print(f"  FAILED {name}: {what} {figure} (limit {limit})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
