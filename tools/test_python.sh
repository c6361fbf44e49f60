#!/bin/sh
# The Python package's tests that need no GPU, in an environment of their own inside the build folder: pytest, then a
# wheel that is built, checked and installed into a bare environment.
# usage: tools/test_python.sh BUILD   BUILD/release: a finished build of the library
# The last line reads "N passed, N failed, N skipped". Without network the tests count as skipped, with CI=true as failed.
set -u
cd "$(dirname "$0")/.." || exit 3
[ $# -eq 1 ] || {
    sed -n '2,5s/^# //p' "$0" >&2
    exit 2
}
mkdir -p "$1/python" || exit 3
folder=$(cd "$1/python" && pwd) release=$(cd "$1/release" && pwd) || exit 3
environment=$folder/environment

finish() { # passed, failed, skipped
    echo "$1 passed, $2 failed, $3 skipped"
    [ "$2" -eq 0 ]
    exit
}

# Once for each content of the requirements.
install() {
    cmp -s tests/python/requirements.txt "$environment/requirements.txt" && return 0
    rm -rf "$environment"
    python3 -m venv "$environment" &&
        "$environment/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
            -r tests/python/requirements.txt &&
        cp tests/python/requirements.txt "$environment/requirements.txt"
}

if ! install >"$folder/install.log" 2>&1; then
    tail -n 3 "$folder/install.log"
    if [ "${CI:-}" = true ]; then
        echo "FAILED: the packages of tests/python/requirements.txt could not be installed"
        finish 0 1 0
    fi
    echo "skipped: the packages of tests/python/requirements.txt could not be installed (no network?)"
    finish 0 0 1
fi
PATH=$environment/bin:$PATH
export PATH PYTHONPATH="$PWD/python" SMOE_LIBRARY="$release/src/libsmoe.so" SMOE_BUILD="$release" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR="$folder/inductor" OMP_WAIT_POLICY=passive

timeout 1500 python -m pytest -q -rs --durations=5 tests/python 2>&1 | tee "$folder/pytest.log"
count() { # word
    tail -n 1 "$folder/pytest.log" | sed -n "s/.*[^0-9]*\b\([0-9][0-9]*\) $1.*/\1/p"
}
passed=$(count passed) failed=$(count failed) skipped=$(count skipped) errors=$(count error)
passed=${passed:-0} failed=$((${failed:-0} + ${errors:-0})) skipped=${skipped:-0}
[ $((passed + failed + skipped)) -gt 0 ] || failed=1 # pytest ran nothing, or never came to its last line

echo "== wheel"
if tools/wheel.sh "$folder/wheel" "$release"; then
    passed=$((passed + 1))
else
    echo "FAILED: the wheel"
    failed=$((failed + 1))
fi
finish "$passed" "$failed" "$skipped"
