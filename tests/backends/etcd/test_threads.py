"""If the process refuses to start a thread of multilock or of gRPC, notifications still arrive."""

from __future__ import annotations

import itertools
import threading

import pytest

from multilock import Loss, now
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Recorder, eventually, inner, queued
from multilock.testing.conformance.faces import background
from multilock_etcd.notices import CONNECTION
from tests.backends.conftest import Connect
from tests.backends.etcd.kit import Ours
from tests.backends.etcd.test_limits import watcher_of
from tests.servers_etcd import EtcdServer

TTL = 120.0  # seconds: a waiter's timer is 120 s, and renewals come every 40
PUSHED = 20.0  # seconds; an event that is noticed within this time was pushed
# The names of multilock's threads begin with the first text, and those of gRPC's threads end with the second one.
OURS, OF_GRPC = "multilock-", "(_run)"


@pytest.mark.parametrize("nth", range(1, 13))
def test_a_thread_that_is_refused_once_delays_no_push(
    shared: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    options = {"ttl": TTL, "prefix": f"refused-{nth}/"}
    other, client = connect(shared.url, **options), connect(shared.url, **options)
    held = other.lock("job").acquire()
    really, starts = threading.Thread.start, itertools.count(1)

    def start(thread: threading.Thread) -> None:
        if (thread.name.startswith(OURS) or thread.name.endswith(OF_GRPC)) and next(starts) == nth:
            raise RuntimeError("can't start new thread")
        really(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    recorder = Recorder[Loss]()
    waits = background(lambda: client.lock("job", on_lost=recorder).acquire(timeout=50))
    eventually(lambda: queued(other, "job") == 1, PUSHED)
    held.release()
    lease = waits.result(PUSHED)
    eventually(lambda: watcher_of(client).covers(inner(lease).claim.id), PUSHED)
    assert other.force_release("job")
    recorder.wait(within=PUSHED)
    began = now()
    client.close()
    assert now() - began < PUSHED


def test_a_watch_stream_that_is_down_is_reported_until_it_is_back(shared: EtcdServer, prefix: str) -> None:
    with FaultProxy.before(shared.url) as proxy:
        ours = Ours(proxy.url, prefix)
        claim = ours.claim()
        ours.watch((claim, ours.take(claim)))
        watcher = ours.backend._watcher
        eventually(lambda: watcher.covers(claim.id), PUSHED)
        assert ours.ear.down == {}
        proxy.refuse()
        proxy.cut()
        assert ours.ear.wait(lambda: CONNECTION in ours.ear.down, PUSHED)
        assert not watcher.covers(claim.id)  # the key is not watched, so each renewal must read it
        proxy.heal()
        assert ours.ear.wait(lambda: ours.ear.down == {}, PUSHED)
        eventually(lambda: watcher.covers(claim.id), PUSHED)
        ours.backend.close()
        assert ours.ear.down == {}
