#!/bin/sh
# A run that is killed and resumed must end with the same bits as an uninterrupted run. It must then continue on the CPU and
# again on DEVICE:
#   kill_and_resume.sh SMOE DEVICE [OPTIONS]
smoe=$1 device=$2 options=$3
folder=$(mktemp -d) || exit 3
trap 'rm -rf "$folder"' EXIT
seq 3000 >"$folder/text"
# The steps before the kill are not known. Their rate is constant, so that it does not depend on how many follow.
common="--hidden 16 --intermediate 8 --experts 4 --heads 2 --layers 1 --context 8 --batch 2 --seed 5 -q --evaluations 0 \
    --warmup 0 --end-lr 1 $options"

# FOLDER STEPS DEVICE OPTIONS: each step writes a line of the log and a checkpoint.
train() {
    out=$folder/$1 count=$2 on=$3
    shift 3
    given="$common --steps $count --logs $count --checkpoints $count"
    [ "$on" != cpu ] || given=$(echo "$given" | sed 's/--precision bf16//') # the CPU has f32 only
    # shellcheck disable=SC2086
    "$smoe" train "$folder/text" --out "$out" --device "$on" $given "$@" >/dev/null 2>"$folder/errors" && return
    echo "train --out $out --steps $count --device $on $*: exit status $?"
    cat "$folder/errors"
    exit 1
}

lines() {
    cat "$folder/$1/train.jsonl" 2>/dev/null | wc -l
}

# shellcheck disable=SC2086
"$smoe" train "$folder/text" --out "$folder/killed" --device "$device" $common --steps 1000000 --logs 1000000 \
    --checkpoints 1000000 >/dev/null 2>"$folder/errors" &
run=$!
while [ "$(lines killed)" -lt 2 ] && kill -0 $run 2>/dev/null; do sleep 0.05; done
kill -9 $run
wait $run
status=$?
[ $status -eq 137 ] || { echo "not killed: exit status $status"; cat "$folder/errors"; exit 1; }
steps=$(($(lines killed) + 4))
train whole $steps "$device"
train killed $steps "$device" --resume
# The weights after the resume depend on the optimizer's moments, so only the weights are compared.
cmp "$folder/whole/latest/model.safetensors" "$folder/killed/latest/model.safetensors" || exit 1
train killed $((steps + 2)) cpu --resume
train killed $((steps + 3)) "$device" --resume
[ "$(lines killed)" -eq $((steps + 3)) ] || { echo "$(lines killed) lines of the log, not $((steps + 3))"; exit 1; }
