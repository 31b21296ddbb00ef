# Sourced by the other scripts. `install_packages PACKAGE…` installs Debian's packages, as root or by a sudo that needs
# no password, and fails if it cannot.
install_packages() {
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" = 0 ]; then
        sudo=
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        sudo=sudo
    else
        return 1
    fi
    { install_now "$@" || { $sudo apt-get update -qq && install_now "$@"; }; } >&2
}

# RUNLEVEL=1: the tests start their own servers, so the package's service need not run.
install_now() {
    $sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -o DPkg::Lock::Timeout=120 \
        install -y -qq --no-install-recommends "$@"
}
