"""When the watchdog renews leases and sessions, and when it reports them lost, at exact times."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from multilock import (
    AtRisk,
    BackendRejected,
    Client,
    Event,
    Lease,
    LeaseState,
    LockLost,
    LossReason,
    Renewed,
    RenewFailed,
    connect,
)
from multilock.errors import BackendUnavailable
from multilock.kernel.runtime import Threads, now
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from multilock.timing import ARM_AFTER
from tests.unit.kit import (
    Call,
    Losses,
    Scripted,
    client_on,
    eventually,
    executed_but_unanswered,
    late,
    our_threads,
    refused,
    silence,
    state_of,
)

TTL = 30.0
LOST_AFTER = TTL - 0.302 - 3.0


def test_a_lease_is_renewed_every_third_of_its_ttl_with_little_jitter(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    client.lock("n").acquire()
    runtime.advance(3000)
    times = [1000.0, *(call.at for call in backend.called("renew"))]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert min(pauses) >= 8.0
    assert max(pauses) <= 11.0
    assert 9.0 <= sum(pauses) / len(pauses) <= 10.5


def test_a_held_lease_lives_as_long_as_it_is_renewed(client: Client, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    for _ in range(1000):
        runtime.advance(7)
        assert lease.is_held()
    assert losses.calls == []
    assert lease.release()


def test_a_held_lease_needs_no_reference(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    client.lock("n").acquire()
    runtime.advance(500)
    assert "n" in backend.holders
    assert len(backend.called("renew")) > 40


def test_a_released_lease_is_no_longer_renewed(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    client.lock("n").acquire().release()
    runtime.advance(500)
    assert backend.called("renew") == []


def test_leases_due_together_are_renewed_in_one_request(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    for number in range(500):
        client.lock(f"n{number}").acquire()
    runtime.advance(1000)
    requests = backend.called("renew")
    renewed = sum(len(call.claims) for call in requests)
    assert renewed >= 500 * 90
    assert len(requests) <= 1100, "their times fall on a grid of ttl/30"


@pytest.mark.parametrize("request_timeout", [1.0, 5.0, 8.0, 30.0])
def test_every_request_ends_before_the_deadline_of_its_leases(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime, request_timeout: float
) -> None:
    lease = make(backend, request_timeout=request_timeout).lock("n").acquire()
    lost_at = runtime.now() + LOST_AFTER
    backend.always("renew", silence())
    runtime.advance(40)
    assert not lease.is_held()
    tries = backend.called("renew")
    assert all(call.at + call.within <= lost_at + 1e-9 for call in tries)
    assert max(call.within for call in tries) <= request_timeout


def test_an_unanswered_renewal_is_tried_again_soon(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    backend.script("renew", silence(), executed_but_unanswered)
    runtime.advance(100)
    assert lease.is_held()
    assert losses.calls == []
    first, second = backend.called("renew")[:2]
    assert second.at - (first.at + first.within) <= 1.5


def unanswered_for(name: str) -> Callable[[Scripted, Call], Any]:
    """Return a reply that renews all locks of a request except ``name``, for which no majority replies."""

    def answer(backend: Scripted, call: Call) -> Any:
        silence = BackendUnavailable(f"no majority for {name!r}", unknown=False)
        answers = call.execute()
        return [silence if claim.name == name else one for claim, one in zip(call.claims, answers, strict=True)]

    return answer


def test_a_lease_without_a_reply_is_retried_soon_while_the_others_are_renewed(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    heard: list[Event] = []
    client.events.subscribe(heard.append)
    doubtful, renewed = client.lock("doubtful").acquire(), client.lock("renewed").acquire()
    backend.always("renew", unanswered_for("doubtful"))
    runtime.advance(12)
    assert state_of(doubtful) is LeaseState.AT_RISK
    assert doubtful.remaining() == pytest.approx(LOST_AFTER - 12), "it is no proof"
    assert state_of(renewed) is LeaseState.HELD
    assert renewed.remaining() > LOST_AFTER - 4
    eventually(lambda: {type(event) for event in heard} >= {AtRisk, RenewFailed, Renewed})
    assert {event.name for event in heard if isinstance(event, (AtRisk, RenewFailed))} == {"doubtful"}
    tries = [call for call in backend.called("renew") if inner(doubtful).claim in call.claims]
    assert 2 <= len(tries) <= 10
    backend.always("renew", None)
    runtime.advance(2)
    assert state_of(doubtful) is LeaseState.HELD


def test_one_lease_without_a_reply_does_not_hurry_the_session(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    session_client.lock("doubtful", on_lost=losses).acquire()
    renewed = session_client.lock("renewed").acquire()
    session_backend.always("renew", unanswered_for("doubtful"))
    runtime.advance(40)
    assert losses.times == pytest.approx([1000 + LOST_AFTER])
    assert losses.reasons == [LossReason.EXPIRED]
    assert renewed.is_held()
    assert len(session_backend.called("renew")) <= 4


def test_a_renewal_by_hand_without_a_reply_raises_and_proves_nothing(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    runtime.advance(1)
    backend.script("renew", unanswered_for("n"))
    with pytest.raises(BackendUnavailable, match="no majority for 'n'") as caught:
        lease.renew()
    assert (caught.value.name, caught.value.backend) == ("n", "scripted")
    assert state_of(lease) is LeaseState.AT_RISK
    assert lease.remaining() == pytest.approx(LOST_AFTER - 1)


def test_a_reply_just_in_time_saves_the_lease(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    backend.always("renew", silence(0.5))
    runtime.advance(LOST_AFTER - 2)
    assert state_of(lease) is LeaseState.AT_RISK
    backend.always("renew", None)
    runtime.advance(20)
    assert state_of(lease) is LeaseState.HELD


def test_a_late_acknowledgement_does_not_revive_the_lease(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    backend.always("renew", silence(0.2))
    runtime.advance(LOST_AFTER - 1)
    backend.always("renew", late(4.0))  # the server executed the renewal, but the reply is slow
    runtime.advance(3.9)
    assert losses.reasons == [LossReason.EXPIRED]
    assert losses.times == pytest.approx([1000 + LOST_AFTER])
    backend.always("renew", None)
    runtime.advance(10)
    assert state_of(lease) is LeaseState.LOST
    assert not lease.is_held()
    assert len(losses.calls) == 1


def test_a_renewal_by_hand_with_a_late_reply_is_a_loss(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    backend.always("renew", silence(0.0))
    runtime.advance(LOST_AFTER - 1)
    backend.script("renew", late(1.5))
    with pytest.raises(LockLost):
        lease.renew()
    assert losses.reasons == [LossReason.EXPIRED]
    assert losses.times == pytest.approx([1000 + LOST_AFTER])


def test_a_renewal_by_hand_moves_the_deadline(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    runtime.advance(5)
    lease.renew()
    assert lease.remaining() == pytest.approx(LOST_AFTER)


def test_a_renewal_by_hand_of_a_lock_that_was_taken_raises_lock_lost(client: Client, backend: Scripted) -> None:
    lease = client.lock("n").acquire()
    backend.holders["n"] = "an operator"
    with pytest.raises(LockLost) as caught:
        lease.renew()
    assert caught.value.loss is not None
    assert caught.value.loss.reason is LossReason.TAKEN
    assert caught.value.loss.confirmed


def test_a_renewal_by_hand_without_a_reply_leaves_the_lease_unchanged(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    backend.script("renew", silence())
    with pytest.raises(BackendUnavailable) as caught:
        lease.renew()
    assert caught.value.name == "n"
    assert lease.is_held()
    assert state_of(lease) is LeaseState.AT_RISK
    runtime.advance(2)
    assert state_of(lease) is LeaseState.HELD


@pytest.mark.oracle
def test_the_lost_callback_starts_at_the_deadline_while_the_renewal_hangs(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    client.lock("n", on_lost=losses).acquire()
    runtime.hold_jobs()  # from now on no request ends
    runtime.advance(100)
    assert losses.reasons == [LossReason.EXPIRED]
    assert losses.times == pytest.approx([1000 + LOST_AFTER])


def test_a_denied_renewal_loses_the_lease_at_once(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    client.lock("n", on_lost=losses).acquire()
    del backend.holders["n"]
    runtime.advance(12)
    assert losses.reasons == [LossReason.TAKEN]
    assert losses.calls[0].confirmed
    assert losses.calls[0].time_left == 0.0
    assert losses.times[0] == backend.called("renew")[0].at


def test_a_lost_lock_is_never_acquired_again_without_the_user(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    del backend.holders["n"]
    runtime.advance(500)
    assert len(backend.called("attempt")) == 1
    assert not lease.is_held()
    assert backend.holders == {}


@pytest.mark.parametrize("error", [BackendRejected("NOPERM"), ValueError("a bug of the backend")])
def test_a_refused_renewal_is_repeated_until_the_deadline(
    client: Client, backend: Scripted, runtime: HandRuntime, error: Exception
) -> None:
    losses = Losses(runtime)
    client.lock("n", on_lost=losses).acquire()
    backend.always("renew", refused(error))
    runtime.advance(100)
    assert losses.reasons == [LossReason.EXPIRED]
    assert losses.times == pytest.approx([1000 + LOST_AFTER])
    assert len(backend.called("renew")) > 5


def test_after_a_silent_loss_the_name_is_released_when_its_validity_is_over(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    client.lock("n", on_lost=losses).acquire()
    backend.always("renew", silence())
    runtime.advance(100)
    [release] = backend.called("release")
    assert release.at == pytest.approx(losses.calls[0].valid_until)
    assert losses.times[0] < release.at
    assert release.details["unsure"] is True, "renewals without an answer may still be executed"


def test_two_locks_with_different_ttls_end_at_their_own_times(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    short, long = Losses(runtime), Losses(runtime)
    client.lock("short", ttl=2, on_lost=short).acquire()
    client.lock("long", ttl=30, on_lost=long).acquire()
    backend.always("renew", silence())
    runtime.advance(60)
    assert short.times == pytest.approx([1000 + 2 - 0.022 - 0.2])
    assert long.times == pytest.approx([1000 + LOST_AFTER])


def test_a_lease_about_to_end_does_not_shorten_the_time_of_the_others(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    client.lock("old", ttl=30).acquire()
    backend.always("renew", silence())
    runtime.advance(26)
    backend.always("renew", None)
    client.lock("new", ttl=30).acquire()
    runtime.hold_jobs()
    runtime.advance(14)
    runtime.release_jobs()
    [renewal] = [call for call in backend.called("renew") if {c.name for c in call.claims} == {"new"}]
    assert renewal.within == 5.0


def test_a_lease_held_for_a_quarter_second_is_watched(make: Callable[..., Client], runtime: HandRuntime) -> None:
    backend = Scripted(runtime, push_loss=True)
    client = make(backend)
    lease = client.lock("n").acquire()
    client.lock("short").acquire().release()
    runtime.advance(0.2)
    assert backend.called("watch") == []
    runtime.advance(100)
    [watch] = backend.called("watch")
    assert [claim.name for claim in watch.claims] == ["n"]
    assert watch.at == 1000.25
    assert lease.is_held()


def test_a_watch_that_could_not_be_set_is_tried_again(make: Callable[..., Client], runtime: HandRuntime) -> None:
    backend = Scripted(runtime, push_loss=True)
    backend.script("watch", silence(), silence())
    make(backend).lock("n").acquire()
    runtime.advance(20)
    assert len(backend.called("watch")) == 3


def test_a_short_lease_does_not_shorten_the_watch_of_the_others(
    make: Callable[..., Client], runtime: HandRuntime
) -> None:
    backend = Scripted(runtime, push_loss=True)
    client = make(backend)
    client.lock("short", ttl=1.0).acquire()
    client.lock("long", ttl=30.0).acquire()
    runtime.advance(0.5)
    [watch] = backend.called("watch")
    assert len(watch.claims) == 2
    assert watch.within == 5.0


def test_a_backend_without_notices_is_not_asked_to_watch(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    client.lock("n").acquire()
    runtime.advance(100)
    assert backend.called("watch") == []


def test_the_heap_of_deadlines_does_not_grow_with_ended_locks(client: Client, runtime: HandRuntime) -> None:
    lock = client.lock("n")
    kept = client.lock("kept").acquire()
    for _ in range(5000):
        lock.acquire().release()
    assert len(client._kernel.watchdog._heap) < 200
    assert kept.is_held()


def test_ended_locks_do_not_wake_the_watchdog_one_by_one(
    client: Client, runtime: HandRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = client._kernel.watchdog
    steps: list[float] = []

    def step(now: float, step: Callable[[float], float] = watchdog.step) -> float:
        steps.append(now)
        return step(now)

    monkeypatch.setattr(watchdog, "step", step)
    for _ in range(50):
        client.lock("n").acquire().release()
        runtime.advance(0.01)
    runtime.advance(60)
    assert len(steps) < 10


@pytest.mark.parametrize("beside", [False, True])
def test_a_lock_that_comes_and_goes_does_not_wake_the_watchdog_each_time(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wake-up would switch threads in the middle of the next request.

    The test uses real threads, because the ticker of `HandRuntime` steps only at planned times.
    """
    with connect("memory://come-and-go") as client:
        kept = client.lock("kept").acquire() if beside else None
        lock = client.lock("n")
        lock.acquire().release()
        time.sleep(ARM_AFTER * 1.5)  # the watchdog next checks the kept lease after some seconds
        ticker: Any = client._kernel.ticker
        steps: list[float] = []

        def step(step: Callable[[], float] = ticker._step) -> float:
            steps.append(now())
            return step()

        monkeypatch.setattr(ticker, "_step", step)
        began = now()
        for _ in range(300):
            lock.acquire().release()
            time.sleep(0.0005)  # gives a woken thread time to run
        assert len(steps) < 20 + 2 * (now() - began) / ARM_AFTER
        assert kept is None or kept.is_held()


def test_the_heap_does_not_grow_with_renewals_by_hand(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    for _ in range(5000):
        lease.renew()
    assert len(client._kernel.watchdog._heap) < 200
    runtime.advance(1000)
    assert lease.is_held()


def test_an_idle_client_has_no_planned_task(client: Client, runtime: HandRuntime) -> None:
    with client.lock("n").acquire():
        runtime.advance(100)
    runtime.advance(100)
    assert client._kernel.watchdog._heap == []
    assert client._kernel.timers._heap == []


def test_a_watchdog_that_dies_is_a_loss_for_every_lease(
    client: Client, backend: Scripted, runtime: HandRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = Losses(runtime)
    leases = [client.lock(f"n{number}", on_lost=losses).acquire() for number in range(3)]
    runtime.advance(1)
    assert client.is_healthy()

    def die(now: float) -> float:
        monkeypatch.undo()
        raise MemoryError("a bug")

    monkeypatch.setattr(client._kernel.watchdog, "step", die)
    runtime.advance(12)
    assert losses.reasons == [LossReason.WATCHDOG_DIED] * 3
    assert not any(lease.is_held() for lease in leases)
    assert not client.is_healthy()
    runtime.advance(100)
    assert backend.holders == {}, "what they held is released all the same"
    assert len(losses.calls) == 3


def test_a_watchdog_that_hangs_is_unhealthy_and_the_clock_still_decides() -> None:
    class Stuck(Threads):
        pass

    backend = Scripted()
    client = client_on(backend, Stuck(), ttl=1.0)
    losses = Losses()
    lease = client.lock("n", on_lost=losses).acquire()
    with client._kernel.lock:  # the ticking thread stops where it needs this lock
        time.sleep(0.95)
        assert not client.is_healthy()
        assert client._kernel.now() > inner(lease).lost_at
    eventually(lambda: not lease.is_held())
    losses.wait()
    client.close()


# Sessions: groups that the backend announces


@pytest.fixture
def session_backend(runtime: HandRuntime) -> Scripted:
    return Scripted(runtime, sessions=True)


@pytest.fixture
def session_client(make: Callable[..., Client], session_backend: Scripted) -> Client:
    return make(session_backend)


def test_a_session_is_renewed_by_one_request_however_many_locks_it_has(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    leases = [session_client.lock(f"n{number}").acquire() for number in range(300)]
    runtime.advance(100)
    renewals = session_backend.called("renew")
    assert 9 <= len(renewals) <= 12
    assert all(len(call.claims) == 300 for call in renewals)
    assert all(lease.is_held() for lease in leases)


def test_a_session_without_locks_is_renewed_too(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    session_client.lock("n").acquire().release()
    runtime.advance(100)
    renewals = session_backend.called("renew")
    assert 9 <= len(renewals) <= 12
    assert all(call.claims == () for call in renewals)


def test_a_lock_in_an_old_session_is_valid_only_as_long_as_the_session(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    session_client.lock("first").acquire()
    runtime.advance(5)
    lease = session_client.lock("second").acquire()
    assert lease.remaining() == pytest.approx(LOST_AFTER - 5)


@pytest.mark.parametrize("adopted", ["while it is under way", "after its answer"])
def test_the_renewal_of_a_session_counts_for_a_lock_granted_before_its_reply(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime, adopted: str
) -> None:
    first = session_client.lock("first").acquire()
    leases: list[Lease] = []

    def granted_before(backend: Scripted, call: Call) -> Any:
        group = call.details["group"]
        before = backend._session_proof[group]
        answer = call.execute()
        proof, backend._session_proof[group] = backend._session_proof[group], before
        if adopted == "while it is under way":
            other = threading.Thread(target=lambda: leases.append(session_client.lock("second").acquire()))
            other.start()
            other.join(10)
            backend._session_proof[group] = proof
        return answer

    session_backend.script("renew", granted_before)
    runtime.advance(TTL / 3 + 0.01)
    leases = leases or [session_client.lock("second").acquire()]
    assert leases[0].remaining() == pytest.approx(first.remaining())
    assert first.remaining() > LOST_AFTER - 2


def test_the_end_of_a_session_loses_each_of_its_locks_once(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    losses = [Losses(runtime) for _ in range(5)]
    for number, on_lost in enumerate(losses):
        session_client.lock(f"n{number}", on_lost=on_lost).acquire()
    other = session_client.lock("other", ttl=20).acquire()
    session_backend.notices.group_gone(("session", TTL), "it expired at the server")
    session_backend.notices.group_gone(("session", TTL), "it expired at the server")
    assert [on_lost.reasons for on_lost in losses] == [[LossReason.SESSION_LOST]] * 5
    assert all(on_lost.calls[0].confirmed for on_lost in losses)
    assert other.is_held(), "it lives in another session"
    before = len(session_backend.called("renew"))
    runtime.advance(100)
    groups = {call.details["group"] for call in session_backend.called("renew")[before:]}
    assert groups == {("session", 20.0)}, "a session that ended is renewed no more"


def test_an_unanswered_session_renewal_is_repeated_and_its_locks_end_at_their_deadline(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    for number in range(3):
        session_client.lock(f"n{number}", on_lost=losses).acquire()
    session_backend.always("renew", silence())
    runtime.advance(LOST_AFTER + 1)
    assert losses.reasons == [LossReason.EXPIRED] * 3
    assert losses.times == pytest.approx([1000 + LOST_AFTER] * 3)
    tries = session_backend.called("renew")
    assert len(tries) >= 3
    assert all(call.at + call.within <= 1000 + LOST_AFTER + 1e-6 for call in tries)


def test_a_broken_connection_renews_its_session_at_once(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    session_client.lock("n").acquire()
    runtime.advance(2)
    session_backend.notices.silent(("session", TTL))
    runtime.settle()
    [renewal] = session_backend.called("renew")
    assert renewal.at == 1002.0
    runtime.advance(8)
    assert len(session_backend.called("renew")) == 1, "and its period starts again"


def test_a_broken_connection_renews_its_leases_at_once(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    client.lock("given", renew=False).acquire()
    runtime.advance(2)
    backend.notices.silent("server")
    backend.notices.silent("another server")
    runtime.settle()
    [renewal] = backend.called("renew")
    assert (renewal.at, [claim.name for claim in renewal.claims]) == (1002.0, ["n"])
    assert lease.is_held()


def test_a_lease_about_to_end_does_not_shorten_the_request_of_its_session(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    """No reply can extend a lease that is about to end. The request serves the other leases of the session, and may
    take as long as these allow."""
    kept = session_client.lock("kept").acquire()
    ends = [session_client.lock(f"n{number}", renew=False).acquire() for number in range(60)]
    held = session_client._kernel.held.values()
    of_their_own = {lease.claim.id: lease.granted for lease in held if not lease.claim.renew}

    def answer(backend: Scripted, call: Call) -> Any:
        if call.within < 0.02:  # the duration of a round trip
            return silence()(backend, call)
        answers = call.execute()
        return [of_their_own.get(claim.id, one) for claim, one in zip(call.claims, answers, strict=True)]

    session_backend.always("renew", answer)
    for _ in range(3):
        runtime.advance((LOST_AFTER - 0.01) / 3)
        session_backend.notices.silent(("session", TTL))
        runtime.settle()
    assert runtime.now() == pytest.approx(1000 + LOST_AFTER - 0.01)
    assert all(lease.is_held() for lease in ends)
    assert session_backend.called("renew")[-1].within == pytest.approx(5.0)
    assert state_of(kept) is LeaseState.HELD
    runtime.advance(2 * TTL)
    assert kept.is_held()
    assert not any(lease.is_held() for lease in ends)


def test_a_session_with_several_leases_is_renewed_in_the_time_of_the_newest(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    old, new = session_client.lock("old").acquire(), session_client.lock("new").acquire()
    proof = inner(old).granted

    def answer(backend: Scripted, call: Call) -> Any:
        answers = call.execute()
        return [proof if claim.name == "old" else one for claim, one in zip(call.claims, answers, strict=True)]

    session_backend.always("renew", answer)
    runtime.advance(LOST_AFTER - 0.01)
    session_backend.notices.silent(("session", TTL))
    runtime.settle()
    assert session_backend.called("renew")[-1].within == pytest.approx(5.0)
    runtime.advance(1)
    assert not old.is_held()
    assert new.is_held()


def test_a_session_whose_ttl_is_shortened_by_the_server_shortens_its_leases(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    losses = Losses(runtime)
    lease = session_client.lock("n", on_lost=losses).acquire()
    session_backend.always("renew", silence())
    runtime.advance(1)
    session_backend.notices.shortened(("session", TTL), 6.0, 1000 + 6.0, 2.0)
    assert lease.ttl == 6.0
    lost_after = 6.0 - 0.062 - 0.6
    assert lease.remaining() == pytest.approx(lost_after - 1)
    eventually(lambda: "scripted grants sessions of 6 s instead of 30 s from now on" in caplog.text)
    assert caplog.text.count("instead of") == 1
    runtime.advance(LOST_AFTER)
    assert losses.times == pytest.approx([1000 + lost_after])


def test_a_proof_that_is_over_by_the_new_ttl_is_lost_at_once(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = session_client.lock("n", on_lost=losses).acquire()
    runtime.advance(9)
    session_backend.notices.shortened(("session", TTL), 6.0, 1000 + 6.0, 2.0)
    assert not lease.is_held()
    assert losses.times == pytest.approx([1009])


def test_a_session_renewal_pending_at_a_shortening_counts_with_the_new_ttl(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    """The backend computed its reply with the former ttl, and the reply reaches the watchdog after the ttl was
    shortened."""
    lease = session_client.lock("n").acquire()

    def answer(backend: Scripted, call: Call) -> Any:
        answers = call.execute()
        backend.notices.shortened(("session", TTL), 6.0, runtime.now() + 6.0, 2.0)
        return answers

    session_backend.script("renew", answer)
    session_backend.notices.silent(("session", TTL))
    runtime.settle()
    assert lease.ttl == 6.0
    assert lease.remaining() <= 6.0


def test_a_grant_pending_at_a_shortening_counts_with_the_new_ttl(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    session_client.lock("first").acquire()

    def answer(backend: Scripted, call: Call) -> Any:
        granted = call.execute()
        backend.notices.shortened(("session", TTL), 6.0, runtime.now() + 6.0, 2.0)
        return granted

    session_backend.script("attempt", answer)
    lease = session_client.lock("n").acquire()
    assert lease.ttl == 6.0
    assert lease.remaining() <= 6.0


def test_a_session_whose_ttl_was_shortened_is_renewed_in_time(
    session_client: Client, session_backend: Scripted, runtime: HandRuntime
) -> None:
    lease = session_client.lock("n").acquire()

    def answer(backend: Scripted, call: Call) -> Any:
        return [granted._replace(ttl=6.0, valid_for=6.0, renew_every=2.0) for granted in call.execute()]

    session_backend.always("renew", answer)
    session_backend.notices.shortened(("session", TTL), 6.0, 1000 + 6.0, 2.0)
    for _ in range(50):
        runtime.advance(1)
        assert lease.is_held()
    assert 20 <= len(session_backend.called("renew")) <= 30


# Tests with real threads, which must not wait for each other


def slow_until(release: threading.Event) -> Callable[[Scripted, Call], Any]:
    def answer(backend: Scripted, call: Call) -> Any:
        release.wait(10)
        return call.execute()

    return answer


def test_a_server_that_hangs_starves_no_other_group() -> None:
    hang = threading.Event()

    class Shards(Scripted):
        def _granted(self, claim: Any, token: int | None) -> Any:
            granted = super()._granted(claim, token)
            return type(granted)(token, claim.ttl, granted.sent_at, claim.ttl, claim.ttl / 3, claim.name)

    def answer(backend: Scripted, call: Call) -> Any:
        if call.details["group"] == "dead":
            hang.wait(10)
        return call.execute()

    backend = Shards()
    backend.always("renew", answer)
    client = client_on(backend, Threads(), ttl=3.0)
    dead, alive = Losses(), Losses()
    client.lock("dead", on_lost=dead).acquire()
    lease = client.lock("alive", on_lost=alive).acquire()
    loss = dead.wait()
    eventually(lambda: [call.details["group"] for call in backend.called("renew")].count("alive") >= 2)
    eventually(lambda: now() > loss.valid_until + 0.3)
    assert lease.is_held()
    assert alive.calls == []
    hang.set()
    client.close()


@pytest.mark.oracle
def test_the_callback_starts_in_time_while_every_renewal_and_another_callback_hang() -> None:
    hang = threading.Event()
    backend = Scripted()
    backend.always("renew", slow_until(hang))
    client = client_on(backend, Threads(), ttl=6.0)
    losses = Losses()
    client.lock("first", on_lost=lambda loss: hang.wait(10)).acquire()
    client.lock("second", on_lost=losses).acquire()
    loss = losses.wait(within=10)
    assert losses.times[0] < loss.valid_until, "nobody else can have it yet"
    assert losses.threads[0].name == "multilock-callback"
    hang.set()
    client.close()


def test_ten_thousand_leases_need_few_threads() -> None:
    before = our_threads()
    with connect("memory://ten-thousand", ttl=600) as client:
        leases = [client.lock(f"n{number}").acquire() for number in range(10_000)]
        assert len(our_threads() - before) <= 4
        assert all(lease.is_held() for lease in leases)


def test_a_lease_needs_two_kilobytes() -> None:
    with connect("memory://two-kilobytes", ttl=600) as client:
        client.lock("warm").acquire().release()
        gc.collect()
        tracemalloc.start()
        leases = [client.lock(f"n{number}").acquire() for number in range(1000)]
        taken = tracemalloc.take_snapshot()
        tracemalloc.stop()
        ours = taken.filter_traces([tracemalloc.Filter(False, "*multilock_memory*")])
        used = sum(each.size for each in ours.statistics("filename"))
        assert used / len(leases) <= 2048, "lock object and name included, the memory of the store not"
