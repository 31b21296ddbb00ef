"""One lock, acquired and released again and again on one Consul: ours, the field's, and what lies below them.

python -m tests.benchmarks.consul            prints a table and JSON

All in one process on one server, in turns, so that what disturbs one disturbs all. Medians.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import consul

import multilock
from tests.benchmarks.measure import interleave
from tests.servers_consul import ConsulServer

ROUNDS, CYCLES = 15, 40
NOTICES = 20
WITHIN = 5.0
FLAGS = 0x2DDCCBC058A50C18
VALUE = base64.b64encode(b"v" * 200).decode()

Cycle = Callable[[], object]


def acquisition(key: str, session: str) -> list[dict[str, Any]]:
    """The transaction that our recipe sends."""
    value = {"Key": key, "Value": VALUE, "Flags": FLAGS}
    return [{"KV": {"Verb": "cas", "Index": 0, **value}}, {"KV": {"Verb": "lock", "Session": session, **value}}]


def release(key: str, session: str, index: int) -> list[dict[str, Any]]:
    return [
        {"KV": {"Verb": "check-session", "Key": key, "Session": session}},
        {"KV": {"Verb": "delete-cas", "Key": key, "Index": index}},
    ]


def new_session(server: ConsulServer) -> str:
    session: str = server.ask("PUT", "session/create", {"TTL": "3600s", "NodeChecks": []})["ID"]
    return session


def raw_http(server: ConsulServer) -> Cycle:
    """The floor: a socket and bytes, nothing looked at but the index that the release needs."""
    session = new_session(server)
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(operations: list[dict[str, Any]]) -> bytes:
        body = json.dumps(operations).encode()
        sock.sendall(b"PUT /v1/txn HTTP/1.1\r\nHost: consul\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        return answer

    def cycle() -> None:
        answer = ask(acquisition("raw/.lock", session))
        index = int(answer[answer.rindex(b'"ModifyIndex"') + 14 :].partition(b"}")[0])
        ask(release("raw/.lock", session, index))

    return cycle


def http_client(server: ConsulServer) -> Cycle:
    """The same two transactions over a kept-alive connection of the standard library."""
    session = new_session(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)

    def ask(operations: list[dict[str, Any]]) -> Any:
        connection.request("PUT", "/v1/txn", json.dumps(operations))
        return json.loads(connection.getresponse().read())

    def cycle() -> None:
        index = ask(acquisition("stdlib/.lock", session))["Results"][1]["KV"]["ModifyIndex"]
        ask(release("stdlib/.lock", session, index))

    return cycle


def py_consul(server: ConsulServer) -> Cycle:
    """The same two transactions through py-consul."""
    session = new_session(server)
    client = consul.Consul(port=server.port)

    def cycle() -> None:
        index = client.txn.put(acquisition("py-consul/.lock", session))["Results"][1]["KV"]["ModifyIndex"]
        client.txn.put(release("py-consul/.lock", session, index))

    return cycle


def py_consul_recipe(server: ConsulServer) -> Cycle:
    """What programs write with py-consul: the bare verb, which is no safe lock."""
    session = new_session(server)
    client = consul.Consul(port=server.port)

    def cycle() -> None:
        assert client.kv.put("recipe", "v" * 200, acquire=session)
        assert client.kv.put("recipe", "", release=session)

    return cycle


def ours(server: ConsulServer) -> Cycle:
    lock = multilock.connect(server.url, ttl=60).lock("bench")

    def cycle() -> None:
        assert lock.acquire().release()

    return cycle


def ours_asyncio(server: ConsulServer) -> Cycle:
    loop = asyncio.new_event_loop()
    lock = multilock.connect_async(server.url, ttl=60).lock("bench-asyncio")

    async def cycle() -> None:
        lease = await lock.acquire()
        await lease.release()

    return lambda: loop.run_until_complete(cycle())


def notice(server: ConsulServer, what: str) -> float:
    """Seconds from sending the deletion of a held key, or the end of its session, to the start of the callback."""
    client = multilock.connect(server.url, ttl=60, lock_delay=0)
    took: list[float] = []
    began: list[float] = []
    for number in range(NOTICES):
        key = f"multilock/notice-{number}/.lock"
        lease = client.lock(f"notice-{number}", on_lost=lambda _: began.append(multilock.now())).acquire()
        time.sleep(0.5)  # its watch is armed a quarter of a second after the grant
        entry = server.key(key)
        assert entry is not None
        sent_at = multilock.now()
        if what == "key":
            server.ask("DELETE", f"kv/{key}")
        else:
            server.ask("PUT", f"session/destroy/{entry['Session']}")
        assert lease.wait_lost(WITHIN)
        time.sleep(0.05)
        took.append(began[-1] - sent_at)
    client.close()
    return statistics.median(took)


def thousand(server: ConsulServer) -> dict[str, float]:
    """A thousand locks on one client: what a period of renewals costs."""
    client = multilock.connect(server.url, ttl=6)
    begun = time.perf_counter()
    for number in range(1000):
        client.lock(f"thousand-{number}").acquire()
    acquired = time.perf_counter() - begun
    before, used = server.requests(), time.process_time()
    time.sleep(20.0)  # ten periods
    used = time.process_time() - used
    made = server.requests() - before
    client.close()
    return {
        "seconds to acquire": round(acquired, 2),
        "renewals in ten periods": made["PUT session/renew"],
        "looks of 64 keys in ten periods": made["PUT txn"],
        "share of a core": round(used / 20, 4),
    }


def main() -> None:
    with ConsulServer() as server:
        notices = {what: round(notice(server, what) * 1e3, 2) for what in ("key", "session")}
        makers = (raw_http, http_client, py_consul, py_consul_recipe, ours, ours_asyncio)
        samples = interleave({make.__name__: make(server) for make in makers}, rounds=ROUNDS, per_round=CYCLES)
    with ConsulServer(log_level="debug") as server:
        kept = thousand(server)
    medians = {name: each.median for name, each in samples.items()}
    for name, microseconds in medians.items():
        ratio = microseconds / medians["raw_http"]
        print(f"{name:17} {microseconds:8.1f} µs   {ratio:5.2f} × raw HTTP", file=sys.stderr)
    for what, milliseconds in notices.items():
        print(f"notice of a deleted {what}: {milliseconds:.2f} ms after it was sent", file=sys.stderr)
    print(f"a thousand locks: {kept}", file=sys.stderr)
    result = {"unit": "µs, median", "acquire and release": medians, "notice, ms": notices, "a thousand locks": kept}
    print(json.dumps({"cores": os.cpu_count(), **result}))


if __name__ == "__main__":
    main()
