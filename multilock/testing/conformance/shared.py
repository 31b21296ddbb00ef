"""Locks that several holders may share: read-write locks and semaphores."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from multilock import (
    BackendRejected,
    CapabilityMissing,
    Client,
    DistributedLock,
    Lease,
    LeaseState,
    Loss,
    LossReason,
    now,
)
from multilock.kernel.acquire import _Contender
from multilock.model import Busy
from multilock.testing.conformance.base import NAME, SOON, Conformance, Pulse, Recorder, eventually, queued, refused
from multilock.testing.conformance.faces import AsyncioFace, Face, background
from multilock.testing.conformance.places import Place

__all__ = ["ReadWriteConformance", "SemaphoreConformance"]

QUICK = 2.0  # seconds until every waiter that may enter has entered, even if its backend polls
WAITS_FOR = 0.5  # seconds that an impatient writer waits
# seconds; timers of waiters are at least this long. Only the pause before a refused request is repeated is shorter.
TIMERS = 1.0
NEVER = 3600.0  # seconds, longer than any test


def reader(client: Client, **options: object) -> DistributedLock:
    """Return a reader's lock."""
    return client.read_write_lock(NAME, **options).reader()  # type: ignore[arg-type]


def writer(client: Client, **options: object) -> DistributedLock:
    """Return a writer's lock."""
    return client.read_write_lock(NAME, **options).writer()  # type: ignore[arg-type]


class ReadWriteConformance(Conformance):
    """Tests for a backend with readers and writers. Other backends must refuse them before any I/O."""

    @pytest.fixture(autouse=True)
    def _can(self, client: Client) -> None:
        if not client.capabilities.read_write:
            with pytest.raises(CapabilityMissing, match="has no readers and writers"):
                client.read_write_lock(NAME)
            pytest.skip("declared: it has no readers and writers")

    def test_many_readers_hold_together_and_a_writer_holds_alone(self, client: Client, other: Client) -> None:
        with reader(client) as one, reader(other) as two:
            assert one.is_held()
            assert two.is_held()
            assert background(lambda: writer(other).try_acquire()).result(SOON) is None
        with writer(client):
            assert reader(other).try_acquire() is None
            assert writer(other).try_acquire() is None

    def test_a_plain_lock_of_the_same_name_excludes_readers_and_writers(self, client: Client, other: Client) -> None:
        with client.lock(NAME):
            assert reader(other).try_acquire() is None
            assert writer(other).try_acquire() is None
        with reader(client):
            assert other.lock(NAME).try_acquire() is None
        with writer(client):
            assert other.lock(NAME).try_acquire() is None

    def test_read_write_lock_always_returns_the_same_two_locks(self, client: Client) -> None:
        both = client.read_write_lock(NAME)
        assert both.name == both.reader().name == both.writer().name == NAME
        both.reader().acquire()
        assert both.reader().release() is True
        both.writer().acquire()
        assert both.writer().release() is True

    def test_a_reader_lock_is_held_while_any_of_its_leases_is(self, client: Client) -> None:
        lock = reader(client)
        first = lock.acquire()
        second = background(lock.acquire).result(SOON)
        assert (first.owner, first.token) != (second.owner, second.token)
        second.release()
        assert lock.is_held()
        first.release()
        assert not lock.is_held()

    def test_each_reader_is_renewed_separately(self, client: Client, place: Place) -> None:
        """One lease of a name can end while another lease of it in the same client continues."""
        lock = reader(client, ttl=place.steady_ttl)
        first, second = lock.acquire(), background(lock.acquire).result(SOON)
        first.release()
        until = now() + 1.3 * second.ttl
        while now() < until:
            assert second.is_held()
            time.sleep(0.05)
        second.renew()
        assert second.release() is True

    def test_a_waiting_writer_is_not_starved_by_a_stream_of_readers(self, client: Client, other: Client) -> None:
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set():
                with reader(client).acquire(timeout=SOON):
                    time.sleep(0.01)

        streams = [background(read) for _ in range(4)]
        try:
            for _ in range(3):
                with writer(other).acquire(timeout=SOON):
                    pass
        finally:
            ended.set()
        for stream in streams:
            stream.result(2 * SOON)

    def test_readers_behind_a_writer_that_gives_up_enter_at_once(
        self, client: Client, other: Client, pulse: Pulse
    ) -> None:
        first = reader(client).acquire()
        giving_up = background(lambda: refused(lambda seconds: writer(other).try_acquire(timeout=seconds)))
        eventually(lambda: queued(client, NAME))
        behind = [background(lambda: reader(client).acquire(timeout=SOON)) for _ in range(3)]
        assert giving_up.result(SOON) is None
        begun = now()
        leases = [each.result(SOON) for each in behind]
        assert now() - begun < QUICK + pulse.stopped()
        assert first.is_held()
        for lease in leases:
            assert lease.release()

    def test_readers_behind_a_writer_that_gives_up_are_admitted_by_push(
        self, client: Client, other: Client, face: Face, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not client.capabilities.push_wait:
            pytest.skip("declared: waiters poll")
        by_the_timer = _Contender._look_again_in

        def by_a_push(self: _Contender, busy: Busy) -> float:
            seconds = by_the_timer(self, busy)
            return seconds if seconds < TIMERS else NEVER

        monkeypatch.setattr(_Contender, "_look_again_in", by_a_push)
        lock: Any = writer(other, ttl=30)

        async def cancelled() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(WAITS_FOR):
                    await lock._target.acquire()

        def gives_up() -> None:
            if isinstance(face, AsyncioFace):
                face.run(cancelled())
            else:
                assert lock.try_acquire(timeout=WAITS_FOR) is None

        first = reader(client, ttl=30).acquire()
        giving_up = background(gives_up)
        eventually(lambda: queued(client, NAME))
        behind = [background(lambda: reader(client, ttl=30).acquire(timeout=2 * SOON)) for _ in range(3)]
        giving_up.result(SOON)
        leases = [each.result(SOON) for each in behind]
        assert all(lease.release() for lease in (first, *leases))

    def test_waiting_readers_enter_together(self, client: Client, other: Client) -> None:
        held = writer(client).acquire()
        waiting = [background(lambda: reader(other).acquire(timeout=SOON)) for _ in range(5)]
        # ``waiting`` is None if the backend has no queue.
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        held.release()
        leases = [each.result(SOON) for each in waiting]
        assert all(lease.is_held() for lease in leases)
        for lease in leases:
            assert lease.release()

    def test_readers_and_writers_never_overlap_under_contention(self, client: Client, other: Client) -> None:
        reading: list[int] = []
        writing: list[int] = []
        wrong = 0

        def work(client: Client, me: int) -> None:
            nonlocal wrong
            for turn in range(8):
                writes = (turn + me) % 3 == 0
                with (writer if writes else reader)(client).acquire(timeout=30):
                    mine = writing if writes else reading
                    mine.append(me)
                    wrong += len(writing) > 1 or bool(writing and reading)
                    time.sleep(0.001)
                    mine.remove(me)

        clients = [client, other, client, other]
        for done in [background(lambda c=c, n=n: work(c, n)) for n, c in enumerate(clients)]:  # type: ignore[misc]
            done.result(40)
        assert wrong == 0

    def test_writers_have_greater_tokens_than_the_readers_before_them(self, client: Client, other: Client) -> None:
        """A resource compares the token of a writer with that of a reader before or after it, but never the tokens of
        two readers."""
        if not client.capabilities.fencing:
            pytest.skip("declared: it has no tokens")
        tokens: list[tuple[str, int]] = []
        for take in (writer, reader, writer, reader):
            with take(client) as lease:
                tokens.append((take.__name__, lease.fence()))
                if take is reader:
                    with reader(other) as second:
                        tokens.append(("reader", second.fence()))
        assert len({token for _, token in tokens}) == len(tokens)
        written = [(number, token) for number, (kind, token) in enumerate(tokens) if kind == "writer"]
        for number, token in written:
            assert all(before < token for _, before in tokens[:number])
            assert all(after > token for _, after in tokens[number + 1 :])

    def test_no_holder_can_change_between_reader_and_writer(self, client: Client) -> None:
        with reader(client):
            with pytest.raises(CapabilityMissing, match="asks to write"):
                writer(client).acquire()
            with pytest.raises(CapabilityMissing):
                writer(client, reentrant=True).try_acquire()
        with writer(client), pytest.raises(CapabilityMissing, match="asks to read"):
            reader(client).try_acquire(timeout=1)
        assert client.inspect(NAME) is None

    def test_a_read_lease_of_another_client_raises_no_upgrade_error_here(self, client: Client) -> None:
        lease = background(reader(client).acquire).result(SOON)
        assert writer(client).try_acquire() is None
        lease.release()
        assert writer(client).try_acquire() is not None

    def test_a_reentrant_reader_can_acquire_again_behind_a_waiting_writer(self, client: Client, other: Client) -> None:
        first = reader(client, reentrant=True).acquire()
        waiting = background(lambda: writer(other).acquire(timeout=SOON))
        eventually(lambda: queued(other, NAME))
        second = reader(client, reentrant=True).acquire(timeout=0)
        assert second == first
        first.release()
        assert second.is_held()
        second.release()
        assert waiting.result(SOON).is_held()

    def test_a_reentrant_reader_cannot_be_acquired_as_a_reentrant_plain_lock(self, client: Client) -> None:
        with reader(client, reentrant=True):
            assert client.lock(NAME, reentrant=True).try_acquire() is None

    def test_force_release_takes_the_name_from_every_reader(self, client: Client, other: Client, place: Place) -> None:
        losses: Recorder[Loss[Lease]] = Recorder()
        lock = reader(client, on_lost=losses, ttl=place.quick_ttl)
        leases = [lock.acquire(), background(lock.acquire).result(SOON)]
        assert other.force_release(NAME) is True
        losses.wait(2)
        assert {loss.reason for loss in losses.calls} <= {LossReason.TAKEN, LossReason.SESSION_LOST}
        assert [lease.state for lease in leases] == [LeaseState.LOST] * 2
        assert other.force_release(NAME) is False

    def test_inspect_counts_the_readers(self, client: Client, other: Client) -> None:
        leases = [reader(client).acquire(), background(reader(other).acquire).result(SOON)]
        info = other.inspect(NAME)
        assert info is not None
        assert (info.name, info.kind, info.holders, info.permits) == (NAME, "read", 2, None)
        assert sorted([info.owner or "", *(each.owner or "" for each in info.others)]) == sorted(
            lease.owner for lease in leases
        )
        [listed] = other.inspect_all()
        assert (listed.name, listed.holders, listed.others) == (NAME, 2, ())
        assert reader(client).is_locked()

    def test_no_candidate_is_elected_while_readers_hold_the_name(self, client: Client) -> None:
        with reader(client):
            assert client.election(NAME).leader() is None

    def test_a_lost_reply_leaves_no_reader_behind(self, client: Client, other: Client, place: Place) -> None:
        dropped = place.drop_reply("attempt")
        lease = reader(client).acquire(timeout=SOON)
        dropped.wait(SOON)
        lease.release()
        assert writer(other).acquire(timeout=SOON).release()
        eventually(lambda: place.leftovers() == [])

    def test_a_decorated_function_runs_as_a_reader(self, client: Client, other: Client, face: Face) -> None:
        seen: list[bool] = []

        def body() -> None:
            seen.append(background(lambda: reader(other).try_acquire()).result(SOON) is not None)
            seen.append(background(lambda: writer(other).try_acquire()).result(SOON) is not None)

        client.locked(NAME, shared=True)(face.function(body, blocks=True))()
        assert seen == [True, False]

    def test_readers_and_writers_leave_nothing_at_the_server(self, client: Client, other: Client, place: Place) -> None:
        with reader(client), reader(other):
            assert refused(lambda seconds: other.lock(NAME).try_acquire(timeout=seconds)) is None
        with writer(other):
            assert refused(lambda seconds: reader(client).try_acquire(timeout=seconds)) is None
        eventually(lambda: place.leftovers() == [])


class SemaphoreConformance(Conformance):
    """Tests for a backend with semaphores. Other backends must refuse them before any I/O."""

    @pytest.fixture(autouse=True)
    def _can(self, client: Client) -> None:
        if not client.capabilities.semaphore:
            with pytest.raises(CapabilityMissing, match="has no semaphores"):
                client.semaphore(NAME, 2)
            pytest.skip("declared: it has no semaphores")

    def test_a_semaphore_has_as_many_holders_as_permits(self, client: Client, other: Client) -> None:
        lock = client.semaphore(NAME, 3)
        assert (lock.name, lock.permits) == (NAME, 3)
        held = [lock.acquire(timeout=0), lock.acquire(timeout=0), other.semaphore(NAME, 3).acquire(timeout=0)]
        assert other.semaphore(NAME, 3).try_acquire() is None
        assert len({lease.owner for lease in held}) == 3
        held[1].release()
        assert other.semaphore(NAME, 3).try_acquire() is not None

    def test_a_plain_lock_and_readers_of_that_name_exclude_permits(self, client: Client, other: Client) -> None:
        excluding = [other.lock(NAME)]
        if client.capabilities.read_write:
            excluding += [reader(other), writer(other)]
        for lock in excluding:
            with client.semaphore(NAME, 2):
                assert lock.try_acquire() is None
            with lock:
                assert client.semaphore(NAME, 2).try_acquire() is None

    def test_a_semaphore_with_one_permit_excludes(self, client: Client, other: Client) -> None:
        with client.semaphore(NAME, 1) as lease:
            assert other.semaphore(NAME, 1).try_acquire() is None
            assert lease.token is None or lease.fence() == lease.token

    def test_a_different_number_of_permits_is_refused_at_once_and_leaves_nothing(
        self, client: Client, other: Client, place: Place, pulse: Pulse
    ) -> None:
        with client.semaphore(NAME, 3):
            for timeout in (0, SOON):
                begun = now()
                with pytest.raises(BackendRejected, match="has 3 permits here, but 5 were requested") as caught:
                    other.semaphore(NAME, 5).acquire(timeout=timeout)
                assert now() - begun < QUICK + pulse.stopped()
                assert caught.value.name == NAME
            eventually(lambda: not queued(client, NAME))
        eventually(lambda: place.leftovers() == [])
        assert other.semaphore(NAME, 5).acquire(timeout=SOON).release()

    def test_a_released_permit_goes_to_a_waiter(self, client: Client, other: Client) -> None:
        held = [client.semaphore(NAME, 2).acquire() for _ in range(2)]
        waiting = background(lambda: other.semaphore(NAME, 2).acquire(timeout=SOON))
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        held[0].release()
        assert waiting.result(SOON).is_held()
        assert held[1].is_held()

    def test_under_contention_permits_are_never_exceeded_and_no_waiter_starves(
        self, client: Client, other: Client
    ) -> None:
        inside: list[int] = []
        most = 0

        def work(client: Client, me: int) -> None:
            nonlocal most
            for _ in range(4):
                with client.semaphore(NAME, 3).acquire(timeout=30):
                    inside.append(me)
                    most = max(most, len(inside))
                    time.sleep(0.002)
                    inside.remove(me)

        clients = [client, other] * 5
        for done in [background(lambda c=c, n=n: work(c, n)) for n, c in enumerate(clients)]:  # type: ignore[misc]
            done.result(40)
        assert 1 < most <= 3

    def test_each_permit_has_a_token_and_fence_raises(self, client: Client) -> None:
        leases = [client.semaphore(NAME, 2).acquire() for _ in range(2)]
        if client.capabilities.fencing:
            assert len({lease.token for lease in leases} - {None}) == 2
        with pytest.raises(CapabilityMissing, match="which of 2 permits is over"):
            leases[0].fence()

    def test_the_number_of_permits_is_checked_before_any_request(self, client: Client, place: Place) -> None:
        with place.silence():
            for wrong in (0, -1, 1_000_001):
                with pytest.raises(ValueError, match="1 to 1,000,000"):
                    client.semaphore(NAME, wrong)
            for kind in (True, 2.0, "2", None):
                with pytest.raises(TypeError, match="whole number"):
                    client.semaphore(NAME, kind)  # type: ignore[arg-type]
            assert client.semaphore(NAME, 1_000_000).permits == 1_000_000

    def test_a_semaphore_is_acquired_again_only_with_the_same_number_of_permits(self, client: Client) -> None:
        with client.semaphore(NAME, 2, reentrant=True) as lease:
            assert client.semaphore(NAME, 2, reentrant=True).acquire(timeout=0) == lease
            assert lease.release()
            with pytest.raises(BackendRejected):
                client.semaphore(NAME, 3, reentrant=True).acquire(timeout=0)
            with client.semaphore(NAME, 2) as second:
                assert second != lease

    def test_inspect_shows_how_many_permits_are_taken(self, client: Client, other: Client) -> None:
        leases = [client.semaphore(NAME, 3).acquire() for _ in range(2)]
        info = other.inspect(NAME)
        assert info is not None
        assert (info.kind, info.holders, info.permits, len(info.others)) == ("permit", 2, 3, 1)
        assert {info.owner, info.others[0].owner} == {lease.owner for lease in leases}

    def test_a_decorated_function_runs_with_a_permit(self, client: Client, other: Client, face: Face) -> None:
        seen: list[bool] = []

        def body() -> None:
            seen.append(background(lambda: other.semaphore(NAME, 2).try_acquire()).result(SOON) is not None)
            seen.append(background(lambda: other.semaphore(NAME, 2).try_acquire()).result(SOON) is not None)

        client.locked(NAME, permits=2)(face.function(body, blocks=True))()
        assert seen == [True, False]

    def test_a_silent_clients_permit_expires_while_another_permit_is_kept(
        self, client: Client, other: Client, place: Place, make: Callable[..., Client]
    ) -> None:
        dead = client.semaphore(NAME, 2, ttl=place.steady_ttl).acquire()
        kept = other.semaphore(NAME, 2, ttl=place.steady_ttl).acquire()
        with place.silence():
            assert make(bystander=True).semaphore(NAME, 2).acquire(timeout=place.steady_ttl * 4 + SOON)
            assert kept.is_held()
            assert not dead.is_held()
