"""Many operations at once with a long round trip: losses, followed names, ends of leases, and watches after a
reconnect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from multilock import BackendUnavailable, Event, Loss, LossReason, RenewFailed, now
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Pulse, Recorder, eventually, queued
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear
from multilock_zookeeper import ZooKeeperBackend, open_backend
from multilock_zookeeper.transport import Answer
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.servers_zookeeper import ZooKeeperServer

ROUND_TRIP = 0.01


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def backend(proxy: FaultProxy, ear: Ear) -> Iterator[ZooKeeperBackend]:
    """A backend behind a proxy. The tests call it directly."""
    backend = open_backend(proxy.url, {"ttl": 30.0})
    backend.open(ear)
    yield backend
    proxy.heal()
    backend.close()


def packets(server: ZooKeeperServer) -> int:
    return server.metric("zk_packets_received")


def test_two_hundred_nodes_deleted_at_once_are_reported_at_once(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect, operator: Operator
) -> None:
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=30)
    names = [f"job-{number}" for number in range(200)]
    for name in names:
        client.lock(name, on_lost=lost).acquire()
    watcher = client._kernel.backend._watcher  # type: ignore[attr-defined]
    eventually(lambda: len(watcher._covered) == 200, within=20)
    by = operator(server.endpoint)
    paths = [f"/multilock/{name}/{by.get_children(f'/multilock/{name}')[0]}" for name in names]
    proxy.delay(ROUND_TRIP / 2)
    with Pulse() as pulse:
        for deleted in [by.delete_async(path) for path in paths]:
            deleted.get(10)
        done = now()
        lost.wait(200, within=10)
    # One after the other, the requests would take 2.4 seconds.
    assert lost.times[-1] - done < 1.0 + pulse.stopped()
    assert {loss.reason for loss in lost.calls} == {LossReason.TAKEN}


def test_after_a_reconnect_a_thousand_observed_names_are_watched_again_once(
    server: ZooKeeperServer, proxy: FaultProxy, backend: ZooKeeperBackend, ear: Ear
) -> None:
    names = frozenset(f"job-{number}" for number in range(1000))
    proxy.delay(ROUND_TRIP / 2)
    assert backend.follow(names, 10.0)
    ear.changes.clear()
    proxy.cut()
    assert ear.wait(lambda: names <= set(ear.changes), within=20)
    time.sleep(0.5)
    before, told = packets(server), len(ear.changes)
    time.sleep(3)
    assert packets(server) - before < 50
    assert len(ear.changes) == told == 1000


def test_a_name_whose_watch_got_no_reply_does_not_count_as_watched(
    server: ZooKeeperServer, backend: ZooKeeperBackend, ear: Ear, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.ping(5.0)
    with monkeypatch.context() as silent:
        silent.setattr(backend._transport, "children", lambda path, watch: Answer(now()))
        with pytest.raises(BackendUnavailable):
            backend.follow(frozenset({"job"}), 0.3)
    assert backend.follow(frozenset({"job"}), 5.0)
    ear.changes.clear()
    connect(server.url).lock("job").acquire()
    assert ear.wait(lambda: "job" in ear.changes, within=5)


def test_observing_many_names_advances_with_each_turn(
    backend: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of `follow` has time for only some of the names."""
    backend.ping(5.0)
    transport = backend._transport
    exists, asked = transport.exists, []

    def slow(path: str, watch: Any = None) -> Answer:
        asked.append(path)
        return exists(path, watch) if len(asked) % 4 else Answer(now())  # every fourth request gets no reply

    monkeypatch.setattr(transport, "exists", slow)
    monkeypatch.setattr(transport, "_silent", lambda answer: None)
    names = frozenset(f"job-{number}" for number in range(16))
    rounds = 0
    while True:
        rounds += 1
        try:
            backend.follow(names, 0.5)
            break
        except BackendUnavailable:
            assert rounds < 6
    assert 16 < len(asked) < 32


def test_a_renewal_succeeds_although_some_nodes_could_not_be_read(
    backend: ZooKeeperBackend, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal writes to one node and reads the others. If a node could not be read in time, its lock is not lost: the
    write has proved that the session lives."""
    claims = [ear.claim(f"job-{number}") for number in range(3)]
    held: Any = [(claim, backend.attempt(claim, True, 5.0)) for claim in claims]
    monkeypatch.setattr(backend._transport, "exists", lambda path: Answer(now()))
    monkeypatch.setattr(backend._transport, "_silent", lambda answer: None)
    before = now()
    answers = backend.renew(held[0][1].group, held, 1.0)
    assert all(answer is not None and answer.sent_at >= before for answer in answers)


def test_leases_without_renewal_that_end_leave_the_session_renewals_alone(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
) -> None:
    """Leases without renewal end one after the other, and a round trip takes longer than the time between two ends."""
    failed = Recorder[Event]()
    client = connect(proxy.url, ttl=6)
    kept = client.lock("kept").acquire()
    for number in range(60):
        client.lock(f"job-{number}").acquire().release()
    client.events.subscribe(lambda event: failed(event) if isinstance(event, RenewFailed) else None)
    for number in range(100):
        client.lock(f"job-{number}", renew=False, ttl=2).acquire()
        time.sleep(0.01)
    proxy.delay(ROUND_TRIP)
    time.sleep(2.5)
    assert failed.calls == []
    assert kept.is_held()


# ---- renew=False


def test_the_ttl_of_a_lease_without_renewal_counts_from_its_grant_and_not_from_its_arrival(
    server: ZooKeeperServer, connect: Connect
) -> None:
    holder = connect(server.url, ttl=30).lock("job").acquire()
    client = connect(server.url, ttl=10)
    with Pulse() as pulse:
        waits = background(lambda: (lease := client.lock("job", ttl=4, renew=False).acquire(), lease.remaining()))
        eventually(lambda: queued(client, "job") == 1)
        time.sleep(3)
        holder.release()
        lease, remaining = waits.result(10)
    assert lease.ttl == 4
    assert remaining > 2.5 - pulse.stopped()  # the ttl is 4 seconds, of which the last tenth belongs to the callback


def test_a_waiter_keeps_its_place_for_longer_than_its_ttl(
    server: ZooKeeperServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    holder = connect(server.url, ttl=30).lock("job").acquire()
    # the request timeout exceeds a fifth of the short ttl
    second, third = connect(server.url, ttl=10, request_timeout=2.0), connect(server.url, ttl=10)
    order: list[str] = []

    def stand(client: Any, who: str, **options: Any) -> None:
        with client.lock("job", fair=True, **options):
            order.append(who)

    waits = [background(lambda: stand(second, "second", ttl=1, renew=False))]
    eventually(lambda: queued(second, "job") == 1)
    waits.append(background(lambda: stand(third, "third")))
    eventually(lambda: queued(second, "job") == 2)
    time.sleep(1.5)
    holder.release()
    for each in waits:
        each.result(15)
    assert order == ["second", "third"]
    assert "silent" not in caplog.text


def test_a_released_lease_without_renewal_is_not_deleted_again(server: ZooKeeperServer, connect: Connect) -> None:
    # With this timeout no request is repeated and counted twice.
    client = connect(server.url, ttl=60, request_timeout=10.0)
    client.lock("job", renew=False, ttl=1).acquire().release()
    before = packets(server)
    for _ in range(50):
        client.lock("job", renew=False, ttl=1).acquire().release()
    time.sleep(2)
    # Each lock costs a create, a listing and a delete. The test sends one request, and there may be two renewals.
    assert packets(server) - before - 1 <= 153 + 3


def test_the_planned_end_of_a_released_lease_is_forgotten(backend: ZooKeeperBackend, ear: Ear) -> None:
    for _ in range(200):
        claim = ear.claim(renew=False, ttl=20)
        granted: Any = backend.attempt(claim, True, 5.0)
        backend.release(claim, granted, False, 5.0)
    assert len(backend._watcher._looks._jobs) < 130
