"""The few threads that carry requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from multilock.kernel import workers as module
from multilock.kernel.workers import ThreadWorkers
from tests.unit.kit import eventually


class Spawner:
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.failures = 0
        self.later: list[Callable[[], None]] = []  # what is to be called soon

    def __call__(self, run: Callable[[], None], name: str) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("can't start new thread")
        thread = threading.Thread(target=run, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self.threads)


@pytest.fixture
def spawner() -> Spawner:
    return Spawner()


def test_jobs_are_done_by_few_threads_started_on_demand(spawner: Spawner) -> None:
    workers = ThreadWorkers(spawner, "w", 3, spawner.later.append)
    assert spawner.threads == []
    hold = threading.Event()
    done: list[int] = []

    def job(number: int) -> None:
        hold.wait(10)
        done.append(number)

    for number in range(20):
        workers.submit(lambda number=number: job(number))  # type: ignore[misc]
    assert len(spawner.threads) == 3
    hold.set()
    eventually(lambda: len(done) == 20)
    workers.close()
    eventually(lambda: spawner.alive() == 0)


def test_an_idle_thread_is_used_again(spawner: Spawner) -> None:
    workers = ThreadWorkers(spawner, "w", 8, spawner.later.append)
    for _ in range(50):
        done = threading.Event()
        workers.submit(done.set)
        assert done.wait(5)
        eventually(lambda: workers._idle == 1)
    assert len(spawner.threads) == 1
    workers.close()


def test_threads_end_when_idle_and_start_again(spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 0.02)
    workers = ThreadWorkers(spawner, "w", 2, spawner.later.append)
    for _ in range(30):
        done = threading.Event()
        workers.submit(done.set)
        assert done.wait(5), "a job was left without a thread"
        threading.Event().wait(0.018)
    eventually(lambda: spawner.alive() == 0)
    assert workers._threads == 0
    assert workers._idle == 0


def test_after_close_jobs_submitted_before_are_done_and_none_is_taken(spawner: Spawner) -> None:
    workers = ThreadWorkers(spawner, "w", 1, spawner.later.append)
    hold = threading.Event()
    done: list[str] = []

    def wait() -> None:
        hold.wait(10)

    workers.submit(wait)
    workers.submit(lambda: done.append("before"))
    workers.close()
    workers.submit(lambda: done.append("after"))
    hold.set()
    eventually(lambda: spawner.alive() == 0)
    assert done == ["before"]


def test_a_thread_that_could_not_be_started_is_not_counted_and_its_job_waits(
    spawner: Spawner, caplog: pytest.LogCaptureFixture
) -> None:
    workers = ThreadWorkers(spawner, "w", 1, spawner.later.append)
    spawner.failures = 3
    done: list[int] = []
    for number in range(3):
        workers.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    assert "new thread" in caplog.text
    workers.submit(lambda: done.append(3))
    eventually(lambda: done == [0, 1, 2, 3])
    eventually(lambda: workers._idle == 1)
    workers.submit(lambda: done.append(4))
    eventually(lambda: 4 in done)
    workers.close()
    eventually(lambda: spawner.alive() == 0)


def test_a_start_that_was_refused_is_tried_again_until_it_is_not(
    spawner: Spawner, caplog: pytest.LogCaptureFixture
) -> None:
    workers = ThreadWorkers(spawner, "w", 2, spawner.later.append)
    spawner.failures = 4
    hold = threading.Event()
    done: list[int] = []

    def job(number: int) -> None:
        hold.wait(10)
        done.append(number)

    for number in range(3):
        workers.submit(partial(job, number))
    while spawner.failures:
        [again] = spawner.later
        spawner.later.clear()
        again()
    [again] = spawner.later
    spawner.later.clear()
    again()
    assert len(spawner.threads) == 2, "as many as there would have been"
    assert spawner.later == []
    hold.set()
    eventually(lambda: sorted(done) == [0, 1, 2])
    eventually(lambda: workers._idle == 2)
    assert caplog.text.count("new thread") == 1
    spawner.failures = 1
    more = ThreadWorkers(spawner, "v", 1, spawner.later.append)
    more.submit(lambda: done.append(3))
    spawner.later.pop()()
    eventually(lambda: 3 in done)
    workers.close()
    more.close()
    eventually(lambda: spawner.alive() == 0)


def test_many_submit_at_once_and_every_job_is_done(spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 0.001)
    workers = ThreadWorkers(spawner, "w", 4, spawner.later.append)
    done: list[int] = []

    def submit(base: int) -> None:
        for number in range(500):
            workers.submit(partial(done.append, base + number))

    threads = [threading.Thread(target=submit, args=(base,)) for base in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(done) == 1500, within=10)
    workers.close()
