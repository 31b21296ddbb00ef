"""Tests of the asyncio face where it differs from the blocking face."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

import multilock
from multilock import (
    AsyncClient,
    AsyncLease,
    BackendRejected,
    BackendUnavailable,
    ClientClosed,
    Event,
    LeaseState,
    LockInfo,
    LockLost,
    LockTimeout,
    Loss,
    LossReason,
    NotHeld,
)
from multilock.aio.batches import AT_ONCE
from multilock.aio.channels import MOST, Kind, Turns
from multilock.aio.lock import HeldAsyncLease
from multilock.aio.requests import CARRIERS
from multilock.kernel.blocking import NotAsked
from multilock.kernel.runtime import now
from multilock.model import Busy, Claim, Granted
from multilock.testing.conformance.base import inner
from tests.unit.kit import Call, Scripted, eventually, executed_but_unanswered, our_threads, refused, silence


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await main()

    return asyncio.run(limited())


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


def take(backend: Scripted) -> None:
    claim = backend.called("attempt")[-1].claims[0]
    backend.holders[claim.name] = "an operator"
    backend.notices.gone(claim.id, LossReason.TAKEN, "an operator took it")


async def until(ready: Callable[[], object], within: float = 5.0) -> None:
    end = time.monotonic() + within
    while not ready():
        assert time.monotonic() < end, f"the condition did not become true within {within:g} s"
        await asyncio.sleep(0.002)


# The members of the blocking face, with await


def test_a_lock_is_acquired_kept_and_released(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend, ttl=2.0) as client:
            lock = client.lock("n")
            async with lock as lease:
                assert lease.is_held()
                assert lock.is_held()
                assert await lock.is_locked()
                assert client.current_lease() is lease
                await until(lambda: len(backend.called("renew")) >= 2)
                await lease.renew()
            assert not lease.is_held()
            assert backend.holders == {}
            lease = await lock.acquire(timeout=1)
            assert await lock.try_acquire(0.5) is None
            with pytest.raises(LockTimeout):
                await lock.acquire(0.5)
            assert await lock.release() is True
            with pytest.raises(NotHeld):
                await lock.release()
            assert await lease.release() is False

    run(main)


def test_a_client_may_be_awaited_and_entered(backend: Scripted) -> None:
    async def main() -> None:
        client = await AsyncClient(backend)
        async with client:
            assert await client.ping() >= 0
        with pytest.raises(ClientClosed):
            await client.ping()

    run(main)


@pytest.mark.parametrize("how", ["await", "task", "enter", "wait_for", "gather"])
def test_acquire_returns_a_coroutine_that_is_also_an_async_context_manager(backend: Scripted, how: str) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lock = client.lock("n")
            if how == "enter":
                async with lock.acquire(timeout=5) as lease:
                    assert client.current_lease() is lease
                assert not lease.is_held()
                return
            if how == "await":
                lease = await lock.acquire()
            elif how == "task":
                lease = await asyncio.create_task(lock.acquire())
            elif how == "wait_for":
                lease = await asyncio.wait_for(lock.acquire(), 5)
            else:
                [lease] = await asyncio.gather(lock.acquire())
            assert client.current_lease() is lease, "the task that called holds it"
            assert await lock.release() is True

    run(main)


@pytest.mark.parametrize("how", ["task", "wait_for", "gather"])
def test_a_try_and_a_release_belong_to_the_task_that_called_them(backend: Scripted, how: str) -> None:
    async def elsewhere(awaitable: Coroutine[Any, Any, Any]) -> Any:
        if how == "task":
            return await asyncio.create_task(awaitable)
        if how == "wait_for":
            return await asyncio.wait_for(awaitable, 5)
        [result] = await asyncio.gather(awaitable)
        return result

    async def main() -> None:
        async with AsyncClient(backend) as client:
            lock = client.lock("n", reentrant=True)
            lease = await elsewhere(lock.try_acquire(1))
            assert client.current_lease() is lease
            assert await elsewhere(lock.try_acquire()) is lease
            assert await lock.release() is True
            assert await elsewhere(lock.release()) is True
            assert not lease.is_held()
            with pytest.raises(NotHeld):
                await elsewhere(lock.release())

    run(main)


def test_a_try_and_a_release_created_outside_a_task_belong_to_the_awaiting_task(backend: Scripted) -> None:
    client = AsyncClient(backend)
    lock = client.lock("n")
    trying, releasing = lock.try_acquire(1), lock.release()

    async def main() -> None:
        assert await trying is client.current_lease()
        assert await releasing is True
        await client.close()

    run(main)


def test_an_acquire_may_be_called_without_a_running_loop(backend: Scripted) -> None:
    client = AsyncClient(backend)
    lock = client.lock("n")
    lease = asyncio.run(lock.acquire(timeout=1))
    assert lease.is_held()
    with pytest.raises(NotHeld):
        client.current_lease()

    async def main() -> None:
        assert await lease.release() is True
        loop = asyncio.get_running_loop()

        def call() -> AsyncLease:
            return asyncio.run_coroutine_threadsafe(lock.acquire(timeout=1), loop).result(5)

        assert await (await asyncio.to_thread(call)).release() is True
        await client.close()

    run(main)


def test_an_acquire_created_outside_a_task_belongs_to_the_awaiting_task(backend: Scripted) -> None:
    client = AsyncClient(backend)
    lock = client.lock("n")
    acquiring = lock.acquire(timeout=1)

    async def main() -> None:
        lease = await acquiring
        assert client.current_lease() is lease
        assert await lock.release() is True
        await client.close()

    run(main)


def test_a_lost_lease_released_by_hand_is_not_the_current_lease(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lock = client.lock("inner")
            async with client.lock("outer") as outer:
                lease = await lock.acquire()
                take(backend)
                assert client.current_lease() is lease, "its owner was not notified of it"
                assert await lease.release() is False
                assert client.current_lease() is outer
                with pytest.raises(NotHeld):
                    await lock.release()

    run(main)


def test_each_reentrant_lock_object_holds_its_lease_and_is_notified_of_a_loss_once(
    backend: Scripted,
) -> None:
    async def main() -> None:
        told: list[str] = []
        async with AsyncClient(backend) as client:
            one = client.lock("n", reentrant=True, on_lost=lambda loss: told.append("one"))
            other = client.lock("n", reentrant=True, on_lost=lambda loss: told.append("other"))
            async with one as lease:
                assert not other.is_held()
                async with other as again, one, other:
                    assert again is lease
                    assert other.is_held()
            await one.acquire()
            await other.acquire()
            await other.acquire()
            take(backend)
            await until(lambda: len(told) == 2)
        assert told == ["one", "other"]

    run(main)


def test_the_leases_of_two_tasks_are_distinct(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lock = client.lock("n", reentrant=True)
            lease = await lock.acquire()
            assert await lock.acquire() is lease

            async def other() -> None:
                with pytest.raises(NotHeld):
                    client.current_lease()
                assert await lock.try_acquire() is None
                assert await lease.release() is True

            await asyncio.create_task(other())
            assert lease.is_held()
            assert await lock.release()
            assert backend.holders == {}

    run(main)


def test_a_coroutine_function_can_be_decorated(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:

            @client.locked("order/{order_id}", timeout=0, skip=True)
            async def work(order_id: int) -> str:
                return client.current_lease().name

            assert await work(5) == "order/5"
            backend.holders["order/6"] = "somebody"
            assert await work(6) is None
            with pytest.raises(TypeError, match="coroutine"):
                client.locked("n")(lambda: None)  # type: ignore[arg-type, return-value]

            @client.locked("n")
            async def loses() -> None:
                take(backend)
                await asyncio.sleep(10)

            with pytest.raises(LockLost):
                await loses()

    run(main)


def test_subscribers_get_events_in_order_on_the_loop(backend: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        heard: list[str] = []
        async with AsyncClient(backend) as client:

            async def slow(event: Event) -> None:
                await asyncio.sleep(0.01)
                heard.append(type(event).__name__)
                raise KeyError("the subscriber's own")

            unsubscribe = client.events.subscribe(slow)
            for _ in range(2):
                async with client.lock("n"):
                    pass
            await until(lambda: len(heard) == 4)
            unsubscribe()
            async with client.lock("n"):
                await asyncio.sleep(0.02)
        assert heard == ["Acquired", "Released"] * 2
        assert caplog.text.count("raised; it is not called again") == 4

    run(main)


def test_work_that_cannot_be_awaited_is_refused_and_the_node_resigns(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:

            def plain(leadership: AsyncLease) -> Any:
                return leadership.token

            with pytest.raises(TypeError, match=r"run takes a coroutine function, but <function .* returned 1"):
                await client.election("e").run(plain)
            assert backend.holders == {}

    run(main)


# Leases that are lost inside `async with`


@pytest.mark.parametrize("cancel_on_lost", [True, False])
@pytest.mark.parametrize("body", ["normal end", "own error", "return"])
def test_a_loss_in_an_async_with_block_cancels_the_block(backend: Scripted, body: str, cancel_on_lost: bool) -> None:
    async def lose_inside(client: AsyncClient) -> str:
        async with client.lock("n", cancel_on_lost=cancel_on_lost):
            take(backend)
            if body == "own error":
                raise KeyError("the body's own")
            if body == "return":
                return "not exclusive"
        return "after"

    async def main() -> None:
        async with AsyncClient(backend) as client:
            with pytest.raises(KeyError if body == "own error" else LockLost) as caught:
                await lose_inside(client)
            if body == "own error":
                assert "lock 'n' was lost" in caught.value.__notes__[0]
            await asyncio.sleep(0)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0, "no cancellation is left behind"

    run(main)


def test_a_waiting_body_is_cancelled_at_the_moment_of_the_loss(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:

            async def body() -> None:
                async with client.lock("n"):
                    asyncio.get_running_loop().call_later(0.02, take, backend)
                    await asyncio.sleep(15)

            with pytest.raises(LockLost):
                await body()

    began = time.monotonic()
    run(main)
    assert time.monotonic() - began < 5


def test_without_cancel_on_lost_the_body_continues_to_its_end(backend: Scripted) -> None:
    async def main() -> None:
        reached: list[bool] = []
        async with AsyncClient(backend) as client:

            async def body() -> None:
                async with client.lock("n", cancel_on_lost=False) as lease:
                    take(backend)
                    await asyncio.sleep(0.02)
                    reached.append(lease.is_held())

            with pytest.raises(LockLost):
                await body()
        assert reached == [False]

    run(main)


def test_an_async_with_block_may_end_in_another_task_than_it_began(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lock = client.lock("n")
            lease = await asyncio.create_task(lock.__aenter__())
            await asyncio.create_task(lock.__aexit__(None, None, None))
            assert not lease.is_held()
            assert backend.holders == {}
            with pytest.raises(NotHeld):
                await lock.__aexit__(None, None, None)

    run(main)


@pytest.mark.parametrize("cancel_on_lost", [True, False])
@pytest.mark.parametrize("where", ["a task of its own", "the task that entered next"])
def test_an_async_with_block_of_a_generator_ends_its_own_lease_in_any_task(
    backend: Scripted, cancel_on_lost: bool, where: str
) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lock = client.lock("n", cancel_on_lost=cancel_on_lost)

            async def hold() -> AsyncIterator[AsyncLease]:
                async with lock as lease:
                    yield lease

            async def end(generator: AsyncIterator[AsyncLease]) -> AsyncLease | None:
                return await anext(generator, None)

            first, second = hold(), hold()
            lost = await asyncio.create_task(end(first))
            assert lost is not None
            take(backend)
            del backend.holders["n"]

            async def next_request() -> None:
                held = await anext(second)
                with pytest.raises(LockLost) as caught:
                    await (asyncio.create_task(end(first)) if where == "a task of its own" else end(first))
                assert caught.value.loss is inner(lost).loss
                assert held.is_held()

            await asyncio.create_task(next_request())
            assert list(backend.holders) == ["n"]
            await anext(second, None)
            assert backend.holders == {}

    run(main)


def test_an_async_exit_by_hand_in_a_third_task_ends_the_lost_lease_and_not_the_held_one(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lock = client.lock("n")
            await asyncio.create_task(lock.__aenter__())
            take(backend)
            del backend.holders["n"]
            held = await asyncio.create_task(lock.__aenter__())
            with pytest.raises(LockLost):
                await asyncio.create_task(lock.__aexit__(None, None, None))
            assert held.is_held()
            await asyncio.create_task(lock.__aexit__(None, None, None))
            assert not held.is_held()
            assert backend.holders == {}

    run(main)


@pytest.mark.oracle
def test_a_loss_leaves_no_cancellation_behind_in_two_tasks_with_one_lease(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lease = await client.lock("n").acquire()
            inside = 0

            async def hold() -> None:
                nonlocal inside
                async with lease:
                    inside += 1
                    await asyncio.sleep(15)

            tasks = [asyncio.create_task(hold()) for _ in range(3)]
            await until(lambda: inside == 3)
            take(backend)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [LockLost] * 3
            assert [task.cancelling() for task in tasks] == [0, 0, 0]

    run(main)


@pytest.mark.parametrize("lost", [False, True])
def test_an_exit_stack_releases_a_lease_that_it_did_not_enter(backend: Scripted, lost: bool) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lease = await client.lock("n").acquire()
            with pytest.raises(LockLost) if lost else contextlib.nullcontext():
                async with contextlib.AsyncExitStack() as stack:
                    stack.push_async_exit(lease)
                    if lost:
                        take(backend)
                        del backend.holders["n"]
            assert not lease.is_held()
            assert backend.holders == {}

    run(main)


def test_an_acquire_that_was_not_entered_cannot_be_exited(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            acquiring = client.lock("n").acquire()
            with pytest.raises(NotHeld, match="async with"):
                await acquiring.__aexit__(None, None, None)
            await (await acquiring).release()

    run(main)


@pytest.mark.oracle
@pytest.mark.parametrize("body", ["waits", "does not wait"])
def test_a_loss_just_before_the_body_leaves_no_cancellation_behind(
    backend: Scripted, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lease = await client.lock("n").acquire()
            monkeypatch.setattr(HeldAsyncLease, "check", lambda _: take(backend))  # lost right before the body

            async def hold() -> None:
                async with lease:
                    if body == "waits":
                        await asyncio.sleep(15)

            with pytest.raises(LockLost):
                await hold()
            await asyncio.sleep(0)

    run(main)


def test_a_cancellation_from_outside_is_not_replaced_by_lock_lost(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            inside = asyncio.Event()

            async def hold() -> None:
                async with client.lock("n"):
                    inside.set()
                    await asyncio.sleep(15)

            for lost_too in (False, True):
                task = asyncio.create_task(hold())
                await inside.wait()
                inside.clear()
                if lost_too:
                    take(backend)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until(lambda: client._kernel.held == {})
                backend.holders.clear()

    run(main)


def test_a_timeout_around_the_body_stays_a_timeout(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03), client.lock("n"):
                    await asyncio.sleep(15)
            await until(lambda: backend.holders == {})

    run(main)


def test_a_body_that_swallows_the_cancellation_still_raises_lock_lost(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:

            async def body() -> None:
                async with client.lock("n"):
                    take(backend)
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(15)

            with pytest.raises(LockLost):
                await body()
            await asyncio.sleep(0.01)

    run(main)


def test_a_release_by_hand_inside_is_not_a_loss(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client, client.lock("n") as lease:
            await lease.release()
            await asyncio.sleep(0.01)

    run(main)


# Callbacks run on the loop; a blocked loop delays them and nothing else


def test_callbacks_run_on_the_loop_and_may_be_coroutine_functions(backend: Scripted) -> None:
    async def main() -> None:
        heard: list[tuple[str, int, LossReason]] = []

        def plain(loss: Loss) -> None:
            heard.append(("plain", threading.get_ident(), loss.reason))

        async def coroutine(loss: Loss) -> None:
            await asyncio.sleep(0)
            heard.append(("async", threading.get_ident(), loss.reason))

        async with AsyncClient(backend) as client:
            lease = await client.lock("n", on_lost=plain).acquire()
            lease.on_lost(coroutine)
            take(backend)
            await until(lambda: len(heard) == 2)
            lease.on_lost(coroutine)
            await until(lambda: len(heard) == 3)
        here = threading.get_ident()
        assert heard == [(kind, here, LossReason.TAKEN) for kind in ("plain", "async", "async")]

    run(main)


def test_any_awaitable_that_a_callback_returns_is_awaited(backend: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    class Awaitable:
        def __await__(self) -> Iterator[None]:
            yield
            raise ValueError("the user's bug")

    async def main() -> None:
        async with AsyncClient(backend) as client:
            await client.lock("n", on_lost=lambda loss: Awaitable()).acquire()
            take(backend)
            await until(lambda: "the user's bug" in caplog.text)

    run(main)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_callback_that_raises_is_logged(backend: Scripted, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def plain(loss: Loss) -> None:
        raise ValueError("the user's bug")

    async def coroutine(loss: Loss) -> None:
        raise ValueError("the user's bug")

    async def main() -> None:
        async with AsyncClient(backend) as client:
            await client.lock("n", on_lost=plain if kind == "plain" else coroutine).acquire()
            take(backend)
            await until(lambda: "the user's bug" in caplog.text)

    run(main)


def test_a_blocked_loop_loses_no_lock(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend, ttl=1.5) as client:
            lease = await client.lock("n").acquire()
            time.sleep(2.5)  # noqa: ASYNC251
            assert lease.is_held()
            assert len(backend.called("renew")) >= 3
            assert await lease.release() is True

    run(main)


def test_a_loss_is_noticed_in_time_while_the_loop_is_blocked(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend, ttl=1.0) as client:
            heard: list[float] = []
            lease = await client.lock("n", on_lost=lambda loss: heard.append(time.monotonic())).acquire()
            backend.always("renew", silence(0.05))
            time.sleep(1.6)  # noqa: ASYNC251
            woke = now()
            assert not lease.is_held()
            assert lease.state is LeaseState.LOST
            assert heard == []
            await until(lambda: heard)
            loss = await lease.wait_lost()
            assert loss is not None
            assert loss.detected_at < woke, "the watchdog was not blocked"

    run(main)


def test_wait_lost_returns_the_loss(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            lease = await client.lock("n").acquire()
            assert await lease.wait_lost(0.01) is None
            waiting = [asyncio.create_task(lease.wait_lost()) for _ in range(3)]
            await asyncio.sleep(0.01)
            take(backend)
            losses = await asyncio.gather(*waiting)
            assert [loss.reason for loss in losses if loss] == [LossReason.TAKEN] * 3
            backend.holders.clear()
            lease = await client.lock("n").acquire()
            task = asyncio.create_task(lease.wait_lost())
            await asyncio.sleep(0.01)
            await lease.release()
            assert await task is None

    run(main)


def test_a_loop_closed_during_a_wait_does_not_stop_the_watchdog(backend: Scripted) -> None:
    loop = asyncio.new_event_loop()
    client = AsyncClient(backend)

    async def leave_behind() -> Any:
        lease = await client.lock("n").acquire()
        task = loop.create_task(lease.wait_lost())
        await asyncio.sleep(0.01)
        return lease, task

    lease, task = loop.run_until_complete(leave_behind())
    loop.close()
    take(backend)
    assert not lease.is_held()
    eventually(client.is_healthy)
    task._log_destroy_pending = False
    client._kernel.end.close()


# A cancelled acquire leaves nothing behind


@pytest.mark.oracle
@pytest.mark.parametrize("world", ["free", "taken", "silent", "lost reply", "slow"])
def test_a_cancelled_acquire_leaves_nothing_behind(backend: Scripted, world: str) -> None:
    hold = threading.Event()

    def slow(backend: Scripted, call: Call) -> Any:
        answer = call.execute()
        hold.wait(0.01)
        return answer

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=0.2) as client:
            for delay in [0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.03]:
                if world == "taken":
                    backend.holders["n"] = "somebody"
                elif world == "silent":
                    backend.script("attempt", silence(0.05))
                elif world == "lost reply":
                    backend.script("attempt", executed_but_unanswered)
                elif world == "slow":
                    backend.script("attempt", slow)
                task = asyncio.create_task(client.lock("n").acquire())
                await asyncio.sleep(delay)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    await task.result().release()
                backend._scripts["attempt"].clear()
                backend.holders = {name: who for name, who in backend.holders.items() if who != "somebody"}
                await until(lambda: backend.holders == {} and backend.queues["n"] == [])
                kernel = client._kernel
                assert kernel.held == {}
                assert kernel.gate._lines == {}
                assert kernel.monitor.waiting == {}

    run(main)


def test_a_cancelled_release_continues_in_the_background(backend: Scripted) -> None:
    def slow(backend: Scripted, call: Call) -> Any:
        time.sleep(0.02)
        return call.execute()

    async def main() -> None:
        async with AsyncClient(backend) as client:
            for delay in (0, 0.001, 0.01):
                lease = await client.lock("n").acquire()
                backend.script("release", slow)
                task = asyncio.create_task(lease.release())
                await asyncio.sleep(delay)
                task.cancel()
                await asyncio.wait([task])
                await until(lambda: backend.holders == {})
                if delay:
                    assert lease.state is LeaseState.RELEASED

    run(main)


def test_an_incomplete_release_returns_at_once_and_continues_in_the_background(backend: Scripted) -> None:
    def partly(backend: Scripted, call: Call) -> Any:
        return call.execute()._replace(again=True)

    async def main() -> None:
        async with AsyncClient(backend) as client:
            lease = await client.lock("n").acquire()
            backend.script("release", partly, partly)
            assert await lease.release() is True
            assert lease.state is LeaseState.RELEASED
            await until(lambda: client._kernel.cancels.wait(0))
            assert [call.details["unsure"] for call in backend.called("release")] == [False, True, True]

    run(main)


def test_a_timeout_does_not_wait_for_stuck_workers(backend: Scripted) -> None:
    stuck = threading.Event()

    def hang(backend: Scripted, call: Call) -> Any:
        stuck.wait(10)
        raise BackendUnavailable("at last")

    async def main() -> None:
        client = AsyncClient(backend, request_timeout=0.1)
        backend.always("attempt", hang)
        began = time.monotonic()
        results = await asyncio.gather(
            *(client.lock(f"n{number}").acquire(0.3) for number in range(20)), return_exceptions=True
        )
        assert time.monotonic() - began < 1.5
        assert all(isinstance(result, BackendUnavailable) for result in results)
        stuck.set()
        await client.close()

    run(main)


def test_an_error_of_the_backend_is_raised(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            backend.script("attempt", refused(BackendRejected("NOAUTH")))
            with pytest.raises(BackendRejected):
                await client.lock("n").acquire()

    run(main)


def test_many_tasks_acquire_in_turn(backend: Scripted) -> None:
    async def main() -> None:
        inside = 0
        async with AsyncClient(backend) as client:
            lock = client.lock("n")

            async def work() -> None:
                nonlocal inside
                for _ in range(5):
                    async with lock:
                        inside += 1
                        assert inside == 1
                        await asyncio.sleep(0)
                        inside -= 1

            await asyncio.gather(*(work() for _ in range(10)))
        assert backend.holders == {}

    run(main)


# Clients on several loops, and the end of a loop


def test_a_client_belongs_to_one_loop_at_a_time(backend: Scripted) -> None:
    client = AsyncClient(backend)

    async def use() -> bool:
        return await (await client.lock("n").acquire()).release()

    assert asyncio.run(use()) is True
    assert asyncio.run(use()) is True, "the former loop is closed"

    async def use_in_two_loops() -> None:
        await use()
        errors: list[BaseException] = []

        def other() -> None:
            try:
                asyncio.run(use())
            except RuntimeError as error:
                errors.append(error)

        await asyncio.to_thread(other)
        assert "another event loop" in str(errors)
        await client.close()

    asyncio.run(use_in_two_loops())


def leave_on_a_closed_loop(main: Callable[[], Coroutine[Any, Any, list[asyncio.Task[Any]]]]) -> list[asyncio.Task[Any]]:
    """Return tasks that never end because their loop was closed before, as in a program that does not use
    asyncio.run()."""
    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(main())
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    return tasks


@pytest.mark.parametrize("then", ["continue", "close"])
@pytest.mark.parametrize("fair", [False, True])
def test_a_waiter_of_a_closed_loop_delays_no_other(backend: Scripted, then: str, fair: bool) -> None:
    client = AsyncClient(backend)
    backend.holders["n"] = "somebody"
    lock = client.lock("n", fair=fair)

    async def wait() -> list[asyncio.Task[Any]]:
        tasks = [asyncio.create_task(lock.acquire()) for _ in range(3)]
        await until(lambda: len(backend.queues["n"]) == (3 if fair else 1))
        return tasks

    tasks = leave_on_a_closed_loop(wait)
    del backend.holders["n"]

    async def go_on() -> None:
        if then == "continue":
            async with lock.acquire(timeout=3):
                pass
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < 2.5

    run(go_on)
    assert backend.queues["n"] == []
    assert backend.holders == {}
    assert not any(task.done() for task in tasks)


def test_a_waiter_of_a_closed_loop_gives_up_its_place_without_further_calls(backend: Scripted) -> None:
    client = AsyncClient(backend, ttl=1.5)
    backend.holders["n"] = "somebody"

    async def wait() -> list[asyncio.Task[Any]]:
        await client.lock("m").acquire()  # this lease makes the client renew the session
        tasks = [asyncio.create_task(client.lock("n", fair=True).acquire())]
        await until(lambda: len(backend.queues["n"]) == 1)
        return tasks

    tasks = leave_on_a_closed_loop(wait)
    eventually(lambda: backend.queues["n"] == [], within=10)
    assert not tasks[0].done()
    asyncio.run(client.close())


@pytest.mark.parametrize("then", ["continue", "close"])
def test_a_release_left_on_a_closed_loop_continues_in_the_background(backend: Scripted, then: str) -> None:
    client = AsyncClient(backend)
    answer = threading.Event()

    def waits(backend: Scripted, call: Call) -> Any:
        answer.wait(10)
        return call.execute()

    async def begin() -> list[asyncio.Task[Any]]:
        lease = await client.lock("n").acquire()
        backend.script("release", waits)
        task = asyncio.create_task(lease.release())
        await until(lambda: backend.called("release"))
        return [task]

    tasks = leave_on_a_closed_loop(begin)
    answer.set()

    async def go_on() -> None:
        if then == "continue":
            await client.ping()
            await until(lambda: not client._kernel.held)
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < 2.5

    run(go_on)
    assert backend.holders == {}
    assert not any(task.done() for task in tasks)


@pytest.mark.parametrize("then", ["continue", "close"])
def test_a_callback_that_a_closed_loop_never_ran_does_not_delay_close(backend: Scripted, then: str) -> None:
    client = AsyncClient(backend)

    async def never_ends(loss: Loss) -> None:
        await asyncio.Event().wait()

    async def lose() -> list[asyncio.Task[Any]]:
        await client.lock("n", on_lost=never_ends).acquire()
        take(backend)
        await until(lambda: any(task.get_coro().__name__ == "never_ends" for task in asyncio.all_tasks()))  # type: ignore[union-attr]
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    tasks = leave_on_a_closed_loop(lose)

    async def go_on() -> None:
        if then == "continue":
            await client.ping()
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < 2.5

    run(go_on)
    assert len(tasks) == 1


def test_events_are_reported_on_a_second_loop_too(backend: Scripted) -> None:
    client = AsyncClient(backend)
    heard: list[Event] = []
    client.events.subscribe(heard.append)

    async def leave_while_it_is_held() -> None:
        await client.lock("n").acquire()

    async def use() -> None:
        await (await client.lock("other").acquire()).release()
        await until(lambda: [event.name for event in heard[-2:]] == ["other", "other"])
        await client.close()

    asyncio.run(leave_while_it_is_held())
    take(backend)  # the loop of the lease is closed when its loss is noticed
    asyncio.run(use())


def test_close_reports_each_lease_as_lost_and_ends_every_wait(backend: Scripted) -> None:
    async def main() -> None:
        heard: list[LossReason] = []
        before = our_threads()
        client = AsyncClient(backend)
        lease = await client.lock("held", on_lost=lambda loss: heard.append(loss.reason)).acquire()
        backend.holders["n"] = "somebody"
        waiters = [asyncio.create_task(client.lock("n").acquire()) for _ in range(3)]
        await until(lambda: backend.queues["n"])
        await client.close()
        await client.close()
        assert heard == [LossReason.CLOSED]
        assert not lease.is_held()
        ends = await asyncio.gather(*waiters, return_exceptions=True)
        assert [type(end) for end in ends] == [ClientClosed] * 3
        assert backend.holders == {"n": "somebody"}
        assert backend.queues["n"] == []
        await until(lambda: our_threads() <= before)

    run(main)


def test_a_loop_that_ends_before_an_unawaited_close_leaves_no_traceback(
    backend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    answer = threading.Event()

    def waits(backend: Scripted, call: Call) -> Any:
        answer.wait(10)
        return call.execute()

    async def main() -> None:
        client = AsyncClient(backend)
        await client.lock("n").acquire()
        backend.script("release", waits)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.close(), 0.05)

    run(main)
    answer.set()
    eventually(lambda: backend.closed and not any(each.name == "multilock-close" for each in threading.enumerate()))
    assert raised == []
    assert backend.holders == {}


def test_a_callback_may_close_the_client(backend: Scripted) -> None:
    async def main() -> None:
        closed = asyncio.Event()
        client = AsyncClient(backend, request_timeout=0.2)

        async def close(loss: Loss) -> None:
            await client.close()
            closed.set()

        await client.lock("n", on_lost=close).acquire()
        take(backend)
        await closed.wait()

    run(main)


def test_inspect_all_is_an_async_iterator(backend: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(backend) as client:
            for number in range(3):
                await client.lock(f"n{number}").acquire()
            listed: AsyncIterator[Any] = client.inspect_all("n")
            assert [info.name async for info in listed] == ["n0", "n1", "n2"]
            info = await client.inspect("n1")
            assert info is not None
            assert await client.force_release("n1") is True

    run(main)


def test_a_subscriber_may_return_any_awaitable_and_survives_a_cancelled_part_of_it(
    backend: Scripted,
) -> None:
    heard: list[str] = []

    async def main() -> None:
        async def hear(event: Event) -> None:
            heard.append(type(event).__name__)
            part = asyncio.create_task(asyncio.sleep(5))
            part.cancel()
            await part

        async with AsyncClient(backend) as client:
            client.events.subscribe(lambda event: hear(event))
            for _ in range(2):
                async with client.lock("n"):
                    pass
                await until(lambda: heard[-1:] == ["Released"])

    run(main)
    assert heard == ["Acquired", "Released"] * 2


def test_a_page_of_locks_may_take_longer_than_one_request(backend: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def many_requests(prefix: str, within: float) -> Iterator[LockInfo]:
        for number in range(8):
            time.sleep(within / 4)
            yield LockInfo(f"n{number}")

    monkeypatch.setattr(backend, "inspect_all", many_requests)

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=0.5) as client:
            assert len([info async for info in client.inspect_all("n")]) == 8

    run(main)


@pytest.fixture(autouse=True)
def no_thread_of_a_request_is_left() -> Iterator[None]:
    yield
    eventually(lambda: not any(thread.name == "multilock-close" for thread in threading.enumerate()))


CROWD = 60


async def crowd_of(client: AsyncClient, backend: Scripted) -> list[asyncio.Task[Any]]:
    """Start waiters, and wait until all are in the queue of "n", where they must send heartbeats all the time."""
    backend.heartbeat = 0.01
    tasks = [asyncio.create_task(client.lock("n", fair=True).acquire()) for _ in range(CROWD)]
    await until(lambda: len(client._kernel.monitor.waiting) == CROWD)
    await until(lambda: all(waiting.told for waiting in list(client._kernel.monitor.waiting.values())), within=15)
    return tasks


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("what", ["release", "try"])
def test_many_heartbeats_do_not_delay_a_release_or_a_first_attempt(backend: Scripted, what: str) -> None:
    permits = threading.Semaphore(0)
    held: list[Call] = []

    def in_turn(backend: Scripted, call: Call) -> Any:
        held.append(call)
        permits.acquire(timeout=10)
        return call.execute()

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=15.0) as client:
            lease = await client.lock("n", fair=True).acquire()
            tasks = await crowd_of(client, backend)
            backend.always("attempt", in_turn)
            turns: Any = client._kernel.face._turns  # type: ignore[attr-defined]
            # Wait until all requests under way are held back by the test, because the end of any other request would
            # admit the next heartbeat.
            await until(lambda: len(held) == CARRIERS and turns.waiting(Kind.HEARTBEAT) > CROWD / 2, within=15)
            urgent = asyncio.create_task(lease.release() if what == "release" else client.lock("m").try_acquire())
            await until(lambda: turns.waiting(Kind.RELEASE) + turns.waiting(Kind.FIRST))
            permits.release(MOST + CARRIERS)
            if what == "release":
                await until(lambda: backend.called("release"))
            else:
                await until(lambda: any(call.claims[0].name == "m" for call in backend.called("attempt")))
            permits.release(10_000)
            assert await urgent
            await end(tasks)

    run(main)


def test_a_free_lock_does_not_wait_behind_a_crowd_for_another(backend: Scripted) -> None:
    backend.holders["n"] = "another"
    permits = threading.Semaphore(0)
    held: list[str] = []

    def in_turn(backend: Scripted, call: Call) -> Any:
        held.append(call.claims[0].name)
        permits.acquire(timeout=10)
        return call.execute()

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=15.0) as client:
            backend.always("attempt", in_turn)
            tasks = [asyncio.create_task(client.lock("n", fair=True).acquire()) for _ in range(CROWD)]
            turns: Any = client._kernel.face._turns  # type: ignore[attr-defined]
            await until(lambda: sum(map(turns.waiting, Kind)) == CROWD - CARRIERS and len(held) == CARRIERS, within=15)
            other = asyncio.create_task(client.lock("m").acquire())
            await until(lambda: sum(map(turns.waiting, Kind)) == CROWD - CARRIERS + 1)
            permits.release()
            await until(lambda: len(held) > CARRIERS)
            assert held[CARRIERS:] == ["m"]
            permits.release(10_000)
            assert await other
            await end(tasks)

    run(main)


def test_a_heartbeat_without_a_free_slot_is_not_taken_for_silence(backend: Scripted) -> None:
    def slow(backend: Scripted, call: Call) -> Any:
        time.sleep(0.1)
        return call.execute()

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=1.0, outage_timeout=0.5) as client:
            await client.lock("n", fair=True).acquire()
            tasks = await crowd_of(client, backend)
            backend.always("attempt", slow)
            await asyncio.wait(tasks, timeout=4, return_when=asyncio.FIRST_COMPLETED)
            assert [task for task in tasks if task.done()] == []
            backend.always("attempt", None)
            await end(tasks)

    run(main)


def test_a_task_cancelled_as_it_gets_a_slot_passes_the_slot_on(backend: Scripted) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(1)
        assert turns.take()
        first, second = loop.create_future(), loop.create_future()
        turns.wait(first, Kind.FIRST)
        turns.wait(second, Kind.HEARTBEAT)
        first.cancel()
        turns.give_back()
        assert second.done()
        turns.give_back()
        assert turns.take()
        assert not turns.take()

    run(main)


def test_releases_come_first_and_every_fourth_turn_is_for_the_last() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(0)
        lines = {kind: [loop.create_future() for _ in range(3)] for kind in reversed(Kind)}
        for kind, line in lines.items():
            for turn in line:
                turns.wait(turn, kind)

        def served() -> list[int]:
            return [sum(turn.done() for turn in lines[kind]) for kind in Kind]

        for _ in range(3):
            turns.give_back()
        assert served() == [3, 0, 0, 0]
        turns.give_back()
        assert served() == [3, 0, 0, 1]
        for _ in range(3):
            turns.give_back()
        assert served() == [3, 3, 0, 1]
        turns.give_back()
        assert served() == [3, 3, 1, 1]

    run(main)


class Many(Scripted):
    """A `multilock.backend.AttemptsMany`."""

    def attempt_all(self, claims: Sequence[Claim], within: float) -> Sequence[Granted | Busy | Exception]:
        together = tuple(claims)
        answers: list[Granted | Busy | Exception] = self._ask(
            "attempt_all", within, together, lambda: [self._attempt(claim, True) for claim in together]
        )
        return answers


class Blocked:
    """Makes each request of these methods for the name "n" wait until `open` is called."""

    def __init__(self, backend: Scripted, *methods: str) -> None:
        self._open = threading.Event()
        self.held: list[int] = []  #: for each request that waits: the number of its claims
        for method in methods:
            backend.always(method, self._answer)

    def _answer(self, backend: Scripted, call: Call) -> Any:
        if any(claim.name == "n" for claim in call.claims):
            self.held.append(len(call.claims))
            self._open.wait(20)
        return call.execute()

    def open(self) -> None:
        self._open.set()


def test_the_heartbeats_of_a_crowd_go_together_and_take_no_turns() -> None:
    backend = Many()

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=15.0) as client:
            lease = await client.lock("n", fair=True).acquire()
            tasks = await crowd_of(client, backend)
            way = Blocked(backend, "attempt", "attempt_all")
            gathered: Any = client._kernel.face._batches._gathered  # type: ignore[attr-defined]
            # Wait until each heartbeat is in one of the few requests under way, or gathered for the next request.
            await until(lambda: sum(way.held) + len(gathered) == CROWD, within=15)
            assert len(way.held) <= AT_ONCE
            assert await client.lock("m").try_acquire()
            assert await client.lock("o").acquire()
            await lease.release()
            rest, before = len(gathered), len(backend.called("attempt_all"))
            way.open()
            await until(lambda: len(backend.called("attempt_all")) > before)
            assert len(backend.called("attempt_all")[before].claims) >= rest
            await end(tasks)

    run(main)


def test_a_first_attempt_without_a_turn_goes_together_with_others() -> None:
    backend = Many()
    backend.holders["n"] = "another"

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=15.0) as client:
            way = Blocked(backend, "attempt")
            tasks = [asyncio.create_task(client.lock("n", fair=True).acquire()) for _ in range(CROWD)]
            await until(lambda: len(backend.queues["n"]) == CROWD - CARRIERS, within=15)
            assert len(backend.called("attempt_all")) <= AT_ONCE
            assert await client.lock("m").acquire()  # sent after the crowd's requests, but not delayed by them
            way.open()
            await end(tasks)

    run(main)


def test_attempts_sent_together_that_get_no_answer_fail_one_by_one() -> None:
    backend = Many()
    backend.holders["n"] = "another"

    async def main() -> None:
        async with AsyncClient(backend, outage_timeout=0.0) as client:
            tasks = await crowd_of(client, backend)
            backend.always("attempt_all", refused(BackendUnavailable("no answer")))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(error) for error in results} == {BackendUnavailable}
            assert len({id(error) for error in results}) == CROWD
            # the outcomes are unknown, so all attempts are cancelled
            await until(lambda: len(backend.released()) == CROWD)
            assert all(call.details["unsure"] for call in backend.called("release"))

    run(main)


def test_a_first_attempt_without_a_turn_is_not_taken_for_silence(backend: Scripted) -> None:
    """The server answers other requests, so the waiters continue even after the outage_timeout."""
    backend.holders["n"] = "another"
    permits = threading.Semaphore(0)
    ended = threading.Event()

    def in_turn(backend: Scripted, call: Call) -> Any:
        while not permits.acquire(timeout=0.02) and not ended.is_set():
            pass
        return call.execute()

    async def main() -> None:
        async with AsyncClient(backend, request_timeout=2.0, outage_timeout=0.01) as client:
            face: Any = client._kernel.face
            attempt, not_sent = face.attempt, 0

            async def watched(*args: Any) -> Any:
                nonlocal not_sent
                answer = await attempt(*args)
                not_sent += isinstance(answer, NotAsked)
                return answer

            face.attempt = watched
            backend.always("attempt", in_turn)
            tasks = [asyncio.create_task(client.lock("n", fair=True).acquire()) for _ in range(CROWD)]
            while not not_sent:
                permits.release()
                await asyncio.sleep(0.05)
            # the request was not sent, so it is unknown whether "n" is taken
            with pytest.raises(BackendUnavailable, match="was not sent"):
                await client.lock("n", fair=True).acquire(timeout=0.3)
            ended.set()
            await until(lambda: len(backend.queues["n"]) == CROWD, within=15)
            assert [task for task in tasks if task.done()] == []
            await end(tasks)

    run(main)


# A backend that answers at once is called on the loop


def test_a_task_that_acquires_in_a_loop_lets_other_tasks_run() -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://busy-loop") as client:
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            async def acquire_in_a_loop() -> None:
                while True:
                    async with client.lock("a"):
                        pass

            others = asyncio.create_task(other())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(acquire_in_a_loop(), 0.05)
            others.cancel()
            assert turns > 10
            assert not await client.lock("a").is_locked()

    run(main)


def test_memory_needs_no_thread_for_a_request() -> None:
    async def main() -> None:
        before = our_threads()
        async with multilock.connect_async("memory://no-thread") as client:
            async with client.lock("a"):
                assert await client.lock("a").try_acquire() is None
            assert not [thread for thread in our_threads() - before if "request" in thread.name]

    run(main)


def test_memory_refuses_to_be_used_on_another_loop() -> None:
    client = multilock.connect_async("memory://another-loop")

    async def use() -> None:
        await client.lock("a").is_locked()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(use())
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            second.run(use())
        first.run(client.close())


def test_a_lease_that_two_tasks_entered_is_held_until_both_bodies_ended(backend: Scripted) -> None:
    async def main() -> None:
        async with multilock.AsyncClient(backend) as client:
            lease = await client.lock("n").acquire()
            entered, go_on = asyncio.Event(), asyncio.Event()

            async def body() -> None:
                async with lease:
                    entered.set()
                    await go_on.wait()
                    assert lease.is_held()

            async with asyncio.TaskGroup() as tasks:
                async with lease:
                    tasks.create_task(body())
                    await entered.wait()
                go_on.set()
            assert backend.holders == {}

    run(main)


def test_a_release_by_hand_in_an_inner_async_with_block_affects_no_outer_one(backend: Scripted) -> None:
    async def main() -> None:
        async with multilock.AsyncClient(backend) as client:
            lock = client.lock("n", reentrant=True)
            async with lock as outer:
                async with lock as again:
                    assert await again.release()
                assert outer.is_held()
            assert backend.holders == {}

    run(main)
