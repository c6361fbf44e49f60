#!/bin/sh
# Copies the shared libraries that programs need, except those of libc, C++ and CUDA, for a machine that lacks them.
# Usage: tools/copy_libraries.sh DIR PROGRAM...     a PROGRAM that does not exist is left out. Exit status: 0, 2 usage, 3 not copied
set -u
[ $# -ge 2 ] || {
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
}
folder=$1
shift
for program; do
    [ ! -e "$program" ] || ldd "$program"
done | awk '$3 ~ /openblas|gomp|gfortran|quadmath|jansson|libz\.|cmocka|bzip3|lzma/ { print $3 }' | sort -u |
    while read -r library; do cp -L "$library" "$folder/" || exit 3; done
