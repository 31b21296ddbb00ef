"""Connect to a server within a time limit, although a DNS look-up and a handshake of several round trips have none.

This module is for backends that make their connections in blocking code. `Dialling` connects on a separate thread.
`unforked` makes a connection that no child process inherits unnoticed. `OpenWires` are the connections that a child
must drop.

A login is one attempt to connect, up to the moment at which the connection can send requests.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from multilock import system
from multilock.kernel.worker import start_worker

__all__ = ["Dialling", "OpenWires", "unforked"]


KEPT = 5.0  # seconds for which a connection that was made too late is kept for the next request
# Seconds. If a login takes longer than this, the server may never answer. So the next request does not wait for it, but
# begins another login.
PROMISING = 1.0


class Closable(Protocol):
    """A connection."""

    def stale(self) -> bool:
        """Return whether no further request may be sent, for example because the server has closed the connection."""

    def close(self) -> None:
        """Close the connection."""


Wire = TypeVar("Wire", bound=Closable)


class OpenWires(Generic[Wire]):
    """The open connections. This set holds weak references: if the owner of a connection was interrupted before it
    stored the connection, the connection is closed at once, as garbage."""

    def __init__(self) -> None:
        self._wires: set[weakref.ref[Wire]] = set()  # used without a lock, since its methods are atomic

    def add(self, wire: Wire) -> None:
        """Hold this connection until it is closed or garbage."""
        self._wires.add(weakref.ref(wire, self._wires.discard))

    def discard(self, wire: Wire) -> None:
        """Forget this connection, if it has not been forgotten already."""
        self._wires.discard(weakref.ref(wire))

    def __iter__(self) -> Iterator[Wire]:
        return iter([wire for one in list(self._wires) if (wire := one())])


class Dialling(Generic[Wire]):
    """The logins of one client to one server: at most ``most`` threads connect at once, since a DNS look-up may hang.

    A login that takes longer than its request is not wasted. Its thread finishes the login, and the next request
    uses the connection. Otherwise many clients that connect to a busy server at once would give up, and try again,
    forever.
    """

    def __init__(self, name: str, most: int) -> None:
        """``name`` is the name of the threads, and ``most`` the greatest number of them."""
        self._name = name
        self._most = most
        self.forget()

    def forget(self) -> None:
        """Forget the threads and their connections, which do not exist in a forked child."""
        #: One item for each thread that may still be started.
        self.permits: system.SimpleQueue[None] = system.SimpleQueue()
        for _ in range(self._most):
            self.permits.put(None)
        self._late: deque[_Login[Wire]] = deque()  # used without a lock, since its methods are atomic
        self._closed = False

    def close(self) -> None:
        """Close the connections for which no request waits, also those that are made later. `outcome` still works."""
        self._closed = True
        for login in self._late.copy():
            login.settled.set()

    def outcome(self, dial: Callable[[], Wire], within: float, now: Callable[[], float]) -> Wire | BaseException:
        """Return a connection: one that came too late for an earlier call, or a new one of ``dial()``, which runs on a
        separate thread. Returns the exception that ``dial()`` raised, or a TimeoutError after ``within`` seconds.

        If ``dial()`` connects after this time, the connection is kept for a few seconds (`KEPT`), and then closed. If
        the client was closed or the caller was interrupted, the connection is closed at once.
        """
        deadline = now() + within
        for login in self._late_logins(now):
            made = self._await(login, deadline, now)
            if made is None:
                return _timeout(within)
            if isinstance(made, BaseException):
                continue  # that login failed, but the server may be back by now
            if not made.stale():
                return made
            made.close()
        return self._begin(dial, within, deadline, now)

    def _late_logins(self, now: Callable[[], float]) -> Iterator[_Login[Wire]]:
        """Remove and yield the logins that no request waits for.

        A login that began long ago is not taken: the server may never answer, so the request begins another login.
        """
        for _ in range(len(self._late)):
            try:
                login = self._late.popleft()
            except IndexError:  # another thread has taken it
                return
            if login.settled.is_set():
                continue
            if login.result.empty() and now() >= login.begun + PROMISING:
                self._keep(login)
            else:
                yield login

    def _keep(self, login: _Login[Wire]) -> None:
        """Keep a late login for the next request."""
        self._late.append(login)
        if self._closed:
            login.discard()

    def _begin(
        self, dial: Callable[[], Wire], within: float, deadline: float, now: Callable[[], float]
    ) -> Wire | BaseException:
        login = _Login[Wire](now())
        permits, permit = self.permits, list[None]()

        def give_back() -> None:
            with suppress(IndexError):
                permits.put(permit.pop())

        def run() -> None:
            keep_for = 0.0
            try:
                login.end(dial())
                keep_for = KEPT
            except BaseException as error:
                login.end(error)
            finally:
                give_back()
            login.keep(keep_for)

        worker = None
        try:
            system.take(permits.get, deadline - now(), permit)
            # The thread gives the permit back, even if this call is interrupted after the thread was started.
            worker = start_worker(run, self._name, once=True, or_here=True)
            made = self._await(login, deadline, now)
            return _timeout(within) if made is None else made
        except system.Empty:
            return _timeout(within)
        except BaseException:
            login.discard()
            raise
        finally:
            if worker is None:  # does nothing if a thread was started all the same and has given the permit back
                give_back()

    def _await(self, login: _Login[Wire], deadline: float, now: Callable[[], float]) -> Wire | BaseException | None:
        """Return the result of a login. Returns None if there is none at the deadline: then the login is late."""
        kept = False
        try:
            # `result.get(timeout=…)` may never return: if another thread takes the result first, and this thread sees
            # that only after the deadline, CPython waits without a limit.
            login.ended.wait(max(0.0, deadline - now()))
            with suppress(system.Empty):
                return login.result.get_nowait()
            login.late.set()
            with suppress(system.Empty):  # the login may have ended just before `late` was set
                return login.result.get_nowait()
            self._keep(login)
            kept = True
            return None
        finally:
            if not kept:
                login.discard()


class _Login(Generic[Wire]):
    """A login under way, and its result, which one request takes."""

    __slots__ = ("begun", "ended", "late", "result", "settled")

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.result: system.SimpleQueue[Wire | BaseException] = system.SimpleQueue()
        self.ended = system.Event()  # set once the result is there
        self.late = system.Event()  # set if its request did not wait for the result
        self.settled = system.Event()  # set if the result was taken, or is not wanted

    def end(self, result: Wire | BaseException) -> None:
        """Store the result of the login."""
        self.result.put(result)
        self.ended.set()

    def keep(self, seconds: float) -> None:
        """Keep a late result until a request takes it, for at most ``seconds``. The thread of the login calls this
        last."""
        if self.late.is_set():
            self.settled.wait(seconds)
            self.discard()

    def discard(self) -> None:
        """Close the connection, unless a request has taken it. If it is not made yet, the thread closes it."""
        self.late.set()
        self.settled.set()
        with suppress(system.Empty):
            late = self.result.get_nowait()
            if not isinstance(late, BaseException):
                late.close()


def _timeout(within: float) -> TimeoutError:
    return TimeoutError(f"not connected within {within:g} s")


def unforked(make: Callable[[], Wire], deadline: float, now: Callable[[], float]) -> Wire:
    """Return a new connection of ``make()`` during which this process did not fork.

    After a fork, a child may have inherited the connection unnoticed. Such a connection is closed, and another one is
    made. Raises TimeoutError if there is still none at the deadline.
    """
    while True:
        forks = _forks
        wire = make()
        if _forks == forks and forks % 2 == 0:
            return wire
        wire.close()
        if now() >= deadline:
            raise TimeoutError("this process forks faster than a connection is made")


_forks = 0  # counted up before and after each fork, so it is odd while this process forks


def _count_forks() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_forks, after_in_parent=_count_forks, after_in_child=_count_forks)
