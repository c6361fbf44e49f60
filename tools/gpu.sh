#!/bin/sh
# The GPU programs on a machine that has a GPU and little else.
#
#   tools/gpu.sh pack BUILD DIR       on the build machine: programs and the libraries they need, into DIR
#   DIR/gpu.sh run DIR PART...        on the GPU machine: the parts in order, each under its own time limit;
#                                     logs under $OUT (default DIR/out). Parts: check, check:NAME,
#                                     measure:ROUTING:CHUNKS:SHAPE[:SHAPE...], smoe:ARGUMENTS (words joined by +)
set -u

pack() {
    mkdir -p "$2/lib"
    cp "$0" "$2/gpu.sh"
    for program in tests/cuda/cuda_check tests/cuda/cuda_measure smoe; do
        [ -x "$1/$program" ] && cp "$1/$program" "$2/"
    done
    for program in "$2"/cuda_check "$2"/cuda_measure "$2"/smoe; do
        [ -x "$program" ] && ldd "$program"
    done | awk '$3 ~ /openblas|gomp|gfortran|quadmath|jansson|libz/ { print $3 }' | sort -u | while read -r library; do
        cp -L "$library" "$2/lib/"
    done
    du -sh "$2"
}

run() {
    cd "$1" || exit 3
    shift
    out=${OUT:-$PWD/out}
    mkdir -p "$out"
    export LD_LIBRARY_PATH="$PWD/lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    for part; do
        start=$(date +%s)
        case $part in
        check) timeout 150 ./cuda_check ;;
        check:*) timeout 60 ./cuda_check "${part#check:}" ;;
        measure:*)
            # shellcheck disable=SC2046
            timeout 200 ./cuda_measure $(echo "${part#measure:}" | tr ':' ' ') ;;
        smoe:*)
            # shellcheck disable=SC2046
            timeout 250 ./smoe $(echo "${part#smoe:}" | tr '+' ' ') ;;
        *) echo "unknown part $part" ;;
        esac >"$out/part.txt" 2>&1
        status=$?
        cat "$out/part.txt" >>"$out/log.txt"
        tail -c 9000 "$out/part.txt"
        echo "== $part: exit $status, $(($(date +%s) - start)) s"
    done
    rm -f "$out/part.txt"
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
pack) pack "$@" ;;
run) run "$@" ;;
*) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
