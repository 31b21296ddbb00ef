"""How long a waiter waits, which requests it sends, and that it leaves nothing behind, however its wait ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from multilock import Acquired, BackendRejected, BackendUnavailable, Client, LockTimeout
from multilock.kernel.acquire import acquire
from multilock.kernel.runtime import Threads
from multilock.model import Busy
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import (
    Call,
    Scripted,
    Step,
    StepFace,
    client_on,
    executed_but_unanswered,
    late,
    refused,
    silence,
)

# The duration of a wait


def test_a_free_lock_costs_one_request(client: Client, backend: Scripted) -> None:
    client.lock("n").acquire()
    assert [call.method for call in backend.calls] == ["attempt"]


@pytest.mark.parametrize("timeout", [0.2, 1, 4, 7.5])
def test_the_timeout_limits_the_whole_wait(
    client: Client, backend: Scripted, runtime: HandRuntime, timeout: float
) -> None:
    backend.holders["n"] = "somebody"
    with pytest.raises(LockTimeout, match="still taken") as caught:
        client.lock("n").acquire(timeout)
    assert runtime.now() == pytest.approx(1000 + timeout)
    assert caught.value.name == "n"
    assert caught.value.backend == "scripted"
    assert isinstance(caught.value, TimeoutError)


def test_hints_that_lead_to_nothing_do_not_lengthen_the_wait(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"

    def wake_again(backend: Scripted, call: Call) -> Any:
        answer = call.execute()
        backend.notices.wake(None)
        backend.pass_time(0.01)
        return answer

    backend.always("attempt", wake_again)
    assert client.lock("n").try_acquire(4) is None
    assert runtime.now() == pytest.approx(1004, abs=0.02)


@pytest.mark.oracle
def test_timeout_zero_sends_one_request_and_leaves_no_place_in_the_queue(client: Client, backend: Scripted) -> None:
    backend.holders["n"] = "somebody"
    assert client.lock("n").try_acquire() is None
    with pytest.raises(LockTimeout):
        client.lock("n").acquire(0)
    assert [(call.method, call.details["join"]) for call in backend.calls] == [("attempt", False)] * 2


@pytest.mark.parametrize("forever", [None, math.inf])
def test_none_or_inf_means_forever(
    client: Client, backend: Scripted, runtime: HandRuntime, forever: float | None
) -> None:
    backend.holders["n"] = "somebody"
    attempts = 0

    def count(backend: Scripted, call: Call) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 5000:
            del backend.holders["n"]
        return call.execute()

    backend.always("attempt", count)
    assert client.lock("n").acquire(forever).is_held()
    assert runtime.now() > 1000 + 0.9 * 4998


@pytest.mark.parametrize(
    ("timeout", "error"), [(-1, ValueError), (math.nan, ValueError), (True, TypeError), ("5", TypeError)]
)
def test_an_invalid_timeout_is_refused_before_any_request(
    client: Client, backend: Scripted, timeout: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.lock("n").acquire(timeout)
    with pytest.raises(error):
        client.lock("n").try_acquire(timeout)
    assert backend.calls == []


def test_no_request_lasts_longer_than_the_callers_timeout(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("attempt", silence())
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire(7)
    assert runtime.now() == pytest.approx(1007, abs=0.01)
    assert all(call.at + call.within <= 1007.01 for call in backend.called("attempt"))


# The requests during a wait


def test_a_waiter_looks_again_after_the_heartbeat_interval_with_jitter(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    assert client.lock("n").try_acquire(60) is None
    times = [call.at for call in backend.called("attempt")]
    pauses = {round(later - earlier, 6) for earlier, later in pairwise(times)}
    assert min(pauses) >= 0.9
    assert max(pauses) <= 1.1
    assert len(pauses) > 10


def test_a_push_is_a_hint_and_only_a_reply_grants(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.holders["n"] = "somebody"
    backend.heartbeat = 100.0
    client._kernel.timers.at(1003.0, lambda: backend.notices.wake(None))
    assert client.lock("n").try_acquire(10) is None
    assert [call.at for call in backend.called("attempt")] == [1000.0, 1003.0]


def test_a_push_makes_the_waiter_look_at_once(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.holders["n"] = "somebody"
    backend.heartbeat = 100.0

    def free() -> None:
        del backend.holders["n"]
        backend.notices.wake(backend.called("attempt")[0].claims[0].id)

    client._kernel.timers.at(1003.0, free)
    assert client.lock("n").acquire().is_held()
    assert runtime.now() == 1003.0


def test_a_push_that_arrives_before_the_reply_is_not_lost(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    backend.heartbeat = 100.0

    def freed_meanwhile(backend: Scripted, call: Call) -> Any:
        answer = call.execute()
        del backend.holders["n"]
        backend.notices.wake(call.claims[0].id)
        return answer

    backend.script("attempt", freed_meanwhile)
    assert client.lock("n").acquire(50).is_held()
    assert runtime.now() == 1000.0


def test_a_push_for_another_claim_affects_nothing(client: Client, backend: Scripted) -> None:
    backend.notices.wake("a claim of long ago")
    backend.notices.wake(None)
    lease = client.lock("n").acquire()
    backend.notices.wake(lease.owner)
    assert lease.is_held()


# Silent servers


def test_a_single_try_ends_at_the_first_request_without_a_reply(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("attempt", silence())
    with pytest.raises(BackendUnavailable) as caught:
        client.lock("n").try_acquire()
    assert runtime.now() == 1005.0
    assert (caught.value.name, caught.value.backend) == ("n", "scripted")
    assert isinstance(caught.value, ConnectionError)


def test_a_wait_continues_through_an_outage_shorter_than_the_outage_timeout(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("attempt", silence())
    client._kernel.timers.at(1025.0, lambda: backend.always("attempt", None))
    assert client.lock("n").acquire().is_held()
    assert 1025 <= runtime.now() <= 1031


def test_a_wait_ends_in_an_outage_longer_than_the_outage_timeout(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("attempt", silence())
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire()
    assert 1030 <= runtime.now() <= 1036


def test_an_outage_counts_from_its_beginning_and_not_from_the_call(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    client._kernel.timers.at(1100.0, lambda: backend.always("attempt", silence()))
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire()
    assert 1129 <= runtime.now() <= 1136


def test_every_reply_ends_an_outage(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.holders["n"] = "somebody"
    for _ in range(20):
        backend.script("attempt", *[silence()] * 3, lambda backend, call: call.execute())
    with pytest.raises(LockTimeout):
        client.lock("n").acquire(600)


def test_without_an_outage_timeout_only_the_timeout_ends_a_silent_wait(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("attempt", silence())
    with pytest.raises(BackendUnavailable):
        make(backend, outage_timeout=None).lock("n").acquire(500)
    assert runtime.now() == pytest.approx(1500, abs=0.01)


def test_the_last_request_decides_between_taken_and_silent(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    client._kernel.timers.at(1004.0, lambda: backend.always("attempt", silence()))
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire(8)
    client._kernel.timers.at(1012.0, lambda: backend.always("attempt", None))
    with pytest.raises(LockTimeout):
        client.lock("n").acquire(12)


def test_a_request_shortened_by_the_deadline_does_not_count_as_silence(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    backend.heartbeat = 0.99
    asked: list[float] = []

    def needs_ten_milliseconds(backend: Scripted, call: Call) -> Any:
        asked.append(call.within)
        if call.within < 0.01:
            return silence()(backend, call)
        backend.pass_time(0.01)
        return call.execute()

    backend.always("attempt", needs_ten_milliseconds)
    for timeout in (1.0, 1.001, 1.005, 1.01, 2.0, 2.01, 3.0):
        with pytest.raises(LockTimeout):
            client.lock("n").acquire(timeout)


def test_tries_during_an_outage_slow_down_to_one_a_second(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("attempt", silence(0.0, unknown=False))
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire()
    times = [call.at for call in backend.called("attempt")]
    assert 30 <= len(times) <= 80
    assert times[1] - times[0] <= 0.1


@pytest.mark.parametrize("timeout", [None, 0, 50])
def test_an_error_that_a_retry_cannot_cure_is_raised_at_once(
    client: Client, backend: Scripted, runtime: HandRuntime, timeout: float | None
) -> None:
    backend.always("attempt", refused(BackendRejected("NOAUTH")))
    with pytest.raises(BackendRejected, match="NOAUTH") as caught:
        client.lock("n").acquire(timeout)
    assert runtime.now() == 1000.0
    assert (caught.value.name, caught.value.backend) == ("n", "scripted")
    assert backend.called("release") == [], "nothing was executed, so nothing must be undone"


# Calls that need several claim ids, one after the other


def spent(backend: Scripted, call: Call) -> Busy:
    """Reply as Redlock does if an attempt was undone, but one server has not confirmed the undo."""
    return Busy(0.01, spent=True)


@pytest.mark.parametrize("timeout", [None, 0])
def test_a_cancelled_id_is_never_sent_again(
    client: Client, backend: Scripted, runtime: HandRuntime, timeout: float | None
) -> None:
    backend.script("attempt", spent)
    lease = client.lock("n").try_acquire(timeout) if timeout == 0 else client.lock("n").acquire()
    first, *more = (call.claims[0] for call in backend.called("attempt"))
    assert [claim.id for claim in more] == ([inner(lease).claim.id] if lease else [])
    assert (lease is None) == (timeout == 0)
    runtime.advance(5)
    [cancel] = backend.called("release")
    assert cancel.claims == (first,)
    assert cancel.details["unsure"] is True
    assert first.id not in {claim.id for claim in more}
    assert client._kernel.monitor.waiting == {}


def test_every_id_of_one_call_has_the_arrival_time_of_the_call(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, outage_timeout=None)
    lock = client.lock("n")
    client.lock("n").acquire().release()
    runtime.advance(5)
    backend.script("attempt", late(60.0), spent, spent)
    lock.acquire()
    earlier, *claims = (call.claims[0] for call in backend.called("attempt"))
    assert earlier.arrived == 1000_000_000
    assert len({claim.id for claim in claims}) == 4
    assert {claim.arrived for claim in claims} == {1005_000_000}


def test_the_arrival_time_is_read_from_the_wall_clock() -> None:
    before = time.time()
    assert before - 0.001 <= Threads().wall() / 1_000_000 <= time.time() + 0.001


# Grants with little time left


def test_a_grant_past_half_of_its_time_is_renewed_once(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=20.0)
    backend.script("attempt", late(16.0))
    lease = client.lock("n").acquire()
    assert [call.method for call in backend.calls] == ["attempt", "renew"]
    assert lease.remaining() == pytest.approx(26.698)


def test_a_young_grant_is_not_renewed_first(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("attempt", late(14.0))
    make(backend, request_timeout=20.0).lock("n").acquire()
    assert [call.method for call in backend.calls] == ["attempt"]


def test_a_lock_acquired_late_in_its_sessions_period_is_renewed_first(
    make: Callable[..., Client], runtime: HandRuntime
) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend)
    client.lock("first").acquire()
    backend.always("renew", silence())
    runtime.advance(18)
    backend.always("renew", None)
    lease = client.lock("second").acquire()
    assert lease.remaining() == pytest.approx(26.698)


def test_the_first_renewal_lasts_no_longer_than_the_callers_timeout(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=10.0)
    backend.script("attempt", late(9.5))
    backend.always("renew", silence())
    lease = client.lock("n", ttl=18).acquire(10)
    assert runtime.now() == pytest.approx(1010, abs=0.01)
    assert lease.is_held()


def test_a_grant_is_returned_with_its_remaining_time_if_the_first_renewal_gets_no_reply(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=16.0)
    backend.script("attempt", late(16.0))
    backend.script("renew", silence(2.0))
    lease = client.lock("n").acquire()
    assert runtime.now() == 1018.0
    assert lease.remaining() == pytest.approx(26.698 - 18)
    lease.release()
    assert backend.called("release")[0].details["unsure"] is True


def test_a_grant_is_returned_with_its_remaining_time_if_the_first_renewal_is_too_late(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=16.0)
    backend.script("attempt", late(16.0))
    backend.script("renew", lambda *_: [BackendUnavailable("no majority")])
    lease = client.lock("n").acquire()
    assert lease.remaining() == pytest.approx(26.698 - 16)
    lease.release()
    assert backend.called("release")[0].details["unsure"] is True


def test_a_grant_that_is_gone_at_its_first_renewal_becomes_no_lease(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=20.0)

    def taken_meanwhile(backend: Scripted, call: Call) -> Any:
        answer = late(16.0)(backend, call)
        backend.holders["n"] = "an operator"
        return answer

    backend.script("attempt", taken_meanwhile)
    client._kernel.timers.at(1030.0, lambda: backend.holders.clear())
    lease = client.lock("n").acquire()
    assert runtime.now() >= 1030
    assert lease.owner != backend.called("attempt")[0].claims[0].owner


def test_an_id_whose_reply_was_too_late_is_released_and_never_used_again(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=60.0)
    backend.script("attempt", late(27.0))
    lease = client.lock("n").acquire()
    first, *others = (call.claims[0].id for call in backend.called("attempt"))
    assert first not in others
    assert lease.owner.startswith(others[-1])
    release = backend.called("release")[0]
    assert release.claims[0].id == first
    assert release.details["unsure"] is True, "its cancel must be final"
    assert all(call.claims[0].id != first for call in backend.calls[backend.calls.index(release) + 1 :])


@pytest.mark.parametrize("timeout", [0, 100, None])
def test_a_server_whose_replies_are_always_too_late_counts_as_silent(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime, timeout: float | None
) -> None:
    client = make(backend, request_timeout=60.0)
    backend.always("attempt", late(28.0))
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire(timeout)
    runtime.advance(300)
    assert len(backend.called("attempt")) <= 5
    assert backend.holders == {}


def test_grants_in_a_session_without_proof_cause_no_busy_loop(
    make: Callable[..., Client], runtime: HandRuntime
) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend)
    client.lock("first").acquire()
    backend.always("renew", silence())
    runtime.advance(29)  # no renewal gets a reply, so nothing proves that the session is alive
    with pytest.raises(BackendUnavailable):
        client.lock("second").acquire(20)
    assert len(backend.called("attempt")) < 100
    runtime.advance(100)
    assert "second" not in backend.holders


# No end of an acquire leaves anything behind


def test_after_a_lost_reply_the_next_try_finds_the_grant(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("attempt", executed_but_unanswered)
    lease = client.lock("n").acquire()
    first, second = backend.called("attempt")
    assert first.claims[0].id == second.claims[0].id, "one attempt, one id"
    assert lease.remaining() == pytest.approx(26.698), "it counts from the request that was answered"
    lease.release()
    assert backend.called("release")[0].details["unsure"] is True, "the first request may still be executed"


@pytest.mark.parametrize("timeout", [0, 3])
def test_after_a_lost_last_reply_the_lock_is_released_in_the_background(
    client: Client, backend: Scripted, runtime: HandRuntime, timeout: float
) -> None:
    backend.always("attempt", executed_but_unanswered)
    with pytest.raises(BackendUnavailable, match="released"):
        client.lock("n").acquire(timeout)
    runtime.settle()
    assert backend.holders == {}
    [release] = backend.called("release")
    assert release.details == {"granted": None, "unsure": True}


@pytest.mark.oracle
def test_a_request_that_was_certainly_not_executed_is_not_undone(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("attempt", silence(unknown=False))
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire(0)
    runtime.advance(10)
    assert backend.called("release") == []


def test_a_claim_stays_unsure_after_a_later_attempt_that_was_not_sent(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("attempt", silence(), silence(unknown=False), lambda backend, call: call.execute())
    lease = client.lock("n").acquire()
    lease.release()
    assert backend.called("release")[0].details["unsure"] is True


def test_a_certain_claim_is_released_without_a_tombstone(client: Client, backend: Scripted) -> None:
    client.lock("n").acquire().release()
    assert backend.called("release")[0].details["unsure"] is False


def test_a_waiter_that_gives_up_leaves_the_queue(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.holders["n"] = "somebody"
    assert client.lock("n").try_acquire(3) is None
    runtime.settle()
    assert backend.queues["n"] == []
    assert backend.called("release")[0].details == {"granted": None, "unsure": False}
    assert client._kernel.monitor.waiting == {}


class Interrupt(BaseException):
    pass


def drive(step: Step, runtime: HandRuntime, awaits: int) -> bool:
    """Advance the coroutine by ``awaits`` awaits. Returns False if the coroutine was done before."""
    for _ in range(awaits):
        if step.done():
            return False
        if not step.on():
            runtime.advance(0.5)
    return not step.done()


@pytest.mark.oracle
@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, Interrupt])
@pytest.mark.parametrize("world", ["free", "taken", "silent", "lost replies", "late", "half over", "fair"])
@pytest.mark.parametrize("timeout", [None, 0])
def test_an_acquire_interrupted_at_any_await_leaves_nothing_behind(
    runtime: HandRuntime, world: str, timeout: float | None, error: type[BaseException]
) -> None:
    interrupted = 0
    for awaits in range(30):
        backend = Scripted(runtime)
        client = client_on(backend, runtime, StepFace, request_timeout=40.0)
        if world in ("taken", "fair"):
            backend.holders["n"] = "somebody"
        elif world == "silent":
            backend.always("attempt", silence(1.0))
        elif world == "lost replies":
            backend.script("attempt", executed_but_unanswered)
        elif world == "late":
            backend.always("attempt", late(27.0))
        elif world == "half over":
            backend.script("attempt", late(20.0))
        want = client.lock("n", fair=world == "fair")._want  # type: ignore[attr-defined]
        step = Step(acquire(client._kernel, want, timeout))
        if not drive(step, runtime, awaits):
            break
        step.cancel(error())
        interrupted += 1
        assert isinstance(step.error, error)
        backend.always("attempt", None)
        runtime.advance(30)
        backend.holders = {name: holder for name, holder in backend.holders.items() if holder != "somebody"}
        assert backend.holders == {}, f"after {awaits} awaits"
        assert backend.queues["n"] == []
        assert client._kernel.held == {}
        assert client._kernel.monitor.waiting == {}
        assert client._kernel.gate._lines == {}
        assert client._kernel.cancels.take() == []
        renewals = len(backend.called("renew"))
        runtime.advance(100)
        assert len(backend.called("renew")) == renewals, "an object without references is not kept alive"
    assert interrupted >= 2


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
@pytest.mark.parametrize("awaits", [0, 1])
def test_a_release_interrupted_at_any_await_continues_in_the_background(
    backend: Scripted, runtime: HandRuntime, awaits: int, error: type[BaseException]
) -> None:
    client = client_on(backend, runtime, StepFace)
    acquired = Step(acquire(client._kernel, client.lock("n")._want, None))  # type: ignore[attr-defined]
    while acquired.on():
        pass
    release = Step(client._kernel.releases.release(acquired.result))
    assert drive(release, runtime, awaits)
    release.cancel(error())
    assert isinstance(release.error, error)
    runtime.settle()
    assert backend.holders == {}
    assert client._kernel.held == {}
    assert acquired.result.release is not None
    assert acquired.result.state.value == "released"


@pytest.mark.oracle
def test_an_interrupt_inside_a_blocking_request_leaves_nothing_behind(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    def interrupted(backend: Scripted, call: Call) -> Any:
        call.execute()
        raise KeyboardInterrupt

    backend.script("attempt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.lock("n").acquire()
    assert backend.holders == {}
    assert backend.called("release")[0].details == {"granted": None, "unsure": True}
    lease = client.lock("n").acquire()
    backend.script("release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    assert lease.state.value == "released"
    assert [call.details["unsure"] for call in backend.called("release")[1:]] == [False, True]


@pytest.mark.oracle
def test_an_interrupt_between_grant_and_return_leaves_nothing_behind(
    client: Client, backend: Scripted, runtime: HandRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(event: object) -> None:
        if isinstance(event, Acquired):
            raise KeyboardInterrupt

    client.events.subscribe(lambda event: None)
    monkeypatch.setattr(client.events, "emit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.lock("n").acquire()
    assert client._kernel.held == {}
    assert backend.holders == {}
    runtime.advance(100)
    assert backend.called("renew") == []


@pytest.mark.oracle
def test_an_unknown_exception_of_a_backend_is_raised_and_leaves_nothing_behind(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    def bug(backend: Scripted, call: Call) -> Any:
        call.execute()
        raise ZeroDivisionError

    backend.script("attempt", bug)
    with pytest.raises(ZeroDivisionError):
        client.lock("n").acquire()
    runtime.settle()
    assert backend.holders == {}
