"""The backend by itself: what proves a grant, whose session it is, what a cancel leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from multilock import BackendUnavailable, now
from multilock.model import Busy, Claim, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.spi import Ear
from multilock_consul import ConsulBackend, open_backend
from multilock_consul.http1 import Reading
from tests.servers_consul import ConsulServer

WITHIN = 5.0
Open = Callable[..., ConsulBackend]


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def open_(ear: Ear) -> Iterator[Open]:
    opened: list[ConsulBackend] = []

    def open_(url: str, **options: object) -> ConsulBackend:
        backend = open_backend(url, {"ttl": 3.0, "prefix": "multilock/", "identity": "me", **options})
        backend.open(ear)
        opened.append(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()


def take(backend: ConsulBackend, claim: Claim) -> Granted:
    granted = backend.attempt(claim, False, WITHIN)
    assert isinstance(granted, Granted), granted
    return granted


def test_a_lock_is_as_old_as_the_last_renewal_of_its_session(server: ConsulServer, open_: Open, ear: Ear) -> None:
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
    assert renewed is not None
    assert before <= renewed.sent_at <= now() - 1.2, "two requests, one after the other"


def test_a_session_that_was_not_renewed_in_time_is_never_used_again(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    first = take(backend, ear.claim("first", ttl=1.0))
    time.sleep(1.0)  # at the server it lives for twice its ttl
    second = take(backend, ear.claim("second", ttl=1.0))
    assert second.group != first.group
    assert second.sent_at > first.sent_at + 0.9
    assert list(backend.renew(first.group, [(ear.claim("first"), first)], WITHIN)) == [None]


def test_what_an_unanswered_attempt_took_in_a_session_whose_time_is_over_is_given_back(
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


def test_locks_of_different_ttls_are_in_different_sessions(server: ConsulServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    groups = {take(backend, ear.claim(f"job-{n}", ttl=ttl)).group for n, ttl in enumerate((2.0, 3.0, 2.0))}
    assert len(groups) == len(server.sessions()) == 2


def test_an_attempt_that_begins_after_its_cancel_takes_nothing(server: ConsulServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    claim = ear.claim()
    assert backend.release(claim, None, True, WITHIN) is False
    assert isinstance(backend.attempt(claim, True, WITHIN), Busy)
    take(backend, ear.claim())


def test_a_refused_try_without_renewal_leaves_no_session(server: ConsulServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    take(backend, ear.claim())
    assert isinstance(backend.attempt(ear.claim(renew=False), False, WITHIN), Busy)
    assert len(server.sessions()) == 1


def test_a_lock_without_renewal_counts_from_when_it_was_free_and_not_from_when_it_was_waited_for(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    holder, waiter = ear.claim(), ear.claim(renew=False)
    granted = take(backend, holder)
    assert isinstance(backend.attempt(waiter, True, WITHIN), Busy)
    time.sleep(0.6)
    before = now()
    assert backend.release(holder, granted, False, WITHIN)
    later = backend.attempt(waiter, True, WITHIN)
    assert isinstance(later, Granted)
    assert later.sent_at >= before


# ---- answers as they arrive

ANSWERS = {
    b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Consul-Index: 7\r\n\r\n"abc"': (200, b'"abc"'),
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n": (404, b""),
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n": (
        200,
        b"abc0123456789",
    ),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: x\r\n\r\n": (200, b"a"),
}


@pytest.mark.parametrize("wire", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_whole_with_its_last_byte_and_not_before(wire: bytes, size: int) -> None:
    reading = Reading()
    pieces = [wire[start : start + size] for start in range(0, len(wire), size)]
    for piece in pieces[:-1]:
        assert reading.feed(piece) is None
    response = reading.feed(pieces[-1])
    assert response is not None
    assert (response.status, response.body) == ANSWERS[wire]


@pytest.mark.parametrize("wire", [b"SSH-2.0-x\r\n\r\n", b"x" * 70_000, b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_no_http_is_an_error(wire: bytes) -> None:
    with pytest.raises(ValueError):
        Reading().feed(wire)
