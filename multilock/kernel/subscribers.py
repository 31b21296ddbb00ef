"""`Client.events`: tells every event to those who subscribed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multilock import system

if TYPE_CHECKING:
    from multilock.events import Event
    from multilock.kernel.callbacks import Callbacks
    from multilock.kernel.tell import Tell

__all__ = ["BACKLOG", "Events"]

BACKLOG = 10_000  # events kept for a subscriber that hangs; then the oldest are dropped


class Events:
    """``subscribe(callback) -> unsubscribe``: calls it with every event, in order, off the threads that do the work
    (asyncio: on the loop; there what it returns is awaited, if it can be).

    One that raises is logged and goes on; one that hangs delays only its own events.
    """

    def __init__(self, check: Callable[[str, object], None], now: Callable[[], float]) -> None:
        self._check = check  # raises TypeError for what this client cannot call
        self._now = now
        self._callbacks: Callbacks | None = None
        self.tell: Tell | None = None  # None while nobody listens: then nothing is made, nor imported, of an event
        self._subscribers: tuple[_Subscriber, ...] = ()
        self._lock = system.RLock()

    def subscribe(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Have ``callback(event)`` called from now on; call what this returns to end it."""
        if callback is None:
            raise TypeError("subscribe takes a function of one argument, not None")
        self._check("subscribe", callback)
        subscriber = _Subscriber(callback)
        with self._lock:
            self._subscribers += (subscriber,)
            self._set_tell()

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(other for other in self._subscribers if other is not subscriber)
                self._set_tell()

        return unsubscribe

    def _set_tell(self) -> None:
        if not self._subscribers:
            self.tell = None
        elif self.tell is None:
            from multilock.kernel.tell import Tell

            self.tell = Tell(self, self._now)

    def begin(self, callbacks: Callbacks) -> None:
        """At the start of the client, and again in a forked child, where nobody is draining."""
        self._callbacks = callbacks
        self._lock = system.RLock()
        for subscriber in self._subscribers:
            subscriber.begin()

    def emit(self, event: Event) -> None:
        """The client tells its subscribers. No user needs it."""
        for subscriber in self._subscribers:
            try:
                if subscriber.put(event) and (callbacks := self._callbacks):
                    callbacks.start_each(subscriber.callback, subscriber.following)
            except BaseException:
                subscriber.interrupted()
                raise


class _Subscriber:
    def __init__(self, callback: Callable[[Event], Any]) -> None:
        self.callback = callback
        self.begin()

    def begin(self) -> None:
        self._events: deque[Event] = deque(maxlen=BACKLOG)
        self._draining = False
        self._lock = system.RLock()

    def put(self, event: Event) -> bool:
        """Whether somebody must be started to drain."""
        with self._lock:
            self._events.append(event)
            draining, self._draining = self._draining, True
            return not draining

    def interrupted(self) -> None:
        """Whether somebody drains is not known: the next event starts somebody."""
        self._draining = False

    def following(self) -> Event | None:
        """None: somebody must be started to drain again."""
        with self._lock:
            if self._events:
                return self._events.popleft()
            self._draining = False
            return None
