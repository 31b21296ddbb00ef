"""Run those tests of the asyncio API that depend on the event loop on uvloop.

The event loop uvloop is written in C. It checks descriptors that asyncio's own loop does not check, and runs coroutines
under other stack frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvloop

from multilock import AsyncLease, LockLost, connect_async
from multilock.testing import FaultProxy, conformance
from multilock.testing.conformance.faces import AsyncioFace
from tests.backends.redis.descriptors import its_number_is_free
from tests.conformance.consul import Consul
from tests.conformance.etcd import Etcd
from tests.conformance.places import Memory, Redis, Sqlite
from tests.conformance.postgresql import Postgresql
from tests.conformance.redlock import Redlock
from tests.conformance.zookeeper import ZooKeeper
from tests.servers import RedisServer


class OnUvloop:
    @pytest.fixture
    def face(self) -> Iterator[AsyncioFace]:
        face = AsyncioFace(uvloop.new_event_loop)
        yield face
        face.close()


class TestMemory(OnUvloop, conformance.CancelConformance):
    backend = Memory


class TestSqlite(OnUvloop, conformance.CancelConformance):
    backend = Sqlite


class TestRedis(OnUvloop, conformance.CancelConformance):
    backend = Redis


class TestRedlock(OnUvloop, conformance.CancelConformance):
    backend = Redlock


class TestPostgresql(OnUvloop, conformance.CancelConformance):
    backend = Postgresql


class TestConsul(OnUvloop, conformance.CancelConformance):
    backend = Consul


class TestEtcd(OnUvloop, conformance.CancelConformance):
    backend = Etcd


class TestZooKeeper(OnUvloop, conformance.CancelConformance):
    backend = ZooKeeper


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(main, 20))


@pytest.mark.parametrize("ends", ["in the answer", "before the request", "while it is idle"])
def test_a_closed_descriptor_is_unregistered_before_a_connection_can_reuse_its_number(
    redis_server: RedisServer, ends: str
) -> None:
    with FaultProxy.before(redis_server.url) as proxy:
        run(its_number_is_free(proxy, ends))


@pytest.mark.parametrize("by", ["generator", "hand"])
def test_an_async_with_block_that_ends_in_another_task_ends_its_own_lease(by: str) -> None:
    async def main() -> None:
        async with connect_async("memory://uvloop") as client:
            lock = client.lock("n")

            async def hold() -> AsyncIterator[AsyncLease]:
                async with lock as lease:
                    yield lease

            async def begin() -> tuple[AsyncIterator[AsyncLease], AsyncLease]:
                generator = hold()
                return generator, await (anext(generator) if by == "generator" else lock.__aenter__())

            async def end(generator: AsyncIterator[AsyncLease]) -> None:
                await (anext(generator, None) if by == "generator" else lock.__aexit__(None, None, None))

            first, lost = await asyncio.create_task(begin())
            await client.force_release("n")
            assert await lost.wait_lost(5)
            second, held = await asyncio.create_task(begin())
            with pytest.raises(LockLost):
                await asyncio.create_task(end(first))
            assert held.is_held()
            await asyncio.create_task(end(second))
            assert not held.is_held()

    run(main())
