#!/bin/sh
# The Redis tests on other servers than this machine's: Redis 6.0 and 8.0, and Valkey, of Debian 11 and 13.
# Prints which version passed; the argument is the Python to test with.
set -eu
cd "$(dirname "$0")/.."
python=$1

for which in "bullseye redis" "trixie redis" "trixie valkey"; do
    # shellcheck disable=SC2086
    program=$(tests/bootstrap/redis.sh $which)
    version=$("$program" --version)
    echo "== $which: $version"
    PATH=$(dirname "$program"):$PATH MULTILOCK_REQUIRE=redis \
        "$python" -m pytest -q -n 4 tests/backends/redis tests/backends/redlock \
        tests/conformance/test_redis.py tests/conformance/test_sentinel.py tests/conformance/test_cluster.py \
        tests/conformance/test_redlock.py
    echo "== passed: $version"
done
