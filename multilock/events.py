"""Typed events: frozen values, one class for each thing that happens; and `Client.events`, which tells them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multilock.model import LeaderInfo, Loss

if TYPE_CHECKING:
    from multilock.callbacks import Callbacks

__all__ = [
    "Acquired",
    "AtRisk",
    "Elected",
    "Event",
    "Events",
    "LeaderChanged",
    "Lost",
    "Released",
    "RenewFailed",
    "Renewed",
    "Waiting",
]


@dataclass(frozen=True, slots=True)
class Event:
    """``at`` is seconds on the clock `multilock.now()`; ``owner`` is the id of the acquisition concerned."""

    name: str
    owner: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The name was taken; this acquire waits."""


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """The name is held from now on; ``token`` is None where the backend has none."""

    token: int | None
    waited: float  #: seconds from the call of acquire()


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """A renewal was acknowledged; the proof now lasts until ``valid_until``."""

    valid_until: float


@dataclass(frozen=True, slots=True)
class RenewFailed(Event):
    """A renewal was not answered, or refused; it is tried again."""

    message: str


@dataclass(frozen=True, slots=True)
class AtRisk(Event):
    """A renewal failed or is late; the lease is lost at ``lost_at`` unless one is acknowledged before."""

    lost_at: float


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """The lease ended without being released."""

    loss: Loss


@dataclass(frozen=True, slots=True)
class Released(Event):
    """``held_for`` is the seconds from the grant to the call of release()."""

    held_for: float


@dataclass(frozen=True, slots=True)
class Elected(Event):
    """This node leads, in this term."""

    identity: str
    term: int | None


@dataclass(frozen=True, slots=True)
class LeaderChanged(Event):
    """Another node leads, or none."""

    leader: LeaderInfo | None


BACKLOG = 10_000  # events kept for a subscriber that hangs; then the oldest are dropped


class Events:
    """``subscribe(callback) -> unsubscribe``: calls it with every event, in order, off the threads that do the work.

    One that raises is logged and goes on; one that hangs delays only its own events.
    """

    def __init__(self) -> None:
        self._callbacks: Callbacks | None = None
        self.listened = False  #: whether making an event is worth it
        self._subscribers: tuple[_Subscriber, ...] = ()
        self._lock = threading.Lock()

    def subscribe(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        if not callable(callback):
            raise TypeError(f"subscribe takes a function of one argument, not {callback!r:.60}")
        subscriber = _Subscriber(callback)
        with self._lock:
            self._subscribers += (subscriber,)
            self.listened = True

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(other for other in self._subscribers if other is not subscriber)
                self.listened = bool(self._subscribers)

        return unsubscribe

    def begin(self, callbacks: Callbacks) -> None:
        """At the start of the client, and again in a forked child, where nobody is draining."""
        self._callbacks = callbacks
        self._lock = threading.Lock()
        for subscriber in self._subscribers:
            subscriber.begin()

    def emit(self, event: Event) -> None:
        for subscriber in self._subscribers:
            if subscriber.put(event) and self._callbacks:
                self._callbacks.start(subscriber.drain)


class _Subscriber:
    def __init__(self, callback: Callable[[Event], Any]) -> None:
        self._callback = callback
        self.begin()

    def begin(self) -> None:
        self._events: deque[Event] = deque(maxlen=BACKLOG)
        self._draining = False
        self._lock = threading.Lock()

    def put(self, event: Event) -> bool:
        """Whether somebody must be started to drain."""
        with self._lock:
            self._events.append(event)
            draining, self._draining = self._draining, True
            return not draining

    def drain(self) -> None:
        from multilock.callbacks import call_safely

        while True:
            with self._lock:
                if not self._events:
                    self._draining = False
                    return
                event = self._events.popleft()
            call_safely(self._callback, event)
