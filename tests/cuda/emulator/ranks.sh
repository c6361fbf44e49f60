#!/bin/sh
# Two ranks of the trainer on emulated GPUs, through train/cuda/nccl.c: copy engines and rings give the same bits, with and
# without clipping that scales nothing, and about the loss of one rank with two micro-batches.
#   ranks.sh SMOE NCCL
smoe=$1 nccl=$2
folder=$(mktemp -d) || exit 3
trap 'rm -rf "$folder"' EXIT
seq 3000 >"$folder/text"
# With the rule sr-f a step is not recorded: in the emulator a captured stream does not capture the one that waits for it.
sizes="--hidden 16 --intermediate 8 --experts 5 --heads 2 --layers 2 --context 8 --batch 4 --steps 3 --rounding sr-f --tile 4"
common="$sizes --seed 5 -q --device cuda-plain --checkpoints 1 --evaluations 1 --evaluation-tokens 64 --last-evaluation-tokens 64"

fail() {
    echo "$1"
    cat "$folder"/errors*
    exit 1
}

# NAME WINDOWS OPTIONS: both ranks must end well.
pair() {
    name=$1 windows=$2 status=0
    port=$((10000 + $$ % 20000)) # below those that the kernel gives to others
    shift 2
    for rank in 0 1; do
        # shellcheck disable=SC2086
        EMULATOR_NCCL_WINDOWS=$windows SMOE_NCCL=$nccl RANK=$rank LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost \
            MASTER_PORT=$port timeout 300 "$smoe" train "$folder/text" --out "$folder/$name" $common "$@" \
            >/dev/null 2>"$folder/errors$rank" &
        eval "p$rank=$!"
    done
    # shellcheck disable=SC2154
    wait "$p0" || status=1
    # shellcheck disable=SC2154
    wait "$p1" || status=1
    [ $status -eq 0 ] || fail "$name: a rank failed"
    way="2 GPUs, NCCL 2.28.9"
    [ "$windows" -eq 0 ] || [ -n "${NCCL_P2P_DISABLE:-}" ] || way="$way, copy engines"
    grep -qx "$way" "$folder/errors0" || fail "$name: not '$way'"
}

same() { # RUN RUN: the weights of the last step depend on the moments of the steps before
    cmp "$folder/$1/latest/model.safetensors" "$folder/$2/latest/model.safetensors" || fail "$1 and $2 differ"
}

loss() { # RUN
    tail -n 1 "$folder/$1/train.jsonl" | sed 's/.*"val_loss": *\([0-9.]*\).*/\1/'
}

pair engines 1 --clip 0
pair rings 0 --clip 0
(export NCCL_P2P_DISABLE=1 && pair forbidden 1 --clip 0) || exit 1
pair clipped 1 --clip 1e9
same engines rings
same engines forbidden
same engines clipped
pair narrow 1 --clip 0 --precision bf16
pair narrow_rings 0 --clip 0 --precision bf16
same narrow narrow_rings
pair mixed 1 --clip 0 --gradients bf16
pair parts 1 --clip 1 --micro-batches 2
# shellcheck disable=SC2086
"$smoe" train "$folder/text" --out "$folder/one" $common --micro-batches 2 --clip 0 >/dev/null 2>"$folder/errors0" || fail one
for run in engines narrow mixed; do
    awk -v a="$(loss one)" -v b="$(loss $run)" 'BEGIN { exit !(a > 0 && b / a < 1.01 && b / a > 0.99) }' ||
        fail "$run: loss $(loss $run), one rank $(loss one)"
done
echo "one rank $(loss one); two $(loss engines), bf16 $(loss narrow), gradients in bf16 $(loss mixed)"
