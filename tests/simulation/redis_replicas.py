"""Simulated Redis servers that replicate asynchronously, and the Sentinels that decide which of them is the primary.

`test_redis_replicas` compares the servers and Sentinels with real ones. `Guarded` replaces the messages between
Sentinels: it decides when they notice that the primary is down, and when each learns of a failover.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import multilock_redis
from multilock_redis import transactions
from multilock_redis.acquire_release import Replicas
from multilock_redis.keys import Keyspace
from multilock_redis.sentinel import Sentinel, SentinelEndpoint
from tests.simulation.network import Socket
from tests.simulation.oracles import Belief, Oracle
from tests.simulation.plan import Fault
from tests.simulation.redis_server import LATER, Client, Connection, Link, RedisServer, claim_of, encoded, settings_of
from tests.simulation.redis_store import Refused, Reply
from tests.simulation.scheduler import Process
from tests.simulation.server import PREFIX, Group, Server, Simulated

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = [
    "FAILOVER",
    "FAULTS",
    "NAME",
    "PORT",
    "SIMULATED",
    "Guarded",
    "Promoting",
    "Replicating",
    "SentinelServer",
    "replicas_of",
    "runs",
]

NAME = "mymaster"  # the Sentinels' name for the primary
PORT = 6379  # the port of every server and Sentinel; the host is the name of the server
SENTINELS = 3
QUORUM = 2  # Sentinels that must agree before a failover
DELAY = 0.001  # seconds: the mean delay of a message from one server to another
COPIED_AFTER = 0.3  # seconds: the mean time until a new replica has a copy of the data
DOWN_AFTER = 1.0  # seconds without a reply after which the Sentinels count the primary as down
TEND_EVERY = 0.5  # seconds between two checks of the servers by the Sentinels
LEARNS = 0.5  # probability that a Sentinel learns of a failover between two checks
DEMOTE_WITHIN = 30.0  # seconds within which the Sentinels demote a former primary that serves again
#: seconds within which an undisturbed client must stop sending scripts to a former primary, once a Sentinel knows of
#: the failover (docs/backends/redis.md)
NOTICED_WITHIN = 8.0
# seconds after its request to the new primary from which a client must ignore replies of a former primary
SETTLED = 0.5
# faults during which a client can still notice a failover
OF_FAILOVER = ("fail_over", "divide", "lag", "force", "evict")

LEAVES = {transactions.RELEASE._sha, transactions.REST._sha}
WRITES = ("SET", "DEL", "PEXPIRE", "HSET", "HDEL", "ZADD", "ZREM", "ZREMRANGEBYSCORE")
_numbers = count()

Change = tuple[str, Any, int | None]
"""A changed key, with its value and the time of its expiry, or None for either."""


def _refuse_to_write(*words: str) -> Reply:
    raise Refused("READONLY You can't write against a read only replica.")


class Replicating(RedisServer):
    """A primary or a replica. A primary replies first, and then sends each change to its replicas."""

    joins_within = 1.5  # because a client asks the Sentinels or nodes before each of its first connections
    leader: Replicating | None = None  #: the server that this replica follows, or None for a primary
    written = 0  # number of changes that this server has made, or has received from its leader

    def __init__(self, *about: Any) -> None:
        self._changed: dict[str, None] = {}
        self.link = -1  #: the number of the connection to the leader; messages of earlier connections are dropped
        self.lags_until = 0.0  #: when changes arrive at this replica again
        self._last_arrival = 0.0
        #: for each replica that has a copy of the data, the number of changes that it has acknowledged
        self.acknowledged: dict[Replicating, int] = {}
        self._held: list[Callable[[], None]] = []  # events that happened while the server was stopped
        # for each client in WAIT, the numbers of replicas and of changes for which it waits
        self._waiting: dict[Client, tuple[int, int]] = {}
        self.copied: Replicating | None = None  #: the server whose data this replica has
        #: Called before each script, with its hash and the claims that it names. The returned function is called after
        #: the script.
        self.on_script: Callable[[str, list[str]], Callable[[], None]] = lambda sha, claims: lambda: None
        super().__init__(*about)

    def _begin(self, *, forgets: bool) -> None:
        super()._begin(forgets=forgets)
        self._take_role()

    def _take_role(self) -> None:
        for name in WRITES:
            write = getattr(self.store, f"do_{name.lower()}")
            self._calls[name] = _refuse_to_write if self.leader else write

    # Commands

    def execute(self, client: Client, words: list[str]) -> Reply | Refused:
        reply = super().execute(client, words)
        self._replicate()
        client.written = self.written
        return reply

    def _do_role(self) -> Reply:
        if self.leader:
            is_online = self in self.leader.acknowledged
            return ["slave", self.leader.name, PORT, "connected" if is_online else "connect", self.written]
        return ["master", self.written, [[each.name, str(PORT), str(n)] for each, n in self.acknowledged.items()]]

    def _do_wait(self, wanted: str, milliseconds: str) -> Reply:
        client = self._by
        assert client is not None
        if self.leader:
            raise Refused("ERR WAIT cannot be used with replica instances.")
        if self._reached(client.written) >= int(wanted):
            return self._reached(client.written)
        self._waiting[client] = int(wanted), client.written
        for each in self.acknowledged:
            self._send(each, partial(each.acknowledge, self, each.link))
        self.sim.after(int(milliseconds) / 1000, self.running, partial(self._answer, client))
        return LATER

    def _do_evalsha(self, sha: str, count: str, *words: str) -> Reply:
        executed = self.on_script(sha, [claim_of(word) for word in words if "@" in word])
        try:
            return super()._do_evalsha(sha, count, *words)
        finally:
            executed()

    # Replication

    def _touched(self, key: str) -> None:
        super()._touched(key)
        self._changed[key] = None

    def delete(self, key: str) -> None:
        super().delete(key)
        self._replicate()

    def _plan_end(self, key: str, end: int) -> None:
        if self.leader is None:  # a replica does not delete expired keys, but waits for its primary to do it
            super()._plan_end(key, end)

    def _replicate(self) -> None:
        """Send the changes to the replicas."""
        changed, self._changed = self._changed, {}
        if self.leader is None and changed:
            self.written += 1
            changes = [self._of(key) for key in changed]
            for each in self.acknowledged:
                self._send(each, partial(each.change, changes, self.written))

    def _of(self, key: str) -> Change:
        return key, _copied(self.store.values.get(key)), self.store.ends.get(key)

    def _send(self, replica: Replicating, call: Callable[[], None]) -> None:
        """Let ``call`` run at the replica when a message arrives, after all earlier messages."""
        arrival = max(self.sim.time + self.random.expovariate(1 / DELAY), replica.lags_until)
        replica._last_arrival = max(replica._last_arrival + 1e-9, arrival)
        self.sim.at(replica._last_arrival, replica.arrives, replica.link, call)

    def arrives(self, link: int, call: Callable[[], None]) -> None:
        if link == self.link:
            self.running(call)

    def running(self, call: Callable[[], None]) -> None:
        """Call ``call`` now, or once this server is no longer stopped. A server that has ended ignores it."""
        if self.paused:
            self._held.append(call)
        elif self.up:
            call()

    def change(self, changes: Sequence[Change], written: int) -> None:
        """Change some keys in the same way as the leader."""
        self.written = written
        for key, value, end in changes:
            self.store.values.pop(key, None)
            self.store.ends.pop(key, None)
            if value is not None:
                self.store.values[key] = _copied(value)
                if end is not None:
                    self.store.ends[key] = end

    def acknowledge(self, leader: Replicating, link: int) -> None:
        """Report to the leader how many changes have arrived."""
        done = partial(leader.receive_acknowledgement, self, link, self.written)
        self.sim.after(self.random.expovariate(1 / DELAY), leader.running, done)

    def receive_acknowledgement(self, replica: Replicating, link: int, written: int) -> None:
        if replica in self.acknowledged and link == replica.link:
            self.acknowledged[replica] = max(self.acknowledged[replica], written)
            for client, (wanted, since) in list(self._waiting.items()):
                if self._reached(since) >= wanted:
                    self._answer(client)

    def _reached(self, written: int) -> int:
        return sum(each >= written for each in self.acknowledged.values())

    def _answer(self, client: Client) -> None:
        """Reply to the WAIT of this client, if it has no reply yet, and execute the commands that followed it."""
        if client in self._waiting and client.rest is not None:
            _, since = self._waiting.pop(client)
            rest, client.rest = client.rest, None
            client.link.deliver(encoded(self._reached(since)))
            if rest:
                self.received(client, rest)

    def follow(self, leader: Replicating, *, at_once: bool = False) -> None:
        """Become a replica of this server (REPLICAOF). With ``at_once`` the copy of its data takes no time."""
        self._change_role(leader)
        if at_once:
            self._copy(self.link)
        else:
            self.sim.after(self.random.expovariate(1 / COPIED_AFTER), self._copy, self.link)

    def _copy(self, link: int) -> None:
        """Replace the data by a copy of the leader's."""
        if link != self.link or not self.up or self.leader is None:
            return
        if not runs(self) or not runs(self.leader) or self.leader.leader or self.sim.time < self.lags_until:
            self.sim.after(TEND_EVERY, self._copy, link)
            return
        self.store.values.clear()
        self.store.ends.clear()
        self.change([self.leader._of(key) for key in self.leader.store.values], self.leader.written)
        self.leader.acknowledged[self] = self.written
        self.copied = self.leader
        self.acknowledge(self.leader, link)

    def promote(self) -> None:
        """Become a primary (REPLICAOF NO ONE)."""
        self._change_role(None)
        for key, end in list(self.store.ends.items()):
            self._plan_end(key, end)

    def _change_role(self, leader: Replicating | None) -> None:
        ended = self._ends_with_its_role()
        self._part()
        self.leader = leader
        self._take_role()
        for client in ended:
            self.clients.pop(client.number, None)
            client.link.reset()

    def _ends_with_its_role(self) -> list[Client]:
        """Return the clients whose connections end when the role changes."""
        return list(self.clients.values())

    def _part(self) -> None:
        """End the connections to the leader and to all replicas."""
        self.link = next(_numbers)
        self._held.clear()
        self._waiting.clear()
        if self.leader:
            self.leader.acknowledged.pop(self, None)
        for each in list(self.acknowledged):
            if each.leader is self:
                each.follow(self)
        self.acknowledged.clear()

    def go_on(self) -> None:
        super().go_on()
        held, self._held = self._held, []
        for call in held:
            self.running(call)

    def _ended(self, *, forgets: bool) -> list[Link]:
        self._part()
        return super()._ended(forgets=forgets)

    def start(self) -> None:
        begins = not self.up
        super().start()
        if begins and self.leader:
            self.follow(self.leader)


class SentinelServer(RedisServer):
    """A Sentinel, which keeps its state when its process ends."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.epoch = 0  #: the epoch of the last failover that this Sentinel knows
        self.names: Server = self  #: the primary whose address it gives to clients
        #: the primary that it describes; a leader of a failover still describes the former one
        self.describes: Server = self
        self.others: list[SentinelServer] = []
        self.replicas, self.leads = 0, False  #: how many replicas this Sentinel knows, and whether it leads a failover
        self.apart_until = 0.0  #: the time from which it can reach the other Sentinels again

    def learn(self, epoch: int, primary: Server) -> None:
        """Learn of a failover from another Sentinel, or end the failover that this Sentinel leads."""
        former, self.epoch, self.names, self.describes = self.describes, epoch, primary, primary
        self.leads = False
        if former is not primary:
            self.announce("+switch-master", f"{NAME} {former.name} {PORT} {primary.name} {PORT}")

    def promoted(self, epoch: int, primary: Server) -> None:
        """Learn, as the leader of a failover, that the replica was promoted."""
        self.epoch, self.names = epoch, primary
        former, new = f"{self.describes.name} {PORT}", f"{primary.name} {PORT}"
        self.announce("+promoted-slave", f"slave {primary.name}:{PORT} {new} @ {NAME} {former}")

    def announce(self, channel: str, message: str) -> None:
        for each in self._listeners(channel):
            each.link.deliver(encoded(["message", channel, message]))

    def _do_sentinel(self, what: str, name: str = "") -> Reply:
        what = what.upper()
        if what == "MYID":
            return self._id
        if name != NAME:
            if what == "GET-MASTER-ADDR-BY-NAME":
                return None
            raise Refused("ERR No such master with that name")
        if what == "GET-MASTER-ADDR-BY-NAME":
            return [self.names.name, str(PORT)]
        if what == "SENTINELS":
            return [
                ["name", each._id, "ip", each.name, "port", str(PORT), "runid", each._id, "flags", "sentinel"]
                for each in self.others
            ]
        flags = "master,failover_in_progress,force_failover" if self.leads else "master"
        facts = {"name": NAME, "ip": self.describes.name, "port": PORT, "flags": flags, "config-epoch": self.epoch}
        facts |= {"num-slaves": self.replicas, "num-other-sentinels": len(self.others), "quorum": QUORUM}
        return [word for pair in facts.items() for word in map(str, pair)]

    @property
    def _id(self) -> str:
        return self.name.encode().hex().ljust(40, "0")

    def holder(self, key: str) -> None:
        return None

    def claims(self) -> Iterator[tuple[str, str]]:
        return iter(())


class Promoting(Group):
    """Primaries with replicas, of which one may be promoted.

    Redis makes no promise about a lease whose last change the new primary lacks, or about requests that a former
    primary executes. The oracles do not judge these.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.world, self.sim = world, world.sim
        self.random = random.Random(f"failovers {world.plan.seed}")
        self.redis = [each for each in world.servers if isinstance(each, Replicating)]
        self.primaries: list[Replicating] = []
        # when a process first sent a new primary a script for a name
        self._asked: dict[tuple[Process, Server, str], float] = {}
        # Claims whose release or cancel is lost. If the new primary then executes an earlier request of such a claim,
        # the claim stays there for its ttl.
        self._left: set[str] = set()
        self.moved: dict[str, float] = {}  # name -> when its keys were last moved to another primary
        self._on_sent = world.network.on_sent
        world.network.on_sent = self.sent
        for each in self.redis:
            each.on_script = partial(self._script, each)

    def decides(self, server: Server) -> bool:
        return server in self.primaries

    def calm(self) -> None:
        super().calm()
        self.lag(0.0)

    def fail_over(self, choice: int) -> None:
        """Promote a replica, if one is able to be promoted."""
        raise NotImplementedError

    def divide(self, choice: int, seconds: float) -> None:
        """Cut a member of the group off from the others."""
        raise NotImplementedError

    def lag(self, seconds: float) -> None:
        for each in self.redis:
            each.lags_until = self.sim.time + seconds

    def ready(self, primary: Replicating) -> list[Replicating]:
        """Return the replicas of a primary that can be promoted."""
        return [each for each in self.redis if each.leader is each.copied is primary and runs(each)]

    def promote(self, former: Replicating, new: Replicating) -> None:
        """Let a replica take the place of a primary. The former primary is not notified."""
        self._excuse(former, new)
        self.primaries[self.primaries.index(former)] = new
        self.moved |= {name: self.sim.time for name in self.world.kinds if self.keeper(name) is new}
        self._asked = {each: since for each, since in self._asked.items() if each[1] is not new}
        new.promote()

    # For the oracles

    def _is_former(self, server: Server) -> bool:
        """Return whether this server is a former primary that has not been notified of the failover."""
        return isinstance(server, Replicating) and server not in self.primaries and server.leader is None

    def _excuse(self, former: Replicating, new: Replicating) -> None:
        """Excuse the holders of those names for which the new primary lacks a change, because Redis replicates only
        after it has replied. Do this before the promotion."""
        oracles = self.world.oracles
        oracles.disturb(None, NOTICED_WITHIN, "fail_over")
        for server in (former, new):
            server.micros()
        replicas = sum(each.leader is former for each in self.redis)
        kept, all_of_them = {claim for _, claim in new.claims()}, abs(self.world.plan.replicas) >= replicas
        for name in self.world.kinds:
            if self.keeper(name) is not former:
                continue
            for belief in oracles.of(name) if all_of_them else ():
                claim, held = belief.part.claim.id, belief.held
                was = any(claim == each for _, each in former.claims()) and held.since > max(
                    new.started, self.moved.get(name, 0.0)
                )
                # If renewals are not acknowledged, a copy of the lease may end a ttl after the grant.
                grant_ends = new.granted_at(belief.token or 0) + belief.ttl
                was = was and (self.world.plan.replicas < 0 or self.sim.time < grant_ends)
                if was and claim not in kept and held.is_live and not belief.excused:
                    oracles.bad("Acknowledged", f"{belief.who} holds {name}, which {new.name} has never stored")
            key = self.world.key(name)
            keys = key, f"{{{key}}}:holders"
            if any(former.store.look(each) != new.store.look(each) for each in keys) or any(
                former.store.ends.get(each) != new.store.ends.get(each) for each in keys
            ):
                self.sim.note(None, f"the new primary lacks a change of {name}")
                oracles.excuse(name)
        for _, claim in set(new.claims()) - set(former.claims()):
            oracles.doom(claim, former)
            self._left.add(claim)
            oracles.forced.pop(claim, None)

    def _script(self, server: Replicating, sha: str, claims: list[str]) -> Callable[[], None]:
        doomed = self.world.oracles.doomed
        if self._is_former(server):
            if sha in LEAVES:
                self._left.update(claims)
            before = set(server.claims())

            def executed() -> None:
                for claim in [*claims, *(claim for _, claim in set(server.claims()) - before)]:
                    self.world.oracles.doom(claim, server)

            return executed

        def present() -> None:
            if server in self.primaries and any(claim in doomed for claim in claims):
                for claim in set(claims) & {claim for _, claim in server.claims()} - self._left:
                    doomed.pop(claim, None)

        return present

    def sent(self, sock: Socket, data: bytes) -> None:
        """Record the first script that a process sends to a new primary."""
        if b"EVALSHA" in data and sock.server in self.primaries:
            for name in self.world.kinds:
                if f"{self.world.key(name)}\r".encode() in data:
                    self._asked.setdefault((sock.process, sock.server, name), self.sim.time)
        self._on_sent(sock, data)

    def judge(self, belief: Belief) -> str:
        """Return a violation if the client believes that it holds the lock because of a former primary's reply,
        although it had already sent a request to the new primary."""
        former, new = self.world.oracles.doomed.get(belief.part.claim.id), self.keeper(belief.name)
        asked = self._asked.get((belief.held.process, new, belief.name), math.inf) if new else math.inf
        late = self.sim.time - asked
        if former in (None, new) or new is None or late < SETTLED or len(belief.held.beliefs) > 1:
            return ""
        grants = {claim for key, claim in new.claims() if not key.endswith(("}:queue", "}:live"))}
        if belief.part.claim.id in {*grants, *self.world.oracles.forced}:
            return ""  # the new primary has granted the claim, too; an operator may have released it since
        return f"{belief.who} got {belief.name} from a former primary, {late:.3f} s after it asked the new one"


class Guarded(Promoting):
    """A primary with its replicas and the Sentinels. After a failover, an undisturbed client must ask the Sentinels in
    time."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.primaries = self.redis[:1]
        self.epoch = 0
        self.known_at = -math.inf  #: when the first Sentinel learnt of the last failover
        self._down_since = math.inf
        self._demoted_at: dict[Replicating, float] = {}
        self.sentinels = [world.new_server(SentinelServer, f"sentinel{each}") for each in range(SENTINELS)]
        world.servers += self.sentinels
        for sentinel in self.sentinels:
            sentinel.names = sentinel.describes = self.primary
            sentinel.others = [each for each in self.sentinels if each is not sentinel]
            sentinel.replicas = len(self.redis) - 1
        for each in self.redis[1:]:
            each.follow(self.primary, at_once=True)
        self.sim.after(TEND_EVERY, self._tend)

    @property
    def primary(self) -> Replicating:
        return self.primaries[0]

    def keeper(self, name: str) -> Server:
        return self.primary

    def calm(self) -> None:
        super().calm()
        for sentinel in self.sentinels:
            sentinel.apart_until = 0.0

    # Faults

    def fail_over(self, choice: int, leader: SentinelServer | None = None) -> None:
        """Let a Sentinel promote a replica, as at an operator's request. Without ``leader``, ``choice`` decides which
        Sentinel leads the failover."""
        together, former = self._together(), self.primary
        able = [each for each in together if leader in (None, each)]
        ready = self.ready(former)
        if len(together) < QUORUM or not able or not ready:
            return
        leader, new = able[choice % len(able)], ready[choice // 16 % len(ready)]
        self.sim.note(None, f"{leader.name} promotes {new.name}")
        self.epoch, self.known_at, leader.leads = self.epoch + 1, math.inf, True
        self.promote(former, new)
        self.sim.after(self.random.uniform(0.0, 1.0), self._is_promoted, leader, self.epoch)

    def divide(self, choice: int, seconds: float) -> None:
        """Let a Sentinel lose contact with the others for ``seconds``. Either it leads a failover just before that
        time, or it misses a failover at the beginning of that time."""
        alone, leads = self.sentinels[choice % SENTINELS], choice // 16 % 2
        if leads:
            self.fail_over(choice, alone)
        alone.apart_until = self.sim.time + seconds
        if not leads:
            self.fail_over(choice)

    # The Sentinels

    def _together(self) -> list[SentinelServer]:
        """Return the running Sentinels that can reach one another."""
        return [each for each in self.sentinels if runs(each) and each.apart_until <= self.sim.time]

    def _is_promoted(self, leader: SentinelServer, epoch: int) -> None:
        """Let the leader of a failover, or another Sentinel if the leader is away, learn that the replica is the
        primary."""
        able = [leader] if runs(leader) else self._together()
        if epoch == self.epoch and able:
            able[0].promoted(epoch, self.primary)
            self.known_at = self.sim.time
        elif epoch == self.epoch:
            self.sim.after(TEND_EVERY, self._is_promoted, leader, epoch)

    def _tend(self) -> None:
        self.sim.after(TEND_EVERY, self._tend)
        now, together, chance = self.sim.time, self._together(), self.random.random
        self._down_since = math.inf if runs(self.primary) else min(self._down_since, now)
        if now - self._down_since > DOWN_AFTER:
            self.fail_over(self.random.randrange(1 << 10))
        for sentinel in together:
            best = max(together, key=lambda each: each.epoch)
            if sentinel.epoch < best.epoch and chance() < LEARNS:
                sentinel.learn(best.epoch, best.names)
        for sentinel in self.sentinels:
            if runs(sentinel) and sentinel.names is not sentinel.describes and chance() < LEARNS:
                sentinel.learn(sentinel.epoch, sentinel.names)  # all replicas follow the new primary
        for server in self.redis:
            if server is self.primary or not runs(server) or not together or now < self.known_at:
                continue
            if server.leader is None:
                if now >= self._demoted_at.setdefault(server, now + self.random.uniform(1.0, DEMOTE_WITHIN)):
                    del self._demoted_at[server]
                    server.follow(self.primary)
            elif server.leader is not self.primary:
                server.follow(self.primary)

    def sent(self, sock: Socket, data: bytes) -> None:
        """Report a client that still sends scripts to a former primary, unless other faults disturb the client."""
        if b"EVALSHA" in data and self._is_former(sock.server):
            weather, calm = self.world.plan.weather, self.world.oracles.calm_since(sock.process, *OF_FAILOVER)
            since, now = max(self.known_at, calm), self.sim.time
            late = now - since > NOTICED_WITHIN and sock.process.ran_since(since)
            if late and not weather.p_stall and not weather.p_cut:
                where = f"{sock.server.name}, {now - since:.1f} s after a failover"
                self.world.oracles.bad("Former", f"{sock.process} still uses {where}")
        super().sent(sock, data)


class Former(Oracle):
    """A client ignores replies of a former primary once it follows the new one."""

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        group = self.world.group
        if isinstance(group, Promoting) and (objection := group.judge(belief)):
            self.bad(objection)


def runs(server: Server) -> bool:
    """Return whether the process of a server runs."""
    return server.up and not server.paused


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, dict) else value


Replicating.group = Guarded


def fail_over(world: World, fault: Fault, process: Process) -> None:
    """Promote a replica, sometimes one that lacks the latest changes."""
    assert isinstance(world.group, Promoting)
    if fault.choice % 2:
        world.group.lag(fault.seconds)
        world.sim.after(0.05, world.group.fail_over, fault.choice // 2)
    else:
        world.group.fail_over(fault.choice // 2)


def divide(world: World, fault: Fault, process: Process) -> None:
    """Cut a Sentinel or node off from the others, and cause a failover."""
    assert isinstance(world.group, Promoting)
    world.group.divide(fault.choice, fault.seconds)


def lag(world: World, fault: Fault, process: Process) -> None:
    assert isinstance(world.group, Promoting)
    world.group.lag(fault.seconds)


def replicas_of(world: World) -> Replicas:
    """Return how many replicas must acknowledge a write."""
    wanted = abs(world.plan.replicas)
    return Replicas(wanted, wanted if world.plan.replicas < 0 else 0)


def _open(world: World, ttl: float) -> Any:
    group, settings = world.group, settings_of(world)
    assert isinstance(group, Guarded)
    places = [{**settings, "host": each.name, "port": PORT} for each in group.sentinels]
    sentinels = [Sentinel("redis+sentinel", Connection, place) for place in places]
    endpoint = SentinelEndpoint("redis+sentinel", sentinels, NAME, Connection, settings)
    return multilock_redis.RedisBackend("redis+sentinel", endpoint, Keyspace(PREFIX), replicas_of(world), ttl=ttl)


FAULTS = {"fail_over": fail_over, "divide": divide, "lag": lag}
FAILOVER = (
    "fail_over divide lag stop_server restart",
    "fail_over fail_over divide lag pause part stop_server",
)
SIMULATED = {
    "redis+sentinel": Simulated(
        _open,
        Replicating,
        3,
        FAULTS,
        {"failover": FAILOVER},
        "failover failover failover failover",
        replicas=2,
    )
}
