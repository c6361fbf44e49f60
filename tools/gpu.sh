#!/bin/bash
# Runs what needs a GPU: checks and measurements, on a machine that may have no compilers and no network.
#
#   cmake --install BUILD --component gpu --prefix DIR     on the build machine: what the parts need, as far as it is built
#   DIR/tools/gpu.sh LABEL|PART...                         on the GPU machine: the parts, or all parts of a label
#
# All together take at most BUDGET seconds (default 560). Logs and records go to $OUT (default ./gpu_out), scratch to $WORK (default
# ./gpu_work). PYTHON names another python3; SITE is a folder of Python packages that are not installed, for example of the peers
# (docs/peers.md says which); BIN another folder than DIR/bin. Parts of train need numpy; olmoe, python, peers and fsdp2 also torch.
# TRANSFORMERS: Transformers' unpacked source distribution, for experts_test. The part ptx needs a build with PTX, by
# -DCMAKE_CUDA_ARCHITECTURES='80;90a-real'; what the driver compiles stays in $OUT/ptx_cache, so a second call goes on. PLAIN: for
# first_call, another DIR, of a build with -DSMOE_CUDA_COMPRESS=-compress-mode=none.
# Exit status: 0 all well, 1 a part failed or found an error, 2 wrong arguments, 77 a part found no GPU and none failed.
#
# label    part        seconds at most, and what it does
# shellcheck disable=SC2086,SC2317 # options are words; the parts are called by name
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
bin=${BIN:-$root/bin}

parts() {
    cat <<'PARTS'
correct    verify         400  all cases of smoe verify, in 14 processes
correct    route          150  routing compared with the CPU bit for bit
correct    limits          60  extreme cases and errors of the caller
correct    sms             60  contexts that use fewer SMs
correct    ep             300  layers with ranks; examples/ep_cuda_layer.c with threads and with processes
correct    lora            60  LoRA beside the experts' weights
correct    memcheck       300  compute-sanitizer on small cases
correct    synccheck      300
portable   portable_verify 200  the portable kernels (SMOE_KERNELS): all cases of smoe verify, in 14 processes
portable   portable_99k   200  the same with 99 KB of shared memory
portable   portable_lora   60  LoRA
portable   portable_memcheck 300  compute-sanitizer on small cases
portable   portable_racecheck 540
portable   portable_synccheck 300  reports up and dh, whose warps wait for one barrier at two instructions, which PTX allows
f8         f8_kernels     120  fp8: rows, weights, up, down, dh and dx_rows compared with the CPU bit for bit
f8         f8_dw          120  weight gradients in fp8, also bit for bit
f8         f8_layers      120  layers in fp8 against the oracle
f8         f8_verify      400  smoe verify with --compute f8 and f8-dgrad, in 14 processes
f8         f8_times       540  forward and training in fp8 beside bf16, the paper's layers; build cuda_time_f8 and cuda_time_f8_backward for it
python_portable portable_torch 400  tests/python/gpu.py
python_portable experts_test 120  Transformers' own test of experts functions
ptx        ptx            540  smoe verify with the portable kernels as the driver compiles them from an A100's PTX
speed_portable first_call  60  what compressed machine code adds to the first call
speed_portable peers_portable 480  bench/peers.py: the portable kernels beside Hopper's and the peers; a second call goes on
paper      paper          500  the paper's layers, uniform and random routing: forward, and backward as far as dlogits
paper      peaks           60  peak memory by number of chunks
bench      paper_topk     500  the paper's layers; the backward ends with dS, without the router's backward
bench      settled        400  forward, each job settled for 0.4 s, so that it runs at its own clock
bench      alone          400  each kernel by itself; combine and dx compared with copies of as many bytes
bench      rounding       400  token rounding by number of experts
bench      launches        60  each kernel by itself at T = 512
bench      models         300  the models' layers
bench      shares         300  the layers that one GPU holds under expert parallelism
bench      skewed         300  skewed routing
train      ops             60  every operation of the trainer against the CPU
train      model           40  a whole model's loss and gradients against the CPU
train      small          120  300 steps of the default model on CPU and GPU: the loss curves agree to 1 %
train      twin            90  two runs end with the same bits; the dense twin trains
train      kill           120  SIGKILL and resume end with the same bits: f32, and bf16 in micro-batches
train      micro          120  the 0.5B model in 1 and in 4 micro-batches: losses agree to 1e-4; tokens/s of both
train      first_step     180  the 1.4B model, from process start to the end after one step: the best of 3 takes at most 5 s
train      checkpoint     240  bf16 checkpoints of the 1.4B model: at most 1.2 times as long as dd; host memory (60 GB of disk)
train      7B             120  tokens/s of the 7B model
train      f8_steps       240  smoe train --compute bf16, f8 and f8-dgrad in turns: the 1.4B model, and 30 layers of the 7B model, in 80 GB
train      olmoe          110  check_olmoe.py (60 GB of disk)
train      nan             60  a loss that is not finite: status 3, and the last checkpoint can be evaluated
train      disk           120  a disk that is full at the first and at a later checkpoint: status 3, the later one resumes
many       scaling        300  smoe train, 1.4B and 7B on one and on all GPUs: at least 0.95 of the tokens/s of as many single ones
many       ranks          120  on all GPUs: two runs end with the same bits; a killed rank ends all; rings through sockets
experts    ep_torch       240  expert parallelism from Python on all GPUs: gpu.py --only ep (about 120 s; with Transformers 5.23 its part too)
experts    ep_times       300  cuda_time_ep: layers with ranks beside the same experts alone, and at T 64 in a graph (about 90 s)
experts    ep_peers       500  bench/peers.py: smoe.ep beside Transformers' (5.23) all-to-all and torch's; on eight GPUs about 400 s
experts    ep_fsdp2       180  examples/train_fsdp2.py, 30B with 6 layers for each GPU: with --ep over all GPUs, and with FSDP-2 alone
python     torch          400  tests/python/gpu.py
python     jax            120  tests/python/jax_gpu.py
peers      peers          500  bench/peers.py: the paper's layers beside SonicMoE, ScatterMoE and cuBLAS
fsdp2      fsdp2          540  examples/train_fsdp2.py, the 7B model on 1, 2, 4, ... GPUs, with smoe and each peer of SITE
fsdp2      losses         180  the 0.5B model on text: smoe's losses are grouped_mm's
fsdp2      finetune       170  examples/finetune_transformers.py, OLMoE-1B-7B's shape, random weights
PARTS
}

usage() {
    sed -n '2,/^# label/s/^# \{0,1\}//p' "$0" >&2
    parts >&2
    exit 2
}

# Runs a command for at most the given seconds, and not longer than until the end of BUDGET.
within() { # seconds, command...
    local seconds=$1 left=$((end - $(date +%s)))
    shift
    [ "$left" -ge 5 ] || { echo "no time left for $*" >&2; return 1; }
    [ "$seconds" -lt "$left" ] || seconds=$left
    timeout -k 5 "$seconds" "$@"
    local status=$?
    [ $status -ne 124 ] || echo "stopped after $seconds s: $*" >&2
    return $status
}

# ---- correct ----

verify="$bin/smoe verify --device cuda --all"

# In 14 processes, because the computation on the CPU that it compares with takes most of its time.
verify_all() { # options...
    local shard good
    for shard in {0..13}; do
        OMP_NUM_THREADS=1 within "$seconds" $verify --shard "$shard/14" "$@" >"shard.$shard" 2>&1 &
    done
    wait
    cat shard.*
    good=$(grep -l ' passed, 0 failed' shard.* | wc -l)
    echo "$good of 14 processes found nothing wrong"
    [ "$good" -eq 14 ]
}

# Also the example, whose ranks are threads and then processes; they share the GPUs if there are fewer than four.
part_ep() {
    local check
    for check in cuda_check_ep cuda_check_ep_failures example_ep_cuda_layer "example_ep_cuda_layer processes"; do
        within 120 "$bin"/$check || return
    done
    CUDA_LAUNCH_BLOCKING=1 CUDA_DEVICE_MAX_CONNECTIONS=1 within 120 "$bin/example_ep_cuda_layer" processes
}

# What an A100 runs: compute_80 PTX, compiled by the driver.
part_ptx() {
    export CUDA_FORCE_PTX_JIT=1 CUDA_CACHE_PATH="$out/ptx_cache" CUDA_CACHE_MAXSIZE=4294967296
    verify_all --kernels portable --repeats 20
    local status=$?
    grep -hm 1 'machine code for' shard.0 && echo "build with -DCMAKE_CUDA_ARCHITECTURES='80;90a-real'"
    du -sh "$CUDA_CACHE_PATH"
    unset CUDA_FORCE_PTX_JIT CUDA_CACHE_PATH CUDA_CACHE_MAXSIZE
    return $status
}

# The cases run side by side: racecheck needs minutes for one.
sanitize() { # tool, options of verify...
    local sanitizer case job tool=$1 failed=0 jobs=()
    shift
    sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer) --tool $tool --error-exitcode 1"
    for case in "backward, eights d 8 n 8" "backward, one token" "backward, edges n 320" "E 13" "forward, eights"; do
        within "$seconds" $sanitizer $verify --again 0 --only "$case" "$@" >"$case" 2>&1 &
        jobs+=("$!:$case")
    done
    for case in even odd; do
        [ "$tool" != synccheck ] || break
        within "$seconds" $sanitizer "$bin/cuda_check_route" few $case >route_$case 2>&1 &
        jobs+=("$!:route_$case")
    done
    for job in "${jobs[@]}"; do
        wait "${job%%:*}" || { failed=1; echo "FAILED: ${job#*:}"; }
        cat "${job#*:}"
    done
    return $failed
}

# ---- bench ----

# smoe bench with ARGUMENTS; each shape of a suite in its own process, so that only its figures are lost if it crashes or hangs.
bench() { # table of report.sh, suite or "", arguments...
    local table=$1 suite=$2 failed=0 shape
    shift 2
    if [ -n "$suite" ]; then
        for shape in $("$bin/smoe" info --json --suite "$suite" | sed -n 's/.*"shape":"\([^"]*\)".*/\1/p'); do
            within 60 "$bin/smoe" bench --device cuda --json --shape "$suite/$shape" "$@" >>"$out/$part.jsonl" || failed=$?
        done
    else
        within 60 "$bin/smoe" bench --device cuda --json "$@" >>"$out/$part.jsonl" || failed=$?
    fi
    [ ! -s "$out/$part.jsonl" ] || { echo; echo "$part"; "$root/tools/report.sh" "$table" "$out/$part.jsonl"; } >>"$out/summary.txt"
    return $failed
}

experts="--scope experts --pass forward,backward"
both="--routing uniform,random $experts"
renorm="--score softmax-topk-renorm"
part_paper() { bench passes paper $both --entry logits $renorm --seconds 6; }
part_paper_topk() { bench passes paper $both --seconds 6; }
part_settled() { bench passes paper --routing uniform,random --scope experts --pass forward --settle 0.4 --seconds 3; }
part_alone() { bench launches paper $experts --entry logits $renorm --alone --seconds 1; }
part_peaks() { bench peaks "" --shape 7B-n256 --shape 30B-n256 --reuse --scope experts --chunks 1,2,4 --no-bound --seconds 2; }
part_rounding() { bench passes rounding --routing uniform,random --rounding none,nr-f --pass layer --no-bound --seconds 1; }
part_launches() { bench launches "" --thiek 512,2048,768,128,8 $renorm --alone --no-bound --seconds 1; }
part_models() { bench passes models --routing random $experts --seconds 8; }
part_shares() { bench passes ep --routing random $experts --seconds 8; }
part_skewed() { bench passes paper --routing skewed $experts --seconds 2; }

# ---- train ----

# smoe train --out NAME; its result goes to $out/NAME.json.
train() { # NAME, seconds, options...
    local name=$1 limit=$2
    shift 2
    within "$limit" "$bin/smoe" train --json -q --out "$name" --evaluations 0 "$@" >"$out/$name.json" ||
        { echo "$name: exit status $?"; return 1; }
}

# Runs smoe train and checks its exit status.
expect() { # status, what follows "train"
    local wanted=$1 status
    shift
    within 30 "$bin/smoe" train -q --device cuda --evaluations 0 "$@"
    status=$?
    [ $status -eq "$wanted" ] || { echo "exit status $status, expected $wanted"; return 1; }
}

job() { "$python" "$root/tools/gpu_train.py" "$@"; }
visible_gpus() { if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then echo "$CUDA_VISIBLE_DEVICES" | tr , '\n'; else nvidia-smi -L; fi | wc -l; }
random() { [ -f "$work/random.bin" ] || job tokens "$work/random.bin" 20000000 50304; }
value() { sed -n "s/.*\"$2\": *\([0-9.e+-]*\).*/\1/p" "$out/$1.json"; } # run, name of a number

paper="--intermediate 256 --topk 8 --renormalize --tied --context 4096 --vocab 50304 --balance 0 --init 0.02 --lr 1e-4 --device cuda"
half="--layers 12 --hidden 768 --heads 12 --experts 64 --batch 8 $paper"
middle="--layers 18 --hidden 768 --heads 12 --experts 128 --batch 10 --clip 0 --precision bf16 $paper"
large="--layers 45 --hidden 1536 --heads 24 --experts 128 --batch 6 --clip 0 --precision bf16 $paper"
little="--device cuda --steps 20 --context 512 --hidden 256 --heads 4"

# The GPU computes in bf16, the CPU in f32. Small differences grow during a run: on the CPU a learning rate that is 0.025 % higher
# changes single losses by up to 0.6 %, but the means over five lines (50 steps) by 0.3 %. Without the balance loss these means change
# by 1.4 %. So the means are compared.
part_small() {
    for device in cpu cuda; do
        train small_$device 60 --device $device --steps 300 --logs 30 --checkpoints 0 --batch 16 "$text" || return
    done
    job compare small_cpu/train.jsonl small_cuda/train.jsonl 0.01 5
}

part_twin() {
    for run in a b; do train twin_$run 30 $little --checkpoints 1 "$text" || return; done
    cmp twin_a/latest/model.safetensors twin_b/latest/model.safetensors && echo "two runs: the same bits" &&
        train twin 30 $little --checkpoints 0 --dense-twin "$text" && echo "dense twin: loss $(value twin loss)"
}

part_kill() {
    within 60 "$root/tests/cuda/kill_and_resume.sh" "$bin/smoe" cuda &&
        within 60 "$root/tests/cuda/kill_and_resume.sh" "$bin/smoe" cuda "--micro-batches 2 --precision bf16"
}

part_micro() {
    random
    for m in 1 4; do
        train micro_$m 60 $half --micro-batches $m --steps 30 --logs 30 --checkpoints 0 "$work/random.bin" || return
        echo "$m micro-batches: $(job speed micro_$m/train.jsonl), $(value micro_$m device_gb) GB of GPU memory"
    done
    job compare micro_1/train.jsonl micro_4/train.jsonl 1e-4
}

part_first_step() {
    local best=60000 begin took
    random
    for run in 1 2 3; do
        begin=$(date +%s%3N)
        train first_$run 60 $middle --steps 1 --logs 1 --checkpoints 0 "$work/random.bin" || return
        took=$(($(date +%s%3N) - begin))
        echo "$took ms"
        [ $took -ge $best ] || best=$took
    done
    [ $best -le 5000 ]
}

part_checkpoint() {
    random
    within 240 "$python" "$root/tools/gpu_train.py" checkpoint "$bin/smoe" train -q $middle --steps 3 --logs 3 --checkpoints 3 \
        --keep 1 --evaluations 0 "$work/random.bin"
}

part_7B() {
    random
    train 7B 120 $large --fastest --recompute none --steps 22 --logs 22 --checkpoints 0 "$work/random.bin" &&
        echo "$(job speed 7B/train.jsonl), $(value 7B device_gb) GB of GPU memory"
}

part_f8_steps() {
    local turn compute run
    random
    for turn in 1 2 3; do
        for compute in bf16 f8 f8-dgrad; do
            train "1.4B_$compute.$turn" 60 $middle --fastest --compute $compute --steps 32 --logs 32 --checkpoints 0 "$work/random.bin" &&
                train "7B_$compute.$turn" 60 $large --layers 30 --fastest --compute $compute --steps 32 --logs 32 --checkpoints 0 "$work/random.bin" || return
            for run in "1.4B_$compute.$turn" "7B_$compute.$turn"; do echo "$run: $(job speed "$run/train.jsonl"), $(value "$run" device_gb) GB"; done
        done
    done
}

part_nan() {
    expect 3 --out nan --steps 20 --lr 1000 --weight-decay 1000 --warmup 0 --checkpoints 1 "$text" &&
        head -c 100000 "$text" >short.txt && within 30 "$bin/smoe" eval --json --device cuda -c nan/latest short.txt
}

# ulimit limits a file to 2 MB: a write beyond that fails as on a full disk.
part_disk() {
    (ulimit -f 4000; expect 3 --out disk --steps 20 "$text") &&
        expect 0 --out later --steps 5 --checkpoints 1 "$text" &&
        (ulimit -f 4000; expect 3 --out later --resume --steps 10 --checkpoints 2 "$text") &&
        expect 0 --out later --resume --steps 10 --checkpoints 2 "$text" && echo "later: resumed with room"
}

scale() { # NAME, sequences of a GPU, options...: one GPU, then all
    local name=$1 each=$2
    shift 2
    train "one_$name" 60 "$@" --fastest --steps 22 --logs 22 --checkpoints 0 "$work/random.bin" &&
        train "all_$name" 90 "$@" --gpus "$gpus" --batch $((gpus * each)) --fastest --steps 22 --logs 22 --checkpoints 0 "$work/random.bin" &&
        echo "$name: $(value "one_$name" device_gb) and $(value "all_$name" device_gb) GB of each GPU" &&
        job share "one_$name/train.jsonl" "all_$name/train.jsonl" "$gpus"
}

part_scaling() {
    local gpus wrong=0
    gpus=$(visible_gpus)
    random
    scale 1.4B 10 $middle || wrong=1
    scale 7B 6 $large || wrong=1
    return $wrong
}

part_ranks() {
    local gpus run started=0
    gpus=$(visible_gpus)
    for run in a b; do train ranks_$run 30 $little --batch 16 --gpus "$gpus" --checkpoints 1 "$text" || return; done
    cmp ranks_a/latest/model.safetensors ranks_b/latest/model.safetensors && echo "two runs: the same bits" || return
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 train sockets 60 $little --batch 16 --gpus "$gpus" --checkpoints 0 "$text" || return
    timeout -k 5 60 "$bin/smoe" train -q $little --batch 16 --gpus "$gpus" --steps 100000 --checkpoints 9 --evaluations 0 --out killed \
        "$text" &
    run=$!
    until [ -s killed/train.jsonl ] || [ $((started += 1)) -gt 300 ]; do sleep 0.1; done
    kill -9 "$(pgrep -P "$(pgrep -P $run)" | tail -n 1)"
    wait $run
    [ $? -eq 3 ] && within 30 "$bin/smoe" eval --json --device cuda -c killed/latest "$text"
}

# ---- Python ----

part_peers() {
    within 500 "$python" "$root/bench/peers.py" --records "$out/peers.jsonl" --suite paper --peers sonicmoe,scattermoe,cublas \
        --no-new-t --shape-seconds 5 --peer-seconds 200 --seconds 430 --commit "$("$bin/smoe" info | sed -n 's/^commit *//p')"
}

part_peers_portable() {
    within 480 "$python" "$root/bench/peers.py" --records "$out/portable.jsonl" --suite paper \
        --peers smoe-portable,scattermoe,momoe,grouped_mm,scattermoe-mma,momoe-mma,liger-mma --no-new-t --shape-seconds 4 \
        --peer-seconds 200 --seconds 400 --commit "$("$bin/smoe" info | sed -n 's/^commit *//p')"
}

# The time of a process that makes one small forward and backward, least of five; of it the first calls have the most.
process_ms() { # folder of a component
    local run begin took best=60000
    for run in 1 2 3 4 5; do
        begin=$(date +%s%3N)
        LD_LIBRARY_PATH="$1/lib:$LD_LIBRARY_PATH" within 30 "$1/bin/smoe" bench --device cuda --thiek 512,256,128,8,2 --scope experts \
            --pass forward,backward --no-bound --seconds 0.01 >bench.txt 2>&1 || { cat bench.txt; return 1; }
        took=$(($(date +%s%3N) - begin))
        [ $took -ge $best ] || best=$took
    done
    echo $best
}

part_first_call() {
    local compressed plain
    compressed=$(process_ms "$root") || { echo "$compressed"; return 1; }
    echo "with this build: $compressed ms"
    [ -n "${PLAIN:-}" ] || return 0
    plain=$(process_ms "$PLAIN") || { echo "$plain"; return 1; }
    echo "without compression: $plain ms; compression adds $((compressed - plain)) ms"
}

fsdp2() { # name, GPUs, seconds, options of train_fsdp2.py...
    local name=$1 count=$2 limit=$3
    shift 3
    within "$limit" "$python" -m torch.distributed.run --nproc-per-node "$count" --master-addr 127.0.0.1 \
        "$root/examples/train_fsdp2.py" --json "$out/$name.jsonl" "$@" && tail -n 1 "$out/$name.jsonl"
}

part_fsdp2() {
    local peer count wrong=0
    for peer in smoe sonicmoe scattermoe; do
        [ $peer = smoe ] || [ -d "${SITE:-}/$peer" ] || continue
        for ((count = $(nvidia-smi -L | wc -l); count >= 1; count /= 2)); do
            fsdp2 "fsdp2_${peer}_$count" "$count" 90 --model 7B --precision bf16 --random --steps 20 --log-every 5 --clip 0 --seed 1 \
                --experts $peer --profile 2 || wrong=1
        done
    done
    return $wrong
}

# The learning rate is 2e-4, because with 1e-3 single losses jumped after 20 steps.
part_losses() {
    local small="--model 0.5B --batch 16 --steps 40 --log-every 10 --lr 2e-4 --warmup 0.3 --seed 3"
    fsdp2 loss_grouped_mm 1 90 $small --experts grouped_mm "$text" &&
        fsdp2 loss_smoe 1 90 $small --experts smoe "$text" --compare "$out/loss_grouped_mm.jsonl" --tolerance 0.02
}

part_ep_fsdp2() {
    local gpus ep wrong=0
    gpus=$(visible_gpus)
    for ep in "$gpus" 1; do
        fsdp2 "ep_fsdp2_$ep" "$gpus" 90 --model 30B --layers $((6 * gpus)) --ep "$ep" --precision bf16 --random --steps 16 \
            --log-every 4 --clip 0 --seed 1 || wrong=1
    done
    return $wrong
}

# Three more layers on eight GPUs.
part_ep_times() {
    local gpus few="16384,2048,768,128,8 16384,2048,768,128,8,0,zipf 8192,7168,2048,256,8 64,2048,768,128,8" many=""
    gpus=$(visible_gpus)
    [ "$gpus" -lt 8 ] || many="24576,1536,256,128,8 32768,4096,512,128,8 32768,4096,2048,64,4"
    within 300 "$bin/cuda_time_ep" "$gpus" $few $many
}

part_ep_peers() {
    local gpus shapes=Qwen3-30B-A3B-ranks,DeepSeek-V3.2-ranks,Qwen3-30B-A3B-ranks-T64
    gpus=$(visible_gpus)
    [ "$gpus" -lt 8 ] || shapes="$shapes,7B-n256-ranks,30B-n512-ranks,120B-n2048-ranks"
    within 500 "$python" "$root/bench/peers.py" --ranks "$gpus" --shape "$shapes" --records "$out/ep_peers.jsonl" --shape-seconds 15 \
        --seconds 430 --commit "$("$bin/smoe" info | sed -n 's/^commit *//p')"
}

# ---- Parts ----

no_gpu() { grep -q 'no usable CUDA device\|CUDA driver version is insufficient\|NVIDIA-SMI has failed' "$out/$part.log"; }

one_part() {
    case $part in
    route | limits | sms) within "$seconds" "$bin/cuda_check_$part" ;;
    lora) within "$seconds" "$bin/cuda_lora" ;;
    memcheck | synccheck) sanitize "$part" ;;
    verify) verify_all --repeats 200 ;;
    f8_kernels) within "$seconds" "$bin/cuda_check_f8" && within "$seconds" "$bin/cuda_check_f8_dh" ;;
    f8_dw) within "$seconds" "$bin/cuda_check_f8_dw" ;;
    f8_layers) within "$seconds" "$bin/cuda_check_f8_layer" ;;
    f8_verify) verify_all --compute f8 --repeats 50 && verify_all --compute f8-dgrad --repeats 50 ;;
    f8_times) within "$seconds" "$bin/cuda_time_f8" 9 random && within "$seconds" "$bin/cuda_time_f8_backward" 5 random ;;
    portable_verify) verify_all --kernels portable --repeats 200 ;;
    portable_99k) verify_all --kernels portable-99k --repeats 50 ;;
    portable_lora) SMOE_KERNELS=portable within "$seconds" "$bin/cuda_lora" ;;
    portable_memcheck | portable_racecheck | portable_synccheck) SMOE_KERNELS=portable sanitize "${part#portable_}" --kernels portable ;;
    portable_torch) SMOE_KERNELS=portable within "$seconds" "$python" "$root/tests/python/gpu.py" --device "${DEVICE:-cuda}" ;;
    experts_test)
        SMOE_KERNELS=portable within "$seconds" "$python" "$root/tools/transformers_experts_test.py" "${TRANSFORMERS:-none}" -W ignore ;;
    ops | model) within "$seconds" "$bin/cuda_check_train_$part" ;;
    olmoe) within "$seconds" "$python" "$root/tools/check_olmoe.py" "$bin/smoe" ;;
    ep_torch) within "$seconds" "$python" "$root/tests/python/gpu.py" --device "${DEVICE:-cuda}" --only ep ;;
    torch) within "$seconds" "$python" "$root/tests/python/gpu.py" --device "${DEVICE:-cuda}" ;;
    jax) within "$seconds" "$python" "$root/tests/python/jax_gpu.py" --device "${DEVICE:-cuda}" ;;
    finetune) within "$seconds" "$python" "$root/examples/finetune_transformers.py" --steps 12 --modes full,lora ;;
    *) "part_$part" ;;
    esac
}

run_part() {
    local begin status verdict=ok lines=4
    begin=$(date +%s)
    rm -rf "$work/part" && mkdir "$work/part" && cd "$work/part" || exit 3
    rm -f "$out/$part.jsonl"
    one_part >"$out/$part.log" 2>&1
    status=$?
    if [ $status -eq 77 ] || { [ $status -ne 0 ] && no_gpu; }; then
        verdict="no GPU"
        [ $worst -ne 0 ] || worst=77
    elif [ $status -ne 0 ]; then
        verdict="FAILED (exit $status)" worst=1 lines=25
    fi
    tail -n $lines "$out/$part.log" | cut -c1-220
    echo "== $part: $verdict, $(($(date +%s) - begin)) s" | tee -a "$out/parts.txt"
}

[ $# -gt 0 ] || usage
chosen=()
for word; do
    found=$(parts | awk -v word="$word" '$1 == word || $2 == word { print $2 " " $3 }')
    [ -n "$found" ] || { echo "gpu.sh: there is no part and no label $word" >&2; exit 2; }
    mapfile -t -O ${#chosen[@]} chosen <<<"$found"
done
mkdir -p "${OUT:=gpu_out}" "${WORK:=gpu_work}" && out=$(cd "$OUT" && pwd) && work=$(cd "$WORK" && pwd) || exit 3
text=$work/text.txt python=${PYTHON:-python3} worst=0 end=$(($(date +%s) + ${BUDGET:-560}))
find "$root/docs" "$root/src" "$root/train" -name '*.md' -o -name '*.[ch]' | LC_ALL=C sort | xargs cat >"$text"
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 SMOE_LIBRARY="$root/lib/libsmoe.so"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || exit 3
LD_LIBRARY_PATH="$root/lib:$(printf '%s:' "$packages"/nvidia/*/lib)/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
export LD_LIBRARY_PATH PYTHONPATH="$root/python${SITE:+:$SITE:$SITE/nvidia_cutlass_dsl/python_packages}"
# NVLink multicast does not work on many rented hosts. NCCL fails there unless its use is switched off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
: >"$out/summary.txt"
: >"$out/parts.txt"
for each in "${chosen[@]}"; do
    read -r part seconds <<<"$each"
    run_part
done
rm -rf "$work/part" "$work/random.bin"
cat "$out/summary.txt" "$out/parts.txt"
exit $worst
