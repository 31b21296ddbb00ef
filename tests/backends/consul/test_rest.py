"""A name *rests* while it stays taken after an early release. No client renews or ends the session of its key, which
only the server's clock ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

import multilock
from multilock import BackendUnavailable, now
from multilock.model import Busy, Claim, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import NAME, eventually
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear
from multilock_consul import ConsulBackend
from tests.backends.consul.conftest import WITHIN, Connect, Open, take
from tests.servers_consul import ConsulServer

KEY = "multilock/job/.lock"
MOVE = b'"unlock"'
LONG = 60.0  # seconds that a rest lasts if the test does not wait for its end
SHORT = 1.0


def key_session(server: ConsulServer) -> str:
    entry = server.key(KEY)
    assert entry is not None
    session: str = entry["Session"]
    return session


def ids(server: ConsulServer) -> set[str]:
    return {session["ID"] for session in server.sessions()}


@pytest.fixture
def held(ear: Ear) -> Callable[..., tuple[Claim, Granted]]:
    def held(backend: ConsulBackend, **options: Any) -> tuple[Claim, Granted]:
        claim = ear.claim("job", **{"ttl": 10.0, **options})
        return claim, take(backend, claim)

    return held


Held = Callable[..., tuple[Claim, Granted]]


# ---- requests whose reply is lost, or that are executed late


def test_if_creating_a_session_for_a_rest_gets_no_reply_another_one_is_made(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held
) -> None:
    backend = open_(proxy.url)
    claim, granted = held(backend)
    lost = proxy.drop_reply(b"/v1/session/create")
    with pytest.raises(BackendUnavailable) as silence:
        backend.rest(claim, granted, False, SHORT, WITHIN)
    assert not silence.value.unknown
    lost.wait(WITHIN)
    assert key_session(server) == granted.key, "the name stays held until it rests"
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True
    unused = ids(server) - {granted.key, key_session(server)}
    assert len(unused) == 1
    eventually(lambda: not unused & ids(server))  # the session whose creation got no reply has no key, and expires
    assert server.key(KEY)


@pytest.mark.parametrize("then", ["cut", "hold"])
def test_a_move_to_the_resting_session_is_done_once_even_if_its_reply_is_lost(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held, then: Literal["cut", "hold"]
) -> None:
    backend = open_(proxy.url)
    claim, granted = held(backend)
    lost = proxy.drop_reply(MOVE, then=then)
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, LONG, 1.0)
    lost.wait(WITHIN)
    rest = server.key(KEY)
    assert rest is not None
    assert rest["Session"] != granted.key
    assert backend.rest(claim, granted, True, 2 * LONG, WITHIN).ours is True
    assert server.key(KEY) == rest
    assert ids(server) == {granted.key, rest["Session"]}, "what is superfluous is ended"


def test_a_rest_executed_late_lasts_at_least_as_long_as_first_requested(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held, ear: Ear
) -> None:
    """The client gives up its first request to move the key, and repeats it. The server executes the first request
    before the second one."""
    backend = open_(proxy.url)
    claim, granted = held(backend)
    late = proxy.hold_request(MOVE)
    asked_at = now()
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, 2.0, 1.0)
    late.wait(WITHIN)
    time.sleep(0.5)
    late.release()
    eventually(lambda: key_session(server) != granted.key)
    assert backend.rest(claim, granted, True, 2.0, WITHIN).ours is True
    while isinstance(backend.attempt(ear.claim("job"), False, WITHIN), Busy):
        assert now() < asked_at + 10.0
        time.sleep(0.02)
    assert now() >= asked_at + 1.9


def test_a_move_executed_after_the_release_changes_nothing(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held, ear: Ear
) -> None:
    """The name need not stay taken any longer, so the client releases it. Another client acquires the name before the
    late move is executed."""
    backend = open_(proxy.url)
    claim, granted = held(backend)
    late = proxy.hold_request(MOVE)
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, LONG, 1.0)
    late.wait(WITHIN)
    assert backend.release(claim, granted, True, WITHIN).ours is True
    take(backend, ear.claim("job"))
    before = server.key(KEY)
    late.release()
    time.sleep(0.3)
    assert server.key(KEY) == before


def test_a_move_in_an_ended_session_changes_nothing(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held
) -> None:
    """The client or the server was paused between the two requests of `rest`. The first creates another session, and
    the second moves the key to that session."""
    backend = open_(proxy.url)
    claim, granted = held(backend)
    late = proxy.hold_request(MOVE)
    resting = background(lambda: backend.rest(claim, granted, False, SHORT, 20.0))
    late.wait(WITHIN)
    eventually(lambda: ids(server) == {granted.key}, 15.0)
    late.release()
    with pytest.raises(BackendUnavailable, match="too late") as silence:
        resting.result(WITHIN)
    assert not silence.value.unknown
    assert key_session(server) == granted.key
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True


@pytest.mark.parametrize("mark", [b"/v1/session/create", MOVE])
def test_a_cancelled_release_still_lets_the_name_rest(server: ConsulServer, proxy: FaultProxy, mark: bytes) -> None:
    async def main() -> None:
        async with multilock.connect_async(proxy.url, ttl=10.0) as client:
            lease = await client.lock("job", hold_at_least=LONG).acquire()
            session = key_session(server)
            asked = proxy.hold_request(mark)
            releasing = asyncio.ensure_future(lease.release())
            await asyncio.to_thread(asked.wait, WITHIN)
            releasing.cancel()
            await asyncio.gather(releasing, return_exceptions=True)
            await asyncio.to_thread(eventually, lambda: key_session(server) != session, WITHIN)
            rests = server.key(KEY)
            asked.release()
            await asyncio.sleep(0.3)
            assert server.key(KEY) == rests
            info = await client.inspect("job")
            assert info is not None
            assert info.resting_until

    asyncio.run(main())


# ---- events that must neither end a rest nor begin one


def unanswered_rest(backend: ConsulBackend, proxy: FaultProxy, claim: Claim, granted: Granted, seconds: float) -> None:
    lost = proxy.drop_reply(b"/v1/session/create")
    with pytest.raises(BackendUnavailable):
        backend.rest(claim, granted, False, seconds, WITHIN)
    assert lost.happened


def test_the_key_of_a_resting_name_is_not_removed_before_its_end(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held
) -> None:
    """As long as the `rest` has no reply, renewals keep the session of the key, so the name stays taken. After the time
    of the rest, a renewal removes the key."""
    backend = open_(proxy.url)
    claim, granted = held(backend)
    begun = now()
    unanswered_rest(backend, proxy, claim, granted, 3.0)
    for _ in range(3):
        backend.renew(granted.group, [], WITHIN)
        assert server.key(KEY) or now() >= begun + 3.0
    eventually(lambda: backend.renew(granted.group, [], WITHIN) == [] and server.key(KEY) is None)
    assert now() >= begun + 3.0
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is False


def test_a_cancel_in_the_same_session_ends_no_rest(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held, ear: Ear
) -> None:
    """A cancel usually ends a session without locks. But this session may have locked the key of a resting name, so it
    must not end."""
    backend = open_(proxy.url)
    claim, granted = held(backend)
    unanswered_rest(backend, proxy, claim, granted, LONG)
    other = ear.claim("other", ttl=10.0)
    unheard = proxy.drop_reply(b'"cas"')
    with pytest.raises(BackendUnavailable):
        backend.attempt(other, False, WITHIN)
    assert unheard.happened
    backend.release(other, None, True, WITHIN)
    assert key_session(server) == granted.key
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True


def test_if_a_rest_cannot_be_requested_close_leaves_the_name_until_the_session_ends(
    server: ConsulServer, proxy: FaultProxy, open_: Open, held: Held, ear: Ear
) -> None:
    backend = open_(proxy.url)
    claim, granted = held(backend)
    other = take(backend, ear.claim("other", ttl=20.0))
    unanswered_rest(backend, proxy, claim, granted, LONG)
    backend.close()
    assert key_session(server) == granted.key
    assert other.key not in ids(server)


@pytest.mark.parametrize("renew", [True, False])
def test_an_unanswered_acquire_cannot_be_executed_after_the_rest(
    server: ConsulServer, proxy: FaultProxy, open_: Open, ear: Ear, renew: bool
) -> None:
    backend = open_(proxy.url)
    claim = ear.claim("job", ttl=10.0, renew=renew)
    late = proxy.hold_request(b'"cas"')
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, 1.0)
    late.wait(WITHIN)
    granted = take(backend, claim)
    assert backend.rest(claim, granted, True, SHORT, WITHIN).ours is True
    assert granted.key not in ids(server)
    late.release()
    eventually(lambda: server.key(KEY) is None)
    time.sleep(0.3)
    assert server.key(KEY) is None


def test_a_lock_that_is_not_renewed_rests_without_another_session(
    server: ConsulServer, open_: Open, held: Held, ear: Ear
) -> None:
    backend = open_(server.url)
    claim, granted = held(backend, renew=False)
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is True
    assert ids(server) == {key_session(server)}
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is True
    assert isinstance(backend.attempt(ear.claim("job"), False, WITHIN), Busy)


def test_a_key_with_an_overwritten_value_rests_too(server: ConsulServer, open_: Open, held: Held) -> None:
    backend = open_(server.url)
    claim, granted = held(backend)
    server.cli("kv", "put", KEY, "nobody knows why")
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is True
    info = backend.inspect("job", WITHIN)
    assert info is not None
    assert info.resting_until
    assert (info.owner, info.token) == (claim.owner, granted.token)


@pytest.mark.oracle
def test_a_force_release_that_ends_a_rest_leaves_no_session(server: ConsulServer, open_: Open, held: Held) -> None:
    backend = open_(server.url)
    claim, granted = held(backend)
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is True
    assert open_(server.url).force_release("job", WITHIN) is True
    assert ids(server) == {granted.key}
    assert backend.rest(claim, granted, True, LONG, WITHIN).ours is False
    assert ids(server) == {granted.key}


def test_a_lost_lease_leaves_no_session_for_a_rest(server: ConsulServer, open_: Open, held: Held) -> None:
    backend = open_(server.url)
    claim, granted = held(backend)
    server.ask("PUT", f"session/destroy/{granted.key}")
    assert backend.rest(claim, granted, False, LONG, WITHIN).ours is False
    assert ids(server) == set()
    assert server.key(KEY) is None


def test_a_rest_shorter_than_the_shortest_session_lasts_as_long_as_that_session(open_: Open, held: Held) -> None:
    with ConsulServer(session_ttl_min="5s") as server:
        backend = open_(server.url)
        claim, granted = held(backend)
        begun = time.time()
        assert backend.rest(claim, granted, False, SHORT, WITHIN).ours is True
        info = backend.inspect("job", WITHIN)
        assert info is not None
        assert info.resting_until
        assert info.resting_until.timestamp() >= begun + 5.0 - 0.01


# ---- Consul's own tools


def test_consul_lock_waits_for_a_resting_name(server: ConsulServer, connect: Connect) -> None:
    with connect(server.url).lock("job", hold_at_least=2.0):
        pass
    begun = now()
    official = background(lambda: server.cli("lock", "multilock/job", "true"))
    official.result(30)
    assert now() - begun >= 1.5


def test_a_resting_name_is_distinguished_from_every_name_of_a_lock(server: ConsulServer, connect: Connect) -> None:
    client = connect(server.url)
    with client.lock(NAME, hold_at_least=LONG) as lease:
        info = client.inspect(NAME)
        assert info is not None
        assert info.resting_until is None
    resting = client.inspect(NAME)
    assert resting is not None
    assert resting.resting_until is not None
    assert (resting.owner, resting.token) == (lease.owner, lease.token)
    client.force_release(NAME)
    assert client.inspect(NAME) is None
