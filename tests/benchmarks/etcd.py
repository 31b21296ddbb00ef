"""One lock, acquired and released again and again on one etcd: ours, the field's, and what lies below them.

python -m tests.benchmarks.etcd            prints a table and JSON; peers that are not installed are left out
pip install etcd3 'tenacity<8.3' 'protobuf<4' etcd3gw                                   (etcd3 needs those versions)

All in one process on one server, in turns, so that what disturbs one disturbs all. Medians.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import multilock
from multilock_etcd import messages as m
from multilock_etcd.transport import Cluster, Transport, calls
from tests.servers_etcd import EtcdServer

ROUNDS, CYCLES = 15, 60
NOTICES = 20
WITHIN = 5.0


def raw(server: EtcdServer) -> Callable[[], None]:
    """The floor: grpc alone, one transaction and one deletion with the same contents, each time with a fresh key."""
    import grpc

    channel = grpc.insecure_channel(server.endpoint)

    def stub(method: Any, request: Any) -> Any:
        return channel.unary_unary(
            method.path, request_serializer=request.SerializeToString, response_deserializer=method.answer.FromString
        )

    lease = stub(calls.GRANT, m.LeaseGrantRequest)(m.LeaseGrantRequest(TTL=60)).ID
    acquire, release = stub(calls.TXN, m.TxnRequest), stub(calls.DELETE, m.DeleteRangeRequest)
    last = m.RangeRequest(key=b"raw/", range_end=b"raw0", limit=2, sort_order=2, sort_target=2, keys_only=True)

    def cycle() -> None:
        own = b"raw/" + os.urandom(24).hex().encode()
        absent = [m.Compare(target=m.CREATE, key=own), m.Compare(target=m.CREATE, key=b"gone/" + own)]
        put = m.PutRequest(key=own, value=b"v" * 200, lease=lease)
        request = m.TxnRequest(compare=absent, success=[_op(put=put), _op(range=last)])
        assert acquire(request, timeout=WITHIN).succeeded
        assert release(m.DeleteRangeRequest(key=own), timeout=WITHIN).deleted == 1

    return cycle


def _op(**kind: Any) -> Any:
    return m.RequestOp(**{f"request_{name}": request for name, request in kind.items()})


def transport(server: EtcdServer) -> Callable[[], None]:
    """One linearized read through our transport: a round trip."""
    requests = Transport(Cluster([server.endpoint]), multilock.now)

    def cycle() -> None:
        requests.call(calls.TXN, m.TxnRequest(), WITHIN)

    return cycle


def ours(server: EtcdServer) -> Callable[[], None]:
    lock = multilock.connect(server.url, ttl=60).lock("bench")

    def cycle() -> None:
        assert lock.acquire().release()

    return cycle


def ours_asyncio(server: EtcdServer) -> Callable[[], None]:
    loop = asyncio.new_event_loop()
    lock = multilock.connect_async(server.url, ttl=60).lock("bench-asyncio")

    async def cycle() -> None:
        lease = await lock.acquire()
        await lease.release()

    return lambda: loop.run_until_complete(cycle())


def etcd3(server: EtcdServer) -> Callable[[], None]:
    lock = importlib.import_module("etcd3").client(port=server.port).lock("bench", ttl=60)

    def cycle() -> None:
        assert lock.acquire()
        assert lock.release()

    return cycle


def etcd3gw(server: EtcdServer) -> Callable[[], None]:
    lock = importlib.import_module("etcd3gw").client(port=server.port, api_path="/v3/").lock(id="bench", ttl=60)

    def cycle() -> None:
        assert lock.acquire()
        assert lock.release()

    return cycle


def notice(server: EtcdServer, what: str) -> float:
    """Seconds from sending the deletion of a held key, or the end of its lease, to the start of the callback."""
    operator = Transport(Cluster([server.endpoint]), multilock.now)
    client = multilock.connect(server.url, ttl=60)
    took: list[float] = []
    began: list[float] = []
    for number in range(NOTICES):
        lease = client.lock(f"notice-{number}", on_lost=lambda _: began.append(multilock.now())).acquire()
        time.sleep(0.35)  # its watch is armed a quarter of a second after the grant
        found, _ = operator.call(calls.RANGE, m.RangeRequest(key=b"multilock/", range_end=b"multilock0"), WITHIN)
        [row] = found.kvs
        if what == "key":
            _, sent_at = operator.call(calls.DELETE, m.DeleteRangeRequest(key=row.key), WITHIN)
        else:
            _, sent_at = operator.call(calls.REVOKE, m.LeaseRevokeRequest(ID=row.lease), WITHIN)
        assert lease.wait_lost(WITHIN)
        time.sleep(0.05)
        took.append(began[-1] - sent_at)
    client.close()
    return statistics.median(took)


def main() -> None:
    with EtcdServer() as server:
        notices = {what: round(notice(server, what) * 1e3, 2) for what in ("key", "lease")}
        cycles = {}
        for make in (raw, transport, ours, ours_asyncio, etcd3, etcd3gw):
            with suppress(ImportError):
                cycles[make.__name__] = make(server)
        for cycle in cycles.values():
            for _ in range(CYCLES):
                cycle()
        times: dict[str, list[float]] = {name: [] for name in cycles}
        for _ in range(ROUNDS):
            for name, cycle in cycles.items():
                for _ in range(CYCLES):
                    began = time.perf_counter()
                    cycle()
                    times[name].append(time.perf_counter() - began)
    medians = {name: round(statistics.median(each) * 1e3, 3) for name, each in times.items()}
    for name, milliseconds in medians.items():
        print(f"{name:14} {milliseconds:7.3f} ms   {milliseconds / medians['raw']:5.2f} × raw", file=sys.stderr)
    for what, milliseconds in notices.items():
        print(f"notice of a deleted {what}: {milliseconds:.2f} ms after it was sent", file=sys.stderr)
    print(json.dumps({"unit": "ms, median", "acquire and release": medians, "notice": notices}))


if __name__ == "__main__":
    main()
