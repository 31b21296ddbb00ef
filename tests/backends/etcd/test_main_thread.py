"""The main thread, which interrupts can reach, runs no code of gRPC."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

import multilock
from multilock.backend import call_inside
from multilock.kernel.living_clients import in_the_middle
from multilock_etcd import main_thread
from multilock_etcd.main_thread import Aside
from tests.backends.conftest import Connect
from tests.backends.kit import interrupted
from tests.servers_etcd import EtcdServer

LIMIT = 20.0


def test_the_main_thread_runs_no_code_of_grpc(shared: EtcdServer, connect: Connect) -> None:
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/grpc/" in frame.f_code.co_filename:
            seen.add(frame.f_code.co_qualname)

    connect(shared.url, prefix="aside/").lock("imports").acquire().release()
    client = connect(shared.url, prefix="aside/")
    sys.setprofile(profile)
    try:
        lease = client.lock("job").acquire()
        with pytest.raises(multilock.LockTimeout):
            client.lock("job").acquire(timeout=0.05)
        client.inspect("job")
        client.ping()
        client.diagnose()
        lease.release()
        client.close()
    finally:
        sys.setprofile(None)
    assert {each for each in seen if "Code" not in each and "Error" not in each} == set()


def test_after_an_interrupt_at_any_moment_the_next_call_runs() -> None:
    hand_over = Aside()
    assert hand_over(threading.get_ident, LIMIT) != threading.get_ident()
    moment = 1
    while interrupted(lambda: hand_over(threading.get_ident, LIMIT), moment, main_thread):
        assert hand_over(threading.get_ident, LIMIT) != threading.get_ident()
        moment += 1
    hand_over.close()
    assert moment > 5


def test_a_signal_handler_can_call_while_another_call_runs() -> None:
    hand_over, answers, go_on = Aside(), list[Any](), threading.Event()

    def handler(*_: object) -> None:
        answers.append(hand_over(lambda: "inner", LIMIT))
        go_on.set()

    def outer() -> str:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        assert go_on.wait(LIMIT)
        return "outer"

    before = signal.signal(signal.SIGALRM, handler)
    try:
        answers.append(hand_over(outer, LIMIT))
    finally:
        signal.signal(signal.SIGALRM, before)
    hand_over.close()
    assert answers == ["inner", "outer"]


def test_an_error_reaches_its_caller_and_a_closed_transport_still_replies() -> None:
    hand_over = Aside()
    with pytest.raises(ZeroDivisionError):
        hand_over(lambda: 1 // 0, LIMIT)
    hand_over.close()
    assert hand_over(lambda: 1, LIMIT) == 1


def test_a_finalizer_on_the_other_thread_does_not_wait_for_itself() -> None:
    hand_over = Aside()
    assert call_inside(lambda: hand_over(in_the_middle, LIMIT))
    hand_over.close()
