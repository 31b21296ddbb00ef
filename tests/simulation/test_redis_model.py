"""Compare the simulated Redis with a real one: replies and notifications must be the same, byte for byte.

Both servers execute the same random calls, of all scripts and of operators. The clock of the real server is stopped for
each call, so both have the same time.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pytest

from multilock_redis import transactions
from multilock_redis.acquire_release import RESTS
from multilock_redis.transactions import Script
from multilock_redis.wire import pack
from tests.faults.clock import ClockedRedis, compiled
from tests.simulation.redis_server import INVALIDATED, Client
from tests.simulation.redis_server import RedisServer as Model

CALLS, SEEDS = 150, 40
CLIENTS = [f"{number:016x}" for number in range(3)]
NAMES = ["a", "b"]
Word = bytes | str | int


TRACKED = "MGET, tracked"


def packed(words: Sequence[Word]) -> bytes:
    if list(words[:1]) == [TRACKED]:
        return pack("CLIENT", "CACHING", "YES") + pack("MGET", *words[1:])
    return pack(*words) if words else b""


class Real:
    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self._pong = b"+PONG\r\n"
        self._buffer = b""

    def send(self, *words: Word) -> None:
        """Send a PING, and before it the command ``words``, if given."""
        if words[:1] == ("SUBSCRIBE",):
            self._pong = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
        self._sock.sendall(packed(words) + pack("PING"))

    def read(self) -> bytes:
        """Return the bytes that arrive before the reply to the PING. A push may follow that reply at once."""
        while self._pong not in self._buffer:
            self._buffer += self._sock.recv(65536)
        said, _, self._buffer = self._buffer.partition(self._pong)
        return said

    def close(self) -> None:
        self._sock.close()


class Simulated:
    """A connection to the model, with the methods of `Real`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._said = b""
        end = model.accept(self)
        assert isinstance(end, Client)
        self._end = end

    def deliver(self, data: bytes) -> None:
        self._said += data

    def reset(self) -> None:
        """Do nothing."""

    def send(self, *words: Word) -> None:
        if words:
            self._model.received(self._end, packed(words))

    def read(self) -> bytes:
        said, self._said = self._said, b""
        return said


class Connection(Protocol):
    def send(self, *words: Word) -> None: ...

    def read(self) -> bytes: ...


def ask(connection: Connection, *words: Word) -> bytes:
    connection.send(*words)
    return connection.read()


class Side:
    """The connections to one of the two servers: for each client one that is subscribed, and one that sends commands
    and tracks keys."""

    def __init__(self, subscribed: Sequence[Connection], commands: Sequence[Connection]) -> None:
        self.subscribed, self.commands = subscribed, commands
        for client, listener, tracking in zip(CLIENTS, subscribed, commands, strict=True):
            number = int(ask(listener, "CLIENT", "ID").strip(b":\r\n"))
            ask(listener, "SUBSCRIBE", INVALIDATED)
            ask(listener, "SUBSCRIBE", f"multilock:wake:{client}")
            ask(tracking, "CLIENT", "TRACKING", "ON", "REDIRECT", number, "OPTIN", "NOLOOP")

    def pushes(self) -> list[bytes]:
        for listener in self.subscribed:
            listener.send()
        return [listener.read() for listener in self.subscribed]


def keys_of(name: str, claim: str = "") -> list[Word]:
    lock = f"ml/{name}"
    keys: list[Word] = [lock, *(f"{{{lock}}}:{part}" for part in ("queue", "live", "token", "holders"))]
    return [*keys, f"{{{lock}}}:gone:{claim}"] if claim else keys


def call(script: Script, keys: list[Word], *arguments: Word) -> list[Word]:
    return ["EVALSHA", script._sha, len(keys), *keys, *arguments]


def some_call(chance: random.Random, owners: list[str], micros: int) -> list[Word]:
    name, owner = chance.choice(NAMES), chance.choice(owners)
    keys = keys_of(name, owner.partition("@")[0])
    ttl, wait = chance.choice([40, 300, 2000]), chance.choice([0, 1000, 3000, 3000, -1000])
    echo = chance.choice(["", f"{micros}/{abs(wait)}"]) if wait else ""
    mode, tomb = chance.choice(["r", "r", "p2", "p3"]), chance.choice([0, 0, 60_000])
    proposed = micros + chance.randrange(-2_000_000, 2_000_000)
    lock, token, holders = keys[0], keys[3], keys[4]
    calls: list[Callable[[], list[Word]]] = [
        lambda: call(transactions.ACQUIRE, keys, owner, ttl, wait, chance.choice([0, 1]), echo),
        lambda: call(transactions.ACQUIRE, keys, owner, ttl, 3000, 0, echo),
        lambda: call(transactions.SHARE, keys, owner, ttl, wait, mode, echo),
        lambda: call(transactions.SHARE, keys, owner, ttl, 3000, "r", echo),
        lambda: call(transactions.RELEASE, keys, owner, tomb),
        lambda: call(transactions.RELEASE, keys, owner, tomb),
        lambda: call(transactions.REST, keys, owner, tomb, ttl, RESTS),
        lambda: call(transactions.FORCE, keys[:5]),
        lambda: call(transactions.INSPECT, keys[:5], chance.choice([1, 100])),
        lambda: call(transactions.STAND, keys, owner, ttl, wait, chance.randrange(5), echo, micros, 1000, proposed),
        lambda: call(transactions.GIVE, keys, owner, tomb, proposed),
        lambda: call(transactions.RENEW, [lock, token] * 2, owner, ttl, chance.choice(owners), ttl),
        lambda: call(transactions.RENEW_SHARED, [lock, token, holders], owner, ttl),
        lambda: ["MGET", *(f"ml/{each}" for each in NAMES)],
        lambda: [TRACKED, *(f"ml/{each}" for each in NAMES)],
        lambda: ["PTTL", chance.choice(keys)],
        lambda: chance.choice(OPERATORS)(chance.choice(keys)),
    ]
    return chance.choice(calls)()


OPERATORS: list[Callable[[Word], list[Word]]] = [
    lambda key: ["DEL", key],
    lambda key: ["SET", key, "foreign"],
    lambda key: ["SET", key, "foreign", "PX", 500],
    lambda key: ["HSET", key, "field", "value"],
    lambda key: ["PEXPIRE", key, 100],
    lambda key: ["ZADD", key, 5, "member"],
    lambda key: ["EVALSHA", "0" * 40, 1, key],
]


def without_text(reply: bytes) -> bytes:
    """Return the reply, or only the first word of an error."""
    return reply.split()[0] if reply.startswith(b"-") else reply


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClockedRedis]:
    folder = tmp_path_factory.mktemp("clock")
    with ClockedRedis(compiled(folder), folder / "clock", "--enable-debug-command", "yes") as server:
        server.hold(1_700_000_000_000_000)
        connection = Real(server.port)
        assert ask(connection, "DEBUG", "SET-ACTIVE-EXPIRE", 0) == b"+OK\r\n"
        connection.close()
        yield server


@pytest.mark.slow
@pytest.mark.timeout(400)  # a busy machine takes ten times as long
def test_the_model_replies_and_pushes_as_redis_does(server: ClockedRedis) -> None:
    scripts = [each for each in vars(transactions).values() if isinstance(each, Script)]
    assert len(scripts) == 10, "a new script belongs into some_call()"
    for seed in range(SEEDS):
        chance = random.Random(seed)
        micros = 1_700_000_000_000_000
        server.hold(micros)
        connection = Real(server.port)
        ask(connection, "FLUSHALL")
        connection.close()
        model = Model("model", None, lambda: micros, seed)  # noqa: B023
        connections = [Real(server.port) for _ in range(6)]
        real = Side(connections[:3], connections[3:])
        simulated = Side(*([Simulated(model) for _ in CLIENTS] for _ in range(2)))
        for script in scripts:
            text = script.load.split(b"\r\n", 6)[6].removesuffix(b"\r\n")
            for side in (real, simulated):
                ask(side.commands[0], "SCRIPT", "LOAD", text)
        owners = [f"{client}.{chance.randbytes(16).hex()}@lock:host:1:me:2" for client in CLIENTS for _ in range(3)]
        for number in range(CALLS):
            micros += chance.choice([0, 17, 1000, 45_000, 310_000, 1_100_000, 3_100_000, -1_500_000])
            server.hold(micros)
            words, at = some_call(chance, owners, micros), chance.randrange(3)
            expected = without_text(ask(real.commands[at], *words))
            where = f"seed {seed}, call {number} of client {at}: {words}"
            assert without_text(ask(simulated.commands[at], *words)) == expected, where
            assert simulated.pushes() == real.pushes(), where
        for connection in connections:
            connection.close()
