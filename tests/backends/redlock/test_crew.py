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
