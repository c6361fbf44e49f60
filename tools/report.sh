#!/bin/sh
# Makes tables in Markdown, and a picture, from the records of `smoe bench --json`.
#
#   tools/report.sh passes FILE...          each pass and stage: time in ms, the reference's time / smoe's; geometric means
#   tools/report.sh peaks FILE...           peak memory, measured and as `smoe_query_sizes` states it, by chunks and `reuse_saved`
#   tools/report.sh launches FILE...        kernels of a pass, and the time of each by itself (--alone)
#   tools/report.sh rounding FILE... [PNG]  rounding rules, plain top-K and uniform routing, by E
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

# One line for each shape, tab-separated: d n K E; ms with uniform routing, plain top-K and token rounding; TFLOP/s of the three;
# the rounding rule.
rounding_lines() {
    awk "$reader"'
    {
        take()
        if (pass != "layer" || kernel != "all") next
        what = rounding == "none" ? routing : routing == "uniform" ? "" : "rounded"
        if (what == "" || what == "skewed") next
        v = field("d") "\t" field("n") "\t" field("K") "\t" field("E")
        if (!(v in known)) { known[v] = 1; order[++rows] = v }
        time[v, what] = ms; speed[v, what] = tflops
        if (what == "rounded") rule[v] = rounding
    }
    END {
        for (i = 1; i <= rows; i++) {
            v = order[i]
            if (!((v, "random") in time) || !((v, "rounded") in time)) continue
            printf "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", v, time[v, "uniform"], time[v, "random"], time[v, "rounded"],
                speed[v, "uniform"], speed[v, "random"], speed[v, "rounded"], rule[v]
        }
    }' "$@" | sort -k1,1n -k2,2n -k4,4n
}

picture() { # lines, png
    groups=$(awk -F'\t' '{ v = $1 "-" $2 "-" $3; if (++n[v] == 2) printf "%s ", v }' "$1") # one point is no curve
    {
        echo "set terminal pngcairo size 1100,700 font 'sans,11'; set output '$2'"
        echo "set datafile separator tab; set logscale x 2; set xlabel 'experts'; set grid; set key left bottom"
        echo "set multiplot layout 2,3 title 'Layer forward and backward, TFLOP/s (model FLOPs of top-K)'"
        for group in $groups; do
            awk -F'\t' -v v="$group" 'v == $1 "-" $2 "-" $3' "$1" >"$1.$group"
            echo "set title 'd-n-K $group'; set yrange [0:*]"
            echo "plot '$1.$group' using 4:8 with linespoints title 'uniform', '' using 4:9 with linespoints title 'random, top-K', '' using 4:10 with linespoints title 'random, rounded'"
        done
    } | gnuplot
}

rounding() {
    png=
    for file; do last=$file; done
    case $last in
    *.png)
        png=$last
        files=
        for file; do [ "$file" = "$png" ] || files="$files $file"; done
        # shellcheck disable=SC2086
        set -- $files
        ;;
    esac
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    rounding_lines "$@" >"$folder/lines"
    awk -F'\t' '
    BEGIN { print "\n| d | n | K | E | uniform ms | random ms | rounded ms | rule | TFLOP/s: uniform, random, rounded | random ms / rounded ms | rounded ms / uniform ms |\n|---|---|---|---|---|---|---|---|---|---|---|" }
    {
        printf "| %s | %s | %s | %s | %s | %.3f | %.3f | %s | %s %.0f %.0f | %.3f | %s |\n", $1, $2, $3, $4,
            $5 == "" ? "" : sprintf("%.3f", $5), $6, $7, $11, $8 == "" ? "" : sprintf("%.0f", $8), $9, $10, $6 / $7,
            $5 == "" ? "" : sprintf("%.3f", $7 / $5)
    }' "$folder/lines"
    [ -z "$png" ] || picture "$folder/lines" "$png"
}

command=${1:-}
[ $# -gt 1 ] || command=
[ $# -eq 0 ] || shift
case $command in
passes | peaks | launches | rounding) "$command" "$@" ;;
*) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
