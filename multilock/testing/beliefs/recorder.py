"""Record in a file what the clients of one process hold, in lines of `multilock.testing.beliefs.witness`.

The thread that acquires or releases a lease also records the acquire or the release. Another thread checks each lease
until its end. The check must not call ``is_held()``, which would report the loss of an ended lease.
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

from multilock.kernel.emit import Tell
from multilock.kernel.holding import HELD, RELEASING, Holding
from multilock.kernel.runtime import now

if TYPE_CHECKING:
    from multilock import AsyncClient, Client
    from multilock.model import Loss

__all__ = ["Overhears", "Recorder", "is_alive", "recorder_of"]

ASK_EVERY = 0.005  # seconds between two checks whether a lease is still held
NOTE_EVERY = 0.02  # seconds between two lines about a lease that is still held
STALLED = 0.025
END_WITHIN = 1.0
LOCKED = 1 << 40  # offset of a byte far behind the end of the file, which is locked while the process lives


_recorders: dict[tuple[int, str], Recorder] = {}
_making = threading.Lock()


def recorder_of(folder: str, also: Callable[[], None] | None = None) -> Recorder:
    """Return the recorder of this process for this folder. After a fork a new one is made."""
    if (found := _recorders.get((os.getpid(), folder))) is not None:
        return found
    with _making:
        key = os.getpid(), folder
        return _recorders.get(key) or _recorders.setdefault(key, Recorder(folder, also))


class Recorder:
    """The recorder of one process. ``also`` is called at each check."""

    def __init__(self, folder: str, also: Callable[[], None] | None = None) -> None:
        self.pid = os.getpid()
        self._folder = folder
        self._also = also
        self._lock = threading.RLock()  # reentrant: a finalizer may release a lease while its thread has the lock
        # By id: the lease, the time of its last positive check, and the time of its last line.
        self._active: dict[str, tuple[Holding, float, float]] = {}
        self._got: set[str] = set()  # ids of leases that may still be released
        self._end = threading.Event()
        # The file gets its name only once it is locked, because an unlocked file counts as the file of a dead process.
        unlocked = Path(folder, f".{self.pid}")
        self._file = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, LOCKED)
        unlocked.rename(Path(folder, str(self.pid)))
        self._thread = threading.Thread(target=self._keep_looking, name="multilock-believers", daemon=True)
        self._thread.start()

    def acquired(self, lease: Holding) -> None:
        """Record a grant. Called by the thread that acquired the lease, before any other code has it."""
        claim, kernel = lease.claim, lease._kernel
        at, yes = now(), _believes(lease)
        full_name = f"{kernel.scheme}:{getattr(kernel.settings, 'prefix', '')}{claim.name}"
        token = "-" if lease.token is None else lease.token
        with self._lock:
            self._note("got", at, quote(full_name, safe=":/"), claim.id, token, int(yes), claim.mode)
            self._got.add(claim.id)
            if yes:
                self._active[claim.id] = lease, at, at
        lease._at_end(partial(self.lost, lease))  # runs before threads that wait for the loss continue

    def released(self, lease: Holding, at: float) -> None:
        """Record a release. Called by the thread that released, with the time at which it called ``release()``."""
        with self._lock:
            self._active.pop(lease.claim.id, None)
            if lease.claim.id in self._got:  # a check may have recorded the end already, but ``at`` is more exact
                self._got.remove(lease.claim.id)
                self._note("release", at, lease.claim.id)
                self._note("released", now(), lease.claim.id, 1)

    def lost(self, lease: Holding) -> None:
        """Record a loss. Called by the thread that noticed it."""
        with self._lock:
            self._ask(lease.claim.id)

    def look(self, last: float) -> float:
        """Check everything that is held. ``last`` is the time of the previous check. Returns the time of this check."""
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
        """Write nothing more. May be repeated."""
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
        """Check one lease. The caller holds ``_lock``."""
        lease, last, noted = self._active.get(id, (None, 0.0, 0.0))
        if lease is None:
            return
        asked = now()
        if _believes(lease):
            if asked - noted >= NOTE_EVERY:
                self._note("held", asked, id)
                noted = asked
            self._active[id] = lease, asked, noted
        elif lease.stage == RELEASING:  # `released` or `lost` will record the end more exactly
            return
        else:
            self._note("held", last, id)
            self._note("over", asked, id, now())
            self._active.pop(id, None)

    def _note(self, *words: object) -> None:
        if not self._end.is_set():
            os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


class Overhears(Tell):
    """The events of a client, recorded by the thread in which they happen, then passed on."""

    def __init__(self, client: Client | AsyncClient, recorder: Callable[[], Recorder | None]) -> None:
        super().__init__(client._kernel.events, client._kernel.now)
        self.recorder = recorder  # called for each event, because the client may be used in a forked child

    def acquired(self, lease: Holding, started: float) -> None:
        """Record a grant."""
        if recorder := self.recorder():
            recorder.acquired(lease)
        super().acquired(lease, started)

    def released(self, lease: Holding, released_at: float) -> None:
        """Record a release."""
        if recorder := self.recorder():
            recorder.released(lease, released_at)
        super().released(lease, released_at)

    def lost(self, lease: Holding, loss: Loss) -> None:
        """Record a loss."""
        if recorder := self.recorder():
            recorder.lost(lease)
        super().lost(lease, loss)


def is_alive(file: Path) -> bool:
    """Return whether the process that writes this file is alive: it has a part of the file locked until it dies."""
    with file.open("rb+") as opened:
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, LOCKED)
        except OSError:
            return True
    return False


def _believes(lease: Holding) -> bool:
    """Return what ``is_held()`` would return, without its effects."""
    return lease.stage == HELD and lease._kernel.now() < lease.lost_at
