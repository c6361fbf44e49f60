#!/bin/sh
# Tests tools/report.sh with invented records, and the other tools with scripts in place of the programs that they run.
set -u
tools=$(cd "$(dirname "$0")/../../tools" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wrong=0

expect() { # what is tested, file, a line that the file must have
    grep -qxF -- "$3" "$2" && return
    echo "$1: no line '$3' in:"
    cat "$2"
    wrong=1
}

expect_status() { # what, status, wanted
    [ "$2" -eq "$3" ] && return
    echo "$1: exit status $2 instead of $3"
    wrong=1
}

# ---- report.sh ----

table() { # command, extra arguments
    name=$1
    shift
    "$tools/report.sh" "$name" "$here/records.jsonl" "$@" >"$folder/$name.md"
    expect_status "report.sh $name" $? 0
}

table passes
expect passes "$folder/passes.md" "| shape | routing | ms | TFLOP/s | ratio | up | plan |"
expect passes "$folder/passes.md" "| a | uniform | 2.0000 | 100.5 | 1.100 | 1.2500 (0.500) | 0.0100 |"
expect passes "$folder/passes.md" "| 64,32,8,4,2 | uniform | 4.0000 | 100.5 | 0.400 |  |  |"
expect passes "$folder/passes.md" "forward, uniform: geometric mean 0.663, least 0.400 (2 shapes)"
table peaks
expect peaks "$folder/peaks.md" "| a | uniform | 1.0 | 3.0 (4.0) |  |  | 2.0000 |  |"
expect peaks "$folder/peaks.md" "| a | random, nr-f, 4 chunks, reuse, layer | 2.0 |  |  | 2.5 (3.0) |  |  |"
table launches
expect launches "$folder/launches.md" "| a | uniform | forward | all | 4 | 2.0000 | 1600.0 | 1.250 |  |"
expect launches "$folder/launches.md" "| a | uniform | forward | plan | 3 | 0.0100 |  |  |  |"
[ "$(wc -l <"$folder/launches.md")" -eq 6 ] || { echo "launches: sums and records without launches are no rows"; wrong=1; }
"$tools/report.sh" passes >/dev/null 2>&1
expect_status "report.sh without files" $? 2

# ---- gpu.sh ----

mkdir -p "$folder/bin"
program() { # name, script
    printf '#!/bin/sh\n%s\n' "$2" >"$folder/bin/$1"
    chmod +x "$folder/bin/$1"
}
program smoe "case \"\$*\" in
'info --json --suite'*) cat '$here/shapes.jsonl' ;;
*'--json --shape paper/'*) sed \"s,\\\"a\\\",\\\"\${6#paper/}\\\",\" '$here/records.jsonl' ;;
*'models/one'*) sleep 60 ;;
'verify --device cuda --all --shard'*)
    [ -z \"\$CUDA_FORCE_PTX_JIT\" ] || { echo this build has machine code for 90a; exit 3; }
    case \"\$*\" in *' --kernels portable --'* | *' --kernels portable-99k --'*) echo \"\$8\" >>'$folder/kernels' ;; esac
    case \"\$*\" in *' --compute f8'*) echo \"\$8\" >>'$folder/computes' ;; esac
    [ -e '$folder/no_gpu' ] && { echo no usable CUDA device; exit 3; }
    [ -e '$folder/wrong' ] && [ \"\$6\" = 3/14 ] && { echo 5 passed, 1 failed; exit 1; }
    echo 5 passed, 0 failed ;;
*) exit 3 ;;
esac"
program cuda_check_route 'sleep 60'
program cuda_check_limits 'echo no GPU: skipped; exit 77'
program cuda_check_sms 'echo 0 failures'
for each in cuda_check_f8 cuda_check_f8_dh cuda_check_f8_dw cuda_check_f8_layer cuda_time_f8 cuda_time_f8_backward; do program $each "echo \"\${0##*/}\${1:+ \$*}\""; done
program compute-sanitizer "echo \"\$*\" >>'$folder/sanitized'; case \"\$*\" in *'one token'*) exit 1 ;; esac"

budget=300
run() { # wanted status, parts
    wanted=$1
    shift
    PATH=$folder/bin:$PATH OUT=$folder/out WORK=$folder/work BUDGET=$budget BIN=$folder/bin "$tools/gpu.sh" "$@" >"$folder/run.txt" 2>&1
    expect_status "gpu.sh $*" $? "$wanted"
}
untimed() { # a line that the output must have, where the seconds at the line's end are not compared
    sed 's/, [0-9]* s$//; s/after [0-9]* s/after N s/' "$folder/run.txt" >"$folder/untimed.txt"
    expect "$1" "$folder/untimed.txt" "$1"
}
run 0 sms paper_topk
untimed "0 failures"
untimed "== sms: ok"
untimed "== paper_topk: ok"
untimed "| one | uniform | 2.0000 | 100.5 | 1.100 | 1.2500 (0.500) | 0.0100 |"
untimed "forward, uniform: geometric mean 0.785, least 0.400 (3 shapes)"
[ "$(wc -l <"$folder/out/paper_topk.jsonl")" -eq 20 ] || { echo "not all records came back"; wrong=1; }
run 0 portable_verify portable_99k
untimed "== portable_99k: ok"
[ "$(sort "$folder/kernels" | uniq -c | tr -s ' \n' ' ')" = ' 14 portable 14 portable-99k ' ] || { echo "not each process had the portable kernels"; wrong=1; }
run 0 f8
untimed "cuda_check_f8_dh"
untimed "cuda_check_f8_layer"
untimed "== f8_verify: ok"
[ "$(sort "$folder/computes" | uniq -c | tr -s ' \n' ' ')" = " 14 f8 14 f8-dgrad " ] || { echo "f8_verify checks something else"; wrong=1; }
untimed "cuda_time_f8 9 random"
untimed "cuda_time_f8_backward 5 random"
run 1 portable_synccheck
untimed "== portable_synccheck: FAILED (exit 1)"
[ "$(grep -c 'tool synccheck.*--kernels portable' "$folder/sanitized")" -eq 5 ] || { echo "no case after the one that fails"; wrong=1; }
run 1 ptx
untimed "build with -DCMAKE_CUDA_ARCHITECTURES='80;90a-real'"
untimed "== ptx: FAILED (exit 1)"
run 77 verify limits
untimed "== verify: ok"
untimed "== limits: no GPU"
: >"$folder/wrong"
run 1 limits verify
untimed "13 of 14 processes found nothing wrong"
untimed "== verify: FAILED (exit 1)"
rm "$folder/wrong"
: >"$folder/no_gpu"
run 77 verify
run 2 sms nonsense
expect "an unknown part" "$folder/run.txt" "gpu.sh: there is no part and no label nonsense"
run 2
budget=20 # shorter than the programs sleep, and long enough for a loaded machine to start them
run 1 models
untimed "stopped after N s: $folder/bin/smoe bench --device cuda --json --shape models/one --routing random --scope experts --pass forward,backward --seconds 8"
untimed "== models: FAILED (exit 1)"
run 1 route sms
untimed "== route: FAILED (exit 124)"
untimed "no time left for $folder/bin/cuda_check_sms"

# ---- test.sh, demo.sh, make ----

# OMP_NUM_THREADS is about a program's threads, not about the number of jobs.
fakes=$folder/fakes
mkdir -p "$fakes"
# shellcheck disable=SC2016 # their own variables
printf '#!/bin/sh\necho "${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-7}}"\n' >"$fakes/nproc"
# shellcheck disable=SC2016
printf '#!/bin/sh\ncase "$*" in --build*) echo "$*" | grep -o -e " -j[0-9]*" >>"%s/jobs"; exit 1 ;; esac\n' "$folder" >"$fakes/cmake"
printf '#!/bin/sh\necho install ok installed\n' >"$fakes/dpkg-query"
printf '#!/bin/sh\nexit 1\n' >"$fakes/python3"
chmod +x "$fakes"/*
for each in "tools/test.sh $folder/built" "tools/demo.sh $folder/built" "make BUILD=$folder/built"; do
    : >"$folder/jobs"
    # shellcheck disable=SC2086 # two words
    (cd "$tools/.." && unset MAKEFLAGS JOBS && OMP_NUM_THREADS=1 OMP_THREAD_LIMIT=1 PATH=$fakes:$PATH $each) >"$folder/run.txt" 2>&1
    [ "$(sort -u "$folder/jobs")" = " -j7" ] || { echo "$each: '$(sort -u "$folder/jobs")' instead of -j7"; wrong=1; }
done

# ---- variants.sh ----

pack=$folder/variants
mkdir -p "$pack"
cp "$here/../../docs/shapes.csv" "$pack/"
# shellcheck disable=SC2016 # its own arguments
printf '#!/bin/sh\n[ "$3" != 40960,768,256,128,8 ] || exit 3\necho "timed $*"\n' >"$pack/variants"
chmod +x "$pack/variants"
variant() { # name, status of its check
    printf '#!/bin/sh\nexit %s\n' "$2" >"$pack/smoe.$1"
    chmod +x "$pack/smoe.$1"
    : >"$pack/$1.so"
}
variant base 0
variant broken 1
variant another 0
variant bound-nothing 1 # a variant named bound-* may have wrong results
"$tools/variants.sh" run "$pack" 2 30B-n256 7B-n256:uniform >"$folder/variants.txt"
expect_status "variants.sh run" $? 0
expect variants.sh "$folder/variants.txt" "broken: FAILED, not measured"
expect variants.sh "$folder/variants.txt" "30B-n256, random"
expect variants.sh "$folder/variants.txt" "timed 2 random 32768,4096,256,256,16 ./base.so ./another.so ./bound-nothing.so"
expect variants.sh "$folder/variants.txt" "timed 2 uniform 24576,1536,256,128,8 ./base.so ./another.so ./bound-nothing.so"
"$tools/variants.sh" run "$pack" 2 1.4B-n256 >"$folder/variants.txt"
expect_status "variants.sh with a shape that fails" $? 3
variant base 1
"$tools/variants.sh" run "$pack" 2 30B-n256 >"$folder/variants.txt"
expect_status "variants.sh without a base" $? 1

[ $wrong -eq 0 ] && echo "the tools do what they say"
exit $wrong
