#!/bin/sh
# See to it that etcd and etcdctl can be started, by Debian's packages where they are missing.
set -eu

[ -z "${MULTILOCK_TEST_ETCD_URL:-}" ] || exit 0
! { command -v "${MULTILOCK_TEST_ETCD:-etcd}" && command -v etcdctl; } >/dev/null 2>&1 || exit 0

missing() {
    echo "The tests need etcd and etcdctl: install etcd-server and etcd-client (Debian: apt-get install)," >&2
    echo "or name one that may be emptied: MULTILOCK_TEST_ETCD_URL=etcd://127.0.0.1:2379" >&2
    exit 1
}

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
        install -y -qq --no-install-recommends etcd-server etcd-client
}
{ install || { $sudo apt-get update -qq && install; }; } >&2 || missing
