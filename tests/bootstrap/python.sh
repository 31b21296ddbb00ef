#!/bin/sh
# Unpack another Debian release's Python (tests/bootstrap/python.sh trixie 3.13) under .state, with the libraries that
# it needs, including its libc. Nothing is installed. Prints its path. It makes virtual environments like any other
# Python.
set -eu
cd "$(dirname "$0")/../.."
. tests/bootstrap/release.sh

suite=$1
python=python$2
home=.state/pythons/$suite
found() {
    printf '%s\n' "$PWD/$home/usr/bin/$python"
    exit 0
}
missing() {
    echo "Debian's packages of $suite are not to be had here: $python is unpacked from them (apt-get, dpkg)" >&2
    exit 1
}
[ ! -x "$home/usr/bin/$python" ] || found
command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || missing

# Two test runs may arrive here together: each unpacks its own copy, and the first to finish moves it into place.
work=$home.$$
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
unpack_release "$PWD/$work" "$suite" "$python" "lib|$python|media-types|tzdata" || missing
# Its own loader starts it, and gives it the path of the wrapper, or of the link to the wrapper in a virtual
# environment, as its own: from there it finds its modules.
mv "$work/root/usr/bin/$python" "$work/root/usr/bin/$python.program"
cat >"$work/root/usr/bin/$python" <<WRAPPER
#!/bin/sh
root=\$(readlink -f "\$0")
root=\${root%/usr/bin/*}
libraries=\$(echo "\$root"/usr/lib/*-linux-gnu "\$root"/lib/*-linux-gnu | tr ' ' ':')
exec "\$root/$loader" --library-path "\$libraries" --argv0 "\$0" "\$root/usr/bin/$python.program" "\$@"
WRAPPER
chmod +x "$work/root/usr/bin/$python"
mv -T "$work/root" "$home" 2>/dev/null || [ -x "$home/usr/bin/$python" ] || missing
found
