"""Tests of sets of locks that need no real backend, many with an event at the worst moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import multilock
from multilock import Client, Lease, LeaseState, LockLost, Loss, LossReason
from multilock.lock_all import in_order
from multilock.model import Claim, Granted, Returned
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import Pulse, inner
from multilock.testing.conformance.faces import background
from tests.unit.kit import Call, Losses, Scripted, client_on, eventually, interrupted_at, late, silence


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


@pytest.fixture
def runtime() -> HandRuntime:
    return HandRuntime(start=1000.0)


class Resting(Scripted):
    """A backend that supports ``hold_at_least``, and records each name and the seconds for which it must stay taken."""

    def __init__(self, runtime: HandRuntime) -> None:
        super().__init__(runtime, hold_at_least=True)
        self.rests: list[tuple[str, float]] = []

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        self.rests.append((claim.name, seconds))
        return self.release(claim, granted, unsure, within)


@pytest.fixture
def scripted(runtime: HandRuntime) -> Resting:
    return Resting(runtime)


@pytest.fixture
def hand(scripted: Resting, runtime: HandRuntime) -> Iterator[Client]:
    """A client whose clock the test drives."""
    with client_on(scripted, runtime) as client:
        yield client


def lose(backend: Scripted) -> None:
    """Lose the name that was acquired first."""
    claim = backend.called("attempt")[0].claims[0]
    del backend.holders[claim.name]
    backend.notices.gone(claim.id, LossReason.TAKEN, "a test took it")


@pytest.fixture
def client(backend: Scripted) -> Iterator[Client]:
    with Client(backend, ttl=20, request_timeout=0.2) as client:
        yield client


def test_names_are_sorted_by_their_keys_without_duplicates() -> None:
    assert in_order(["b", "a/1", "B", "a", "b", "ä", "a.", "a-"]) == ["ä", "B", "a", "a/1", "a-", "a.", "b"]


def test_a_thousand_names_are_held_together_and_released(client: Client, backend: Scripted) -> None:
    with client.lock_all([f"n/{number}" for number in range(1000)]) as lease:
        assert lease.is_held()
        assert len(lease.leases) == len(backend.holders) == 1000
    eventually(lambda: backend.holders == {}, within=20)


def test_the_locks_of_a_set_are_acquired_in_order_and_released_in_reverse(client: Client, backend: Scripted) -> None:
    with client.lock_all(["c", "a", "b"]):
        assert [call.claims[0].name for call in backend.called("attempt")] == ["a", "b", "c"]
    assert [call.claims[0].name for call in backend.called("release")] == ["c", "b", "a"]


def test_a_try_asks_for_each_lock_once_and_stops_at_the_first_taken_one(client: Client, backend: Scripted) -> None:
    backend.holders["b"] = "somebody"
    assert client.lock_all(["a", "b", "c"]).try_acquire() is None
    assert [(call.claims[0].name, call.details["join"]) for call in backend.called("attempt")] == [
        ("a", False),
        ("b", False),
    ]
    assert backend.holders == {"b": "somebody"}


def test_silence_releases_the_acquired_locks_and_raises(client: Client, backend: Scripted) -> None:
    backend.script("attempt", lambda backend, call: call.execute(), silence(0.01))
    with pytest.raises(multilock.BackendUnavailable, match="'b'"):
        client.lock_all(["a", "b"]).try_acquire()
    eventually(lambda: backend.holders == {})


def test_a_release_waits_for_one_request_even_if_several_get_no_reply(client: Client, backend: Scripted) -> None:
    lease = client.lock_all([f"n{number}" for number in range(20)]).acquire()
    backend.always("release", silence())
    started = time.monotonic()
    assert lease.release() is True
    assert time.monotonic() - started < 10 * 0.2
    assert lease.state is LeaseState.RELEASED
    backend.always("release", None)
    eventually(lambda: backend.holders == {}, 10)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_renewal_covers_each_lock_even_after_one_without_a_reply(
    client: Client, backend: Scripted, face: str
) -> None:
    def renew() -> None:
        if face == "blocking":
            client.lock_all(["a", "b", "c"]).acquire().renew()
        else:
            asyncio.run(renew_there())

    async def renew_there() -> None:
        async with multilock.AsyncClient(backend, ttl=20) as there:
            lease = await there.lock_all(["a", "b", "c"]).acquire()
            await lease.renew()

    backend.script("renew", silence(0.01), lambda backend, call: call.execute(), silence(0.01))
    with pytest.raises(multilock.BackendUnavailable) as caught:
        renew()
    assert caught.value.name == "a"
    assert [call.claims[0].name for call in backend.called("renew")] == ["a", "b", "c"]


def test_one_lost_lock_loses_the_set_even_if_others_get_no_reply(client: Client, backend: Scripted) -> None:
    lease = client.lock_all(["a", "b"]).acquire()
    backend.script("renew", silence(0.01))
    del backend.holders["b"]
    with pytest.raises(LockLost, match="part 'b'"):
        lease.renew()


def test_releasing_one_lock_of_a_set_by_hand_is_not_a_loss(client: Client, backend: Scripted) -> None:
    losses = Losses()
    lease = client.lock_all(["a", "b"], on_lost=losses).acquire()
    lease.leases[0].release()
    assert not lease.is_held()
    assert lease.release() is False
    eventually(lambda: backend.holders == {})
    assert losses.calls == []


def test_a_loss_found_by_the_release_is_reported(client: Client, backend: Scripted) -> None:
    losses = Losses()
    lease = client.lock_all(["a", "b"], on_lost=losses).acquire()
    del backend.holders["a"]
    assert lease.release() is False
    loss = losses.wait()
    assert (loss.lease, loss.reason) == (lease, LossReason.TAKEN)
    assert backend.holders == {}
    assert len(losses.calls) == 1


def test_without_renewal_a_set_lasts_as_long_as_its_first_lock(client: Client) -> None:
    losses = Losses()
    with Pulse() as pulse:
        lease = client.lock_all(["a", "b"], ttl=1.0, renew=False, on_lost=losses).acquire()
        loss = losses.wait()
        stopped = pulse.stopped()
    assert loss.lease is lease
    assert "part 'a'" in loss.message
    assert losses.times[0] <= loss.valid_until + stopped


def test_a_lost_set_that_is_never_released_is_released_after_one_ttl(
    hand: Client, scripted: Resting, runtime: HandRuntime
) -> None:
    lease = hand.lock_all(["a", "b"], ttl=30).acquire()
    lose(scripted)
    assert not lease.is_held()
    runtime.advance(29.5)
    assert sorted(scripted.holders) == ["b"]
    runtime.advance(1)
    assert scripted.holders == {}
    assert lease.state is LeaseState.LOST


@pytest.mark.parametrize("how", ["release", "release of the lock", "with"])
def test_the_other_locks_of_a_lost_set_are_kept_until_the_work_has_ended(
    hand: Client, scripted: Resting, runtime: HandRuntime, how: str
) -> None:
    lock = hand.lock_all(["a", "b"], ttl=30)
    lease = lock.__enter__()
    lose(scripted)
    runtime.advance(25)
    assert sorted(scripted.holders) == ["b"]
    match how:
        case "release":
            assert not lease.release()
        case "release of the lock":
            assert not lock.release()
        case "with":
            with pytest.raises(LockLost):
                lock.__exit__(None, None, None)
    runtime.settle()
    assert scripted.holders == {}


def test_a_reentrant_lost_set_is_released_with_its_last_release(
    hand: Client, scripted: Resting, runtime: HandRuntime
) -> None:
    lock = hand.lock_all(["a", "b"], reentrant=True)
    lease = lock.acquire()
    assert lock.acquire() is lease
    lose(scripted)
    assert not lock.release()
    runtime.settle()
    assert sorted(scripted.holders) == ["b"]
    assert not lock.release()
    runtime.settle()
    assert scripted.holders == {}
    with pytest.raises(multilock.NotHeld):
        lock.release()


def test_a_lock_that_is_also_held_separately_outlives_the_set(hand: Client, scripted: Resting) -> None:
    single = hand.lock("a", reentrant=True).acquire()
    for _ in range(3):
        with hand.lock_all(["a", "b"], reentrant=True):
            assert sorted(scripted.holders) == ["a", "b"]
        assert sorted(scripted.holders) == ["a"]
    assert single.is_held()
    assert not inner(single)._hooks, "nothing is left of the sets"
    assert single.release()
    assert scripted.holders == {}


def test_the_innermost_lease_within_a_set_is_the_set(hand: Client) -> None:
    with hand.lock_all(["a", "b"]) as lease:
        assert hand.current_lease() is lease
        assert hand.current_lease("b") is lease.leases[1]


def test_wait_lost_ends_when_one_lock_of_the_set_is_released_by_hand(client: Client) -> None:
    lease = client.lock_all(["a", "b"]).acquire()
    waiting = background(lambda: lease.wait_lost(30))
    eventually(lambda: len(inner(lease)._hooks or ()) == 1)
    lease.leases[0].release()
    assert waiting.result(5) is None
    assert lease.wait_lost() is None
    assert lease.state is LeaseState.RELEASED


@pytest.mark.parametrize("end", ["release", "with", "with meanwhile"])
def test_after_one_lock_is_released_by_hand_the_set_releases_the_others(
    hand: Client, scripted: Resting, runtime: HandRuntime, end: str
) -> None:
    lock = hand.lock_all(["a", "b"])
    lease = lock.acquire()

    def enter(backend: Scripted, call: Call) -> Any:
        with pytest.raises(multilock.NotHeld), lease:
            pass
        return call.execute()

    if end == "with meanwhile":
        scripted.script("release", enter)
    lease.leases[0].release()
    assert sorted(scripted.holders) == ["b"]
    if end == "release":
        assert lock.release() is False
    elif end == "with":
        with pytest.raises(multilock.NotHeld), lease:
            pass
    runtime.settle()
    assert scripted.holders == {}
    with pytest.raises(multilock.NotHeld):
        lock.release()


def test_a_lost_set_is_not_kept_alive_after_its_release(client: Client, backend: Scripted) -> None:
    lock = client.lock_all(["a", "b"], ttl=1000)
    with contextlib.suppress(LockLost), lock as lease:
        lose(backend)
        kept = weakref.ref(lease)
        del lease
    eventually(lambda: backend.holders == {})
    with lock:  # the lock object refers only to its newest lease, which is now that of this block
        eventually(lambda: gc.collect() >= 0 and kept() is None)


@pytest.mark.oracle
@pytest.mark.parametrize("why", ["silence", "cancelled", "closed"])
def test_a_set_that_was_not_acquired_leaves_no_rest(
    scripted: Resting, hand: Client, runtime: HandRuntime, why: str
) -> None:
    lock = hand.lock_all(["a", "b"], hold_at_least=3600)
    scripted.script("attempt", lambda backend, call: call.execute(), ending(why, hand))
    with pytest.raises((multilock.BackendUnavailable, KeyboardInterrupt, multilock.ClientClosed)):
        lock.try_acquire()
    runtime.settle()
    assert scripted.holders == {}
    assert scripted.rests == []


def ending(why: str, client: Client) -> Any:
    def end(backend: Scripted, call: Call) -> Any:
        if why == "closed":
            client._kernel.closed = True
        raise KeyboardInterrupt if why == "cancelled" else multilock.BackendUnavailable("the test keeps silent")

    return end


def test_each_lock_of_an_acquired_set_rests(hand: Client, scripted: Resting) -> None:
    with hand.lock_all(["a", "b"], hold_at_least=3600):
        pass
    assert [name for name, _ in scripted.rests] == ["b", "a"]


@pytest.mark.oracle
def test_a_lost_set_leaves_no_rest(hand: Client, scripted: Resting, runtime: HandRuntime) -> None:
    lease = hand.lock_all(["a", "b"], hold_at_least=3600).acquire()
    lose(scripted)
    assert not lease.release()
    runtime.settle()
    assert scripted.holders == {}
    assert scripted.rests == []


def test_each_lock_rests_for_as_long_as_the_set_requires(hand: Client, scripted: Resting, runtime: HandRuntime) -> None:
    first = hand.lock("a", reentrant=True).acquire()
    runtime.advance(20)
    with hand.lock_all(["a", "b"], reentrant=True, hold_at_least=60):
        pass
    first.release()
    assert [(name, round(seconds)) for name, seconds in scripted.rests] == [("b", 60), ("a", 60)]


def test_a_lock_that_ends_as_the_last_one_is_acquired_does_not_end_the_wait(
    hand: Client, scripted: Resting, runtime: HandRuntime
) -> None:
    def outlast_the_first(backend: Scripted, call: Call) -> Any:
        runtime._now += 40  # no timer runs, so only the waiter can notice that its first lock has ended
        backend.holders.pop("a")
        return call.execute()

    scripted.script("attempt", lambda backend, call: call.execute(), outlast_the_first)
    lease = hand.lock_all(["a", "b"], ttl=30, renew=False).acquire()
    assert lease.is_held()
    assert [call.claims[0].name for call in scripted.called("attempt")] == ["a", "b", "a", "b"]


def test_an_inner_lock_of_a_reentrant_lease_lets_the_name_rest(hand: Client, scripted: Resting) -> None:
    with hand.lock("a", reentrant=True), hand.lock("a", reentrant=True, hold_at_least=60):
        pass
    assert [name for name, _ in scripted.rests] == ["a"]


def test_a_release_has_the_time_of_one_request_however_slow_each_reply_is(hand: Client, scripted: Resting) -> None:
    lease = hand.lock_all(["a", "b", "c"], ttl=25).acquire()
    scripted.script("release", late(3), silence())
    assert lease.release() is True
    asked = scripted.called("release")
    assert [call.within for call in asked[:2]] == [5.0, 2.0]


@pytest.mark.parametrize("lost", [False, True])
def test_a_forked_child_holds_no_lock_of_a_set_and_lost_none(client: Client, backend: Scripted, lost: bool) -> None:
    lease = client.lock_all(["a", "b"]).acquire()
    if lost:
        lose(backend)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not lease.is_held() and lease.state is LeaseState.RELEASED and not lease.release() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert lease.is_held() is not lost


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
def test_an_interrupt_anywhere_in_the_acquire_leaves_nothing(backend: Scripted) -> None:
    for step in range(10_000):
        with Client(backend, ttl=20, request_timeout=0.2) as client:
            lease = None
            try:
                with interrupted_at(step, "acquire_all") as where:
                    lease = client.lock_all(["a", "b", "c"]).acquire()
            except KeyboardInterrupt:
                assert lease is None
                eventually(lambda: backend.holders == {})
            else:
                assert lease.release()
                if not where:  # the call was not interrupted, so all points have been tried
                    break
    assert step > 100


@pytest.mark.oracle
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
def test_an_interrupt_anywhere_in_a_with_block_leaves_nothing(backend: Scripted) -> None:
    for step in range(10_000):
        with Client(backend, ttl=20, request_timeout=0.2) as client:
            where: list[str] = []
            try:
                with interrupted_at(step, "Waits._exit") as where, client.lock_all(["a", "b", "c"]):
                    pass
            except KeyboardInterrupt:
                eventually(lambda: backend.holders == {})
            if not where:
                break
    assert backend.holders == {}
    assert step > 50


async def holding(client: multilock.AsyncClient, name: str) -> None:
    async with asyncio.timeout(5):
        async for leader in client.election(name).observe():
            if leader:
                return


def test_a_task_cancelled_between_two_locks_releases_the_first() -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://many-cancel") as client, client.lock("b"):
            waiting = asyncio.create_task(client.lock_all(["a", "b"]).try_acquire(30))
            await holding(client, "a")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with client.lock("a").acquire(timeout=5):
                pass

    asyncio.run(main())


def test_the_body_is_cancelled_at_the_loss_of_one_lock() -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://many-body") as client:
            told: asyncio.Queue[Loss] = asyncio.Queue()

            async def lose_b() -> None:
                async with client.lock_all(["a", "b"], on_lost=told.put) as lease:
                    assert lease.is_held()
                    await client.force_release("b")
                    await asyncio.sleep(20)

            with pytest.raises(LockLost, match="part 'b'"):
                await lose_b()
            assert "part 'b'" in (await told.get()).message
            async with client.lock("a").acquire(timeout=5), client.lock_all(["b", "c"]).acquire(timeout=5) as second:
                assert [part.name for part in second.leases] == ["b", "c"]
            assert told.empty()

    asyncio.run(main())


def test_a_set_works_as_a_threading_lock(client: Client, backend: Scripted) -> None:
    lock = client.lock_all(["a", "b"]).as_threading_lock()
    with lock:
        assert lock.locked()
        assert sorted(backend.holders) == ["a", "b"]
    assert backend.holders == {}


def test_a_set_that_is_released_twice_releases_each_lock_once(client: Client, backend: Scripted) -> None:
    lock, both = client.lock("a", reentrant=True), client.lock_all(["a", "b"], reentrant=True)
    with lock as outer:
        with both as lease:
            assert lease.release()
            lock.acquire()
            assert not lease.release()
        assert lock.acquire() is outer
        for _ in range(2):
            assert outer.release()
        assert outer.is_held()
        assert "a" in backend.holders
    assert backend.holders == {}


def test_releasing_an_expired_lost_set_counts_no_lock_down_again(hand: Client, scripted: Resting) -> None:
    lock = hand.lock("b", reentrant=True)
    outer = lock.acquire()
    lease = hand.lock_all(["a", "b"], reentrant=True).acquire()
    claim = scripted.called("attempt")[1].claims[0]
    scripted.notices.gone(claim.id, LossReason.TAKEN, "a test took it")
    inner(lease)._give_back_parts()  # type: ignore[attr-defined]  # as the timer does after a ttl
    lock.acquire()
    assert not lease.release()
    assert outer.release()
    assert outer.is_held()
    assert outer.release()
    assert not outer.is_held()


def held_outside(client: Client, backend: Scripted, meanwhile: Callable[[Lease], object]) -> Lease:
    """Return a lease of "a", in a backend in which "b" is taken. When this thread requests "b", ``meanwhile`` runs in
    another thread."""
    outer = client.lock("a", reentrant=True).acquire()
    backend.holders["b"] = "another"

    def answer(backend: Scripted, call: Call) -> Any:
        if call.claims[0].name == "b":
            background(lambda: meanwhile(outer)).result(5)
        return call.execute()

    backend.always("attempt", answer)
    return outer


def test_a_set_that_fails_beside_the_end_of_a_body_leaves_the_other_body_its_lock(
    client: Client, backend: Scripted
) -> None:
    outer = held_outside(client, backend, lambda lease: lease.__exit__(None, None, None))
    outer.__enter__()
    with outer:
        assert client.lock_all(["a", "b"], reentrant=True).try_acquire() is None
        assert outer.is_held()
        assert "a" in backend.holders
    assert "a" not in backend.holders


def test_an_interrupted_set_releases_a_lock_that_its_first_holder_has_released(
    client: Client, backend: Scripted
) -> None:
    def release(lease: Lease) -> None:
        lease.release()
        raise KeyboardInterrupt

    held_outside(client, backend, release)
    with pytest.raises(KeyboardInterrupt):
        client.lock_all(["a", "b"], reentrant=True).try_acquire()
    eventually(lambda: "a" not in backend.holders)


def test_a_body_that_ends_during_the_release_of_its_set_releases_nothing_twice(
    client: Client, backend: Scripted
) -> None:
    lease = client.lock_all(["a", "b"]).acquire()
    lease.__enter__()

    def answer(backend: Scripted, call: Call) -> Any:
        if call.claims[0].name == "b":
            background(lambda: lease.__exit__(None, None, None)).result(5)
        return call.execute()

    backend.always("release", answer)
    assert lease.release()
    client.close()  # this waits for releases in the background
    assert [call.claims[0].name for call in backend.called("release")] == ["b", "a"]
