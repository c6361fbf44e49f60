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

refused type src/routing_decisions.h src/problem.c src/cpu/convert.c oracle/number.c
refused score src/scores.h oracle/score.h
refused rounding src/problem.c src/cpu/rounding.c oracle/round.c
refused entry src/problem.c src/cpu/plan.c src/cpu/experts_backward.c
refused layout src/cpu/up.c

# A score of the list whose curve is missing: its value (routing_decisions.h) or its slope. Only the curve's constant is there.
mkdir -p "$folder/list"
sed 's/^#define MOE_SCORES(X) .*/#define MOE_SCORES(X) X(SMOE_TRIAL, "trial", "trial", trial, none, biased) \\/; s/MOE_CURVE_sigmoid = 1/&, MOE_CURVE_trial = 1/' \
    "$source/src/scores.h" > "$folder/list/scores.h"
cp "$source/src/routing_decisions.h" "$folder/list/routing_decisions.h" # beside the list that it includes
[ "$(grep -c 'SMOE_TRIAL\|MOE_CURVE_trial' "$folder/list/scores.h")" -eq 2 ]
without() { # MACRO FLAG... FILE
    macro=$1
    shift
    if compile -I"$folder/score" -I"$folder/list" "$@"; then echo "compiles without $macro: $*"; exit 1; fi
    grep -q "$macro" "$folder/messages" || { cat "$folder/messages"; echo "does not name $macro: $*"; exit 1; }
}
without MOE_VALUE_trial "$source/src/cpu/router.c"
without MOE_SLOPE_trial -DMOE_VALUE_trial=break "$source/src/cpu/router_backward.c"
compile -I"$folder/score" -I"$folder/list" -DMOE_VALUE_trial=break -DMOE_SLOPE_trial=break "$source/src/cpu/router_backward.c" ||
    { cat "$folder/messages"; exit 1; }

# Scores are compared in the list and in the oracle alone.
found=$(grep -rnE '(==|!=) *SMOE_SCORE_|case SMOE_SCORE_' "$source/src" "$source/harness" "$source/cli" "$source/train" || true)
[ -z "$found" ] || { echo "$found"; echo "these compare one score; src/scores.h has the properties"; exit 1; }
echo "a forgotten enumerator does not compile"
