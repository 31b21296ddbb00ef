#!/bin/sh
# Make sure that a consul can be started: the one on the PATH, or else Debian 11's, unpacked in the user's cache
# (nothing is installed). Prints its path. Debian 12 and later have no package. So for this one package, apt-get reads
# this machine's own source of packages under the name of Debian 11, with a second set of package lists.
set -eu
. "$(dirname "$0")/release.sh"

suite=bullseye
home=${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/multilock-tests/consul
program=$home/usr/bin/consul

found() {
    printf '%s\n' "$1"
    exit 0
}
missing() {
    echo "The tests need a Consul, which they start themselves: put the program consul on the PATH" >&2
    exit 1
}

on_path=$(command -v consul || true)
[ -z "$on_path" ] || found "$on_path"
[ ! -x "$program" ] || found "$program"
command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || missing

# Two test runs may arrive here together: each unpacks its own copy, and the first to finish moves it into place.
work=$home.$$
trap 'rm -rf "$work"' EXIT
read_release "$work" "$suite"
{
    # shellcheck disable=SC2086
    (cd "$work" && apt-get $options download consul) && dpkg -x "$work"/consul_*.deb "$work/root"
} >&2 || missing
mv -T "$work/root" "$home" 2>/dev/null || [ -x "$program" ] || missing
found "$program"
