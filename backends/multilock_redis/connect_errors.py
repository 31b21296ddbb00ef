"""The errors of a connection that breaks or cannot be made. They say what the user should change: the scheme of the URL
(with or without TLS), a password, or a certificate."""

from __future__ import annotations

import ssl

from redis import exceptions as theirs

from multilock import BackendRejected, BackendUnavailable
from multilock.options import NO_TLS, who_answered
from multilock_redis.wire import SILENT, refusal, spelled

__all__ = ["broken_hint", "not_connected", "other_scheme", "other_schemes", "speaks_tls"]

WANTS_CERTIFICATE = " (does this server require a client certificate? If so, give one that it trusts as cert= and key=)"


def not_connected(error: BaseException, where: str) -> Exception:
    """Return the exception for a failed connection or login. ``where`` begins with the URL."""
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return BackendRejected(f"{where} is not trusted: {error.__context__} (see ca=)", backend="redis")
    if isinstance(error, theirs.ResponseError) and str(error).partition(" ")[0] in SILENT:
        return refusal(str(error), where)
    if isinstance(error, theirs.ResponseError) and str(error).startswith("unknown command"):
        return refusal(f"ERR {error}", where)
    if isinstance(error, (theirs.AuthenticationError, theirs.ResponseError)):
        return BackendRejected(
            f"{where} refused: {error} (check username=, password= and the database)", backend="redis"
        )
    why = f"{where} cannot be reached: {error}{_hint(error, where)}"
    return BackendUnavailable(why, unknown=False, backend="redis")


def _hint(error: BaseException, where: str) -> str:
    if not speaks_tls(where):
        return ""
    if NO_TLS in str(error):
        return f" (this server does not use TLS: write {other_schemes(where)} in the URL)"
    if "alert" in str(error):  # only a server with TLS sends an alert
        return WANTS_CERTIFICATE
    # A Redis without TLS waits for the end of a line, and does not answer the handshake.
    silent = isinstance(error, (TimeoutError, theirs.TimeoutError))
    broken = isinstance(error.__context__, (ssl.SSLError, ConnectionResetError))
    return f" (does this server use TLS? If not, write {other_schemes(where)} in the URL)" if silent or broken else ""


def broken_hint(error: Exception, where: str, begun: bytes, heard: bool) -> str:
    """Return the likely cause why a connection broke, to be appended to a message. Returns "" if it is unknown.

    ``begun`` are the bytes of an incomplete reply. ``heard`` is True if the server has sent anything on this
    connection.
    """
    if who := who_answered(begun):
        return f" ({who}: {f'the URL is {other_schemes(where)}' if 'TLS' in who else 'it is not Redis'})"
    if heard or not isinstance(error, (ConnectionError, ssl.SSLError)):
        return ""
    if speaks_tls(where):
        return WANTS_CERTIFICATE
    secure = other_schemes(where)
    return f" (the server sent nothing: is it a Redis? If it uses TLS, write {secure} in the URL)"


def speaks_tls(where: str) -> bool:
    """Return whether this server's URL has a scheme with TLS. ``where`` may also be the scheme alone."""
    return where.startswith(("rediss", "valkeys", "redlocks"))


def other_scheme(scheme: str) -> str:
    """Return the scheme with TLS for a scheme without TLS, and the reverse: ``redis+cluster`` for
    ``rediss+cluster``."""
    server, plus, kind = scheme.partition("+")
    return (server[:-1] if speaks_tls(scheme) else f"{server}s") + plus + kind


def other_schemes(where: str) -> str:
    """Return the schemes with TLS for a URL without TLS, and the reverse. If ``where`` does not show which scheme the
    user wrote, returns all possible ones."""
    scheme = where.partition("://")[0]
    if "+" in scheme:
        return f"{other_scheme(scheme)}://"
    without, with_ = "redis://, redlock:// or redis+cluster://", "rediss://, redlocks:// or rediss+cluster://"
    return spelled(without if speaks_tls(where) else with_, where)
