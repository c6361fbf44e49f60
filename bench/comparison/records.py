"""The records: a line with a JSON object for each layer, implementation and tuning. This module needs no torch."""

import contextlib
import errno
import fcntl
import json
import os
import tempfile

ALWAYS = {"commit", "device", "suite", "shape", "part", "peer", "date"}  # fields of every record
KEY = (
    "commit", "device", "suite", "shape", "T", "d", "n", "E", "K", "part", "routing", "dtype", "settle_s", "peer", "tuning",
    "ranks",
)  # fmt: skip
SETTLE_S = 0.03  # of a record that does not name it; the default of --settle


class Broken(ValueError):
    """A line of a file of records is not a record."""


def key_of(record):
    """The fields that identify a measurement: two records with equal keys are of the same measurement."""
    return tuple(settle_of(record) if name == "settle_s" else record.get(name) for name in KEY)


def settle_of(record):
    """Seconds that every job ran untimed in its turn."""
    return record.get("settle_s", SETTLE_S)


def read(path):
    """The records of a file, in order; none if there is no file. A line that is not a record raises Broken."""
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    return [_record(path, number, line) for number, line in enumerate(lines, 1)]


def _record(path, number, line):
    try:
        record = json.loads(line)
    except ValueError as error:  # also of bytes that are no text
        raise Broken(f"{path}, line {number}: not a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise Broken(f"{path}, line {number}: not a JSON object")
    if not ALWAYS <= record.keys():
        raise Broken(f"{path}, line {number}: a record without {', '.join(sorted(ALWAYS - record.keys()))}")
    return record


@contextlib.contextmanager
def _folder_of(path):
    """A descriptor of the folder of a file, locked against other programs that write records there."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)


def _temporary(path):
    """A new file beside `path`: its descriptor and its name."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return tempfile.mkstemp(dir=os.path.dirname(path), prefix=os.path.basename(path) + ".")


def check_writable(path):
    """Raises OSError if write_file could not write this file."""
    path = os.path.realpath(path)
    with _folder_of(path):
        handle, temporary = _temporary(path)
        os.close(handle)
        os.unlink(temporary)


def write_file(path, text):
    """Replaces a file, or the file that a link leads to: writes the text under another name in the same folder, flushes
    it to the disk, renames it and flushes the folder."""
    path = os.path.realpath(path)
    with _folder_of(path) as folder:
        _replace(path, text, folder)


def _replace(path, text, folder):
    handle, temporary = _temporary(path)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    os.fsync(folder)  # without this the new name may be lost if the machine stops


def append(path, new):
    """Adds records to a file. They replace records with the same key. Two programs may append to one file."""
    path = os.path.realpath(path)
    replaced = {key_of(record) for record in new}
    with _folder_of(path) as folder:
        kept = [record for record in read(path) if key_of(record) not in replaced]
        _replace(path, "".join(json.dumps(record) + "\n" for record in kept + list(new)), folder)


def has_passes(record, passes):
    """Whether the record is the result of measuring all these passes. A record names the passes that were tried. Where
    it names none, they are those that have a time. A failure is the result of every pass."""
    tried = record.get("passes") or [name for name in passes if name + "_ms" in record]
    return "failed" in record or set(passes) <= set(tried)


def missing(records, wanted, peers, passes=()):
    """The peers that have no record of these passes with the fields of `wanted`, which are all of KEY but the peer."""
    there = {key_of(record) for record in records if has_passes(record, passes)}
    return [peer for peer in peers if key_of(wanted | {"peer": peer}) not in there]
