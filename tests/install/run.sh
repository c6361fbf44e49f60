#!/bin/sh
# Installs the build into a new prefix and compiles programs that use it, found by find_package and by pkg-config, with -Werror.
# Checks that the header compiles by itself as C99 and as C++, and which symbols the shared library exports.
set -eu
build=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$build/install-test
rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --prefix "$work/prefix" >/dev/null

cmake -S "$here" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/cmake" >/dev/null
"$work/cmake/consumer_smoe"
"$work/cmake/consumer_static"

PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name smoe.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir smoe)
# The shared library works where OpenBLAS's development files are missing: PKG_CONFIG_LIBDIR hides openblas.pc. The program
# runs as it was linked.
export PKG_CONFIG_LIBDIR="$work"
# shellcheck disable=SC2046
cc -std=c99 -pedantic -Wall -Wextra -Werror "$here/consumer.c" -o "$work/consumer" $(pkg-config --cflags --libs smoe)
env -u LD_LIBRARY_PATH "$work/consumer"
cmake -S "$here" -B "$work/cmake-shared" -DCMAKE_PREFIX_PATH="$work/prefix" -DKINDS=smoe >/dev/null
cmake --build "$work/cmake-shared" >/dev/null
"$work/cmake-shared/consumer_smoe"
if pkg-config --exists openblas; then exit 1; fi # or the above shows nothing
unset PKG_CONFIG_LIBDIR
# shellcheck disable=SC2046
cc -std=c99 -pedantic -Wall -Wextra -Werror "$here/consumer.c" -o "$work/consumer_static" "$libdir/libsmoe.a" \
    -Wl,--as-needed $(pkg-config --static --cflags --libs smoe)
"$work/consumer_static"

# The program takes the library that is installed beside it.
program=$work/prefix/bin/smoe
if [ -e "$program" ] && ! env -u LD_LIBRARY_PATH ldd "$program" | grep -q "libsmoe\.so.* => $work/prefix/"; then
    ldd "$program"
    exit 1
fi

for header in "$work/prefix/include/smoe.h" "$work/prefix/include/smoe_ep.h"; do
    cc -std=c99 -pedantic -Wall -Wextra -Werror -fsyntax-only -x c -I "$work/prefix/include" "$header"
    c++ -pedantic -Wall -Wextra -Werror -fsyntax-only -x c++ -I "$work/prefix/include" "$header"
done

library=$(readlink -f "$libdir/libsmoe.so")
readelf -d "$library" | grep -q 'soname: \[libsmoe.so.0.2\]'
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort)
declared=$(sed -n 's/^SMOE_API .*[ *]\(smoe_[a-z_]*\)(.*/\1/p' "$work"/prefix/include/smoe*.h | sort)
if [ "$exported" != "$declared" ]; then
    echo "exported and declared symbols differ:"
    printf '%s\n' "$exported" >"$work/exported"
    printf '%s\n' "$declared" | diff "$work/exported" -
    exit 1
fi
echo "$(printf '%s\n' "$exported" | wc -l) symbols exported, as declared"
