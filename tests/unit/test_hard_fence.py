"""With ``hard_fence``, the operating system kills this process at the end of a lease that was not renewed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from random import Random
from typing import Any

import pytest

import multilock
from multilock import BackendUnavailable, CapabilityMissing, Client, LeaseState, LockLost, LossReason
from multilock.kernel.hard_fence import Fence, KillingTimer
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import Call, Scripted, interrupted_at, silence

NEVER = float("inf")


def valid_until(lease: multilock.Lease) -> float:
    return inner(lease).valid_until


def test_the_process_lives_as_long_as_its_lease_is_proved(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n", ttl=10, hard_fence=True).acquire()
    first = runtime.kills_at
    assert first == valid_until(lease) <= runtime.now() + 10
    runtime.advance(6)
    assert lease.is_held()
    assert first < runtime.kills_at == valid_until(lease)
    lease.release()
    assert runtime.kills_at == NEVER


def test_a_lease_without_a_hard_fence_kills_no_process(client: Client, runtime: HandRuntime) -> None:
    client.lock("n").acquire()
    assert runtime.kills_at == NEVER


def test_of_several_fenced_leases_the_first_deadline_counts(client: Client, runtime: HandRuntime) -> None:
    short = client.lock("short", ttl=5, renew=False, hard_fence=True).acquire()
    long = client.lock("long", ttl=50, renew=False, hard_fence=True).acquire()
    assert runtime.kills_at == valid_until(short)
    short.release()
    assert runtime.kills_at == valid_until(long)
    long.release()
    assert runtime.kills_at == NEVER


def test_a_reentrant_lease_is_fenced_until_the_last_release(client: Client, runtime: HandRuntime) -> None:
    lock = client.lock("n", reentrant=True, hard_fence=True)
    with lock, lock as lease:
        pass
    assert runtime.kills_at == NEVER
    with lock as lease:
        with lock:
            pass
        assert runtime.kills_at == valid_until(lease)


def test_a_release_lifts_the_fence_before_the_server_replies(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n", hard_fence=True).acquire()
    backend.script("release", silence())
    lease.release()
    assert runtime.kills_at == NEVER


@pytest.mark.parametrize("how", ["release", "release of the lock", "with", "close"])
def test_a_lost_lease_stays_fenced_until_its_holder_reports_the_end_of_its_work(
    client: Client, backend: Scripted, runtime: HandRuntime, how: str
) -> None:
    lock = client.lock("n", hard_fence=True)
    lease = lock.__enter__()
    until = valid_until(lease)
    [call] = backend.called("attempt")
    backend.notices.gone(call.claims[0].id, LossReason.TAKEN, "taken")
    assert lease.state is LeaseState.LOST
    runtime.advance(1)
    assert runtime.kills_at == until
    match how:
        case "release":
            assert not lease.release()
        case "release of the lock":
            assert not lock.release()
        case "with":
            with pytest.raises(LockLost):
                lock.__exit__(None, None, None)
        case "close":
            client.close()
    assert runtime.kills_at == NEVER


@pytest.mark.oracle
def test_a_refused_or_interrupted_acquire_leaves_no_fence(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lock = client.lock("n", hard_fence=True)
    backend.holders["n"] = "another"
    assert lock.try_acquire() is None
    assert runtime.kills_at == NEVER
    del backend.holders["n"]
    lease = lock.acquire()
    client._kernel.abandon(inner(lease).claim)
    assert runtime.kills_at == NEVER


def lose(backend: Scripted) -> None:
    backend.notices.gone(backend.called("attempt")[-1].claims[0].id, LossReason.TAKEN, "taken")


def test_a_lost_leadership_is_fenced_until_work_and_callbacks_have_ended(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    seen: list[float] = []

    def work(leadership: multilock.Leadership) -> None:
        assert runtime.kills_at == valid_until(leadership)
        if not seen:
            lose(backend)
            seen.append(runtime.kills_at - valid_until(leadership))

    def stop(loss: multilock.Loss[multilock.Leadership]) -> None:
        if loss.reason is LossReason.TAKEN:
            seen.append(runtime.kills_at - loss.valid_until)

    election = client.election("e", hard_fence=True, on_lost=stop)
    election.run(work)
    assert sorted(seen) == [0.0, 0.0], "fenced in the work and in on_lost"
    assert runtime.kills_at == NEVER


def test_a_leadership_of_campaign_is_fenced_until_its_holder_releases_it(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    leadership = client.election("e", hard_fence=True).campaign()
    lose(backend)
    runtime.advance(1)
    assert runtime.kills_at == valid_until(leadership)
    assert not leadership.release()
    assert runtime.kills_at == NEVER


def test_each_lock_of_a_set_is_fenced(client: Client, runtime: HandRuntime) -> None:
    with client.lock_all(["a", "b"], ttl=9, hard_fence=True) as both:
        assert runtime.kills_at == min(map(valid_until, both.leases))
    assert runtime.kills_at == NEVER


def test_a_lost_lock_of_a_set_with_a_longer_ttl_is_fenced_until_its_end(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    outer = client.lock("a", ttl=60, reentrant=True).acquire()
    client.lock_all(["a", "b"], ttl=6, reentrant=True, hard_fence=True).acquire()
    backend.notices.gone(backend.called("attempt")[0].claims[0].id, LossReason.TAKEN, "taken")
    runtime.advance(57)  # lock b of the set is renewed in the meantime
    assert runtime.kills_at == valid_until(outer)


def test_a_set_that_ends_first_leaves_the_fence_of_a_separate_lock(client: Client, runtime: HandRuntime) -> None:
    several = client.lock_all(["a", "b"], reentrant=True, hard_fence=True).acquire()
    single = client.lock("a", reentrant=True, hard_fence=True).acquire()
    several.release()
    assert runtime.kills_at == valid_until(single)
    single.release()
    assert runtime.kills_at == NEVER


@pytest.mark.parametrize("several", [False, True])
def test_a_fence_of_an_inner_acquire_lasts_until_the_last_release(
    client: Client, runtime: HandRuntime, several: bool
) -> None:
    def lock(*, hard_fence: bool = False) -> Any:
        both = client.lock_all(["a", "b"], reentrant=True, hard_fence=hard_fence)
        return both if several else client.lock("a", reentrant=True, hard_fence=hard_fence)

    outer = lock().acquire()
    assert runtime.kills_at == NEVER
    fenced = lock(hard_fence=True).acquire()
    assert runtime.kills_at < NEVER
    outer.release()  # the work of the inner acquire may continue after this release
    assert runtime.kills_at < NEVER
    fenced.release()
    assert runtime.kills_at == NEVER


def test_a_fenced_set_stays_fenced_after_a_separate_lock_on_one_of_its_names_ends(
    client: Client, runtime: HandRuntime
) -> None:
    single = client.lock("a", reentrant=True).acquire()
    several = client.lock_all(["a"], reentrant=True, hard_fence=True).acquire()
    single.release()
    assert runtime.kills_at == min(map(valid_until, several.leases))
    several.release()
    assert runtime.kills_at == NEVER


@pytest.mark.parametrize("how", ["release", "with"])
def test_a_set_with_one_lost_lock_is_fenced_until_its_holder_ends(
    client: Client, backend: Scripted, runtime: HandRuntime, how: str
) -> None:
    lock = client.lock_all(["a", "b"], hard_fence=True)
    lease = lock.__enter__()
    backend.notices.gone(backend.called("attempt")[0].claims[0].id, LossReason.TAKEN, "taken")
    assert runtime.kills_at < NEVER
    if how == "release":
        assert not lease.release()
    else:
        with pytest.raises(LockLost):
            lock.__exit__(None, None, None)
    assert runtime.kills_at == NEVER


def test_the_fences_of_a_set_are_all_lifted_when_its_release_begins(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock_all(["a", "b"], hard_fence=True, renew=False).acquire()
    seen: list[float] = []

    def slow(backend: Scripted, call: Call) -> Any:
        seen.append(runtime.kills_at)
        backend.pass_time(5)
        raise BackendUnavailable("silent")

    backend.always("release", slow)
    lease.release()
    assert seen
    assert {*seen, runtime.kills_at} == {NEVER}


def test_a_set_that_was_not_acquired_kills_no_process(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    """During an outage, the set loses its first lock, and the request for its second lock fails."""

    def outage(backend: Scripted, call: Call) -> Any:
        backend.always("release", silence())
        backend.pass_time(28)
        raise BackendUnavailable("silent")

    backend.script("attempt", lambda backend, call: call.execute(), outage)
    backend.always("renew", silence())
    with pytest.raises(BackendUnavailable):
        client.lock_all(["a", "b"], hard_fence=True).acquire(timeout=20)
    assert runtime.kills_at == NEVER


def test_a_lost_reentrant_lease_is_fenced_until_each_acquire_is_released(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lock = client.lock("n", reentrant=True, hard_fence=True)
    lock.acquire()
    lease = lock.acquire()
    backend.notices.gone(backend.called("attempt")[0].claims[0].id, LossReason.TAKEN, "taken")
    assert not lease.release()
    assert runtime.kills_at < NEVER, "the outer one may be at work"
    assert not lease.release()
    assert runtime.kills_at == NEVER


def test_a_set_is_fenced_once_it_is_returned_and_no_sooner(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    seen: list[float] = []

    def look(backend: Scripted, call: Call) -> Any:
        seen.append(runtime.kills_at)
        return call.execute()

    backend.always("attempt", look)
    with client.lock_all(["a", "b", "c"], hard_fence=True):
        assert seen == [NEVER] * 3
        assert runtime.kills_at < NEVER
    assert runtime.kills_at == NEVER


def test_a_set_that_waits_through_an_outage_kills_no_process(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["b"] = "another"
    killed: list[float] = []

    def silent(backend: Scripted, call: Call) -> Any:
        killed.append(runtime.kills_at)
        backend.pass_time(call.within)
        raise BackendUnavailable("silent")

    backend.script("attempt", lambda backend, call: call.execute())
    backend.always("attempt", silent)
    backend.always("renew", silence())
    with pytest.raises(BackendUnavailable):
        client.lock_all(["a", "b"], hard_fence=True).acquire(timeout=60)
    assert len(killed) > 3
    assert {*killed, runtime.kills_at} == {NEVER}


@pytest.mark.parametrize("lock", ["lock", "lock_all", "lock and lock_all"])
def test_the_fence_of_a_lost_lease_is_lifted_when_the_last_with_block_ends(
    client: Client, backend: Scripted, runtime: HandRuntime, lock: str
) -> None:
    several: Any = client.lock_all(["a", "b"], reentrant=True, hard_fence=True)
    single: Any = client.lock("a", reentrant=True, hard_fence=True)
    outer = several if lock == "lock_all" else single
    within = single if lock == "lock" else several
    outer.__enter__()
    within.__enter__()
    backend.notices.gone(backend.called("attempt")[0].claims[0].id, LossReason.TAKEN, "taken")
    with pytest.raises(LockLost):
        within.__exit__(None, None, None)
    assert runtime.kills_at < NEVER, "the outer one may be at work"
    with pytest.raises(LockLost):
        outer.__exit__(None, None, None)
    assert runtime.kills_at == NEVER


def test_each_release_of_a_lost_reentrant_lock_is_counted(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lock = client.lock("n", reentrant=True, hard_fence=True)
    lock.acquire()
    lock.acquire()
    backend.notices.gone(backend.called("attempt")[0].claims[0].id, LossReason.TAKEN, "taken")
    assert [lock.release(), lock.release()] == [False, False]
    assert runtime.kills_at == NEVER
    with pytest.raises(multilock.NotHeld):
        lock.release()


@pytest.mark.parametrize("names", [["n"], ["n", "o"]])
def test_a_lease_lost_before_its_with_block_begins_is_not_fenced(
    client: Client, backend: Scripted, runtime: HandRuntime, names: list[str]
) -> None:
    lock = client.lock_all(names, hard_fence=True) if len(names) > 1 else client.lock("n", hard_fence=True)
    lease = lock.acquire()
    backend.notices.gone(backend.called("attempt")[0].claims[0].id, LossReason.TAKEN, "taken")
    assert runtime.kills_at < NEVER
    with pytest.raises(LockLost), lease:
        raise AssertionError("the body runs")
    runtime.settle()
    assert runtime.kills_at == NEVER
    assert [name for name in backend.holders if name != "n"] == []
    with pytest.raises(multilock.NotHeld):
        lock.release()


@pytest.mark.parametrize("several", [False, True])
def test_a_lease_lost_before_its_async_with_block_begins_is_not_fenced(several: bool) -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://fence-async") as client:
            client._kernel.fence = fence = Fence(killer := Recorded())
            lock = client.lock_all(["n", "o"], hard_fence=True) if several else client.lock("n", hard_fence=True)
            lease = await lock.acquire()
            assert killer.set_to < NEVER
            await client.force_release("n")
            with pytest.raises(LockLost):
                async with lease:
                    raise AssertionError("the body runs")
            assert client._kernel.fence is fence
            assert killer.set_to == NEVER

    asyncio.run(main())


class Recorded:
    """A stand-in for the timer that kills the process. It only records its calls."""

    set_to = NEVER
    times = 0

    def at(self, when: float) -> None:
        self.set_to = when
        self.times += 1

    def close(self) -> None: ...


def test_a_proof_after_the_end_of_the_client_sets_no_fence(client: Client, runtime: HandRuntime) -> None:
    lease = inner(client.lock("n", hard_fence=True).acquire())
    client._kernel.lift_fences()
    client._kernel.closed = True
    lease._accept(lease.granted)
    assert runtime.kills_at == NEVER
    assert client._kernel.fence is None


def test_a_client_closed_in_an_outage_is_not_killed_while_its_requests_run(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n", hard_fence=True).acquire()
    backend.always("renew", silence())
    backend.always("release", silence())
    runtime.advance(27)
    assert lease.state is LeaseState.LOST
    killed_at = runtime.kills_at
    assert runtime.now() < killed_at < NEVER
    client.close()
    assert runtime.now() > killed_at
    assert runtime.kills_at == NEVER


@pytest.mark.oracle
def test_a_release_interrupted_anywhere_leaves_no_fence(client: Client, runtime: HandRuntime) -> None:
    for step in range(1000):
        lease = client.lock("n", hard_fence=True).acquire()
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(step, "Releases.release") as where:
            lease.release()
        lease.release()  # the interrupt may have come before the release began
        runtime.settle()
        assert runtime.kills_at == NEVER, (step, where)
        if not where:
            break
    assert 10 < step < 999


@pytest.mark.oracle
def test_an_acquire_interrupted_anywhere_leaves_no_fence(client: Client, runtime: HandRuntime) -> None:
    lock = client.lock("n", hard_fence=True)
    for step in range(1000):
        lease = None
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(step, "Kernel.adopt") as where:
            lease = lock.acquire()
        if lease:
            lease.release()
        runtime.settle()
        assert client._kernel.held == {}
        assert runtime.kills_at == NEVER, (step, where)
        if not where:
            break
    assert 10 < step < 999


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_hard_fence_must_be_true_or_false(client: Client, value: Any) -> None:
    with pytest.raises(TypeError, match="hard_fence must be True or False"):
        client.lock("n", hard_fence=value)


def test_a_release_by_a_finalizer_inside_another_release_is_not_forgotten() -> None:
    """A signal handler or a finalizer calls `release` while another `release` runs in the same thread."""

    class Interrupted:
        set_to = NEVER

        def at(self, when: float) -> None:
            if when == 5.0:
                fence.lift("b")
            self.set_to = when

        def close(self) -> None: ...

    killer = Interrupted()
    fence = Fence(killer)
    fence.keep("b", 5.0)
    assert killer.set_to == NEVER


@pytest.mark.oracle
@pytest.mark.parametrize("at", range(6))
def test_an_interrupt_while_a_fence_is_set_leaves_no_timer_after_its_release(at: int) -> None:
    """The interrupt comes before or after the timer is set, or while the timer is deleted."""

    class Interrupted(Recorded):
        def at(self, when: float) -> None:
            steps.append(when)
            if len(steps) == at // 2 + 1:
                if at % 2:
                    super().at(when)
                raise KeyboardInterrupt
            super().at(when)

    steps: list[float] = []
    fence = Fence(killer := Interrupted())
    for keep, claim_id, until in ((True, "a", 5.0), (True, "b", 4.0), (False, "b", 0.0)):
        with contextlib.suppress(KeyboardInterrupt):
            fence.keep(claim_id, until) if keep else fence.lift(claim_id)
    fence.lift("b")
    assert killer.set_to == 5.0
    fence.lift("a")
    assert killer.set_to == NEVER


def test_the_timer_is_always_set_to_the_earliest_fenced_deadline() -> None:
    fence = Fence(killer := Recorded())
    random = Random(1)
    until: dict[str, float] = {}
    for step in range(20_000):
        claim_id = f"c{random.randrange(500)}"
        if random.random() < 0.4:
            until.pop(claim_id, None)
            fence.lift(claim_id)
        else:
            until[claim_id] = step + random.uniform(10, 100)
            fence.keep(claim_id, until[claim_id])
        if step % 50 == 0:
            assert killer.set_to == min(until.values(), default=NEVER)
            assert len(fence._heap) <= 64 + 2 * 500 + 1


def test_ten_thousand_fenced_locks_are_renewed_in_less_than_a_second() -> None:
    """The heap of deadlines is fast enough. A search through all locks at each renewal would take ten seconds."""
    fence = Fence(killer := Recorded())
    for number in range(10_000):
        fence.keep(f"c{number}", 1000 + number)
    begun = time.thread_time()
    for number in range(10_000):
        fence.keep(f"c{number}", 20_000 + number)
    assert time.thread_time() - begun < 1.0
    assert killer.set_to == 20_000
    assert killer.times == 1 + 10_000


def test_hard_fence_is_refused_on_systems_where_it_cannot_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    with multilock.connect("memory://test-fence") as client:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(CapabilityMissing, match="docker run --init"):
                client.lock("n", hard_fence=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            with pytest.raises(CapabilityMissing, match="needs Linux"):
                client.lock("n", hard_fence=True)
        with pytest.raises(CapabilityMissing, match="gives this process no timer"):
            KillingTimer(-1)


# ---- real processes

HOLDER = """
import os, re, signal, sys, time
import multilock

ttl = {ttl}
client = multilock.connect("memory://holder", ttl=ttl)
lease = client.lock("n", renew={renew}, hard_fence=True).acquire()
print(lease.valid_until, flush=True)
{body}
"""
TTL = 1.0
WITHIN = 20.0

STUCK = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "the interpreter is stuck": "re.match('(a+)+$', 'a' * 50 + 'b')",
    "at work in another thread": "import threading; threading.Thread(target=time.sleep, args=[60]).start()",
}


def holder(body: str, renew: bool = True, ttl: float = TTL) -> subprocess.Popen[str]:
    program = HOLDER.format(ttl=ttl, renew=renew, body=body)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("why", STUCK)
def test_a_process_that_cannot_prove_its_lease_is_killed(why: str) -> None:
    renewed = why != "at work in another thread"  # a healthy process renews its lease
    with holder(STUCK[why], renew=renewed) as process:
        assert process.stdout is not None
        granted_until = float(process.stdout.readline())
        assert process.wait(WITHIN) == -signal.SIGKILL
        assert multilock.now() >= granted_until


def test_a_process_that_renews_or_releases_its_lease_lives_on() -> None:
    body = "time.sleep(1.5 * ttl); assert lease.release(); time.sleep(1.5 * ttl); print('ended')"
    with holder(body, ttl=3.0) as process:
        assert process.communicate(timeout=WITHIN)[0].splitlines()[1:] == ["ended"]
        assert process.returncode == 0


def test_a_forked_child_outlives_the_lease_of_its_parent() -> None:
    body = "\n".join(
        [
            "if os.fork():",
            "    os.kill(os.getpid(), signal.SIGSTOP)",
            "time.sleep(3 * ttl)",
            "print('child', flush=True)",
        ]
    )
    with holder(body) as process:
        assert process.wait(WITHIN) == -signal.SIGKILL
        assert process.stdout is not None
        assert re.sub(r"^\S+\n", "", process.stdout.read()) == "child\n"


def test_a_cancelled_timer_kills_no_process() -> None:
    timer = KillingTimer(time.CLOCK_BOOTTIME)
    timer.at(multilock.now() + 1.5)
    timer.at(NEVER)
    time.sleep(2)
    timer.at(multilock.now() + 1.5)
    timer.close()
    time.sleep(2)
