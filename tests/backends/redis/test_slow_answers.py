"""Answers that take their time: what they prove, and for which request."""

from __future__ import annotations

from typing import Any

import pytest

from multilock import BackendUnavailable, now
from multilock.model import Granted
from multilock.testing import FaultProxy
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours

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


def test_who_stood_still_until_it_was_connected_sends_nothing_any_more(
    us: Ours, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been called off meanwhile, and the server does not remember that for longer than a minute."""
    connections = us.backend._node.connections
    stood_still = [0.0]
    connect = connections._endpoint.connect

    def stands_still(*how: Any) -> Any:
        wire = connect(*how)
        stood_still.append(120.0)
        return wire

    monkeypatch.setattr(connections, "_now", lambda: now() + stood_still[-1])
    monkeypatch.setattr(connections._endpoint, "connect", stands_still)
    with pytest.raises(BackendUnavailable, match="no time was left") as caught:
        us.attempt(us.claim())
    assert caught.value.unknown is False
    assert list(bare.scan_iter()) == []
    us.take()  # on that connection
