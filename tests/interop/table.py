"""Make the table of docs/interoperability.md, which shows which locks of multilock and of other programs exclude each
other. Each pair is tried on a real server.

python -m tests.interop.table prints it (`make interop` writes it into the page)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import multilock
from multilock import BackendRejected, Client, DistributedLock
from tests.interop.theirs import BACKENDS, Refused, Their

__all__ = ["COLUMNS", "PAGE", "WAITS", "Cell", "printed", "rows_of", "try_pair"]

PAGE = Path(__file__).parents[2] / "docs" / "interoperability.md"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"

COLUMNS: dict[str, Callable[[Client, str], DistributedLock]] = {
    "`lock`": lambda client, name: client.lock(name),
    "`reader()`": lambda client, name: client.read_write_lock(name).reader(),
    "`writer()`": lambda client, name: client.read_write_lock(name).writer(),
    "`semaphore` of 3": lambda client, name: client.semaphore(name, 3),
}
WAITS, ENTERS, REFUSED = "waits", "**enters**", "refused"
# Seconds: a lock that must wait counts as waiting after SOON. A lock that may enter has until LATE, because the machine
# may be overloaded.
SOON, LATE = 0.7, 30.0

Cell = tuple[str, str]
"""What ours does while theirs is held, and theirs while ours is."""


def ours_behind(lock: DistributedLock, their: Their, within: float) -> str:
    if not their.acquire(LATE):
        raise AssertionError("theirs did not get a free lock")
    try:
        lease = lock.try_acquire(timeout=within)
    except BackendRejected:
        their.release()
        return REFUSED
    if lease:
        lease.release()
        their.release()
        return ENTERS
    their.release()
    lock.acquire(timeout=LATE).release()
    return WAITS


def theirs_behind(lock: DistributedLock, their: Their, within: float) -> str:
    lease = lock.acquire(timeout=LATE)
    try:
        entered = their.acquire(within)
    except Refused:
        lease.release()
        return REFUSED
    if entered:
        their.release()
        lease.release()
        return ENTERS
    lease.release()
    if not their.acquire(LATE):
        raise AssertionError("theirs waited on after ours was released")
    their.release()
    return WAITS


def try_pair(
    client: Client, server: Any, make: Callable[[Any, str, ExitStack], Their], column: str, name: str, expected: Cell
) -> Cell:
    """Try the pair twice, each time with a new name: first multilock holds the lock, then the other program does.

    ``expected`` only determines how long to wait, because a lock that may enter gets more time.
    """
    ours = COLUMNS[column]
    patience = [SOON if cell == WAITS else LATE for cell in expected]
    with ExitStack() as stack:
        first = ours_behind(ours(client, f"{name}-1"), make(server, f"{name}-1", stack), patience[0])
        second = theirs_behind(ours(client, f"{name}-2"), make(server, f"{name}-2", stack), patience[1])
    return first, second


def rows_of(text: str) -> dict[tuple[str, str], dict[str, Cell]]:
    """Return the table as it is on the page: (backend, lock of the other program) → column → cell."""
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if "|" in line]
    header, _, *rows = lines
    assert header[2:] == list(COLUMNS), header
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for scheme, theirs, *cells in rows:
        both = [cell.split(" / ") for cell in cells]
        found[scheme.strip("`"), theirs] = {
            column: (one, other) for column, (one, other) in zip(COLUMNS, both, strict=True)
        }
    return found


def in_page() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def printed(rows: Mapping[tuple[str, str], Mapping[str, Cell]]) -> str:
    lines = [f"| backend | theirs | {' | '.join(COLUMNS)} |", "| --- " * (2 + len(COLUMNS)) + "|"]
    for (scheme, theirs), cells in rows.items():
        lines.append(f"| `{scheme}` | {theirs} | {' | '.join(' / '.join(cells[column]) for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def _tried() -> Iterator[tuple[tuple[str, str], dict[str, Cell]]]:
    number = 0
    for scheme, (start, theirs) in BACKENDS.items():
        with start() as server, multilock.connect(url_of(server, scheme), ttl=10) as client:
            for title, make in theirs.items():
                cells = {}
                for column in COLUMNS:
                    number += 1
                    cells[column] = try_pair(client, server, make, column, f"pair{number}", (WAITS, WAITS))
                yield (scheme, title), cells


def url_of(server: Any, scheme: str) -> str:
    url: str = server.url
    return f"{url}?{scheme.partition('?')[2]}" if "?" in scheme else url


def main() -> None:
    table = printed(dict(_tried()))
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"({BEGIN}).*({END})", lambda found: found[1] + table + found[2], text, flags=re.S))
    print(table)


if __name__ == "__main__":
    main()
