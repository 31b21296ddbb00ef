"""`Client.events`: delivers every event to the subscribers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multilock import system

if TYPE_CHECKING:
    from multilock.events import Event
    from multilock.kernel.callbacks import Callbacks
    from multilock.kernel.emit import Tell

__all__ = ["BACKLOG", "Events"]

BACKLOG = 10_000  # events kept for a subscriber that hangs; if there are more, the oldest are dropped


class Events:
    """The events of one client. ``unsubscribe = client.events.subscribe(callback)`` subscribes to all of them.

    A callback gets every event in order, on a thread of its own. With asyncio it runs on the event loop and may be
    ``async def``. If a callback raises, the error is logged and the next event is delivered. If a callback hangs, only
    its own events are delayed, and at most 10,000 of them are kept.
    """

    def __init__(self, check: Callable[[str, object], None], now: Callable[[], float]) -> None:
        self._check = check  # raises TypeError for a callback that this client cannot call
        self._now = now
        self._callbacks: Callbacks | None = None
        # None while there are no subscribers, so that no event is built and nothing is imported.
        self.tell: Tell | None = None
        self._subscribers: tuple[_Subscriber, ...] = ()
        self._lock = system.RLock()

    def subscribe(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Have ``callback(event)`` called for every event from now on. Returns a function that ends the subscription.

        Raises TypeError if ``callback`` cannot be called, or if a blocking client is given a coroutine function.
        """
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
            from multilock.kernel.emit import Tell

            self.tell = Tell(self, self._now)

    def begin(self, callbacks: Callbacks) -> None:
        """Forget undelivered events. Called at the start of the client, in a forked child, and on a new event loop."""
        self._callbacks = callbacks
        self._lock = system.RLock()
        for subscriber in self._subscribers:
            subscriber.begin()

    def emit(self, event: Event) -> None:
        """Deliver an event to all subscribers. Only the client itself calls this."""
        for subscriber in self._subscribers:
            try:
                if subscriber.put(event) and (callbacks := self._callbacks):
                    callbacks.start_each(subscriber.callback, subscriber.following)
            except BaseException:
                subscriber.interrupted()
                raise


class _Subscriber:
    """One callback and its undelivered events. At most one thread or task delivers them at a time."""

    def __init__(self, callback: Callable[[Event], Any]) -> None:
        self.callback = callback
        self.begin()

    def begin(self) -> None:
        """Forget undelivered events."""
        self._events: deque[Event] = deque(maxlen=BACKLOG)
        self._draining = False
        self._lock = system.RLock()

    def put(self, event: Event) -> bool:
        """Add an event. Returns True if the caller must start a thread or task that delivers."""
        with self._lock:
            self._events.append(event)
            draining, self._draining = self._draining, True
            return not draining

    def interrupted(self) -> None:
        """Make the next event start a thread or task that delivers: after an interrupt, perhaps none is running."""
        self._draining = False

    def following(self) -> Event | None:
        """Return the next event. Returns None if there is none: the delivering thread or task then ends."""
        with self._lock:
            if self._events:
                return self._events.popleft()
            self._draining = False
            return None
