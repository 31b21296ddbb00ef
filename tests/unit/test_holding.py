"""A lease reads the clock each time a program reads its state, even while other threads run."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from multilock import CapabilityMissing, Client, LeaseState, LockLost, LossReason, NotHeld
from multilock.events import Lost
from multilock.testing import HandRuntime
from tests.unit.kit import Losses, Scripted, late, silence, state_of

TTL = 30.0
# seconds from the sending of the request until the loss: the ttl, less the drift and the tenth for the callback
LOST_AFTER = TTL - 0.302 - 3.0


def test_validity_counts_from_the_sending_of_the_request_and_not_from_its_reply(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("attempt", late(4.0))
    lease = client.lock("n", renew=False).acquire()
    assert runtime.now() == 1004.0
    assert lease.remaining() == pytest.approx(LOST_AFTER - 4.0)


def test_a_renewal_counts_from_its_sending_too(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    runtime.advance(5)
    backend.script("renew", late(3.0))
    lease.renew()
    assert lease.remaining() == pytest.approx(LOST_AFTER - 3.0)


def test_is_held_turns_false_by_the_clock_alone(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n", renew=False).acquire()
    runtime.jump(LOST_AFTER - 0.01)  # no thread of this process runs
    assert lease.is_held()
    assert state_of(lease) is LeaseState.HELD
    runtime.jump(0.02)
    assert not lease.is_held()
    assert lease.remaining() == 0.0
    assert state_of(lease) is LeaseState.LOST


def raises_lock_lost(method: Callable[[], object]) -> bool:
    with pytest.raises(LockLost):
        method()
    return True


@pytest.mark.oracle
@pytest.mark.parametrize(
    "look",
    [
        lambda lease: lease.is_held() is False,
        lambda lease: lease.remaining() == 0.0,
        lambda lease: lease.state is LeaseState.LOST,
        lambda lease: lease.release() is False,
        lambda lease: raises_lock_lost(lease.check),
        lambda lease: raises_lock_lost(lease.fence),
        lambda lease: raises_lock_lost(lease.renew),
        lambda lease: lease.wait_lost(0) is not None,
        lambda lease: lease.on_lost(lambda loss: None) is None,
    ],
    ids=["is_held", "remaining", "state", "release", "check", "fence", "renew", "wait_lost", "on_lost"],
)
def test_the_first_look_after_a_pause_notices_it_and_calls_back_once(
    client: Client, runtime: HandRuntime, look: Callable[[Any], bool]
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    runtime.jump(LOST_AFTER + TTL / 10 + 0.1)
    assert look(lease)
    assert losses.reasons == [LossReason.PAUSED]
    runtime.advance(100)
    assert not lease.is_held()
    assert losses.reasons == [LossReason.PAUSED]


def test_a_deadline_noticed_in_time_is_not_a_pause(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    runtime.jump(LOST_AFTER + TTL / 10 - 0.1)
    loss = lease.wait_lost(0)
    assert loss is not None
    assert loss.reason is LossReason.EXPIRED


def test_the_watchdog_itself_notices_a_pause(client: Client, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    runtime.advance(1)
    runtime.jump(200)
    runtime.settle()
    assert losses.reasons == [LossReason.PAUSED]
    assert lease.release() is False
    assert losses.reasons == [LossReason.PAUSED]


def test_a_pause_shorter_than_the_lease_is_ignored(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    runtime.jump(LOST_AFTER - 0.5)
    assert lease.is_held()
    runtime.settle()
    assert lease.remaining() > LOST_AFTER - 1, "renewed at once"
    assert lease.release()


def test_a_late_renewal_puts_the_lease_at_risk_and_an_acknowledged_one_ends_that(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    backend.always("renew", silence(0.5))
    runtime.advance(12)
    assert state_of(lease) is LeaseState.AT_RISK
    assert lease.is_held()
    backend.always("renew", None)
    runtime.advance(2)
    assert state_of(lease) is LeaseState.HELD


def test_a_renewal_that_is_not_even_tried_puts_the_lease_at_risk_after_two_periods(
    client: Client, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    runtime.hold_jobs()
    runtime.advance(19.9)
    assert state_of(lease) is LeaseState.HELD
    runtime.advance(0.2)
    assert state_of(lease) is LeaseState.AT_RISK


def test_a_lease_that_is_not_renewed_is_never_at_risk(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n", renew=False).acquire()
    runtime.advance(LOST_AFTER - 0.1)
    assert state_of(lease) is LeaseState.HELD
    assert backend.called("renew") == []
    runtime.advance(0.2)
    assert state_of(lease) is LeaseState.LOST
    runtime.advance(TTL)
    assert backend.holders == {}, "released although nobody renews or releases it"


def test_a_released_lease_is_not_held_and_never_lost(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    assert lease.release() is True
    assert lease.release() is False
    assert state_of(lease) is LeaseState.RELEASED
    assert lease.remaining() == 0.0
    with pytest.raises(NotHeld):
        lease.check()
    with pytest.raises(NotHeld):
        lease.fence()
    with pytest.raises(NotHeld):
        lease.renew()
    lease.on_lost(losses)
    assert lease.wait_lost() is None
    runtime.advance(1000)
    assert losses.calls == []
    assert len(backend.called("release")) == 1


@pytest.mark.oracle
def test_on_lost_after_the_loss_is_called_at_once_with_the_same_loss(client: Client, runtime: HandRuntime) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    runtime.jump(100)
    assert not lease.is_held()
    lease.on_lost(losses)
    assert losses.calls == [losses.calls[0]] * 2


@pytest.mark.oracle
def test_every_callback_of_a_lease_is_called_in_its_order(client: Client, runtime: HandRuntime) -> None:
    heard: list[str] = []
    lease = client.lock("n", on_lost=lambda loss: heard.append("of the lock")).acquire()
    lease.on_lost(lambda loss: heard.append("of the lease"))
    runtime.jump(100)
    runtime.settle()
    assert heard == ["of the lock", "of the lease"]


@pytest.mark.parametrize("wrong", [None, 3, "print"])
def test_a_callback_that_cannot_be_called_is_refused(client: Client, wrong: Any) -> None:
    lease = client.lock("n").acquire()
    with pytest.raises(TypeError, match="on_lost"):
        lease.on_lost(wrong)


def test_fence_returns_the_token_while_the_lease_is_held(client: Client) -> None:
    lease = client.lock("n").acquire()
    assert lease.fence() == lease.token == 1


def test_fence_without_tokens_raises_missing_capability(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    def without_token(backend: Scripted, call: Any) -> Any:
        granted = call.execute()
        return type(granted)(None, granted.ttl, granted.sent_at, granted.valid_for, granted.renew_every, granted.group)

    backend.script("attempt", without_token)
    lease = client.lock("n").acquire()
    assert lease.token is None
    with pytest.raises(CapabilityMissing):
        lease.fence()


def test_a_loss_contains_the_known_details(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n", renew=False).acquire()
    runtime.advance(100)
    loss = lease.wait_lost()
    assert loss is not None
    assert loss.lease is lease
    assert not loss.confirmed
    assert loss.detected_at == pytest.approx(1000 + LOST_AFTER)
    assert loss.valid_until == pytest.approx(1000 + LOST_AFTER + 3.0)
    assert loss.time_left == pytest.approx(3.0)
    with pytest.raises(LockLost) as caught:
        lease.check()
    assert caught.value.loss is loss
    assert caught.value.name == "n"
    assert caught.value.backend == "scripted"


def test_lock_lost_can_be_sent_to_another_process(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n", renew=False).acquire()
    runtime.advance(100)
    with pytest.raises(LockLost, match=r"expired|paused") as caught:
        lease.check()
    there = pickle.loads(pickle.dumps(caught.value))
    assert type(there) is LockLost
    assert (str(there), there.name, there.backend, there.loss) == (str(caught.value), "n", "scripted", None)
    assert caught.value.loss is lease.wait_lost()


def test_copying_an_object_that_refers_to_a_lease_keeps_the_same_lease(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n", renew=False).acquire()
    assert copy.copy(lease) is lease
    assert copy.deepcopy([lease]) == [lease]
    runtime.advance(100)
    loss = lease.wait_lost()
    assert loss is not None
    assert copy.deepcopy(loss) == loss
    assert dataclasses.asdict(loss)["lease"] is lease
    lost = Lost("n", lease.owner, runtime.now(), loss, 27.0)
    assert dataclasses.asdict(lost)["loss"]["reason"] is loss.reason


def test_weak_references_to_a_lease_are_possible(client: Client) -> None:
    lease = client.lock("n").acquire()
    assert weakref.ref(lease)() is lease


def test_wait_lost_ends_at_the_loss_at_its_timeout_and_at_a_release(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    assert lease.wait_lost(7) is None
    assert runtime.now() == 1007.0
    backend.always("renew", silence())
    loss = lease.wait_lost()
    assert loss is not None
    assert loss.reason is LossReason.EXPIRED
    assert runtime.now() == pytest.approx(loss.detected_at)


def test_each_acquisition_has_an_id_of_its_own(client: Client) -> None:
    lock = client.lock("n")
    owners = set()
    for _ in range(20):
        with lock.acquire() as lease:
            owners.add(lease.owner)
    assert len(owners) == 20


def test_a_lease_shows_its_state_in_its_repr(client: Client, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    assert "'n' held token=1" in repr(lease)
    runtime.jump(100)
    assert "lost" in repr(lease)
