"""The bytes by which a session is opened and closed. The server's reply contains the session timeout that it grants,
which kazoo does not show."""

from __future__ import annotations

import struct
from typing import Any

__all__ = ["granted_by", "open_second_session"]


def granted_by(greeting: bytes) -> float | None:
    """Return the session timeout in seconds that a server grants in its reply to the opening of a session.

    ``greeting`` is the part of the reply that has arrived. Returns None if it is too short.
    """
    if len(greeting) < 12:  # the length of the reply, the version, and the timeout in ms
        return None
    granted: int = struct.unpack_from("!i", greeting, 8)[0]
    return granted / 1000


def open_second_session(connection: Any, asked: float) -> float:
    """Open a session, close it at once, and return the timeout in seconds that the server granted instead of ``asked``.

    Raises OSError or struct.error.
    """
    connection.sendall(struct.pack("!iiqiqi16s?", 45, 0, 0, round(asked * 1000), 0, 16, b"", False))
    answer = _receive(connection)
    connection.sendall(struct.pack("!iii", 8, 1, -11))
    granted: int = struct.unpack_from("!i", answer, 4)[0]
    return granted / 1000


def _receive(connection: Any) -> bytes:
    length: int = struct.unpack("!i", _exactly(connection, 4))[0]
    return _exactly(connection, length)


def _exactly(connection: Any, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("the server closed the connection")
        data += piece
    return data
