"""The steps of the lock. Each is one function of the server, which executes it completely or not at all.

A step is one message and one commit. If the functions are missing, they are made, and the step is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from multilock import BackendUnavailable, system
from multilock_postgresql.tables import create
from multilock_postgresql.transport import Answer, ConnectionPool, PgWire, patience
from multilock_postgresql.wire import NotReadCommitted, NotThere

__all__ = ["StepQueries", "Transactions"]

# Tries of one request. The first may find that the functions are missing, and the second that the isolation level is
# wrong.
TRIES = 3
# Renewals that may wait for a locked row for most of their time. Each keeps a renewing thread busy, and the other
# threads must stay free for other leases.
PATIENT = 2
# Seconds for which any further renewal may wait for a locked row. The kernel repeats a renewal that fails, with a pause
# between two tries.
ROW_WAIT = 0.1


class StepQueries:
    """The SQL of each step, for one schema. The last argument of a step is the time in ms for which the server may wait
    for a locked row."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.attempt = self._sql("SELECT * FROM {}.acquire_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)")
        self.release = self._sql("SELECT {}.release_1($1, $2, $3, $4)")
        self.rest = self._sql("SELECT {}.rest_1($1, $2, $3, $4, $5)")
        self.renew = self._sql("SELECT pg_catalog.unnest({}.renew_1($1, $2, $3, $4))")
        self.force = self._sql("SELECT pg_catalog.unnest({}.force_1($1, $2))")
        self.sweep = self._sql("SELECT {}.sweep_1()")
        self.guard = f'SELECT "{schema}".guard_1(%s, %s)'  # the only query that a user's own connection sends
        self.lost = self._sql(
            "SELECT a.id FROM unnest($1::text[], $2::text[]) AS a(key, id) "
            "WHERE NOT EXISTS (SELECT FROM {0}.locks l WHERE l.key = a.key AND l.id = a.id) "
            "AND NOT EXISTS (SELECT FROM {0}.holders h WHERE h.id = a.id)"
        )
        # Whether another session has locked a whole table or index of ours, or waits for such a lock. A session that
        # waits for a row is in this view as well, with the locktype "tuple".
        self.shut = self._sql(
            "SELECT 1 FROM pg_catalog.pg_locks t JOIN pg_catalog.pg_class c ON c.oid = t.relation "
            "JOIN pg_catalog.pg_database d ON d.oid = t.database AND d.datname = pg_catalog.current_database() "
            "WHERE t.locktype = 'relation' AND c.relnamespace = pg_catalog.to_regnamespace('{}')::oid "
            "AND t.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"
        )
        self.follow = self._sql(
            "INSERT INTO {0}.locks AS l (key, token, followed) "
            "SELECT k, {0}.us_1(), pg_catalog.clock_timestamp() + $2::bigint * interval '1 ms' "
            "FROM pg_catalog.unnest($1::text[]) AS k, pg_catalog.set_config('synchronous_commit', 'off', true) AS s, "
            "pg_catalog.set_config('lock_timeout', $3, true) AS t "
            "ON CONFLICT (key) DO UPDATE SET followed = excluded.followed "
            "RETURNING l.key, l.id, extract(epoch FROM l.until - pg_catalog.clock_timestamp())"
        )
        self.holder = self._sql(
            "SELECT l.key, l.id, extract(epoch FROM l.until - pg_catalog.clock_timestamp()) FROM {}.locks l "
            "WHERE l.key = ANY ($1::text[])"
        )
        live = "FROM {0}.holders h WHERE h.key = l.key AND h.until > pg_catalog.clock_timestamp()"
        held = "l.id IS NOT NULL AND (l.until > pg_catalog.clock_timestamp() OR h.id IS NOT NULL)"
        self.inspect = self._sql(
            "SELECT l.id, l.who, l.token, extract(epoch FROM l.until - pg_catalog.clock_timestamp()), "
            "h.id, h.who, h.token, extract(epoch FROM h.until - pg_catalog.clock_timestamp()), w.n, c.n "
            "FROM {0}.locks l "
            "CROSS JOIN LATERAL (SELECT count(*) AS n FROM {0}.queue q "
            "WHERE q.key = l.key AND q.until > pg_catalog.clock_timestamp()) w "
            f"CROSS JOIN LATERAL (SELECT count(*) AS n {live}) c "
            f"LEFT JOIN LATERAL (SELECT * {live} ORDER BY h.token LIMIT 100) h ON l.until IS NULL "
            f"WHERE l.key = $1 AND {held}"
        )
        self.inspect_all = self._sql(
            "SELECT l.key, l.id, l.who, l.token, extract(epoch FROM l.until - pg_catalog.clock_timestamp()), "
            "h.id, h.who, h.token, extract(epoch FROM h.until - pg_catalog.clock_timestamp()), "
            "(SELECT count(*) FROM {0}.queue q WHERE q.key = l.key AND q.until > pg_catalog.clock_timestamp()), "
            f"(SELECT count(*) {live}) FROM {{0}}.locks l "
            f"LEFT JOIN LATERAL (SELECT * {live} ORDER BY h.token LIMIT 1) h ON l.until IS NULL "
            f"WHERE l.key >= $1 AND ($2::text IS NULL OR l.key < $2) AND {held} ORDER BY l.key LIMIT $3::integer"
        )

    def _sql(self, template: str) -> bytes:
        return template.format(f'"{self.schema}"').encode()


class Transactions:
    """Calls of the steps over the connections to one server."""

    def __init__(self, connections: ConnectionPool, renewals: ConnectionPool, steps: StepQueries) -> None:
        """``renewals`` are connections for renewals alone, so that requests that wait for locked rows do not delay
        them."""
        self._connections = connections
        self._renewals = renewals
        self.steps = steps
        self.now: Callable[[], float] = connections.now
        self._patient: system.SimpleQueue[None] = system.SimpleQueue()
        for _ in range(PATIENT):
            self._patient.put(None)

    def run(self, sql: bytes, arguments: Sequence[bytes | None], within: float, *, limited: bool = True) -> Answer:
        """Send one request. Returns its rows, and when it was sent. For ``limited`` see `ConnectionPool.call`."""
        return self._run(self._connections, sql, arguments, within, limited)

    def renew(self, arguments: Sequence[bytes | None], within: float) -> Answer:
        """Send one renewal, on a connection for renewals.

        Many claims that join the queue of one name lock its row in turn. A renewal that gave up its turn early, again
        and again, would lose the lease. So a few renewals wait longer than `ROW_WAIT`.
        """
        permit: list[None] = []
        try:
            with suppress(system.Empty):
                system.take(self._patient.get, 0.0, permit)
            limit = patience(within if permit else min(within, ROW_WAIT))
            return self._run(self._renewals, self.steps.renew, [*arguments, limit], within, False)
        finally:
            # No Python function is called before the put, so no interrupt can lose the permit.
            if permit:
                self._patient.put(None)

    def create(self, within: float) -> None:
        """Make the tables and functions, unless they exist."""

        def make(wire: PgWire, left: float) -> Answer:
            create(wire, self.steps.schema, left)
            return [], wire.used

        self._connections.use(make, within)

    def _run(
        self, connections: ConnectionPool, sql: bytes, arguments: Sequence[bytes | None], within: float, limited: bool
    ) -> Answer:
        deadline = self.now() + within
        answer: Exception
        for _ in range(TRIES):
            try:
                return connections.call(sql, arguments, deadline - self.now(), limited=limited)
            except NotThere as error:
                answer = error
                self.create(deadline - self.now())
            except NotReadCommitted as error:  # each later request sets its isolation level
                answer = error
        told = f"{connections.endpoint.name}: {answer} (does another program change the functions of multilock there?)"
        raise BackendUnavailable(told, unknown=False, backend="postgresql") from answer
