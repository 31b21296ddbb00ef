"""Ctrl-C, or a time limit by signal, at any point of a ``with``: the lock is released."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from multilock import Client
from multilock.kernel.inside import inside
from multilock.testing import HandRuntime
from tests.unit.kit import Scripted, interrupted_at


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine that never began
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
    ],
)
def test_an_interrupt_anywhere_in_a_with_still_releases_the_lock(
    client: Client, backend: Scripted, runtime: HandRuntime, use: Callable[[Client], None], function: str
) -> None:
    held = []
    step = 0
    while True:
        with interrupted_at(step, function) as where, contextlib.suppress(KeyboardInterrupt):
            use(client)
        if not where:
            break
        runtime.advance(0.5)  # time for the work in the background
        # At the points where __enter__ or __exit__ itself begins, none of our code has run yet, so we cannot cover
        # them.
        if backend.holders and not where[0].partition(":")[0].endswith(("__enter__", "__exit__")):
            held.append((step, where))
        backend.holders.clear()
        client._kernel.held.clear()
        step += 1
        assert threading.get_ident() not in inside, "every later release of this thread would be left to another one"
    assert step > 10
    assert held == []
