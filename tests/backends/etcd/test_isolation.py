"""A follower is cut off from its leader while the holder talks to it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import multilock
from multilock import LeaseState, Loss, LossReason, now
from multilock.testing.conformance.base import Pulse, Recorder, believed_until, eventually
from multilock.testing.conformance.faces import background
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.islands import Archipelago, possible
from tests.servers_etcd import EtcdServer

pytestmark = pytest.mark.skipif(not possible(), reason="it makes networks, which takes root on Linux")

TRIALS = 20


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


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_holder_stops_believing_before_the_next_one_gets_in(islands: Archipelago) -> None:
    gaps = []
    for _ in range(TRIALS):
        cut_off, other = islands.followers()
        with (
            multilock.connect(cut_off.url, ttl=2) as ours,
            multilock.connect(other.url, ttl=2) as theirs,
        ):
            lost = Recorder[Loss]()
            lease = ours.lock("job", on_lost=lost).acquire(timeout=20)
            with islands.cut_off(cut_off), Pulse() as pulse:
                waits = background(lambda: (theirs.lock("job").acquire(timeout=20), now())[1])
                believed = believed_until(lease)
                loss = lost.wait()
                gap = waits.result(20) - max(believed, lost.times[0]) + pulse.stopped()
            if loss.reason is not LossReason.PAUSED:  # the one who did not run in time promises nothing
                gaps.append(gap)
        eventually(lambda: in_touch(cut_off), within=10)  # noqa: B023
    assert len(gaps) >= TRIALS / 2
    assert min(gaps) > 0, gaps


@pytest.mark.timeout(120)
def test_a_holder_with_several_endpoints_leaves_the_member_and_keeps_its_lock(
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
