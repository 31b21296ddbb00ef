"""Who leads, as others see it: ``observe()``, ``on_leader_changed``, the event LeaderChanged.

`Followers` knows whom the client wants to hear of, `Observer` gives the present leader and each change, and `Reporter`
tells them to an election's callback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from multilock import system
from multilock.errors import BackendRejected, BackendUnavailable, ClientClosed
from multilock.kernel.runtime import call_inside
from multilock.kernel.want import SHARED
from multilock.model import LeaderInfo, LockInfo
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.runtime import Bell

__all__ = ["Followers", "Observer", "Reporter", "leader_info"]

POLL = 0.5  # seconds between looks where the backend does not push
PUSHED = 10.0  # seconds between looks where it does: a push is a hint, never a promise
REFUSED_PAUSE = 1.0  # seconds before a backend is asked again that refused to tell who leads


class Followers:
    """Bells by name. A bell rings when its name may have changed, and once when the backend has begun to tell."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._bells: dict[str, list[Bell]] = {}
        self._dropped: deque[tuple[str, Bell]] = deque()
        self._lock = system.RLock()
        self._workers = kernel.runtime.workers("multilock-follow", 1)
        self._pushed: frozenset[str] = frozenset()

    def add(self, name: str, bell: Bell) -> None:
        self._remove_dropped()
        with self._lock:
            self._bells.setdefault(name, []).append(bell)
        self._workers.submit(self._tell_backend)

    def remove(self, name: str, bell: Bell) -> None:
        with self._lock:
            bells = self._bells.get(name, [])
            if bell in bells:
                bells.remove(bell)
            if not bells:
                self._bells.pop(name, None)
        self._workers.submit(self._tell_backend)

    def drop(self, name: str, bell: Bell) -> None:
        """Like `remove`, some time later: the garbage collector calls, in whatever thread, whatever lock that holds."""
        self._dropped.append((name, bell))

    def _remove_dropped(self) -> None:
        while self._dropped:
            try:
                self.remove(*self._dropped.popleft())
            except IndexError:  # another thread was first
                return

    def wanted(self) -> bool:
        self._remove_dropped()
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
            bell.ring()

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


def leader_info(info: LockInfo | None) -> LeaderInfo | None:
    """None while the name rests, or is held by readers or permits: nobody leads then."""
    if info is None or info.resting_until or info.kind in SHARED:
        return None
    return LeaderInfo(info.identity, info.token, info.host, info.since)


class Observer:
    """The present leader, then each change; quick changes may be merged, the last is never missed."""

    def __init__(self, kernel: Kernel, name: str, told: str | None = "") -> None:
        self._kernel = kernel
        self._name = name
        self.closed = False
        self.told = told  # the owner told last, None for nobody; no owner is "", so that the first is always told
        self.bell = kernel.face.bell()
        kernel.followers.add(name, self.bell)

    async def following(self) -> LeaderInfo | None:
        """The next leader, None for nobody. An outage is waited out.

        Raises ClientClosed at the end, and BackendRejected, after which it may be asked again.
        """
        kernel = self._kernel
        while True:
            if self.closed:
                raise ClientClosed("this observer was closed", name=self._name, backend=kernel.scheme)
            try:
                info = await kernel.ask(kernel.backend.inspect, self._name, name=self._name)
            except BackendUnavailable as error:
                logger.debug("who leads %r is not known: %s", self._name, error)
            else:
                leader = leader_info(info)
                owner = (info.owner or repr(leader)) if info and leader else None
                if owner != self.told:
                    self.told = owner
                    return leader
            await self.bell.wait(kernel.followers.look_again_in(self._name))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._kernel.followers.remove(self._name, self.bell)
            self.bell.ring()

    def drop(self) -> None:
        """Like `close`, by the garbage collector."""
        if not self.closed:
            self.closed = True
            self._kernel.followers.drop(self._name, self.bell)


class Reporter:
    """Tells one election's ``on_leader_changed``, and the client's events, each change of leader."""

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        on_leader_changed: Callable[[LeaderInfo | None], object] | None,
        call: Callable[[Callable[[LeaderInfo | None], object], LeaderInfo | None], Awaitable[None]],
        in_background: Callable[[Callable[[], Coroutine[Any, Any, None]], Observer], None],
    ) -> None:
        self._kernel = kernel
        self._name = name
        self._on_leader_changed = on_leader_changed
        self._call = call
        self._in_background = in_background
        self._observer: Observer | None = None
        self._wanted = False

    def begin(self) -> None:
        self._wanted = self._on_leader_changed is not None or self._kernel.events.tell is not None
        if self._wanted and self._observer is None:
            self._observe(None)

    def _observe(self, told: str | None) -> None:
        observer = self._observer = Observer(self._kernel, self._name, told)
        self._in_background(lambda: self._report(observer), observer)

    def resume(self, observer: Observer) -> None:
        """Its task was cancelled from outside, perhaps before it began."""
        observer.close()
        if self._observer is observer:
            self._observer = None
        if self._wanted and self._observer is None and not self._kernel.closed:
            self._observe(observer.told)

    def end_without_callback(self) -> None:
        """A campaign is over: what was observed for it alone was observed for its events."""
        if self._on_leader_changed is None:
            self.end()

    def end(self) -> None:
        self._wanted = False
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def forget(self) -> None:
        """In a forked child: nothing observes there."""
        self._wanted = False
        self._observer = None

    async def _report(self, observer: Observer) -> None:
        """Tell each change, until the observer is closed."""
        try:
            while True:
                try:
                    leader = await observer.following()
                except BackendRejected as error:
                    logger.error(
                        "who leads %r is not told, and asked again: %s",
                        self._name,
                        error,
                        extra={"lock_name": self._name},
                    )
                    await observer.bell.wait(REFUSED_PAUSE)
                else:
                    await self._tell(leader)
        except ClientClosed:
            pass
        finally:
            observer.close()
            if self._observer is observer:
                self._observer = None

    async def _tell(self, leader: LeaderInfo | None) -> None:
        kernel = self._kernel
        if tell := kernel.events.tell:
            tell.leader_changed(self._name, leader)
        if self._on_leader_changed:
            await self._call(self._on_leader_changed, leader)
