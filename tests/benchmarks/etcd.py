"""Benchmarks of etcd, run by ``python -m tests.benchmarks.etcd``: multilock's lock, locks of other libraries, and plain
requests for comparison.

All contenders use one server, which keeps its data in memory, because writing to a disk would take so long that no
other difference would show. ``make bench`` makes the environment of etcd3 and etcd3gw. Without it these libraries are
left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import multilock
from multilock_etcd import wire
from multilock_etcd.transport import Cluster, EtcdTransport, calls
from tests.benchmarks import sessions
from tests.benchmarks.crowd import ASYNCIO, FAIR, OURS, SECONDS, crowds, ours
from tests.benchmarks.measure import interleave, pin
from tests.benchmarks.peer import PEERS_PYTHON, versions_of
from tests.benchmarks.report import publish, with_ratios
from tests.benchmarks.sessions import WITHIN, Contender
from tests.servers_etcd import EtcdServer

RAW = "grpc alone, the same two calls"
PEERS = ("etcd3", "etcd3gw")
HISTORY = (0, 1000, 10_000)
MEMORY = Path("/dev/shm")


def raw(server: EtcdServer) -> Contender:
    """Measure the lower limit for any client: gRPC alone sends multilock's transaction and deletion, with a new key
    each time."""
    import grpc

    channel = grpc.insecure_channel(server.endpoint)

    def stub(method: Any, request: Any) -> Any:
        return channel.unary_unary(
            method.path, request_serializer=request.SerializeToString, response_deserializer=method.answer.FromString
        )

    lease = stub(calls.GRANT, wire.LeaseGrantRequest)(wire.LeaseGrantRequest(TTL=3600)).ID
    txn, delete = stub(calls.TXN, wire.TxnRequest), stub(calls.DELETE, wire.DeleteRangeRequest)
    last = wire.RangeRequest(key=b"raw/", range_end=b"raw0", limit=2, sort_order=2, sort_target=2, keys_only=True)
    keys: list[bytes] = []

    def acquire() -> None:
        own = b"raw/" + os.urandom(24).hex().encode()
        absent = [wire.Compare(target=wire.CREATE, key=own), wire.Compare(target=wire.CREATE, key=b"gone/" + own)]
        put = wire.PutRequest(key=own, value=b"v" * 200, lease=lease)
        request = wire.TxnRequest(compare=absent, success=[_op(put=put), _op(range=last)])
        assert txn(request, timeout=WITHIN).succeeded
        keys.append(own)

    def release() -> None:
        assert delete(wire.DeleteRangeRequest(key=keys.pop()), timeout=WITHIN).deleted == 1

    return Contender(acquire, release)


def _op(**kind: Any) -> Any:
    return wire.RequestOp(**{f"request_{name}": request for name, request in kind.items()})


class Peer:
    """A process of `tests.benchmarks.peer`, which acquires and releases on command, and reports the seconds that this
    took."""

    def __init__(self, library: str, port: int) -> None:
        command = [str(PEERS_PYTHON), "-I", str(Path(__file__).with_name("peer.py")), library, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        self.contender = Contender(lambda: self._ask("acquire"), lambda: self._ask("release"))

    def cycles(self, count: int) -> list[float]:
        return self._ask(str(count))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WITHIN)

    def _ask(self, word: str) -> list[float]:
        print(word, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        took: list[float] = json.loads(self._process.stdout.readline())
        return took


@contextmanager
def _contenders() -> Iterator[tuple[EtcdServer, dict[str, Contender], dict[str, Peer]]]:
    """Yield the server and its contenders. The server has one core, and all clients share another one."""
    with EtcdServer(synced=True) as server, ExitStack() as stack:
        pin(server.pid, apart=True)
        libraries = PEERS if PEERS_PYTHON.exists() else ()
        peers = {f"{library} Lock": Peer(library, server.port) for library in libraries}
        for peer in peers.values():
            stack.callback(peer.close)
        yield server, {RAW: raw(server), **sessions.faces(server.url, stack)}, peers


def _uncontended() -> dict[str, Any]:
    with _contenders() as (server, contenders, peers):
        samples = interleave(
            {name: each.cycle for name, each in contenders.items()},
            rounds=20,
            per_round=60,
            elsewhere={name: peer.cycles for name, peer in peers.items()},
            before_each_round=lambda: _compact(server),
        )
    return {"client and server on two cores": with_ratios(samples, (RAW, *peers))}


def _requests() -> dict[str, Any]:
    with _contenders() as (server, contenders, peers):
        others = {name: peer.contender for name, peer in peers.items()}
        return sessions.requests({**contenders, **others}, _counter(server))


def _counter(server: EtcdServer) -> sessions.Count:
    def count() -> Mapping[str, float]:
        asked = "grpc_server_started_total"
        renewals = server.metric(f'{asked}{{grpc_method="LeaseKeepAlive"')
        return {"renewals": renewals, "other requests": server.metric(asked) - renewals}

    return count


def _compact(server: EtcdServer) -> None:
    """Compact the server's history, as most servers do automatically. Deleted keys in the history make each read of a
    queue slower."""
    revision = int(server.post("kv/range", {"key": "IQ=="})["header"]["revision"])
    server.post("kv/compaction", {"revision": revision, "physical": True})


def _crowd() -> dict[str, Any]:
    libraries = PEERS if PEERS_PYTHON.exists() else ()
    commands = {how: ours(how) for how in (OURS, FAIR, ASYNCIO)} | {f"{each} Lock": _peer(each) for each in libraries}
    return crowds(lambda: EtcdServer(synced=True), commands, _counter)


def _peer(library: str) -> Callable[[EtcdServer], list[str]]:
    script = str(Path(__file__).with_name("peer.py"))
    return lambda server: [str(PEERS_PYTHON), "-I", script, library, str(server.port), str(SECONDS)]


def _history() -> dict[str, Any]:
    with EtcdServer(synced=True) as server, multilock.connect(server.url, ttl=sessions.TTL) as client:
        pin(server.pid, apart=True)
        cycles = {f"{count:,}": _cycle(client.lock(f"taken {count} times")) for count in HISTORY}
        for count, cycle in zip(HISTORY, cycles.values(), strict=True):
            for _ in range(count):
                cycle()
        samples = interleave(cycles, rounds=10, per_round=20)
    return {"acquisitions of the same lock since the last compaction": {n: asdict(each) for n, each in samples.items()}}


def _cycle(lock: multilock.DistributedLock) -> Callable[[], None]:
    def cycle() -> None:
        assert lock.acquire().release()

    return cycle


def _notices() -> dict[str, Any]:
    with EtcdServer(synced=True) as server:
        operator = EtcdTransport(Cluster([server.endpoint]), multilock.now)

        def row(name: str) -> Any:
            begin = f"multilock/{name}".encode()
            found, _ = operator.call(calls.RANGE, wire.RangeRequest(key=begin + b"/", range_end=begin + b"0"), WITHIN)
            return found.kvs[0]

        def delete(_: multilock.Client, name: str) -> float:
            return operator.call(calls.DELETE, wire.DeleteRangeRequest(key=row(name).key), WITHIN)[1]

        def revoke(_: multilock.Client, name: str) -> float:
            return operator.call(calls.REVOKE, wire.LeaseRevokeRequest(ID=row(name).lease), WITHIN)[1]

        try:
            return sessions.notices(server.url, {"the key is deleted": delete, "the lease is revoked": revoke})
        finally:
            operator.close()


def _held() -> dict[str, Any]:
    with EtcdServer(synced=True) as server:
        return sessions.held(server.url, _counter(server))


def _versions() -> dict[str, str]:
    with EtcdServer(synced=True) as server:
        etcd = str(server.post("maintenance/status", {})["version"])
    return {"grpcio": version("grpcio"), "protobuf": version("protobuf"), **versions_of(PEERS), "etcd": etcd}


BENCHMARKS: Mapping[str, Callable[[], object]] = {
    "uncontended": _uncontended,
    "requests": _requests,
    "crowd": _crowd,
    "notice": _notices,
    "held locks": _held,
    "with time": _history,
}

if __name__ == "__main__":
    tempfile.tempdir = str(MEMORY) if MEMORY.is_dir() else None
    publish("etcd", _versions, BENCHMARKS)
