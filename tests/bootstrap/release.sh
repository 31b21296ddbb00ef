# Sourced by the others. `read_release WORK SUITE` lets apt-get, called with $options, see the packages of another Debian
# release, without installing anything: this machine's own sources of packages are read under the other name, into lists
# of their own below WORK (an absolute path).
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
    # A source without this release is no matter if another has the package.
    # shellcheck disable=SC2086
    apt-get $options update >&2 || true
}
