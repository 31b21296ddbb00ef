"""Several locks at once: what no backend is needed for, and what comes at the worst moment."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import pytest

import multilock
from multilock import Client, LeaseState, LockLost, Loss, LossReason
from multilock.many import in_order
from multilock.testing.conformance.base import Pulse
from tests.unit.kit import Losses, Scripted, eventually, interrupted_at, silence


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


@pytest.fixture
def client(backend: Scripted) -> Iterator[Client]:
    with Client(backend, ttl=20, request_timeout=0.2) as client:
        yield client


def test_names_are_put_in_the_order_of_their_keys_once_each() -> None:
    assert in_order(["b", "a/1", "B", "a", "b", "ä", "a.", "a-"]) == ["ä", "B", "a", "a/1", "a-", "a.", "b"]


def test_a_thousand_names_are_held_together_and_given_back(client: Client, backend: Scripted) -> None:
    with client.lock_all([f"n/{number}" for number in range(1000)]) as lease:
        assert lease.is_held()
        assert len(lease.leases) == len(backend.holders) == 1000
    eventually(lambda: backend.holders == {}, within=20)


def test_parts_are_asked_for_one_after_the_other_and_given_back_the_other_way_round(
    client: Client, backend: Scripted
) -> None:
    with client.lock_all(["c", "a", "b"]):
        assert [call.claims[0].name for call in backend.called("attempt")] == ["a", "b", "c"]
    assert [call.claims[0].name for call in backend.called("release")] == ["c", "b", "a"]


def test_a_try_asks_once_for_each_and_stops_at_the_first_that_is_taken(client: Client, backend: Scripted) -> None:
    backend.holders["b"] = "somebody"
    assert client.lock_all(["a", "b", "c"]).try_acquire() is None
    assert [(call.claims[0].name, call.details["join"]) for call in backend.called("attempt")] == [
        ("a", False),
        ("b", False),
    ]
    assert backend.holders == {"b": "somebody"}


def test_silence_gives_back_what_was_held_and_raises(client: Client, backend: Scripted) -> None:
    backend.script("attempt", lambda backend, call: call.execute(), silence(0.01))
    with pytest.raises(multilock.BackendUnavailable, match="'b'"):
        client.lock_all(["a", "b"]).try_acquire()
    eventually(lambda: backend.holders == {})


def test_a_release_waits_for_one_request_however_many_do_not_answer(client: Client, backend: Scripted) -> None:
    lease = client.lock_all([f"n{number}" for number in range(20)]).acquire()
    backend.always("release", silence())
    started = time.monotonic()
    assert lease.release() is True
    assert time.monotonic() - started < 10 * 0.2
    assert lease.state is LeaseState.RELEASED
    backend.always("release", None)
    eventually(lambda: backend.holders == {}, 10)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_renewal_asks_for_each_part_also_after_one_that_was_not_answered(
    client: Client, backend: Scripted, face: str
) -> None:
    def renew() -> None:
        if face == "blocking":
            client.lock_all(["a", "b", "c"]).acquire().renew()
        else:
            asyncio.run(renew_there())

    async def renew_there() -> None:
        async with multilock.AsyncClient(backend, ttl=20, request_timeout=0.2) as there:
            lease = await there.lock_all(["a", "b", "c"]).acquire()
            await lease.renew()

    backend.script("renew", silence(0.01), lambda backend, call: call.execute(), silence(0.01))
    with pytest.raises(multilock.BackendUnavailable) as caught:
        renew()
    assert caught.value.name == "a"
    assert [call.claims[0].name for call in backend.called("renew")] == ["a", "b", "c"]


def test_a_part_that_is_found_lost_loses_the_set_whatever_was_not_answered(client: Client, backend: Scripted) -> None:
    lease = client.lock_all(["a", "b"]).acquire()
    backend.script("renew", silence(0.01))
    del backend.holders["b"]
    with pytest.raises(LockLost, match="part 'b'"):
        lease.renew()


def test_a_part_that_is_released_by_hand_is_no_loss(client: Client, backend: Scripted) -> None:
    losses = Losses()
    lease = client.lock_all(["a", "b"], on_lost=losses).acquire()
    lease.leases[0].release()
    assert not lease.is_held()
    assert lease.release() is False
    assert backend.holders == {}
    assert losses.calls == []


def test_a_loss_that_the_release_finds_is_told(client: Client, backend: Scripted) -> None:
    losses = Losses()
    lease = client.lock_all(["a", "b"], on_lost=losses).acquire()
    del backend.holders["a"]
    assert lease.release() is False
    loss = losses.wait()
    assert (loss.lease, loss.reason) == (lease, LossReason.TAKEN)
    assert backend.holders == {}
    assert len(losses.calls) == 1


def test_without_renewal_it_lasts_as_long_as_its_first_part(client: Client) -> None:
    losses = Losses()
    with Pulse() as pulse:
        lease = client.lock_all(["a", "b"], ttl=1.0, renew=False, on_lost=losses).acquire()
        loss = losses.wait()
        stopped = pulse.stopped()
    assert loss.lease is lease
    assert "part 'a'" in loss.message
    assert losses.times[0] <= loss.valid_until + stopped


def test_a_callback_that_hangs_keeps_the_others_for_one_ttl(client: Client, backend: Scripted) -> None:
    hangs = threading.Event()
    lease = client.lock_all(["a", "b"], ttl=0.6, on_lost=lambda loss: hangs.wait(30)).acquire()
    backend.notices.gone(lease.leases[0].owner.partition("@")[0], LossReason.TAKEN, "a test took it")
    assert not lease.is_held()
    assert "b" in backend.holders
    eventually(lambda: "b" not in backend.holders)
    hangs.set()


@pytest.mark.parametrize("held", ["acquire", "with"])
def test_a_forked_child_holds_none_of_it_and_lost_none_of_it(client: Client, held: str) -> None:
    lease = client.lock_all(["a", "b"]).acquire()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not lease.is_held() and lease.state is LeaseState.RELEASED else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert lease.is_held()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine that was never begun
def test_an_interrupt_anywhere_in_the_acquire_leaves_nothing(backend: Scripted) -> None:
    for step in range(10_000):
        with Client(backend, ttl=20, request_timeout=0.2) as client:
            lease = None
            try:
                with interrupted_at(step, "acquire_all") as where:
                    lease = client.lock_all(["a", "b", "c"]).acquire()
            except KeyboardInterrupt:
                assert lease is None
                eventually(lambda: backend.holders == {})
            else:
                assert lease.release()
                if not where:  # else a finalizer was interrupted, which tells nobody
                    break
    assert step > 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine that was never begun
def test_an_interrupt_anywhere_in_with_leaves_nothing(backend: Scripted) -> None:
    for step in range(10_000):
        with Client(backend, ttl=20, request_timeout=0.2) as client:
            where: list[str] = []
            try:
                with interrupted_at(step, "LeaseSet.__exit__") as where, client.lock_all(["a", "b", "c"]):
                    pass
            except KeyboardInterrupt:
                eventually(lambda: backend.holders == {})
            if not where:
                break
    assert backend.holders == {}
    assert step > 50


async def holding(client: multilock.AsyncClient, name: str) -> None:
    async with asyncio.timeout(5):
        async for leader in client.election(name).observe():
            if leader:
                return


def test_a_task_that_is_cancelled_between_two_parts_gives_the_first_back() -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://many-cancel") as client, client.lock("b"):
            waiting = asyncio.create_task(client.lock_all(["a", "b"]).try_acquire(30))
            await holding(client, "a")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with client.lock("a").acquire(timeout=5):
                pass

    asyncio.run(main())


def test_the_body_is_cancelled_at_the_loss_of_one_part() -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://many-body") as client:
            told: asyncio.Queue[Loss] = asyncio.Queue()

            async def lose_b() -> None:
                async with client.lock_all(["a", "b"], on_lost=told.put) as lease:
                    assert lease.is_held()
                    await client.force_release("b")
                    await asyncio.sleep(20)

            with pytest.raises(LockLost, match="part 'b'"):
                await lose_b()
            assert "part 'b'" in (await told.get()).message
            async with client.lock("a").acquire(timeout=5), client.lock_all(["b", "c"]).acquire(timeout=5) as second:
                assert [part.name for part in second.leases] == ["b", "c"]
            assert told.empty()

    asyncio.run(main())


def test_it_serves_as_a_threading_lock(client: Client, backend: Scripted) -> None:
    lock = client.lock_all(["a", "b"]).as_threading_lock()
    with lock:
        assert lock.locked()
        assert sorted(backend.holders) == ["a", "b"]
    assert backend.holders == {}
