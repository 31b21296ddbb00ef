"""Connect to a server within a time limit, although a DNS look-up and a handshake of several round trips have none.

For backends that make their connections in blocking code. `Dialling` connects on a separate thread. `unforked` makes a
connection that no child process inherits unnoticed. `OpenWires` are the connections that a child must drop.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from multilock import system
from multilock.kernel.worker import start_worker

__all__ = ["Dialling", "OpenWires", "unforked"]


class Closable(Protocol):
    """A connection."""

    def close(self) -> None:
        """Close the connection."""


Wire = TypeVar("Wire", bound=Closable)


class OpenWires(Generic[Wire]):
    """The open connections. This set holds weak references: a connection whose owner was interrupted before storing it
    is closed at once, as garbage."""

    def __init__(self) -> None:
        self._wires: set[weakref.ref[Wire]] = set()  # used without a lock, since its methods are atomic

    def add(self, wire: Wire) -> None:
        """Hold this connection until it is closed or garbage."""
        self._wires.add(weakref.ref(wire, self._wires.discard))

    def discard(self, wire: Wire) -> None:
        """Forget this connection, if it is here."""
        self._wires.discard(weakref.ref(wire))

    def __iter__(self) -> Iterator[Wire]:
        return iter([wire for one in list(self._wires) if (wire := one())])


class Dialling:
    """The threads of one client that connect to one server: at most ``most``, since a DNS look-up may hang."""

    def __init__(self, name: str, most: int) -> None:
        """``name`` is that of the threads."""
        self._name = name
        self._most = most
        self.forget()

    def forget(self) -> None:
        """Forget the threads, which do not exist in a forked child."""
        self.permits: system.SimpleQueue[None] = system.SimpleQueue()  #: an item for each further thread allowed now
        for _ in range(self._most):
            self.permits.put(None)

    def outcome(self, dial: Callable[[], Wire], within: float, now: Callable[[], float]) -> Wire | BaseException:
        """Run ``dial()`` on a separate thread. Returns its connection, or the exception that it raised.

        After ``within`` seconds, returns a TimeoutError. If ``dial()`` connects after this time, or the caller was
        interrupted, the connection is closed.
        """
        deadline = now() + within
        result: system.SimpleQueue[Wire | BaseException] = system.SimpleQueue()
        done = system.Event()  # set when the caller no longer waits for the result
        permits, permit = self.permits, list[None]()

        def give_back() -> None:
            with suppress(IndexError):
                permits.put(permit.pop())

        def run() -> None:
            try:
                result.put(dial())
            except BaseException as error:
                result.put(error)
            finally:
                give_back()
            if done.is_set():
                _close_late(result)

        worker = None
        try:
            system.take(permits.get, within, permit)
            # The thread gives the permit back, even if this call is interrupted after the thread was started.
            worker = start_worker(run, self._name, once=True, or_here=True)
            return result.get(timeout=max(0.0, deadline - now()))
        except system.Empty:
            return TimeoutError(f"not connected within {within:g} s")
        finally:
            if worker is None:  # no thread was started, or it gives back what this finds given back already
                give_back()
            done.set()
            _close_late(result)


def unforked(make: Callable[[], Wire], deadline: float, now: Callable[[], float]) -> Wire:
    """Return a new connection of ``make()`` during which this process did not fork.

    After a fork, a child may have inherited the connection without knowing. Such a connection is closed, and another
    one is made. Raises TimeoutError if there is still none at the deadline.
    """
    while True:
        forks = _forks
        wire = make()
        if _forks == forks and forks % 2 == 0:
            return wire
        wire.close()
        if now() >= deadline:
            raise TimeoutError("this process forks faster than a connection is made")


_forks = 0  # odd while this process forks


def _count_forks() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_forks, after_in_parent=_count_forks, after_in_child=_count_forks)


def _close_late(result: system.SimpleQueue[Wire | BaseException]) -> None:
    """Close a connection that was made too late. The caller and the thread that connects both call this, and the later
    call finds the connection."""
    with suppress(system.Empty):
        late = result.get_nowait()
        if not isinstance(late, BaseException):
            late.close()
