"""The body of an ``async with``, which is cancelled when the lease is lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from multilock.kernel.holding import AnyHeld

__all__ = ["Body"]


class Body:
    """The body of one ``async with``. Its task is cancelled when the lease is lost, as `asyncio.timeout` cancels a
    task."""

    __slots__ = ("_before", "_cancelled", "_lease", "_loop", "_task")

    def __init__(self, lease: AnyHeld) -> None:
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "async with runs in a task"
        self._task: asyncio.Task[Any] | None = task
        self._before = task.cancelling()
        self._cancelled = False

    def watch(self) -> None:
        """Cancel the body when the lease is lost, or soon if it is lost already."""
        if not self._lease._at_end(self._tell):
            # Cancel the body by a call that the loop makes later. A task that is cancelled while it runs receives the
            # cancellation at its next await, which may come after the body.
            self._tell()

    def _tell(self) -> None:
        """Have the loop cancel the body. Called by the thread that ended the lease, which can be any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the body has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._cancelled and self._lease._loss_for_the_body():
            self._cancelled = True
            self._task.cancel()

    def end(self, error: BaseException | None) -> bool:
        """Return True if ``error`` is the cancellation by this body, and nobody else cancelled the task as well."""
        self._lease._not_at_end(self._tell)
        task, self._task = self._task, None
        if not self._cancelled or task is None:
            return False
        return task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError)
