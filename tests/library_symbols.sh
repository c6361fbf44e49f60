#!/bin/sh
# The static library has no symbol map, so its symbols must not clash with a caller's. Every external symbol must be in the
# public API (smoe.map), begin with moe_, or be in the C++ namespace moe (also the symbols that nvcc makes for kernels).
# With kernels, the library must contain at least KERNELS of them: those that it registers with the CUDA runtime.
# library_symbols.sh LIBRARY MAP [KERNELS]
set -eu
library=$1 map=$2 least=${3:-0}
names=$(mktemp)
trap 'rm -f "$names"' EXIT
sed -n 's/^ *\(smoe_[a-z0-9_]*\);$/\1/p' "$map" >"$names"
[ -s "$names" ] || { echo "library_symbols: $map lists nothing" >&2; exit 3; }

defined=$(nm -g --defined-only "$library" | awk 'NF == 3 { print $3 }' | sort -u)
missing=$(printf '%s\n' "$defined" | grep -Fxf "$names" | sort | comm -13 - "$names")
[ -z "$missing" ] || { printf 'library_symbols: the library lacks %s\n' $missing >&2; exit 1; }
other=$(printf '%s\n' "$defined" | grep -vFxf "$names" | grep -vE '^(moe_|_ZNK?3moe|_Z[0-9]+__device_stub__ZN3moe)' || true)
[ -z "$other" ] || { printf 'library_symbols: neither public nor moe_: %s\n' $other >&2; exit 1; }

[ "$least" -gt 0 ] || exit 0
kernels=$(readelf -p .rodata -p .rodata.str1.1 -p .rodata.str1.8 "$library" 2>/dev/null | grep -o '_ZN3moe.*' | sort -u | wc -l)
[ "$kernels" -ge "$least" ] || { echo "library_symbols: $kernels kernels in the library, $least are expected" >&2; exit 1; }
echo "$kernels kernels in the library"
