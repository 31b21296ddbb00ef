"""A long run in pieces: earlier pieces are read from its folder, and the new one is appended."""

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
    """The earlier pieces of a run. It is empty for the first piece."""

    data: dict[str, Any] = field(default_factory=dict)
    headers: dict[int, Event] = field(default_factory=dict)  #: by number, also those of loads
    verdicts: list[tuple[Event, Verdict]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """The pieces so far."""
        return pieces_of(self.data) if self.data else []

    def left_behind(self, contestant: str) -> set[str]:
        """Return what earlier pieces left behind at the server of this contestant."""
        columns = self.data.get("columns", [])
        return {name for column in columns if column["name"] == contestant for name in column["leftovers"]}

    def check(self, plans: Iterable[tuple[int, str, str, str]], wanted: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the earlier pieces belong to the same run.

        Each of ``plans`` is the number, contestant, adapter and scenario of a cycle planned now.
        """
        for key in SAME if self.data else ():
            if self.data.get(key) != wanted[key]:
                raise _another(f"{key} was {self.data.get(key)} then, and is {wanted[key]} now")
        planned = {number: rest for number, *rest in plans}
        for number, header in self.headers.items():
            its = [header["contestant"], header["adapter"], header.get("scenario", header.get("kind"))]
            if planned.get(number) != its:
                raise _another(f"cycle {number} was {', '.join(its)} then, and is {planned.get(number)} now")


def done_before(folder: Path) -> Before:
    """Return the earlier pieces. Raises ConfigurationError if the folder has no run that can be continued."""
    before = Before(read_report(folder).data)
    if before.data["multilock"] != multilock.__version__:
        raise _another(f"multilock was {before.data['multilock']} then, and is {multilock.__version__} now")
    try:
        for events in read_cycles(folder / HISTORY):
            header, end = events[0], events[-1]
            if end["what"] != "end":
                raise ConfigurationError(f"{folder / HISTORY} ends within cycle {header['cycle']}")
            if end["at"] > now():
                raise _another("this machine was restarted since, so its clock is another one")
            before.headers[header["cycle"]] = header
            if header["what"] == "load":
                before.rows += rows_of([events])
            else:
                before.verdicts.append((header, judge_cycle(events)))
    except OSError as error:
        raise ConfigurationError(f"cannot read {folder / HISTORY}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"{folder / HISTORY} is not a history ({type(error).__name__}: {error})") from error
    return before


def _another(why: str) -> ConfigurationError:
    return ConfigurationError(f"the folder has another run, which cannot be continued ({why})")
