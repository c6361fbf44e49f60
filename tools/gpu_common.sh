# shellcheck shell=sh disable=SC2034 # the variables are for the scripts that read this file
# Functions that gpu_train.sh, gpu_fsdp2.sh, gpu_peers.sh and gpu_python.sh share. They read this file from tools/ or from a
# packed folder.

tools=$(cd "$(dirname "$0")" && pwd)

# Copies the library, the shared libraries that it needs, python/ and the named folders into $folder.
pack_python() { # BUILD, folders of the repository...
    cp -L "$1/src/libsmoe.so" "$folder/lib/" && "$tools/copy_libraries.sh" "$folder/lib" "$folder/lib/libsmoe.so" || exit 3
    shift
    without_blas
    tar -C "$tools/.." --exclude=__pycache__ -c python "$@" | tar -C "$folder" -x || exit 3
}

# Makes $folder, a scratch folder with lib/ in it. It is then filled, and pack_end packs it.
pack_begin() { # DIR
    mkdir -p "$1"
    folder=$(mktemp -d) && mkdir "$folder/lib" || exit 3
}

# Replaces OpenBLAS, which is most of a pack, by a library with the four functions that smoe needs to load. It is for programs
# that compute on the GPU alone.
without_blas() {
    rm -f "$folder"/lib/libopenblas* "$folder"/lib/libgfortran* "$folder"/lib/libquadmath*
    cc -shared -fPIC -x c -o "$folder/lib/libopenblas.so.0" - <<'C' || exit 3
#include <stdlib.h>
void cblas_sgemm(void) { abort(); }
char *openblas_get_config(void) { return ""; }
int openblas_get_num_threads(void) { return 1; }
void openblas_set_num_threads(int count) { (void)count; }
C
}

# Packs $folder into DIR, beside the script and this file.
pack_end() { # DIR
    cp "$0" "$tools/gpu_common.sh" "$1/" && tar -C "$folder" -czf "$1/pack.tar.gz" . || exit 3
    rm -r "$folder"
    du -sh "$1"
}

# On the GPU machine: unpacks DIR/pack.tar.gz into $work/pack and sets dir (that folder), packed (DIR), out, work, python, end
# and LD_LIBRARY_PATH.
run_begin() { # DIR
    nvidia-smi --query-gpu=name,power.limit,driver_version --format=csv,noheader || exit 77
    packed=$(cd "$1" && pwd) || exit 3
    work=${WORK:-$packed/work} out=${OUT:-$packed/out} python=${PYTHON:-python3}
    end=$(($(date +%s) + ${BUDGET:-560}))
    mkdir -p "$work/pack" "$out" || exit 3
    work=$(cd "$work" && pwd) out=$(cd "$out" && pwd) dir=$work/pack
    tar -C "$dir" -xzf "$packed/pack.tar.gz" || exit 3
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || exit 3
    LD_LIBRARY_PATH="$dir/lib:$(printf '%s:' "$packages"/nvidia/*/lib)/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    export LD_LIBRARY_PATH
}

# Ends if one of the peers' packages is not among the listed files. Without this check bench/peers.py would measure for minutes
# without the peer.
require_peers() { # what the list is of, list
    for module in sonicmoe quack tvm_ffi scattermoe einops momoe; do
        printf '%s\n' "$2" | sed 's|^\./||' | grep -qxF "$module/__init__.py" || {
            echo "$(basename "$0"): $1 has no package $module" >&2
            exit 3
        }
    done
}

# Unpacks the peers' Python packages, which gpu_peers.sh has packed, into $work/site, and the kernels that they have compiled
# into $work/cache. Sets peer_path.
unpack_peers() { # DIR
    export QUACK_CACHE_DIR="$work/cache/o" QUACK_HOME="$work/cache" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
    mkdir -p "$work/cache"
    if [ ! -e "$work/site.done" ]; then
        rm -rf "$work/site"
        mkdir "$work/site" && untar "$1/site.tar.xz" "$work/site" || exit 3
        require_peers "$1/site.tar.xz" "$(cd "$work/site" && find . -maxdepth 2)"
        [ ! -e "$1/cache.tar.xz" ] || untar "$1/cache.tar.xz" "$work/cache" || exit 3
        touch "$work/site.done"
    fi
    peer_path=$work/site:$work/site/nvidia_cutlass_dsl/python_packages
}

# Unpacks with Python, because the machine may have no xz.
untar() { # archive, folder
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' "$@"
}

# Runs a command for at most the given seconds, and not longer than until the end of BUDGET.
within() { # seconds, command...
    seconds=$1
    left=$((end - $(date +%s)))
    shift
    [ "$left" -ge 5 ] || { echo "no time left for $*" >&2; return 1; }
    [ "$seconds" -lt "$left" ] || seconds=$left
    timeout -k 5 "$seconds" "$@"
}

# Sets the variables with which Python finds the package smoe and its library.
use_python() {
    export PYTHONPATH="$dir/python" SMOE_LIBRARY="$dir/lib/libsmoe.so"
}

usage() {
    sed -n '2,/^[^#]/{/^# shellcheck/d;s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
}
