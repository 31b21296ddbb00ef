"""SIGTERM, SIGINT, SIGHUP and SIGQUIT: they end the wait for a lock. Once CMD runs, they are passed on to it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from multilock import system
from multilock.cli.exits import say

__all__ = ["Signalled", "Signals"]

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A suspended multilock renews nothing, and CMD, which has its own group, would continue without the lock.
IGNORED = (signal.SIGTSTP, signal.SIGTTOU)
LOOK_AGAIN = 1.0  # seconds after which `pause` returns although nothing came


class Signalled(BaseException):
    """The exception of a signal that ended the wait. It is not an Exception, so that no ``except Exception`` treats it
    as a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.code = 128 + signum


class Target(Protocol):
    """An object that receives the signals: CMD, or the code that ends it."""

    def signal(self, signum: int) -> bool:
        """Pass the signal on. Returns False if that is not permitted."""


class Signals:
    """Signal handlers of the main thread, installed inside this context.

    Enter the context before the client, and leave it after ``close()``: a second Ctrl-C must not end this process
    before it has released the lock. Outside of `end_the_wait` and `go_to`, a signal is only remembered.

    A signal that was ignored before stays ignored (nohup).
    """

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self._waiting = False
        self._target: Target | None = None
        self.pending: list[int] = []  #: signals that came while no code could obey them
        self.passed_on: list[int] = []  #: signals passed on to CMD

    def __enter__(self) -> Signals:
        self._came, self._wakeup = os.pipe()
        for end in (self._came, self._wakeup):
            os.set_blocking(end, False)
        self._former_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the signal ends `pause`
        for signum in PASSED_ON:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._former[signum] = signal.signal(signum, self._handle)
        for signum in IGNORED:
            self._former[signum] = signal.signal(signum, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._former.items():
            signal.signal(signum, former)
        signal.set_wakeup_fd(self._former_wakeup)  # the pipe stays open, because a thread may be calling `wake`

    def wake(self) -> None:
        """Have `pause` return. Any thread may call this. This never waits, and needs no other thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so `pause` returns anyway
            os.write(self._wakeup, b"\0")

    def pause(self, seconds: float = LOOK_AGAIN, *descriptors: int) -> None:
        """Wait at most ``seconds`` until a signal comes, the end of a child, a `wake`, or input on ``descriptors``.

        Returns at once if a signal or a `wake` came since the last call.

        Python runs a handler between two of its own instructions. If a signal comes just as a system call begins, the
        handler waits for the end of that call, and a call that waits for CMD may never end. Some supervisors block
        SIGCHLD for their children. The end of CMD then does not wake this call, so the caller must check CMD itself
        after each call.
        """
        waits = system.poll()
        for descriptor in (self._came, *descriptors):
            waits.register(descriptor, system.POLLIN)
        waits.poll(math.ceil(min(seconds, LOOK_AGAIN) * 1000))
        with contextlib.suppress(BlockingIOError):
            os.read(self._came, 4096)

    def forget_survived(self) -> None:
        """Forget the signals that were passed on to CMD and did not end it, such as a SIGHUP that made it read its
        configuration again.

        A SIGTERM is kept: CMD may just be ending because of it.
        """
        self.passed_on = [signum for signum in self.passed_on if signum == signal.SIGTERM]

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self._target is not None:
            self.passed_on.append(signum)
            if not self._target.signal(signum):
                say(f"{signal.Signals(signum).name} cannot be passed on to CMD, whose processes belong to another user")
        elif self._waiting:
            self._waiting = False  # a second exception would interrupt the clean-up after the first
            raise Signalled(signum)
        else:
            self.pending.append(signum)

    @contextlib.contextmanager
    def end_the_wait(self) -> Iterator[None]:
        """Have a signal raise Signalled inside this context. If a signal came earlier, the context raises it at
        once."""
        self._waiting = True
        try:
            if self.pending:
                raise Signalled(self.pending[0])
            yield
        finally:
            self._waiting = False

    @contextlib.contextmanager
    def go_to(self, target: Target) -> Iterator[None]:
        """Pass signals on to ``target`` inside this context, also those that came while ``target`` was being
        created."""
        self._target = target
        try:
            while self.pending:
                self._handle(self.pending.pop(0), None)
            yield
        finally:
            self._target = None
