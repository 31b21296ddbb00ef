"""A step of the Redis server's clock does not change the order of tokens, and a holder that loses its lock is
notified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from multilock import Loss, LossReason
from multilock.backend import Busy, Granted
from multilock.testing.conformance.base import Recorder, eventually, queued
from multilock.testing.conformance.faces import background
from tests.backends.redlock.kit import Contender, holders
from tests.faults.clock import ClockedRedis, compiled
from tests.faults.conftest import Connect
from tests.servers import RedisServer
from tests.servers_redlock import RedisServers

HOUR = 3600.0


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def redis_server(shim: Path, tmp_path: Path) -> Iterator[ClockedRedis]:
    with ClockedRedis(shim, tmp_path / "offset") as server:
        yield server


def test_the_helper_steps_the_clock(redis_server: ClockedRedis) -> None:
    with redis.Redis(port=redis_server.port) as client:
        before = client.time()[0]
        redis_server.step(-HOUR)
        assert before - HOUR <= client.time()[0] <= before - HOUR + 10


def test_tokens_grow_whatever_the_clock_does(connect: Connect, redis_server: ClockedRedis) -> None:
    client, other = connect(), connect()
    tokens = []
    for step in (0.0, -HOUR, -2 * HOUR, HOUR, 0.0, -24 * HOUR):
        redis_server.step(step)
        for each in (client, other):
            with each.lock("n").acquire(timeout=5) as lease:
                tokens.append(lease.fence())
    assert tokens == sorted(set(tokens))


def test_a_clock_stepped_back_costs_no_lease_and_blocks_no_waiter(connect: Connect, redis_server: ClockedRedis) -> None:
    losses: Recorder[Loss] = Recorder()
    client, other = connect(ttl=3.0), connect(ttl=3.0)
    lease = client.lock("n", on_lost=losses).acquire(timeout=5)
    waiting = background(lambda: other.lock("n").acquire(timeout=20))
    eventually(lambda: queued(client, "n") == 1)
    redis_server.step(-HOUR)
    assert losses.stays_at(0, during=3.5)
    assert lease.release()
    assert waiting.result(5).is_held()


def test_a_clock_stepped_forward_ends_a_lease_and_notifies_its_holder(
    connect: Connect, redis_server: ClockedRedis
) -> None:
    """No client can prevent this, because the ttl has ended on the server's clock. The token distinguishes the two
    holders."""
    losses: Recorder[Loss] = Recorder()
    client, other = connect(ttl=3.0), connect(ttl=3.0)
    lease = client.lock("n", on_lost=losses).acquire(timeout=5)
    waiting = background(lambda: other.lock("n").acquire(timeout=20))
    eventually(lambda: queued(client, "n") == 1)
    redis_server.step(HOUR)
    following = waiting.result(5)
    loss = losses.wait(within=2.0)
    assert (loss.reason, loss.confirmed) == (LossReason.TAKEN, True)
    assert not lease.is_held()
    assert following.fence() > (lease.token or 0)
    following.renew()


# ---- the clock of one of several servers


@pytest.fixture
def three(redis_server: ClockedRedis) -> Iterator[RedisServers]:
    """Three servers. A test can step the clock of the first one."""
    with RedisServer() as second, RedisServer() as third:
        servers = RedisServers(0)
        servers.members = [redis_server, second, third]
        yield servers


@pytest.fixture
def contenders(three: RedisServers) -> Iterator[tuple[Contender, Contender]]:
    both = Contender(three), Contender(three)
    yield both
    for each in both:
        each.close()


def test_a_stepped_clock_on_one_of_three_servers_admits_no_second_holder(
    contenders: tuple[Contender, Contender], three: RedisServers, redis_server: ClockedRedis
) -> None:
    us, them = contenders
    claim, granted = us.take()
    us.settle(claim)
    redis_server.step(HOUR)
    tried = them.claim()
    refused = them.attempt(tried)
    assert isinstance(refused, Busy)
    them.settle(tried)
    assert holders(three) == [tried.id, claim.id, claim.id]
    [renewed] = us.renew((claim, granted))
    assert isinstance(renewed, Granted)
    them.give_back(tried)
    us.give_back(claim)
    _, following = them.take()
    assert (following.token or 0) > (granted.token or 0)


@pytest.mark.parametrize("steps", [(HOUR, 0.0), (-HOUR, HOUR)])
def test_tokens_of_a_majority_grow_although_one_clock_is_stepped(
    contenders: tuple[Contender, Contender], redis_server: ClockedRedis, steps: tuple[float, ...]
) -> None:
    tokens = []
    for step in (0.0, *steps):
        redis_server.step(step)
        for each in contenders:
            claim, granted = each.take()
            each.settle(claim)
            tokens.append(granted.token or 0)
            each.give_back(claim)
    assert tokens == sorted(set(tokens))


def test_a_clock_stepped_beside_a_bare_majority_admits_a_second_holder_with_a_greater_token(
    contenders: tuple[Contender, Contender], redis_server: ClockedRedis
) -> None:
    """No client can prevent this: the first server ends the lease, and the third server has never had a lock of the
    first holder."""
    us, them = contenders
    us.cut_off(2)
    _, granted = us.take()
    redis_server.step(HOUR)
    _, following = them.take()
    assert (following.token or 0) > (granted.token or 0)
