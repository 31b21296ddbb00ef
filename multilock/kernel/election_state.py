"""`Office`: the state that all terms of one election share. `Condition` lets coroutines wait for changes of that state.

A term is one leadership. A part is user code that must end before the leadership is released. A mark records that a
thread or task runs inside a part. A bell wakes one waiting coroutine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from multilock import system
from multilock.kernel import living_clients
from multilock.kernel.holding import Holding
from multilock.model import Loss

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.runtime import Bell
    from multilock.kernel.scopes import Scope

__all__ = ["Condition", "Office", "Part", "inside", "is_inside", "mark", "marks", "set_marks", "unmark"]

T = TypeVar("T", bound=Holding)


class Part:
    """User code that must end before a leadership is released: the work, ``on_elected`` or ``on_lost``."""

    __slots__ = ("done", "name", "office")

    def __init__(self, name: str, office: Office[Any], *, done: bool = False) -> None:
        self.name = name
        self.office = office
        self.done = done


# The parts that run in this thread or task, or in a task that started it. Code in one of these parts may end the
# leadership, but does not wait until the leadership has ended. Otherwise the code would wait for itself, or for code
# that waits for it.
_INSIDE: ContextVar[tuple[Part, ...]] = ContextVar("multilock_inside", default=())


def mark(part: Part) -> None:
    """Mark the code that this thread or task runs from here on as part of ``part``."""
    _INSIDE.set((*[other for other in _INSIDE.get() if not other.done], part))


def unmark(part: Part) -> None:
    """Remove the newest mark of this part from this thread or task.

    Does nothing if another thread or task called `mark`, as may happen after an event loop was closed. The mark then
    stays in the other thread or task until `mark` is called there again. Once the part has ended, the mark does not
    count.
    """
    marked = list(_INSIDE.get()[::-1])
    with contextlib.suppress(ValueError):
        marked.remove(part)
        _INSIDE.set((*marked[::-1],))


def marks() -> tuple[Part, ...]:
    """Return the parts inside which this thread or task runs now. `set_marks` restores them if a body does not
    begin."""
    return _INSIDE.get()


def set_marks(parts: tuple[Part, ...]) -> None:
    """Restore the parts that `marks` returned, because a body has not begun."""
    _INSIDE.set(parts)


def is_inside(part: Part) -> bool:
    """Return whether this thread or task, or the task that started it, runs inside ``part``."""
    return part in _INSIDE.get()


@contextlib.contextmanager
def inside(part: Part) -> Iterator[None]:
    """Mark the body as running inside ``part``."""
    mark(part)
    try:
        yield
    finally:
        unmark(part)


def _never() -> float:
    return math.inf


class Condition:
    """A `threading.Condition` for coroutines, without its lock.

    Code that changes something calls `notify` after the change, and every waiter checks its predicate again. A waiter
    registers its bell before the first check, so it misses no change.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._bells: list[Bell] = []

    async def wait_for(self, predicate: Callable[[], bool], deadline: Callable[[], float] = _never) -> bool:
        """Wait until ``predicate()`` is true. Returns False at ``deadline()``.

        The deadline is read again at every wake-up, because it may have moved closer.
        """
        bell = self._kernel.face.bell()
        self._bells.append(bell)
        try:
            while not predicate():
                if (left := deadline() - self._kernel.now()) <= 0:
                    return False
                await bell.wait(left)
            return True
        finally:
            with contextlib.suppress(ValueError):  # `forget` has already removed it
                self._bells.remove(bell)

    def notify(self) -> None:
        """Have every waiter check its predicate again."""
        for bell in list(self._bells):
            bell.ring()

    def forget(self) -> None:
        """Remove all waiters, because their event loop was closed and they never wake."""
        self._bells.clear()


class Office(Generic[T]):
    """The callbacks, the grace and the condition of one election."""

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        scope: Callable[[], Scope[Any] | None],
        on_elected: Callable[[T], object] | None,
        on_lost: Callable[[Loss[Any]], object] | None,
        grace: float | None,
    ) -> None:
        self.kernel = kernel
        self.name = name
        self.scope = scope  # returns the leases of the calling thread or task
        self.on_elected = on_elected
        self.on_lost = on_lost
        self.grace = grace
        self.begin()

    def begin(self) -> None:
        """Create the condition. Called again in a forked child, where none of the waiters exists."""
        self.condition = Condition(self.kernel)

    @property
    def lock(self) -> system.RLock:
        """The lock of the client's state. `in_the_middle` of `living_clients` is True while a thread holds it."""
        return self.kernel.lock

    def push(self, leadership: T, scope: Scope[Any] | None = None) -> None:
        """Make the leadership the innermost lease of the thread or task that runs its work."""
        if scope := scope or self.scope():
            scope.push(leadership)

    def inside(self) -> bool:
        """Return whether the caller must not wait for the end of a leadership.

        The caller must not wait if it is work or a callback of this election, or a task started by one of these. A
        finalizer or signal handler that has interrupted a call of multilock must not wait either.
        """
        if any([part.office is self and not part.done for part in _INSIDE.get()]):  # noqa: C419 - one call for all
            return True
        return living_clients.in_the_middle()
