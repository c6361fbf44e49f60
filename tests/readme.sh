#!/bin/sh
# The C block of docs/c.md must be equal to examples/layer.c.
set -eu
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$1/docs/c.md" | diff - "$1/examples/layer.c"
