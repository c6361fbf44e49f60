#!/usr/bin/env python3
"""Compares smoe with SonicMoE, ScatterMoE, MoMoE, Liger, DeepGEMM, torch's grouped_mm, Transformers' experts and cuBLAS's batched GEMMs.
All get the same tensors and run by turns. docs/peers.md describes the method and the tables.

    bench/peers.py                                        # the paper's layers: experts on given routing
    bench/peers.py --part layer --peers sonicmoe          # with the router
    bench/peers.py --suite paper,models --routing random,skewed --tunings 3
    bench/peers.py --suite small                          # 1 to 4096 tokens
    bench/peers.py --e2e 1.4B                             # whole training steps
    bench/peers.py --ranks 8                              # expert parallelism, one process for each GPU
    bench/peers.py --show --markdown --plot ratios.png    # the repository's records, nothing is measured
    bench/peers.py --peers smoe-portable,scattermoe,scattermoe-mma,liger,liger-mma
                                                          # the portable kernels; -mma: Triton's code by mma.sync
    bench/peers.py --peers smoe-f8,torchao-f8,sonicmoe    # fp8 beside bf16
    bench/peers.py --device cpu --dtype f32               # tries the program on tiny layers, without a GPU

After each layer its records are appended to build/peers.jsonl, and the tables of this device are printed at the end. A
measurement that has a record of this commit, device and --settle with the same passes is skipped. docs/results/peers.jsonl,
which docs/peers.md shows, changes only if --records names it.
Exit status: 0 all was measured, or time was up; 2 wrong arguments; 3 nothing could be measured, read or
written, or smoe itself failed at a layer (the other layers are measured).
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from comparison import page, records, suites, tables  # noqa: E402
from comparison.processes import VARIABLES  # noqa: E402
from comparison.run import BASE, JOBS, PEERS, Failed, Run, say  # noqa: E402

NAMED_ONLY = ("loop", "smoe-concatenated", "smoe-portable", "smoe-f8", "torchao-f8", *VARIABLES)  # only if --peers names them
MODELS, ROUTINGS, PARTS = ("0.5B", "1.4B", "7B", "tiny"), ("random", "uniform", "skewed"), ("experts", "layer")
MEASURED = ("CMakeLists.txt", "cmake", "include", "src", "python")
SMALL_PASSES = ["inference", "graph"]
PUBLISHED, MEASURED_HERE = ROOT / "docs/results/peers.jsonl", ROOT / "build/peers.jsonl"
RANKS_HERE = ROOT / "build/ranks.jsonl"
BEGIN, END = "<!-- begin of what bench/peers.py --docs writes -->", "<!-- end -->"


def words(known):
    """The parser of a comma-separated argument whose words must all be in `known`."""

    def parse(text):
        found = [word for word in text.split(",") if word]
        for word in found:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r}: expected of {', '.join(known)}")
        return found

    return parse


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def interpreter(text):
    peer, _, python = text.partition("=")
    if peer not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r}: expected PEER=INTERPRETER")
    return peer, python


def parser():
    made = argparse.ArgumentParser(
        prog="peers.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    what = "what is measured"
    group = made.add_argument_group(what)
    add = group.add_argument
    add("--suite", default="", help="suites of docs/shapes.csv, `small`, `tiny` or `all`, comma-separated (paper; tiny "
        "with --device cpu)")  # fmt: skip
    add("--shape", default="", help="layers by name, comma-separated")
    add("--thiek", action="append", default=[], metavar="T,d,n,E,K", help="measure a layer of these sizes")
    add("--part", type=words(PARTS), help="experts (on given routing) or layer (with the router) (experts)")
    add("--routing", type=words(ROUTINGS), help="routing of part experts: random, uniform or skewed (random)")
    add("--peers", type=words((*PEERS, *JOBS)), help="implementations to compare with, comma-separated")
    add("--e2e", choices=MODELS, help="measure whole training steps of this model instead")
    add("--ranks", type=positive, help="measure expert parallelism over so many processes instead, one for each GPU; T is then "
        "each one's, the suite is `ranks`, and --peers are jobs: alone, smoe-ep, a2a-smoe, a2a-grouped_mm, torch")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    add("--seed", type=int, default=0, help="of the inputs; a record does not name it, so use other --records (0)")
    add("--inference", action="store_true", help="also measure the forward without gradients, eager and as a CUDA graph")
    add("--kernels", action="store_true", help="also measure the kernels of each pass, by PyTorch's profiler: tables of the "
        "GPU's time without waiting for the host; with --show, print every kernel's time")  # fmt: skip
    add("--no-new-t", dest="new_t", action="store_false", help="do not time the first call with another T")
    group = made.add_argument_group("how")
    add = group.add_argument
    add("--tunings", type=positive, default=1, help="number of processes that tune anew; each peer's best tuning counts (1)")
    add("--python", type=interpreter, action="append", default=[], metavar="PEER=INTERPRETER",
        help="the Python that has this peer's packages; peers of one interpreter share a process")  # fmt: skip
    add("--shape-seconds", type=float, default=6.0, help="seconds of rounds of a layer, or of steps of a model (6)")
    add("--least-rounds", type=positive, default=4, help="least number of rounds (4)")
    add("--settle", type=float, help=f"seconds that a job runs untimed in its turn ({records.SETTLE_S:g}); each value has "
        "tables of its own")  # fmt: skip
    add("--timed", type=float, default=0.06, help="seconds that it is then timed (0.06)")
    add("--seconds", type=float, default=float("inf"), help="stop after this many seconds; a layer that is then measured gets no record")
    add("--peer-seconds", type=float, default=600.0, help="leave an implementation out that takes longer than this to load, to be "
        "prepared for a layer, or for a turn (600)")  # fmt: skip
    group = made.add_argument_group("records and output")
    add = group.add_argument
    add("--records", help="the file of records (build/peers.jsonl; with --show and --docs docs/results/peers.jsonl)")
    add("--again", action="store_true", help="also measure what has a record, and replace the record")
    add("--commit", help="commit to write into records (the last one that changed the library or the package)")
    add("--show", action="store_true", help="measure nothing; show the tables of the records, of --suite, --peers, --part, "
        "--routing and --settle only if these are given")  # fmt: skip
    add("--markdown", action="store_true", help="print the tables in Markdown")
    add("--csv", action="store_true", help="print the records as CSV")
    add("--plot", metavar="FILE.png", help="draw the ratios as bars; needs matplotlib")
    add("--docs", metavar="FILE.md", help="measure nothing; write the newest commit's figures of every suite between the marks in this file")
    return made


def commit(root=ROOT):
    """The last commit that changed the library or the package, with -dirty if the clone differs from it. A commit of
    records or documents does not change the result, so a run can be continued after it."""

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        named = git("log", "-1", "--format=%h", "--abbrev=12", "--", *MEASURED) or "unknown"
        return named + ("-dirty" if git("status", "--porcelain", "--", *MEASURED) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def default_peers(device):
    if device == "cpu":
        return ["smoe", "transformers", "loop"]
    return [peer for peer in PEERS if peer not in NAMED_ONLY]


def default_suite(options):
    if options.shape or options.thiek:
        return ""
    return "tiny" if options.device == "cpu" else "ranks" if options.ranks else "paper"


def complete(options):
    """Adds to the options the values that are derived from them."""
    options.parts, options.routings = options.part or ["experts"], options.routing or ["random"]
    options.pythons = dict(options.python)
    options.peers_shown = options.peers and {BASE, *options.peers}
    options.chosen = options.peers
    options.settle_shown = None if options.settle is None else {options.settle}
    options.settle = records.SETTLE_S if options.settle is None else options.settle
    chosen = options.peers or default_peers(options.device)
    options.peers = [BASE] + [peer for peer in chosen if peer != BASE]
    options.commit = options.commit or commit()
    if options.ranks:
        options.records = options.records or str(RANKS_HERE)
    options.records = options.records or str(PUBLISHED if options.show or options.docs else MEASURED_HERE)

    def passes_of(shape):
        more = SMALL_PASSES if options.inference or shape.suite == "small" else []
        return ["forward", "both"] + (more if options.device == "cuda" else more[:1])

    options.passes_of = passes_of
    return options


def renewed(text, block):
    """The text of a document in which `block` replaces the text between the marks. Without the marks it raises
    Failed."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise Failed(f"--docs: the file has no lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{block}\n{END}{tail}"


def renew(path, file_of_records):
    records.write_file(path, renewed(path.read_text(), docs_block(records.read(file_of_records))))


def in_order(chosen):
    """The records by suite, part, routing and --settle, and then by layer. Suites and layers have the order of
    docs/shapes.csv; other ones, and steps, are the last."""
    every = suites.read(ROOT / "docs/shapes.csv")
    known = [list(dict.fromkeys(shape.suite for shape in every)), PARTS, ROUTINGS, [shape.name for shape in every]]

    def place(record):
        suite, part, routing, layer = (
            names.index(name) if name in names else len(names)
            for names, name in zip(known, (record.get(field) for field in ("suite", "part", "routing", "shape")), strict=True)
        )
        return suite, part, routing, records.settle_of(record), layer

    return sorted(chosen, key=place)


def docs_block(every):
    return page.block(in_order(every))


def is_shown(options, record):
    """Does a record have those suites, peers, parts, routings and --settle that are given?"""
    given = options.suite.split(",") if options.suite not in ("", "all") else None
    wanted = ((given, record["suite"]), (options.peers_shown, record["peer"]), (options.part, record["part"]),
              (options.routing, record.get("routing")), (options.settle_shown, records.settle_of(record)))  # fmt: skip
    return all(not choice or value in choice for choice, value in wanted)


def shown(options, device):
    """The records that tables are made of: after a measurement those of its device, with --show those that are asked
    for."""
    there = records.read(options.records)
    if options.show:
        if not there:
            raise Failed(f"--show: no records in {options.records}")
        there = [record for record in there if is_shown(options, record)]
    else:
        there = [record for record in there if record["device"] == device]
    return in_order(tables.newest(there))


def show(options, chosen):
    if options.csv:
        sys.stdout.write(tables.as_csv(chosen))
    else:
        form = tables.as_markdown if options.markdown else tables.as_text
        print(form(tables.make(chosen) + (tables.of_kernels(chosen) if options.kernels else [])))
        if chosen:
            print(f"versions: {tables.versions(chosen)}")
    if options.plot and any(record["part"] != "e2e" for record in chosen):  # the picture shows layers
        try:
            tables.plot(chosen, options.plot)
        except ValueError as error:  # an ending that matplotlib does not know
            raise Failed(f"--plot {options.plot}: {error}") from None


def can_plot():
    return importlib.util.find_spec("matplotlib") is not None


def check_files(options):
    """Fails before anything is measured, instead of after the first layer."""
    try:
        if options.records:
            records.check_writable(options.records)
    except OSError as error:
        raise Failed(f"--records {options.records}: {error.strerror}") from None


def measure(options, shapes):
    """Returns the layers and steps that smoe could not compute, and the name of the device."""
    Path(options.records).parent.mkdir(exist_ok=True)
    check_files(options)
    records.read(options.records)  # a broken file is found at once, too
    run = Run(options, shapes)
    late = run.steps(options.e2e) if options.e2e else run.measure()
    if late:
        say(f"time is up after {options.seconds:g} s; the same command goes on where this one stopped")
    return run.failed, run.device


def of_ranks(options, shapes):
    """--ranks: expert parallelism"""
    options.jobs = [job for job in JOBS if not options.chosen or job in options.chosen]
    Path(options.records).parent.mkdir(exist_ok=True)
    check_files(options)
    sys.path.append(str(ROOT / "python"))
    from comparison import ranks

    if not options.show:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the ranks end with this process
        given = "device ranks dtype seed settle timed shape_seconds least_rounds seconds routings jobs commit records"
        ranks.measure(argparse.Namespace(**{name: getattr(options, name) for name in given.split()}), shapes)
    names = {shape.name for shape in shapes}
    there = [record for record in records.read(options.records) if record.get("ranks") == options.ranks]
    print(ranks.table([record for record in tables.newest(there) if record["shape"] in names]))


def main():
    if sys.argv[1:] == ["--worker"]:
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # libraries print to stdout; from here on that is stderr, apart from the answers
        sys.path.append(str(ROOT / "python"))
        try:
            from comparison import worker

            worker.main(answers)
        except (BrokenPipeError, KeyboardInterrupt):  # nobody waits for answers any more
            os._exit(130)
        return 0
    options = complete(parser().parse_args())
    try:
        suite = options.suite or default_suite(options)
        shapes = suites.choose(suites.read(ROOT / "docs/shapes.csv"), suite, options.shape, options.thiek)
        for shape in shapes if options.ranks else []:
            if shape.E % options.ranks:
                raise ValueError(f"--ranks {options.ranks}: {shape.name} has {shape.E} experts; expected a multiple")
    except ValueError as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2
    if options.kernels and options.device == "cpu":
        print("peers.py: --kernels: needs a GPU", file=sys.stderr)
        return 2
    if options.plot and not can_plot():
        print("peers.py: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 3
    try:
        if options.ranks:
            of_ranks(options, shapes)
            return 0
        if options.docs:
            renew(Path(options.docs), options.records)
            return 0
        failed, device = ([], "") if options.show else measure(options, shapes)
        show(options, shown(options, device))
        if failed:
            raise Failed(f"{BASE} itself failed: {'; '.join(failed)}")
        return 0
    except (Failed, records.Broken, OSError) as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where this one stopped")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the measuring processes
    sys.exit(main())
