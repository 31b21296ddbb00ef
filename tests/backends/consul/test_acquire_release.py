"""The Consul backend, called directly: the proof of a grant, the session of a lock, and the effects of a cancel."""

from __future__ import annotations

import time
from typing import Any

import pytest

from multilock import BackendUnavailable, now
from multilock.model import Busy, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.spi import Ear
from tests.backends.consul.conftest import WITHIN, Open, take
from tests.servers_consul import ConsulServer


def test_the_validity_of_a_lock_counts_from_the_last_renewal_of_its_session(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    first = take(backend, ear.claim("first"))
    time.sleep(0.3)
    second = take(backend, ear.claim("second"))
    assert (second.sent_at, second.group) == (first.sent_at, first.group)
    [renewed] = backend.renew(first.group, [(ear.claim("third"), first)], WITHIN)
    assert renewed is None, "the third was never taken"
    assert take(backend, ear.claim("fourth")).sent_at >= first.sent_at + 0.3


def test_a_renewal_counts_from_its_sending(server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear) -> None:
    backend = open_(proxy.url)
    claim = ear.claim()
    granted = take(backend, claim)
    proxy.delay(0.3)
    before = now()
    [renewed] = backend.renew(granted.group, [(claim, granted)], WITHIN)
    assert isinstance(renewed, Granted)
    assert before <= renewed.sent_at <= now() - 1.2, "two requests, one after the other"


def test_a_client_that_was_frozen_while_it_connected_sends_nothing_late(
    shared: ConsulServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim may have been cancelled during the pause, and the client looks for late executions for one minute
    only."""
    backend = open_(shared.url)
    take(backend, ear.claim("stands-still-1"))
    agents = backend._agents
    stood_still = [0.0]
    taking = agents._take

    def stands_still(within: float) -> Any:
        wire = taking(within)
        stood_still.append(120.0)
        return wire

    monkeypatch.setattr(agents, "now", lambda: now() + stood_still[-1])
    monkeypatch.setattr(agents, "_take", stands_still)
    with pytest.raises(BackendUnavailable, match="no time was left") as caught:
        backend.attempt(ear.claim("stands-still-2"), True, WITHIN)
    assert caught.value.unknown is False
    monkeypatch.undo()
    assert backend.inspect("stands-still-2", WITHIN) is None


def test_a_session_that_was_not_renewed_in_time_is_never_used_again(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    first = take(backend, ear.claim("first", ttl=1.0))
    time.sleep(1.0)  # the server ends a session only after twice its ttl
    second = take(backend, ear.claim("second", ttl=1.0))
    assert second.group != first.group
    assert second.sent_at > first.sent_at + 0.9
    assert list(backend.renew(first.group, [(ear.claim("first"), first)], WITHIN)) == [None]


def test_an_unanswered_attempt_in_an_expired_session_is_released(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear
) -> None:
    backend = open_(proxy.url)
    take(backend, ear.claim("warm-up", ttl=1.0))
    claim = ear.claim(ttl=1.0)
    proxy.drop_reply(b'"lock"')
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, WITHIN)
    time.sleep(1.0)
    before = now()
    assert isinstance(backend.attempt(claim, True, WITHIN), Busy)
    granted = take(backend, claim)
    assert granted.sent_at >= before


def test_locks_with_different_ttls_use_different_sessions(server: ConsulServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    groups = {take(backend, ear.claim(f"job-{n}", ttl=ttl)).group for n, ttl in enumerate((2.0, 3.0, 2.0))}
    assert len(groups) == len(server.sessions()) == 2


def test_an_attempt_that_begins_after_its_cancel_acquires_nothing(server: ConsulServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    claim = ear.claim()
    assert backend.release(claim, None, True, WITHIN).ours is False
    assert isinstance(backend.attempt(claim, True, WITHIN), Busy)
    take(backend, ear.claim())


@pytest.mark.oracle
def test_a_refused_try_without_renewal_leaves_no_session(server: ConsulServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    take(backend, ear.claim())
    assert isinstance(backend.attempt(ear.claim(renew=False), False, WITHIN), Busy)
    assert len(server.sessions()) == 1


def test_a_lock_without_renewal_counts_from_its_grant_and_not_from_its_request(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    holder, waiter = ear.claim(), ear.claim(renew=False)
    granted = take(backend, holder)
    assert isinstance(backend.attempt(waiter, True, WITHIN), Busy)
    time.sleep(0.6)
    before = now()
    assert backend.release(holder, granted, False, WITHIN).ours
    later = backend.attempt(waiter, True, WITHIN)
    assert isinstance(later, Granted)
    assert later.sent_at >= before
