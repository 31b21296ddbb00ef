#!/bin/sh
# See to it that a consul can be started: the one on the PATH, else Debian 11's, unpacked in the user's cache (nothing
# is installed). Prints its path. Debian 12 and later have no package; so this machine's own source of packages is read
# under the name of Debian 11, by a second set of package lists, for this one package.
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

# Two test runs may come here at once: each unpacks for itself, and the first to finish puts it in its place.
work=$home.$$
trap 'rm -rf "$work"' EXIT
read_release "$work" "$suite"
{
    # shellcheck disable=SC2086
    (cd "$work" && apt-get $options download consul) && dpkg -x "$work"/consul_*.deb "$work/root"
} >&2 || missing
mv -T "$work/root" "$home" 2>/dev/null || [ -x "$program" ] || missing
found "$program"
