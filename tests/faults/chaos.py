"""Let fifty contenders use locks on a real server while faults happen, and check what they recorded (the *oracles*).

python -m tests.faults.chaos                              a minute on a Redis of its own
python -m tests.faults.chaos --backend sqlite --seconds 20
python -m tests.faults.chaos --backend etcd              or etcd-late, consul, zookeeper, postgresql
python -m tests.faults.chaos --habits uvloop             all processes have this habit; else most have one each
python -m tests.faults.chaos --mixed                     readers, writers, permits and plain locks of the same names
python -m tests.faults.chaos --defect "plain DEL"         with a defect built in, on its backend, until it is seen
"""

from __future__ import annotations

import argparse
import base64
import heapq
import itertools
import json
import math
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.error import HTTPError

import psycopg
import redis
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from rich.console import Console
from rich.table import Table

import multilock
from multilock import now
from multilock.model import LockInfo, parse_owner
from multilock.testing import Helper, Network
from multilock.testing.beliefs import Belief, FaultPeriod, LedgerServer, Record
from multilock.testing.beliefs.witness import STALLED
from multilock.testing.conformance.faces import background
from multilock.values import decode_value
from tests.faults.contender import SHORT_HOLD
from tests.faults.defects import DEFECTS
from tests.faults.habits import HABITS
from tests.servers import RedisServer
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer, etcdctl
from tests.servers_postgresql import PostgresqlServer
from tests.servers_zookeeper import ZooKeeperServer

__all__ = [
    "ARENAS",
    "Arena",
    "Chaos",
    "ConsulArena",
    "EtcdArena",
    "LateEtcdArena",
    "PostgresqlArena",
    "RedisArena",
    "Report",
    "ServerArena",
    "SqliteArena",
    "Stream",
    "ZooKeeperArena",
    "overstays",
    "run",
]

NAMES = ("red", "green", "blue", "cyan", "amber", "violet")
KEYS = [f"multilock/{name}" for name in NAMES]
PROCESSES = 8
CONTENDERS = 50
# The habits of the processes, in the order of their numbers. Further processes have no habit.
HABITS_BY_PLACE = [[], *([habit] for habit in HABITS), list(HABITS)]
PROCESS_PACE = 0.07  # seconds between two faults of processes, on average
SERVER_PACE = 0.4  # share of a ttl between two faults of the server, on average
MOMENT = 0.5  # seconds for which a fault waits at most for a fitting moment
FOR_A_WHILE = (
    SHORT_HOLD,
    math.inf,
)  # the least and the greatest age in seconds of a lock that counts as held for a while
# The least and the greatest age in seconds of a lock that has hardly been renewed yet.
JUST_NOW = (SHORT_HOLD, SHORT_HOLD + 0.1)
BEFORE_RENEWAL = (0.005, 0.12)  # least and greatest time until the next renewal, as shares of a ttl
RECOVERY = 0.1  # seconds between two faults of one process
TOLD_WITHIN = 5.0  # seconds within which a stopped process can report its stop, on a busy machine
SHORT_STOP = 0.05  # seconds; a process certainly notices a stop of this length
# Seconds within which a callback must start. It passes through three threads, and each may pause unnoticed for STALLED
# seconds.
CALLBACK_WITHIN = 3 * STALLED
STREAMS = 3  # streams of faults that hit processes; while one stream waits for a fitting moment, the others continue
AT_ONCE = 4  # the greatest number of processes with a fault at the same time
CUT_OFF_TOO = 2  # so many further processes may have a fault if they are cut off just after they got a lock
LOOK_EVERY = 0.5


# ---- the servers and networks


class Arena:
    """One backend with the servers on which contenders compete. ``ttl`` is as short as the backend allows."""

    scheme: ClassVar[str]
    ttl: ClassVar[float] = 0.75
    url: str
    asked_again: ClassVar[float] = 0.0  # seconds for which clients send no request to a server that did not reply
    taken: dict[str, float]
    """Sessions that an operator ends, and when: see `Record.taken`."""

    def __init__(self, stack: ExitStack) -> None:
        """Start the servers. They are stopped when ``stack`` is closed."""
        self.taken = {}

    def url_for(self, place: int) -> str:
        """Return the URL under which the process with the number ``place`` reaches the servers."""
        return self.url

    def standing(self) -> Iterator[str]:
        """Yield lines about each name's state at the server, for the report of a name that nobody can acquire."""
        return iter(())

    def leftovers(self) -> Iterator[str]:
        """Yield violations of O7: all keys that a run leaves behind must expire in a known time."""
        raise NotImplementedError


class SqliteArena(Arena):
    """A file of SQLite without a server, so only processes have faults."""

    scheme = "sqlite"

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="multilock-chaos-"))
        self.url = f"sqlite://{folder}/locks.db"

    def leftovers(self) -> Iterator[str]:
        with multilock.connect(self.url) as client:
            until = now() + self.ttl + 1.0
            while (left := list(client.inspect_all())) and now() < until:
                time.sleep(0.02)
        if left:
            yield f"O7: {left} are left"


Mishaps = dict[str, tuple[float, Callable[[random.Random], None]]]


class Pausable(Protocol):
    @property
    def url(self) -> str: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class RemoteArena(Arena):
    """Each process has its own network to the servers, in which faults happen."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self.networks = [stack.enter_context(closing(Network(self.url))) for _ in range(PROCESSES)]
        self.mishaps: Mishaps = {}
        """Further faults of the servers: the weight of each, compared with a pause of the server (0.7), and the
        function that causes it."""

    def url_for(self, place: int) -> str:
        return self.networks[place].url

    def cut(self, dice: random.Random) -> None:
        for proxy in itertools.chain(*(network.proxies for network in self.networks)):
            for connection in proxy.connections:
                if dice.random() < 0.4:
                    connection.cut()

    def holders(self, record: Record) -> set[int | None]:
        """Return the processes that are holders at the server, but have not recorded it yet."""
        infos = [info for info in self.held() if (info.owner or "").partition("@")[0] not in record.beliefs]
        return {info.pid for info in infos}

    def held(self) -> Iterable[LockInfo]:
        """Return the holders of all names, read from the server without multilock."""
        raise NotImplementedError


class ServerArena(RemoteArena):
    """An arena with one server of its own, which may have faults, too."""

    server: Pausable
    by_session = True  # a lock lives as long as its session
    one_at_a_time = False  # if True, the only fault isolates one holder after another before it renews its session

    def __init__(self, stack: ExitStack) -> None:
        self.url = self.server.url
        super().__init__(stack)


class RedisArena(ServerArena):
    scheme = "redis"
    by_session = False

    def __init__(self, stack: ExitStack) -> None:
        self.server = server = stack.enter_context(RedisServer())
        super().__init__(stack)
        self.operator = stack.enter_context(redis.Redis(port=server.port))
        self.mishaps = {"connections cut": (4, self.cut), "SCRIPT FLUSH": (2, lambda _: self.operator.script_flush())}

    def held(self) -> list[LockInfo]:
        together = itertools.chain(*(self.operator.zrange(f"{{{key}}}:holders", 0, -1) for key in KEYS))
        return [parse_owner(owner.decode()) for owner in (*self.operator.mget(KEYS), *together) if owner]

    def cut(self, dice: random.Random) -> None:
        operator = self.operator
        clients = [client["id"] for client in operator.client_list() if int(client["id"]) != operator.client_id()]
        for client in dice.sample(clients, min(len(clients), 8)):
            operator.client_kill_filter(_id=client)

    def leftovers(self) -> Iterator[str]:
        until = now() + self.ttl + 2.0
        while (clients := len(self.operator.client_list())) > 1 and now() < until:
            time.sleep(0.05)
        if clients > 1:
            yield f"O7: {clients - 1} connections are left"
        while self.operator.exists(*KEYS) and now() < until:
            time.sleep(0.05)
        for key in self.operator.scan_iter():
            if overstays(key.decode(), left := self.operator.pttl(key)):
                yield f"O7: the key {key!r} is left, and ends in {left} ms"


def overstays(key: str, left: int) -> bool:
    """Return whether a key with this PTTL reply is kept longer than allowed.

    PTTL is -1 if the key never expires, 0 in the last millisecond of its life, and -2 after its end.
    """
    longest = {"token": 610_000, "queue": 60_000, "live": 60_000, "gone": 60_000}
    return left == -1 or left > longest.get(key.partition("}:")[2].partition(":")[0], -1)


class EtcdArena(ServerArena):
    """An etcd member, which is also killed and started again with its data."""

    scheme = "etcd"
    ttl = 2.0
    # seconds of a long outage; 0 means a little longer than a process with the habit "short clean-up" repeats a cancel
    outage: ClassVar[float] = 0.0

    def __init__(self, stack: ExitStack) -> None:
        self.server: EtcdServer = stack.enter_context(EtcdServer())
        super().__init__(stack)
        self.mishaps = {
            "connections cut": (4, self.cut),
            "server killed": (0.6, lambda _: self.server.restart()),
            "server away for long": (0.1, self.away),
        }

    def away(self, dice: random.Random) -> None:
        """Kill the server for longer than a process with the habit "short clean-up" repeats a cancel. The restarted
        server begins the ttl of each lease anew."""
        self.server.kill()
        time.sleep(self.outage or dice.uniform(2.2, 2.6) * self.ttl)
        self.server.start()

    def held(self) -> Iterator[LockInfo]:
        ends = {"key": "multilock/", "range_end": "multilock0"}
        coded = {part: base64.b64encode(key.encode()).decode() for part, key in ends.items()}
        try:
            rows = self.server.post("kv/range", {**coded, "sort_target": "CREATE"}, 0.2).get("kvs", [])
        except OSError:
            return
        first = dict.fromkeys(NAMES, "")
        for row in rows:
            name = base64.b64decode(row["key"]).decode().split("/")[1]
            if first.get(name) == "":
                first[name] = row["value"]
        yield from (decode_value(base64.b64decode(value)) for value in first.values() if value)

    def standing(self) -> Iterator[str]:
        """Yield the keys of each name in order of arrival, with the remaining time of their leases."""
        rows = json.loads(etcdctl(self.server.endpoint, "get", "--prefix", "multilock/", "-w", "json")).get("kvs", [])
        left: dict[int, str] = {}
        for row in sorted(rows, key=lambda row: row["create_revision"]):
            lease = row.get("lease", 0)
            if lease not in left:
                left[lease] = etcdctl(self.server.endpoint, "lease", "timetolive", f"{lease:x}").strip()
            info = decode_value(base64.b64decode(row.get("value", "")))
            yield f"{base64.b64decode(row['key']).decode()} at {row['create_revision']}, pid {info.pid}, {left[lease]}"

    def leftovers(self) -> Iterator[str]:
        until = now() + self.ttl + 2.0
        while True:
            keys = etcdctl(self.server.endpoint, "get", "--prefix", "--keys-only", "multilock/").split()
            leases = etcdctl(self.server.endpoint, "lease", "list").split()[3:]
            if not keys and not leases:
                return
            if now() > until:
                yield f"O7: the keys {keys} and leases {leases} are left"
                return
            time.sleep(0.05)


class LateEtcdArena(EtcdArena):
    """An arena for one defect: a holder believes that it holds a lock, although the lease has ended.

    Other faults would hide this defect: a restarted server renews its leases, and a waiter that has a fault keeps the
    next waiter from getting the lock.
    """

    ttl = 4.0  # the member ends a lease up to 0.5 s late
    one_at_a_time = True


class ConsulArena(ServerArena):
    """A Consul server with a disk, which is also killed and started again. An operator destroys sessions."""

    scheme = "consul"

    def __init__(self, stack: ExitStack) -> None:
        self.server: ConsulServer = stack.enter_context(ConsulServer(keep=True, session_ttl_min="100ms"))
        super().__init__(stack)
        self.mishaps = {
            "connections cut": (3, self.cut),
            "session destroyed": (3, self.destroy),
            "server killed": (0.3, lambda _: self.server.restart()),
        }

    def entries(self) -> Iterator[tuple[str, LockInfo]]:
        """Yield sessions, each with a lock held in it."""
        try:
            entries = self.server.ask("GET", "kv/multilock/?recurse&consistent", within=0.2)
        except HTTPError as error:
            if error.code == 404:  # no lock is held
                return
            raise
        yield from ((entry.get("Session", ""), decode_value(base64.b64decode(entry["Value"]))) for entry in entries)

    def keys(self) -> list[str]:
        try:
            keys: list[str] = self.server.ask("GET", "kv/multilock/?keys&consistent", within=5.0)
        except HTTPError as error:
            if error.code == 404:
                return []
            raise
        return keys

    def held(self) -> Iterator[LockInfo]:
        with suppress(OSError):
            yield from (info for _, info in self.entries())

    def destroy(self, dice: random.Random) -> None:
        with suppress(OSError):
            holding = [id for id, _ in self.entries() if id]
            chosen = dice.choice(holding or [session["ID"] for session in self.server.sessions()])
            self.taken.setdefault(chosen, now())  # even without a reply, since a stopped server may execute it later
            self.server.ask("PUT", f"session/destroy/{chosen}", within=1.0)

    def leftovers(self) -> Iterator[str]:
        # A client that acquires a name exclusively removes the keys of a killed reader, or of the last holder of a
        # semaphore.
        with multilock.connect(self.url, ttl=self.ttl) as client:
            for name in {key.split("/")[1] for key in self.keys()}:
                client.lock(name).acquire(timeout=4 * self.ttl + 5.0).release()
        until = now() + 2 * self.ttl + 5.0  # the server ends a session only at twice its ttl
        while True:
            sessions = self.server.sessions()
            keys = self.keys()
            if not keys and not sessions:
                return
            if now() > until:
                yield f"O7: the keys {keys} and the sessions {sessions} are left"
                return
            time.sleep(0.05)


class ZooKeeperArena(ServerArena):
    """A ZooKeeper server with a disk, which is also killed and started again."""

    scheme = "zookeeper"
    ttl = 1.5
    handshake = 6.0  # seconds; the operator's session timeout, which limits its wait for a reply

    def __init__(self, stack: ExitStack) -> None:
        self.server: ZooKeeperServer = stack.enter_context(ZooKeeperServer())
        super().__init__(stack)
        retry = {"max_tries": -1, "delay": 0.05, "max_delay": 0.2}
        self.operator = KazooClient(self.server.endpoint, timeout=self.handshake, connection_retry=retry)
        self.operator.start()
        stack.callback(self.operator.close)  # called after stop(), which leaves the client's sockets open
        stack.callback(self.operator.stop)
        self.mishaps = {
            "connections cut": (4, self.cut),
            "server killed": (0.3, lambda _: self.server.restart()),
            "server with other limits": (0.15, self.limit),
        }

    def limit(self, dice: random.Random) -> None:
        """Restart the server with another upper limit of session timeouts. The restarted server lowers longer timeouts
        to this limit, even those of existing sessions."""
        self.server.settings["maxSessionTimeout"] = dice.choice([int(700 * self.ttl), 60_000])
        self.server.restart()

    def held(self) -> Iterator[LockInfo]:
        if not self.operator.connected:  # without a connection, a reply would come too late
            return
        until = now() + 0.2
        listed = {name: self.operator.get_children_async(f"/multilock/{name}") for name in NAMES}
        asked = []
        with suppress(KazooTimeoutError):
            for name, answer in listed.items():
                with suppress(KazooException, ValueError):  # ValueError: no holder
                    holder = min(answer.get(timeout=until - now()), key=lambda child: int(child[-10:]))
                    asked.append(self.operator.get_async(f"/multilock/{name}/{holder}"))
            for answer in asked:
                with suppress(KazooException):
                    yield decode_value(answer.get(timeout=until - now())[0])

    def contenders(self, name: str, within: float) -> list[str]:
        try:
            children: list[str] = self.operator.get_children_async(f"/multilock/{name}").get(timeout=within)
        except NoNodeError:
            return []
        return children

    def leftovers(self) -> Iterator[str]:
        until = now() + 2 * self.handshake
        while not self.operator.connected and now() < until:
            time.sleep(0.05)
        until = now() + self.ttl + 2.0
        while True:
            nodes = [node for name in NAMES for node in self.contenders(name, 5.0)]
            sessions = self.server.metric("zk_global_sessions") - 1
            if not nodes and not sessions:
                return
            if now() > until:
                yield f"O7: the nodes {nodes} and {sessions} sessions are left"
                return
            time.sleep(0.05)


class PostgresqlArena(ServerArena):
    """A PostgreSQL server with a disk. Its processes are stopped or ended, and it is also killed and started again."""

    scheme = "postgresql"
    ttl = 3.0  # a reconnect after a lost reply takes long, because the server starts a process for it
    by_session = False
    asked_again = 15.0  # seconds for which a name stays taken if it was handed over just before a crash

    def __init__(self, stack: ExitStack) -> None:
        self.server: PostgresqlServer = stack.enter_context(PostgresqlServer(wal_writer_delay="10s"))
        super().__init__(stack)
        self.mishaps = {
            "sessions ended": (4, self.cut),
            "requests cancelled": (2, lambda dice: self.end_some(dice, "pg_cancel_backend")),
            "server killed": (0.3, lambda _: self.server.restart()),
        }

    def ask(self, sql: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Execute a statement, unless the server is away. Returns its rows, or none."""
        try:
            with psycopg.connect(self.url, autocommit=True, connect_timeout=2) as operator:
                return operator.execute(sql, arguments).fetchall()
        except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
            return []

    def cut(self, dice: random.Random) -> None:
        self.end_some(dice, "pg_terminate_backend")

    def end_some(self, dice: random.Random, function: str) -> None:
        listed = "SELECT pid FROM pg_stat_activity WHERE application_name = 'multilock'"
        pids = [pid for (pid,) in self.ask(listed)]
        self.ask(f"SELECT {function}(pid) FROM unnest(%s::int[]) pid", dice.sample(pids, min(len(pids), 8)))

    def held(self) -> list[LockInfo]:
        owners = (
            "SELECT id || who FROM multilock.locks WHERE until > clock_timestamp() AND id NOT LIKE '#%%' "
            "UNION ALL SELECT id || who FROM multilock.holders WHERE until > clock_timestamp() AND id NOT LIKE '#%%'"
        )
        return [parse_owner(owner) for (owner,) in self.ask(owners)]

    def standing(self) -> Iterator[str]:
        for table in ("locks", "holders", "queue", "alive"):
            yield from (f"{table}: {row}" for row in self.ask(f"SELECT *, clock_timestamp() FROM multilock.{table}"))

    def leftovers(self) -> Iterator[str]:
        left = (
            "SELECT key, id FROM multilock.locks WHERE until > clock_timestamp() "
            "UNION ALL SELECT key, id FROM multilock.holders WHERE until > clock_timestamp() "
            "UNION ALL SELECT key, id FROM multilock.queue WHERE until > clock_timestamp() "
            "UNION ALL SELECT 'connection', pid::text FROM pg_stat_activity WHERE application_name = 'multilock'"
        )
        until = now() + self.ttl + 8.0  # a name that was handed to a killed process stays taken for 6 s
        while (rows := self.ask(left)) and now() < until:
            time.sleep(0.05)
        if rows:
            yield f"O7: {rows} are left"


ARENAS: dict[str, type[Arena]] = {
    "redis": RedisArena,
    "sqlite": SqliteArena,
    "etcd": EtcdArena,
    "etcd-late": LateEtcdArena,
    "consul": ConsulArena,
    "zookeeper": ZooKeeperArena,
    "postgresql": PostgresqlArena,
}


# ---- the faults


Since = tuple[float, float]
"""Seconds, from and to."""

Happening = Callable[[], bool]
"""A function that causes a fault. It returns False if the right moment for the fault has not come."""


class Stream:
    """A stream of faults, one after another."""

    def __init__(self, dice: random.Random, kinds: Mapping[Happening, float], pace: float) -> None:
        self._dice, self._kinds, self._pace = dice, kinds, pace
        self._next: Happening | None = None
        self._next_at = now() + 1.0
        self._give_up_at = 0.0

    def step(self, at: float) -> None:
        if at < self._next_at:
            return
        if self._next is None:
            [self._next] = self._dice.choices(list(self._kinds), list(self._kinds.values()))
            self._give_up_at = at + MOMENT
        if self._next() or at > self._give_up_at:
            self._next = None
            self._next_at = at + self._dice.expovariate(1 / self._pace)


class Chaos:
    """The processes, the present faults, and the way to undo each fault."""

    names: Sequence[str] = NAMES
    processes = PROCESSES
    at_once = AT_ONCE
    contender = "tests.faults.contender:contend"

    def __init__(
        self, arena: Arena, ledger: LedgerServer, seed: int, habits: Sequence[str], defect: str, mixed: bool
    ) -> None:
        self.arena, self.ledger, self.habits, self.defect, self.mixed = arena, ledger, habits, defect, mixed
        self.dice = random.Random(seed)
        self.seed = seed
        self.helpers: dict[int, Helper] = {}  # by place, which is the number of a process
        self.gone: list[Helper] = []
        self.faults: list[FaultPeriod] = []
        self.told_to_stop_at = math.inf
        self.scene: list[str] = []  # the state of the server when a name could not be acquired
        self.record = Record(arena.taken)
        self._read: Counter[Helper] = Counter()
        self._busy: set[int | str | None] = set()  # places (None: the server) with a fault under way
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # pending actions with their times
        self._numbers = itertools.count()
        self.starts = itertools.count()

    def start(self, place: int) -> None:
        threads, more = divmod(CONTENDERS, PROCESSES)
        threads += place < more
        habits = self.habits or (HABITS_BY_PLACE[place] if place < len(HABITS_BY_PLACE) else [])
        self.helpers[place] = Helper(
            self.contender,
            self.arena.url_for(place), self.arena.ttl, ",".join(NAMES), threads - 2, 2, self.ledger.path,
            f"{self.seed}.{next(self.starts)}", ";".join(habits), self.defect, "mixed" if self.mixed else "",
        )  # fmt: skip

    def close(self) -> None:
        for helper in (*self.helpers.values(), *self.gone):
            helper.close()

    def collect(self) -> None:
        """Read the lines that contenders wrote since the last call."""
        for helper in (*self.gone, *self.helpers.values()):
            for line in itertools.islice(helper.lines, self._read[helper], None):
                self.feed(helper.pid, line)
                self._read[helper] += 1

    def feed(self, pid: int, line: str) -> None:
        self.record.feed(pid, line)

    def do_what_is_due(self, at: float) -> None:
        while self._later and self._later[0][0] <= at:
            heapq.heappop(self._later)[2]()

    def streams(self) -> list[Stream]:
        if isinstance(self.arena, ServerArena) and self.arena.one_at_a_time:
            return [Stream(self.dice, {self.cut_off_before_a_renewal: 1}, PROCESS_PACE)]
        processes: dict[Happening, int] = {
            partial(what, holding): weight * share
            for what, weight in ((self.freeze, 10), (self.kill, 6))
            for holding, share in ((FOR_A_WHILE, 4), (None, 1))
        }
        if not isinstance(self.arena, ServerArena):
            return [Stream(self.dice, processes, PROCESS_PACE) for _ in range(STREAMS)]
        processes |= {partial(self.partition, FOR_A_WHILE): 10, self.freeze_a_new_holder: 30}
        server: dict[Happening, float] = {self.freeze_server: 0.7}
        for kind, (weight, what) in self.arena.mishaps.items():
            server[partial(self.hurt_server, kind, what)] = weight
        streams = [Stream(self.dice, processes, PROCESS_PACE) for _ in range(STREAMS)]
        if self.arena.by_session:  # a rare fault needs a stream of its own
            streams.append(Stream(self.dice, {partial(self.partition, JUST_NOW): 1}, PROCESS_PACE))
        return [*streams, Stream(self.dice, server, SERVER_PACE * self.arena.ttl)]

    def _rest(self, *, always_long: bool = False) -> float:
        """Return how long a fault lasts. Most faults outlast a lease that is not renewed."""
        long = always_long or self.dice.random() < 0.6
        return self.arena.ttl * (self.dice.uniform(1.1, 1.4) if long else self.dice.uniform(0.05, 0.9))

    def _pick(self, holding: Since | None) -> int | None:
        """Choose a process without a fault that has held a lock for a time in this range. Returns None if no process
        fits."""
        free = [place for place in self.helpers if place not in self._busy]
        if len(free) <= self.processes - self.at_once - CUT_OFF_TOO * (holding is JUST_NOW):
            return None
        if holding:
            pids = {belief.pid for belief in self._holding(holding)}
            free = [place for place in free if self.helpers[place].pid in pids]
        return self.dice.choice(free) if free else None

    def _holding(self, since: Since) -> list[Belief]:
        at, (least, most) = now(), since
        return [belief for belief in self.record.held_at(None, at) if least < at - belief.began < most]

    def _do(self, after: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._later, (now() + after, next(self._numbers), what))

    def _begin(
        self, kind: str, place: int | None, end: Callable[[], None], after: float, *, stops: bool = False
    ) -> None:
        pid = None if place is None else self.helpers[place].pid
        fault = FaultPeriod(kind, pid, now(), stops=stops)
        self.faults.append(fault)
        self._busy.add(place)

        def undo() -> None:
            end()
            fault.end = now()
            self._do(RECOVERY, recover)

        def recover() -> None:
            """Wait until a stopped process has reported its stop. If it were killed first, the stop would not be
            recorded."""
            if stops and not self._has_told_of(fault) and now() < fault.end + TOLD_WITHIN:
                self._do(RECOVERY, recover)
            else:
                self._busy.discard(place)

        self._do(after, undo)

    def _has_told_of(self, stop: FaultPeriod) -> bool:
        stalls = self.record.stalls[stop.pid or 0]
        return stop.end - stop.start < SHORT_STOP or any(end > stop.end for _, end in stalls)

    def _happened(self, kind: str, pid: int | None = None) -> None:
        self.faults.append(FaultPeriod(kind, pid, now(), now()))

    # Processes

    def freeze(self, holding: Since | None) -> bool:
        if (place := self._pick(holding)) is None:
            return False
        helper = self.helpers[place]
        self._begin("process stopped", place, helper.resume, self._rest(), stops=True)
        helper.signal(signal.SIGSTOP)
        return True

    def kill(self, holding: Since | None) -> bool:
        if (place := self._pick(holding)) is None:
            return False
        self.kill_at(place)
        return True

    def kill_at(self, place: int) -> None:
        """Kill the process with the number ``place`` and start another one in its place."""
        helper = self.helpers[place]
        self._happened("process killed", helper.pid)
        helper.kill()
        self.gone.append(helper)
        self.start(place)

    def partition(self, holding: Since | None) -> bool:
        if (place := self._pick(holding)) is None:
            return False
        assert isinstance(self.arena, RemoteArena)
        network = self.arena.networks[place]
        self._begin("partition", place, network.heal, self._rest(always_long=holding is JUST_NOW))
        network.black_hole(self.dice.choice(["both", "up", "down"]))
        return True

    def cut_off_before_a_renewal(self) -> bool:
        """Cut off a process that has just got a lock in a session that it renewed long ago."""
        assert isinstance(self.arena, RemoteArena)
        at, due = now(), self.record.renewals
        soon, late = (at + self.arena.ttl * share for share in BEFORE_RENEWAL)
        pids = {belief.pid for belief in self._holding(JUST_NOW) if soon < due.get(belief.id, 0.0) < late}
        place = next((place for place, helper in self.helpers.items() if helper.pid in pids), None)
        if self._busy or place is None:
            return False
        network = self.arena.networks[place]
        self._begin("cut off before a renewal", place, network.heal, self._rest(always_long=True))
        network.black_hole(self.dice.choice(["both", "up"]))  # not "down", because then the renewals would still arrive
        return True

    def freeze_a_new_holder(self) -> bool:
        """Slow the network of a process, and stop it while the reply that makes it a holder is on its way."""
        assert isinstance(self.arena, RemoteArena)
        arena, place = self.arena, self._pick(None)
        if place is None or None in self._busy:
            return False
        helper, network = self.helpers[place], arena.networks[place]
        slow = self.dice.uniform(0.05, 0.12)
        self._busy.add(place)
        network.delay(slow, "down")
        give_up = now() + 1.0

        def end() -> None:
            network.heal()
            helper.resume()

        def freeze() -> None:
            self._begin("stopped as it got the lock", place, end, self._rest(), stops=True)
            helper.signal(signal.SIGSTOP)

        def look() -> None:
            if now() > give_up:
                network.heal()
                self._busy.discard(place)
            elif None not in self._busy and helper.pid in arena.holders(self.record):
                self._do(slow * 1.5, freeze)  # the wake-up and then the reply are delayed by `slow` seconds each
            else:
                self._do(0.005, look)

        look()
        return True

    # The server

    def freeze_server(self) -> bool:
        assert isinstance(self.arena, ServerArena)
        if None in self._busy:
            return False
        self._begin("server stopped", None, self.arena.server.resume, self._rest())
        self.arena.server.pause()
        return True

    def hurt_server(self, kind: str, what: Callable[[random.Random], None]) -> bool:
        if None in self._busy:
            return False
        fault = FaultPeriod(kind, None, now())
        self.faults.append(fault)
        self._busy.add(None)
        done = background(
            partial(what, random.Random(self.dice.random()))
        )  # in another thread, because a start of a server takes a second

        def look() -> None:
            if done.done():
                done.result(0)
                fault.end = now()
                self._busy.discard(None)
            else:
                self._do(0.005, look)

        look()
        return True

    # ---- the end

    def stacks(self) -> Iterator[str]:
        """Yield what each thread of each process is doing now."""
        for helper in self.helpers.values():
            helper.signal(signal.SIGUSR1)
        time.sleep(1.0)
        yield from (f"process {helper.pid}:\n{helper.errors}" for helper in self.helpers.values())

    def stood_still(self, since: float) -> float:
        """Return for how many seconds after ``since`` nobody could get a lock although there was no fault.

        Subclasses override this.
        """
        return 0.0

    def standstills(self) -> Iterator[FaultPeriod]:
        """Yield pauses that no fault caused but that count as faults. Subclasses override this."""
        return iter(())

    def seen(self) -> Iterator[str]:
        """Yield the violations found so far. Subclasses override this."""
        return iter(())

    def judged(self) -> Iterator[str]:
        """Yield further violations at the end of the run. Subclasses override this."""
        return iter(())

    def told(self) -> list[str]:
        """Return further lines for the report. Subclasses override this."""
        return []

    def calm(self, bound: float, within: float) -> Iterator[str]:
        """Undo all faults. Then every name must get a holder, and every process must end by itself."""
        while self._later:
            self.do_what_is_due(self._later[0][0])
            time.sleep(0.01)
            self.collect()
        began = now()
        stuck = set(self.names)
        patience = bound + 2 * self.arena.ttl
        while now() < began + 2 * self.arena.ttl or (stuck and now() < began + patience + self.stood_still(began)):
            self.collect()
            stuck -= {belief.name for belief in self.record.beliefs.values() if belief.began > began}
            time.sleep(0.02)
        yield from (f"O5 {name}: all faults have ended, and nobody got it for {now() - began:.2f} s" for name in stuck)
        if stuck:
            self.scene += [*self.arena.standing(), *self.stacks()]
        self.told_to_stop_at = now()
        for helper in self.helpers.values():
            helper.tell("stop")
        until = now() + within
        for helper in self.helpers.values():
            try:
                helper.wait_for("end", max(0.1, until - now()))
            except AssertionError as error:
                yield f"O7: a process did not end: {error}"
        self.collect()


# ---- the report


@dataclass
class Report:
    seconds: float
    record: Record
    faults: list[FaultPeriod]
    writes: int = 0
    refused: int = 0
    violations: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    again: str = ""  # the command that repeats the run

    @property
    def acquisitions(self) -> int:
        return len(self.record.beliefs)

    @property
    def by_mode(self) -> Counter[str]:
        return Counter(belief.mode for belief in self.record.beliefs.values())

    @property
    def acquired_with(self) -> Counter[str]:
        """Return how many locks were acquired by processes of each habit."""
        return Counter(
            habit for belief in self.record.beliefs.values() for habit in self.record.habits.get(belief.pid, ["-"])
        )

    def outlived(self, fault: FaultPeriod) -> bool:
        """Return whether a lease that was held when the fault began ended during the fault."""
        held = self.record.held_at(fault.pid, fault.start)
        if fault.kind == "process killed":
            return bool(held)
        return any(fault.start <= lost_at <= fault.end for belief in held for _, _, lost_at in belief.losses)

    @property
    def outliving(self) -> int:
        return sum(map(self.outlived, self.faults))

    def show(self) -> None:
        table = Table("fault", "times", "outlived a lease", title=f"{self.seconds:.0f} s of chaos")
        kinds = Counter(fault.kind for fault in self.faults)
        outlived = Counter(fault.kind for fault in self.faults if self.outlived(fault))
        for kind, times in kinds.most_common():
            table.add_row(kind, str(times), str(outlived[kind]))
        table.add_section()
        table.add_row("all", str(len(self.faults)), str(self.outliving))
        console = Console()
        console.print(table)
        console.print(", ".join(f"{habit}: {times}" for habit, times in self.acquired_with.most_common()))
        if len(self.by_mode) > 1:
            console.print(", ".join(f"mode {mode}: {times}" for mode, times in self.by_mode.most_common()))
        losses = sum(bool(belief.losses) for belief in self.record.beliefs.values())
        console.print(
            f"{self.acquisitions} acquisitions, {losses} losses ({self.record.judged_callbacks} of them noticed by a "
            f"running process); {self.writes} fenced writes, {self.refused} refused; {len(self.violations)} violations"
        )
        told = [*self.told, *(f"  {violation}" for violation in self.violations)]
        if self.violations:
            told += [f"again: {self.again}", *self._history()]
        for line in told:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _history(self) -> Iterator[str]:
        """Yield a line for each fault: its times in seconds since the first fault, and the names held at its end."""
        for fault in self.faults:
            held = ", ".join(sorted({belief.name for belief in self.record.held_at(None, fault.end)}))
            since = [at - self.faults[0].start for at in (fault.start, fault.end)]
            yield f"  {since[0]:8.3f} to {since[1]:8.3f} {fault.kind}, process {fault.pid}; then held: {held or '-'}"


@contextmanager
def _chaos(
    kind: type[Chaos], arena: type[Arena], seed: int, habits: Sequence[str], defect: str, mixed: bool
) -> Iterator[Chaos]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="multilock-chaos-"))
        ledger = LedgerServer(Path(folder, "ledger"))
        stack.callback(ledger.close)
        chaos = kind(arena(stack), ledger, seed, habits, defect, mixed)
        stack.callback(chaos.close)
        for place in range(chaos.processes):
            chaos.start(place)
        for helper in chaos.helpers.values():
            helper.wait_for("ready", within=20)
        yield chaos


def run(
    arena: type[Arena],
    seconds: float,
    *,
    seed: int = 0,
    habits: Sequence[str] = (),
    defect: str = "",
    mixed: bool = False,
    enough: Callable[[Report], bool] = lambda _: True,
    kind: type[Chaos] = Chaos,
) -> Report:
    """Run chaos for ``seconds``, or until the first violation.

    On a busy machine too little may happen in that time. Then the run continues until ``enough`` returns True, for up
    to four times as long. ``mixed`` adds locks of every kind.
    """
    again = f"seed {seed}, {arena.__name__}, {kind.__name__}, {seconds:g} s, defect {defect!r}, mixed {mixed}"
    with _chaos(kind, arena, seed, habits, defect, mixed) as chaos:
        record, ledger = chaos.record, chaos.ledger
        started, look_at, streams = now(), now() + LOOK_EVERY, chaos.streams()
        until = started + seconds
        violations: list[str] = []
        while not violations:
            if (at := now()) >= until:
                if at >= started + 4 * seconds or enough(Report(at - started, record, chaos.faults)):
                    break
                until = at + LOOK_EVERY
            chaos.collect()
            for stream in streams:
                stream.step(at)
            if at >= look_at:
                violations = [*record.overlaps(), *record.token_regressions(), *ledger.lost]
                violations += record.miscounted_callbacks(set())
                violations += chaos.seen()
                look_at = at + LOOK_EVERY
            chaos.do_what_is_due(at)
            time.sleep(0.005)
        lasted = now() - started
        if not violations:
            bound = _bound(chaos.arena) + chaos.arena.asked_again
            violations += chaos.calm(bound, within=15.0)
            violations += record.overlaps()
            violations += (f"O2 {lost}" for lost in ledger.lost)
            violations += record.token_regressions()
            faults = [*chaos.faults, *chaos.standstills()]
            violations += record.late_callbacks(CALLBACK_WITHIN, faults)
            violations += record.slow_takeovers(faults, bound, chaos.arena.ttl, chaos.told_to_stop_at)
            violations += record.miscounted_callbacks(set(record.ends))
            violations += (f"O7: process {pid} ended with {end}" for pid, end in record.ends.items() if end != ("-", 0))
            violations += record.wrong
            violations += chaos.seen()
            violations += chaos.judged()
            violations += chaos.arena.leftovers()
        told = [*chaos.told(), *(f"excused by pauses of the machine: {each}" for each in record.excused), *chaos.scene]
        return Report(lasted, record, chaos.faults, ledger.accepted, ledger.refused, violations, told, again)


def _bound(arena: Arena) -> float:
    with multilock.connect(arena.url, ttl=arena.ttl) as client:
        return client.capabilities.takeover_bound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=ARENAS, help="default: redis, or that of the defect")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--outage", type=float, default=0.0, help="seconds of etcd's long ones: 75 outlast a clean-up")
    parser.add_argument("--habits", choices=HABITS, nargs="+", default=(), metavar="HABIT", help=", ".join(HABITS))
    here = [name for name, defect in DEFECTS.items() if defect.arena in ARENAS]
    parser.add_argument("--defect", choices=here, default="")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--must-be-seen", action="store_true", help="fail where the oracles of the defect see nothing")
    given = parser.parse_args()
    defect = DEFECTS.get(given.defect)
    arena = ARENAS[given.backend or (defect.arena if defect else "redis")]
    habits = given.habits or (defect.habits if defect else ())
    EtcdArena.outage = given.outage
    print(f"seed {given.seed}")
    report = run(arena, given.seconds, seed=given.seed, habits=habits, defect=given.defect, mixed=given.mixed)
    report.show()
    if given.must_be_seen:
        return not any(violation.startswith(DEFECTS[given.defect].oracles) for violation in report.violations)
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
