"""Locks on ZooKeeper 3.5 and later, in the queues of kazoo's locks or of Curator's.

See docs/backends/zookeeper.md. `acquire_release` is the algorithm, `renewal` renews held locks, `keys` lays out the
nodes of a name, and `queue` decides which of them hold the name. `claims` records the state of each claim of this
client, and `session_validity` computes for how long a session certainly lives. `transport` sends the requests through
kazoo, `sockets` has kazoo's sockets and threads, `wire` has the bytes that open a session, and `notices` receives what
the server pushes. `inspection` shows operators who holds a lock, and `diagnosis` reports what weakens the lock on this
ensemble.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

# This import comes first, because it fails if kazoo is missing, and the registry explains that error to the user.
from multilock_zookeeper.transport import KAZOO_TLS, Ensemble, Transport

# isort: split
from multilock import ConfigurationError
from multilock.backend import (
    Busy,
    Capabilities,
    Claim,
    Finding,
    Granted,
    Held,
    LockInfo,
    LossReason,
    Notices,
    Returned,
)
from multilock.options import (
    LOGIN,
    TLS_FILES,
    TLS_OPTIONS,
    belong_together,
    host_list,
    prefix_of,
    reject_unknown,
    texts,
    ttl_of,
    user_info,
    verifies,
    yes_or_no,
)
from multilock_zookeeper.acquire_release import Recipe
from multilock_zookeeper.claims import ZkWaiters
from multilock_zookeeper.diagnosis import diagnose
from multilock_zookeeper.inspection import Inspection
from multilock_zookeeper.keys import STYLES, Nodes
from multilock_zookeeper.notices import ENDED, Watcher
from multilock_zookeeper.renewal import ZkRenewal

__all__ = ["ZooKeeperBackend", "open_backend"]

PORT = 2181
TTL_MIN = 4.0  # seconds; by default a server grants at least two ticks of 2 s
TTL_FLOOR = 0.1  # seconds; a server may be configured to grant less than TTL_MIN
TTL_MAX = 2_147_483.0  # seconds, about 25 days: the protocol has 31 bits for milliseconds
TICK = 2.0  # seconds; a server ends a session up to one tick late

# Clients of the parent, in a forked child. They are kept here, because garbage collection would close them.
_inherited: list[object] = []


def open_backend(url: str, options: Mapping[str, object]) -> ZooKeeperBackend:
    """Return the backend for ``zookeeper://h1:2181,h2:2181,h3:2181/chroot``, or the same with ``zk://``.

    The options are ``username`` and ``password`` (digest); ``tls``, ``ca``, ``cert``, ``key`` (paths of PEM files) and
    ``tls_verify``; ``node_style`` (``kazoo`` or ``curator``); and ``client``, a KazooClient. This backend uses the
    session of that client, and never closes the client. Raises `ConfigurationError` if the options contradict each
    other.
    """
    reject_unknown(options, (*TLS_OPTIONS, "tls", *LOGIN, "node_style", "client"), "zookeeper")
    style = options.get("node_style", "kazoo")
    if style not in STYLES:
        raise ConfigurationError(f"node_style must be kazoo or curator, not {style!r:.60}")
    ttl = max(ttl_of(options), TTL_FLOOR)
    if ttl > TTL_MAX:
        raise ConfigurationError(f"ttl is {ttl:g} s: a session of ZooKeeper takes {TTL_MAX:.0f} s at most")
    return ZooKeeperBackend(
        _ensemble(url, options, ttl),
        Nodes(_prefix(prefix_of(options)), style),
        ttl=ttl,
    )


class ZooKeeperBackend:
    """The `multilock.backend.Backend` for one ZooKeeper ensemble."""

    scheme = "zookeeper"
    spi_version = 1

    def __init__(self, ensemble: Ensemble, nodes: Nodes, *, ttl: float) -> None:
        self._ensemble = ensemble
        self._nodes = nodes
        self._opened: Transport | None = None
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope="the life of the ensemble's data",
            fair=True,
            push_wait=True,
            push_loss=True,
            cross_host=True,
            survives_failover=True,
            ttl_min=TTL_MIN,
            ttl_max=ttl,
            ttl_step=0.001,
            takeover_bound=max(ttl, TTL_MIN) + TICK,
            ttl_floor=TTL_FLOOR,
            read_write=True,
            semaphore=True,
        )

    def __repr__(self) -> str:
        return f"<ZooKeeperBackend {self._ensemble.name}>"

    def open(self, notices: Notices) -> None:
        if self._opened:
            _inherited.append(self._opened.forget())
        self._notices = notices
        self._watcher = Watcher(notices)
        self._opened = Transport(self._ensemble, notices.now, self._watcher)
        self._watcher.attach(self._opened)
        waiters = ZkWaiters(notices.now)
        self._renewal = ZkRenewal(self._nodes, self._opened, self._watcher, notices, waiters)
        self._recipe = Recipe(self._nodes, self._opened, self._watcher, waiters, self._renewal, notices.now)
        self._inspection = Inspection(self._nodes, self._opened, notices.now)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._recipe.attempt(claim, join, within)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        return Returned(self._recipe.release(claim, granted, unsure, within))

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        return self._renewal.renew(group, held, within)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        present: dict[str, str] = {}
        for claim, granted in held:
            if self._transport.is_present(granted.group):
                present[str(granted.key)] = claim.id
            else:  # the session of the claim ended before the watch was set
                self._notices.gone(claim.id, LossReason.SESSION_LOST, ENDED)
        self._watcher.hold(present, self._notices.now() + within)

    def follow(self, names: frozenset[str], within: float) -> bool:
        deadline = self._notices.now() + within
        if names:
            self._transport.session(deadline)
        self._watcher.follow({self._nodes.parent(name): name for name in names}, deadline)
        return True

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._inspection.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._inspection.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self._inspection.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        return diagnose(self._transport, within)

    def ping(self, within: float) -> None:
        deadline = self._notices.now() + within
        self._transport.session(deadline)
        self._transport.wait(self._transport.exists("/"), deadline)

    def close(self) -> None:
        self._watcher.close()
        self._transport.close()

    @property
    def _transport(self) -> Transport:
        assert self._opened is not None
        return self._opened


def _prefix(prefix: str) -> str:
    parts = prefix.lstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts[:-1]):
        raise ConfigurationError(
            f"prefix {prefix!r} cannot be part of a node's path: one of its parts is empty, '.' or '..'"
        )
    return "/".join(parts)


def _ensemble(url: str, options: Mapping[str, object], ttl: float) -> Ensemble:
    rest = url.partition("://")[2]
    login, _, place = rest.rpartition("@")
    hosts, slash, chroot = place.partition("/")
    chroot = (slash + unquote(chroot)).rstrip("/")
    given = user_info(login) | texts(options, (*TLS_FILES, *LOGIN))
    if "client" in options:
        if hosts or chroot or given or "tls" in options or "tls_verify" in options:
            raise ConfigurationError(
                "with client= the URL is zookeeper:// alone: the client already has its servers and its credentials"
            )
        return _handed_over(options["client"])
    belong_together(given, "username", "password")
    belong_together(given, "cert", "key")
    if not hosts:
        raise ConfigurationError("a ZooKeeper URL names its servers: zookeeper://h1:2181,h2:2181,h3:2181")
    if any(part in ("", ".", "..") for part in chroot.split("/")[1:]):
        raise ConfigurationError(f"{chroot!r} cannot be a node's path: one of its parts is empty, '.' or '..'")
    auth = [("digest", f"{given['username']}:{given['password']}")] if "username" in given else []
    servers = ",".join(host_list(hosts, PORT, "server of a ZooKeeper URL"))
    return Ensemble(servers, chroot, ttl, auth, _tls(given, options))


def _tls(given: Mapping[str, str], options: Mapping[str, object]) -> Mapping[str, Any]:
    files = {name: given[name] for name in TLS_FILES if name in given}
    if not yes_or_no("tls", options.get("tls", bool(files))):
        if of_tls := [name for name in TLS_OPTIONS if name in options]:
            raise ConfigurationError(f"{of_tls[0]}= is for TLS: give tls=true with it, or leave it out")
        return {}
    verify = verifies(options)
    for name, path in files.items():
        if not os.access(path, os.R_OK):
            raise ConfigurationError(f"{name}= must be a PEM file that can be read: {path}")
    cert, key = files.get("cert"), files.get("key")
    return {
        "use_ssl": True,
        "ca": files.get("ca"),
        "certfile": cert,
        "keyfile": key,
        "verify_certs": verify,
        "check_hostname": verify,
    }


def _handed_over(client: Any) -> Ensemble:
    """Return the ensemble of a kazoo client that was passed as ``client=``. A forked child makes another client with
    the same settings."""
    if not all(hasattr(client, name) for name in ("add_listener", "start_async", "client_state", "chroot")):
        raise ConfigurationError(f"client= takes a kazoo.client.KazooClient, not {type(client).__name__}")
    return Ensemble(
        ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in client.hosts),
        client.chroot,
        client._session_timeout / 1000,
        list(client.auth_data),
        {name: getattr(client, name) for name in KAZOO_TLS},
        client,
    )
