"""Connections for notifications break or are refused. Waiters are still served, losses are still reported, and the
client restores the connections."""

from __future__ import annotations

import pytest
import redis

from multilock import now
from multilock.model import Granted, LossReason
from multilock.testing import FaultProxy
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of, since
from tests.servers import RedisServer

TAKEN = LossReason.TAKEN
LOCK, LIVE = "multilock/a", "{multilock/a}:live"
EVERYTHING = ("~*", "&*", "+@all")


class Password(redis.CredentialProvider):
    """The password that the application sends on each connection."""

    def __init__(self, password: str) -> None:
        self.password = password

    def get_credentials(self) -> tuple[str, str]:
        return "app", self.password


@pytest.fixture
def password(bare: Bare) -> Password:
    since(bare, "6.2", "rights on channels")
    bare.execute_command("ACL", "SETUSER", "app", "reset", "on", ">old", *EVERYTHING)
    return Password("old")


@pytest.fixture
def us(server: RedisServer, connect: Connect, password: Password) -> Ours:
    return connect("redis://", client=redis.Redis(port=server.port, credential_provider=password))


def change_password(bare: Bare) -> None:
    """Change the password. Open connections stay logged in."""
    bare.execute_command("ACL", "SETUSER", "app", "resetpass", ">new")


def kill_tracked(bare: Bare) -> None:
    for client in bare.client_list():
        if "t" in client["flags"]:
            bare.client_kill_filter(_id=client["id"])


def test_a_login_that_is_refused_briefly_does_not_end_pushed_losses(us: Ours, bare: Bare, password: Password) -> None:
    held = us.take()
    us.watch(held)
    listener = us.backend._node.listener
    before = listener._tracked
    assert us.ear.down == {}
    change_password(bare)
    kill_tracked(bare)
    eventually(lambda: before and (not before.alive or before.stale()))
    listener._look_again(None)
    assert listener.refused == {}
    assert [what.partition(" to ")[0] for what in us.ear.down] == ["tracked connection"]
    password.password = "new"
    eventually(lambda: listener._tracked is not before and listener._tracked and listener._tracked.alive, within=10)
    eventually(lambda: us.ear.down == {})
    us.ear.heard.clear()
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)


@pytest.mark.parametrize("missing", ["-client|tracking", "-subscribe", "-mget"])
def test_a_refused_subscription_is_tried_again(server: RedisServer, bare: Bare, connect: Connect, missing: str) -> None:
    since(bare, "7.0", "rights on subcommands")
    bare.execute_command("ACL", "SETUSER", "managed", "reset", "on", "nopass", *EVERYTHING, missing)
    us = connect(server.url.replace("//", "//managed:x@"))
    listener = us.backend._node.listener
    listener._again_in = 0.1
    held = us.take()
    us.watch(held)
    assert us.ear.refused
    assert us.ear.down
    bare.execute_command("ACL", "SETUSER", "managed", "+@all")
    eventually(lambda: not listener.refused and listener._tracked and listener._tracked.alive, within=30)
    eventually(lambda: us.ear.down == {})
    us.ear.heard.clear()
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_subscription_that_stays_refused_is_tried_less_and_less_often(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    since(bare, "7.0", "rights on subcommands")
    bare.execute_command("ACL", "SETUSER", "managed", "reset", "on", "nopass", *EVERYTHING, "-client|tracking")
    us = connect(server.url.replace("//", "//managed:x@"))
    listener = us.backend._node.listener
    listener._again_in = 0.1
    us.watch(us.take())
    eventually(lambda: listener._again_in >= 0.4, within=30)
    eventually(lambda: "changes" in listener.refused)


def test_a_loss_is_found_while_the_subscription_is_down(us: Ours, bare: Bare) -> None:
    held = us.take()
    us.watch(held)
    us.backend.follow(frozenset({"b"}), 1)
    change_password(bare)
    bare.client_kill_filter(_type="pubsub")
    eventually(lambda: not us.backend._node.recipe.told, within=10)
    assert [what.partition(" to ")[0] for what in us.ear.down] == ["subscription"]
    assert us.ear.refused
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN, within=5)
    us.ear.heard.clear()
    bare.set("multilock/b", "somebody", px=60_000)
    us.ear.hears("changed", "b", within=5)


def test_a_waiter_is_served_in_order_while_its_subscription_is_down(
    us: Ours, bare: Bare, password: Password, connect: Connect
) -> None:
    first, last = connect(), connect()
    held, _ = first.take()
    waiter = us.wait()
    later = last.wait()
    change_password(bare)
    bare.client_kill_filter(_type="pubsub")
    eventually(lambda: not us.backend._node.recipe.told, within=10)
    us.wait(waiter)  # this attempt is the waiter's heartbeat
    eventually(lambda: last.backend._node.listener._subscriber, within=10)
    first.release(held)
    assert holder_of(bare) == waiter.owner
    assert isinstance(us.attempt(waiter), Granted)
    password.password = "new"
    eventually(lambda: us.backend._node.recipe.told, within=10)
    assert us.ear.down == {}
    assert us.release(waiter)
    assert holder_of(bare) == later.owner
    last.ear.hears("wake", later.id)


def test_a_tracked_connection_that_a_firewall_dropped_is_replaced_early(
    connect: Connect, proxy: FaultProxy, bare: Bare
) -> None:
    us = connect(proxy.url)
    held = us.take()
    us.watch(held)
    us.release(held[0])
    listener = us.backend._node.listener
    tracked = listener._tracked
    assert tracked
    [address] = [client["addr"] for client in bare.client_list() if "t" in client["flags"]]
    for connection in proxy.connections:
        if connection._server.getsockname()[1] == int(address.rpartition(":")[2]):
            connection.black_hole()
    eventually(lambda: listener._tracked is not tracked and listener._tracked, within=15)
    held = us.take()
    us.watch(held)
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_silent_tracked_connection_delays_a_watch_by_only_a_second(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url, within=20)
    us.watch(us.take(us.claim("b")))
    held = us.take()
    with us.backend._node.listener._using_tracked:
        proxy.black_hole(which="present")
    started = now()
    us.watch(held)
    assert now() - started < 10


def test_an_observer_sees_its_own_clients_locks_although_their_watch_is_down(us: Ours, them: Ours, bare: Bare) -> None:
    """A client that observes a name and holds it renews over the tracked connection, which reports no changes of its
    own."""
    other = us.take(us.claim("other"))
    us.watch(other)
    us.backend.follow(frozenset({"a"}), 1)
    us.ear.heard.clear()
    held = us.take()
    us.ear.hears("changed", "a")
    for _ in range(3):
        assert all(us.renew(held))
    assert us.ear.heard == []
    bare.delete(LOCK)
    us.ear.hears("changed", "a")
