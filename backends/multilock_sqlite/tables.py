"""The tables of the file, and the clean-up of rows from before the present boot.

A committed transaction survives the death of every process at once. A transaction survives a power failure only after
some time, because the file is not synced each time (``synchronous=NORMAL``). For leases this is enough, because no
holder survives a power failure. But tokens must never repeat. So they are reserved in blocks by ``durable``
transactions, which are on the disk when they end, and each boot starts after the last reserved block.
"""

from __future__ import annotations

from collections.abc import Callable

from multilock import BackendRejected
from multilock.timing import LATE_REQUEST, LIVENESS_MAX
from multilock_sqlite.host import boot_id
from multilock_sqlite.transport import Connection, transaction

__all__ = ["set_up", "sweep"]

APPLICATION_ID = 0x6D6C636B  # "mlck"; marks the file as ours
FORMAT = 1
SCHEMA = """
CREATE TABLE locks (
    key TEXT NOT NULL, id TEXT NOT NULL, mode TEXT NOT NULL, owner TEXT NOT NULL, token INTEGER NOT NULL,
    since REAL NOT NULL, ttl REAL NOT NULL, until REAL NOT NULL, boot TEXT, space TEXT, pid INTEGER, start INTEGER,
    PRIMARY KEY (key, id)
) WITHOUT ROWID;
CREATE INDEX shared_by_end ON locks (key, until) WHERE mode <> 'x';
CREATE TABLE queue (
    ticket INTEGER PRIMARY KEY, key TEXT NOT NULL, id TEXT NOT NULL UNIQUE, mode TEXT NOT NULL, fair INTEGER NOT NULL,
    until REAL NOT NULL, space TEXT, pid INTEGER, start INTEGER
);
CREATE INDEX queue_by_key ON queue (key, ticket);
CREATE TABLE cancelled (id TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE counter (token INTEGER NOT NULL, reserved INTEGER NOT NULL, boot TEXT);
INSERT INTO counter VALUES (0, 0, NULL)
"""


def set_up(path: str, now: Callable[[], float], sql: Connection) -> None:
    """Create the tables of a new file, refuse another program's file, and delete rows that an earlier boot left.

    Raises `BackendRejected` for another program's file, or one of another format.
    """
    if _format(sql) == (0, 0):
        # read the format again, because another process may have made our tables meanwhile
        if _has_tables(sql) and _format(sql) == (0, 0):
            raise _foreign(path)
        _use_log(path, sql)
        _create(sql)
    application, found = _format(sql)
    if application != APPLICATION_ID:
        raise _foreign(path)
    if found != FORMAT:
        raise _newer(path, found)
    _use_log(path, sql)
    _begin_boot(sql, now)
    sql.execute("PRAGMA synchronous = NORMAL")


def sweep(sql: Connection, now: float) -> None:
    """Delete rows whose time has ended."""
    for table in ("locks", "queue", "cancelled"):
        sql.execute(f"DELETE FROM {table} WHERE until <= ?", (now,))


def _create(sql: Connection) -> None:
    with transaction(sql, durable=True):
        if not _has_tables(sql):
            for statement in SCHEMA.split(";"):
                sql.execute(statement)
            sql.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            sql.execute(f"PRAGMA user_version = {FORMAT}")


def _begin_boot(sql: Connection, clock: Callable[[], float]) -> None:
    """Delete rows that only an earlier boot can have written, and skip tokens that a power failure may have undone.

    A different boot id does not prove a reboot, because a container can have a separate one (systemd-nspawn, LXC). So a
    row is deleted only if it cannot have been written with the clock of this boot. Other rows end within their ttl, or
    when their process is found dead. If /proc does not show the boot id, this runs at each opening.
    """
    boot = boot_id()
    if _boot_began(sql, boot):
        return
    with transaction(sql, durable=True):
        # Another process may have recorded this boot meanwhile, and written rows. So check again, and read the clock
        # only now. With an older time, these rows would seem to come from an earlier boot.
        if _boot_began(sql, boot):
            return
        now = clock()
        sql.execute("DELETE FROM locks WHERE (boot IS NULL OR boot IS NOT ?) AND until > ? + ttl", (boot, now))
        sql.execute("DELETE FROM queue WHERE until > ?", (now + LIVENESS_MAX,))
        sql.execute("DELETE FROM cancelled WHERE until > ?", (now + LATE_REQUEST,))
        sql.execute("UPDATE counter SET token = reserved, boot = coalesce(?, boot)", (boot,))


def _boot_began(sql: Connection, boot: str | None) -> bool:
    return boot is not None and bool(sql.execute("SELECT boot FROM counter").fetchone() == (boot,))


def _format(sql: Connection) -> tuple[int, int]:
    (application,) = sql.execute("PRAGMA application_id").fetchone()
    (found,) = sql.execute("PRAGMA user_version").fetchone()
    return application, found


def _has_tables(sql: Connection) -> bool:
    return sql.execute("SELECT 1 FROM sqlite_master").fetchone() is not None


def _use_log(path: str, sql: Connection) -> None:
    (mode,) = sql.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise BackendRejected(
            f"{path} cannot have a write-ahead log on this file system: put it on a local disk", backend="sqlite"
        )


def _foreign(path: str) -> BackendRejected:
    return BackendRejected(f"{path} is another program's database: give the locks their own file", backend="sqlite")


def _newer(path: str, found: int) -> BackendRejected:
    return BackendRejected(
        f"{path} has file format {found}: it was made by a newer multilock, and this one reads format {FORMAT}. Update "
        "multilock here too",
        backend="sqlite",
    )
