"""Code that a typical user writes, for mypy and pyright in their strict modes. It is never run."""

from __future__ import annotations

import asyncio.subprocess
import multiprocessing
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Unpack, assert_type, cast

import multilock
from multilock import (
    AsyncClient,
    AsyncDistributedLock,
    AsyncLease,
    Client,
    DistributedLock,
    LeaderInfo,
    Leadership,
    Lease,
    LeaseState,
    LockInfo,
    Loss,
    LossReason,
)
from multilock.backend import Backend
from multilock.testing import Fault, Helper, Killed, Network, Paused, compare, kill, pause
from multilock.testing.beliefs import Believers, Verdict

client = multilock.connect("redis://localhost:6379/0", ttl=15, requires={"fencing"})
by_mapping = multilock.connect({"url": "memory://", "ttl": 15})
configured = multilock.connect(profile="prod", config="multilock.toml")
multilock.connect("redis://h", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
multilock.connect("redis://h", ttl="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
multilock.connect_async("redis://h", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
third_party = multilock.connect("directory:///srv/locks?colour=red")
third_party_by_mapping = multilock.connect({"url": "directory:///srv/locks", "colour": "red"})


def on_a_backend_object(backend: Backend) -> Client:
    return Client(backend, ttl=15)


def wrapped(url: str, **options: Unpack[multilock.ConnectOptions]) -> Client:
    return multilock.connect(url, **options)


def blocking(client: Client) -> None:
    lock = client.lock("invoices/42", ttl=30.0, on_lost=stop)
    assert_type(lock, DistributedLock)
    with lock as lease:
        assert_type(lease, Lease)
        assert_type(lease.fence(), int)
        assert_type(lease.token, int | None)
        assert_type(lease.state, LeaseState)
        assert_type(lease.remaining(), float)
    with lock.acquire(timeout=5) as lease:
        lease.check()
    if taken := lock.try_acquire(timeout=2):
        assert_type(taken, Lease)
        assert_type(taken.wait_lost(1.0), Loss[Lease] | None)
        assert_type(taken.release(), bool)
    assert_type(client.inspect("invoices/42"), LockInfo | None)
    for info in client.inspect_all("invoices/"):
        assert_type(info, LockInfo)
    assert_type(client.capabilities.fencing, bool)
    assert_type(client.ping(), float)
    assert_type(client.current_lease(), Lease)
    threading_lock = lock.as_threading_lock()
    if threading_lock.acquire(timeout=1):
        threading_lock.release()
    threading.Condition(threading_lock)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    threading.Condition(cast("threading.Lock", threading_lock))  # from the docstring of as_threading_lock
    unsubscribe = client.events.subscribe(heard)
    unsubscribe()


def give_back(loss: Loss) -> None:
    """The plain annotation ``Loss`` fits callbacks of both faces, blocking and asyncio."""
    loss.lease.release()
    if isinstance(loss.lease, Lease):
        assert_type(loss.lease.release(), bool)


def give_back_blocking(loss: Loss[Lease]) -> bool:
    return loss.lease.release()


async def give_back_async(loss: Loss[AsyncLease]) -> bool:
    return await loss.lease.release()


def on_either_face(lease: Lease, on_loop: AsyncLease) -> None:
    lease.on_lost(give_back)
    lease.on_lost(give_back_blocking)
    lease.on_lost(lambda loss: assert_type(loss.lease.release(), bool))
    lease.on_lost(give_back_async)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    on_loop.on_lost(give_back)
    on_loop.on_lost(give_back_async)
    on_loop.on_lost(give_back_blocking)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(lease.leases, tuple[Lease, ...])
    assert_type(on_loop.leases, tuple[AsyncLease, ...])


def on_loss_of_a_leadership(loss: Loss[Leadership]) -> None:
    print(loss.lease.term)


def stop(loss: Loss) -> None:
    if loss.reason is LossReason.EXPIRED and not loss.confirmed:
        print(loss.lease.name, loss.time_left, loss.message)


def heard(event: multilock.Event) -> None:
    if isinstance(event, multilock.Acquired):
        assert_type(event.waited, float)


@client.locked("order/{order_id}", timeout=0, skip=True)
def report(order_id: int) -> str:
    return str(order_id)


@client.locked("invoice/{number}")
def invoice(number: int, *, draft: bool = False) -> str:
    return f"{number} {draft}"


class Shop:
    @client.locked("shop")
    def sell(self, article: str) -> int:
        return len(article)


def decorated(shop: Shop) -> None:
    assert_type(report(5), str | None)
    assert_type(invoice(5, draft=True), str)
    assert_type(shop.sell("tea"), int)
    invoice("five")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def election(client: Client) -> None:
    election = client.election("scheduler", identity="node-1", on_elected=elected, on_lost=stop, on_leader_changed=seen)
    assert_type(election.run(work), int | None)
    with election.campaign(timeout=5) as leadership:
        assert_type(leadership.term, int | None)
    client.election("scheduler", on_lost=on_loss_of_a_leadership)
    with election:
        assert_type(election.is_leader(), bool)
        assert_type(election.observe(), Iterator[LeaderInfo | None])


def elected(leadership: Leadership) -> None:
    print(leadership.term, leadership.identity)


def seen(leader: LeaderInfo | None) -> None:
    print(leader.identity if leader else None)


def work(leadership: Leadership) -> int:
    while leadership.is_held():
        pass
    return 1


def errors(lock: DistributedLock) -> None:
    try:
        lock.acquire(timeout=1)
    except multilock.LockTimeout as late:
        assert_type(late.name, str | None)
    except multilock.LockLost as lost:
        assert_type(lost.loss, Loss | None)
    except multilock.BackendUnavailable as silent:
        assert_type(silent.backend, str | None)


async def asynchronous() -> None:
    async with multilock.connect_async("memory://") as client:
        assert_type(client, AsyncClient)
        lock = client.lock("invoices/42", cancel_on_lost=False, on_lost=stop_soon)
        assert_type(lock, AsyncDistributedLock)
        async with lock as lease:
            assert_type(lease, AsyncLease)
            assert_type(await lease.wait_lost(1.0), Loss[AsyncLease] | None)
        async with lock.acquire(timeout=5) as lease:
            assert_type(lease.fence(), int)
        lease = await lock.acquire()
        assert_type(lease, AsyncLease)
        assert_type(await lock.try_acquire(), AsyncLease | None)
        assert_type(await client.inspect("invoices/42"), LockInfo | None)
        async for info in client.inspect_all():
            assert_type(info, LockInfo)

        @client.locked("order/{order_id}")
        async def order(order_id: int) -> str:
            return str(order_id)

        @client.locked("order/{order_id}", skip=True)
        async def try_order(order_id: int) -> str:
            return str(order_id)

        assert_type(await order(5), str)
        assert_type(await try_order(order_id=5), str | None)
        election = client.election("scheduler")
        assert_type(await election.run(lead), str | None)
        assert_type(election.observe(), AsyncIterator[LeaderInfo | None])
        leadership = await election.campaign(timeout=5)
        assert_type(leadership.term, int | None)


def misspelt(error: Exception) -> bool:
    return isinstance(error, multilock.LockTimeoutt)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def open_object(url: str, options: dict[str, object]) -> Backend:
    raise NotImplementedError(url, options)


def open_any(url: str, options: dict[str, Any]) -> Backend:
    raise NotImplementedError(url, options)


def open_mapping(url: str, options: Mapping[str, object]) -> Backend:
    raise NotImplementedError(url, options)


multilock.register_backend("first", open_object)
multilock.register_backend("second", open_any)
multilock.register_backend("third", open_mapping)


async def stop_soon(loss: Loss) -> None:
    print(loss)


async def lead(leadership: multilock.AsyncLeadership) -> str:
    return leadership.identity


def test_type_checkers_know_the_fixtures_of_the_plugin(
    multilock_client: Client,
    multilock_async_client: AsyncClient,
    multilock_url: str,
    multilock_faults: Network,
    multilock_believers: Believers,
) -> None:
    assert_type(multilock_faults.url, str)
    multilock_faults.black_hole("up")
    multilock_faults.delay(0.1)
    multilock_faults.cut()
    lost = multilock_faults.drop_reply_after(2, b"invoices")
    assert_type(lost, Fault)
    assert_type(lost.happened, bool)
    multilock_faults.heal()
    multilock_believers.watch(multilock_client)
    multilock_believers.watch(multilock_async_client)
    multilock_believers.watch(multilock_url)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(multilock_believers.judge(), Verdict)
    assert_type(compare.run([multilock_url], compare.Options(scenarios=["partition"], cycles=1)), compare.Report)
    assert_type(compare.run([multilock_url], scenarios=["partition"], cycles=1), compare.Report)


def processes(
    helper: Helper,
    child: subprocess.Popen[str],
    worker: multiprocessing.Process,
    awaited: asyncio.subprocess.Process,
) -> None:
    with pause(helper) as paused:
        assert_type(paused, Paused)
    for process in (child, worker, awaited, 4711):
        pause(process).resume()
        with kill(process) as killed:
            assert_type(killed, Killed)
    kill("4711")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
