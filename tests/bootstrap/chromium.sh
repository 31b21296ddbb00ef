#!/bin/sh
# Make sure that a Chromium can be started: an installed one, or else Debian's package. Prints the path of the program.
set -eu
. "$(dirname "$0")/install.sh"

find_one() {
    for name in chromium chromium-browser google-chrome chrome; do
        if program=$(command -v "$name") && "$program" --version >/dev/null 2>&1; then
            printf '%s\n' "$program"
            exit 0
        fi
    done
    return 1
}
missing() {
    echo "The tests need Chromium: install it (Debian: apt-get install chromium)" >&2
    exit 1
}

find_one || true
install_packages chromium || missing
find_one || missing
