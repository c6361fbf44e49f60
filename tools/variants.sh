#!/bin/sh
# Which of several variants of the forward is faster? Each is a patch on top of HEAD; all of them are measured in one
# call on the GPU machine, in turn, each against cuBLAS of its own process.
#
#   tools/variants.sh build DIR PATCH...             here: into DIR/carry measure.NAME and check.NAME of HEAD (`base`) and
#                                                    of every PATCH (NAME.patch; several joined by + are applied in turn)
#   CARRY/variants.sh run CARRY ROUNDS ROUTING:SHAPE...   there: every check, then ROUNDS rounds of all variants on
#                                                    every shape, then a table; lines under $OUT (default CARRY/out)
#   tools/variants.sh table FILE                     the table of such lines
set -u

# Tree and build folder are reused, so that a variant compiles only what it changes.
build() {
    directory=$(realpath -m "$1")
    shift
    mkdir -p "$directory/pack"
    [ -d "$directory/source" ] || git worktree add -q --detach "$directory/source" HEAD || exit 3
    commit=$(git rev-parse HEAD)
    for variant in base "$@"; do
        name=$(echo "$variant" | tr '+' '\n' | sed 's|.*/||; s|\.patch$||' | paste -sd+)
        git -C "$directory/source" checkout -q -f --detach "$commit" && git -C "$directory/source" clean -qfd || exit 3
        if [ "$variant" != base ]; then
            for patch in $(echo "$variant" | tr '+' ' '); do
                git -C "$directory/source" apply "$(realpath "$patch")" || exit 3
            done
        fi
        [ -f "$directory/build/CMakeCache.txt" ] ||
            cmake -S "$directory/source" -B "$directory/build" -DCMAKE_BUILD_TYPE=Release >"$directory/log.txt" || exit 3
        make -C "$directory/build" cuda_measure cuda_check >>"$directory/log.txt" 2>&1 || { tail "$directory/log.txt"; exit 3; }
        sh "$directory/source/tests/cuda/resources.sh" \
            "$directory/build/src/cuda/CMakeFiles/smoe_cuda_objects.dir" || exit 3
        for program in measure check; do
            strip -o "$directory/pack/$program.$name" "$directory/build/tests/cuda/cuda_$program" || exit 3
        done
        echo "$name"
    done
    git worktree remove --force "$directory/source"
    mkdir -p "$directory/pack/lib"
    ldd "$directory"/pack/check.* | awk '$3 ~ /openblas|gomp|gfortran|quadmath/ { print $3 }' | sort -u |
        while read -r library; do cp -L "$library" "$directory/pack/lib/"; done
    mkdir -p "$directory/carry"
    tar -czf "$directory/carry/pack.tgz" -C "$directory/pack" . && cp "$0" "$directory/carry/variants.sh"
    du -sh "$directory/carry"
}

# Of every shape and variant: the mean over the rounds of the pass's ratio to the bound, of up's ratio to cuBLAS, of up,
# cuBLAS's up and the pass in ms.
table() {
    awk '/ pass / {
        key = $2 " " $3 " " $1
        if (!(key in n)) order[++keys] = key
        n[key]++
        for (i = 4; i < NF; i++) {
            if ($i == "ratio") ratio[key] += $(i + 1)
            if ($i == "pass") pass[key] += $(i + 1)
            if ($i == "up" && $(i + 2) ~ /^\(x/) {
                up[key] += $(i + 1)
                upx[key] += substr($(i + 2), 3)
            }
            if ($i == "up" && $(i + 2) == "down") cublas[key] += $(i + 1)
        }
    }
    END {
        printf "%-12s %-8s %-24s %3s %7s %7s %8s %9s %9s\n", "shape", "routing", "variant", "n", "bound/", "up x", "up ms",
            "cublas up", "pass ms"
        for (k = 1; k <= keys; k++) {
            split(order[k], f, " ")
            c = n[order[k]]
            printf "%-12s %-8s %-24s %3d %7.3f %7.3f %8.4f %9.4f %9.4f\n", f[1], f[2], f[3], c, ratio[order[k]] / c,
                upx[order[k]] / c, up[order[k]] / c, cublas[order[k]] / c, pass[order[k]] / c
        }
    }' "$1"
}

run() {
    cd "$1" || exit 3
    [ -f pack.tgz ] && { tar -xzf pack.tgz || exit 3; }
    rounds=$2
    shift 2
    out=${OUT:-$PWD/out}
    mkdir -p "$out"
    export LD_LIBRARY_PATH="$PWD/lib:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    for check in check.*; do
        # A few cases of every kind: exact integers at all edges, one expert with all rows, biases, rounded ones.
        for part in ${CHECKS:-eights edges general one bias swiglu}; do
            timeout 60 "./$check" "$part" >"$out/$check.$part.txt" 2>&1 ||
                echo "${check#check.}: $part FAILED, not measured" | tee -a "$out/failed.txt"
        done
    done
    round=0
    while [ $round -lt "$rounds" ]; do
        for job; do
            for program in measure.*; do
                name=${program#measure.}
                grep -qs "^$name: " "$out/failed.txt" && continue
                timeout 60 "./$program" "${job%%:*}" 1 "${job#*:}" | sed "s/^/$name /" >>"$out/lines.txt"
            done
        done
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
*) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
