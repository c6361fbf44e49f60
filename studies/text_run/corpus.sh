#!/bin/sh
# Gathers the text of README.md: documentation and source code of Debian 12's packages.
#
# Usage: studies/text_run/corpus.sh OUT        needs Debian 12 with apt-get, dpkg-deb, and Python with the package lxml
# OUT/deb receives the packages (1.1 GB), OUT/text one text file for each document (about 300 MB).
# Then: tools/make_tokens.py OUT/data OUT/text --sample 48 --validation 0.02
set -eu
if [ $# -ne 1 ]; then
    sed -n '4,6s/^# //p' "$0" >&2
    exit 2
fi
mkdir -p "$1/deb"
tools=$(cd "$(dirname "$0")" && pwd)
cd "$1"

# PACKAGE: at most 5 MB of prose and 4 MB of code are taken. PACKAGE=MB: at most MB of each.
packages="
ada-reference-manual-2020 anarchism=12 ansible-core apache2-doc aptitude-doc-en asymptote-doc bacula-doc bash-doc
bind9-doc binutils-doc bioperl cinder-doc clang-16-doc cmake-data cmake-doc cppreference-doc-en-html csound-doc
dbus-1-doc debian-faq debian-handbook debian-history debian-policy debian-reference-en developers-reference dict-devil
dict-foldoc dict-jargon docutils-doc dpdk-doc emacs-el=9 erlang-doc evolution-data-server-doc exim4-doc-html
ffmpeg-doc fortunes gimp-help-en git-doc glance-doc gnome-user-docs gnuastro gnuplot-doc golang-1.19-doc
golang-1.19-src=8 graphviz-doc grass-doc haproxy-doc haskell98-report heat-doc horizon-doc icinga2-doc
imagemagick-6-doc installation-guide-amd64 ironic-doc jargon-text keystone-doc libboost1.81-doc
libcatalyst-manual-perl libdatetime-perl libdbi-perl libdbix-class-perl libgimp2.0-doc libmojolicious-perl
libmoose-perl libpython3.11-stdlib=9 libpython3.11-testsuite libreoffice-help-en-us libruby3.1 libvirt-doc libwww-perl
lilypond-doc-html linux-doc-6.1=14 linux-source-6.1=24 llvm-16-doc maint-guide manila-doc manpages maxima-doc
mercurial-common nethack-common neutron-doc nodejs-doc nova-doc octave-doc octavia-doc perl-doc=10 perl-modules-5.36=6
postfix-doc postgresql-doc-15=12 python-aiohttp-doc python-attr-doc python-celery-doc
python-cryptography-doc python-django-doc python-flask-doc python-gevent-doc python-h5py-doc python-jinja2-doc
python-mpmath-doc python-pandas-doc python-pymongo-doc python-requests-doc python-scipy-doc python-sklearn-doc
python-sqlalchemy-doc python-sympy-doc python-tornado-doc python-werkzeug-doc python3.11-doc=12 qtbase5-doc-html
r-doc-html r-doc-info racket-doc rust-doc rust-src=8 sbcl-doc slurm-wlm-doc sphinx-doc sqlite3-doc swi-prolog-doc
swift-doc twisted-doc varnish-doc vim-doc vim-runtime wireshark-doc xen-doc zsh-doc
"
names=
for package in $packages; do names="$names ${package%=*}"; done
# shellcheck disable=SC2086 # names are words
(cd deb && apt-get download -qq $names)

set --
for package in $packages; do
    limit=${package#"${package%=*}"}
    case $package in *=*) ;; *) limit= ;; esac
    for file in "deb/${package%=*}"_*.deb; do set -- "$@" "$file$limit"; done
done
"$tools/corpus_text.py" text 5 "$@"
