"""Check that an event loop (asyncio's own or uvloop) no longer watches the descriptor of an ended connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

import multilock
from multilock import BackendUnavailable
from multilock.testing import FaultProxy

__all__ = ["its_number_is_free"]


class Successor:
    """Another connection of the program. It gets the number of multilock's descriptor at the moment when multilock
    closes that descriptor."""

    def __init__(self, line: Any) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._connection = line._channel._wire._connection
        self._disconnect = self._connection.disconnect
        self._fileno: int = line._channel.fileno()
        self._connection.disconnect = self._succeed
        self.heard = asyncio.Event()

    def _succeed(self) -> None:
        self._disconnect()
        if self._connection.disconnect == self._succeed:
            self._connection.disconnect = self._disconnect
            os.dup2(self._ours.fileno(), self._fileno)
            asyncio.get_running_loop().add_reader(self._fileno, self.heard.set)

    async def hears(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)  # let the loop handle the pending events of our connection
        self._theirs.send(b"for the successor")
        async with asyncio.timeout(2):
            await self.heard.wait()
        asyncio.get_running_loop().remove_reader(self._fileno)
        os.close(self._fileno)
        self._ours.close()
        self._theirs.close()


async def its_number_is_free(proxy: FaultProxy, ends: str) -> None:
    """Check that the loop reports data on the next connection that gets the number of multilock's descriptor."""
    async with multilock.connect_async(proxy.url, ttl=2.0, request_timeout=1.0) as client:
        await (await client.lock("a").acquire()).release()
        face: Any = client._kernel.face
        [line] = face._channels.living
        successor = Successor(line)
        if ends == "in the answer":
            proxy.drop_reply(b"multilock/a", then="cut")
            with contextlib.suppress(BackendUnavailable):
                await client.lock("a").try_acquire()
        elif ends == "before the request":
            line._channel._wire._sock.shutdown(socket.SHUT_RDWR)
            assert await client.lock("b").try_acquire()
        else:
            proxy.cut()
        await successor.hears()
        assert await client.lock("c").try_acquire()
