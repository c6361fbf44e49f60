#!/bin/sh
# Checks the Python package on a machine that has a GPU, PyTorch and perhaps JAX, but no compilers and no network.
#
#   tools/gpu_python.sh pack BUILD DIR           on the build machine: libsmoe.so and libsmoe_xla.so of BUILD (targets smoe_shared
#                                                smoe_xla), their libraries, python/ and tests/python/ into DIR (14 MB)
#   DIR/gpu_python.sh run DIR [torch] [jax] [-- ARGUMENTS]
#                                                on the GPU machine, within BUDGET seconds (default 560): tests/python/gpu.py (torch)
#                                                with ARGUMENTS, at most 400 s, and tests/python/jax_gpu.py (jax), at most 120 s;
#                                                without names both
# Logs come back as torch.log and jax.log under $OUT (default DIR/out). Scratch is $WORK (default DIR/work). PYTHON names another
# python3. DEVICE=cpu runs the parts that can run on a CPU, to try this script; it needs a command nvidia-smi all the same.
# Exit status: 0 all well, 1 a check failed, 2 wrong arguments, 3 nothing could be unpacked, 77 no GPU, or JAX finds none.
# shellcheck source-path=SCRIPTDIR
set -u
. "$(dirname "$0")/gpu_common.sh"

# gpu.py calls the CPU backend, too, so the pack has the real OpenBLAS.
pack() { # BUILD, DIR
    pack_begin "$2"
    cp -L "$1/src/libsmoe.so" "$1/src/libsmoe_xla.so" "$folder/lib/" || exit 3
    "$tools/copy_libraries.sh" "$folder/lib" "$folder/lib/libsmoe.so" || exit 3
    tar -C "$tools/.." --exclude=__pycache__ -c python tests/python docs/shapes.csv | tar -C "$folder" -x || exit 3
    pack_end "$2"
}

check() { # name, seconds, program, arguments...
    name=$1 limit=$2 start=$(date +%s)
    shift 2
    within "$limit" "$python" "$@" --device "${DEVICE:-cuda}" >"$out/$name.log" 2>&1
    status=$?
    tail -n 3 "$out/$name.log" | cut -c1-220
    echo "== $name: exit status $status, $(($(date +%s) - start)) s"
    case $status:$worst in 0:* | 77:1) ;; 77:*) worst=77 ;; *) worst=1 ;; esac
}

run() { # DIR, names, --, arguments
    run_begin "$1"
    shift
    names=''
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        case $1 in torch | jax) names="$names $1" ;; *) usage ;; esac
        shift
    done
    [ $# -eq 0 ] || shift
    use_python
    export HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
    worst=0
    for name in ${names:-torch jax}; do
        case $name in
        torch) check torch 400 "$dir/tests/python/gpu.py" "$@" ;;
        jax) check jax 120 "$dir/tests/python/jax_gpu.py" ;;
        esac
    done
    exit $worst
}

case ${1:-}:$# in
pack:3) pack "$2" "$3" ;;
run:1 | run:0) usage ;;
run:*) shift && run "$@" ;;
*) usage ;;
esac
