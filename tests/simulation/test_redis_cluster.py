"""Compare the nodes of the simulated cluster with those of a real one, for the commands that multilock sends."""

from __future__ import annotations

from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from multilock_redis.wire import pack, parse
from tests.servers_cluster import RedisCluster
from tests.simulation.redis_cluster import Clustered, ClusterNode, slot_of
from tests.simulation.redis_replicas import PORT
from tests.simulation.test_redis_model import Real, Word, ask
from tests.simulation.test_redis_replicas import MICROS, Simulated, virtual

LOCK = "ml/a"
KEYS = [LOCK, *(f"{{{LOCK}}}:{part}" for part in ("queue", "live", "token", "holders", "gone:1"))]
SCRIPT = "return #KEYS"


def modelled() -> Clustered:
    sim = virtual()
    oracles = SimpleNamespace(disturb=lambda *what: None, doomed={}, forced={})
    world: Any = SimpleNamespace(
        sim=sim,
        servers=[ClusterNode(f"server{each}", sim, lambda: MICROS, 0) for each in range(4)],
        network=SimpleNamespace(on_sent=None),
        plan=SimpleNamespace(seed=0, replicas=0),
        oracles=oracles,
        kinds={},
        key=lambda name: f"ml/{name}",
    )
    group = Clustered(world)
    sim.run(sim.time + 5.0)
    return group


def requests(sha: str) -> list[list[Word]]:
    """Return commands that change nothing."""
    return [
        ["GET", LOCK],
        ["MGET", LOCK],
        ["MGET", LOCK, KEYS[3]],
        ["MGET", LOCK, "ml/elsewhere"],
        ["PTTL", KEYS[3]],
        ["HDEL", KEYS[2], ""],
        ["EVALSHA", sha, 1, LOCK],
        ["EVALSHA", sha, 1, KEYS[1]],
        ["EVALSHA", sha, 6, *KEYS],
        ["EVALSHA", sha, 2, LOCK, KEYS[3]],
        ["PUBSUB", "NUMSUB", "channel"],
    ]


def table(reply: bytes, names: dict[int, str]) -> list[list[object]]:
    """Return the ranges of slots in a reply to CLUSTER SLOTS, each with its primary."""
    lines = parse(reply, 0, "a node")[0]
    found = [
        [first, last, *(names.get(each[1], each[0].decode()) for each in nodes[:1])] for first, last, *nodes in lines
    ]
    return sorted(found)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_simulated_nodes_redirect_as_real_ones_do() -> None:
    group = modelled()
    with ExitStack() as stack:
        cluster = stack.enter_context(RedisCluster(shards=2))
        members, nodes, sim = cluster.members, group.nodes, group.sim
        names = {member.port: node.name for member, node in zip(members, nodes, strict=True)}
        pairs = [
            (stack.enter_context(closing(Real(member.port))), Simulated(node))
            for member, node in zip(members, nodes, strict=True)
        ]
        for real, simulated in pairs:
            sha = ask(real, "SCRIPT", "LOAD", SCRIPT)
            assert simulated.ask("SCRIPT", "LOAD", SCRIPT) == sha
        script = sha.split(b"\r\n")[1].decode()

        def compare(phase: str) -> None:
            for number, (real, simulated) in enumerate(pairs):
                for words in requests(script):
                    for asking in (False, True):
                        if asking:
                            assert ask(real, "ASKING") == simulated.ask("ASKING")
                            request = pack(*words)
                            real._sock.sendall(pack("ASKING") + request)
                            expected = ask(real).removeprefix(b"+OK\r\n")
                            simulated.ask("ASKING")
                        else:
                            expected = ask(real, *words)
                        for port, name in names.items():
                            expected = expected.replace(b"127.0.0.1:%d" % port, f"{name}:{PORT}".encode())
                        assert simulated.ask(*words) == expected, f"{phase}, node {number}, asking {asking}: {words}"
                slots = table(simulated.ask("CLUSTER", "SLOTS"), {}), table(ask(real, "CLUSTER", "SLOTS"), names)
                assert slots[0] == slots[1], f"{phase}, node {number}: {slots}"

        slot = slot_of(LOCK)
        source = group.table.owner(slot)
        target = next(each for each in nodes[:2] if each is not source)
        old, new = members[nodes.index(source)], members[nodes.index(target)]
        assert cluster.owner(slot) is old
        compare("no keys")
        group._moving.add(slot)
        target.importing[slot], source.migrating[slot] = source, target
        cluster.begin_migration(slot, new)
        compare("no keys, moving")
        source.migrating.clear()  # otherwise these writes would be redirected
        old.bare.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
        for at in (old, source):
            writes: list[list[Word]] = [
                ["SET", LOCK, "x", "PX", 9_000_000],
                ["SET", KEYS[3], 17],
                ["ZADD", KEYS[1], 5, "m"],
            ]
            for words in writes:
                if at is old:
                    old.bare.execute_command(*words)
                else:
                    assert pairs[nodes.index(source)][1].ask(*words)
        source.migrating[slot] = target
        old.bare.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new.id)
        compare("some keys, moving")
        moved = next(key for key in source.store.values)
        assert source.hand_key(slot, target)
        old.bare.execute_command("MIGRATE", new.host, new.port, moved, 0, 5000)
        compare("one key has moved")
        while source.hand_key(slot, target):
            pass
        cluster.move_keys(slot, old, new)
        compare("all keys have moved")
        group._move(slot, source, target, 0.0)
        cluster.end_migration(slot, old, new)
        sim.run(sim.time + 10.0)
        cluster.agree()
        compare("moved")
        assert new.bare.get(LOCK).decode() == target.store.values[LOCK]
        assert 0 < new.bare.pttl(LOCK) <= target.store.ends[LOCK] - target.store.now
        listening = stack.enter_context(closing(Real(new.port)))
        heard = Simulated(target)
        assert ask(listening, "SUBSCRIBE", "channel") == heard.ask("SUBSCRIBE", "channel")
        with redis.Redis(port=old.port) as bare:
            assert bare.publish("channel", "text") == 0
        assert pairs[nodes.index(source)][1].ask("PUBLISH", "channel", "text") == b":0\r\n"
        pushed = b""
        while not pushed:  # wait until another node has forwarded the message
            pushed = ask(listening)
        assert heard.said == pushed
        group._take_over(target)
        promoted = cluster.fail_over(new)
        assert nodes[members.index(promoted)] is group.table.owner(slot)
        sim.run(sim.time + 10.0)
        cluster.agree()
        pairs = [
            (stack.enter_context(closing(Real(member.port))), Simulated(node))
            for member, node in zip(members, nodes, strict=True)
        ]
        for real, simulated in pairs:
            ask(real, "SCRIPT", "LOAD", SCRIPT)
            simulated.ask("SCRIPT", "LOAD", SCRIPT)
        compare("a replica has taken over")
