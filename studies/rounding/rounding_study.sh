#!/bin/sh
# Does token rounding cost quality? Trains small models with and without it, with several seeds each: README.md.
#
# Usage: studies/rounding/rounding_study.sh OUT SECONDS     makes missing runs, for at most SECONDS; repeat it until none is missing
#        studies/rounding/rounding_study.sh --plan OUT      lists the runs, what each takes, and which are done
# A finished run leaves OUT/NAME.json (its result) and OUT/NAME/train.jsonl. An interrupted run leaves no result and is made
# again. A run is started only if it should end in time. studies/rounding/rounding_study.py OUT makes tables and a picture of the results.
# Runs that have a record in the file RECORDS (rounding_study.py's RECORDS.jsonl, from another machine) count as done too.
# Environment: SMOE (the program), DATA (folder of tools/make_tokens.py), GPUS (numbers of the GPUs, one run at a time on each; "0"),
# RECORDS, STEPS (3072), BATCH (16 sequences), CONTEXT (1024), SIZES (the model without its experts), TILE (128), MOST (runs in
# this call), CASES.
# Exit status: 0 all runs are made, 1 runs are left, 2 wrong arguments, 3 a run failed.
set -eu

plan=
if [ "${1:-}" = --plan ]; then plan=1; shift; fi
out=${1:-} seconds=${2:-0}
if [ -z "$out" ] || { [ -z "$plan" ] && [ "$seconds" -le 0 ]; }; then
    sed -n '4,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
smoe=${SMOE:-smoe} data=${DATA:-data} steps=${STEPS:-3072} batch=${BATCH:-16} context=${CONTEXT:-1024} tile=${TILE:-128}
sizes=${SIZES:---layers 12 --hidden 768 --heads 12 --intermediate 256 --tied --init 0.02}
start=5 # seconds that a run takes before its first step and after its last one, together

# Case, experts, K, micro-batches of a step, expected tokens/s on an H200. The case is named after the mean number of tiles of rows
# that an expert has in a micro-batch: with 16 sequences of 1024 tokens, 128 experts, K = 4 and tiles of 128 rows this number is
# 4, 2 and 1 for 1, 2 and 4 micro-batches.
cases=${CASES:-'two 128 4 2 420000
one 128 4 4 300000
four 128 4 1 480000
coarse 16 4 1 550000'}

# All runs as "case rule seed", the most important ones first.
list() {
    for seed in 1 2 3 4 5; do printf 'two none %s\ntwo nr-f %s\n' $seed $seed; done
    for seed in 1 2 3; do
        for case in one four; do printf '%s none %s\n%s nr-f %s\n' $case $seed $case $seed; done
    done
    for seed in 1 2 3; do
        if [ $seed -lt 3 ]; then for rule in up down sr-f nr-s balance-f; do printf 'two %s %s\n' $rule $seed; done; fi
        printf 'coarse none %s\ncoarse nr-f %s\n' $seed $seed
    done
}

finished() { # case, rule, seed
    [ -e "$out/$1.$2.$3.json" ] ||
        { [ -n "${RECORDS:-}" ] && grep -q "\"case\": \"$1\", \"rounding\": \"$2\", \"seed\": $3," "$RECORDS" 2>/dev/null; }
}

# Sets experts, topk, passes and, from the case's newest result or else from the table, rate.
describe() { # case
    # shellcheck disable=SC2046 # five words
    set -- "$1" $(echo "$cases" | sed -n "s/^$1 //p")
    experts=$2 topk=$3 passes=$4 rate=$5
    for result in "$out/$1".*.json; do
        if [ ! -e "$result" ]; then continue; fi
        found=$(sed -n 's/.*"tokens_per_s": *\([0-9]*\).*/\1/p' "$result")
        if [ "${found:-0}" -gt 0 ]; then rate=$found; fi
    done
    takes=$((start + steps * batch * context / rate))
}

train() { # case, rule, seed, GPU, seconds left
    name=$1.$2.$3
    describe "$1"
    rm -rf "${out:?}/$name"
    parts=
    if [ "$passes" -gt 1 ]; then parts="--micro-batches $passes"; fi
    # shellcheck disable=SC2086 # sizes are words
    CUDA_VISIBLE_DEVICES=$4 timeout "$5" "$smoe" train --quiet --json --out "$out/$name" --tokenizer "$data/bpe.txt" $sizes \
        --experts "$experts" --topk "$topk" --context "$context" --batch "$batch" $parts \
        --rounding "$2" --tile "$tile" --seed "$3" --steps "$steps" --lr 1e-3 --weight-decay 0.1 --checkpoints 0 --logs 100 \
        --evaluations 8 --evaluation-tokens 131072 --last-evaluation-tokens 4194304 --recompute none \
        "$data"/*.bin >"$out/$name.tmp" 2>"$out/$name.log" && mv "$out/$name.tmp" "$out/$name.json"
}

# Makes runs on one GPU, one after the other. A run is taken by making a folder. Only one process succeeds in this, so the processes
# of two GPUs never take the same run.
work() { # GPU
    list | while read -r case rule seed; do
        name=$case.$rule.$seed
        describe "$case"
        left=$((end - $(date +%s)))
        if finished "$case" "$rule" "$seed" || [ "$takes" -gt "$left" ] || ! mkdir "$out/taken/$name" 2>/dev/null; then continue; fi
        # shellcheck disable=SC2012 # names without surprises
        if [ "$(ls "$out/taken" | wc -l)" -gt "${MOST:-1000}" ]; then break; fi
        status=0
        train "$case" "$rule" "$seed" "$1" "$left" || status=$?
        case $status in
        0) echo "$name: done" ;;
        124) echo "$name: out of time" ;;
        *)
            echo "$name: smoe train ended with status $status" >&2
            tail -n 3 "$out/$name.log" >&2
            touch "$out/failed"
            ;;
        esac
    done
}

count_left() {
    list | while read -r case rule seed; do finished "$case" "$rule" "$seed" || echo "$case"; done | wc -l
}

if [ "$plan" ]; then
    list | while read -r case rule seed; do
        describe "$case"
        state="to make"
        if finished "$case" "$rule" "$seed"; then state="done"; fi
        printf '%-7s %-10s seed %s  %4s s  %s\n' "$case" "$rule" "$seed" "$takes" "$state"
    done | awk '{ print; all += $5; if ($NF != "done") { left += $5; runs++ } }
        END { printf "%d runs, %d s of one GPU; to make: %d runs, %d s\n", NR, all, runs, left }'
    exit 0
fi
mkdir -p "$out"
rm -rf "$out/taken" "$out/failed" # left by a call that was ended
mkdir "$out/taken"
end=$(($(date +%s) + seconds))
for gpu in ${GPUS:-0}; do work "$gpu" & done
wait
rm -r "$out/taken"
left=$(count_left)
echo "$left runs are left to make"
if [ -e "$out/failed" ]; then exit 3; fi
if [ "$left" -gt 0 ]; then exit 1; fi
