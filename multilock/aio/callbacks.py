"""The callbacks of an asyncio client: each one is passed to the client's event loop, where an ``async def`` runs as a
task. If the loop is closed, or the client was never used on a loop, a warning is logged instead.

This module also runs the background tasks of a client, and starts them again if a program cancels all its tasks.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from multilock.kernel.callbacks import CALLED, call_safely
from multilock.kernel.runtime import Runtime, wait_until
from multilock.log_thread import logger

__all__ = ["LoopCallbacks", "await_safely", "go_on_if_cancelled"]

AGAIN = 0.1  # seconds until a task that was cancelled from outside is started again


def call_on_loop(callback: Callable[..., object], *args: Any) -> object:
    """Call ``callback(*args)`` and log its exception, even a CancelledError that comes from the result of a cancelled
    future."""
    try:
        return call_safely(callback, *args)
    except asyncio.CancelledError:
        logger.exception("the callback %r raised; it is not called again for this event", callback)
        return None


async def await_safely(callback: Callable[..., object], *args: Any) -> None:
    """Call ``callback(*args)`` and await its result if it can be awaited. An exception is logged."""
    result = call_on_loop(callback, *args)
    if inspect.isawaitable(result):
        try:
            await result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            logger.exception("the callback %r cancelled itself", callback)
        except Exception:
            logger.exception("the callback %r raised; it is not called again for this event", callback)


def go_on_if_cancelled(
    coroutine: Coroutine[Any, Any, None],
    name: str,
    again: Callable[[], object],
    ended: Callable[[], object] | None = None,
) -> asyncio.Task[None]:
    """Run ``coroutine`` as a background task, and call ``ended()`` at its end.

    If a program cancels all its tasks and continues, the background task must continue too: ``again()`` is called soon
    afterwards to start it again. If the event loop ends instead, ``again()`` is never called.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)

    def done(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            task.get_loop().call_later(AGAIN, again)
        elif ended:
            ended()

    task.add_done_callback(done)
    return task


class LoopCallbacks:
    """The callbacks of an asyncio client. They run on the client's event loop. A callback that is ``async def`` runs as
    a task.

    While the loop is blocked, no callback runs.
    """

    def __init__(self, its_loop: Callable[[], asyncio.AbstractEventLoop | None], runtime: Runtime) -> None:
        """``its_loop`` returns the client's loop, or None if it has none yet."""
        self._its_loop = its_loop
        self._tasks: set[asyncio.Future[Any]] = set()
        self._runtime = runtime
        self._unfinished: set[object] = set()

    def start(self, callback: Callable[..., object], *args: Any) -> None:
        loop = self._its_loop()
        call = object()
        self._unfinished.add(call)
        try:
            if loop is None:
                raise RuntimeError("this client has not been used on any loop")
            loop.call_soon_threadsafe(self._run, call, callback, args)
        except RuntimeError as error:
            logger.warning("the callback %r cannot run: %s", callback, error)
            self._unfinished.discard(call)

    def gathering(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_each(self, callback: Callable[..., object], following: Callable[[], object | None]) -> None:
        async def call_each() -> None:
            while (argument := following()) is not None:
                await await_safely(callback, argument)

        def begin() -> asyncio.Task[None]:
            return go_on_if_cancelled(call_each(), "multilock-events", lambda: self.start_each(callback, following))

        self.start(begin)

    def wait(self, timeout: float) -> bool:
        """See `Callbacks.wait`. Must not be called on the loop itself, which runs the callbacks."""
        return wait_until(self._runtime, lambda: self._unfinished <= {CALLED.get()}, timeout)

    def drop(self) -> None:
        """Drop the callbacks under way, because their loop was closed and they never end."""
        self._tasks.clear()
        self._unfinished.clear()

    def _run(self, call: object, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        CALLED.set(call)  # set in the context of this call, which is inherited by tasks that the callback creates
        result: object = None
        try:
            result = call_on_loop(callback, *args)
        finally:  # sys.exit() in a callback ends the loop: then no caller may wait for this call
            if not inspect.isawaitable(result):
                self._unfinished.discard(call)
        if not inspect.isawaitable(result):
            return
        task: asyncio.Future[Any] = asyncio.ensure_future(result)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._task_done(call, task, callback))

    def _task_done(self, call: object, task: asyncio.Future[Any], callback: Callable[..., object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("the callback %r raised; it is not called again for this event", callback, exc_info=error)
        self._unfinished.discard(call)
