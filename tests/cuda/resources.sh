#!/bin/sh
# Reads the output of ptxas -v for every kernel below FOLDER, which cmake/keep_output.sh has kept. Fails if a kernel has a spill or
# a stack frame, if there is a message C75xx (wgmma serialised, setmaxnreg ignored), or if there are fewer than LEAST kernels.
# resources.sh FOLDER LEAST
set -eu
cd "$1"
logs=$(find . -name '*.cu.o.log')
[ -n "$logs" ] || { echo "no output of ptxas -v in $1"; exit 1; }
kernels=$(cat $logs | sed -n "s/.*Compiling entry function '\(.*\)' for .*/\1/p" | sort -u | wc -l)
code=$(cat $logs | grep -c 'bytes spill stores' || true)
bad=$(cat $logs | grep -E 'C75[0-9][0-9]|spill stores' | grep -v '^    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads$' || true)
[ -z "$bad" ] || { echo "$bad"; exit 1; }
[ "$kernels" -ge "$2" ] || { echo "$kernels kernels in $1, $2 are expected"; exit 1; }
echo "$kernels kernels, compiled $code times for all architectures, no spills"
