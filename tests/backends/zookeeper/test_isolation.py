"""A follower is cut off from its leader while the holder talks to it: it goes on answering reads for seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

import multilock
from multilock import Loss, now
from multilock.testing.conformance.base import Pulse, Recorder, answers, believed_until, eventually
from multilock.testing.conformance.faces import background
from multilock_zookeeper.transport import Transport
from tests.backends.zookeeper.islands import Archipelago, possible

pytestmark = pytest.mark.skipif(not possible(), reason="it makes networks, which takes root on Linux")

TRIALS = 20
TTL = 2.4


@pytest.fixture(scope="module")
def islands() -> Iterator[Archipelago]:
    with Archipelago() as islands:
        yield islands


def gap(islands: Archipelago) -> float:
    """Seconds from the end of our belief, or our callback if that was later, to the next holder; with those for which
    this process stood still, as nobody can be told in time then."""
    cut_off, other = islands.followers()
    with multilock.connect(cut_off.url, ttl=TTL) as ours, multilock.connect(other.url, ttl=TTL) as theirs:
        eventually(lambda: answers(theirs), within=20)
        lost = Recorder[Loss]()
        lease = ours.lock("job", on_lost=lost).acquire(timeout=20)
        waits = background(lambda: (theirs.lock("job").acquire(timeout=30), now())[1])
        time.sleep(random.uniform(0.2, 1.0))  # anywhere in a period of renewals
        with islands.cut_off(cut_off), Pulse() as pulse:
            believed = believed_until(lease)
            lost.wait()
            found = waits.result(30) - max(believed, lost.times[0]) + pulse.stopped()
    eventually(lambda: "Mode: follower" in cut_off.ask("srvr"), within=20)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_holder_stops_believing_before_the_next_one_gets_in(islands: Archipelago) -> None:
    gaps = sorted(gap(islands) for _ in range(TRIALS))
    assert gaps[0] > 0, gaps


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_if_reads_were_a_proof_two_would_believe(islands: Archipelago, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would find."""
    monkeypatch.setattr(Transport, "put", lambda transport, path, value: transport.exists(path))
    assert min(gap(islands) for _ in range(3)) < 0
