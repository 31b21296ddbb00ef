"""One watch of the name admits each waiter without a further request, even after failures of that watch."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

import multilock
from multilock import BackendUnavailable, LossReason, now
from multilock.backend import Busy, Claim, Granted
from multilock.testing import FaultProxy, Helper, hear, say
from multilock.testing.conformance.base import eventually
from multilock.testing.conformance.faces import background
from multilock_etcd import notices, wire
from multilock_etcd.queue import Queue
from multilock_etcd.transactions import EtcdTransactions
from multilock_etcd.transport import EtcdTransport, Method, calls
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.kit import WITHIN, Mishap, Ours
from tests.backends.etcd.test_faults import keys, sent
from tests.servers_etcd import EtcdCluster, EtcdServer, etcdctl

START = 60.0  # seconds for processes to start on an overloaded machine


def pushed(ours: Ours, claim: Claim) -> Granted:
    assert ours.ear.wait(lambda: claim.id in ours.ear.pushed, WITHIN), "it was pushed nothing"
    return ours.ear.pushed[claim.id]


def listening(ours: Ours, *waiting: Claim) -> None:
    """Wait until the server has confirmed the watch. Then the claims in ``waiting`` read the queue again."""
    watcher = ours.backend._watcher
    eventually(lambda: all(watch.confirmed for watch in list(watcher._queues.values())))
    for claim in waiting:
        assert isinstance(ours.attempt(claim, join=True), Busy)
    ours.woken()


def queues(ours: Ours) -> int:
    return len(ours.backend._watcher._queues)


@pytest.mark.parametrize("kind", ["lock", "read", "write", "permit"])
def test_the_watch_grants_the_next_waiter_with_the_token_and_validity_of_its_lease(
    us: Ours, them: Ours, kind: str
) -> None:
    alone = us.claim()
    us.take(alone)
    waiting = them.wait(them.claim(kind, 2 if kind == "permit" else 0))
    listening(them, waiting)
    session = them.backend._sessions._shared[waiting.ttl]
    us.release(alone)
    granted = pushed(them, waiting)
    assert granted.sent_at == session.sent_at
    assert granted == them.take(waiting)
    assert them.renew((waiting, granted)) == [True]


@pytest.mark.parametrize("granted", [30, 60])
def test_a_handover_takes_one_request_to_join_and_one_to_release(
    server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, granted: int
) -> None:
    """A server may grant a longer ttl than requested, because it grants at least 1.5 times its election timeout."""
    really = EtcdTransport.call

    def call(transport: EtcdTransport, method: Method, request: Any, within: float) -> Any:
        if method is calls.GRANT:
            request = wire.LeaseGrantRequest(TTL=granted)
        return really(transport, method, request, within)

    monkeypatch.setattr(EtcdTransport, "call", call)
    clients = [connect(server.url, ttl=30) for _ in range(2)]
    locks = [client.lock("job") for client in clients]
    lease = locks[0].acquire()
    for lock in locks:
        lock.try_acquire()
    before = 0.0
    for turn in range(12):
        if turn == 2:  # both clients now have a watch that stays open
            before = server.metric("grpc_server_started_total")
        joined = sent(server, "Txn") + 1
        waits = background(lambda: locks[(turn + 1) % 2].acquire(timeout=START))  # noqa: B023
        eventually(lambda: sent(server, "Txn") == joined)  # noqa: B023
        lease.release()
        lease = waits.result(START)
    assert server.metric("grpc_server_started_total") - before == 20


def test_the_waiters_of_a_client_share_one_watch_and_later_waiters_reuse_it(server: EtcdServer) -> None:
    here = Ours(server.url, "multilock/")
    holding = here.claim()
    here.take(holding)
    first, second = here.wait(here.claim()), here.wait(here.claim())
    listening(here, first, second)
    assert server.metric("etcd_debugging_mvcc_watcher_total") == 1
    for claim, then in ((holding, first), (first, second)):
        here.release(claim)
        pushed(here, then)
    third = here.wait(here.claim())
    before = sent(server, "Txn")
    here.release(second)
    assert pushed(here, third).token
    assert sent(server, "Txn") == before
    assert server.metric("etcd_debugging_mvcc_watcher_total") == 1
    here.backend.close()


def test_few_unused_watches_are_kept_and_they_end(us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "KEPT_QUEUES", 2)
    monkeypatch.setattr(notices, "KEPT_FOR", 1)
    for name in ("a", "b", "c"):
        holding, waiting = (ours.claim()._replace(name=name) for ours in (us, them))
        us.take(holding)
        them.wait(waiting)
        them.release(waiting)
        us.release(holding)
    assert queues(them) <= 2

    def turn() -> bool:
        for name in ("a", "b", "c"):
            claim = us.claim()._replace(name=name)
            us.take(claim)
            us.release(claim)
        return queues(them) == 0

    eventually(turn, within=START)


def test_a_waiter_far_back_in_the_queue_watches_only_one_key(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", 1)
    queue = [us.claim(), us.claim(), us.claim()]
    us.take(queue[0])
    for claim in queue[1:]:
        us.wait(claim)
    far = them.wait(them.claim())
    assert queues(them) == 0
    us.release(queue[1])
    us.release(queue[2])
    them.hears_a_wake_for(far)
    assert isinstance(them.attempt(far, join=True), Busy)
    listening(them, far)
    us.release(queue[0])
    pushed(them, far)


def test_a_waiter_far_behind_is_counted_in_before_its_turn(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", 1)
    first, second, third = us.claim(), us.claim(), us.claim()
    us.take(first)
    us.wait(second)
    us.wait(third)
    far = them.wait(them.claim())
    us.release(first)
    us.take(second)
    us.release(second)
    them.hears_a_wake_for(far)
    assert isinstance(them.attempt(far, join=True), Busy)
    listening(them, far)
    us.release(third)
    pushed(them, far)  # the waiter gets the name without a further request


def test_a_reader_behind_many_readers_watches_only_one_key(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", 3)
    writer = us.writer()
    us.take(writer)
    crowd = [us.wait(us.reader()) for _ in range(3)]
    assert queues(us) == 1
    far = them.wait(them.reader())
    assert queues(them) == 0
    for claim in crowd:
        us.release(claim)
    us.release(writer)
    them.hears_a_wake_for(far)
    assert isinstance(them.attempt(far, join=True), Granted)


def test_a_denied_watch_of_a_name_is_tried_again_for_the_next_waiter(us: Ours, them: Ours) -> None:
    holding = us.claim()
    us.take(holding)
    deaf = them.wait(them.claim())
    listening(them)
    watcher = them.backend._watcher
    [denied] = watcher._queues.values()
    denied.confirmed = False
    watcher._denied_at = watcher._notices.now()
    answer = {"created": True, "canceled": True, "compact_revision": 0, "cancel_reason": "permission denied"}
    watcher._hear(SimpleNamespace(watch_id=-1, events=(), **answer))
    waiting = them.wait(them.claim())
    assert denied not in watcher._queues.values()
    listening(them, waiting)
    them.release(deaf)
    us.release(holding)
    pushed(them, waiting)


def test_any_exception_in_the_notice_thread_counts_as_a_broken_stream(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holding = us.claim()
    us.take(holding)
    waiting, behind = them.wait(them.claim()), them.wait(them.claim())
    listening(them, waiting, behind)

    def breaks(_: Queue, __: Any) -> Any:
        raise ValueError("by the test")

    with monkeypatch.context() as patched:
        patched.setattr(Queue, "hear", breaks)
        us.release(holding)
        assert them.ear.wait(lambda: None in them.ear.wakes, WITHIN)
    assert "by the test" in caplog.text
    them.take(waiting, join=True)
    listening(them, them.wait(behind))
    them.release(waiting)
    pushed(them, behind)


def test_a_waiting_request_gets_its_reply_before_the_events_of_the_watch(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = us.claim()
    us.take(holding)
    waiting = them.wait(them.claim())
    listening(them, waiting)
    execute = EtcdTransactions.execute

    def slow(self: EtcdTransactions, *asked: Any) -> Any:
        said = execute(self, *asked)
        us.release(holding)
        [watch] = them.backend._watcher._queues.values()
        eventually(lambda: watch.queue is not None and watch.queue._told)
        assert them.ear.pushed == {}
        return said

    with monkeypatch.context() as patched:
        patched.setattr(EtcdTransactions, "execute", slow)
        assert isinstance(them.attempt(waiting, join=True), Busy)
    assert waiting.id in them.ear.pushed


# ---- events that prove nothing


def test_a_waiter_whose_key_is_deleted_is_not_admitted_and_joins_again(
    us: Ours, them: Ours, shared: EtcdServer, prefix: str
) -> None:
    holding = us.claim()
    us.take(holding)
    waiting, behind = them.wait(them.claim()), them.wait(them.claim())
    listening(them, waiting, behind)
    etcdctl(shared.endpoint, "del", f"{prefix}job/{waiting.id}")
    them.hears_a_wake_for(waiting)
    us.release(holding)
    pushed(them, behind)
    assert waiting.id not in them.ear.pushed
    assert isinstance(them.attempt(waiting, join=True), Busy)
    them.release(behind)
    pushed(them, waiting)


def test_deleting_all_keys_of_a_name_admits_no_waiter(us: Ours, them: Ours, shared: EtcdServer, prefix: str) -> None:
    us.take(us.claim())
    waiting = [them.wait(them.claim()) for _ in range(3)]
    listening(them, *waiting)
    etcdctl(shared.endpoint, "del", "--prefix", f"{prefix}job/")
    for claim in waiting:
        them.hears_a_wake_for(claim)
    assert them.ear.pushed == {}
    assert isinstance(them.attempt(waiting[2], join=True), Granted)
    assert isinstance(them.attempt(waiting[0], join=True), Busy)


def test_a_waiter_whose_key_is_gone_after_its_push_gives_up_its_id(
    us: Ours, them: Ours, shared: EtcdServer, prefix: str
) -> None:
    holding = us.claim()
    us.take(holding)
    waiting = them.wait(them.claim())
    listening(them, waiting)
    us.release(holding)
    pushed(them, waiting)
    etcdctl(shared.endpoint, "del", f"{prefix}job/{waiting.id}")
    answer = them.attempt(waiting, join=True)
    assert isinstance(answer, Busy)
    assert answer.spent
    assert keys(shared, f"{prefix}job/") == []


def test_an_admitted_claim_is_notified_that_its_key_was_deleted(
    us: Ours, them: Ours, shared: EtcdServer, prefix: str
) -> None:
    holding = us.claim()
    us.take(holding)
    waiting = them.wait(them.claim())
    listening(them, waiting)
    us.release(holding)
    pushed(them, waiting)
    them.woken()
    etcdctl(shared.endpoint, "del", f"{prefix}job/{waiting.id}")
    them.hears_a_wake_for(waiting)
    them.hears_of_the_loss_of(waiting)


def test_an_admitted_claim_is_notified_that_its_lease_ended(
    us: Ours, them: Ours, shared: EtcdServer, prefix: str
) -> None:
    holding = us.claim()
    us.take(holding)
    waiting = them.wait(them.claim())
    listening(them, waiting)
    us.release(holding)
    group = pushed(them, waiting).group
    etcdctl(shared.endpoint, "lease", "revoke", f"{group:x}")
    assert them.ear.wait(lambda: (waiting.id, LossReason.SESSION_LOST) in them.ear.losses, WITHIN)


@pytest.mark.oracle
def test_a_late_join_with_a_cancelled_id_leaves_no_key(
    us: Ours, them: Ours, shared: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding, waiting = us.claim(), them.claim()
    us.take(holding)
    unsent = Mishap(monkeypatch, calls.TXN, b"/job/", executed=False)
    with pytest.raises(BackendUnavailable):
        them.attempt(waiting, join=True)
    listening(them, them.wait(waiting))
    us.release(holding)
    pushed(them, waiting)
    etcdctl(shared.endpoint, "del", f"{prefix}job/{waiting.id}")
    answer = them.attempt(waiting, join=True)
    assert isinstance(answer, Busy)
    assert answer.spent
    them.release(waiting, unsure=True)
    assert not unsent.send().succeeded
    assert keys(shared, f"{prefix}job/") == []


def test_a_waiter_whose_lease_ends_is_not_admitted(us: Ours, them: Ours, shared: EtcdServer) -> None:
    holding = us.claim()
    us.take(holding)
    waiting = them.wait(them.claim())
    listening(them, waiting)
    lease = them.backend._sessions._shared[waiting.ttl].lease
    etcdctl(shared.endpoint, "lease", "revoke", f"{lease:x}")
    them.hears_a_wake_for(waiting)
    us.release(holding)
    assert isinstance(them.attempt(waiting, join=True), Granted)
    assert them.ear.pushed == {}


def test_a_cancelled_claim_is_not_admitted(us: Ours, them: Ours) -> None:
    holding = us.claim()
    us.take(holding)
    given_up, behind = them.wait(them.claim()), them.wait(them.claim())
    listening(them, given_up, behind)
    them.release(given_up, unsure=True)
    us.release(holding)
    pushed(them, behind)
    assert given_up.id not in them.ear.pushed


def test_a_waiter_without_renewal_is_woken_and_sends_a_request(us: Ours, them: Ours) -> None:
    holding = us.claim()
    us.take(holding)
    waiting = them.wait(them.claim()._replace(renew=False))
    listening(them, waiting)
    us.release(holding)
    them.hears_a_wake_for(waiting)
    assert them.ear.pushed == {}
    them.take(waiting)


def test_after_a_broken_stream_the_watch_reads_the_queue_and_continues_from_there(
    shared: EtcdServer, prefix: str
) -> None:
    holder = Ours(shared.url, prefix)
    with FaultProxy.before(shared.url) as proxy:
        waiter = Ours(proxy.url, prefix)
        queue = [holder.claim(), holder.claim()]
        holder.take(queue[0])
        holder.wait(queue[1])
        waiting = waiter.wait(waiter.claim())
        listening(waiter, waiting)
        holder.release(queue[0])
        proxy.cut()
        assert waiter.ear.wait(lambda: None in waiter.ear.wakes, START)
        assert isinstance(waiter.attempt(waiting, join=True), Busy)
        eventually(lambda: queues(waiter) == 1)
        listening(waiter, waiting)
        holder.release(queue[1])
        assert waiter.ear.wait(lambda: waiting.id in waiter.ear.pushed, START)
        waiter.take(waiting)
        waiter.backend.close()
    holder.backend.close()


def test_a_resumed_member_reports_the_missed_events_and_admits_its_waiter(
    cluster: EtcdCluster,
) -> None:
    follower = cluster.followers()[0]
    waiter, holder = Ours(follower.url, "p/"), Ours(cluster.leader().url, "p/")
    holding = holder.claim()
    holder.take(holding)
    waiting = waiter.wait(waiter.claim())
    listening(waiter, waiting)
    follower.pause()
    holder.release(holding)
    behind = holder.wait(holder.claim())
    follower.resume()
    assert waiter.ear.wait(lambda: waiting.id in waiter.ear.pushed, START)
    assert isinstance(holder.attempt(behind, join=True), Busy)
    for ours in (waiter, holder):
        ours.backend.close()


# ---- many waiters

PROCESSES, THREADS, TTL = 4, 5, 4.0


def crowd(url: str) -> None:
    """Run five fair waiters, each of which reports its turn."""
    client = multilock.connect(url, ttl=TTL)
    client.ping()
    say("ready")
    hear()

    def turn() -> None:
        lease = client.lock("job", fair=True).acquire(timeout=60)
        got = now()
        said = f"{lease.token} {got!r}"
        held = lease.is_held()
        lease.release()
        say("turn", said, held)

    threads = [threading.Thread(target=turn) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("done")
    hear()
    client.close()


@pytest.mark.timeout(120)
def test_twenty_waiters_of_four_processes_enter_in_order_although_one_process_is_killed(
    server: EtcdServer,
) -> None:
    holder = Ours(server.url, "multilock/")
    holding = holder.claim()
    holder.take(holding)
    with ExitStack() as stack:
        stack.callback(holder.backend.close)
        helpers = [stack.enter_context(Helper(f"{__name__}:crowd", server.url)) for _ in range(PROCESSES)]
        for helper in helpers:
            helper.wait_for("ready", START)
        for helper in helpers:
            helper.tell("go")
        eventually(lambda: len(keys(server)) == 1 + PROCESSES * THREADS, within=START)
        helpers[0].kill()
        holder.release(holding)
        for helper in helpers[1:]:
            helper.wait_for("done", START)
        turns = [line.split()[1:] for helper in helpers[1:] for line in helper.lines if line.startswith("turn")]
        turns.sort(key=lambda words: float(words[1]))
        tokens = [int(token) for token, _, _ in turns]
        assert len(tokens) == (PROCESSES - 1) * THREADS
        assert tokens == sorted(tokens)
        assert {held for _, _, held in turns} == {"True"}
