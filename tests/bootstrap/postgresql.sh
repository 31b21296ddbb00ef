#!/bin/sh
# See to it that a PostgreSQL can be started: the newest that is installed, else Debian's package. Prints the folder of
# its programs.
set -eu

find_one() {
    folder=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
    [ -n "$folder" ] || folder=$(dirname "$(command -v initdb || echo /-/-)")
    [ -x "$folder/initdb" ] && [ -x "$folder/postgres" ] && [ -x "$folder/pg_isready" ] || return 1
    printf '%s\n' "$folder"
    exit 0
}
missing() {
    echo "The tests need PostgreSQL: install it (Debian: apt-get install postgresql)" >&2
    exit 1
}

find_one || true
command -v apt-get >/dev/null 2>&1 || missing
if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    sudo=sudo
else
    missing
fi
# RUNLEVEL=1: the tests start servers of their own, the package's service need not run.
install() {
    $sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -o DPkg::Lock::Timeout=120 \
        install -y -qq --no-install-recommends postgresql
}
{ install || { $sudo apt-get update -qq && install; }; } >&2 || missing
find_one || missing
