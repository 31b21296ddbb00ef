"""Each notice of the backend changes the state of a lease once, before the kernel makes any call that may block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multilock import BackendUnavailable, Client, LeaseState, LossReason
from multilock.kernel.notices import UngrantedClaim
from multilock.model import Claim, Granted
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import Answer, Call, Losses, Scripted, late, silence, state_of


def claim_of(backend: Scripted, number: int = 0) -> str:
    return backend.called("attempt")[number].claims[0].id


def test_a_notice_that_the_lock_is_gone_is_a_loss_at_once(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    runtime.advance(3)
    backend.notices.gone(claim_of(backend), LossReason.TAKEN, "an operator took it")
    assert state_of(lease) is LeaseState.LOST
    assert losses.reasons == [LossReason.TAKEN]
    assert losses.times == [1003.0]
    assert losses.calls[0].confirmed
    assert losses.calls[0].time_left == 0.0
    assert losses.calls[0].message == "an operator took it"


@pytest.mark.parametrize("report", ["claim", "session"])
def test_a_report_after_the_deadline_does_not_change_the_reason_paused(
    client: Client, backend: Scripted, runtime: HandRuntime, report: str
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    runtime.jump(1000)  # the process did not run, and now reads the server's report first
    if report == "claim":
        backend.notices.gone(claim_of(backend), LossReason.TAKEN, "its key has another owner")
    else:
        backend.notices.group_gone(inner(lease).granted.group, "the session ended")
    runtime.advance(1)
    assert losses.reasons == [LossReason.PAUSED]
    assert not losses.calls[0].confirmed


@pytest.mark.oracle
def test_the_callback_starts_before_any_clean_up(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    order: list[str] = []
    client.lock("n", on_lost=lambda loss: order.append("callback")).acquire()

    def released(backend: Scripted, call: Call) -> Any:
        order.append("release")
        return call.execute()

    backend.always("release", released)
    backend.notices.gone(claim_of(backend), LossReason.TAKEN, "taken")
    runtime.advance(1)
    assert order == ["callback", "release"]


def test_a_lease_is_lost_once_even_if_several_reports_arrive(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    for _ in range(3):
        backend.notices.gone(claim_of(backend), LossReason.TAKEN, "taken")
    backend.notices.group_gone("server", "gone")
    runtime.jump(1000)
    client._kernel.losses.expire(inner(lease))  # the watchdog calls this after an earlier check of the lease
    assert not lease.is_held()
    assert lease.release() is False
    runtime.advance(10)
    assert losses.reasons == [LossReason.TAKEN]


def test_notices_about_other_claims_are_ignored(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    backend.notices.gone("an id of long ago", LossReason.TAKEN, "taken")
    backend.notices.group_gone("another server", "gone")
    backend.notices.changed("n")
    backend.notices.changed(None)
    assert lease.is_held()


def test_a_notice_during_the_release_is_not_a_loss(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()

    def tells_of_our_own_delete(backend: Scripted, call: Call) -> Any:
        answer = call.execute()
        backend.notices.gone(call.claims[0].id, LossReason.TAKEN, "deleted")
        return answer

    backend.script("release", tells_of_our_own_delete)
    assert lease.release() is True
    runtime.advance(100)
    assert losses.calls == []


def test_a_loss_that_release_discovers_is_a_loss(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    backend.holders["n"] = "somebody else"
    assert lease.release() is False
    assert losses.reasons == [LossReason.TAKEN]
    assert state_of(lease) is LeaseState.LOST
    assert len(backend.called("release")) == 1, "there is nothing more to release"
    assert backend.holders == {"n": "somebody else"}


def test_a_release_without_a_reply_continues_in_the_background(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    backend.script("release", silence(), silence())
    runtime.hold_jobs()
    assert lease.release() is True
    assert runtime.now() == 1005.0, "one request timeout at most"
    assert state_of(lease) is LeaseState.RELEASED
    runtime.release_jobs()
    runtime.advance(10)
    assert backend.holders == {}
    assert all(call.details["unsure"] for call in backend.called("release")[1:])
    assert losses.calls == []


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("no route")])
def test_release_never_raises(client: Client, backend: Scripted, runtime: HandRuntime, error: Exception) -> None:
    def fail(backend: Scripted, call: Call) -> Any:
        raise error

    lease = client.lock("n").acquire()
    backend.script("release", fail)
    assert lease.release() is True
    runtime.advance(10)
    assert backend.holders == {}


def test_a_lease_that_was_held_when_its_release_began_counts_as_released(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", ttl=1.0, on_lost=losses).acquire()
    backend.script("release", late(5.0))
    assert lease.release() is True
    runtime.advance(10)
    assert losses.calls == []


def test_after_a_reconnect_a_notice_wakes_every_waiter(client: Client, backend: Scripted) -> None:
    rung: list[str] = []

    class Bell:
        def __init__(self, name: str) -> None:
            self.name = name

        def ring(self) -> None:
            rung.append(self.name)

    waiting = client._kernel.monitor.waiting
    claim = Claim("n", "lock", "id", "id@who", 30.0, renew=True, fair=False, identity="me")
    waiting["a"], waiting["b"] = UngrantedClaim(claim, Bell("a")), UngrantedClaim(claim, Bell("b"))
    backend.notices.wake("b")
    backend.notices.wake(None)
    waiting.clear()
    assert rung == ["b", "a", "b"]


# ---- A notice while the grant is on its way. No lease is made, because the holder would not be notified again


def told_meanwhile(tell: Callable[[Scripted, Granted, str], None]) -> Answer:
    """Send a notice, and then give a correct reply."""

    def answer(backend: Scripted, call: Call) -> Any:
        granted = call.execute()
        tell(backend, granted, call.claims[0].id)
        return granted

    return answer


def session_ends(backend: Scripted, granted: Granted, claim_id: str) -> None:
    backend._session_proof.clear()
    backend.holders.clear()
    backend.notices.group_gone(granted.group, "the server ended it")


def name_is_taken_back(backend: Scripted, granted: Granted, claim_id: str) -> None:
    backend.holders.clear()
    backend.notices.gone(claim_id, LossReason.TAKEN, "an operator took it")


@pytest.mark.parametrize("tell", [session_ends, name_is_taken_back])
def test_a_grant_revoked_on_its_way_makes_no_lease(
    make: Callable[..., Client], runtime: HandRuntime, tell: Callable[[Scripted, Granted, str], None]
) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend)
    backend.script("attempt", told_meanwhile(tell))
    lease = client.lock("n").acquire(timeout=10)
    first, second = (call.claims[0].id for call in backend.called("attempt"))
    assert first != second
    assert lease.owner.startswith(second)
    runtime.advance(5)
    assert lease.is_held()
    assert first in backend.cancelled


@pytest.mark.parametrize("tell", [session_ends, name_is_taken_back])
def test_a_single_try_whose_grant_was_revoked_raises_backend_unavailable(
    make: Callable[..., Client], runtime: HandRuntime, tell: Callable[[Scripted, Granted, str], None]
) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend)
    backend.script("attempt", told_meanwhile(tell))
    with pytest.raises(BackendUnavailable, match="over before the reply"):
        client.lock("n").try_acquire()
    assert client.lock("n").try_acquire() is not None


def test_the_end_of_one_session_revokes_no_grant_of_another(make: Callable[..., Client], runtime: HandRuntime) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend)
    client.lock("first", ttl=5.0).acquire()
    backend.script(
        "attempt", told_meanwhile(lambda backend, granted, _: backend.notices.group_gone(("session", 5.0), "gone"))
    )
    assert client.lock("n").try_acquire() is not None


def test_every_claim_of_a_client_begins_with_its_identity(client: Client, backend: Scripted) -> None:
    client.lock("n").acquire()
    assert claim_of(backend).startswith(backend.notices.client + ".")
    assert len(backend.notices.client) == 16
