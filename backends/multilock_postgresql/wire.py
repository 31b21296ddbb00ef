"""The text format of values, and the meaning of each error of the server for a request."""

from __future__ import annotations

from collections.abc import Iterable

from psycopg import pq

from multilock import BackendRejected, BackendUnavailable

__all__ = [
    "IS_REPLICA",
    "LockWait",
    "NotReadCommitted",
    "NotThere",
    "Row",
    "array",
    "failure",
    "number",
    "refused_login",
    "seconds",
    "text",
]

Row = tuple[bytes | None, ...]

IS_REPLICA = "it is a read replica, or this role is read-only: give the address of the primary"
LOCK_WAIT = "55P03"
READ_ONLY = "25006"
TOO_MUCH = "54000"
EXHAUSTED = "54000 without a table"
NOT_READ_COMMITTED = "ML002"
NOT_THERE = {"3F000", "42P01", "42883"}  # the schema, a table or a function is missing

# After these errors nothing was executed, and the server may accept the same request later.
SILENT = {
    READ_ONLY: IS_REPLICA,
    "40001": "its transaction could not be serialized",
    "40P01": "its transaction was chosen to end a deadlock",
    "53300": "it has too many connections: raise max_connections, or lower connections=",
    "57014": "the request was cancelled there: is statement_timeout of this role shorter than request_timeout=?",
    EXHAUSTED: "its queue of notifications is full (end the sessions that listen and never read), or it has no more "
    "transaction ids (vacuum it)",
    "57P03": "it starts or shuts down",
}
# After these errors nothing was executed, and repeating the request does not help.
REFUSED = {
    "22023": "the name of the lock is too long for a notification: shorten it",
    "22P05": "the name, the prefix or identity= has a character that the encoding of its database lacks",
    TOO_MUCH: "the name of the lock is too long for an index: shorten it",
    "0A000": "it does not support what multilock needs: PostgreSQL 14 or newer",
    "28000": "check username= and the server's pg_hba.conf",
    "28P01": "check username= and password=",
    "3D000": "check the name of the database in the URL",
    "42501": "grant this role the rights that `multilock doctor --sql` prints at its end",
    "53100": "its disk is full",
}
# libpq reports a refused login only as text. These are the English texts.
_REFUSED_LOGIN = (
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "permission denied",
    "not permitted to log in",
    "certificate",
    "server does not support SSL",
)


class NotThere(Exception):
    """The tables or functions do not exist, so nothing was executed. Make them, and send the request again."""


class NotReadCommitted(Exception):
    """This role's transactions have another isolation level, so nothing was executed. Send the request in a transaction
    that sets the isolation level."""


class LockWait(BackendUnavailable):
    """The request waited for a locked row until its limit: nothing was executed."""


def failure(result: pq.abc.PGresult, where: str) -> Exception:
    """Return the exception for an error reply."""
    code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    told = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    if code in NOT_THERE:
        return NotThere(told)
    if code == NOT_READ_COMMITTED:
        return NotReadCommitted(told)
    message = f"{where}: {told} ({code})"
    if code == TOO_MUCH and not result.error_field(pq.DiagnosticField.TABLE_NAME):
        code = EXHAUSTED
    if code == LOCK_WAIT:
        return LockWait(message, unknown=False, backend="postgresql")
    if code in SILENT:
        return BackendUnavailable(f"{message}: {SILENT[code]}", unknown=False, backend="postgresql")
    if code in REFUSED or code.startswith("28"):
        hint = REFUSED.get(code, REFUSED["28000"])
        return BackendRejected(f"{message}: {hint}", backend="postgresql")
    return BackendUnavailable(message, unknown=True, backend="postgresql")


def refused_login(told: str) -> bool:
    """Return whether a failed connection shows a wrong login or certificate, so that another try would fail too."""
    return any(text in told for text in _REFUSED_LOGIN)


def array(items: Iterable[str]) -> bytes:
    """Return a ``text[]`` of these texts, none of which is empty.

    All texts are escaped in one step, because a renewal may have thousands. For that they are joined with NUL, which no
    text of PostgreSQL can contain.
    """
    joined = "\0".join(items)
    if not joined:
        return b"{}"
    return ('{"' + joined.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","') + '"}').encode()


def number(value: bytes | None) -> int | None:
    """Return an integer, or None for NULL."""
    return None if value is None else int(value)


def seconds(value: bytes | None) -> float | None:
    """Return a number of seconds, or None for NULL."""
    return None if value is None else float(value)


def text(value: bytes | None) -> str:
    """Return a text, which is empty for NULL."""
    return "" if value is None else value.decode(errors="replace")
