"""The history of a run, from which the run can be judged again: one JSON object a line.

Each line has ``cycle``, a number, and ``what``, its kind. All lines of a cycle are together: first its plan (``cycle``,
or ``load`` for a measurement), then the lines of its processes (with their ``pid``) and the faults, then ``end``. Times
are in seconds on the clock of `multilock.now()`, which is the same for all processes.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from multilock import ConfigurationError
from multilock.testing.beliefs import Record

__all__ = ["HISTORY", "Event", "check_writable", "event_of", "open_history", "read_cycles", "record_of", "write_cycle"]

HISTORY = "history.jsonl"

Event = dict[str, Any]

FIELDS = {
    "got": ("at", "name", "id", "token", "held"),
    "held": ("at", "id"),
    "over": ("at", "id", "by"),
    "listens": ("at", "id"),
    "lost": ("at", "id", "reason", "due"),
    "release": ("at", "id"),
    "released": ("at", "id", "ours"),
    "wrote": ("at", "id", "token", "value", "taken"),
    "stall": ("at", "until"),
    "opened": ("at", "id"),
    "asking": ("at", "id", "name"),
    "ttl": ("id", "seconds"),
    "valid": ("id", "until"),
    "refused": ("at", "id", "why"),
    "raised": ("at", "id", "why"),
    "blocked": ("at", "until"),
    "ended": ("at", "id", "ours"),
    "closed": ("at", "id"),
    "grant": ("at", "id", "asked", "until", "held", "token"),
    "served": ("at", "id", "asked", "until", "held", "token"),
    "unserved": ("at", "id", "asked"),
    "spent": ("at", "id", "acquire", "release", "ping"),
    "holds": ("at", "id", "locks", "threads", "bytes"),
    "kept": ("at", "id", "locks", "seconds", "cpu"),
    "done": ("at", "id"),
    "wrong": ("id", "why"),
}
"""The names of the words in a line of a worker, by its first word."""

TIMES = ("at", "by", "due", "until", "seconds", "asked", "acquire", "release", "ping", "bytes", "cpu")
COUNTS = ("held", "ours", "value", "taken", "locks", "threads")
LAST = ("why",)  # a JSON string, which may have spaces


def event_of(pid: int, line: str) -> Event | None:
    """Return the event that a line of a worker describes. Returns None if the line does not belong to the history."""
    what, _, rest = line.partition(" ")
    fields = FIELDS.get(what)
    if fields is None:
        return None
    words = rest.split(" ", len(fields) - 1)
    try:
        values = {name: _value(name, word) for name, word in zip(fields, words, strict=True)}
    except ValueError:  # a line that a lock library printed
        return None
    return {"what": what, "pid": pid, **values}


def _value(name: str, word: str) -> object:
    if name in TIMES:
        return None if word == "-" else float(word)
    if name in COUNTS:
        return int(word)
    if name == "token":
        return None if word == "-" else int(word)
    return json.loads(word) if name in LAST else word


def record_of(events: Iterable[Event]) -> Record:
    """Return the `Record` of these events, for the oracles."""
    record = Record()
    for event in events:
        if event["what"] in FIELDS and "why" not in event:
            words = (_word(event[name]) for name in FIELDS[event["what"]])
            record.feed(event["pid"], " ".join((event["what"], *words)))
    return record


def _word(value: object) -> str:
    return "-" if value is None else str(value)


def write_cycle(file: IO[bytes], events: Iterable[Event]) -> None:
    """Write all lines of one cycle, or none of them if the disk is full. ``file`` must be unbuffered."""
    begun = file.tell()
    left = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events).encode()
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.truncate(begun)
            file.seek(begun)
        raise


def read_cycles(path: Path) -> Iterator[list[Event]]:
    """Yield the cycles of a history in turn. The file may be compressed (``history.jsonl.gz``)."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for _, events in itertools.groupby(map(json.loads, file), key=lambda event: event["cycle"]):
            yield list(events)


# ---- the folder of a run, which is checked before any cycle runs and before an old history is overwritten

DISK = 65_536  # bytes to write as a trial


def check_writable(out: Path | None) -> None:
    """Raise ConfigurationError if the folder cannot be made or the disk is full. The files in the folder are not
    touched."""
    if out is None:
        return
    trial = out / f"{HISTORY}.trial"
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            trial.write_bytes(b"\n" * DISK)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from error


def open_history(out: Path | None, *, resume: bool) -> IO[bytes]:
    """Open the history. Unless ``resume`` is True this deletes the old history, so call it after all other checks."""
    path = Path(os.devnull) if out is None else out / HISTORY
    try:
        if out is not None and not resume:
            path.write_bytes(b"\n" * DISK)
        return path.open("ab" if resume else "wb", buffering=0)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(out: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{out} cannot be written: {error.strerror}")
