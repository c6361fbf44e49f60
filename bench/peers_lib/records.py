"""The records: a line with a JSON object for each layer, implementation and tuning. This module needs no torch."""

import json
import os
import tempfile

KEY = ("commit", "device", "suite", "shape", "T", "d", "n", "E", "K", "part", "routing", "dtype", "peer", "tuning")


class Broken(ValueError):
    """A line of a file of records is not a JSON object."""


def key_of(record):
    """The fields that identify a measurement: two records with equal keys are of the same measurement."""
    return tuple(record.get(name) for name in KEY)


def read(path):
    """The records of a file, in order; none if there is no file. A line that is not a JSON object raises Broken."""
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise Broken(f"{path}, line {number}: not a JSON object: {error}") from None
    return records


def write_file(path, text):
    """Replaces a file: writes the text under another name in the same folder, flushes it to the disk, renames it and
    flushes the folder."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=os.path.basename(path) + ".")
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
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)  # without this the new name may be lost if the machine stops
    finally:
        os.close(place)


def append(path, new):
    """Adds records to a file. They replace records with the same key."""
    replaced = {key_of(record) for record in new}
    kept = [record for record in read(path) if key_of(record) not in replaced]
    write_file(path, "".join(json.dumps(record) + "\n" for record in kept + list(new)))


def copy(path, target):
    with open(path) as file:
        write_file(target, file.read())


def has_passes(record, passes):
    """Whether the record is the result of measuring all these passes. A record names the passes that were tried. Where
    it names none, they are those that have a time. A failure is the result of every pass."""
    tried = record.get("passes") or [name for name in passes if name + "_ms" in record]
    return "failed" in record or set(passes) <= set(tried)


def missing(records, wanted, peers, passes=()):
    """The peers that have no record of these passes with the fields of `wanted`, which are all of KEY but the peer."""
    there = {key_of(record) for record in records if has_passes(record, passes)}
    return [peer for peer in peers if key_of(wanted | {"peer": peer}) not in there]
