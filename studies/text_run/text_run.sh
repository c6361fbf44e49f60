#!/bin/sh
# Trains a 0.5B MoE model and its dense twin on text for equally long, in several calls: README.md.
#
# Usage: studies/text_run/text_run.sh OUT SECONDS [moe|twin]
# Starts or resumes the runs OUT/moe and OUT/twin at the same time on GPU 0 and GPU 1, or only the run that is named. It ends
# before SECONDS have passed. After BUDGET seconds of training a run is finished; then OUT/RUN.json, .eval.json (of the whole
# validation text) and OUT/RUN.samples.txt are written too. Repeat the call until "finished" is printed.
# Environment: SMOE (the program), DATA (folder of tools/make_tokens.py), BUDGET (600), LEAVE (60: of SECONDS, kept for the
# step at hand, the checkpoint and the end), GPUS ("0 1"), and SIZES, BATCH, LR, WARMUP, EVALUATIONS, EVALUATION_TOKENS.
# Exit status: 0 all well, 2 wrong arguments, 3 a run failed.
set -eu

out=${1:-} seconds=${2:-} which=${3:-both}
case $which:$seconds in both:[0-9]* | moe:[0-9]* | twin:[0-9]*) ;; *) sed -n '4,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac

smoe=${SMOE:-smoe}
data=${DATA:-data}
budget=${BUDGET:-600}
leave=${LEAVE:-60}
if [ "$seconds" -le "$leave" ]; then
    echo "text_run.sh: SECONDS is $seconds, of which LEAVE=$leave are for the end: nothing is left to train" >&2
    exit 2
fi

# The paper's 0.5B model (12 layers, 8 of 64 experts) with a context of 1024.
sizes=${SIZES:---layers 12 --hidden 768 --heads 12 --intermediate 256 --experts 64 --topk 8 --renormalize --tied --context 1024 --init 0.02}
# Every validation, also the last one, reads the same tokens, so that all points of the curve can be compared.
evaluation=${EVALUATION_TOKENS:-262144}
schedule="--seconds $budget --batch ${BATCH:-64} --lr ${LR:-1e-3} --warmup ${WARMUP:-0.03} --end-lr 0.1 --weight-decay 0.1
    --logs 600 --evaluations ${EVALUATIONS:-40} --evaluation-tokens $evaluation --last-evaluation-tokens $evaluation
    --checkpoints 1 --keep 1 --recompute none"

sample() { # run
    for prompt in "The kernel" "To install the package, " "def main(" "There are two kinds of people:"; do
        "$smoe" generate --checkpoint "$out/$1" --prompt "$prompt" --tokens 120 --temperature 0.7 --top-p 0.9 || return
        printf '\n--------\n'
    done >"$out/$1.samples.tmp" && mv "$out/$1.samples.tmp" "$out/$1.samples.txt"
}

finish() { # run
    "$smoe" eval --json --checkpoint "$out/$1" "$data"/val_*.bin >"$out/$1.eval.tmp" && mv "$out/$1.eval.tmp" "$out/$1.eval.json" &&
        sample "$1" && mv "$out/$1.json.tmp" "$out/$1.json" && echo "$1: finished"
}

# SIGTERM makes smoe train finish its step, write a checkpoint and end with status 128 + 15. The budget is the sum over all calls.
train() { # run, GPU
    if [ -e "$out/$1.json" ]; then
        echo "$1: finished"
        return 0
    fi
    more=
    if [ -e "$out/$1/latest" ]; then more=--resume; fi
    if [ "$1" = twin ]; then more="$more --dense-twin"; fi
    status=0
    # shellcheck disable=SC2086 # options are words
    CUDA_VISIBLE_DEVICES=$2 timeout --preserve-status --signal=TERM --kill-after=$((2 * leave)) $((seconds - leave)) \
        "$smoe" train --quiet --json --out "$out/$1" --tokenizer "$data/bpe.txt" $sizes $schedule $more "$data"/*.bin \
        >"$out/$1.json.tmp" 2>>"$out/$1.log" || status=$?
    case $status in
    0) CUDA_VISIBLE_DEVICES=$2 finish "$1" || { echo "$1: samples or evaluation failed" >&2; return 3; } ;;
    143) echo "$1: interrupted, run it again" ;;
    *)
        echo "$1: smoe train ended with status $status" >&2
        tail -n 5 "$out/$1.log" >&2
        return 3
        ;;
    esac
}

mkdir -p "$out"
# shellcheck disable=SC2086 # a list
set -- ${GPUS:-0 1}
case $which in
both)
    wrong=0
    train moe "$1" & moe=$!
    train twin "${2:-$1}" & twin=$!
    wait "$moe" || wrong=3
    wait "$twin" || wrong=3
    exit $wrong
    ;;
moe) train moe "$1" ;;
twin) train twin "${2:-$1}" ;;
esac
