"""One lock, acquired and released again and again on one ZooKeeper: ours, kazoo's, and what lies below them.

python -m tests.benchmarks.zookeeper       prints a table and JSON

All in one process on one server, in turns, so that what disturbs one disturbs all. Medians. The server does not wait
for its disk, which would hide everything else.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient

import multilock
from multilock_zookeeper import ZooKeeperBackend
from tests.benchmarks.measure import interleave
from tests.servers_zookeeper import ZooKeeperServer

NOTICES = 20
WITHIN = 5.0
TTL = 30.0


def raw(kazoo: Any) -> Callable[[], None]:
    """The floor: kazoo's own create and delete of such a node, which exclude nobody."""
    kazoo.ensure_path("/raw")

    def cycle() -> None:
        kazoo.delete(kazoo.create("/raw/node", b"v" * 200, ephemeral=True, sequence=True))

    return cycle


def kazoo_lock(kazoo: Any) -> Callable[[], None]:
    lock = kazoo.Lock("/kazoo")

    def cycle() -> None:
        assert lock.acquire()
        lock.release()

    return cycle


def ours(client: multilock.Client) -> Callable[[], None]:
    lock = client.lock("bench")

    def cycle() -> None:
        assert lock.acquire().release()

    return cycle


def ours_asyncio(server: ZooKeeperServer) -> Callable[[], None]:
    loop = asyncio.new_event_loop()
    lock = multilock.connect_async(server.url, ttl=TTL).lock("bench-asyncio")

    async def cycle() -> None:
        lease = await lock.acquire()
        await lease.release()

    return lambda: loop.run_until_complete(cycle())


def packets(server: ZooKeeperServer, cycle: Callable[[], None]) -> float:
    """Requests of one cycle, as the server counts them."""
    before = server.metric("zk_packets_received")
    for _ in range(100):
        cycle()
    return (server.metric("zk_packets_received") - before - 1) / 100


def notice(server: ZooKeeperServer, kazoo: Any, what: str) -> float:
    """Seconds from sending the deletion of a held node, or the end of its session, to the start of the callback."""
    client = multilock.connect(server.url, ttl=TTL)
    took: list[float] = []
    for _ in range(NOTICES):
        began: list[float] = []
        lease = client.lock("notice", on_lost=lambda _: began.append(multilock.now())).acquire(timeout=WITHIN)  # noqa: B023
        time.sleep(0.4)  # its watch is armed a quarter of a second after the grant
        if what == "node":
            [node] = kazoo.get_children("/multilock/notice")
            sent_at = multilock.now()
            kazoo.delete(f"/multilock/notice/{node}")
        else:
            thief = _same_session(server, client)
            sent_at = multilock.now()
            thief.stop()
        assert lease.wait_lost(WITHIN)
        while not began:
            time.sleep(0.001)
        took.append(began[0] - sent_at)
    client.close()
    return statistics.median(took)


def _same_session(server: ZooKeeperServer, client: multilock.Client) -> Any:
    """Somebody else with the session's id and password."""
    backend = client._kernel.backend
    assert isinstance(backend, ZooKeeperBackend)
    thief = KazooClient(server.endpoint, client_id=backend._transport._client.client_id)
    thief.start()
    return thief


def main() -> None:
    with ZooKeeperServer(forceSync="no") as server, multilock.connect(server.url, ttl=TTL) as client:
        kazoo = KazooClient(server.endpoint)
        kazoo.start()
        notices = {what: round(notice(server, kazoo, what) * 1e3, 2) for what in ("node", "session")}
        cycles = {
            "raw": raw(kazoo),
            "ours": ours(client),
            "ours_asyncio": ours_asyncio(server),
            "kazoo_lock": kazoo_lock(kazoo),
        }
        samples = interleave(cycles, rounds=15, per_round=60)
        requests = {name: packets(server, cycles[name]) for name in ("ours", "kazoo_lock")}
        kazoo.stop()
    medians = {name: round(each.median / 1e3, 3) for name, each in samples.items()}
    for name, milliseconds in medians.items():
        print(f"{name:14} {milliseconds:7.3f} ms   {milliseconds / medians['raw']:5.2f} × raw", file=sys.stderr)
    for what, milliseconds in notices.items():
        print(f"notice of a deleted {what}: {milliseconds:.2f} ms after it was sent", file=sys.stderr)
    told = {"acquire and release": medians, "requests": requests, "notice": notices}
    print(json.dumps({"unit": "ms, median", **told}))


if __name__ == "__main__":
    main()
