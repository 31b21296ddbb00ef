"""Locks on etcd v3: leases, transactions, watches. The queue is etcd's own, so etcd's tools and libraries can join it.

See docs/backends/etcd.md. `acquire_release` is the algorithm, `renewal` renews held locks, `keys` lays out the queue of
a name, `claims` records the state of each claim of this client, and `queue` decides when a waiting claim is admitted.
`sessions` keeps the leases of the claims, and `sweep` reads keys and deletes old tombstones at each renewal.
`transactions` and `transport` carry the requests, `wire` defines their format, and `notices` receives what the server
pushes. `inspection` shows operators who holds a lock, and `diagnosis` reports what weakens the lock on this cluster.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

# This import comes first, because it fails if grpc is missing, and the registry explains that error to the user.
from multilock_etcd.transport import Cluster, EtcdTransport, refuse_eventlet

# isort: split
from multilock import ConfigurationError
from multilock.backend import Busy, Capabilities, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock.options import (
    LOGIN,
    TLS_FILES,
    TLS_OPTIONS,
    belong_together,
    host_list,
    prefix_of,
    reject_unknown,
    texts,
    tls_only,
    ttl_of,
    user_info,
    verifies,
)
from multilock_etcd.acquire_release import EtcdRecipe
from multilock_etcd.diagnosis import diagnose
from multilock_etcd.inspection import EtcdInspection
from multilock_etcd.keys import EtcdKeyspace
from multilock_etcd.notices import EtcdWatcher
from multilock_etcd.renewal import EtcdRenewal
from multilock_etcd.sessions import EtcdSessions
from multilock_etcd.sweep import EtcdSweep
from multilock_etcd.transactions import EtcdTransactions, present_revision

__all__ = ["EtcdBackend", "open_backend"]

PORT = 2379
TTL_MIN = 2.0  # seconds; a server grants at least 1.5 times its election timeout, which is 1 s by default
TTL_MAX = 9_000_000_000.0
EXPIRY = 1.0  # seconds; a server ends a lease up to 0.5 s late, and a majority must then agree to delete its keys

# Clients of the parent, in a forked child. They are kept here, because garbage collection would close them.
_inherited: list[object] = []


def open_backend(url: str, options: Mapping[str, object]) -> EtcdBackend:
    """Return the backend for ``etcd://h1:2379,h2:2379,h3:2379``, or for ``etcds://…`` with TLS.

    The options are ``username``, ``password``, ``ca``, ``cert``, ``key`` (paths of PEM files), and ``client``: an etcd
    client of another library, whose ``channel`` is then used. Raises `ConfigurationError` if the options contradict
    each other.
    """
    refuse_eventlet()
    reject_unknown(options, (*TLS_OPTIONS, *LOGIN, "client"), "etcd")
    return EtcdBackend(
        _cluster(url, options),
        prefix=prefix_of(options),
        ttl=ttl_of(options),
    )


class EtcdBackend:
    """The `multilock.backend.Backend` for one etcd cluster."""

    scheme = "etcd"
    spi_version = 1

    def __init__(self, cluster: Cluster, *, prefix: str, ttl: float) -> None:
        self._cluster = cluster
        self._keys = EtcdKeyspace(prefix)
        self._opened: object = None
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope="the life of the cluster's data",
            fair=True,
            push_wait=True,
            push_loss=True,
            cross_host=True,
            survives_failover=True,
            ttl_min=TTL_MIN,
            ttl_max=TTL_MAX,
            ttl_step=1.0,
            takeover_bound=max(ttl, TTL_MIN) + EXPIRY,
            hold_at_least=True,
            read_write=True,
            semaphore=True,
        )

    def open(self, notices: Notices) -> None:
        _inherited.append(self._opened)
        transport = EtcdTransport(self._cluster, notices.now)
        self._sessions = EtcdSessions(transport, notices)
        transactions = EtcdTransactions(self._keys, transport, notices.now)
        self._watcher = EtcdWatcher(transport, transactions, self._sessions, notices)
        self._requests = transport
        self._opened = (transport, self._watcher)
        sweep = EtcdSweep(self._keys, transactions, notices.now)
        self._recipe = EtcdRecipe(self._keys, transport, transactions, self._sessions, self._watcher, sweep, notices)
        self._renewal = EtcdRenewal(self._keys, self._sessions, self._watcher, sweep, notices)
        self._inspection = EtcdInspection(self._keys, transport, transactions, self._sessions, notices.now)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._recipe.attempt(claim, join, within)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        return Returned(self._recipe.release(claim, granted, unsure, within))

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        return Returned(self._recipe.rest(claim, granted, unsure, seconds, within))

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        return self._renewal.renew(group, held, within)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        for claim, granted in held:
            assert granted.token is not None
            self._watcher.hold(claim.id, self._keys.own(claim), granted.token, group)

    def follow(self, names: frozenset[str], within: float) -> bool:
        queues = {name: self._keys.queue(name) for name in names}
        start = present_revision(self._requests, within) + 1 if names else 0
        self._watcher.follow(queues, start)
        return True

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._inspection.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._inspection.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self._inspection.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        return diagnose(self._requests, self._cluster, within)

    def ping(self, within: float) -> None:
        present_revision(self._requests, within)

    def close(self) -> None:
        try:
            self._watcher.close()
        finally:
            try:
                self._recipe.close()
            finally:
                self._requests.close()


def _cluster(url: str, options: Mapping[str, object]) -> Cluster:
    scheme, _, rest = url.partition("://")
    login, _, hosts = rest.rpartition("@")
    tls = scheme == "etcds"
    given = user_info(login) | texts(options, (*TLS_FILES, *LOGIN))
    if "client" in options:
        return _handed_over(hosts, given, options)
    tls_only(options, scheme, "etcds")
    if not verifies(options):
        raise ConfigurationError("tls_verify=no: gRPC always verifies the server; give the server's certificate as ca=")
    belong_together(given, "cert", "key")
    if "password" in given and "username" not in given:
        raise ConfigurationError("password= needs username=")
    if not hosts.rstrip("/"):
        raise ConfigurationError("an etcd URL names its members: etcd://h1:2379,h2:2379,h3:2379")
    return Cluster(
        host_list(hosts.rstrip("/"), PORT, "host of an etcd URL"),
        tls,
        ca=given.get("ca"),
        cert=given.get("cert"),
        key=given.get("key"),
        username=given.get("username"),
        password=given.get("password"),
    )


def _handed_over(hosts: str, given: Mapping[str, str], options: Mapping[str, object]) -> Cluster:
    client = options["client"]
    if hosts.rstrip("/") or given or "tls_verify" in options:
        raise ConfigurationError(
            "with client= the URL is etcd:// alone: the client already has its hosts and its credentials"
        )
    if not hasattr(getattr(client, "channel", None), "unary_unary"):
        raise ConfigurationError(
            f"client= takes an etcd client with a gRPC .channel, such as etcd3.client(), not {type(client).__name__}"
        )
    return Cluster(["of the client object passed to connect()"], client=client)
