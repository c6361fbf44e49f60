"""src/f8.h against torch's float8_e4m3fn, by the program f8_codes of a CMake build: SMOE_BUILD names the build folder."""
import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = Path(os.environ.get("SMOE_BUILD", Path(__file__).resolve().parents[2] / "build" / "release")) / "tests" / "f8_codes"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built (SMOE_BUILD)")


def run(data, *arguments):
    return subprocess.run([PROGRAM, *arguments], input=data, capture_output=True, check=True, timeout=60).stdout


def test_all_codes_have_the_values_of_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float()
    got = torch.frombuffer(bytearray(run(codes.numpy().tobytes(), "decode")), dtype=torch.float32)
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


def test_all_values_have_the_codes_of_torch():
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(torch.float16).float()
    random = torch.randn(200_000, generator=torch.Generator().manual_seed(1)).mul(5).exp2()
    values = torch.cat([halves, random, -random, torch.tensor([1e-45, -1e-45, 2.0**-10, 3 * 2.0**-10])])
    values = values[~values.isnan()]
    # torch gives NaN beyond the largest number, smoe saturates.
    want = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    got = torch.frombuffer(bytearray(run(values.numpy().tobytes())), dtype=torch.uint8)
    assert torch.equal(got, want)
