"""``redis+sentinel://`` with real Sentinels: which server a client uses, and which locks survive a change of the
primary."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis
import valkey

import multilock
from multilock import LossReason, now, system
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.model import Busy
from multilock.testing import FaultProxy
from multilock_redis import open_backend
from multilock_redis.sentinel import SentinelEndpoint
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Ours, eventually, holder_of
from tests.servers import RedisServer, free_port
from tests.servers_sentinel import NAME, Guarded, SentinelServer
from tests.unit.kit import our_threads

WITHIN = 20.0  # seconds to wait at most for Sentinels, on an overloaded machine

pytestmark = pytest.mark.timeout(120)  # Sentinels that missed an election wait for the next one


@pytest.fixture
def us(guarded: Guarded, connect: Connect) -> Ours:
    return connect(guarded.url)


@pytest.fixture
def them(guarded: Guarded, connect: Connect) -> Ours:
    return connect(guarded.url)


def on(server: RedisServer, name: str = "a") -> str | None:
    """Return the holder of the name as stored on this server."""
    with redis.Redis(port=server.port) as bare:
        return holder_of(bare, name)


def led_to(ours: Ours, server: RedisServer) -> bool:
    """Return True if this client follows that primary."""
    endpoint = ours.backend._endpoint
    assert isinstance(endpoint, SentinelEndpoint)
    return endpoint.told is not None and endpoint.told.primary.port == server.port


def forgotten_by_the_replicas(guarded: Guarded, name: str = "a") -> None:
    """Delete the name from the replicas, as if the last writes had not reached them."""
    for replica in guarded.replicas():
        with redis.Redis(port=replica.port) as bare:
            eventually(lambda bare=bare: holder_of(bare, name), within=WITHIN)  # type: ignore[misc]
            bare.config_set("replica-read-only", "no")
            bare.delete(f"multilock/{name}")
            bare.config_set("replica-read-only", "yes")


# ---- which server is used


def test_every_operation_uses_the_primary_that_the_sentinels_name(guarded: Guarded, us: Ours, them: Ours) -> None:
    held = us.take()
    assert on(guarded.primary()) == held[0].owner
    us.watch(held)
    waiter = them.wait()
    assert us.release(held[0])
    them.ear.hears("wake", waiter.id)
    held = them.take(waiter)
    them.watch(held)
    assert all(them.renew(held))
    us.backend.force_release("a", 2)
    them.ear.hears("gone", held[0].id, LossReason.TAKEN)


def test_an_absent_sentinel_costs_only_a_moment(guarded: Guarded, connect: Connect) -> None:
    nobody = SentinelServer(list)
    nobody.port = free_port()
    ours = connect(guarded.url_to([nobody, *guarded.guards[:1]]))
    ours.take()
    with guarded.guards[0].paused():
        connect(guarded.url).take(ours.claim("b"))
    names = [str(each) for each in ours.backend._endpoint.sentinels]  # type: ignore[attr-defined]
    assert names == [guarded.guards[0].endpoint, nobody.endpoint], "the Sentinel that replied is asked first"


def test_a_sentinel_whose_name_lookup_hangs_does_not_block_the_others(
    server: RedisServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    look_up = socket.getaddrinfo

    def hangs(host: str, *how: Any, **more: Any) -> Any:
        return look_up(host, *how, **more) if host != "slow.example" else over.wait(30) and []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    with SentinelServer(list) as guard, guard.client() as client:
        client.execute_command("SENTINEL", "MONITOR", "m", server.host, server.port, 1)
        ours = connect(f"redis+sentinel://slow.example:1,{guard.endpoint}/m", within=6.0)
        endpoint = ours.backend._endpoint
        assert isinstance(endpoint, SentinelEndpoint)
        try:
            claim, _ = ours.take()
            assert on(server) == claim.owner
            assert str(endpoint.sentinels[0]) == guard.endpoint
            eventually(lambda: client.client_list(_type="pubsub"), within=WITHIN)
            # When its subscription to this Sentinel ends, the client must first try the slow Sentinel, and then this
            # one again.
            endpoint.sentinels = endpoint.sentinels[::-1]
            client.client_kill_filter(_type="pubsub")
            with pytest.raises(BackendUnavailable, match=r"slow\.example.*not connected"):
                endpoint.ask(endpoint.sentinels[0], 0.1, now)
            eventually(lambda: client.client_list(_type="pubsub"), within=WITHIN)
        finally:
            over.set()


def test_a_replica_that_is_named_as_primary_is_not_believed(guarded: Guarded, connect: Connect) -> None:
    replica = guarded.replicas()[0]
    with SentinelServer(list) as mistaken, mistaken.client() as guard:
        guard.execute_command("SENTINEL", "MONITOR", "wrong", replica.host, replica.port, 2)
        ours = connect(f"redis+sentinel://{mistaken.endpoint}/wrong")
        for ask in (lambda: ours.take(), lambda: ours.backend.inspect("a", 2)):
            with pytest.raises(BackendUnavailable, match="which is still a replica") as caught:
                ask()
            assert caught.value.unknown is False


def test_a_sentinel_that_missed_the_last_failover_is_not_believed(guarded: Guarded, connect: Connect) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(RedisServer())
        former = stack.enter_context(SentinelServer(list))
        with former.client() as guard:
            guard.execute_command("SENTINEL", "MONITOR", NAME, other.host, other.port, 1)
        guarded.failover()
        ours = connect(guarded.url_to([guarded.guards[0], former]))
        claim, _ = ours.take()
        guarded.guards[0].kill()
        with redis.Redis(port=guarded.primary().port) as bare:
            bare.client_kill_filter(_type="normal", skipme=True)
        ours.be_patient(WITHIN)
        at_b, _ = ours.take(ours.claim("b"))  # only a Sentinel that is not in the URL names this primary
        assert on(other, "b") is None
        assert on(guarded.primary()) == claim.owner
        assert on(guarded.primary(), "b") == at_b.owner


def test_a_client_learns_of_a_failover_although_its_sentinel_is_isolated(connect: Connect) -> None:
    def knows(primary: RedisServer, epoch: int) -> SentinelServer:
        monitor = f"sentinel monitor {NAME} {primary.host} {primary.port} 1"
        return SentinelServer(lambda: [monitor, f"sentinel config-epoch {NAME} {epoch}"])

    with RedisServer() as former, RedisServer() as new, knows(former, 1) as cut_off, knows(new, 2) as other:
        ours = connect(f"redis+sentinel://{cut_off.endpoint},{other.endpoint}/{NAME}", within=WITHIN)
        with suppress(BackendUnavailable):  # the client may notice the failover during this request
            ours.take()
        ours.be_patient(WITHIN)
        # Only the Sentinels may still be connected to the former primary.
        with redis.Redis(port=former.port) as bare:

            def is_left() -> bool:
                others = [each for each in bare.client_list() if not each["name"].startswith("sentinel-")]
                return led_to(ours, new) and len(others) == 1

            eventually(is_left, within=WITHIN)
        claim, _ = ours.take(ours.claim("b"))
        assert on(new, "b") == claim.owner
        assert on(former, "b") is None


def test_a_stale_sentinel_behind_a_shared_host_name_is_not_believed(guarded: Guarded, connect: Connect) -> None:
    """The host name leads to a different Sentinel at each connection. Later it leads to an isolated Sentinel that
    reports another primary."""
    guarded.failover()
    with RedisServer() as former, SentinelServer(list) as stale, ExitStack() as stack:
        with stale.client() as guard:
            guard.execute_command("SENTINEL", "MONITOR", NAME, former.host, former.port, 1)
        name = stack.enter_context(FaultProxy(guarded.guards[0].host, guarded.guards[0].port))
        ours = connect(f"redis+sentinel://{name.host}:{name.port}/{NAME}")
        ours.be_patient(WITHIN)
        ours.take()
        endpoint = ours.backend._endpoint
        assert isinstance(endpoint, SentinelEndpoint)
        eventually(lambda: len(endpoint.everybody()) == 1 + len(guarded.guards), within=WITHIN)
        name._target = (stale.host, stale.port)
        name.cut()
        for i in range(4):
            endpoint.interrupt()  # the client must make new connections
            claim, _ = ours.take(ours.claim(f"b{i}"))
            assert on(guarded.primary(), f"b{i}") == claim.owner
        assert led_to(ours, guarded.primary())
        assert "one-sentinel" in {finding.code for finding in ours.backend.diagnose(5)}


def test_a_new_client_with_an_outdated_sentinel_asks_another_one_first(server: RedisServer, connect: Connect) -> None:
    with RedisServer() as new, ExitStack() as stack:
        guards = []
        for primary, epoch in ((server, 1), (new, 2)):
            lines = [
                f"sentinel monitor {NAME} {primary.host} {primary.port} 2",
                f"sentinel config-epoch {NAME} {epoch}",
            ]
            guards.append(stack.enter_context(SentinelServer(lambda lines=lines: lines)))  # type: ignore[misc]
        ours = connect(f"redis+sentinel://{','.join(guard.endpoint for guard in guards)}/{NAME}")
        claim, _ = ours.take()
        assert on(new) == claim.owner
        assert on(server) is None


# a failover


def test_recreated_sentinels_are_followed_at_the_next_failover(guarded: Guarded, us: Ours, them: Ours) -> None:
    guarded.failover()
    guarded.heal()
    us.be_patient(WITHIN)
    us.release(us.take()[0])
    endpoint = us.backend._endpoint
    assert isinstance(endpoint, SentinelEndpoint)
    for _ in range(5):  # the new Sentinels may still get the former epoch by a late message
        guarded.make_sentinels_anew()
        with suppress(AssertionError):
            eventually(lambda: endpoint.told is not None and endpoint.told.epoch == 0, within=8.0)
            break
    assert endpoint.told is not None
    assert endpoint.told.epoch == 0
    guarded.heal()
    with guarded.slow_to_demote():
        former = guarded.primary()
        new = guarded.failover()
        eventually(lambda: led_to(us, new), within=WITHIN)
        them.be_patient(WITHIN)
        claim, _ = us.take()
        assert on(former) is None
        assert on(new) == claim.owner
        assert isinstance(them.attempt(them.claim()), Busy)


def test_sentinels_that_were_given_another_primary_are_followed(guarded: Guarded, us: Ours) -> None:
    guarded.failover()
    guarded.heal()
    us.be_patient(WITHIN)
    us.release(us.take()[0])
    with RedisServer() as other:
        former = guarded.primary()
        guarded.move_sentinels_to(other)
        try:
            eventually(lambda: led_to(us, other), within=WITHIN)
            claim, _ = us.take()
            assert on(other) == claim.owner
            assert on(former) is None
        finally:
            guarded.move_sentinels_to(former)


@pytest.mark.parametrize("refused", [1, 2])
def test_a_refused_thread_keeps_no_client_at_the_former_primary(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    left = [None] * refused
    start = system.Thread.start

    def refuse(thread: Any) -> None:
        if thread.name == "multilock-redis-sentinel" and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(system.Thread, "start", refuse)
    with multilock.connect(guarded.url, ttl=20) as client, client.lock("warm"):
        former = guarded.primary()
        with guarded.slow_to_demote():
            new = guarded.failover()
            endpoint = client._kernel.backend._endpoint  # type: ignore[attr-defined]
            eventually(lambda: endpoint.told.primary.port == new.port, within=WITHIN)
            lease = client.lock("a").acquire(timeout=WITHIN)
            assert on(new) is not None
            assert on(former) is None
            lease.release()
    assert not left


def test_a_refused_subscription_to_sentinels_is_reported(server: RedisServer, connect: Connect) -> None:
    with SentinelServer(list) as guard, guard.client() as admin:
        admin.execute_command("SENTINEL", "MONITOR", "m", server.host, server.port, 1)
        admin.execute_command("ACL", "SETUSER", "app", "on", ">x", "+@all", "-subscribe")
        ours = connect(f"redis+sentinel://{guard.endpoint}/m", sentinel_username="app", sentinel_password="x")
        ours.take()
        eventually(lambda: "subscription to the Sentinels of m" in ours.ear.down, within=WITHIN)
        assert ours.ear.refused


def test_a_lock_that_the_new_primary_has_stays_held(guarded: Guarded, us: Ours, them: Ours) -> None:
    held = us.take()
    us.watch(held)
    waiter = them.wait()
    new = guarded.failover()
    eventually(lambda: led_to(us, new) and led_to(them, new), within=WITHIN)
    us.be_patient(WITHIN)
    them.be_patient(WITHIN)
    [renewed] = us.renew(held)
    assert renewed is not None
    assert renewed.token == held[1].token
    assert on(new) == held[0].owner
    # All waiters must ask again, because the new primary does not know them.
    them.ear.hears("wake", None, within=WITHIN)
    them.wait(waiter)
    assert us.release(held[0])
    them.ear.hears("wake", waiter.id, within=WITHIN)
    assert (them.take(waiter)[1].token or 0) > (held[1].token or 0)


def test_a_holder_that_lost_its_lock_by_a_failover_is_notified_at_once(guarded: Guarded, us: Ours) -> None:
    held = us.take()
    us.watch(held)
    forgotten_by_the_replicas(guarded)
    former = guarded.primary()
    former.kill()
    new = guarded.await_other(former)
    us.ear.hears("gone", held[0].id, LossReason.TAKEN, within=WITHIN)
    us.be_patient(WITHIN)
    assert us.renew(held) == [None]
    assert on(new) is None


def test_a_former_primary_that_still_believes_in_its_role_grants_no_lock(
    guarded: Guarded, us: Ours, them: Ours
) -> None:
    """An operator orders this failover, so no connection breaks."""
    us.release(us.take()[0])
    them.release(them.take()[0])
    with guarded.slow_to_demote():
        former = guarded.primary()
        new = guarded.failover()
        eventually(lambda: led_to(us, new) and led_to(them, new), within=WITHIN)
        us.be_patient(WITHIN)
        them.be_patient(WITHIN)
        claim, _ = us.take()
        assert on(new) == claim.owner
        with redis.Redis(port=former.port) as bare:
            role, *_ = bare.role()
            assert role == b"master", "the client was notified too early, so the test shows nothing"
        assert on(former) is None
        assert isinstance(them.attempt(them.claim()), Busy)


def test_a_new_primary_is_followed_from_its_promotion_on(guarded: Guarded, connect: Connect) -> None:
    """Until the failover ends, for up to three minutes, the leading Sentinel still describes the former primary."""
    leading, following = guarded.guards[:2]
    us, them = (connect(guarded.url_to([guard])) for guard in (leading, following))
    us.release(us.take()[0])
    them.release(them.take()[0])
    former = guarded.primary()
    guarded.await_replicas(former)
    with guarded.slow_to_demote(), guarded.slow_to_reconfigure():
        guarded.ask_for_failover(leading)
        eventually(lambda: guarded.promoted_by(leading) is not former, within=WITHIN)
        new = guarded.promoted_by(leading)
        eventually(lambda: led_to(us, new) and led_to(them, new), within=WITHIN)
        assert guarded.primary() is former, "the failover is over: this shows nothing"
        us.be_patient(WITHIN)
        them.be_patient(WITHIN)
        claim, _ = us.take()
        assert isinstance(them.attempt(them.claim()), Busy)
        assert on(new) == claim.owner
        assert on(former) is None


def test_a_reply_of_a_former_primary_that_was_frozen_does_not_count(guarded: Guarded, us: Ours, them: Ours) -> None:
    us.release(us.take()[0])
    former = guarded.primary()
    guarded.await_replicas(former)
    us.within = WITHIN
    with guarded.slow_to_demote(), ThreadPoolExecutor() as pool:
        with former.paused():
            asked = pool.submit(us.take, claim := us.claim())
            new = guarded.await_other(former)
            them.be_patient(WITHIN)
            held = them.take()
            eventually(lambda: led_to(us, new), within=WITHIN)
        # The former primary runs again, executes the pending requests, and replies.
        eventually(lambda: on(former), within=WITHIN)
        with pytest.raises(BackendUnavailable) as caught:
            asked.result(WITHIN)
        assert caught.value.unknown is True
        us.be_patient(WITHIN)
        assert isinstance(us.attempt(claim), Busy)
        assert us.release(claim, unsure=True) is False
        assert on(new) == held[0].owner


def test_a_release_that_a_failover_lost_is_repeated_at_the_new_primary(guarded: Guarded) -> None:
    with multilock.connect(guarded.url, ttl=20, request_timeout=2) as client:
        lease = client.lock("a").acquire()
        former = guarded.primary()
        for replica in guarded.replicas():
            eventually(lambda replica=replica: on(replica), within=WITHIN)  # type: ignore[misc]
        with former.paused():
            lease.release()
            assert not lease.is_held()
            new = guarded.await_other(former)
            eventually(lambda: on(new) is None, within=WITHIN)


def test_a_waiter_gets_the_lock_from_the_new_primary_on_both_faces(guarded: Guarded) -> None:
    order: list[str] = []

    async def wait() -> None:
        async with multilock.connect_async(guarded.url, ttl=20) as client, client.lock("a").acquire(timeout=4 * WITHIN):
            order.append("asyncio")

    # The `with` closes the client first, which releases its lock, so that the waiter ends even if this test fails.
    with ThreadPoolExecutor() as pool, multilock.connect(guarded.url, ttl=20) as client:
        lease = client.lock("a").acquire()
        done = pool.submit(asyncio.run, wait())
        eventually(lambda: one_waits(client), within=WITHIN)
        former = guarded.primary()
        former.kill()
        guarded.await_other(former)
        eventually(lambda: one_waits(client), within=WITHIN)
        order.append("held")
        lease.release()
        done.result(WITHIN)
    assert order == ["held", "asyncio"]


def one_waits(client: multilock.Client) -> bool:
    """Return True if one claim waits for "a". While the primary is failing, a request may get no reply."""
    with suppress(BackendUnavailable):
        info = client.inspect("a")
        return info is not None and info.waiting == 1
    return False


def test_without_sentinels_the_client_keeps_using_its_connections(guarded: Guarded, us: Ours) -> None:
    held = us.take()
    us.watch(held)
    for guard in guarded.guards[1:]:
        guard.kill()
    us.take(us.claim("b"))
    guarded.guards[0].kill()
    assert all(us.renew(held))
    claim, _ = us.take(us.claim("c"))
    assert us.release(claim)
    with redis.Redis(port=guarded.servers[0].port) as bare, redis.Redis(port=guarded.servers[1].port) as other:
        for server in (bare, other):
            server.client_kill_filter(_type="normal", skipme=True)
    with redis.Redis(port=guarded.servers[2].port) as bare:
        bare.client_kill_filter(_type="normal", skipme=True)
    with suppress(BackendUnavailable):  # this request uses the connection that was just closed, and fails
        us.backend.ping(1)
    with pytest.raises(BackendUnavailable, match=r"\(a Sentinel\) cannot be reached") as caught:
        us.take(us.claim("d"))
    assert caught.value.unknown is False


def test_a_server_that_became_a_replica_is_left_on_all_connections(redis_server: RedisServer, connect: Connect) -> None:
    """The client leaves it even with ``redis://``, because the address may lead to another server by now."""
    ours = connect(redis_server.url)
    together = threading.Barrier(3)

    def take(name: str) -> None:
        together.wait(WITHIN)
        ours.take(ours.claim(name))

    with redis.Redis(port=redis_server.port) as bare, redis.Redis(port=redis_server.port) as other:
        mine = {bare.client_id(), other.client_id()}
        with ThreadPoolExecutor(3) as pool:
            bare.execute_command("CLIENT", "PAUSE", 1000)  # so that each thread needs its own connection
            list(pool.map(take, "abc"))
        assert len({client["id"] for client in bare.client_list()} - {str(each) for each in mine}) == 3
        bare.replicaof("127.0.0.1", free_port())
        with pytest.raises(BackendUnavailable, match="READONLY"):
            ours.take(ours.claim("d"))
        eventually(lambda: {int(client["id"]) for client in bare.client_list()} <= mine, within=WITHIN)


# ---- the findings about the servers


def test_diagnose_finds_settings_that_weaken_a_failover(guarded: Guarded, us: Ours) -> None:
    codes = {finding.code: finding for finding in us.backend.diagnose(5)}
    assert codes.keys() >= {"failover", "min-replicas-to-write"}
    assert not codes.keys() & {"sentinel", "sentinels-differ", "quorum", "no-replicas"}
    with redis.Redis(port=guarded.primary().port) as bare:
        bare.config_set("min-replicas-to-write", 1)
    guarded.guards[2].kill()
    codes = {finding.code: finding for finding in us.backend.diagnose(5)}
    assert guarded.guards[2].endpoint in codes["sentinel"].message
    assert "min-replicas-to-write" not in codes


def test_diagnose_reports_a_single_sentinel_without_replicas(server: RedisServer, connect: Connect) -> None:
    with SentinelServer(list) as alone, alone.client() as guard:
        guard.execute_command("SENTINEL", "MONITOR", "m", server.host, server.port, 2)
        ours = connect(f"redis+sentinel://{alone.endpoint}/m")
        findings = {finding.code: finding for finding in ours.backend.diagnose(5)}
        assert findings["quorum"].level == "error"
        assert findings["no-replicas"].level == "warning"


def test_the_capabilities_do_not_promise_to_survive_a_failover() -> None:
    backend = open_backend("redis+sentinel://s/m", {"ttl": 10.0})
    assert backend.capabilities.survives_failover is False
    assert "failover" in backend.capabilities.fencing_scope


# passwords of Sentinel and server, and other services at these addresses


@pytest.fixture(scope="module")
def locked() -> Iterator[tuple[SentinelServer, RedisServer]]:
    """Start a Sentinel and a server with different passwords."""
    with RedisServer("--requirepass", "of-redis") as server, SentinelServer(list, "requirepass of-guard") as guard:
        with guard.client(password="of-guard") as client:
            client.execute_command("SENTINEL", "MONITOR", "m", server.host, server.port, 1)
        yield guard, server


def test_the_sentinels_and_the_primary_may_have_different_passwords(
    locked: tuple[SentinelServer, RedisServer], connect: Connect
) -> None:
    guard, server = locked
    ours = connect(f"redis+sentinel://:of-redis@{guard.endpoint}/m", sentinel_password="of-guard")
    claim, _ = ours.take()
    with redis.Redis(port=server.port, password="of-redis") as bare:
        assert holder_of(bare) == claim.owner
    assert ours.release(claim)
    for shown in (repr(ours.backend), repr(ours.backend._endpoint), repr(vars(ours.backend._endpoint)["sentinels"])):
        assert "of-" not in shown


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, r"\(a Sentinel\).*give sentinel_password="),
        ({"sentinel_password": "wrong"}, r"\(a Sentinel\).*check sentinel_username= and sentinel_password="),
        ({"password": "of-guard"}, r"\(a Sentinel\).*give sentinel_password="),
        ({"sentinel_password": "of-guard"}, r"/m/0 at 127\.0\.0\.1:\d+ refused.*give username= and password="),
        (
            {"sentinel_password": "of-guard", "password": "wrong"},
            r"/m/0 at 127\.0\.0\.1:\d+ refused.*check username=, password=",
        ),
    ],
)
def test_an_error_about_a_password_names_sentinel_or_primary(
    locked: tuple[SentinelServer, RedisServer], connect: Connect, options: dict[str, str], remedy: str
) -> None:
    ours = connect(f"redis+sentinel://{locked[0].endpoint}/m", **options)
    with pytest.raises(BackendRejected, match=remedy) as caught:
        ours.take()
    assert "of-guard" not in str(caught.value)


def test_a_primary_name_that_no_sentinel_knows_is_reported(guarded: Guarded, connect: Connect) -> None:
    ours = connect(guarded.url.replace(NAME, "yours"))
    with pytest.raises(BackendRejected, match=r"No such master.*redis\+sentinel://host/NAME"):
        ours.take()


def test_redis_and_sentinel_addresses_that_are_confused_are_reported(
    guarded: Guarded, server: RedisServer, connect: Connect
) -> None:
    with pytest.raises(BackendRejected, match=r"it is not a Sentinel: give redis:// with this address"):
        connect(f"redis+sentinel://{server.endpoint}/m").take()
    for db in (0, 1):
        with pytest.raises(BackendRejected, match=r"a Sentinel\? Then give redis\+sentinel://host:port/NAME"):
            connect(f"redis://{guarded.guards[0].endpoint}/{db}").take()


# a client object passed to connect()


@pytest.mark.parametrize("library", [redis, valkey])
def test_a_client_that_asks_sentinels_can_be_passed_to_connect(
    guarded: Guarded, connect: Connect, library: Any
) -> None:
    guards = [(guard.host, guard.port) for guard in guarded.guards]
    asks = library.Sentinel(guards, sentinel_kwargs={"socket_timeout": 1})
    with asks.master_for(NAME, db=2, decode_responses=True) as client:
        ours = connect(f"{library.__name__}+sentinel://", client=client)
        claim, _ = ours.take()
        assert client.get("multilock/a") == claim.owner
        ours.close()
        assert client.ping() is True


def test_a_redis_py_client_that_reads_replicas_is_refused() -> None:
    asks = redis.Sentinel([("s", 1)])  # type: ignore[no-untyped-call]
    with pytest.raises(multilock.ConfigurationError, match="master_for"):
        open_backend("redis+sentinel://", {"client": asks.slave_for("m")})  # type: ignore[no-untyped-call]


@pytest.mark.oracle
def test_a_closed_client_leaves_no_connection_and_no_thread(guarded: Guarded) -> None:
    before = our_threads()
    with multilock.connect(guarded.url, ttl=20) as client, client.lock("a"):
        assert any(thread.name == "multilock-redis-sentinel" for thread in our_threads() - before)
    started = now()
    eventually(lambda: our_threads() <= before, within=WITHIN)
    assert now() - started < 2 + WITHIN / 4
