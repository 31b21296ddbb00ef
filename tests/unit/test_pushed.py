"""Tests of a pushed grant (`Notices.granted`): when it becomes a lease, and for how long the lease is valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multilock import Client, DistributedLock, LeaseState, LockTimeout, LossReason
from multilock.model import Claim, Granted
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from multilock.timing import ARM_AFTER
from tests.unit.kit import Answer, Call, Losses, Scripted, executed_but_unanswered, silence, state_of

TOKEN = 77
VALID_FOR = 6.0


def hand_over(backend: Scripted, claim: Claim, sent_at: float, *, valid_for: float = VALID_FOR) -> None:
    """Let the server give the name to the waiter, and push the grant. The validity of the grant counts from
    ``sent_at``, the time at which the request was sent."""
    backend.holders[claim.name] = claim.id
    backend.queues[claim.name].remove(claim.id)
    backend.notices.granted(
        claim.id, Granted(TOKEN, valid_for, sent_at, valid_for, valid_for / 3, "server", short=True)
    )


def then_handed_over(client: Client, after: float, sent_at: float | None = None) -> Answer:
    """Reply to a request that joins the queue. ``after`` seconds later the server hands the name over and pushes the
    grant."""

    def answer(backend: Scripted, call: Call) -> Any:
        kernel, [claim] = client._kernel, call.claims
        sent = call.at if sent_at is None else sent_at
        kernel.timers.at(kernel.now() + after, lambda: hand_over(backend, claim, sent))
        return call.execute()

    return answer


def honest(backend: Scripted, call: Call) -> Any:
    return call.execute()


@pytest.fixture
def lock(client: Client, backend: Scripted) -> Any:
    """A lock whose name another client holds. The watchdog runs."""
    client.lock("other").acquire()
    backend.calls.clear()
    backend.holders["n"] = "somebody"
    backend.heartbeat = 1.0
    return client.lock("n")


def test_the_validity_of_a_pushed_grant_counts_from_its_request(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("attempt", then_handed_over(client, 0.5))
    lease = lock.acquire()
    assert runtime.now() == pytest.approx(1000.5)
    assert len(backend.called("attempt")) == 1
    assert lease.token == TOKEN
    assert lease.remaining() == pytest.approx(1000 + VALID_FOR * (1 - 0.01 - 0.1) - 0.002 - 1000.5)
    assert lease.ttl == 30.0


def test_a_pushed_grant_is_renewed_a_moment_later_and_then_has_its_whole_ttl(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("attempt", then_handed_over(client, 0.5))
    lease = lock.acquire()
    runtime.advance(ARM_AFTER - 0.01)
    assert backend.called("renew") == []
    runtime.advance(0.02)
    assert len(backend.called("renew")) == 1
    assert 26 < lease.remaining() < 27
    runtime.advance(60)
    assert lease.state is LeaseState.HELD


def test_a_pushed_grant_expires_if_no_renewal_gets_a_reply(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    backend.script("attempt", then_handed_over(client, 0.5))
    lease = lock.acquire()
    lease.on_lost(losses)
    runtime.hold_jobs()
    runtime.advance(4.7)
    assert state_of(lease) is LeaseState.AT_RISK
    runtime.advance(0.2)
    assert state_of(lease) is LeaseState.LOST
    assert losses.reasons == [LossReason.EXPIRED]
    assert losses.times == [pytest.approx(1000 + VALID_FOR * 0.89 - 0.002)]


@pytest.mark.parametrize("age", [3.1, 600.0, -0.1], ids=["half over", "minutes late", "from the future"])
def test_a_pushed_grant_past_half_of_its_time_is_only_a_hint(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime, age: float
) -> None:
    backend.script("attempt", then_handed_over(client, 0.5, sent_at=1000.5 - age))
    lease = lock.acquire()
    assert len(backend.called("attempt")) == 2
    assert lease.token != TOKEN
    assert lease.remaining() > 26


@pytest.mark.parametrize("granted", [40.0, 39.0])
def test_a_pushed_grant_that_exceeds_every_ttl_is_only_a_hint(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime, granted: float
) -> None:
    """A server may grant its sessions more time than requested, and a forged push may contain any time."""
    backend.notices.group("server", granted, granted / 3)

    def answer(backend: Scripted, call: Call) -> Any:
        claim, sent = call.claims[0], call.at
        client._kernel.timers.at(sent + 0.5, lambda: hand_over(backend, claim, sent, valid_for=40.0))
        return call.execute()

    backend.script("attempt", answer)
    lease = lock.acquire()
    believed = granted == 40.0
    assert (lease.token == TOKEN) is believed
    assert len(backend.called("attempt")) == (1 if believed else 2)


def test_after_a_pushed_grant_a_lease_without_renewal_requests_its_ttl(
    client: Client, lock: DistributedLock, backend: Scripted
) -> None:
    backend.script("attempt", then_handed_over(client, 0.5))
    lease = client.lock("n", renew=False).acquire()
    assert len(backend.called("attempt")) == 2
    assert lease.remaining() > 26


def test_a_pushed_grant_waits_for_the_pending_reply(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime
) -> None:
    def handed_over_meanwhile(backend: Scripted, call: Call) -> Any:
        hand_over(backend, call.claims[0], 1000.0)
        return call.execute()

    backend.script("attempt", honest, handed_over_meanwhile)
    lease = lock.acquire()
    assert len(backend.called("attempt")) == 2
    assert lease.token != TOKEN
    assert inner(lease).granted.sent_at > 1000.0


def test_a_pushed_grant_counts_after_a_reply_that_was_older(
    client: Client, lock: DistributedLock, backend: Scripted
) -> None:
    def refused_and_then_handed_over(backend: Scripted, call: Call) -> Any:
        answer = call.execute()
        hand_over(backend, call.claims[0], call.at)  # the push overtakes the reply
        return answer

    backend.script("attempt", refused_and_then_handed_over)
    assert lock.acquire().token == TOKEN
    assert len(backend.called("attempt")) == 1


def test_a_pushed_grant_is_void_once_a_later_request_was_refused(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime
) -> None:
    """After the handover somebody deleted the name, and another client got it. The refusal overtook the push."""

    def refused_before_the_push_came(backend: Scripted, call: Call) -> Any:
        kernel, [claim], answer = client._kernel, call.claims, call.execute()

        def push() -> None:
            hand_over(backend, claim, 1000.0)
            backend.holders[claim.name] = "another"

        kernel.timers.at(call.at + 0.2, push)
        return answer

    backend.script("attempt", honest, refused_before_the_push_came)
    with pytest.raises(LockTimeout):
        lock.acquire(1.5)
    assert len(backend.called("attempt")) == 3


@pytest.mark.parametrize("everybody", [False, True], ids=["to it", "to everybody, after a reconnect"])
def test_a_pushed_grant_that_a_hint_follows_is_checked_by_a_request(
    client: Client, lock: DistributedLock, backend: Scripted, everybody: bool
) -> None:
    """The name may have been released by force since the push, and another client may hold it by now."""

    def handed_over_and_taken_back(backend: Scripted, call: Call) -> Any:
        answer, [claim] = call.execute(), call.claims
        hand_over(backend, claim, call.at)
        backend.holders[claim.name] = "another"
        backend.notices.wake(None if everybody else claim.id)
        return answer

    backend.script("attempt", handed_over_and_taken_back)
    with pytest.raises(LockTimeout):
        lock.acquire(0.5)
    assert len(backend.called("attempt")) == 2


@pytest.mark.parametrize("unanswered", [executed_but_unanswered, silence()], ids=["executed", "on its way"])
def test_after_a_request_without_a_reply_the_release_is_final(
    make: Callable[..., Client], backend: Scripted, unanswered: Answer
) -> None:
    """A request without a reply may still be executed after the release, and would then leave an orphaned lock."""

    def handed_over_and_silent(backend: Scripted, call: Call) -> Any:
        hand_over(backend, call.claims[0], 1000.0)
        return unanswered(backend, call)

    backend.script("attempt", honest, handed_over_and_silent)
    backend.holders["n"] = "somebody"
    backend.heartbeat = 0.1
    lease = make(backend, request_timeout=0.5).lock("n").acquire()
    assert lease.token == TOKEN
    assert lease.release()
    assert [call.details["unsure"] for call in backend.called("release")] == [True]


def test_a_push_for_a_cancelled_claim_is_ignored(
    client: Client, lock: DistributedLock, backend: Scripted, runtime: HandRuntime
) -> None:
    with pytest.raises(LockTimeout):
        lock.acquire(2.5)
    [claim] = {call.claims[0] for call in backend.called("attempt")}
    granted = Granted(TOKEN, VALID_FOR, runtime.now(), VALID_FOR, 2.0, "server", short=True)
    backend.notices.granted(claim.id, granted)

    def told_of_the_former(backend: Scripted, call: Call) -> Any:
        backend.notices.granted(claim.id, granted)
        return call.execute()

    backend.script("attempt", told_of_the_former)
    with pytest.raises(LockTimeout):
        lock.acquire(2.5)


def test_a_waiter_that_is_granted_the_lock_after_close_does_not_hold_it(
    client: Client, lock: DistributedLock, backend: Scripted
) -> None:
    def closed_and_handed_over(backend: Scripted, call: Call) -> Any:
        answer = call.execute()
        client._kernel.closed = True
        hand_over(backend, call.claims[0], call.at)
        return answer

    backend.script("attempt", closed_and_handed_over)
    with pytest.raises(Exception, match="closed"):
        lock.acquire()
    client._kernel.closed = False
    assert "n" not in client._kernel.held_names()
