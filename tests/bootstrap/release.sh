# Sourced by the other scripts. `read_release WORK SUITE` lets apt-get, called with $options, see the packages of
# another Debian release, without installing anything: it reads this machine's own sources of packages under the other
# name, into separate lists below WORK (an absolute path).
read_release() {
    mkdir -p "$1/sources" "$1/lists/partial" "$1/archives/partial"
    release=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
        if [ -n "$release" ] && grep -qs "$release" "$file"; then
            sed -e "s/$release-\(updates\|backports\)//g" -e "s/$release/$2/g" "$file" >"$1/sources/${file##*/}"
        fi
    done
    options="-qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$1/sources
        -o Dir::State::Lists=$1/lists -o Dir::Cache::Archives=$1/archives
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User= -o Debug::NoLocking=true"
    # A source may lack this release, as long as another one has the package.
    # shellcheck disable=SC2086
    apt-get $options update >&2 || true
}

# `unpack_release WORK SUITE PACKAGE NAMES` unpacks that release's PACKAGE into WORK/root, with its libc and all other
# packages it depends on whose names begin with one of NAMES (a|b|c). After that $loader is the path, below root, of the
# program that starts its programs: they need their own libc.
unpack_release() {
    mkdir -p "$1/root"
    read_release "$1" "$2"
    options="$options -o Dir::State::status=/dev/null"
    {
        # shellcheck disable=SC2086
        packages=$(apt-cache $options depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
            --no-replaces --no-enhances "$3" | grep -E "^($4)" | sort -u)
        # shellcheck disable=SC2086
        (cd "$1" && apt-get $options download $packages) || return 1
        for package in "$1"/*.deb; do dpkg -x "$package" "$1/root"; done
    } >&2
    loader=$(cd "$1/root" && find . -type f \( -name 'ld-linux*.so*' -o -name 'ld-[0-9]*.so' \) | head -n 1)
    [ -n "$loader" ]
}
