"""Attempts that an asyncio client sends together in one request, when that request fails in some way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

import multilock
from multilock import AsyncClient, AsyncLease, ClientClosed
from multilock.model import Claim
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import inner
from tests.backends.redis.kit import Bare, eventually, holder_of
from tests.servers import RedisServer

LIMIT = 20.0  # seconds to wait at most, on an overloaded machine

Waiters = list[asyncio.Task[AsyncLease]]


def run(main: Callable[[], Awaitable[Any]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(3 * LIMIT):
            await main()

    asyncio.run(limited())


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while not ready():  # noqa: ASYNC110 - no event reports a change of the server's data
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[AsyncClient]:
    async with multilock.connect_async(url, **{"ttl": 30.0, "request_timeout": 10.0, **options}) as client:
        await (await client.lock("b").acquire()).release()  # this loads the scripts into the server
        yield client


@contextlib.contextmanager
def no_turns(client: AsyncClient) -> Iterator[None]:
    """Allow no separate attempts inside the block, so that the client sends further first attempts together."""
    turns: Any = client._kernel.face._turns  # type: ignore[attr-defined]
    free, turns.free = turns.free, 0
    try:
        yield
    finally:
        turns.free += free


async def waiters(client: AsyncClient, number: int = 3, sent: Callable[[], object] = lambda: None) -> Waiters:
    """Start tasks that wait for "a", and whose attempts are sent in one request. ``sent()`` is called once that request
    was passed to a thread."""
    batches: Any = client._kernel.face._batches  # type: ignore[attr-defined]
    send, together = batches._send, []

    def noted(claims: Sequence[Claim], end: float) -> Any:
        together.append(len(claims))
        answer = send(claims, end)
        sent()
        return answer

    batches._send = noted
    with no_turns(client):
        tasks = [asyncio.create_task(client.lock("a", fair=True).acquire()) for _ in range(number)]
        await until(lambda: together)
    batches._send = send
    assert together == [number]
    return tasks


async def served(tasks: Waiters) -> None:
    """Check that all waiters get the lock, one after the other."""
    rest = set(tasks)
    while rest:
        done, rest = await asyncio.wait(rest, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
        [task] = done
        lease = await task
        assert lease.is_held()
        await asyncio.sleep(0)
        assert not any(other.done() for other in rest)
        assert await lease.release()


async def cancelled(tasks: Waiters) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task


def executed(bare: Bare) -> int:
    """Return how many scripts the server has executed."""
    found: int = bare.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    return found


def nothing_left(server: RedisServer) -> bool:
    """Return whether the lock has no holder and no waiter."""
    with multilock.connect(server.url) as other:
        lease = other.lock("a", fair=True).try_acquire()
        return lease is not None and lease.release()


@pytest.mark.parametrize("then", ["cut", "hold"])
def test_waiters_whose_common_reply_is_lost_are_served_one_by_one(
    server: RedisServer, proxy: FaultProxy, then: Any
) -> None:
    async def main() -> None:
        async with client(proxy.url, request_timeout=0.5) as ours:
            lost = proxy.drop_reply(b"multilock/a", then=then)
            tasks = await waiters(ours)
            await until(lambda: lost.happened)
            await served(tasks)
            await until(lambda: nothing_left(server))

    run(main)


def test_a_grant_of_a_request_held_up_on_its_way_counts_from_the_sending(proxy: FaultProxy) -> None:
    async def main() -> None:
        async with client(proxy.url, ttl=5.0) as ours:
            held = proxy.hold_request(b"multilock/a")
            tasks = await waiters(ours, 1)
            await until(lambda: held.happened)
            sent_by = multilock.now()
            await asyncio.sleep(0.3)
            held.release()
            [lease] = await asyncio.gather(*tasks)
            assert inner(lease).granted.sent_at <= sent_by
            assert lease.remaining() <= 4.5 - 0.3

    run(main)


def test_a_common_reply_that_a_blocked_loop_reads_late_counts_from_the_sending(proxy: FaultProxy, bare: Bare) -> None:
    executed_by: list[float] = []

    def blocked() -> None:
        eventually(lambda: holder_of(bare), LIMIT)
        executed_by.append(multilock.now())
        time.sleep(0.3)

    async def main() -> None:
        async with client(proxy.url, ttl=5.0) as ours:
            tasks = await waiters(ours, 1, blocked)
            [lease] = await asyncio.gather(*tasks)
            assert inner(lease).granted.sent_at <= executed_by[0]
            assert lease.remaining() <= 4.5 - 0.3

    run(main)


@pytest.mark.parametrize("late", [True, False], ids=["request late", "reply lost"])
@pytest.mark.parametrize("number", [1, 3])
def test_waiters_cancelled_during_a_common_request_take_nothing(
    server: RedisServer, proxy: FaultProxy, bare: Bare, late: bool, number: int
) -> None:
    async def main() -> None:
        async with client(proxy.url, request_timeout=0.5) as ours:
            before = executed(bare)
            way = proxy.hold_request(b"multilock/a") if late else proxy.drop_reply(b"multilock/a", then="hold")
            tasks = await waiters(ours)
            await until(lambda: way.happened)
            await cancelled(tasks[:number])
            if late:
                way.release()
            # The attempts and their cancels were executed.
            await until(lambda: executed(bare) >= before + len(tasks) + number)
            await served(tasks[number:])
            await until(lambda: nothing_left(server))

    run(main)


@pytest.mark.parametrize("late", [True, False], ids=["request late", "reply lost"])
def test_a_client_closed_during_a_common_request_leaves_nothing(
    server: RedisServer, proxy: FaultProxy, bare: Bare, late: bool
) -> None:
    async def main() -> None:
        async with client(proxy.url, request_timeout=2) as ours:
            way = proxy.hold_request(b"multilock/a") if late else proxy.drop_reply(b"multilock/a", then="hold")
            tasks = await waiters(ours)
            await until(lambda: way.happened)
        for task in tasks:
            with pytest.raises(ClientClosed):
                await task
        if late:
            before = executed(bare)
            way.release()
            await until(lambda: executed(bare) >= before + len(tasks))
        await until(lambda: nothing_left(server))

    run(main)


def test_a_client_closed_during_a_common_request_that_ends_late_leaves_nothing(
    server: RedisServer, proxy: FaultProxy, bare: Bare
) -> None:
    """A busy machine runs the thread of the request only some time after its timeout."""

    async def main() -> None:
        async with client(proxy.url, request_timeout=1) as ours:
            batches: Any = ours._kernel.face._batches  # type: ignore[attr-defined]
            send = batches._send

            async def late(answer: asyncio.Future[Any]) -> Any:
                await asyncio.wait([answer])
                await asyncio.sleep(0.5)
                return answer.result()

            batches._send = lambda claims, end: asyncio.ensure_future(late(send(claims, end)))
            way = proxy.hold_request(b"multilock/a")
            tasks = await waiters(ours)
            await until(lambda: way.happened)
        for task in tasks:
            with pytest.raises(ClientClosed):
                await task
        before = executed(bare)
        way.release()
        await until(lambda: executed(bare) >= before + len(tasks))
        await until(lambda: nothing_left(server))

    run(main)
