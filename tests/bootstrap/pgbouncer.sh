#!/bin/sh
# Make sure that a PgBouncer can be started: an installed one, or else Debian's package. Prints the path of the program.
set -eu
. "$(dirname "$0")/install.sh"

find_one() {
    PATH=$PATH:/usr/sbin command -v pgbouncer
}
missing() {
    echo "The tests need PgBouncer: install it (Debian: apt-get install pgbouncer)" >&2
    exit 1
}

find_one || { install_packages pgbouncer && find_one; } || missing
