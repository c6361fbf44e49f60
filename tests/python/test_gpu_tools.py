"""tools/gpu_peers.sh, gpu_fsdp2.sh and gpu_python.sh on a machine without a GPU: an invented nvidia-smi, packs made here.
Whatever is under $OUT comes back from a GPU machine, so it must hold the results so far at any time."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import argparse, json
options, _ = (p := argparse.ArgumentParser(), p.add_argument("--json"), p.add_argument("--experts"))[0].parse_known_args()
ends = dict(kind="end", processes=1, step_ms=1.0, tokens_per_s=1.0, tokens_per_s_each=1.0, tokens_per_day_each=1.0)
losses = dict(kind="step", step=1, loss=2.0 if options.experts == "smoe" else 2.5)
open(options.json, "a").write("".join(json.dumps(x) + "\\n" for x in (losses, dict(ends, memory_gib=1.0))))
"""
FINETUNE = """
import glob, os, sys
assert sys.argv[-2:] == ["--modes", "lora"], sys.argv
assert glob.glob(os.environ["OUT"] + "/table.md"), "the part before has left nothing"
open(sys.argv[sys.argv.index("--json") + 1], "a").write("{}\\n")
"""


def pack(folder, script, files):
    """A folder as `tools/SCRIPT pack` leaves it: files {place in the pack: file, folder or text}."""
    inside = folder / "inside"
    (inside / "lib").mkdir(parents=True)
    for place, what in files.items():
        target = inside / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(what, str):
            target.write_text(what)
        elif what.is_dir():
            shutil.copytree(what, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(what, target)
    for name in (script, "gpu_common.sh"):
        shutil.copy(ROOT / "tools" / name, folder)
    with tarfile.open(folder / "pack.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(inside, ".")
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'GPU 0: invented'\n")
    smi.chmod(0o755)


def run(folder, script, *arguments, **variables):
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(folder / "out"), "OMP_WAIT_POLICY": "passive"}
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | variables
    line = [str(folder / script), "run", str(folder), *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def pack_site(path, *places):
    """An archive of empty Python packages, as `tools/gpu_peers.sh pack` writes it."""
    with tarfile.open(path, "w:xz") as archive:
        for place in places:
            archive.addfile(tarfile.TarInfo(f"./{place}/__init__.py"))


PACKAGES = ("sonicmoe", "quack", "tvm_ffi", "scattermoe", "einops", "momoe")


@pytest.fixture
def peers(tmp_path):
    pack_site(tmp_path / "site.tar.xz", *PACKAGES)
    files = {"bench": ROOT / "bench", "python": ROOT / "python", "docs/shapes.csv": ROOT / "docs/shapes.csv"}
    files |= {"lib/libsmoe.so": Path(os.environ["SMOE_LIBRARY"]), "commit": "c1\n"}
    pack(tmp_path, "gpu_peers.sh", files)
    return tmp_path


def test_packages_one_folder_too_deep_are_not_packed(tmp_path):
    """They could not be imported on the GPU machine, which would be found out only there."""
    site = tmp_path / "site"
    for place in ("sonicmoe/sonicmoe", "scattermoe", "einops", "momoe"):
        (site / place).mkdir(parents=True)
        (site / place / "__init__.py").touch()
    line = [str(ROOT / "tools/gpu_peers.sh"), "pack", os.environ["SMOE_BUILD"], str(tmp_path / "packed"), str(site)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "has no package sonicmoe" in done.stderr, done.stderr
    assert not list((tmp_path / "packed").glob("*.xz*"))
    earlier = tmp_path / "packed/site.tar.xz"
    earlier.parent.mkdir(exist_ok=True)
    pack_site(earlier, *PACKAGES[:4], "einops/einops", "momoe")
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "site.tar.xz has no package einops" in done.stderr, done.stderr
    earlier.write_bytes(earlier.read_bytes()[:-40])
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "has no package" not in done.stderr and "pack.tar.gz" not in os.listdir(earlier.parent)
    pack_site(earlier, *PACKAGES)
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and {"pack.tar.gz", "gpu_peers.sh"} <= set(os.listdir(earlier.parent)), done.stderr


@pytest.mark.parametrize("script", ["gpu_peers.sh", "gpu_fsdp2.sh"])
def test_packages_that_are_missing_end_a_run(peers, script):
    """smoe would be measured alone, for minutes."""
    pack_site(peers / "site.tar.xz", *PACKAGES[:3], *PACKAGES[4:])
    shutil.copy(ROOT / "tools" / script, peers)
    done = run(peers, script, "two", PEERS=str(peers))
    assert done.returncode == 3 and "site.tar.xz has no package scattermoe" in done.stderr, done.stderr
    assert not (peers / "out/table.md").exists() and not (peers / "out/log.txt").exists()


def test_an_unknown_part_is_a_usage_error(tmp_path):
    line = [str(ROOT / "tools/gpu_fsdp2.sh"), "run", str(tmp_path), "two", "nosuch"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "unknown part nosuch" in done.stderr


def test_peers_in_two_lists(peers):
    tiny = "--device cpu --suite tiny --dtype f32 --shape-seconds 0 --settle 0 --timed 0 --peers loop".split()
    done = run(peers, "gpu_peers.sh", *tiny, "--shape", "tiny-a", "--", "--suite", "nosuch", "--", *tiny)
    assert done.returncode == 2, done.stderr  # the status of the list that failed; the next list runs
    found = records(peers / "out/peers.jsonl")
    assert [(r["shape"], r["peer"], r["commit"]) for r in found] == [
        (shape, peer, "c1") for shape in ("tiny-a", "tiny-b") for peer in ("smoe", "loop")]  # fmt: skip
    log = (peers / "out/log.txt").read_text()
    assert log.count("tiny-a experts") == 1 and "--suite nosuch: the suites are" in log and "exit status 2" in log
    assert "tiny-b" in (peers / "out/tables.txt").read_text() and (peers / "out/cache.tar.xz").exists()


STUCK = """
import json, sys, time
if "--show" not in sys.argv:
    value = lambda name: sys.argv[sys.argv.index(name) + 1]
    for path in (value("--records"), value("--copy")):
        open(path, "a").write(json.dumps({"shape": "first"}) + "\\n")
    assert value("--copy").startswith(sys.argv[-1]), "records are copied out of reach"
    time.sleep(60)
"""


def test_peers_that_run_out_of_time(peers):
    """The list that is stuck is ended. The next list must not start, and the first layer's record must be there."""
    shutil.rmtree(peers / "inside/bench")
    (peers / "inside/bench").mkdir()
    (peers / "inside/bench/peers.py").write_text(STUCK)
    with tarfile.open(peers / "pack.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(peers / "inside", ".")
    out = str(peers / "out")
    done = run(peers, "gpu_peers.sh", out, "--", out, BUDGET="48")
    assert done.returncode == 124 and "no time left" in done.stderr + (peers / "out/log.txt").read_text(), done.stderr
    assert records(peers / "out/peers.jsonl") == [{"shape": "first"}]


def test_fsdp2_on_one_gpu(tmp_path):
    """Part losses makes two runs with one GPU. Its table is there before the next part."""
    files = {"examples/train_fsdp2.py": TRAIN, "examples/finetune_transformers.py": FINETUNE}
    pack(tmp_path, "gpu_fsdp2.sh", files | {"gpu_fsdp2_table.py": ROOT / "tools/gpu_fsdp2_table.py"})
    done = run(tmp_path, "gpu_fsdp2.sh", "losses", "lora")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss_grouped_mm and loss_smoe: 1 losses, at most 0.5000 apart" in (tmp_path / "out/table.md").read_text()
    with tarfile.open(tmp_path / "out/logs.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"loss_smoe.jsonl", "loss_grouped_mm.jsonl", "finetune.jsonl"} <= names and "loss_all.jsonl" not in names


CHECKS = """
import os, sys
print("arguments", *sys.argv[1:])
sys.exit(int(os.environ[os.path.basename(sys.argv[0])[:3].upper()]))
"""


def test_python_checks(tmp_path):
    """The status is that of the checks: 1 if one failed, else 77 if one found no GPU. Each leaves a log."""
    files = {"tests/python/gpu.py": CHECKS, "tests/python/jax_gpu.py": CHECKS, "python/smoe/__init__.py": ""}
    pack(tmp_path, "gpu_python.sh", files)

    def status(torch, jax, *arguments):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return run(tmp_path, "gpu_python.sh", *arguments, GPU=str(torch), JAX=str(jax)).returncode

    assert [status(*both) for both in ((0, 0), (0, 77), (77, 1), (1, 77), (3, 0))] == [0, 77, 1, 1, 1]
    assert status(0, 1, "torch", "--", "--only", "host") == 0
    assert (tmp_path / "out/torch.log").read_text() == "arguments --only host --device cuda\n"
    assert not (tmp_path / "out/jax.log").exists()
    assert status(0, 0, "numpy") == 2


def test_compare_losses(tmp_path):
    """Means over lines compare the curves. A single loss that is off does not count, a curve that is off does."""
    smooth = [3 - i / 30 for i in range(30)]
    curves = {"smooth": smooth, "one": [1.02 * x if i == 7 else x for i, x in enumerate(smooth)]}
    curves |= {"higher": [x * (1.015 if i >= 10 else 1) for i, x in enumerate(smooth)], "short": smooth[:4]}
    for name, losses in curves.items():
        (tmp_path / name).write_text("".join(json.dumps({"loss": x}) + "\n" for x in losses))

    def compare(other, *arguments):
        line = [sys.executable, ROOT / "tools/gpu_train.py", "compare", tmp_path / "smooth", tmp_path / other, "0.01"]
        done = subprocess.run([*line, *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout

    assert [compare(other)[0] for other in ("smooth", "one", "higher", "short")] == [0, 1, 1, 1]
    assert [compare(other, "5")[0] for other in ("smooth", "one", "higher", "short")] == [0, 0, 1, 1]
    assert "means over 5 lines 4.0" in compare("one", "5")[1] and "1.96e-02 of single lines" in compare("one", "5")[1]


@pytest.mark.parametrize("script", ["gpu_train.sh", "gpu_peers.sh", "gpu_fsdp2.sh", "gpu_python.sh"])
def test_usage(script):
    done = subprocess.run([str(ROOT / "tools" / script)], capture_output=True, text=True)
    assert done.returncode == 2 and f"tools/{script} pack" in done.stderr, done.stderr
    assert "shellcheck" not in done.stderr  # a line for another reader
