#!/bin/sh
# Measures which of several variants of the library is the fastest. Each is a patch on top of HEAD. All are measured by turns in
# one process on the GPU machine (bench/time_variants.c says which differences can be detected).
#
#   tools/variants.sh build DIR PATCH...            on the build machine: packs into DIR/carry the library and its checks,
#                                                   of HEAD (`base`) and with every PATCH (NAME.patch; several joined by +
#                                                   are applied one after the other)
#   CARRY/variants.sh run CARRY ROUNDS SHAPE...     on the GPU machine: every check, then a table of all variants for every
#                                                   SHAPE of docs/shapes.csv (NAME: random routing; or NAME:uniform)
#
# A patch named bound-* leaves out work to show what this work costs. It is measured although its results are wrong.
set -u

# All variants share one worktree and one build folder, so that only the files that a variant changes are compiled again.
build() {
    directory=$(realpath -m "$1")
    shift
    rm -rf "$directory/pack"
    mkdir -p "$directory/pack/lib" "$directory/carry"
    [ -d "$directory/source" ] || git worktree add -q --detach "$directory/source" HEAD || exit 3
    commit=$(git rev-parse HEAD)
    for variant in base "$@"; do
        name=$(echo "$variant" | tr '+' '\n' | sed 's|.*/||; s|\.patch$||' | paste -sd_)
        git -C "$directory/source" checkout -q -f --detach "$commit" && git -C "$directory/source" clean -qfd || exit 3
        if [ "$variant" != base ]; then
            for patch in $(echo "$variant" | tr '+' ' '); do
                git -C "$directory/source" apply "$(realpath "$patch")" || exit 3
            done
        fi
        [ -f "$directory/build/CMakeCache.txt" ] ||
            cmake -S "$directory/source" -B "$directory/build" -DCMAKE_BUILD_TYPE=Release >"$directory/log.txt" || exit 3
        make -C "$directory/build" smoe_shared smoe_cli cuda_time_variants cuda_time_host \
            >>"$directory/log.txt" 2>&1 || {
            tail "$directory/log.txt"
            exit 3
        }
        sh "$directory/source/tests/cuda/resources.sh" "$directory/build/src/cuda" 1 || exit 3
        strip -o "$directory/pack/$name.so" "$directory/build/src/libsmoe.so" || exit 3
        strip -o "$directory/pack/smoe.$name" "$directory/build/smoe" || exit 3
        echo "$name"
    done
    for program in time_variants time_host; do
        strip -o "$directory/pack/$program" "$directory/build/bench/cuda_$program" || exit 3
    done
    cp "$directory/source/docs/shapes.csv" "$directory/pack/" || exit 3
    git worktree remove --force "$directory/source"
    ldd "$directory"/pack/*.so "$directory"/pack/smoe.* |
        awk '$3 ~ /openblas|gomp|gfortran|quadmath|jansson|libz\./ { print $3 }' | sort -u |
        while read -r library; do cp -L "$library" "$directory/pack/lib/"; done
    tar -czf "$directory/carry/pack.tgz" -C "$directory/pack" . && cp "$0" "$directory/carry/variants.sh"
    du -sh "$directory/carry"
}

# T,d,n,E,K of a shape.
shape() {
    awk -F, -v name="$1" '$2 == name { print $3 "," $4 "," $5 "," $6 "," $7; exit }' shapes.csv
}

time_shapes() { # rounds, libraries joined by blanks, shapes
    rounds=$1
    libraries=$2
    shift 2
    for name; do
        routing=random
        [ "${name#*:}" = "$name" ] || routing=${name#*:}
        echo
        echo "${name%:*}, $routing"
        # shellcheck disable=SC2086
        timeout 200 ./time_variants "$rounds" "$routing" "$(shape "${name%:*}")" $libraries || return 3
    done
}

run() {
    cd "$1" || exit 3
    [ ! -f pack.tgz ] || tar -xzf pack.tgz || exit 3
    rounds=$2
    shift 2
    out=${OUT:-$PWD/out}
    mkdir -p "$out"
    export LD_LIBRARY_PATH="$PWD/lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    good=./base.so
    for library in *.so; do
        name=${library%.so}
        case $name in bound-*) good="$good ./$library"; continue ;; esac
        # The forward's and the backward's cases with small sizes, which are no multiples of a tile.
        if timeout 120 "./smoe.$name" verify --device cuda --all --only eights >"$out/check.txt" 2>&1; then
            [ "$name" = base ] || good="$good ./$library"
        else
            echo "$name: FAILED, not measured"
            [ "$name" != base ] || exit 1
        fi
    done
    time_shapes "$rounds" "$good" "$@" >"$out/table.txt"
    ended=$?
    # shellcheck disable=SC2086
    timeout 100 ./time_host 60 64,256,64,8,2 $good >"$out/host.txt" || ended=3
    cat "$out/table.txt" "$out/host.txt"
    exit $ended
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
build) build "$@" ;;
run) run "$@" ;;
*) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
