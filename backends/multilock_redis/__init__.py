"""Locks on Redis or Valkey: on one primary (``redis://``, ``rediss://`` with TLS, ``unix://``), on the primary that
Sentinels name (``redis+sentinel://``), on a cluster (``redis+cluster://``), or on several primaries (``redlock://``).
Instead of the address, a program can give a client object of redis-py.

`acquire_release` is the algorithm. Its steps are Lua scripts in ``scripts/``, which `transactions` runs, and `keys`
names the keys. `transport` sends requests over `connections`, `wire` encodes them, and `connect_errors` explains failed
connections. `notices` receives what the server pushes, and `event_loop` is a connection for an event loop. `inspection`
shows operators who holds a lock, and `diagnosis` reports what weakens the lock on this server. `node` joins these parts
for one primary. `endpoints` reads the primary's address from the URL, and `sentinel` asks Sentinels for it. `cluster`
has one node for each primary of a cluster, and `cluster_map` finds the node of a name in the table of slots
(`slot_table`). `redlock` uses several independent primaries.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from multilock import BackendUnavailable
from multilock.backend import Busy, Capabilities, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock.options import reject_unknown, ttl_of
from multilock.timing import JITTER, heartbeat, liveness
from multilock_redis.acquire_release import Replicas
from multilock_redis.cluster import ClusterBackend
from multilock_redis.diagnosis import diagnose, diagnose_sentinels
from multilock_redis.endpoints import (
    OPTIONS,
    REPLICAS,
    SENTINEL_LOGIN,
    cluster_of_client,
    cluster_of_url,
    endpoint_of_client,
    endpoint_of_url,
    keyspace,
    replicas_of,
    sentinels_of_client,
    sentinels_of_url,
)
from multilock_redis.event_loop import Channel
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.redlock import RedlockBackend, open_redlock
from multilock_redis.sentinel import SentinelEndpoint
from multilock_redis.transport import Endpoint
from multilock_redis.wire import pack

__all__ = ["ClusterBackend", "RedisBackend", "open_backend"]


def open_backend(url: str, options: Mapping[str, object]) -> RedisBackend | ClusterBackend | RedlockBackend:
    """Return the backend for a URL of one of these schemes:

    * ``redis://[user:password@]host[:port][/db]``, ``rediss://…`` or ``unix:///path``;
    * ``redis+sentinel://[user:password@]s1[:port],s2,s3/name[/db]`` or ``rediss+sentinel://…``;
    * ``redis+cluster://[user:password@]h1[:port],h2`` or ``rediss+cluster://…``;
    * ``redlock://h1,h2,h3`` or ``redlocks://…`` (see `open_redlock`).

    The options ``username``, ``password`` and ``db`` override the URL. ``ca``, ``cert`` and ``key`` are files for TLS.
    ``replicas`` is the number of replicas that must acknowledge a grant before it counts. With ``replicas_on_renew`` as
    many replicas must acknowledge each renewal. ``sentinel_username`` and ``sentinel_password`` are the login at the
    Sentinels.

    Another option is ``client``: a ``redis.Redis``, for a cluster a ``redis.RedisCluster``, with Sentinels the result
    of ``redis.sentinel.Sentinel(…).master_for(…)``. This backend opens its own connections with the client's settings,
    and never closes the client. Raises `ConfigurationError` if the options contradict each other. Sends no request.
    """
    scheme = url.partition("://")[0]
    if scheme in ("redlock", "redlocks"):
        return open_redlock(url, scheme, options)
    by_sentinels = scheme.endswith("+sentinel")
    reject_unknown(options, (*OPTIONS, *(SENTINEL_LOGIN if by_sentinels else ()), *REPLICAS, "client"), scheme)
    keys = keyspace(options, scheme)
    if scheme.endswith("+cluster"):
        if "client" in options:
            seeds, endpoint_at = cluster_of_client(url, options["client"], options)
        else:
            seeds, endpoint_at = cluster_of_url(url, scheme, options)
        replicas = replicas_of(options)
        return ClusterBackend(scheme, seeds, endpoint_at, keys, _capabilities(ttl_of(options), replicas), replicas)
    endpoint: Endpoint
    if "client" in options:
        of_client = sentinels_of_client if by_sentinels else endpoint_of_client
        endpoint = of_client(url, options["client"], options)
    else:
        endpoint = (sentinels_of_url if by_sentinels else endpoint_of_url)(url, scheme, options)
    return RedisBackend(scheme, endpoint, keys, replicas_of(options), ttl=ttl_of(options))


def _capabilities(ttl: float, replicas: Replicas) -> Capabilities:
    rarer = f" (replicas={replicas.of_grants} makes that rarer, and is not consensus)" if replicas.of_grants else ""
    return Capabilities(
        fencing=True,
        fencing_scope=(
            "unless the server loses the token's key (flush, eviction, restart or failover without the last "
            f"writes, 10 minutes without a holder) and its clock is then behind the last grant{rarer}"
        ),
        fair=True,
        push_wait=True,
        push_loss=True,
        cross_host=True,
        survives_failover=False,
        ttl_min=0.1,
        ttl_max=365 * 86400.0,
        ttl_step=0.001,
        # A dead holder's ttl must end first. A waiter that died at the same time must lose its place in the queue as
        # well. Then the next waiter gets the name by its next heartbeat, which may come 10 % late.
        takeover_bound=max(ttl, liveness(ttl)) + (1 + JITTER) * heartbeat(ttl),
        hold_at_least=True,
        read_write=True,
        semaphore=True,
    )


class RedisBackend:
    """The `multilock.backend.Backend` for one primary."""

    spi_version = 1

    def __init__(
        self, scheme: str, endpoint: Endpoint, keys: Keyspace, replicas: Replicas | None = None, *, ttl: float
    ) -> None:
        self.scheme = scheme
        self._replicas = replicas or Replicas()
        self._endpoint = endpoint
        self._keys = keys
        self.capabilities = _capabilities(ttl, self._replicas)

    def __repr__(self) -> str:
        return f"<RedisBackend {self._endpoint.name}>"

    def open(self, notices: Notices) -> None:
        self._now = notices.now
        if isinstance(self._endpoint, SentinelEndpoint):
            self._endpoint.pushes = notices.pushes
        self._node = Node(self._endpoint, self._keys, notices, self._replicas)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._node.attempt(claim, join, within)

    def attempt_all(self, claims: Sequence[Claim], within: float) -> Sequence[Granted | Busy | Exception]:
        return self._node.attempt_all(claims, within)

    def channel(self, within: float) -> Channel | None:
        return self._node.channel(within)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        return Returned(self._node.release(claim, unsure, within))

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        return Returned(self._node.rest(claim, unsure, seconds, within))

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        return self._node.renew(held, within)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self._node.listener.watch(held, within)

    def follow(self, names: frozenset[str], within: float) -> bool:
        return self._node.listener.follow(names, within)

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._node.inspection.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._node.inspection.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self._node.inspection.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        deadline = self._now() + within
        wanted = self._replicas.of_grants
        findings = diagnose(self._node.connections, within, replicas=wanted)
        if isinstance(self._endpoint, SentinelEndpoint):
            findings += diagnose_sentinels(self._endpoint, self._now, deadline - self._now())
        return findings

    def ping(self, within: float) -> None:
        self._node.connections.call(pack("PING"), within)

    def close(self) -> None:
        self._node.close()
