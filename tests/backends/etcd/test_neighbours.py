"""Other keys beside and below the keys of a lock: the data of an application, and the locks of clients with a longer
prefix."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from multilock import Client
from multilock.testing.conformance.base import eventually, queued
from multilock.testing.conformance.faces import background
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.test_faults import keys
from tests.servers_etcd import EtcdServer, etcdctl

Put = Callable[[str], None]
NESTED = 700  # number of keys, more than the client reads at once


def names(client: Client) -> list[str]:
    return [info.name for info in client.inspect_all()]


def value(server: EtcdServer, key: str) -> str:
    return etcdctl(server.endpoint, "get", "--print-value-only", key).strip()


@pytest.fixture
def put(server: EtcdServer) -> Put:
    """Put a key on a lease of its own."""

    def put(key: str) -> None:
        lease = etcdctl(server.endpoint, "lease", "grant", "60").split()[1]
        etcdctl(server.endpoint, "put", f"--lease={lease}", key, "v")

    return put


# ---- data without a lease


@pytest.mark.parametrize("prefix", ["", "multilock/"])
def test_force_release_leaves_the_data_of_an_application_alone(
    server: EtcdServer, connect: Connect, prefix: str
) -> None:
    etcdctl(server.endpoint, "put", f"{prefix}plain/key", "v")
    client = connect(server.url, prefix=prefix)
    assert client.force_release("plain") is False
    assert value(server, f"{prefix}plain/key") == "v"


@pytest.mark.parametrize("prefix", ["", "multilock/"])
def test_inspect_shows_no_data_of_an_application_as_a_lock(server: EtcdServer, connect: Connect, prefix: str) -> None:
    etcdctl(server.endpoint, "put", f"{prefix}plain/key", "v")
    client = connect(server.url, prefix=prefix)
    assert client.inspect("plain") is None
    assert names(client) == []


@pytest.mark.parametrize("kind", ["lock", "read", "permit"])
def test_a_key_that_an_operator_wrote_again_is_shown_and_can_be_released(
    server: EtcdServer, connect: Connect, kind: str
) -> None:
    """The operator's put detaches the key from its lease, so if the holder dies, the end of its lease does not free the
    lock."""
    client, other = connect(server.url), connect(server.url)
    locks = {"lock": client.lock("n"), "read": client.read_write_lock("n").reader(), "permit": client.semaphore("n", 2)}
    lease = locks[kind].acquire()
    [key] = [key for key in keys(server) if key.startswith("multilock/n/")]
    etcdctl(server.endpoint, "put", key, "hello")
    info = other.inspect("n")
    assert info is not None
    assert (info.kind or "lock", info.token) == (kind, lease.token)
    assert names(other) == ["n"]
    assert other.force_release("n")
    assert lease.wait_lost(5) is not None
    assert other.lock("n").try_acquire() is not None


def test_force_release_leaves_application_data_among_the_waiters_alone(server: EtcdServer, connect: Connect) -> None:
    client, other = connect(server.url), connect(server.url)
    lease = client.lock("job").acquire()
    waits = background(lambda: other.lock("job").acquire(timeout=10))
    eventually(lambda: queued(client, "job") == 1)
    etcdctl(server.endpoint, "put", "multilock/job/0", "v")
    info = client.inspect("job")
    assert info is not None
    assert info.token == lease.fence()
    assert client.force_release("job") is True
    assert waits.result(10).is_held()  # the waiter's place was not deleted
    assert value(server, "multilock/job/0") == "v"


@pytest.mark.parametrize("first", ["data", "a lock of a longer prefix"])
def test_a_waiter_behind_an_unknown_key_is_not_shown_as_the_holder(
    server: EtcdServer, connect: Connect, put: Put, first: str
) -> None:
    key = "multilock/job/0"
    if first == "data":
        etcdctl(server.endpoint, "put", key, "v")
    else:
        put(key := f"{key}/1")
    client, other = connect(server.url), connect(server.url)
    waits = background(lambda: other.lock("job", fair=True).acquire(timeout=10))
    eventually(lambda: len(keys(server, "multilock/job/")) == 2)
    standing = keys(server, "multilock/job/")
    assert client.inspect("job") is None
    assert names(client) == []
    assert client.force_release("job") is False
    assert keys(server, "multilock/job/") == standing
    etcdctl(server.endpoint, "del", key)
    assert waits.result(10).is_held()


@pytest.mark.parametrize("below", ["read/0", "write/0", "permit/3/0"])
def test_readers_writers_and_permits_are_shown_as_holders_and_can_be_released(
    server: EtcdServer, connect: Connect, put: Put, below: str
) -> None:
    put(f"multilock/job/{below}")
    client = connect(server.url)
    assert client.lock("job").try_acquire() is None
    assert client.inspect("job") is not None
    assert names(client) == ["job"]
    assert client.force_release("job") is True
    assert client.lock("job").try_acquire() is not None


@pytest.mark.parametrize("below", ["read/0/1", "write/", "permit/0", "permit/x/0", "permit/3/0/1", "reader/0"])
def test_a_key_that_only_resembles_a_reader_or_permit_is_ignored(
    server: EtcdServer, connect: Connect, put: Put, below: str
) -> None:
    put(f"multilock/job/{below}")
    client = connect(server.url)
    assert client.inspect("job") is None
    assert names(client) == []
    assert client.force_release("job") is False


# ---- prefixes that nest


def test_inspect_shows_no_lock_of_a_longer_prefix(server: EtcdServer, connect: Connect) -> None:
    outer, inner = connect(server.url, prefix="app/"), connect(server.url, prefix="app/my ")
    inner.lock("job").acquire()
    assert outer.inspect("my job") is None
    assert names(outer) == []
    outer.lock("my job").acquire()
    assert names(outer) == ["my job"]
    assert names(inner) == ["job"]


def test_a_lock_below_a_longer_prefix_is_neither_shown_nor_released(server: EtcdServer, connect: Connect) -> None:
    outer, inner = connect(server.url, prefix="app/"), connect(server.url, prefix="app/jobs/")
    lease = inner.lock("x").acquire()
    assert outer.inspect("jobs") is None
    assert names(outer) == []
    assert outer.force_release("jobs") is False
    time.sleep(0.5)  # long enough for a notification of a loss
    assert lease.is_held()
    assert names(inner) == ["x"]


def test_a_holder_is_found_among_the_locks_below_its_name(server: EtcdServer, connect: Connect, put: Put) -> None:
    outer = connect(server.url, prefix="app/")
    lease = outer.lock("jobs").acquire()
    for neighbour in ("0", "a", "zz"):  # these keys are sorted before, among and after the ids of claims
        put(f"app/jobs/{neighbour}/1")
    info = outer.inspect("jobs")
    assert info is not None
    assert info.token == lease.fence()
    assert [(info.name, info.token) for info in outer.inspect_all()] == [("jobs", lease.fence())]
    assert outer.force_release("jobs") is True
    eventually(lambda: not lease.is_held())
    assert outer.force_release("jobs") is False
    assert len(etcdctl(server.endpoint, "get", "--prefix", "--keys-only", "app/jobs/").split()) == 3


def test_the_holder_is_found_among_very_many_keys_below_its_name(server: EtcdServer, connect: Connect) -> None:
    outer, inner = connect(server.url, prefix="app/"), connect(server.url, prefix="app/jobs/")
    lease = outer.lock("jobs").acquire()
    # The keys of these locks begin with `%21`, which is sorted before any id of a claim.
    held = [inner.lock(f"!{number}").acquire() for number in range(NESTED)]
    info = outer.inspect("jobs")
    assert info is not None
    assert info.token == lease.fence()
    assert names(outer) == ["jobs"]
    assert outer.force_release("jobs") is True
    assert outer.force_release("jobs") is False
    assert all(each.is_held() for each in held)


def test_a_prefix_without_a_final_slash_shows_no_lock_without_a_name(server: EtcdServer, connect: Connect) -> None:
    connect(server.url, prefix="app/").lock("x").acquire()
    assert names(connect(server.url, prefix="app")) == []
    assert connect(server.url, prefix="").force_release("app") is False


def test_a_key_below_a_prefix_without_a_final_slash_is_ignored(server: EtcdServer, connect: Connect, put: Put) -> None:
    put("app/x")
    assert names(connect(server.url, prefix="app")) == []


def test_a_name_waits_for_locks_of_a_longer_prefix_below_it(server: EtcdServer, connect: Connect) -> None:
    """The keys of a longer prefix are in the range that the server compares, as docs/backends/etcd.md says."""
    outer, inner = connect(server.url, prefix="app/"), connect(server.url, prefix="app/jobs/")
    lease = inner.lock("x").acquire()
    assert outer.lock("jobs").try_acquire() is None
    assert outer.lock("job").try_acquire() is not None
    lease.release()
    assert outer.lock("jobs").try_acquire() is not None
