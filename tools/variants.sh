#!/bin/sh
# Which of several variants is faster? Each is a patch on top of HEAD; all of them are measured in one call on the GPU
# machine, in turn, every second round the other way round. A process each: what differs by less than 3 % stays undecided
# (docs/lab-notebook.md, "How to compare").
#
#   tools/variants.sh build DIR PATCH...            here: into DIR/carry smoe.NAME and check.NAME of HEAD (`base`) and of
#                                                   every PATCH (NAME.patch; several joined by + are applied in turn)
#   CARRY/variants.sh run CARRY ROUNDS SHAPE...     there: every check, then ROUNDS rounds of all variants on every shape
#                                                   of the paper's suite, then a table; lines under $OUT (default CARRY/out)
#   tools/variants.sh table FILE                    the table of such lines
set -u

# Tree and build folder are reused, so that a variant compiles only what it changes.
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
        make -C "$directory/build" smoe_cli cuda_check cuda_check_backward >>"$directory/log.txt" 2>&1 || {
            tail "$directory/log.txt"
            exit 3
        }
        sh "$directory/source/tests/cuda/resources.sh" \
            "$directory/build/src/cuda/CMakeFiles/smoe_cuda_objects.dir" || exit 3
        strip -o "$directory/pack/smoe.$name" "$directory/build/smoe" || exit 3
        for program in check check_backward; do
            strip -o "$directory/pack/$program.$name" "$directory/build/tests/cuda/cuda_$program" || exit 3
        done
        echo "$name"
    done
    git worktree remove --force "$directory/source"
    ldd "$directory"/pack/smoe.* | awk '$3 ~ /openblas|gomp|gfortran|quadmath|jansson|libz/ { print $3 }' | sort -u |
        while read -r library; do cp -L "$library" "$directory/pack/lib/"; done
    tar -czf "$directory/carry/pack.tgz" -C "$directory/pack" . && cp "$0" "$directory/carry/variants.sh"
    du -sh "$directory/carry"
}

# Of every shape, routing and pass: the mean over the rounds of every variant's ms, and its ratio to base's.
table() {
    awk '
    function field(name,    at, rest) {
        at = index($0, "\"" name "\":")
        rest = substr($0, at + length(name) + 3)
        if (substr(rest, 1, 1) == "\"") { rest = substr(rest, 2); return substr(rest, 1, index(rest, "\"") - 1) }
        sub(/[,}].*/, "", rest)
        return rest
    }
    field("kernel") == "all" {
        key = field("shape") " " field("routing") " " field("pass")
        if (!(key in known)) { known[key] = 1; keys[++count] = key }
        if (!($1 in seen)) { seen[$1] = 1; names[++variants] = $1 }
        n[key, $1]++
        ms[key, $1] += field("ms_median")
    }
    END {
        printf "%-32s", "shape, routing, pass"
        for (v = 1; v <= variants; v++) printf " %20s", names[v]
        print ""
        for (k = 1; k <= count; k++) {
            printf "%-32s", keys[k]
            base = ms[keys[k], "base"] / n[keys[k], "base"]
            for (v = 1; v <= variants; v++) {
                mean = ms[keys[k], names[v]] / n[keys[k], names[v]]
                printf " %12.4f (%.3f)", mean, mean / base
            }
            print ""
        }
    }' "$1"
}

bench() { # variant, shape
    timeout 60 "./smoe.$1" bench --device cuda --json --shape "paper/$2" --routing uniform,random --scope experts \
        --pass forward,backward --seconds 2 --no-bound 2>/dev/null | sed "s/^/$1 /" >>"$out/lines.txt"
}

run() {
    cd "$1" || exit 3
    [ ! -f pack.tgz ] || tar -xzf pack.tgz || exit 3
    rounds=$2
    shift 2
    out=${OUT:-$PWD/out}
    mkdir -p "$out"
    export LD_LIBRARY_PATH="$PWD/lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    good=
    for program in smoe.*; do
        name=${program#smoe.}
        # Exact integers at all edges, both ways.
        if timeout 60 "./check.$name" eights >"$out/check.txt" 2>&1 &&
            timeout 60 "./check_backward.$name" "eights d 8" >>"$out/check.txt" 2>&1; then
            good="$good $name"
        else
            echo "$name: FAILED, not measured"
        fi
    done
    round=0
    while [ $round -lt "$rounds" ]; do
        for shape; do
            for name in $good; do bench "$name" "$shape"; done
        done
        good=$(echo "$good" | tr ' ' '\n' | tac | tr '\n' ' ')
        round=$((round + 1))
    done
    table "$out/lines.txt"
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
build) build "$@" ;;
run) run "$@" ;;
table) table "$@" ;;
*) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
