#!/bin/sh
# Who may include whom: includes.sh SOURCE_FOLDER. The trainer is for the model commands alone; tool, harness and
# trainer see of the library its public header and the list of activations; the oracle sees no more than the header.
set -eu
cd "$1"
wrong=0

# forbidden PATTERN ALLOWED FILES...: no #include "PATTERN..." in them but of ALLOWED.
forbidden() {
    pattern=$1 allowed=$2
    shift 2
    found=$(grep -nE "#include \"($pattern)" "$@" | grep -vE "#include \"($allowed)\"" || true)
    [ -z "$found" ] && return
    echo "$found"
    wrong=1
}

forbidden 'train/' 'none' cli/*.c cli/common/*.[ch] cli/bench/*.[ch] cli/verify/*.[ch] harness/*.[ch] oracle/*.[ch] common/*.[ch]
forbidden 'src/|cuda/|cpu/' 'src/activations.h' cli/*.c cli/*/*.[ch] harness/*.[ch] train/*.[ch] train/*/*.[ch] common/*.[ch]
forbidden 'cli/' 'none' harness/*.[ch] train/*.[ch] train/*/*.[ch] oracle/*.[ch] common/*.[ch] src/*.[ch]
forbidden 'src/|cli/|harness/|train/' 'none' oracle/*.[ch]
[ $wrong -eq 0 ] || { echo "these includes cross a border"; exit 1; }
echo "no include crosses a border"
