"""Checkpoints by torch.distributed.checkpoint: every process writes its shards, any number of processes reads them.

OUT/step-0000100 is complete and never changed again. OUT/latest is a link to the newest checkpoint. A checkpoint is
written into step-0000100.tmp, flushed to the disk and renamed; only then is the link changed. So a run that is killed
at any moment leaves the last complete checkpoint.
"""

import json
import os
import shutil
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from . import RunError, UsageError

NOTE = "run.json"  # a file beside the shards: the step, and the settings that a resumed run must share


def folder_of(step: int) -> str:
    return f"step-{step:07d}"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _commit(out: Path, made: Path, name: str, note: dict, keep: int) -> None:
    """Makes the finished folder the newest checkpoint. Only process 0 calls it."""
    with open(made / NOTE, "w") as file:
        json.dump(note, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(made)
    if (out / name).exists():  # left by a run that was killed between the renaming and the change of the link
        shutil.rmtree(out / name)
    os.rename(made, out / name)
    link = out / "latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    os.replace(link, out / "latest")
    _sync(out)
    finished = sorted(path for path in out.glob("step-*") if path.suffix != ".tmp")
    for old in [path for path in finished if path.name != name][: len(finished) - keep]:
        shutil.rmtree(old, ignore_errors=True)


def _on_first(action, what: str) -> None:
    """Runs `action` on process 0; all processes fail together if it fails."""
    problem = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = [f"{what}: {error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise RunError(problem[0])


def _prepare(out: Path, made: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob("step-*.tmp"):
        shutil.rmtree(left)
    made.mkdir()


def save(out: str, step: int, model, optimizer, note: dict, keep: int) -> None:
    folder, name = Path(out), folder_of(step)
    if newest(out) and newest(out).name == name:
        return
    made = folder / (name + ".tmp")
    _on_first(lambda: _prepare(folder, made), f"{made}: cannot make the folder")
    weights, states = get_state_dict(model, optimizer)
    try:
        with warnings.catch_warnings():  # these come with one process and --no-shard
            warnings.filterwarnings("ignore", message=".*torch.distributed.*")
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(made))
    except (dcp.api.CheckpointException, OSError) as error:
        raise RunError(f"{made}: cannot save: {str(error).strip().splitlines()[-1]}")
    note = {"step": step, **note}
    _on_first(lambda: _commit(folder, made, name, note, keep), f"{folder / name}: cannot finish the checkpoint")


def newest(out: str) -> Path | None:
    link = Path(out) / "latest"
    return link.resolve() if (link / NOTE).is_file() else None


def check_new(out: str) -> None:
    if newest(out):
        raise UsageError(f"--out {out} holds {newest(out).name} already: give --resume, or another folder")


def read_note(out: str) -> dict:
    """The note of the newest checkpoint: its step and settings."""
    path = newest(out)
    if path is None:
        raise UsageError(f"--resume: {out} holds no checkpoint")
    try:
        note = json.loads((path / NOTE).read_text())
        return {**note, "step": int(note["step"])}
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise RunError(f"{path / NOTE}: not the note of a checkpoint: {type(error).__name__}: {error}")


def check_same(out: str, note: dict, wanted: dict) -> None:
    """A checkpoint whose settings are not those of `wanted` raises UsageError."""
    for key, value in wanted.items():
        if note.get(key) != value:
            raise UsageError(f"--resume: {newest(out)} was trained with {key} {note.get(key)}, not {value}")


def load(out: str, model, optimizer) -> None:
    """Loads weights and the optimizer's states. Weight decay and betas stay as they are: those of this run's options."""
    path = newest(out)
    own = [{key: group[key] for key in ("weight_decay", "betas")} for group in optimizer.param_groups]
    weights, states = get_state_dict(model, optimizer)
    try:
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=str(path))
    except (dcp.api.CheckpointException, OSError) as error:
        raise RunError(f"{path}: cannot load: {str(error).strip().splitlines()[-1]}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
