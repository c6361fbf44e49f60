"""examples/train_fsdp2.py on gloo: the losses must be the same with 1, 2, 4 and 8 processes, from checkpoints of other
numbers of processes, after a kill, and in `smoe train`."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import train_fsdp2  # noqa: E402

# A file that does not change. With another text a router may have a near tie, and then losses of other numbers of processes
# differ by 1e-4.
TEXT = str(ROOT / "LICENSE")
SETTINGS = ["--device", "cpu", "--lr", "4e-3", "--log-every", "1", "--seed", "5"]
RUN = [*SETTINGS, "--batch", "8"]
STEPS = 8

shards = pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="fully_shard of torch 2.6 needs a GPU: it records an event of the CPU's stream, which has none",
)

# The fork server imports torch once for all processes. It finds modules only by PYTHONPATH.
SPAWN = get_context("forkserver")
SPAWN.set_forkserver_preload(["test_fsdp2", "torch._dynamo", "smoe.functional"])


@pytest.fixture(scope="module", autouse=True)
def server_path():
    with pytest.MonkeyPatch.context() as patch:
        here = [str(Path(__file__).parent), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(here))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def _work(rank, processes, folder, arguments, kill_at):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    import torch.distributed as dist

    if kill_at:
        _kill_at(*kill_at)
    start = dist.init_process_group
    dist.init_process_group = lambda backend, **_: start(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=processes
    )
    with open(f"{folder}/out.{rank}", "w") as out, redirect_stdout(out), redirect_stderr(out):
        sys.exit(train_fsdp2.main(arguments))


def _kill_at(function, step):
    """Ends the process by SIGKILL where it would call os.rename or os.replace on the checkpoint of `step`."""
    real = getattr(os, function)

    def call(source, target):
        if f"step-{step:07d}" in str(source) or (function == "replace" and f"{step:07d}" in os.readlink(source)):
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target)

    setattr(os, function, call)


def train(folder, processes, *arguments, kill_at=None):
    """Runs train_fsdp2.py. Returns the exit statuses of the processes, and the output of process 0."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    work = (str(folder), [*arguments, "--json", str(folder / "log.jsonl")], kill_at)
    crew = [SPAWN.Process(target=_work, args=(rank, processes, *work)) for rank in range(processes)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(150)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in crew], (folder / "out.0").read_text()


def losses(folder):
    """The loss of every step. If a step ran twice, the later loss."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def close(ours, theirs):
    return list(ours) == list(theirs) and list(ours.values()) == pytest.approx(list(theirs.values()), abs=2e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of a run with one process."""
    folder = tmp_path_factory.mktemp("alone")
    status, said = train(folder, 1, TEXT, *RUN, "--steps", str(STEPS))
    assert status == [0], said
    found = losses(folder)
    assert found[STEPS] < found[1] - 0.1
    return found


@shards
def test_four_processes_resume_what_two_began(alone, tmp_path):
    """The second run has no --batch and must use the checkpoint's batch."""
    run = ["--steps", str(STEPS), "--out", str(tmp_path / "out")]
    status, said = train(tmp_path / "two", 2, TEXT, *RUN, *run, "--save-every", "4")
    assert status == [0, 0], said
    assert close(losses(tmp_path / "two"), alone)
    latest = tmp_path / "out/latest"
    latest.unlink()
    latest.symlink_to("step-0000004")
    status, said = train(tmp_path / "four", 4, TEXT, *SETTINGS, *run, "--resume")
    assert status == [0] * 4, said
    assert close(losses(tmp_path / "four"), {step: alone[step] for step in range(5, STEPS + 1)})


@shards
def test_eight_processes_have_the_losses_of_one(alone, tmp_path):
    """With recomputation of the layers, and with weights that stay gathered after the forward."""
    kind = ["--checkpoint", "full", "--zero", "2", "--profile", "2"]
    status, said = train(tmp_path, 8, TEXT, *RUN, "--steps", str(STEPS), *kind)
    assert status == [0] * 8, said
    assert close(losses(tmp_path), alone)
    end = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert 0 < end["communication"] <= 1 and end["processes"] == 8


@shards
def test_expert_parallelism_has_the_losses_of_one_process(alone, tmp_path):
    """Two processes that spread all experts; then four with two copies of them, whose checkpoint goes on without."""
    run = ["--steps", str(STEPS)]
    status, said = train(tmp_path / "two", 2, TEXT, *RUN, *run, "--ep", "2", "--checkpoint", "full")
    assert status == [0, 0] and "experts over 2 processes" in said, said
    assert close(losses(tmp_path / "two"), alone)
    run += ["--out", str(tmp_path / "out")]
    status, said = train(tmp_path / "four", 4, TEXT, *RUN, *run, "--ep", "2", "--save-every", "4")
    assert status == [0] * 4, said
    assert close(losses(tmp_path / "four"), alone)
    latest = tmp_path / "out/latest"
    latest.unlink()
    latest.symlink_to("step-0000004")
    status, said = train(tmp_path / "one", 1, TEXT, *SETTINGS, *run, "--resume")
    assert status == [0], said
    assert close(losses(tmp_path / "one"), {step: alone[step] for step in range(5, STEPS + 1)})
    status, said = train(tmp_path / "three", 3, TEXT, "--device", "cpu", "--ep", "3")
    assert status == [2] * 3 and "--ep 3 does not divide the 8 experts" in said, said


@shards
def test_fp8_experts_are_gathered_as_bytes(alone, tmp_path):
    """Two processes that compute layers again, then four whose weights stay gathered. What they gather is in test_fsdp_f8.py."""
    run = ["--steps", str(STEPS), "--compute", "f8", "--out", str(tmp_path / "out")]
    status, said = train(tmp_path / "two", 2, TEXT, *RUN, *run, "--save-every", "4", "--checkpoint", "full")
    assert status == [0, 0] and "arithmetic f8" in said, said
    found = losses(tmp_path / "two")
    assert found != alone and list(found.values()) == pytest.approx(list(alone.values()), abs=0.05)
    shards = [path.read_bytes() for path in (tmp_path / "out/step-0000004").glob("*.distcp")]
    assert len(shards) == 2 and not any(b"_Shard" in data for data in shards)
    latest = tmp_path / "out/latest"
    latest.unlink()
    latest.symlink_to("step-0000004")
    status, said = train(tmp_path / "four", 4, TEXT, *SETTINGS, *run, "--resume", "--zero", "2")
    assert status == [0] * 4, said
    again = losses(tmp_path / "four")
    assert again == {step: pytest.approx(found[step], abs=0.02) for step in range(5, STEPS + 1)}
    status, said = train(tmp_path / "three", 3, TEXT, "--device", "cpu", "--compute", "f8")
    assert status == [2] * 3 and "3 processes do not divide the 8 experts" in said, said


@shards
@pytest.mark.parametrize("function", ["rename", "replace"])
def test_a_kill_while_saving_leaves_the_last_checkpoint(alone, tmp_path, function):
    """The run is killed before the complete folder gets its name, or before the link points to it."""
    run = [TEXT, *RUN, "--steps", str(STEPS), "--out", str(tmp_path / "out")]
    status, said = train(tmp_path / "a", 1, *run, "--save-every", "3", kill_at=(function, 6))
    assert status == [-signal.SIGKILL], said
    assert os.readlink(tmp_path / "out/latest") == "step-0000003"
    status, said = train(tmp_path / "b", 1, *run, "--save-every", "3", "--resume")
    assert status == [0], said
    assert losses(tmp_path / "b") == {step: alone[step] for step in range(4, STEPS + 1)}  # the same bits
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest", "step-0000006", "step-0000008"]


def smoe_train(folder, *arguments):
    program = os.environ.get("SMOE_PROGRAM")
    if not program:
        pytest.skip("SMOE_PROGRAM names no smoe")
    sizes = "--layers 2 --hidden 32 --heads 4 --experts 8 --intermediate 16 --topk 2 --vocab 256 --context 32".split()
    # Without a validation smoe train would not set text aside, and its samples would be others.
    kept = "--logs 20 --evaluations 1 --last-evaluation-tokens 1 --checkpoints 1 --device cpu --quiet".split()
    subprocess.run(
        [program, "train", "--out", str(folder), "--steps", "20", *sizes, *kept, *arguments],
        check=True, capture_output=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@shards
def test_losses_are_those_of_smoe_train(tmp_path):
    """The same weights and the same folder of text, with load-balance loss, in float32 and in bf16; and token files
    with the eager experts."""
    same = ["--seed", "7", "--batch", "4", "--lr", "0.004", "--balance", "0.01"]
    run = ["--device", "cpu", "--steps", "20", *same]
    reference = [f"--init={tmp_path}/c/step-0000000", f"--compare={tmp_path}/c/train.jsonl"]
    # The text is generated, so that it never changes: at a near tie of two logits torch and smoe may route a token
    # differently.
    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randrange(1, 9))) for _ in range(400)]
    text = tmp_path / "text"
    text.mkdir()
    for name in "ab":
        (text / f"{name}.txt").write_text(" ".join(draw.choices(words, k=20000)))
    smoe_train(tmp_path / "c", *same, str(text))
    for kind in (["--tolerance", "1e-4"], ["--compute", "bf16", "--tolerance", "2e-2"]):
        status, said = train(tmp_path / "p", 1, str(text), *run, *reference, *kind)
        assert status == [0], said
        assert "20 losses" in said
    status, said = train(tmp_path / "p", 1, TEXT, *run, *reference, "--tolerance", "1e-4")  # other text
    assert status == [1] and "NOT within" in said
    tokens = tmp_path / "data.bin"
    tokens.write_bytes(token_file([i * i % 251 for i in range(3000)]))
    smoe_train(tmp_path / "c2", *same, "--renormalize", "--logs", "10", str(tokens), str(tokens))  # means of two losses
    reference = [f"--init={tmp_path}/c2/step-0000000", f"--compare={tmp_path}/c2/train.jsonl", "--tolerance", "1e-4"]
    status, said = train(tmp_path / "p2", 1, str(tokens), str(tokens), *run, *reference, "--experts", "eager")
    assert status == [0] and "10 losses" in said, said


def token_file(tokens):
    header = torch.zeros(256, dtype=torch.int32)
    header[:3] = torch.tensor([20240520, 1, len(tokens)])
    return header.numpy().tobytes() + torch.tensor(tokens, dtype=torch.int16).numpy().tobytes()


USAGE = [  # arguments, part of the message
    ([], "name text files"),
    ([TEXT, "--random"], "not both"),
    (["--random", "--experts", "momoe"], "--experts: invalid choice"),
    (["--random", "--foo"], "unrecognized arguments"),
    (["--random", "--batch", "0"], "0 is less than 1"),
    (["--random", "--resume"], "--resume needs --out"),
    (["--random", "--resume", "--out", "{}/none"], "holds no checkpoint"),
    (["--random", "--experts", "scattermoe", "--device", "cpu"], "needs a CUDA device"),
    (["--random", "--device", "cpu", "--precision", "bf16", "--compute", "f32"], "at most as wide"),
    (["--random", "--device", "cpu", "--no-shard", "--compute", "bf16"], "--no-shard"),
    (["--random", "--device", "cpu", "--ep", "2"], "--ep 2 does not divide the 1 processes"),
    (["--random", "--device", "cpu", "--ep", "2", "--experts", "eager"], "it needs --experts smoe"),
    (["--random", "--device", "cpu", "--compute", "f8", "--experts", "eager"], "--compute f8: it needs --experts smoe"),
    (["--random", "--device", "cpu", "--compute", "f8", "--no-shard"], "--no-shard"),
    (["--random", "--device", "cpu", "--init", "{}/none"], "no readable config.json"),
    (["--random", "--steps", "3", "--profile", "3"], "leaves no step"),
    (["--profile", TEXT], "LICENSE' is not a whole number"),
    (["--random", "--profile", "-1"], "-1 is less than 1"),
    (["--random", "--lr", "fast"], "fast is not a number"),
    (["--random", "--skip", "-5"], "-5 is less than 0"),
]


@pytest.mark.parametrize("arguments, message", USAGE)
def test_a_usage_error_is_named_with_status_2(arguments, message, tmp_path, capsys):
    try:
        status = train_fsdp2.main([part.format(tmp_path) for part in arguments])
    except SystemExit as error:
        status = error.code
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    said = capsys.readouterr().err
    assert status == 2 and "train_fsdp2.py: " in said and message in said, said


def test_a_checkpoint_with_an_unknown_feature_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="olmoe", clip_qkv=8.0)))
    with pytest.raises(train_fsdp2.UsageError, match="clip_qkv is not supported"):
        train_fsdp2.models.Checkpoint(str(tmp_path))


CONFIGS = sorted((ROOT / "tests/fuzz/corpus/config").glob("*.json"))
BAD = ("bad-rope", "bad-theta-differs", "bad-act", "bad-grouped", "bad-head-dim")
REFUSED = [path for path in CONFIGS if path.stem.startswith(BAD)]
GOOD = [path for path in CONFIGS if path.stem.startswith(("good-rope", "good-integer", "good-olmoe"))]


@pytest.mark.parametrize("path", REFUSED + GOOD, ids=lambda path: path.stem)
def test_init_refuses_what_smoe_train_refuses(path, tmp_path, monkeypatch):
    monkeypatch.setattr(train_fsdp2.models.Checkpoint, "_open", lambda self: None)  # the weights
    (tmp_path / "config.json").write_text(path.read_text())
    if path in GOOD:
        train_fsdp2.models.Checkpoint(str(tmp_path)).config(train_fsdp2.models.Config(1, 1, 1, 1, 1, 1))
        return
    with pytest.raises(train_fsdp2.UsageError, match="is not supported"):
        train_fsdp2.models.Checkpoint(str(tmp_path))


def test_the_files_that_validate_are_those_of_smoe_train(tmp_path):
    """The names of test_tokens.c."""
    train = ["fineweb_train_000001.bin", "interval_0.bin", "valuation.bin", "val/x/0.bin", "validated.bin"]
    validate = ["fineweb_val_000000.bin", "tiny_shakespeare_val.bin", "x-valid.bin", "valid3.bin", "2val.bin"]
    validate += ["Validation.part.bin", "x.VAL.bin", "valid/00.bin"]
    for name in train + validate:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(token_file(range(20)))
        assert train_fsdp2.data.Source(str(tmp_path / name), True).validates == (name in validate), name


@shards
def test_a_failure_is_named_without_a_traceback(tmp_path):
    run = ["--device", "cpu", "--steps", "2"]
    (tmp_path / "short.bin").write_bytes(token_file(range(5))[:-2])
    (tmp_path / "short.txt").write_text("too short")
    wanted = {"missing.txt": "no such file", "short.bin": "the header counts 5 tokens", "short.txt": "to train on"}
    for data, message in wanted.items():
        status, said = train(tmp_path / "run", 1, str(tmp_path / data), *run)
        assert status == [3] and data in said and message in said, said
    status, said = train(tmp_path / "run", 2, TEXT, *run, "--batch", "7")
    assert status == [2, 2] and "not a multiple" in said, said
    status, said = train(tmp_path / "run", 1, TEXT, *run, "--compare", str(tmp_path / "missing.jsonl"))
    assert status == [3] and "--compare" in said and "tokens/s" not in said, said  # said before the training
    (tmp_path / "bad.txt.gz").write_bytes(b"\x1f\x8b\x08\x00" + bytes(range(100, 200)))
    status, said = train(tmp_path / "run", 1, str(tmp_path / "bad.txt.gz"), *run)
    assert status == [3] and "bad.txt.gz: " in said and "Traceback" not in said, said
    for line in ("3", "{}", '{"step": 1}', '{"step": "x", "loss": 1}'):
        (tmp_path / "log.jsonl").write_text(line + "\n")
        status, said = train(tmp_path / "run", 1, TEXT, *run, "--compare", str(tmp_path / "log.jsonl"))
        assert status == [3] and "log.jsonl, line 1: not a line of a run" in said and "tokens/s" not in said, said
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 5.5}\n{"step": 2, "loss": null}\n')  # a run whose loss was NaN
    tolerant = ["--compare", str(tmp_path / "log.jsonl"), "--tolerance", "1e9"]
    status, said = train(tmp_path / "run", 1, TEXT, *run, *tolerant)
    assert status == [1] and "NOT within" in said, said
    out = tmp_path / "out"
    status, said = train(tmp_path / "run", 1, TEXT, *run, "--lr", "1e30", "--steps", "5", "--out", str(out))
    assert status == [3] and "the loss is" in said and "checkpoint" not in said.split("the loss is")[1], said
    assert not out.exists()
    status, said = train(tmp_path / "full", 1, TEXT, *run, "--out", "/dev/full/out")
    assert status == [3] and "/dev/full" in said and "Traceback" not in said, said


@shards
def test_a_resumed_run_has_the_options_of_its_command(tmp_path):
    """Weight decay and betas are those of the command that resumes, as the learning rate is."""
    out = tmp_path / "out"
    run = ["--device", "cpu", "--random", "--out", str(out)]
    status, said = train(tmp_path / "run", 1, *run, "--steps", "2")
    assert status == [0], said
    status, said = train(tmp_path / "run", 1, *run, "--steps", "4", "--resume", "--profile", "2")
    assert status == [2] and "leaves no step of the 2 after step 2" in said, said
    changed = ["--weight-decay", "0.75", "--beta1", "0.5", "--beta2", "0.625"]
    status, said = train(tmp_path / "run", 1, *run, "--steps", "4", "--resume", *changed)
    assert status == [0], said
    reader = torch.distributed.checkpoint.FileSystemReader(str(out / "latest"))
    names = [name for name in reader.read_metadata().state_dict_metadata if name.startswith("optimizer.param_groups.")]
    values = {name: torch.empty(()) for name in names if name.endswith((".weight_decay", ".betas"))}
    assert values
    torch.distributed.checkpoint.load(values, storage_reader=reader, no_dist=True)
    assert {tuple(v) if isinstance(v, (list, tuple)) else v for v in values.values()} == {0.75, 0.0, (0.5, 0.625)}
    (out / "latest" / "run.json").write_text('{"batch": 4}')
    status, said = train(tmp_path / "run", 1, *run, "--steps", "6", "--resume")
    assert status == [3] and "run.json: not the note of a checkpoint: KeyError" in said and "Traceback" not in said, said


@shards
def test_torchrun_starts_it_and_another_seed_is_refused(tmp_path):
    script, out = str(ROOT / "examples/train_fsdp2.py"), str(tmp_path / "out")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # at a free port: tests may run side by side
    command += ["--nproc-per-node", "2", script, "--random", *RUN]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", "2", "--out", out], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0 and "tokens/day" in done.stdout, done.stdout + done.stderr
    status, said = train(tmp_path / "run", 1, "--random", *RUN, "--seed", "6", "--steps", "3", "--out", out, "--resume")
    assert status == [2] and "seed 5, not 6" in said
