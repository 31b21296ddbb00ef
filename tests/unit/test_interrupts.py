"""`surely` and `Once` complete interrupted work, at whatever point CPython interrupts it."""

from __future__ import annotations

import contextlib
import sys

import pytest

from multilock.kernel.interrupts import Once, surely
from tests.unit.kit import interrupted_at

HERE = __file__


class Books:
    """A list of entries. A step adds three entries, each only once, even if the step is called again."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def post(self, entry: str) -> None:
        if entry not in self.entries:
            self.entries.append(entry)

    def step(self, answer: int) -> int:
        for entry in ("debit", "credit", "receipt"):
            self.post(entry)
        return answer


def test_without_an_interrupt_the_step_is_called_once_and_its_result_returned() -> None:
    calls: list[tuple[int, str]] = []

    def step(number: int, text: str) -> str:
        calls.append((number, text))
        return text * number

    assert surely(step, 2, "ab") == "abab"
    assert calls == [(2, "ab")]


def test_after_an_interrupt_anywhere_the_step_is_completed_and_the_interrupt_raised() -> None:
    step = 0
    while True:
        books = Books()
        with interrupted_at(step, "Books.step", HERE) as where, contextlib.suppress(KeyboardInterrupt):
            surely(books.step, 7)
            assert not where, "the interrupt was swallowed"
        assert books.entries == ["debit", "credit", "receipt"], where
        if not where:
            break
        step += 1
    assert step > 6


def test_an_interrupt_before_the_first_line_leaves_nothing_begun() -> None:
    books = Books()
    with interrupted_at(0, "surely") as where, pytest.raises(KeyboardInterrupt):
        surely(books.step, 7)
    assert where
    assert books.entries == []


def test_an_error_of_the_step_itself_is_raised_after_the_second_try() -> None:
    calls: list[int] = []

    def fails() -> None:
        calls.append(len(calls))
        raise ValueError(f"try {len(calls)}")

    with pytest.raises(ValueError, match="try 2"):
        surely(fails)
    assert calls == [0, 1]


@pytest.mark.oracle
def test_a_callback_started_by_two_threads_is_called_once() -> None:
    calls: list[str] = []
    once = Once(calls.append, lambda: calls.append("begins"))
    assert repr(once) == repr(calls.append)
    once("first")
    once("second")
    assert calls == ["begins", "first"]


def test_a_callback_with_a_return_value_is_still_named() -> None:
    once = Once(str, lambda: None)
    assert once("text") == "text"
    assert repr(once) == repr(str)


def test_no_interrupt_is_raised_as_a_generator_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython does not check for signals at this point. An exception raised there would only be reported as ignored."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def stop_at_the_first() -> bool:
        return any(number for number in (1, 0))

    points = 0
    while True:
        with (
            interrupted_at(points, stop_at_the_first.__qualname__, HERE) as where,
            contextlib.suppress(KeyboardInterrupt),
        ):
            stop_at_the_first()
        if not where:
            break
        points += 1
    assert points >= 2
    assert ignored == []
