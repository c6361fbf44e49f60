#!/bin/sh
# Runs the tests of the Python package that need no GPU, each in an environment of its own in the build folder: with PyTorch and
# Transformers, with Transformers' own test of experts functions, with a wheel that is built, checked and installed into an
# empty environment, and with JAX.
# usage: tools/test_python.sh BUILD [VERSION ... | jax]   BUILD/release: a finished build of the library
# With versions of Transformers (5.18.0, newest) only the tests that use it run, with each of them; with "jax" those of smoe.jax with
# the newest jax, by the Python that PYTHON names (python3.12).
# The last line reads "N passed, N failed, N skipped". Without a network the tests count as skipped, or with CI=true as failed.
set -u
cd "$(dirname "$0")/.." || exit 3
[ $# -ge 1 ] || {
    sed -n '2,8s/^# //p' "$0" >&2
    exit 2
}
mkdir -p "$1/python" || exit 3
folder=$(cd "$1/python" && pwd) release=$(cd "$1/release" && pwd) || exit 3
passed=0 failed=0 skipped=0
export PYTHONPATH="$PWD/python" SMOE_LIBRARY="$release/src/libsmoe.so" SMOE_PROGRAM="$release/smoe" SMOE_BUILD="$release" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR="$folder/inductor" OMP_WAIT_POLICY=passive

# Makes an environment with the packages of a requirements file, once for each content of the file.
install() { # environment, requirements file
    cmp -s "$2" "$1/requirements.txt" && return 0
    rm -rf "$1"
    python3 -m venv "$1" &&
        "$1/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check -r "$2" &&
        cp "$2" "$1/requirements.txt"
}

# Counts one test as skipped (in CI as failed), and prints why.
lacks() { # what could not be installed, log
    tail -n 3 "$2"
    if [ "${CI:-}" = true ]; then
        echo "FAILED: $1 could not be installed"
        failed=$((failed + 1))
    else
        echo "skipped: $1 could not be installed (no network?)"
        skipped=$((skipped + 1))
    fi
}

# Installs the packages of a requirements file.
have() { # environment, requirements file
    install "$1" "$2" >"$folder/install.log" 2>&1 && return 0
    lacks "the packages of $2" "$folder/install.log"
    return 1
}

# Other projects' code that tests read or run, without what it depends on: the wheels of SonicMoE and Megatron-Core, and
# Transformers' source distribution, which has its tests. Unpacked in $folder/fetched, once for each list of versions.
transformers=$(sed -n 's/^transformers==//p' tests/python/requirements.txt)
sources="sonic-moe==0.1.2.post1 megatron-core==0.19.2 transformers==$transformers"
download() {
    "$folder/torch/bin/python" -m pip download --quiet --no-cache-dir --disable-pip-version-check --no-deps -d "$folder/fetched" "$@"
}
fetch() {
    [ "$(cat "$folder/fetched/versions" 2>/dev/null)" = "$sources" ] && return 0
    rm -rf "$folder/fetched" && mkdir -p "$folder/fetched" || return 1
    # shellcheck disable=SC2086 # two words
    download --python-version 3.12 --only-binary :all: ${sources% *} &&
        download --no-binary :all: "${sources##* }" &&
        for wheel in "$folder"/fetched/*.whl; do "$folder/torch/bin/python" -m zipfile -e "$wheel" "$folder/fetched" || return 1; done &&
        tar -C "$folder/fetched" -xzf "$folder/fetched/transformers-$transformers.tar.gz" &&
        rm "$folder"/fetched/*.whl "$folder"/fetched/*.gz && echo "$sources" >"$folder/fetched/versions"
}

count() { # log, word
    tail -n 1 "$1" | sed -n "s/^\(.*[^0-9]\)\{0,1\}\([0-9][0-9]*\) $2.*/\2/p"
}

# Runs pytest, or a script that runs it, and adds the numbers of its last line.
run_pytest() { # environment, log, arguments of python
    environment=$1 log=$2
    shift 2
    timeout 5000 "$environment/bin/python" "$@" 2>&1 | tee "$log"
    good=$(count "$log" passed) bad=$(count "$log" failed) left=$(count "$log" skipped) broken=$(count "$log" error)
    good=${good:-0} bad=$((${bad:-0} + ${broken:-0})) left=${left:-0}
    [ $((good + bad + left)) -gt 0 ] || bad=1 # it ran nothing, or never came to its last line
    passed=$((passed + good)) failed=$((failed + bad)) skipped=$((skipped + left))
}

# Makes an environment with another version of Transformers, and all else of the one with PyTorch.
install_transformers() { # environment, version
    rm -rf "$1"
    python3 -m venv "$1" || return 1
    site=$(echo "$1"/lib/python3*/site-packages)
    "$folder/torch/bin/python" -c 'import sys; print(*sys.path[1:], sep="\n")' | grep site-packages >"$site/torch.pth"
    wanted=transformers
    [ "$2" = newest ] || wanted="transformers==$2"
    "$1/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --upgrade "$wanted"
}

test_jax() { # environment, log
    run_pytest "$1" "$2" -m pytest -q -rs --noconftest -k jax tests/python/test_jax.py tests/python/test_docs_code.py
}

shift
if [ "${1:-}" = jax ]; then
    environment=$folder/jax-newest
    rm -rf "$environment"
    if { "${PYTHON:-python3.12}" -m venv "$environment" &&
        "$environment/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check jax pytest; } >"$folder/install.log" 2>&1; then
        "$environment/bin/python" -c 'import sys, jax; print("== jax", jax.__version__, "on Python", sys.version.split()[0])'
        test_jax "$environment" "$folder/jax-newest.log"
    else
        lacks "jax on ${PYTHON:-python3.12}" "$folder/install.log"
    fi
elif [ $# -gt 0 ] && have "$folder/torch" tests/python/requirements.txt; then
    for version in "$@"; do
        environment=$folder/transformers-$version
        if install_transformers "$environment" "$version" >"$folder/install.log" 2>&1; then
            echo "== $("$environment/bin/python" -c 'import transformers; print("transformers", transformers.__version__)')"
            run_pytest "$environment" "$environment.log" -m pytest -q -rs tests/python/test_transformers.py \
                tests/python/test_gates.py tests/python/test_gpt_oss.py tests/python/test_check.py \
                tests/python/test_finetune.py tests/python/test_finetune_qwen3.py
        else
            lacks "transformers $version" "$folder/install.log"
        fi
    done
fi
if [ $# -gt 0 ]; then
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
fi

if have "$folder/torch" tests/python/requirements.txt; then
    if fetch >"$folder/fetch.log" 2>&1; then
        export SMOE_FETCHED="$folder/fetched"
        run_pytest "$folder/torch" "$folder/transformers.log" tools/transformers_experts_test.py \
            "$folder/fetched/transformers-$transformers" -W ignore
    else
        lacks "$sources" "$folder/fetch.log"
    fi
    run_pytest "$folder/torch" "$folder/pytest.log" -m pytest -q -rs --durations=5 --ignore=tests/python/test_jax.py tests/python
fi
echo "== jax"
if have "$folder/jax" tests/python/requirements-jax.txt; then
    test_jax "$folder/jax" "$folder/jax.log"
fi

# Last, because it links the library in the build folder with another OpenBLAS.
if [ -e "$folder/torch/requirements.txt" ]; then # it is installed
    echo "== wheel"
    if PATH=$folder/torch/bin:$PATH tools/wheel.sh "$folder/wheel" "$release"; then
        passed=$((passed + 1))
        echo "== kernels"
        rm -rf "$folder/kernels" "$folder/kernels.check"
        if PATH=$folder/torch/bin:$PATH tools/kernels_repo.sh "$folder"/wheel/smoe-*.whl "$folder/kernels"; then
            passed=$((passed + 1))
        elif [ $? -eq 77 ]; then
            lacks kernels /dev/null
        else
            echo "FAILED: the repository for Hugging Face's kernels"
            failed=$((failed + 1))
        fi
    else
        echo "FAILED: the wheel"
        failed=$((failed + 1))
    fi
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
