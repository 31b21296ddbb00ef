"""Acquiring, holding and releasing: the lock and its lease while nothing fails."""

from __future__ import annotations

import gc
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from multilock import (
    CapabilityMissing,
    Client,
    DistributedLock,
    Lease,
    LeaseState,
    LockTimeout,
    NotHeld,
    now,
)
from multilock.testing.conformance.base import NAME, SOON, Conformance, Pulse, eventually, refused
from multilock.testing.conformance.faces import FACES, Face, background
from multilock.testing.conformance.places import Place

__all__ = ["LeaseConformance", "LockConformance", "OptionConformance", "ThreadingConformance"]

NAMES = [
    "a",
    "a/b",
    "a%2Fb",
    "A",
    "ä",
    "🔒",
    ".",
    "..",
    "a b",
    "a:b",
    "a{b}",
    "!a",
    "#",
    "*",
    "?",
    "[a]",
    "\\",
    "x" * 1000,
]


class LockConformance(Conformance):
    """Tests of acquire, try_acquire, release, and the methods around them."""

    def test_a_second_caller_is_refused_while_the_first_holds_the_lock(self, client: Client, other: Client) -> None:
        with client.lock(NAME):
            assert other.lock(NAME).try_acquire() is None
            with pytest.raises(LockTimeout):
                other.lock(NAME).acquire(timeout=0)
        with other.lock(NAME).acquire(timeout=0) as lease:
            assert lease.is_held()

    def test_two_locks_of_one_client_exclude_each_other(self, client: Client) -> None:
        with client.lock(NAME):
            assert client.lock(NAME).try_acquire() is None

    def test_holders_never_overlap_under_contention(self, client: Client, other: Client) -> None:
        inside: list[int] = []
        overlaps = 0
        rounds = 12

        def work(client: Client, me: int) -> None:
            nonlocal overlaps
            for _ in range(rounds):
                with client.lock(NAME).acquire(timeout=30):
                    inside.append(me)
                    overlaps += len(inside) > 1
                    time.sleep(0.001)
                    inside.remove(me)

        for done in [background(lambda c=c, n=n: work(c, n)) for n, c in enumerate([client, other, client, other])]:  # type: ignore[misc]
            done.result(40)
        assert overlaps == 0

    def test_different_names_do_not_exclude_each_other(self, client: Client, other: Client) -> None:
        locks = [client.lock(name) for name in NAMES]
        leases = [lock.acquire(timeout=0) for lock in locks]
        assert all(lease.is_held() for lease in leases)
        assert [other.lock(name).try_acquire() for name in NAMES] == [None] * len(NAMES)
        assert [lease.name for lease in leases] == [lock.name for lock in locks]
        for lease in leases:
            assert lease.release()

    def test_a_waiter_gets_the_lock_after_the_release(self, client: Client, other: Client) -> None:
        lease = client.lock(NAME).acquire()
        waiting = background(lambda: other.lock(NAME).acquire(timeout=SOON))
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        assert not waiting.done()
        lease.release()
        assert waiting.result(SOON).is_held()

    def test_acquire_without_a_timeout_waits_until_the_lock_is_free(self, client: Client, other: Client) -> None:
        lease = client.lock(NAME).acquire(timeout=math.inf)
        waiting = background(lambda: other.lock(NAME).acquire())
        time.sleep(0.1)
        assert not waiting.done()
        lease.release()
        assert waiting.result(SOON).is_held()

    def test_timeout_limits_the_whole_wait_and_raises_lock_timeout(
        self, client: Client, other: Client, pulse: Pulse
    ) -> None:
        client.lock(NAME).acquire()
        lock = other.lock(NAME)
        waits: list[tuple[float, float]] = []

        def wait(seconds: float) -> Lease:
            waits.append((now(), seconds))
            return lock.acquire(timeout=seconds)

        with pytest.raises(LockTimeout, match="still taken") as caught:
            refused(wait)
        begun, timeout = waits[-1]
        assert timeout <= now() - begun < timeout + 1.0 + pulse.stopped()
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.name, caught.value.backend) == (lock.name, client_scheme(client))

    def test_try_acquire_waits_for_its_timeout_and_returns_none(
        self, client: Client, other: Client, pulse: Pulse
    ) -> None:
        lease = client.lock(NAME).acquire()
        waits: list[tuple[float, float]] = []

        def wait(seconds: float) -> Lease | None:
            waits.append((now(), seconds))
            return other.lock(NAME).try_acquire(timeout=seconds)

        assert refused(wait) is None
        begun, timeout = waits[-1]
        assert timeout <= now() - begun < timeout + 1.0 + pulse.stopped()
        waiting = background(lambda: other.lock(NAME).try_acquire(timeout=SOON))
        time.sleep(0.05)
        lease.release()
        got = waiting.result(SOON)
        assert got is not None
        assert got.is_held()

    def test_a_waiter_that_gave_up_leaves_nothing_behind(self, client: Client, other: Client, place: Place) -> None:
        lease = client.lock(NAME).acquire()
        assert refused(lambda seconds: other.lock(NAME).try_acquire(timeout=seconds)) is None
        assert other.lock(NAME).try_acquire() is None
        lease.release()
        eventually(lambda: client.inspect(NAME) is None and place.leftovers() == [])
        with client.lock(NAME).acquire(timeout=0):
            pass

    def test_a_claim_whose_cancel_is_pending_never_blocks_a_later_try_of_its_client(
        self, client: Client, other: Client, place: Place
    ) -> None:
        lease = other.lock(NAME).acquire()
        place.slow_request("release", 0.2)
        with pytest.raises(LockTimeout):
            refused(lambda seconds: client.lock(NAME).acquire(timeout=seconds))
        lease.release()
        own = client.lock(NAME).try_acquire()
        assert own is not None, "the withdrawn claim blocked it"
        own.release()

    def test_a_refused_try_joins_no_queue(self, client: Client, other: Client, make: Callable[..., Client]) -> None:
        with client.lock(NAME):
            other.lock(NAME).try_acquire()
        assert make().lock(NAME).try_acquire() is not None

    def test_nothing_is_left_at_the_server_after_the_last_release(self, client: Client, place: Place) -> None:
        for _ in range(3):
            with client.lock(NAME):
                pass
        eventually(lambda: place.leftovers() == [])

    def test_release_gives_back_the_newest_lease_of_this_thread(self, client: Client) -> None:
        lock = client.lock(NAME)
        lock.acquire()
        assert lock.release() is True
        assert client.inspect(NAME) is None
        with pytest.raises(NotHeld):
            lock.release()

    def test_release_after_the_lease_was_released_by_hand_raises_not_held(self, client: Client) -> None:
        lock = client.lock(NAME)
        lease = lock.acquire()
        assert lease.release() is True
        with pytest.raises(NotHeld):
            lock.release()

    def test_release_never_ends_the_lease_of_another_thread(self, client: Client) -> None:
        lock = client.lock(NAME)
        lease = lock.acquire()
        with pytest.raises(NotHeld):
            background(lock.release).result(SOON)
        assert lease.is_held()

    def test_a_lease_can_be_released_from_any_thread(self, client: Client) -> None:
        lease = client.lock(NAME).acquire()
        assert background(lease.release).result(SOON) is True
        assert client.lock(NAME).try_acquire() is not None

    def test_a_release_by_another_client_never_frees_the_lock(self, client: Client, other: Client) -> None:
        first = client.lock(NAME).acquire()
        assert first.release() is True
        second = other.lock(NAME).acquire(timeout=0)
        assert first.release() is False
        assert second.is_held()
        assert client.lock(NAME).try_acquire() is None

    def test_is_locked_asks_the_backend_and_counts_every_holder(self, client: Client, other: Client) -> None:
        lock = client.lock(NAME)
        assert lock.is_locked() is False
        lease = other.lock(NAME).acquire()
        assert lock.is_locked() is True
        lease.release()
        assert lock.is_locked() is False

    def test_is_held_sends_no_request_and_counts_the_leases_of_all_threads(self, client: Client, other: Client) -> None:
        lock = client.lock(NAME)
        assert lock.is_held() is False
        lease = background(lock.acquire).result(SOON)
        assert lock.is_held() is True
        assert client.lock(NAME).is_held() is False
        assert other.lock(NAME).is_held() is False
        lease.release()
        assert lock.is_held() is False

    def test_a_lock_and_its_lease_are_both_context_managers(self, client: Client) -> None:
        with client.lock(NAME) as lease:
            assert lease.is_held()
        assert lease.state is LeaseState.RELEASED
        with client.lock(NAME).acquire(timeout=5) as again:
            assert again.is_held()
        assert client.inspect(NAME) is None

    def test_the_lock_is_released_if_the_with_block_raises(self, client: Client) -> None:
        with pytest.raises(KeyError, match="mine"), client.lock(NAME):
            raise KeyError("mine")
        assert client.inspect(NAME) is None

    def test_a_reentrant_lock_returns_the_same_lease_and_counts_the_acquires(
        self, client: Client, other: Client
    ) -> None:
        lock = client.lock(NAME, reentrant=True)
        first = lock.acquire()
        second = client.lock(NAME, reentrant=True).acquire(timeout=0)
        assert second == first
        assert lock.release() is True
        assert first.is_held()
        assert other.lock(NAME).try_acquire() is None
        assert first.release() is True
        assert not first.is_held()
        assert other.lock(NAME).try_acquire() is not None

    def test_a_reentrant_lock_excludes_other_threads(self, client: Client) -> None:
        lock = client.lock(NAME, reentrant=True)
        with lock:
            assert background(lambda: lock.try_acquire()).result(SOON) is None

    def test_a_lock_that_is_not_reentrant_refuses_its_own_thread(self, client: Client) -> None:
        lock = client.lock(NAME)
        with lock, pytest.raises(LockTimeout):
            lock.acquire(timeout=1.0)

    def test_fair_waiters_get_the_lock_in_order_of_arrival(self, client: Client, make: Callable[..., Client]) -> None:
        if not client.capabilities.fair:
            with pytest.raises(CapabilityMissing):
                client.lock(NAME, fair=True)
            return
        order: list[int] = []
        lease = client.lock(NAME).acquire()

        def wait(number: int, client: Client) -> None:
            with client.lock(NAME, fair=True).acquire(timeout=20):
                order.append(number)

        waiting = []
        for number in range(4):
            waiter = client if number % 2 else make()
            waiting.append(background(lambda n=number, c=waiter: wait(n, c)))  # type: ignore[misc]
            eventually(lambda n=number: (info := client.inspect(NAME)) and info.waiting == n + 1)  # type: ignore[misc]
        lease.release()
        for each in waiting:
            each.result(20)
        assert order == [0, 1, 2, 3]

    def test_every_unfair_waiter_of_one_client_gets_its_turn(self, client: Client) -> None:
        lease = client.lock(NAME).acquire()

        def turn() -> bool:
            with client.lock(NAME).acquire(timeout=20):
                return True

        waiting = [background(turn) for _ in range(5)]
        lease.release()
        assert [each.result(20) for each in waiting] == [True] * 5

    def test_one_unfair_waiter_of_each_client_queues_at_the_backend(self, client: Client, other: Client) -> None:
        lease = other.lock(NAME).acquire()
        waiting = [background(lambda: client.lock(NAME).acquire(timeout=20).release()) for _ in range(5)]
        eventually(lambda: (info := other.inspect(NAME)) and info.waiting != 0)
        time.sleep(0.2)  # time in which all threads begin to wait
        info = other.inspect(NAME)
        assert info is not None
        assert info.waiting in (None, 1)
        lease.release()
        assert [each.result(20) for each in waiting] == [True] * 5

    def test_a_decorated_function_runs_while_the_lock_is_held(self, client: Client, face: Face) -> None:
        def body(order: int, *, kind: str = "new") -> tuple[int, bool]:
            lease = client.current_lease()
            return order, lease.is_held() and lease.name == f"order/{order}/{kind}/{{}}"

        function = client.locked("order/{order}/{kind}/{{}}", timeout=0)(face.function(body))
        assert function(7) == (7, True)
        assert function.__name__ == "body" if face.name == "blocking" else True
        assert list(client.inspect_all()) == []

    def test_a_decorated_function_is_skipped_or_times_out_if_the_lock_is_taken(
        self, client: Client, other: Client, face: Face
    ) -> None:
        def body() -> str:
            return "ran"

        with other.lock(NAME):
            assert client.locked(NAME, timeout=0, skip=True)(face.function(body))() is None
            with pytest.raises(LockTimeout):
                refused(lambda seconds: client.locked(NAME, timeout=seconds)(face.function(body))())
        assert client.locked(NAME, timeout=0, skip=True)(face.function(body))() == "ran"

    def test_the_decorator_refuses_coroutine_functions_on_a_blocking_lock_and_the_reverse(
        self, client: Client, face: Face
    ) -> None:
        def blocking() -> None: ...

        async def coroutine() -> None: ...

        with pytest.raises(TypeError):
            client.locked(NAME)(coroutine if face.name == "blocking" else blocking)

    def test_current_lease_is_the_innermost_of_this_thread(self, client: Client) -> None:
        with pytest.raises(NotHeld):
            client.current_lease()
        with client.lock("outer") as outer:
            with client.lock("inner") as inner:
                assert client.current_lease() == inner
                assert client.current_lease("outer") == outer
                with pytest.raises(NotHeld):
                    background(client.current_lease).result(SOON)
            assert client.current_lease() == outer
            with pytest.raises(NotHeld):
                client.current_lease("inner")
        with pytest.raises(NotHeld):
            client.current_lease()


class ThreadingConformance(Conformance):
    """Tests of the stand-ins for the standard library's locks, which only the blocking API has."""

    @pytest.fixture(params=["blocking"])
    def face(self, request: pytest.FixtureRequest) -> Face:
        """The blocking face only."""
        return FACES[request.param]()

    def test_a_lock_implements_the_protocol_distributed_lock(self, client: Client) -> None:
        assert isinstance(client.lock(NAME), DistributedLock)
        with client.lock(NAME) as lease:
            assert isinstance(lease, Lease)

    def test_a_lock_can_replace_a_threading_lock(self, client: Client) -> None:
        lock = client.lock(NAME).as_threading_lock()
        assert lock.acquire() is True
        assert lock.locked()
        assert lock.acquire(blocking=False) is False
        assert lock.acquire(timeout=1.0) is False
        background(lock.release).result(SOON)
        assert not lock.locked()
        with lock:
            assert client.lock(NAME).is_locked()
        with pytest.raises(RuntimeError):
            lock.release()

    def test_a_condition_works_over_a_lock(self, client: Client) -> None:
        condition = threading.Condition(client.lock(NAME).as_threading_lock())  # type: ignore[arg-type]
        ready: list[int] = []

        def produce() -> None:
            with condition:
                ready.append(1)
                condition.notify()

        with condition:
            done = background(produce)
            assert condition.wait_for(lambda: bool(ready), SOON)
        done.result(SOON)

    def test_a_reentrant_lock_can_replace_an_rlock(self, client: Client) -> None:
        lock = client.lock(NAME, reentrant=True).as_threading_lock()
        with lock, lock:
            assert background(lambda: lock.acquire(blocking=False)).result(SOON) is False
        assert client.inspect(NAME) is None


class LeaseConformance(Conformance):
    """Tests of one lease: its attributes, and how long it lives."""

    def test_a_lease_shows_its_name_ttl_state_and_owner(self, client: Client) -> None:
        with client.lock(NAME, ttl=12) as lease:
            assert lease.name == NAME
            assert lease.ttl >= 12
            assert 0 < lease.remaining() <= lease.ttl
            assert lease.state is LeaseState.HELD
            assert lease.is_held()
            assert [each.owner for each in lease.leases] == [lease.owner]

    def test_each_acquisition_has_an_owner_of_its_own(self, client: Client) -> None:
        owners = set()
        for _ in range(3):
            with client.lock(NAME) as lease:
                info = client.inspect(NAME)
                assert info is not None
                assert info.owner == lease.owner
                owners.add(lease.owner)
        assert len(owners) == 3

    def test_each_later_token_is_greater(self, client: Client, other: Client) -> None:
        tokens = []
        for each in (client, other, client, client, other):
            with each.lock(NAME) as lease:
                if lease.token is None:
                    assert not client.capabilities.fencing
                    with pytest.raises(CapabilityMissing):
                        lease.fence()
                    return
                assert lease.fence() == lease.token
                tokens.append(lease.token)
        assert client.capabilities.fencing
        assert tokens == sorted(set(tokens))

    def test_a_released_lease_is_never_held_again(self, client: Client) -> None:
        lease = client.lock(NAME).acquire()
        assert lease.release() is True
        assert lease.release() is False
        with client.lock(NAME):
            assert not lease.is_held()
            assert lease.remaining() == 0.0
            assert lease.state is LeaseState.RELEASED
            for use in (lease.check, lease.fence, lease.renew):
                with pytest.raises(NotHeld):
                    use()

    def test_remaining_decreases_between_two_renewals(self, client: Client) -> None:
        with client.lock(NAME, ttl=10) as lease:
            before = lease.remaining()
            time.sleep(0.05)
            assert 0.04 < before - lease.remaining() < 1.0

    def test_check_and_fence_do_not_raise_while_the_lease_is_held(self, client: Client) -> None:
        with client.lock(NAME) as lease:
            lease.check()
            if client.capabilities.fencing:
                assert lease.fence() == lease.token

    def test_a_lease_is_renewed_until_released(self, client: Client, other: Client, place: Place) -> None:
        with client.lock(NAME, ttl=place.steady_ttl) as lease:
            time.sleep(1.3 * lease.ttl)
            assert lease.is_held()
            assert other.lock(NAME).try_acquire() is None

    def test_a_lease_is_renewed_even_if_no_reference_to_it_is_left(
        self, client: Client, other: Client, place: Place
    ) -> None:
        lease = client.lock(NAME, ttl=place.steady_ttl).acquire()
        ttl, owner = lease.ttl, lease.owner
        del lease
        gc.collect(1)  # collects young objects only, such as the lease: a full collection can take longer than the ttl
        time.sleep(2 * ttl)
        info = other.inspect(NAME)
        assert info is not None
        assert info.owner == owner

    def test_a_lease_that_is_not_renewed_ends_at_its_ttl(
        self, client: Client, other: Client, place: Place, pulse: Pulse
    ) -> None:
        begun = now()
        lease = client.lock(NAME, ttl=place.quick_ttl, renew=False).acquire()
        asked = now()
        assert lease.is_held()
        loss = lease.wait_lost(2 * lease.ttl)
        assert loss is not None
        assert 0.8 * lease.ttl <= loss.detected_at - begun
        assert loss.detected_at <= asked + lease.ttl + 0.05 + pulse.stopped()
        assert not lease.is_held()
        bound = client.capabilities.lock_delay + 2 * lease.ttl + SOON
        assert other.lock(NAME).try_acquire(timeout=bound) is not None
        assert now() - begun >= lease.ttl * 0.98

    def test_a_lease_that_is_not_renewed_counts_from_its_grant_however_long_the_wait_was(
        self, client: Client, other: Client, place: Place, pulse: Pulse
    ) -> None:
        holder = other.lock(NAME).acquire()

        def stand() -> tuple[Lease, float]:
            lease = client.lock(NAME, ttl=place.quick_ttl, renew=False).acquire(timeout=60)
            return lease, now()

        waits = background(stand)
        time.sleep(1.3 * place.quick_ttl)
        assert holder.release()
        lease, held_from = waits.result(SOON)
        # This test cannot use remaining(): until a session is renewed, its validity may count from a time before the
        # grant.
        loss = lease.wait_lost(2 * lease.ttl + SOON)
        assert loss is not None
        # The callback starts in the last tenth of the ttl.
        assert loss.detected_at - held_from > 0.6 * lease.ttl - pulse.stopped()

    def test_renew_moves_the_deadline(self, client: Client) -> None:
        with client.lock(NAME, ttl=10, renew=False) as lease:
            time.sleep(1.0)  # longer than a renewal takes on a busy machine
            before = lease.remaining()
            lease.renew()
            assert lease.remaining() > before

    def test_wait_lost_returns_none_at_its_timeout_and_at_a_release(self, client: Client, pulse: Pulse) -> None:
        lease = client.lock(NAME).acquire()
        begun = now()
        assert lease.wait_lost(0.1) is None
        assert 0.1 <= now() - begun < 1.0 + pulse.stopped()
        waiting = background(lambda: lease.wait_lost(30))
        time.sleep(0.05)
        lease.release()
        assert waiting.result(SOON) is None
        assert lease.wait_lost() is None

    def test_two_locks_of_one_client_with_different_ttls_each_keep_their_own(
        self, client: Client, other: Client, place: Place
    ) -> None:
        short = client.lock("short", ttl=place.quick_ttl, renew=False).acquire()
        long = client.lock("long", ttl=30, renew=False).acquire()
        assert short.wait_lost(2 * short.ttl) is not None
        assert long.is_held()
        assert other.lock("short").try_acquire(timeout=2 * short.ttl + SOON) is not None
        assert other.lock("long").try_acquire() is None

    def test_the_granted_ttl_is_at_least_the_requested_one(self, client: Client) -> None:
        can = client.capabilities
        for asked in (can.ttl_min, can.ttl_min + 0.0004, 1.5, 3.3, 7):
            lease = client.lock(NAME, ttl=asked).acquire()
            assert asked <= lease.ttl + 1e-9 <= asked + can.ttl_step + can.ttl_min
            # the result is not checked, because a lease with the shortest ttl may expire on a busy machine
            lease.release()


class OptionConformance(Conformance):
    """Wrong arguments raise before any I/O: the server is down in all of these tests."""

    @pytest.fixture
    def client(self, make: Callable[..., Client], place: Place) -> Any:
        """A client whose server is down."""
        client = make()
        with place.down():
            yield client

    def test_making_a_lock_sends_no_request(self, client: Client) -> None:
        lock = client.lock(NAME)
        assert (lock.name, lock.ttl) == (NAME, 10.0)
        assert client.lock(NAME, ttl=3).ttl == 3
        assert lock.is_held() is False

    @pytest.mark.parametrize("name", ["", "x" * 1001, "a\nb", "a\x00", "\ud800"], ids=repr)
    def test_a_bad_name_raises_value_error(self, client: Client, name: str) -> None:
        for use in (client.lock, client.inspect, client.force_release, client.locked):
            with pytest.raises(ValueError, match=r"name"):
                use(name)

    @pytest.mark.parametrize("name", [b"bytes", 3, None], ids=repr)
    def test_a_name_that_is_not_text_raises_type_error(self, client: Client, name: Any) -> None:
        with pytest.raises(TypeError, match="name"):
            client.lock(name)

    @pytest.mark.parametrize(
        ("ttl", "error"),
        [
            (0, ValueError),
            (-1, ValueError),
            (math.nan, ValueError),
            (math.inf, ValueError),
            (True, TypeError),
            ("3", TypeError),
        ],
        ids=repr,
    )
    def test_a_bad_ttl_raises(self, client: Client, ttl: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="ttl"):
            client.lock(NAME, ttl=ttl)

    def test_a_ttl_beyond_the_limit_raises_an_error_that_names_the_limit(self, client: Client) -> None:
        limit = client.capabilities.ttl_max
        if math.isfinite(limit):
            with pytest.raises(ValueError, match=re.escape(f"{limit:.10g}")):
                client.lock(NAME, ttl=limit * 2)

    @pytest.mark.parametrize(
        ("timeout", "error"), [(-1, ValueError), (math.nan, ValueError), (True, TypeError), ("1", TypeError)], ids=repr
    )
    def test_a_bad_timeout_raises(self, client: Client, timeout: Any, error: type[Exception]) -> None:
        lock = client.lock(NAME)
        for use in (lock.acquire, lock.try_acquire):
            with pytest.raises(error, match="timeout"):
                use(timeout)

    @pytest.mark.parametrize("option", ["renew", "reentrant", "fair"])
    def test_an_option_that_is_true_or_false_takes_nothing_else(self, client: Client, option: str) -> None:
        options: dict[str, Any] = {option: 1}
        with pytest.raises(TypeError, match=option):
            client.lock(NAME, **options)

    def test_a_callback_that_cannot_be_called_raises(self, client: Client) -> None:
        with pytest.raises(TypeError, match="on_lost"):
            client.lock(NAME, on_lost="no function")  # type: ignore[arg-type]

    def test_an_unknown_option_raises(self, client: Client) -> None:
        with pytest.raises(TypeError):
            client.lock(NAME, color="red")  # type: ignore[arg-type]


def client_scheme(client: Client) -> str:
    """Return the scheme that errors of this client carry."""
    with pytest.raises(NotHeld) as caught:
        client.current_lease("nobody holds this")
    assert caught.value.backend is not None
    return caught.value.backend
