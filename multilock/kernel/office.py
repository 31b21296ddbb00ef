"""What all terms of one election share: its callbacks and its grace, on what everybody waits, and who must not wait."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from multilock import system
from multilock.kernel import process
from multilock.kernel.holding import Holding
from multilock.model import Loss

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.runtime import Bell
    from multilock.kernel.scopes import Scope

__all__ = ["Condition", "Office", "Part", "inside"]

T = TypeVar("T", bound=Holding)


class Part:
    """What has to end before a leadership is given back: the work, ``on_elected``, ``on_lost``."""

    __slots__ = ("done", "name", "office")

    def __init__(self, name: str, office: Office[Any], *, done: bool = False) -> None:
        self.name = name
        self.office = office
        self.done = done


# What this thread or task, or the task that started it, runs for an election. Ending the leadership from there does not
# wait: it would wait for itself, or for what may wait for it.
_INSIDE: ContextVar[tuple[Part, ...]] = ContextVar("multilock_inside", default=())


@contextlib.contextmanager
def inside(part: Part) -> Iterator[None]:
    token = _INSIDE.set((*_INSIDE.get(), part))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # its loop was closed, and the garbage collector unwinds it elsewhere
            _INSIDE.reset(token)


def _never() -> float:
    return math.inf


class Condition:
    """`threading.Condition` without its lock: who changes something calls `notify` after it, and whoever waits looks
    again. No change is missed: a bell hangs here before the first look."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._bells: list[Bell] = []

    async def wait_for(self, predicate: Callable[[], bool], deadline: Callable[[], float] = _never) -> bool:
        """Wait until ``predicate()``; False at ``deadline()``, which is looked at again as well: it may come closer."""
        bell = self._kernel.face.bell()
        self._bells.append(bell)
        try:
            while not predicate():
                if (left := deadline() - self._kernel.now()) <= 0:
                    return False
                await bell.wait(left)
            return True
        finally:
            with contextlib.suppress(ValueError):  # forgotten
                self._bells.remove(bell)

    def notify(self) -> None:
        for bell in list(self._bells):
            bell.ring()

    def forget(self) -> None:
        """Who waited on a loop that was closed never wakes."""
        self._bells.clear()


class Office(Generic[T]):
    """What the terms of one election have in common."""

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
        self.scope = scope  # the leases of the thread or task that asks
        self.on_elected = on_elected
        self.on_lost = on_lost
        self.grace = grace
        self.begin()

    def begin(self) -> None:
        """Anew in a forked child, where nobody waits, and another thread may have had the lock."""
        self.lock = system.RLock()  # a finalizer may come while its thread is inside
        self.condition = Condition(self.kernel)

    def push(self, leadership: T, scope: Scope[Any] | None = None) -> None:
        """It is the innermost lease of who works under it."""
        if scope := scope or self.scope():
            scope.push(leadership)

    def inside(self) -> bool:
        """Whether who asks must not wait: it is work or a callback of this election that has not ended, or was started
        by it, or comes in the middle of ours."""
        if any(part.office is self and not part.done for part in _INSIDE.get()):
            return True
        return process.in_the_middle() or self.lock._is_owned()  # type: ignore[attr-defined]
