"""SIGTERM, SIGINT, SIGHUP and SIGQUIT: they end the wait for a lock. Once CMD runs, they are passed on to it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from multilock import system
from multilock.cli.exits import say

__all__ = ["Signalled", "Signals"]

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A suspended multilock renews nothing, and CMD, which has its own group, would run on.
IGNORED = (signal.SIGTSTP, signal.SIGTTOU)
LOOK_AGAIN = 1000  # milliseconds


class Signalled(BaseException):
    """A signal ended the wait. It is not an Exception, so that no handler on the way treats it as a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.code = 128 + signum


class Target(Protocol):
    """Something that receives the signals: CMD, or what ends it."""

    def signal(self, signum: int) -> bool:
        """Pass the signal on. Returns False if that is not permitted."""


class Signals:
    """Signal handlers, installed in the main thread while the context is entered.

    A signal that was ignored before stays ignored (nohup).
    """

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self._waiting = False
        self._target: Target | None = None
        self._pending: list[int] = []
        self.passed_on: int | None = None  #: the last signal passed on to CMD

    def __enter__(self) -> Signals:
        self._came, self._wakeup = os.pipe()
        for end in (self._came, self._wakeup):
            os.set_blocking(end, False)
        self._former_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it ends `pause`
        for signum in PASSED_ON:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._former[signum] = signal.signal(signum, self._handle)
        for signum in IGNORED:
            self._former[signum] = signal.signal(signum, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._former.items():
            signal.signal(signum, former)
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._came)
        os.close(self._wakeup)

    def pause(self) -> None:
        """Wait until a signal comes, or the end of a child; return at once if one came since the last call.

        Python runs a handler between two of its own instructions. If a signal comes just as a system call begins, the
        handler waits for the end of that call, and a call that waits for CMD may never end. Nothing comes if SIGCHLD is
        blocked, as it is for a child of some supervisors: so this returns after a second in any case.
        """
        waits = system.poll()
        waits.register(self._came, system.POLLIN)
        waits.poll(LOOK_AGAIN)
        with contextlib.suppress(BlockingIOError):
            os.read(self._came, 4096)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self._target is not None:
            self.passed_on = signum
            if not self._target.signal(signum):
                say(f"{signal.Signals(signum).name} cannot be passed on to CMD, whose processes belong to another user")
        elif self._waiting:
            raise Signalled(signum)
        else:
            self._pending.append(signum)

    @contextlib.contextmanager
    def end_the_wait(self) -> Iterator[None]:
        """Have a signal raise Signalled inside this context. One that came earlier raises it at once."""
        self._waiting = True
        try:
            if self._pending:
                raise Signalled(self._pending[0])
            yield
        finally:
            self._waiting = False

    @contextlib.contextmanager
    def go_to(self, target: Target) -> Iterator[None]:
        """Pass signals on to ``target`` inside this context, and those that came while the target was being made."""
        self._target = target
        try:
            while self._pending:
                self._handle(self._pending.pop(0), None)
            yield
        finally:
            self._target = None
