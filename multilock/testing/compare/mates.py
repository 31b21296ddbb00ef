"""The worker processes, as the runner sees them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from multilock import now
from multilock.testing.compare.history import Event, event_of
from multilock.testing.process import Helper

__all__ = ["Late", "Mate", "Stopped", "Trouble"]

LOOK_EVERY = 0.005  # seconds between two looks at what tells nobody
TICK = 0.1  # … and, where somebody is listened to, whether the run ends
WORKER = "multilock.testing.compare.worker:work"
WRONG = ("wrong", None)  # whoever it is of


class Trouble(Exception):
    """A cycle that cannot be gone on with: nothing is learned from it."""


class Late(Trouble):
    """Something did not happen in time."""


class Stopped(Trouble):
    """The whole run ends."""


class Mate:
    """One worker process. It serves one cycle at a time; who makes it must outlive it (see `Helper`)."""

    def __init__(self, stop: threading.Event) -> None:
        self.helper = Helper(WORKER)
        self.fit = True  #: for another cycle
        self._stop = stop
        self._events: list[Event] = []
        self._first: dict[tuple[str, str | None], Event] = {}  # by kind, and role where it has one

    @property
    def pid(self) -> int:
        return self.helper.pid

    def order(self, do: str, role: str = "", **more: object) -> None:
        try:
            self.helper.tell(json.dumps({"do": do, **({"role": role} if role else {}), **more}))
        except RuntimeError as error:
            self.fit = False
            raise Trouble(f"a worker ended: {error}"[:300]) from None

    def pause(self) -> None:
        """Stop it; back when it stands still."""
        try:
            self.helper.pause()
        except RuntimeError:
            self.fit = False
            raise Trouble(f"a worker ended by itself ({self.helper.returncode})") from None

    def events(self) -> list[Event]:
        """What it said in this cycle."""
        self.listen(0.0)
        return self._events

    def listen(self, within: float) -> None:
        """Until it says something, for so many seconds at most."""
        for line in self.helper._take(within):
            if (event := event_of(self.pid, line)) is not None:
                self._events.append(event)
                self._first.setdefault((event["what"], event.get("id")), event)
                if event["what"] == "wrong":
                    self._first.setdefault(WRONG, event)

    def said(self, what: str, role: str) -> Event | None:
        """The first such event of this role in this cycle."""
        self.listen(0.0)
        return self._first.get((what, role)) or self._first.get((what, None))

    def wait_for(self, role: str, *what: str, within: float) -> Event:
        """The first event of one of these kinds; raises `Trouble` for an error, or if it does not come."""

        def found() -> Event | None:
            return next((event for each in what if (event := self.said(each, role)) is not None), None)

        return self.wait_until(found, within, f"{role} did not come to {' or '.join(what)}")

    def wait_until(self, look: Callable[[], Event | None], within: float, why: str) -> Event:
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
        """All that it said in this cycle, which is over."""
        events, self._events = self.events(), []
        self._first.clear()
        return events
