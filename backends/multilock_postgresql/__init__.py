"""Locks on PostgreSQL: ``postgresql://`` or ``postgres://``, or a connection of psycopg that is passed to `connect`.

`acquire_release` is the algorithm. Its steps are functions of the server in ``sql/``, beside the tables. `tables`
creates tables and functions, `transactions` calls the functions, and `keys` turns names into keys. `transport` carries
the requests, `wire` reads values and errors, `notices` receives what the server pushes, and `event_loop` is a
connection for an event loop. `endpoints` reads the address. `inspection` shows operators who holds a lock, and
`diagnosis` reports what weakens the lock on this server.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import cast

# This import comes first, because it fails if psycopg is missing, and the registry explains that error to the user.
from multilock_postgresql.transport import ConnectionPool, PgEndpoint

# isort: split
from multilock import BackendUnavailable
from multilock.backend import Busy, Capabilities, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock.options import prefix_of, reject_unknown, ttl_of
from multilock.timing import JITTER, heartbeat, liveness
from multilock_postgresql.acquire_release import Recipe
from multilock_postgresql.diagnosis import diagnose
from multilock_postgresql.endpoints import (
    OPTIONS,
    connections_of,
    endpoint_of_client,
    endpoint_of_url,
    listen_of,
    schema_of,
)
from multilock_postgresql.event_loop import Channel
from multilock_postgresql.inspection import Inspection
from multilock_postgresql.keys import LockKeys
from multilock_postgresql.notices import Listener
from multilock_postgresql.tables import grants_of, sql_of
from multilock_postgresql.transactions import StepQueries, Transactions

__all__ = ["PostgresqlBackend", "open_backend", "sql_of"]

# Connections for renewals, one for each renewing thread of the client. The renewal of a long lease may wait for the
# server for longer than a short lease lasts. Meanwhile the short lease is renewed on another connection.
RENEWALS_AT_ONCE = 4


def open_backend(url: str, options: Mapping[str, object]) -> PostgresqlBackend:
    """Return the backend for ``postgresql://[user:password@]h1[:port][,h2][/db]``, or ``postgres://…``.

    If the URL names several hosts, the client uses the primary. The options are:

    * ``username``, ``password`` and ``db`` override the URL.
    * ``ca``, ``cert`` and ``key`` are files for TLS. With ``ca`` the server's certificate must match its host.
    * ``schema`` holds the tables. The default is ``multilock``.
    * ``listen`` is the server's own ``host:port``, for notifications, if the URL leads to a pooler.
    * ``connections`` is the greatest number of connections for requests, 8 by default. A client has more: one that
      listens, and one for renewals, or up to four while renewals wait for the server.
    * ``client`` is a ``psycopg.Connection``. This backend opens its own connections with the settings of that
      connection, and never uses it.

    Raises `ConfigurationError` if the options contradict each other. Sends no request.
    """
    scheme = url.partition("://")[0]
    reject_unknown(options, OPTIONS, scheme)
    if "client" in options:
        endpoint = endpoint_of_client(url, options["client"], options)
    else:
        endpoint = endpoint_of_url(url, scheme, options)
    return PostgresqlBackend(
        scheme,
        endpoint,
        LockKeys(prefix_of(options)),
        schema=schema_of(options),
        direct=listen_of(endpoint, options),
        connections=connections_of(options),
        ttl=ttl_of(options),
        request_timeout=cast("float | None", options.get("request_timeout")),
    )


class PostgresqlBackend:
    """The `multilock.backend.Backend` for one PostgreSQL primary."""

    spi_version = 1

    def __init__(
        self,
        scheme: str,
        endpoint: PgEndpoint,
        keys: LockKeys,
        *,
        schema: str,
        direct: PgEndpoint | None,
        connections: int,
        ttl: float,
        request_timeout: float | None,
    ) -> None:
        self.scheme = scheme
        self._endpoint = endpoint
        self._direct = direct
        self._keys = keys
        self._steps = StepQueries(schema)
        self._most = connections
        self._request_timeout = request_timeout
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope=(
                "the database: after a failover that loses writes, tokens still grow if the clocks of both servers "
                "agree better than the time between the grants"
            ),
            fair=True,
            push_wait=True,
            push_loss=True,
            cross_host=True,
            survives_failover=False,
            ttl_min=0.1,
            ttl_max=365 * 86400.0,
            ttl_step=0.001,
            # A dead holder's ttl must end first. A waiter that died at the same time must lose its place in the queue
            # as well. Then the next waiter gets the name by its next heartbeat, which may come 10 % late.
            takeover_bound=max(ttl, liveness(ttl)) + (1 + JITTER) * heartbeat(ttl),
            hold_at_least=True,
            read_write=True,
            semaphore=True,
        )

    def __repr__(self) -> str:
        return f"<PostgresqlBackend {self._endpoint.name}>"

    def open(self, notices: Notices) -> None:
        self._now = notices.now
        for endpoint in (self._endpoint, self._direct):
            if endpoint:
                endpoint.forget()
        self._connections = ConnectionPool(self._endpoint, notices.now, self._most)
        self._renewals = ConnectionPool(self._endpoint, notices.now, RENEWALS_AT_ONCE, lender=self._connections)
        self._transactions = Transactions(self._connections, self._renewals, self._steps)
        self._recipe = Recipe(self._keys, self._transactions, self._endpoint.name)
        self._inspection = Inspection(self._keys, self._transactions)
        self._listener = Listener(self._endpoint, self._direct, self._transactions, self._keys, self._recipe, notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        if join and not self._listener.listening:
            # A free lock needs no listener. But a waiter needs one for the notification of a handover, so the claim
            # joins the queue only once the client listens.
            deadline = self._now() + within
            answer = self._recipe.attempt(claim, False, within)
            if isinstance(answer, Granted):
                return answer
            self._listener.listen(deadline - self._now())
            within = deadline - self._now()
        return self._recipe.attempt(claim, join, within)

    def channel(self, within: float) -> Channel | None:
        wire = self._endpoint.connect(within, self._now)
        return Channel(wire, self._recipe, self._steps, self._listener, self._now, self._request_timeout)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        self._listener.unwatch(claim.id)  # before the request is sent, so that the release does not look like a loss
        return Returned(self._recipe.release(claim, unsure, within))

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        self._listener.unwatch(claim.id)  # before the request, as in `release`
        return Returned(self._recipe.rest(claim, unsure, seconds, within))

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        return self._recipe.renew(held, within)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self._listener.watch(held, within)

    def follow(self, names: frozenset[str], within: float) -> bool:
        return self._listener.follow(names, within)

    def sql(self) -> str:
        return sql_of(self._steps.schema) + grants_of(self._steps.schema)

    def guard(self, name: str) -> tuple[str, str]:
        return self._steps.guard, self._keys.of(name).decode()

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._inspection.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._inspection.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self._inspection.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        return diagnose(self._transactions, within)

    def ping(self, within: float) -> None:
        self._transactions.run(b"SELECT 1", [], within, limited=False)

    def close(self) -> None:
        self._listener.close()
        self._connections.close()
        self._renewals.close()
        for endpoint in (self._endpoint, self._direct):
            if endpoint:
                endpoint.close()
