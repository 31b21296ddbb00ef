"""A test can send commands to helper processes, freeze them and kill them."""

from __future__ import annotations

import os
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


def test_a_helper_receives_its_arguments_and_replies() -> None:
    with Helper(FUNCTION, "a", 1) as helper:
        assert helper.wait_for("ready", within=10) == ["ready", "a", "1"]
        helper.tell("hello", 2)
        assert helper.wait_for("heard", within=10) == ["heard", "hello", "2"]


def test_each_line_is_waited_for_once() -> None:
    with Helper(FUNCTION) as helper:
        helper.wait_for("ready", within=10)
        with pytest.raises(AssertionError, match="did not say 'ready' within"):
            helper.wait_for("ready", within=0.01)


def test_a_paused_helper_prints_nothing_until_it_is_resumed() -> None:
    with Helper(FUNCTION) as helper:
        helper.wait_for("ready", within=10)
        with helper.paused():
            helper.tell("now")
            time.sleep(0.1)
            assert helper.lines == ["ready"]
        helper.wait_for("heard", within=10)


def test_a_killed_helper_is_gone_even_if_it_was_paused() -> None:
    with Helper(FUNCTION) as helper:
        helper.wait_for("ready", within=10)
        helper.pause()
        helper.kill()
        assert helper.returncode == -signal.SIGKILL


def test_a_helper_that_fails_shows_its_traceback() -> None:
    with Helper(f"{__name__}:failing") as helper, pytest.raises(AssertionError, match="no luck"):
        helper.wait_for("ready", within=10)


def test_a_function_is_given_with_its_module() -> None:
    with pytest.raises(ValueError, match=r"package\.module:function"):
        Helper("answering")


def test_an_empty_line_is_received_and_is_not_the_end() -> None:
    with Helper(FUNCTION) as helper:
        helper.tell("")
        assert helper.wait_for("heard", within=10) == ["heard"]
        helper.tell("more")
        assert helper.wait_for("heard", within=10) == ["heard", "more"]


def test_a_helper_may_be_killed_while_it_is_paused() -> None:
    with Helper(FUNCTION) as helper:
        with helper.paused():
            helper.kill()
        helper.resume()


def test_a_helper_that_ended_can_neither_be_paused_nor_receive_a_line() -> None:
    with Helper(f"{__name__}:failing") as helper:
        helper.wait(within=10)
        for act in (helper.pause, lambda: helper.tell("hello")):
            with pytest.raises(RuntimeError, match="failing ended with 1"):
                act()
    with pytest.raises(RuntimeError, match="failing ended with 1"):
        helper.tell("after the end")


def test_sending_to_a_dying_helper_raises_no_broken_pipe() -> None:
    with Helper(FUNCTION) as helper:
        helper.wait_for("ready", within=10)

        def keep_telling() -> None:
            for _ in range(1000):
                helper.tell("hello")
                time.sleep(0.01)

        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="answering ended with -9"):
            keep_telling()
