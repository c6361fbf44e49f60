#!/bin/sh
# Installs what the tests need, builds and runs all of them: with gcc (and the CUDA code if nvcc is installed), the Python
# package, with clang's sanitizers (address + undefined, thread), and the fuzz targets for FUZZ_SECONDS each (default 20).
# The last line reads "N passed, N failed, N skipped".
set -u
cd "$(dirname "$0")/.." || exit 3
build=${1:-build}
jobs=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which obeys them
tools/install_packages.sh build-essential cmake pkg-config libopenblas-dev libjansson-dev libcmocka-dev zlib1g-dev \
    gnuplot-nox clang libclang-rt-14-dev libomp-dev python3 python3-venv || exit 3

passed=0 failed=0 skipped=0

# Counts a step that has only one result as one test.
count_step() { # description, exit status
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $1"
    fi
}

run_tests() { # build directory, log
    ctest --test-dir "$1" -j"$jobs" --output-on-failure --timeout 1800 2>&1 | tee "$2"
}

# Configures, builds and runs ctest; adds ctest's numbers of passed, failed and skipped tests.
run_suite() { # name, then CMake options
    name=$1
    shift
    echo "== $name"
    dir=$build/$name
    mkdir -p "$dir"
    log=$dir/test.log
    if ! { cmake -S . -B "$dir" "$@" && cmake --build "$dir" -j"$jobs"; } >"$dir/build.log" 2>&1; then
        tail -n 40 "$dir/build.log"
        count_step "$name: build" 1
        return
    fi
    run_tests "$dir" "$log"
    # The leak sanitizer itself crashes at the exit of about one in a hundred programs with OpenMP threads. Such a run
    # has no result. It is repeated once, and the result of the second run counts.
    if grep -q 'LeakSanitizer has encountered a fatal error' "$log"; then
        echo "== $name, once more: the leak sanitizer crashed"
        run_tests "$dir" "$log"
    fi
    total=$(sed -n 's/.* tests failed out of \([0-9]*\)$/\1/p' "$log")
    bad=$(sed -n 's/.*passed, \([0-9]*\) tests failed out of .*/\1/p' "$log")
    left=$(grep -c '\*\*\*Skipped' "$log")
    if [ -z "$total" ]; then
        count_step "$name: ctest ran nothing" 1
        return
    fi
    passed=$((passed + total - bad - left))
    failed=$((failed + bad))
    skipped=$((skipped + left))
}

# tools/wheel.sh leaves another OpenBLAS in the folder.
run_suite release -DCMAKE_BUILD_TYPE=Release -DSMOE_OPENBLAS=system -DCMAKE_CUDA_ARCHITECTURES=all

# Most of the Python tests use one core, so they run beside the sanitizers' suites.
echo "== python: started"
mkdir -p "$build/python"
tools/test_python.sh "$build" >"$build/python/test.log" 2>&1 &
python=$!

LSAN_OPTIONS="suppressions=$PWD/tests/lsan.supp:print_suppressions=0 ${LSAN_OPTIONS:-}"
export LSAN_OPTIONS
# LLVM 14's leak sanitizer itself crashed ("Tracer caught signal 11") in 13 of 655 runs of `smoe train --resume` on a busy machine,
# and with this option in none of 357.
ASAN_OPTIONS="intercept_tls_get_addr=0 ${ASAN_OPTIONS:-}"
export ASAN_OPTIONS
OMP_NUM_THREADS=2 run_suite address -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_COMPILER=clang -DSMOE_CUDA=OFF \
    -DSMOE_SANITIZE=address,undefined
# libarcher tells the thread sanitizer about OpenMP's barriers; OpenBLAS itself is not instrumented.
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 ${TSAN_OPTIONS:-}"
OMP_NUM_THREADS=2 run_suite thread -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_COMPILER=clang -DSMOE_CUDA=OFF \
    -DSMOE_SANITIZE=thread

echo "== fuzz"
mkdir -p "$build/fuzz"
if { cmake -S . -B "$build/fuzz" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_COMPILER=clang -DSMOE_CUDA=OFF \
    -DSMOE_FUZZ=ON && cmake --build "$build/fuzz" -j"$jobs" --target fuzz; } >"$build/fuzz/build.log" 2>&1; then
    for target in safetensors index config tokens bpe; do
        mkdir -p "$build/fuzz/corpus_$target"
        "$build/fuzz/tests/fuzz/fuzz_$target" -max_total_time="${FUZZ_SECONDS:-20}" -rss_limit_mb=2048 \
            -artifact_prefix="$build/fuzz/" "$build/fuzz/corpus_$target" "tests/fuzz/corpus/$target" \
            >"$build/fuzz/$target.log" 2>&1
        status=$?
        [ $status -eq 0 ] || tail -n 30 "$build/fuzz/$target.log"
        count_step "fuzz $target" $status
    done
else
    tail -n 40 "$build/fuzz/build.log"
    count_step "fuzz: build" 1
fi

echo "== python"
wait "$python"
cat "$build/python/test.log"
counts=$(tail -n 1 "$build/python/test.log" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
if [ -n "$counts" ]; then
    passed=$((passed + ${counts%% *}))
    skipped=$((skipped + ${counts##* }))
    counts=${counts#* }
    failed=$((failed + ${counts% *}))
else
    count_step "python: no result" 1
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
