#!/bin/sh
# Reads the output of ptxas -v for every kernel, which cmake/keep_output.sh has kept. Fails if a kernel has a spill or a stack
# frame, if there is a message C75xx (wgmma serialised, setmaxnreg ignored), or if there is no output.
set -eu
cd "$1"
logs=$(find . -name '*.cu.o.log')
kernels=$(cat $logs | grep -c 'bytes spill stores') || { echo "no output of ptxas -v in $1"; exit 1; }
bad=$(cat $logs | grep -E 'C75[0-9][0-9]|spill stores' | grep -v '^    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads$' || true)
[ -z "$bad" ] || { echo "$bad"; exit 1; }
echo "$kernels kernels, no spills"
