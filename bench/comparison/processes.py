"""The measuring processes, as bench/peers.py starts and commands them. This module needs no torch."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

FOREVER = float("inf")
ENTRY = Path(__file__).resolve().parent.parent / "peers.py"

# Triton then multiplies by mma.sync, as it does on GPUs before Hopper. The folder has the code of these processes alone, so
# that it can be checked.
MMA_SYNC = {"DISABLE_MMA_V3": "1", "TRITON_CACHE_DIR": str(Path.home() / ".triton/cache-mma-sync")}
# Implementations that need a process with variables of their own.
VARIABLES = {"scattermoe-mma": MMA_SYNC, "momoe-mma": MMA_SYNC, "liger-mma": MMA_SYNC}


class Failed(RuntimeError):
    """Nothing can be measured; exit status 3."""


class Died(RuntimeError):
    """A measuring process ended while `peer` was running in it, or was ended because `peer` took too long."""

    def __init__(self, peer, why):
        super().__init__(why)
        self.peer = peer


class TimeUp(RuntimeError):
    """The run's time was up before the answer came. The process was killed."""


class Process:
    """One measuring process: its Python interpreter, its implementations, and variables to add to the environment."""

    def __init__(self, python, peers, environment):
        self.python, self.peers = python, list(peers)
        self.environment = os.environ | environment
        self.child, self.at, self.unread = None, None, b""

    def start(self):
        self.at, self.unread = None, b""
        try:
            self.child = subprocess.Popen(
                [self.python, str(ENTRY), "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self.environment,
                start_new_session=True,  # for kill
            )
        except OSError as error:
            raise Failed(f"{self.python}: {error.strerror}") from None

    def ask(self, do, *, limit=FOREVER, deadline=FOREVER, begins=None, **arguments):
        """Sends a command and returns the answer. Raises Died if the process ends first, and if an implementation takes more
        than `limit` seconds; TimeUp at `deadline`, by time.monotonic. begins(peer) is called as soon as one begins."""
        try:
            self.child.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
            self.child.stdin.flush()
        except OSError:
            raise self._died() from None
        try:
            return self._answer(limit, deadline, begins)
        except KeyboardInterrupt:  # the process has not got the signal
            self.kill()
            raise

    def _answer(self, limit, deadline, begins):
        while (line := self._line(limit, deadline)) is not None:
            message = json.loads(line)
            if "done" in message:
                return message["done"]
            self.at = message["at"]
            if begins:
                begins(self.at)
        raise self._died()

    def _died(self):
        return Died(self.at, f"its process ended with status {self.child.wait()}")

    def _line(self, limit, deadline):
        """The next line of the process, None once the process has ended. A process that it started may live longer and
        keep the pipe open, so the end of the pipe alone does not show that the process has ended."""
        late = time.monotonic() + limit
        while b"\n" not in self.unread:
            ended = self.child.poll() is not None
            left = min(late, deadline) - time.monotonic()
            if left <= 0 and not ended:
                self.kill()
                raise TimeUp(self.at or "torch") if deadline <= late else Died(self.at, f"no answer within {limit:g} s")
            if select.select([self.child.stdout], [], [], 0 if ended else min(left, 1))[0]:
                more = os.read(self.child.stdout.fileno(), 65536)
                if not more:
                    return None
                self.unread += more
            elif ended:
                return None
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def stop(self):
        if self.child is None:
            return
        for stream in (self.child.stdin, self.child.stdout):
            try:
                stream.close()
            except OSError:
                pass  # the process ended before it had read everything
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        self.child.wait()
        self.child = None

    def kill(self):
        """Ends the process and all that it has started."""
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # they have ended


def group(peers, pythons, base, environment):
    """The processes for these implementations: one for each interpreter and VARIABLES, with the base implementation in
    every one."""
    together = {}
    for peer in peers:
        python, variables = pythons.get(peer, sys.executable), VARIABLES.get(peer, {})
        together.setdefault((python, tuple(variables.items())), []).append(peer)
    return [
        Process(python, [base] + [peer for peer in members if peer != base], environment | dict(variables))
        for (python, variables), members in together.items()
    ]
