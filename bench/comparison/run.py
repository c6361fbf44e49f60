"""The measuring loop over tunings, layers and rounds. Records are appended after each layer. This module needs no
torch."""

import datetime
import statistics
import sys
import time

from . import records
from .processes import VARIABLES, Died, Failed, TimeUp, group

BASE = "smoe"
PEERS = (
    "smoe", "smoe-concatenated", "smoe-portable", "smoe-f8", "sonicmoe", "scattermoe", "momoe", "liger", "deepgemm", "torchao-f8",
    "grouped_mm", "transformers", "loop", "cublas", *VARIABLES,
)  # fmt: skip
JOBS = ("alone", "smoe-ep", "a2a-smoe", "a2a-grouped_mm", "torch")  # of --ranks, comparison/ranks.py
# Makes SonicMoE's tuner ignore the timings that it keeps in files. The other tuners start anew in every process.
NEW_TUNING = {"QUACK_FORCE_CACHE_UPDATE": "1"}


def say(text):
    print(f"peers: {text}", file=sys.stderr, flush=True)


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def times_of(rounds, peer, factor=1.0):
    """{"forward_ms", "both_ms", "backward_ms", ...} of one peer: medians over the rounds. Without times of the backward,
    it is both less the forward. rounds: a list of {"peer pass": ms}."""
    found = {}
    for name in dict.fromkeys(key for one in rounds for key in one):
        owner, measured = name.split()
        if owner == peer:
            found[measured + "_ms"] = factor * statistics.median(one[name] for one in rounds if name in one)
    if "backward_ms" not in found and "forward_ms" in found and "both_ms" in found:
        found["backward_ms"] = found["both_ms"] - found["forward_ms"]
    return found


def in_rounds(rounds, peer, beside, factor=1.0):
    """{"forward": [ms, ...], "backward": [ms, ...], "both": [ms, ...], ...} of one peer, of the rounds in which both
    peers were measured. rounds: a list of {"peer pass": ms}."""
    found = {}
    for measured in sorted({name.split()[1] for one in rounds for name in one if name.split()[0] == peer}):
        needed = {f"{one} {measured}" for one in (peer, beside)}
        found[measured] = [round(factor * one[f"{peer} {measured}"], 5) for one in rounds if needed <= one.keys()]
    return found


def median_kernels(rounds):
    """Of each kernel of a job the median time over the rounds, the longest first. rounds: a list of {"peer pass":
    [[kernel, launches, us]]}."""
    found = {}
    for job in rounds[0] if rounds else ():
        times = {}
        for one in rounds:
            for kernel, launches, us in one.get(job, ()):
                times.setdefault(kernel, (launches, []))[1].append(us)
        found[job] = [[kernel, launches, statistics.median(us)] for kernel, (launches, us) in times.items()]
        found[job].sort(key=lambda one: -one[2])
    return found


def times_of_kernels(kernels, peer, factor=1.0):
    """{"gpu_forward_ms", "gpu_both_ms", "gpu_backward_ms", ..., "kernels": {pass: [[kernel, launches, us]]}} of one peer:
    the sums of the times of its kernels, and these times. kernels: {"peer pass": [[kernel, launches, us]]}."""
    own = {key.split()[1]: list_of for key, list_of in kernels.items() if key.split()[0] == peer}
    if not own:
        return {}
    sums = {f"{peer} {name}": sum(us for *_, us in list_of) / 1e3 for name, list_of in own.items()}
    return {"gpu_" + name: ms for name, ms in times_of([sums], peer, factor).items()} | {"kernels": own}


class Run:
    """One run of bench/peers.py: options (its arguments), the layers, the deadline."""

    def __init__(self, options, shapes):
        self.options, self.shapes = options, shapes
        self.deadline = time.monotonic() + options.seconds
        self.processes, self.versions, self.device = [], {}, ""
        self.layer = ""  # the layer that is measured, with part, routing and tuning
        self.told = set()
        self.failed = []  # the layers and steps that smoe itself could not compute

    def out_of_time(self):
        return time.monotonic() >= self.deadline

    # ---- processes ----

    def start(self, peers, environment):
        """Starts the processes and asks which peers each can measure. Prints a line for each peer that it cannot."""
        self.processes = group(peers, self.options.pythons, BASE, environment)
        for process in self.processes:
            self._start_one(process)
        if set(peers) - {BASE} and all(process.peers == [BASE] for process in self.processes):
            raise Failed("none of the implementations that smoe is to be compared with can run here")
        for process in self.processes[1:]:
            if process.peers == [BASE]:  # no peer is left to compare with
                process.stop()
                self.processes.remove(process)

    def _environment(self, tuning):
        return NEW_TUNING if tuning else {}

    def _ask(self, process, do, more=0.0, **arguments):
        """Sends a command. It ends at the deadline, or if an implementation takes --peer-seconds and `more`."""
        return process.ask(do, limit=self.options.peer_seconds + more, deadline=self.deadline, **arguments)

    def _hello(self, process):
        """What the process says of itself. A peer that ends it, or does not answer, is left out."""
        while True:
            process.start()
            try:
                return self._ask(process, "hello", device=self.options.device, peers=process.peers)
            except Died as died:
                if died.peer in (None, BASE):
                    raise Failed(f"{process.python} could not load {died.peer or 'torch'}: {died}") from None
                say(f"{died.peer} left out, could not be loaded: {died}")
                process.peers.remove(died.peer)
                process.stop()

    def _start_one(self, process):
        facts = self._hello(process)
        if "no_device" in facts:
            raise Failed(f"{facts['no_device']}; --device cpu measures tiny layers without one")
        self.device = facts["device"]
        for peer, fact in facts["peers"].items():
            if "skipped" not in fact:
                self.versions[peer] = fact["versions"]
                continue
            if peer == BASE:
                raise Failed(f"{BASE} itself cannot run: {fact['skipped']}")
            process.peers.remove(peer)
            if peer not in self.told:
                self.told.add(peer)
                say(f"{peer} skipped: {fact['skipped']}")

    def stop(self):
        for process in self.processes:
            process.stop()

    # ---- layers ----

    def measure(self):
        """Measures everything that has no record yet. Returns whether time ran out before the end."""
        for tuning in range(self.options.tunings):
            if self.out_of_time():
                return True
            try:
                self.start(self.options.peers, self._environment(tuning))
                if self._measure_tuning(tuning):
                    return True
            except TimeUp as late:
                say(f"time was up while {late} was loaded, prepared or measured")
                return True
            finally:
                self.stop()
        return False

    def _measure_tuning(self, tuning):
        for part in self.options.parts:
            for routing in self.options.routings if part == "experts" else ["random"]:
                for shape in self.shapes:
                    if self.out_of_time():
                        return True
                    self._measure_layer(shape, part, routing, tuning)
        return False

    def _fields(self, shape, part, routing, tuning):
        """All fields of a record's key but the peer."""
        o = self.options
        return {"commit": o.commit, "device": self.device, "suite": shape.suite, "shape": shape.name, "T": shape.T,
                "d": shape.d, "n": shape.n, "E": shape.E, "K": shape.K, "part": part, "routing": routing,
                "dtype": o.dtype, "settle_s": o.settle, "tuning": tuning}  # fmt: skip

    def _measure_layer(self, shape, part, routing, tuning):
        fields = self._fields(shape, part, routing, tuning)
        there = [] if self.options.again else records.read(self.options.records)
        present = list(dict.fromkeys(peer for process in self.processes for peer in process.peers))
        passes = self.options.passes_of(shape)
        # In records without the pass `backward` it is a difference.
        passes = passes + ["backward"] * ("both" in passes) + ["kernels"] * self.options.kernels
        wanted = records.missing(there, fields, present, passes)
        if not wanted:
            return
        self.layer = f"{shape.name} {part} {routing}" + (f" tuning {tuning}" if self.options.tunings > 1 else "")
        say(self.layer)
        found = {}
        try:
            self._take_turns(shape, part, routing, wanted, found)
        finally:  # if time is up before the figures are there, found has the peers that were left out
            date = now()
            self._append([
                fields | {"timed_s": self.options.timed, "peer": peer, "date": date, "versions": self.versions[peer],
                          "passes": passes} | found[peer]
                for peer in wanted
                if peer in found
            ])  # fmt: skip

    def _append(self, new):
        records.append(self.options.records, new)

    def _take_turns(self, shape, part, routing, wanted, found):
        """Fills found: {peer: its figures, or the failure}. A peer during whose turn the process ends is left out of the rest of the
        run. The process then begins the layer again without this peer; earlier rounds of the other peers still
        count."""
        busy = [process for process in self.processes if set(process.peers) & set(wanted)]
        ready = {id(process): self._prepare(process, shape, part, routing, wanted, found) for process in busy}
        rounds = {id(process): [] for process in busy}
        begin, index = time.monotonic(), 0
        while self._goes_on(begin, index, ready):
            turn = index % len(busy)
            for process in busy[turn:] + busy[:turn]:
                if not self._round(process, index, rounds[id(process)], found):
                    ready[id(process)] = self._prepare(process, shape, part, routing, wanted, found)
            index += 1
        for process in busy:
            kernels = self._kernels(process, found)
            self._drop(process)
            self._collect(process, ready[id(process)], rounds[id(process)], kernels, found)

    def _goes_on(self, begin, rounds, ready):
        if all("failed" in once for prepared in ready.values() for once in prepared.values()):
            return False
        return rounds < self.options.least_rounds or time.monotonic() - begin < self.options.shape_seconds

    def _prepare(self, process, shape, part, routing, wanted, found):
        o, begun = self.options, []

        def begins(peer):
            begun.append((peer, time.monotonic()))
            say(f"  {peer} is prepared")

        while True:
            peers = [BASE] + [peer for peer in process.peers if peer in wanted and peer != BASE]
            begun.clear()
            try:
                ready = self._ask(
                    process, "prepare", shape=list(shape), part=part, routing=routing, dtype=o.dtype, seed=o.seed,
                    passes=o.passes_of(shape), new_t=o.new_t, peers=peers, begins=begins,
                )["measured"]  # fmt: skip
            except Died as died:
                self._leave_out(process, died, found)
                continue
            ends = [begin for _, begin in begun[1:]] + [time.monotonic()]
            took = [f"{peer} {end - begin:.1f}" for (peer, begin), end in zip(begun, ends, strict=False)]
            say(f"  seconds of preparing: {', '.join(took)}")
            return ready

    def _round(self, process, index, rounds, found):
        o = self.options
        try:
            answer = self._ask(process, "round", index=index, layer=self.layer, settle_s=o.settle, timed_s=o.timed)
            rounds.append(answer["times"])
            return True
        except Died as died:
            self._leave_out(process, died, found)
            return False

    def _kernels(self, process, found):
        """The kernels of every job if they were asked for: {"peer pass": [[kernel, launches, us]]}."""
        rounds = []
        try:
            for index in range(self.options.least_rounds if self.options.kernels else 0):
                answer = self._ask(process, "kernels", index=index, layer=self.layer, settle_s=self.options.settle)
                rounds.append(answer["kernels"])
        except Died as died:
            self._leave_out(process, died, found)
        return median_kernels(rounds)

    def _drop(self, process):
        try:
            process.ask("drop", limit=self.options.peer_seconds)
        except Died:
            pass  # all rounds are measured; the next command finds the process ended

    def _leave_out(self, process, died, found):
        if died.peer in (None, BASE):
            raise Failed(f"{BASE} itself cannot run: {died}")
        say(f"{died.peer} left out from here on: {died}")
        found[died.peer] = {"failed": str(died)}
        process.peers.remove(died.peer)
        process.stop()
        self._start_one(process)

    def _collect(self, process, ready, rounds, kernels, found):
        base = times_of(rounds, BASE) | times_of_kernels(kernels, BASE)
        base.pop("kernels", None)
        for peer, once in ready.items():
            if peer in found:  # smoe, of which the first process makes the record
                continue
            if "failed" in once:
                self._say_failed(peer, self.layer, once["failed"])
                found[peer] = once
                continue
            factor = once.pop("factor", 1.0)
            times = times_of(rounds, peer, factor) | times_of_kernels(kernels, peer, factor)
            found[peer] = {"rounds": len(rounds), BASE: dict(base)} | times | once
            if peer != BASE:
                found[peer]["round_ms"] = in_rounds(rounds, peer, BASE, factor)
                found[peer][BASE]["round_ms"] = in_rounds(rounds, BASE, peer)

    def _say_failed(self, peer, what, why):
        say(f"{peer} failed: {why}")
        if peer == BASE:
            self.failed.append(what)

    # ---- a whole training step ----

    def steps(self, model):
        """Measures training steps, one process for each implementation and tuning. The processes run one after the
        other, because their memory does not fit at once. Every second tuning takes the implementations in reverse
        order. Returns whether time ran out before the end. If no implementation can run it raises Failed."""
        can_run = False
        for tuning in range(self.options.tunings):
            peers = [peer for peer in self.options.peers if peer != "cublas"]
            for peer in peers if tuning % 2 == 0 else peers[::-1]:
                if self.out_of_time():
                    return True
                try:
                    can_run |= self._step(model, peer, tuning)
                except TimeUp:
                    say(f"time was up while {peer} was measured")
                    return True
        if not can_run:
            raise Failed("no implementation can run here")
        return False

    def _step(self, model, peer, tuning):
        """Returns whether the implementation can run here. It is measured unless it has a record."""
        o = self.options
        self.processes = group([peer], o.pythons, peer, self._environment(tuning))
        try:
            self.processes[0].start()
            return self._step_in(self.processes[0], model, peer, tuning)
        except Died as died:
            say(f"{peer} could not be loaded: {died}")
            return False
        finally:
            self.stop()

    def _step_in(self, process, model, peer, tuning):
        o = self.options
        facts = self._ask(process, "hello", device=o.device, peers=[peer])
        if "no_device" in facts:
            raise Failed(facts["no_device"])
        self.device = facts["device"]
        fact = facts["peers"][peer]
        if "skipped" in fact:
            say(f"{peer} skipped: {fact['skipped']}")
            return False
        fields = {"commit": o.commit, "device": self.device, "suite": "e2e", "shape": model, "part": "e2e",
                  "dtype": "bf16", "tuning": tuning, "peer": peer}  # fmt: skip
        if not o.again and not records.missing(records.read(o.records), fields, [peer]):
            return True
        say(f"step of {model}, {peer}")
        try:
            answer = self._ask(process, "step", more=o.shape_seconds, model=model, peer=peer, seconds=o.shape_seconds)
        except Died as died:
            answer = {"failed": str(died)}
        if "failed" in answer:
            self._say_failed(peer, f"step of {model}", answer["failed"])
        found = answer.get("measured", answer)
        self._append([fields | {"date": now(), "versions": fact["versions"]} | found])
        return True
