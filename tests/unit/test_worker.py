"""The supervisor of worker threads: a thread whose start was refused starts later, and a thread that died starts
again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from multilock import Client, Finding
from multilock.kernel import worker
from multilock.kernel.runtime import Threads
from multilock.kernel.worker import start_worker
from tests.unit.kit import Scripted, client_on, eventually, refuse_threads
from tests.unit.test_kernel_fork_exit import in_child

pytestmark = pytest.mark.usefixtures("threads_may_die")


@pytest.fixture(autouse=True)
def refusals(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    return refuse_threads(monkeypatch)


@pytest.fixture
def client() -> Iterator[Client]:
    with client_on(Scripted(), Threads(), ttl=20.0) as client:
        client.lock("n").acquire()  # this starts the watchdog's thread
        yield client


def of_threads(client: Client) -> list[Finding]:
    return [finding for finding in client.diagnose() if finding.code == "threads"]


def test_a_refused_thread_starts_as_soon_as_one_can(client: Client, refusals: dict[str, int]) -> None:
    ran = threading.Event()
    refusals["multilock-x"] = 3
    start_worker(ran.set, "multilock-x")
    assert not client.is_healthy()
    [finding] = of_threads(client)
    assert finding.level == "error"
    assert "multilock-x" in finding.message
    assert ran.wait(10)
    eventually(client.is_healthy)
    assert of_threads(client) == []


def test_a_thread_that_dies_is_restarted_and_is_logged_once(
    client: Client, refusals: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    runs = 0

    def fail() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ValueError("a bug")

    started = start_worker(fail, "multilock-x")
    started.join(10)
    assert runs == 3
    assert caplog.text.count("multilock-x died") == 1
    [finding] = of_threads(client)
    assert "died 2 times, first of ValueError: a bug" in finding.message
    eventually(client.is_healthy)


def test_a_thread_started_by_two_watchdogs_at_once_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients each start the watchdog's thread. One start is refused, and the other one succeeds before the refusal
    is recorded."""
    ran = threading.Event()
    real = worker.begin_thread
    tries: list[str] = []

    def refuse_late(run: Callable[[], object], name: str) -> str | None:
        tries.append(name)
        if len(tries) == 1:
            assert real(run, name) is None  # as if the other client had started the thread
            assert ran.wait(10)
            return "can't start new thread"
        return real(run, name)

    monkeypatch.setattr(worker, "begin_thread", refuse_late)
    start_worker(ran.set, "multilock-x").join(10)
    assert worker.troubles() == []
    assert not worker.is_any_missing()


def test_a_job_that_runs_once_is_not_restarted(refusals: dict[str, int]) -> None:
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        raise SystemExit

    start_worker(fail, "multilock-x", once=True).join(10)
    assert runs == [1]


def test_a_job_with_a_waiting_caller_runs_in_the_caller_if_the_watchdog_is_missing(
    refusals: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "helpers", {})
    refusals["multilock-x"] = 1
    threads: list[int] = []
    start_worker(lambda: threads.append(threading.get_ident()), "multilock-x", once=True, or_here=True)
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("before", [True, False], ids=["before it began", "after it began"])
def test_a_job_whose_start_is_interrupted_runs_exactly_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    interrupts = [1]
    real = threading.Thread

    class Interrupted(real):  # type: ignore[valid-type, misc]
        def start(self) -> None:
            if not before:
                super().start()
            if interrupts:
                interrupts.pop()
                raise KeyboardInterrupt
            if before:
                super().start()

    monkeypatch.setattr("multilock.system.Thread", Interrupted)
    ran: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        start_worker(lambda: ran.append(1), "multilock-x")
    eventually(lambda: ran == [1])
    eventually(client.is_healthy)
    assert ran == [1]


def test_a_deep_recursion_is_not_taken_for_a_refused_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class TooDeep(threading.Thread):
        def start(self) -> None:
            monkeypatch.undo()
            raise RecursionError

    monkeypatch.setattr("multilock.system.Thread", TooDeep)
    with pytest.raises(RecursionError):
        start_worker(lambda: None, "multilock-x")


def test_a_forked_child_misses_no_thread_of_its_parent(refusals: dict[str, int]) -> None:
    refusals["multilock-x"] = 1000
    start_worker(lambda: None, "multilock-x")
    assert worker.is_any_missing()
    try:
        assert in_child(lambda: [str(worker.is_any_missing())]) == ["False"]
    finally:
        refusals.clear()
        worker.try_again()
