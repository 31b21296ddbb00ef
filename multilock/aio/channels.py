"""Requests that the loop itself sends and reads, where the backend opens channels for it: no thread in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from multilock.backend import Channel, Lingers, OpensChannels
from multilock.errors import BackendRejected, BackendUnavailable

if TYPE_CHECKING:
    from multilock.backend import Backend

__all__ = ["Channels", "LoopChannel", "Turns"]

MOST = 4  # what is asked while all are in use goes through a thread
PATIENT = 4  # of so many turns one is for who is patient, however many are urgent


class Turns:
    """How many requests are under way at once, and who comes next. What changes something goes before the heartbeats of
    those who have their place already: else a crowd of waiters keeps its own holder from giving the lock back."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._given = 0
        self._urgent: deque[asyncio.Future[Any]] = deque()
        self._patient: deque[asyncio.Future[Any]] = deque()

    def take(self) -> bool:
        """At once, or not."""
        if not self._free:
            return False
        self._free -= 1
        return True

    def wait(self, turn: asyncio.Future[Any], *, urgent: bool) -> None:
        """It is done when it is its turn; who gives up before that has it done otherwise."""
        (self._urgent if urgent else self._patient).append(turn)

    def give_back(self) -> None:
        self._given += 1
        lines = [self._urgent, self._patient]
        for line in lines if self._given % PATIENT else reversed(lines):
            while line:
                turn = line.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1


class Channels:
    """Those of one client on one loop. Used by that loop only, but for `open`."""

    def __init__(self, backend: Backend) -> None:
        self._offered = isinstance(backend, OpensChannels)
        self._backend = backend
        self.living: set[LoopChannel] = set()
        self.idle: list[LoopChannel] = []
        self.opening = 0
        self._unclaimed: set[Channel] = set()  # opened, and the loop may close before it hears of it

    def may_open(self) -> bool:
        return self._offered and len(self.living) + self.opening < MOST

    def open(self, within: float) -> Channel | None:
        """In a thread: connecting may block. What comes of it is for `add`, or for `drop`."""
        channel = cast("OpensChannels", self._backend).channel(within)
        if channel is not None:
            self._unclaimed.add(channel)
            if not self._offered:  # any more
                self.drop(channel)
                return None
        return channel

    def drop(self, channel: Channel | None) -> None:
        if channel is not None:
            self._unclaimed.discard(channel)
            channel.close()

    def add(self, loop: asyncio.AbstractEventLoop, channel: Channel | None) -> LoopChannel | None:
        """None: this server, or this loop, has no channels."""
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
        """No more are opened."""
        self._offered = False

    def close(self) -> None:
        for channel in list(self.living):
            channel.close()
        for unclaimed in list(self._unclaimed):
            self.drop(unclaimed)


class LoopChannel:
    """One channel, read whenever the loop finds something on it."""

    __slots__ = ("_answer", "_channel", "_channels", "_fileno", "_lingers", "_loop", "_timer")

    def __init__(self, channels: Channels, loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
        self._channels = channels
        self._loop = loop
        self._channel = channel
        self._fileno = channel.fileno()
        self._answer: asyncio.Future[Any] | None = None  # of the request under way
        self._lingers = channel if isinstance(channel, Lingers) else None
        self._timer: asyncio.TimerHandle | None = None  # to look though nothing came
        loop.add_reader(self._fileno, self._read)

    async def ask(self, send: Callable[[Channel], bool], answer: asyncio.Future[Any]) -> Any:
        """What `Channel.answer` gives; None also where ``send``, a call of one of its verbs, could not send it.

        Whatever ends the wait for ``answer``, also a time limit or a cancellation, ends the channel with it.
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
        if answer is None or answer.done():  # nobody asked: as a rule it is the server's end of the connection
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
            self.close()  # now: a broken connection would be found readable for ever, or its number be another's

    def _plan(self) -> None:
        """Have a channel that lingers look again though nothing comes."""
        if self._lingers is None:
            return
        if self._timer:
            self._timer.cancel()
        seconds = self._lingers.look_in()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._read)

    def _rest(self) -> None:
        self._answer = None
        self._plan()
        if self in self._channels.living:  # it may have ended since the answer came
            self._channels.idle.append(self)

    def close(self) -> None:
        channels = self._channels
        if self not in channels.living:
            return
        channels.living.discard(self)
        if self in channels.idle:
            channels.idle.remove(self)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fileno)  # before its number can be another's
            if self._timer:
                self._timer.cancel()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(BackendUnavailable("the connection was closed meanwhile"))
        self._channel.close()
