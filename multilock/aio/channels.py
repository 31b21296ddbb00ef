"""Channels: connections that the event loop itself writes and reads, without a thread in between.

Only some backends offer them. `Turns` limits how many requests are under way at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, cast

from multilock.backend import Channel, Lingers, OpensChannels
from multilock.errors import BackendRejected, BackendUnavailable

if TYPE_CHECKING:
    from multilock.backend import Backend

__all__ = ["Channels", "Kind", "LoopChannel", "Turns"]

MOST = 4  # channels of one client; while all are in use, further requests go through threads
PATIENT = 4  # every fourth turn goes to a waiting CROWDED or HEARTBEAT request, even if other requests wait


class Kind(IntEnum):
    """The kinds of requests, in the order in which they get their turns."""

    RELEASE = 0
    FIRST = 1
    CROWDED = 2  #: a first attempt while another first attempt of this client for the same name is under way
    HEARTBEAT = 3


class Turns:
    """A limit for the requests under way, with a queue for each kind of request that has to wait for its turn.

    Releases come first, because each one frees a name. The first attempt of an acquire() comes before heartbeats, by
    which waiters keep their places in the server's queue. So a first attempt for a free lock does not wait behind many
    attempts for another name.
    """

    def __init__(self, free: int) -> None:
        self.free = free  #: turns that nobody has taken
        self._given = 0
        self._lines = tuple(deque[asyncio.Future[Any]]() for _ in Kind)
        self._last = deque((self._lines[Kind.HEARTBEAT], self._lines[Kind.CROWDED]))

    def take(self) -> bool:
        """Take a turn if one is free. Returns False otherwise."""
        if not self.free:
            return False
        self.free -= 1
        return True

    def wait(self, turn: asyncio.Future[Any], kind: Kind) -> None:
        """Queue ``turn``, a future whose result is set when its turn comes. A caller that gives up cancels ``turn``, or
        sets its exception."""
        self._lines[kind].append(turn)

    def waiting(self, kind: Kind) -> int:
        """Return how many requests of a kind wait for their turns."""
        return sum(not turn.done() for turn in self._lines[kind])

    def give_back(self) -> None:
        """End a turn, and give it to the next request in the queues."""
        self._given += 1
        lines: Iterable[deque[asyncio.Future[Any]]] = self._lines
        if self._given % PATIENT == 0:
            lines = *self._last, *lines
            self._last.rotate()
        for line in lines:
            while line:
                turn = line.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self.free += 1


class Channels:
    """The channels of one client on one loop. Only that loop uses this class, except for `open`."""

    def __init__(self, backend: Backend) -> None:
        self.offered = isinstance(backend, OpensChannels)  #: whether channels may be opened
        self._backend = backend
        self.living: set[LoopChannel] = set()
        self.idle: list[LoopChannel] = []
        self.opening = 0
        # Channels that a thread has opened but not yet passed to the loop. The loop may close before it gets them.
        self._unclaimed: set[Channel] = set()

    def may_open(self) -> bool:
        """Return whether another channel may be opened."""
        return self.offered and len(self.living) + self.opening < MOST

    def open(self, within: float) -> Channel | None:
        """Open a channel in a thread, because connecting may block. The caller passes it to `add` or to `drop`."""
        channel = cast("OpensChannels", self._backend).channel(within)
        if channel is not None:
            self._unclaimed.add(channel)
            if not self.offered:  # `end` was called meanwhile
                self.drop(channel)
                return None
        return channel

    def drop(self, channel: Channel | None) -> None:
        """Close a channel that `open` returned, because it is not needed."""
        if channel is not None:
            self._unclaimed.discard(channel)
            channel.close()

    def add(self, loop: asyncio.AbstractEventLoop, channel: Channel | None) -> LoopChannel | None:
        """Have ``loop`` read the channel. Returns None if this server or this loop cannot have channels."""
        if channel is not None:
            try:
                living = LoopChannel(self, loop, channel)
            except NotImplementedError:  # a loop that cannot watch sockets, as on Windows
                self.drop(channel)
            else:
                self._unclaimed.discard(channel)
                self.living.add(living)
                return living
        self.end()
        return None

    def end(self) -> None:
        """Stop opening channels."""
        self.offered = False

    def close(self) -> None:
        """Close all channels."""
        for channel in list(self.living):
            channel.close()
        for unclaimed in list(self._unclaimed):
            self.drop(unclaimed)


class LoopChannel:
    """One channel, which the loop reads whenever data arrives."""

    __slots__ = ("_answer", "_channel", "_channels", "_fileno", "_lingers", "_look_at", "_loop", "_timer")

    def __init__(self, channels: Channels, loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
        self._channels = channels
        self._loop = loop
        self._channel = channel
        self._fileno = channel.fileno()
        self._answer: asyncio.Future[Any] | None = None  # receives the answer to the request under way
        self._lingers = channel if isinstance(channel, Lingers) else None
        self._timer: asyncio.TimerHandle | None = None  # reads the channel even if no data arrives
        self._look_at = 0.0  # the time of the planned read, by the loop's clock
        loop.add_reader(self._fileno, self._read)

    async def ask(self, send: Callable[[Channel], bool], answer: asyncio.Future[Any]) -> Any:
        """Send a request and return the result of `Channel.answer`. Returns None if ``send`` could not send it.

        ``send`` calls one of the request methods of `Channel`. If the wait for ``answer`` is cancelled or takes too
        long, the channel is closed, because a late answer must not be taken for the answer to the next request.
        """
        try:
            if not send(self._channel):
                self.close()
                return None
            self._answer = answer
            self._plan()
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
        if answer is None or answer.done():  # no request is under way, so the server has probably closed the connection
            if self._lingers and self._lingers.idle():
                self._plan()
            else:
                self.close()
            return
        try:
            answer.set_result(self._channel.answer())
        except BlockingIOError:
            self._plan()
        except BackendRejected as error:
            answer.set_exception(error)
        except Exception as error:
            answer.set_exception(error)
            self.close()  # closed at once, because the loop would find a broken connection readable again and again

    def _plan(self) -> None:
        """Plan a read without new data, if the channel wants one (`Lingers`).

        If a read is already planned for an earlier time, it stays, and plans the next read itself if necessary.
        """
        if self._lingers is None or (seconds := self._lingers.look_in()) is None:
            return
        at = self._loop.time() + seconds
        if self._timer:
            if self._look_at <= at:
                return
            self._timer.cancel()
        self._look_at = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        """Read the channel at the planned time."""
        self._timer = None
        self._read()

    def _rest(self) -> None:
        """Make the channel available for the next request."""
        self._answer = None
        self._plan()
        if self in self._channels.living:  # the channel may have been closed since the answer came
            self._channels.idle.append(self)

    def close(self) -> None:
        """Close the channel. A request under way fails with BackendUnavailable."""
        channels = self._channels
        if self not in channels.living:
            return
        channels.living.discard(self)
        if self in channels.idle:
            channels.idle.remove(self)
        if not self._loop.is_closed():
            # Stop watching first: once the channel is closed, another connection can get the same descriptor.
            self._loop.remove_reader(self._fileno)
            if self._timer:
                self._timer.cancel()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(BackendUnavailable("the connection was closed meanwhile"))
        self._channel.close()
