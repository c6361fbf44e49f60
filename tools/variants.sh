#!/bin/sh
# Measures which of several variants of the library is the fastest. Each is a patch on top of HEAD. All are measured by turns in
# one process on a GPU (bench/variants.c says which differences can be detected).
#
#   tools/variants.sh build DIR PATCH...            into DIR: the library and its checks, of HEAD (`base`) and with every PATCH
#                                                   (NAME.patch; several joined by + are applied one after the other)
#   DIR/variants.sh run DIR ROUNDS SHAPE...         on the GPU machine: every check, then a table of all variants for every
#                                                   SHAPE of docs/shapes.csv (NAME: random routing; or NAME:uniform)
#
# A patch named bound-* leaves out work to show what this work costs. It is measured although its results are wrong. A GPU machine
# that lacks OpenBLAS or jansson finds them in the lib/ of tools/gpu.sh by LD_LIBRARY_PATH.
set -u

# All variants share one worktree and one build folder, so that only the files that a variant changes are compiled again.
build() {
    directory=$(realpath -m "$1")
    shift
    mkdir -p "$directory"
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
        cmake --build "$directory/build" --target smoe_shared smoe_cli cuda_variants >>"$directory/log.txt" 2>&1 || {
            tail "$directory/log.txt"
            exit 3
        }
        sh "$directory/source/tests/cuda/resources.sh" "$directory/build/src/cuda" || exit 3
        strip -o "$directory/$name.so" "$directory/build/src/libsmoe.so" || exit 3
        strip -o "$directory/smoe.$name" "$directory/build/smoe" || exit 3
        echo "$name"
    done
    cp "$directory/build/bench/cuda_variants" "$directory/variants" || exit 3
    cp "$directory/source/docs/shapes.csv" "$0" "$directory/" || exit 3
    git worktree remove --force "$directory/source"
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
        timeout 200 ./variants "$rounds" "$routing" "$(shape "${name%:*}")" $libraries || return 3
    done
}

run() {
    cd "$1" || exit 3
    rounds=$2
    shift 2
    out=${OUT:-$PWD/out}
    mkdir -p "$out"
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
    cat "$out/table.txt"
    exit $ended
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
build) build "$@" ;;
run) run "$@" ;;
*) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
