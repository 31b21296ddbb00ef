#!/bin/sh
# See to it that a redis-server can be started, by Debian's package where there is none.
set -eu

[ -z "${MULTILOCK_TEST_REDIS_URL:-}" ] || exit 0
! command -v redis-server >/dev/null 2>&1 || exit 0

missing() {
    echo "The tests need a Redis: install redis-server (Debian: apt-get install redis-server)," >&2
    echo "or name one that may be emptied: MULTILOCK_TEST_REDIS_URL=redis://127.0.0.1:6379/0" >&2
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
    $sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends redis-server
}
{ install || { $sudo apt-get update -qq && install; }; } >&2 || missing
