"""Requests that the loop itself sends and reads, where the backend opens channels for it: no thread in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multilock.backend import Channel, OpensChannels
from multilock.errors import BackendRejected, BackendUnavailable

if TYPE_CHECKING:
    from multilock.backend import Backend

__all__ = ["Channels", "Line"]

LINES = 4  # what is asked while all are in use goes through a thread


class Channels:
    """The lines of one client on one loop. Used by that loop only."""

    def __init__(self, backend: Backend) -> None:
        # The method of a channel for one of the backend; none where there are no channels.
        self.sends: dict[Callable[..., Any], str] = {}
        if isinstance(backend, OpensChannels):
            self.sends = {backend.attempt: "attempt", backend.release: "release"}
        self.lines: set[Line] = set()
        self.idle: list[Line] = []
        self.opening = 0

    def may_open(self) -> bool:
        return len(self.lines) + self.opening < LINES

    def add(self, loop: asyncio.AbstractEventLoop, channel: Channel | None) -> Line | None:
        """None: this server, or this loop, has no channels."""
        if channel is not None:
            try:
                line = Line(self, loop, channel)
            except NotImplementedError:  # a loop that cannot watch sockets, as on Windows
                channel.close()
            else:
                self.lines.add(line)
                return line
        self.sends = {}
        return None

    def close(self) -> None:
        for line in list(self.lines):
            line.close()


class Line:
    """One channel, read whenever the loop finds something on it."""

    __slots__ = ("_answer", "_channel", "_channels", "_fileno", "_loop")

    def __init__(self, channels: Channels, loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
        self._channels = channels
        self._loop = loop
        self._channel = channel
        self._fileno = channel.fileno()
        self._answer: asyncio.Future[Any] | None = None  # of the request under way
        loop.add_reader(self._fileno, self._read)

    async def ask(self, send: str, args: tuple[Any, ...], answer: asyncio.Future[Any]) -> Any:
        """What `Channel.answer` gives; None also where it could not be sent.

        Whatever ends the wait for ``answer``, also a time limit or a cancellation, ends the channel with it.
        """
        try:
            if not getattr(self._channel, send)(*args):
                self.close()
                return None
            self._answer = answer
            result = await answer
        except BackendRejected:
            self._rest()
            raise
        except BaseException:
            self.close()
            raise
        self._rest()
        return result

    def _read(self) -> None:
        answer = self._answer
        if answer is None or answer.done():  # nobody asked: as a rule it is the server's end of the connection
            self.close()
            return
        try:
            answer.set_result(self._channel.answer())
        except BlockingIOError:
            pass
        except BackendRejected as error:
            answer.set_exception(error)
        except Exception as error:
            answer.set_exception(error)
            self.close()  # now: a broken connection would be found readable for ever, or its number be another's

    def _rest(self) -> None:
        self._answer = None
        if self in self._channels.lines:  # it may have ended since the answer came
            self._channels.idle.append(self)

    def close(self) -> None:
        channels = self._channels
        if self not in channels.lines:
            return
        channels.lines.discard(self)
        if self in channels.idle:
            channels.idle.remove(self)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fileno)  # before its number can be another's
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(BackendUnavailable("the connection was closed meanwhile"))
        self._channel.close()
