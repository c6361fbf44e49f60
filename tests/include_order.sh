#!/bin/sh
# The includes of src/ must have no cycle, a folder of src/cuda must not include files of the folders that depend on it, and no
# two files may share a name: include_order.sh SOURCE_FOLDER. If not, prints the cycle, includes or names; exit status 1.
set -eu
cd "$1/src"
pairs=$(mktemp)
trap 'rm -f "$pairs"' EXIT

# One line "FILE INCLUDED" for each include of a file of src/ by a file of src/.
find . -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sed 's|^\./||' | sort | while read -r file; do
    sed -n 's|^[[:space:]]*#[[:space:]]*include[[:space:]]*"\(.*\)".*|\1|p' "$file" | while read -r name; do
        for folder in "$(dirname "$file")" . cuda; do
            [ -f "$folder/$name" ] || continue
            printf '%s %s\n' "$file" "$(printf '%s\n' "$folder/$name" | sed 's|^\./||')"
            break
        done
    done
done >"$pairs"
[ "$(wc -l <"$pairs")" -gt 100 ] || { echo "include_order: found no includes in $1/src" >&2; exit 3; }

status=0
if ! tsort "$pairs" >/dev/null; then
    echo "include_order: the files above include each other" >&2
    status=1
fi

# Which folders must not include which.
forbid() { # FOLDER FOLDERS-IT-MUST-NOT-INCLUDE
    if grep -E "^cuda/$1/[^ ]* cuda/$2/" "$pairs"; then
        echo "include_order: src/cuda/$1 must not include src/cuda/$2" >&2
        status=1
    fi
}
forbid common '(schedule|host|tma|routing|experts|ep|sm[0-9]+)'
forbid schedule '(host|tma|routing|experts|ep|sm[0-9]+)'
forbid host '(tma|routing|experts|ep|sm[0-9]+)'
forbid tma '(host|routing|experts|ep|sm[0-9]+)'
forbid routing '(experts|ep|sm[0-9]+)'
forbid experts '(routing|ep|sm[0-9]+)'
forbid ep '(tma|routing|experts|sm[0-9]+)'
forbid sm80 '(routing|ep|sm90)'
forbid sm90 '(routing|ep|sm80)'

# No two files share a name, except where one backend mirrors the other, or one generation of GPUs the other.
named=$(find . -type f ! -name CMakeLists.txt | sed -E 's,^\./,,; s,^(cpu|cuda/host)/,BACKEND/,; s,^cuda/sm[0-9]+/,cuda/GENERATION/,' | sort -u |
    sed 's,.*/,,' | sort | uniq -d)
if [ -n "$named" ]; then
    find . -type f | grep -F "$(echo "$named" | sed 's,^,/,')" >&2
    echo "include_order: the files above of src/ share a name" >&2
    status=1
fi
exit $status
