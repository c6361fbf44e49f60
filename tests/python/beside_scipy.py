"""The package smoe with the OpenBLAS that it brings, beside NumPy's and SciPy's own in one process. The three libraries have
symbols of the same names. usage: beside_scipy.py FIRST   FIRST: smoe or scipy, which is imported first."""

import ctypes
import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "2"


def use_scipy():
    import numpy as np
    import scipy.linalg

    a = np.random.default_rng(1).integers(-8, 8, (96, 96)).astype(np.float32)  # products are exact
    exact = (a.astype(np.int64) @ a.astype(np.int64)).astype(np.float32)
    assert np.array_equal(a @ a, exact), "numpy"
    assert np.array_equal(scipy.linalg.blas.sgemm(1.0, a, a), exact), "scipy"


def use_smoe():
    import torch

    import smoe

    torch.manual_seed(1)
    x, w1, w2 = torch.randn(40, 48), torch.randn(4, 64, 48), torch.randn(4, 48, 32)
    ids, weights = torch.randint(0, 4, (40, 1)), torch.rand(40, 1)
    out = smoe.experts(x, ids, weights, w1, w2)
    rows = torch.einsum("td,tnd->tn", x, w1[ids[:, 0]])
    rows = torch.nn.functional.silu(rows[:, :32]) * rows[:, 32:]
    torch.testing.assert_close(out, weights * torch.einsum("tn,tdn->td", rows, w2[ids[:, 0]]), rtol=1e-4, atol=1e-3)


def loaded():
    """The OpenBLAS libraries of this process by folder."""
    paths = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    return {Path(path).parent.name: path for path in paths}


def threads(folder, suffix=""):
    return getattr(ctypes.CDLL(loaded()[folder]), f"scipy_openblas_get_num_threads{suffix}")()


order = [use_smoe, use_scipy] if sys.argv[1] == "smoe" else [use_scipy, use_smoe]
for use in [*order, *order]:
    use()
assert set(loaded()) == {"lib", "numpy.libs", "scipy.libs"}, loaded()
found = threads("lib"), threads("numpy.libs", "64_"), threads("scipy.libs")
assert found == (2, 2, 2), f"threads of OpenBLAS changed: {found}"
