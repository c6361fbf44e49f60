#!/bin/bash
# Runs examples/train_fsdp2.py and finetune_transformers.py on a machine that has GPUs and PyTorch, but no network. Measures step
# times by implementation and number of GPUs, and compares losses with grouped_mm's.
#
#   tools/gpu_fsdp2.sh pack BUILD DIR        on the build machine: libsmoe.so of BUILD, its libraries, python/, examples/ and
#                                            a text into DIR
#   DIR/gpu_fsdp2.sh run DIR PART...         on the GPU machine, within BUDGET seconds (default 560)
#
# part       GPUs   seconds, and what it does
#   two      2      350   7B model: smoe, SonicMoE, ScatterMoE on two GPUs, then on one; smoe without fully_shard
#   many     all    540   7B model on 1, 2, 4, ... GPUs by peer: weak scaling (540 s with 8 GPUs)
#   losses   1      120   0.5B model on text, from the same weights: smoe and grouped_mm on one GPU each, smoe on all GPUs. With one
#                         GPU smoe and grouped_mm run one after the other, and there is no third run
#   finetune 1      120   OLMoE-1B-7B's shape, random weights, in full: smoe and grouped_mm; 4 layers on text
#   lora     1       60   the same model with LoRA
# The GPU machine needs torch. Parts finetune and lora also need Transformers, and lora needs peft. SITE: a folder or zip of more
# packages. PEERS=FOLDER: where `gpu_peers.sh pack` left SonicMoE and ScatterMoE; without it parts two and many measure smoe alone.
# STEPS (20): of a 7B run.
# After each part logs and JSON lines come back as $OUT/logs.tar.gz (default DIR/out), the table as $OUT/table.md; scratch is $WORK
# (DIR/work).
# Exit status: 0 all well, 1 a run failed or losses differ, 2 wrong arguments, 3 nothing could be unpacked or a package of a peer is
# missing, 77 no GPU.
# shellcheck source-path=SCRIPTDIR disable=SC2086 # options are words
set -u
. "$(dirname "$0")/gpu_common.sh"

pack() { # BUILD, DIR
    pack_begin "$2"
    pack_python "$1" examples docs src train include README.md
    cp "$tools/gpu_fsdp2_table.py" "$folder/" || exit 3
    pack_end "$2"
}

# ---- One run ----

# Starts the processes of a run as torchrun would, but without torchrun's rendezvous, which looks up the host's name in the
# network. If one process fails, the others are ended, because they would wait for it.
start_processes() { # name, GPUs (as 0,1), seconds, options of train_fsdp2.py...
    local name=$1 gpus=$2 limit=$3 count rank code=0 status=0 port=$((20000 + RANDOM % 20000)) pids=()
    shift 3
    count=$(tr , '\n' <<<"$gpus" | wc -l)
    for ((rank = 0; rank < count; rank++)); do
        CUDA_VISIBLE_DEVICES=$gpus RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$count MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            timeout -k 5 "$limit" "$python" "$dir/examples/train_fsdp2.py" --json "$logs/$name.jsonl" "$@" \
            >"$logs/$name.$rank.log" 2>&1 &
        pids+=($!)
    done
    for ((rank = 0; rank < count; rank++)); do
        wait -n
        code=$?
        [ $code -eq 0 ] || { [ $status -ne 0 ] || status=$code; kill "${pids[@]}" 2>/dev/null; }
    done
    return $status
}

train() { # name, GPUs, seconds, options...
    local name=$1 gpus=$2 limit=$3 started status left=$((end - $(date +%s)))
    shift 3
    started=$(date +%s)
    [ $left -ge 15 ] || { echo "== $name: no time left"; return 1; }
    [ "$limit" -lt $left ] || limit=$left
    start_processes "$name" "$gpus" "$limit" "$@"
    status=$?
    echo "== $name: exit status $status, $(($(date +%s) - started)) s"
    [ $status -eq 0 ] || tail -n 5 "$logs/$name".*.log
    return $status
}

by_peer() { # name, GPUs, seconds, peer, options...: the peer's packages are on PYTHONPATH
    local name=$1 gpus=$2 limit=$3 peer=$4
    shift 4
    [ "$peer" = smoe ] || local -x PYTHONPATH=$PYTHONPATH:$peer_path
    train "$name" "$gpus" "$limit" $big --experts "$peer" "$@"
}

# Waits for two runs on one GPU each. They run at the same time, so that both GPUs are as busy and as warm as in a run on two.
both() { # two process ids
    local status=0
    wait "$1" || status=1
    wait "$2" || status=1
    return $status
}

# ---- Parts ----

big="--model 7B --precision bf16 --random --steps ${STEPS:-20} --log-every 5 --clip 0 --seed 1"
# The learning rate is 2e-4, because with 1e-3 single losses jumped after 20 steps.
small="--model 0.5B --batch 16 --steps 40 --log-every 10 --lr 2e-4 --warmup 0.3 --seed 3"

part_two() {
    local wrong=0 peer first
    for peer in $peers; do by_peer "two_$peer" 0,1 90 "$peer" --profile 2 || wrong=1; done
    by_peer one_smoe 0 80 smoe & first=$!
    by_peer plain_smoe 1 80 smoe --no-shard &
    both $first $! || wrong=1
    [ "$peers" != smoe ] || return $wrong
    by_peer one_sonicmoe 0 80 sonicmoe & first=$!
    by_peer one_scattermoe 1 80 scattermoe &
    both $first $! || wrong=1
    by_peer two_smoe_again 0,1 60 smoe || wrong=1
    return $wrong
}

part_many() {
    local wrong=0 peer count
    for peer in $peers; do
        for ((count = all; count >= 1; count /= 2)); do
            by_peer "many_${peer}_$count" "$(seq -s, 0 $((count - 1)))" 90 "$peer" --profile 2 || wrong=1
        done
    done
    return $wrong
}

part_losses() {
    local wrong=0 first text="$dir/docs $dir/src $dir/train $dir/include"
    if [ "$all" -eq 1 ]; then
        train loss_smoe 0 90 $small --experts smoe $text || wrong=1
        train loss_grouped_mm 0 90 $small --experts grouped_mm $text || wrong=1
        return $wrong
    fi
    train loss_smoe 0 60 $small --experts smoe $text & first=$!
    train loss_grouped_mm 1 60 $small --experts grouped_mm $text &
    both $first $! || wrong=1
    train loss_all "$(seq -s, 0 $((all - 1)))" 60 $small --experts smoe $text --compare "$logs/loss_smoe.jsonl" --tolerance 0.02 ||
        wrong=1
    return $wrong
}

finetune() { # seconds, name, options...
    local limit=$1 name=$2
    shift 2
    within "$limit" "$python" "$dir/examples/finetune_transformers.py" --json "$logs/finetune.jsonl" "$@" >"$logs/$name.log" 2>&1
    local status=$?
    echo "== $name: exit status $status"
    tail -n 8 "$logs/$name.log"
    return $status
}

part_finetune() {
    local wrong=0
    finetune 170 finetune_full --steps 12 --modes full || wrong=1
    # The learning rate is 1e-4. With 1e-3 the loss first rises to 19, and the implementations' rounding differences grow too.
    finetune 60 finetune_text --steps 30 --modes full --layers 4 --lr 1e-4 --batch 4 --context 1024 "$dir"/docs/*.md || wrong=1
    return $wrong
}

part_lora() {
    finetune 120 finetune_lora --steps 12 --modes lora
}

# The table and the logs of all runs so far.
keep_results() {
    "$python" "$dir/gpu_fsdp2_table.py" "$logs" >"$out/table.md"
    tar -C "$logs" -czf "$work/logs.tar.gz" . && mv "$work/logs.tar.gz" "$out/"
}

run() { # DIR, parts
    local worst=0 part
    for part in "${@:2}"; do
        case $part in two | many | losses | finetune | lora) ;; *) echo "unknown part $part" >&2; exit 2 ;; esac
    done
    run_begin "$1"
    shift
    use_python
    export PYTHONPATH=$PYTHONPATH${SITE:+:$SITE} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 QUACK_COMPILE_WORKERS=8
    export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
    # NVLink multicast does not work on many rented hosts. NCCL fails there unless its use is switched off.
    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    logs=$work/logs all=$(nvidia-smi -L | wc -l) peers=smoe
    mkdir -p "$logs"
    [ -z "${PEERS:-}" ] || { unpack_peers "$PEERS"; peers="smoe sonicmoe scattermoe"; }
    for part; do
        "part_$part" || worst=1
        keep_results
    done
    cat "$out/table.md"
    exit $worst
}

case ${1:-}:$# in
pack:3) pack "$2" "$3" ;;
run:1 | run:2) usage ;;
run:*) shift && run "$@" ;;
*) usage ;;
esac
