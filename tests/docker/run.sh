#!/bin/sh
# Test compose/ and the containers with any Docker engine that answers. The argument is the Python to test with. Without
# an engine, the rig in the folder named by MULTILOCK_DOCKER_RIG (engine.sh, images.sh) starts one and builds the
# images. Without a rig the script reports that nothing was tested, and exits with 0. It stops everything it started.
set -eu
cd "$(dirname "$0")/../.."
python=$1
rig=${MULTILOCK_DOCKER_RIG:-../shared/docker}

files="compose/compose.yaml compose/cluster.yaml"
inside= # the command that runs another one where the containers' ports are open
started=
tests= # process id of pytest
running=
export MULTILOCK_DOCKER_PROJECT="multilock-test-$$"

answers() {
    docker version >/dev/null 2>&1 && docker compose version >/dev/null 2>&1
}

images() {
    for file in $files; do docker compose --profile all --file "$file" config --images; done | sort -u
}

# Clean up after tests that were killed; the others do it themselves.
finish() {
    if [ -n "$tests" ]; then
        [ -z "$running" ] || { kill "$tests" && wait "$tests" || true; }
        for name in compose cluster; do
            docker compose --project-name "$MULTILOCK_DOCKER_PROJECT-$name" down --volumes --timeout 1 >/dev/null 2>&1 || true
        done
        left=$(docker ps --all --quiet --filter "label=multilock.testing.pid=$tests")
        # shellcheck disable=SC2086
        [ -z "$left" ] || docker rm --force --volumes $left >/dev/null
    fi
    [ -z "$started" ] || "$rig/engine.sh" down
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if answers; then
    for image in $(images); do
        docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image"
    done
elif [ -x "$rig/engine.sh" ]; then
    eval "$("$rig/engine.sh" env)"
    answers || started=yes
    "$rig/engine.sh" up
    docker image inspect rig/redis rig/etcd rig/zookeeper rig/consul >/dev/null 2>&1 || {
        SUITE=trixie JDK=21 "$rig/images.sh" redis etcd zookeeper
        "$rig/images.sh" consul
    }
    docker image inspect rig/postgres >/dev/null 2>&1 || tests/docker/postgresql_image.sh rig/postgres
    for image in $(images); do
        kind=${image##*/} # without the address of a registry
        docker tag "rig/${kind%%:*}" "$image"
    done
    inside="$rig/engine.sh run"
else
    echo "NOT TESTED: compose/ and the containers of multilock.testing. No Docker engine with compose answers." >&2
    exit 0
fi

# In the background, so that a signal is handled at once.
MULTILOCK_REQUIRE=docker $inside "$python" -m pytest tests/docker &
tests=$!
running=yes
status=0
wait "$tests" || status=$?
running=
exit "$status"
