#!/bin/sh
# Installs what is missing, builds for this machine, trains a small MoE language model on the Jargon File for DEMO_SECONDS
# (default 150), and shows the curve and a sample. Leaves train.jsonl, curve.png and the checkpoints in BUILD/demo/.
# Further arguments are passed to `smoe train`, as in: tools/demo.sh build --rounding nr-f
set -eu
cd "$(dirname "$0")/.."
build=${1:-build}
[ $# -eq 0 ] || shift
tools/install_packages.sh build-essential cmake pkg-config libopenblas-dev libjansson-dev zlib1g-dev gnuplot-nox jargon-text

native=$build/native
mkdir -p "$native"
if ! { cmake -S . -B "$native" -DCMAKE_BUILD_TYPE=Release -DSMOE_NATIVE=ON -DSMOE_TESTS=OFF -DSMOE_CUDA=OFF &&
    cmake --build "$native" -j"$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"; } >"$native/build.log" 2>&1; then
    tail -n 40 "$native/build.log"
    exit 3
fi

text=/usr/share/doc/jargon-text/jargon.txt.gz
if [ ! -e $text ]; then # some images install packages without their documentation
    (cd "$build" && apt-get download -qq jargon-text && dpkg-deb -x jargon-text_*.deb jargon)
    text=$build/jargon$text
fi

demo=$build/demo
rm -rf "$demo"
"$native/smoe" train --out "$demo" --seconds "${DEMO_SECONDS:-150}" "$@" "$text"

echo
echo "validation loss, bits per byte, over millions of tokens:"
sed -n 's/.*"tokens": *\([0-9]*\).*"val_loss": *\([0-9.e-]*\).*/\1 \2/p' "$demo/train.jsonl" |
    awk '{ print $1 / 1e6, $2 / log(2) }' >"$demo/curve.dat"
gnuplot -e "set terminal dumb 78 20; set nokey; plot '$demo/curve.dat' with linespoints"
echo "a sample:"
"$native/smoe" generate --checkpoint "$demo/latest" --prompt "hacker: n. " --tokens 400 --temperature 0.7
echo
echo "log, curve and checkpoint: $demo/train.jsonl $demo/curve.png $demo/latest/"
