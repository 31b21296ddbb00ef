#!/bin/sh
# Make sure that a PostgreSQL can be started: the newest installed one, or else Debian's package. Prints the folder of
# its programs.
set -eu
. "$(dirname "$0")/install.sh"

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
install_packages postgresql || missing
find_one || missing
