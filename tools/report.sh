#!/bin/sh
# Makes tables in Markdown from the records of `smoe bench --json`.
#
#   tools/report.sh passes FILE...          each pass and stage: time in ms, the reference's time / smoe's; geometric means
#   tools/report.sh peaks FILE...           peak memory, measured and as `smoe_query_sizes` states it, by chunks and `reuse_saved`
#   tools/report.sh launches FILE...        kernels of a pass, and the time of each by itself (--alone)
#
# If several records have the same problem, pass and stage, the last one counts.
set -eu

# The part of awk that all tables share: a record's fields, and formats.
# shellcheck disable=SC2016 # awk's dollars
reader='
function field(name,    at, rest) {
    at = index($0, "\"" name "\":")
    if (!at) return ""
    rest = substr($0, at + length(name) + 3)
    if (substr(rest, 1, 1) == "\"") { rest = substr(rest, 2); return substr(rest, 1, index(rest, "\"") - 1) }
    sub(/[,}].*/, "", rest)
    return rest == "null" ? "" : rest + 0
}
function take() {
    shape = field("shape"); routing = field("routing"); rounding = field("rounding"); pass = field("pass")
    kernel = field("kernel"); chunks = field("chunks"); reuse = field("reuse_saved"); ms = field("ms_median")
    ratio = field("ratio"); tflops = field("tflops"); scope = field("scope")
}
function mib(bytes) { return bytes == "" ? "" : sprintf("%.1f", bytes / 1048576) }
function with_ratio(value, ratio) { return value == "" ? "" : sprintf(ratio == "" ? "%.4f" : "%.4f (%.3f)", value, ratio) }
function seen(list, name) { if (!((list, name) in known)) { known[list, name] = 1; names[list, ++count[list]] = name } }
function variant() {
    return routing (rounding == "none" ? "" : ", " rounding) (chunks == 1 ? "" : ", " chunks " chunks") \
        (reuse ? ", reuse" : "") (scope == "layer" ? ", layer" : "")
}
'

passes() {
    awk "$reader"'
    {
        take()
        if (kernel == "routing" || kernel == "gemms") next
        seen("pass", pass); seen(pass, shape SUBSEP variant())
        if (kernel != "all") seen("stages of " pass, kernel)
        cell[pass, shape, variant(), kernel] = with_ratio(ms, ratio)
        if (kernel == "all") cell[pass, shape, variant(), kernel] = sprintf("%.4f | %.1f | %s", ms, tflops, ratio == "" ? "" : sprintf("%.3f", ratio))
        if (kernel == "all" && ratio != "") value[pass, shape, variant()] = ratio
    }
    END {
        for (p = 1; p <= count["pass"]; p++) {
            pass = names["pass", p]; stages = "stages of " pass
            printf "\n%s, ms and (reference / smoe)\n\n| shape | routing | ms | TFLOP/s | ratio |", pass
            for (k = 1; k <= count[stages]; k++) printf " %s |", names[stages, k]
            printf "\n|---|---|---|---|---|"
            for (k = 1; k <= count[stages]; k++) printf "---|"
            printf "\n"
            for (i = 1; i <= count[pass]; i++) {
                split(names[pass, i], row, SUBSEP)
                printf "| %s | %s | %s |", row[1], row[2], cell[pass, row[1], row[2], "all"]
                for (k = 1; k <= count[stages]; k++) printf " %s |", cell[pass, row[1], row[2], names[stages, k]]
                printf "\n"
                if (!((pass, row[1], row[2]) in value)) continue
                r = value[pass, row[1], row[2]]; seen("of " pass, row[2]); v = pass SUBSEP row[2]
                logs[v] += log(r); n[v]++
                if (!(v in least) || r < least[v]) least[v] = r
            }
            for (i = 1; i <= count["of " pass]; i++) {
                v = pass SUBSEP names["of " pass, i]
                printf "%s%s, %s: geometric mean %.3f, least %.3f (%d shapes)\n", i == 1 ? "\n" : "", pass,
                    names["of " pass, i], exp(logs[v] / n[v]), least[v], n[v]
            }
        }
    }' "$@"
}

peaks() {
    awk "$reader"'
    {
        take()
        if (kernel != "all") next
        seen("rows", shape SUBSEP variant()); v = shape SUBSEP variant()
        saved[v] = mib(field("saved_bytes")); time[v, pass] = sprintf("%.4f", ms)
        peak[v, pass] = mib(field("peak_bytes")) " (" mib(field("predicted_bytes")) ")"
    }
    END {
        print "\nIn MiB: measured peak of a pass without X, dO and the weights (what `smoe_query_sizes` asks for)\n"
        print "| shape | routing | saved | forward | backward | both | forward ms | backward ms |\n|---|---|---|---|---|---|---|---|"
        for (i = 1; i <= count["rows"]; i++) {
            v = names["rows", i]; split(v, row, SUBSEP)
            printf "| %s | %s | %s | %s | %s | %s | %s | %s |\n", row[1], row[2], saved[v], peak[v, "forward"],
                peak[v, "backward"], peak[v, "layer"], time[v, "forward"], time[v, "backward"]
        }
    }' "$@"
}

launches() {
    awk "$reader"'
    {
        take(); alone = field("alone_ms"); copy = field("alone_copy_ms"); number = field("launches")
        if (number == "" || number == 0 || kernel == "routing" || kernel == "gemms") next
        if (!head++) print "\n| shape | routing | pass | kernel | launches | ms | alone, us | ms / alone | copy / alone |\n|---|---|---|---|---|---|---|---|---|"
        printf "| %s | %s | %s | %s | %d | %.4f | %s | %s | %s |\n", shape, variant(), pass, kernel, number, ms,
            (alone == "" ? "" : sprintf("%.1f", 1000 * alone)), (alone == "" ? "" : sprintf("%.3f", ms / alone)),
            (copy == "" ? "" : sprintf("%.3f", copy / alone))
    }' "$@"
}

command=${1:-}
[ $# -gt 1 ] || command=
[ $# -eq 0 ] || shift
case $command in
passes | peaks | launches) "$command" "$@" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
