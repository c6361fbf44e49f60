"""`python -m smoe`, and the command `smoe` of the package: runs the command line tool that the package brings."""

import os
import sys
from pathlib import Path


def main() -> int:
    tool = Path(__file__).parent / "bin" / "smoe"
    if not tool.is_file():
        print(
            f"smoe: the package in {tool.parents[1]} has no tool; it was built without libjansson-dev or zlib1g-dev",
            file=sys.stderr,
        )
        return 3
    os.execv(tool, [str(tool), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
