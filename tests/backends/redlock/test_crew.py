"""The threads that ask one server."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
from redis.exceptions import BusyLoadingError

from multilock import BackendUnavailable, now
from multilock_redis.redlock.crew import AT_ONCE, SILENCES, SILENT_FOR, Crew, NotAsked
from multilock_redis.transport import not_connected
from multilock_redis.wire import refusal

WITHIN = 10.0


class Asked:
    """A crew with a hand-driven clock, and what its server was asked: each question fails in its own way."""

    def __init__(self) -> None:
        self.time = 0.0
        self.times = 0
        self.back: list[float] = []  # when it was
        self.crew: Crew[str] = Crew("a", "it", lambda: self.time, lambda: self.back.append(self.time))

    def ask(self, failure: Callable[[], Exception] | None = None, takes: float = 0.0) -> Any:
        answers: SimpleQueue[Any] = SimpleQueue()

        def question(subject: str, within: float) -> str:
            self.times += 1
            self.time += takes
            if failure:
                raise failure()
            return subject

        self.crew.ask(question, self.time + WITHIN, answers.put)
        return answers.get(timeout=WITHIN)


def late() -> Exception:
    return BackendUnavailable("it did not answer: timed out", unknown=True)


def cut() -> Exception:
    silence = BackendUnavailable("it did not answer: reset", unknown=True)
    silence.__cause__ = ConnectionResetError("reset")
    return silence


def not_asked() -> Exception:
    return NotAsked("the claim was given up")


def refused() -> Exception:
    nobody = ConnectionError("nobody listens")
    nobody.__context__ = ConnectionRefusedError("refused")  # as redis-py raises it
    silence = not_connected(nobody, "it")
    silence.__cause__ = nobody
    return silence


def loads() -> Exception:
    return refusal("LOADING Redis is loading the dataset in memory", "it")


def loads_as_one_logs_in() -> Exception:
    loading = BusyLoadingError("Redis is loading the dataset in memory")
    silence = not_connected(loading, "it")
    silence.__cause__ = loading
    return silence


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_answer_that_is_not_understood_costs_no_thread() -> None:
    crew: Crew[str] = Crew("a", "it", now)
    answers: SimpleQueue[object] = SimpleQueue()

    def fails(said: object) -> None:
        answers.put(said)
        raise ValueError(said)

    for _ in range(2 * AT_ONCE):
        crew.ask(lambda subject, within: subject, now() + WITHIN, fails)
        assert answers.get(timeout=WITHIN) == "a"
    crew.ask(lambda subject, within: subject, now() + WITHIN, answers.put)
    assert answers.get(timeout=WITHIN) == "a"
    crew.close()


@pytest.mark.parametrize(
    ("failure", "takes"), [(late, 0.05), (late, 0.9 * SILENT_FOR), (cut, 0.0), (not_asked, 0.0), (not_asked, 1.0)]
)
def test_a_server_is_asked_again_at_once_unless_it_is_known_to_be_down(
    asked: Asked, failure: Callable[[], Exception], takes: float
) -> None:
    """A limit that is short and spent, a connection that was cut, a question called off say nothing of it."""
    for _ in range(2 * SILENCES):
        asked.ask(failure, takes)
    assert asked.times == 2 * SILENCES
    assert asked.ask() == "a"
    assert not asked.back


@pytest.mark.parametrize("failure", [refused, loads, loads_as_one_logs_in])
def test_a_server_that_is_down_is_asked_now_and_then(asked: Asked, failure: Callable[[], Exception]) -> None:
    asked.ask(failure)
    assert "down just now" in str(asked.ask())
    for _ in range(1000):
        asked.time += 0.01
        asked.ask(failure)
    assert asked.times == 1 + 5 + 8  # the pauses double up to a second
    assert not asked.back
    asked.time += 1.0
    assert asked.ask() == "a"
    assert asked.ask() == "a"
    assert asked.back == [asked.time]


def test_a_server_that_has_been_silent_for_long_is_asked_now_and_then(asked: Asked) -> None:
    for _ in range(SILENCES):
        asked.ask(late, SILENT_FOR)
    assert "down just now" in str(asked.ask())
    asked.time += 1.0
    assert asked.ask() == "a"


def test_a_server_that_answers_in_between_is_not_silent(asked: Asked) -> None:
    for _ in range(3 * SILENCES):
        for _ in range(SILENCES - 1):
            asked.ask(late, SILENT_FOR)
        assert asked.ask() == "a"


def test_who_is_not_asked_since_it_was_down_is_told_why_it_was() -> None:
    crew: Crew[str] = Crew("a", "it", lambda: 0.0)
    answers: SimpleQueue[object] = SimpleQueue()
    nobody = ConnectionRefusedError("refused")

    def silent(subject: str, within: float) -> None:
        raise BackendUnavailable("nobody listens") from nobody

    crew.ask(silent, WITHIN, answers.put)
    answers.get(timeout=WITHIN)
    crew.ask(silent, WITHIN, answers.put)
    silence = answers.get(timeout=WITHIN)
    assert isinstance(silence, BackendUnavailable)
    assert "down just now" in str(silence)
    assert silence.__cause__ is nobody
    crew.close()


def test_a_question_after_the_close_is_refused_at_once() -> None:
    crew: Crew[str] = Crew("a", "it", now)
    answers: SimpleQueue[object] = SimpleQueue()
    crew.ask(lambda subject, within: subject, now() + WITHIN, answers.put)
    assert answers.get(timeout=WITHIN) == "a"
    crew.close()
    crew.ask(lambda subject, within: subject, now() + WITHIN, answers.put)
    silence = answers.get_nowait()
    assert isinstance(silence, BackendUnavailable)
    assert not silence.unknown
