"""A proxy in front of etcd that understands HTTP/2 frames and sends GOAWAY in the server's name.

GOAWAY is sent by a member that stops, by a load balancer that is drained, and by a server that was pinged too often.
The sender finishes the requests that it has accepted. The client must send further requests on another connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["ENHANCE_YOUR_CALM", "NO_ERROR", "GoawayProxy"]

NO_ERROR, ENHANCE_YOUR_CALM = 0x0, 0xB
GOAWAY = 0x7
HEADER = 9  # bytes before the payload of a frame: length (3), type (1), flags (1), stream (4)
ALL_STREAMS = 2**31 - 1


class _Connection:
    """One connection through the proxy. It forwards only whole frames to the client, so that the proxy can insert a
    frame between them."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._client = client
        self._server = server
        self._down = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(carry,), name="goaway-proxy", daemon=True)
            for carry in (self._carry_up, self._carry_down)
        ]
        for thread in self._threads:
            thread.start()

    def say_goodbye(self, error: int, text: bytes, last_stream: int) -> None:
        payload = struct.pack("!II", last_stream, error) + text
        frame = struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", GOAWAY, 0, 0) + payload
        with self._down, contextlib.suppress(OSError):  # the client has closed the connection
            self._client.sendall(frame)

    def end(self) -> None:
        """Shut both sides down, after all bytes were sent."""
        for side in (self._client, self._server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._server.close()

    def _run(self, carry: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, EOFError):
            carry()
        self.end()

    def _carry_up(self) -> None:
        while data := self._client.recv(65536):
            self._server.sendall(data)

    def _carry_down(self) -> None:
        while True:
            header = self._read(HEADER)
            frame = header + self._read(int.from_bytes(header[:3], "big"))
            with self._down:
                self._client.sendall(frame)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (piece := self._server.recv(size - len(data))):
                raise EOFError
            data += piece
        return data


class GoawayProxy:
    """A proxy in front of ``host:port`` that listens on its own port."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._old: list[_Connection] = []  # connections on which GOAWAY was sent already
        self.made = 0
        self._thread = threading.Thread(target=self._serve, name="goaway-proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self._listener.getsockname()[1]}"

    def say_goodbye(
        self, error: int = NO_ERROR, text: bytes = b"", *, last_stream: int = ALL_STREAMS, close: bool = False
    ) -> int:
        """Send GOAWAY on every connection on which it was not sent yet. If ``close`` is set, end these connections.
        Returns their number."""
        with self._lock:
            present, self._connections = self._connections, []
        for connection in present:
            connection.say_goodbye(error, text, last_stream)
            if close:
                connection.end()
        self._old += present
        return len(present)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts connections
        self._thread.join()
        self._listener.close()
        with self._lock:
            connections = [*self._connections, *self._old]
        for connection in connections:
            connection.close()

    def __enter__(self) -> GoawayProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the proxy was closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target, 5.0)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for side in (client, server):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self.made += 1
                    self._connections.append(_Connection(client, server))
