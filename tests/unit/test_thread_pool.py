"""The worker threads that send requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from multilock.kernel import thread_pool as module
from multilock.kernel.thread_pool import ThreadPool
from tests.unit.kit import eventually


class Spawner:
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __call__(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self.threads)


@pytest.fixture
def spawner() -> Spawner:
    return Spawner()


def test_jobs_are_done_by_few_threads_started_on_demand(spawner: Spawner) -> None:
    workers = ThreadPool(spawner, "w", 3)
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
    workers = ThreadPool(spawner, "w", 8)
    for _ in range(50):
        done = threading.Event()
        workers.submit(done.set)
        assert done.wait(5)
        eventually(lambda: workers._idle == 1)
    assert len(spawner.threads) == 1
    workers.close()


def test_threads_end_when_idle_and_start_again(spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 0.02)
    workers = ThreadPool(spawner, "w", 2)
    for _ in range(30):
        done = threading.Event()
        workers.submit(done.set)
        assert done.wait(5), "a job was left without a thread"
        threading.Event().wait(0.018)
    eventually(lambda: spawner.alive() == 0)
    assert workers._threads == 0
    assert workers._idle == 0


def test_after_close_earlier_jobs_are_done_and_no_new_one_is_accepted(spawner: Spawner) -> None:
    workers = ThreadPool(spawner, "w", 1)
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


def test_jobs_submitted_at_once_by_many_threads_are_all_done(spawner: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE", 0.001)
    workers = ThreadPool(spawner, "w", 4)
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
