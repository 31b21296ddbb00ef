"""A follower that is cut off from its leader still answers the holder's reads for seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

import multilock
from multilock import Loss, now
from multilock.testing.conformance.base import Pulse, Recorder, answers, believed_until, eventually
from multilock.testing.conformance.faces import background
from multilock_zookeeper.transport import Transport
from tests.backends.zookeeper.islands import Archipelago, possible

pytestmark = pytest.mark.skipif(not possible(), reason="it makes networks, which takes root on Linux")

CUTS, LOCKS = 2, 5  # how often a follower is cut off, and how many clients then hold a lock
TTL = 2.4


@pytest.fixture(scope="module")
def islands() -> Iterator[Archipelago]:
    with Archipelago() as islands:
        yield islands


def entered_at(client: multilock.Client, name: str) -> float:
    client.lock(name).acquire(timeout=30)
    return now()


def gaps(islands: Archipelago) -> list[float]:
    """Return for each lock how many seconds after the end of the holder's belief the next client acquired it. The
    belief ends when `is_held()` is False and the lost callback has begun.

    The pauses of this process are added to the result, because a paused process cannot be notified in time.
    """
    cut_off, other = islands.followers()
    found, held = [], []
    with ExitStack() as clients:
        ours, theirs = (
            [clients.enter_context(multilock.connect(member.url, ttl=TTL)) for _ in range(LOCKS)]
            for member in (cut_off, other)
        )
        for client in theirs:
            eventually(partial(answers, client), within=20)
        for number, client in enumerate(ours):
            lost = Recorder[Loss]()
            held.append((client.lock(f"job{number}", on_lost=lost).acquire(timeout=20), lost))
            time.sleep(random.uniform(0, 0.2))  # so that the locks are not renewed at the same time
        waits = [background(partial(entered_at, client, f"job{number}")) for number, client in enumerate(theirs)]
        time.sleep(random.uniform(0.2, 1.0))  # wait for a random part of a renewal period
        with islands.cut_off(cut_off), Pulse() as pulse:
            believing = [background(partial(believed_until, lease)) for lease, _ in held]
            for (_, lost), belief, next_one in zip(held, believing, waits, strict=True):
                lost.wait(within=20)
                found.append(next_one.result(30) - max(belief.result(20), lost.times[0]))
            stopped = pulse.stopped()
    eventually(lambda: "Mode: follower" in cut_off.ask("srvr"), within=20)
    return [gap + stopped for gap in found]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_off_holder_stops_believing_before_the_next_one_enters(islands: Archipelago) -> None:
    found = sorted(gap for _ in range(CUTS) for gap in gaps(islands))
    assert found[0] > 0, found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_if_reads_counted_as_proof_two_clients_would_believe(
    islands: Archipelago, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show that the test above would find an overlap if reads counted as proof of a session."""
    monkeypatch.setattr(Transport, "put", lambda transport, path, value: transport.exists(path))
    assert min(gaps(islands)) < 0
