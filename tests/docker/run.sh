#!/bin/sh
# The tests of compose/ and of the containers, with any Docker engine that answers; without one the rig in the folder
# that MULTILOCK_DOCKER_RIG names (engine.sh, images.sh), which can start one and build the images; without that it says
# that nothing was tested, and ends well. The argument is the Python to test with; whatever was started is ended.
set -eu
cd "$(dirname "$0")/../.."
python=$1
rig=${MULTILOCK_DOCKER_RIG:-../shared/docker}

files="compose/compose.yaml compose/cluster.yaml"
inside= # what runs a command where the containers' ports are
started=
tests= # the process
running=
export MULTILOCK_DOCKER_PROJECT="multilock-test-$$"

answers() {
    docker version >/dev/null 2>&1 && docker compose version >/dev/null 2>&1
}

images() {
    for file in $files; do docker compose --profile all --file "$file" config --images; done | sort -u
}

# The tests clean up after themselves; this is for those that were killed.
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
    for file in $files; do "$rig/images.sh" -f "$file"; done
    inside="$rig/engine.sh run"
else
    echo "NOT TESTED: compose/ and the containers of multilock.testing. No Docker engine with compose answers." >&2
    exit 0
fi

# In the background, so that a signal is heard at once.
MULTILOCK_REQUIRE=docker $inside "$python" -m pytest tests/docker &
tests=$!
running=yes
status=0
wait "$tests" || status=$?
running=
exit "$status"
