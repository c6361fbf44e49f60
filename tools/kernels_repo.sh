#!/bin/sh
# Makes a repository of Hugging Face's `kernels` from a wheel, and loads it with that package's own loader.
# usage: tools/kernels_repo.sh WHEEL OUT   WHEEL: as tools/wheel.sh makes it; OUT: the new folder, to be uploaded as it is
# The variant is torch-cuda without architecture or versions: the package loads its C library by path and calls it through
# ctypes, so one variant serves every torch. The check needs torch in the Python on PATH, and pip's network: 77 without it.
set -eu
if [ $# -ne 2 ] || [ -e "$2" ]; then
    sed -n '2,5s/^# //p' "$0" >&2
    exit 2
fi
variant=$2/build/torch-cuda
version=$(basename "$1" | cut -d- -f2)
kernel=1 # the version for get_kernel: one more when the Python functions change incompatibly
mkdir -p "$variant"
python3 -m zipfile -e "$1" "$variant"
mv "$variant"/smoe-*.dist-info/licenses "$variant/licenses"
rm -r "$variant"/smoe-*.dist-info "$variant/smoe/bin"
cat >"$variant/metadata.json" <<EOF
{"id": "smoe_$(echo "$version" | tr . _)", "name": "smoe", "version": $kernel, "license": "Apache-2.0",
 "python-depends": [], "backend": {"type": "cuda"}}
EOF
cat >"$2/README.md" <<EOF
---
license: apache-2.0
tags: [kernels]
---
smoe $version: Mixture-of-Experts layers. \`get_kernel("OWNER/smoe", version=$kernel).MoE(...)\` is \`smoe.MoE\`; for Transformers,
\`importlib.import_module(kernel.__name__ + ".transformers")\` registers \`experts_implementation="smoe"\`.
EOF

python3 -m venv "$2.check"
python3 -c 'import site; print(site.getsitepackages()[0])' >"$(echo "$2.check"/lib/python3*/site-packages)/torch.pth"
"$2.check/bin/python" -m pip install --quiet --disable-pip-version-check kernels || {
    echo "$2 is made, but not checked: kernels cannot be installed" >&2
    exit 77
}
env -u PYTHONPATH -u SMOE_LIBRARY "$2.check/bin/python" - "$2" <<'PY'
import importlib
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]), backend="cuda" if torch.version.cuda else "cpu")
assert sys.argv[1] in kernel.build_info()["library"], kernel.build_info()
x = torch.randn(5, 64, requires_grad=True)
kernel.MoE(64, 32, num_experts=8, top_k=2)(x).sum().backward()
assert x.grad.abs().sum() > 0 and "smoe" not in sys.modules
try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError:
    sys.exit()
importlib.import_module(kernel.__name__ + ".transformers")
assert ALL_EXPERTS_FUNCTIONS["smoe"].__module__.startswith(kernel.__name__)
PY
rm -r "$2.check"
du -sh "$2"
