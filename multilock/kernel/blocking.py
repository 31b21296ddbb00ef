"""`BlockingFace`: how the blocking API sends requests, waits for a wake-up, and runs callbacks.

The blocking and the asyncio API are called the two faces of a client. `Face` is the interface of both. The asyncio face
is in `multilock.aio.requests`. A claim is the demand of one caller for one name. A bell wakes the thread or the
coroutine that waits for the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from multilock.kernel.callbacks import Callbacks, ThreadCallbacks
from multilock.kernel.inside_backend import call_inside, check_outside
from multilock.kernel.runtime import Bell
from multilock.model import Busy, Claim, Granted, Returned

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.runtime import Runtime, ThreadBell

__all__ = ["NOT_SENT", "BlockingFace", "Face", "NotAsked", "WaiterBell", "run"]

R = TypeVar("R")

NOT_SENT = "the request was not sent, because too many requests of this client are under way"


class NotAsked(Busy):
    """The result of an attempt that was not sent, although the backend answers other claims.

    If an earlier request took a place in the queue, the claim keeps it.
    """

    __slots__ = ()


class WaiterBell(Bell, Protocol):
    """The bell of a coroutine that waits."""

    async def wait(self, seconds: float) -> None:
        """Wait for a ring, at most ``seconds``, which may be inf."""


class Face(Protocol):
    """The interface of a face: its way to send requests, to wait, and to run callbacks. Every request ends within
    ``within`` seconds, with the backend's answer or exception."""

    asynchronous: bool
    callbacks: Callbacks

    async def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """See `Backend.attempt`."""
        ...

    async def release(self, claim: Claim, granted: Granted, unsure: bool, within: float) -> Returned:
        """See `Backend.release`."""
        ...

    async def ask(self, within: float, call: Callable[..., R], *args: Any) -> R:
        """Send any other request: return the result of ``call(*args, within)``."""
        ...

    def bell(self) -> WaiterBell:
        """Make a bell for a coroutine of this face."""
        ...

    def forget_closed_loop(self) -> None:
        """Have the kernel drop the calls that ran on an event loop that was closed, because their coroutines never run
        again."""

    def abandoned(self) -> Sequence[str]:
        """Return the ids of the claims whose waiters never run again, because their event loop was closed.

        The ticking thread, which watches deadlines, calls this. Otherwise a client that is not used again would keep
        the places of these waiters in a queue for as long as it renews its session.
        """
        ...

    def close(self) -> None:
        """End the threads of the face. No request follows."""
        ...


def run(coroutine: Coroutine[Any, Any, R]) -> R:
    """Drive a coroutine of the blocking face, whose awaitables never suspend, to its end in this thread."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: R = stop.value
        return result
    raise RuntimeError("a blocking coroutine suspended")  # pragma: no cover


class BlockingFace:
    """The blocking face. Requests and waits happen in the calling thread."""

    asynchronous = False

    def __init__(self, kernel: Kernel) -> None:
        self._backend = kernel.backend
        self._runtime = kernel.runtime
        self._own = ThreadCallbacks(kernel.runtime, kernel.timers)
        self.callbacks: Callbacks = self._own

    async def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return call_inside(self._backend.attempt, claim, join, within)

    async def release(self, claim: Claim, granted: Granted, unsure: bool, within: float) -> Returned:
        return call_inside(self._backend.release, claim, granted, unsure, within)

    async def ask(self, within: float, call: Callable[..., R], *args: Any) -> R:
        check_outside()
        return call_inside(call, *args, within)

    def bell(self) -> WaiterBell:
        return _BlockingBell(self._runtime)

    def forget_closed_loop(self) -> None:
        pass  # the blocking face has no loop

    def abandoned(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        self._own.close()


class _BlockingBell:
    """A `WaiterBell` for a thread. The first wait makes the real bell, because most acquires never wait."""

    __slots__ = ("_bell", "_rung", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rung = False
        self._bell: ThreadBell | None = None

    def ring(self) -> None:
        self._rung = True
        if bell := self._bell:
            bell.ring()

    async def wait(self, seconds: float) -> None:
        bell = self._bell
        if bell is None:
            bell = self._bell = self._runtime.bell()
        if not self._rung:  # checked only after ring() can see the bell, so that no ring is missed
            bell.wait(seconds)
        self._rung = False
