#!/bin/sh
# Runs a compiler and keeps what it says beside the object it makes, in OBJECT.log: ptxas -v lists registers and
# spills there, and tests/cuda/resources.sh reads it. All but that list is shown too.
object='' previous=''
for word; do
    [ "$previous" = -o ] && object=$word
    previous=$word
done
"$@" >"$object.log" 2>&1
status=$?
grep -Ev '^ptxas info|^    [0-9]+ bytes stack frame|^$' "$object.log" >&2
exit $status
