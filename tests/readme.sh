#!/bin/sh
# The C block of the README must be equal to examples/layer.c.
set -eu
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$1/README.md" | diff - "$1/examples/layer.c"
