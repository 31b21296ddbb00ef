"""The server is stopped, frozen or restarted without its data, or it forgets its scripts."""

from __future__ import annotations

import pytest

from multilock import BackendUnavailable, LeaseState, Loss, LossReason, now
from multilock.testing.conformance.base import Pulse, Recorder, by_the_clock, eventually, queued
from multilock.testing.conformance.faces import background
from tests.faults.conftest import Connect, Operator
from tests.servers import RedisServer

TTL = 2.0
SLACK = 0.15  # seconds by which a callback may start late; a tenth of the ttl is reserved for callbacks


def test_a_frozen_server_costs_the_lease_before_another_client_can_have_it(
    connect: Connect, redis_server: RedisServer
) -> None:
    losses: Recorder[Loss] = Recorder()
    client, other = connect(ttl=TTL), connect(ttl=6.0)
    lease = client.lock("n", on_lost=losses).acquire(timeout=5)
    waiting = background(lambda: other.lock("n").acquire(timeout=20))
    eventually(lambda: queued(client, "n") == 1)
    with redis_server.paused(), Pulse() as pulse:
        loss = losses.wait()
        assert losses.times[0] <= loss.valid_until - TTL / 10 + SLACK + pulse.stopped()
        assert by_the_clock(loss)
        assert not loss.confirmed
        assert loss.time_left > 0 or pulse.stopped()
        assert not lease.is_held()
    following = waiting.result(10)
    assert following.fence() > (lease.token or 0)
    assert not lease.release()
    following.renew()
    assert losses.stays_at(1)


def test_a_server_frozen_for_less_than_the_lease_costs_nothing(connect: Connect, redis_server: RedisServer) -> None:
    losses: Recorder[Loss] = Recorder()
    lease = connect(ttl=6.0).lock("n", on_lost=losses).acquire(timeout=5)
    before = lease.remaining()
    with redis_server.paused():
        eventually(lambda: lease.state is LeaseState.AT_RISK)
    eventually(lambda: lease.state is LeaseState.HELD and lease.remaining() > before - 1.0)
    assert losses.calls == []
    assert lease.release()


def test_an_absent_server_costs_the_lease_in_time(connect: Connect, redis_server: RedisServer) -> None:
    losses: Recorder[Loss] = Recorder()
    connect(ttl=TTL).lock("n", on_lost=losses).acquire(timeout=5)
    redis_server.kill()
    with Pulse() as pulse:
        loss = losses.wait()
        assert losses.times[0] <= loss.valid_until - TTL / 10 + SLACK + pulse.stopped()
    assert by_the_clock(loss)


def test_a_server_restarted_without_data_is_reported_as_a_loss_and_then_used(
    connect: Connect, redis_server: RedisServer
) -> None:
    losses: Recorder[Loss] = Recorder()
    client, other = connect(ttl=3.0), connect(ttl=3.0)
    lease = client.lock("n", on_lost=losses).acquire(timeout=5)
    waiting = background(lambda: other.lock("n").acquire(timeout=20))
    eventually(lambda: queued(client, "n") == 1)
    redis_server.restart()
    following = waiting.result(10)
    assert losses.wait().reason is LossReason.TAKEN
    assert losses.calls[0].confirmed
    assert following.fence() > (lease.token or 0)
    assert following.is_held()


def test_scripts_that_the_server_lost_are_loaded_again_by_any_request(connect: Connect, operator: Operator) -> None:
    losses: Recorder[Loss] = Recorder()
    client, other = connect(ttl=TTL), connect(ttl=10.0)
    operator.script_flush()
    lease = client.lock("n", on_lost=losses).acquire(timeout=5)
    until = now() + 1.5 * TTL
    while now() < until:  # the server has lost the script of each renewal, and of each request of the other client
        operator.script_flush()
        assert other.lock("n").try_acquire() is None
    operator.script_flush()
    assert lease.release()
    assert losses.calls == []
    with other.lock("n").acquire(timeout=5):
        pass


def test_a_wait_continues_until_the_server_is_back_in_time(connect: Connect, redis_server: RedisServer) -> None:
    client = connect(ttl=TTL, outage_timeout=10.0)
    redis_server.kill()
    waiting = background(lambda: client.lock("n").acquire(timeout=20))
    assert not _ends(waiting, within=1.0)
    redis_server.start()
    assert waiting.result(5).is_held()


def test_a_wait_ends_when_the_server_stays_absent_for_too_long(connect: Connect, redis_server: RedisServer) -> None:
    client = connect(ttl=TTL, outage_timeout=0.8)
    redis_server.kill()
    began = now()
    waiting = background(lambda: client.lock("n").acquire())
    with pytest.raises(BackendUnavailable, match="no answer"):
        waiting.result(10)
    assert 0.8 <= now() - began < 2.5


def _ends(waiting: object, within: float) -> bool:
    try:
        waiting.result(within)  # type: ignore[attr-defined]
    except TimeoutError:
        return False
    return True
