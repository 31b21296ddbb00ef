"""Read the addresses of servers from a URL and its options, or from a client object that the program passed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis as AsyncRedis
from redis.client import Redis
from redis.cluster import RedisCluster
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection

from multilock import ConfigurationError
from multilock.options import (
    LOGIN,
    TLS_OPTIONS,
    client_alone,
    host_list,
    number,
    prefix_of,
    texts,
    tls_context,
    tls_only,
    user_info,
    verifies,
    yes_or_no,
)
from multilock_redis.acquire_release import Replicas
from multilock_redis.connect_errors import other_scheme, speaks_tls
from multilock_redis.keys import Keyspace
from multilock_redis.sentinel import Sentinel, SentinelEndpoint
from multilock_redis.slot_table import Address, key_slot
from multilock_redis.transport import Endpoint

__all__ = [
    "OPTIONS",
    "REPLICAS",
    "SENTINEL_LOGIN",
    "at",
    "cluster_of_client",
    "cluster_of_url",
    "database",
    "endpoint_of_client",
    "endpoint_of_url",
    "endpoints_of_clients",
    "endpoints_of_redlock",
    "keyspace",
    "replicas_of",
    "sentinels_of_client",
    "sentinels_of_url",
    "tls_settings",
]

OPTIONS = (*LOGIN, "db", *TLS_OPTIONS)
REPLICAS = ("replicas", "replicas_on_renew")
SENTINEL_LOGIN = ("sentinel_username", "sentinel_password")
PRIMARY = re.compile(r"[A-Za-z0-9._-]+")  # the names of a primary that a Sentinel accepts
FORBIDDEN = "{}*?[]\\"
TLS = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
# Settings of a client object that are not copied, because `Endpoint` chooses them, or because they concern only the
# client's pool.
NOT_TAKEN_OVER = {
    "socket_timeout",
    "socket_connect_timeout",
    "parser_class",
    "command_packer",
    "event_dispatcher",
    "himport_registry",
    "connection_pool",
    "client_cache",
}
NOT_TAKEN_OVER_PREFIXES = ("cache_", "maint", "orig_", "oss_cluster_", "lib_", "driver_")


def keyspace(options: Mapping[str, object], scheme: str) -> Keyspace:
    """Return the keyspace below the prefix of these options."""
    prefix = prefix_of(options)
    if bad := sorted(set(prefix) & set(FORBIDDEN)):
        raise ConfigurationError(
            f"prefix {prefix!r} contains {' '.join(bad)}: {scheme}:// allows none of {' '.join(FORBIDDEN)}"
        )
    return Keyspace(prefix, key_slot if scheme.endswith("+cluster") else None)


def replicas_of(options: Mapping[str, object]) -> Replicas:
    """Return how many replicas must acknowledge grants and renewals."""
    wanted = number(int, options.get("replicas", 0))
    if wanted is None or wanted < 0:
        raise ConfigurationError("replicas must be the number of replicas that have to acknowledge a grant")
    of_renewals = yes_or_no("replicas_on_renew", options.get("replicas_on_renew", False))
    if of_renewals and not wanted:
        raise ConfigurationError("replicas_on_renew= needs replicas=, the number of them")
    return Replicas(wanted, wanted if of_renewals else 0)


def tls_settings(options: Mapping[str, object], scheme: str) -> dict[str, Any]:
    """Return the options of TLS as settings of a connection. Raises `ConfigurationError` if the scheme is without
    TLS."""
    secure = speaks_tls(scheme)
    files = tls_only(options, scheme, scheme if secure else other_scheme(scheme))
    if files.get("key") and not files.get("cert"):
        raise ConfigurationError("key= needs cert=, the certificate to which it belongs")
    if files:
        tls_context(files)
    settings: dict[str, Any] = {TLS[name]: path for name, path in files.items()}
    if secure:  # redis-py before 6.0 does not check host names by default
        verify = verifies(options)
        settings |= {"ssl_check_hostname": verify, "ssl_cert_reqs": "required" if verify else "none"}
    return settings


def database(options: Mapping[str, object], path: str) -> int:
    """Return the number of the database, from ``db`` or else from the URL's path."""
    found = number(int, options.get("db", path or 0))
    if found is None or found < 0:
        # The path may be a part of a password, so it is not shown.
        why = "" if "db" in options else ", and a '/' in a password is written %2F"
        raise ConfigurationError(f"the database must be a number from 0, as in redis://host/0{why}")
    return found


def at(scheme: str, host: str, port: int, settings: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of one server. ``scheme`` is the scheme of the user's URL, and ``settings`` are arguments of
    redis-py's connections."""
    settings = {**settings, "host": host, "port": port}
    kind = SSLConnection if speaks_tls(scheme) else Connection
    return Endpoint(_place(scheme, host, port, settings.get("db", 0)), kind, settings)


def endpoint_of_url(url: str, scheme: str, options: Mapping[str, object]) -> Endpoint:
    """Read ``redis://[user:password@]host[:port][/db]``, ``rediss://…`` or ``unix:///path``. Options override the
    URL."""
    parts = urlsplit(url)
    settings: dict[str, Any] = {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }
    settings |= texts(options, LOGIN)
    tls = tls_settings(options, "redis" if scheme == "unix" else scheme)
    if scheme == "unix":
        settings["db"] = database(options, "")
        settings["path"] = unquote(parts.path)
        if parts.hostname or not parts.path.strip("/"):
            raise ConfigurationError("unix:// takes the absolute path of a socket: unix:///run/redis/redis.sock")
        return Endpoint(f"unix://{settings['path']}", UnixDomainSocketConnection, settings)
    if "," in parts.netloc.rpartition("@")[2]:
        several = "redlocks" if speaks_tls(scheme) else "redlock", f"{scheme}+cluster", f"{scheme}+sentinel"
        raise ConfigurationError(
            f"{scheme}:// takes one address, that of the primary. Did you mean {several[0]}:// (independent servers), "
            f"{several[1]}:// or {several[2]}://?"
        )
    settings["db"] = database(options, parts.path.strip("/"))
    try:
        port = parts.port or 6379
    except ValueError:
        raise ConfigurationError(f"the port in the URL of {scheme}:// must be a number from 1 to 65535") from None
    return at(scheme, unquote(parts.hostname or "localhost"), port, settings | tls)


def endpoints_of_redlock(url: str, scheme: str, options: Mapping[str, object]) -> list[Endpoint]:
    """Read ``redlock://[user:password@]h1[:port],[user:password@]h2,…[/db]``, or ``redlocks://…`` for TLS.

    Options override the URL. Without ``db`` or a path, database 0 of each server is used.
    """
    login = texts(options, LOGIN)
    tls = tls_settings(options, scheme)
    authority, _, path = url.partition("://")[2].partition("/")
    settings = {"db": database(options, path)} | tls
    one = "rediss" if speaks_tls(scheme) else "redis"
    endpoints = []
    for server in authority.split(","):
        user, _, place = server.rpartition("@")
        [where] = host_list(place, 6379, f"server of a {scheme}:// URL")
        host, _, port = where.rpartition(":")
        endpoints.append(at(one, unquote(host.strip("[]")), int(port), settings | user_info(user) | login))
    return endpoints


def endpoints_of_clients(url: str, clients: object, options: Mapping[str, object]) -> list[Endpoint]:
    """Return the endpoint to which each ``redis.Redis`` of a list connects."""
    scheme, _, rest = url.partition("://")
    if not isinstance(clients, (list, tuple)):
        raise ConfigurationError(f"client= of {scheme}:// takes a list of redis.Redis, one for each server")
    if rest:
        raise ConfigurationError(f"client= already has the addresses of its servers: give {scheme}:// as the URL")
    one = "rediss" if speaks_tls(scheme) else "redis"
    return [endpoint_of_client(f"{one}://", client, options) for client in clients]


def endpoint_of_client(url: str, client: object, options: Mapping[str, object]) -> Endpoint:
    """Return the endpoint to which this ``redis.Redis`` or ``valkey.Valkey`` connects. The connections of that client
    are not used."""
    scheme, _, rest = url.partition("://")
    if not _is(type(client), Redis):
        other = f"{type(client).__module__}.{type(client).__qualname__}"
        hint = ": the blocking client works with asyncio too" if _is(type(client), AsyncRedis) else ""
        raise ConfigurationError(f"client= of {scheme}:// takes a redis.Redis or valkey.Valkey, not {other}{hint}")
    client_alone(options, OPTIONS)
    pool: Any = client.connection_pool  # type: ignore[attr-defined]
    if _is(pool.connection_class, SentinelManagedConnection):
        raise ConfigurationError(f"client= asks Sentinels for its primary: give {scheme}+sentinel://")
    kind = _connection_of(pool)
    if speaks_tls(scheme) and not issubclass(kind, SSLConnection):
        raise _without_tls(scheme)
    settings = _settings_of(pool)
    shown = _place(scheme, settings.get("host", "localhost"), settings.get("port", 6379), settings.get("db") or 0)
    if path := settings.get("path"):
        shown = f"unix://{path}"
    if rest and endpoint_of_url(url, scheme, {}).name != shown:
        raise ConfigurationError(f"client= is connected to {shown}, not to the server of the URL: give {scheme}://")
    return Endpoint(shown, kind, settings)


def sentinels_of_url(url: str, scheme: str, options: Mapping[str, object]) -> SentinelEndpoint:
    """Read ``redis+sentinel://[user:password@]s1[:port],s2,s3/name[/db]`` or ``rediss+sentinel://…``.

    The user and password of the URL are for the primary. The options ``sentinel_username`` and ``sentinel_password``
    are for the Sentinels.
    """
    login, _, hosts = urlsplit(url).netloc.rpartition("@")
    name, _, db = urlsplit(url).path.removeprefix("/").partition("/")
    if not hosts or not PRIMARY.fullmatch(name):
        raise ConfigurationError(
            f"{scheme}:// takes Sentinels, and the name by which they know the primary: "
            f"{scheme}://s1:26379,s2:26379,s3:26379/NAME (a '/' in a password is written %2F)"
        )
    tls = tls_settings(options, scheme)
    kind = SSLConnection if speaks_tls(scheme) else Connection
    theirs = {name.removeprefix("sentinel_"): value for name, value in texts(options, SENTINEL_LOGIN).items()}
    if "password" not in theirs and "username" in theirs:
        raise ConfigurationError("sentinel_username= needs sentinel_password=")
    sentinels = [
        Sentinel(scheme, kind, theirs | tls | {"host": host.strip("[]"), "port": int(port)})
        for host, _, port in (each.rpartition(":") for each in host_list(hosts, 26379, f"Sentinel of a {scheme} URL"))
    ]
    settings = {**user_info(login), **texts(options, LOGIN), **tls, "db": database(options, db)}
    return SentinelEndpoint(scheme, sentinels, name, kind, settings)


def sentinels_of_client(url: str, client: object, options: Mapping[str, object]) -> SentinelEndpoint:
    """Return the Sentinels and the settings of a client that ``redis.sentinel.Sentinel(…).master_for(…)`` has made."""
    scheme, _, rest = url.partition("://")
    pool: Any = getattr(client, "connection_pool", None)
    if not _is(type(client), Redis) or not _is(type(pool), SentinelConnectionPool):
        other = f"{type(client).__module__}.{type(client).__qualname__}"
        hint = f": give {scheme.partition('+')[0]}://" if _is(type(client), Redis) else ""
        raise ConfigurationError(
            f"client= of {scheme}:// takes what redis.sentinel.Sentinel(…).master_for(…) makes, or that of valkey, "
            f"not {other}{hint}"
        )
    client_alone(options, (*OPTIONS, *SENTINEL_LOGIN))
    if not pool.is_master:
        raise ConfigurationError("client= reads from replicas, where no lock can be taken: make it with master_for(…)")
    secure = _is(pool.connection_class, SSLConnection)
    if speaks_tls(scheme) and not secure:
        raise _without_tls(scheme)
    pools = [each.connection_pool for each in pool.sentinel_manager.sentinels]
    sentinels = [Sentinel(scheme, _connection_of(each), _settings_of(each)) for each in pools]
    kind = SSLConnection if secure else Connection
    endpoint = SentinelEndpoint(scheme, sentinels, pool.service_name, kind, _settings_of(pool))
    if rest and sentinels_of_url(url, scheme, {}).name != endpoint.name:
        raise ConfigurationError(
            f"client= asks for {endpoint.name}, which is not the primary of the URL: give {scheme}://"
        )
    return endpoint


Nodes = tuple[list[Address], Callable[[Address], Endpoint]]
"""The nodes of a cluster that are asked first, and how to connect to any of its nodes."""


def cluster_of_url(url: str, scheme: str, options: Mapping[str, object]) -> Nodes:
    """Read ``redis+cluster://[user:password@]h1[:port],h2[/0]`` or ``rediss+cluster://…``. The URL need not name all
    nodes of the cluster."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    if not hosts:
        raise ConfigurationError(
            f"{scheme}:// takes some nodes of the cluster: {scheme}://h1:6379,h2:6379 "
            "(a '/' in a password is written %2F)"
        )
    if database(options, parts.path.strip("/")):
        raise ConfigurationError(f"a cluster has database 0 only: give {scheme}:// without another one")
    settings = {**user_info(login), **texts(options, LOGIN), **tls_settings(options, scheme)}
    pairs = (each.rpartition(":") for each in host_list(hosts, 6379, f"node of a {scheme} URL"))
    seeds = [Address(host.strip("[]"), int(port)) for host, _, port in pairs]
    return seeds, lambda address: at(scheme, *address, settings)


def cluster_of_client(url: str, client: object, options: Mapping[str, object]) -> Nodes:
    """Return the nodes that this ``redis.RedisCluster`` or ``valkey.ValkeyCluster`` knows, and how it connects to them.
    The connections of that client are not used."""
    scheme, _, rest = url.partition("://")
    if not _is(type(client), RedisCluster):
        other = f"{type(client).__module__}.{type(client).__qualname__}"
        hint = f": give {scheme.partition('+')[0]}://" if _is(type(client), Redis) else ""
        raise ConfigurationError(
            f"client= of {scheme}:// takes a redis.RedisCluster or valkey.ValkeyCluster, not {other}{hint}"
        )
    if rest:
        raise ConfigurationError(f"client= already has the addresses of its nodes: give {scheme}://")
    client_alone(options, OPTIONS)
    cluster: Any = client
    node = cluster.get_default_node()
    pool = (getattr(node, "redis_connection", None) or node.valkey_connection).connection_pool
    secure = _is(pool.connection_class, SSLConnection)
    if speaks_tls(scheme) and not secure:
        raise _without_tls(scheme)
    shown = scheme if secure == speaks_tls(scheme) else other_scheme(scheme)
    # The cluster client's connect function may switch to reading from replicas. So use the one that the program gave.
    settings = _settings_of(pool) | {"redis_connect_func": cluster.user_on_connect_func}
    remap: Callable[[tuple[str, int]], tuple[str, int]] = cluster.nodes_manager.address_remap or Address._make

    def endpoint_at(address: Address) -> Endpoint:
        return at(shown, *remap((address.host, address.port)), settings)

    return [Address(node.host, node.port) for node in cluster.nodes_manager.startup_nodes.values()], endpoint_at


def _is(kind: type, redis_s: type) -> bool:
    """Return whether ``kind`` is this class of redis-py, the corresponding class of valkey-py, or a subclass of these.

    valkey-py is a fork of redis-py. Its classes are recognised by their names, so that it need not be installed.
    """
    module, name = redis_s.__module__.replace("redis", "valkey"), redis_s.__name__.replace("Redis", "Valkey")
    return any(each is redis_s or (each.__module__, each.__name__) == (module, name) for each in kind.__mro__)


def _connection_of(pool: Any) -> type[Any]:
    """Return the class of redis-py that connects as this pool does."""
    kind: type[Any] = pool.connection_class
    if kind.__module__ == "valkey.connection":
        same = (SSLConnection, Connection, UnixDomainSocketConnection)
        kind = next((each for each in same if each.__name__ == kind.__name__), kind)
    if not issubclass(kind, (Connection, UnixDomainSocketConnection)):
        raise ConfigurationError(f"client= connects by {kind.__qualname__}: only one fixed server is supported")
    return kind


def _without_tls(scheme: str) -> ConfigurationError:
    plain = other_scheme(scheme)
    return ConfigurationError(f"client= connects without TLS: make it with ssl=True, or give {plain}:// as the URL")


def _settings_of(pool: Any) -> dict[str, Any]:
    if pool.connection_class.__module__.partition(".")[0] == "fakeredis":
        raise ConfigurationError("client= is a FakeRedis, to which one cannot connect: use memory:// in a test")
    return {
        name.replace("valkey_", "redis_"): value
        for name, value in pool.connection_kwargs.items()
        if name not in NOT_TAKEN_OVER and not name.startswith(NOT_TAKEN_OVER_PREFIXES)
    }


def _place(scheme: str, host: str, port: int, db: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{db}"
