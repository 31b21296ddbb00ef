"""How to test a service that locks: on every backend you name, with a loss and an outage made on purpose.

    pip install 'multilock[redis]' pytest
    cd docs/examples
    pytest test_billing.py                                                    # memory://
    pytest test_billing.py --multilock-url memory:// --multilock-url redis://127.0.0.1:6379/0

You should see each test once for each URL; the outage is skipped where there is no network to fail.
"""

from __future__ import annotations

import uuid

import pytest

import multilock
from multilock import Client, Lease
from multilock.testing import FaultProxy

# ---- the service


def bill(lease: Lease, orders: list[str]) -> list[str]:
    """Stops where the lock is lost: what was billed until then is returned."""
    billed = []
    for order in orders:
        if not lease.is_held():
            break
        billed.append(order)
        if order == "slow":
            lease.wait_lost(5.0)  # a pause that ends early when the lock is lost
    return billed


# ---- its tests; the plugin comes with multilock, and closes its clients


@pytest.fixture
def name() -> str:
    return f"billing/{uuid.uuid4().hex}"  # the server may be shared


def test_one_bills_at_a_time(multilock_client: Client, multilock_url: str, name: str) -> None:
    with multilock_client.lock(name) as lease, multilock.connect(multilock_url) as another:
        assert another.lock(name).try_acquire() is None
        assert bill(lease, ["a", "b"]) == ["a", "b"]


def test_it_stops_when_the_lock_is_lost(multilock_client: Client, name: str) -> None:
    lease = multilock_client.lock(name).acquire()
    assert multilock_client.force_release(name)  # an operator
    assert lease.wait_lost(10.0)
    assert bill(lease, ["a", "b"]) == []


def test_it_stops_when_the_server_falls_silent(multilock_url: str, name: str) -> None:
    if multilock_url.startswith(("memory:", "sqlite:")):
        pytest.skip("there is no network to fail")
    with FaultProxy.before(multilock_url) as proxy, multilock.connect(proxy.url, ttl=2.0) as client:
        lease = client.lock(name).acquire()
        proxy.black_hole()
        assert bill(lease, ["slow", "b"]) == ["slow"]
        proxy.heal()
