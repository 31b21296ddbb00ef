"""A plan: all operations and faults of one run, as data. `make_plan` makes a plan from a seed, and `shrink` makes it
smaller.

The schedule and the network use random numbers of their own, so a smaller plan has the same delays as long as possible.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.server import Simulated

__all__ = [
    "BACKENDS",
    "FACES",
    "PROFILES",
    "Fault",
    "Operation",
    "Plan",
    "ProcessPlan",
    "Weather",
    "make_plan",
    "simulated",
]

#: For each backend, the module in this folder that simulates it. Its table ``SIMULATED`` has an entry for the backend.
BACKENDS = {
    "redis": "redis_server",
    "redis+sentinel": "redis_replicas",
    "redis+cluster": "redis_cluster",
    "redlock": "redis_server",
    "postgresql": "postgresql_server",
    "consul": "consul_server",
    "etcd": "etcd_server",
    "zookeeper": "zookeeper_client",
    "sqlite": "sqlite_file",
    "memory": "memory_store",
}
FACES = ("blocking", "asyncio")
MOST_OPERATIONS = 30  # the greatest number of operations of one worker


@dataclass(slots=True)
class Weather:
    """The random delays and failures of the network. Times are seconds. A name with ``p_`` is a probability for each
    packet."""

    base: float = 0.0005  # the usual delay
    p_slow: float = 0.0
    slow: float = 0.02  # the mean of an additional delay
    p_stall: float = 0.0
    stall: float = 1.0  # the mean of a long delay
    p_cut: float = 0.0  # probability that a connection breaks at a packet
    p_late: float = 0.5  # probability that data of a closed connection is still executed


@dataclass(slots=True)
class Operation:
    """One acquire, and what happens after it. Times are seconds."""

    kind: str  # lock, read, write, permit, set or lead
    names: list[str]
    ttl: float
    think: float  # seconds of pause before the operation
    hold: float
    step: float  # seconds between two calls of is_held()
    timeout: float | None = None
    fair: bool = False
    renew: bool = True
    reentrant: bool = False
    permits: int = 0
    rest: float = 0.0  # hold_at_least
    cancel: float | None = None  # asyncio: when the acquire is cancelled


@dataclass(slots=True)
class Fault:
    """One fault. See `tests.simulation.faults` for the kinds.

    It happens at the time ``at``. If ``nth`` is not 0, it happens ``at`` seconds after the ``nth`` event of the kind
    ``after``. ``process`` is the number of a process, or -1 for the process of the event.
    """

    kind: str
    at: float
    process: int = -1
    seconds: float = 0.0
    choice: int = 0  # a random number for the choices of the fault
    after: str = ""  # the name of an event in `EVENTS`
    nth: int = 0


@dataclass(slots=True)
class ProcessPlan:
    """One process: its client's options, its clock, and what its threads or tasks do."""

    ttl: float
    outage: float | None
    offset: float
    rate: float
    workers: list[list[Operation]]


@dataclass(slots=True)
class Plan:
    seed: int
    backend: str
    face: str
    profile: str
    seconds: float  # the time at which the faults end
    patience: float  # seconds after the faults within which every operation must end
    weather: Weather
    jitter: float
    p_switch: float
    p_long: float
    replicas: int = 0  # how many replicas must acknowledge a grant, and also a renewal if this is negative
    processes: list[ProcessPlan] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def is_quiet(self) -> bool:
        """Whether the run has no faults, only short delays."""
        return self.profile == "quiet"

    @property
    def operations(self) -> list[Operation]:
        return [each for process in self.processes for worker in process.workers for each in worker]

    def size(self) -> tuple[int, int]:
        return len(self.operations), len(self.faults)

    def to_json(self) -> str:
        """Return the plan as text, with a line for each operation and each fault."""
        return json.dumps(asdict(self)).replace('{"kind"', '\n{"kind"')

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["weather"] = Weather(**data["weather"])
        data["faults"] = [Fault(**each) for each in data["faults"]]
        for process in data["processes"]:
            process["workers"] = [[Operation(**each) for each in worker] for worker in process["workers"]]
        data["processes"] = [ProcessPlan(**each) for each in data["processes"]]
        return cls(**data)


#: For each profile, the kinds of faults at any time, and those that follow an event. A kind that occurs twice is drawn
#: more often. Each backend may add faults and profiles of its own: see `tests.simulation.server.Simulated`.
PROFILES = {
    "quiet": ("", ""),
    "cuts": ("cut cut_all", "cut cut_all"),
    "network": ("part part cut cut_all part_all", "part cut lose_reply late_request late_reply"),
    "slow": ("part cut", "part part pause late_request late_reply"),
    "process": ("pause pause kill close", "pause pause pause kill newcomer"),
    "server": ("stop_server restart flush_scripts cut_all", "stop_server restart"),
    "forget": ("forget force step_clock pause evict", "force force evict evict pause cut cut_all newcomer"),
    "force": ("force", "force force part cut cut_all"),
    "all": (
        "part cut cut_all pause pause kill close stop_server restart flush_scripts",
        "part pause lose_reply late_request late_reply newcomer cut",
    ),
}
OFTEN = "quiet cuts network slow slow process process server force forget all all"
#: Backends without a network have only these faults.
OF_LOCAL = {"pause", "kill", "close", "force", "newcomer"}
#: About how many events of each kind a run has.
#: ``long``: a grant to a worker that holds it for half a ttl or more.
#: ``rare``: the 1st, 2nd, 4th, 8th and so on of the requests of one kind, for each kind of request.
#: ``connects``: the beginning of a connection.
#: ``handed``: a server has given the name to a waiter, which was not notified yet.
#: ``forced``: an operator has ended a lock, whose holder was not notified yet.
EVENTS = {"asked": 40, "granted": 40, "long": 8, "released": 40, "sent": 300, "rare": 40, "connects": 20}
EVENTS |= {"handed": 20, "pushed": 30, "ending": 4, "expired": 4, "forced": 4}
EVENTS_OF_LOCAL = ["asked", "granted", "long", "released"]


def simulated(backend: str) -> Simulated:
    """Return the description of how a backend is simulated."""
    found: Simulated = import_module(f"tests.simulation.{BACKENDS[backend]}").SIMULATED[backend]
    return found


def make_plan(seed: int, backend: str, face: str, profile: str | None = None) -> Plan:
    """Return the plan of this seed. ``profile`` is one of `PROFILES` or of the backend's own profiles. None lets the
    seed choose the profile."""
    has = simulated(backend)
    chance = random.Random(f"plan {seed} {backend}")
    profile = profile or chance.choice(f"{OFTEN} {has.often}".split())
    ttl = chance.choice(has.ttls)
    plan = Plan(
        seed,
        backend,
        face,
        profile,
        seconds=chance.choice([10.0, 20.0, 30.0]),
        patience=60.0,
        weather=_weather(chance, profile, ttl),
        jitter=chance.choice([20e-6, 100e-6]),
        p_switch=chance.choice([0.0, 0.0, 0.05, 0.3]),
        p_long=chance.choice([0.0, 0.002]),
    )
    names = ["a"] if chance.random() < 0.6 else ["a", "b"]
    kinds = ["lock", "lock", "lock", "lead", *(["shared", "permit"] if has.shares else [])]
    families = {name: chance.choice(kinds) for name in names}
    permits = chance.choice([2, 3])
    for _ in range(chance.choice([2, 3, 4])):
        workers = []
        for _ in range(chance.choice([1, 1, 2, 3])):
            workers.append(_operations(chance, plan, names, families, permits, ttl))
        clock = (0.0, 1.0) if not has.servers else (chance.uniform(0, 5000), 1 + chance.uniform(-0.004, 0.004))
        plan.processes.append(ProcessPlan(ttl, chance.choice([None, 30.0, 5.0]), *clock, workers))
    plan.patience += sum(each.hold + each.rest + 0.2 for each in plan.operations)
    plan.faults = _faults(chance, plan, has, ttl)
    if has.replicas:
        plan.replicas = chance.choice([0, 0, 1, has.replicas, -has.replicas])
    return plan


def _weather(chance: random.Random, profile: str, ttl: float) -> Weather:
    weather = Weather(base=chance.choice([0.0001, 0.0005, 0.005]))
    if profile == "cuts":
        return weather
    weather.p_slow, weather.slow = 0.01, 0.02 if profile == "quiet" else chance.choice([0.01, 0.1])
    if profile in ("network", "all", "forget"):
        weather.p_cut = chance.choice([0.0, 0.0, 0.002, 0.01])
        weather.p_stall, weather.stall = chance.choice([0.0, 0.005, 0.02]), chance.choice([0.15, 0.5, 1.5]) * ttl
    if profile in ("slow", "force"):
        weather.p_stall, weather.stall = chance.choice([0.05, 0.2]), 0.3 * ttl
    return weather


def _operations(
    chance: random.Random, plan: Plan, names: list[str], families: dict[str, str], permits: int, ttl: float
) -> list[Operation]:
    operations: list[Operation] = []
    time = 0.0
    while time < plan.seconds and len(operations) < MOST_OPERATIONS:
        name = chance.choice(names)
        kind = families[name]
        if kind == "shared":
            kind = chance.choice(["read", "read", "write"])
        elif kind == "lead" and chance.random() < 0.5:
            kind = "lock"
        length, patience = chance.random(), chance.random()
        operation = Operation(
            kind,
            [name],
            ttl=ttl if chance.random() < 0.8 else chance.choice([1.0, 2.0, 5.0]),
            think=chance.expovariate(1.0) * chance.choice([0.001, 0.1, 1.0]),
            hold=chance.expovariate(1.0) * (0.003 if length < 0.4 else 0.3 if length < 0.8 else ttl),
            step=chance.choice([0.05, 0.1, 0.5, 60.0]),
            timeout=None if patience < 0.5 else 0.0 if patience < 0.65 else chance.choice([0.05, 0.5, 2.0, 10.0]),
            fair=kind == "lock" and chance.random() < 0.3,
            renew=chance.random() < 0.9,
            permits=permits,
        )
        if kind == "lock":
            if len(names) > 1 and set(families.values()) <= {"lock", "lead"} and chance.random() < 0.2:
                operation.kind, operation.names = "set", list(names)
            operation.reentrant = chance.random() < 0.1
            operation.rest = chance.choice([0.1, 0.5]) if chance.random() < 0.1 else 0.0
        if plan.face == "asyncio" and chance.random() < 0.15:
            operation.cancel = chance.expovariate(1.0) * chance.choice([0.001, 0.05, 1.0])
        operations.append(operation)
        time += operation.hold + operation.think + 0.05
    return operations


def _faults(chance: random.Random, plan: Plan, has: Simulated, ttl: float) -> list[Fault]:
    tables = [table[plan.profile] for table in (PROFILES, has.profiles) if plan.profile in table]
    if not tables:
        raise ValueError(f"{plan.backend} has no profile {plan.profile!r}")
    both = [" ".join(words).split() for words in zip(*tables, strict=True)]
    lacks = has.lacks.split()
    anytime, reactive = ([x for x in kinds if x not in lacks and (has.servers or x in OF_LOCAL)] for kinds in both)
    faults = []
    if anytime:
        for _ in range(chance.choice([1, 3, 8])):
            seconds = chance.expovariate(1.0) * chance.choice([0.1, 1.0, ttl, ttl])
            kind, at = chance.choice(anytime), chance.uniform(0.2, plan.seconds)
            process = chance.randrange(len(plan.processes))
            faults.append(Fault(kind, at, process, min(seconds, 30.0), chance.randrange(1 << 30)))
    if reactive:
        for _ in range(chance.choice([0, 5, 20, 40])):
            after = chance.choice([*EVENTS, "long", "long", "sent", "rare", "rare"] if has.servers else EVENTS_OF_LOCAL)
            at = chance.expovariate(1.0) * chance.choice([base := plan.weather.base, base, base, 0.02, ttl / 4])
            # Delays of about a fifth of the ttl (the limit of a request) or about a ttl are drawn more often.
            low, high = chance.choice([(0.1, 2.5), (0.5, 1.1), (0.16, 0.21)])
            seconds = min(chance.uniform(low, high) * ttl, 30.0)
            nth = chance.randrange(1, EVENTS[after] + 1)
            kind, process = chance.choice(reactive), -1 if chance.random() < 0.7 else chance.randrange(9)
            faults.append(Fault(kind, at, process, seconds, chance.randrange(1 << 30), after, nth))
    lasting = [each for each in faults if each.kind in ("kill", "close")]
    chance.shuffle(lasting)
    # Only one process may be killed or closed, so that others are left.
    return [each for each in faults if each not in lasting[1:]]
