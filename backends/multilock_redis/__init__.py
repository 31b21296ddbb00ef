"""Locks on one Redis or Valkey primary: ``redis://``, ``rediss://`` (TLS), ``unix://``, or a client handed over.

`recipe` is the algorithm, ``scripts/`` its steps, `transactions` runs them, `keys` says on which keys. `transport`
carries the requests, `wire` is their format; `notices` is what the server pushes, `channel` a connection for an event
loop. `inspection` is for operators, `diagnosis` says what this server takes away.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis as AsyncRedis
from redis.client import Redis
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelManagedConnection

from multilock import ConfigurationError
from multilock.backend import Busy, Capabilities, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock.options import (
    LOGIN,
    TLS_FILES,
    client_alone,
    number,
    prefix_of,
    reject_unknown,
    texts,
    tls_context,
    tls_only,
    ttl_of,
)
from multilock_redis.channel import Channel
from multilock_redis.diagnosis import diagnose
from multilock_redis.inspection import Inspection
from multilock_redis.keys import Keyspace
from multilock_redis.notices import Listener
from multilock_redis.recipe import Recipe, liveness
from multilock_redis.transactions import Transactions
from multilock_redis.transport import Connections, Endpoint
from multilock_redis.wire import pack

__all__ = ["RedisBackend", "open_backend"]

FORBIDDEN = "{}*?[]\\"
TLS = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
OPTIONS = (*LOGIN, "db", *TLS_FILES)
# Of a client handed over, what `Endpoint` decides itself, and what ties a connection to that client's own pool.
NOT_TAKEN_OVER = {
    "socket_timeout",
    "socket_connect_timeout",
    "parser_class",
    "command_packer",
    "event_dispatcher",
    "himport_registry",
}
NOT_TAKEN_OVER_PREFIXES = ("maint", "orig_", "oss_cluster_", "lib_", "driver_")


def open_backend(url: str, options: Mapping[str, object]) -> RedisBackend:
    """The backend of ``redis://[user:password@]host[:port][/db]``, ``rediss://…`` or ``unix:///path``.

    Own options: ``username``, ``password``, ``db`` (they win over the URL's), ``ca``, ``cert``, ``key`` (files, for
    ``rediss://``), or ``client``, a ``redis.Redis`` whose settings are used for connections of our own; it is never
    closed. Raises ConfigurationError; no I/O.
    """
    scheme = url.partition("://")[0]
    reject_unknown(options, (*OPTIONS, "client"), scheme)
    prefix = prefix_of(options)
    if bad := sorted(set(prefix) & set(FORBIDDEN)):
        raise ConfigurationError(
            f"prefix {prefix!r} contains {' '.join(bad)}: {scheme}:// takes none of {' '.join(FORBIDDEN)}"
        )
    endpoint = _endpoint_of_client(url, options) if "client" in options else _endpoint_of_url(url, scheme, options)
    return RedisBackend(scheme, endpoint, prefix=prefix, ttl=ttl_of(options))


def _endpoint_of_url(url: str, scheme: str, options: Mapping[str, object]) -> Endpoint:
    parts = urlsplit(url)
    settings: dict[str, Any] = {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }
    settings |= texts(options, LOGIN)
    files = tls_only(options, scheme, "rediss")
    if files.get("key") and not files.get("cert"):
        raise ConfigurationError("key= needs cert=, the certificate that it belongs to")
    if files:
        tls_context(files)
    if scheme == "unix":
        settings["db"] = _database(options, "")
        settings["path"] = unquote(parts.path)
        if parts.hostname or not parts.path.strip("/"):
            raise ConfigurationError("unix:// takes the absolute path of a socket: unix:///run/redis/redis.sock")
        return Endpoint(f"unix://{settings['path']}", UnixDomainSocketConnection, settings)
    if "," in parts.netloc.rpartition("@")[2]:
        raise ConfigurationError(f"{scheme}:// takes one address, that of the primary: {scheme}://host:6379/0")
    settings["db"] = _database(options, parts.path.strip("/"))
    settings["host"] = unquote(parts.hostname or "localhost")
    try:
        settings["port"] = parts.port or 6379
    except ValueError:
        raise ConfigurationError(f"the port in the URL of {scheme}:// must be a number from 1 to 65535") from None
    shown = _place(scheme, settings["host"], settings["port"], settings["db"])
    settings |= {TLS[name]: path for name, path in files.items()}
    return Endpoint(shown, SSLConnection if scheme == "rediss" else Connection, settings)


def _endpoint_of_client(url: str, options: Mapping[str, object]) -> Endpoint:
    scheme, _, rest = url.partition("://")
    client = options["client"]
    if not isinstance(client, Redis):
        other = f"{type(client).__module__}.{type(client).__qualname__}"
        hint = ": the blocking client serves asyncio too" if isinstance(client, AsyncRedis) else ""
        raise ConfigurationError(f"client= of {scheme}:// takes a redis.Redis, not {other}{hint}")
    client_alone(options, OPTIONS)
    pool = client.connection_pool
    kind = pool.connection_class
    if not issubclass(kind, (Connection, UnixDomainSocketConnection)) or issubclass(kind, SentinelManagedConnection):
        raise ConfigurationError(f"client= connects by {kind.__qualname__}: only one fixed server is supported")
    if scheme == "rediss" and not issubclass(kind, SSLConnection):
        raise ConfigurationError("client= connects without TLS: make it with ssl=True, or give redis:// as the URL")
    settings = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name not in NOT_TAKEN_OVER and not name.startswith(NOT_TAKEN_OVER_PREFIXES)
    }
    shown = _place(scheme, settings.get("host", "localhost"), settings.get("port", 6379), settings.get("db") or 0)
    if path := settings.get("path"):
        shown = f"unix://{path}"
    if rest and _endpoint_of_url(url, scheme, {}).name != shown:
        raise ConfigurationError(f"client= is connected to {shown}, which is not where the URL leads: give {scheme}://")
    return Endpoint(shown, kind, settings)


def _database(options: Mapping[str, object], path: str) -> int:
    found = number(int, options.get("db", path or 0))
    if found is None or found < 0:
        # What stands there may be (the rest of) a password, and is not shown.
        why = "" if "db" in options else ", and a '/' in a password is written %2F"
        raise ConfigurationError(f"the database must be a number from 0, as in redis://host/0{why}")
    return found


def _place(scheme: str, host: str, port: int, db: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{db}"


class RedisBackend:
    """See `multilock.backend.Backend` for what each method promises."""

    spi_version = 2

    def __init__(self, scheme: str, endpoint: Endpoint, *, prefix: str, ttl: float) -> None:
        self.scheme = scheme
        self._endpoint = endpoint
        self._keys = Keyspace(prefix)
        wait = liveness(ttl)
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope=(
                "unless the server loses the token's key (flush, eviction, restart or failover without the last "
                "writes, 10 minutes without a holder) and its clock then stands behind the last grant"
            ),
            fair=True,
            push_wait=True,
            push_loss=True,
            cross_host=True,
            survives_failover=False,
            ttl_min=0.1,
            ttl_max=365 * 86400.0,
            ttl_step=0.001,
            # Its own ttl, and that of a waiter which died with it; then the next one's heartbeat, jitter included.
            takeover_bound=max(ttl, wait) + 1.1 * wait / 3,
            hold_at_least=True,
            read_write=True,
            semaphore=True,
        )

    def __repr__(self) -> str:
        return f"<RedisBackend {self._endpoint.name}>"

    def open(self, notices: Notices) -> None:
        self._endpoint.forget()
        self._now = notices.now
        self._connections = Connections(self._endpoint, notices.now)
        transactions = Transactions(self._connections, notices.now)
        self._recipe = Recipe(self._keys, transactions, self._endpoint.name)
        self._inspection = Inspection(self._keys, transactions)
        self._listener = Listener(self._endpoint, self._connections, self._keys, self._recipe, notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        if join and not self._listener.listening:
            # A free lock needs no subscription. But who joins without one is taken for dead, and passed over.
            deadline = self._now() + within
            answer = self._recipe.attempt(claim, False, within)
            if isinstance(answer, Granted):
                return answer
            self._listener.listen(deadline - self._now())
            within = deadline - self._now()
        return self._recipe.attempt(claim, join, within)

    def channel(self, within: float) -> Channel | None:
        wire = self._connections.channel(within)
        return Channel(wire, self._recipe, self._listener) if wire else None

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        self._listener.unwatch(claim.id)  # before it is sent: what follows is no loss
        return Returned(self._recipe.release(claim, unsure, within))

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        self._listener.unwatch(claim.id)  # as before a release
        return Returned(self._recipe.rest(claim, unsure, seconds, within))

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        return self._listener.renew(held, within)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self._listener.watch(held, within)

    def follow(self, names: frozenset[str], within: float) -> bool:
        return self._listener.follow(names, within)

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._inspection.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._inspection.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self._inspection.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        return diagnose(self._connections, self._listener.refused.values(), within)

    def ping(self, within: float) -> None:
        self._connections.call(pack("PING"), within)

    def close(self) -> None:
        self._listener.close()
        self._connections.close()
