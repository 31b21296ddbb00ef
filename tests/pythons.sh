#!/bin/sh
# The tests of what depends on the Python, on others than this machine's: 3.13 and 3.14, of Debian 13 and of unstable.
# Prints which version passed; the argument is a Python whose pip fills their environments.
set -eu
cd "$(dirname "$0")/.."
pip=$1
failed=

for which in "trixie 3.13" "sid 3.14"; do
    # shellcheck disable=SC2086
    python=$(tests/bootstrap/python.sh $which)
    environment=.state/pythons/environment-${which%% *}
    [ -x "$environment/bin/python" ] || "$python" -m venv --without-pip "$environment"
    "$pip" -m pip --python "$environment/bin/python" install --quiet -e '.[all]' --group dev
    version=$("$environment/bin/python" --version)
    echo "== $which: $version"
    if MULTILOCK_REQUIRE=redis "$environment/bin/python" -m pytest -q -n "${WORKERS:-3}" tests/unit tests/testing \
        tests/conformance/test_memory.py tests/conformance/test_sqlite.py tests/conformance/test_redis.py; then
        echo "== passed: $version"
    else
        failed=1
    fi
done
test -z "$failed"
