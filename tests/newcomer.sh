#!/bin/sh
# The first build on a new machine: newcomer.sh SOURCE FOLDER. Without cmocka, jansson, zlib and gnuplot the library must be
# built, and one line of CMake's output must name the parts that are left out and the packages to install. Without OpenBLAS or
# pkg-config, CMake must end with the names of their packages and without a call stack.
set -eu
source=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder/pkgconfig" "$folder/empty"

refused() { # package, CMake options
    package=$1
    shift
    if PKG_CONFIG_LIBDIR=$folder/empty PKG_CONFIG_PATH='' cmake -S "$source" -B "$folder/refused" -DSMOE_CUDA=OFF "$@" \
        >"$folder/log" 2>&1; then
        echo "CMake went on without $package" && exit 1
    fi
    if ! tr '\n' ' ' <"$folder/log" | grep -q "($package)" || grep -q 'Call Stack' "$folder/log"; then
        cat "$folder/log"
        echo "CMake does not name $package, or ends in a call stack" && exit 1
    fi
    rm -r "$folder/refused"
}
refused libopenblas-dev
refused pkg-config -DPKG_CONFIG_EXECUTABLE=/nonexistent
cp "$(pkg-config --variable=pcfiledir openblas)/openblas.pc" "$folder/pkgconfig/"

PKG_CONFIG_LIBDIR=$folder/pkgconfig PKG_CONFIG_PATH='' cmake -S "$source" -B "$folder/build" -DSMOE_CUDA=OFF \
    -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON >"$folder/log" 2>&1 || {
    cat "$folder/log"
    exit 1
}
said=$(grep 'left out' "$folder/log")
echo "$said"
[ "$(echo "$said" | wc -l)" -eq 1 ]
for word in 'smoe program' tests libjansson-dev zlib1g-dev libcmocka-dev; do
    echo "$said" | grep -q "$word" || { echo "the line does not name $word" && exit 1; }
done
cmake --build "$folder/build" >"$folder/log" 2>&1 || { cat "$folder/log" && exit 1; }
[ -f "$folder/build/src/libsmoe.so" ] && [ -f "$folder/build/src/libsmoe.a" ]
[ ! -e "$folder/build/smoe" ]
# pip hides CMake's output; on a terminal the line about CUDA must be seen all the same.
script -qec "cmake -S '$source' -B '$folder/pip' -DSKBUILD=2 -DSMOE_CUDA=OFF >'$folder/log'" /dev/null >"$folder/terminal"
grep -q 'cuda backend: none, because SMOE_CUDA is OFF' "$folder/terminal"
