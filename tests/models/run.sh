#!/bin/sh
# Models of protocols, exhausted: none may be violated, and each seeded mistake must be found. Needs g++ (or CXX).
# See the head of each model for what its words mean.
set -eu
cd "$(dirname "$0")"
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
${CXX:-g++} -O2 -std=c++20 -Wall -Wextra -Werror -o "$built/redis_queue" redis_queue.cpp

holds() { "$built/redis_queue" "$@" -; }
found() {
    if "$built/redis_queue" "$@"; then
        echo "this mistake was not found" >&2
        exit 1
    fi
}

# clients, faults, crashes, deletes, steps back, ttl, liveness, looked at
holds WW 1 1 1 1 3 2 1
holds 22 1 1 0 0 2 1 1
holds WWT 0 1 0 1 2 1 1
holds WWW 1 1 0 0 2 1 1
holds WWW 0 1 1 1 2 1 1
holds 2WW 0 1 1 0 2 1 1
holds WWW 0 1 1 1 3 2 1
holds XW 1 1 1 1 2 1 1
holds XXW 0 0 0 0 2 1 1
holds XWW 1 0 0 0 2 1 1

found 2WW 0 1 0 0 2 1 1 nobody
found WWW 0 0 0 0 2 1 1 plaindelete
for mistake in nocap publish freestays receipt queueonly notombstone newcomers deadstay wholettl; do
    found WW 1 1 1 1 2 1 1 $mistake
done
for mistake in restkeepsid restlengthens restpasses; do
    found XW 1 0 0 0 2 1 1 $mistake
done
echo "all hold, and every mistake was found"
