#!/bin/sh
# Installs those of the named Debian packages that are missing. Without the right to install, it prints the command.
set -eu
missing=
for package in "$@"; do
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -eq 0 ]; then
    root=
elif command -v sudo >/dev/null; then
    root=sudo
else
    echo "Missing packages, and no right to install them. As root: apt-get install$missing" >&2
    exit 3
fi
echo "installing:$missing" >&2
$root apt-get update -qq >&2
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends $missing >/dev/null
