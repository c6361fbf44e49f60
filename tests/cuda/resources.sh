#!/bin/sh
# Reads the output of ptxas -v for every kernel below FOLDER, which cmake/keep_output.sh has kept. Fails if a kernel has a spill or
# a stack frame, if there is a message C75xx (wgmma serialised, setmaxnreg ignored), or if there are fewer kernels for an
# architecture than LEAST. For 90a, those for 90 count too.
# resources.sh FOLDER ARCHITECTURE=LEAST...
set -eu
cd "$1"
shift
logs=$(find . -name '*.cu.o.log')
[ -n "$logs" ] || { echo "no output of ptxas -v in $PWD"; exit 1; }
bad=$(cat $logs | grep -E 'C75[0-9][0-9]|spill stores' | grep -v '^    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads$' || true)
[ -z "$bad" ] || { echo "$bad"; exit 1; }
for wanted; do
    architecture=${wanted%=*}
    kernels=$(cat $logs | sed -n "s/.*Compiling entry function '\(.*\)' for 'sm_\($architecture\|${architecture%a}\)'.*/\1/p" | sort -u | wc -l)
    [ "$kernels" -ge "${wanted#*=}" ] || { echo "$kernels kernels for sm_$architecture in $PWD, ${wanted#*=} are expected"; exit 1; }
    echo "sm_$architecture: $kernels kernels, no spills"
done
