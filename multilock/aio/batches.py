"""Attempts that are sent together: the heartbeats of many waiters, and first attempts that find no turn free.

An attempt asks the server for a name. A heartbeat is a later attempt, by which a waiter keeps its place in the server's
queue. A turn is the permission to send one request (`multilock.aio.channels.Turns`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from multilock.model import Busy, Claim, Granted

__all__ = ["AT_ONCE", "Batches"]

AT_ONCE = 2  # the most batches under way at once: a batch whose reply is lost must not hold up the next ones
LARGEST = 250  # attempts in one batch: the loop is busy for about ten milliseconds with their results

Results = Sequence[Granted | Busy | Exception]


class Batches:
    """Gathers attempts on one loop and sends them in batches, so that the number of requests depends on the round-trip
    time, and not on the number of waiters.

    ``send(claims, end)`` sends a batch, and returns a future with one result for each claim. ``end`` is on the loop's
    clock.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Sequence[Claim], float], asyncio.Future[Results]],
    ) -> None:
        self._loop = loop
        self._send = send
        self._gathered: dict[asyncio.Future[Any], tuple[Claim, float]] = {}  # attempts that are not sent yet
        self._under_way = 0
        self._planned = False

    def add(self, claim: Claim, end: float, result: asyncio.Future[Any]) -> None:
        """Send an attempt with the next batch. ``result`` is the future that gets the answer. An exception becomes its
        result, and is not raised."""
        self._gathered[result] = claim, end
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._send_next)  # so that attempts of the same moment are sent together

    def drop(self, result: asyncio.Future[Any]) -> bool:
        """Forget an attempt that its caller has given up. Returns True if it had not been sent yet."""
        return self._gathered.pop(result, None) is not None

    def _send_next(self) -> None:
        self._planned = False
        while self._gathered and self._under_way < AT_ONCE:
            futures = list(islice(self._gathered, LARGEST))
            batch = [self._gathered.pop(future) for future in futures]
            self._under_way += 1
            answer = self._send([claim for claim, _ in batch], max(end for _, end in batch))
            answer.add_done_callback(partial(self._answered, futures))

    def _answered(self, futures: Sequence[asyncio.Future[Any]], answer: asyncio.Future[Results]) -> None:
        self._under_way -= 1
        error = answer.exception()
        # Each claim gets its own copy of the exception, because the kernel adds the name of the lock to it.
        results = answer.result() if error is None else [copy.copy(error) for _ in futures]
        for future, result in zip(futures, results, strict=True):
            if not future.done():
                future.set_result(result)
        self._send_next()
