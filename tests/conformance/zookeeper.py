"""ZooKeeper under test. All tests share one server, and each test has its own proxy."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from multilock.backend import Backend, Held, Notices
from multilock.model import Busy, Capabilities, Claim, Finding, Granted, LockInfo, Returned
from multilock.names import escape
from multilock.registry import open_backend
from tests.conformance.proxied import Proxied
from tests.servers_zookeeper import ZooKeeperServer

__all__ = ["ZooKeeper"]


class ZooKeeper(Proxied):
    """Nodes are deleted by another client, as an operator would.

    A client of ZooKeeper has one session, with the client's ttl. The suites use locks of several ttls on one client, so
    the client under test has a backend for each ttl.
    """

    scheme = "zookeeper"
    quick_ttl = 2.4

    def __init__(self) -> None:
        server, self._operator = _server()
        super().__init__(server.url)

    def delete(self, name: str) -> None:
        parent = f"/{self.prefix}{escape(name)}"
        holder = min(self._operator.get_children(parent), key=lambda child: int(child[-10:]))
        self._operator.delete(f"{parent}/{holder}")

    def leftovers(self) -> list[str]:
        """Return every contender. Their parent nodes are containers, which the server removes by itself."""
        found = []
        with contextlib.suppress(NoNodeError):
            for parent in self._operator.get_children(f"/{self.prefix.rstrip('/')}"):
                with contextlib.suppress(NoNodeError):
                    children = self._operator.get_children(f"/{self.prefix}{parent}")
                    found += [f"{parent}/{child}" for child in children]
        return sorted(found)

    def _open(self, url: str, options: dict[str, Any]) -> Backend:
        ttl = options.get("ttl", 10.0)
        return _BackendPerTtl(url, {"ttl": ttl, "prefix": self.prefix, "identity": "conformance"})


class _BackendPerTtl:
    """A backend that gives its client one session for each ttl."""

    scheme = "zookeeper"
    spi_version = 1

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._url = url
        self._options = options
        self._of_client: Any = self._make(options["ttl"])
        self._of_ttl: dict[object, Any] = {options["ttl"]: self._of_client}

    @property
    def capabilities(self) -> Capabilities:
        declared: Capabilities = self._of_client.capabilities
        return replace(declared, ttl_max=60.0)

    def open(self, notices: Notices) -> None:
        self._notices = notices
        for backend in self._of_ttl.values():
            backend.open(notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        answer: Granted | Busy = self._of(claim).attempt(claim, join, within)
        return answer

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        answer: Returned = self._of(claim).release(claim, granted, unsure, within)
        return answer

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        backend = self._of(held[0][0]) if held else self._of_group(group)
        answers: Sequence[Granted | None] = backend.renew(group, held, within)
        return answers

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self._of(held[0][0]).watch(group, held, within)

    def follow(self, names: frozenset[str], within: float) -> bool:
        return bool(self._of_client.follow(names, within))

    def inspect(self, name: str, within: float) -> LockInfo | None:
        info: LockInfo | None = self._of_client.inspect(name, within)
        return info

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        infos: Iterator[LockInfo] = self._of_client.inspect_all(prefix, within)
        return infos

    def force_release(self, name: str, within: float) -> bool:
        return bool(self._of_client.force_release(name, within))

    def diagnose(self, within: float) -> list[Finding]:
        findings: list[Finding] = self._of_client.diagnose(within)
        return findings

    def ping(self, within: float) -> None:
        self._of_client.ping(within)

    def close(self) -> None:
        for backend in self._of_ttl.values():
            backend.close()

    def _make(self, ttl: object) -> Backend:
        return open_backend("zookeeper", self._url, {**self._options, "ttl": ttl})

    def _of(self, claim: Claim) -> Any:
        if claim.ttl not in self._of_ttl:
            backend = self._make(claim.ttl)
            backend.open(self._notices)
            self._of_ttl[claim.ttl] = backend
        return self._of_ttl[claim.ttl]

    def _of_group(self, group: Hashable) -> Any:
        sessions = {backend: backend._transport.present() for backend in self._of_ttl.values()}
        return next(
            (each for each, session in sessions.items() if session and session.number == group), self._of_client
        )


@lru_cache
def _server() -> tuple[ZooKeeperServer, Any]:
    """Return the server that all these tests share, and a client of it for the operator."""
    server = ZooKeeperServer()
    server.start()
    atexit.register(server.stop)
    operator = KazooClient(server.endpoint, timeout=30)
    operator.start()
    atexit.register(operator.stop)
    return server, operator
