"""What answers where a backend was expected, for messages: out of the first bytes that it said."""

from __future__ import annotations

__all__ = ["NO_TLS", "who_answered"]

NO_TLS = "WRONG_VERSION_NUMBER"  # what OpenSSL says of a first answer that is none of TLS


def who_answered(said: bytes) -> str | None:
    """None: these bytes do not tell."""
    if said[:1] in (b"\x15", b"\x16") and said[1:2] == b"\x03":
        return "what listens there speaks TLS"
    if said.startswith(b"HTTP/"):
        return "an HTTP server listens there"
    if said.startswith((b"-ERR", b"-NOAUTH", b"-DENIED", b"+PONG")):
        return "a Redis listens there"
    if said[3:4] == b"\x04" and said[5:9] == b"\x00\x00\x00\x00":
        return "an HTTP/2 server listens there, as etcd is one"
    return None
