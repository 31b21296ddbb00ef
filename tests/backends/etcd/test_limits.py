"""Servers with smaller limits than usual, and names so long that they reach the usual limits."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pytest

from multilock import BackendRejected, Client, Loss, LossReason, now
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Recorder, eventually, inner
from multilock_etcd import EtcdBackend, transactions
from multilock_etcd.notices import EtcdWatcher
from multilock_etcd.transactions import Steps
from multilock_etcd.transport import TooMuch
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.kit import Ours
from tests.backends.etcd.test_faults import keys
from tests.servers_etcd import EtcdServer, etcdctl

LONGEST = "\U0001f512" * 1000  # the key of this name has 12,000 bytes
MANY = 70


def watcher_of(client: Client) -> EtcdWatcher:
    backend = client._kernel.backend
    assert isinstance(backend, EtcdBackend)
    return backend._watcher


class Server:
    """A server that refuses transactions with too many operations or bytes."""

    def __init__(self, operations: int, bytes: int) -> None:
        self.operations, self.bytes = operations, bytes
        self.asked: list[int] = []

    def ask(self, keys: Sequence[bytes]) -> int:
        count = len(keys)
        self.asked.append(count)
        if count > self.operations:
            raise TooMuch("too many operations in txn request", by_bytes=False)
        if sum(map(len, keys)) > self.bytes:
            raise TooMuch("request is too large", by_bytes=True)
        return count


@pytest.mark.parametrize(("operations", "bytes"), [(64, 10**9), (1, 10**9), (10**9, 30_000), (7, 500)])
def test_a_refused_batch_is_halved_and_its_size_is_remembered(operations: int, bytes: int) -> None:
    server, steps = Server(operations, bytes), Steps()
    keys = [b"x" * 400] * 250
    done = 0
    while done < len(keys):
        count, answer = steps.take(keys[done:], lambda key: key, server.ask)
        assert count == answer > 0
        done += count
    refused = len(server.asked) - sum(count <= operations and count * 400 <= bytes for count in server.asked)
    assert refused <= 8
    server.asked.clear()
    steps.take(keys, lambda key: key, server.ask)
    assert len(server.asked) == 1


def test_a_refused_request_with_a_single_key_is_not_repeated() -> None:
    with pytest.raises(TooMuch):
        Steps().take([b"x"] * 100, lambda key: key, Server(0, 0).ask)


@pytest.fixture
def small() -> Any:
    """Start a server that accepts fewer operations in a transaction than etcd does by default."""
    with EtcdServer("--max-txn-ops", "16") as server:
        yield server


def test_a_deleted_key_is_reported_by_a_server_that_accepts_few_operations(small: EtcdServer, connect: Connect) -> None:
    with FaultProxy.before(small.url) as proxy:
        client = connect(proxy.url, ttl=60)
        recorder = Recorder[Loss]()
        held = [client.lock(f"n{number}", on_lost=recorder).acquire() for number in range(40)]
        watcher = watcher_of(client)
        eventually(lambda: all(watcher.covers(inner(lease).claim.id) for lease in held), 20)
        before = watcher._call
        proxy.cut()
        eventually(lambda: watcher._call not in (None, before), 20)
        eventually(lambda: all(watcher.covers(inner(lease).claim.id) for lease in held), 20)
        for number in (3, 39):
            etcdctl(small.endpoint, "del", "--prefix", f"multilock/n{number}/")
        eventually(lambda: sorted(loss.lease.name for loss in recorder.calls) == ["n3", "n39"], 20)


def test_such_a_server_reports_a_key_deleted_while_the_stream_was_down(small: EtcdServer, connect: Connect) -> None:
    with FaultProxy.before(small.url) as proxy:
        client = connect(proxy.url, ttl=60)
        recorder = Recorder[Loss]()
        held = [client.lock(f"n{number}", on_lost=recorder).acquire() for number in range(40)]
        watcher = watcher_of(client)
        eventually(lambda: all(watcher.covers(inner(lease).claim.id) for lease in held), 20)
        proxy.refuse()
        proxy.cut()
        etcdctl(small.endpoint, "del", "--prefix", "multilock/n39/")
        proxy.heal()
        eventually(lambda: [loss.reason for loss in recorder.calls] == [LossReason.TAKEN], 20)


def test_renewals_read_keys_on_a_server_that_accepts_few_operations(small: EtcdServer) -> None:
    ours = Ours(small.url, "multilock/")
    held = [(claim := ours.claim()._replace(name=f"n{number}"), ours.take(claim)) for number in range(40)]
    etcdctl(small.endpoint, "del", "--prefix", "multilock/n39/")
    assert ours.renew(*held) == [True] * 39 + [False]
    ours.backend.close()


@pytest.mark.oracle
def test_a_client_leaves_nothing_on_a_server_that_accepts_few_operations(small: EtcdServer, connect: Connect) -> None:
    client = connect(small.url, ttl=60)
    for number in range(40):
        client.lock(f"n{number}", renew=False).acquire()
    client.close()
    assert keys(small) == []


def test_the_stream_is_opened_although_the_read_before_it_is_refused(
    server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy.before(server.url) as proxy:
        client = connect(proxy.url, ttl=60)
        recorder = Recorder[Loss]()
        leases = [client.lock(name, on_lost=recorder).acquire() for name in ("a", "b")]
        watcher = watcher_of(client)
        eventually(lambda: all(watcher.covers(inner(lease).claim.id) for lease in leases), 20)

        def refused(*_: Any) -> Any:
            raise BackendRejected("the test refuses it")

        monkeypatch.setattr(transactions.EtcdTransactions, "missing", refused)
        before = watcher._call
        proxy.cut()
        eventually(lambda: watcher._call not in (None, before), 20)
        eventually(lambda: watcher._watches and all(watch.confirmed for watch in watcher._watches.values()), 20)
        # The key is not watched, so each renewal must read it.
        assert not any(watcher.covers(inner(lease).claim.id) for lease in leases)
        etcdctl(server.endpoint, "del", "--prefix", "multilock/a/")
        eventually(lambda: [loss.lease.name for loss in recorder.calls] == ["a"], 20)


def test_force_release_removes_many_readers_of_the_longest_name(us: Ours, them: Ours) -> None:
    readers = [us.reader()._replace(name=LONGEST) for _ in range(MANY)]
    held = [(reader, us.take(reader)) for reader in readers]
    assert them.backend.force_release(LONGEST, 5.0)
    assert us.renew(*held) == [False] * MANY


def test_renewals_read_many_keys_of_the_longest_name(us: Ours, shared: EtcdServer, prefix: str) -> None:
    readers = [us.reader()._replace(name=LONGEST) for _ in range(300)]
    held = [(reader, us.take(reader)) for reader in readers]
    gone = us.backend._keys.own(readers[250])
    shared.post("kv/deleterange", {"key": base64.b64encode(gone).decode()})
    began = now()
    assert us.renew(*held).count(False) == 1
    assert now() - began < 5.0


NINES = "9" * 5000


@pytest.fixture
def foreign(shared: EtcdServer, prefix: str) -> str:
    """Put a key of another program, with a lease, among the keys of permits. It looks like the key of a permit, but its
    number is one that multilock never writes."""
    lease = etcdctl(shared.endpoint, "lease", "grant", "600").split()[1]
    etcdctl(shared.endpoint, "put", f"{prefix}job/permit/{NINES}/x", "v", f"--lease={lease}")
    return lease


def test_another_programs_invalid_number_of_permits_breaks_no_call(us: Ours, foreign: str) -> None:
    assert us.backend.inspect("job", 5.0) is None
    assert list(us.backend.inspect_all("", 5.0)) == []
    assert us.backend.force_release("job", 5.0) is False
    for claim in (us.claim(), us.reader(), us.writer(), us.permit(2)):
        for join in (False, True):
            assert not hasattr(us.attempt(claim, join=join), "token")
            us.release(claim)
