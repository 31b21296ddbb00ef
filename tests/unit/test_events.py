"""Events are typed and arrive in order, on a thread that does no other work of the library."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from multilock import Acquired, AtRisk, Client, Event, Lost, Released, Renewed, RenewFailed, Waiting
from multilock.kernel.runtime import Threads
from multilock.kernel.subscribers import BACKLOG
from multilock.testing import HandRuntime
from tests.unit.kit import Call, Scripted, client_on, eventually, silence


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_events_report_the_life_of_a_lease_in_order(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    heard: list[Event] = []
    client.events.subscribe(heard.append)
    backend.holders["n"] = "somebody"
    client._kernel.timers.at(1002.5, lambda: backend.holders.clear())
    lease = client.lock("n").acquire()
    runtime.advance(12)
    lease.release()
    assert names(heard) == ["Waiting", "Acquired", "Renewed", "Released"]
    waiting, acquired, renewed, released = heard
    assert isinstance(waiting, Waiting)
    assert waiting.at == 1000.0
    assert isinstance(acquired, Acquired)
    assert acquired.owner == lease.owner == renewed.owner == released.owner
    assert (acquired.name, acquired.token) == ("n", 1)
    assert acquired.waited == pytest.approx(runtime.now() - 12 - 1000)
    assert isinstance(renewed, Renewed)
    assert renewed.valid_until > renewed.at
    assert isinstance(released, Released)
    assert released.held_for == pytest.approx(12)


def test_events_report_a_lease_at_risk_in_order(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    heard: list[Event] = []
    client.lock("n").acquire()
    client.events.subscribe(heard.append)
    backend.always("renew", silence())
    runtime.advance(40)
    assert names(heard)[:2] == ["AtRisk", "RenewFailed"]
    assert names(heard).count("AtRisk") == 1
    assert names(heard).count("Lost") == 1
    [at_risk] = [event for event in heard if isinstance(event, AtRisk)]
    [lost] = [event for event in heard if isinstance(event, Lost)]
    assert lost.at == lost.loss.detected_at == pytest.approx(at_risk.lost_at)
    assert any(isinstance(event, RenewFailed) and "silent" in event.message for event in heard)


def test_a_subscriber_that_unsubscribes_receives_nothing_further(client: Client) -> None:
    heard: list[Event] = []
    unsubscribe = client.events.subscribe(heard.append)
    client.lock("n").acquire().release()
    unsubscribe()
    unsubscribe()
    client.lock("n").acquire().release()
    assert names(heard) == ["Acquired", "Released"]
    assert client.events.tell is None


def test_a_subscriber_that_raises_is_logged_and_receives_the_next_event(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []

    def fail(event: Event) -> None:
        heard.append(event)
        raise ValueError("the subscriber's bug")

    client.events.subscribe(fail)
    with caplog.at_level(logging.ERROR, "multilock"):
        client.lock("n").acquire().release()
    assert names(heard) == ["Acquired", "Released"]
    assert "the subscriber's bug" in caplog.text


def test_a_subscriber_that_hangs_delays_only_its_own_events_up_to_a_limit() -> None:
    client = client_on(Scripted(), Threads())
    hang = threading.Event()
    slow: list[Event] = []
    quick: list[Event] = []

    def hanging(event: Event) -> None:
        hang.wait(20)
        slow.append(event)

    client.events.subscribe(hanging)
    client.events.subscribe(quick.append)
    lock = client.lock("n")
    for _ in range(BACKLOG // 2 + 100):
        last = lock.acquire()
        last.release()
    eventually(lambda: len(quick) >= BACKLOG)
    hang.set()
    eventually(lambda: [event.owner for event in slow[-2:]] == [last.owner] * 2)
    assert names(slow[-2:]) == ["Acquired", "Released"], "the oldest were dropped"
    assert BACKLOG <= len(slow) <= BACKLOG + 1
    client.close()


@pytest.mark.parametrize("wrong", [None, "print", 3])
def test_a_subscriber_must_be_callable(client: Client, wrong: Any) -> None:
    with pytest.raises(TypeError, match="subscribe"):
        client.events.subscribe(wrong)


def test_a_log_format_may_name_the_lock_in_every_record(
    client: Client, backend: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script("attempt", silence(0.1))
    with caplog.at_level(logging.DEBUG, "multilock"):
        client.lock("n").acquire()
    shown = [f"{record.lock_name} {record.lock_owner} {record.lock_token}" for record in caplog.records]  # type: ignore[attr-defined]
    assert "n None None" in shown


def test_the_log_names_lock_owner_and_token(
    client: Client, backend: Scripted, runtime: HandRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    lease = client.lock("n").acquire()
    backend.always("renew", silence())
    with caplog.at_level(logging.WARNING, "multilock"):
        runtime.advance(40)
    [record] = [record for record in caplog.records if "lost the lock 'n'" in record.getMessage()]
    assert (record.lock_name, record.lock_owner, record.lock_token) == ("n", lease.owner, 1)  # type: ignore[attr-defined]


def test_the_first_silence_of_a_wait_is_logged_once(
    client: Client, backend: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    def free(backend: Scripted, call: Call) -> Any:
        return call.execute()

    backend.script("attempt", silence(), silence(), silence(), free)
    with caplog.at_level(logging.WARNING, "multilock"):
        client.lock("n").acquire()
    assert len([record for record in caplog.records if "does not answer" in record.getMessage()]) == 1


def test_many_events_share_a_callback_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    spawn = Threads.spawn

    def count_and_spawn(self: Threads, run: Callable[[], None], name: str) -> None:
        started.append(name)
        spawn(self, run, name)

    monkeypatch.setattr(Threads, "spawn", count_and_spawn)
    heard: list[Event] = []
    with client_on(Scripted(), Threads()) as client:
        client.events.subscribe(heard.append)
        for count in range(1, 21):
            with client.lock("n"):
                pass
            eventually(lambda: len(heard) == 2 * count)  # noqa: B023
    # Usually one thread is started. Another thread is started if an event arrives before the first thread has reported
    # that it is idle.
    assert started.count("multilock-callback") < len(heard) / 2


def test_an_event_just_before_close_is_still_reported() -> None:
    heard: list[Event] = []
    client = client_on(Scripted(), Threads())
    client.events.subscribe(heard.append)
    client.lock("n").acquire()
    client.close()
    client.events.emit(Waiting("late", None, 0.0))
    eventually(lambda: [event.name for event in heard][-1] == "late")
