"""A process that cannot start threads for a while loses no lock, and raises errors of multilock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from multilock import AsyncClient, BackendUnavailable, Client
from multilock.aio.requests import LoopFace
from multilock.config import settings_for
from multilock.kernel.client import Kernel
from multilock.kernel.runtime import Threads
from tests.unit.kit import Call, Losses, Scripted, client_on, eventually, refuse_threads


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number of further starts that fail, by thread name."""
    return refuse_threads(monkeypatch)


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


@pytest.fixture
def client(backend: Scripted, threads: dict[str, int]) -> Iterator[Client]:
    client = client_on(backend, Threads(), ttl=2.0)
    yield client
    client.close()


def test_a_renewal_that_cannot_start_a_thread_is_repeated_later(
    client: Client, backend: Scripted, threads: dict[str, int]
) -> None:
    losses = Losses()
    threads["multilock-renew"] = 3
    lease = client.lock("n", on_lost=losses).acquire()
    eventually(lambda: len(backend.called("renew")) >= 4, within=10)
    assert (lease.is_held(), losses.calls) == (True, [])
    assert threads["multilock-renew"] == 0


def test_a_lock_is_renewed_although_no_further_thread_can_start(
    client: Client, backend: Scripted, threads: dict[str, int]
) -> None:
    losses = Losses()
    lease = client.lock("n", on_lost=losses).acquire()
    threads.update(dict.fromkeys(("multilock-renew", "multilock-watch", "multilock-log"), 10_000))
    eventually(lambda: len(backend.called("renew")) >= 4, within=10)
    assert (lease.is_held(), losses.calls) == (True, [])
    threads.clear()
    eventually(client.is_healthy)
    eventually(lambda: len(backend.called("renew")) >= 6, within=10)


def test_an_acquire_without_a_watchdog_sends_nothing_and_raises(
    client: Client, backend: Scripted, threads: dict[str, int]
) -> None:
    threads["multilock-watchdog"] = 1
    with pytest.raises(BackendUnavailable, match=r"'n'.*new thread") as raised:
        client.lock("n").acquire(timeout=0)
    assert not raised.value.unknown
    assert backend.called("attempt") == []
    assert client.lock("n").acquire(timeout=0).is_held()


def test_an_acquire_waits_until_a_thread_can_start(client: Client, threads: dict[str, int]) -> None:
    threads["multilock-watchdog"] = 3
    assert client.lock("n").acquire(timeout=10).is_held()
    assert threads["multilock-watchdog"] == 0


@pytest.mark.oracle
def test_a_backend_without_a_thread_after_its_request_leaves_nothing_behind(
    client: Client, backend: Scripted, threads: dict[str, int]
) -> None:
    def executed(backend: Scripted, call: Call) -> Any:
        call.execute()
        raise RuntimeError("can't start new thread")

    threads["multilock-cleanup"] = 3
    backend.script("attempt", executed)
    with pytest.raises(BackendUnavailable, match="new thread") as raised:
        client.lock("n").acquire(timeout=0)
    assert raised.value.unknown
    eventually(lambda: backend.holders == {})
    [cancel] = backend.called("release")
    assert cancel.details["unsure"]


def test_another_exception_of_a_backend_is_not_taken_for_a_missing_thread(client: Client, backend: Scripted) -> None:
    def wrong(backend: Scripted, call: Call) -> Any:
        raise RuntimeError("a bug")

    backend.script("attempt", wrong)
    with pytest.raises(RuntimeError, match="a bug"):
        client.lock("n").acquire(timeout=0)


def test_asyncio_waits_for_a_thread_too(backend: Scripted, threads: dict[str, int]) -> None:
    async def main() -> None:
        client = AsyncClient.__new__(AsyncClient)
        AsyncClient._begin(client, backend, settings_for(backend.scheme, {"ttl": 3.0}))
        client._kernel = Kernel(backend, settings_for(backend.scheme, {"ttl": 3.0}), Threads(), LoopFace)
        async with client:
            threads.update({"multilock-watchdog": 2, "multilock-request": 2, "multilock-renew": 2})
            lease = await client.lock("n").acquire(timeout=10)
            await asyncio.to_thread(eventually, lambda: len(backend.called("renew")) >= 4, 10)
            assert lease.is_held()
            assert sum(threads.values()) == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_asyncio_close_ends_although_the_watchdog_could_not_start(backend: Scripted, threads: dict[str, int]) -> None:
    async def main() -> None:
        client = AsyncClient(backend)
        threads.update({"multilock-close": 3, "multilock-watchdog": 3})
        await client.close()
        assert threads["multilock-close"] == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_election_campaigns_although_the_watchdog_could_not_start(client: Client, threads: dict[str, int]) -> None:
    threads.update({"multilock-election": 3, "multilock-watchdog": 3})
    with client.election("n") as election:
        eventually(election.is_leader, within=10)
    assert threads["multilock-election"] == 0


def test_if_a_dead_watchdog_cannot_be_replaced_all_leases_are_lost(
    client: Client, backend: Scripted, threads: dict[str, int]
) -> None:
    losses = Losses()
    leases = [client.lock(f"n{number}", on_lost=losses).acquire() for number in range(3)]

    def die() -> None:
        threads.update({"multilock-watchdog": 10, "multilock-callback": 1})
        raise ValueError("a bug")

    client._kernel.timers.at(client._kernel.now(), die)
    eventually(lambda: not any(lease.is_held() for lease in leases))
    losses.wait(2)
    threads.clear()
    assert client.lock("m").acquire(timeout=5).is_held(), "which starts another"
    losses.wait(3)
    assert threading.active_count() < 100
