"""How to test a service that uses locks. The tests cause a loss, a silent server and a lost reply on purpose.

    pip install 'multilock[redis]' pytest
    pytest docs/examples/testing --multilock-url memory:// --multilock-url redis://127.0.0.1:6379/0 --multilock-compare

You should see each test once for each URL. Tests that need a network are skipped on memory://.
"""

from __future__ import annotations

import asyncio

import pytest

import multilock
from multilock import AsyncClient, Client, Lease
from multilock.testing import Network

# ---- the service


def bill(lease: Lease, orders: list[str]) -> list[str]:
    """Bill the orders until the lock is lost. Return the orders that were billed."""
    billed = []
    for order in orders:
        if not lease.is_held():
            break
        billed.append(order)
        if order == "slow":
            lease.wait_lost(20.0)  # stands for work; the pause ends early when the lock is lost
    return billed


# ---- its tests; the pytest plugin of multilock closes the clients


def test_one_bill_is_made_at_a_time(multilock_client: Client, multilock_url: str) -> None:
    with multilock_client.lock("billing") as lease, multilock.connect(multilock_url) as another:
        assert another.lock("billing").try_acquire() is None
        assert bill(lease, ["a", "b"]) == ["a", "b"]


def test_an_asyncio_service_needs_no_plugin(multilock_async_client: AsyncClient) -> None:
    async def use() -> None:
        async with multilock_async_client.lock("billing") as lease:
            assert lease.is_held()

    asyncio.run(use())


def test_the_work_stops_when_the_lock_is_lost(multilock_client: Client) -> None:
    lease = multilock_client.lock("billing").acquire()
    assert multilock_client.force_release("billing")  # an operator
    assert lease.wait_lost(20.0)
    assert bill(lease, ["a", "b"]) == []


def test_the_work_stops_when_the_server_sends_no_replies(multilock_client: Client, multilock_faults: Network) -> None:
    lease = multilock_client.lock("billing", ttl=2.0).acquire()
    multilock_faults.black_hole()
    assert bill(lease, ["slow", "b"]) == ["slow"]


def test_a_lost_reply_costs_nothing(multilock_client: Client, multilock_faults: Network) -> None:
    multilock_client.ping()  # open the connection first
    lost = multilock_faults.drop_reply_after(0, b"billing")
    with multilock_client.lock("billing").acquire(timeout=20.0) as lease:
        assert lost.happened  # the server granted the lock, and the reply was lost
        assert bill(lease, ["a", "b"]) == ["a", "b"]


@pytest.mark.multilock(requires={"fencing"})
def test_a_late_write_is_refused(multilock_client: Client) -> None:
    with multilock_client.lock("billing") as first:
        late = first.fence()
    with multilock_client.lock("billing") as second:
        assert late < second.fence()
