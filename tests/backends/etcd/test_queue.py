"""A waiter counts down the keys ahead of it. The tests need no server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from multilock.backend import Claim
from multilock.model import owner_text
from multilock_etcd import queue as queue_module
from multilock_etcd.claims import Waiter
from multilock_etcd.keys import Ahead, EtcdKeyspace
from multilock_etcd.queue import Admission, Decision, Deletion, Queue
from multilock_etcd.sessions import EtcdSession
from multilock_etcd.transactions import Position

KEYS = EtcdKeyspace("p/")
ID = "f" * 32
ADMITTED, ASK_AGAIN, TAKEN_BACK = Admission.ADMITTED, Admission.ASK_AGAIN, Admission.TAKEN_BACK


def waiter(
    kind: str = "lock", *others: str, like: Sequence[str] = (), permits: int = 0, revision: int = 10, at: int = 10
) -> Waiter:
    """Make a waiter behind the keys ``others``, or behind the key ``one`` if none is given."""
    claim_id = f"{os.urandom(8).hex()}.{ID}"
    owner = owner_text(claim_id, kind, "host", os.getpid(), "me", 60.0)
    claim = Claim("job", kind, claim_id, owner, 60.0, True, True, "me", permits)
    made = Waiter(claim, KEYS.own(claim))
    made.revision, made.session = revision, EtcdSession(1, 60.0, 0.0)
    ranges = Ahead((KEYS.queue("job"),), (KEYS.queue("job"),), max(1, permits))
    made.position = Position(ranges, revision, at, [answer(others or ["one"]), answer(like)])
    return made


def answer(keys: Sequence[str]) -> Any:
    rows = [SimpleNamespace(key=key(of), create_revision=number) for number, of in enumerate(keys, 1)]
    return SimpleNamespace(response_range=SimpleNamespace(kvs=rows, count=len(rows)))


def enter(queue: Queue, waiting: Waiter) -> list[Decision]:
    return queue.enter(waiting, waiting.position)


def key(of: str) -> bytes:
    return b"p/job/" + of.encode()


def gone(revision: int, of: str = "one") -> Deletion:
    return Deletion(key(of), revision)


def told(decisions: Sequence[Decision]) -> list[tuple[Waiter, Admission]]:
    return [(decision.waiter, decision.admission) for decision in decisions]


@pytest.fixture
def queue() -> Queue:
    """Return a queue whose watch begins after revision 10."""
    queue = Queue(KEYS.queue("job"))
    queue.begins(10)
    return queue


def test_a_waiter_is_admitted_once_when_no_key_is_ahead_of_it(queue: Queue) -> None:
    waiting = waiter("lock", "one", "two")
    assert enter(queue, waiting) == []
    assert queue.hear([gone(11)]) == []
    assert told(queue.hear([gone(12, "two")])) == [(waiting, ADMITTED)]
    assert queue.hear([gone(13)]) == []


def test_a_replayed_deletion_neither_admits_nor_delays_a_waiter(queue: Queue) -> None:
    waiting = waiter("lock", "one", "two", "three")
    enter(queue, waiting)
    first, second = gone(11), gone(12, "two")
    assert queue.hear([first]) == []
    assert queue.hear([first, second]) == []
    assert queue.hear([first]) == []
    assert told(queue.hear([second, gone(13, "three")])) == [(waiting, ADMITTED)]


def test_a_replayed_deletion_changes_nothing_for_a_later_waiter(queue: Queue) -> None:
    queue.hear([gone(11), gone(12, "two")])
    queue.hear([gone(11), gone(12, "two")])
    late = waiter("lock", "two", "three", revision=11, at=11)
    assert enter(queue, late) == []
    assert queue.hear([gone(11), gone(12, "two")]) == []
    assert told(queue.hear([gone(13, "three")])) == [(late, ADMITTED)]


def test_replayed_deletions_take_no_memory_in_the_queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "REMEMBERED", 2)
    queue.hear([gone(11), gone(12), gone(13), gone(14)])
    queue.hear([gone(11), gone(12), gone(13)])
    late = waiter(at=11)
    assert told(enter(queue, late)) == [(late, ASK_AGAIN)]


def test_the_deletion_of_a_later_key_admits_no_waiter(queue: Queue) -> None:
    enter(queue, waiter())
    assert queue.hear([gone(12, "newcomer")]) == []


def test_one_queue_admits_each_of_its_waiters(queue: Queue) -> None:
    first, second = waiter(), waiter("lock", "one", "first", revision=11, at=11)
    enter(queue, first)
    enter(queue, second)
    assert told(queue.hear([gone(12)])) == [(first, ADMITTED)]
    assert told(queue.hear([gone(13, "first")])) == [(second, ADMITTED)]


def test_a_late_waiter_counts_only_reports_after_its_own_read(
    queue: Queue,
) -> None:
    queue.hear([gone(11), gone(13, "two")])
    late = waiter("lock", "one", "two", revision=12, at=12)  # the claim of the key "one" has joined again
    assert enter(queue, late) == []
    in_time = waiter("lock", "two", revision=12, at=12)
    assert told(enter(queue, in_time)) == [(in_time, ADMITTED)]
    assert told(queue.hear([gone(14)])) == [(late, ADMITTED)]


def test_deletions_before_the_read_of_a_waiter_do_not_count() -> None:
    queue = Queue(KEYS.queue("job"))
    enter(queue, waiter(revision=12, at=12))
    assert queue.begins(8) == []
    assert queue.hear([gone(9)]) == []
    assert queue.hear([gone(12), gone(13, "newcomer")]) == []
    [decision] = queue.hear([gone(14)])
    assert decision.admission is ADMITTED


def test_a_waiter_that_read_before_the_watch_began_must_read_again() -> None:
    queue = Queue(KEYS.queue("job"))
    early, in_time = waiter(at=10), waiter(revision=11, at=11)
    enter(queue, early)
    enter(queue, in_time)
    assert told(queue.begins(11)) == [(early, ASK_AGAIN)]
    assert told(enter(queue, again := waiter(at=10))) == [(again, ASK_AGAIN)]
    assert told(queue.hear([gone(12)])) == [(in_time, ADMITTED)]


def test_a_waiter_whose_read_is_too_old_must_read_again(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "REMEMBERED", 2)
    for revision, of in (11, "one"), (12, "two"), (13, "three"):
        queue.hear([gone(revision, of)])
    late, in_time = waiter(at=10), waiter("lock", "two", "three", "four", at=11)
    assert told(enter(queue, late)) == [(late, ASK_AGAIN)]
    assert enter(queue, in_time) == []
    assert told(queue.hear([gone(14, "four")])) == [(in_time, ADMITTED)]


@pytest.mark.parametrize("together", [11, 12])
def test_a_waiter_whose_own_key_was_deleted_is_not_admitted(queue: Queue, together: int) -> None:
    waiting = waiter()
    enter(queue, waiting)
    own = Deletion(waiting.own, together)
    assert told(queue.hear([gone(11), own])) == [(waiting, ASK_AGAIN)]


def test_deleting_the_key_of_an_admitted_claim_revokes_its_admission(queue: Queue) -> None:
    waiting = waiter()
    enter(queue, waiting)
    assert told(queue.hear([gone(11)])) == [(waiting, ADMITTED)]
    assert queue
    [decision] = queue.hear([Deletion(waiting.own, 12)])
    assert decision == (waiting, TAKEN_BACK, 12)
    assert not queue


def test_a_claim_that_has_left_cannot_be_revoked(queue: Queue) -> None:
    waiting = waiter()
    enter(queue, waiting)
    queue.hear([gone(11)])
    queue.leave(waiting.claim.id)
    assert queue.hear([Deletion(waiting.own, 12)]) == []
    assert not queue


def test_a_claim_that_has_left_is_not_notified(queue: Queue) -> None:
    waiting = waiter()
    enter(queue, waiting)
    queue.leave(waiting.claim.id)
    assert queue.hear([gone(11)]) == []


def test_events_are_dropped_only_while_no_claim_waits(queue: Queue) -> None:
    enter(queue, waiting := waiter())
    queue.hear([gone(11, "another")])
    assert queue.unheeded == 0
    queue.leave(waiting.claim.id)
    queue.hear([gone(12, "another")])
    assert queue.unheeded == 1


def test_a_permit_waits_for_excluding_keys_and_for_a_free_permit(
    queue: Queue,
) -> None:
    like = ["permit/2/one", "permit/2/two", "permit/2/three"]
    permit = waiter("permit", "permit/3/other", like=like, permits=2)
    assert permit.position.to_go == 3
    enter(queue, permit)
    assert queue.hear([gone(11, like[0]), gone(12, like[1])]) == []
    assert told(queue.hear([gone(13, "permit/3/other")])) == [(permit, ADMITTED)]
    assert permit.position.to_go == 0
