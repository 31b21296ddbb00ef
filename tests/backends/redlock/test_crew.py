"""The threads that ask one server."""

from __future__ import annotations

from queue import SimpleQueue

from multilock import BackendUnavailable, now
from multilock_redis.redlock.crew import AT_ONCE, Crew

WITHIN = 10.0


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


def test_who_is_not_asked_since_it_was_down_is_told_why_it_was() -> None:
    crew: Crew[str] = Crew("a", "it", lambda: 0.0)
    answers: SimpleQueue[object] = SimpleQueue()
    reset = ConnectionResetError("reset")

    def silent(subject: str, within: float) -> None:
        raise BackendUnavailable("nothing was read") from reset

    crew.ask(silent, WITHIN, answers.put)
    answers.get(timeout=WITHIN)
    crew.ask(silent, WITHIN, answers.put)
    refused = answers.get(timeout=WITHIN)
    assert isinstance(refused, BackendUnavailable)
    assert "down just now" in str(refused)
    assert refused.__cause__ is reset
    crew.close()


def test_a_question_after_the_close_is_refused_at_once() -> None:
    crew: Crew[str] = Crew("a", "it", now)
    answers: SimpleQueue[object] = SimpleQueue()
    crew.ask(lambda subject, within: subject, now() + WITHIN, answers.put)
    assert answers.get(timeout=WITHIN) == "a"
    crew.close()
    crew.ask(lambda subject, within: subject, now() + WITHIN, answers.put)
    refused = answers.get_nowait()
    assert isinstance(refused, BackendUnavailable)
    assert not refused.unknown
