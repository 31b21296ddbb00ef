"""The contestants: each URL and the controls beside it. Each server is asked once before anything runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import multilock
from multilock import ConfigurationError, MultilockError
from multilock.config import resolve
from multilock.testing.compare.contestants import ASYNCIO, BLOCKING, load
from multilock.testing.compare.controls import CONTROLS
from multilock.testing.compare.scenarios import SCENARIOS, Need, Scenario
from multilock.testing.compare.servers import Given, ServerProcess
from multilock.testing.compare.versions import versions_of
from multilock.testing.network import has_network, why_no_network
from multilock.urls import redact

__all__ = ["Column", "columns_for", "is_ours"]

CONTROLS_MODULE = "multilock.testing.compare.controls"
LIBRARIES = {"naive": "redis", "redis-py": "redis", "kazoo": "kazoo"}
PROBE_WITHIN = 10.0
BOUND_MAX = 300.0  # seconds: each cycle may wait so long


@dataclass
class Column:
    """A contestant at a URL. ``adapters`` are those of its faces, which take turns."""

    name: str
    url: str
    adapters: list[str]
    ttl: float  #: seconds, as granted
    bound: float = 0.0  #: seconds until another can have the lock of a holder that vanished
    must_fail: frozenset[str] = frozenset()  #: the scenarios in which a control must fail
    control: bool = False
    gone: str = ""  #: why it does not take part (any longer)
    facts: dict[str, Any] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    server: ServerProcess | None = None  #: None if the user did not name it

    def faces(self, scenario: Scenario) -> list[str]:
        """Return the adapters that can go through this scenario. It is not applicable here if there are none."""
        return [path for path in self.adapters if scenario.needs <= self._has(path)]

    def _has(self, path: str) -> set[Need]:
        adapter = load(path)
        has: set[Need] = set()
        if not self.url.startswith("memory:"):  # which belongs to one process
            has.add("processes")
        if not why_no_network(self.url):
            has.add("network")
        if callable(getattr(adapter, "take", None)):
            has.add("operator")
        if getattr(adapter, "loop", False):
            has.add("loop")
        sessions = getattr(adapter, "has_sessions", None)
        with suppress(Exception):  # the adapter may be anybody's
            if callable(sessions) and sessions(self.url):
                has.add("session")
        if self.server is not None:
            has.add("server")
            if self.server.restarts:
                has.add("restart")
        return has

    def sweep(self, begin: str) -> list[str] | None:
        """Remove all names that begin like this, and return those that are left; None if the adapter cannot do it."""
        sweep = getattr(load(self.adapters[0]), "sweep", None)
        return None if sweep is None else sorted(map(str, sweep(self.url, begin)))

    @property
    def data(self) -> dict[str, Any]:
        """The column for the report, without secrets."""
        return {
            "name": self.name, "url": redact(self.url), "adapters": self.adapters, "control": self.control,
            "must_fail": sorted(self.must_fail), "ttl": self.ttl, "bound": self.bound, "gone": self.gone or None,
            "leftovers": self.leftovers,
            "server": None if self.server is None else str(self.server),
            "not_applicable": sorted(each.name for each in SCENARIOS.values() if not self.faces(each)),
            **self.facts,
        }  # fmt: skip


def columns_for(
    urls: Sequence[str], adapters: Iterable[str], ttl: float, *, controls: bool = True, servers: Given | None = None
) -> list[Column]:
    """Return the columns: our lock at each URL with its controls, and each adapter ``package.module:Name=URL``.

    Raises ConfigurationError for anything misspelled. If a server does not answer, its column says so.
    """
    columns: list[Column] = []
    for url in urls:
        scheme = resolve(url).scheme
        ours = Column(_free_name(scheme, columns), url, [BLOCKING, ASYNCIO], ttl)
        _probe(ours)
        columns.append(ours)
        if controls and scheme != "memory":
            columns += _controls(ours, scheme, columns)
    for given in adapters:
        path, equals, url = given.partition("=")
        if not equals:
            raise ConfigurationError(f"write --adapter package.module:Name=URL, not {redact(given)!r}")
        column = Column(_free_name(path.rpartition(":")[2], columns), url, [path], ttl)
        column.must_fail = frozenset(getattr(load(path), "control", ()))
        try:
            column.bound = _bound(path, url, ttl)
        except Exception as error:  # the adapter may be anybody's
            column.gone = f"bound(): {type(error).__name__}: {error}"
        columns.append(column)
        scheme = _scheme(url)
        if controls and scheme not in ("", "memory") and not any(each.control and each.url == url for each in columns):
            columns += _controls(column, scheme, columns)
    if not columns:
        raise ConfigurationError("there is nothing to compare: give a URL, such as redis://localhost:6379")
    _assign(servers or {}, columns)
    return columns


def _assign(servers: Given, columns: list[Column]) -> None:
    """Assign each given server to all columns of its URL."""
    remote = dict.fromkeys(column.url for column in columns if has_network(column.url))
    for which, server in servers.items():
        url = next((column.url for column in columns if which in (column.name, column.url)), which)
        if not which:
            if len(remote) != 1:
                raise ConfigurationError(
                    f"which URL does the {server} serve? Write URL={server.container or server.pid}"
                )
            url = next(iter(remote))
        if url not in remote:
            raise ConfigurationError(f"{redact(which)!r} is not one of the compared servers")
        for column in columns:
            if column.url == url:
                column.server = server


def is_ours(url: str) -> bool:
    """Return whether multilock has a backend for this URL. If not, we cannot ask its server anything."""
    return bool(_scheme(url))


def _scheme(url: str) -> str:
    """Return the scheme of a URL of ours, or an empty text for another URL, for which we have no control."""
    try:
        multilock.connect(url).close()  # without a request
        return resolve(url).scheme
    except ConfigurationError:
        return ""


def _free_name(name: str, columns: Iterable[Column]) -> str:
    taken = {column.name for column in columns}
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(each for each in names if each not in taken)


def _controls(ours: Column, scheme: str, columns: list[Column]) -> list[Column]:
    found: list[Column] = []
    for name, adapter in CONTROLS.get(scheme, {}).items():
        if importlib.util.find_spec(LIBRARIES[name]) is not None:
            found.append(_control(ours, name, adapter.__name__, [*columns, *found]))
    if not any(column.must_fail for column in found):
        found.append(_control(ours, f"{scheme}-flag", "Flag", [*columns, *found]))
    return found


def _control(ours: Column, name: str, adapter: str, columns: list[Column]) -> Column:
    path = f"{CONTROLS_MODULE}:{adapter}"
    column = Column(_free_name(name, columns), ours.url, [path], ours.ttl, control=True, gone=ours.gone)
    column.bound = _bound(path, ours.url, ours.ttl)
    runs = {each.name for each in SCENARIOS.values() if column.faces(each)}
    column.must_fail = frozenset(getattr(load(path), "control", ())) & runs
    return column


def _bound(path: str, url: str, ttl: float) -> float:
    bound = getattr(load(path), "bound", None)
    seconds = float(bound(url, ttl)) if callable(bound) else 2 * ttl + 2.0
    if not 0 < seconds <= BOUND_MAX:
        raise ValueError(f"{seconds} seconds: give more than 0 and at most {BOUND_MAX:.0f}")
    return seconds


def _probe(column: Column) -> None:
    """Take one lock and ping once, as a user would, and store what the server reports.

    The server may be slow, so requests here have more time than those of a lock with a short ttl.
    """
    try:
        with multilock.connect(column.url, request_timeout=PROBE_WITHIN) as client:
            client.ping()
            findings = client.diagnose()
            versions = versions_of(client, PROBE_WITHIN)
        with multilock.connect(column.url, ttl=column.ttl, outage_timeout=PROBE_WITHIN) as client:
            with client.lock("compare-probe").acquire(PROBE_WITHIN) as lease:
                column.ttl = lease.ttl
            its = client.capabilities
        column.facts = {
            "versions": versions,
            "capabilities": {name: getattr(its, name) for name in type(its).__dataclass_fields__},
            "findings": [
                {"level": each.level, "code": each.code, "message": each.message, "remedy": each.remedy}
                for each in findings
            ],
        }
        column.bound = _bound(BLOCKING, column.url, column.ttl)
    except ConfigurationError:
        raise
    except MultilockError as error:
        column.gone = f"{type(error).__name__}: {error}"
