"""The answers of an HTTP/1.1 server, out of bytes as they arrive: no I/O, so that a blocking request and the one thread
that keeps many blocking queries open read them alike.

``http.client`` reads from a socket only, and takes as long as the rest of a request together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["Reading", "Response"]

HEAD_MAX = 65536
END = b"\r\n"


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]  #: names in lower case
    body: bytes

    @property
    def closes(self) -> bool:
        """The server ends this connection now."""
        return self.headers.get("connection", "").lower() == "close"

    @property
    def text(self) -> str:
        return self.body[:300].decode(errors="replace").strip()

    def json(self) -> Any:
        """Raises ValueError for anything else."""
        return json.loads(self.body)


class Reading:
    """One response that is on its way."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._chunks: bytearray | None = None  # of a chunked body, those that are whole
        self._length = 0

    def feed(self, data: bytes) -> Response | None:
        """The response, once it is whole. Raises ValueError for what is no HTTP."""
        self._buffer += data
        if not self._status and not self._read_head():
            return None
        body = self._read_chunks() if self._chunks is not None else self._read_length()
        return None if body is None else Response(self._status, self._headers, body)

    def _read_head(self) -> bool:
        end = self._buffer.find(END + END)
        if end < 0:
            if len(self._buffer) > HEAD_MAX:
                raise ValueError("the head of the answer has no end")
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"no answer of an HTTP server: {first!r:.60}")
        for line in lines:
            name, _, value = line.partition(":")
            self._headers[name.lower()] = value.strip()
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            self._chunks = bytearray()
        else:
            self._length = int(self._headers["content-length"]) if "content-length" in self._headers else 0
        self._status = int(rest[:3])
        return True

    def _read_length(self) -> bytes | None:
        return bytes(self._buffer[: self._length]) if len(self._buffer) >= self._length else None

    def _read_chunks(self) -> bytes | None:
        assert self._chunks is not None
        while (end := self._buffer.find(END)) >= 0:
            size = int(bytes(self._buffer[:end]).partition(b";")[0], 16)
            if size == 0:  # after it come trailers, if any, and an empty line
                return bytes(self._chunks) if self._buffer.find(END + END, end) >= 0 else None
            start = end + 2
            if len(self._buffer) < start + size + 2:
                return None
            self._chunks += self._buffer[start : start + size]
            del self._buffer[: start + size + 2]
        return None
