"""Benchmarks of Consul. They compare multilock's lock with locks of other libraries and with plain requests, all on one
server in dev mode.

Run it with ``python -m tests.benchmarks.consul``.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import consul

import multilock
from tests.benchmarks import sessions
from tests.benchmarks.measure import interleave, pin
from tests.benchmarks.report import publish, with_ratios
from tests.benchmarks.sessions import WITHIN, Contender
from tests.servers_consul import ConsulServer

RAW = "raw HTTP, prepared bytes"
STDLIB = "http.client, the same two transactions"
PY_CONSUL = "py-consul, the same two transactions"
RECIPE = "py-consul, bare acquire and release"
FLAGS = 0x2DDCCBC058A50C18
VALUE = base64.b64encode(b"v" * 200).decode()
LOOK = "GET status/leader"  # the request that `_counter` sends


def _acquisition(key: str, session: str) -> list[dict[str, Any]]:
    """Return the transaction that multilock sends to acquire a lock."""
    value = {"Key": key, "Value": VALUE, "Flags": FLAGS}
    return [{"KV": {"Verb": "cas", "Index": 0, **value}}, {"KV": {"Verb": "lock", "Session": session, **value}}]


def _release(key: str, session: str, index: int) -> list[dict[str, Any]]:
    return [
        {"KV": {"Verb": "check-session", "Key": key, "Session": session}},
        {"KV": {"Verb": "delete-cas", "Key": key, "Index": index}},
    ]


def _new_session(server: ConsulServer) -> str:
    session: str = server.ask("PUT", "session/create", {"TTL": "3600s", "NodeChecks": []})["ID"]
    return session


def _transactions(server: ConsulServer, key: str, ask: Callable[[list[dict[str, Any]]], Any]) -> Contender:
    """Return a contender that sends multilock's transactions by ``ask``, which returns the parsed reply."""
    session = _new_session(server)
    indexes: list[int] = []

    def acquire() -> None:
        indexes.append(ask(_acquisition(key, session))["Results"][1]["KV"]["ModifyIndex"])

    def release() -> None:
        ask(_release(key, session, indexes.pop()))

    return Contender(acquire, release)


def raw_http(server: ConsulServer) -> Contender:
    """Measure the lower limit for any client: bytes on a plain socket. Only the index of a reply is parsed, because the
    release needs it."""
    session = _new_session(server)
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answers: list[bytes] = []

    def ask(operations: list[dict[str, Any]]) -> bytes:
        body = json.dumps(operations).encode()
        sock.sendall(b"PUT /v1/txn HTTP/1.1\r\nHost: consul\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        return answer

    def acquire() -> None:
        answers.append(ask(_acquisition("raw/.lock", session)))

    def release() -> None:
        answer = answers.pop()
        index = int(answer[answer.rindex(b'"ModifyIndex"') + 14 :].partition(b"}")[0])
        ask(_release("raw/.lock", session, index))

    return Contender(acquire, release)


def http_client(server: ConsulServer) -> Contender:
    """Send multilock's transactions over a kept-alive connection of the standard library."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)

    def ask(operations: list[dict[str, Any]]) -> Any:
        connection.request("PUT", "/v1/txn", json.dumps(operations))
        return json.loads(connection.getresponse().read())

    return _transactions(server, "stdlib/.lock", ask)


def py_consul(server: ConsulServer) -> Contender:
    return _transactions(server, "py-consul/.lock", consul.Consul(port=server.port).txn.put)


def py_consul_recipe(server: ConsulServer) -> Contender:
    """The lock that programs usually write with py-consul. It uses only the verb ``acquire``, which does not make a
    safe lock."""
    session = _new_session(server)
    client = consul.Consul(port=server.port)

    def acquire() -> None:
        assert client.kv.put("recipe", "v" * 200, acquire=session)

    def release() -> None:
        assert client.kv.put("recipe", "", release=session)

    return Contender(acquire, release)


def _contenders(server: ConsulServer, stack: ExitStack) -> dict[str, Contender]:
    return {
        RAW: raw_http(server),
        STDLIB: http_client(server),
        **sessions.faces(server.url, stack),
        PY_CONSUL: py_consul(server),
        RECIPE: py_consul_recipe(server),
    }


def _uncontended() -> dict[str, Any]:
    with ConsulServer() as server, ExitStack() as stack:
        pin(server.pid, apart=True)
        cycles = {name: each.cycle for name, each in _contenders(server, stack).items()}
        samples = interleave(cycles, rounds=15, per_round=40)
    return {"client and server on two cores": with_ratios(samples, (RAW, PY_CONSUL, RECIPE))}


def _requests() -> dict[str, Any]:
    with ConsulServer(log_level="debug") as server, ExitStack() as stack:
        return sessions.requests(_contenders(server, stack), _counter(server))


def _counter(server: ConsulServer) -> sessions.Count:
    """Count requests in the server's log. A request appears in the log a moment after its reply, so each count sends a
    request of its own and waits for its line."""
    asked = itertools.count(1)

    def count() -> Mapping[str, float]:
        number = next(asked)
        server.ask("GET", "status/leader")
        until = time.monotonic() + WITHIN
        while (made := server.requests())[LOOK] < number:
            assert time.monotonic() < until, "the log does not tell of our request"
            time.sleep(0.001)
        renewals = made["PUT session/renew"]
        return {"renewals": renewals, "other requests": made.total() - renewals - number}

    return count


def _notices() -> dict[str, Any]:
    with ConsulServer() as server:

        def delete(_: multilock.Client, name: str) -> float:
            sent_at = multilock.now()
            server.ask("DELETE", f"kv/multilock/{name}/.lock")
            return sent_at

        def destroy(_: multilock.Client, name: str) -> float:
            entry = server.key(f"multilock/{name}/.lock")
            assert entry is not None
            sent_at = multilock.now()
            server.ask("PUT", f"session/destroy/{entry['Session']}")
            return sent_at

        ends = {"the key is deleted": delete, "the session is destroyed": destroy}
        return sessions.notices(server.url, ends, lock_delay=0)


def _held() -> dict[str, Any]:
    with ConsulServer(log_level="debug") as server:
        return sessions.held(server.url, _counter(server))


def _versions() -> dict[str, str]:
    with ConsulServer() as server:
        return {"py-consul": version("py-consul"), "Consul": server.ask("GET", "agent/self")["Config"]["Version"]}


BENCHMARKS: Mapping[str, Callable[[], object]] = {
    "uncontended": _uncontended,
    "requests": _requests,
    "notice": _notices,
    "held locks": _held,
}

if __name__ == "__main__":
    publish("consul", _versions, BENCHMARKS)
