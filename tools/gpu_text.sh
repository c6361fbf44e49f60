#!/bin/sh
# Runs text_run.sh and rounding_study.sh (docs/training.md, "Ten minutes on one H200" and "Token rounding") on a machine that has
# GPUs but no compilers, in calls of less than ten minutes.
#
#   tools/gpu_text.sh pack BUILD CORPUS DIR         on the build machine: the program smoe of BUILD and its libraries, the text
#                                                   CORPUS/text (tools/corpus.sh) and the tokenizer of CORPUS/data
#                                                   (tools/make_tokens.py) into DIR; about 60 MB with bzip3, which is used if
#                                                   installed, else xz
#   DIR/gpu_text.sh run DIR                         on the GPU machine: MoE on GPU 0, twin on GPU 1; repeat it until both are
#                                                   "finished" (two calls with the default BUDGET)
#   DIR/gpu_text.sh study DIR [STUDY.tar.gz]        a part of the rounding study on all GPUs; repeat it until no run is left.
#                                                   STUDY.tar.gz: the results of earlier calls on another machine.
#                                                   Runs in docs/results/rounding_study.jsonl of the pack count as done
# A call takes at most BUDGET seconds (default 560). The first one unpacks the text and makes the tokens, which takes 30 to 50 s;
# later ones find them in $WORK (default DIR/work). The variables of text_run.sh and rounding_study.sh (LR, GPUS,
# STEPS, ...) hold here too, except that BUDGET of text_run.sh is called TRAIN_SECONDS (600) here. NAME (out) is the folder of a text
# run, so that several learning rates can be tried. Needs on the GPU machine: Python with tokenizers and matplotlib.
# Results under $OUT (default DIR/out): text_run.png, text_run_{moe,twin}.jsonl, {moe,twin}.txt (log, evaluation, samples);
# study.tar.gz, rounding_study.{png,jsonl,md}.
# Exit status: 0 all well, 1 study: runs are left, 2 wrong arguments, 3 a run failed or nothing could be unpacked, 77 no GPU.
# shellcheck source-path=SCRIPTDIR
set -u
. "$(dirname "$0")/gpu_common.sh"

parts="0 1 2 3" # numbers of the archives, which are unpacked at the same time

# ---- pack ----

# Distributes the folders of the text over the archives, and adds the program that unpacks them, which the GPU machine may lack.
pack_text() { # CORPUS
    compressor=$(command -v bzip3 || command -v xz) || exit 3
    options=-9
    [ "${compressor##*/}" = xz ] || options="-e -b 64"
    cp -L "$compressor" "$folder/decompress" || exit 3
    for part in $parts; do
        # shellcheck disable=SC2012,SC2086 # names of packages; options are words
        ls "$1/text" | awk -v part="$part" 'NR % 4 == part' |
            tar -C "$1/text" --sort=name --owner=0 --group=0 --mtime=@0 -c -T - | "$compressor" $options -c >"$folder/text_$part" || exit 3
    done
}

pack() { # BUILD, CORPUS, DIR
    pack_begin "$3"
    mkdir "$folder/tokenizer"
    cp "$1/smoe" "$folder/" && cp "$2/data/bpe.txt" "$2"/data/tokenizer*.json "$folder/tokenizer/" || exit 3
    for tool in text_run.sh text_run_plot.py rounding_study.sh rounding_study.py make_tokens.py; do
        cp "$tools/$tool" "$folder/" || exit 3
    done
    cp "$tools/../docs/results/rounding_study.jsonl" "$folder/" 2>/dev/null # if there are records
    pack_text "$2"
    "$tools/copy_libraries.sh" "$folder/lib" "$folder/smoe" "$folder/decompress" || exit 3
    without_blas
    pack_end "$3"
}

# ---- run and study ----

make_tokens() {
    [ ! -e "$work/data/ready" ] || return 0
    rm -rf "$work/text" && mkdir -p "$work/text" || exit 3
    for part in $parts; do
        { "$dir/decompress" -d -c "$dir/text_$part" || touch "$work/text.failed"; } | tar -C "$work/text" -x &
    done
    wait
    [ ! -e "$work/text.failed" ] || exit 3
    "$python" "$dir/make_tokens.py" "$work/data" "$work/text" --tokenizer "$dir/tokenizer" --validation 0.02 --quiet || exit 3
    touch "$work/data/ready"
    echo "$(find "$work/text" -type f | wc -l) documents are tokens"
}

begin() { # DIR
    run_begin "$1"
    make_tokens
    export SMOE="$dir/smoe" DATA="$work/data"
}

run() { # DIR
    begin "$1"
    folder=$work/${NAME:-out}
    BUDGET=${TRAIN_SECONDS:-600} "$dir/text_run.sh" "$folder" $((end - $(date +%s)))
    status=$?
    "$python" "$dir/text_run_plot.py" "$folder" "$out/text_run.png" || echo "no picture" >&2
    for model in moe twin; do
        [ -e "$folder/$model/train.jsonl" ] || continue
        cp "$folder/$model/train.jsonl" "$out/text_run_$model.jsonl"
        cat "$folder/$model.log" "$folder/$model.eval.json" "$folder/$model.json" "$folder/$model.samples.txt" \
            >"$out/$model.txt" 2>/dev/null # the last three are there when the run is finished
        tail -n 1 "$out/text_run_$model.jsonl"
    done
    exit $status
}

study() { # DIR, archive
    begin "$1"
    folder=$work/study
    mkdir -p "$folder"
    [ -z "$2" ] || tar -C "$folder" -xzf "$2" || exit 3
    GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | tr '\n' ' ')}
    export GPUS
    [ -e "$work/rounding_study.jsonl" ] || cp "$dir/rounding_study.jsonl" "$work/" 2>/dev/null
    export RECORDS="$work/rounding_study.jsonl"
    "$dir/rounding_study.sh" "$folder" $((end - 20 - $(date +%s))) # 20 s are left for the results
    status=$?
    tar -C "$folder" --exclude='*.tmp' --exclude='*.png' -czf "$out/study.tar.gz" .
    "$python" "$dir/rounding_study.py" "$folder" "$out/rounding_study.png" "$RECORDS" | tee "$out/rounding_study.md"
    cp "$RECORDS" "$out/"
    exit $status
}

case ${1:-}:$# in
pack:4) pack "$2" "$3" "$4" ;;
run:2) run "$2" ;;
study:2 | study:3) study "$2" "${3:-}" ;;
*) usage ;;
esac
