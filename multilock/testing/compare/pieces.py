"""A long run in pieces: what was done before is read from its folder, and what is done now is written behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import multilock
from multilock import ConfigurationError, now
from multilock.testing.compare.history import Event, read_cycles
from multilock.testing.compare.loads import rows_of
from multilock.testing.compare.report import HISTORY, pieces_of, read_report
from multilock.testing.compare.verdicts import Verdict, judge_cycle

__all__ = ["Before", "done_before"]

SAME = ("cycles", "control_cycles", "ttl", "planned")


@dataclass(slots=True)
class Before:
    """The earlier pieces of a run. Empty: this is the first one."""

    data: dict[str, Any] = field(default_factory=dict)
    headers: dict[int, Event] = field(default_factory=dict)  #: by number, also those of measurements
    verdicts: list[tuple[Event, Verdict]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pieces(self) -> list[dict[str, Any]]:
        return pieces_of(self.data) if self.data else []

    def left_behind(self, contestant: str) -> set[str]:
        columns = self.data.get("columns", [])
        return {name for column in columns if column["name"] == contestant for name in column["leftovers"]}

    def check(self, plans: Iterable[tuple[int, str, str, str]], wanted: dict[str, Any]) -> None:
        """Whether it is a part of the same run: number, contestant, adapter, and what happens, of each that is planned
        now. Raises ConfigurationError."""
        for key in SAME if self.data else ():
            if self.data.get(key) != wanted[key]:
                raise _another(f"{key} was {self.data.get(key)}, and is {wanted[key]}")
        planned = {number: rest for number, *rest in plans}
        for number, header in self.headers.items():
            its = [header["contestant"], header["adapter"], header.get("scenario", header.get("kind"))]
            if planned.get(number) != its:
                raise _another(f"its cycle {number} was {', '.join(its)}, and is {planned.get(number)}")


def done_before(folder: Path) -> Before:
    """Raises ConfigurationError where there is nothing that could be gone on with."""
    before = Before(read_report(folder).data)
    if before.data["multilock"] != multilock.__version__:
        raise _another(f"multilock was {before.data['multilock']}, and is {multilock.__version__}")
    try:
        for events in read_cycles(folder / HISTORY):
            header, end = events[0], events[-1]
            if end["what"] != "end":
                raise ConfigurationError(f"{folder / HISTORY} ends within cycle {header['cycle']}")
            if end["at"] > now():
                raise _another("this machine has been started since, and its clock with it")
            before.headers[header["cycle"]] = header
            if header["what"] == "load":
                before.rows += rows_of([events])
            else:
                before.verdicts.append((header, judge_cycle(events)))
    except OSError as error:
        raise ConfigurationError(f"cannot read {folder / HISTORY}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"{folder / HISTORY} is no history: {type(error).__name__}: {error}") from error
    return before


def _another(why: str) -> ConfigurationError:
    return ConfigurationError(f"this is not the run that was begun there: {why}")
