"""The leases of one thread or task, so that it can ask for its innermost one, and acquire one again (reentrant); and
those of the ``with`` statements over one lock object, so that each ends its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from multilock.kernel.holding import LOST, AnyHeld

if TYPE_CHECKING:
    from multilock.kernel.want import Want

__all__ = ["Entered", "Entry", "Scope"]

L = TypeVar("L", bound=AnyHeld)


class Scope(Generic[L]):
    """What one thread or task acquired and has not given back, a lost lease included. Any thread may discard."""

    def __init__(self) -> None:
        self._leases: dict[AnyHeld, None] = {}
        self._tidy_at = 64

    def push(self, lease: L) -> None:
        """Of several locks each is here, under the lease of all of them."""
        for each in (*lease.leases, lease):
            if each._scope is None:
                each._scope = self
                self._leases[each] = None
        if len(self._leases) >= self._tidy_at:  # leases that were lost and never released by their owner
            for old in list(self._leases):
                if old._state == LOST:
                    self.discard(old)
            self._tidy_at = max(64, 2 * len(self._leases))

    def discard(self, lease: AnyHeld) -> None:
        self._leases.pop(lease, None)

    def taken_through(self, want: Want) -> L | None:
        """What a release through the lock object of ``want`` is about: its newest lease, lost ones included."""
        return self.newest(lambda lease: lease._want is want or lease._may_reenter(want))

    def keeps_out(self, want: Want) -> bool:
        """Whether leases that were taken here and are still valid keep it out: who waits for it waits for itself."""
        if want.parts:
            return any(self.keeps_out(part) for part in want.parts)
        held = islice(self._valid(want.name), max(1, want.permits))
        return len(list(held)) == max(1, want.permits)

    def blocks_itself(self, want: Want) -> L | None:
        """The lease of a reader that would become the writer, or of the writer that would become a reader."""
        other = {"read": "write", "write": "read"}.get(want.kind)
        held = next(self._valid(want.name), None) if other else None  # what is valid of one name is of one mode
        return held if held and held._want.kind == other else None

    def _valid(self, name: str) -> Iterator[L]:
        return (lease for lease in self if lease.name == name and not lease._want.parts and lease.is_held())

    def newest(self, suits: Callable[[L], bool]) -> L | None:
        return next((lease for lease in self if suits(lease)), None)

    def __iter__(self) -> Iterator[L]:
        """Newest first, without those that were released."""
        leases = cast("list[L]", list(self._leases))
        return (lease for lease in reversed(leases) if lease._to_be_released())


class Entry(Generic[L]):
    """What one ``with lock`` began: its lease, and the frame it stands in, which is the same at its end.

    That is so in whatever thread or task the end comes: the frame of a generator (a fixture, a dependency of FastAPI)
    goes with it. The frame of an exit stack's method, or of any other helper that entered for somebody, is another at
    the end; kept here, none can be mistaken for it.
    """

    __slots__ = ("_open", "body", "frame", "lease")

    def __init__(self, lease: L, frame: FrameType | None) -> None:
        self.lease = lease
        self.frame = frame
        self.body: Any = None  # asyncio: what is cancelled when the lease is lost
        self._open = [True]

    def close(self) -> bool:
        """Take it to its end. False: somebody else did."""
        try:
            return self._open.pop()
        except IndexError:
            return False

    def is_open(self) -> bool:
        return bool(self._open)


class Entered(Generic[L]):
    """What was entered through one lock object, and not left. Any thread may ask; no lock is taken, which a fork could
    leave taken."""

    def __init__(self) -> None:
        self._entries: list[Entry[L]] = []

    def add(self, entry: Entry[L]) -> None:
        self._entries.append(entry)

    def discard(self, entry: Entry[L]) -> None:
        with suppress(ValueError):
            self._entries.remove(entry)

    def ending(self, frame: FrameType | None, scope: object) -> Entry[L] | None:
        """Return the entry that ends here, or None if none can be told. The caller closes it (if another thread was
        faster it asks again), ends its lease, and then discards it.

        That is the entry of the ``with`` in this frame. Without one, an exit stack or an explicit call entered
        it, and nothing tells which entry ends: the newest of this thread or task, else one whose end harms nobody (a
        lost one first, so that its loss is reported), else the only one that is held."""
        entries = [entry for entry in self._entries[::-1] if entry.is_open()]

        def newest(suits: Callable[[Entry[L]], bool]) -> Entry[L] | None:
            return next((entry for entry in entries if suits(entry)), None)

        return (
            (newest(lambda entry: entry.frame is frame) if frame else None)
            or (newest(lambda entry: entry.lease._scope is scope) if scope else None)
            or newest(lambda entry: entry.lease._is_lost())
            or newest(lambda entry: not entry.lease._alive())
            or (entries[0] if len({entry.lease for entry in entries}) == 1 else None)
        )
