"""Waiters that are far behind in the queue. Some of their requests make the server read the whole queue, and others
only compare some keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multilock import BackendUnavailable
from multilock.backend import Claim
from multilock_etcd.notices import EtcdWatcher
from multilock_etcd.transactions import EtcdTransactions
from multilock_etcd.transport import calls
from tests.backends.etcd.kit import WITHIN, Mishap, Ours

KINDS = pytest.mark.parametrize("kind", [Ours.claim, Ours.reader, Ours.writer, lambda ours: ours.permit(2)])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the requests that made the server read a whole queue: ``join`` or ``look`` for each."""
    execute, read = EtcdTransactions.execute, []

    def recorded(self: EtcdTransactions, compare: Any, success: Any, failure: Any, deadline: float) -> Any:
        said = execute(self, compare, success, failure, deadline)
        done = success if said.succeeded else failure
        if any(part["request_range"].get("range_end") for part in done if "request_range" in part):
            read.append("join" if any("request_put" in part for part in done) else "look")
        return said

    monkeypatch.setattr(EtcdTransactions, "execute", recorded)
    return read


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets `NEAR`. A waiter with more keys ahead of it than `NEAR` watches only one key."""
    return lambda keys: monkeypatch.setattr("multilock_etcd.transactions.NEAR", keys)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose every event that concerns a waiter that is far behind."""
    monkeypatch.setattr(EtcdWatcher, "wait", lambda *_: None)


def delete(ours: Ours, claim: Claim) -> None:
    """Delete the key of this claim, as an operator would."""
    recipe = ours.backend._recipe
    assert recipe._transactions.delete(recipe._keys.own(claim), WITHIN)


def test_a_crowd_of_one_client_seldom_reads_its_queue(
    us: Ours, them: Ours, reads: list[str], near: Callable[[int], None]
) -> None:
    near(4)
    them.take(them.claim())
    crowd = [us.wait(us.claim()) for _ in range(40)]
    assert reads == ["join"] * 5
    for _ in range(3):
        reads.clear()
        for claim in crowd:
            us.wait(claim)
        assert reads == ["look"] * 4  # only these waiters read the queue


@KINDS
def test_a_waiter_far_behind_does_not_read_the_queue_again(
    us: Ours, them: Ours, reads: list[str], near: Callable[[int], None], kind: Callable[[Ours], Claim]
) -> None:
    near(1)
    for claim in (them.claim(), them.claim(), them.claim(), them.permit(2), them.permit(2), them.permit(2)):
        them.attempt(claim, join=True)
    far = us.wait(kind(us))
    reads.clear()
    us.wait(far)
    assert reads == []


def test_a_permit_behind_many_permits_does_not_read_the_queue_again(
    us: Ours, them: Ours, reads: list[str], near: Callable[[int], None]
) -> None:
    near(1)
    holding = [them.permit(2), them.permit(2)]
    for claim in holding:
        them.take(claim)
    ahead = [them.wait(them.permit(2)) for _ in range(2)]
    far = us.wait(us.permit(2))
    reads.clear()
    us.wait(far)
    assert reads == []
    for claim in (*holding, ahead[0]):
        them.release(claim)
    us.take(far, join=True)


@KINDS
@pytest.mark.usefixtures("deaf")
def test_a_waiter_far_behind_enters_although_each_event_is_lost(
    us: Ours, them: Ours, near: Callable[[int], None], kind: Callable[[Ours], Claim]
) -> None:
    near(0)
    ahead = [them.claim(), them.claim()]
    them.take(ahead[0])
    them.wait(ahead[1])
    far = us.wait(kind(us))
    them.release(ahead[1])
    us.wait(far)
    them.release(ahead[0])
    us.take(far, join=True)


@KINDS
@pytest.mark.usefixtures("deaf")
def test_a_waiter_far_behind_finds_its_own_key_gone_and_joins_again(
    us: Ours, them: Ours, near: Callable[[int], None], kind: Callable[[Ours], Claim]
) -> None:
    near(0)
    holding = them.claim()
    them.take(holding)
    far = us.wait(kind(us))
    delete(us, far)
    us.wait(far)
    them.release(holding)
    assert us.take(far, join=True).token


@pytest.mark.usefixtures("deaf")
def test_a_key_that_is_put_again_is_no_longer_ahead(us: Ours, them: Ours, near: Callable[[int], None]) -> None:
    near(0)
    holding = them.claim()
    them.take(holding)
    first, second = us.wait(us.claim()), us.wait(us.claim())
    delete(us, first)
    us.wait(first)
    them.release(holding)
    us.take(second, join=True)


@KINDS
def test_a_waiter_joins_although_the_key_it_would_wait_for_is_gone(
    us: Ours, them: Ours, near: Callable[[int], None], kind: Callable[[Ours], Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    near(0)
    holding = them.claim()
    them.take(holding)
    with monkeypatch.context() as patched:
        patched.setattr(EtcdWatcher, "wait", lambda *_: None)
        gone = us.wait(us.claim())
        delete(us, gone)
    waiting = us.wait(kind(us))
    them.release(holding)
    us.hears_a_wake_for(waiting)
    us.take(waiting, join=True)


def test_a_join_whose_reply_is_lost_does_not_wait_for_a_later_key(
    us: Ours, them: Ours, near: Callable[[int], None]
) -> None:
    near(0)
    holding = them.claim()
    them.take(holding)
    first = us.claim()
    us.wait(first)
    us.wait(us.claim())
    waiter = us.backend._recipe._waiters.enter(first)
    assert waiter is not None
    waiter.revision = None  # the state of a claim before the reply to its first request
    us.wait(first)
    them.release(holding)
    us.hears_a_wake_for(first)
    us.take(first, join=True)


def test_a_claim_that_has_left_keeps_no_place_for_later_claims(
    us: Ours, them: Ours, near: Callable[[int], None]
) -> None:
    near(0)
    them.take(them.claim())
    for claim in [us.wait(us.claim()) for _ in range(3)]:
        us.release(claim)
    assert us.backend._recipe._waiters._queued == {}


@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("asks_again", [True, False])
def test_a_comparison_without_a_reply_is_repeated_or_cancelled(
    us: Ours,
    them: Ours,
    near: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    reads: list[str],
    executed: bool,
    asks_again: bool,
) -> None:
    """The request is a join or a later attempt. If the server executes it after the cancel, it puts no key."""
    near(0)
    holding, behind, claim = them.claim(), us.claim(), us.claim()
    them.take(holding)
    us.wait(behind)
    if asks_again:
        us.wait(claim)
    reads.clear()
    with monkeypatch.context() as patched:
        late = Mishap(patched, calls.TXN, claim.id.encode(), executed=executed)
        with pytest.raises(BackendUnavailable):
            us.attempt(claim, join=True)
    assert reads == []
    us.wait(claim)
    them.release(holding)
    us.release(behind)
    us.take(claim, join=True)
    assert us.release(claim, unsure=True)
    if not executed and not asks_again:
        assert not late.send().succeeded
    them.take(them.claim())


def test_a_join_behind_another_claim_that_is_executed_after_its_cancel_leaves_nothing(
    us: Ours, them: Ours, near: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    near(0)
    holding, claim = them.claim(), us.claim()
    them.take(holding)
    us.wait(us.claim())
    with monkeypatch.context() as patched:
        late = Mishap(patched, calls.TXN, claim.id.encode(), executed=False)
        with pytest.raises(BackendUnavailable):
            us.attempt(claim, join=True)
    assert not us.release(claim, unsure=True)
    assert not late.send().succeeded
