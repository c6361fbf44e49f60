"""`python -m smoe` where the package has no tool. tools/wheel.sh runs the tool of the wheel."""

import subprocess
import sys


def test_a_package_without_the_tool_says_so():
    done = subprocess.run([sys.executable, "-m", "smoe", "info"], capture_output=True, text=True)
    assert done.returncode == 3 and "has no tool" in done.stderr and "libjansson-dev" in done.stderr
