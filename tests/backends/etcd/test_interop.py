"""Locks of multilock and of etcd's own tools on the same name: each waits for the other, in one queue."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from multilock import Client, DistributedLock
from multilock.testing.conformance.base import eventually, queued
from multilock.testing.conformance.faces import background
from tests.backends.etcd.conftest import Connect
from tests.servers_etcd import EtcdServer, etcdctl


class Tool:
    """``etcdctl lock NAME`` or ``etcdctl elect NAME VALUE``: prints its key once it holds, and holds until it is
    interrupted."""

    def __init__(self, server: EtcdServer, *words: str) -> None:
        self._process = subprocess.Popen(
            ["etcdctl", "--endpoints", server.endpoint, *words],
            env={**os.environ, "ETCDCTL_API": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def key(self) -> str:
        """Wait until the tool holds the lock, and return its key."""
        assert self._process.stdout is not None
        return background(self._process.stdout.readline).result(10).strip()

    def holds(self) -> bool:
        """Return True if the tool has reported that it holds the lock."""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return bool(self._process.stdout.readline())

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(10)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def tools() -> Iterator[list[Tool]]:
    started: list[Tool] = []
    yield started
    for tool in started:
        tool.close()


@pytest.fixture
def client(connect: Connect, shared: EtcdServer, request: pytest.FixtureRequest) -> Client:
    return connect(shared.url, prefix=f"{request.node.name}/")


def start(tools: list[Tool], server: EtcdServer, *words: str) -> Tool:
    tools.append(Tool(server, *words))
    return tools[-1]


def shared_locks(client: Client) -> dict[str, DistributedLock]:
    both = client.read_write_lock("job")
    return {"reader": both.reader(), "writer": both.writer(), "permit": client.semaphore("job", 2)}


KINDS = ["reader", "writer", "permit"]


def words_for(verb: str, key: str) -> tuple[str, ...]:
    return (verb, key) if verb == "lock" else (verb, key, "node-7")


@pytest.mark.parametrize("verb", ["lock", "elect"])
def test_our_lock_waits_for_etcdctl(
    verb: str, client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    tool = start(tools, shared, *words_for(verb, f"{request.node.name}/job"))
    key = tool.key()
    assert key.startswith(f"{request.node.name}/job/")
    assert client.lock("job").try_acquire() is None
    info = client.inspect("job")
    assert info is not None
    assert info.identity == (None if verb == "lock" else "node-7")
    ours = background(lambda: client.lock("job").acquire(timeout=10))
    eventually(lambda: queued(client, "job") == 1)
    tool.end()
    lease = ours.result(10)
    assert info.token is not None
    assert lease.fence() > info.token


@pytest.mark.parametrize("verb", ["lock", "elect"])
def test_etcdctl_waits_for_our_lock(
    verb: str, client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    lease = client.lock("job").acquire()
    tool = start(tools, shared, *words_for(verb, f"{request.node.name}/job"))
    eventually(lambda: queued(client, "job") == 1)
    assert not tool.holds()
    assert lease.release()
    eventually(tool.holds)
    assert client.lock("job").try_acquire() is None


def test_etcdctl_and_multilock_share_one_queue_in_order_of_arrival(
    client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    holder = client.lock("job").acquire()
    tool = start(tools, shared, "lock", f"{request.node.name}/job")
    eventually(lambda: queued(client, "job") == 1)
    ours = background(lambda: client.lock("job", fair=True).acquire(timeout=10))
    eventually(lambda: queued(client, "job") == 2)
    holder.release()
    tool.key()
    assert not ours.done()
    tool.end()
    assert ours.result(10).is_held()


def test_a_waiter_waits_for_a_killed_tool_until_its_lease_ends(
    client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    tool = start(tools, shared, "lock", "--ttl", "2", f"{request.node.name}/job")
    tool.key()
    tool.close()
    assert client.lock("job").try_acquire() is None
    assert client.lock("job").acquire(timeout=10).is_held()


def test_a_name_with_a_slash_is_one_escaped_name_for_other_tools(
    client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    with client.lock("a/b"):
        stranger = start(tools, shared, "lock", f"{request.node.name}/a/b")
        stranger.key()  # the tool does not escape names, so this is another lock
        tool = start(tools, shared, "lock", f"{request.node.name}/a%2Fb")
        eventually(lambda: queued(client, "a/b") == 1)
        assert not tool.holds()
    eventually(tool.holds)


def test_our_lock_waits_for_an_unescaped_name_below_it_as_in_go(
    client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    stranger = start(tools, shared, "lock", f"{request.node.name}/a/b")
    stranger.key()
    assert client.lock("a").try_acquire() is None
    stranger.end()
    assert client.lock("a").acquire(timeout=10).is_held()


# ---- readers, writers and permits, which etcdctl does not know


@pytest.mark.parametrize("kind", KINDS)
def test_etcdctl_waits_for_our_readers_writers_and_permits(
    kind: str, client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    lease = shared_locks(client)[kind].acquire()
    tool = start(tools, shared, "lock", f"{request.node.name}/job")
    eventually(lambda: queued(client, "job") == 1)
    assert not tool.holds()
    assert lease.release()
    eventually(tool.holds)
    assert shared_locks(client)[kind].try_acquire() is None


@pytest.mark.parametrize("kind", KINDS)
def test_our_readers_writers_and_permits_wait_for_etcdctl(
    kind: str, client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    tool = start(tools, shared, "lock", f"{request.node.name}/job")
    tool.key()
    assert shared_locks(client)[kind].try_acquire() is None
    ours = background(lambda: shared_locks(client)[kind].acquire(timeout=20))
    eventually(lambda: queued(client, "job") == 1)
    tool.end()
    assert ours.result(20).is_held()


@pytest.mark.parametrize("kind", ["reader", "permit"])
def test_no_reader_writer_or_permit_overtakes_a_waiting_etcdctl(
    kind: str, client: Client, shared: EtcdServer, tools: list[Tool], request: pytest.FixtureRequest
) -> None:
    lease = shared_locks(client)[kind].acquire()
    tool = start(tools, shared, "lock", f"{request.node.name}/job")
    eventually(lambda: queued(client, "job") == 1)
    assert shared_locks(client)[kind].try_acquire() is None
    ours = background(lambda: shared_locks(client)[kind].acquire(timeout=20))
    eventually(lambda: queued(client, "job") == 2)
    lease.release()
    tool.key()
    assert not ours.done()
    tool.end()
    assert ours.result(20).is_held()


def test_our_locks_see_the_keys_of_gos_read_write_recipe_as_readers_and_writers(
    client: Client, shared: EtcdServer, request: pytest.FixtureRequest
) -> None:
    """No tool uses the read-write lock of etcd's Go client. So the test puts the keys of that lock itself."""
    below = f"{request.node.name}/job"
    lease = etcdctl(shared.endpoint, "lease", "grant", "60").split()[1]
    locks = shared_locks(client)
    etcdctl(shared.endpoint, "put", f"--lease={lease}", f"{below}/read/{lease}", "")
    assert locks["reader"].acquire(timeout=0).release()
    assert locks["writer"].try_acquire() is None
    info = client.inspect("job")
    assert info is not None
    assert (info.kind, info.holders) == ("read", 1)
    etcdctl(shared.endpoint, "put", f"--lease={lease}", f"{below}/write/{lease}", "")
    assert locks["reader"].try_acquire() is None
    etcdctl(shared.endpoint, "lease", "revoke", lease)
    assert locks["writer"].acquire(timeout=20).release()
