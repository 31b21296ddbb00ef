"""Tests of losses: which code is notified, when and how often, and the state after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multilock import BackendUnavailable, Client, LeaseState, LockLost, Loss, LossReason, NotHeld, now
from multilock.testing.conformance.base import NAME, SOON, Conformance, Pulse, Recorder, by_the_clock, eventually, inner
from multilock.testing.conformance.faces import FACES, AsyncioFace, Face, background
from multilock.testing.conformance.places import Place

__all__ = ["CancelConformance", "LossConformance", "WithConformance"]


class LossConformance(Conformance):
    """Tests of lost leases, of late and missing replies, and of callbacks."""

    def test_a_lease_held_beyond_max_hold_is_lost_and_its_release_frees_the_name(
        self, client: Client, other: Client, place: Place, pulse: Pulse
    ) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=6, max_hold=0.6, on_lost=lost).acquire()
        granted_at = max(inner(each).granted_at for each in lease.leases)

        def hold() -> None:
            with lease:
                loss = lost.wait()
                assert not lease.is_held()
                assert other.lock(NAME).try_acquire() is None or now() > loss.valid_until

        with pytest.raises(LockLost) as caught:
            hold()
        loss = lost.wait()
        assert caught.value.loss == loss
        assert (loss.reason, loss.confirmed) == (LossReason.HELD_TOO_LONG, False)
        assert granted_at + 0.6 <= lost.times[0] <= granted_at + 0.7 + pulse.stopped()
        assert loss.time_left >= 0.1 * 6
        assert other.lock(NAME).acquire(timeout=SOON).is_held()
        assert now() < loss.valid_until or pulse.stopped()
        assert lost.stays_at(1, 0.01)

    def test_a_deleted_key_is_a_confirmed_loss(self, client: Client, place: Place, pulse: Pulse) -> None:
        lost = Recorder[Loss]()
        lock = client.lock(NAME, ttl=3, on_lost=lost)
        lease = lock.acquire()
        # A backend that pushes losses watches a lease from a quarter of a second after its grant.
        time.sleep(0.4)
        place.delete(NAME)
        deleted_at = now()
        loss = lost.wait()
        assert (loss.reason, loss.confirmed, loss.time_left) == (LossReason.TAKEN, True, 0.0)
        assert loss.lease.name == lock.name
        assert loss.message
        assert lost.times[0] - deleted_at < (1.0 if client.capabilities.push_loss else 2.0) + pulse.stopped()
        assert not lease.is_held()
        assert lost.stays_at(1)

    def test_during_a_silence_the_lease_ends_before_another_client_gets_the_lock(
        self, client: Client, other: Client, place: Place, pulse: Pulse
    ) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=place.calm_ttl, on_lost=lost).acquire()
        with place.silence():
            waiting = background(lambda: (other.lock(NAME).acquire(timeout=20), now()))
            loss = lost.wait()
            held_after_the_callback = lease.is_held()
            _, next_at = waiting.result(20)
        assert not held_after_the_callback
        assert loss.valid_until <= next_at
        assert by_the_clock(loss)
        assert not loss.confirmed
        assert loss.detected_at <= lost.times[0] <= loss.valid_until + pulse.stopped()
        assert loss.time_left <= 0.1 * lease.ttl + 1e-6
        assert loss.time_left > 0 or pulse.stopped()

    def test_the_next_client_gets_the_lock_within_the_published_bound(
        self, make: Callable[..., Client], other: Client, place: Place, pulse: Pulse
    ) -> None:
        client = make(ttl=place.quick_ttl)
        client.lock(NAME).acquire()
        with place.silence():
            begun = now()
            assert other.lock(NAME).try_acquire(timeout=30) is not None
            assert now() - begun <= client.capabilities.takeover_bound + 1.0 + pulse.stopped()

    def test_a_lost_lease_is_never_held_again(self, client: Client, other: Client, place: Place) -> None:
        lock = client.lock(NAME, ttl=place.quick_ttl)
        lease = lock.acquire()
        with place.silence():
            assert lease.wait_lost(SOON) is not None
        time.sleep(0.7 * place.quick_ttl)  # by then every request has its reply
        assert not lease.is_held()
        assert lease.remaining() == 0.0
        assert lease.state is LeaseState.LOST
        assert lease.release() is False
        for use in (lease.check, lease.fence, lease.renew):
            with pytest.raises(LockLost) as caught:
                use()
            assert caught.value.loss is not None
            assert caught.value.name == lock.name

    def test_a_short_silence_puts_a_lease_at_risk_but_does_not_lose_it(self, client: Client, place: Place) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=5, on_lost=lost).acquire()
        with place.silence():
            eventually(lambda: lease.state is LeaseState.AT_RISK)
            assert lease.is_held()
        eventually(lambda: lease.state is LeaseState.HELD)
        assert lost.calls == []
        lease.release()

    def test_the_callback_is_called_once_however_many_threads_notice_the_loss(
        self, client: Client, place: Place
    ) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=place.quick_ttl, on_lost=lost).acquire()
        with place.silence():
            looking = [background(lambda: watch_until_lost(lease)) for _ in range(4)]
            for each in looking:
                each.result(SOON)
            lease.release()
            lost.wait()
        assert lost.stays_at(1)

    def test_a_callback_set_after_the_loss_is_called_at_once(self, client: Client, place: Place) -> None:
        lease = client.lock(NAME, ttl=place.quick_ttl, renew=False).acquire()
        loss = lease.wait_lost(SOON)
        late = Recorder[Loss]()
        lease.on_lost(late)
        assert late.wait() == loss
        assert late.stays_at(1, 0.05)

    def test_there_is_never_a_callback_after_a_release(self, client: Client, other: Client, place: Place) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=place.quick_ttl, on_lost=lost).acquire()
        lease.on_lost(lost)
        lease.release()
        with other.lock(NAME):
            lease.on_lost(lost)
            assert lost.stays_at(0, 1.2 * place.quick_ttl)

    def test_a_callback_that_raises_affects_nothing_else(self, client: Client, place: Place) -> None:
        bad, good = Recorder[Loss](raises=True), Recorder[Loss]()
        lease = client.lock(NAME, ttl=3, on_lost=bad).acquire()
        lease.on_lost(good)
        survivor = client.lock("survivor", ttl=place.steady_ttl).acquire()
        time.sleep(0.3)
        place.delete(NAME)
        bad.wait()
        good.wait()
        time.sleep(1.2 * place.steady_ttl)
        assert survivor.is_held()

    def test_a_callback_that_hangs_delays_no_renewal(self, client: Client, place: Place, face: Face) -> None:
        end = threading.Event()
        hanging = face.function(lambda loss: end.wait(10), blocks=True)
        survivor = client.lock("survivor", ttl=place.steady_ttl).acquire()
        second = Recorder[Loss]()
        try:
            client.lock(NAME, ttl=3, on_lost=hanging).acquire()
            client.lock("second", ttl=3, on_lost=second).acquire()
            time.sleep(0.3)
            place.delete(NAME)
            time.sleep(0.3)
            place.delete("second")
            second.wait()
            time.sleep(1.2 * place.steady_ttl)
            assert survivor.is_held()
        finally:
            end.set()

    def test_the_callback_never_runs_on_the_renewing_thread(self, client: Client, place: Place, face: Face) -> None:
        on_callback_thread: list[bool] = []
        done = threading.Event()

        def look(loss: Loss) -> None:
            on_callback_thread.append(face.is_callback_thread(threading.get_ident()))
            done.set()

        client.lock(NAME, ttl=place.quick_ttl, renew=False, on_lost=look).acquire()
        assert done.wait(SOON)
        assert on_callback_thread == [True]

    def test_a_hanging_renewal_never_delays_the_callback(self, client: Client, place: Place, pulse: Pulse) -> None:
        lost = Recorder[Loss]()
        client.lock(NAME, ttl=place.calm_ttl, on_lost=lost).acquire()
        held = place.hold_request("renew")
        with place.silence():
            loss = lost.wait()
        assert lost.times[0] <= loss.valid_until + pulse.stopped()
        held.release()

    def test_an_acknowledgement_that_arrives_too_late_does_not_revive_the_lease(
        self, client: Client, place: Place
    ) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=place.quick_ttl, on_lost=lost).acquire()
        held = place.hold_request("renew")
        held.wait(SOON)
        with place.silence():
            lost.wait()
            held.release()
        time.sleep(0.3)
        assert not lease.is_held()
        assert lost.stays_at(1, 0.05)

    def test_renew_raises_lock_lost_when_the_lock_is_gone(self, client: Client, place: Place) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=30, on_lost=lost).acquire()
        place.delete(NAME)
        with pytest.raises(LockLost) as caught:
            lease.renew()
        assert caught.value.loss == lost.wait()

    def test_renew_raises_backend_unavailable_without_a_reply(self, make: Callable[..., Client], place: Place) -> None:
        lease = make(request_timeout=0.2).lock(NAME, ttl=30).acquire()
        with place.silence():
            with pytest.raises(BackendUnavailable):
                lease.renew()
            assert lease.is_held()

    def test_a_release_that_finds_the_key_gone_reports_a_loss(self, client: Client, place: Place) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=30, on_lost=lost).acquire()
        place.delete(NAME)
        assert lease.release() is False
        assert lost.wait().reason is LossReason.TAKEN
        assert lease.state is LeaseState.LOST

    def test_releasing_a_lost_lease_returns_false_once_then_raises_not_held(self, client: Client, place: Place) -> None:
        lock = client.lock(NAME, ttl=place.quick_ttl, renew=False)
        lease = lock.acquire()
        assert lease.wait_lost(SOON) is not None
        assert lock.release() is False
        with pytest.raises(NotHeld):
            lock.release()

    def test_a_force_release_is_reported_as_a_lock_that_was_taken(self, client: Client, other: Client) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=3, on_lost=lost).acquire()
        time.sleep(0.3)
        assert other.force_release(NAME) is True
        assert lost.wait().reason is LossReason.TAKEN
        assert not lease.is_held()
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_wait_lost_returns_the_loss_to_every_waiting_thread(self, client: Client, place: Place) -> None:
        lease = client.lock(NAME, ttl=place.quick_ttl, renew=False).acquire()
        waiting = [background(lambda: lease.wait_lost(SOON)) for _ in range(3)]
        losses = [each.result(SOON) for each in waiting]
        assert losses[0] is not None
        assert by_the_clock(losses[0])
        assert losses == [losses[0]] * 3
        assert lease.wait_lost() == losses[0]

    def test_an_acquire_whose_reply_is_lost_is_repeated(self, client: Client, other: Client, place: Place) -> None:
        mishap = place.drop_reply("attempt")
        lease = client.lock(NAME, ttl=5).acquire(timeout=SOON)
        mishap.wait(SOON)
        assert lease.is_held()
        assert other.lock(NAME).try_acquire() is None
        assert lease.release() is True
        assert other.lock(NAME).try_acquire() is not None

    def test_a_lost_reply_to_a_single_try_raises_and_leaves_nothing(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        client = make(request_timeout=2.0)
        mishap = place.drop_reply("attempt")
        with pytest.raises(BackendUnavailable):
            client.lock(NAME, ttl=30).acquire(timeout=0)
        mishap.wait(SOON)
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_a_renewal_whose_reply_is_lost_costs_nothing(self, client: Client, place: Place) -> None:
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=3, on_lost=lost).acquire()
        place.drop_reply("renew").wait(SOON)
        assert lost.stays_at(0, 1.0)
        assert lease.is_held()
        assert lease.release() is True

    def test_a_release_whose_reply_is_lost_frees_the_lock(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        client = make(request_timeout=2.0)
        lost = Recorder[Loss]()
        lease = client.lock(NAME, ttl=30, on_lost=lost).acquire()
        mishap = place.drop_reply("release")
        assert lease.release() is True
        mishap.wait(SOON)
        assert not lease.is_held()
        assert lost.stays_at(0, 0.05)
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_a_request_executed_after_its_cancel_acquires_nothing(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        client = make(request_timeout=1.0)
        mishap = place.hold_request("attempt")
        with pytest.raises(BackendUnavailable):
            client.lock(NAME, ttl=30).acquire(timeout=0)
        mishap.wait(SOON)
        with other.lock(NAME).acquire(timeout=SOON):
            pass
        eventually(lambda: place.faults.answered["release"])  # the server has replied to the cancel
        mishap.release()
        time.sleep(0.2)
        assert other.inspect(NAME) is None
        assert other.lock(NAME).try_acquire() is not None

    def test_a_release_without_a_reply_returns_and_continues_in_the_background(
        self, make: Callable[..., Client], other: Client, place: Place, pulse: Pulse
    ) -> None:
        client = make(request_timeout=0.2)
        lease = client.lock(NAME, ttl=30).acquire()
        with place.silence():
            begun = now()
            assert lease.release() is True
            assert now() - begun < 1.0 + pulse.stopped()
            assert not lease.is_held()
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None


class WithConformance(Conformance):
    """Tests of a lease that is lost inside ``with``."""

    @pytest.fixture
    def options(self, face: Face) -> dict[str, Any]:
        """The options with which the body of ``with`` continues after a loss."""
        # Only asyncio cancels the body, which CancelConformance tests.
        return {"cancel_on_lost": False} if face.name == "asyncio" else {}

    def test_after_a_loss_the_normal_end_of_a_with_block_raises_lock_lost(
        self, client: Client, place: Place, options: dict[str, Any]
    ) -> None:
        with pytest.raises(LockLost) as caught, client.lock(NAME, ttl=30, **options):
            place.delete(NAME)
        assert caught.value.loss is not None
        assert caught.value.loss.reason is LossReason.TAKEN

    def test_after_a_loss_a_return_in_a_with_block_raises_lock_lost(
        self, client: Client, place: Place, options: dict[str, Any]
    ) -> None:
        def body() -> int:
            with client.lock(NAME, ttl=place.quick_ttl, renew=False, **options) as lease:
                lease.wait_lost(SOON)
                return 1

        with pytest.raises(LockLost):
            body()

    def test_after_a_loss_an_exception_of_the_body_is_raised_with_a_note(
        self, client: Client, place: Place, options: dict[str, Any]
    ) -> None:
        def body() -> None:
            with client.lock(NAME, ttl=30, **options).acquire():
                place.delete(NAME)
                raise KeyError("mine")

        with pytest.raises(KeyError) as caught:
            body()
        assert any("lost" in note for note in caught.value.__notes__)

    def test_a_release_in_a_with_block_is_not_a_loss(
        self, client: Client, place: Place, options: dict[str, Any]
    ) -> None:
        lost = Recorder[Loss]()
        with client.lock(NAME, on_lost=lost, **options) as lease:
            lease.release()
        assert lost.stays_at(0, 0.05)

    def test_a_with_block_that_ends_elsewhere_never_releases_the_lease_of_a_third(
        self, client: Client, other: Client, place: Place, options: dict[str, Any]
    ) -> None:
        lock = client.lock(NAME, ttl=30, **options)
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        gone = background(lambda: first.enter_context(lock)).result(SOON)
        place.delete(NAME)
        assert gone.release() is False
        held = background(lambda: second.enter_context(lock)).result(SOON)
        with pytest.raises(LockLost):
            background(first.close).result(SOON)
        assert held.is_held()
        assert other.lock(NAME).try_acquire() is None
        background(second.close).result(SOON)
        assert not held.is_held()
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_a_decorated_function_reports_a_loss_as_a_with_block_does(
        self, client: Client, place: Place, face: Face, options: dict[str, Any]
    ) -> None:
        decorate: Callable[..., Any] = client.locked(NAME, ttl=30, **options)
        with pytest.raises(LockLost):
            decorate(face.function(lambda: place.delete(NAME)))()


class CancelConformance(Conformance):
    """Tests of cancellation, which only asyncio has."""

    @pytest.fixture(params=["asyncio"])
    def face(self, request: pytest.FixtureRequest) -> Iterator[Face]:
        """The asyncio face only."""
        face = FACES[request.param]()
        yield face
        face.close()

    def test_an_async_with_block_is_cancelled_when_the_lease_is_lost(
        self, client: Client, place: Place, face: AsyncioFace, pulse: Pulse
    ) -> None:
        lock: Any = client.lock(NAME, ttl=place.calm_ttl, renew=False)
        cancelled: list[float] = []

        async def body() -> None:
            async with lock._target:
                try:
                    await asyncio.sleep(SOON)
                except asyncio.CancelledError:
                    cancelled.append(now())
                    raise

        with pytest.raises(LockLost) as caught:
            face.run(body())
        assert caught.value.loss is not None
        assert cancelled[0] <= caught.value.loss.valid_until + pulse.stopped()

    def test_a_cancellation_from_outside_is_not_replaced_by_lock_lost(
        self, client: Client, place: Place, face: AsyncioFace
    ) -> None:
        lock: Any = client.lock(NAME, ttl=30)

        async def outside() -> bool:
            entered = asyncio.Event()

            async def body() -> None:
                async with lock._target:
                    entered.set()
                    await asyncio.sleep(SOON)

            task = asyncio.create_task(body())
            await entered.wait()
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

        assert face.run(outside())
        assert client.inspect(NAME) is None

    def test_a_cancelled_wait_leaves_nothing_behind(
        self, client: Client, other: Client, place: Place, face: AsyncioFace
    ) -> None:
        held = other.lock(NAME).acquire()
        lock: Any = client.lock(NAME)

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await lock._target.acquire()

        face.run(give_up())
        held.release()
        eventually(lambda: other.inspect(NAME) is None and place.leftovers() == [])
        assert other.lock(NAME).try_acquire() is not None

    def test_a_waiter_of_a_closed_loop_blocks_no_other_waiter_and_leaves_nothing(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        client: Any = make()._target  # type: ignore[attr-defined]
        held = other.lock(NAME).acquire()

        async def wait() -> list[asyncio.Task[Any]]:
            waiting = [asyncio.create_task(client.lock(NAME).acquire()) for _ in range(2)]
            end = now() + SOON
            while (info := await client.inspect(NAME)) and info.waiting == 0:
                assert now() < end
                await asyncio.sleep(0.003)
            return waiting

        async def go_on() -> None:
            async with client.lock(NAME).acquire(timeout=SOON):
                pass
            await client.close()

        loop = asyncio.new_event_loop()
        waiting = loop.run_until_complete(wait())
        loop.close()
        held.release()
        asyncio.run(go_on())
        eventually(lambda: place.leftovers() == [])
        for each in waiting:
            each._log_destroy_pending = False  # type: ignore[attr-defined]

    def test_an_async_callback_is_awaited(self, client: Client, place: Place, face: AsyncioFace) -> None:
        lost = Recorder[Loss]()

        async def on_lost(loss: Loss) -> None:
            await asyncio.sleep(0)
            lost(loss)

        client.lock(NAME, ttl=place.quick_ttl, renew=False, on_lost=on_lost).acquire()
        assert by_the_clock(lost.wait())

    def test_a_blocked_event_loop_loses_no_lock(
        self, client: Client, other: Client, place: Place, face: AsyncioFace
    ) -> None:
        lease = client.lock(NAME, ttl=place.steady_ttl).acquire()
        face.loop.call_soon_threadsafe(time.sleep, 1.7 * place.steady_ttl)
        time.sleep(1.3 * place.steady_ttl)
        assert other.lock(NAME).try_acquire() is None
        assert lease.is_held()

    def test_a_blocked_loop_delays_the_callback_but_is_held_stays_correct(
        self, client: Client, place: Place, face: AsyncioFace
    ) -> None:
        lost = Recorder[Loss]()
        lock: Any = client.lock(NAME, ttl=place.quick_ttl, on_lost=lost)
        lease = lock.acquire()._target
        blocked = threading.Event()
        with place.silence():
            face.loop.call_soon_threadsafe(lambda: (blocked.wait(2 * place.quick_ttl), None))
            eventually(lambda: not lease.is_held())
            assert lost.calls == []
            blocked.set()
            lost.wait()

    def test_acquire_returns_a_coroutine_that_is_also_an_async_context_manager(
        self, client: Client, face: AsyncioFace
    ) -> None:
        lock: Any = client.lock(NAME)

        async def use() -> list[bool]:
            async with lock._target.acquire(timeout=5) as lease:
                held = [lease.is_held()]
            task = asyncio.create_task(lock._target.acquire(timeout=5))
            held.append((await task).is_held())
            await (await client_awaited()).lock(NAME).try_acquire()
            return held

        async def client_awaited() -> Any:
            return await client._target  # type: ignore[attr-defined]

        assert face.run(use()) == [True, True]


def watch_until_lost(lease: Any) -> None:
    """Check the lease again and again until it is lost."""
    while lease.is_held():
        time.sleep(0.001)
