#!/bin/sh
# Which folders may include which, and how long a file may be: includes.sh SOURCE_FOLDER. Only the model commands include the trainer. Of the library, tool,
# harness and trainer include only the public header, the lists of activations and scores, and the options for tests; the oracle includes only the header. bench/ includes only the public headers, base/ and two headers of tests/cuda. In the
# trainer, run/ stands on model/ and data/, both on files/.
set -eu
cd "$1"
wrong=0

# forbidden PATTERN ALLOWED FILES...: the files must have no #include "PATTERN..." except of ALLOWED.
forbidden() {
    pattern=$1 allowed=$2
    shift 2
    found=$(grep -nE "#include \"($pattern)" "$@" | grep -vE "#include \"($allowed)\"" || true)
    [ -z "$found" ] && return
    echo "$found"
    wrong=1
}

forbidden 'train/' 'none' cli/*.c cli/support/*.[ch] cli/bench/*.[ch] cli/verify/*.[ch] harness/*.[ch] oracle/*.[ch] base/*.[ch]
forbidden 'src/|cuda/|cpu/' 'src/(activations|scores).h|src/cuda/host/test_options.h' cli/*.c cli/*/*.[ch] harness/*.[ch] train/*.[ch] train/*/*.[ch] base/*.[ch]
forbidden 'cli/' 'none' harness/*.[ch] train/*.[ch] train/*/*.[ch] oracle/*.[ch] base/*.[ch] src/*.[ch]
forbidden 'src/|cli/|harness/|train/' 'none' oracle/*.[ch]
forbidden 'src/|cuda/|cpu/|train/|tests/|host/' 'tests/cuda/gpu.h|tests/cuda/route_cases.h' bench/*.[ch]
forbidden 'train/(data|model|run)/' 'none' train/*.[ch] train/cpu/*.[ch] train/cuda/*.[ch] train/files/*.[ch] train/ranks/*.[ch]
forbidden 'train/(model|run)/' 'none' train/data/*.[ch]
forbidden 'train/(data|run)/' 'none' train/model/*.[ch]
[ $wrong -eq 0 ] || { echo "these includes cross a border"; exit 1; }
echo "no include crosses a border"

# A test is named by a sentence that says what holds: in Python, where pytest asks for test_, by three words or more.
if grep -nE 'cmocka_unit_test[a-z_]*\(test_' tests/*.c tests/cuda/*.c tests/cuda/emulator/*.c ||
    grep -rnE --include='test_*.py' 'def test_[a-z0-9]*(_[a-z0-9]*)?\(' tests/python studies; then
    echo "these names of tests are no sentences"
    exit 1
fi

# A file of 600 lines is split by concept.
folders='base bench cli examples harness include oracle python src tests tools train'
# shellcheck disable=SC2086
long=$(find $folders \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.py' -o -name '*.sh' \) \
    -exec wc -l {} + | awk '$1 >= 600 && $2 != "total"')
if [ -n "$long" ]; then
    echo "these files have 600 lines or more:"
    echo "$long"
    exit 1
fi
