"""Readers, writers and permits in the kernel and in both APIs, on a backend that records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import multilock
from multilock import CapabilityMissing, Client, LockInfo, LockTimeout
from multilock.kernel.leader_changes import leader_info
from tests.unit.kit import Scripted


@pytest.fixture
def backend() -> Scripted:
    return Scripted(read_write=True, semaphore=True)


@pytest.fixture
def client(backend: Scripted) -> Iterator[Client]:
    with Client(backend) as client:
        yield client


@pytest.fixture
def together() -> Iterator[Client]:
    """A client of a backend that lets several hold at once."""
    with multilock.connect("memory://unit-shared") as client:
        yield client


def test_shared_claims_are_fair_if_the_backend_is_and_contain_the_number(client: Client, backend: Scripted) -> None:
    both = client.read_write_lock("n")
    for lock in (client.lock("m"), both.reader(), both.writer(), client.semaphore("s", 7)):
        lock.acquire().release()
    claims = [call.claims[0] for call in backend.called("attempt")]
    assert [(claim.kind, claim.mode, claim.fair, claim.permits) for claim in claims] == [
        ("lock", "x", False, 0),
        ("read", "r", True, 0),
        ("write", "x", True, 0),
        ("permit", "p7", True, 7),
    ]


@pytest.mark.parametrize(
    ("options", "reader", "writer", "permit"),
    [({}, True, True, True), ({"fair": True}, True, True, True), ({"fair": False}, True, False, True)],
    ids=["as the backend can", "fair", "unfair"],
)
def test_of_shared_modes_only_an_unfair_writer_queues_inside_the_client(
    client: Client, options: dict[str, bool], reader: bool, writer: bool, permit: bool
) -> None:
    both = client.read_write_lock("n", **options)  # type: ignore[arg-type]
    wants = [lock._want for lock in (both._reader, both._writer, client.semaphore("s", 2, **options))]  # type: ignore[arg-type, union-attr]
    assert [want.queues for want in wants] == [reader, writer, permit]
    assert all(want.fair for want in wants)


def test_a_backend_without_order_serves_shared_modes_and_refuses_fair() -> None:
    with Client(Scripted(read_write=True, semaphore=True, fair=False)) as client:
        both = client.read_write_lock("n")
        assert [(lock._want.fair, lock._want.queues) for lock in (both._reader, both._writer)] == [
            (False, True),
            (False, False),
        ]
        for make in (lambda: client.read_write_lock("n", fair=True), lambda: client.semaphore("n", 2, fair=True)):
            with pytest.raises(CapabilityMissing, match="no order of arrival"):
                make()


def test_a_backend_without_shared_modes_receives_no_shared_request() -> None:
    backend = Scripted()
    with Client(backend) as client:
        with pytest.raises(CapabilityMissing, match="has no readers and writers") as caught:
            client.read_write_lock("n")
        assert caught.value.name == "n"
        with pytest.raises(CapabilityMissing, match="has no semaphores"):
            client.semaphore("n", 2)
        with pytest.raises(CapabilityMissing):
            client.locked("n", shared=True)
    assert backend.called("attempt") == []


def test_an_upgrade_is_refused_before_any_request(client: Client, backend: Scripted) -> None:
    both = client.read_write_lock("n")
    with both.reader():
        asked = len(backend.called("attempt"))
        for attempt in (both.writer().acquire, both.writer().try_acquire, client.read_write_lock("n").writer().acquire):
            with pytest.raises(CapabilityMissing, match="asks to write 'n' while it has a read lease"):
                attempt()
        assert len(backend.called("attempt")) == asked
        client.read_write_lock("other").writer().acquire().release()
    both.writer().acquire().release()


def test_an_upgrade_is_recognised_among_several_leases(together: Client) -> None:
    both = together.read_write_lock("n")
    first, second = both.reader().acquire(), both.reader().acquire()
    second.release()
    with pytest.raises(CapabilityMissing):
        both.writer().try_acquire()
    first.release()
    both.writer().acquire().release()


def test_an_upgrade_is_recognised_for_each_task_separately() -> None:
    async def try_to_write(both: multilock.AsyncReadWriteLock) -> multilock.AsyncLease | None:
        return await both.writer().try_acquire()

    async def main() -> None:
        async with multilock.connect_async("memory://upgrade") as client:
            both = client.read_write_lock("n")
            async with both.reader():
                with pytest.raises(CapabilityMissing, match="this task asks to write"):
                    await both.writer().try_acquire()
                assert await asyncio.create_task(try_to_write(both)) is None

    asyncio.run(main())


def test_a_thread_deadlocks_with_itself_only_if_it_has_all_permits(together: Client) -> None:
    semaphore = together.semaphore("s", 2)
    scope = together._scope()
    want = semaphore._want  # type: ignore[attr-defined]
    first, second = semaphore.acquire(), semaphore.acquire()
    assert scope.keeps_out(want)
    first.release()
    assert not scope.keeps_out(want)
    assert scope.keeps_out(together.lock("s")._want)  # type: ignore[attr-defined]
    second.release()
    assert not scope.keeps_out(together.lock("s")._want)  # type: ignore[attr-defined]


def test_a_campaign_blocked_by_readers_does_not_report_another_leader(together: Client) -> None:
    election = together.election("n")
    with together.read_write_lock("n").reader():
        assert election.leader() is None
        with pytest.raises(LockTimeout, match="another node leads, or holds a lock of that name"):
            election.campaign(timeout=0)


def test_readers_and_permits_are_not_leaders() -> None:
    assert [leader_info(LockInfo("n", kind)) is not None for kind in ("leader", "lock", "write", "read", "permit")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_function_cannot_be_decorated_as_reader_and_with_a_permit_at_once(client: Client, backend: Scripted) -> None:
    client.locked("n/{who}", shared=True)(lambda who: who)(3)
    client.locked("s", permits=4)(lambda: None)()
    assert [call.claims[0].mode for call in backend.called("attempt")] == ["r", "p4"]
    with pytest.raises(TypeError, match="not with both"):
        client.locked("n", shared=True, permits=2)
    with pytest.raises(TypeError, match="shared must be"):
        client.locked("n", shared=1)
    with pytest.raises(ValueError, match="permits is 0"):
        client.locked("n", permits=0)


@pytest.mark.parametrize("option", ["timeout", "hold_at_least"])
def test_an_option_that_does_not_apply_is_refused(client: Client, option: str) -> None:
    with pytest.raises(TypeError, match=f"read_write_lock.*{option}"):
        client.read_write_lock("n", **{option: 3})  # type: ignore[arg-type]
