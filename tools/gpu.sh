#!/bin/sh
# The GPU programs on a machine that has a GPU and little else.
#
#   tools/gpu.sh pack BUILD DIR       on the build machine: programs and the libraries they need, into DIR
#   DIR/gpu.sh run DIR PART...        on the GPU machine: the parts in order, each under its own time limit;
#                                     logs under $OUT (default DIR/out). Parts: check, check:NAME,
#                                     measure:ROUTING:CHUNKS:SHAPE[:SHAPE...], smoe:ARGUMENTS (words joined by +),
#                                     check_backward (14 processes), backward:WORD[:WORD...] (measure_backward.c)
set -u

pack() {
    mkdir -p "$2/lib"
    cp "$0" "$2/gpu.sh"
    for program in tests/cuda/cuda_check tests/cuda/cuda_measure tests/cuda/cuda_check_backward \
        tests/cuda/cuda_measure_backward smoe; do
        [ -x "$1/$program" ] && cp "$1/$program" "$2/"
    done
    for program in "$2"/cuda_* "$2"/smoe; do
        [ -x "$program" ] && ldd "$program"
    done | awk '$3 ~ /openblas|gomp|gfortran|quadmath|jansson|libz/ { print $3 }' | sort -u | while read -r library; do
        cp -L "$library" "$2/lib/"
    done
    du -sh "$2"
}

# The cases of check_backward, most of whose time the reference on the CPU takes, in 14 processes.
check_backward() {
    for shard in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do
        OMP_NUM_THREADS=1 LAUNCHES="${LAUNCHES:-300}" timeout 100 ./cuda_check_backward --shard $shard 14 \
            >"$out/shard.$shard" 2>&1 &
    done
    wait
    cat "$out"/shard.*
    grep -c '^0 wrong' "$out"/shard.* | grep -c ':1$' | sed 's/$/ of 14 processes found nothing wrong/'
    rm "$out"/shard.*
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
        check_backward) check_backward ;;
        backward:*)
            # shellcheck disable=SC2046
            timeout 250 ./cuda_measure_backward $(echo "${part#backward:}" | tr ':' ' ') ;;
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
*) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
