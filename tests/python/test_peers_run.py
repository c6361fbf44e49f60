"""bench/peers.py without a GPU: the loop over layers, the measuring processes, the command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import peers  # noqa: E402
from comparison import processes, records, run, suites, tables  # noqa: E402
from test_peers import EVERY, some_records  # noqa: E402

# ---- the loop, with pretended processes ----


class Pretended:
    """A pretended measuring process, which answers at once. A peer in `fatal` ends it in `hello`, `prepare` or a round."""

    log, fatal = [], {}

    def __init__(self, python, members):
        self.python, self.peers = python, members

    def start(self):
        self.log.append(("start", self.python))

    def stop(self):
        pass

    def ask(self, do, **arguments):
        self.log.append((do, self.python))
        for peer in self.peers:
            if self.fatal.get(peer) in (do, (do, arguments.get("index"))):
                raise processes.Died(peer, "its process ended with status 70")
        if do == "hello":
            skipped = {"skipped": "No module named 'momoe'; to install: pip install momoe"}
            known = lambda peer: skipped if peer == "momoe" else {"versions": {peer: "1"}}
            return {"device": "GPU", "peers": {peer: known(peer) for peer in arguments["peers"]}}
        if do == "prepare":
            for peer in arguments["peers"]:
                arguments["begins"](peer)
            self.prepared, self.passes = arguments["peers"], arguments["passes"]
            once = lambda peer: {"failed": "too large"} if peer == "grouped_mm" else {"kept_bytes": 1}
            return {"measured": {peer: once(peer) for peer in arguments["peers"]}}
        if do == "round":
            times = {"smoe": 2.0 if self.python == sys.executable else 5.0, "sonicmoe": 3.0}
            alive = [peer for peer in self.prepared if peer != "grouped_mm"]
            known = {"forward": 1, "both": 3, "inference": 0.5}  # graph: none can be captured
            factors = [(p, known[p]) for p in self.passes if p in known]
            made = {f"{peer} {p}": times.get(peer, 4.0) * k for peer in alive for p, k in factors}
            return {"times": made}
        if do == "kernels":
            return {"kernels": {"smoe forward": [["up", 1, 2e3]], "sonicmoe forward": [["gemm", 2, 3e3]]}}
        return {}


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """pretend(arguments) -> (late, records): a Run with pretended processes. pretend.log has the commands that they
    got."""
    monkeypatch.setattr(Pretended, "log", [])
    monkeypatch.setattr(Pretended, "fatal", {})

    def group(names, pythons, base, environment):
        return [Pretended(p.python, p.peers) for p in processes.group(names, pythons, base, environment)]

    monkeypatch.setattr(run, "group", group)
    path = tmp_path / "peers.jsonl"

    def go(*arguments):
        command = ["--records", str(path), "--commit", "c1", "--shape-seconds", "0", *arguments]
        options = peers.complete(peers.parser().parse_args(command))
        late = run.Run(options, suites.choose(EVERY, options.suite or "tiny")).measure()
        return late, records.read(path)

    go.log, go.fatal, go.path = Pretended.log, Pretended.fatal, path
    return go


def test_a_run_resumes(pretend, capsys):
    late, found = pretend("--peers", "sonicmoe,momoe")
    assert not late and [(r["shape"], r["peer"]) for r in found] == [
        ("tiny-a", "smoe"), ("tiny-a", "sonicmoe"), ("tiny-b", "smoe"), ("tiny-b", "sonicmoe")]  # fmt: skip
    assert found[1]["forward_ms"] == 3 and found[1]["backward_ms"] == 6 and found[1]["rounds"] == 4
    assert tables.ratio(found[1], "backward") == (1.5, 0.0) and found[1]["versions"] == {"sonicmoe": "1"}
    assert "momoe skipped: No module named 'momoe'; to install: pip install momoe\n" in capsys.readouterr().err
    before, pretend.log[:] = pretend.path.read_bytes(), []
    pretend("--peers", "sonicmoe,momoe")
    assert pretend.path.read_bytes() == before and {do for do, _ in pretend.log} == {"start", "hello"}
    _, found = pretend("--peers", "sonicmoe,scattermoe")  # measures only smoe and the new peer
    assert [r["peer"] for r in found] == ["smoe", "sonicmoe"] * 2 + ["scattermoe"] * 2
    pretend.log[:] = []
    _, found = pretend("--peers", "sonicmoe", "--again")
    assert len(found) == 6 and [do for do, _ in pretend.log].count("prepare") == 2


def test_smoe_is_measured_alone_only_where_asked_for(pretend, capsys):
    """If every peer that is asked for is skipped, smoe is not measured by itself, unless it was asked for alone."""
    with pytest.raises(processes.Failed, match="none of the implementations"):
        pretend("--peers", "momoe")
    assert "momoe skipped" in capsys.readouterr().err
    assert [do for do, _ in pretend.log] == ["start", "hello"] and not pretend.path.exists()
    with pytest.raises(processes.Failed, match="none of the implementations"):
        pretend("--peers", "momoe", "--python", "momoe=/other/python")
    _, found = pretend("--peers", "smoe")
    assert [r["peer"] for r in found] == ["smoe"] * 2
    _, found = pretend("--peers", "sonicmoe", "--python", "sonicmoe=/other/python")  # the only peer is in the other one
    assert [r["peer"] for r in found] == ["smoe"] * 2 + ["sonicmoe"] * 2


def test_passes_without_a_record_are_measured(pretend):
    """A record without inference is replaced by one with it. Records of all passes, and failures, stay."""
    prepares = lambda: [do for do, _ in pretend.log].count("prepare")
    pretend("--peers", "sonicmoe,grouped_mm")
    assert prepares() == 2
    _, found = pretend("--peers", "sonicmoe,grouped_mm", "--inference")
    assert prepares() == 4 and len(found) == 6
    assert [r.get("inference_ms") for r in found if r["shape"] == "tiny-a"] == [None, 1.0, 1.5]
    assert all(r["failed"] == "too large" for r in found if r["peer"] == "grouped_mm")
    before = pretend.path.read_bytes()
    pretend("--peers", "sonicmoe,grouped_mm", "--inference")  # the pass graph was tried, although no peer has a time
    pretend("--peers", "sonicmoe,grouped_mm")
    assert prepares() == 4 and pretend.path.read_bytes() == before
    old = [{key: value for key, value in r.items() if key != "passes"} for r in found]  # of an earlier version
    records.append(pretend.path, old)
    pretend("--peers", "sonicmoe,grouped_mm")
    assert prepares() == 4
    pretend("--peers", "sonicmoe,grouped_mm", "--inference")
    assert prepares() == 6


def test_backwards_that_are_differences_are_measured_anew(pretend):
    """Their records do not name the pass `backward`."""
    _, found = pretend("--peers", "sonicmoe")
    assert all(r["passes"] == ["forward", "both", "backward"] and r["timed_s"] == 0.06 for r in found)
    records.append(pretend.path, [r | {"passes": ["forward", "both"]} for r in found])
    _, found = pretend("--peers", "sonicmoe")
    assert len(found) == 4 and all("backward" in r["passes"] for r in found)


def test_kernels_are_measured_where_asked_for(pretend):
    _, found = pretend("--peers", "sonicmoe")
    assert "kernels" not in found[1] and ("kernels", sys.executable) not in pretend.log
    _, found = pretend("--peers", "sonicmoe", "--kernels")
    assert len(found) == 4 and found[1]["kernels"] == {"forward": [["gemm", 2, 3e3]]}
    assert tables.ratio(found[1], "gpu_forward") == (1.5, None) and tables.ratio(found[1], "forward") == (1.5, 0.0)
    before = pretend.path.read_bytes()
    pretend("--peers", "sonicmoe", "--kernels")
    assert pretend.path.read_bytes() == before
    pretend.fatal["sonicmoe"] = "kernels"
    _, found = pretend("--peers", "sonicmoe,scattermoe", "--kernels", "--again")
    by_peer = {r["peer"]: r for r in found if r["shape"] == "tiny-a"}
    assert "status 70" in by_peer["sonicmoe"]["failed"] and by_peer["scattermoe"]["forward_ms"] == 4


def test_time_is_up_between_layers(pretend, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    late, found = pretend("--peers", "sonicmoe", "--suite", "paper", "--seconds", "8")
    assert late and 0 < len({r["shape"] for r in found}) < 12 and len(found) % 2 == 0


def test_time_is_up_while_a_layer_is_prepared(pretend, monkeypatch, capsys):
    """The layers before it have records."""
    real = Pretended.ask

    def ask(self, do, **arguments):
        if do == "prepare" and [do for do, _ in self.log].count("prepare") == 1:
            raise processes.TimeUp("sonicmoe")
        return real(self, do, **arguments)

    monkeypatch.setattr(Pretended, "ask", ask)
    late, found = pretend("--peers", "sonicmoe")
    assert late and {r["shape"] for r in found} == {"tiny-a"}
    Pretended.log.clear()
    pretend.fatal["scattermoe"] = "prepare"  # left out before time is up
    late, found = pretend("--peers", "scattermoe,sonicmoe", "--again")
    assert late and found[-1]["peer"] == "scattermoe" and found[-1]["failed"] == "its process ended with status 70"
    said = capsys.readouterr().err
    assert "  sonicmoe is prepared\n" in said and "seconds of preparing: smoe 0.0, sonicmoe 0.0\n" in said
    assert "time was up while sonicmoe was loaded, prepared or measured\n" in said


def test_time_is_up_during_a_layers_turns(pretend, monkeypatch):
    real = Pretended.ask

    def ask(self, do, **arguments):
        if do == until and [do for do, _ in self.log].count("prepare") == 2:
            assert 0 < arguments["deadline"] - time.monotonic() < 1000
            raise processes.TimeUp("sonicmoe")
        return real(self, do, **arguments)

    monkeypatch.setattr(Pretended, "ask", ask)
    for until in ("round", "kernels"):
        Pretended.log.clear()
        late, found = pretend("--peers", "sonicmoe", "--seconds", "1000", "--kernels", "--again")
        assert late and {r["shape"] for r in found} == {"tiny-a"}


def test_a_peer_that_cannot_be_loaded_leaves_the_others(pretend, capsys):
    pretend.fatal["sonicmoe"] = "hello"
    _, found = pretend("--peers", "sonicmoe,scattermoe")
    assert [r["peer"] for r in found] == ["smoe", "scattermoe"] * 2
    assert "sonicmoe left out, could not be loaded: its process ended with status 70\n" in capsys.readouterr().err
    pretend.fatal["smoe"] = "hello"
    with pytest.raises(run.Failed, match="could not load smoe: its process"):
        pretend("--peers", "scattermoe", "--again")


def test_tunings_are_processes(pretend):
    _, found = pretend("--peers", "sonicmoe", "--tunings", "3")
    assert [do for do, _ in pretend.log].count("start") == 3 and {r["tuning"] for r in found} == {0, 1, 2}
    assert run.Run._environment(None, 0) == {} and run.Run._environment(None, 2) == run.NEW_TUNING


def test_packages_that_disagree_alternate(pretend):
    _, found = pretend("--peers", "sonicmoe,scattermoe", "--python", "sonicmoe=/other/python")
    by_peer = {r["peer"]: r for r in found if r["shape"] == "tiny-a"}
    assert by_peer["smoe"]["forward_ms"] == 2.0  # of the first process; ratios use smoe's time in the same process
    assert tables.ratio(by_peer["sonicmoe"], "forward") == (0.6, 0.0)
    assert tables.ratio(by_peer["scattermoe"], "forward") == (2.0, 0.0) and "round_ms" not in by_peer["smoe"]
    rounds = [python for do, python in pretend.log if do == "round"][:8]
    ours = sys.executable
    assert rounds == [ours, "/other/python", "/other/python", ours] * 2
    groups = processes.group(["smoe", "sonicmoe", "scattermoe"], {"sonicmoe": "/other/python"}, "smoe", {})
    assert [p.peers for p in groups] == [["smoe", "scattermoe"], ["smoe", "sonicmoe"]]


def test_each_set_of_variables_has_a_process(monkeypatch):
    monkeypatch.delenv("DISABLE_MMA_V3", raising=False)
    plain, sync = processes.group(["smoe", "scattermoe", "scattermoe-mma", "liger-mma", "liger"], {}, "smoe", {"A": "1"})
    assert plain.peers == ["smoe", "scattermoe", "liger"] and "DISABLE_MMA_V3" not in plain.environment
    assert sync.peers == ["smoe", "scattermoe-mma", "liger-mma"] and sync.environment["DISABLE_MMA_V3"] == "1"
    assert plain.environment["A"] == sync.environment["A"] == "1"


def test_failures_are_records(pretend, capsys):
    pretend.fatal["scattermoe"] = "prepare"
    _, found = pretend("--peers", "scattermoe,grouped_mm,sonicmoe")
    by_peer = {r["peer"]: r for r in found if r["shape"] == "tiny-a"}
    assert by_peer["grouped_mm"]["failed"] == "too large" and "status 70" in by_peer["scattermoe"]["failed"]
    assert by_peer["sonicmoe"]["forward_ms"] == 3
    assert [r["peer"] for r in found if r["shape"] == "tiny-b"] == ["smoe", "grouped_mm", "sonicmoe"]
    assert "scattermoe left out from here on" in capsys.readouterr().err


def test_a_peer_that_ends_its_process_leaves_the_others_times(pretend):
    pretend.fatal["sonicmoe"] = "round"
    _, found = pretend("--peers", "sonicmoe,scattermoe")
    by_peer = {r["peer"]: r for r in found if r["shape"] == "tiny-a"}
    assert "status 70" in by_peer["sonicmoe"]["failed"] and by_peer["scattermoe"]["forward_ms"] == 4
    pretend.fatal["sonicmoe"] = ("round", 3)  # the last round: the earlier rounds of the other peers count
    _, found = pretend("--peers", "sonicmoe,scattermoe", "--again")
    by_peer = {r["peer"]: r for r in found if r["shape"] == "tiny-a"}
    assert "failed" in by_peer["sonicmoe"] and by_peer["scattermoe"]["rounds"] == 3
    assert by_peer["scattermoe"]["forward_ms"] == 4


def test_without_smoe_nothing_is_measured(pretend):
    pretend.fatal["smoe"] = "prepare"
    with pytest.raises(run.Failed, match="smoe itself"):
        pretend("--peers", "sonicmoe")


def test_a_process_that_ends_is_seen_while_its_child_lives_which_ends_with_it(monkeypatch, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        'import subprocess, sys\nsys.stdin.readline()\nprint(\'{"at": "momoe"}\', flush=True)\n'
        "open(sys.argv[0] + '.child', 'w').write(str(subprocess.Popen(['sleep', '120']).pid))\nsys.exit(7)\n"
    )
    monkeypatch.setattr(processes, "ENTRY", script)
    process = processes.Process(sys.executable, ["smoe", "momoe"], {})
    process.start()
    with pytest.raises(processes.Died, match="status 7") as died:
        process.ask("prepare")
    assert died.value.peer == "momoe"
    state = Path("/proc", (tmp_path / "ends.py.child").read_text(), "stat")
    assert " S " in state.read_text()  # sleeps
    process.stop()
    late = time.monotonic() + 60
    while state.exists() and " Z " not in state.read_text():
        assert time.monotonic() < late
        time.sleep(0.05)


def test_a_process_that_does_not_answer_is_ended(monkeypatch, tmp_path):
    """It names the peer and answers the first command; then it waits without end."""
    script = tmp_path / "waits.py"
    script.write_text(
        'import sys, threading\nsys.stdin.readline()\nprint(\'{"at": "momoe"}\\n{"done": 1}\', flush=True)\nthreading.Event().wait()\n'
    )
    monkeypatch.setattr(processes, "ENTRY", script)
    process = processes.Process(sys.executable, ["smoe", "momoe"], {})
    for arguments, error, text in (
        ({"limit": 0.1}, processes.Died, "^no answer within 0.1 s$"),
        ({"limit": 60, "deadline": time.monotonic()}, processes.TimeUp, "^momoe$"),
    ):
        process.start()
        begun = []
        assert process.ask("hello", begins=begun.append) == 1 and begun == ["momoe"]
        with pytest.raises(error, match=text) as raised:
            process.ask("prepare", **arguments)
        assert getattr(raised.value, "peer", "momoe") == "momoe" and process.child.wait(60) == -signal.SIGKILL
        process.stop()
    process.start()
    with pytest.raises(KeyboardInterrupt):
        process.ask("hello", begins=lambda _: signal.raise_signal(signal.SIGINT))
    assert process.child.wait(60) == -signal.SIGKILL
    process.stop()


def test_a_layer_that_smoe_cannot_measure_ends_with_status_3(pretend, monkeypatch, capsys):
    """smoe's record must have the failure. The other peers have times without a ratio, and the run continues. The command
    then ends with exit status 3."""
    real = Pretended.ask

    def ask(self, do, **arguments):
        answer = real(self, do, **arguments)
        if do == "prepare":
            answer["measured"]["smoe"] = {"failed": "out of memory"}
        return {"times": {"sonicmoe forward": 3.0}} if do == "round" else answer

    monkeypatch.setattr(Pretended, "ask", ask)
    _, found = pretend("--peers", "sonicmoe")
    assert [r.get("failed") for r in found] == ["out of memory", None] * 2
    assert found[1]["forward_ms"] == 3 and tables.ratio(found[1], "forward") is None
    assert tables.make(found)
    again = f"--records {pretend.path} --again --suite tiny --peers sonicmoe --shape-seconds 0".split()
    monkeypatch.setattr(sys, "argv", ["peers.py", *again])
    assert peers.main() == 3
    assert "smoe itself failed: tiny-a experts random; tiny-b experts random" in capsys.readouterr().err


# ---- the command ----


def test_the_commit_is_that_of_the_sources(tmp_path):
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    git = lambda *words: subprocess.run(
        ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True
    )

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    git("init", "-q")
    write("src/a.c", "1")
    git("add", "-A"), git("commit", "-q", "-m", "source")
    first = peers.commit(tmp_path)
    assert len(first) == 12
    write("docs/results/peers.jsonl", "{}")
    assert peers.commit(tmp_path) == first
    git("add", "-A"), git("commit", "-q", "-m", "records")
    assert peers.commit(tmp_path) == first
    write("src/a.c", "2")
    assert peers.commit(tmp_path) == first + "-dirty"
    git("add", "-A"), git("commit", "-q", "-m", "source again")
    assert peers.commit(tmp_path) not in (first, first + "-dirty")
    assert peers.commit(tmp_path / "none") == "unknown"


def command(path, *arguments, hide=None):
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    if hide:
        environment["PYTHONPATH"] = os.pathsep.join([str(hide), environment.get("PYTHONPATH", "")])
    line = [sys.executable, str(ROOT / "bench/peers.py"), "--records", str(path), *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=600)


def test_the_command_measures_on_the_cpu(tmp_path):
    """The suite is `tiny` without an argument."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "transformers.py").write_text("raise ImportError('not here')\n")
    path = tmp_path / "peers.jsonl"
    tiny = (
        "--device",
        "cpu",
        "--dtype",
        "f32",
        "--shape-seconds",
        "0",
        "--settle",
        "0",
        "--timed",
        "0",
    )
    done = command(path, *tiny, hide=tmp_path / "hidden")
    assert done.returncode == 0, done.stderr
    assert "transformers skipped: ImportError: not here; to install: pip install 'transformers>=5.17'" in done.stderr
    found = records.read(path)
    assert [(r["shape"], r["peer"]) for r in found] == [
        (shape, peer) for shape in ("tiny-a", "tiny-b") for peer in ("smoe", "loop")]  # fmt: skip
    for record in found:
        assert max(record["errors"].values()) < 1e-6 and record["forward_ms"] > 0 and record["rounds"] == 4
        assert record["commit"] and record["date"].endswith("Z") and record["versions"]["torch"] == torch.__version__
    assert "loop / smoe, geometric mean: forward" in done.stdout and "tiny-b" in done.stdout
    before = path.read_bytes()
    again = command(path, *tiny, "--peers", "loop", "--markdown")
    assert again.returncode == 0 and path.read_bytes() == before and "tiny-a experts" not in again.stderr
    assert "| tiny-a | loop |" in again.stdout


def test_a_measurement_keeps_the_published_records_as_they_are(tmp_path, monkeypatch, capsys):
    """What is measured goes into build/, and nothing of another device is shown beside it."""
    published, here = tmp_path / "docs.jsonl", tmp_path / "build" / "peers.jsonl"
    records.append(published, some_records())
    before = published.read_bytes()
    monkeypatch.setattr(peers, "PUBLISHED", published)
    monkeypatch.setattr(peers, "MEASURED_HERE", here)
    quick = "--device cpu --dtype f32 --shape tiny-a --suite tiny --peers loop --shape-seconds 0 --settle 0 --timed 0"
    monkeypatch.setattr(sys, "argv", ["peers.py", *quick.split()])
    assert peers.main() == 0
    assert published.read_bytes() == before and {record["shape"] for record in records.read(here)} == {"tiny-a"}
    records.append(here, some_records())  # as if another device had written into the same file
    capsys.readouterr()
    assert peers.main() == 0
    assert "tiny-a" in (text := capsys.readouterr().out) and "7B-n256" not in text and "GPU" not in text
    monkeypatch.setattr(sys, "argv", ["peers.py", "--show"])
    assert peers.main() == 0
    assert "7B-n256" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_names_the_cpu(tmp_path):
    done = command(tmp_path / "peers.jsonl", "--suite", "tiny")
    assert done.returncode == 3 and "torch finds no CUDA device" in done.stderr and "--device cpu" in done.stderr
    assert not (tmp_path / "peers.jsonl").exists()


def test_the_default_suite_is_that_of_the_device():
    """The paper's layers would take hours on the CPU."""
    suite = lambda *arguments: peers.default_suite(peers.parser().parse_args(arguments))
    assert (suite(), suite("--device", "cpu"), suite("--shape", "7B-n256")) == ("paper", "tiny", "")


def test_a_wrong_argument_ends_with_status_2(tmp_path):
    for arguments in (("--suite", "nosuch"), ("--peers", "nosuch"), ("--python", "nosuch=python3")):
        done = command(tmp_path / "peers.jsonl", *arguments)
        assert done.returncode == 2 and "nosuch" in done.stderr, arguments
    done = command(tmp_path / "peers.jsonl", "--tunings", "0")
    assert done.returncode == 2 and "'0': expected a number of at least 1" in done.stderr


def test_a_plot_needs_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "can_plot", lambda: False)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--show", "--plot", str(tmp_path / "ratios.png")])
    assert peers.main() == 3 and "pip install matplotlib" in capsys.readouterr().err


def test_a_document_is_renewed_between_its_marks(tmp_path):
    path, document = tmp_path / "peers.jsonl", tmp_path / "peers.md"
    document.write_text(f"before\n{peers.BEGIN}\nold\n{peers.END}\nafter\n")
    records.append(path, some_records())
    assert command(path, "--docs", str(document)).returncode == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| 7B-n256 | " in text and "SonicMoE's time / smoe's time" in text


def test_what_does_not_serve_is_named_with_status_3(tmp_path):
    """The command must print one line and end with status 3, without a traceback."""
    (tmp_path / "unmarked.md").write_text("nothing")
    (tmp_path / "broken.jsonl").write_text('{"commit"\n')
    none, broken = tmp_path / "none.jsonl", tmp_path / "broken.jsonl"
    records.append(tmp_path / "one.jsonl", some_records()[:1])
    tiny = ["--device", "cpu", "--suite", "tiny"]
    cases = [
        (none, ["--show"], "--show: no records in"),
        (broken, tiny, "broken.jsonl, line 1"),
        (tmp_path / "one.jsonl", ["--show", "--plot", str(tmp_path / "x.foo")], "--plot"),
        (Path("/dev/null"), tiny, "--records /dev/null: not a regular file"),
        (none, ["--device", "cpu", "--e2e", "tiny", "--peers", "smoe", "--python", "smoe=/bin/false"], "can run here"),
        (none, ["--docs", str(tmp_path / "unmarked.md")], "has no lines"),
        (none, ["--docs", str(tmp_path / "missing.md")], "missing.md"),
        (broken, ["--show"], "broken.jsonl, line 1"),
        (none, [*tiny, "--python", "loop=/no/python"], "/no/python: No such file"),
    ]
    for path, arguments, text in cases:
        done = command(path, *arguments)
        assert done.returncode == 3 and text in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_options_choose_what_is_shown(tmp_path):
    path = tmp_path / "peers.jsonl"
    records.append(path, some_records())
    done = command(path, "--show", "--peers", "sonicmoe")
    assert done.returncode == 0 and "sonicmoe" in done.stdout and "momoe" not in done.stdout.replace("sonicmoe", "")
    assert "momoe" in command(path, "--show", "--suite", "paper").stdout.replace("sonicmoe", "")
    assert "momoe" not in command(path, "--show", "--suite", "models").stdout.replace("sonicmoe", "")
    records.append(path, [record | {"settle_s": 0.4} for record in some_records()])
    shown = [command(path, "--show", *settle).stdout for settle in ((), ("--settle", "0.4"), ("--settle", "0.03"))]
    assert ["settled for 0.4 s" in text for text in shown] == [True, True, False]
    counts = [text.count("Suite paper, experts, random routing") for text in shown]
    assert counts[0] == counts[1] + counts[2] and counts[1] == counts[2] > 0
    records.append(path, [record | {"part": "layer"} for record in some_records()])
    for choice in (("--part", "layer"), ("--routing", "skewed")):
        text = command(path, "--show", *choice).stdout
        assert "Suite paper, experts" not in text and ("Suite paper, layer" in text) == (choice[1] == "layer")


def test_tables_are_in_the_order_of_the_shapes():
    made = [{"suite": suite, "shape": shape} for suite, shape in (
        ("e2e", "7B"), ("models", "OLMoE-1B-7B"), ("paper", "7B-n512"), ("thiek", "1x8x8x8x1"), ("paper", "7B-n256"))]  # fmt: skip
    assert [one["shape"] for one in peers.in_order(made)] == ["7B-n256", "7B-n512", "OLMoE-1B-7B", "7B", "1x8x8x8x1"]
    kinds = [("layer", "random", 0.03), ("experts", "skewed", 0.03), ("experts", "random", 0.4), ("experts", "random", 0.03)]
    made = [{"suite": "paper", "part": part, "routing": routing, "settle_s": settle, "shape": shape}
            for part, routing, settle in kinds for shape in ("7B-n256", "1.4B-n256")]  # fmt: skip
    assert peers.in_order(made) == made[::-1]


def test_an_interrupted_run_keeps_its_records(tmp_path):
    """As by timeout(1), which sends SIGTERM, or Ctrl-C. No traceback; the same command then goes on."""
    path, log = tmp_path / "peers.jsonl", tmp_path / "log"
    tiny = "--device cpu --dtype f32 --peers loop --settle 0 --timed 0 --shape-seconds".split()
    line = [sys.executable, str(ROOT / "bench/peers.py"), "--records", str(path), *tiny]
    with open(log, "w") as errors:
        running = subprocess.Popen([*line, "10"], stderr=errors, stdout=errors, start_new_session=True)
        while "peers: tiny-b" not in log.read_text() and running.poll() is None:
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGTERM)
        assert running.wait(600) == 130
    said = log.read_text()
    assert "interrupted; the same command goes on" in said and "Traceback" not in said, said
    assert [record["shape"] for record in records.read(path)] == ["tiny-a"] * 2
    assert subprocess.run([*line, "0"], capture_output=True, timeout=600).returncode == 0
    assert [record["shape"] for record in records.read(path)] == ["tiny-a"] * 2 + ["tiny-b"] * 2
