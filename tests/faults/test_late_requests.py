"""A request that is executed after its caller has given up, or even after its cancel, must acquire nothing."""

from __future__ import annotations

import asyncio

import pytest

from multilock import BackendUnavailable, Client, now
from multilock.testing.conformance.base import eventually
from multilock.testing.conformance.faces import AsyncioFace
from tests.faults.conftest import Connect, Operator
from tests.servers import RedisServer

KEY = "multilock/n"


@pytest.mark.parametrize("timeout", [0, 0.3])
def test_an_acquire_at_a_frozen_server_leaves_no_orphaned_lock(
    connect: Connect, redis_server: RedisServer, operator: Operator, timeout: float
) -> None:
    client = connect(ttl=2.0)
    with redis_server.paused(), pytest.raises(BackendUnavailable):
        client.lock("n", ttl=6.0).try_acquire(timeout=timeout)
    _nothing_is_taken(operator)


@pytest.mark.parametrize("face", ["asyncio"], indirect=True)
def test_a_cancelled_task_leaves_no_orphaned_lock_at_a_frozen_server(
    face: AsyncioFace, connect: Connect, redis_server: RedisServer, operator: Operator
) -> None:
    client = connect(ttl=2.0)

    async def give_up(client: Client) -> None:
        target = client._target.lock("n", ttl=6.0)  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await target.acquire()

    with redis_server.paused():
        face.run(give_up(client))
    _nothing_is_taken(operator)


def test_a_release_at_a_frozen_server_frees_the_lock_when_the_server_resumes(
    connect: Connect, redis_server: RedisServer, operator: Operator
) -> None:
    lease = connect(ttl=2.0).lock("n", ttl=6.0).acquire(timeout=5)
    with redis_server.paused():
        began = now()
        assert lease.release()  # the release continues in the background
        assert now() - began < 2.0
        assert not lease.is_held()
    _nothing_is_taken(operator)


def test_a_release_after_max_hold_at_a_frozen_server_frees_the_lock_when_it_resumes(
    connect: Connect, redis_server: RedisServer, operator: Operator
) -> None:
    lease = connect(ttl=2.0).lock("n", ttl=12.0, max_hold=1.2).acquire(timeout=5)
    assert lease.wait_lost(timeout=20)
    with redis_server.paused():
        began = now()
        assert not lease.release()  # the release continues in the background
        assert now() - began < 2.0
    eventually(lambda: operator.get(KEY) is None)  # the release frees the lock long before its ttl would


def _nothing_is_taken(operator: Operator) -> None:
    """Check that the cancel is final: once its tombstone exists, no request of that id ever acquires the lock."""
    eventually(lambda: operator.keys("*:gone:*"))
    assert operator.get(KEY) is None
    assert operator.exists("{multilock/n}:queue") == 0
