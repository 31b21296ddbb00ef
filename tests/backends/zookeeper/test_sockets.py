"""The socket through which kazoo reads: replies that arrive in pieces or together, the time limit of a wait, and the
callbacks of watches. No server is needed."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.protocol.states import Callback

from multilock import now
from multilock_zookeeper.sockets import Handler, _Buffered, dial

GREETING = struct.pack("!iiiq", 16, 0, 6000, 1)  # length, version, milliseconds, the session


@pytest.fixture
def pair() -> Iterator[tuple[_Buffered, socket.socket]]:
    """Return the socket from which kazoo reads, and the server's end of the connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield _Buffered(ours), theirs


@pytest.fixture
def handler() -> Handler:
    return Handler(now, 1.0, 1.0, lambda since: False)


@pytest.fixture
def pipe() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the two ends of the pipe that wakes kazoo's connection thread for a request."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def ready(handler: Handler, reading: list[Any], writing: Any = (), timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
    can_read, can_write, _ = handler.select(reading, list(writing), [], timeout)
    return can_read, can_write


@pytest.mark.parametrize("piece", [1, 5, 12, 100])
def test_the_granted_timeout_is_known_only_with_its_last_byte(
    pair: tuple[_Buffered, socket.socket], piece: int
) -> None:
    ours, theirs = pair
    for start in range(0, 12, piece):
        assert ours.granted is None
        theirs.sendall(GREETING[start : start + piece])
        ours.recv(100)
    assert ours.granted == 6.0


def test_replies_that_arrived_together_are_read_without_waiting(
    pair: tuple[_Buffered, socket.socket], pipe: tuple[socket.socket, socket.socket], handler: Handler
) -> None:
    """kazoo would wait for the socket between two replies, although the second one has arrived."""
    (ours, theirs), (requests, _) = pair, pipe
    theirs.sendall(b"first!second")
    assert ready(handler, [ours, requests], timeout=5.0) == ([ours], [])
    assert (ours.recv(6), ours.pending()) == (b"first!", 6)
    assert ready(handler, [ours, requests], timeout=60.0) == ([ours], [])
    assert ready(handler, [ours], timeout=60.0) == ([ours], [])
    assert (ours.recv(4), ours.recv(100), ours.pending()) == (b"seco", b"nd", 0)
    assert ready(handler, [ours, requests]) == ([], [])


def test_unread_replies_do_not_block_a_request(
    pair: tuple[_Buffered, socket.socket], pipe: tuple[socket.socket, socket.socket], handler: Handler
) -> None:
    (ours, theirs), (requests, end) = pair, pipe
    theirs.sendall(b"first!second")
    ours.recv(6)
    end.send(b"\0")
    assert ready(handler, [ours, requests], timeout=60.0) == ([ours, requests], [])


def test_the_data_read_equals_the_data_sent_even_in_several_parts(
    pair: tuple[_Buffered, socket.socket],
) -> None:
    ours, theirs = pair
    sent = bytes(number % 251 for number in range(300_000))
    threading.Thread(target=theirs.sendall, args=(sent,), daemon=True).start()
    said = b""
    while len(said) < len(sent):
        said += ours.recv(min(100_000, len(sent) - len(said)))
    assert said == sent


def test_a_closed_connection_can_be_read_and_reports_its_end(
    pair: tuple[_Buffered, socket.socket], handler: Handler
) -> None:
    ours, theirs = pair
    theirs.sendall(b"last")
    theirs.close()
    assert ready(handler, [ours], timeout=5.0) == ([ours], [])
    assert (ours.recv(100), ours.pending()) == (b"last", 0)
    assert ready(handler, [ours], timeout=5.0) == ([ours], [])
    assert ours.recv(100) == b""


@pytest.mark.parametrize("options", [{"ca": "/missing"}, {"certfile": "/missing"}, {"check_hostname": True}])
def test_no_connection_stays_open_if_tls_cannot_begin(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    connect = socket.create_connection

    def record(*args: Any) -> socket.socket:
        opened.append(connect(*args))
        return opened[-1]

    monkeypatch.setattr(socket, "create_connection", record)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises((OSError, ValueError)):
            dial(server.getsockname(), 5.0, {"use_ssl": True, **options})
        assert all(each.fileno() == -1 for each in opened)


def test_a_wait_ends_after_its_time_and_not_before(pair: tuple[_Buffered, socket.socket], handler: Handler) -> None:
    ours, _ = pair
    for _ in range(10):
        began = now()
        assert ready(handler, [ours], timeout=0.0009) == ([], [])
        assert now() - began >= 0.0009  # if it returned earlier, kazoo would call it again at once
    assert ready(handler, [], [ours], timeout=5.0) == ([], [ours])


def test_a_watch_reports_on_the_reading_thread_and_its_exceptions_stay_there(handler: Handler) -> None:
    told: list[int] = []

    def fail() -> None:
        raise ValueError("a mistake of ours")

    handler.dispatch_callback(Callback("watch", fail, ()))
    handler.dispatch_callback(Callback("watch", lambda: told.append(threading.get_ident()), ()))
    assert told == [threading.get_ident()]
