"""Benchmarks of ZooKeeper, run by ``python -m tests.benchmarks.zookeeper``. They compare multilock's lock with kazoo's
lock and with plain requests.

All contenders use one server. It does not wait for its disk, because writing to the disk would take so long that no
other difference would show.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

from kazoo.client import KazooClient

import multilock
from multilock_zookeeper import ZooKeeperBackend
from tests.benchmarks import sessions
from tests.benchmarks.crowd import ASYNCIO, FAIR, KAZOO, OURS, crowds, ours
from tests.benchmarks.measure import interleave, pin
from tests.benchmarks.report import publish, with_ratios
from tests.benchmarks.sessions import Contender
from tests.servers_zookeeper import ZooKeeperServer

RAW = "kazoo's create and delete of a node"


def raw(kazoo: Any) -> Contender:
    """Measure the lower limit for any client: create and delete a node of the same kind, without a lock."""
    kazoo.ensure_path("/raw")
    nodes: list[str] = []
    return Contender(
        lambda: nodes.append(kazoo.create("/raw/node", b"v" * 200, ephemeral=True, sequence=True)),
        lambda: kazoo.delete(nodes.pop()),
    )


def kazoo_lock(kazoo: Any) -> Contender:
    lock = kazoo.Lock("/kazoo")

    def acquire() -> None:
        assert lock.acquire()

    return Contender(acquire, lock.release)


@contextmanager
def _server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer() as server:
        yield server


@contextmanager
def _kazoo(server: ZooKeeperServer) -> Iterator[Any]:
    kazoo = KazooClient(server.endpoint)
    kazoo.start()
    try:
        yield kazoo
    finally:
        kazoo.stop()
        kazoo.close()


@contextmanager
def _contenders() -> Iterator[tuple[ZooKeeperServer, dict[str, Contender]]]:
    with _server() as server, ExitStack() as stack:
        pin(server.pid, apart=True)
        kazoo = stack.enter_context(_kazoo(server))
        yield server, {RAW: raw(kazoo), **sessions.faces(server.url, stack), KAZOO: kazoo_lock(kazoo)}


def _uncontended() -> dict[str, Any]:
    with _contenders() as (_, contenders):
        samples = interleave({name: each.cycle for name, each in contenders.items()}, rounds=15, per_round=60)
    return {"client and server on two cores": with_ratios(samples, (RAW, KAZOO))}


def _requests() -> dict[str, Any]:
    with _contenders() as (server, contenders):
        return sessions.requests(contenders, _counter(server))


def _counter(server: ZooKeeperServer) -> sessions.Count:
    """Count packets, including pings, but without the request that reads the count."""
    asked = itertools.count()
    return lambda: {"packets": server.metric("zk_packets_received") - next(asked)}


def _crowd() -> dict[str, Any]:
    return crowds(ZooKeeperServer, {how: ours(how) for how in (OURS, FAIR, ASYNCIO, KAZOO)}, _counter)


def _notices() -> dict[str, Any]:
    with _server() as server, _kazoo(server) as kazoo:

        def delete(_: multilock.Client, name: str) -> float:
            [node] = kazoo.get_children(f"/multilock/{name}")
            sent_at = multilock.now()
            kazoo.delete(f"/multilock/{name}/{node}")
            return sent_at

        def end_session(client: multilock.Client, _: str) -> float:
            thief = _same_session(server, client)
            sent_at = multilock.now()
            thief.stop()
            thief.close()
            return sent_at

        return sessions.notices(
            server.url, {"the node is deleted": delete, "the session is closed by others": end_session}
        )


def _same_session(server: ZooKeeperServer, client: multilock.Client) -> Any:
    """Return another client that uses the id and password of this client's session."""
    backend = client._kernel.backend
    assert isinstance(backend, ZooKeeperBackend)
    thief = KazooClient(server.endpoint, client_id=backend._transport._client.client_id)
    thief.start()
    return thief


def _held() -> dict[str, Any]:
    with _server() as server:
        return sessions.held(server.url, _counter(server))


def _versions() -> dict[str, str]:
    with _server() as server:
        said = re.search(r"version: ([\d.]+)", server.ask("srvr"))
    assert said is not None
    return {"kazoo": version("kazoo"), "ZooKeeper": said[1]}


BENCHMARKS: Mapping[str, Callable[[], object]] = {
    "uncontended": _uncontended,
    "requests": _requests,
    "crowd": _crowd,
    "notice": _notices,
    "held locks": _held,
}

if __name__ == "__main__":
    # The measurement of notices ends sessions, and kazoo would log each end.
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    publish("zookeeper", _versions, BENCHMARKS)
