"""A measuring process: it reads commands from stdin as lines of JSON, and writes answers to stdout in the same way.

bench/peers.py starts one for each Python interpreter among the implementations. Output of libraries goes to stderr.
Before an implementation runs, the process sends its name ({"at": name}). So bench/peers.py knows which implementation
was running if the process ends.
"""

import importlib.metadata
import json
import os
import platform
import sys

import torch

from . import implementations, timing, tuning
from .inputs import Inputs
from .measured import Measured, new_t_seconds
from .suites import Shape

PROFILED_RUNS = 5
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def one_line(error):
    """The error and its cause: torch says that it could not load a library, and the cause says why."""
    text = " ".join(f"{error}: {error.__cause__}".removesuffix(": None").split())
    return f"{type(error).__name__}: {text[:300]}"


def version_of(package):
    """The module's __version__ (torch's contains the CUDA version), or else the version of the installed package."""
    said = getattr(sys.modules.get(package), "__version__", None)
    try:
        return said or importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not packaged"


class Worker:
    def __init__(self, send):
        self.send, self.jobs, self.inputs, self.clock, self.device = send, {}, None, None, ""
        self.shapes_seen, self.tuned = 0, {}

    # ---- commands ----

    def hello(self, device, peers):
        """The device's name, and for each implementation its versions or the reason why it cannot run."""
        if device == "cuda" and not torch.cuda.is_available():
            return {"no_device": "torch finds no CUDA device"}
        self.device, self.clock = device, timing.clock_of(device)
        name = torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}"
        if device == "cuda":
            torch.zeros(1, device="cuda")
            self.tuned = tuning.tune_fast()
        return {"device": name, "peers": {peer: self._load(peer) for peer in peers}}

    def _load(self, name):
        implementation = implementations.ALL[name]
        if self.device not in implementation.devices:
            return {"skipped": f"does not run on {self.device}"}
        self.send({"at": name})
        try:
            implementation.load()
        except Exception as error:  # noqa: BLE001, a broken installation raises anything
            return {"skipped": f"{one_line(error)}; to install: {implementation.install}"}
        return {"versions": {package: version_of(package) for package in implementation.packages}}

    def prepare(self, shape, part, routing, dtype, seed, passes, new_t, peers):
        """Makes the layer's inputs and each implementation's jobs. Answers with the figures that are measured once."""
        self.drop()
        torch._dynamo.reset()
        self.inputs = Inputs(Shape(*shape), self.device, DTYPES[dtype], routing, seed)
        found = {}
        for name in peers:
            self.send({"at": name})
            try:
                with implementations.ALL[name].turn():
                    found[name] = self._prepare_one(name, part, passes, new_t)
            except Exception as error:  # noqa: BLE001, any failure of a peer is its result
                found[name] = {"failed": one_line(error)}
                self._forget(name)
        self.shapes_seen += 1
        return {"measured": found}

    def _prepare_one(self, name, part, passes, new_t):
        implementation = implementations.ALL[name]
        if name == "cublas":
            jobs, factor = implementation.jobs(self.inputs)
            self._add(name, {key: job for key, job in jobs.items() if key in passes})
            return {"factor": factor}
        self.tuned.clear()
        measured = Measured(implementation, self.inputs, part)
        first, out, gradients = measured.first_call(self.clock)
        implementation.check_code()
        errors = measured.errors(out, gradients)
        del out, gradients
        kept, peak = measured.memory()
        self._add(name, measured.jobs(passes))
        return {
            "first_call_s": first,
            "first_in_process": self.shapes_seen == 0,
            "errors": errors,
            "kept_bytes": kept,
            "peak_bytes": peak,
            "new_t_s": new_t_seconds(implementation, self.inputs, part, self.clock) if new_t else None,
            "w1_layout": implementation.w1_layout,
        } | ({"triton_tuning": dict(self.tuned)} if self.tuned else {})

    def _add(self, name, jobs):
        self.jobs |= {f"{name} {key}": job for key, job in jobs.items()}

    def _forget(self, name):
        """Drops a peer that failed. Ends the process if the failure broke the CUDA context, which no later job could
        use."""
        self.jobs = {key: job for key, job in self.jobs.items() if key.split()[0] != name}
        if self.device == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                os._exit(70)

    def round(self, index, layer, settle_s, timed_s):
        """One turn of every job: {"times": {"peer pass": ms}}. The second function of the pair `both` is the pass
        `backward`."""
        times = {}
        for name in timing.order_of(list(self.jobs), index, layer):
            peer = name.split()[0]
            self.send({"at": peer})
            with implementations.ALL[peer].turn():
                times[name], *backward = timing.turn(self.clock, self.jobs[name], settle_s, timed_s)
            times |= {f"{peer} backward": ms for ms in backward}
        return {"times": times}

    def kernels(self, index, layer, settle_s):
        """One turn of every job: its kernels and their times, {"kernels": {"peer pass": [[kernel, launches, us]]}}."""
        found = {}
        for name in timing.order_of(list(self.jobs), index, layer):
            peer = name.split()[0]
            self.send({"at": peer})
            with implementations.ALL[peer].turn():
                found[name] = timing.kernels_of(self.clock, self.jobs[name], settle_s, PROFILED_RUNS)
        return {"kernels": found}

    def step(self, model, peer, seconds):
        """A whole training step with one implementation's experts."""
        from .step import measure

        self.send({"at": peer})
        try:
            with implementations.ALL[peer].turn():
                return {"measured": measure(model, implementations.ALL[peer], self.device, seconds)}
        except Exception as error:  # noqa: BLE001
            return {"failed": one_line(error)}

    def drop(self):
        self.jobs, self.inputs = {}, None
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {}


def main(answers):
    """Carries out commands until stdin ends; `answers` is the file that the answers go to."""

    def send(message):
        answers.write(json.dumps(message) + "\n")

    worker = Worker(send)
    for line in sys.stdin:
        command = json.loads(line)
        send({"done": getattr(worker, command.pop("do"))(**command)})
