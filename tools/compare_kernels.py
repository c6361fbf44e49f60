#!/usr/bin/env python3
"""Compares the machine code of every kernel of two builds: compare_kernels.py OLD_BUILD NEW_BUILD.

Prints the kernels whose instructions differ and those that only one build has; exit status 1 if there are any.
Kernels with different names (a renamed namespace or parameter type) count as the same if their instructions are
equal."""
import collections
import hashlib
import pathlib
import re
import subprocess
import sys


def kernels(build):
    """Maps the name of every kernel below `build`/src/cuda to a hash of its instructions."""
    code = {}
    for path in sorted(pathlib.Path(build, "src/cuda").rglob("*.cu.o")):
        listing = subprocess.run(["cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
        for part in re.split(r"\n\s*Function : ", listing)[1:]:
            name, body = part.split("\n", 1)
            instructions = "\n".join(re.findall(r"0x[0-9a-f]{16}", body))
            code[name] = hashlib.sha256(instructions.encode()).hexdigest()
    return code


def readable(name):
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=False).stdout.strip() or name


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    old, new = kernels(sys.argv[1]), kernels(sys.argv[2])
    if not old or not new:
        print("no kernels found: build the target smoe_shared in both folders", file=sys.stderr)
        return 3
    changed = [name for name in old if name in new and old[name] != new[name]]
    gone = [name for name in old if name not in new]
    come = {name for name in new if name not in old}
    by_code = collections.defaultdict(list)
    for name in sorted(come):
        by_code[new[name]].append(name)
    lost = []
    for name in gone:
        if by_code[old[name]]:
            come.remove(by_code[old[name]].pop())
        else:
            lost.append(name)
    for title, names in (("changed", changed), ("only in the old build", lost), ("only in the new build", sorted(come))):
        for name in names:
            print(f"{title}: {readable(name)}")
    print(f"{len(old)} kernels, {len(new)} now: {len(old) - len(changed) - len(lost)} the same, {len(changed)} changed, "
          f"{len(lost)} gone or changed with their name, {len(come)} new")
    return 1 if changed or lost or come else 0


sys.exit(main())
