"""Report who leads an election: ``observe()``, ``on_leader_changed``, the event LeaderChanged.

`Followers` has the names whose changes the client wants. `Observer` returns the present leader and each change.
`Reporter` passes the changes to an election's callback. A bell wakes one observer. A push is a message that the server
sends without a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from multilock import system
from multilock.errors import BackendRejected, BackendUnavailable, ClientClosed
from multilock.kernel.inside_backend import call_inside
from multilock.kernel.lock_options import SHARED
from multilock.log_thread import logger
from multilock.model import LeaderInfo, LockInfo

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.runtime import Bell

__all__ = ["Followers", "Observer", "Reporter", "leader_info"]

POLL = 0.5  # seconds between requests if the backend does not push changes
PUSHED = 10.0  # seconds between requests if the backend pushes changes, because a push may be lost
REFUSED_PAUSE = 1.0  # seconds until the next request, if the backend refused to say who leads


class Followers:
    """The bells of all observers, by the name that they observe. A bell rings when the holder of the name may
    have changed.

    The bell also rings once when the backend has begun to push the changes of that name.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._bells: dict[str, list[Bell]] = {}
        self._dropped: deque[tuple[str, Bell]] = deque()
        self._lock = system.RLock()
        self._workers = kernel.runtime.workers("multilock-follow", 1)
        self._pushed: frozenset[str] = frozenset()

    def add(self, name: str, bell: Bell) -> None:
        """Ring ``bell`` whenever the holder of ``name`` may have changed."""
        self._remove_dropped()
        with self._lock:
            self._bells.setdefault(name, []).append(bell)
        self._workers.submit(self._tell_backend)

    def remove(self, name: str, bell: Bell) -> None:
        """Undo `add`."""
        with self._lock:
            bells = self._bells.get(name, [])
            if bell in bells:
                bells.remove(bell)
            if not bells:
                self._bells.pop(name, None)
        self._workers.submit(self._tell_backend)

    def drop(self, name: str, bell: Bell) -> None:
        """Have `remove` called later. Called by the garbage collector, in a thread that may hold any lock."""
        self._dropped.append((name, bell))

    def _remove_dropped(self) -> None:
        while self._dropped:
            try:
                self.remove(*self._dropped.popleft())
            except IndexError:  # another thread has taken the last entry
                return

    def wanted(self) -> bool:
        """Return whether any name is followed."""
        self._remove_dropped()
        return bool(self._bells)

    def look_again_in(self, name: str) -> float:
        """Return the seconds after which an observer asks for the leader although no change was pushed."""
        return PUSHED if name in self._pushed else POLL

    def changed(self, name: str | None) -> None:
        """Ring the bells of ``name``, or of all names if that is None."""
        self._remove_dropped()
        with self._lock:
            if name is None:
                bells = [bell for some in self._bells.values() for bell in some]
            else:
                bells = list(self._bells.get(name, ()))
        for bell in bells:
            bell.ring()

    def close(self) -> None:
        """Wake every observer and end the thread, because the client ends."""
        self.changed(None)
        self._workers.close()

    def _tell_backend(self) -> None:
        """Give the backend the names whose changes it must push. If that fails, try again after a second."""
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
    """Return the leader in ``info``, or None if nobody leads.

    A name has no leader while hold_at_least keeps it taken, or while readers or permits hold it.
    """
    if info is None or info.resting_until or info.kind in SHARED:
        return None
    return LeaderInfo(info.identity, info.token, info.host, info.since)


class Observer:
    """Returns the present leader, then each change. Quick changes may be merged, but the last one is never missed.

    ``told`` is the owner of the leader that was returned last, or None if the last result was that nobody leads.
    ``told`` begins as "", which is never an owner, so the first leader is always returned.
    """

    def __init__(self, kernel: Kernel, name: str, told: str | None = "") -> None:
        self._kernel = kernel
        self._name = name
        self.closed = False
        self.told = told
        self.bell = kernel.face.bell()
        kernel.followers.add(name, self.bell)

    async def following(self) -> LeaderInfo | None:
        """Wait for the next change and return the leader, or None if there is none. An outage only delays the result.

        Raises ClientClosed at the end. After BackendRejected the caller may call this again.
        """
        kernel = self._kernel
        while True:
            if self.closed:
                raise ClientClosed("this observer was closed", name=self._name, backend=kernel.scheme)
            try:
                info = await kernel.ask(kernel.backend.inspect, self._name, name=self._name)
            except BackendUnavailable as error:
                logger.debug("cannot find out who leads %r, trying again: %s", self._name, error)
            else:
                leader = leader_info(info)
                owner = (info.owner or repr(leader)) if info and leader else None
                if owner != self.told:
                    self.told = owner
                    return leader
            await self.bell.wait(kernel.followers.look_again_in(self._name))

    def close(self) -> None:
        """Stop observing, and wake the coroutine that waits in `following`."""
        if not self.closed:
            self.closed = True
            self._kernel.followers.remove(self._name, self.bell)
            self.bell.ring()

    def drop(self) -> None:
        """Stop observing. Called by the garbage collector."""
        if not self.closed:
            self.closed = True
            self._kernel.followers.drop(self._name, self.bell)


class Reporter:
    """Passes each change of leader to one election's ``on_leader_changed``, and to the client's events."""

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
        """Start to observe, if there is a callback or a subscriber."""
        self._wanted = self._on_leader_changed is not None or self._kernel.events.tell is not None
        if self._wanted and self._observer is None:
            self._observe(None)

    def _observe(self, told: str | None) -> None:
        observer = self._observer = Observer(self._kernel, self._name, told)
        self._in_background(lambda: self._report(observer), observer)

    def resume(self, observer: Observer) -> None:
        """Start the reporting task again after user code cancelled it, perhaps before it began."""
        observer.close()
        if self._observer is observer:
            self._observer = None
        if self._wanted and self._observer is None and not self._kernel.closed:
            self._observe(observer.told)

    def end_without_callback(self) -> None:
        """Stop observing after a campaign, unless there is a callback: a callback receives changes until `stop`."""
        if self._on_leader_changed is None:
            self.end()

    def end(self) -> None:
        """Stop observing."""
        self._wanted = False
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def forget(self) -> None:
        """Forget the parent's observer in a forked child."""
        self._wanted = False
        self._observer = None

    async def _report(self, observer: Observer) -> None:
        """Pass on each change until the observer is closed."""
        try:
            while True:
                try:
                    leader = await observer.following()
                except BackendRejected as error:
                    logger.error(
                        "the backend refuses to tell who leads %r, asking again: %s",
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
