"""Several cycles that share one stop of their server: it affects all its users anyway."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multilock import now
from multilock.testing.compare.mates import TICK, Stopped
from multilock.testing.compare.servers import ServerFault, ServerProcess

__all__ = ["WHEN", "Together"]

WHEN = 0.2, 0.8  # of a ttl: the range of the time from A's grant to the fault
GATHER_WITHIN = 60.0  # seconds; a cycle that comes later has missed the fault


class Together:
    """A group of ``cycles`` cycles. Each calls `gather` and then `stopped` once, or only `leave`."""

    def __init__(self, cycles: int, seed: str = "") -> None:
        self.share = random.Random(seed).uniform(*WHEN)  #: of a ttl: the time from the grants to the fault
        self._expected = cycles
        self._ready = self._here = 0
        self._led = False
        self._down = self._up = False
        self._why = ""
        self._changed = threading.Condition()

    def gather(self, stop: threading.Event) -> None:
        """Wait for the other cycles before anything is held: a lock that is not renewed would expire meanwhile."""
        with self._changed:
            self._ready += 1
            self._changed.notify_all()
        self._wait(lambda: self._ready >= self._expected, stop, now() + GATHER_WITHIN)

    @contextmanager
    def stopped(
        self, server: ServerProcess, within: float, begin: Callable[[], None], stop: threading.Event
    ) -> Iterator[None]:
        """Stop the server inside this context. ``begin`` is called right before.

        The first cycle stops the server once all are here, and continues it at the end of its context. The contexts of
        the others end then, too.
        """
        with self._changed:
            if self._down:
                raise ServerFault("the cycle came too late for the fault of its server")
            self._here += 1
            self._changed.notify_all()
            leads, self._led = not self._led, True
        if not leads:
            self._wait(lambda: self._down, stop)
            begin()
            yield
            self._wait(lambda: self._up, stop)
            return
        try:
            self._wait(lambda: self._here >= self._expected, stop, now() + GATHER_WITHIN)
            begin()
            with server.stopped(within):
                self._set(down=True)
                yield
        except BaseException as error:
            self._why = str(error) or type(error).__name__
            raise
        finally:
            self._set(down=True, up=True)

    def leave(self) -> None:
        """Report that a cycle has ended, or does not come to its fault."""
        with self._changed:
            self._expected -= 1
            self._changed.notify_all()

    def _set(self, *, down: bool, up: bool = False) -> None:
        with self._changed:
            self._down, self._up = down, up
            self._changed.notify_all()

    def _wait(self, look: Callable[[], bool], stop: threading.Event, until: float = float("inf")) -> None:
        with self._changed:
            while not look():
                if stop.is_set():
                    raise Stopped("the run was interrupted")
                if now() > until:
                    return
                self._changed.wait(TICK)
        if self._why:
            raise ServerFault(f"the cycle that stopped the server for this one failed: {self._why}")
