"""A proxy in front of the server repeats and splits replies, sends errors, and forgets connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import multilock
from multilock import now
from multilock.errors import BackendUnavailable
from multilock.model import Busy, Granted
from multilock.testing import FaultProxy
from multilock_redis.connections import Connections
from multilock_redis.transport import Wire
from multilock_redis.wire import pack
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, eventually, holder_of
from tests.servers import RedisServer

Mangle = Callable[[bytes], list[bytes]]
PAUSE = 0.02  # seconds between two pieces of a reply


class Mangler:
    """A proxy that forwards requests unchanged, and passes each reply to ``mangle``. It sends each piece that
    ``mangle`` returns separately."""

    def __init__(self, server: RedisServer) -> None:
        self.mangle: Mangle | None = None
        self.done = threading.Event()  # set when all pieces of a reply were sent
        self._target = server.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sides: list[socket.socket] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for side in self._sides:
            with suppress(OSError):
                # wakes the thread that waits in recv(), so that the connection is closed
                side.shutdown(socket.SHUT_RDWR)
            side.close()

    def once(self, first: bytes, mangle: Mangle) -> None:
        """Use ``mangle`` only for the next reply that begins with ``first``."""

        def only_once(data: bytes) -> list[bytes]:
            if not data.startswith(first):
                return [data]
            self.mangle = None
            return mangle(data)

        self.mangle = only_once

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sides += [client, server]
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, here: socket.socket, there: socket.socket, down: bool) -> None:
        with suppress(OSError):
            while data := here.recv(65536):
                pieces = self.mangle(data) if down and self.mangle else [data]
                for i, piece in enumerate(pieces):
                    if i:
                        time.sleep(PAUSE)
                    there.sendall(piece)
                if len(pieces) > 1 or self.mangle is None:
                    self.done.set()
        with suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def mangler(server: RedisServer) -> Iterator[Mangler]:
    mangler = Mangler(server)
    yield mangler
    mangler.close()


def twice_at_once(data: bytes) -> list[bytes]:
    return [data + data]


def twice_in_pieces(data: bytes) -> list[bytes]:
    return [data, data]


@pytest.mark.parametrize("twice", [twice_at_once, twice_in_pieces])
def test_a_duplicated_reply_grants_no_other_lock(connect: Connect, mangler: Mangler, twice: Mangle) -> None:
    us, them = connect(mangler.url), connect()
    us.release(us.take()[0])
    them.take(them.claim("b"))
    mangler.once(b":", twice)
    us.take()
    [wire] = us.backend._node.connections._idle
    eventually(wire.stale)
    assert isinstance(us.attempt(us.claim("b")), Busy)


def test_a_reply_right_behind_another_grants_no_other_lock(connect: Connect, mangler: Mangler) -> None:
    """The client looks for unexpected bytes even if it used the connection a moment ago."""
    us, them = connect(mangler.url), connect()
    us.release(us.take()[0])
    them.take(them.claim("b"))
    mangler.once(b":", twice_in_pieces)
    us.take()
    [wire] = us.backend._node.connections._idle
    eventually(wire.stale)
    wire.used = now()
    assert isinstance(us.attempt(us.claim("b")), Busy)


@pytest.mark.parametrize("twice", [twice_at_once, twice_in_pieces])
def test_a_duplicated_reply_grants_no_other_lock_under_asyncio(
    connect: Connect, mangler: Mangler, twice: Mangle
) -> None:
    them = connect()
    them.take(them.claim("b"))

    async def run() -> object:
        async with multilock.connect_async(mangler.url) as client:
            async with client.lock("warm"):
                pass
            mangler.once(b":", twice)
            mangler.done.clear()
            async with client.lock("x"):
                await asyncio.to_thread(mangler.done.wait, 10)
                return await client.lock("b").try_acquire()

    assert asyncio.run(run()) is None


def test_a_batch_with_one_reply_too_many_renews_nothing(connect: Connect, mangler: Mangler) -> None:
    us = connect(mangler.url)
    held = us.take()
    us.renew(held)
    mangler.once(b"*", twice_at_once)
    with pytest.raises(BackendUnavailable) as caught:
        us.renew(held)
    assert caught.value.unknown is True
    assert all(us.renew(held))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_reply_in_two_pieces_is_parsed_as_one(connect: Connect, mangler: Mangler, size: int) -> None:
    us = connect(mangler.url)
    us.release(us.take()[0])
    mangler.once(b":", lambda data: [data[:size], data[size:]])
    us.take()


def test_a_reply_that_arrives_byte_by_byte_has_the_time_of_one_request(connect: Connect, mangler: Mangler) -> None:
    us = connect(mangler.url)
    us.take()
    us.backend.inspect("a", 5)
    mangler.mangle = lambda data: [data[i : i + 1] for i in range(len(data))]
    started = now()
    with pytest.raises(BackendUnavailable):
        us.backend.inspect("a", 1)
    with pytest.raises(BackendUnavailable):
        us.backend._node.connections.exchange([pack("PING"), pack("INFO")], 1)
    assert now() - started < 4


@pytest.mark.parametrize("said", [b"-ERR Connection timed out\r\n", b"-upstream failure\r\n"])
def test_an_error_of_a_proxy_does_not_prove_that_nothing_was_executed(
    connect: Connect, mangler: Mangler, bare: Bare, said: bytes
) -> None:
    us = connect(mangler.url)
    us.release(us.take()[0])
    claim = us.claim()
    mangler.once(b":", lambda data: [said])
    with pytest.raises(BackendUnavailable) as caught:
        us.take(claim)
    assert caught.value.unknown is True
    assert holder_of(bare) == claim.owner
    us.take(claim)


def test_an_error_of_a_proxy_loses_no_lock_of_an_asyncio_client(mangler: Mangler, bare: Bare) -> None:
    async def run() -> None:
        async with multilock.connect_async(mangler.url) as client:
            async with client.lock("warm"):
                pass
            mangler.once(b":", lambda data: [b"-ERR Connection timed out\r\n"])
            async with client.lock("a").acquire(timeout=10):
                assert holder_of(bare) is not None

    asyncio.run(run())
    assert holder_of(bare) is None


def answered(pool: Connections, number: int) -> list[Wire]:
    """Return ``number`` connections. The proxy has certainly accepted each connection, because each was used for a
    request."""
    wires = [pool._take(5)[0] for _ in range(number)]
    for wire in wires:
        wire.call(pack("PING"), 5)
    return wires


def test_one_dead_connection_closes_all_others_idle_for_as_long(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url, within=0.3)
    pool = us.backend._node.connections
    for wire in answered(pool, 4):
        pool._give(wire)
    proxy.black_hole(which="present")
    with pytest.raises(BackendUnavailable):
        us.attempt(us.claim())
    assert isinstance(us.attempt(us.claim()), Granted)


def test_a_connection_used_since_another_fell_silent_is_kept(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url, within=0.3)
    pool = us.backend._node.connections
    dead, alive = answered(pool, 2)
    [its] = [each for each in proxy.connections if each._client.getpeername() == dead._sock.getsockname()]
    its.black_hole()
    with pytest.raises(BackendUnavailable):
        dead.call(pack("PING"), 0.2)
    alive.call(pack("PING"), 1)
    pool._give(alive)
    us.take()
    assert list(pool._idle) == [alive]


def test_a_request_with_too_little_time_closes_no_connection(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url)
    pool = us.backend._node.connections
    hurried, other = answered(pool, 2)
    proxy.delay(0.1)
    with pytest.raises(BackendUnavailable):
        hurried.call(pack("PING"), 0.01)
    assert not other.stale()
