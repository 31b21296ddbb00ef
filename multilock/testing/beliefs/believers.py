"""Record which clients believe that they hold a lock, in all threads and processes of one test, and judge the records.

    believers = Believers()                       # in the test; the fixture multilock_believers is one
    believers.watch(client)                       # records everything that this client holds
    Helper("tests.helpers:hold", url, believers.path)

    def hold(url, path):                          # in the other process
        with multilock.connect(url) as client:
            Believers(path).watch(client)
            ...

    verdict = believers.judge()
    assert not verdict.broken and not verdict.undecided

A belief begins with the grant. It ends when ``release()`` is called, when ``is_held()`` becomes False, or when the
process dies. While a process is frozen by `multilock.testing.pause`, it believes nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from multilock.kernel.runtime import now
from multilock.testing.beliefs.judge import Outcome, judge
from multilock.testing.beliefs.oracles import Belief, Record
from multilock.testing.beliefs.recorder import Overhears, Recorder, is_alive, recorder_of
from multilock.testing.pausing import spans

if TYPE_CHECKING:
    from multilock import AsyncClient, Client

__all__ = ["Believers", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a judgement.

    ``broken``: pairs of holders that certainly believed at the same time that they held one name, and tokens that are
    not greater than earlier ones. ``kept``: how many pairs certainly did not believe it at the same time.
    ``undecided``: pairs for which neither is certain. ``beliefs``: how many beliefs were judged.
    """

    broken: tuple[str, ...]
    undecided: tuple[str, ...]
    kept: int
    beliefs: int


class Believers:
    """Records in the folder ``path``, one file for each process, and their judge. Without ``path``, a temporary folder
    is made.

    `close` removes a temporary folder. If an object is passed to another process (``multiprocessing``, pickle), both
    processes use the same folder.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._made_by = os.getpid() if path is None else None
        self.path = tempfile.mkdtemp(prefix="multilock-beliefs-") if path is None else os.fspath(path)
        self._dead: dict[int, float] = {}  # for each pid, when its death was noticed
        self._closed = False
        self._record()

    def __reduce__(self) -> tuple[Any, ...]:
        return Believers, (self.path,)

    def watch(self, client: Client | AsyncClient) -> None:
        """Record everything that this client holds from now on, also in forked children of this process. May be
        repeated."""
        events = client._kernel.events
        if not isinstance(events.tell, Overhears) or events.tell.recorder != self._recorder:
            client.events.subscribe(_ignore)  # the client emits events only if it has a subscriber
            events.tell = Overhears(client, self._recorder)

    def judge(self) -> Verdict:
        """Judge everything that was recorded until now."""
        self._record().look(now())
        record, said = self._read()
        broken = [*record.overlaps(), *record.token_regressions()]
        undecided, kept = list[str](), 0
        for one, other in _pairs(record):
            # The second belief is recorded before any code can act on it, so pauses of its process are not needed here.
            frozen = self._frozen(one.pid, said[one.pid])
            told = judge(one, other, frozen=frozen, killed=self._dead.get(one.pid, math.inf))
            kept += told.outcome is Outcome.KEPT
            if told.outcome is Outcome.UNDECIDED:
                undecided.append(f"{other.name}, of process {one.pid} and then of {other.pid}: {told.why}")
        return Verdict(tuple(map(unquote, broken)), tuple(map(unquote, undecided)), kept, len(record.beliefs))

    def close(self) -> None:
        """Record nothing more in the process that made the folder. May be repeated.

        Other processes stop recording when they end.
        """
        if self._made_by == os.getpid():
            self._record().close()
            shutil.rmtree(self.path, ignore_errors=True)
            self._made_by = None
        self._closed = True

    def _record(self) -> Recorder:
        return recorder_of(self.path, self._look_for_the_dead if self._made_by == os.getpid() else None)

    def _recorder(self) -> Recorder | None:
        """Return the recorder of this process. Returns None after `close`, because a client may still emit events
        then."""
        with contextlib.suppress(OSError):  # in a child that was forked late, the folder is gone already
            return None if self._closed else self._record()
        return None

    def _look_for_the_dead(self) -> None:
        for file in _files(self.path):
            pid = int(file.name)
            if pid != os.getpid() and pid not in self._dead and not is_alive(file):
                self._dead[pid] = now()

    def _read(self) -> tuple[Record, dict[int, float]]:
        """Return the record, and the time at which each process wrote its last line."""
        record, said = Record(), dict[int, float]()
        for file in _files(self.path):
            pid = int(file.name)
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # a process that died while it wrote left an incomplete line
                    record.feed(pid, line.rstrip("\n"))
                    said[pid] = max(said.get(pid, -math.inf), float(line.split(" ")[1]))
        return record, said

    def _frozen(self, pid: int, said: float) -> list[tuple[float, float]]:
        """Return when the process was frozen. A span counts only if the process later wrote a line or has
        not run since."""
        return [(start, until) for start, until in spans(pid) if until == math.inf or until < said]


def _files(path: str) -> list[Path]:
    return [file for file in Path(path).iterdir() if file.name.isdigit()]


def _ignore(event: object) -> None:
    pass


def _pairs(record: Record) -> Iterator[tuple[Belief, Belief]]:
    """Yield each belief with the next belief about the same name whose holder must not hold the name at the same
    time."""
    for _, beliefs in record.by_name():
        for number, one in enumerate(beliefs):
            other = next((other for other in beliefs[number + 1 :] if not one.fits(other)), None)
            if other is not None:
                yield one, other
