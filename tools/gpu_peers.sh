#!/bin/bash
# Packs bench/peers.py (docs/peers.md) and runs it on a machine that has a GPU and PyTorch, but no network.
#
#   tools/gpu_peers.sh pack BUILD DIR [SITE]    on a machine with a network: libsmoe.so of BUILD, bench/, python/ and the
#                                               peers' packages into DIR (about 48 MB). The packages are downloaded into the
#                                               folder SITE; without SITE into a scratch folder. What SITE already has (its
#                                               folders sonicmoe, scattermoe, einops and momoe, which are the packages
#                                               themselves) is not downloaded again. An existing DIR/site.tar.xz is kept:
#                                               remove it to pack other packages.
#   DIR/gpu_peers.sh run DIR [ARGUMENTS [-- ARGUMENTS]...]
#                                               on the GPU machine: bench/peers.py with ARGUMENTS, once for each list between
#                                               the words --; without ARGUMENTS the paper's layers, part experts, compared
#                                               with SonicMoE, ScatterMoE and cuBLAS
# pack needs pip, git and xz; PYTHON_VERSION is the GPU machine's Python (3.12). run needs torch and, for the picture, matplotlib.
# run ends within BUDGET seconds (default 560), the last 40 of which are for tables, picture and cache; the default ARGUMENTS take
# 430 s. --seconds N among ARGUMENTS ends a list between two layers. Without caches SonicMoE tunes for 5 to 60 s at each layer.
# run leaves peers.jsonl, tables.txt, log.txt, ratios.png and cache.tar.xz under $OUT (default DIR/out). peers.jsonl is there from
# the first layer on, and has every layer as soon as it is measured. If cache.tar.xz is copied to DIR, SonicMoE need not compile
# and tune again on the next machine. Scratch is $WORK (default DIR/work). A record of docs/results/peers.jsonl or of an
# earlier run in the same $WORK is not measured again.
# Exit status: 0 all well, else that of the first list that failed: 1 no time was left to start it, 2 wrong arguments, 3 nothing
# could be measured, 124 out of time (what was measured is in the tables). 3 also if nothing could be unpacked or a package of a peer is
# missing, 77 no GPU.
# shellcheck source-path=SCRIPTDIR
set -u
. "$(dirname "$0")/gpu_common.sh"

# ---- pack: the versions of docs/peers.md ----

sonicmoe="sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2
apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5"

# A folder of a repository on GitHub, at a commit.
clone() { # owner/name, commit, folder in it, where it goes
    [ ! -e "$4" ] || return 0
    place=$(mktemp -d)
    git clone --quiet "https://github.com/$1" "$place" && git -C "$place" checkout --quiet "$2" && cp -r "$place/$3" "$4"
    status=$?
    rm -rf "$place"
    return $status
}

download() { # SITE
    mkdir -p "$1"
    # shellcheck disable=SC2086 # names are words
    [ -e "$1/sonicmoe" ] || python3 -m pip install --quiet --target "$1" --no-deps --only-binary=:all: \
        --no-compile --ignore-requires-python --python-version "${PYTHON_VERSION:-3.12}" \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 $sonicmoe || exit 3
    clone shawntan/scattermoe 47b5e15 scattermoe "$1/scattermoe" || exit 3
    [ -e "$1/einops" ] || python3 -m pip install --quiet --target "$1" --no-deps --no-compile einops || exit 3
    clone tilde-research/MoMoE-impl d6e2d68 momoe "$1/momoe" || exit 3
}

pack() { # BUILD, DIR, SITE
    pack_begin "$2"
    pack_python "$1" bench docs/shapes.csv
    mkdir -p "$folder/docs/results"
    cp "$tools/../docs/results/peers.jsonl" "$folder/docs/results/" 2>/dev/null # if there are records
    python3 -c 'import sys; sys.path[0] = sys.argv[1] + "/bench"; import peers; print(peers.commit())' "$tools/.." >"$folder/commit" ||
        exit 3
    if [ ! -e "$2/site.tar.xz" ]; then
        site=${3:-$(mktemp -d)}
        download "$site"
        require_peers "$site" "$(cd "$site" && find . -maxdepth 2)"
        # A dictionary as large as most of the packages: 46 MB instead of 56 MB, in 4 minutes.
        XZ_OPT=--lzma2=preset=9,dict=192MiB tar -C "$site" --exclude=__pycache__ -cJf "$2/site.tar.xz.tmp" . && mv "$2/site.tar.xz.tmp" "$2/site.tar.xz" || exit 3
        [ -n "$3" ] || rm -r "$site"
    else
        packed=$(tar -tJf "$2/site.tar.xz") || exit 3
        require_peers "$2/site.tar.xz" "$packed"
    fi
    pack_end "$2"
}

# ---- run ----

peers() { # arguments of bench/peers.py
    "$python" "$dir/bench/peers.py" --records "$work/peers.jsonl" "$@"
}

# One run of bench/peers.py, which copies its records to $out after each layer. Then the tables of all records so far.
one_part() { # arguments
    within 3600 "$python" "$dir/bench/peers.py" --records "$work/peers.jsonl" --copy "$out/peers.jsonl" --commit "$(cat "$dir/commit")" \
        "$@" 2>>"$out/log.txt"
    local status=$?
    echo "== $*: exit status $status" | tee -a "$out/log.txt" >&2
    [ $status -ne 0 ] || return 0
    tail -n 5 "$out/log.txt" >&2
    [ $worst -ne 0 ] || worst=$status
}

# The tables, the picture and the compiled kernels, also of a run that was ended. Little compression, because the machine is lent.
keep_results() {
    [ ! -e "$work/peers.jsonl" ] || cp "$work/peers.jsonl" "$out/"
    peers --show >"$out/tables.txt"
    timeout 20 "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1], "w:xz", preset=1).add(sys.argv[2], ".")' \
        "$work/cache.tar.xz" "$work/cache" && mv "$work/cache.tar.xz" "$out/"
    timeout 10 "$python" "$dir/bench/peers.py" --records "$work/peers.jsonl" --show --plot "$out/ratios.png" >/dev/null
}

run() { # DIR, arguments
    run_begin "$1"
    shift
    use_python
    unpack_peers "$packed"
    export PYTHONPATH="$PYTHONPATH:$peer_path" QUACK_COMPILE_WORKERS=$(($(nproc) > 2 ? $(nproc) - 2 : 1))
    [ -e "$work/peers.jsonl" ] || cp "$dir/docs/results/peers.jsonl" "$work/" 2>/dev/null
    [ $# -gt 0 ] || set -- --suite paper --peers sonicmoe,scattermoe,cublas --no-new-t --shape-seconds 5 --seconds 430
    end=$((end - 40))
    worst=0
    : >"$out/log.txt"
    part=()
    for word in "$@" --; do
        if [ "$word" = -- ]; then
            one_part "${part[@]}"
            part=()
        else
            part+=("$word")
        fi
    done
    keep_results
    exit $worst
}

case ${1:-}:$# in
pack:3 | pack:4) pack "$2" "$3" "${4:-}" ;;
run:1) usage ;;
run:*) shift && run "$@" ;;
*) usage ;;
esac
