"""asyncio without threads: the event loop sends a request and later reads the reply. The tests cause faults between
these two steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import multilock
from multilock import AsyncClient, BackendRejected, BackendUnavailable
from multilock.aio.channels import MOST, Channels
from multilock.aio.requests import _Request
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import inner
from multilock.testing.proxy import Fault
from tests.backends.redis.descriptors import its_number_is_free
from tests.backends.redis.kit import WITHIN, Bare, connected, holder_of
from tests.servers import RedisServer

TTL = 2.0


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await main()

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[AsyncClient]:
    async with multilock.connect_async(url, **{"ttl": TTL, **options}) as client:
        yield client


def channels(client: AsyncClient) -> Channels:
    face: Any = client._kernel.face
    found: Channels = face._channels
    return found


def request_threads() -> int:
    return sum(thread.name == "multilock-request" for thread in threading.enumerate())


async def until(ready: Callable[[], object]) -> None:
    end = time.monotonic() + WITHIN
    while not ready():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


async def cancelled_under_way(ours: AsyncClient, bare: Bare, task: asyncio.Task[Any], fault: Fault) -> None:
    """Cancel the task while its request is under way. Check that the client closes the connection, and that the server
    keeps nothing of the request."""
    await until(lambda: fault.happened)
    [channel] = channels(ours).living
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert channel not in channels(ours).living
    await until(lambda: holder_of(bare) is None)


def test_a_free_lock_is_acquired_and_released_over_one_connection(server: RedisServer, bare: Bare) -> None:
    async def main() -> None:
        async with client(server.url) as ours:
            # The first request runs in a thread, which loads the scripts.
            await (await ours.lock("a").acquire()).release()
            before = bare.info("stats")["total_connections_received"]
            for _ in range(20):
                await (await ours.lock("a").acquire()).release()
            assert bare.info("stats")["total_connections_received"] == before
            assert len(channels(ours).idle) == len(channels(ours).living) == 1

    run(main)


@pytest.mark.oracle
@pytest.mark.parametrize("then", ["cut", "hold"])
def test_a_single_try_whose_reply_is_lost_leaves_nothing(
    server: RedisServer, proxy: FaultProxy, bare: Bare, then: Any
) -> None:
    async def main() -> None:
        async with client(proxy.url, request_timeout=1.0) as ours:
            await (await ours.lock("a").acquire()).release()
            lost = proxy.drop_reply(b"multilock/a", then=then)
            with pytest.raises(BackendUnavailable) as caught:
                await ours.lock("a").try_acquire()
            assert caught.value.unknown
            assert lost.happened
            await until(lambda: holder_of(bare) is None)
            assert len(channels(ours).living) <= 1
            assert await ours.lock("a").try_acquire()

    run(main)


def test_a_release_whose_reply_is_lost_is_repeated_in_the_background(proxy: FaultProxy, bare: Bare) -> None:
    async def main() -> None:
        async with client(proxy.url, request_timeout=0.3) as ours:
            lease = await ours.lock("a").acquire()
            proxy.hold_request(b"multilock/a")
            assert await lease.release()
            await until(lambda: holder_of(bare) is None)

    run(main)


def test_a_cancelled_request_ends_its_connection_and_is_undone(proxy: FaultProxy, bare: Bare) -> None:
    async def main() -> None:
        async with client(proxy.url, request_timeout=5.0) as ours:
            await (await ours.lock("a").acquire()).release()
            lost = proxy.drop_reply(b"multilock/a", then="hold")
            task = asyncio.create_task(ours.lock("a").try_acquire())
            await cancelled_under_way(ours, bare, task, lost)
            other = await ours.lock("b").acquire()
            assert other.is_held()

    run(main)


class LateSocket:
    """A socket that behaves as if the process had been paused just before sending."""

    def __init__(self, sock: socket.socket, by: float) -> None:
        self._sock = sock
        self._by = by

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: bytes) -> int:
        time.sleep(self._by)
        return self._sock.send(data)


def test_a_pause_before_the_sending_only_shortens_the_lease(server: RedisServer, bare: Bare) -> None:
    async def main() -> None:
        async with client(server.url, ttl=5.0) as ours:
            await (await ours.lock("a").acquire()).release()
            [channel] = channels(ours).living
            wire: Any = channel._channel
            wire = wire._wire
            real, wire._sock = wire._sock, LateSocket(wire._sock, by=0.3)
            lease = await ours.lock("a").try_acquire()
            assert lease
            assert inner(lease).granted.sent_at <= multilock.now() - 0.3
            assert lease.remaining() <= 4.5 - 0.3
            assert await lease.release()
            wire._sock = real
            assert holder_of(bare) is None

    run(main)


def test_a_cancelled_release_continues_in_the_background(proxy: FaultProxy, bare: Bare) -> None:
    async def main() -> None:
        async with client(proxy.url, request_timeout=5.0) as ours:
            lease = await ours.lock("a").acquire()
            held = proxy.hold_request(b"multilock/a")
            task = asyncio.create_task(lease.release())
            await cancelled_under_way(ours, bare, task, held)
            held.release()  # the delayed request arrives now, and finds another holder
            other = await ours.lock("a").try_acquire()
            assert other
            await asyncio.sleep(0.2)
            await other.renew()

    run(main)


def test_a_reply_read_late_by_a_blocked_loop_counts_from_the_sending(server: RedisServer) -> None:
    async def main() -> None:
        async with client(server.url, ttl=5.0) as ours:
            await (await ours.lock("a").acquire()).release()
            task = asyncio.create_task(ours.lock("a").try_acquire())
            await asyncio.sleep(0)
            assert not channels(ours).idle, "it is sent"
            sent_by = multilock.now()
            time.sleep(0.3)  # noqa: ASYNC251 (what no program should do on a loop)
            lease = await task
            assert lease
            assert inner(lease).granted.sent_at <= sent_by
            assert lease.remaining() <= 4.5 - 0.3

    run(main)


def test_a_release_whose_reply_waited_for_a_blocked_loop_succeeds(
    server: RedisServer, bare: Bare, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with client(server.url, request_timeout=1.0) as ours:
            await (await ours.lock("a").acquire()).release()  # this loads the scripts into the server
            lease = await ours.lock("a").acquire()
            [channel] = channels(ours).living
            task = asyncio.create_task(lease.release())
            await asyncio.sleep(0)
            assert not channels(ours).idle, "it is sent"
            time.sleep(1.5)  # noqa: ASYNC251 (longer than a request may take)
            assert await task
            assert holder_of(bare) is None
            assert channels(ours).idle == [channel]
            own = ours._kernel.client
            said = [record for record in caplog.records if str(getattr(record, "lock_owner", "")).startswith(own)]
            assert not said, "and not in the background"

    run(main)


def test_an_idle_connection_closed_by_the_server_costs_no_request(server: RedisServer, bare: Bare) -> None:
    async def main() -> None:
        async with client(server.url) as ours:
            await (await ours.lock("a").acquire()).release()
            [channel] = channels(ours).living
            bare.client_kill_filter(skipme=True, _type="normal")
            time.sleep(0.05)  # noqa: ASYNC251 (it has ended, and the loop has not seen it)
            complaints: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
            assert await ours.lock("a").try_acquire()
            assert channel not in channels(ours).living
            del channel
            gc.collect()
            assert not complaints, "of an answer that nobody awaits"

    run(main)


@pytest.mark.parametrize("ends", ["in the answer", "before the request", "while it is idle"])
def test_a_closed_descriptor_is_unregistered_before_a_connection_can_reuse_its_number(
    proxy: FaultProxy, ends: str
) -> None:
    run(lambda: its_number_is_free(proxy, ends))


def test_a_client_whose_loop_was_closed_during_a_request_works_on_another_loop(
    server: RedisServer, proxy: FaultProxy, bare: Bare
) -> None:
    first = asyncio.new_event_loop()
    first.set_exception_handler(lambda *_: None)  # ignore the error of the task that remains on the loop
    ours = multilock.connect_async(proxy.url, ttl=TTL, request_timeout=1.0)
    lock = ours.lock("a")

    async def once() -> None:
        await (await lock.acquire()).release()

    first.run_until_complete(once())
    proxy.hold_request(b"multilock/a")
    task = first.create_task(lock.try_acquire())
    first.run_until_complete(asyncio.sleep(0.05))
    first.close()

    async def again() -> None:
        async with ours:
            assert await ours.lock("b").try_acquire()
            proxy.hold_request(b"multilock/c")
            # The deadline of the first request has passed too, and must not hide the deadline of this request.
            with pytest.raises(BackendUnavailable):
                await ours.lock("c").try_acquire()
            assert not task.done()

    run(again)


def test_the_loop_notices_the_end_of_an_idle_connection(server: RedisServer, bare: Bare) -> None:
    async def main() -> None:
        async with client(server.url) as ours:
            await (await ours.lock("a").acquire()).release()
            bare.client_kill_filter(skipme=True, _type="normal")
            await until(lambda: not channels(ours).living)
            assert not channels(ours).idle

    run(main)


def test_scripts_that_the_server_lost_are_loaded_again(server: RedisServer, bare: Bare) -> None:
    async def main() -> None:
        async with client(server.url) as ours:
            lease = await ours.lock("a").acquire()
            bare.script_flush()
            assert await lease.release()
            bare.script_flush()
            assert await ours.lock("a").try_acquire()

    run(main)


def test_a_refusal_leaves_the_connection_open(server: RedisServer, bare: Bare) -> None:
    async def main() -> None:
        bare.hset("multilock/a", "another", 1)
        async with client(server.url) as ours:
            for _ in range(3):
                with pytest.raises(BackendRejected):
                    await ours.lock("a").acquire()
            assert await ours.lock("b").try_acquire()
            assert len(channels(ours).living) == len(channels(ours).idle) == 1

    run(main)


def test_a_waiter_is_served_in_order_and_woken_by_the_releaser(server: RedisServer) -> None:
    async def main() -> None:
        async with client(server.url, ttl=10.0) as ours, client(server.url, ttl=10.0) as theirs:
            held = await theirs.lock("a").acquire()
            order: list[int] = []

            async def wait(number: int) -> None:
                async with ours.lock("a", fair=True):
                    order.append(number)

            tasks = []
            for number in range(3):
                tasks.append(asyncio.create_task(wait(number)))
                await until(lambda: theirs_waiting() == number + 1)  # noqa: B023
            before = time.monotonic()
            await held.release()
            await asyncio.gather(*tasks)
            assert order == [0, 1, 2]
            assert time.monotonic() - before < 1.0, "no heartbeat had to find out"

        assert not channels(ours).living

    with multilock.connect(server.url) as looker:

        def theirs_waiting() -> int:
            info = looker.inspect("a")
            return (info.waiting or 0) if info else 0

        run(main)


def test_requests_beyond_the_limit_of_connections_use_threads(server: RedisServer, proxy: FaultProxy) -> None:
    async def main() -> None:
        async with client(proxy.url, ttl=30.0) as ours:
            proxy.delay(0.1)
            leases = await asyncio.gather(*(ours.lock(f"n{number}").acquire() for number in range(3 * MOST)))
            assert all(lease.is_held() for lease in leases)
            assert len(channels(ours).living) == MOST
            assert request_threads() > 0
            assert all(await asyncio.gather(*(lease.release() for lease in leases)))

    run(main)


def made_slowly(ours: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], threading.Event]:
    """Let the backend finish new connections only once the returned event is set."""
    backend: Any = ours._kernel.backend
    connect = backend.channel
    made: list[Any] = []
    go_on = threading.Event()

    def slow(within: float) -> Any:
        made.append(connect(within))
        go_on.wait(WITHIN)
        return made[-1]

    monkeypatch.setattr(backend, "channel", slow)
    return made, go_on


def test_a_connection_without_a_waiting_request_is_closed(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with client(server.url, request_timeout=5.0) as ours:
            made, go_on = made_slowly(ours, monkeypatch)
            task = asyncio.create_task(ours.lock("a").try_acquire())
            await until(lambda: made)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert channels(ours).opening == 0
            go_on.set()
            await until(lambda: made[0].fileno() < 0)
            assert not channels(ours).living

    run(main)


def test_a_connection_completed_during_the_cancel_of_its_request_is_closed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel comes between the receipt of the reply and its use."""
    settle = _Request._settle

    async def main() -> None:
        async with client(server.url, request_timeout=5.0) as ours:
            made, go_on = made_slowly(ours, monkeypatch)
            task = asyncio.create_task(ours.lock("a").try_acquire())
            await until(lambda: made)

            def settle_and_cancel(request: _Request, result: Any, error: BaseException | None) -> None:
                settle(request, result, error)
                task.cancel()

            monkeypatch.setattr(_Request, "_settle", settle_and_cancel)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            monkeypatch.undo()
            assert made[0].fileno() < 0
            assert channels(ours).opening == 0

    run(main)


@pytest.mark.parametrize("closed_before", [True, False], ids=["closed before", "closed after"])
def test_a_connection_that_ended_unnoticed_is_closed_with_the_client(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, closed_before: bool
) -> None:
    first = asyncio.new_event_loop()
    ours = multilock.connect_async(server.url, ttl=TTL, request_timeout=5.0)
    made, go_on = made_slowly(ours, monkeypatch)

    async def begin() -> None:
        task = asyncio.create_task(ours.lock("a").try_acquire())
        await until(lambda: made)
        task.cancel()
        await asyncio.wait([task])

    first.run_until_complete(begin())
    told = threading.Event()
    tell = first.call_soon_threadsafe

    def noted(*words: Any, **more: Any) -> Any:
        try:
            return tell(*words, **more)
        finally:
            told.set()

    monkeypatch.setattr(first, "call_soon_threadsafe", noted)
    if closed_before:
        first.close()
    go_on.set()
    assert told.wait(WITHIN)
    first.close()
    run(ours.close)
    assert made[0].fileno() < 0


def test_a_connection_made_while_the_client_closes_is_closed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The request must come after the end of the connection, but within this time.
    monkeypatch.setattr("multilock.aio.requests.GRACE", WITHIN)

    async def main() -> None:
        ours = multilock.connect_async(server.url, ttl=TTL, request_timeout=0.5)
        made, go_on = made_slowly(ours, monkeypatch)
        task = asyncio.create_task(ours.lock("a").try_acquire())
        await until(lambda: made)
        await ours.close()
        go_on.set()
        await until(lambda: made[0].fileno() < 0)
        assert not channels(ours).living
        task.cancel()
        await asyncio.wait([task])

    run(main)


def test_a_loop_that_cannot_watch_sockets_uses_threads(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        def add_reader(*_: Any) -> None:
            raise NotImplementedError

        loop = asyncio.get_running_loop()
        async with client(server.url) as ours:
            with monkeypatch.context() as patch:
                patch.setattr(loop, "add_reader", add_reader)
                assert await (await ours.lock("a").acquire()).release()
            assert not channels(ours).may_open()
            assert await (await ours.lock("a").acquire()).release()

    run(main)


def test_closing_ends_the_connections(server: RedisServer, bare: Bare) -> None:
    before = connected(bare)

    async def main() -> None:
        async with client(server.url) as ours:
            await ours.lock("a").acquire()
        assert not channels(ours).living
        await until(lambda: connected(bare) <= before)

    run(main)


def test_a_client_moves_to_another_loop_when_the_first_is_closed(server: RedisServer, bare: Bare) -> None:
    ours = multilock.connect_async(server.url, ttl=TTL)

    async def once() -> None:
        await (await ours.lock("a").acquire()).release()
        assert len(channels(ours).living) == 1

    run(once)
    run(once)
    run(ours.close)
    assert not channels(ours).living
