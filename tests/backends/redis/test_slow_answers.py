"""Answers that take their time: what they prove, and for which request."""

from __future__ import annotations

import pytest

from multilock import BackendUnavailable, now
from multilock.model import Granted
from multilock.testing import FaultProxy
from tests.backends.redis.conftest import Connect

SLOW = 0.3


def test_validity_counts_from_the_sending_however_slow_the_answer(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url)
    us.release(us.take()[0])
    proxy.delay(SLOW, "down")
    claim, granted = us.take()
    assert now() - granted.sent_at >= SLOW
    [renewed] = us.renew((claim, granted))
    assert isinstance(renewed, Granted)
    assert now() - renewed.sent_at >= SLOW


def test_a_slow_answer_is_never_taken_for_that_of_the_next_request(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url)
    held, _ = us.take()
    proxy.delay(4 * SLOW, "down")
    with pytest.raises(BackendUnavailable):
        us.backend.inspect(held.name, SLOW / 2)
    proxy.heal()
    assert us.release(us.claim("another")) is False
