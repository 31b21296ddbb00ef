"""An operator deletes the key of a lock, takes the lock, or empties the database. The holder is notified at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from multilock import Loss, LossReason, now
from multilock.testing.conformance.base import Pulse, Recorder, eventually
from tests.faults.conftest import Connect, Operator

KEY = "multilock/n"
NOTICE = 0.05  # seconds at most until the holder is notified, with a round trip of less than a millisecond


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda operator: operator.delete(KEY), id="deleted"),
        pytest.param(lambda operator: operator.set(KEY, "me", px=100), id="taken"),
        pytest.param(lambda operator: operator.flushall(), id="flushed"),
        pytest.param(lambda operator: operator.rename(KEY, "elsewhere"), id="renamed"),
    ],
)
def test_a_holder_is_notified_of_a_force_release_within_a_round_trip_and_50_ms(
    connect: Connect, operator: Operator, act: Callable[[Operator], object]
) -> None:
    client = connect()
    notices = []
    for _ in range(5):
        losses: Recorder[Loss] = Recorder()
        lease = client.lock("n", on_lost=losses).acquire(timeout=5)
        eventually(lambda: _tracked(operator))
        with Pulse() as pulse:
            began = now()
            act(operator)
            loss = losses.wait()
            notices.append(losses.times[0] - began - pulse.stopped())
        assert (loss.reason, loss.confirmed) == (LossReason.TAKEN, True)
        assert not lease.is_held()
        assert not lease.release()
        eventually(lambda: not operator.exists(KEY))
    assert statistics.median(notices) <= NOTICE


def test_a_force_release_notifies_the_holder_before_it_admits_the_next_one(connect: Connect) -> None:
    losses: Recorder[Loss] = Recorder()
    client, other = connect(), connect()
    lease = client.lock("n", on_lost=losses).acquire(timeout=5)
    assert other.force_release("n")
    with other.lock("n").acquire(timeout=5) as following:
        assert following.fence() > (lease.token or 0)
    assert losses.wait().reason is LossReason.TAKEN


def _tracked(operator: Operator) -> bool:
    """Return whether the server reports changes of this key. The reports begin when a lock has been held for 0.25 s."""
    return bool(operator.info("stats")["tracking_total_keys"])
