#!/bin/sh
# Make sure that etcd and etcdctl can be started: those on the PATH, or else Debian's packages. Prints the path of etcd.
#
# With the name of a Debian release (tests/bootstrap/etcd.sh trixie) it unpacks that release's etcd under .state, and
# installs nothing: apt-get reads this machine's own source of packages under the other name, with a second set of
# lists.
set -eu
cd "$(dirname "$0")/../.."
. tests/bootstrap/install.sh
. tests/bootstrap/release.sh

suite=${1:-}

found() {
    printf '%s\n' "$1"
    exit 0
}
missing() {
    echo "The tests need etcd and etcdctl on the PATH (Debian: apt-get install etcd-server etcd-client)" >&2
    exit 1
}

if [ -z "$suite" ]; then
    on_path=$(command -v etcd || true)
    if [ -n "$on_path" ] && command -v etcdctl >/dev/null 2>&1; then
        found "$on_path"
    fi
    install_packages etcd-server etcd-client || missing
    found "$(command -v etcd)"
fi

home=.state/servers/etcd-$suite
program=$home/usr/bin/etcd
[ ! -x "$program" ] || found "$PWD/$program"
command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || missing

# Two test runs may arrive here together: each unpacks its own copy, and the first to finish moves it into place.
work=$home.$$
trap 'rm -rf "$work"' EXIT
read_release "$PWD/$work" "$suite"
{
    # shellcheck disable=SC2086
    (cd "$work" && apt-get $options download etcd-server) && dpkg -x "$work"/etcd-server_*.deb "$work/root"
} >&2 || missing
mv -T "$work/root" "$home" 2>/dev/null || [ -x "$program" ] || missing
found "$PWD/$program"
