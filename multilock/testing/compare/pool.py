"""The worker processes of a run, and how many cycles use them at the same time."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from multilock import now
from multilock.testing.compare.history import Event, event_of
from multilock.testing.process import Helper

__all__ = ["Late", "Limit", "RunEnded", "Trouble", "WorkerPool", "WorkerProcess"]

STOOD_STILL = 0.01  # share of a cycle's time; if its processes were frozen for longer, fewer cycles run at once
LOOK_EVERY = 0.005  # seconds between two checks of a condition that sends no event
TICK = 0.1  # seconds between two checks whether the run must end
WORKER = "multilock.testing.compare.worker:work"
WRONG = ("wrong", None)  # in `WorkerProcess._first`, the key of the first error, whichever role reported it


class Trouble(Exception):
    """A cycle that cannot be continued, and so has no verdict."""


class Late(Trouble):
    """An event did not come in time."""


class RunEnded(Trouble):
    """The whole run has ended."""


class WorkerProcess:
    """One worker process, which serves one cycle at a time. The thread that makes it must outlive it (see `Helper`)."""

    def __init__(self, stop: threading.Event) -> None:
        self.helper = Helper(WORKER)
        self.fit = True  #: whether it can be used for another cycle
        self._stop = stop
        self._events: list[Event] = []
        self._first: dict[tuple[str, str | None], Event] = {}  # events by kind, and by role if they have one

    @property
    def pid(self) -> int:
        """The process ID."""
        return self.helper.pid

    def order(self, do: str, role: str = "", **more: object) -> None:
        """Send an order. Raises Trouble if the worker has ended."""
        try:
            self.helper.tell(json.dumps({"do": do, **({"role": role} if role else {}), **more}))
        except RuntimeError as error:
            self.fit = False
            raise Trouble(f"a worker ended: {error}"[:300]) from None

    def pause(self) -> None:
        """Freeze the process. When this returns, the process does not run."""
        try:
            self.helper.pause()
        except RuntimeError:
            self.fit = False
            raise Trouble(f"a worker ended by itself ({self.helper.returncode})") from None

    def events(self) -> list[Event]:
        """Return the events that the process reported in this cycle."""
        self.listen(0.0)
        return self._events

    def listen(self, within: float) -> None:
        """Wait until the process reports something, for at most ``within`` seconds."""
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
        """Return the first event of one of these kinds. Raises Trouble for an error, and Late if no such event comes in
        time."""

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
                raise RunEnded("the run was interrupted")
            if self.helper.returncode is not None:
                self.fit = False
                raise Trouble(f"a worker ended by itself ({self.helper.returncode}): {self.helper.errors[-200:]}")
            if (left := until - now()) < 0:
                raise Late(f"{why} in {within:.1f} s")
            self.listen(min(left, TICK))

    def forget(self) -> list[Event]:
        """Return all events of the ended cycle, and forget them."""
        events, self._events = self.events(), []
        self._first.clear()
        return events


class WorkerPool:
    """All worker processes of a run. A worker that was given back is used again.

    A worker process ends when the thread that started it ends. So one long-lived thread calls `make`, and other
    threads call `borrow`.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._wanted: queue.SimpleQueue[Future[WorkerProcess]] = queue.SimpleQueue()
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []

    def make(self) -> None:
        """Make a worker for a thread that waits in `borrow`. If no thread waits, this returns after `TICK` seconds."""
        with suppress(queue.Empty):
            wanted = self._wanted.get(timeout=TICK)
            try:
                worker = WorkerProcess(self._stop)
            except OSError as error:
                wanted.set_exception(error)
            else:
                self._all.append(worker)
                wanted.set_result(worker)

    def borrow(self, *, fresh: bool = False) -> WorkerProcess:
        """Return a worker process, or a new one if ``fresh`` is True. Raises RunEnded if the run ends during the
        wait."""
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
        wanted: Future[WorkerProcess] = Future()
        self._wanted.put(wanted)
        while True:
            try:
                return wanted.result(TICK)
            except TimeoutError:
                if self._stop.is_set():
                    raise RunEnded("the run ends") from None

    def give_back(self, worker: WorkerProcess) -> None:
        """Keep a worker for another cycle. Kills the worker if it is not fit or the run ends."""
        if worker.fit and not self._stop.is_set():
            with self._lock:
                self._idle.append(worker)
        else:
            worker.helper.kill()

    def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            worker.helper.close()


class Limit:
    """The number of cycles that run at the same time.

    The number grows by one after a cycle whose processes hardly waited for a processor, and falls by one after any
    other cycle. On an overloaded machine, too many cycles would have no verdict.
    """

    def __init__(self, least: int, most: int) -> None:
        self.now, self._least, self.most = least, least, most

    def learn(self, events: list[Event]) -> None:
        """Adjust the number after a cycle with these events."""
        faults = [event for event in events if event["what"] == "fault"]
        stood_still = sum(
            each["until"] - each["at"]
            for each in events
            if each["what"] == "stall"
            if not any(fault["pid"] == each["pid"] and _meet(fault, each) for fault in faults)
        )
        busy = stood_still > STOOD_STILL * 2 * (events[-1]["at"] - events[0]["at"])
        self.now = max(self._least, self.now - 1) if busy else min(self.most, self.now + 1)


def _meet(one: Event, other: Event) -> bool:
    return bool(one["at"] <= other["until"] and other["at"] <= one["until"])
