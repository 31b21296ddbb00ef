"""Whether Ctrl-C, a signal or another thread interrupts a ``with`` at any point, its lock is released, and not too
early."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from multilock import Client, DistributedLock, Leadership, Lease, NotHeld, system
from multilock.kernel.holding import EndOfBody
from multilock.kernel.inside_backend import inside
from multilock.kernel.release import Releases
from multilock.testing import HandRuntime
from tests.unit.kit import PRODUCT, Scripted, ctrl_c_now, eventually, interrupted_at


def enter_lock(client: Client) -> None:
    with client.lock("n"):
        pass


def enter_lease(client: Client) -> None:
    with client.lock("n").acquire():
        pass


def enter_reentrant(client: Client) -> None:
    lock = client.lock("n", reentrant=True)
    with lock, contextlib.suppress(KeyboardInterrupt), lock:
        pass


def enter_decorated(client: Client) -> None:
    @client.locked("n", reentrant=True)
    def work() -> None:
        pass

    with client.lock("n", reentrant=True), contextlib.suppress(KeyboardInterrupt):
        work()


def enter_by_an_exit_stack(client: Client) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(client.lock("n"))


def enter_threading_lock(client: Client) -> None:
    with client.lock("n").as_threading_lock():
        pass


def enter_reentrant_threading_lock(client: Client) -> None:
    lock = client.lock("n", reentrant=True).as_threading_lock()
    with lock, contextlib.suppress(KeyboardInterrupt), lock:
        pass


def release_by_hand_inside(client: Client) -> None:
    lock = client.lock("n", reentrant=True)
    with lock as outer:
        with contextlib.suppress(KeyboardInterrupt), lock as inner:
            inner.release()
        assert outer.is_held()


def enter_twice(client: Client) -> None:
    with client.lock("n").acquire() as lease:
        with contextlib.suppress(KeyboardInterrupt), lease:
            pass
        assert lease.is_held()


def enter_a_set_over_a_part(client: Client) -> None:
    with client.lock("n", reentrant=True) as outer:
        with contextlib.suppress(KeyboardInterrupt), client.lock_all(["m", "n"], reentrant=True):
            pass
        with outer:
            pass
        assert outer.is_held()


def release_the_rest_of_a_set(client: Client) -> None:
    lease = client.lock_all(["m", "n"]).acquire()
    lease.leases[1].release()
    lease.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
@pytest.mark.parametrize(
    ("use", "function"),
    [
        (enter_lock, "Lock.__enter__"),
        (enter_lock, "Lock.__exit__"),
        (enter_lease, "Lock.acquire"),
        (enter_lease, "Waits.__exit__"),
        (enter_reentrant, "Handing.reenter"),
        (enter_reentrant, "Lock.__exit__"),
        (enter_decorated, "Handing.reenter"),
        (enter_by_an_exit_stack, "Lock.__exit__"),
        (enter_threading_lock, "ThreadingLock.__enter__"),
        (enter_threading_lock, "ThreadingLock.__exit__"),
        (enter_reentrant_threading_lock, "ThreadingLock.__exit__"),
        (release_by_hand_inside, "Waits.release"),
        (enter_twice, "Waits.__enter__"),
        (enter_a_set_over_a_part, "HeldSet._let_go"),
        (release_the_rest_of_a_set, "HeldSet._give_back_parts"),
    ],
)
def test_an_interrupt_anywhere_in_a_with_block_still_releases_the_lock(
    client: Client, backend: Scripted, runtime: HandRuntime, use: Callable[[Client], None], function: str
) -> None:
    held = []
    step = 0
    while True:
        with interrupted_at(step, function) as where, contextlib.suppress(KeyboardInterrupt):
            use(client)
        if not where:
            break
        runtime.advance(0.5)  # time for work in the background
        # When __enter__ or __exit__ itself begins, none of our code has run yet, so an interrupt there cannot be
        # handled.
        if backend.holders and not where[0].partition(":")[0].endswith(("__enter__", "__exit__")):
            held.append((step, where))
        backend.holders.clear()
        client._kernel.held.clear()
        step += 1
        assert threading.get_ident() not in inside, "every later release of this thread would be left to another one"
    assert step > 10
    assert held == []


def one_lease(client: Client) -> tuple[Lease, Lease]:
    lease = client.lock("n").acquire()
    return lease, lease


def one_set(client: Client) -> tuple[Lease, Lease]:
    lease = client.lock_all(["m", "n"]).acquire()
    return lease, lease


def set_and_part(client: Client) -> tuple[Lease, Lease]:
    lease = client.lock_all(["m", "n"]).acquire()
    return lease, lease.leases[1]


def leadership(client: Client) -> tuple[Lease, Lease]:
    lease = client.election("n", grace=0.1).campaign()
    return lease, lease


def leave(lease: Any) -> None:
    lease.__exit__(None, None, None)


def leave_by_an_interrupt(lease: Any) -> None:
    lease._release_after_interrupt(EndOfBody())


@pytest.mark.parametrize(
    ("make", "end"),
    [
        *((make, leave) for make in (one_lease, one_set, set_and_part, leadership)),
        (one_lease, leave_by_an_interrupt),
    ],
)
def test_a_body_that_begins_as_the_last_one_ends_has_the_lock(
    make: Callable[[Client], tuple[Lease, Lease]], end: Callable[[Lease], None]
) -> None:
    function = "Waits.__exit__" if end is leave else "Waits._release_after_interrupt"
    backend = Scripted()
    step = 0
    where = ["at first"]
    while where:
        with Client(backend, ttl=20) as client:
            lease, other = make(client)
            lease.__enter__()
            begun: list[Lease] = []

            def begin(other: Lease = other, begun: list[Lease] = begun) -> None:
                with contextlib.suppress(NotHeld):
                    begun.append(other.__enter__())

            thread = threading.Thread(target=begin, daemon=True)

            def meanwhile(thread: threading.Thread = thread) -> None:
                thread.start()
                thread.join(0.02)  # with a limit, because that thread may wait for a lock that this one holds

            with interrupted_at(step, function, PRODUCT, interrupt=meanwhile) as where:
                end(lease)
            if where:
                thread.join(5)
            for body in begun:
                assert body.is_held(), where
                assert "n" in backend.holders, where
                body.__exit__(None, None, None)
            eventually(lambda: not backend.holders)
        step += 1
    assert step > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
def test_a_body_of_a_part_has_the_lock_after_an_interrupted_set(
    client: Client, backend: Scripted, runtime: HandRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = Releases.go_on
    begun: list[Lease] = []
    step = 0
    where = ["at first"]
    while where:
        lease, part = set_and_part(client)
        lease.__enter__()

        def after_a_body_has_begun(releases: Releases, lease: Any, part: Lease = part) -> None:
            with contextlib.suppress(NotHeld):
                begun.append(part.__enter__())
            go_on(releases, lease)

        monkeypatch.setattr(Releases, "go_on", after_a_body_has_begun)
        with (
            interrupted_at(step, "HeldSet._let_go", PRODUCT) as where,
            contextlib.suppress(KeyboardInterrupt),
        ):
            lease.__exit__(None, None, None)
        for body in begun:
            assert body.is_held(), where
            assert "n" in backend.holders, where
            body.__exit__(None, None, None)
        begun.clear()
        runtime.advance(0.5)
        assert backend.holders == {}, where
        step += 1
    assert step > 10


@pytest.mark.parametrize("hold", [one_lease, one_set])
def test_a_refused_body_does_not_stop_the_release_by_a_finalizer(
    client: Client, backend: Scripted, runtime: HandRuntime, hold: Callable[[Client], tuple[Lease, Lease]]
) -> None:
    step = 0
    where = ["at first"]
    while where:
        lease, _ = hold(client)
        lease.__enter__()
        inside.add(threading.get_ident())  # as if a finalizer interrupted a call of the backend
        try:
            lease.__exit__(None, None, None)
        finally:
            inside.discard(threading.get_ident())
        with (
            interrupted_at(step, "Waits.__enter__", PRODUCT, interrupt=runtime.settle) as where,
            pytest.raises(NotHeld),
        ):
            lease.__enter__()
        runtime.settle()
        assert backend.holders == {}, where
        step += 1
    assert step > 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
@pytest.mark.parametrize("hold", [one_lease, one_set])
def test_an_interrupted_release_by_a_finalizer_is_finished(
    client: Client, backend: Scripted, runtime: HandRuntime, hold: Callable[[Client], tuple[Lease, Lease]]
) -> None:
    step = 0
    where = ["at first"]
    while where:
        lease, _ = hold(client)
        inside.add(threading.get_ident())  # as if a finalizer interrupted a call of the backend
        try:
            with (
                interrupted_at(step, "Releases._release_from_within", PRODUCT) as where,
                contextlib.suppress(KeyboardInterrupt),
                lease,
            ):
                pass
        finally:
            inside.discard(threading.get_ident())
        assert not system.is_owned(client._kernel.lock), where
        runtime.advance(0.5)
        assert backend.holders == {}, where
        step += 1
    assert step > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
def test_a_refused_body_does_not_stop_an_interrupted_resignation(
    client: Client, backend: Scripted, runtime: HandRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, after_interrupt = Leadership._check_at_entry, Leadership._release_after_interrupt
    step = 0
    where = ["at first"]
    while where:
        lease, _ = leadership(client)
        lease.__enter__()
        begun: list[Lease] = []

        def beside_a_body(lease: Any, end: EndOfBody, begun: list[Lease] = begun) -> None:
            def meanwhile(lease: Any, its_end: EndOfBody) -> None:
                after_interrupt(lease, end)
                check(lease, its_end)

            with monkeypatch.context() as patch, contextlib.suppress(NotHeld):
                patch.setattr(Leadership, "_release_after_interrupt", after_interrupt)
                patch.setattr(Leadership, "_check_at_entry", meanwhile)
                begun.append(lease.__enter__())

        monkeypatch.setattr(Leadership, "_release_after_interrupt", beside_a_body)
        with (
            interrupted_at(step, "Leading._body_ends", PRODUCT) as where,
            contextlib.suppress(KeyboardInterrupt),
        ):
            lease.__exit__(None, None, None)
        for body in begun:
            assert body.is_held(), where
            body.__exit__(None, None, None)
        runtime.advance(0.5)
        assert backend.holders == {}, where
        step += 1
    assert step > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
@pytest.mark.parametrize("make", [one_lease, one_set, set_and_part, leadership])
def test_an_interrupted_end_beside_that_of_another_body_leaves_nothing(
    make: Callable[[Client], tuple[Lease, Lease]],
) -> None:
    backend = Scripted()
    step = 0
    where = ["at first"]
    while where:
        with Client(backend, ttl=20) as client:
            lease, other = make(client)
            lease.__enter__()
            other.__enter__()

            def meanwhile(other: Lease = other) -> None:
                thread = threading.Thread(target=other.__exit__, args=(None, None, None), daemon=True)
                thread.start()
                thread.join(0.02)
                ctrl_c_now()

            with (
                interrupted_at(step, "Waits._exit", PRODUCT, interrupt=meanwhile) as where,
                contextlib.suppress(KeyboardInterrupt),
            ):
                lease.__exit__(None, None, None)
            if not where:
                other.__exit__(None, None, None)
            eventually(lambda: not backend.holders)
        step += 1
    assert step > 10


def enter_again(lock: DistributedLock) -> None:
    lock.__enter__()


def acquire_again(lock: DistributedLock) -> None:
    lock.acquire()


@pytest.mark.parametrize("again", [enter_again, acquire_again])
def test_an_interrupted_inner_acquire_beside_another_body_leaves_its_outer(
    again: Callable[[DistributedLock], None],
) -> None:
    backend = Scripted()
    function = "Lock.__enter__" if again is enter_again else "Lock.acquire"
    step = 0
    where = ["at first"]
    while where:
        with Client(backend, ttl=20) as client:
            lock = client.lock("n", reentrant=True)
            lease = lock.acquire()
            lease.__enter__()
            if again is enter_again:
                lease.__enter__()
            other = threading.Thread(target=lease.__exit__, args=(None, None, None), daemon=True)

            def meanwhile(other: threading.Thread = other) -> None:
                other.start()
                other.join(0.02)  # with a limit, because that thread may wait for a lock that this one holds
                ctrl_c_now()

            with (
                interrupted_at(step, function, PRODUCT, interrupt=meanwhile) as where,
                contextlib.suppress(KeyboardInterrupt),
            ):
                again(lock)
            if where:
                other.join(5)
                if again is enter_again:
                    assert lease.is_held(), where
                    assert "n" in backend.holders, where
                    lease.__exit__(None, None, None)
                eventually(lambda: not backend.holders)
        step += 1
    assert step > 10


def test_a_finalizer_that_gets_no_lock_releases_under_no_new_body(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    lease.__enter__()
    locked, go = threading.Event(), threading.Event()

    def keep_the_lock() -> None:
        with client._kernel.lock:
            locked.set()
            go.wait(10)

    keeper = threading.Thread(target=keep_the_lock)
    keeper.start()
    assert locked.wait(10)
    inside.add(threading.get_ident())  # as if a finalizer interrupted a call of the backend
    try:
        lease.__exit__(None, None, None)
    finally:
        inside.discard(threading.get_ident())
        go.set()
        keeper.join()
    with lease:
        runtime.advance(0.5)
        assert lease.is_held()
        assert "n" in backend.holders
    runtime.advance(0.5)
    assert backend.holders == {}
