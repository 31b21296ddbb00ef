"""Sets of locks: either all locks of a set are acquired or none, and the set is lost if one of its locks is."""

from __future__ import annotations

import time

import pytest

from multilock import (
    CapabilityMissing,
    Client,
    DistributedLock,
    Lease,
    LeaseState,
    LockLost,
    LockTimeout,
    Loss,
    LossReason,
    NotHeld,
    now,
)
from multilock.testing.conformance.base import SOON, Conformance, Recorder, eventually, refused
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.places import Place

__all__ = ["LockAllConformance"]

NAMES = ["a/2", "a/1", "b"]
IN_ORDER = ["a/1", "a/2", "b"]


def held(client: Client) -> list[str]:
    """Return the names that are held."""
    return sorted(info.name for info in client.inspect_all() if not info.resting_until)


class LockAllConformance(Conformance):
    """Tests of `lock_all`. Its parts are ordinary locks, so every backend supports it."""

    def test_all_locks_of_a_set_are_acquired_and_released_together(
        self, client: Client, other: Client, place: Place
    ) -> None:
        lock = client.lock_all([*NAMES, "b"])
        assert lock.name == "a/1, a/2, b"
        assert not lock.is_held()
        with lock as lease:
            assert lease.is_held()
            assert lock.is_held()
            assert lock.is_locked()
            assert held(other) == IN_ORDER
            assert 0 < lease.remaining() <= lease.ttl
        assert lease.state is LeaseState.RELEASED
        assert not lock.is_held()
        assert held(other) == []
        assert lease.release() is False
        with pytest.raises(NotHeld):
            lease.check()
        eventually(lambda: place.leftovers() == [])

    def test_a_set_holds_nothing_while_one_of_its_locks_is_taken(self, client: Client, other: Client) -> None:
        with other.lock("b"):
            assert client.lock_all(NAMES).try_acquire() is None
            assert held(other) == ["b"]
            with pytest.raises(LockTimeout, match="a/1, a/2, b"):
                refused(lambda seconds: client.lock_all(NAMES).acquire(timeout=seconds))
            eventually(lambda: held(other) == ["b"])

    def test_one_timeout_limits_the_wait_for_all_locks_of_a_set(self, client: Client, other: Client) -> None:
        first = other.lock("a/1").acquire()
        waiting = background(lambda: client.lock_all(NAMES).acquire(timeout=SOON))
        eventually(lambda: (info := other.inspect("a/1")) and info.waiting != 0)
        last = other.lock("b").acquire()
        first.release()
        eventually(lambda: held(other) == IN_ORDER)
        assert not waiting.done()
        last.release()
        assert waiting.result(SOON).is_held()

    def test_callers_that_name_the_locks_in_opposite_orders_never_deadlock(self, client: Client, other: Client) -> None:
        inside = 0
        overlaps = 0

        def work(client: Client, names: list[str]) -> None:
            nonlocal inside, overlaps
            for _ in range(4):
                with client.lock_all(names).acquire(timeout=30):
                    inside += 1
                    overlaps += inside > 1
                    time.sleep(0.001)
                    inside -= 1

        jobs = [(client, NAMES), (other, NAMES[::-1]), (client, sorted(NAMES)), (other, NAMES)]
        for done in [background(lambda j=j: work(*j)) for j in jobs]:  # type: ignore[misc]
            done.result(60)
        assert overlaps == 0

    def test_each_lock_of_a_set_has_a_token_and_the_set_has_none(self, client: Client) -> None:
        with client.lock_all(NAMES) as lease:
            assert [part.name for part in lease.leases] == IN_ORDER
            assert lease.token is None
            with pytest.raises(CapabilityMissing, match="fence"):
                lease.fence()
            assert lease.owner == lease.leases[0].owner
            if client.capabilities.fencing:
                assert [part.fence() for part in lease.leases] == [part.token for part in lease.leases]
            assert client.current_lease("a/2").owner == lease.leases[1].owner

    def test_each_lock_of_a_set_is_renewed(self, client: Client, other: Client, place: Place) -> None:
        with client.lock_all(NAMES, ttl=place.steady_ttl) as lease:
            until = now() + 1.3 * lease.ttl
            while now() < until:
                assert lease.is_held()
                time.sleep(0.05)
            lease.renew()
            assert held(other) == IN_ORDER

    def test_a_set_is_lost_with_one_of_its_locks_and_names_it(
        self, client: Client, other: Client, place: Place
    ) -> None:
        losses: Recorder[Loss[Lease]] = Recorder()
        late: Recorder[Loss[Lease]] = Recorder()
        lease = client.lock_all(NAMES, on_lost=losses, ttl=place.quick_ttl).acquire()
        other.force_release("a/2")
        loss = losses.wait()
        assert loss.reason in (LossReason.TAKEN, LossReason.SESSION_LOST)
        assert "part 'a/2'" in loss.message
        assert loss.lease.owner == lease.owner
        assert lease.state is LeaseState.LOST
        assert not lease.is_held()
        with pytest.raises(LockLost, match="part 'a/2'"):
            lease.check()
        lost = lease.wait_lost(timeout=SOON)
        assert lost is not None
        assert lost.message == loss.message
        lease.on_lost(late)
        assert late.wait().message == loss.message
        assert lease.release() is False
        eventually(lambda: held(other) == [])
        assert losses.stays_at(1)

    def test_the_other_locks_are_kept_until_the_lost_set_is_released(
        self, client: Client, other: Client, place: Place
    ) -> None:
        losses: Recorder[Loss[Lease]] = Recorder()
        lease = client.lock_all(NAMES, on_lost=losses, ttl=place.steady_ttl).acquire()
        other.force_release("a/2")
        losses.wait()
        assert losses.stays_at(1, 0.5 * place.steady_ttl), "the callback ended long ago"
        assert other.lock("a/1").try_acquire() is None
        assert other.lock("b").try_acquire() is None
        assert lease.release() is False
        assert other.lock("b").acquire(timeout=SOON).release()
        assert other.lock("a/1").acquire(timeout=SOON).release()

    def test_the_other_locks_of_a_lost_set_that_nobody_releases_are_kept_for_one_ttl(
        self, client: Client, other: Client, place: Place
    ) -> None:
        losses: Recorder[Loss[Lease]] = Recorder()
        lease = client.lock_all(NAMES, on_lost=losses, ttl=place.quick_ttl).acquire()
        other.force_release("a/2")
        losses.wait()
        assert other.lock("b").acquire(timeout=lease.ttl + SOON)
        assert now() >= losses.times[0] + lease.ttl - 0.1
        assert other.lock("a/1").acquire(timeout=SOON)

    def test_the_end_of_a_with_block_raises_the_loss_of_a_set(
        self, client: Client, other: Client, place: Place
    ) -> None:
        losses: Recorder[Loss[Lease]] = Recorder()

        def body() -> None:
            with client.lock_all(NAMES, on_lost=losses, ttl=place.quick_ttl):
                other.force_release("b")
                losses.wait()

        with pytest.raises(LockLost, match="part 'b'"):
            body()

    def test_a_lock_of_a_set_that_is_lost_during_the_wait_is_acquired_again(
        self, client: Client, other: Client, place: Place
    ) -> None:
        last = other.lock("b").acquire()
        waiting = background(lambda: client.lock_all(NAMES, ttl=place.quick_ttl).acquire(timeout=4 * SOON))
        eventually(lambda: held(other) == IN_ORDER)
        before = other.inspect("a/2")
        assert before is not None
        other.force_release("a/1")
        eventually(lambda: (info := other.inspect("a/2")) and info.owner != before.owner, 2 * SOON)
        assert not waiting.done()
        last.release()
        assert waiting.result(SOON).is_held()
        assert held(other) == IN_ORDER

    def test_a_reentrant_set_can_be_acquired_again(self, client: Client, other: Client) -> None:
        lock = client.lock_all(NAMES, reentrant=True)
        with lock, client.lock("b", reentrant=True), lock as inner:
            assert inner.is_held()
        assert held(other) == []

    def test_releasing_through_the_lock_ends_the_newest_lease_of_this_thread(self, client: Client) -> None:
        lock = client.lock_all(NAMES)
        lease = lock.acquire()
        assert lock.release() is True
        assert lease.state is LeaseState.RELEASED
        with pytest.raises(NotHeld):
            lock.release()

    def test_a_wrong_argument_raises_before_any_request(self, client: Client, place: Place) -> None:
        with place.silence():
            with pytest.raises(ValueError, match="no names"):
                client.lock_all([])
            with pytest.raises(TypeError, match="several names"):
                client.lock_all("abc")
            with pytest.raises(TypeError):
                client.lock_all(["a", 3])  # type: ignore[list-item]
            with pytest.raises(TypeError, match="on_lost"):
                client.lock_all(["a"], on_lost=3)  # type: ignore[arg-type]
            assert isinstance(client.lock_all(iter(["a"])).name, str)

    def test_a_closed_client_releases_all_locks_of_a_set(self, client: Client, other: Client) -> None:
        losses: Recorder[Loss[Lease]] = Recorder()
        lock: DistributedLock = client.lock_all(NAMES, on_lost=losses)
        lock.acquire()
        client.close()
        assert losses.wait().reason is LossReason.CLOSED
        assert losses.stays_at(1)
        eventually(lambda: held(other) == [])
