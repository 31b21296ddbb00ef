"""Each refusal and each missing reply raises the right error, which states correctly whether the server executed the
request."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis

from multilock import now
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.model import Granted, LossReason
from multilock.testing import FaultProxy
from multilock_redis.transport import CONNECTING_AT_ONCE, Endpoint
from multilock_redis.wire import Redirected, Unclear, refusal
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, busy, eventually, holder_of, since, without
from tests.servers import RedisServer, free_port

SECRET = "correct-horse"


@contextmanager
def silent(*, unknown: bool) -> Iterator[pytest.ExceptionInfo[BackendUnavailable]]:
    with pytest.raises(BackendUnavailable) as caught:
        yield caught
    assert caught.value.unknown is unknown
    assert caught.value.backend == "redis"


# refused


@pytest.fixture
def locked(redis_server: RedisServer) -> RedisServer:
    """Start a server with a password."""
    with redis.Redis(port=redis_server.port) as bare:
        bare.config_set("requirepass", SECRET)
    return redis_server


def test_a_missing_password_is_rejected(locked: RedisServer) -> None:
    with pytest.raises(BackendRejected, match=r"NOAUTH Authentication required\..*give username= and password="):
        Ours(locked.url).take()


def test_a_connection_that_breaks_right_after_the_login_is_closed(redis_server: RedisServer) -> None:
    made: list[redis.Connection] = []

    class Broken(redis.Connection):
        def connect(self) -> None:
            super().connect()  # type: ignore[no-untyped-call]
            made.append(self)
            sock: Any = self._sock
            sock.close()  # on macOS, a socket whose server has closed it refuses all options

    endpoint = Endpoint(redis_server.url, Broken, {"port": redis_server.port})
    with pytest.raises(BackendUnavailable):
        endpoint.connect(5.0, now)
    assert not made[0].is_connected


def test_a_wrong_password_is_rejected_but_not_shown(locked: RedisServer) -> None:
    with pytest.raises(BackendRejected) as caught:
        Ours(locked.url, password="battery-staple").take()
    assert "battery-staple" not in str(caught.value)
    assert "battery-staple" not in repr(caught.value.__cause__)


def test_the_password_may_be_in_the_url_or_in_the_options(locked: RedisServer) -> None:
    for ours in (
        Ours(locked.url, password=SECRET),
        Ours(locked.url.replace("//", f"//:{SECRET}@")),
        Ours(locked.url.replace("//", "//default:wrong@"), password=SECRET),
    ):
        claim, _ = ours.take()
        ours.release(claim)
        assert SECRET not in repr(ours.backend) + repr(ours.backend._endpoint)
        ours.close()


def test_a_database_that_does_not_exist_is_rejected(server: RedisServer, connect: Connect) -> None:
    with pytest.raises(BackendRejected, match="DB index"):
        connect(server.url, db=99).take()


def test_a_user_without_the_commands_is_rejected_and_nothing_is_executed(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    bare.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], commands=["+get", "+ping"], reset=True)
    with pytest.raises(BackendRejected, match="NOPERM"):
        connect(server.url.replace("//", "//reader:x@")).take()
    assert holder_of(bare) is None


def test_a_user_without_permission_for_these_keys_is_rejected(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    bare.acl_setuser("other", enabled=True, nopass=True, keys=["other:*"], commands=["+@all"], reset=True)
    with pytest.raises(BackendRejected, match="NOPERM"):
        connect(server.url.replace("//", "//other:x@")).take()


def test_the_documented_permissions_are_sufficient_for_every_operation(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    since(bare, "6.2", "rights on channels")
    bare.execute_command("ACL", "SETUSER", "app", "reset", "on", "nopass", *RIGHTS)
    us, them = connect(server.url.replace("//", "//app:x@")), connect(server.url.replace("//", "//app:x@"))
    held = us.take()
    us.watch(held)
    assert all(us.renew(held))
    waiter = them.wait()
    assert us.backend.inspect("a", 1) is not None
    assert len(list(us.backend.inspect_all("", 1))) == 1
    us.release(held[0], unsure=True)
    them.ear.hears("wake", waiter.id)
    held = them.take(waiter)
    them.watch(held)
    assert us.backend.force_release("a", 1) is True
    reader, permit = us.take(us.reader("r")), them.take(them.permit(2, "p"))
    them.wait(them.claim("r"))
    us.wait(us.reader("p"))
    assert all(us.renew(reader))
    assert all(them.renew(permit))
    assert [info.holders for info in us.backend.inspect_all("", 1)] == [1, 1]
    assert them.backend.rest(*permit, False, 1, 1).ours
    assert us.release(reader[0])
    assert us.backend.force_release("p", 1) is True
    assert us.backend.follow(frozenset({"a"}), 1) is True
    us.backend.ping(1)
    assert us.ear.down == {}


@pytest.mark.oracle
@pytest.mark.parametrize(
    "right", ["zadd", "zrem", "zrange", "zrank", "hset", "hget", "hdel", "pexpire", "time", "publish"]
)
def test_a_missing_permission_leaves_no_key_without_an_expiry(
    server: RedisServer, bare: Bare, connect: Connect, right: str
) -> None:
    whole, lacking = connect(), connect(without(bare, server, right))
    held, _ = whole.take()
    claim = lacking.claim()
    for call in (
        lambda: lacking.attempt(claim, join=True),
        lambda: lacking.release(claim, unsure=True),
        lambda: lacking.attempt(lacking.claim("free"), join=True),
        lambda: whole.wait(),
    ):
        with suppress(BackendRejected):
            call()
        assert {key for key in bare.scan_iter() if bare.ttl(key) == -1} == set()
    assert whole.release(held)


# The rights that a user needs according to the documentation page on Redis.
KEYS_AND_CHANNELS = ("~multilock/*", "~{multilock/*", "&multilock:wake:*", "&__redis__:invalidate")
COMMANDS = (
    *("+evalsha", "+script|load", "+client|id", "+client|tracking", "+client|caching", "+subscribe", "+publish"),
    "+pubsub|numsub",
    *("+get", "+set", "+exists", "+del", "+mget", "+pexpire", "+pttl", "+time", "+scan", "+ping", "+select"),
    *("+zadd", "+zrem", "+zrange", "+zrank", "+zcard", "+zscore", "+zcount", "+zrangebyscore", "+zremrangebyscore"),
    *("+hset", "+hget", "+hdel"),
)
RIGHTS = (*KEYS_AND_CHANNELS, *COMMANDS)


def test_a_key_of_another_type_is_rejected_and_left_alone(us: Ours, bare: Bare) -> None:
    bare.hset("multilock/a", "redisson", 1)
    for call in (lambda: us.take(), lambda: us.wait(), lambda: us.backend.inspect("a", 1)):
        with pytest.raises(BackendRejected, match="WRONGTYPE"):
            call()
    assert bare.hgetall("multilock/a") == {b"redisson": b"1"}


@pytest.mark.parametrize("part", ["queue", "live", "token"])
def test_another_type_of_an_auxiliary_key_is_rejected_and_leaves_no_lock(us: Ours, bare: Bare, part: str) -> None:
    bare.rpush(f"{{multilock/a}}:{part}", "x")
    if part == "live":
        bare.zadd("{multilock/a}:queue", {"x": 1})
    with pytest.raises(BackendRejected, match="WRONGTYPE"):
        us.attempt(us.claim(), join=True)
    assert holder_of(bare) is None


def test_a_full_server_rejects_new_locks_but_serves_the_held_ones(us: Ours, them: Ours, bare: Bare) -> None:
    held = us.take()
    waiter = them.wait()
    other = us.take(us.claim("other"))
    bare.config_set("maxmemory", 1)
    try:
        with pytest.raises(BackendRejected, match="OOM"):
            us.take(us.claim("new"))
        assert holder_of(bare, "new") is None
        assert isinstance(us.attempt(held[0]), Granted)
        assert all(us.renew(held, other))
        assert us.release(held[0], unsure=True) is True
        assert holder_of(bare) == waiter.owner
        assert bare.exists(f"{{multilock/a}}:gone:{held[0].id}") == 1
        assert them.backend.force_release("a", 1) is True
        assert us.release(other[0]) is True
    finally:
        bare.config_set("maxmemory", 0)


# Errors that count as a missing reply, although the request was certainly not executed


def test_a_refused_connection_raises_backend_unavailable(connect: Connect) -> None:
    with silent(unknown=False):
        connect(f"redis://127.0.0.1:{free_port()}").take()


def test_an_unknown_host_raises_backend_unavailable(connect: Connect) -> None:
    with silent(unknown=False):
        connect("redis://no-such-host.invalid").take()


def test_a_name_lookup_that_hangs_ends_in_time(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(10) and [])
    started = now()
    with silent(unknown=False):
        connect("redis://slow.example", within=0.2).take()
    assert now() - started < 3
    release.set()


def test_a_name_lookup_that_hangs_occupies_few_threads(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(30) and [])
    us = connect("redis://slow.example", within=0.05)

    def ask() -> None:
        for _ in range(4):
            with silent(unknown=False):
                us.take()

    callers = [threading.Thread(target=ask) for _ in range(50)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert connecting() <= CONNECTING_AT_ONCE
    release.set()
    eventually(lambda: connecting() == 0)
    started = now()
    with silent(unknown=False):  # the next request must try to connect at once, without a pause
        us.take()
    assert now() - started < 1
    eventually(lambda: connecting() == 0)


def connecting() -> int:
    return sum(thread.name == "multilock-redis-connect" for thread in threading.enumerate())


def test_a_missing_socket_file_raises_backend_unavailable(connect: Connect) -> None:
    with silent(unknown=False):
        connect("unix:///nowhere/redis.sock").take()


def test_a_server_that_accepts_and_never_replies_ends_in_time(connect: Connect, proxy: FaultProxy) -> None:
    proxy.black_hole()
    # The first options need a handshake before the request, and the second do not.
    for options, unknown in (({"password": "x"}, False), ({}, True)):
        started = now()
        with silent(unknown=unknown):
            connect(proxy.url, within=1.0, **options).take()
        assert now() - started < 3


def test_a_replica_counts_as_silence_and_is_named(us: Ours, server: RedisServer, redis_server: RedisServer) -> None:
    replica = Ours(redis_server.url)
    claim, _ = replica.take()
    with redis.Redis(port=server.port) as primary:
        primary.config_set("repl-diskless-sync-delay", 0)
    with redis.Redis(port=redis_server.port) as bare:
        bare.replicaof("127.0.0.1", server.port)
        with silent(unknown=False) as caught:
            replica.take(replica.claim("b"))
        assert "replica" in str(caught.value)
        eventually(lambda: bare.info("replication")["master_link_status"] == "up", within=10)
    with silent(unknown=False):  # no refusal, although the primary never had the lock
        replica.release(claim)
    replica.close()


def empty_replica(bare: Bare) -> None:
    """Turn the server into an empty replica that has not connected to its primary yet."""
    bare.replicaof("127.0.0.1", 1)
    bare.config_set("replica-read-only", "no")
    # With one transaction no other client finds an empty server that still accepts writes.
    at_once = bare.pipeline(transaction=True)
    at_once.flushall()
    at_once.config_set("replica-read-only", "yes")
    at_once.execute()


def test_a_replica_that_denies_a_renewal_is_not_believed(redis_server: RedisServer) -> None:
    us = Ours(redis_server.url)
    lock, reader = us.take(), us.take(us.reader("r"))
    with redis.Redis(port=redis_server.port) as bare:
        empty_replica(bare)
    for ask in (
        lambda: us.release(lock[0]),
        lambda: us.release(reader[0]),
        lambda: us.renew(lock),
        lambda: us.renew(reader),
        lambda: us.backend.inspect("a", 1),
        lambda: us.backend.force_release("a", 1),
        lambda: us.backend.rest(*lock, False, 1, 1),
    ):
        with silent(unknown=False) as caught:
            ask()
        assert "replica" in str(caught.value)
    us.close()


@pytest.mark.parametrize("kind", ["lock", "read", "permit"])
def test_a_replica_that_reports_a_taken_lock_is_not_believed(redis_server: RedisServer, kind: str) -> None:
    us = Ours(redis_server.url)
    us.take()
    us.take(us.permit(2, "p"))
    with redis.Redis(port=redis_server.port) as bare:
        bare.replicaof("127.0.0.1", 1)
    name, permits = ("p", 3) if kind == "permit" else ("a", 0)
    with silent(unknown=False) as caught:
        us.attempt(us.claim(name, kind=kind, permits=permits))
    assert "replica" in str(caught.value)
    us.close()


def test_the_contents_of_a_replica_cause_no_loss(redis_server: RedisServer) -> None:
    us = Ours(redis_server.url)
    held = us.take()
    us.watch(held)
    us.backend.follow(frozenset({"a"}), 1)
    us.ear.heard.clear()
    with redis.Redis(port=redis_server.port) as bare:
        empty_replica(bare)
    with suppress(BackendUnavailable):
        us.backend._node.listener._look(None, 2.0)
    assert [what for what in us.ear.heard if what[0] == "gone" or what == ("changed", "a")] == []
    us.close()


def test_a_server_that_is_loading_its_data_raises_backend_unavailable(bare: Bare) -> None:
    since(bare, "7.0", "way to load slowly")
    slow = ("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
    with RedisServer("--enable-debug-command", "yes", *slow) as server:
        ours = Ours(server.url)
        with redis.Redis(port=server.port, socket_timeout=10) as bare:
            bare.mset({str(number): "x" for number in range(1000)})
            thread = threading.Thread(target=bare.execute_command, args=("DEBUG", "RELOAD"))
            thread.start()
            eventually(lambda: says(ours, "LOADING"), within=10)
            thread.join()
        ours.close()


def says(ours: Ours, word: str) -> bool:
    try:
        claim, _ = ours.take()
    except BackendUnavailable as error:
        return word in str(error) and not error.unknown
    ours.release(claim)
    return False


def test_a_server_busy_with_a_script_raises_backend_unavailable(redis_server: RedisServer) -> None:
    ours = Ours(redis_server.url)
    ours.take(ours.claim("before"))
    with busy(redis_server), silent(unknown=False) as caught:
        ours.take()
    assert "BUSY" in str(caught.value)
    ours.take()
    ours.close()


def test_a_server_that_becomes_busy_during_the_connect_raises_backend_unavailable(redis_server: RedisServer) -> None:
    ours = Ours(f"redis://127.0.0.1:{redis_server.port}/2")
    with busy(redis_server), silent(unknown=False) as caught:
        ours.take()
    assert "BUSY" in str(caught.value)
    ours.take()
    ours.close()


def test_too_few_replicas_raise_backend_unavailable(us: Ours, bare: Bare) -> None:
    since(bare, "7.0", "such check in scripts")
    bare.config_set("min-replicas-to-write", 1)
    try:
        with silent(unknown=False):
            us.take()
    finally:
        bare.config_set("min-replicas-to-write", 0)
    assert holder_of(bare) is None


# missing replies, where the request may have been executed


def test_an_acquire_whose_reply_is_lost_is_found_by_the_same_id(
    connect: Connect, proxy: FaultProxy, bare: Bare
) -> None:
    us = connect(proxy.url)
    us.release(us.take()[0])
    claim = us.claim()
    proxy.drop_reply(b"EVALSHA")
    with silent(unknown=True):
        us.take(claim)
    assert holder_of(bare) == claim.owner
    us.take(claim)


def test_a_repeated_release_returns_false(connect: Connect, proxy: FaultProxy, bare: Bare) -> None:
    us = connect(proxy.url)
    us.release(us.take()[0])
    claim, _ = us.take()
    proxy.drop_reply(b"EVALSHA")
    with silent(unknown=True):
        us.release(claim)
    assert holder_of(bare) is None
    assert us.release(claim, unsure=True) is False


@pytest.mark.parametrize("watched", [False, True])
def test_a_renewal_whose_reply_is_lost_is_repeated(
    connect: Connect, proxy: FaultProxy, bare: Bare, watched: bool
) -> None:
    us = connect(proxy.url)
    held = us.take()
    us.renew(held)
    if watched:
        us.watch(held)
    bare.pexpire("multilock/a", 1000)
    proxy.drop_reply(b"EVALSHA")
    with silent(unknown=True):
        us.renew(held)
    assert bare.pttl("multilock/a") > 9_000
    [renewed] = us.renew(held)
    assert renewed is not None


def test_a_request_that_arrives_after_its_cancel_acquires_nothing(
    connect: Connect, proxy: FaultProxy, bare: Bare
) -> None:
    us = connect(proxy.url)
    us.release(us.take()[0])
    us.within = 1.0
    claim = us.claim()
    held_back = proxy.hold_request(claim.id.encode())
    with silent(unknown=True):
        us.take(claim)
    assert us.release(claim, unsure=True) is False
    before = bare.info("commandstats")["cmdstat_evalsha"]["calls"]
    held_back.release()
    eventually(lambda: bare.info("commandstats")["cmdstat_evalsha"]["calls"] > before)
    assert holder_of(bare) is None


def test_a_late_reply_is_never_taken_for_the_reply_to_the_next_request(connect: Connect, proxy: FaultProxy) -> None:
    us = connect(proxy.url)
    us.take()
    proxy.black_hole("down")
    with silent(unknown=True):
        us.backend.inspect("a", 0.2)
    proxy.heal()
    assert us.release(us.claim("b")) is False
    assert us.backend.inspect("b", 1) is None


def test_an_idle_connection_that_the_server_closed_is_not_used(us: Ours, bare: Bare) -> None:
    us.backend.ping(1)
    bare.client_kill_filter(_type="normal", skipme=True)
    time.sleep(0.06)
    us.take()


@pytest.mark.parametrize("path", ["0", "1"])
def test_a_server_that_accepts_no_more_clients_counts_as_silent(redis_server: RedisServer, path: str) -> None:
    with redis.Redis(port=redis_server.port) as bare:
        bare.config_set("maxclients", 1)
        us = Ours(redis_server.url.removesuffix("0") + path)
        with silent(unknown=False) as caught:
            us.take()
        assert "max number of clients" in str(caught.value)
        bare.config_set("maxclients", 100)
        us.take()
        us.close()


def test_a_restarted_server_is_found_again(redis_server: RedisServer) -> None:
    us = Ours(redis_server.url)
    held = us.take()
    us.watch(held)
    redis_server.restart()
    us.ear.hears("gone", held[0].id, LossReason.TAKEN, within=5)
    us.take()
    us.close()


@pytest.mark.parametrize(
    ("text", "kind", "unknown"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'. script: 0f, on @user_script:3.", BackendRejected, 0),
        ("ERR Error running script (call to f_0f): @user_script:7: -OOM command not allowed", BackendRejected, 0),
        (
            "ERR Error running script (call to f_0f): @user_script:7: @user_script: 7: -READONLY You can't write",
            BackendUnavailable,
            False,
        ),
        ("ERR Error running script (call to f_0f): @user_script:7: WRONGTYPE Operation", BackendRejected, 0),
        ("ERR user_script:7: attempt to compare nil with number script: 0f", BackendUnavailable, True),
        ("ERR Error running script (call to f_0f): @user_script:7: user_script:7: attempt", BackendUnavailable, True),
        ("UNKNOWNWORD something new", BackendUnavailable, True),
        ("ERR Connection timed out", Unclear, 0),
        ("ERR max number of clients reached", BackendUnavailable, False),
        ("ERR max number of clients + cluster connections reached", BackendUnavailable, False),
        ("@user_script: 12: -READONLY You can't write against a read only replica.", BackendUnavailable, False),
        ("ERR unknown command 'EVALSHA'", BackendRejected, 0),
        (
            "ERR The user executing the script can't run this command or subcommand script: 0f, on @user_script:9.",
            BackendRejected,
            0,
        ),
        (
            "ERR ACL failure in script: User u has no permissions to run 'hset' script: 0f, on @user_script:9.",
            BackendRejected,
            0,
        ),
        ("MISCONF Redis is configured to save RDB snapshots", BackendRejected, 0),
        ("MASTERDOWN Link with MASTER is down", BackendUnavailable, False),
        ("MOVED 1234 10.0.0.1:6379", Redirected, 0),
    ],
)
def test_errors_of_old_and_new_servers_are_distinguished(text: str, kind: type[Exception], unknown: bool) -> None:
    error = refusal(text, "redis://h:1/0")
    assert type(error) is kind
    assert not isinstance(error, BackendUnavailable) or error.unknown is unknown


@pytest.mark.parametrize("text", ["MOVED 1234 10.0.0.1:6379", "ASK 1 10.0.0.1:6379", "CROSSSLOT Keys in request"])
def test_a_node_of_a_cluster_is_reported_as_such(text: str) -> None:
    assert "redis+cluster://" in str(refusal(text, "redis://h:1/0"))


def test_another_server_is_not_taken_for_redis() -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            connection, _ = web.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with silent(unknown=True) as caught:
            Ours(f"redis://127.0.0.1:{web.getsockname()[1]}").take()
        assert "another protocol" in str(caught.value)
        thread.join()


def test_a_cluster_of_one_shard_works_with_its_own_url_and_is_named_otherwise(connect: Connect) -> None:
    with RedisServer("--cluster-enabled", "yes") as server, redis.Redis(port=server.port) as bare:
        bare.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        ours, plain = connect(f"redis+cluster://{server.endpoint}", within=10), connect(server.url)
        eventually(lambda: "cluster_state:ok" in str(bare.execute_command("CLUSTER", "INFO")), within=20)
        held = [ours.take(ours.claim(name)) for name in "bcd"]
        assert all(ours.renew(*held))
        with pytest.raises(BackendRejected, match=r"redis\+cluster://"):
            plain.renew(*held)
