"""The measuring processes, seen from bench/peers.py. No torch here."""

import json
import os
import subprocess
import sys
from pathlib import Path

ENTRY = Path(__file__).resolve().parent.parent / "peers.py"


class Died(RuntimeError):
    """A measuring process ended; `peer` had its turn."""

    def __init__(self, peer, status):
        super().__init__(f"its process ended with status {status}")
        self.peer = peer


class Process:
    """One measuring process: Python interpreter, implementations in it, environment to add."""

    def __init__(self, python, peers, environment):
        self.python, self.peers = python, list(peers)
        self.environment = os.environ | environment
        self.child, self.at = None, None

    def start(self):
        self.child = subprocess.Popen(
            [self.python, str(ENTRY), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def ask(self, do, **arguments):
        """The answer to a command. Died if the process ends first."""
        try:
            self.child.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self.child.stdin.flush()
        except OSError:
            raise Died(self.at, self.child.wait()) from None
        for line in self.child.stdout:
            message = json.loads(line)
            if "done" in message:
                return message["done"]
            self.at = message["at"]
        raise Died(self.at, self.child.wait())

    def stop(self):
        if self.child is None:
            return
        for stream in (self.child.stdin, self.child.stdout):
            try:
                stream.close()
            except OSError:
                pass  # it ended before it had read everything
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child = None


def group(peers, pythons, base, environment):
    """The processes for these implementations: one for each interpreter, with the base implementation in every one."""
    by_python = {}
    for peer in peers:
        by_python.setdefault(pythons.get(peer, sys.executable), []).append(peer)
    return [
        Process(python, [base] + [peer for peer in members if peer != base], environment)
        for python, members in by_python.items()
    ]
