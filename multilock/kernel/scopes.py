"""The leases of each thread or task (`Scope`), and those of each ``with`` statement (`Entered`).

A want has the settings of one lock object. A scope finds the innermost lease of a thread or task, and the lease that a
reentrant lock may acquire once more. An entry records one ``with lock`` that has begun, so that the end of the ``with``
releases the right lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from multilock.kernel.holding import LOST, AnyHeld

if TYPE_CHECKING:
    from multilock.kernel.lock_options import Want

__all__ = ["Entered", "Scope", "WithEntry"]

L = TypeVar("L", bound=AnyHeld)


class Scope(Generic[L]):
    """The leases that one thread or task has acquired and not released, including lost leases.

    Any thread may call `discard`.
    """

    def __init__(self) -> None:
        self._leases: dict[AnyHeld, None] = {}
        self._tidy_at = 64

    def push(self, lease: L) -> None:
        """Add a lease. For a lease of several locks, the single leases are added before it."""
        for each in (*lease.leases, lease):
            if each._scope is None:
                each._scope = self
                self._leases[each] = None
        if len(self._leases) >= self._tidy_at:  # drop leases that were lost and that their owner never released
            for old in list(self._leases):
                if old.stage == LOST:
                    self.discard(old)
            self._tidy_at = max(64, 2 * len(self._leases))

    def discard(self, lease: AnyHeld) -> None:
        """Remove a lease, if this scope has it."""
        self._leases.pop(lease, None)

    def taken_through(self, want: Want) -> L | None:
        """Return the lease that ``release()`` of this lock object ends: the newest lease, even if it was lost."""
        return self.newest(lambda lease: lease.want is want or lease._may_reenter(want))

    def keeps_out(self, want: Want) -> bool:
        """Return whether valid leases of this thread or task exclude ``want``, so that the thread or task would wait
        for itself."""
        if want.parts:
            return any(self.keeps_out(part) for part in want.parts)
        held = islice(self._valid(want.name), max(1, want.permits))
        return len(list(held)) == max(1, want.permits)

    def blocks_itself(self, want: Want) -> L | None:
        """Return the read lease that prevents ``want`` from writing, or the write lease that prevents it from
        reading."""
        other = {"read": "write", "write": "read"}.get(want.kind)
        held = next(self._valid(want.name), None) if other else None  # all valid leases of a name have the same kind
        return held if held and held.want.kind == other else None

    def _valid(self, name: str) -> Iterator[L]:
        return (lease for lease in self if lease.name == name and not lease.want.parts and lease.is_held())

    def newest(self, suits: Callable[[L], bool]) -> L | None:
        """Return the newest lease for which ``suits(lease)`` is true, or None."""
        return next((lease for lease in self if suits(lease)), None)

    def __iter__(self) -> Iterator[L]:
        """Iterate over the leases that still have to be released, the newest first."""
        leases = cast("list[L]", list(self._leases))
        return (lease for lease in reversed(leases) if lease._to_be_released())


class WithEntry(Generic[L]):
    """One ``with lock``: its lease, and the frame that contains the ``with`` statement.

    A ``with`` ends in the frame in which it began. This is true even in a generator (a fixture, a dependency of
    FastAPI) that begins the ``with`` in one thread or task and ends it in another. If an exit stack or another helper
    entered the lock, the end has a different frame. The entry keeps a reference to its frame, so that no later frame
    can be mistaken for it.
    """

    __slots__ = ("_open", "body", "frame", "lease")

    def __init__(self, lease: L, frame: FrameType | None) -> None:
        self.lease = lease
        self.frame = frame
        self.body: Any = None  # with asyncio, the `Body` that a loss cancels
        self._open = [True]

    def close(self) -> bool:
        """Take the right to end this entry. Returns False if another caller has taken it already."""
        try:
            return self._open.pop()
        except IndexError:
            return False

    def is_open(self) -> bool:
        """Return True until `close` is called."""
        return bool(self._open)


class Entered(Generic[L]):
    """The open entries of one lock object. Any thread may call its methods.

    This class uses no lock, because after a fork a lock could stay taken forever in the child.
    """

    def __init__(self) -> None:
        self._entries: list[WithEntry[L]] = []

    def add(self, entry: WithEntry[L]) -> None:
        """Add the entry of a ``with`` that begins."""
        self._entries.append(entry)

    def discard(self, entry: WithEntry[L]) -> None:
        """Remove an entry, if it has not been removed already."""
        with suppress(ValueError):
            self._entries.remove(entry)

    def ending(self, frame: FrameType | None, scope: object) -> WithEntry[L] | None:
        """Return the entry that ends in this frame, or None if no entry can be chosen.

        The caller closes the entry, ends its lease, and then discards the entry. If another thread closes the entry
        first, the caller asks for an entry again.

        Tries these rules in order, and returns the newest open entry that the first matching rule finds:

        * The entry's ``with`` statement is in this frame.
        * The entry's lease belongs to ``scope``, the scope of this thread or task.
        * The entry's lease was lost. The caller then raises the loss.
        * The entry's lease was released.
        * All open entries have the same lease.

        Only the first rule is certain. The others guess, because an exit stack or a call by hand entered the lock.
        """
        entries = [entry for entry in self._entries[::-1] if entry.is_open()]

        def newest(suits: Callable[[WithEntry[L]], bool]) -> WithEntry[L] | None:
            return next((entry for entry in entries if suits(entry)), None)

        return (
            (newest(lambda entry: entry.frame is frame) if frame else None)
            or (newest(lambda entry: entry.lease._scope is scope) if scope else None)
            or newest(lambda entry: entry.lease._is_lost())
            or newest(lambda entry: not entry.lease._alive())
            or (entries[0] if len({entry.lease for entry in entries}) == 1 else None)
        )
