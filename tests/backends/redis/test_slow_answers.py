"""Late replies: to which request they belong, and what they prove."""

from __future__ import annotations

from typing import Any

import pytest

from multilock import BackendUnavailable, now
from multilock.model import Granted
from multilock.testing import FaultProxy
from multilock_redis.wire import pack
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, connected

SLOW = 0.3


def test_validity_counts_from_the_sending_however_late_the_reply(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url)
    us.release(us.take()[0])
    proxy.delay(SLOW, "down")
    claim, granted = us.take()
    assert now() - granted.sent_at >= SLOW
    [renewed] = us.renew((claim, granted))
    assert isinstance(renewed, Granted)
    assert now() - renewed.sent_at >= SLOW


def test_a_late_reply_is_never_taken_for_the_reply_to_the_next_request(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url)
    held, _ = us.take()
    proxy.delay(SLOW, "down")
    with pytest.raises(BackendUnavailable):
        us.backend.inspect(held.name, SLOW / 2)
    assert us.release(us.claim("another")) is False  # the late reply arrives while this request waits


def test_a_client_that_was_frozen_while_it_connected_sends_nothing_late(
    us: Ours, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim may have been cancelled during the freeze, and the server remembers a cancel for only one minute."""
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
    us.take()  # this request uses the old connection


@pytest.mark.parametrize("within", [0.0, -60.0])
def test_an_expired_request_is_not_sent_on_an_idle_connection(us: Ours, bare: Bare, within: float) -> None:
    us.release(us.take()[0])
    bare.flushall()
    before = connected(bare)
    for call in (
        lambda: us.backend.attempt(us.claim(), False, within),
        lambda: us.backend.attempt(us.claim(), True, within),
        lambda: us.backend._node.connections.exchange([pack("SET", "multilock/a", "late")], within),
    ):
        with pytest.raises(BackendUnavailable, match="no time was left") as caught:
            call()
        assert caught.value.unknown is False
    assert list(bare.scan_iter()) == []
    us.take()
    assert connected(bare) == before  # the old connection is still used


def test_a_client_that_was_frozen_while_it_subscribed_sends_nothing_late(
    us: Ours, them: Ours, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    them.take()
    node, stood_still = us.backend._node, [0.0]
    listen = node.listener.listen

    def stands_still(within: float) -> None:
        listen(within)
        stood_still.append(120.0)

    for part, clock in ((node, "_now"), (node.connections, "_now"), (node.recipe._transactions, "now")):
        monkeypatch.setattr(part, clock, lambda: now() + stood_still[-1])
    monkeypatch.setattr(node.listener, "listen", stands_still)
    with pytest.raises(BackendUnavailable, match="no time was left") as caught:
        us.attempt(us.claim(), join=True)
    assert caught.value.unknown is False
    assert bare.zcard("{multilock/a}:queue") == 0
