"""The worker processes, as the runner sees them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from multilock import now
from multilock.testing.compare.history import Event, event_of
from multilock.testing.process import Helper

__all__ = ["Late", "Mate", "Stopped", "Trouble"]

LOOK_EVERY = 0.005  # seconds between two checks of a condition that sends no event
TICK = 0.1  # seconds between two checks whether the run ends
WORKER = "multilock.testing.compare.worker:work"
WRONG = ("wrong", None)  # the key of the first error of any role


class Trouble(Exception):
    """A cycle that cannot be continued. Nothing is learned from it."""


class Late(Trouble):
    """Something did not happen in time."""


class Stopped(Trouble):
    """The whole run has ended."""


class Mate:
    """One worker process. It serves one cycle at a time. The thread that makes it must outlive it (see `Helper`)."""

    def __init__(self, stop: threading.Event) -> None:
        self.helper = Helper(WORKER)
        self.fit = True  #: whether it can be used for another cycle
        self._stop = stop
        self._events: list[Event] = []
        self._first: dict[tuple[str, str | None], Event] = {}  # by kind, and by role if there is one

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.helper.pid

    def order(self, do: str, role: str = "", **more: object) -> None:
        """Send an order. Raises Trouble if the worker has ended."""
        try:
            self.helper.tell(json.dumps({"do": do, **({"role": role} if role else {}), **more}))
        except RuntimeError as error:
            self.fit = False
            raise Trouble(f"a worker ended: {error}"[:300]) from None

    def pause(self) -> None:
        """Freeze the process. When this returns it does not run."""
        try:
            self.helper.pause()
        except RuntimeError:
            self.fit = False
            raise Trouble(f"a worker ended by itself ({self.helper.returncode})") from None

    def events(self) -> list[Event]:
        """Return what it reported in this cycle."""
        self.listen(0.0)
        return self._events

    def listen(self, within: float) -> None:
        """Wait until it reports something, for at most ``within`` seconds."""
        for line in self.helper._take(within):
            if (event := event_of(self.pid, line)) is not None:
                self._events.append(event)
                self._first.setdefault((event["what"], event.get("id")), event)
                if event["what"] == "wrong":
                    self._first.setdefault(WRONG, event)

    def said(self, what: str, role: str) -> Event | None:
        """Return the first event of this kind and role in this cycle, or None."""
        self.listen(0.0)
        return self._first.get((what, role)) or self._first.get((what, None))

    def wait_for(self, role: str, *what: str, within: float) -> Event:
        """Return the first event of one of these kinds. Raises Trouble for an error, Late if none comes in time."""

        def found() -> Event | None:
            return next((event for each in what if (event := self.said(each, role)) is not None), None)

        return self.wait_until(found, within, f"{role} did not come to {' or '.join(what)}")

    def wait_until(self, look: Callable[[], Event | None], within: float, why: str) -> Event:
        """Wait until ``look`` returns an event. Raises Trouble for an error, Late (with ``why``) if it is too late."""
        until = now() + within
        while True:
            if (event := look()) is not None:
                return event
            if (wrong := self._first.get(WRONG)) is not None:
                raise Trouble(f"{wrong['id']}: {wrong['why']}")
            if self._stop.is_set():
                raise Stopped("the run was interrupted")
            if self.helper.returncode is not None:
                self.fit = False
                raise Trouble(f"a worker ended by itself ({self.helper.returncode}): {self.helper.errors[-200:]}")
            if (left := until - now()) < 0:
                raise Late(f"{why} in {within:.1f} s")
            self.listen(min(left, TICK))

    def forget(self) -> list[Event]:
        """Return everything that it reported in this cycle, and forget it: the cycle is over."""
        events, self._events = self.events(), []
        self._first.clear()
        return events
