"""The addresses of a database, from a URL or from a connection of psycopg that is passed to `connect`."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

import psycopg

from multilock import ConfigurationError
from multilock.options import LOGIN, TLS_FILES, client_alone, host_list, number, text, texts, tls_context, user_info
from multilock_postgresql.tables import SCHEMA
from multilock_postgresql.transport import PgEndpoint

__all__ = ["OPTIONS", "connections_of", "endpoint_of_client", "endpoint_of_url", "listen_of", "schema_of"]

OPTIONS = (*LOGIN, "db", *TLS_FILES, "schema", "listen", "connections", "client")
PORT = 5432
CONNECTIONS = 8
TLS = {"ca": "sslrootcert", "cert": "sslcert", "key": "sslkey"}
_OURS = {
    "client_encoding": "UTF8",
    "fallback_application_name": "multilock",
    "target_session_attrs": "read-write",  # a read replica may lag behind
}
# Settings of the connection in client= that are not copied. The addresses are read separately, and a pooler refuses
# "options".
_NOT_TAKEN_OVER = {"host", "hostaddr", "port", "options"}


def endpoint_of_url(url: str, scheme: str, options: Mapping[str, object]) -> PgEndpoint:
    """Read ``postgresql://[user:password@]h1[:port][,h2][/db]``. Options override the URL.

    All other settings come from libpq: from the environment (``PGUSER``, ``PGHOST`` …), the password file and defaults.
    """
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    addresses = [("", "")]
    if hosts:
        pairs = (each.rpartition(":") for each in host_list(hosts, PORT, f"host of a {scheme} URL"))
        addresses = [(unquote(host).strip("[]"), port) for host, _, port in pairs]
    given = {**user_info(login), **texts(options, LOGIN)}
    database = text("db", options["db"]) if "db" in options else unquote(parts.path.strip("/"))
    settings = {"user": given.get("username", ""), "password": given.get("password", ""), "dbname": database}
    settings |= _tls(options)
    return _endpoint(addresses, settings)


def endpoint_of_client(url: str, client: object, options: Mapping[str, object]) -> PgEndpoint:
    """Return the endpoint to which this connection of psycopg leads. The connection itself is not used."""
    scheme, _, rest = url.partition("://")
    if not isinstance(client, (psycopg.Connection, psycopg.AsyncConnection)):
        other = f"{type(client).__module__}.{type(client).__qualname__}"
        raise ConfigurationError(f"client= of {scheme}:// takes a psycopg.Connection, not {other}")
    client_alone(options, (*LOGIN, "db", *TLS_FILES))
    if rest:
        raise ConfigurationError(f"client= already has the address of its server: give {scheme}:// as the URL")
    info = client.info
    settings = {key: value for key, value in info.get_parameters().items() if key not in _NOT_TAKEN_OVER}
    return _endpoint([(info.host, str(info.port))], {**settings, "password": info.password})


def listen_of(endpoint: PgEndpoint, options: Mapping[str, object]) -> PgEndpoint | None:
    """Return the address for notifications, if ``listen`` gives one."""
    if "listen" not in options:
        return None
    [where] = host_list(text("listen", options["listen"]), PORT, "address for listen=")
    host, _, port = where.rpartition(":")
    return endpoint.at(unquote(host).strip("[]"), port)


def schema_of(options: Mapping[str, object]) -> str:
    """Return the schema of the tables."""
    schema = text("schema", options.get("schema", SCHEMA))
    if not (schema.isidentifier() and schema.isascii() and len(schema) < 64):
        raise ConfigurationError(
            f"schema {schema!r:.80} must have at most 63 letters, digits and _, and not begin with a digit"
        )
    return schema


def connections_of(options: Mapping[str, object]) -> int:
    """Return how many connections one client may have for its requests."""
    most = number(int, options.get("connections", CONNECTIONS))
    if most is None or most < 1:
        raise ConfigurationError("connections must be the greatest number of connections of a client, at least 1")
    return most


def _endpoint(addresses: list[tuple[str, str]], settings: Mapping[str, str]) -> PgEndpoint:
    shown = ",".join(f"{f'[{host}]' if ':' in host else host}:{port}" if host else "" for host, port in addresses)
    name = f"postgresql://{shown}/{settings['dbname']}"
    return PgEndpoint(name, addresses, {**{key: value for key, value in settings.items() if value}, **_OURS})


def _tls(options: Mapping[str, object]) -> dict[str, str]:
    files = texts(options, TLS_FILES)
    if "key" in files and "cert" not in files:
        raise ConfigurationError("key= needs cert=, the certificate to which it belongs")
    if files:
        tls_context(files)  # find a missing file now: libpq would report it like a server that cannot be reached
    verified = {"sslmode": "verify-full"} if "ca" in files else {"sslmode": "require"} if files else {}
    return {**{TLS[name]: path for name, path in files.items()}, **verified}
