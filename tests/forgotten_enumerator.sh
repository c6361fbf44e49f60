#!/bin/sh
# If a storage type, score function, rounding rule, entry or layout is missing in one place, that file must not compile, and
# the compiler's message must name the enumerator: forgotten_enumerator.sh SOURCE_FOLDER CC. The test adds a trial enumerator
# to copies of smoe.h.
set -eu
source=$1 compiler=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

compile() { # FLAG... FILE
    "$compiler" -std=gnu11 -fopenmp -Wall -Werror -Wno-unused-function -fsyntax-only "$@" -I"$source/include" -I"$source/src" -I"$source/src/cuda" \
        -I"$source" 2> "$folder/messages"
}

# refused ENUM FILE...: each file must compile, but not if the enum has one more enumerator.
refused() {
    enum=$1
    shift
    mkdir -p "$folder/$enum"
    sed "s/^} smoe_$enum;/, SMOE_TRIAL = 99 } smoe_$enum;/" "$source/include/smoe.h" > "$folder/$enum/smoe.h"
    grep -q SMOE_TRIAL "$folder/$enum/smoe.h"
    for file in "$@"; do
        compile "$source/$file" || { cat "$folder/messages"; echo "does not compile: $file"; exit 1; }
        if compile -I"$folder/$enum" "$source/$file"; then echo "$file compiles without a new $enum"; exit 1; fi
        grep -q SMOE_TRIAL "$folder/messages" ||
            { cat "$folder/messages"; echo "$file does not name the new $enum"; exit 1; }
    done
}

refused type src/rank.h src/problem.c src/cpu/convert.c oracle/number.c
refused score src/rank.h
refused rounding src/problem.c src/cpu/rounding.c oracle/round.c
refused entry src/problem.c src/cpu/plan.c src/cpu/experts_backward.c
refused layout src/cpu/up.c
echo "a forgotten enumerator does not compile"
