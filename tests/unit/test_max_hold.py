"""With ``max_hold``, a lease that is held for too long is lost at an exact time, and then released."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from multilock import Client, Leadership, Lease, LockLost, Loss, LossReason, Renewed
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import Losses, Scripted, late

NEVER = math.inf


def ends_at(lease: Lease) -> float:
    return inner(lease).hold_until


def test_a_lease_is_renewed_until_its_max_hold_and_then_lost(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", max_hold=100.0, on_lost=losses).acquire()
    end = runtime.now() + 100.0
    runtime.advance_to(end - 0.001)
    assert lease.is_held()
    assert 9 <= len(backend.called("renew")) <= 12
    runtime.advance_to(end)
    [loss] = losses.calls
    assert (loss.reason, loss.confirmed, loss.detected_at) == (LossReason.HELD_TOO_LONG, False, end)
    assert losses.times == [end]
    assert not lease.is_held()
    assert 15.0 < loss.time_left < 30.0, "it was renewed until then"
    renewals = len(backend.called("renew"))
    runtime.advance(200)
    assert len(backend.called("renew")) == renewals


def test_after_max_hold_the_name_is_kept_while_its_holder_still_works(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n", max_hold=5.0).acquire()
    runtime.advance(5)
    until = inner(lease).valid_until
    runtime.advance_to(until - 0.001)
    assert "n" in backend.holders
    runtime.advance_to(until + 0.001)
    assert "n" not in backend.holders


def test_after_max_hold_the_name_is_free_once_its_holder_releases_it(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    def hold() -> None:
        with client.lock("n", max_hold=5.0):
            runtime.advance(6)
            assert "n" in backend.holders

    with pytest.raises(LockLost) as caught:
        hold()
    assert caught.value.loss is not None
    assert caught.value.loss.time_left > 20
    runtime.advance(0)
    assert "n" not in backend.holders
    runtime.advance(100)
    assert len(backend.called("release")) == 1


def test_a_holder_cannot_release_before_its_callback_begins(
    client: Client, backend: Scripted, runtime: HandRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], object]] = []
    monkeypatch.setattr(client._kernel.callbacks, "start", lambda call, *args: started.append(lambda: call(*args)))
    begun: list[bool] = []
    lease = client.lock("n", max_hold=5.0, on_lost=lambda loss: begun.append("n" in backend.holders)).acquire()
    runtime.advance(6)
    assert lease.release() is False
    runtime.advance(1)
    assert "n" in backend.holders
    started[0]()
    assert begun == [True]
    runtime.advance(0)
    assert "n" not in backend.holders


def test_a_reply_after_max_hold_extends_nothing(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    renewed: list[Renewed] = []
    client.events.subscribe(lambda event: renewed.append(event) if isinstance(event, Renewed) else None)
    losses = Losses(runtime)
    lease = client.lock("n", max_hold=12.0, on_lost=losses).acquire()
    backend.always("renew", late(4.0))
    runtime.advance(30)
    assert losses.reasons == [LossReason.HELD_TOO_LONG]
    assert renewed == []
    assert not lease.is_held()


@pytest.mark.parametrize(("max_hold", "reason"), [(5.0, "held_too_long"), (60.0, "expired")])
def test_without_renewals_the_earlier_of_both_ends_counts(
    client: Client, runtime: HandRuntime, max_hold: float, reason: str
) -> None:
    losses = Losses(runtime)
    client.lock("n", renew=False, max_hold=max_hold, on_lost=losses).acquire()
    runtime.advance(100)
    assert [one.value for one in losses.reasons] == [reason]


def test_a_loss_to_another_holder_leaves_no_time_for_the_callback(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", max_hold=5.0, on_lost=losses).acquire()
    runtime.jump(6)  # the report comes after the end of max_hold, but before the watchdog checks it
    backend.notices.gone(inner(lease).claim.id, LossReason.TAKEN, "its key has another owner")
    runtime.advance(1)
    [loss] = losses.calls
    assert (loss.reason, loss.confirmed, loss.time_left) == (LossReason.TAKEN, True, 0.0)


def test_max_hold_of_a_reentrant_lease_counts_from_its_first_grant(client: Client, runtime: HandRuntime) -> None:
    lock = client.lock("n", reentrant=True, max_hold=50.0)
    lease = lock.acquire()
    end = ends_at(lease)
    runtime.advance(30)
    assert lock.acquire() is lease
    assert client.lock("n", reentrant=True, max_hold=5.0).acquire() is lease
    assert ends_at(lease) == end == runtime.now() + 20
    runtime.advance(20)
    assert not lease.is_held()


def test_max_hold_of_a_set_counts_from_its_last_grant_and_ends_the_whole_set(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    backend.script("attempt", late(1.0), late(2.0))
    several = client.lock_all(["a", "b"], max_hold=20.0, on_lost=losses).acquire()
    assert {ends_at(lease) for lease in several.leases} == {runtime.now() + 20.0}
    runtime.advance(20)
    [loss] = losses.calls
    assert loss.reason is LossReason.HELD_TOO_LONG
    assert loss.valid_until == min(inner(lease).valid_until for lease in several.leases)
    assert set(backend.holders) == {"a", "b"}
    assert several.release() is False
    runtime.advance(0)
    assert not backend.holders


def test_a_set_leaves_a_separate_outer_lease_unchanged(client: Client, runtime: HandRuntime) -> None:
    outer = client.lock("a", reentrant=True).acquire()
    several = client.lock_all(["a", "b"], reentrant=True, max_hold=20.0).acquire()
    runtime.advance(20)
    assert not several.is_held()
    assert several.release() is False
    runtime.advance(100)
    assert outer.is_held()


def test_a_hard_fence_stays_until_the_work_has_ended(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n", max_hold=20.0, hard_fence=True).acquire()
    runtime.advance(20)
    assert runtime.kills_at == inner(lease).valid_until
    lease.release()
    assert runtime.kills_at == NEVER


def test_every_kind_of_lock_accepts_max_hold(make: Callable[..., Client], runtime: HandRuntime) -> None:
    client = make(Scripted(runtime, read_write=True, semaphore=True))
    rw = client.read_write_lock("rw", max_hold=7.0)
    locks = [rw.reader(), rw.writer(), client.semaphore("s", 3, max_hold=7.0)]
    for lock in locks:
        lease = lock.acquire()
        runtime.advance(7)
        assert lease.wait_lost(0)
        lease.release()

    @client.locked("decorated", max_hold=7.0)
    def work() -> None:
        runtime.advance(7)

    with pytest.raises(LockLost, match="held_too_long"):
        work()


def test_a_leader_that_led_for_too_long_loses_and_campaigns_again(client: Client, runtime: HandRuntime) -> None:
    losses: list[Loss[Leadership]] = []
    led: list[float] = []

    def work(leadership: Leadership) -> int:
        led.append(runtime.now())
        if len(led) < 3:
            runtime.advance(50)
            assert not leadership.is_held()
        return len(led)

    election = client.election("e", max_hold=50.0, on_lost=losses.append)
    assert election.run(work) == 3
    assert [loss.reason.value for loss in losses] == ["held_too_long", "held_too_long", "resigned"]
    assert led[2] - led[0] < 2 * 50 + 3, "the name was free as soon as work and callbacks had ended"


def test_a_lost_leadership_keeps_its_name_until_the_with_block_ends(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    led: list[bool] = []

    def work(leadership: Leadership) -> None:
        if led:
            return
        runtime.advance(50)
        with pytest.raises(LockLost):
            leadership.__enter__()
        runtime.advance(0)
        led.append("n" in backend.holders)

    client.election("n", max_hold=50.0).run(work)
    assert led == [True]
    assert backend.holders == {}


@pytest.mark.parametrize("wrong", [0, -1.0, NEVER, math.nan, 2.9])
def test_a_wrong_max_hold_is_refused_before_any_request(client: Client, backend: Scripted, wrong: float) -> None:
    calls: list[Callable[..., Any]] = [client.lock, client.election]
    for call in calls:
        with pytest.raises(ValueError, match="max_hold"):
            call("n", max_hold=wrong)
    with pytest.raises(ValueError, match="max_hold"):
        client.lock_all(["a"], max_hold=wrong)
    assert backend.calls == []


def test_max_hold_must_be_a_number_of_seconds(client: Client) -> None:
    for wrong in (True, "5"):
        with pytest.raises(TypeError, match="max_hold must be a number of seconds"):
            client.lock("n", max_hold=wrong)  # type: ignore[arg-type]
    assert client.lock("n", ttl=6.0, max_hold=0.6) is not None


def test_an_async_body_is_cancelled_at_the_end_of_its_max_hold() -> None:
    import multilock

    async def main() -> Loss:
        async with multilock.connect_async("memory://") as client:
            with pytest.raises(LockLost) as caught:
                async with client.lock("n", ttl=2.0, max_hold=0.2):
                    await asyncio.sleep(60)
            async with client.lock("n").acquire(timeout=1):
                pass
            assert caught.value.loss
            return caught.value.loss

    assert asyncio.run(main()).time_left > 1.0
