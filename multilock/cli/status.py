"""``multilock status``: list the held locks and their holders."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from multilock import BackendUnavailable, Client, LockInfo, system
from multilock.cli.exits import say

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["show", "watch"]

EVERY = 1.0  # seconds between two updates of --watch; each reads all keys with the prefix


def show(client: Client, prefix: str, as_json: bool) -> None:
    """List the locks once: as a table on a terminal, elsewhere as tab-separated lines or JSON."""
    locks = _held(client, prefix)
    if as_json:
        print(_json(locks, indent=2))
    elif _tables():
        from rich.console import Console

        Console().print(_table(locks) if locks else "nothing is held")
    else:
        for info in locks:
            print(_line(info))


def watch(client: Client, prefix: str, as_json: bool) -> None:
    """List the locks until interrupted: as a table that stays in place on a terminal, elsewhere one line per change."""
    looks = _looks(client, prefix)
    if as_json:
        _watch_json(looks)
    elif _tables():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(), auto_refresh=False) as live:
            for locks in looks:
                live.update(_table(locks), refresh=True)
    else:
        _watch_lines(looks)


def _tables() -> bool:
    """Return whether stdout is a terminal and rich is installed."""
    if not sys.stdout.isatty():
        return False
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _watch_json(looks: Iterator[list[LockInfo]]) -> None:
    shown = None
    for locks in looks:
        present = [_without_example(info) for info in locks]
        if present != shown:
            print(_json(locks, indent=None), flush=True)
        shown = present


def _watch_lines(looks: Iterator[list[LockInfo]]) -> None:
    """Print ``+`` for a new holder and ``-`` for a holder that is gone. If the number of holders changed, print
    both."""
    shown: dict[object, LockInfo] = {}
    for locks in looks:
        present = {_holding(info): info for info in locks}
        for sign, infos, others in (("-", shown, present), ("+", present, shown)):
            for holding in infos:
                if holding not in others:
                    print(f"{datetime.now():%H:%M:%S}\t{sign}\t{_line(infos[holding])}", flush=True)
        shown = present


def _holding(info: LockInfo) -> object:
    """Return the fields whose change is reported."""
    return info.name, info.kind, info.holders, info.permits, _without_example(info).owner


def _without_example(info: LockInfo) -> LockInfo:
    """If there are several holders, return ``info`` without the fields that describe only one of them.

    The backend describes an arbitrary holder, and on Redis each renewal may change which holder that is.
    """
    if info.holders is None:
        return info
    return dataclasses.replace(info, owner=None, identity=None, host=None, pid=None, token=None, ttl=None, since=None)


def _looks(client: Client, prefix: str) -> Iterator[list[LockInfo]]:
    """Yield the held locks again and again. If the backend does not reply, say so once and keep trying."""
    silent = False
    while True:
        try:
            yield _held(client, prefix)
            silent = False
        except BackendUnavailable as error:
            if not silent:
                say(f"{error}; still trying")
            silent = True
        system.sleep(EVERY)


def _held(client: Client, prefix: str) -> list[LockInfo]:
    return sorted(client.inspect_all(prefix), key=lambda info: info.name)


def _json(locks: Sequence[LockInfo], indent: int | None) -> str:
    return json.dumps([dataclasses.asdict(info) for info in locks], indent=indent, default=datetime.isoformat)


def _line(info: LockInfo) -> str:
    since = info.since.isoformat(timespec="seconds") if info.since else None
    resting = info.resting_until.isoformat(timespec="seconds") if info.resting_until else None
    left = None if info.remaining is None else round(info.remaining, 1)
    fields = (info.name, _kind(info), info.identity, info.token, info.ttl, since, info.waiting, resting, left)
    return "\t".join(_shown(field) for field in fields)


def _table(locks: Sequence[LockInfo]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, right in (
        ("name", 0),
        ("kind", 0),
        ("holder", 0),
        ("token", 1),
        ("for", 1),
        ("ttl", 1),
        ("left", 1),
        ("waits", 1),
    ):
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for info in locks:
        kind = f"rests {_seconds(info.resting_until - datetime.now(UTC))}" if info.resting_until else _kind(info)
        left = None if info.remaining is None else _seconds(timedelta(seconds=info.remaining))
        fields = (info.name, kind, info.identity, info.token, _age(info), info.ttl, left, info.waiting)
        table.add_row(*(Text(_shown(field)) for field in fields))
    return table


def _kind(info: LockInfo) -> str | None:
    """Return the kind, and how many hold the name if several can: ``read ×12``, ``permit 2 of 3``."""
    if info.holders is None:
        return info.kind
    return f"{info.kind} {info.holders} of {info.permits}" if info.permits else f"{info.kind} ×{info.holders}"


def _age(info: LockInfo) -> str | None:
    if info.since is None:
        return None
    return _seconds(datetime.now(UTC) - info.since)


def _seconds(span: timedelta) -> str:
    seconds = max(0, round(span.total_seconds()))
    if seconds < 100:
        return f"{seconds}s"
    return f"{seconds // 60}m" if seconds < 6000 else f"{seconds // 3600}h"


def _shown(field: object) -> str:
    """Return the text of a field for a terminal: another program may have stored control characters in it."""
    if field is None:
        return "-"
    text = f"{field:g}" if isinstance(field, float) else str(field)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
