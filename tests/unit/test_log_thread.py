"""A separate thread passes log records to the handlers, so a handler that blocks or raises disturbs no lock."""

from __future__ import annotations

import contextvars
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multilock import LossReason, log_thread
from multilock.kernel.runtime import Threads
from multilock.log_thread import logger
from tests.unit.kit import Losses, Scripted, client_on, eventually
from tests.unit.test_kernel_fork_exit import in_child

ROOT = Path(__file__).parents[2]


class Handler(logging.Handler):
    """A handler that stores each record, after calling ``before``."""

    def __init__(self, before: Callable[[logging.LogRecord], object] | None = None) -> None:
        super().__init__()
        self.before = before
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self.before:
            self.before(record)
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@contextmanager
def heard_by(handler: Handler) -> Iterator[Handler]:
    log = logging.getLogger("multilock")
    assert log_thread.flush(10)
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log_thread.flush(10)
        log.removeHandler(handler)


@contextmanager
def blocked() -> Iterator[tuple[Handler, threading.Event]]:
    """Return a handler that blocks in its first record, and the event that lets it continue."""
    entered, go_on = threading.Event(), threading.Event()

    def block(record: logging.LogRecord) -> None:
        if not entered.is_set():
            entered.set()
            assert go_on.wait(10)

    with heard_by(Handler(block)) as handler:
        try:
            logger.warning("first")
            assert entered.wait(10)
            yield handler, go_on
        finally:
            go_on.set()


def test_a_log_record_has_the_source_line_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    before = time.time()
    frame = sys._getframe()
    logger.error("the lock %r of %s", "n", "us", extra={"lock_name": "n"})
    line, after = frame.f_lineno - 1, time.time()
    [record] = caplog.records
    assert record.getMessage() == "the lock 'n' of us"
    assert (record.name, record.levelno, record.exc_info) == ("multilock", logging.ERROR, None)
    assert (record.pathname, record.lineno, record.funcName) == (__file__, line, frame.f_code.co_name)
    assert before <= record.created <= after
    began = logging.makeLogRecord({})
    assert abs((began.relativeCreated - record.relativeCreated) / 1000 - (began.created - record.created)) < 0.01
    assert (record.thread, record.threadName) == (threading.get_ident(), threading.current_thread().name)
    assert (record.lock_name, record.lock_owner, record.lock_token) == ("n", None, None)  # type: ignore[attr-defined]


def test_a_log_record_of_an_asyncio_task_names_the_task(caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    async def main() -> None:
        asyncio.current_task().set_name("the task")  # type: ignore[union-attr]
        logger.warning("said")

    asyncio.run(main())
    if sys.version_info >= (3, 12):
        assert [record.taskName for record in caplog.records] == ["the task"]
    assert [record.threadName for record in caplog.records] == [threading.current_thread().name]


def test_an_exception_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    try:
        fail()
    except ValueError as error:
        logger.exception("it failed")
        kept = error
    logger.error("it had failed", exc_info=kept)
    assert caplog.text.count("in fail\n") == 2
    assert caplog.text.count("ValueError: a bug") == 2


def test_a_log_filter_sees_the_context_of_the_call() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    seen: list[str] = []
    with heard_by(Handler(lambda record: seen.append(request.get()))):
        token = request.set("request 17")
        logger.warning("said in it")
        request.reset(token)
        logger.warning("said after it")
    assert seen == ["request 17", "none"]


def test_records_are_handled_in_the_order_of_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2000):
        logger.warning("%d", number)
    said = [
        record.getMessage() for record in caplog.records if record.msg == "%d"
    ]  # only records of this test, because clients of other tests may log at the same time
    assert said == [str(number) for number in range(2000)]


@pytest.mark.parametrize(("level", "told"), [(logging.INFO, ["info"]), (logging.DEBUG, ["debug", "info"])])
def test_the_level_at_the_time_of_the_call_counts(level: int, told: list[str]) -> None:
    with heard_by(Handler()) as handler:
        logging.getLogger("multilock").setLevel(level)
        try:
            logger.debug("debug")
            logger.info("info")
        finally:
            logging.getLogger("multilock").setLevel(logging.NOTSET)
        logger.debug("unheard")
    assert handler.messages == told


@pytest.mark.parametrize("said", ["debug", "warning"])
def test_a_log_call_does_not_wait_for_a_configuration_that_hangs(said: str) -> None:
    """``dictConfig`` holds the lock of the logging module while it makes handlers, and a handler may connect to a
    server."""
    log = logging.getLogger("multilock")
    module_lock: Any = logging._lock  # type: ignore[attr-defined]
    log.manager._clear_cache()  # type: ignore[attr-defined]  # as setLevel() does
    saying = threading.Thread(target=lambda: getattr(logger, said)("a line"), daemon=True)
    with heard_by(Handler()):
        with module_lock:
            saying.start()
            saying.join(10)
            waits = saying.is_alive()
        saying.join(10)
    assert not waits


@pytest.mark.parametrize("how", ["disable", "disabled", "level", "root"])
def test_a_disabled_level_is_not_logged(how: str) -> None:
    log, root = logging.getLogger("multilock"), logging.getLogger()
    before = root.level
    with heard_by(Handler()) as handler:
        try:
            if how == "disable":
                logging.disable(logging.WARNING)
            elif how == "disabled":
                log.disabled = True
            elif how == "level":
                log.setLevel(logging.ERROR)
            else:
                root.setLevel(logging.ERROR)
            logger.warning("off")
        finally:
            logging.disable(logging.NOTSET)
            log.disabled = False
            log.setLevel(logging.NOTSET)
            root.setLevel(before)
        logger.warning("on")
    assert handler.messages == ["on"]


def test_arguments_are_not_formatted_in_the_calling_thread(caplog: pytest.LogCaptureFixture) -> None:
    looked: list[str] = []

    class Mine(dict[str, str]):
        def look(self, *_: object) -> Any:
            looked.append(threading.current_thread().name)
            return True

        __repr__ = __str__ = __len__ = __bool__ = __getitem__ = look

    logger.warning("it is %(x)s", Mine())
    logger.warning("it is %r and %s", 1, Mine())
    assert "it is True" in caplog.text
    assert set(looked) == {log_thread.THREAD}


def test_a_handler_that_blocks_delays_no_caller_and_excess_records_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_thread, "BACKLOG", 5)
    with blocked() as (handler, go_on):
        began = time.monotonic()
        for number in range(12):
            logger.warning("%d", number)
        assert not log_thread.flush(0.05)
        assert time.monotonic() - began < 5
        go_on.set()
        assert log_thread.flush(10)
        logger.warning("afterwards")
        assert log_thread.flush(10)
    # The first lines are kept, because they show the cause.
    assert handler.messages == [
        "first",
        *(str(number) for number in range(5)),
        "7 lines of this log were dropped: its handlers hang",
        "afterwards",
    ]


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3), KeyboardInterrupt()])
def test_a_handler_that_raises_is_reported_and_gets_the_next_record(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: logging.LogRecord) -> None:
        if record.getMessage() == "first":
            raise error

    with heard_by(Handler(fail)) as handler:
        logger.warning("first")
        logger.warning("second")
    assert handler.messages == ["second"]
    assert type(error).__name__ in capsys.readouterr().err


def test_a_handler_may_use_locks_and_does_not_get_its_own_log_records() -> None:
    backend = Scripted()
    client = client_on(backend, Threads())

    def lock(record: logging.LogRecord) -> None:
        with client.lock("the log"):
            logger.warning("said by the handler")

    with heard_by(Handler(lock)) as handler:
        logger.warning("said")
        eventually(lambda: len(backend.called("release")) == 1)
    assert handler.messages == ["said"]
    client.close()


def test_a_handler_may_close_the_client() -> None:
    client = client_on(Scripted(), Threads())
    with heard_by(Handler(lambda record: client.close())) as handler:
        logger.warning("said")
        eventually(lambda: client._kernel.finished)
    assert handler.messages == ["said"]


NO_THREAD = "no thread for multilock-log yet: can't start new thread"


def test_records_without_a_thread_wait_for_the_next_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> list[str]:
        with heard_by(Handler()) as handler:
            start = threading.Thread.start

            def refuse(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr(threading.Thread, "start", refuse)
            logger.warning("first")
            waiting = log_thread.flush(0)
            monkeypatch.setattr(threading.Thread, "start", start)
            logger.warning("second")
            assert log_thread.flush(10)
        return [str(waiting), *handler.messages]

    # in a new process, in which the log thread does not run yet
    assert in_child(told) == ["False", "first", NO_THREAD, "second"]


def test_a_forked_child_logs_its_own_records_and_none_of_its_parent() -> None:
    with blocked() as (handler, go_on):
        logger.warning("said by the parent")

        def child() -> list[str]:
            handler.before = None
            logger.warning("said by the child")
            eventually(lambda: handler.records)
            return handler.messages

        assert in_child(child) == ["said by the child"]
        go_on.set()
        assert log_thread.flush(10)
        assert handler.messages == ["first", "said by the parent"]


def test_the_end_of_the_watchdog_counts_as_a_loss_before_it_is_logged() -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), ttl=30.0)
    losses = Losses()
    with blocked():
        lease = client.lock("n", on_lost=losses).acquire()

        def die() -> None:
            raise ValueError("a bug")

        client._kernel.timers.at(client._kernel.now(), die)
        assert losses.wait().reason is LossReason.WATCHDOG_DIED
        assert not lease.is_held()
        assert not client.is_healthy()
    client.close()


def test_close_waits_for_log_handlers_but_not_forever() -> None:
    client = client_on(Scripted(), Threads())
    with blocked():
        began = time.monotonic()
        client.close()
        assert 0.4 < time.monotonic() - began < 5
    client = client_on(Scripted(), Threads())
    with heard_by(Handler(lambda record: time.sleep(0.1))) as handler:
        client.lock("n").acquire()
        client.close()
        assert len(handler.messages) == 1, "the lock that was still held"


@pytest.mark.parametrize("threads", [True, False], ids=["a thread tells", "no thread can start"])
def test_the_last_records_of_a_program_are_handled(threads: bool) -> None:
    script = f"""
import logging, threading
logging.basicConfig(format="%(levelname)s %(threadName)s %(message)s")
from multilock.errors import BackendUnavailable
from multilock.kernel.runtime import Threads
from tests.unit.kit import Scripted, client_on, refused
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
backend = Scripted()
client = client_on(backend, Threads(), ttl=10.0)
lease = client.lock("n").acquire()
backend.always("release", refused(BackendUnavailable("silent")))
if not {threads}:
    threading.Thread.start = refuse
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}"},
        check=False,
    )
    assert done.stderr.splitlines() == ["WARNING MainThread the lock 'n' could not be released at exit: silent"]
    assert done.returncode == 0


def test_a_program_without_log_handlers_prints_why_a_leader_resigned() -> None:
    script = """
import threading
import multilock
ended = threading.Event()
def oops(leadership):
    raise KeyError("oops")
with multilock.connect("memory://") as client:
    with client.election("e", on_elected=oops, on_lost=lambda loss: ended.set()):
        assert ended.wait(20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    lines = done.stderr.splitlines()
    assert lines[0] == "on_elected of the election 'e' raised, so this node resigns"
    assert lines[-1] == "KeyError: 'oops'"
    assert done.returncode == 0
