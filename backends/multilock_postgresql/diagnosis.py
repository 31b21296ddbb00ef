"""Report what weakens the lock on this server, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from multilock import Finding, system
from multilock_postgresql.transactions import Transactions
from multilock_postgresql.wire import number, seconds, text

__all__ = ["diagnose"]

OLDEST = 140000
CLOCK_WITHIN = 1.0  # seconds by which the clocks may differ without a finding; a difference affects only `since`
OLD_SNAPSHOT = 600.0  # seconds; a transaction that is open for longer keeps the dead versions of all renewed rows
NEARLY_ALL = 0.8  # share of the server's connections; if more are in use, that is a finding
QUERY = b"""SELECT current_setting('server_version_num'), current_setting('fsync'), current_setting('full_page_writes'),
 current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
 current_setting('default_transaction_isolation'), current_setting('idle_in_transaction_session_timeout'),
 (SELECT setting FROM pg_settings WHERE name = 'statement_timeout'),
 (SELECT count(*) FROM pg_stat_replication), (SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'async'),
 (SELECT max(extract(epoch FROM clock_timestamp() - xact_start)) FROM pg_stat_activity
  WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()),
 (SELECT sum(numbackends) FROM pg_stat_database), current_setting('max_connections'),
 extract(epoch FROM clock_timestamp()), pg_has_role('pg_read_all_stats', 'USAGE'), version()"""


class ServerState(NamedTuple):
    """The server's version, settings and present load, as one query returns them."""

    version: int
    fsync: str
    full_page_writes: str
    synchronous_commit: str
    standbys: str
    isolation: str
    idle_limit: str
    statement_timeout: float  # seconds; 0 for none
    replicas: int
    asynchronous: int
    oldest_snapshot: float
    connections: int
    most_connections: int
    clock: float
    sees_all: bool
    name: str  # its version() as text


def diagnose(transactions: Transactions, within: float) -> list[Finding]:
    """Return the findings about the server's settings. Raises the same errors as a request."""
    rows, sent_at = transactions.run(QUERY, [], within, limited=False)
    took = transactions.now() - sent_at
    row = rows[0]
    fsync, full_page_writes, synchronous_commit, standbys, isolation, idle_limit = map(text, row[1:7])
    told = ServerState(
        number(row[0]) or 0,
        fsync,
        full_page_writes,
        synchronous_commit,
        standbys,
        isolation,
        idle_limit,
        (number(row[7]) or 0) / 1000,
        number(row[8]) or 0,
        number(row[9]) or 0,
        seconds(row[10]) or 0.0,
        number(row[11]) or 0,
        number(row[12]) or 0,
        seconds(row[13]) or 0.0,
        row[14] == b"t",
        text(row[15]),
    )
    return [*_about_disk(told), *_about_replicas(told), *_about_role(told), *_about_load(told, took)]


def _about_disk(told: ServerState) -> Iterator[Finding]:
    if told.version < OLDEST:
        yield Finding(
            "postgresql-old", "error", f"its version is {told.version // 10000}: multilock needs 14", "upgrade it"
        )
    if not told.name.startswith("PostgreSQL ") or "-YB-" in told.name:
        yield Finding(
            "postgresql-not-postgresql",
            "warning",
            f"it calls itself {told.name:.40}: its locks of rows and its notifications were not tried",
            "use PostgreSQL itself",
        )
    if told.fsync == "off":
        yield Finding(
            "postgresql-fsync-off",
            "error",
            "after a power failure the server may have forgotten who holds a lock, or may not start",
            "set fsync = on",
        )
    if told.full_page_writes == "off":
        yield Finding(
            "postgresql-full-page-writes-off",
            "warning",
            "a power failure may destroy the tables of locks",
            "set full_page_writes = on",
        )
    if told.synchronous_commit in ("off", "local"):
        yield Finding(
            "postgresql-asynchronous-commit",
            "info",
            f"synchronous_commit is {told.synchronous_commit} for this role: multilock sets it to on for each grant",
            "no action is needed",
        )


def _about_replicas(told: ServerState) -> Iterator[Finding]:
    if told.standbys:
        yield Finding(
            "postgresql-synchronous",
            "info",
            f"a grant waits for the standbys of synchronous_standby_names = {told.standbys!r}: without them nobody can "
            "acquire a lock",
            "name more standbys than it needs",
        )
    elif told.replicas and not told.sees_all:
        yield Finding(
            "postgresql-replicas",
            "info",
            f"the server has {told.replicas} standbys, and this role may not see whether they are synchronous",
            "GRANT pg_read_all_stats to this role",
        )
    elif told.asynchronous:
        yield Finding(
            "postgresql-async-replicas",
            "warning",
            "its standbys are asynchronous: a failover may lose the newest locks, together with what was written under "
            "their guard",
            "set synchronous_standby_names, or guard each write",
        )


def _about_role(told: ServerState) -> Iterator[Finding]:
    if told.isolation != "read committed":
        yield Finding(
            "postgresql-isolation",
            "info",
            f"this role's default isolation level is {told.isolation!r}: each request begins with READ COMMITTED, "
            "which makes it longer",
            "ALTER ROLE … SET default_transaction_isolation = 'read committed'",
        )
    if 0 < told.statement_timeout < 5:
        yield Finding(
            "postgresql-statement-timeout",
            "warning",
            f"statement_timeout of this role is {told.statement_timeout:g} s: renewals of many locks may fail each "
            "time",
            "ALTER ROLE … SET statement_timeout = '5s', or more",
        )
    if told.idle_limit in ("0", ""):
        yield Finding(
            "postgresql-guard-unbounded",
            "info",
            "a transaction that is left open with a guard keeps its lock without a limit",
            "set idle_in_transaction_session_timeout, or give guard() an idle_limit",
        )


def _about_load(told: ServerState, took: float) -> Iterator[Finding]:
    if told.oldest_snapshot > OLD_SNAPSHOT:
        yield Finding(
            "postgresql-old-snapshot",
            "warning",
            f"a transaction is open for {told.oldest_snapshot:.0f} s: until it ends, the tables of locks grow and each "
            "request takes longer",
            "end it, and set idle_in_transaction_session_timeout",
        )
    if told.connections > NEARLY_ALL * told.most_connections:
        yield Finding(
            "postgresql-connections",
            "warning",
            f"{told.connections} of {told.most_connections} connections are in use: without one no lock is renewed",
            "raise max_connections, or lower connections=",
        )
    off = told.clock - system.wall() / 1e6
    if abs(off) > CLOCK_WITHIN + took:
        yield Finding(
            "postgresql-clock",
            "info",
            f"its clock differs from this host's by {off:+.0f} s: `since` is shown by its clock",
            "run a time service on both",
        )
