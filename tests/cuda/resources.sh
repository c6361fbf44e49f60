#!/bin/sh
# Reads what ptxas -v said of every kernel (cmake/keep_output.sh kept it): fails on a spill, on a stack frame, on a
# C75xx line (wgmma serialised, setmaxnreg ignored), and when there is nothing to read.
set -eu
cd "$1"
logs=$(find . -name '*.cu.o.log')
kernels=$(cat $logs | grep -c 'bytes spill stores') || { echo "no output of ptxas -v in $1"; exit 1; }
bad=$(cat $logs | grep -E 'C75[0-9][0-9]|spill stores' | grep -v '^    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads$' || true)
[ -z "$bad" ] || { echo "$bad"; exit 1; }
echo "$kernels kernels, no spills"
