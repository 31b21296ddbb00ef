"""Who wants to hear when the holder of a name changes (`observe`, `on_leader_changed`)."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from multilock.kernel.runtime import call_inside
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.monitor import Wakeable

__all__ = ["Followers"]

POLL = 0.5  # seconds between looks where the backend does not push
PUSHED = 10.0  # seconds between looks where it does: a push is a hint, never a promise


class Followers:
    """Bells by name. A bell rings when its name may have changed, and once when the backend has begun to tell."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._bells: dict[str, list[Wakeable]] = {}
        self._dropped: deque[tuple[str, Wakeable]] = deque()
        self._lock = threading.RLock()
        self._workers = kernel.runtime.workers("multilock-follow", 1, kernel.later)
        self._pushed: frozenset[str] = frozenset()

    def add(self, name: str, bell: Wakeable) -> None:
        self._remove_dropped()
        with self._lock:
            self._bells.setdefault(name, []).append(bell)
        self._workers.submit(self._tell_backend)

    def remove(self, name: str, bell: Wakeable) -> None:
        with self._lock:
            bells = self._bells.get(name, [])
            if bell in bells:
                bells.remove(bell)
            if not bells:
                self._bells.pop(name, None)
        self._workers.submit(self._tell_backend)

    def drop(self, name: str, bell: Wakeable) -> None:
        """Like `remove`, some time later: the garbage collector calls, in whatever thread, whatever lock that holds."""
        self._dropped.append((name, bell))

    def _remove_dropped(self) -> None:
        while self._dropped:
            try:
                self.remove(*self._dropped.popleft())
            except IndexError:  # another thread was first
                return

    def wanted(self) -> bool:
        return bool(self._bells)

    def look_again_in(self, name: str) -> float:
        """Seconds after which to look without a push."""
        return PUSHED if name in self._pushed else POLL

    def changed(self, name: str | None) -> None:
        self._remove_dropped()
        with self._lock:
            if name is None:
                bells = [bell for some in self._bells.values() for bell in some]
            else:
                bells = list(self._bells.get(name, ()))
        for bell in bells:
            bell.set()

    def close(self) -> None:
        self.changed(None)
        self._workers.close()

    def _tell_backend(self) -> None:
        with self._lock:
            names = frozenset(self._bells)
        if names == self._pushed or self._kernel.finished:
            return
        try:
            pushed = call_inside(self._kernel.backend.follow, names, self._kernel.request_timeout())
        except Exception as error:
            logger.debug("%s does not report changes yet: %s", self._kernel.scheme, error)
            pushed = False
            self._kernel.timers.at(self._kernel.now() + 1.0, lambda: self._workers.submit(self._tell_backend))
        new = names - self._pushed
        self._pushed = names if pushed else frozenset()
        if pushed:
            for name in new:
                self.changed(name)
