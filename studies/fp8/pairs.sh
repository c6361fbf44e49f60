#!/bin/sh
# Trains a small MoE language model in bf16 and in fp8 with equal seeds: README.md, "Does it train as well?".
#
# Usage: studies/fp8/pairs.sh OUT SECONDS [ARM.SEED...]      makes missing runs for at most SECONDS: those named, or pairs.py's plan
# ARM: bf16; higher (bf16 with a learning rate that is 0.025 % higher); f8; f8-dgrad.
# A finished run leaves OUT/ARM.SEED.json, the last line of its log; an interrupted run leaves none and is made again. A run is
# started only if it should end in time. Several calls may work on one OUT at the same time. pairs.py OUT/*.json has the result.
# Environment: SMOE (the program), DATA (folder of tools/make_tokens.py), GPUS (their numbers; "0"), SIDE (runs side by side on a
# GPU; 1), MOST (runs one after the other; 1000), TAKES (expected seconds of a run; 25), STEPS (768), SIZES, CONTEXT (1024),
# BATCH (16 sequences), TOKENS (of the last validation; 1048576).
# Exit status: 0 all runs are made, 1 runs are left, 2 wrong arguments, 3 a run failed.
set -eu

usage() {
    sed -n '4,11s/^# //p' "$0" >&2
    exit 2
}
if [ $# -lt 2 ] || ! [ "$2" -gt 0 ] 2>/dev/null; then usage; fi
out=$1 end=$(($(date +%s) + $2)) folder=$(dirname "$0")
shift 2
for run; do
    case $run in *.*[!0-9]* | *.) usage ;; bf16.* | higher.* | f8.* | f8-dgrad.*) ;; *) usage ;; esac
done
named=$*
smoe=${SMOE:-smoe} data=${DATA:-data} context=${CONTEXT:-1024} batch=${BATCH:-16} tokens=${TOKENS:-1048576}
sizes=${SIZES:---layers 12 --hidden 768 --heads 12 --intermediate 256 --experts 64 --topk 4 --tied --init 0.02}

plan() {
    # shellcheck disable=SC2086 # names are words
    if [ "$named" ]; then printf '%s\n' $named; else "$folder/pairs.py" --plan "$out"; fi
}

train() { # ARM.SEED, GPU, seconds left
    compute=${1%.*} rate=1e-3
    if [ "$compute" = higher ]; then compute=bf16 rate=1.00025e-3; fi
    rm -rf "${out:?}/$1"
    # shellcheck disable=SC2086 # sizes are words
    CUDA_VISIBLE_DEVICES=$2 timeout "$3" "$smoe" train --quiet --out "$out/$1" --tokenizer "$data/bpe.txt" $sizes \
        --context "$context" --batch "$batch" --seed "${1#*.}" --steps "${STEPS:-768}" --lr "$rate" --compute "$compute" \
        --checkpoints 0 --logs 16 --evaluations 2 --evaluation-tokens $((tokens / 16)) --last-evaluation-tokens "$tokens" \
        --recompute none "$data"/*.bin >"$out/$1.log" 2>&1 || return $?
    sed -n "\$s/^{/{\"arm\":\"${1%.*}\",\"seed\":${1#*.},/p" "$out/$1/train.jsonl" >"$out/$1.tmp"
    mv "$out/$1.tmp" "$out/$1.json"
}

# Makes the first run of the plan that is neither made nor taken. A run is taken by locking its file, which ends with the process.
make_next() { # GPU, seconds that a run takes; returns 1 if there is none that fits, 3 after a failure
    begin=$(date +%s)
    if [ $((begin + $2)) -gt "$end" ]; then return 1; fi
    for run in $(plan); do
        exec 9>"$out/$run.lock"
        if ! flock -n 9 || [ -e "$out/$run.json" ]; then continue; fi
        status=0
        train "$run" "$1" $((end - begin)) || status=$?
        if [ $status -eq 0 ]; then
            echo "$(date +%T) $run: done on GPU $1, $(($(date +%s) - begin)) s"
            return 0
        fi
        if [ $status -eq 124 ]; then return 1; fi
        echo "$run: smoe train ended with status $status: $(tail -n 1 "$out/$run.log")" >&2
        touch "$out/failed"
        return 3
    done
    return 1
}

work() { # GPU
    takes=${TAKES:-25}
    for _ in $(seq "${MOST:-1000}"); do
        began=$(date +%s)
        make_next "$1" "$takes" || break
        takes=$(($(date +%s) - began + 1))
    done
}

mkdir -p "$out"
rm -f "$out/failed"
for gpu in ${GPUS:-0}; do
    for _ in $(seq "${SIDE:-1}"); do work "$gpu" & done
done
wait
left=0
for run in $(plan); do [ -e "$out/$run.json" ] || left=$((left + 1)); done
echo "$left runs are left to make"
if [ -e "$out/failed" ]; then exit 3; fi
if [ $left -gt 0 ]; then exit 1; fi
