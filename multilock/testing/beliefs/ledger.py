"""The resource that the locks protect: a counter for each name, guarded by fencing tokens.

This ledger runs in the test process, which is never frozen or killed. A read registers its token, and every older token
is refused from then on. If the tokens of the lock keep their order, each accepted read-modify-write has seen all
earlier ones, and the counter loses none.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Account", "LedgerServer"]

REFUSED = "refused"


@dataclass(slots=True)
class _Counter:
    token: int = 0
    value: int = 0


class LedgerServer(socketserver.ThreadingUnixStreamServer):
    """A server for ``read NAME TOKEN`` and ``write NAME TOKEN VALUE``. It replies with a value or ``refused``.

    The server listens on a Unix socket at ``path``, in its own threads, until `close`.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Session)
        self.path = path
        self.accepted = 0  #: how many writes were accepted
        self.refused = 0  #: how many reads and writes were refused, because an earlier request had a greater token
        self.lost: list[str] = []
        """Accepted writes that had not seen the previous write. Each of them violates the oracle O2."""
        self._counters: dict[str, _Counter] = defaultdict(_Counter)
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, name="ledger", daemon=True).start()

    def answer(self, what: str, name: str, token: int, *value: int) -> str:
        """Return the answer to a request. A test may also call it directly."""
        with self._lock:
            counter = self._counters[name]
            if token < counter.token:
                self.refused += 1
                return REFUSED
            counter.token = token
            if what == "write":
                self.accepted += 1
                if value != (counter.value + 1,):
                    self.lost.append(f"{name}: token {token} wrote {value[0]} over {counter.value}")
                counter.value = value[0]
            return str(counter.value)

    def close(self) -> None:
        """End the server."""
        self.shutdown()
        self.server_close()


class _Session(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, LedgerServer)
        with contextlib.suppress(ConnectionError):  # the contender was killed
            for line in self.rfile:
                what, name, *numbers = line.decode().split()
                self.wfile.write(f"{self.server.answer(what, name, *map(int, numbers))}\n".encode())


class Account:
    """The connection of a process under test, a *contender*, to the ledger at ``path``. One thread at a time may use
    it."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rw")

    def read(self, name: str, token: int) -> int | None:
        """Return the counter of this name, or None if the token was refused."""
        return self._ask(f"read {name} {token}")

    def write(self, name: str, token: int, value: int) -> int | None:
        """Set the counter to ``value``, which must be one more than was read. Returns None if refused."""
        return self._ask(f"write {name} {token} {value}")

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def _ask(self, question: str) -> int | None:
        self._file.write(f"{question}\n")
        self._file.flush()
        answer = self._file.readline().strip()
        return None if answer == REFUSED else int(answer)
