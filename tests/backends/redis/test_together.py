"""Attempts that are sent together in one pipeline: lost or late replies, and a cancel of one attempt."""

from __future__ import annotations

import asyncio

import pytest

import multilock
from multilock import BackendUnavailable, now
from multilock.model import Busy, Claim, Granted
from multilock.testing import FaultProxy
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of
from tests.servers import RedisServer

WITHIN = 20.0  # seconds to wait at most, on an overloaded machine


@pytest.fixture
def us(connect: Connect, proxy: FaultProxy) -> Ours:
    """Return a client behind the proxy. The client has subscribed, and the server has loaded the script."""
    us = connect(proxy.url, within=WITHIN)
    claim = us.claim()
    together(us, claim)
    us.release(claim)
    return us


def together(us: Ours, *claims: Claim, within: float = WITHIN) -> list[Granted | Busy | Exception]:
    return list(us.backend.attempt_all(claims, within))


def executed(bare: Bare) -> int:
    calls: int = bare.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls


def waiting(client: multilock.Client) -> int | None:
    info = client.inspect("a")
    return info.waiting if info else None


def test_attempts_whose_replies_are_lost_are_found_by_the_same_ids(us: Ours, proxy: FaultProxy, bare: Bare) -> None:
    first, behind, elsewhere = us.claim(), us.claim(), us.claim("b")
    proxy.drop_reply(behind.id.encode())
    with pytest.raises(BackendUnavailable) as silence:
        together(us, first, behind, elsewhere)
    assert silence.value.unknown
    assert (holder_of(bare), holder_of(bare, "b")) == (first.owner, elsewhere.owner)
    assert list(map(type, together(us, first, behind, elsewhere))) == [Granted, Busy, Granted]
    for claim in (behind, first, elsewhere):
        us.release(claim, unsure=True)
    assert (holder_of(bare), holder_of(bare, "b")) == (None, None)


def test_attempts_executed_after_their_cancels_acquire_nothing(us: Ours, proxy: FaultProxy, bare: Bare) -> None:
    claims = [us.claim(), us.claim("b")]
    late = proxy.hold_request(claims[0].id.encode())
    with pytest.raises(BackendUnavailable) as silence:
        together(us, *claims, within=1.0)
    assert silence.value.unknown
    for claim in claims:
        assert us.release(claim, unsure=True) is False
    before = executed(bare)
    late.release()
    eventually(lambda: executed(bare) == before + 2, within=WITHIN)
    assert (holder_of(bare), holder_of(bare, "b")) == (None, None)


def test_after_a_pause_that_used_up_their_time_no_attempt_is_sent(us: Ours, bare: Bare) -> None:
    before = executed(bare)
    with pytest.raises(BackendUnavailable) as late:
        together(us, us.claim(), us.claim("b"), within=0.0)
    assert not late.value.unknown
    assert executed(bare) == before


def test_a_late_reply_to_attempts_counts_from_the_sending(us: Ours, proxy: FaultProxy) -> None:
    proxy.delay(0.3, "down")
    for granted in together(us, us.claim(), us.claim("b")):
        assert isinstance(granted, Granted)
        assert granted.sent_at <= now() - 0.3


def test_waiters_cancelled_during_a_common_heartbeat_keep_no_place(
    server: RedisServer, proxy: FaultProxy, bare: Bare
) -> None:
    async def main() -> None:
        with multilock.connect(server.url, ttl=30) as holder, holder.lock("a"):
            async with multilock.connect_async(proxy.url, ttl=2) as client:
                waiters = [asyncio.create_task(client.lock("a", fair=True).acquire()) for _ in range(3)]
                await asyncio.to_thread(eventually, lambda: waiting(holder) == 3, WITHIN)
                late = proxy.hold_request(b"multilock/a")  # delays the next heartbeats
                await asyncio.to_thread(late.wait, WITHIN)
                for waiter in waiters:
                    waiter.cancel()
                await asyncio.wait(waiters)
                assert all(waiter.cancelled() for waiter in waiters)
                await asyncio.to_thread(eventually, lambda: waiting(holder) == 0, WITHIN)
                before = executed(bare)
                late.release()
                await asyncio.to_thread(eventually, lambda: executed(bare) > before, WITHIN)
                assert waiting(holder) == 0

    asyncio.run(main())
