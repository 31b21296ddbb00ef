"""What bad luck does to a lock on one etcd member: lost replies, restarts, silence, compaction, revoked leases."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import multilock_etcd.recipe
from multilock import BackendUnavailable, LeaseState, Loss, LossReason, now
from multilock.errors import MultilockError
from multilock.model import Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Recorder, believed_until, by_the_clock, eventually, queued
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear
from multilock_etcd import open_backend
from multilock_etcd.notices import REASON_WITHIN
from multilock_etcd.sessions import Session
from multilock_etcd.transport import Transport, calls
from tests.backends.etcd.conftest import Connect
from tests.servers_etcd import EtcdServer, etcdctl


def keys(server: EtcdServer, prefix: str = "multilock/") -> list[str]:
    """What stands below this prefix, tombstones excepted."""
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


def test_a_lost_reply_to_a_try_is_given_back_in_the_background(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    client = connect(proxy.url, ttl=5)
    client.lock("another").acquire()
    lost = proxy.drop_reply(b"multilock/job/", then="hold")
    with pytest.raises(BackendUnavailable):
        client.lock("job").try_acquire()
    lost.wait(5)
    assert connect(server.url).lock("job").try_acquire(timeout=5) is not None


def test_a_lost_reply_to_a_release_is_a_release(server: EtcdServer, proxy: FaultProxy, connect: Connect) -> None:
    client, other = connect(proxy.url, ttl=5), connect(server.url)
    lease = client.lock("job").acquire()
    lost = proxy.drop_reply(b"multilock/job/", then="hold")
    assert lease.release()
    lost.wait(5)
    assert other.lock("job").try_acquire(timeout=5) is not None


def test_a_lost_reply_to_a_renewal_is_no_loss(server: EtcdServer, proxy: FaultProxy, connect: Connect) -> None:
    client = connect(proxy.url, ttl=6)
    lease = client.lock("job").acquire()
    request = multilock_etcd.messages.LeaseKeepAliveRequest(ID=int(leases(server)[0], 16)).SerializeToString()
    lost = proxy.drop_reply(request, then="hold")
    lost.wait(5)
    eventually(lambda: lease.remaining() > 4.4)  # a later one was answered
    assert lease.state is LeaseState.HELD


class Unsent:
    """A transport whose next transaction about ``name`` gets no answer; the request is kept, and not sent yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._really = Transport.call
        self._name = f"/{name}/".encode()
        self.kept: list[tuple[Transport, Any]] = []
        monkeypatch.setattr(Transport, "call", lambda *args: self._call(*args))

    def _call(self, transport: Transport, method: Any, request: Any, within: float) -> Any:
        if method is calls.TXN and not self.kept and self._name in request.SerializeToString():
            self.kept.append((transport, request))
            raise BackendUnavailable("the test swallowed the request", unknown=True)
        return self._really(transport, method, request, within)

    def send(self) -> Any:
        """Now the server executes it."""
        [(transport, request)] = self.kept
        return self._really(transport, calls.TXN, request, 5.0)[0]


@pytest.mark.parametrize("join", [True, False])
def test_a_request_that_is_executed_after_its_cancel_finds_that_it_is_too_late(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, join: bool
) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    unsent = Unsent(monkeypatch, "job")
    claim = ear.claim("job")
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, join, 2.0)
    assert backend.release(claim, None, True, 2.0) is False
    assert not unsent.send().succeeded
    assert keys(server) == []
    backend.close()


def test_without_its_tombstone_the_late_request_would_hold(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    unsent = Unsent(monkeypatch, "job")
    claim = ear.claim("job")
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, 2.0)
    assert backend.release(claim, None, False, 2.0) is False
    assert unsent.send().succeeded
    backend.close()


def test_tombstones_are_cleared_away_by_a_later_renewal(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilock_etcd.recipe, "TOMBSTONE", 0.0)
    ear = Ear()
    backend = open_backend(server.url, {})
    backend.open(ear)
    unsent = Unsent(monkeypatch, "job")
    claim = ear.claim("job")
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, 2.0)
    assert unsent.kept
    backend.release(claim, None, True, 2.0)
    assert "!gone/" in etcdctl(server.endpoint, "get", "--prefix", "multilock/")
    backend.renew(ear.sessions[0], [], 2.0)
    assert etcdctl(server.endpoint, "get", "--prefix", "multilock/") == ""
    backend.close()


# ---- the server


def test_a_lock_survives_a_restart_of_the_server(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, ttl=6)
    lease = client.lock("job").acquire()
    server.restart()
    before = lease.remaining()
    eventually(lambda: lease.remaining() > before)
    assert lease.state is LeaseState.HELD
    assert connect(server.url).lock("job").try_acquire() is None
    token = lease.fence()
    assert lease.release()
    assert client.lock("job").acquire(timeout=5).fence() > token


def test_a_server_that_is_silent_past_the_ttl_costs_the_lock_before_another_gets_it(
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
    assert time.monotonic() - begun < 8  # its safety timer would take ten
    assert lost.stays_at(1)


def test_waiting_outlasts_a_restart_and_hears_of_a_release_during_it(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    holder = connect(server.url, ttl=10).lock("job").acquire()
    waiter = connect(proxy.url, ttl=20)
    waits = background(lambda: waiter.lock("job").acquire(timeout=20))
    eventually(lambda: queued(waiter, "job") == 1)
    with outage(proxy):
        holder.release()
    begun = time.monotonic()
    assert waits.result(20).is_held()
    assert time.monotonic() - begun < 8  # its safety timer would take twenty


@contextmanager
def outage(proxy: FaultProxy) -> Iterator[None]:
    proxy.refuse()
    proxy.cut()
    try:
        yield
    finally:
        proxy.accept()


def test_a_key_deleted_while_the_watch_is_broken_is_a_loss_once_it_is_mended(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=20)
    client.lock("job", on_lost=lost).acquire()
    kept = client.lock("kept").acquire()
    time.sleep(0.5)  # the watch is armed after a quarter of a second
    with outage(proxy):
        etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    assert lost.wait().reason is LossReason.TAKEN
    assert kept.is_held()


def test_the_mended_watch_itself_tells_of_the_loss_before_any_renewal_asks(
    server: EtcdServer, proxy: FaultProxy
) -> None:
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


def test_compaction_of_what_a_broken_watch_had_still_to_read_hides_nothing(
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


def test_a_watch_armed_after_a_compaction_still_finds_the_loss(server: EtcdServer, connect: Connect) -> None:
    lost = Recorder[Loss]()
    connect(server.url, ttl=20).lock("job", on_lost=lost).acquire()
    etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    etcdctl(server.endpoint, "put", "something", "else")
    compact(server)
    assert lost.wait().reason is LossReason.TAKEN


@pytest.fixture
def renewed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first time when a lease of 5 s is 3 s old, so that there is time before it."""
    monkeypatch.setattr("multilock_etcd.sessions.RENEWALS", 1.5)


def overlap(server: EtcdServer, proxy: FaultProxy, connect: Connect) -> float:
    """Seconds for which two believe to hold a lock that was taken late in the life of its lease, whose holder was then
    cut off; negative: as many passed between the two."""
    client, other = connect(proxy.url, ttl=5), connect(server.url, ttl=5)
    client.lock("first").acquire()
    time.sleep(2)
    lease = client.lock("job").acquire()
    proxy.black_hole()
    waits = background(lambda: (other.lock("job").acquire(timeout=20), now())[1])
    believed = believed_until(lease)
    return believed - waits.result(20)


@pytest.mark.usefixtures("renewed_late")
def test_a_lock_taken_late_ends_with_its_lease_and_no_later(
    server: EtcdServer, proxy: FaultProxy, connect: Connect
) -> None:
    assert overlap(server, proxy, connect) < 0


@pytest.mark.usefixtures("renewed_late")
def test_the_overlap_is_seen_if_validity_counts_from_the_acquire(
    server: EtcdServer, proxy: FaultProxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def granted(self: Session, revision: int | None) -> Granted:
        return Granted(revision, self.ttl, now(), self.ttl, self.ttl / 3, self.lease, revision)

    monkeypatch.setattr(Session, "granted", granted)
    assert overlap(server, proxy, connect) > 0


# ---- keys and leases


def test_a_revoked_lease_ends_every_lock_on_it_once(server: EtcdServer, connect: Connect) -> None:
    lost = Recorder[Loss]()
    client = connect(server.url, ttl=10)
    held = [client.lock(f"job-{n}", on_lost=lost).acquire() for n in range(20)]
    time.sleep(0.5)
    etcdctl(server.endpoint, "lease", "revoke", leases(server)[0])
    lost.wait(20)
    assert {loss.reason for loss in lost.calls} == {LossReason.SESSION_LOST}
    assert not any(lease.is_held() for lease in held)
    assert lost.stays_at(20)
    assert client.lock("job-0").try_acquire() is not None  # on a new lease


def test_a_reason_without_an_answer_holds_no_notice_up(
    server: EtcdServer, proxy: FaultProxy, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.notices.REASON_WITHIN", REASON_WITHIN)
    lost = Recorder[Loss]()
    connect(proxy.url, ttl=60).lock("job", on_lost=lost).acquire()
    time.sleep(0.5)
    question = multilock_etcd.messages.LeaseTimeToLiveRequest(ID=int(leases(server)[0], 16)).SerializeToString()
    unanswered = proxy.drop_reply(question, then="hold")
    etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    begun = now()
    assert lost.wait().reason is LossReason.TAKEN
    assert lost.times[0] - begun < 1.5  # a request has two seconds and more
    unanswered.wait(5)


def test_an_idle_client_whose_lease_has_ended_gets_a_new_one_with_its_next_lock(
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


def test_a_renewal_that_finds_the_lease_gone_ends_the_group(server: EtcdServer) -> None:
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


def test_a_waiter_whose_lease_is_revoked_joins_again_on_a_new_one(server: EtcdServer, connect: Connect) -> None:
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
    """As in `time_to_explain`: a lease that is not revoked in time is left to end by itself."""
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


# ---- cost


def sent(server: EtcdServer, method: str) -> float:
    return server.metric(f'grpc_server_started_total{{grpc_method="{method}"')


def test_an_uncontended_lock_costs_one_request_to_acquire_and_one_to_release(
    server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock.lease.ARM_AFTER", 60.0)  # none is held so long that it is watched
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
    before = sent(server, "Txn")
    holder.release()
    eventually(lambda: any(each.done() for each in waits))
    time.sleep(0.2)
    assert sent(server, "Txn") - before == 1
    for _ in waits:
        eventually(lambda: any(each.done() for each in waits))
        done = next(each for each in waits if each.done())
        waits.remove(done)
        done.result(0).release()


@pytest.mark.timeout(120)
def test_a_thousand_locks_are_renewed_by_one_request(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, ttl=6)
    held = [client.lock(f"job-{n}").acquire() for n in range(1000)]
    eventually(lambda: server.metric("etcd_debugging_mvcc_watcher_total") == len(held), within=20)
    time.sleep(0.5)  # until the client has heard that all are watched
    before, started = {m: sent(server, m) for m in ("LeaseKeepAlive", "Txn")}, time.monotonic()
    time.sleep(4)
    periods = (time.monotonic() - started) / 2
    assert sent(server, "LeaseKeepAlive") - before["LeaseKeepAlive"] <= periods * 1.25 + 2  # one is asked for again
    assert sent(server, "Txn") == before["Txn"]
    assert all(lease.is_held() for lease in held)


def test_no_exception_of_grpc_ever_leaves(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, outage_timeout=0.5)
    lock = client.lock("job")
    lease = lock.acquire()
    server.kill()
    for call in (client.ping, lock.try_acquire, lock.acquire, lock.is_locked, lease.renew, client.diagnose):
        with pytest.raises(MultilockError) as caught:
            call()
        assert "grpc" not in type(caught.value).__module__
    assert lease.release() in (True, False)
