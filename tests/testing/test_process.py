"""Helper processes can be talked to, frozen and killed."""

from __future__ import annotations

import signal
import time

import pytest

from multilock.testing import Helper, hear, say

FUNCTION = f"{__name__}:answering"


def answering(*words: str) -> None:
    say("ready", *words)
    while (line := hear()) is not None:
        say("heard", line)


def failing() -> None:
    raise RuntimeError("no luck")


def test_a_helper_gets_its_arguments_and_answers() -> None:
    with Helper(FUNCTION, "a", 1) as helper:
        assert helper.wait_for("ready", within=10) == ["ready", "a", "1"]
        helper.tell("hello", 2)
        assert helper.wait_for("heard", within=10) == ["heard", "hello", "2"]


def test_each_line_is_waited_for_once() -> None:
    with Helper(FUNCTION) as helper:
        helper.wait_for("ready", within=10)
        with pytest.raises(AssertionError, match="did not say 'ready' within"):
            helper.wait_for("ready", within=0.01)


def test_a_paused_helper_says_nothing_until_it_is_resumed() -> None:
    with Helper(FUNCTION) as helper:
        helper.wait_for("ready", within=10)
        with helper.paused():
            helper.tell("now")
            time.sleep(0.1)
            assert helper.lines == ["ready"]
        helper.wait_for("heard", within=10)


def test_a_killed_helper_is_gone_even_when_it_was_paused() -> None:
    with Helper(FUNCTION) as helper:
        helper.wait_for("ready", within=10)
        helper.pause()
        helper.kill()
        assert helper.returncode == -signal.SIGKILL


def test_a_helper_that_fails_shows_its_traceback() -> None:
    with Helper(f"{__name__}:failing") as helper, pytest.raises(AssertionError, match="no luck"):
        helper.wait_for("ready", within=10)


def test_a_function_needs_its_module() -> None:
    with pytest.raises(ValueError, match=r"package\.module:function"):
        Helper("answering")
