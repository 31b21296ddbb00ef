"""A name *rests* while it stays taken after an early release. No client renews or revokes the lease of its key, which
stays first in the queue."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import multilock
from multilock import BackendUnavailable, now
from multilock.model import Busy, Claim, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import eventually, inner
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear
from multilock_etcd import EtcdBackend, open_backend
from multilock_etcd.transport import EtcdTransport, Method, calls
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.kit import WITHIN, Mishap
from tests.backends.etcd.test_faults import keys, leases
from tests.servers_etcd import EtcdServer, etcdctl

LONG = 60.0  # seconds that a rest lasts if the test does not wait for its end
SHORT = 2.0  # seconds: the shortest lease that the server grants
MOVE = b"resting_until"

Open = Callable[[str], EtcdBackend]


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def open_(ear: Ear) -> Iterator[Open]:
    """Open backends that the test calls directly. Closes all of them after the test."""
    opened: list[EtcdBackend] = []

    def open_(url: str) -> EtcdBackend:
        backend = open_backend(url, {})
        backend.open(ear)
        opened.append(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()


def held(backend: EtcdBackend, ear: Ear, **options: Any) -> tuple[Claim, Granted]:
    claim = ear.claim("job", **options)
    granted = backend.attempt(claim, False, WITHIN)
    assert isinstance(granted, Granted)
    return claim, granted


def lease_of_key(server: EtcdServer) -> int:
    [row] = rows(server)
    return int(row["lease"])


def rows(server: EtcdServer) -> list[dict[str, Any]]:
    """Return the rows of the name: the key of each claim with its fields."""
    begin, end = (base64.b64encode(key).decode() for key in (b"multilock/job/", b"multilock/job0"))
    found: list[dict[str, Any]] = server.post("kv/range", {"key": begin, "range_end": end}).get("kvs", [])
    return found


# ---- requests whose reply is lost, or that are executed late


def test_if_granting_a_lease_for_a_rest_gets_no_reply_another_is_made(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    Mishap(monkeypatch, calls.GRANT)
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, SHORT, WITHIN)
    assert lease_of_key(server) == granted.group, "the name stays held until it rests"
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True
    assert len(leases(server)) == 3
    eventually(lambda: len(leases(server)) == 2)  # the lease whose grant had no reply has no key, and expires by itself
    assert keys(server)


def test_a_move_to_the_resting_session_is_done_once_even_if_its_reply_is_lost(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    Mishap(monkeypatch, calls.TXN, MOVE)
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, LONG, WITHIN)
    before = rows(server)
    assert int(before[0]["lease"]) != granted.group
    assert backend.rest(claim, granted, True, 2 * LONG, WITHIN).ours is True
    assert rows(server) == before
    assert len(leases(server)) == 2, "what is superfluous is revoked"


def test_a_rest_executed_late_lasts_at_least_as_long_as_first_requested(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gives up its first request to move the key, and sends a second one with a longer time. The server
    executes the first request before the second one."""
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    late = Mishap(monkeypatch, calls.TXN, MOVE, executed=False)
    asked_at = now()
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, 4.0, WITHIN)
    assert late.send().succeeded
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True
    while isinstance(backend.attempt(ear.claim("job"), False, WITHIN), Busy):
        assert now() < asked_at + 15.0
        time.sleep(0.02)
    assert now() >= asked_at + 4.0


@pytest.mark.parametrize("unsure", [True, False])
def test_a_move_executed_after_the_release_changes_nothing(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch, unsure: bool
) -> None:
    """The name need not stay taken any longer, so the client releases it. Another client acquires the name before the
    late move is executed."""
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    late = Mishap(monkeypatch, calls.TXN, MOVE, executed=False)
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, LONG, WITHIN)
    assert backend.release(claim, granted, unsure, WITHIN).ours is True
    held(backend, ear)
    before = rows(server)
    assert not late.send().succeeded
    assert rows(server) == before


@pytest.mark.parametrize("unsure", [True, False])
def test_a_move_after_the_end_of_its_lease_changes_nothing(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch, unsure: bool
) -> None:
    """The client was paused between the two requests of `rest`. The first grants another lease, and the second moves
    the key to that lease."""
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    really = EtcdTransport.call

    def stand_still(transport: EtcdTransport, method: Method, request: Any, within: float) -> Any:
        if method is calls.TXN and MOVE in request.SerializeToString():
            for rest in [lease for lease in leases(server) if int(lease, 16) != granted.group]:
                etcdctl(server.endpoint, "lease", "revoke", rest)
        return really(transport, method, request, within)

    with monkeypatch.context() as patched:
        patched.setattr(EtcdTransport, "call", stand_still)
        with pytest.raises(BackendUnavailable, match="too late") as silence:
            backend.rest(claim, granted, unsure, LONG, WITHIN)
    assert not silence.value.unknown
    assert lease_of_key(server) == granted.group
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True


def test_a_cancelled_release_still_lets_the_name_rest(server: EtcdServer, proxy: FaultProxy) -> None:
    async def main() -> None:
        async with multilock.connect_async(proxy.url, ttl=10.0) as client:
            lease = await client.lock("job", hold_at_least=LONG).acquire()
            before = lease_of_key(server)
            asked = proxy.drop_reply(MOVE, then="hold")
            releasing = asyncio.ensure_future(lease.release())
            await asyncio.to_thread(asked.wait, WITHIN)
            releasing.cancel()
            await asyncio.gather(releasing, return_exceptions=True)
            await asyncio.to_thread(eventually, lambda: lease_of_key(server) != before)
            rests = rows(server)
            assert MOVE in base64.b64decode(rests[0]["value"])
        assert rows(server) == rests

    asyncio.run(main())


# ---- events that must neither end a rest nor begin one


def test_an_acquire_executed_after_an_unconfirmed_rest_acquires_nothing(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_(server.url)
    claim = ear.claim("job")
    late = Mishap(monkeypatch, calls.TXN, b"/job/", executed=False)
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, WITHIN)
    granted = backend.attempt(claim, True, WITHIN)
    assert isinstance(granted, Granted)
    assert backend.rest(claim, granted, True, SHORT, WITHIN).ours is True
    eventually(lambda: rows(server) == [])
    assert not late.send().succeeded
    assert rows(server) == []


@pytest.mark.parametrize("renew", [True, False])
def test_if_a_rest_cannot_be_requested_close_leaves_the_name_until_the_session_ends(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch, renew: bool
) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear, renew=renew)
    Mishap(monkeypatch, calls.GRANT, executed=False)
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, LONG, WITHIN)
    other = backend.attempt(ear.claim("other", ttl=20.0), False, WITHIN)
    assert isinstance(other, Granted)
    backend.close()
    assert lease_of_key(server) == granted.group
    assert [int(lease, 16) for lease in leases(server)] == [granted.group]


def test_a_rest_is_found_although_the_lease_of_its_tombstone_ended(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    Mishap(monkeypatch, calls.TXN, MOVE)
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, LONG, WITHIN)
    before = rows(server)
    etcdctl(server.endpoint, "lease", "revoke", f"{granted.group:x}")
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True
    assert rows(server) == before
    assert len(leases(server)) == 1


def test_a_late_release_does_not_end_the_rest(server: EtcdServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is True
    before = rows(server)
    assert isinstance(backend.attempt(claim, True, WITHIN), Busy)
    for unsure in (False, True):
        assert backend.release(claim, granted, unsure, WITHIN).ours is False
    assert rows(server) == before


def test_a_lock_that_is_not_renewed_rests_without_another_lease(server: EtcdServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear, renew=False)
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is True
    assert [int(lease, 16) for lease in leases(server)] == [lease_of_key(server)]
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True
    assert len(leases(server)) == 1


def test_a_key_with_an_overwritten_value_rests_too(server: EtcdServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    [key] = keys(server)
    etcdctl(server.endpoint, "put", key, "nobody knows why")
    assert [*backend.renew(granted.group, [(claim, granted)], WITHIN)] != [None]
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is True
    info = backend.inspect("job", WITHIN)
    assert info is not None
    assert info.resting_until
    assert (info.owner, info.token) == (claim.owner, granted.token)


@pytest.mark.oracle
def test_a_force_release_that_ends_a_rest_leaves_no_lease(server: EtcdServer, open_: Open, ear: Ear) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is True
    assert open_(server.url).force_release("job", WITHIN) is True
    assert [int(lease, 16) for lease in leases(server)] == [granted.group]
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is False
    assert [int(lease, 16) for lease in leases(server)] == [granted.group]


def test_a_queue_keeps_its_order_during_a_rest(
    server: EtcdServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each waiter watches only the key just ahead of it, and is woken once.
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", 0)
    backend = open_(server.url)
    claim, granted = held(backend, ear)
    waiters = [ear.claim("job", fair=True) for _ in range(3)]
    for waiter in waiters:
        assert isinstance(backend.attempt(waiter, True, WITHIN), Busy)
    begun = now()
    assert backend.rest(claim, granted, False, SHORT, WITHIN).ours is True
    assert ear.wait(lambda: waiters[0].id in ear.wakes, 10.0)
    assert now() >= begun + SHORT
    for waiter in reversed(waiters[1:]):
        assert isinstance(backend.attempt(waiter, True, WITHIN), Busy)
    assert isinstance(backend.attempt(waiters[0], True, WITHIN), Granted)


# ---- etcd's own tools


def test_etcdctl_waits_for_a_resting_name(server: EtcdServer, connect: Connect) -> None:
    with connect(server.url).lock("job", hold_at_least=3.0) as lease:
        pass
    official = background(lambda: etcdctl(server.endpoint, "lock", "multilock/job", "true"))
    official.result(30)
    assert now() >= inner(lease).granted_at + 3.0
