"""Tests of the blocking lock object: ``with``, reentrancy, scopes, the decorator and the threading adapter."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from multilock import (
    BackendRejected,
    BackendUnavailable,
    CapabilityMissing,
    Client,
    ClientClosed,
    ConfigurationError,
    DistributedLock,
    Lease,
    LeaseState,
    LockLost,
    LockTimeout,
    LossReason,
    NotHeld,
)
from multilock.kernel.holding import RELEASING
from multilock.kernel.runtime import Threads
from multilock.kernel.scopes import Scope
from multilock.lock import HeldLease
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import Answer, Call, Losses, Scripted, client_on, eventually, late, refused, silence


@pytest.fixture
def threads() -> Iterator[Client]:
    """A client on real time, for tests with threads of their own."""
    client = client_on(Scripted(), Threads())
    yield client
    client.close()


def take(backend: Scripted) -> None:
    """Release the newest lease's name by force, and let the server report it."""
    claim = backend.called("attempt")[-1].claims[0]
    backend.holders[claim.name] = "an operator"
    backend.notices.gone(claim.id, LossReason.TAKEN, "an operator took it")


def in_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert results, "it hangs"
    return results[0]


# with


def test_with_releases_at_the_end(client: Client, backend: Scripted) -> None:
    with client.lock("n") as lease:
        assert lease.is_held()
        assert backend.holders
    assert not lease.is_held()
    assert backend.holders == {}


def test_with_releases_when_the_body_raises(client: Client, backend: Scripted) -> None:
    with pytest.raises(KeyError), client.lock("n"):
        raise KeyError("the body's own")
    assert backend.holders == {}


@pytest.mark.parametrize("what", ["lock", "acquire", "try_acquire"])
def test_after_a_loss_the_normal_end_of_a_with_block_raises_lock_lost(
    client: Client, backend: Scripted, what: str
) -> None:
    lock = client.lock("n")
    manager: Any = {"lock": lock, "acquire": lock.acquire, "try_acquire": lock.try_acquire}[what]
    with pytest.raises(LockLost, match="operator") as caught, manager if what == "lock" else manager():
        take(backend)
    assert caught.value.loss is not None
    assert caught.value.loss.reason is LossReason.TAKEN


def test_after_a_loss_a_return_in_a_with_block_raises_lock_lost(client: Client, backend: Scripted) -> None:
    def body() -> str:
        with client.lock("n"):
            take(backend)
            return "not exclusive"

    with pytest.raises(LockLost):
        body()


def test_after_a_loss_an_exception_of_the_body_is_raised_with_a_note(client: Client, backend: Scripted) -> None:
    def body() -> None:
        with client.lock("n"):
            take(backend)
            raise KeyError("the body's own")

    with pytest.raises(KeyError) as caught:
        body()
    [note] = caught.value.__notes__
    assert "lock 'n' was lost" in note


def test_a_loss_raised_by_check_gets_no_note(client: Client, backend: Scripted) -> None:
    def body() -> None:
        with client.lock("n") as lease:
            take(backend)
            lease.check()

    with pytest.raises(LockLost) as caught:
        body()
    assert not hasattr(caught.value, "__notes__")


def test_a_loss_that_the_end_of_a_with_block_finds_is_raised(client: Client, backend: Scripted) -> None:
    with pytest.raises(LockLost), client.lock("n"):
        backend.holders["n"] = "an operator"


def test_a_pause_in_a_with_block_is_raised_at_its_end(client: Client, runtime: HandRuntime) -> None:
    with pytest.raises(LockLost) as caught, client.lock("n"):
        runtime.jump(100)
    assert caught.value.loss is not None
    assert caught.value.loss.reason is LossReason.PAUSED


@pytest.mark.parametrize("by", ["lease", "lock"])
def test_a_release_in_a_with_block_is_not_a_loss(client: Client, backend: Scripted, by: str) -> None:
    lock = client.lock("n")
    with lock as lease:
        assert (lease if by == "lease" else lock).release() is True
    assert len(backend.called("release")) == 1


def test_a_lease_can_be_entered_only_while_it_is_held(client: Client) -> None:
    lease = client.lock("n").acquire()
    lease.release()
    with pytest.raises(NotHeld), lease:
        pass


def test_one_lock_object_serves_many_threads_at_once(threads: Client) -> None:
    lock = threads.lock("n")
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    workers = [threading.Thread(target=work) for _ in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert most == 1


# lock.release() ends a lease of the calling thread only


def test_lock_release_ends_the_newest_lease_of_this_thread(client: Client, backend: Scripted) -> None:
    lock = client.lock("n")
    with pytest.raises(NotHeld):
        lock.release()
    lease = lock.acquire()
    assert isinstance(in_thread(lock.release), NotHeld)
    assert lease.is_held()
    assert lock.release() is True
    with pytest.raises(NotHeld):
        lock.release()
    assert backend.holders == {}


def test_lock_release_after_a_loss_returns_false_once(client: Client, backend: Scripted) -> None:
    lock = client.lock("n")
    lock.acquire()
    take(backend)
    assert lock.release() is False
    with pytest.raises(NotHeld):
        lock.release()


def test_a_lost_lease_released_by_hand_is_not_the_current_lease(client: Client, backend: Scripted) -> None:
    lock = client.lock("inner")
    with client.lock("outer") as outer:
        lease = lock.acquire()
        take(backend)
        assert client.current_lease() is lease, "its owner was not notified of it"
        assert lease.release() is False
        assert client.current_lease() is outer
        with pytest.raises(NotHeld):
            lock.release()


@pytest.mark.oracle
@pytest.mark.parametrize("found", ["by the clock", "by its release"])
def test_a_loss_found_by_a_release_by_hand_leaves_no_current_lease(
    client: Client, backend: Scripted, runtime: HandRuntime, found: str
) -> None:
    lease = client.lock("n").acquire()
    if found == "by the clock":
        runtime.jump(200)
    else:
        backend.holders["n"] = "an operator"
    assert lease.release() is False
    with pytest.raises(NotHeld):
        client.current_lease()


def test_a_lease_can_be_released_from_any_thread(client: Client, backend: Scripted) -> None:
    lease = client.lock("n").acquire()
    assert in_thread(lease.release) is True
    assert backend.holders == {}
    with pytest.raises(NotHeld):
        client.current_lease()


def test_the_current_lease_is_the_innermost_of_this_thread(client: Client) -> None:
    with pytest.raises(NotHeld):
        client.current_lease()
    with client.lock("outer") as outer:
        with client.lock("inner") as inner:
            assert client.current_lease() is inner
            assert client.current_lease("outer") is outer
            assert isinstance(in_thread(client.current_lease), NotHeld)
            with pytest.raises(NotHeld, match="third"):
                client.current_lease("third")
        assert client.current_lease() is outer


def test_lost_leases_that_are_never_released_are_forgotten(client: Client, backend: Scripted) -> None:
    kept = client.lock("kept").acquire()
    for number in range(500):
        client.lock(f"n{number}").acquire()
        take(backend)
    scope: Scope[HeldLease] = client._scope()
    assert len(scope._leases) < 70
    assert client.current_lease("kept") is kept


# Reentrancy


def test_a_reentrant_lock_returns_the_same_lease_and_every_release_counts_down(
    client: Client, backend: Scripted
) -> None:
    lock = client.lock("n", reentrant=True)
    lease = lock.acquire()
    assert lock.acquire() is lease
    assert client.lock("n", reentrant=True).acquire(0) is lease, "through any reentrant lock of this client"
    assert len(backend.called("attempt")) == 1
    assert lock.release() is True
    assert lease.release() is True
    assert lease.is_held()
    assert lease.release() is True
    assert not lease.is_held()
    assert lease.release() is False
    assert backend.holders == {}


def test_with_blocks_of_a_reentrant_lock_can_be_nested(client: Client, backend: Scripted) -> None:
    lock = client.lock("n", reentrant=True)
    with lock as outer, lock as inner:
        assert inner is outer
    assert len(backend.called("release")) == 1
    with pytest.raises(LockLost), lock, lock:
        take(backend)


def lock_twice(client: Client) -> tuple[Any, Any]:
    lock = client.lock("n", reentrant=True)
    return lock, lock


def acquire_twice(client: Client) -> tuple[Any, Any]:
    lock = client.lock("n", reentrant=True)
    return lock.acquire(), lock.acquire()


def lock_as_rlock(client: Client) -> tuple[Any, Any]:
    lock = client.lock("n", reentrant=True).as_threading_lock()
    return lock, lock


@pytest.mark.oracle
@pytest.mark.parametrize("bodies", [lock_twice, acquire_twice, lock_as_rlock])
def test_a_release_by_hand_in_an_inner_with_block_affects_no_outer_one(
    client: Client, backend: Scripted, bodies: Callable[[Client], tuple[Any, Any]]
) -> None:
    outer, inner = bodies(client)
    with outer:
        with inner:
            assert client.current_lease().release()
        assert client.current_lease().is_held()
        assert not backend.called("release")
    assert backend.holders == {}


def test_a_body_that_enters_a_lost_lease_of_another_body_keeps_its_fence(client: Client, backend: Scripted) -> None:
    lease = client.lock("n", hard_fence=True).acquire()
    fence = client._kernel.hard_fence()
    lease.__enter__()
    take(backend)
    with pytest.raises(LockLost):
        lease.__enter__()
    assert fence._until
    with pytest.raises(LockLost):
        lease.__exit__(None, None, None)
    assert not fence._until


def test_each_reentrant_lock_object_that_acquired_a_lease_holds_it(client: Client) -> None:
    one, other = client.lock("n", reentrant=True), client.lock("n", reentrant=True)
    with one as lease:
        assert not other.is_held()
        with other as again:
            assert again is lease
            assert one.is_held()
            assert other.is_held()
    assert not one.is_held()
    assert not other.is_held()


def test_each_reentrant_lock_object_that_acquired_a_lease_is_notified_once_of_its_loss(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    one, other, never = Losses(runtime), Losses(runtime), Losses(runtime)
    first, second = (client.lock("n", reentrant=True, on_lost=losses) for losses in (one, other))
    client.lock("n", reentrant=True, on_lost=never)
    for lock in (first, second, first, second):
        lock.acquire()
    take(backend)
    runtime.settle()
    assert one.reasons == other.reasons == [LossReason.TAKEN]
    assert never.calls == []


def test_the_callback_of_an_inner_acquire_stays_until_the_last_release(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    inner = Losses(runtime)
    outer = client.lock("n", reentrant=True).acquire()
    client.lock("n", reentrant=True, on_lost=inner).acquire()
    outer.release()  # a release does not name one of the two acquires
    take(backend)
    runtime.settle()
    assert inner.reasons == [LossReason.TAKEN]


def test_a_reentrant_lock_is_taken_for_other_threads_and_other_clients(
    client: Client, make: Callable[..., Client], backend: Scripted
) -> None:
    client.lock("n", reentrant=True).acquire()
    assert in_thread(client.lock("n", reentrant=True).try_acquire) is None
    assert make(backend).lock("n", reentrant=True).try_acquire() is None
    assert client.lock("n").try_acquire() is None, "this lock is not reentrant"


def test_a_with_block_may_end_in_another_thread_than_it_began(client: Client, backend: Scripted) -> None:
    lock = client.lock("n")
    with contextlib.ExitStack() as stack:
        lease = stack.enter_context(lock)
        assert in_thread(stack.pop_all().close) is None
    assert not lease.is_held()
    assert backend.holders == {}
    with pytest.raises(NotHeld):
        lock.__exit__(None, None, None)


class Dependency:
    """A generator with a ``with lock`` inside, as web frameworks use it: each half runs on any free thread."""

    def __init__(self, lock: Any) -> None:
        self._generator = self._hold(lock)

    def enter(self, pool: ThreadPoolExecutor) -> None:
        pool.submit(next, self._generator).result(10)

    def exit(self, pool: ThreadPoolExecutor) -> BaseException | None:
        return pool.submit(next, self._generator, None).exception(10)

    @staticmethod
    def _hold(lock: Any) -> Iterator[Any]:
        with lock as lease:
            yield lease


@pytest.fixture
def pools() -> Iterator[list[ThreadPoolExecutor]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]


def lose_newest(backend: Scripted) -> None:
    take(backend)
    del backend.holders["n"]


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("threading_lock", [False, True])
def test_a_with_block_of_a_generator_ends_its_own_lease_in_any_thread(
    threads: Client, pools: list[ThreadPoolExecutor], threading_lock: bool, where: int
) -> None:
    backend: Any = threads._kernel.backend
    lock: Any = threads.lock("n").as_threading_lock() if threading_lock else threads.lock("n")
    first, second = Dependency(lock), Dependency(lock)
    first.enter(pools[0])
    lose_newest(backend)
    second.enter(pools[1])
    assert isinstance(first.exit(pools[where]), LockLost)
    assert list(backend.holders) == ["n"], "the second request continues"
    assert second.exit(pools[where - 1]) is None
    assert backend.holders == {}


def entered(pool: ThreadPoolExecutor, lock: Any) -> tuple[contextlib.ExitStack, Any]:
    """Enter the lock object through an exit stack, in the thread of ``pool``. Returns the stack and the lease."""
    stack = contextlib.ExitStack()
    return stack, pool.submit(stack.enter_context, lock).result(10)


def closed(pool: ThreadPoolExecutor, stack: contextlib.ExitStack) -> BaseException | None:
    return pool.submit(stack.close).exception(10)


@pytest.mark.parametrize("threading_lock", [False, True])
def test_a_stack_closed_in_a_third_thread_ends_the_lost_lease_and_not_the_held_one(
    threads: Client, pools: list[ThreadPoolExecutor], threading_lock: bool
) -> None:
    backend: Any = threads._kernel.backend
    lock: Any = threads.lock("n").as_threading_lock() if threading_lock else threads.lock("n")
    first, _ = entered(pools[0], lock)
    lose_newest(backend)
    second, _ = entered(pools[1], lock)
    assert isinstance(closed(pools[2], first), LockLost)
    assert list(backend.holders) == ["n"]
    assert closed(pools[2], second) is None
    assert backend.holders == {}


def test_a_stack_closed_in_its_own_thread_ends_the_leases_entered_there(
    threads: Client, pools: list[ThreadPoolExecutor]
) -> None:
    backend: Any = threads._kernel.backend
    lock = threads.lock("n")
    first, _ = entered(pools[0], lock)
    lose_newest(backend)
    second, lease = entered(pools[1], lock)
    assert closed(pools[1], second) is None
    assert not lease.is_held()
    assert isinstance(closed(pools[0], first), LockLost)
    with pytest.raises(NotHeld):
        lock.__exit__(None, None, None)


def test_a_stack_closed_elsewhere_prefers_a_lease_released_by_hand_to_a_held_one(
    threads: Client, pools: list[ThreadPoolExecutor]
) -> None:
    lock = threads.lock("n")
    first, lease = entered(pools[0], lock)
    assert lease.release()
    second, held = entered(pools[1], lock)
    assert closed(pools[2], first) is None
    assert held.is_held()
    assert closed(pools[2], second) is None
    assert not held.is_held()


def test_of_two_leases_that_both_seem_held_a_third_thread_ends_none(
    threads: Client, pools: list[ThreadPoolExecutor]
) -> None:
    backend: Any = threads._kernel.backend
    lock = threads.lock("n")
    first, gone = entered(pools[0], lock)
    del backend.holders["n"]  # a force release, of which no lease is notified
    second, held = entered(pools[1], lock)
    assert isinstance(closed(pools[2], first), NotHeld)
    assert gone.is_held()
    assert held.is_held()
    assert closed(pools[1], second) is None
    with pytest.raises(LockLost):
        lock.__exit__(None, None, None)


def test_every_level_of_a_reentrant_lock_may_be_left_in_another_thread(
    threads: Client, pools: list[ThreadPoolExecutor]
) -> None:
    lock = threads.lock("n", reentrant=True)
    outer, lease = entered(pools[0], lock)
    inner, _ = entered(pools[0], lock)
    assert closed(pools[1], inner) is None
    assert lease.is_held()
    assert closed(pools[1], outer) is None
    assert not lease.is_held()


def test_a_lost_reentrant_lease_cannot_be_acquired_again(client: Client, backend: Scripted) -> None:
    lock = client.lock("n", reentrant=True)
    first = lock.acquire()
    lock.acquire()
    take(backend)
    assert lock.try_acquire() is None, "somebody else has it"
    del backend.holders["n"]
    second = lock.acquire()
    assert second is not first
    assert second.owner != first.owner
    assert lock.release() is True
    assert not second.is_held()


def test_a_reentrant_lease_lost_by_a_pause_cannot_be_acquired_again(client: Client, runtime: HandRuntime) -> None:
    lock = client.lock("n", reentrant=True)
    first = lock.acquire()
    runtime.jump(200)
    first_again = lock.try_acquire()
    assert first_again is not first
    assert not first.is_held()


# Misuse


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ttl": 0}, ValueError),
        ({"ttl": -1}, ValueError),
        ({"ttl": math.inf}, ValueError),
        ({"ttl": math.nan}, ValueError),
        ({"ttl": 10**400}, ValueError),
        ({"ttl": True}, TypeError),
        ({"ttl": "30"}, TypeError),
        ({"ttl": 3601}, ValueError),
        ({"renew": 1}, TypeError),
        ({"reentrant": None}, TypeError),
        ({"fair": "yes"}, TypeError),
        ({"on_lost": "print"}, TypeError),
        ({"unknown": 1}, TypeError),
    ],
)
def test_invalid_options_are_reported_before_any_request(
    client: Client, backend: Scripted, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.lock("n", **options)
    assert backend.calls == []


def test_a_ttl_is_rounded_up_to_what_the_backend_grants(make: Callable[..., Client], runtime: HandRuntime) -> None:
    client = make(Scripted(runtime, ttl_min=2.0, ttl_step=1.0))
    for asked, granted in [(0.5, 2.0), (2.0, 2.0), (2.1, 3.0), (30, 30.0)]:
        lock = client.lock("n", ttl=asked)
        assert lock.ttl == asked
        with lock as lease:
            assert lease.ttl == granted


def test_a_ttl_on_a_whole_step_is_not_rounded_up_by_float_errors(
    make: Callable[..., Client], runtime: HandRuntime
) -> None:
    client = make(Scripted(runtime, ttl_step=0.001))
    for asked in (0.1, 0.3, 0.7, 1.1, 29.999):
        with client.lock("n", ttl=asked) as lease:
            assert lease.ttl == asked


def test_fair_on_a_backend_without_order_raises_missing_capability(
    make: Callable[..., Client], runtime: HandRuntime
) -> None:
    with pytest.raises(CapabilityMissing):
        make(Scripted(runtime, fair=False)).lock("n", fair=True)


def closed_meanwhile(client: Client) -> Answer:
    def answer(backend: Scripted, call: Call) -> Any:
        granted = call.execute()
        client.close()
        return granted

    return answer


@pytest.mark.parametrize("refused_for", ["closed meanwhile", "too late"])
def test_a_refused_grant_becomes_no_lease(
    client: Client, backend: Scripted, runtime: HandRuntime, refused_for: str
) -> None:
    losses = Losses(runtime)
    lock = client.lock("n", on_lost=losses, renew=False)
    backend.script("attempt", late(40.0) if refused_for == "too late" else closed_meanwhile(client))
    with pytest.raises(BackendUnavailable if refused_for == "too late" else ClientClosed):
        lock.acquire(timeout=0)
    assert not lock.is_held()
    runtime.advance(100)
    assert not lock.is_held()
    assert losses.calls == []


def test_a_grant_that_is_too_late_hides_no_newer_lease(client: Client, backend: Scripted) -> None:
    lock = client.lock("n", renew=False)
    newer: list[Lease] = []

    def overtaken(backend: Scripted, call: Call) -> Any:
        granted = call.execute()
        backend.pass_time(40.0)
        del backend.holders["n"]  # the ttl of this lease is over
        newer.append(in_thread(lambda: lock.acquire(timeout=0)))
        return granted

    backend.script("attempt", overtaken)
    with pytest.raises(BackendUnavailable):
        lock.acquire(timeout=0)
    assert newer[0].is_held()
    assert lock.is_held()


def test_is_locked_sends_a_request_and_is_held_does_not(
    client: Client, make: Callable[..., Client], backend: Scripted
) -> None:
    lock, other = client.lock("n"), make(backend).lock("n")
    assert not lock.is_locked()
    lease = lock.acquire()
    asked = len(backend.called("inspect"))
    assert lock.is_held()
    assert in_thread(lock.is_held) is True
    assert not other.is_held()
    assert len(backend.called("inspect")) == asked
    assert other.is_locked()
    lease.release()
    assert not lock.is_held()


def test_a_lock_implements_the_protocol_distributed_lock(client: Client) -> None:
    assert isinstance(client.lock("n"), DistributedLock)


# The decorator


def test_a_decorated_function_runs_while_the_lock_is_held(client: Client, backend: Scripted) -> None:
    @client.locked("report/{kind}/{number}")
    def report(kind: str, number: int = 7) -> str:
        """Return a report."""
        return client.current_lease().name

    assert report("daily") == "report/daily/7"
    assert report(kind="weekly", number=2) == "report/weekly/2"
    assert report.__doc__ == "Return a report."
    assert backend.holders == {}


def test_a_decorated_function_that_lost_its_lock_raises(client: Client, backend: Scripted) -> None:
    @client.locked("n")
    def work() -> str:
        take(backend)
        return "done"

    with pytest.raises(LockLost):
        work()


def test_a_taken_lock_raises_lock_timeout_or_skips_the_function(client: Client, backend: Scripted) -> None:
    backend.holders["n"] = "somebody"
    ran: list[int] = []
    with pytest.raises(LockTimeout):
        client.locked("n", timeout=0)(lambda: ran.append(1))()
    assert client.locked("n", timeout=0, skip=True)(lambda: ran.append(1))() is None
    assert ran == []
    backend.always("attempt", silence())
    with pytest.raises(BackendUnavailable):
        client.locked("n", timeout=0, skip=True)(lambda: ran.append(1))()


def test_braces_can_be_part_of_a_name(client: Client) -> None:
    assert client.locked("a{{b}}")(lambda: client.current_lease().name)() == "a{b}"


def test_mistakes_in_a_decorator_are_reported_at_decoration(client: Client) -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="coroutine"):
        client.locked("n")(coroutine)
    with pytest.raises(TypeError, match="generator"):
        client.locked("n")(generator)
    with pytest.raises(ConfigurationError, match="order_id"):
        client.locked("n/{order_id}")(lambda number: number)
    with pytest.raises(ValueError):
        client.locked("")
    with pytest.raises(ValueError):
        client.locked("n", timeout=-1)
    with pytest.raises(TypeError):
        client.locked("n", ttll=3)


# as_threading_lock()


def test_the_adapter_behaves_as_a_threading_lock(threads: Client) -> None:
    lock = threads.lock("n").as_threading_lock()
    assert not lock.locked()
    assert lock.acquire() is True
    assert lock.locked()
    assert lock.acquire(blocking=False) is False
    assert lock.acquire(timeout=0.02) is False
    assert in_thread(lock.release) is None, "any thread may release"
    assert not lock.locked()
    with pytest.raises(RuntimeError):
        lock.release()
    with lock as entered:
        assert entered is True
        assert lock.locked()
    assert not lock.locked()


def test_the_adapter_refuses_the_calls_that_a_threading_lock_refuses(threads: Client) -> None:
    lock = threads.lock("n").as_threading_lock()
    with pytest.raises(ValueError):
        lock.acquire(False, 1)
    with pytest.raises(ValueError):
        lock.acquire(timeout=-2)
    with pytest.raises(TypeError, match="give -1 to wait forever"):
        lock.acquire(timeout=None)  # type: ignore[arg-type]


def test_the_adapter_shows_its_name_in_its_repr(threads: Client) -> None:
    lock = threads.lock("n").as_threading_lock()
    assert repr(lock) == "<ThreadingLock 'n' in scripted>"
    with lock:
        assert repr(lock) == "<ThreadingLock 'n' in scripted held>"


def test_the_adapter_of_a_reentrant_lock_behaves_as_an_rlock(threads: Client) -> None:
    lock = threads.lock("n", reentrant=True).as_threading_lock()
    assert lock.acquire()
    assert lock.acquire()
    assert isinstance(in_thread(lock.release), RuntimeError)
    assert in_thread(lambda: lock.acquire(blocking=False)) is False
    lock.release()
    assert lock.locked()
    lock.release()
    assert not lock.locked()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_condition_can_use_the_adapter(threads: Client, reentrant: bool) -> None:
    condition = threading.Condition(threads.lock("n", reentrant=reentrant).as_threading_lock())  # type: ignore[arg-type]
    items: list[int] = []
    got: list[int] = []

    def consume() -> None:
        with condition:
            while not items:
                assert condition.wait(10)
            got.append(items.pop())

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    for number in range(3):
        eventually(lambda number=number: len(condition._waiters) == 3 - number)  # type: ignore[attr-defined, misc]
        with condition:
            items.append(number)
            condition.notify()
        eventually(lambda number=number: len(got) == number + 1)  # type: ignore[misc]
    for consumer in consumers:
        consumer.join(10)
    assert sorted(got) == [0, 1, 2]


def test_a_condition_over_an_rlock_releases_every_level_while_it_waits(threads: Client) -> None:
    lock = threads.lock("n", reentrant=True).as_threading_lock()
    condition = threading.Condition(lock)  # type: ignore[arg-type]
    waiting = threading.Event()
    levels: list[bool] = []

    def wait() -> None:
        with condition, condition:
            waiting.set()
            condition.wait(10)
            lock.release()
            levels.append(lock.locked())
            lock.acquire()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(5)
    with condition:
        condition.notify()
    thread.join(10)
    assert levels == [True]
    assert not lock.locked()


def test_a_loss_before_the_wait_of_a_condition_loses_no_notification(client: Client, backend: Scripted) -> None:
    condition = threading.Condition(client.lock("n").as_threading_lock())  # type: ignore[arg-type]

    def wait_with_a_lost_lock() -> None:
        with condition:
            take(backend)
            condition.wait(0.01)

    with pytest.raises(LockLost):
        wait_with_a_lost_lock()
    assert not condition._waiters  # type: ignore[attr-defined]


def test_a_release_in_another_thread_ends_no_with(client: Client, backend: Scripted) -> None:
    lock = client.lock("n").as_threading_lock()

    def lose_it_inside() -> None:
        with lock:
            take(backend)
            backend.holders.clear()
            in_thread(lock.acquire)
            in_thread(lock.release)  # any thread may release the lock, but this must not end the ``with``
            assert backend.holders == {}

    with pytest.raises(LockLost):
        lose_it_inside()


def test_a_lost_lock_does_not_seem_held(client: Client, backend: Scripted) -> None:
    lock = client.lock("n").as_threading_lock()
    lock.acquire()
    take(backend)
    assert lock.locked(), "somebody else has it"
    with pytest.raises(LockLost):
        lock.release()
    with pytest.raises(RuntimeError):
        lock.release()
    del backend.holders["n"]
    with pytest.raises(LockLost), lock:
        take(backend)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by", ["with", "release"])
def test_a_thread_that_lost_a_shared_lock_gets_the_loss_and_leaves_the_next_holder_alone(
    threads: Client, by: str, reentrant: bool
) -> None:
    backend: Any = threads._kernel.backend
    lock = threads.lock("n", reentrant=reentrant).as_threading_lock()
    lost, end = threading.Event(), threading.Event()

    def lose() -> None:
        take(backend)
        del backend.holders["n"]
        lost.set()
        assert end.wait(10)

    def hold() -> None:
        if by == "with":
            with lock:
                lose()
        else:
            lock.acquire()
            lose()
            lock.release()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(hold)
        assert lost.wait(10)
        with lock:
            end.set()
            assert isinstance(first.exception(10), LockLost)
            assert threads.current_lease().is_held()
    assert backend.holders == {}
    assert not lock.locked()


def test_a_loss_is_raised_at_every_level_of_an_rlock(client: Client, backend: Scripted) -> None:
    lock = client.lock("n", reentrant=True).as_threading_lock()
    lock.acquire()
    lock.acquire()
    take(backend)
    for _ in range(2):
        with pytest.raises(LockLost):
            lock.release()
    with pytest.raises(NotHeld):
        lock.release()


def test_a_thread_with_the_number_of_an_ended_thread_is_not_taken_for_it(threads: Client) -> None:
    backend: Any = threads._kernel.backend
    lock = threads.lock("n").as_threading_lock()
    ended: set[int] = set()
    end = threading.Event()

    def lose() -> None:
        lock.acquire()
        take(backend)
        del backend.holders["n"]
        ended.add(threading.get_ident())

    for _ in range(5):
        thread = threading.Thread(target=lose)
        thread.start()
        thread.join(10)
    living = [threading.Thread(target=end.wait, args=(20,)) for _ in range(10)]
    try:
        for thread in living:
            thread.start()
        assert ended & {thread.ident for thread in living}
        lock._tidy()
        assert not lock._taken
    finally:
        end.set()
        for thread in living:
            thread.join(10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_wait_on_a_condition_whose_lock_was_lost_raises_lock_lost(
    client: Client, backend: Scripted, reentrant: bool
) -> None:
    lock = client.lock("n", reentrant=reentrant).as_threading_lock()
    condition = threading.Condition(lock)  # type: ignore[arg-type]

    def wait() -> None:
        with condition:
            take(backend)
            condition.wait(1)

    with pytest.raises(LockLost) as caught:
        wait()
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(NotHeld):
        lock.release()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_condition_that_cannot_reacquire_its_lock_leaves_the_next_holder_alone(
    threads: Client, reentrant: bool
) -> None:
    backend: Any = threads._kernel.backend
    lock = threads.lock("n", reentrant=reentrant).as_threading_lock()
    condition = threading.Condition(lock)  # type: ignore[arg-type]

    def wait() -> None:
        with condition:
            condition.wait(10)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        eventually(lambda: condition._waiters and not backend.holders)  # type: ignore[attr-defined]
        with condition:
            backend.always("attempt", refused(BackendRejected("NOAUTH")))
            condition.notify()
            assert isinstance(waiting.exception(10), BackendRejected)
            assert threads.current_lease().is_held()
            backend.always("attempt", None)
    assert backend.holders == {}
    assert not lock.locked()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_thread_that_waits_on_a_condition_does_not_count_as_its_owner(threads: Client, reentrant: bool) -> None:
    backend: Any = threads._kernel.backend
    lock = threads.lock("n", reentrant=reentrant).as_threading_lock()
    condition = threading.Condition(lock)  # type: ignore[arg-type]

    def wait() -> bool:
        with condition:
            return condition.wait(10)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        eventually(lambda: condition._waiters and not backend.holders)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            condition.notify()
        with pytest.raises(NotHeld):
            lock.release()
        with condition:
            condition.notify()
        assert waiting.result(10) is True


def test_wait_lost_of_many_threads_ends_with_the_release(threads: Client) -> None:
    lease = threads.lock("n").acquire()
    results: list[object] = []
    waiters = [threading.Thread(target=lambda: results.append(lease.wait_lost(10))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    eventually(lambda: len(inner(lease)._hooks or ()) == 3)
    lease.release()
    for waiter in waiters:
        waiter.join(5)
    assert results == [None] * 3


@pytest.mark.parametrize("timeout", [math.inf, sys.maxsize, 1e300])
def test_a_timeout_longer_than_threads_can_wait_means_forever(timeout: float) -> None:
    threads = client_on(Scripted(), Threads(), outage_timeout=timeout)
    lease = threads.lock("n").acquire(timeout)
    results: list[object] = []
    waiters = [
        threading.Thread(daemon=True, target=lambda: results.append(lease.wait_lost(timeout))),
        threading.Thread(daemon=True, target=lambda: results.append(threads.lock("n").acquire(timeout).release())),
        threading.Thread(daemon=True, target=lambda: results.append(threads.lock("n").acquire(timeout).release())),
    ]
    for waiter in waiters:
        waiter.start()
    eventually(lambda: threads._kernel.gate._lines and len(threads._kernel.gate._lines["n"].bells) == 2)
    lease.release()
    for waiter in waiters:
        waiter.join(5)
    assert sorted(map(str, results)) == ["None", "True", "True"]
    threads.close()


def test_a_simultaneous_release_and_loss_count_as_one_of_them(threads: Client) -> None:
    backend: Any = threads._kernel.backend
    for _ in range(100):
        losses = Losses()
        lease = threads.lock("n", on_lost=losses).acquire()
        claim = inner(lease).claim.id
        start = threading.Barrier(3)
        answers: list[bool] = []

        def release(lease: Lease = lease, start: threading.Barrier = start, answers: list[bool] = answers) -> None:
            start.wait(5)
            answers.append(lease.release())

        def lose(claim: str = claim, start: threading.Barrier = start) -> None:
            start.wait(5)
            backend.notices.gone(claim, LossReason.TAKEN, "taken")

        racers = [threading.Thread(target=release), threading.Thread(target=release), threading.Thread(target=lose)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(5)
        if True in answers:
            assert answers.count(True) == 1
            assert losses.calls == []
        else:
            losses.wait()
        eventually(lambda: backend.holders == {})
        assert len(losses.calls) == 1 - answers.count(True)


def test_a_lease_whose_release_has_begun_at_close_is_released_and_never_lost(
    threads: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = threads._kernel.backend
    losses, answers, answer = Losses(), list[bool](), threading.Event()

    def waits(backend: Scripted, call: Call) -> Any:
        answer.wait(5)
        return call.execute()

    backend.script("release", waits)
    lease = threads.lock("n", on_lost=losses).acquire()
    releasing = threading.Thread(target=lambda: answers.append(lease.release()))
    lose = threads._kernel.losses.lose

    def release_first(*args: Any, **options: Any) -> bool:  # called when close() is about to lose the lease
        if not releasing.ident:
            releasing.start()
            eventually(lambda: inner(lease).stage == RELEASING)
            threading.Timer(0.05, answer.set).start()
        return lose(*args, **options)

    monkeypatch.setattr(threads._kernel.losses, "lose", release_first)
    threads.close()
    releasing.join(5)
    assert answers == [True]
    assert losses.calls == []
    assert lease.state is LeaseState.RELEASED
    assert backend.holders == {}
