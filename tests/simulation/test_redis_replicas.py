"""Compare the simulated replicas and Sentinels with real ones, for the commands that multilock sends.

The simulated servers run in virtual time. The clocks of the real servers are stopped for each command.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from multilock_redis import transactions
from multilock_redis.transactions import Script
from multilock_redis.wire import Incomplete, pack, parse
from tests.backends.redis.kit import eventually
from tests.faults.clock import ClockedRedis, compiled
from tests.servers_sentinel import NAME, Guarded
from tests.simulation import redis_replicas
from tests.simulation.redis_replicas import PORT, Replicating
from tests.simulation.redis_server import Client
from tests.simulation.scheduler import Simulation
from tests.simulation.test_redis_model import CLIENTS, TRACKED, Real, Word, ask, packed, some_call, without_text

CALLS, SEEDS = 60, 8
MICROS = 1_700_000_000_000_000
WITHIN = 20.0  # seconds, on a busy machine


class Simulated:
    def __init__(self, server: Any) -> None:
        self._server, self.said = server, b""
        end = server.accept(self)
        assert isinstance(end, Client)
        self._end = end

    def deliver(self, data: bytes) -> None:
        self.said += data

    def reset(self) -> None:
        """Do nothing."""

    def ask(self, *words: Word) -> bytes:
        """Send a command, and return all bytes that arrive within some virtual seconds."""
        self._server.received(self._end, packed(words))
        self._server.sim.run(self._server.sim.time + 2.0)
        said, self.said = self.said, b""
        return said


def virtual() -> Simulation:
    return Simulation(0, jitter=1e-6, p_switch=0.0, p_long=0.0, trace=False)


# Replicas


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ClockedRedis]]:
    """Two real servers with the same clock."""
    folder = tmp_path_factory.mktemp("clock")
    shim, clock = compiled(folder), folder / "clock"
    options = ("--enable-debug-command", "yes", "--repl-diskless-sync-delay", "0")
    with ClockedRedis(shim, clock, *options) as first, ClockedRedis(shim, clock, *options) as second:
        for server in (first, second):
            with closing(Real(server.port)) as connection:
                assert ask(connection, "DEBUG", "SET-ACTIVE-EXPIRE", 0) == b"+OK\r\n"
        yield [first, second]


def contents(port: int) -> dict[str, tuple[object, int]]:
    """Return the keys of a real server, each with its value and its remaining time."""
    found: dict[str, tuple[object, int]] = {}
    with redis.Redis(port=port, decode_responses=True) as bare:
        for key in sorted(bare.keys()):
            kind: Any = bare.type(key)
            value: Any = bare.get(key) if kind == "string" else None
            if kind == "hash":
                value = bare.hgetall(key)
            elif kind == "zset":
                value = dict(bare.zrange(key, 0, -1, withscores=True))
            found[key] = value, int(bare.pttl(key))
    return found


def contents_of(model: Replicating) -> dict[str, tuple[object, int]]:
    model.micros()
    ttls = {key: model.store.do_pttl(key) for key in sorted(model.store.values)}
    return {key: (model.store.values[key], int(str(ttl))) for key, ttl in ttls.items() if ttl != -2}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_simulated_replicas_have_the_data_and_the_replies_of_real_ones(both: list[ClockedRedis]) -> None:
    scripts = [each for each in vars(transactions).values() if isinstance(each, Script)]
    real, other = both
    for seed in range(SEEDS):
        chance, micros = random.Random(seed), MICROS
        real.hold(micros)
        with redis.Redis(port=real.port) as bare, redis.Redis(port=other.port) as follower:
            bare.replicaof("NO", "ONE")
            bare.flushall()
            follower.replicaof("127.0.0.1", real.port)
            eventually(lambda: bare.wait(1, 1000) == 1)
        sim = virtual()
        models = [Replicating(f"server{each}", sim, lambda: micros, seed) for each in range(2)]  # noqa: B023
        models[1].follow(models[0])
        sim.run(sim.time + 5.0)
        pairs = [(Real(each.port), Simulated(model)) for each, model in zip(both, models, strict=True)]
        for script in scripts:
            text = script.load.split(b"\r\n", 6)[6].removesuffix(b"\r\n")
            for connection, simulated in pairs:
                ask(connection, "SCRIPT", "LOAD", text)
                simulated.ask("SCRIPT", "LOAD", text)
        owners = [f"{client}.{chance.randbytes(16).hex()}@lock:host:1:me:2" for client in CLIENTS for _ in range(3)]
        for number in range(CALLS):
            micros += chance.choice([0, 17, 1000, 45_000, 310_000, 1_100_000, 3_100_000])
            real.hold(micros)
            words, at = some_call(chance, owners, micros), int(chance.random() < 0.2)
            words = ["MGET", *words[1:]] if words[0] == TRACKED else words
            if number == CALLS * 2 // 3:  # the replica is promoted, and the primary follows it
                assert ask(pairs[1][0], "REPLICAOF", "NO", "ONE") == b"+OK\r\n"
                models[1].promote()
                pairs[1] = pairs[1][0], Simulated(models[1])
                ask(pairs[0][0], "REPLICAOF", "127.0.0.1", other.port)
                models[0].follow(models[1])
                pairs[0] = pairs[0][0], Simulated(models[0])
                with redis.Redis(port=other.port) as bare:
                    eventually(lambda: bare.wait(1, 1000) == 1)
            leads = int(number >= CALLS * 2 // 3)
            if number % 4 == 3:
                at, words = chance.randrange(2), chance.choice([["WAIT", 1, 9999], ["WAIT", 0, 10]])
                if at == leads:  # WAIT waits only for changes of its own connection
                    write: list[Word] = ["SET", "ml/a", number]
                    assert ask(pairs[at][0], *write) == pairs[at][1].ask(*write)
            where = f"seed {seed}, call {number} of server {at}: {words}"
            assert without_text(pairs[at][1].ask(*words)) == without_text(ask(pairs[at][0], *words)), where
            if number % 4 == 3 and at == leads:
                with redis.Redis(port=both[leads].port) as bare:
                    bare.set("written", number)
                    assert bare.wait(1, int(WITHIN * 1000)) == 1
                    bare.delete("written")
                    assert bare.wait(1, int(WITHIN * 1000)) == 1
                for server, model in zip(both, models, strict=True):
                    assert contents_of(model) == contents(server.port), where
            if number % 10 == 9:
                role, modelled = ask(pairs[at][0], "ROLE"), pairs[at][1].ask("ROLE")
                assert modelled.split(b"\r\n")[:3] == role.split(b"\r\n")[:3], where
        for connection, _ in pairs:
            connection.close()


@pytest.mark.slow
def test_a_simulated_wait_answers_and_delays_what_follows_as_a_real_one(both: list[ClockedRedis]) -> None:
    real, other = both
    real.hold(0)  # let the clock continue, because with a stopped clock a WAIT never ends
    with redis.Redis(port=real.port) as bare, redis.Redis(port=other.port) as follower:
        bare.replicaof("NO", "ONE")
        follower.replicaof("127.0.0.1", real.port)
        eventually(lambda: bare.wait(1, 1000) == 1)
    sim = virtual()
    models = [Replicating(f"server{each}", sim, lambda: MICROS, 0) for each in range(2)]
    models[1].follow(models[0])
    sim.run(sim.time + 5.0)
    simulated, connection = Simulated(models[0]), Real(real.port)
    request = b"".join((pack("SET", "a", 1), pack("WAIT", 1, 50), pack("GET", "a")))

    def answers() -> tuple[bytes, bytes]:
        connection._sock.sendall(request)
        connection.send()
        models[0].received(simulated._end, request)
        sim.run(sim.time + 2.0)
        said, simulated.said = simulated.said, b""
        return said, connection.read()

    with other.paused():
        models[1].stop()
        said, expected = answers()
        assert said == expected == b"+OK\r\n:0\r\n$1\r\n1\r\n"
    models[1].go_on()
    request = request.replace(b"50", b"9999").replace(b"$2\r\n9999", b"$4\r\n9999")
    said, expected = answers()
    assert said == expected == b"+OK\r\n:1\r\n$1\r\n1\r\n"
    connection.close()


# Sentinels

Asked = tuple[str, str, int, bool, int, int, int]


def asked(say: Callable[..., bytes], letters: dict[str, str]) -> Asked:
    """Return the replies of a Sentinel to the product's commands. Letters replace the servers."""
    questions = ["GET-MASTER-ADDR-BY-NAME", "MASTER", "SENTINELS"]
    place, described, others = (answered(say("SENTINEL", each, NAME)) for each in questions)
    facts = dict(zip(described[::2], described[1::2], strict=True))
    others = [dict(zip(each[::2], each[1::2], strict=True)) for each in others]
    assert all({b"ip", b"port", b"runid"} <= each.keys() for each in others)
    assert len(answered(say("SENTINEL", "MYID"))) == 40
    numbers = (int(facts[word]) for word in (b"config-epoch", b"quorum", b"num-other-sentinels"))
    epoch, quorum, number = numbers
    in_progress = b"failover_in_progress" in facts[b"flags"]
    former = letters[b":".join((facts[b"ip"], facts[b"port"])).decode()]
    return letters[b":".join(place).decode()], former, epoch, in_progress, quorum, number, len(others)


def answered(data: bytes) -> Any:
    return parse(data, 0, "a Sentinel")[0]


def with_letters(data: bytes, letters: dict[str, str]) -> list[list[str]]:
    """Return the pushed messages in this data, with letters instead of the servers."""
    found, at = [], 0
    while at < len(data):
        try:
            message, at = parse(data, at, "a Sentinel")
        except Incomplete:
            break
        text = message[2].decode()
        for place, letter in letters.items():
            text = text.replace(place, letter).replace(place.replace(":", " "), letter)
        found.append([message[1].decode(), text])
    return found


CHANNELS = ("+promoted-slave", "+switch-master")


def real_failover() -> tuple[list[list[Asked]], list[list[list[str]]]]:
    """Return the different replies of the leader and of another Sentinel during a failover, and their messages."""
    replies: list[list[Asked]] = [[], []]
    messages = [b"", b""]
    with Guarded(replicas=1) as guarded:
        former = guarded.primary()
        [new] = guarded.replicas()
        letters = {former.endpoint: "A", new.endpoint: "B"}
        listening = [Real(guard.port) for guard in guarded.guards[:2]]
        asking = [Real(guard.port) for guard in guarded.guards[:2]]
        for each in listening:
            ask(each, "SUBSCRIBE", *CHANNELS)

        def look() -> bool:
            for said, connection in zip(replies, asking, strict=True):
                # The state of the Sentinel may change between two of the commands, so all replies are read twice and
                # must be equal.
                present, again = (asked(lambda *words, to=connection: ask(to, *words), letters) for _ in range(2))
                if present == again and present not in said:
                    said.append(present)
            for number, each in enumerate(listening):
                each.send()
                messages[number] += each.read()
            return all(said[-1][:2] == ("B", "B") for said in replies)

        look()
        guarded.await_replicas(former)
        guarded.ask_for_failover(guarded.guards[0])
        eventually(look, within=WITHIN)
        for each in (*listening, *asking):
            each.close()
    return replies, [with_letters(data, letters) for data in messages]


def simulated_failover() -> tuple[list[list[Asked]], list[list[list[str]]]]:
    sim = virtual()

    def new_server(kind: type[Any], name: str) -> Any:
        return kind(name, sim, lambda: MICROS, 0)

    oracles = SimpleNamespace(disturb=lambda *what: None, doomed={}, forced={})
    world: Any = SimpleNamespace(
        sim=sim,
        servers=[new_server(Replicating, f"server{each}") for each in range(2)],
        network=SimpleNamespace(on_sent=None),
        new_server=new_server,
        plan=SimpleNamespace(seed=0, replicas=0),
        oracles=oracles,
        kinds={},
    )
    group = redis_replicas.Guarded(world)
    sim.run(sim.time + 5.0)
    letters = {f"server0:{PORT}": "A", f"server1:{PORT}": "B"}
    listening, asking = ([Simulated(each) for each in group.sentinels[:2]] for _ in range(2))
    for each in listening:
        each.ask("SUBSCRIBE", *CHANNELS)
    replies: list[list[Asked]] = [[], []]

    def say(connection: Simulated, *words: Word) -> bytes:
        connection._server.received(connection._end, packed(words))
        said, connection.said = connection.said, b""
        return said

    def look() -> None:
        for said, connection in zip(replies, asking, strict=True):
            present = asked(lambda *words, to=connection: say(to, *words), letters)
            if present not in said:
                said.append(present)

    look()
    group.fail_over(0, group.sentinels[0])
    for _ in range(100):
        sim.run(sim.time + 0.05)
        look()
    return replies, [with_letters(each.said, letters) for each in listening]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_simulated_sentinels_reply_and_push_as_real_ones_do_in_a_failover() -> None:
    replies, messages = simulated_failover()
    real_replies, real_messages = real_failover()
    assert messages == real_messages
    # A real leader may give the replies with the new address only for a few milliseconds, so the test may miss them.
    assert [len(said) for said in replies] == [4, 2]
    assert [each for each in replies[0] if each in real_replies[0]] == real_replies[0]
    assert replies[1] == real_replies[1]
