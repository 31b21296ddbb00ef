#!/bin/sh
# Search all states of the protocol models. No invariant may be violated, and each seeded mistake must be found.
# Needs g++ (or CXX). `run.sh long` searches larger ones: half an hour, 5 GB. The comment at the top of each model
# explains its arguments.
set -eu
cd "$(dirname "$0")"
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
for model in etcd redis redlock redlock_claims redlock_progress sentinel; do
    ${CXX:-g++} -O2 -std=c++20 -Wall -Wextra -Werror -o "$built/$model" "$model.cpp"
done

holds() { "$built/$model" "$@" -; }
found() {
    if "$built/$model" "$@"; then
        echo "this mistake was not found" >&2
        exit 1
    fi
}

model=redis # clients, faults, crashes, deletes, steps back, ttl, liveness, permits, looked at, at once
if [ "${1-}" = long ]; then
    holds R,R,X 1 1 0 0 2 1 2 1 0
    holds P,P,P 1 1 0 0 2 1 2 1 0
    holds R,X,P 1 1 0 0 2 1 2 1 0
    holds R,X,X 1 1 0 0 2 1 2 1 0
    holds r,R,X 1 1 0 0 2 1 2 1 0
    holds r,p,x 1 1 0 0 2 1 2 1 0
    holds R,X 2 1 0 0 3 2 2 1 0
    holds R,X 1 1 1 1 3 2 2 1 0
    holds P,P,X 0 1 0 0 3 2 2 1 0
    holds R,R,X 0 0 1 0 3 2 2 1 0
    holds P,P,X 0 1 1 0 2 1 2 1 0
    holds RX,XR 1 1 0 0 3 2 2 1 0
    holds R,X,R,X 0 0 0 0 2 1 2 1 0
    holds P,P,P,X 0 0 0 0 2 1 2 1 0
    holds L,P,P 0 1 0 0 2 1 2 1 0
    holds L,X 1 1 1 1 2 1 2 1 0
    holds L,P,X 0 1 0 0 2 1 2 1 0
    holds R,R,R,X 0 0 0 0 2 1 2 1 1
    holds R,X,R,X 0 1 0 0 2 1 2 1 0
    holds X,X,X 0 1 1 1 2 1 2 1 0
    holds H,X 1 1 1 1 2 1 2 1 0
    holds R,X 1 1 1 1 2 1 2 1 0
    holds X,X,X 1 1 0 0 3 2 2 1 0
    holds X,X,X 1 1 0 0 1 2 2 1 0
    holds XX,X,X 1 0 0 0 2 1 2 1 0
    holds P,P,P 1 0 0 0 3 2 1 1 0

    model=etcd # clients, faults, crashes, deletes, permits; clients joined by + share a watch
    holds X,X 1 1 1 1
    holds X+X 1 1 1 1
    holds X+X,X 1 0 0 1
    holds X+X,X 0 0 1 1
    holds X,X,X 0 0 1 1
    holds P+P,X 0 0 1 2
    holds x+x 1 1 1 1
    holds x+x,x 0 0 1 1

    model=redlock_claims # see below
    "$built/$model" 2 0 1 - 400
    "$built/$model" 2 1 0 - 400 1
    "$built/$model" 2 1 0 - 400 2
    "$built/$model" 2 1 0 - 400 4
    "$built/$model" 3 0 0 - 400
    for mistake in yield-counts lost-give-way-forgotten stale-push; do
        found 2 1 0 $mistake 400
    done
    found 2 2 0 no-floor 400

    model=redlock_progress # see below
    holds 2 0 1 12
    holds 2 1 1 28

    model=redlock # see below
    found lock 2 1 0 2 1 renewsgivenup

    model=sentinel # see below
    holds own 1 1 0 1 0 0
    holds own 1 1 0 0 1 0
    holds own 1 0 1 0 1 0
    holds own 1 0 1 1 0 0
    holds own 2 0 0 1 1 0
    holds own 2 1 0 0 1 0
    holds name 1 1 0 0 1 0
    holds name 1 0 1 1 0 0
    exit
fi

holds X,X 1 1 1 1 3 2 2 1 0
holds XX,XX 1 1 0 0 2 1 2 1 0
holds X,X,x 0 1 0 1 2 1 2 1 0
holds X,X,X 1 1 0 0 2 1 2 1 0
holds X,X,X 0 1 1 0 3 2 2 1 0
holds X,X 1 1 0 0 1 3 2 1 0
holds XX,X 1 0 0 0 3 2 2 1 0
holds N,X,X 1 0 0 0 2 1 2 1 0
holds C,P,P 0 0 0 0 2 1 1 1 0
holds H,X 1 1 1 0 2 1 2 1 0
holds H,H,X 0 0 0 0 2 1 2 1 0
holds L,P,R 0 0 0 0 2 1 2 1 0
holds R,X 1 1 1 0 2 1 2 1 0
holds RX,XR 1 1 0 0 2 1 2 1 0
holds r,r,X 0 1 0 0 2 1 2 1 0
holds R,X,P 0 1 0 0 2 1 2 1 0
holds R,R,X 0 1 0 0 3 2 2 1 0
holds R,R,X 0 0 1 0 2 1 2 1 0
holds R,R,X 0 0 0 0 3 2 2 1 1
holds P,P,P 1 0 0 0 2 1 2 1 0
holds P,P,X 0 0 0 1 2 1 2 1 0

for mistake in nocap publish freestays receipt queueonly notombstone newcomers deadstay wholettl; do
    found X,X 1 1 1 1 2 1 2 1 0 $mistake
done
for mistake in restkeepsid restlengthens restpasses; do
    found H,X 1 0 0 0 2 1 2 1 0 $mistake
    found L,P 1 0 0 0 2 1 1 1 0 $mistake
done
for mistake in joinsreaders deletesall readerovertakes readersfirst onereader cancelstays; do
    found R,R,X 0 0 0 0 2 1 2 2 0 $mistake
done
for mistake in holderskept unlooked unmarked; do
    found R,R,X 0 0 1 0 3 1 2 1 0 $mistake
done
for mistake in onemore permitstays; do
    found P,P,P 0 0 0 0 2 1 2 1 0 $mistake
done
for mistake in fullttl pushreceipt newestsent newestanswered srvwait echoalone inbetween pushsettles pushrevives \
    pushofanother tellsskipped tokenbefore notombstone; do
    found XX,X 1 0 0 0 3 2 2 1 0 $mistake
done
for mistake in fullttl pushreceipt newestanswered inbetween pushsettles; do
    found P,P 1 0 0 0 3 2 1 1 0 $mistake
done
found X,X 1 0 0 0 1 3 2 1 0 uncapped
found X,X,x 1 0 0 0 3 2 2 1 0 pushfirst
found X,X,X 1 0 0 0 2 1 2 1 0 quietskipped
found X,X,X 0 0 1 0 3 2 2 1 0 oldpush
found N,X 0 0 0 0 2 1 2 1 0 pushallowed
found C,P 0 0 0 0 2 1 1 1 0 pushallowed
found XX,X,X 0 1 0 0 2 1 2 1 0 nobody
found X,X,X 0 0 0 0 2 1 2 1 0 plaindelete
found R,P 0 0 0 0 2 1 2 1 0 kindsmix
found R,R 0 0 0 0 2 1 2 1 0 markerends
found R,X 0 0 0 0 2 1 2 1 0 writerstoken

model=etcd # clients, faults, crashes, deletes, permits; clients joined by + share a watch
holds X,X 1 0 1 1
holds X,X 1 1 0 1
holds X,x 1 0 1 1
holds XX,X 0 0 1 1
holds XX,X 1 0 0 1
holds X,X,X 0 0 0 1
holds X+X,X 0 0 0 1
holds R+X,R 0 0 0 1
holds P+P,P 0 0 0 2
holds R,X,P 0 0 0 1
holds R,X,R 0 0 0 1
holds P,P,X 0 0 0 2
holds P,P,P 1 0 0 2
holds x+x 1 0 1 1
holds X+x,X 0 0 0 1
holds r+x,r 0 0 0 1
holds p+p,p 1 0 0 2

for mistake in behindgone behindfound anyrevision ownuncompared watchedlate; do
    found x+x 1 0 1 1 $mistake
done
found r+r,x 0 0 0 1 behindlike
for mistake in fromanswer logignored ownignored half aftercancel rejoinkeeps; do
    found X,X 0 0 1 1 $mistake
done
for mistake in countson foundcounts; do
    found X,X 1 0 1 1 $mistake
done
for mistake in closedforall countsall; do
    found X+X,X 0 0 0 1 $mistake
done
found X,X 0 1 0 1 receipt
for mistake in stalepush frombefore; do
    found XX,X 1 0 1 1 $mistake
done
found X+X,X 1 0 0 1 toldtwice
found P,P,P 0 0 0 1 onemore
found R,R,X 0 0 0 1 likeexcludes
model=redlock # lock: clients, faults, restarts, ttl, liveness; token: lost replies, retries
holds lock 2 0 0 1 1
holds lock 1 1 1 2 1
holds lock 2 0 1 1 1
holds lock 2 1 0 1 1
holds token 1 1

for mistake in minority ackedonly notombstone countson; do
    found lock 2 1 0 1 1 $mistake
done
found lock 2 0 0 2 1 receipt
found lock 2 0 0 2 2 pushreceipt
found lock 2 0 1 2 1 noguard
for mistake in blind nowrite onewrite addsup; do
    found token 1 1 $mistake
done

model=sentinel # addresses, failovers, made anew, moves, cut off, silent, late replies
holds own 1 1 0 0 0 0
holds own 0 0 2 0 0 0
holds own 0 0 1 0 1 0
holds own 0 1 0 0 1 0
holds own 1 0 0 1 1 0
holds own 1 0 0 0 1 1
holds name 1 1 0 0 0 0
holds name 1 0 0 0 1 0

for mistake in forever dialonly; do
    found own 0 0 1 0 0 0 $mistake
done
found own 0 1 0 0 0 0 forever
found name 1 0 0 1 0 0 urlentries
for mistake in oneanswer oneasked; do
    found own 1 0 0 1 0 0 $mistake
done
found own 1 0 0 0 0 0 unwatched
found own 0 0 2 0 0 0 lastspeaks
found own 0 0 1 0 1 0 kept
found own 1 0 0 0 1 0 hasty
found own 1 0 0 1 2 0 twice
found own 0 1 0 0 0 1 latecounts
found own 1 0 1 0 0 2 oneround

model=redlock_claims # claims, faults, restarts, mistake: stamps and evidence, without time
"$built/$model" 1 2 1 -
"$built/$model" 2 0 0 -
"$built/$model" 2 1 0 - 400 1
for mistake in stamp-not-strict max-of-votes minority acked-only; do
    found 2 0 0 $mistake
done
for mistake in no-guard raise-anywhere no-clock; do
    found 2 0 1 $mistake
done
found 2 1 0 no-tombstone

model=redlock_progress # claims, stopped servers, lost messages, most ticks for which a name is free
holds 2 0 0 6
holds 2 1 0 10
holds 1 1 1 18
for mistake in keeps-its-minority push-starts-no-timer; do
    found 2 1 0 10 $mistake
done
for mistake in lost-give-way-waits no-heartbeat; do
    found 1 1 1 18 $mistake
done
echo "all hold, and every mistake was found"
