"""The columns of the report: the contestants at each URL, and the controls of the URL.

This module queries each server once before the first cycle. After the run it looks for keys that were left at the
servers.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions, version
from typing import Any

import multilock
from multilock import ConfigurationError, MultilockError, now
from multilock.backend import Backend
from multilock.config import resolve
from multilock.registry import OURS
from multilock.testing.compare.contestants import ASYNCIO, BLOCKING, load
from multilock.testing.compare.controls import CONTROLS
from multilock.testing.compare.scenarios import PROOF, SCENARIOS, Need, Scenario
from multilock.testing.compare.servers import Given, ServerProcess
from multilock.testing.network import has_network, why_no_network
from multilock.urls import redact

__all__ = ["Column", "columns_for"]

CONTROLS_MODULE = "multilock.testing.compare.controls"
LIBRARIES = {"naive": "redis", "redis-py": "redis", "kazoo": "kazoo", "advisory": "psycopg_pool"}
PROBE_WITHIN = 10.0
ALIVE_WITHIN = 5.0
LOOK_AROUND = 5.0  # seconds within which a released lock must be gone from the server
LOOK_EVERY = 0.1
CONNECTIONS = 10  # connections to PostgreSQL in a cycle: three for each of three clients, one for the operator
BOUND_MAX = 300.0  # seconds; the greatest `bound`, because each cycle may wait for that long


@dataclass
class Column:
    """A contestant at a URL. ``adapters`` has the adapters of the contestant, which its cycles use in turn. Only
    multilock has two: for its blocking and its asyncio API."""

    name: str
    url: str
    adapters: list[str]
    ttl: float  #: seconds, as granted
    bound: float = 0.0  #: seconds until another client can get the lock of a holder that vanished
    #: how many cycles can run at once with the connections of the server; None means no limit
    at_once: int | None = None
    must_fail: frozenset[str] = frozenset()  #: the scenarios in which a control must fail
    control: bool = False
    gone: str = ""  #: the reason why the contestant does not take part, or no longer does
    facts: dict[str, Any] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    server: ServerProcess | None = None  #: the server that may be stopped, or None

    def faces(self, scenario: Scenario) -> list[str]:
        """Return the adapters that can take part in this scenario. If no adapter can, the scenario is not
        applicable."""
        return [path for path in self.adapters if scenario.needs <= self._has(path)]

    def _has(self, path: str) -> set[Need]:
        adapter = load(path)
        has: set[Need] = set()
        if not self.url.startswith("memory:"):  # several processes can share every backend except memory
            has.add("processes")
        if not why_no_network(self.url):
            has.add("network")
        if callable(getattr(adapter, "take", None)):
            has.add("operator")
        if getattr(adapter, "loop", False):
            has.add("loop")
        sessions = getattr(adapter, "has_sessions", None)
        with suppress(Exception):  # an adapter may be written by anybody and may raise anything
            if callable(sessions) and sessions(self.url):
                has.add("session")
        if self.server is not None:
            has.add("server")
            if self.server.restarts:
                has.add("restart")
        return has

    def check_alive(self) -> None:
        """Set ``gone`` if the server does not answer. Without a backend of multilock for the URL this does nothing."""
        if _is_ours(self.url):
            try:
                with multilock.connect(self.url, request_timeout=ALIVE_WITHIN) as client:
                    client.ping()
            except MultilockError as error:
                self.gone = f"{type(error).__name__}: {error}"

    def find_leftovers(self, begin: str, *, patient: bool) -> None:
        """Set ``leftovers`` to the names with this beginning at the server. If the adapter has the method ``sweep``,
        these are only the names that ``sweep`` could not remove.

        If ``patient`` is True, wait until the leases of the remaining locks should have expired.
        """
        if self.gone or self.url.startswith("memory:"):
            return
        try:
            if (sweep := getattr(load(self.adapters[0]), "sweep", None)) is not None:
                self.leftovers = sorted(map(str, sweep(self.url, begin)))
            elif _is_ours(self.url):
                self.leftovers = _left_at(self.url, begin, LOOK_AROUND + (self.bound if patient else 0.0))
        except Exception as error:  # an adapter may be written by anybody and may raise anything
            self.gone = f"{type(error).__name__}: {error}"

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

    Raises ConfigurationError for anything misspelled. If a server does not reply, its column shows the error.
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
        except Exception as error:  # an adapter may be written by anybody and may raise anything
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


def _left_at(url: str, begin: str, within: float) -> list[str]:
    """Return the names with this beginning that are still at the server after ``within`` seconds."""
    until = now() + within
    with multilock.connect(url) as client:
        while (left := sorted({info.name for info in client.inspect_all(begin)})) and now() < until:
            time.sleep(LOOK_EVERY)
    return left


def _is_ours(url: str) -> bool:
    """Return whether multilock has a backend for this URL. Without a backend we cannot ask the server anything."""
    return bool(_scheme(url))


def _scheme(url: str) -> str:
    """Return the scheme of a URL, or an empty text if multilock has no backend for it."""
    try:
        multilock.connect(url).close()  # making a client sends no request
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
    if not any(PROOF in column.must_fail for column in found):
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

    The server may be slow, so these requests have more time than the requests of a lock with a short ttl.
    """
    try:
        with multilock.connect(column.url, request_timeout=PROBE_WITHIN) as client:
            client.ping()
            findings = client.diagnose()
            versions = _versions_of(client, PROBE_WITHIN)
            column.at_once = _at_once(client, PROBE_WITHIN)
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


FREE = b"""SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
 - sum(numbackends)::int FROM pg_stat_database"""


def _at_once(client: multilock.Client, within: float) -> int | None:
    """Return how many cycles may run at once without taking the last connections of the server."""
    backend: Any = client._kernel.backend
    if not backend.scheme.startswith("postgres"):
        return None
    [[free]], _ = backend._transactions.run(FREE, [], within, limited=False)
    return max(1, int(free) // CONNECTIONS)


# ---- the versions of servers and client libraries, for information only


def _versions_of(client: multilock.Client, within: float) -> dict[str, str]:
    """Return the versions that are known, for the report."""
    backend = client._kernel.backend
    found = {"server": server} if (server := _server(backend, within)) else {}
    return found | _library(backend.scheme)


@cache  # looking through all installed packages takes half a second
def _library(scheme: str) -> dict[str, str]:
    library = OURS[scheme].library if scheme in OURS else None
    if library is not None:
        names = packages_distributions().get(library, ())
        return {"client library": ", ".join(f"{name} {version(name)}" for name in sorted(set(names)))}
    return {"client library": f"sqlite {sqlite3.sqlite_version}"} if scheme == "sqlite" else {}


def _server(backend: Backend, within: float) -> str:
    """Return the versions of the servers of a URL. Returns an empty text if this user may not see them."""
    try:
        return ", ".join(dict.fromkeys(_told(backend, within)))
    except Exception:  # a backend of a third party, or a user without the permission: the version is only information
        return ""


def _told(backend: Backend, within: float) -> list[str]:
    its: Any = backend
    match backend.scheme:
        case "redis" | "rediss" | "valkey" | "valkeys" | "unix":
            from multilock_redis.wire import pack

            [(info, _)] = its._node.connections.exchange([pack("INFO", "server")], within)
            found = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            kind = "valkey" if "valkey_version" in found else "redis"
            return [f"{kind} {found[f'{kind}_version']}"]
        case "etcd" | "etcds":
            from multilock_etcd.transport import calls
            from multilock_etcd.wire import StatusRequest

            said = [each for _, each in its._requests.each(calls.STATUS, StatusRequest(), within)]
            return [f"etcd {each.version}" for each in said if not isinstance(each, Exception)]
        case "consul" | "consuls":
            return [f"consul {its._agents.api(within).agent.self()['Config']['Version']}"]
        case "postgresql" | "postgres":
            [[said]], _ = its._transactions.run(b"SHOW server_version", [], within, limited=False)
            return [f"postgresql {said.decode().split()[0]}"]
        case "zookeeper" | "zk":
            [number] = re.findall(r"version: ([\d.]+)", its._transport.command(b"srvr", within))
            return [f"zookeeper {number}"]
    return []
