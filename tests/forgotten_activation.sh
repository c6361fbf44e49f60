#!/bin/sh
# If an activation is missing in one place, that file must not compile, and the compiler's message must name the activation.
#
#   forgotten_activation.sh SOURCE_FOLDER CC                    CPU backend, oracle and tests
#   forgotten_activation.sh SOURCE_FOLDER CXX CONVERTED TOOLKIT CUDA backend. CONVERTED: the folder of its sources that
#                                                               are converted for the emulator; TOOLKIT: the CUDA
#                                                               toolkit's headers
#
# A trial activation is put into copies of smoe.h and of the list; the sources themselves stay as they are.
set -eu
source=$1 compiler=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/enum" "$folder/list"

sed 's/^} smoe_activation;/, SMOE_TRIAL = 99 } smoe_activation;/' "$source/include/smoe.h" > "$folder/enum/smoe.h"
sed 's/^#define MOE_ACTIVATIONS(X) .*/#define MOE_ACTIVATIONS(X) X(SMOE_TRIAL, "trial", gated, trial_curve) \\/' \
    "$source/src/activations.h" > "$folder/list/activations.h"
grep -q SMOE_TRIAL "$folder/enum/smoe.h"
grep -q SMOE_TRIAL "$folder/list/activations.h"

# accepted COMMAND...: the command must succeed. refused WORD COMMAND...: it must fail with a message that contains WORD.
accepted() {
    "$@" 2> "$folder/messages" || { cat "$folder/messages"; echo "does not compile: $*"; exit 1; }
}
refused() {
    word=$1
    shift
    if "$@" 2> "$folder/messages"; then echo "compiles without $word: $*"; exit 1; fi
    grep -q -- "$word" "$folder/messages" || { cat "$folder/messages"; echo "does not name $word: $*"; exit 1; }
}

if [ $# -gt 2 ]; then
    converted=$3 toolkit=$4
    compile() { # FLAG... FILE
        "$compiler" -std=c++17 -w -fsyntax-only "$@" -I"$source/tests/cuda/emulator" -I"$converted" -I"$source/src/cuda" \
            -I"$source/src" -I"$source/include" -isystem "$toolkit"
    }
    for kernel in sm90/experts/up sm90/experts/up_f8 sm90/experts/dh sm90/experts/few_rows sm80/experts/up sm80/experts/dh; do
        file=$converted/$kernel.cpp
        accepted compile "$file"
        refused trial_curve compile -I"$folder/enum" -I"$folder/list" "$file"
    done
    # a score whose curve has no slope in the kernels
    mkdir "$folder/scores"
    sed 's/^} smoe_score;/, SMOE_TRIAL = 99 } smoe_score;/' "$source/include/smoe.h" > "$folder/scores/smoe.h"
    sed 's/^#define MOE_SCORES(X) .*/#define MOE_SCORES(X) X(SMOE_TRIAL, "trial", "trial", trial, none, biased) \\/; s/MOE_CURVE_sigmoid = 1/&, MOE_CURVE_trial = 1/' \
        "$source/src/scores.h" > "$folder/scores/scores.h"
    cp "$source/src/routing_decisions.h" "$folder/scores/routing_decisions.h"
    accepted compile "$converted/routing/dlogits.cpp"
    refused MOE_AT_trial compile -DMOE_VALUE_trial=break -I"$folder/scores" "$converted/routing/dlogits.cpp"
else
    compile() {
        "$compiler" -std=c11 -Wall -Werror -fsyntax-only "$@" -I"$source/include" -I"$source/src" -I"$source"
    }
    for file in src/cpu/activation.c oracle/activation.c tests/test_activation.c; do
        accepted compile "$source/$file"
        refused SMOE_TRIAL compile -I"$folder/enum" "$source/$file" # the activation is in the enum, but not in the list
    done
    refused trial_curve compile -I"$folder/enum" -I"$folder/list" "$source/src/cpu/activation.c"
    refused "has no reference" compile -I"$folder/enum" -I"$folder/list" "$source/tests/test_activation.c"
fi
echo "a forgotten activation does not compile"
