"""A session keeps its locks alive even if reading their keys fails, and keeps no unwanted lock alive."""

from __future__ import annotations

import asyncio
import itertools
import threading
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import multilock
from multilock import BackendRejected, BackendUnavailable, LeaseState, Loss, now
from multilock.model import Busy, Claim, Granted
from multilock.names import escape
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Recorder, eventually, inner
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear
from multilock.values import encode_value
from multilock_consul import ConsulBackend
from multilock_consul.keys import LOCK_FLAGS
from tests.backends.consul.conftest import WITHIN, Connect, Open, take
from tests.servers_consul import ConsulServer

MANY = 640  # number of locks; ten requests read their keys
FAR = 0.1  # seconds for a round trip
KEY = "multilock/job/.lock"
SESSIONS = 'session_prefix "" { policy = "write" }'


def held_in_one_session(backend: ConsulBackend, ear: Ear, names: list[str], ttl: float) -> list[tuple[Claim, Granted]]:
    claims = [ear.claim(name, ttl=ttl) for name in names]
    return [(claim, take(backend, claim)) for claim in claims]


# ---- many locks, long names, a slow network


def test_over_a_slow_network_many_locks_are_renewed_and_their_keys_read_in_turns(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear
) -> None:
    backend = open_(proxy.url)
    held = held_in_one_session(backend, ear, [f"job-{number}" for number in range(MANY)], 30.0)
    group = held[0][1].group
    proxy.delay(FAR / 2)
    for _ in range(2):
        renewed = backend.renew(group, held, 1.0)
        assert all(renewed)
        assert renewed[0].sent_at > held[0][1].sent_at  # type: ignore[union-attr]
    server.ask("DELETE", f"kv/multilock/job-{MANY - 1}/.lock")
    for _ in range(5):  # each renewal has time for some of the ten requests
        renewed = backend.renew(group, held, 1.0)
        assert all(renewed[:-1])
        if renewed[-1] is None:
            return
    pytest.fail("its turn never came")


def test_batches_of_key_reads_are_limited_by_the_bytes_of_the_names(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    names = [f"{number:02d}" + "鎖" * 998 for number in range(64)]
    held = held_in_one_session(backend, ear, names, 30.0)
    assert all(isinstance(answer, Granted) for answer in backend.renew(held[0][1].group, held, WITHIN))
    server.ask("DELETE", f"kv/multilock/{escape(names[-1]).replace('%', '%25')}/.lock")
    renewed = backend.renew(held[0][1].group, held, WITHIN)
    assert all(renewed[:-1])
    assert renewed[-1] is None


@pytest.mark.parametrize("then", ["cut", "hold"])
def test_a_renewed_session_keeps_its_locks_even_if_reading_their_keys_fails(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear, then: Any
) -> None:
    backend = open_(proxy.url)
    claim = ear.claim(ttl=30.0)
    granted = take(backend, claim)
    unanswered = proxy.drop_reply(b"get-tree", then=then)
    before = now()
    [renewed] = backend.renew(granted.group, [(claim, granted)], 1.0)
    assert unanswered.happened
    assert isinstance(renewed, Granted)
    assert renewed.sent_at >= before
    [renewed] = backend.renew(granted.group, [(claim, granted)], WITHIN)
    assert isinstance(renewed, Granted)


def test_a_renewal_of_one_lock_reads_its_key_first(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_consul.sessions.RELEASED_EVERY", 0.0)
    backend = open_(proxy.url)
    for number in range(330):  # six requests read the keys of 330 claims
        claim = ear.claim(f"former-{number}", ttl=30.0)
        backend.release(claim, take(backend, claim), False, WITHIN)
    [held] = held_in_one_session(backend, ear, ["job"], 30.0)
    server.ask("DELETE", f"kv/{KEY}")
    proxy.delay(0.15)  # a renewal then has time for only a few requests
    assert backend.renew(held[1].group, [held], 3.6) == [None]


# ---- locks that are held for no claim


@pytest.mark.parametrize("kept", ["", 'key_prefix "multilock/" { policy = "read" }'])
def test_a_failed_release_is_completed_as_soon_as_possible(
    guarded: ConsulServer, open_: Open, ear: Ear, kept: str
) -> None:
    """The release is refused, so renewals keep a lock that no claim needs. As soon as the token may write the key
    again, a renewal must release the lock."""
    rights = 'key_prefix "multilock/" { policy = "write" } ' + SESSIONS
    policy = guarded.ask("PUT", "acl/policy", {"Name": "locks", "Rules": rights})
    token = guarded.ask("PUT", "acl/token", {"Policies": [{"Name": "locks"}]})["SecretID"]
    backend = open_(guarded.url, token=token)
    claim = ear.claim("job")
    granted = take(backend, claim)
    guarded.ask("PUT", f"acl/policy/{policy['ID']}", {"Name": "locks", "Rules": f"{kept} {SESSIONS}"})
    with pytest.raises(BackendRejected):
        backend.release(claim, granted, False, WITHIN)
    with suppress(BackendRejected):  # one of the policies does not even allow reads
        backend.renew(granted.group, [], WITHIN)
    assert guarded.key(KEY)
    guarded.ask("PUT", f"acl/policy/{policy['ID']}", {"Name": "locks", "Rules": rights})
    eventually(lambda: backend.renew(granted.group, [], WITHIN) == [] and guarded.key(KEY) is None)


@pytest.mark.parametrize("kept", ["read", "deny"])
def test_a_refused_release_affects_no_other_lock(guarded: ConsulServer, open_: Open, ear: Ear, kept: str) -> None:
    withdraw, token = rights_but_for_one_key(guarded)
    backend = open_(guarded.url, token=token)
    [first, other] = held_in_one_session(backend, ear, ["job", "other"], 10.0)
    withdraw(kept)
    with pytest.raises(BackendRejected):
        backend.release(*first, False, WITHIN)
    [renewed] = backend.renew(other[1].group, [other], WITHIN)
    assert isinstance(renewed, Granted)
    assert renewed.sent_at > other[1].sent_at
    assert guarded.key(KEY)


def test_a_key_that_may_no_longer_be_read_is_not_lost_and_gets_no_new_proof(
    guarded: ConsulServer, open_: Open, ear: Ear
) -> None:
    withdraw, token = rights_but_for_one_key(guarded)
    backend = open_(guarded.url, token=token)
    held = held_in_one_session(backend, ear, ["job", "other"], 10.0)
    withdraw("deny")
    hidden, renewed = backend.renew(held[0][1].group, held, WITHIN)
    assert isinstance(hidden, BackendUnavailable)
    assert not hidden.unknown
    assert isinstance(renewed, Granted)
    assert renewed.sent_at > held[1][1].sent_at
    withdraw("write")
    again, _ = backend.renew(held[0][1].group, held, WITHIN)
    assert isinstance(again, Granted)
    assert again.sent_at > renewed.sent_at


def test_renewing_a_key_by_hand_raises_if_the_key_may_not_be_read(guarded: ConsulServer, connect: Connect) -> None:
    withdraw, token = rights_but_for_one_key(guarded)
    lost = Recorder[Loss]()
    lease = connect(guarded.url, ttl=10.0, token=token).lock("job", on_lost=lost).acquire()
    withdraw("deny")
    valid_until = inner(lease).valid_until
    with pytest.raises(BackendUnavailable, match="refuses to show"):
        lease.renew()
    assert inner(lease).valid_until == valid_until
    assert lease.state is LeaseState.AT_RISK
    assert not lost.calls
    withdraw("write")
    lease.renew()
    assert inner(lease).valid_until > valid_until


def rights_but_for_one_key(guarded: ConsulServer) -> tuple[Callable[[str], object], str]:
    """Return a token, and a function that changes the token's right to the key ``KEY``."""
    rights = f'key "{KEY}" {{ policy = "%s" }} key_prefix "multilock/" {{ policy = "write" }} {SESSIONS}'
    policy = guarded.ask("PUT", "acl/policy", {"Name": "locks", "Rules": rights % "write"})
    token: str = guarded.ask("PUT", "acl/token", {"Policies": [{"Name": "locks"}]})["SecretID"]
    change = f"acl/policy/{policy['ID']}"
    return lambda kept: guarded.ask("PUT", change, {"Name": "locks", "Rules": rights % kept}), token


def send_again(server: ConsulServer, key: str = KEY) -> Any:
    """Return a function that repeats the request by which this key was locked, as a proxy might."""
    entry = server.key(key)
    assert entry is not None
    lock = {"Flags": LOCK_FLAGS, "Value": entry["Value"], "Session": entry["Session"]}
    create = {"KV": {"Verb": "cas", "Key": key, "Index": 0, "Value": "", "Flags": LOCK_FLAGS}}
    return lambda **other: server.ask("PUT", "txn", [create, {"KV": {"Verb": "lock", "Key": key, **lock, **other}}])


def test_an_acquire_that_a_proxy_repeats_after_the_release_is_released(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    other = held_in_one_session(backend, ear, ["other"], 10.0)
    claim = ear.claim("job")
    granted = take(backend, claim)
    again = send_again(server)
    assert backend.release(claim, granted, False, WITHIN).ours
    again()
    assert server.key(KEY)
    assert all(isinstance(answer, Granted) for answer in backend.renew(granted.group, other, WITHIN))
    assert server.key(KEY) is None


def test_an_acquire_that_a_proxy_repeats_after_its_caller_gave_up_is_released(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear
) -> None:
    """The request itself is refused, but its copy arrives when the lock is free."""
    backend, holder = open_(proxy.url), open_(server.url)
    [(_, other)] = held_in_one_session(backend, ear, ["other"], 10.0)
    holding, claim = ear.claim("job"), ear.claim("job")
    granted = take(holder, holding)
    again = send_again(server)
    assert isinstance(backend.attempt(claim, True, WITHIN), Busy)
    assert not backend.release(claim, None, False, WITHIN).ours
    assert holder.release(holding, granted, False, WITHIN)
    again(Session=other.key, Value=b64encode(encode_value(claim)).decode())
    assert server.key(KEY)
    backend.renew(other.group, [], WITHIN)
    assert server.key(KEY) is None


@pytest.mark.timeout(120)
def test_the_search_for_orphaned_keys_skips_keys_in_use_or_in_transit(
    server: ConsulServer, open_: Open, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_consul.sessions.RELEASED_EVERY", 0.0)
    backend = open_(server.url)
    [(_, first)] = held_in_one_session(backend, ear, ["other"], 10.0)
    ended = threading.Event()
    given_back: list[bool] = []

    def take_turns(name: str) -> None:
        for _ in range(150):
            claim = ear.claim(name)
            granted = take(backend, claim)
            given_back.append(backend.release(claim, granted, False, WITHIN).ours)

    def renew() -> None:
        while not ended.is_set():
            backend.renew(first.group, [], WITHIN)

    renewing = [threading.Thread(target=renew) for _ in range(2)]
    working = [threading.Thread(target=take_turns, args=(f"job-{number}",)) for number in range(2)]
    for thread in [*renewing, *working]:
        thread.start()
    for thread in working:
        thread.join()
    ended.set()
    for thread in renewing:
        thread.join()
    assert given_back == [True] * 300


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_cancelled_acquires_without_renewal_leave_no_session(
    server: ConsulServer, proxy: FaultProxy, delay: float
) -> None:
    proxy.delay(delay)

    async def main() -> None:
        async with multilock.connect_async(proxy.url, ttl=600.0) as client:
            for pause in itertools.chain(*[(0.0, 0.01, 0.05, 0.12, 0.2)] * 4):
                task = asyncio.ensure_future(client.lock("job", renew=False).acquire())
                await asyncio.sleep(pause)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await (await task).release()
            await asyncio.to_thread(eventually, lambda: server.sessions() == [], 20.0)

    asyncio.run(main())


def test_an_acquire_without_renewal_that_begins_after_its_cancel_makes_no_session(
    server: ConsulServer, open_: Open, ear: Ear
) -> None:
    backend = open_(server.url)
    claim = ear.claim(renew=False)
    assert backend.release(claim, None, True, WITHIN).ours is False
    assert isinstance(backend.attempt(claim, True, WITHIN), Busy)
    assert server.sessions() == []


def test_an_acquire_whose_session_is_made_after_its_cancel_locks_no_key(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear
) -> None:
    """Otherwise the acquire could have no time left to free the key, which a renewal would find much later."""
    backend, claim = open_(proxy.url), ear.claim()
    made = proxy.hold_request(b"/v1/session/create")
    attempt = background(lambda: backend.attempt(claim, True, WITHIN))
    made.wait(WITHIN)
    assert backend.release(claim, None, True, WITHIN).ours is False
    lock = proxy.drop_reply(b"/v1/txn")
    made.release()
    assert isinstance(attempt.result(WITHIN), Busy)
    assert not lock.happened


@pytest.mark.parametrize("renew", [True, False])
def test_a_session_made_while_its_client_closes_is_ended_too(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear, renew: bool
) -> None:
    backend = open_(proxy.url)
    made = proxy.hold_request(b"/v1/session/create")
    attempt = background(lambda: backend.attempt(ear.claim(ttl=600.0, renew=renew), True, WITHIN))
    made.wait(WITHIN)
    backend.close()
    made.release()
    with pytest.raises(BackendUnavailable, match="closed"):
        attempt.result(WITHIN)
    assert server.sessions() == []
