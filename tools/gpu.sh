#!/bin/sh
# Packs the GPU programs and runs them on a machine that has a GPU but no compilers.
#
#   tools/gpu.sh pack BUILD DIR     on the build machine: the programs that are built (targets smoe_cli cuda_check_route
#                                   cuda_check_limits cuda_time_route cuda_time_dlogits) and the libraries they need, compressed, into DIR
#   DIR/gpu.sh run DIR PART...      on the GPU machine: the parts in order, each with its own time limit and all
#                                   within BUDGET seconds (default 560). Logs and records go to $OUT (default
#                                   DIR/out). Exit status: 0 all well, 1 a part failed or found an error, 77 no GPU
#
# All measurements of the library, in four calls of less than ten minutes each (run DIR correct and so on):
#   correct    verify check_route check_limits time_route time_dlogits memcheck synccheck
#   paper      the paper's shapes, uniform and random routing: forward, and backward as far as dlogits; peak memory by
#              number of chunks (paper_topk: the same, but the backward ends with dS, without the router's backward)
#   settled    the paper's forward with --settle 0.05, and again with --settle 0.4, so that library and reference each
#              run at the clock that they reach by themselves
#   alone      each kernel of the paper's shapes by itself; combine and dx compared with copies of as many bytes
#   rest       token rounding by number of experts; each kernel by itself at T = 512; the models' layers; the layers
#              that one GPU holds under expert parallelism; skewed routing
#
# Parts: verify[:TEXT] (smoe verify --all in 14 processes; with TEXT the cases with TEXT in their names, in one),
# check_route[:few], check_limits, memcheck, synccheck (compute-sanitizer, small shapes), time_route,
# time_dlogits, smoe:ARGUMENTS, and bench:TABLE:NAME:ARGUMENTS, which writes NAME.jsonl and prints that table
# of report.sh. ARGUMENTS are words joined by +.
set -u

programs="cuda_check_route cuda_check_limits cuda_time_route cuda_time_dlogits"

pack() {
    folder=$(mktemp -d)
    mkdir -p "$folder/lib" "$2"
    for program in $programs; do
        for place in tests/cuda bench; do
            [ -x "$1/$place/$program" ] && cp "$1/$place/$program" "$folder/"
        done
    done
    cp "$1/smoe" "$(dirname "$0")/report.sh" "$folder/" || exit 3
    "$(dirname "$0")/copy_libraries.sh" "$folder/lib" "$folder"/cuda_* "$folder/smoe" || exit 3
    cp "$0" "$2/gpu.sh"
    tar -C "$folder" -czf "$2/pack.tar.gz" . || exit 3
    (cd "$folder" && ls)
    du -sh "$2"
    rm -r "$folder"
}

# ---- One part ----

# Runs a command for at most the given seconds, and not longer than until the end of BUDGET.
within() { # seconds, command...
    seconds=$1
    left=$((end - $(date +%s)))
    shift
    if [ "$left" -lt 5 ]; then
        echo "no time left for $*" >&2
        return 1
    fi
    [ "$seconds" -lt "$left" ] || seconds=$left
    timeout -k 5 "$seconds" "$@"
    ended=$?
    [ $ended -ne 124 ] || echo "stopped after $seconds s: $*" >&2
    return $ended
}

words() {
    echo "$1" | tr '+' ' '
}

verify="./smoe verify --device cuda --all"

# Runs all cases in 14 processes, because the computation on the CPU that it compares with takes most of its time.
# shellcheck disable=SC2086 # $verify is words
in_shards() {
    for shard in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do
        OMP_NUM_THREADS=1 within 240 $verify --shard $shard/14 --repeats 200 \
            >"$out/shard.$shard" 2>&1 &
    done
    wait
    cat "$out"/shard.*
    good=$(grep -l ' passed, 0 failed' "$out"/shard.* | wc -l)
    missing=$(grep -l 'no usable CUDA device\|this build has no' "$out"/shard.* | wc -l)
    rm "$out"/shard.*
    echo "$good of 14 processes found nothing wrong"
    [ "$missing" -eq 14 ] && return 77
    [ "$good" -eq 14 ]
}

# shellcheck disable=SC2086 # $verify is words
sanitize() { # tool
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    within 30 $verify --only "backward, one token" || return
    for case in "backward, eights d 8 n 8" "backward, one token" "backward, edges n 320" "E 13" "forward, eights"; do
        within 30 "$sanitizer" --tool "$1" --error-exitcode 1 $verify --again 0 --only "$case" || return
    done
    [ "$1" = synccheck ] || within 60 "$sanitizer" --tool "$1" --error-exitcode 1 ./cuda_check_route few
}

# Runs each shape of a suite in its own process. If one crashes or hangs, only its figures and at most 60 s are lost.
bench_shapes() { # words with --suite NAME among them
    suite=$(echo "$*" | sed 's/.*--suite \([a-z]*\).*/\1/')
    others=$(echo "$*" | sed 's/--suite [a-z]*//')
    failed=0
    for shape in $(./smoe info --json --suite "$suite" | sed -n 's/.*"shape":"\([^"]*\)".*/\1/p'); do
        # shellcheck disable=SC2086
        within 60 ./smoe bench --device cuda --json --shape "$suite/$shape" $others || failed=$?
    done
    return $failed
}

bench() { # TABLE, NAME, ARGUMENTS
    # shellcheck disable=SC2046
    case $3 in
    *--suite*) bench_shapes $(words "$3") >"$out/$2.jsonl" ;;
    *) within 60 ./smoe bench --device cuda --json $(words "$3") >"$out/$2.jsonl" ;;
    esac
    ended=$?
    if [ -s "$out/$2.jsonl" ]; then
        { echo; echo "$2"; ./report.sh "$1" "$out/$2.jsonl"; } >>"$out/summary.txt"
    else
        rm "$out/$2.jsonl"
    fi
    return $ended
}

# shellcheck disable=SC2086 # $verify is words
one_part() {
    argument=${1#*:}
    # shellcheck disable=SC2046
    case $1 in
    verify) in_shards ;;
    verify:*) within 60 $verify --only "$argument" ;;
    check_route) within 150 ./cuda_check_route ;;
    check_route:*) within 60 ./cuda_check_route "$argument" ;;
    memcheck | synccheck) sanitize "$1" ;;
    check_limits) within 60 ./cuda_check_limits ;;
    time_route | time_dlogits) within 60 "./cuda_$1" ;;
    smoe:*) within 250 ./smoe $(words "$argument") ;;
    bench:*)
        named=${argument#*:}
        bench "${argument%%:*}" "${named%%:*}" "${named#*:}"
        ;;
    *)
        echo "unknown part $1"
        return 2
        ;;
    esac
}

# Whether a part failed because there is no GPU.
no_gpu() { # exit status
    [ "$1" -eq 77 ] || { [ "$1" -ne 0 ] && grep -q 'no usable CUDA device\|CUDA driver version is insufficient' "$out/part.txt"; }
}

run_part() {
    start=$(date +%s)
    title=${1%%:--*}
    one_part "$1" >"$out/part.txt" 2>&1
    ended=$?
    { echo "== $1"; cat "$out/part.txt"; } >>"$out/log.txt"
    took=$(($(date +%s) - start))
    lines=3
    if [ $ended -eq 0 ]; then
        verdict=ok
    elif no_gpu $ended; then
        verdict="no GPU"
        [ $worst -ne 0 ] || worst=77
    else
        verdict="FAILED (exit $ended)"
        worst=1
        lines=25
    fi
    [ "${1#time_}" = "$1" ] || cat "$out/part.txt" >>"$out/summary.txt"
    tail -n $lines "$out/part.txt" | cut -c1-220
    echo "== $title: $verdict, $took s"
    echo "$title: $verdict, $took s" >>"$out/parts.txt"
}

# ---- Parts together ----

correct="verify check_route check_limits time_route time_dlogits memcheck synccheck"

shapes="--suite+paper+--routing+uniform,random+--scope+experts+--pass+forward,backward+--seconds+6"
memory="--scope+experts+--chunks+1,2,4+--no-bound+--seconds+2"
peaks="bench:peaks:peaks:--shape+7B-n256+--shape+30B-n256+--reuse+$memory bench:peaks:peaks_keep:--shape+7B-n256+$memory"
routed="--entry+logits+--score+softmax-topk-renorm"
paper="bench:passes:paper:$shapes+$routed $peaks"
paper_topk="bench:passes:paper:$shapes $peaks"
forward="--suite+paper+--routing+uniform,random+--scope+experts+--pass+forward+$routed+--seconds+3"
settled="bench:passes:paper_50ms:$forward+--settle+0.05 bench:passes:paper_settled:$forward+--settle+0.4"

sweep="--suite+rounding+--routing+uniform,random+--rounding+none,nr-f+--pass+layer+--no-bound+--seconds+1"
alone="bench:launches:alone:--suite+paper+--scope+experts+--pass+forward,backward+$routed+--alone+--seconds+1"
gaps="--thiek+512,2048,768,128,8+--score+softmax-topk-renorm+--alone+--no-bound+--seconds+1"
rest="bench:rounding:rounding:$sweep bench:launches:launches:$gaps
bench:passes:models:--suite+models+--routing+random+--scope+experts+--pass+forward,backward+--seconds+8
bench:passes:ep:--suite+ep+--routing+random+--scope+experts+--pass+forward,backward+--seconds+8
bench:passes:skewed:--suite+paper+--routing+skewed+--scope+experts+--pass+forward,backward+--seconds+2"

run() {
    cd "$1" || exit 3
    shift
    out=${OUT:-$PWD/out}
    end=$(($(date +%s) + ${BUDGET:-560}))
    worst=0
    mkdir -p "$out"
    : >"$out/summary.txt"
    : >"$out/parts.txt"
    tar -xzf pack.tar.gz || exit 3
    export LD_LIBRARY_PATH="$PWD/lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    for part; do
        # shellcheck disable=SC2086
        case $part in
        correct) set -- $correct ;;
        paper) set -- $paper ;;
        paper_topk) set -- $paper_topk ;;
        settled) set -- $settled ;;
        alone) set -- $alone ;;
        rest) set -- $rest ;;
        *) set -- "$part" ;;
        esac
        for each; do run_part "$each"; done
    done
    rm -f "$out/part.txt"
    cat "$out/summary.txt" "$out/parts.txt"
    exit $worst
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
pack) pack "$@" ;;
run) run "$@" ;;
*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
