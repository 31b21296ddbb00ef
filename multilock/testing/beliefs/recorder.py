"""Writes down, in one process, what its clients hold: lines of `multilock.testing.beliefs.witness` in a file.

It hears of each grant and release from the thread to which it happens, and asks in between. It asks without a trace:
``is_held()`` of a lease that is over would have its loss told.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from multilock.kernel.holding import HELD, RELEASING, Holding
from multilock.kernel.runtime import now
from multilock.kernel.tell import Tell

if TYPE_CHECKING:
    from multilock import AsyncClient, Client
    from multilock.model import Loss

__all__ = ["Overhears", "Recorder", "is_alive", "recorder_of"]

ASK_EVERY = 0.005  # seconds between two questions whether a lease is still held
NOTE_EVERY = 0.02  # … and between two lines that say so
STALLED = 0.025
END_WITHIN = 1.0
LOCKED = 1 << 40  # this byte of the file, far behind its end, is locked as long as the process lives


_recorders: dict[tuple[int, str], Recorder] = {}
_making = threading.Lock()


def recorder_of(folder: str, also: Callable[[], None] | None = None) -> Recorder:
    """The one of this process, which a fork may just have made: it has one file in each folder."""
    if (found := _recorders.get((os.getpid(), folder))) is not None:
        return found
    with _making:
        key = os.getpid(), folder
        return _recorders.get(key) or _recorders.setdefault(key, Recorder(folder, also))


class Recorder:
    """``also`` is called now and then, on the thread that asks."""

    def __init__(self, folder: str, also: Callable[[], None] | None = None) -> None:
        self.pid = os.getpid()
        self._folder = folder
        self._also = also
        self._lock = threading.RLock()  # a finalizer may release a lease while its thread is inside
        self._active: dict[str, tuple[Holding, float, float]] = {}  # by id; last yes, and when one was noted
        self._got: set[str] = set()  # ids that may be released still
        self._end = threading.Event()
        # Under its name only once it is locked: it must not be taken for that of a dead process.
        unlocked = Path(folder, f".{self.pid}")
        self._file = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, LOCKED)
        unlocked.rename(Path(folder, str(self.pid)))
        self._thread = threading.Thread(target=self._keep_looking, name="multilock-believers", daemon=True)
        self._thread.start()

    def acquired(self, lease: Holding) -> None:
        """Called by the thread that was granted it, before anybody else has it."""
        claim, kernel = lease._claim, lease._kernel
        at, yes = now(), _believes(lease)
        place = f"{kernel.scheme}:{getattr(kernel.settings, 'prefix', '')}{claim.name}"
        token = "-" if lease.token is None else lease.token
        with self._lock:
            self._note("got", at, quote(place, safe=":/"), claim.id, token, int(yes), claim.mode)
            self._got.add(claim.id)
            if yes:
                self._active[claim.id] = lease, at, at
        lease._at_end(partial(self.lost, lease))  # before anybody who waits for the loss goes on

    def released(self, lease: Holding, at: float) -> None:
        """… by the thread that gave it back, after ``release()`` was called at this time."""
        with self._lock:
            self._active.pop(lease._claim.id, None)
            if lease._claim.id in self._got:  # it may have been seen to be over before: this is when it was
                self._got.remove(lease._claim.id)
                self._note("release", at, lease._claim.id)
                self._note("released", now(), lease._claim.id, 1)

    def lost(self, lease: Holding) -> None:
        """… by the thread that noticed the loss."""
        with self._lock:
            self._ask(lease._claim.id)

    def look(self, last: float) -> float:
        """Ask about everything that is held; ``last`` is when that was done before. Returns when it was done."""
        with self._lock:
            if self._end.is_set():
                return last
            at = now()
            if at - last > STALLED:
                self._note("stall", last, at)
            for id in list(self._active):
                self._ask(id)
        if self._also is not None:
            self._also()
        return now()

    def close(self) -> None:
        """Write nothing more. Twice is harmless."""
        _recorders.pop((self.pid, self._folder), None)
        with self._lock:
            if not self._end.is_set():
                self._end.set()
                os.close(self._file)
        self._thread.join(END_WITHIN)

    def _keep_looking(self) -> None:
        last = now()
        while not self._end.wait(ASK_EVERY):
            last = self.look(last)

    def _ask(self, id: str) -> None:
        """With the lock."""
        lease, last, noted = self._active.get(id, (None, 0.0, 0.0))
        if lease is None:
            return
        asked = now()
        if _believes(lease):
            if asked - noted >= NOTE_EVERY:
                self._note("held", asked, id)
                noted = asked
            self._active[id] = lease, asked, noted
        elif lease._state == RELEASING:  # `released` or `lost` will come, and knows more
            return
        else:
            self._note("held", last, id)
            self._note("over", asked, id, now())
            self._active.pop(id, None)

    def _note(self, *words: object) -> None:
        if not self._end.is_set():
            os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


class Overhears(Tell):
    """What a client tells its subscribers is heard here by the thread to which it happens."""

    def __init__(self, client: Client | AsyncClient, recorder: Callable[[], Recorder | None]) -> None:
        super().__init__(client._kernel.events, client._kernel.now)
        self.recorder = recorder  # of this process: a client may be carried into a forked child

    def acquired(self, lease: Holding, started: float) -> None:
        if recorder := self.recorder():
            recorder.acquired(lease)
        super().acquired(lease, started)

    def released(self, lease: Holding, released_at: float) -> None:
        if recorder := self.recorder():
            recorder.released(lease, released_at)
        super().released(lease, released_at)

    def lost(self, lease: Holding, loss: Loss) -> None:
        if recorder := self.recorder():
            recorder.lost(lease)
        super().lost(lease, loss)


def is_alive(file: Path) -> bool:
    """Whether the process that writes this file is: it has a part of it locked until it dies, however it does."""
    with file.open("rb+") as opened:
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, LOCKED)
        except OSError:
            return True
    return False


def _believes(lease: Holding) -> bool:
    """What ``is_held()`` says."""
    return lease._state == HELD and lease._kernel.now() < lease._lost_at
