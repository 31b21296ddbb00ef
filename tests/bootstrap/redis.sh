#!/bin/sh
# Make sure that a redis-server can be started: the one on the PATH, or else Debian's package. Prints its path.
#
# With a Debian release and the name of a server (tests/bootstrap/redis.sh trixie valkey) it unpacks that release's
# server under .state, with the libraries that it needs, including its libc. Nothing is installed. For that, apt-get
# reads this machine's own source of packages under the other name, with a second set of package lists.
set -eu
cd "$(dirname "$0")/../.."
. tests/bootstrap/install.sh
. tests/bootstrap/release.sh

suite=${1:-}
server=${2:-redis}

found() {
    printf '%s\n' "$1"
    exit 0
}
missing() {
    echo "The tests need a Redis: install redis-server (Debian: apt-get install redis-server)," >&2
    echo "or name one that may be emptied: MULTILOCK_TEST_REDIS_URL=redis://127.0.0.1:6379/0" >&2
    exit 1
}

if [ -z "$suite" ]; then
    [ -z "${MULTILOCK_TEST_REDIS_URL:-}" ] || found "$MULTILOCK_TEST_REDIS_URL"
    on_path=$(command -v redis-server || true)
    [ -z "$on_path" ] || found "$on_path"
    install_packages redis-server || missing
    found "$(command -v redis-server)"
fi

home=.state/servers/$server-$suite
[ ! -x "$home/bin/redis-server" ] || found "$PWD/$home/bin/redis-server"
command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || missing

# Two test runs may arrive here together: each unpacks its own copy, and the first to finish moves it into place.
work=$home.$$
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/home/bin"
unpack_release "$PWD/$work" "$suite" "$server-server" "lib|lua|$server" || missing
cat >"$work/home/bin/redis-server" <<WRAPPER
#!/bin/sh
root=\$(dirname "\$0")/../root
libraries=\$(echo "\$root"/usr/lib/*-linux-gnu "\$root"/lib/*-linux-gnu | tr ' ' ':')
exec "\$root/$loader" --library-path "\$libraries" "\$root/usr/bin/$server-server" "\$@"
WRAPPER
chmod +x "$work/home/bin/redis-server"
mv "$work/root" "$work/home/root"
mv -T "$work/home" "$home" 2>/dev/null || [ -x "$home/bin/redis-server" ] || missing
found "$PWD/$home/bin/redis-server"
