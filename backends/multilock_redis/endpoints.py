"""Where servers are, out of a URL and its options, or out of a client handed over. Every scheme of this package reads
it here: hosts and ports, who logs in, the database, TLS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis as AsyncRedis
from redis.client import Redis
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelManagedConnection

from multilock import ConfigurationError
from multilock.options import LOGIN, TLS_FILES, client_alone, number, prefix_of, texts, tls_context, tls_only
from multilock_redis.keys import Keyspace
from multilock_redis.transport import Endpoint

__all__ = ["OPTIONS", "at", "database", "endpoint_of_client", "endpoint_of_url", "keyspace", "tls_settings"]

OPTIONS = (*LOGIN, "db", *TLS_FILES)
FORBIDDEN = "{}*?[]\\"
TLS = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
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


def keyspace(options: Mapping[str, object], scheme: str) -> Keyspace:
    prefix = prefix_of(options)
    if bad := sorted(set(prefix) & set(FORBIDDEN)):
        raise ConfigurationError(
            f"prefix {prefix!r} contains {' '.join(bad)}: {scheme}:// takes none of {' '.join(FORBIDDEN)}"
        )
    return Keyspace(prefix)


def tls_settings(options: Mapping[str, object], scheme: str, secure: str) -> dict[str, Any]:
    """``ca``, ``cert`` and ``key`` as a connection takes them; only the scheme ``secure`` does."""
    files = tls_only(options, scheme, secure)
    if files.get("key") and not files.get("cert"):
        raise ConfigurationError("key= needs cert=, the certificate that it belongs to")
    if files:
        tls_context(files)
    return {TLS[name]: path for name, path in files.items()}


def database(options: Mapping[str, object], path: str) -> int:
    """``db``, or what stands for it in the URL's path."""
    found = number(int, options.get("db", path or 0))
    if found is None or found < 0:
        # What stands there may be (the rest of) a password, and is not shown.
        why = "" if "db" in options else ", and a '/' in a password is written %2F"
        raise ConfigurationError(f"the database must be a number from 0, as in redis://host/0{why}")
    return found


def at(scheme: str, host: str, port: int, settings: Mapping[str, Any]) -> Endpoint:
    """``scheme`` is ``redis``, or ``rediss`` for TLS. ``settings``: as redis-py's connections take them."""
    settings = {**settings, "host": host, "port": port}
    kind = SSLConnection if scheme == "rediss" else Connection
    return Endpoint(_place(scheme, host, port, settings.get("db", 0)), kind, settings)


def endpoint_of_url(url: str, scheme: str, options: Mapping[str, object]) -> Endpoint:
    """Of ``redis://[user:password@]host[:port][/db]``, ``rediss://…`` or ``unix:///path``; options win over the URL."""
    parts = urlsplit(url)
    settings: dict[str, Any] = {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }
    settings |= texts(options, LOGIN)
    tls = tls_settings(options, scheme, "rediss")
    if scheme == "unix":
        settings["db"] = database(options, "")
        settings["path"] = unquote(parts.path)
        if parts.hostname or not parts.path.strip("/"):
            raise ConfigurationError("unix:// takes the absolute path of a socket: unix:///run/redis/redis.sock")
        return Endpoint(f"unix://{settings['path']}", UnixDomainSocketConnection, settings)
    if "," in parts.netloc.rpartition("@")[2]:
        raise ConfigurationError(f"{scheme}:// takes one address, that of the primary: {scheme}://host:6379/0")
    settings["db"] = database(options, parts.path.strip("/"))
    try:
        port = parts.port or 6379
    except ValueError:
        raise ConfigurationError(f"the port in the URL of {scheme}:// must be a number from 1 to 65535") from None
    return at(scheme, unquote(parts.hostname or "localhost"), port, settings | tls)


def endpoint_of_client(url: str, client: object, options: Mapping[str, object]) -> Endpoint:
    """Where this ``redis.Redis`` connects, and how; its connections themselves are not used."""
    scheme, _, rest = url.partition("://")
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
    if rest and endpoint_of_url(url, scheme, {}).name != shown:
        raise ConfigurationError(f"client= is connected to {shown}, which is not where the URL leads: give {scheme}://")
    return Endpoint(shown, kind, settings)


def _place(scheme: str, host: str, port: int, db: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{db}"
