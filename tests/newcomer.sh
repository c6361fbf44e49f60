#!/bin/sh
# The first build on a new machine: newcomer.sh SOURCE FOLDER. Without cmocka, jansson, zlib and gnuplot the library must be
# built, and one line of CMake's output must name the parts that are left out and the packages to install.
set -eu
source=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder/pkgconfig"
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
