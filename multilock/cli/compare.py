"""``multilock compare``: cause faults on the user's own servers, and report what each lock did.

A cycle is one trial of a lock under one fault. The card is a picture of the results.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from multilock import ConfigurationError, now
from multilock.cli.exits import say
from multilock.testing import compare as comparison
from multilock.testing.compare import SCENARIOS, Options, Progress, Report, summary
from multilock.testing.compare.history import HISTORY
from multilock.testing.compare.loads import LOADS
from multilock.testing.compare.report import gather, history_of, pieces_of, write_whole

__all__ = ["Wanted", "compare", "show", "verify"]

STYLES = {"kept": "green", "broken": "bold red", "undecided": "yellow", "": "dim"}
WIDTH = 100
SPINNER = 4  # columns of the spinner before a line of progress, together with the margin behind the line
PLAIN_EVERY = 10.0  # seconds between two lines of progress if stdout is not a terminal
CYCLES = 20
# For --quick: the cycles of each fault, the seconds for all cycles together, and the cycles that run at once for each
# core. A core can run several, because most of a cycle is waiting.
QUICK_CYCLES, QUICK_WITHIN, QUICK_AT_ONCE = 2, 60.0, 6
LOCKS, MANY_LOCKS = 1_000, 10_000
INTERRUPTED = 130
PAGE = "report.html"
DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of the command line."""

    urls: Sequence[str]
    adapters: Sequence[str]
    server_pids: Sequence[str]
    server_containers: Sequence[str]
    scenarios: str | None
    cycles: int | None
    control_cycles: int | None
    minutes: float | None
    ttl: float
    seed: int | None
    quick: bool
    scale: bool
    out: str | None
    resume: bool
    card: str | None
    against: str | None
    as_json: bool


def compare(wanted: Wanted) -> int:
    """Run the comparison, show it, and write it to ``out``. Returns the report's exit code, or 130 if interrupted."""
    sys.path.insert(0, os.getcwd())  # adapters are imported from the working directory, as with `python -m`
    # kazoo logs each server that the comparison stops. These lines must not appear on stderr.
    logging.getLogger("kazoo").addHandler(logging.NullHandler())
    older = comparison.read_report(Path(wanted.against)) if wanted.against else None
    draw = _drawing(wanted.card, must=bool(wanted.card))
    console = Console(stderr=wanted.as_json)
    usual = QUICK_CYCLES if wanted.quick else CYCLES
    with ExitStack() as stack:
        folder = Path(wanted.out) if wanted.out else None
        if folder is None and wanted.card:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        options = Options(
            adapters=wanted.adapters,
            locks=MANY_LOCKS if wanted.scale else LOCKS,
            server_pids=wanted.server_pids,
            server_containers=wanted.server_containers,
            scenarios=_scenarios(wanted),
            cycles=usual if wanted.cycles is None else wanted.cycles,
            control_cycles=wanted.control_cycles,
            ttl=wanted.ttl,
            seed=wanted.seed,
            within=_within(wanted),
            at_once=QUICK_AT_ONCE * (os.cpu_count() or 1) if wanted.quick else None,
            all_of_controls=not wanted.quick,
            out=folder,
            resume=wanted.resume,
        )
        report = comparison.run(wanted.urls, options, progress=_progress(console, stack, _Progress()))
        if folder is not None:
            write_whole(folder / "report.md", summary.markdown(report))
            draw(folder, report)
    if wanted.as_json:
        print(json.dumps(report.data, indent=1, ensure_ascii=False))
    else:
        _show(console, report)
    if older is not None:
        console.print(Text(f"\nagainst {wanted.against}", style="bold"), soft_wrap=True)
        for line in list(summary.verdicts(older, report)) or ["every verdict is as before"]:
            console.print(Text(line), soft_wrap=True)
        for line in summary.figures(older, report):
            console.print(Text(line, style="dim"), soft_wrap=True)
    if report.data["partial"] == comparison.INTERRUPTED:
        return report.exit_code if report.violations else INTERRUPTED
    return report.exit_code


def _within(wanted: Wanted) -> float | None:
    if wanted.minutes is not None:
        return wanted.minutes * 60
    return QUICK_WITHIN if wanted.quick else None


def _scenarios(wanted: Wanted) -> list[str] | None:
    if wanted.scenarios:
        return wanted.scenarios.split(",")
    return [name for name in (*SCENARIOS, *LOADS) if name != "scale"] if wanted.quick and not wanted.scale else None


def verify(folder: str) -> int:
    """Judge a report again from its history. Returns 0 if the verdicts are the same, else 1."""
    differences = comparison.verify(Path(folder))
    for line in differences:
        say(line)
    if not differences:
        pieces = len(pieces_of(comparison.read_report(Path(folder)).data))
        made = f", made in {pieces} pieces" if pieces > 1 else ""
        print(f"{folder}: every verdict follows from the history{made}")
    return DIFFERENT if differences else 0


def show(folder: str, card: str | None) -> int:
    """Write the page of a report again, and its card if ``card`` names a file."""
    draw = _drawing(card, must=True)
    draw(Path(folder), comparison.read_report(Path(folder)))
    print(Path(folder) / PAGE)
    return 0


def _drawing(card: str | None, *, must: bool) -> Callable[[Path, Report], None]:
    """Return the function that draws the page of a folder, and the card.

    If that is impossible (jinja2 is missing, the card cannot be written), it raises ConfigurationError, before anything
    runs. If only jinja2 is missing and ``must`` is False, the returned function says so instead of drawing.
    """
    try:
        from multilock.testing.compare import page
    except ConfigurationError as missing:
        if must:
            raise
        why = str(missing)
        return lambda folder, report: say(f"{PAGE} was not written: {why}")
    if card:
        try:
            Path(card).open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigurationError(f"{card} cannot be written: {error.strerror}") from error

    def draw(folder: Path, report: Report) -> None:
        try:
            found = gather(history_of(folder))
        except OSError as error:
            raise ConfigurationError(f"cannot read {folder / HISTORY}: {error.strerror or error}") from error
        write_whole(folder / PAGE, page.page(report, found))
        if card:
            write_whole(Path(card), page.card(report, found))

    return draw


@dataclass(slots=True)
class _Progress:
    """The text of the progress line during a run."""

    before: int | None = None  # cycles that were done before this run began (--resume)

    def line(self, at: Progress, width: int) -> str:
        """Return the progress of the run, the time that is left, and the faults that run now, cut to ``width``
        characters."""
        words, runs = self._words(at), self._runs(at)
        return f"{words}  {runs[: max(0, width - len(words) - 2)]}".rstrip()

    def _words(self, at: Progress) -> str:
        if self.before is None:
            self.before = at.done
        said = f"{at.done} of {at.planned} cycles, {at.elapsed:.0f} s"
        if at.done == self.before or at.measuring:
            return said
        left = at.elapsed / (at.done - self.before) * max(0, at.planned - at.done)
        if at.within is not None:
            left = min(left, max(0.0, at.within - at.elapsed))
        return f"{said}, about {left:.0f} s left"

    def _runs(self, at: Progress) -> str:
        return f"measures {at.measuring}" if at.measuring else ", ".join(dict.fromkeys(at.running))


def _progress(console: Console, stack: ExitStack, told: _Progress) -> Callable[[Progress], None]:
    if console.is_terminal:
        status = stack.enter_context(Status("asking the servers", console=console))
        return lambda at: status.update(Text(told.line(at, min(console.width, WIDTH) - SPINNER)))
    said = now()

    def plain(at: Progress) -> None:
        nonlocal said
        line = told.line(at, WIDTH)
        if now() - said >= PLAIN_EVERY:
            said = now()
            console.print(Text(line), soft_wrap=True)

    return plain


def _show(console: Console, report: Report) -> None:
    names, rows = summary.grid(report)
    worst = report.exit_code in (1, 3)
    console.print(Text(summary.headline(report), style="bold red" if worst else "bold"), soft_wrap=True)
    first = max((len(scenario) for scenario, _ in rows), default=0)
    for some in _that_fit(names, rows, min(console.width, WIDTH) - first - 2):
        table = Table("fault", box=None, padding=(0, 2, 0, 0))
        for number in some:
            table.add_column(names[number], no_wrap=True)
        for scenario, marks in rows:
            if any(marks[number][1] for number in some):
                table.add_row(scenario, *(Text(marks[number][0], style=STYLES[marks[number][1]]) for number in some))
        if rows:
            console.print(table)
    if rows:
        console.print(Text(summary.LEGEND, style="dim"), soft_wrap=True)
    for text, kind in summary.notes(report):
        console.print(Text(text, style=STYLES[kind]), soft_wrap=True)
    for each in summary.tables(report):
        console.print(Text(f"\n{each.title}", style="bold"), soft_wrap=True)
        for line in summary.aligned(each):
            console.print(Text(line), soft_wrap=True)
        if each.note:
            console.print(Text(each.note, style="dim"), soft_wrap=True)
    if broken_off := list(summary.broken_off(report)):
        console.print()
    for line in broken_off:
        console.print(Text(line, style=STYLES["undecided"]), soft_wrap=True)


def _that_fit(names: list[str], rows: list[tuple[str, list[summary.Mark]]], width: int) -> list[list[int]]:
    """Return the columns, by number, divided into tables that fit the width."""
    tables: list[list[int]] = []
    left = 0
    for number, name in enumerate(names):
        needs = 2 + max(len(name), *(len(marks[number][0]) for _, marks in rows), 0)
        if not tables or needs > left:
            tables.append([])
            left = width
        tables[-1].append(number)
        left -= needs
    return tables
