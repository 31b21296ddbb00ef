"""Failures around a lock on one etcd member: lost replies, restarts, silence, compaction, revoked leases."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import multilock
import multilock_etcd.wire
from multilock import BackendRejected, BackendUnavailable, LeaseState, Loss, LossReason, now
from multilock.errors import MultilockError
from multilock.model import Busy, Claim, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import (
    Pulse,
    Recorder,
    believed_until,
    by_the_clock,
    eventually,
    inner,
    queued,
    until_renewed,
)
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear, take
from multilock.timing import REASON_WITHIN
from multilock_etcd import open_backend
from multilock_etcd.keys import EtcdKeyspace
from multilock_etcd.sessions import EtcdSession, EtcdSessions
from multilock_etcd.transactions import EtcdTransactions
from multilock_etcd.transport import Cluster, EtcdTransport, calls
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.kit import Mishap
from tests.servers_etcd import EtcdServer, etcdctl


def keys(server: EtcdServer, prefix: str = "multilock/") -> list[str]:
    """Return the keys below this prefix, without tombstones."""
    found = etcdctl(server.endpoint, "get", "--prefix", "--keys-only", prefix).split()
    return [key for key in found if "!gone/" not in key]


def leases(server: EtcdServer) -> list[str]:
    return etcdctl(server.endpoint, "lease", "list").split()[3:]


def compact(server: EtcdServer) -> None:
    revision = server.post("kv/range", {"key": base64.b64encode(b"x").decode()})["header"]["revision"]
    server.post("kv/compaction", {"revision": revision})


# ---- lost replies


def test_a_lost_reply_to_an_acquire_leaves_one_holder_and_nothing_else(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    client = connect(proxy.url)
    client.ping()
    lost = proxy.drop_reply(b"multilock/job/", then="hold")
    lease = client.lock("job").acquire(timeout=10)
    lost.wait(5)
    assert len(keys(server)) == 1
    assert lease.release()
    eventually(lambda: keys(server) == [])


def test_an_acquire_succeeds_although_the_check_of_renewals_had_no_reply(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    client = connect(proxy.url)
    client.ping()
    lost = proxy.drop_reply(b"LeaseKeepAlive")
    lease = client.lock("job").acquire(timeout=10)
    assert lost.happened
    lease.renew()
    assert lease.release()


def test_a_single_try_whose_reply_is_lost_is_released_in_the_background(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    client = connect(proxy.url, ttl=5)
    client.lock("another").acquire()
    lost = proxy.drop_reply(b"multilock/job/", then="hold")
    with pytest.raises(BackendUnavailable):
        client.lock("job").try_acquire()
    lost.wait(5)
    assert connect(server.url).lock("job").try_acquire(timeout=5) is not None


def test_a_release_whose_reply_is_lost_frees_the_lock(server: EtcdServer, proxy: FaultProxy, connect: Connect) -> None:
    client, other = connect(proxy.url, ttl=5), connect(server.url)
    lease = client.lock("job").acquire()
    lost = proxy.drop_reply(b"multilock/job/", then="hold")
    assert lease.release()
    lost.wait(5)
    assert other.lock("job").try_acquire(timeout=5) is not None


def test_a_renewal_whose_reply_is_lost_costs_nothing(server: EtcdServer, proxy: FaultProxy, connect: Connect) -> None:
    client = connect(proxy.url, ttl=6)
    lease = client.lock("job").acquire()
    request = multilock_etcd.wire.LeaseKeepAliveRequest(ID=int(leases(server)[0], 16)).SerializeToString()
    lost = proxy.drop_reply(request, then="hold")
    lost.wait(5)
    eventually(lambda: lease.remaining() > 4.4)  # wait until a later renewal was answered
    assert lease.state is LeaseState.HELD


@pytest.mark.parametrize("join", [True, False])
def test_a_request_executed_after_its_cancel_acquires_nothing(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, join: bool
) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    unsent = Mishap(monkeypatch, calls.TXN, b"/job/", executed=False)
    claim = ear.claim("job")
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, join, 2.0)
    assert backend.release(claim, None, True, 2.0).ours is False
    assert not unsent.send().succeeded
    assert keys(server) == []
    backend.close()


def test_without_a_tombstone_the_late_request_would_hold_the_lock(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    unsent = Mishap(monkeypatch, calls.TXN, b"/job/", executed=False)
    claim = ear.claim("job")
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, 2.0)
    assert backend.release(claim, None, False, 2.0).ours is False
    assert unsent.send().succeeded
    backend.close()


def test_a_later_renewal_deletes_old_tombstones(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilock_etcd.sweep.LATE_REQUEST_IN_SESSION", 0.0)
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    unsent = Mishap(monkeypatch, calls.TXN, b"/job/", executed=False)
    claim = ear.claim("job")
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, 2.0)
    assert unsent.kept
    backend.release(claim, None, True, 2.0)
    assert "!gone/" in etcdctl(server.endpoint, "get", "--prefix", "multilock/")
    backend.renew(ear.sessions[0], [], 2.0)
    assert etcdctl(server.endpoint, "get", "--prefix", "multilock/") == ""
    backend.close()


def test_a_cancel_is_repeated_through_an_outage_that_its_session_survives(
    server: EtcdServer, proxy: FaultProxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this limit, the cancel of a claim without a renewed session stops after 2 × ttl.
    monkeypatch.setattr("multilock.kernel.background_cancel.AT_LEAST", 0.5)
    client = connect(proxy.url, ttl=2)
    client.lock("another").acquire()
    lost = proxy.drop_reply(b"multilock/job/", then="hold")
    proxy.refuse()  # the cancels do not arrive either
    with pytest.raises(BackendUnavailable):
        client.lock("job").try_acquire()
    lost.wait(5)
    assert len(keys(server, "multilock/job/")) == 1
    server.kill()
    proxy.accept()
    time.sleep(6)
    # The restarted server restarts the ttl of all leases. Another lock uses the lease, so the client renews it. Without
    # a cancel, the lease would keep the unwanted key forever.
    server.start()
    eventually(lambda: keys(server, "multilock/job/") == [], within=10)


def out_of_space(server: EtcdServer, action: str) -> None:
    server.post("maintenance/alarm", {"action": action, "alarm": "NOSPACE"})


def test_a_full_server_stores_no_tombstone_but_frees_the_lock(server: EtcdServer) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    claim = ear.claim("job")
    granted = backend.attempt(claim, False, 2.0)
    assert isinstance(granted, Granted)
    out_of_space(server, "ACTIVATE")
    with pytest.raises(BackendRejected):  # the release is refused, because a late request would find no tombstone
        backend.release(claim, granted, True, 2.0)
    assert keys(server) == []
    out_of_space(server, "DEACTIVATE")
    backend.release(claim, granted, True, 2.0)
    assert "!gone/" in etcdctl(server.endpoint, "get", "--prefix", "multilock/")
    backend.close()


def test_a_release_is_repeated_until_a_full_server_has_space_again(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    client = connect(proxy.url, ttl=5)
    lease = client.lock("job").acquire()
    held = proxy.hold_request(b"multilock/job/")
    out_of_space(server, "ACTIVATE")
    assert lease.release()
    held.wait(5)
    eventually(lambda: keys(server) == [])
    assert not client._kernel.cancels.wait(0)
    out_of_space(server, "DEACTIVATE")
    eventually(lambda: client._kernel.cancels.wait(0), within=15)


# ---- the server


def test_a_lock_survives_a_restart_of_the_server(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, ttl=12)
    lease = client.lock("job").acquire()
    server.restart()
    until_renewed(lease, within=12)
    assert lease.state is LeaseState.HELD
    assert connect(server.url).lock("job").try_acquire() is None
    token = lease.fence()
    assert lease.release()
    assert client.lock("job").acquire(timeout=5).fence() > token


def test_a_silent_server_costs_its_holder_the_lock_before_another_client_gets_it(
    server: EtcdServer, connect: Connect
) -> None:
    lost = Recorder[Loss]()
    lease = connect(server.url, ttl=3).lock("job", on_lost=lost).acquire()
    other = connect(server.url)
    server.pause()
    assert by_the_clock(lost.wait(within=5))
    assert not lease.is_held()
    server.resume()
    begun = time.monotonic()
    assert other.lock("job").acquire(timeout=10).is_held()
    assert time.monotonic() - begun < 8  # without the watch, a safety timer would wake the waiter after 10 s
    assert lost.stays_at(1)


def test_a_wait_continues_through_a_restart_and_notices_a_release_during_it(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    holder = connect(server.url, ttl=10).lock("job").acquire()
    waiter = connect(proxy.url, ttl=20)
    waits = background(lambda: waiter.lock("job").acquire(timeout=20))
    eventually(lambda: is_counted(waiter))
    with outage(proxy):
        holder.release()
    begun = time.monotonic()
    assert waits.result(20).is_held()
    assert time.monotonic() - begun < 8  # without the watch, a safety timer would wake the waiter after 20 s


def is_counted(client: multilock.Client) -> bool:
    """Return True if the watch of the name counts deletions for a waiter, so that the waiter sends no requests."""
    backend: Any = client._kernel.backend
    watcher = backend._watcher
    with watcher._lock:
        queues = [watch.queue for watch in watcher._queues.values()]
        return any(each and each._after is not None for each in queues)


@contextmanager
def outage(proxy: FaultProxy) -> Iterator[None]:
    proxy.refuse()
    proxy.cut()
    try:
        yield
    finally:
        proxy.accept()


def test_a_key_deleted_while_the_watch_is_broken_is_reported_after_the_reconnect(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=20)
    client.lock("job", on_lost=lost).acquire()
    kept = client.lock("kept").acquire()
    time.sleep(0.5)  # the client creates the watch 0.25 s after the grant
    with outage(proxy):
        etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    assert lost.wait().reason is LossReason.TAKEN
    assert kept.is_held()


def test_the_new_watch_reports_the_loss_before_any_renewal_does(server: EtcdServer, proxy: FaultProxy) -> None:
    ear = Ear()
    backend = open_backend(proxy.url, {})
    backend.open(ear)
    claim = ear.claim("job")
    granted = backend.attempt(claim, False, 2.0)
    assert isinstance(granted, Granted)
    backend.watch(granted.group, [(claim, granted)], 2.0)
    with outage(proxy):
        etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    assert ear.wait(lambda: ear.losses == [(claim.id, LossReason.TAKEN)])
    backend.close()


def test_a_lease_revoked_while_the_watch_is_broken_is_reported_as_a_lost_session(
    server: EtcdServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.notices.REASON_WITHIN", REASON_WITHIN)
    ear = Ear()
    backend = open_backend(proxy.url, {})
    backend.open(ear)
    for number in range(5):
        claim = ear.claim(f"job-{number}")
        granted = backend.attempt(claim, False, 2.0)
        assert isinstance(granted, Granted)
        backend.watch(granted.group, [(claim, granted)], 2.0)
    with outage(proxy):
        etcdctl(server.endpoint, "lease", "revoke", leases(server)[0])
        proxy.delay(0.1, which="new")
    assert ear.wait(lambda: ear.sessions == [] or len(ear.losses) == 5)
    assert {reason for _, reason in ear.losses} <= {LossReason.SESSION_LOST}
    backend.close()


def test_a_lease_revoked_between_its_renewal_and_the_key_read_is_a_lost_session(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    held = []
    for name in ("one", "two"):
        claim = ear.claim(name)
        granted = backend.attempt(claim, False, 2.0)
        assert isinstance(granted, Granted)
        held.append((claim, granted))
    keep_alive = EtcdSessions.keep_alive

    def revoked_then(sessions: EtcdSessions, lease: Any, within: float) -> EtcdSession | None:
        session = keep_alive(sessions, lease, within)
        etcdctl(server.endpoint, "lease", "revoke", leases(server)[0])
        return session

    monkeypatch.setattr(EtcdSessions, "keep_alive", revoked_then)
    assert list(backend.renew(held[0][1].group, held, 5.0)) == [None, None]
    assert {reason for _, reason in ear.losses} == {LossReason.SESSION_LOST}
    backend.close()


@pytest.mark.timeout(300)
def test_over_a_slow_network_thousands_of_locks_survive_a_broken_connection(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    count = 2500
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=30)  # so long that the locks outlive a pause of an overloaded machine
    held = {f"job-{number}": client.lock(f"job-{number}", on_lost=lost).acquire() for number in range(count)}
    watched = "etcd_debugging_mvcc_watcher_total"
    eventually(lambda: server.metric(watched) == count, within=60)
    proxy.delay(0.05)
    proxy.cut()
    eventually(lambda: server.metric(watched) == 0, within=60)
    with outage(proxy):
        etcdctl(server.endpoint, "del", "--prefix", "multilock/job-77/")
    proxy.delay(0.05)
    eventually(lambda: server.metric(watched) == count - 1, within=60)
    assert lost.wait(within=60).lease is held.pop("job-77")
    proved = max(now() + lease.remaining() for lease in held.values())
    until_renewed(held["job-0"], within=60)
    eventually(lambda: all(now() + lease.remaining() > proved for lease in held.values()))
    assert len(lost.calls) == 1


def test_keys_without_a_watch_are_read_in_turns_within_their_limit_of_time(
    server: EtcdServer, proxy: FaultProxy
) -> None:
    ear = Ear()
    backend = open_backend(proxy.url, {})
    backend.open(ear)
    held = []
    for number in range(1000):
        claim = ear.claim(f"job-{number}")
        granted = backend.attempt(claim, False, 5.0)
        assert isinstance(granted, Granted)
        held.append((claim, granted))
    etcdctl(server.endpoint, "del", "--prefix", "multilock/job-950/")
    proxy.delay(0.1)
    answers = []
    begun = now()
    with Pulse() as pulse:
        for _ in range(4):
            answers.append(backend.renew(held[0][1].group, held, 2.0))
        assert now() - begun < 8.0 + pulse.stopped()
    still = pulse.stopped() > 0.2  # if the machine was frozen, a renewal may be too late
    assert still or all(answer for answer in answers[0][:900]), "the proof of the session is that of each"
    assert still or [number for answer in answers for number, each in enumerate(answer) if each is None][:1] == [950]
    backend.close()


def test_the_keys_of_each_lease_are_read_in_turns_of_their_own(
    server: EtcdServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.sweep.AT_ONCE", 10)
    ear = Ear()
    backend = open_backend(proxy.url, {})
    backend.open(ear)

    def hold(count: int, ttl: float) -> list[tuple[Claim, Granted]]:
        claims = [ear.claim(f"job-{ttl:g}-{number}", ttl=ttl) for number in range(count)]
        return [(claim, take(backend, claim)) for claim in claims]

    many, few = hold(15, 30.0), hold(3, 20.0)
    proxy.delay(0.1)  # a renewal then has time for only one request, which reads ten keys
    backend.renew(many[0][1].group, many, 0.9)
    etcdctl(server.endpoint, "del", "--prefix", "multilock/job-30-8/")
    for _ in range(5):
        backend.renew(few[0][1].group, few, 5.0)
        backend.renew(many[0][1].group, many[:1], 5.0)  # renew a single claim, as `Lease.renew()` does
        if None in backend.renew(many[0][1].group, many, 0.9):
            break
    else:
        pytest.fail("its turn never came")
    backend.close()


def test_a_compaction_hides_no_event_from_a_broken_watch(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    lost = Recorder[Loss]()
    ours, theirs = connect(proxy.url, ttl=20), connect(server.url, ttl=20)
    ours.lock("held", on_lost=lost).acquire()
    holder = theirs.lock("job").acquire()
    waits = background(lambda: ours.lock("job").acquire(timeout=10))
    eventually(lambda: queued(theirs, "job") == 1)
    time.sleep(0.5)
    with outage(proxy):
        holder.release()
        etcdctl(server.endpoint, "del", "--prefix", "multilock/held/")
        compact(server)
    assert waits.result(5).is_held()
    assert lost.wait().reason is LossReason.TAKEN


def test_a_watch_created_after_a_compaction_still_finds_the_loss(server: EtcdServer, connect: Connect) -> None:
    lost = Recorder[Loss]()
    connect(server.url, ttl=20).lock("job", on_lost=lost).acquire()
    etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    etcdctl(server.endpoint, "put", "something", "else")
    compact(server)
    assert lost.wait().reason is LossReason.TAKEN


@pytest.fixture
def renewed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew a lease of 5 s for the first time when it is 3 s old, so that the test has 3 s without a renewal."""
    monkeypatch.setattr("multilock_etcd.sessions.RENEWALS", 1.5)


def overlap(server: EtcdServer, proxy: FaultProxy, connect: Connect) -> float:
    """Acquire a lock late in the life of its etcd lease, and cut its holder off. Return the seconds for which two
    processes believe that they hold the lock.

    The result is negative if there is a pause between the two beliefs.
    """
    client, other = connect(proxy.url, ttl=5), connect(server.url, ttl=5)
    client.lock("first").acquire()
    time.sleep(2)
    lease = client.lock("job").acquire()
    proxy.black_hole()
    waits = background(lambda: (other.lock("job").acquire(timeout=20), now())[1])
    believed = believed_until(lease)
    return believed - waits.result(20)


@pytest.mark.usefixtures("renewed_late")
def test_a_lock_acquired_late_in_its_lease_ends_with_that_lease(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    assert overlap(server, proxy, connect) < 0


@pytest.mark.usefixtures("renewed_late")
def test_without_the_rule_for_late_locks_two_holders_would_overlap(
    server: EtcdServer, proxy: FaultProxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def granted(self: EtcdSession, revision: int | None) -> Granted:
        return Granted(revision, self.ttl, now(), self.ttl, self.ttl / 3, self.lease, revision)

    monkeypatch.setattr(EtcdSession, "granted", granted)
    assert overlap(server, proxy, connect) > 0


# ---- keys and leases


def test_a_revoked_lease_reports_the_loss_of_each_of_its_locks_once(server: EtcdServer, connect: Connect) -> None:
    lost = Recorder[Loss]()
    client = connect(server.url, ttl=10)
    held = [client.lock(f"job-{n}", on_lost=lost).acquire() for n in range(20)]
    time.sleep(0.5)
    etcdctl(server.endpoint, "lease", "revoke", leases(server)[0])
    lost.wait(20)
    assert {loss.reason for loss in lost.calls} == {LossReason.SESSION_LOST}
    assert not any(lease.is_held() for lease in held)
    assert lost.stays_at(20)
    assert client.lock("job-0").try_acquire() is not None  # this acquire uses a new lease


def test_a_missing_reason_delays_no_notice_of_a_loss(
    server: EtcdServer, proxy: FaultProxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.notices.REASON_WITHIN", REASON_WITHIN)
    lost = Recorder[Loss]()
    connect(proxy.url, ttl=60).lock("job", on_lost=lost).acquire()
    time.sleep(0.5)
    question = multilock_etcd.wire.LeaseTimeToLiveRequest(ID=int(leases(server)[0], 16)).SerializeToString()
    unanswered = proxy.drop_reply(question, then="hold")
    etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    begun = now()
    assert lost.wait().reason is LossReason.TAKEN
    assert lost.times[0] - begun < 1.5  # an ordinary request would wait for a reply for two seconds or more
    unanswered.wait(5)


def test_many_losses_at_once_wait_for_their_reasons_as_briefly_as_one(
    server: EtcdServer, proxy: FaultProxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.notices.REASON_WITHIN", REASON_WITHIN)
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=60)
    for number in range(60):
        client.lock(f"job-{number}", renew=False, on_lost=lost).acquire()
    eventually(lambda: server.metric("etcd_debugging_mvcc_watcher_total") == 60)
    proxy.delay(0.04)
    begun = now()
    with Pulse() as pulse:
        etcdctl(server.endpoint, "del", "--prefix", "multilock/")
        lost.wait(60, within=20)
        assert max(lost.times) - begun < 2.5 + pulse.stopped()


def test_an_idle_client_whose_lease_ended_gets_a_new_lease_with_its_next_lock(
    server: EtcdServer, connect: Connect
) -> None:
    client = connect(server.url, ttl=60)
    client.lock("job").acquire().release()
    etcdctl(server.endpoint, "lease", "revoke", leases(server)[0])
    for _ in range(2):
        lease = client.lock("job").try_acquire()
        assert lease is not None
        assert lease.release()
    assert len(leases(server)) == 1


def test_a_renewal_that_finds_the_lease_gone_loses_every_lock_of_the_lease(server: EtcdServer) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    claim = ear.claim("job")
    granted = backend.attempt(claim, False, 2.0)
    assert isinstance(granted, Granted)
    etcdctl(server.endpoint, "lease", "revoke", leases(server)[0])
    assert list(backend.renew(granted.group, [(claim, granted)], 2.0)) == [None]
    assert (claim.id, LossReason.SESSION_LOST) in ear.losses
    assert ear.sessions == []
    backend.close()


def test_a_lease_in_its_last_second_is_not_taken_for_ended(server: EtcdServer) -> None:
    ear, revision = Ear(), 1 << 40
    transport = EtcdTransport(Cluster([server.endpoint]), now)
    sessions = EtcdSessions(transport, ear)
    session = sessions.of(ear.claim("job", ttl=3.0), 2.0)
    question = multilock_etcd.wire.LeaseTimeToLiveRequest(ID=session.lease)
    eventually(lambda: transport.call(calls.TIME_TO_LIVE, question, 2.0)[0].TTL == 0)
    assert not sessions.look(session.lease, revision, 2.0)
    assert sessions.keep_alive(session.lease, 2.0) is session
    etcdctl(server.endpoint, "lease", "revoke", f"{session.lease:x}")
    assert sessions.look(session.lease, 2 * revision, 2.0)
    assert ear.sessions == []
    transport.close()


def test_two_attempts_of_one_claim_at_the_same_time_use_one_lease(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, of = threading.Barrier(2), EtcdSessions.of

    def at_the_same_time(self: EtcdSessions, claim: Claim, within: float) -> EtcdSession:
        session = of(self, claim, within)
        with suppress(threading.BrokenBarrierError):
            both.wait(1)  # times out if the second attempt waits for the end of the first
        return session

    ear, backend = Ear(), open_backend(server.url, {})
    backend.open(ear)
    claim = ear.claim("job", ttl=60.0)._replace(renew=False)
    monkeypatch.setattr(EtcdSessions, "of", at_the_same_time)
    attempts = [background(lambda: backend.attempt(claim, True, 10.0)) for _ in range(2)]
    granted = [attempt.result(20) for attempt in attempts]
    [lease] = leases(server)
    row = json.loads(etcdctl(server.endpoint, "get", "--prefix", "multilock/job/", "-w", "json"))["kvs"][0]
    assert f"{row['lease']:x}" == lease
    assert [f"{each.group:x}" for each in granted if isinstance(each, Granted)] == [lease, lease]
    backend.close()


def test_a_key_that_is_found_on_another_lease_grants_nothing(server: EtcdServer) -> None:
    ear, keyspace = Ear(), EtcdKeyspace("multilock/")
    transport = EtcdTransport(Cluster([server.endpoint]), now)
    sessions, claim = EtcdSessions(transport, ear), ear.claim("job", ttl=60.0)._replace(renew=False)
    transactions = EtcdTransactions(keyspace, transport, now)
    first, second = (sessions.of(claim, 2.0).lease for _ in range(2))
    revision, _ = transactions.put(claim, first, True, {}, now() + 2.0)
    assert transactions.put(claim, first, True, {}, now() + 2.0) == (revision, None)
    with pytest.raises(BackendUnavailable, match="another lease"):
        transactions.put(claim, second, True, {}, now() + 2.0)
    etcdctl(server.endpoint, "put", keyspace.own(claim).decode(), "x")
    assert transactions.put(claim, second, True, {}, now() + 2.0) == (revision, None)
    transport.close()


def test_a_waiter_whose_lease_is_revoked_joins_again_with_a_new_lease(server: EtcdServer, connect: Connect) -> None:
    ours, theirs = connect(server.url, ttl=10), connect(server.url, ttl=10)
    holder = theirs.lock("job").acquire()
    [their_lease] = leases(server)
    waits = background(lambda: ours.lock("job").acquire(timeout=10))
    eventually(lambda: queued(theirs, "job") == 1)
    [our_lease] = set(leases(server)) - {their_lease}
    etcdctl(server.endpoint, "lease", "revoke", our_lease)
    eventually(lambda: queued(theirs, "job") == 1 and our_lease not in leases(server))
    holder.release()
    assert waits.result(5).is_held()


def test_a_waiter_whose_key_is_deleted_joins_again(server: EtcdServer, connect: Connect) -> None:
    ours, theirs = connect(server.url, ttl=10), connect(server.url, ttl=10)
    holder = theirs.lock("job").acquire()
    waits = background(lambda: ours.lock("job").acquire(timeout=10))
    eventually(lambda: len(keys(server)) == 2)
    last = etcdctl(server.endpoint, "get", "--prefix", "--keys-only", "--sort-by=CREATE", "multilock/").split()[-1]
    etcdctl(server.endpoint, "del", last)
    eventually(lambda: queued(theirs, "job") == 1)
    holder.release()
    assert waits.result(5).is_held()


@pytest.fixture
def time_to_revoke(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow five seconds to revoke a lease, because a lease that is not revoked in time expires only with its ttl."""
    monkeypatch.setattr("multilock_etcd.sessions.REVOKE_WITHIN", 5.0)


@pytest.mark.usefixtures("time_to_revoke")
def test_a_lock_that_is_not_renewed_has_a_lease_of_its_own(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url)
    with client.lock("job", renew=False) as lease:
        assert len(leases(server)) == 1
        assert lease.release()
        assert leases(server) == []
    kept = client.lock("job", renew=False, ttl=2).acquire()
    assert client.lock("job").acquire(timeout=10).is_held()
    assert not kept.is_held()


def test_a_lock_that_is_not_renewed_counts_from_its_grant(server: EtcdServer, connect: Connect) -> None:
    holder = connect(server.url).lock("job").acquire()
    client = connect(server.url)
    waits = background(lambda: client.lock("job", renew=False, ttl=3).acquire(timeout=20))
    eventually(lambda: queued(client, "job") == 1)
    time.sleep(4.5)
    with Pulse() as pulse:
        assert holder.release()
        # The last tenth of the validity is reserved for the callback.
        assert waits.result(5).remaining() > 2.0 - pulse.stopped()


def test_a_waiter_without_renewal_keeps_its_place_longer_than_its_ttl(server: EtcdServer, connect: Connect) -> None:
    first, second, third = (connect(server.url) for _ in range(3))
    holder = first.lock("job").acquire()
    waits = background(lambda: second.lock("job", renew=False, fair=True, ttl=3).acquire(timeout=20))
    eventually(lambda: queued(first, "job") == 1)
    behind = background(lambda: third.lock("job", fair=True).acquire(timeout=20))
    eventually(lambda: queued(first, "job") == 2)
    time.sleep(4.5)
    assert holder.release()
    lease = waits.result(5)
    assert not behind.done()
    lease.release()
    behind.result(5)


@pytest.mark.usefixtures("time_to_revoke")
def test_close_leaves_neither_keys_nor_leases(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url)
    for ttl in (10, 15, 20):
        client.lock(f"job-{ttl}", ttl=ttl).acquire()
    client.lock("once", renew=False, ttl=20).acquire()
    assert len(leases(server)) == 4
    client.close()
    assert keys(server) == []
    assert leases(server) == []


@pytest.mark.parametrize("join", [True, False])
def test_a_separate_lease_that_is_granted_after_the_cancel_is_revoked(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, join: bool
) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    claim = ear.claim("job", renew=False)
    grant = EtcdSessions._grant

    def cancelled_meanwhile(sessions: EtcdSessions, ttl: float, within: float) -> EtcdSession:
        session = grant(sessions, ttl, within)
        backend.release(claim, None, True, 2.0)
        return session

    monkeypatch.setattr(EtcdSessions, "_grant", cancelled_meanwhile)
    assert isinstance(backend.attempt(claim, join, 2.0), Busy)
    assert leases(server) == []
    assert keys(server) == []
    backend.close()


def test_a_cancel_without_a_reply_is_repeated_although_the_attempt_ended_meanwhile(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server executes the attempt, but no reply arrives. The first cancel and each revocation have no reply."""
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    claim = ear.claim("job", renew=False)
    really, silent = EtcdTransport.call, threading.Event()

    def call(transport: EtcdTransport, method: Any, request: Any, within: float) -> Any:
        if not silent.is_set() and method is calls.TXN:
            really(transport, method, request, within)
            silent.set()
            with pytest.raises(BackendUnavailable):
                backend.release(claim, None, True, 2.0)
        if silent.is_set():
            raise BackendUnavailable("the test lost it", unknown=True)
        return really(transport, method, request, within)

    with monkeypatch.context() as patch:
        patch.setattr(EtcdTransport, "call", call)
        with pytest.raises(BackendUnavailable):
            backend.attempt(claim, True, 2.0)
    assert len(keys(server)) == 1
    assert backend.release(claim, None, True, 2.0).ours
    assert keys(server) == []
    backend.close()


def test_an_attempt_that_was_given_up_hides_no_key_of_the_next_attempt(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gives up the first attempt, which then sends nothing. Meanwhile the second attempt puts the key."""
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    claim = ear.claim("job")
    really, first, second, failed = EtcdTransactions.put, threading.Event(), threading.Event(), threading.Event()

    def put(self: EtcdTransactions, *args: Any) -> Any:
        if not first.is_set():
            first.set()
            second.wait(1)  # times out if the second attempt waits for the end of the first
            raise BackendUnavailable("no time was left to ask", unknown=False)
        second.set()
        failed.wait(10)
        return really(self, *args)

    def fail() -> None:
        try:
            with pytest.raises(BackendUnavailable):
                backend.attempt(claim, True, 10.0)
        finally:
            failed.set()

    monkeypatch.setattr(EtcdTransactions, "put", put)
    given_up = background(fail)
    assert first.wait(10)
    backend.attempt(claim, True, 10.0)
    given_up.result(10)
    assert len(keys(server)) == 1
    backend.release(claim, None, True, 2.0)
    assert keys(server) == []
    backend.close()


def test_cancelled_asyncio_acquires_leave_no_separate_lease(server: EtcdServer) -> None:
    async def main() -> None:
        async with multilock.connect_async(server.url, ttl=10) as client:
            await client.lock("job").acquire()
            for number in range(30):
                waits = asyncio.create_task(client.lock("job", renew=False, ttl=86400).acquire())
                await asyncio.sleep(number / 10_000)
                waits.cancel()
            await asyncio.get_running_loop().run_in_executor(None, lambda: eventually(lambda: len(leases(server)) == 1))

    asyncio.run(main())


def test_a_revocation_without_a_reply_is_repeated_with_the_next_one(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    really, unanswered = EtcdTransport.call, [calls.REVOKE]

    def call(transport: EtcdTransport, method: Any, request: Any, within: float) -> Any:
        if method in unanswered:
            unanswered.clear()
            raise BackendUnavailable("the test keeps silent")
        return really(transport, method, request, within)

    monkeypatch.setattr(EtcdTransport, "call", call)
    for name, left in (("first", 1), ("second", 0)):
        claim = ear.claim(name, renew=False)
        granted = backend.attempt(claim, False, 2.0)
        assert isinstance(granted, Granted)
        assert backend.release(claim, granted, False, 2.0).ours
        assert len(leases(server)) == left
    backend.close()


def test_closing_takes_no_longer_with_many_locks_that_are_not_renewed(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    client = connect(proxy.url, ttl=10, request_timeout=1.0)
    for number in range(300):
        client.lock(f"job-{number}", renew=False, ttl=3600).acquire()
    proxy.delay(0.01)
    begun = now()
    with Pulse() as pulse:
        client.close()  # close() waits one request timeout for callbacks, and another one for replies
        assert now() - begun < 3.5 + pulse.stopped()
    assert keys(server) == []


def test_closing_many_clients_waits_for_a_frozen_server_only_once(server: EtcdServer) -> None:
    clients = [multilock.connect(server.url, ttl=30) for _ in range(5)]
    for number, client in enumerate(clients):
        client.lock(f"job-{number}").acquire().release()
    server.pause()
    begun = now()
    with Pulse() as pulse:
        for client in clients:
            client._kernel.backend.close()
        assert now() - begun < 1.5 + pulse.stopped()
    server.resume()


@pytest.mark.parametrize("renew", [True, False])
def test_a_first_renewal_without_a_reply_loses_no_acquire(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, renew: bool
) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    really, unanswered = EtcdTransport.call, [calls.KEEP_ALIVE]

    def call(transport: EtcdTransport, method: Any, request: Any, within: float) -> Any:
        if method in unanswered:
            unanswered.clear()
            time.sleep(within)
            raise BackendUnavailable("the test keeps silent")
        return really(transport, method, request, within)

    monkeypatch.setattr(EtcdTransport, "call", call)
    before = now()
    granted = backend.attempt(ear.claim("job", renew=renew), True, 4.0)
    assert isinstance(granted, Granted)
    assert unanswered == []
    assert granted.sent_at < before + 1.0, "what was not acknowledged proves nothing"
    backend.close()


# ---- cost


def sent(server: EtcdServer, method: str) -> float:
    return server.metric(f'grpc_server_started_total{{grpc_method="{method}"')


def settled(server: EtcdServer) -> float:
    """Wait until the clients send no further transactions, and return the number of all transactions."""
    count = -1.0
    while count != (count := sent(server, "Txn")):
        time.sleep(0.5)
    return count


def test_an_uncontended_lock_costs_one_request_to_acquire_and_one_to_release(
    server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A lock is watched only after 60 s, so no lock of this test is watched.
    monkeypatch.setattr("multilock.kernel.validity.ARM_AFTER", 60.0)
    lock = connect(server.url, ttl=60).lock("job")
    lock.acquire().release()
    before = server.metric("grpc_server_started_total")
    for _ in range(100):
        lock.acquire().release()
    assert server.metric("grpc_server_started_total") - before == 200


def test_a_release_wakes_one_waiter(server: EtcdServer, connect: Connect) -> None:
    holder = connect(server.url, ttl=60).lock("job").acquire()
    clients = [connect(server.url, ttl=60) for _ in range(5)]
    waits = [background(client.lock("job").acquire) for client in clients]
    eventually(lambda: queued(clients[0], "job") == 5)
    before = settled(server)  # each of the waiters that joined at the same time sends one more request
    holder.release()
    eventually(lambda: any(each.done() for each in waits))
    assert settled(server) == before
    for _ in waits:
        eventually(lambda: any(each.done() for each in waits))
        done = next(each for each in waits if each.done())
        waits.remove(done)
        done.result(0).release()


@pytest.mark.timeout(120)
def test_a_thousand_locks_are_renewed_by_one_request(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, ttl=15)
    held = [client.lock(f"job-{n}").acquire() for n in range(1000)]
    watcher: Any = client._kernel.backend._watcher  # type: ignore[attr-defined]
    eventually(lambda: all(watcher.covers(inner(lease).claim.id) for lease in held), within=60)
    before, started = {m: sent(server, m) for m in ("LeaseKeepAlive", "Txn")}, time.monotonic()
    eventually(lambda: sent(server, "LeaseKeepAlive") > before["LeaseKeepAlive"], within=30)
    periods = (time.monotonic() - started) / 5
    # Two more are allowed, because a keep-alive may be repeated.
    assert sent(server, "LeaseKeepAlive") - before["LeaseKeepAlive"] <= periods * 1.25 + 2
    assert sent(server, "Txn") == before["Txn"]
    assert all(lease.is_held() for lease in held)


def test_exceptions_of_grpc_never_reach_the_caller(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, outage_timeout=0.5)
    lock = client.lock("job")
    lease = lock.acquire()
    server.kill()
    for call in (client.ping, lock.try_acquire, lock.acquire, lock.is_locked, lease.renew, client.diagnose):
        with pytest.raises(MultilockError) as caught:
            call()
        assert "grpc" not in type(caught.value).__module__
    assert lease.release() in (True, False)
