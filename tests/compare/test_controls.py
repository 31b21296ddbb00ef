"""On the user's own servers the controls need no more permissions than our locks, and leave nothing behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from kazoo.client import KazooClient
from kazoo.security import CREATOR_ALL_ACL, READ_ACL_UNSAFE

from multilock.testing import compare
from multilock.testing.compare import controls
from multilock.testing.compare.columns import columns_for
from multilock.testing.compare.contestants import Adapter
from multilock.testing.compare.runner import _limit
from multilock.testing.conformance.base import eventually
from tests.servers import RedisServer
from tests.servers_postgresql import PgBouncer, PostgresqlServer
from tests.servers_zookeeper import ZooKeeperServer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresqlServer]:
    with PostgresqlServer(max_connections="50") as server:
        yield server


@contextmanager
def zookeeper(url: str, **options: Any) -> Iterator[Any]:
    client = KazooClient(url.partition("://")[2], **options)
    client.start(timeout=30)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def nodes_below(client: Any, path: str) -> list[str]:
    found = [f"{path.rstrip('/')}/{child}" for child in client.get_children(path) if child != "zookeeper"]
    return found + [node for child in found for node in nodes_below(client, child)]


def test_the_kazoo_control_has_our_login_and_prefix_and_leaves_no_node() -> None:
    """This login may write below one node only. Without the login and prefix, kazoo could hold no lock and the run
    would be void."""
    with ZooKeeperServer() as server:
        with zookeeper(server.url, auth_data=[("digest", "me:secret")]) as operator:
            operator.create("/ours", acl=CREATOR_ALL_ACL + READ_ACL_UNSAFE)
            operator.set_acls("/", READ_ACL_UNSAFE)
        url = f"zookeeper://me:secret@{server.endpoint}?prefix=ours/"
        found = compare.run(
            [url], compare.Options(scenarios=["pause", "kill"], cycles=1, ttl=1.0, all_of_controls=True)
        )
        assert found.cells["kazoo", "pause"]["verdict"] == "broken", found.cells["kazoo", "pause"]["not_decided"]
        # On an overloaded machine too few cycles of our own lock may be decided. No other reason may make the run void.
        assert [why for why in found.void if "could be decided" not in why] == []
        number = [column["name"] for column in found.data["columns"]].index("kazoo")
        # The nodes of our locks are containers, which the server removes by itself.
        with zookeeper(server.url) as operator:
            of_kazoo = re.compile(rf"compare-\w+-{number}-")
            assert [node for node in nodes_below(operator, "/") if of_kazoo.search(node)] == []


def test_nodes_that_a_kazoo_control_leaves_are_removed_by_the_server() -> None:
    with ZooKeeperServer(java=["-Dznode.container.checkIntervalMs=100"]) as server, zookeeper(server.url) as operator:
        place = controls.Kazoo.open(server.url, 1.0)
        lock = place.lock("compare-1")
        for _ in range(2):  # the second time, the parent node is gone, and the lock object must create it again
            holding = lock.acquire(20.0)
            assert holding is not None
            holding.release()
            eventually(lambda: not operator.exists("/multilock/compare-1"), within=30)
        place.close()


@pytest.mark.parametrize("control", [controls.Naive, controls.RedisPy])
def test_a_redis_control_has_our_login_database_and_prefix(server: RedisServer, control: Adapter) -> None:
    rules = ["~some/*", "+@all"]
    with redis.Redis(port=server.port, db=1) as operator:
        operator.execute_command("ACL", "SETUSER", "me", "on", ">secret", *rules)
        url = f"{server.url}?username=me&password=secret&db=1&prefix=some/"
        place = control.open(url, 20.0)
        one, another, far = (place.lock(name).acquire(10.0) for name in ("compare-1", "compare-12", "compare-2"))
        assert sorted(operator.keys()) == [b"some/compare-1", b"some/compare-12", b"some/compare-2"]
        assert control.take(url, "compare-1")  # type: ignore[attr-defined]
        assert control.sweep(url, "compare-1") == []  # type: ignore[attr-defined]
        assert operator.keys() == [b"some/compare-2"]
        assert far is not None
        far.release()
        assert operator.keys() == []
        for each in (one, another):  # the locks are gone already; this call ends their timers
            with suppress(redis.RedisError):
                each.release()  # type: ignore[union-attr]


def test_beside_postgresql_two_controls_cover_its_faults_and_its_connections_last(postgresql: PostgresqlServer) -> None:
    ours, advisory, flag = columns_for([postgresql.url], (), 20.0)
    assert ours.facts["versions"]["server"].startswith("postgresql 1")
    assert (advisory.name, sorted(advisory.must_fail)) == ("advisory", ["half-open", "reset", "taken"])
    assert (flag.name, sorted(flag.must_fail)) == ("postgresql-flag", ["partition", "pause", "taken"])
    assert _limit(None, [ours, advisory]).most in (2, 3, 4)  # of 50 connections, a few are already in use


def test_nothing_tells_the_holder_of_an_advisory_lock_that_it_is_lost(postgresql: PostgresqlServer) -> None:
    adapter = f"multilock.testing.compare.controls:Advisory={postgresql.url}"
    options = compare.Options(adapters=[adapter], scenarios=["reset", "taken"], cycles=1, ttl=1.0, controls=False)
    found = compare.run([], options)
    assert [cell["verdict"] for cell in found.data["cells"]] == ["broken", "broken"], found.data["cells"]
    assert [column["leftovers"] for column in found.data["columns"]] == [[]]


def test_behind_a_pooler_an_advisory_lock_admits_two_and_outlives_both(postgresql: PostgresqlServer) -> None:
    name, prefix = "compare-1-2-3", "?prefix=some/"
    direct = controls.Advisory.open(postgresql.url + prefix, 1.0)
    with PgBouncer(postgresql, size=1) as pooler:
        for _ in range(2):
            place = controls.Advisory.open(pooler.url + prefix, 1.0)
            holding: Any = place.lock(name).acquire(10.0)
            assert holding.believes()
            place.close()
            holding._connection.close()
        assert direct.lock(name).acquire(0.2) is None
        assert not controls.Advisory.take(postgresql.url, name)  # a URL without the prefix names another lock
        assert controls.Advisory.sweep(pooler.url + prefix, "compare-1-2-") == []
        again = direct.lock(name).acquire(10.0)
        assert again is not None
        assert again.release()
    direct.close()
