"""Compare the simulated Consul with a real one: statuses, replies, indexes, and which blocking queries are answered.

Both execute the same random requests, of all kinds that our backend sends. Their indexes differ, because a real server
also writes other entries to its log. So the test pairs each index of the real server with one of the model, and checks
that both have the same order.
"""

from __future__ import annotations

import json
import random
import re
import select
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from multilock_consul.keys import LOCK_FLAGS, SEMAPHORE_FLAGS
from multilock_consul.transactions import operation, whole_tree
from multilock_consul.wire import Reading, Response
from tests.servers_consul import ConsulServer
from tests.simulation.consul_server import ConsulServer as Model

CALLS, SEEDS = 200, 20
QUERIES = 6
WITHIN = 30.0  # seconds for a reply; a busy machine needs longer than usual
NOBODY = "00000000-0000-0000-0000-000000000000"
SESSION: dict[str, Any] = {"Name": "me", "TTL": "600000ms", "LockDelay": "0ms", "Behavior": "delete"}
SESSION |= {"NodeChecks": [], "ServiceChecks": []}
VERBS = ["cas", "lock", "lock", "unlock", "delete", "delete-cas"]
VERBS += ["get-tree", "check-session", "check-index", "check-not-exists"]
Request = tuple[str, str, dict[str, Any], Any]  # method, path, options and body


class Real:
    """A connection to the real server."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=WITHIN)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read(self) -> Response:
        reading = Reading()
        while (response := reading.feed(self.sock.recv(65536))) is None:
            pass
        return response

    def is_answered(self) -> bool:
        return bool(select.select([self.sock], [], [], 0)[0])

    def close(self) -> None:
        self.sock.close()


class Simulated:
    """A connection to the model, with the methods of `Real`."""

    process = None

    def __init__(self, model: Model) -> None:
        self._model, self._said = model, b""
        self._accept()

    def _accept(self) -> None:
        end = self._model.accept(self)
        assert end is not None
        self._end = end

    def deliver(self, data: bytes) -> None:
        self._said += data

    def reset(self) -> None:
        """Do nothing."""

    def send(self, data: bytes) -> None:
        self._model.received(self._end, data)

    def read(self) -> Response:
        said, self._said = self._said, b""
        response = Reading().feed(said)
        assert response is not None
        return response

    def is_answered(self) -> bool:
        return bool(self._said)

    def forget(self) -> None:
        """Forget the blocking query that waits on this connection."""
        self._model.closed(self._end)
        self._accept()


class Pairs:
    """Pairs of an index of the real server and the corresponding index of the model."""

    def __init__(self) -> None:
        self.real: dict[int, int] = {0: 0}
        self._model: dict[int, int] = {0: 0}

    def match(self, real: int, model: int) -> None:
        assert self._model.setdefault(real, model) == model
        assert self.real.setdefault(model, real) == real

    def are_in_order(self) -> bool:
        return [model for _, model in sorted(self._model.items())] == sorted(self.real)


def same(real: Any, model: Any, pairs: Pairs) -> None:
    if isinstance(real, dict):
        assert real.keys() == model.keys()
        for name, value in real.items():
            if name in ("CreateIndex", "ModifyIndex"):
                pairs.match(value, model[name])
            else:
                same(value, model[name], pairs)
    elif isinstance(real, list):
        assert len(real) == len(model), (real, model)
        for one, other in zip(real, model, strict=True):
            same(one, other, pairs)
    elif isinstance(real, str):
        assert re.sub(r"\d+ != \d+", "", real) == re.sub(r"\d+ != \d+", "", model)
    else:
        assert real == model


def same_reply(real: Response, model: Response, pairs: Pairs) -> None:
    assert real.status == model.status, (real, model)
    if "x-consul-index" in model.headers:
        pairs.match(int(real.headers["x-consul-index"]), int(model.headers["x-consul-index"]))
    if not real.headers.get("content-type", "").startswith("application/json"):
        assert real.body == model.body
        return
    said, ours = real.json(), model.json()
    if isinstance(said, dict) and "Results" in said:
        said = {"Results": said["Results"] or None, "Errors": said["Errors"]}
    same(said, ours, pairs)


def encoded(request: Request, real: Pairs | None) -> bytes:
    """Return the bytes of a request. Its indexes are those of the model, and are translated for the real server."""
    method, path, options, body = request

    def index(number: int) -> int:
        return number if real is None else real.real[number]

    options = {name: index(value) if name == "index" else value for name, value in options.items()}
    if isinstance(body, list):
        body = [
            {"KV": {name: index(value) if name == "Index" else value for name, value in step["KV"].items()}}
            for step in body
        ]
    text = json.dumps(body) if body else ""
    target = f"/v1/{path}?{urlencode(options)}" if options else f"/v1/{path}"
    return f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


class Calls:
    """Random requests for the keys below one prefix."""

    def __init__(self, chance: random.Random, prefix: str, model: Model, pairs: Pairs) -> None:
        self.chance, self.prefix, self.model, self.pairs = chance, prefix, model, pairs
        self.sessions = [NOBODY]

    def name(self) -> str:
        return f"{self.prefix}/{self.chance.choice(['a', 'a', 'b'])}/"

    def session(self, key: str = "") -> str:
        """Return a session, often the one that locks this key or one of the newest."""
        entry = self.model.store.keys.get(key)
        if entry and entry.session and self.chance.random() < 0.7:
            return entry.session
        return self.chance.choice(self.sessions[-3:] if self.chance.random() < 0.9 else self.sessions)

    def index(self, key: str) -> int:
        """Return the index of a key, or another index that both servers know."""
        entry = self.model.store.keys.get(key)
        known = [entry.modified] * 20 if entry else [0] * 20
        return self.chance.choice(
            [each for each in [*known, *list(self.pairs.real)[-3:], 0] if each in self.pairs.real]
        )

    def value(self) -> str:
        return b64encode(self.chance.choice([b"one", b"two"])).decode()

    def key(self) -> str:
        if self.chance.random() < 0.5 and (keys := list(self.model.store.keys)):
            return self.chance.choice(keys)
        name = self.name()
        return name + self.chance.choice([".lock", f"!r/c{self.chance.randrange(3)}.{self.session()}", self.session()])

    def step(self) -> dict[str, Any]:
        verb = self.chance.choice(VERBS)
        key = self.key()
        if verb in ("cas", "delete-cas", "check-index"):
            return operation(verb, key, Index=self.index(key), **self.content(verb == "cas"))
        if verb in ("lock", "unlock", "check-session"):
            return operation(verb, key, Session=self.session(key), **self.content(verb != "check-session"))
        if verb == "get-tree":
            key = key[: self.chance.randrange(len(self.prefix), len(key) + 1)]
        return operation(verb, key)

    def content(self, wanted: bool) -> dict[str, Any]:
        if not wanted or self.chance.random() < 0.2:
            return {}
        return {"Value": self.value(), "Flags": self.chance.choice([0, LOCK_FLAGS])}

    def steps(self) -> list[dict[str, Any]]:
        """Return a transaction of our backend, or a random one."""
        name, other = self.name(), self.session()
        lock = f"{name}.lock"
        session = self.session(lock)
        permit = f"{name}{session}"
        reader = f"{name}!r/c{self.chance.randrange(3)}.{session}"
        read = self.index(reader)
        value = {"Value": self.value(), "Flags": LOCK_FLAGS}
        absent = operation("cas", lock, Index=0, Value="", Flags=LOCK_FLAGS)
        still = operation("check-index", lock, Index=self.index(lock))
        holders = b64encode(json.dumps({"Limit": 2, "Holders": {session: True}}).encode()).decode()
        listed = operation("cas", lock, Index=self.index(lock), Value=holders, Flags=SEMAPHORE_FLAGS)
        door = [operation("lock", lock, Session=session), operation("delete", lock)]
        shared = operation("lock", permit, Session=session, Value=self.value(), Flags=SEMAPHORE_FLAGS)
        take = operation("lock", lock, Session=session, **value)
        owned = operation("check-session", lock, Session=session)
        leave = [operation("check-session", permit, Session=session), operation("delete", permit)]
        tree = whole_tree(f"{name}!r/")
        shapes = [
            [absent, take, *tree],
            [absent, take, *tree],
            [still, take, *tree],
            [still, operation("delete", lock), absent, take, *tree],
            [absent, *door, operation("lock", reader, Session=session, **value)],
            [owned, operation("delete-cas", lock, Index=self.index(lock))],
            [operation("check-session", reader, Session=session), operation("delete-cas", reader, Index=read)],
            [still, operation("unlock", lock, Session=session, **value), take],
            [owned, still, operation("unlock", lock, Session=session, **value),
             operation("lock", lock, Session=other, **value)],
            [still, operation("lock", reader, Session=other), operation("delete", reader)],
            [absent, *door, shared, operation("cas", lock, Index=0, Value=holders, Flags=SEMAPHORE_FLAGS), *tree],
            [shared, listed, *tree],
            [*leave, listed],
            [*leave, still, operation("delete", lock)],
            [*leave, operation("lock", f"{name}{other}", Session=other, **value), listed],
            [still, *tree],
            [operation("get-tree", lock), operation("get-tree", reader), operation("get-tree", permit)],
            [operation("check-index", each, Index=0) for each in (lock, f"{name}!", f"{name}!r/!")],
            [self.step() for _ in range(self.chance.randrange(1, 5))],
            [self.step() for _ in range(self.chance.randrange(1, 5))],
        ]  # fmt: skip
        return self.chance.choice(shapes)

    def read(self) -> Request:
        """Return a read that can also wait for a change."""
        kind, name = self.chance.randrange(4), self.name()
        options: dict[str, Any] = {"consistent": ""}
        if kind == 0:
            return "GET", f"session/info/{self.session()}", options, None
        if kind == 1:
            return "GET", f"kv/{name}", {"recurse": "", **options}, None
        if kind == 2:
            folder = self.chance.choice([name, f"{name}!r/", f"{self.prefix}/"])
            return "GET", f"kv/{folder}", {"keys": "", "separator": "/", **options}, None
        return "GET", f"kv/{self.key()}", options, None

    def some(self) -> Request:
        what = self.chance.random()
        if what < 0.1:
            delay = self.chance.choice(["0ms", "0ms", "0ms", "60000ms"])
            body = {
                "Name": "multilock me",
                "TTL": "600000ms",
                "LockDelay": delay,
                "NodeChecks": [],
                "ServiceChecks": [],
            }
            return "PUT", "session/create", {}, {**body, "Behavior": self.chance.choice(["delete", "release"])}
        if what < 0.12:
            return "PUT", "session/create", {}, {**SESSION, "TTL": "500ms"}
        if what < 0.2:
            return "PUT", f"session/{self.chance.choice(['renew', 'destroy', 'destroy'])}/{self.session()}", {}, None
        if what < 0.4:
            return self.read()
        steps = self.steps()
        looks = all(step["KV"]["Verb"] in ("get-tree", "check-index", "check-not-exists") for step in steps)
        return "PUT", "txn", {"consistent": ""} if looks else {}, steps


@pytest.fixture(scope="module")
def server() -> Iterator[ConsulServer]:
    with ConsulServer(disable_coordinates=True) as server:
        yield server


class Compared:
    """A real server and the model, which get the same requests."""

    def __init__(self, server: ConsulServer, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pairs = Pairs()
        self.model = Model("model", None, lambda: 0, seed)
        self.model.ttl_min = 1.0
        self.real, self.simulated = Real(server.port), Simulated(self.model)
        self.calls = Calls(self.chance, f"m{seed}", self.model, self.pairs)
        self.waiting = [(Real(server.port), Simulated(self.model)) for _ in range(QUERIES)]
        self.open: dict[int, Request] = {}

    def close(self) -> None:
        for real in (self.real, *(real for real, _ in self.waiting)):
            real.close()

    def ask(self, request: Request) -> tuple[Response, Response]:
        self.real.send(encoded(request, self.pairs))
        real = self.real.read()
        if request[1] == "session/create" and real.status == 200:
            made = real.json()["ID"]
            self.model.make_id = lambda: made
            self.calls.sessions.append(made)
        self.simulated.send(encoded(request, None))
        model = self.simulated.read()
        same_reply(real, model, self.pairs)
        return real, model

    def wait(self, number: int) -> None:
        """Open a blocking query that waits for a change after the present state."""
        method, path, options, _ = request = self.calls.read()
        _, model = self.ask(request)
        if model.body == b"[]":  # a missing session, for which our backend does not wait
            return
        query = method, path, {**options, "index": int(model.headers["x-consul-index"]), "wait": "600s"}, None
        real, simulated = self.waiting[number]
        real.send(encoded(query, self.pairs))
        simulated.send(encoded(query, None))
        self.open[number] = request

    def compare_pushes(self) -> None:
        """Compare the replies to blocking queries. The real server may answer more queries: if it reads a query only
        after the next request, this request has already changed the index. The extra replies must be true, too."""
        for number, request in list(self.open.items()):
            real, model = self.waiting[number]
            if model.is_answered():
                same_reply(real.read(), model.read(), self.pairs)
                del self.open[number]
            elif real.is_answered():
                model.forget()
                self.simulated.send(encoded(request, None))
                same_reply(real.read(), self.simulated.read(), self.pairs)
                del self.open[number]


@pytest.fixture
def both(server: ConsulServer, request: pytest.FixtureRequest) -> Iterator[Compared]:
    both = Compared(server, request.param)
    yield both
    both.close()


@pytest.mark.slow
@pytest.mark.parametrize("both", range(SEEDS), indirect=True)
def test_the_model_of_consul_replies_and_pushes_as_a_real_server_does(both: Compared) -> None:
    both.ask(("PUT", "session/create", {}, SESSION))
    both.ask(("PUT", "txn", {}, [operation("cas", f"{both.calls.prefix}/a", Index=0)]))
    for _ in range(CALLS):
        free = [number for number in range(QUERIES) if number not in both.open]
        if free and both.chance.random() < 0.2:
            both.wait(free[0])
        both.ask(both.calls.some())
        both.compare_pushes()
    assert both.pairs.are_in_order()


def ask(server: ConsulServer, method: str, path: str, body: object = None) -> Any:
    """Send a request to the real server. Return the reply, even if it is an error."""
    connection = Real(server.port)
    connection.send(encoded((method, path, {}, body), None))
    response = connection.read()
    connection.close()
    return response.json() if response.body else None


def locked(server: ConsulServer, key: str, ttl: str, behavior: str = "delete") -> str:
    """Lock a key in a new session with a long lock delay, and return the session."""
    wanted = {**SESSION, "TTL": ttl, "LockDelay": "60000ms", "Behavior": behavior}
    session: str = ask(server, "PUT", "session/create", wanted)["ID"]
    assert lock(server, key, session) is None
    return session


def lock(server: ConsulServer, key: str, session: str) -> Any:
    """Lock a key. Return the errors of the refusal, or None."""
    return ask(server, "PUT", "txn", [operation("lock", key, Session=session)])["Errors"]


@pytest.mark.slow
def test_a_session_of_a_real_server_ends_after_its_ttl_and_leaves_a_lock_delay(server: ConsulServer) -> None:
    """The model lets a session live for one to two ttls."""
    deleted, released = (locked(server, f"ttl/{each}", "1000ms", each) for each in ("delete", "release"))
    began = time.monotonic()
    for session in (deleted, released):
        ask(server, "PUT", f"session/renew/{session}")
    for session in (deleted, released):
        while ask(server, "GET", f"session/info/{session}?consistent"):
            assert time.monotonic() < began + WITHIN
        assert time.monotonic() > began + 1.0
    assert ask(server, "GET", "kv/ttl/delete") is None
    [key] = ask(server, "GET", "kv/ttl/release")
    assert "Session" not in key
    other = locked(server, "ttl/other", "600s")
    for each in ("delete", "release"):
        [refusal] = lock(server, f"ttl/{each}", other)
        assert "due to lock delay" in refusal["What"]


@pytest.mark.slow
def test_a_real_server_keeps_sessions_keys_and_lock_delays_over_a_restart() -> None:
    """The model begins each lock delay again, like a server that reads the end of the session in its log."""
    with ConsulServer(keep=True) as server:
        session, gone = (locked(server, key, "600s") for key in ("kept", "delayed"))
        before = ask(server, "GET", "kv/kept")
        ask(server, "PUT", f"session/destroy/{gone}")
        server.restart()
        assert ask(server, "GET", "kv/kept?consistent") == before
        assert ask(server, "PUT", f"session/renew/{session}")[0]["ID"] == session
        [refusal] = lock(server, "delayed", session)
        assert "due to lock delay" in refusal["What"]
