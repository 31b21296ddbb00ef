"""A follower is cut off from its leader while the holder talks to it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

import multilock
from multilock import LeaseState, Loss, LossReason, now
from multilock.testing.conformance.base import Pulse, Recorder, believed_until, eventually
from multilock.testing.conformance.faces import background
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.islands import Archipelago, possible
from tests.servers_etcd import EtcdServer

pytestmark = pytest.mark.skipif(not possible(), reason="it makes networks, which takes root on Linux")

CUTS, LOCKS = 2, 5  # how often a follower is cut off, and how many clients then hold a lock


@pytest.fixture(scope="module")
def islands() -> Iterator[Archipelago]:
    with Archipelago() as islands:
        yield islands


def in_touch(member: EtcdServer) -> bool:
    try:
        member.post("kv/range", {"key": "eA=="}, 0.5)
    except OSError:
        return False
    return True


def entered_at(client: multilock.Client, name: str) -> float:
    client.lock(name).acquire(timeout=20)
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
            [clients.enter_context(multilock.connect(member.url, ttl=2)) for _ in range(LOCKS)]
            for member in (cut_off, other)
        )
        for number, client in enumerate(ours):
            lost = Recorder[Loss]()
            held.append((client.lock(f"job{number}", on_lost=lost).acquire(timeout=20), lost))
            time.sleep(random.uniform(0, 0.15))  # so that the locks are not renewed at the same time
        with islands.cut_off(cut_off), Pulse() as pulse:
            waits = [background(partial(entered_at, client, f"job{n}")) for n, client in enumerate(theirs)]
            believing = [background(partial(believed_until, lease)) for lease, _ in held]
            for (_, lost), belief, next_one in zip(held, believing, waits, strict=True):
                loss = lost.wait(within=20)
                gap = next_one.result(20) - max(belief.result(20), lost.times[0])
                if loss.reason is not LossReason.PAUSED:  # nothing is promised to a holder that was paused
                    found.append(gap)
            stopped = pulse.stopped()
    eventually(lambda: in_touch(cut_off), within=10)
    return [gap + stopped for gap in found]


@pytest.mark.timeout(200)
def test_a_cut_off_holder_stops_believing_before_the_next_one_enters(islands: Archipelago) -> None:
    found = sorted(gap for _ in range(CUTS) for gap in gaps(islands))
    assert len(found) >= CUTS * LOCKS / 2
    assert found[0] > 0, found


@pytest.mark.timeout(120)
def test_a_holder_with_several_endpoints_leaves_the_cut_off_member_and_keeps_its_lock(
    islands: Archipelago, connect: Connect
) -> None:
    cut_off, other = islands.followers()
    lost = Recorder[Loss]()
    lease = connect(f"etcd://{cut_off.endpoint},{other.endpoint}", ttl=5).lock("kept", on_lost=lost).acquire()
    with islands.cut_off(cut_off):
        time.sleep(6)
        eventually(lambda: lease.state is LeaseState.HELD)
    assert lost.calls == []
    eventually(lambda: in_touch(cut_off), within=10)
