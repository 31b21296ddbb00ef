"""Replacements of threads, locks, queues, clocks and selectors, which use the virtual time of the present simulation.

`install` puts them into `multilock.system` before the rest of the library is imported. So the library runs unchanged.
"""

from __future__ import annotations

import math
import os
import select
import selectors
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from queue import Empty
from typing import Any, Self

from tests.simulation.scheduler import TIMEOUT, Over, Task, simulation

__all__ = ["EPOCH", "File", "Selector", "Waiter", "install", "now", "waiter"]

EPOCH = 1_700_000_000  # seconds of the wall clock at time 0 of a simulation

Waiter = tuple[Task, int]


def waiter() -> Waiter:
    """Return the running task, with the number of the wait that it is about to begin."""
    task = simulation().running()
    return task, task.turn + 1


def now() -> float:
    sim = simulation()
    return sim.current.process.now() if sim.current else sim.time


def wall() -> int:
    sim = simulation()
    offset = sim.current.process.offset % 0.01 if sim.current else 0.0
    return int((EPOCH + sim.time + offset) * 1e6)


def get_ident() -> int:
    task = simulation().current
    return task.ident if task else 0


class Waiters:
    """The tasks that wait for the same event, in order of arrival."""

    def __init__(self) -> None:
        self._entries: deque[Waiter] = deque()

    def wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> bool:
        """Suspend the running task until ``ready()`` is true, for at most ``timeout`` seconds, or without a limit if it
        is None. Returns whether ``ready()`` is true."""
        sim = simulation()
        end = math.inf if timeout is None else sim.time + timeout
        while not ready():
            entry = waiter()
            self._entries.append(entry)
            if sim.block(end - sim.time, what) is TIMEOUT:
                with suppress(ValueError):  # wake() has already removed the entry
                    self._entries.remove(entry)
                return ready()
        return True

    def wake(self) -> None:
        """Wake the first task."""
        if self._entries:
            simulation().wake(*self._entries.popleft())

    def wake_all(self) -> None:
        while self._entries:
            self.wake()


class Lock:
    def __init__(self) -> None:
        self._locked = False
        self._waiters = Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        simulation().may_switch()
        if self._locked:
            limit = (None if timeout < 0 else timeout) if blocking else 0
            if limit == 0 or not self._waiters.wait(lambda: not self._locked, limit, "lock"):
                return False
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        self._waiters.wake()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_owned():
            if not super().acquire(blocking, timeout):
                return False
            self._owner = simulation().current
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            super().release()

    def _is_owned(self) -> bool:
        return self._count > 0 and self._owner is simulation().current


class Event:
    def __init__(self) -> None:
        self._set, self._sets = False, 0
        self._waiters = Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set, self._sets = True, self._sets + 1
        self._waiters.wake_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        sets = self._sets  # a call of set() ends all waits, even if clear() is called right after it
        return self._waiters.wait(lambda: self._set or self._sets > sets, timeout, "event")


class Condition(RLock):
    def __init__(self, lock: object = None) -> None:
        """``lock`` is ignored, because the only caller that passes a lock waits only before a fork."""
        super().__init__()
        self._bell = Event()  # replaced by a new event after each notification

    def wait(self, timeout: float | None = None) -> bool:
        bell = self._bell
        self.release()
        try:
            return bell.wait(timeout)
        finally:
            self.acquire()

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        end = math.inf if timeout is None else simulation().time + timeout
        while not ready():
            if simulation().time >= end:
                return False
            self.wait(end - simulation().time)
        return True

    def notify_all(self) -> None:
        bell, self._bell = self._bell, Event()
        bell.set()

    notify = notify_all


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters = Waiters()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiters.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and not (block and self._waiters.wait(lambda: bool(self._items), timeout, "queue")):
            raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class Thread:
    """A thread. The simulated system never refuses to start one."""

    def __init__(self, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._target = target
        self.name = name

    def start(self) -> None:
        sim = simulation()
        # A killed process starts nothing, and raises no error: the library would record a missing thread, which other
        # processes would report.
        if sim.current and sim.current.process.alive:
            sim.spawn(sim.current.process, self._target, self.name)


class Local:
    """Replaces `threading.local`: ``__dict__`` returns the attributes of the running thread."""

    def __init__(self) -> None:
        object.__setattr__(self, "_of", {})

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        of: dict[int, dict[str, Any]] = object.__getattribute__(self, "_of")
        return of.setdefault(get_ident(), {})


class File:
    """An open file that a selector or an event loop can watch. Its descriptor is the lowest number that is free, as in
    POSIX."""

    def __init__(self) -> None:
        self.process = simulation().running().process
        files = self.process.files
        self.number = next(number for number in range(3, len(files) + 4) if number not in files)
        files[self.number] = self
        self.selectors: list[Selector | Poll] = []  # the selectors that watch this file
        self._readers = Waiters()

    def fileno(self) -> int:
        return self.number

    def is_readable(self) -> bool:
        raise NotImplementedError

    def wait(self, seconds: float | None, what: str) -> bool:
        """Wait until there is data to read, and return whether there is data."""
        return self._readers.wait(self.is_readable, seconds, what)

    def has_changed(self) -> None:
        """Wake the tasks that wait for data."""
        self._readers.wake_all()
        for selector in self.selectors:
            selector.has_changed()

    def close(self) -> None:
        if self.process.files.get(self.number) is self:
            del self.process.files[self.number]
        self.number = -1
        self.selectors.clear()
        self._readers.wake_all()


class PipeBell(File):
    def __init__(self) -> None:
        super().__init__()
        self._rung = False

    def is_readable(self) -> bool:
        return self._rung

    def ring(self) -> None:
        self._rung = True
        self.has_changed()

    def clear(self) -> None:
        self._rung = False


class Selector(File):
    """A selector for reading. It is a file itself, so that another selector can watch it, as with epoll."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self._files: dict[Any, File] = {}

    def register(self, what: Any, events: int, data: Any = None) -> None:
        number = what if isinstance(what, int) else what.fileno()
        self._files[what] = file = simulation().running().process.files[number]
        self._keys[what] = selectors.SelectorKey(what, number, events, data)
        file.selectors.append(self)

    def unregister(self, what: Any) -> None:
        del self._keys[what]
        if self in (watching := self._files.pop(what).selectors):  # a closed file has no selectors
            watching.remove(self)

    def get_key(self, what: Any) -> selectors.SelectorKey:
        return self._keys[what]

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def is_readable(self) -> bool:
        return any(file.is_readable() and file.number >= 0 for file in self._files.values())

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        if timeout is None or timeout > 0:
            self.wait(timeout, "selector")
        ready = [what for what, file in self._files.items() if file.is_readable() and file.number >= 0]
        return [(self._keys[what], selectors.EVENT_READ) for what in ready]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Poll:
    """The part of select.poll that the library uses. Writing to a file never blocks.

    It waits for simulated files, and for the real FIFOs of SQLite's clients. If the task must end during the wait for a
    FIFO, `poll` closes the FIFO.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[File, int]] = {}
        self._real: int | None = None
        self._waiters = Waiters()
        self.has_changed = self._waiters.wake_all

    def register(self, what: Any, events: int) -> None:
        if isinstance(what, int):
            self._real = what
        else:
            number = what.fileno()
            file = what if isinstance(what, File) else simulation().running().process.files[number]
            self._files[number] = file, events

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        if self._real is not None:
            return self._wait_for_real(self._real)
        ready = self._ready()
        if not ready and milliseconds != 0:
            files = [file for file, _ in self._files.values()]
            for file in files:
                file.selectors.append(self)
            self._waiters.wait(lambda: bool(self._ready()), milliseconds and milliseconds / 1000, "poll")
            for file in files:
                if self in file.selectors:  # a closed file has no selectors
                    file.selectors.remove(self)
            ready = self._ready()
        return ready

    def _ready(self) -> list[tuple[int, int]]:
        ready = []
        for number, (file, events) in self._files.items():
            if events & select.POLLOUT or file.is_readable():
                ready.append((number, events))
        return ready

    def _wait_for_real(self, descriptor: int) -> list[tuple[int, int]]:
        sim = simulation()
        try:
            if not select.select([descriptor], [], [], 0)[0]:
                sim.real[descriptor] = waiter()
                sim.block(what="FIFO")
        except Over:
            sim.real.pop(descriptor, None)
            os.close(descriptor)
            raise
        return [(descriptor, select.POLLIN)]


class InOrder(MutableSet[Any]):
    """A set that yields its items in the order in which they were added.

    The built-in set yields objects in the order of their addresses, which differ from run to run.
    """

    _kind: Callable[[], MutableMapping[Any, None]] = dict

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = self._kind()
        self.update(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: Any) -> None:
        self._items[value] = None

    def discard(self, value: Any) -> None:
        self._items.pop(value, None)

    def copy(self) -> Self:
        return type(self)(self)

    def update(self, items: Iterable[Any]) -> None:
        for item in items:
            self.add(item)

    def intersection_update(self, items: Iterable[Any]) -> None:
        self.__iand__(InOrder(items))


class WeakInOrder(InOrder):
    """The same as `InOrder`, but with weak references to the items."""

    _kind = weakref.WeakKeyDictionary


def sleep(seconds: float) -> None:
    simulation().block(seconds, "sleep")


STAND_INS: dict[str, Any] = {
    "Condition": Condition,
    "DefaultSelector": Selector,
    "Event": Event,
    "Lock": Lock,
    "PipeBell": PipeBell,
    "RLock": RLock,
    "SimpleQueue": SimpleQueue,
    "Thread": Thread,
    "choice": lambda options: simulation().random.choice(options),
    "current_thread": lambda: simulation().running(),
    "get_ident": get_ident,
    "host": lambda: "host",
    "local": Local,
    "now": now,
    "patched_by": lambda: None,
    "pid": lambda: simulation().current.process.pid if simulation().current else 1,
    "poll": Poll,
    "sleep": sleep,
    "uniform": lambda low, high: simulation().random.uniform(low, high),
    "urandom": lambda size: simulation().ids.randbytes(size),
    "wall": wall,
}


def install() -> None:
    """Make the library use these replacements. Call this function before the first import of multilock in this
    interpreter.

    If the hashes of text are random, start this program again with fixed hashes, because the library iterates over sets
    of text.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    if any(name.split(".")[0].startswith("multilock") for name in sys.modules):
        raise RuntimeError("multilock was imported before the simulation")
    spec = PathFinder.find_spec("multilock.system", [str(Path(folder, "multilock")) for folder in sys.path])
    assert spec is not None
    assert spec.loader is not None
    system = module_from_spec(spec)
    spec.loader.exec_module(system)
    if missing := STAND_INS.keys() - vars(system).keys():
        raise RuntimeError(f"multilock.system has no {', '.join(missing)}")
    vars(system).update(STAND_INS)
    vars(weakref)["WeakSet"] = WeakInOrder
    sys.modules["multilock.system"] = system
