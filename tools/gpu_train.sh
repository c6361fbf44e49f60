#!/bin/sh
# Checks and times the trainer on a machine that has a GPU but no compilers.
#
#   tools/gpu_train.sh pack BUILD DIR      on the build machine: the programs that are built (targets smoe_cli
#                                          cuda_check_train_ops cuda_check_train_model), their libraries and a text, into DIR
#   DIR/gpu_train.sh run DIR [PART...]     on the GPU machine: the parts in order, without PART all of them, within
#                                          BUDGET seconds (default 560). Logs under $OUT (default DIR/out), scratch
#                                          under $WORK (default DIR/work), which is removed after each part.
# Needs there: Python with numpy, and CUDA's libraries in /usr/local/cuda or in Python's nvidia packages. Part olmoe also needs
# torch and Transformers; SITE names a folder of packages that are not installed. PYTHON names another python3.
# Exit status: 0 all well, 1 a part failed or found an error, 2 wrong arguments, 3 nothing could be unpacked, 77 no GPU.
#
# part         seconds at most, and what it does
#   ops          60   every operation against the CPU
#   model        40   a whole model's loss and gradients against the CPU
#   small       120   300 steps of the default model on CPU and GPU: the loss curves agree to 1 %
#   twin         90   two runs end with the same bits; the dense twin trains
#   kill        120   SIGKILL and resume end with the same bits: f32, and bf16 in micro-batches
#   micro       120   the 0.5B model in 1 and in 4 micro-batches: losses agree to 1e-4; tokens/s of both
#   first_step  180   the 1.4B model, from process start to the end after one step: the best of 3 takes at most 5 s
#   checkpoint  240   bf16 checkpoints of the 1.4B model: at most 1.2 times as long as dd; host memory
#   7B          120   tokens/s of the 7B model
#   olmoe       110   check_olmoe.py
#   nan          60   a loss that is not finite: status 3, and the last checkpoint can be evaluated
#   disk        120   a disk that is full at the first and at a later checkpoint: status 3, the later one resumes
# The disk has to have 60 GB for checkpoint and olmoe. All parts are meant for one call of ten minutes on an H200.
# shellcheck source-path=SCRIPTDIR disable=SC2086 # options are words
set -u
. "$(dirname "$0")/gpu_common.sh"

pack() { # BUILD, DIR
    pack_begin "$2"
    cp "$1/smoe" "$1/tests/cuda/cuda_check_train_ops" "$1/tests/cuda/cuda_check_train_model" "$folder/" || exit 3
    "$tools/copy_libraries.sh" "$folder/lib" "$folder"/cuda_* "$folder/smoe" || exit 3
    cd "$tools/.." || exit 3
    cp tools/gpu_train.py tools/check_olmoe.py tests/cuda/kill_and_resume.sh "$folder/" || exit 3
    find docs include src train cli tests -name '*.md' -o -name '*.[ch]' | LC_ALL=C sort | xargs cat >"$folder/small.txt"
    cd - >/dev/null && pack_end "$2"
}

# ---- What the parts share ----

# smoe train --out NAME; its result goes to $out/NAME.json.
train() { # NAME, seconds, options...
    name=$1 limit=$2
    shift 2
    within "$limit" "$dir/smoe" train --json -q --out "$name" --evaluations 0 "$@" >"$out/$name.json" && return
    status=$?
    echo "$name: exit status $status"
    return $status
}

# Runs smoe train and checks its exit status.
expect() { # status, what follows "train"
    wanted=$1
    shift
    within 30 "$dir/smoe" train -q --device cuda --evaluations 0 "$@"
    status=$?
    [ $status -eq "$wanted" ] || { echo "exit status $status, expected $wanted"; return 1; }
}

job() { "$python" "$dir/gpu_train.py" "$@"; }
random() { [ -f random.bin ] || job tokens random.bin 20000000 50304; }
value() { sed -n "s/.*\"$2\": *\([0-9.e+-]*\).*/\1/p" "$out/$1.json"; } # run, name of a number

paper="--intermediate 256 --topk 8 --renormalize --tied --context 4096 --vocab 50304 --balance 0 --init 0.02 --lr 1e-4 --device cuda"
half="--layers 12 --hidden 768 --heads 12 --experts 64 --batch 8 $paper"
middle="--layers 18 --hidden 768 --heads 12 --experts 128 --batch 10 --clip 0 --precision bf16 $paper"
large="--layers 45 --hidden 1536 --heads 24 --experts 128 --batch 6 --clip 0 --precision bf16 $paper"
little="--device cuda --steps 20 --context 512 --hidden 256 --heads 4"

# ---- The parts ----

# The GPU computes in bf16, the CPU in f32. Small differences grow during a run: on the CPU a learning rate that is 0.025 % higher
# changes single losses by up to 0.6 %, but the means over five lines (50 steps) by 0.3 %. Without the balance loss these means change
# by 1.4 %. So the means are compared.
part_small() {
    for device in cpu cuda; do
        train small_$device 60 --device $device --steps 300 --logs 30 --checkpoints 0 --batch 16 "$dir/small.txt" || return
        cp small_$device/train.jsonl "$out/small_$device.jsonl"
    done
    job compare small_cpu/train.jsonl small_cuda/train.jsonl 0.01 5
}

part_twin() {
    for run in a b; do train twin_$run 30 $little --checkpoints 1 "$dir/small.txt" || return; done
    cmp twin_a/latest/model.safetensors twin_b/latest/model.safetensors && echo "two runs: the same bits" &&
        train twin 30 $little --checkpoints 0 --dense-twin "$dir/small.txt" && echo "dense twin: loss $(value twin loss)"
}

part_kill() {
    within 60 "$dir/kill_and_resume.sh" "$dir/smoe" cuda 200 "" &&
        within 60 "$dir/kill_and_resume.sh" "$dir/smoe" cuda 200 "--micro-batches 2 --precision bf16"
}

part_micro() {
    random
    for m in 1 4; do
        train micro_$m 60 $half --micro-batches $m --steps 30 --logs 30 --checkpoints 0 random.bin || return
        echo "$m micro-batches: $(job speed micro_$m/train.jsonl), $(value micro_$m device_gb) GB of GPU memory"
    done
    job compare micro_1/train.jsonl micro_4/train.jsonl 1e-4
}

part_first_step() {
    random
    best=60000
    for run in 1 2 3; do
        begin=$(date +%s%3N)
        train first_$run 60 $middle --steps 1 --logs 1 --checkpoints 0 random.bin || return
        took=$(($(date +%s%3N) - begin))
        echo "$took ms"
        [ $took -ge $best ] || best=$took
    done
    [ $best -le 5000 ]
}

part_checkpoint() {
    random
    within 240 "$python" "$dir/gpu_train.py" checkpoint "$dir/smoe" train -q $middle --steps 3 --logs 3 --checkpoints 3 --keep 1 \
        --evaluations 0 random.bin
}

part_7B() {
    random
    train 7B 120 $large --fastest --recompute none --steps 22 --logs 22 --checkpoints 0 random.bin &&
        echo "$(job speed 7B/train.jsonl), $(value 7B device_gb) GB of GPU memory"
}

part_nan() {
    expect 3 --out nan --steps 20 --lr 1000 --weight-decay 1000 --warmup 0 --checkpoints 1 "$dir/small.txt" &&
        head -c 100000 "$dir/small.txt" >short.txt && within 30 "$dir/smoe" eval --json --device cuda -c nan/latest short.txt
}

# ulimit limits a file to 2 MB: a write beyond that fails as on a full disk.
part_disk() {
    (ulimit -f 4000; expect 3 --out disk --steps 20 "$dir/small.txt") &&
        expect 0 --out later --steps 5 --checkpoints 1 "$dir/small.txt" &&
        (ulimit -f 4000; expect 3 --out later --resume --steps 10 --checkpoints 2 "$dir/small.txt") &&
        expect 0 --out later --resume --steps 10 --checkpoints 2 "$dir/small.txt" && echo "later: resumed with room"
}

one_part() {
    case $1 in
    ops) within 60 "$dir/cuda_check_train_ops" ;;
    model) within 40 "$dir/cuda_check_train_model" ;;
    olmoe) PYTHONPATH=${SITE:-} within 110 "$python" "$dir/check_olmoe.py" "$dir/smoe" ;;
    small | twin | kill | micro | first_step | checkpoint | 7B | nan | disk) "part_$1" ;;
    *) echo "unknown part $1"; return 2 ;;
    esac
}

run() { # DIR, parts
    run_begin "$1"
    shift
    [ $# -gt 0 ] || set -- ops model small twin kill micro first_step checkpoint 7B olmoe nan disk
    export OMP_WAIT_POLICY=passive
    [ -z "${SITE:-}" ] || SITE=$(cd "$SITE" && pwd) || exit 3
    mkdir -p "$work/parts" && cd "$work/parts" || exit 3
    worst=0
    for part; do
        start=$(date +%s)
        one_part "$part" >"$out/$part.log" 2>&1
        ended=$?
        verdict=ok
        [ $ended -eq 0 ] || { verdict="FAILED (exit $ended)"; worst=1; }
        tail -n 6 "$out/$part.log" | cut -c1-220
        echo "== $part: $verdict, $(($(date +%s) - start)) s" | tee -a "$out/parts.txt"
        find . -mindepth 1 -maxdepth 1 ! -name random.bin -exec rm -rf {} +
    done
    rm -f random.bin
    exit $worst
}

case ${1:-}:$# in
pack:3) pack "$2" "$3" ;;
run:1 | run:0) usage ;;
run:*) shift && run "$@" ;;
*) usage ;;
esac
