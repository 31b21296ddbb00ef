"""Each callback of the user runs on its own thread and starts soon, even while other callbacks block."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from multilock import Loss, LossReason
from multilock.kernel.blocking import BlockingFace
from multilock.kernel.callbacks import ThreadCallbacks
from multilock.kernel.interrupts import Once
from multilock.kernel.runtime import Threads, now
from multilock.kernel.timers import Timers
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import START_OF_A_THREAD, Losses, Scripted, client_on, ctrl_c, eventually, refuse_threads


class Ticking:
    def __init__(self) -> None:
        runtime = Threads()
        self.timers = Timers(lambda at: self.ticker.poke(at))
        self.ticker = runtime.ticker(lambda: self.timers.step(now()), lambda error: None, "timers")
        self.ticker.start()
        self.callbacks = ThreadCallbacks(runtime, self.timers)


@pytest.fixture
def ticking() -> Ticking:
    return Ticking()


def callback_threads() -> int:
    return sum(thread.name == "multilock-callback" for thread in threading.enumerate())


def test_a_callback_runs_on_a_thread_of_its_own(ticking: Ticking) -> None:
    where: list[str] = []
    ticking.callbacks.start(lambda: where.append(threading.current_thread().name))
    assert ticking.callbacks.wait(5)
    assert where == ["multilock-callback"]
    eventually(lambda: callback_threads() == 0)


@pytest.mark.parametrize(
    ("function", "after"),
    [("ThreadCallbacks._next", None), ("ThreadCallbacks._relieve", None), ("Thread.start", START_OF_A_THREAD)],
)
def test_a_callback_whose_start_is_interrupted_is_called_once(
    ticking: Ticking, function: str, after: str | None
) -> None:
    called: list[int] = []
    with ctrl_c(function, after):
        ticking.callbacks.start(called.append, 1)
    assert ticking.callbacks.wait(5)
    time.sleep(0.3)  # a second thread would have started by now
    assert called == [1]
    assert ticking.callbacks.wait(0)


def test_the_last_reference_held_by_a_callback_is_dropped_on_the_callbacks_thread() -> None:
    ended: list[str] = []

    class Job:
        def stop(self, *_: object) -> None: ...

        def __del__(self) -> None:
            ended.append(threading.current_thread().name)

    class Joining(Threads):
        """A runtime in which a start of a thread returns only after the thread has ended, as if the starting thread was
        stopped in between."""

        def spawn(self, run: Callable[[], None], name: str) -> None:
            thread = threading.Thread(target=run, name=name)
            thread.start()
            thread.join()

    ThreadCallbacks(Joining(), Timers(lambda at: None)).start(Once(Job().stop, lambda: None))
    assert ended == ["multilock-callback"]


def test_a_callback_that_raises_is_logged_and_affects_nothing_else(
    ticking: Ticking, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def fail() -> None:
        raise ValueError("the user's bug")

    with caplog.at_level(logging.ERROR, "multilock"):
        ticking.callbacks.start(fail)
        ticking.callbacks.start(called.append, 1)
        assert ticking.callbacks.wait(5)
    assert called == [1]
    assert "the user's bug" in caplog.text


def test_a_callback_that_raises_system_exit_is_logged_too(ticking: Ticking, caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with caplog.at_level(logging.ERROR, "multilock"):
        ticking.callbacks.start(leave)
        assert ticking.callbacks.wait(10), "it counts as ended"
    assert "SystemExit" in caplog.text


def test_a_callback_that_hangs_delays_no_other(ticking: Ticking) -> None:
    hang = threading.Event()
    called = threading.Event()
    for _ in range(10):
        ticking.callbacks.start(hang.wait, 10)
    ticking.callbacks.start(called.set)
    assert called.wait(5)
    assert not ticking.callbacks.wait(0.01)
    hang.set()
    assert ticking.callbacks.wait(5)


def test_at_most_64_start_at_once_not_counting_those_that_hang(ticking: Ticking) -> None:
    hang = threading.Event()
    started: list[float] = []

    def callback() -> None:
        started.append(now())
        hang.wait(20)

    before = now()
    for _ in range(150):
        ticking.callbacks.start(callback)
    eventually(lambda: len(started) >= 64)
    with_the_first = sum(at < before + 0.1 for at in started)
    assert with_the_first <= 64
    eventually(lambda: len(started) == 150, within=10)
    assert started[64] - before >= 0.1
    hang.set()
    assert ticking.callbacks.wait(10)
    eventually(lambda: callback_threads() == 0)


def test_a_thousand_quick_callbacks_need_no_thousand_threads(ticking: Ticking) -> None:
    most = 0
    done: list[int] = []

    def callback(number: int) -> None:
        nonlocal most
        most = max(most, callback_threads())
        done.append(number)

    for number in range(1000):
        ticking.callbacks.start(callback, number)
    assert ticking.callbacks.wait(10)
    assert sorted(done) == list(range(1000))
    assert most <= 64


@pytest.mark.oracle
def test_a_callback_without_a_thread_is_tried_again(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_threads(monkeypatch)["multilock-callback"] = 5
    called: list[int] = []
    for number in range(3):
        ticking.callbacks.start(called.append, number)
    assert ticking.callbacks.wait(5)
    assert sorted(called) == [0, 1, 2]
    assert "new thread" in caplog.text


@pytest.mark.oracle
def test_the_loss_of_many_locks_calls_each_callback_once() -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), BlockingFace)
    losses = Losses()
    for number in range(300):
        client.lock(f"n{number}", on_lost=losses).acquire()
    backend.notices.group_gone("server", "restarted")
    losses.wait(300)
    client.close()
    assert len(losses.calls) == len({loss.lease.name for loss in losses.calls}) == 300


def test_a_callback_may_use_the_lock_and_the_client() -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), BlockingFace)
    results: list[object] = []
    finished = threading.Event()

    def callback(loss: Loss) -> None:
        results.append(loss.lease.is_held())
        results.append(client.lock("n").acquire(5).release())
        finished.set()

    client.lock("n", on_lost=callback).acquire()
    [call] = backend.called("attempt")
    del backend.holders["n"]
    backend.notices.gone(call.claims[0].id, LossReason.TAKEN, "taken")
    assert finished.wait(5)
    assert results == [False, True]
    client.close()


def test_a_callback_may_close_the_client() -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), BlockingFace, ttl=2.0)
    closed: list[float] = []

    def close(loss: Loss) -> None:
        client.close()
        closed.append(now())

    lease = client.lock("n", on_lost=close).acquire()
    assert lease.is_held()
    backend.notices.group_gone("server", "restarted")
    eventually(lambda: closed, within=5)
    assert backend.closed == 1


def test_close_returns_after_every_loss_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), BlockingFace, ttl=60.0)
    called, go_on = threading.Event(), threading.Event()
    lease = client.lock("n", on_lost=lambda loss: called.set()).acquire()

    def on_a_busy_machine() -> None:
        go_on.wait(10)

    assert inner(lease)._at_end(on_a_busy_machine)
    [call] = backend.called("attempt")
    teller = threading.Thread(target=backend.notices.gone, args=(call.claims[0].id, LossReason.TAKEN, "taken"))
    teller.start()
    assert called.wait(5)
    assert not lease.release()
    closer = threading.Thread(target=client.close)
    closer.start()
    closer.join(0.3)
    ended_before = not closer.is_alive()
    go_on.set()
    closer.join(10)
    teller.join(10)
    assert not ended_before
    assert "lost the lock 'n' (taken)" in caplog.text


# ---- deadlines


def loss_valid_for(seconds: float, at: float) -> Loss:
    return Loss(None, LossReason.EXPIRED, False, "", at, at + seconds)  # type: ignore[arg-type]


@pytest.mark.oracle
def test_many_loss_callbacks_begin_before_their_validity_ends() -> None:
    runtime = HandRuntime(threads=True)
    timers = Timers(lambda at: None)
    callbacks = ThreadCallbacks(runtime, timers)
    go_on, begun = threading.Event(), []

    def writes(loss: Loss) -> None:
        begun.append(loss)
        go_on.wait(30)

    for _ in range(150):
        # This time is too short for the callback to count as hanging.
        callbacks.start(writes, loss_valid_for(0.08, runtime.now()))
    eventually(lambda: len(begun) == 64)
    runtime.jump(0.05)
    timers.step(runtime.now())
    eventually(lambda: len(begun) == 150)
    go_on.set()


@pytest.mark.oracle
def test_the_lease_that_ends_first_has_its_callback_first() -> None:
    runtime = HandRuntime(start=0.0)
    callbacks = ThreadCallbacks(runtime, Timers(lambda at: None))
    order: list[float] = []
    with callbacks.gathering():
        for seconds in (3.0, 1.0, 2.0):
            callbacks.start(lambda loss: order.append(loss.valid_until), loss_valid_for(seconds, 0.0))
    assert order == [1.0, 2.0, 3.0]


def test_many_losses_at_once_need_no_thread_each(ticking: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[str] = []

    def count(run: Callable[[], None], name: str) -> None:
        spawned.append(name)
        spawn(run, name)

    spawn = ticking.callbacks._runtime.spawn
    monkeypatch.setattr(ticking.callbacks._runtime, "spawn", count, raising=False)
    called: list[Loss] = []
    with ticking.callbacks.gathering():
        for _ in range(500):
            ticking.callbacks.start(called.append, loss_valid_for(60.0, now()))
        assert called == []
    assert ticking.callbacks.wait(20)
    assert len(called) == 500
    assert len(spawned) <= 64


def test_a_callback_that_closes_the_client_does_not_wait_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    client = client_on(Scripted(), Threads(), ttl=30.0, request_timeout=20.0)
    took: list[float] = []

    def close(loss: Loss) -> None:
        began = time.monotonic()
        client.close()
        took.append(time.monotonic() - began)

    lease: Any = client.lock("n", on_lost=close).acquire()
    client._kernel.monitor.gone(lease.claim.id, LossReason.TAKEN, "an operator took it")
    eventually(lambda: took, within=15)
    assert took[0] < 10


def test_a_callback_that_returns_a_coroutine_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def stop() -> None: ...

    client = client_on(Scripted(), Threads(), ttl=30.0)
    client.lock("n", on_lost=lambda loss: stop()).acquire()
    client._kernel.losses.lose_all(LossReason.TAKEN, "all are gone")
    eventually(lambda: "which a blocking client cannot await" in caplog.text)
    client.close()
