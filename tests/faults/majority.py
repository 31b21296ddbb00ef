"""Let fifty contenders use locks on five Redis servers. At any time, some of the servers are stopped, killed or cut
off.

All checks of `chaos` apply. Also, no waiter may be starved, and no server may have a key or queue entry of a claim that
was undone.

python -m tests.faults.majority                           a minute
python -m tests.faults.majority --defect "2 of 5 is enough"        with a defect built in, until it is seen
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from multilock import now
from multilock.model import LockInfo, parse_owner
from multilock.testing.beliefs import FaultPeriod, LedgerServer
from multilock.testing.beliefs.oracles import within
from multilock.testing.conformance.faces import background
from multilock.testing.proxy import Direction
from multilock.timing import LONGEST_PAUSE
from multilock_redis.redlock.servers import LEAST_LIMIT
from tests.faults.chaos import (
    FOR_A_WHILE,
    KEYS,
    NAMES,
    PROCESS_PACE,
    RECOVERY,
    SERVER_PACE,
    SHORT_STOP,
    STREAMS,
    Arena,
    Chaos,
    Happening,
    RemoteArena,
    Since,
    Stream,
    overstays,
    run,
)
from tests.faults.defects import DEFECTS
from tests.faults.waits import Waits
from tests.servers_redlock import RedisServers, url_of

__all__ = ["Majority", "RedlockArena"]

SERVERS = 5
# an entry in the queue as queue.lua writes it: the waiter's mode, and its deadline in ms
PLACE = re.compile(rb"\w+:(\d+)")
LOOK_EVERY = 0.1  # seconds between two reads of all keys at the servers
ANSWERS_WITHIN = 0.2
# Seconds after the end of the restart guard within which a server counts again: twice the resolution of the uptime,
# plus the longest pause before a client asks the server again.
KNOWN_AGAIN = 3.0
AT_A_TIME = [1, 2, 3, 5], [5, 4, 2, 1]  # numbers of servers to stop at once, and the weight of each number
DIE_AT_A_TIME = [1, 2, 3], [6, 3, 1]
CUT_OFF_AT_A_TIME = [1, 2, 3, 4], [3, 4, 3, 2]
DIRECTIONS: list[Direction] = ["both", "up", "down"]
FAR = 0.1, 0.2  # seconds of delay, less than a request may take, but longer than the next holder needs to get the lock
FAR_FOR = 5.0
MOST_STALLED = 15.0  # seconds by which an overloaded machine can lengthen a run at most
TOGETHER = 2, 4  # processes on one side of a partition


class Standstills:
    """Times in which this process did not run. It forwards all data between contenders and servers."""

    BEAT = 0.01  # seconds

    def __init__(self) -> None:
        self.those: list[tuple[float, float]] = []
        self._last = now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="standstills", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def beat(self, at: float) -> None:
        last, self._last = self._last, at
        if at - last > SHORT_STOP:
            self.those.append((last, at))

    def _watch(self) -> None:
        while not self._end.wait(self.BEAT):
            self.beat(now())


class RedlockArena(RemoteArena):
    """Five servers. Killed servers lose their data, so the clients use a restart guard."""

    scheme = "redlock"
    ttl = 1.0
    asked_again = LONGEST_PAUSE

    def __init__(self, stack: ExitStack) -> None:
        self.servers = stack.enter_context(RedisServers(SERVERS))
        self.url = url_of([member.endpoint for member in self.servers.members], guard=self.ttl)
        super().__init__(stack)
        self.operators = [
            stack.enter_context(
                redis.Redis(port=member.port, socket_timeout=ANSWERS_WITHIN, retry=Retry(NoBackoff(), 0))
            )
            for member in self.servers.members
        ]
        self.away: set[int] = set()  # servers that cannot answer now
        self.mishaps = {
            "connections cut": (1.5, self.cut),
            "SCRIPT FLUSH": (0.5, lambda dice: self.flush(dice)),
        }

    def flush(self, dice: random.Random) -> None:
        with suppress(redis.RedisError):
            dice.choice(self.operators).script_flush()

    def found(self) -> Iterator[tuple[int, str, str]]:
        """Yield each lock and each unexpired place in a queue, with its server and the owner of the claim."""
        for which in set(range(SERVERS)) - self.away:
            with suppress(redis.RedisError):
                together = self.operators[which].pipeline(transaction=False).time().mget(KEYS)
                for key in KEYS:
                    together.hgetall(f"{{{key}}}:live")
                (seconds, micros), holders, *waiting = together.execute()
                yield from ((which, "the lock", owner.decode()) for owner in holders if owner)
                for owner, place in itertools.chain(*(each.items() for each in waiting)):
                    if int(PLACE.findall(place)[0]) > seconds * 1000 + micros // 1000:
                        yield which, "a place", owner.decode()

    def held(self) -> list[LockInfo]:
        holders: Counter[bytes] = Counter()
        for which in set(range(SERVERS)) - self.away:
            with suppress(redis.RedisError):
                holders.update(filter(None, self.operators[which].mget(KEYS)))
        return [parse_owner(owner.decode()) for owner, times in holders.items() if times > SERVERS // 2]

    def standing(self) -> Iterator[str]:
        """Yield for each name and server the holder, the remaining time of its lease, and the queue."""
        for which, operator in enumerate(self.operators):
            together = operator.pipeline(transaction=False)
            for key in KEYS:
                together.get(key).pttl(key).zrange(f"{{{key}}}:queue", 0, -1, withscores=True)
            try:
                answers = together.execute()
            except redis.RedisError as error:
                yield f"server {which}: {error}"
                continue
            for name, holder, left, queue in zip(NAMES, answers[::3], answers[1::3], answers[2::3], strict=True):
                waiting = [f"{_short(owner)} at {ticket:.0f}" for owner, ticket in queue]
                yield f"{name} at server {which}: {_short(holder)} for {left} ms; waiting: {waiting or '-'}"

    def leftovers(self) -> Iterator[str]:
        until = now() + self.ttl + 2.0
        for which, operator in enumerate(self.operators):
            operator.connection_pool.disconnect()  # a flush during a read of the holders opened a second connection
            while (clients := len(operator.client_list())) > 1 and now() < until:
                time.sleep(0.05)
            if clients > 1:
                yield f"O7: {clients - 1} connections to server {which} are left"
            while operator.exists(*KEYS) and now() < until:
                time.sleep(0.05)
            for key in operator.scan_iter():
                if overstays(key.decode(), left := operator.pttl(key)):
                    yield f"O7: the key {key!r} is left at server {which}, and ends in {left} ms"


def _short(owner: bytes | None) -> str:
    """Return the last characters of the claim's id, and its process."""
    if owner is None:
        return "nobody"
    return f"{owner.partition(b'@')[0][-8:].decode()} of process {parse_owner(owner.decode()).pid}"


class Majority(Chaos):
    contender = "tests.faults.majority_member:contend"
    at_once = 6
    arena: RedlockArena

    def __init__(
        self, arena: Arena, ledger: LedgerServer, seed: int, habits: Sequence[str], defect: str, mixed: bool
    ) -> None:
        super().__init__(arena, ledger, seed, habits, defect, mixed)
        self.waits = Waits(self.record)
        self._of_network = Standstills()
        self._far: list[FaultPeriod] = []
        self.undone: dict[str, float] = {}
        # The last time at which each server had an entry of a claim.
        self._found: dict[tuple[str, int, str], float] = {}
        self._look_at = 0.0

    def close(self) -> None:
        self._of_network.close()
        super().close()

    def streams(self) -> list[Stream]:
        processes: dict[Happening, float] = {
            partial(what, holding): weight * share
            for what, weight in ((self.freeze, 10), (self.kill, 6), (self.cut_off_from_some, 10))
            for holding, share in ((FOR_A_WHILE, 3), (None, 2))
        }
        processes |= {partial(self.partition, FOR_A_WHILE): 10, self.freeze_a_new_holder: 10}
        servers: dict[Happening, float] = {self.stop_servers: 3, self.kill_servers: 0.5, self.divide: 2}
        for kind, (weight, what) in self.arena.mishaps.items():
            servers[partial(self.hurt_server, kind, what)] = weight
        return [
            *(Stream(self.dice, processes, PROCESS_PACE) for _ in range(STREAMS)),
            Stream(self.dice, {self.cut_off_far_away: 1}, PROCESS_PACE),  # a rare fault needs a stream of its own
            Stream(self.dice, servers, SERVER_PACE * self.arena.ttl),
        ]

    def _strike(
        self, kind: str, whom: Iterable[int | str], end: Callable[[], None], after: float, *, rest: float = RECOVERY
    ) -> None:
        """Begin a fault that lasts for ``after`` seconds. After its end, the victims count as faulty for ``rest`` more
        seconds."""
        fault = FaultPeriod(kind, None, now())
        self.faults.append(fault)
        self._busy.update(whom)

        def undo() -> None:
            end()
            fault.end = now()
            self._do(rest, lambda: self._busy.difference_update(whom))

        self._do(after, undo)

    # Servers

    def _some(self, how_many: tuple[list[int], list[int]]) -> list[int]:
        """Return servers without a fault, or an empty list if there are too few."""
        free = [which for which in range(SERVERS) if f"server {which}" not in self._busy]
        [number] = self.dice.choices(*how_many)
        return self.dice.sample(free, number) if number <= len(free) else []

    def stop_servers(self) -> bool:
        chosen = self._some(AT_A_TIME)
        members = [self.arena.servers.members[which] for which in chosen]

        def resume() -> None:
            for member in members:
                member.resume()
            self.arena.away.difference_update(chosen)

        if chosen:
            self.arena.away.update(chosen)
            self._strike(
                f"{len(chosen)} servers stopped", [f"server {which}" for which in chosen], resume, self._rest()
            )
            for member in members:
                member.pause()
        return bool(chosen)

    def kill_servers(self) -> bool:
        """Kill servers, and start them again without data. The fault ends when their votes count again."""
        chosen = self._some(DIE_AT_A_TIME)
        if not chosen:
            return False
        members = [self.arena.servers.members[which] for which in chosen]
        fault = FaultPeriod(f"{len(chosen)} servers killed", None, now())
        self.faults.append(fault)
        self._busy.update(f"server {which}" for which in chosen)
        self.arena.away.update(chosen)
        for member in members:
            member.kill()

        def start_all() -> None:
            for member in members:
                member.start()

        def start() -> None:
            started = background(start_all)

            def look() -> None:
                if started.done():
                    started.result(0)
                    self.arena.away.difference_update(chosen)
                    self._do(self.arena.ttl + KNOWN_AGAIN, count_again)
                else:
                    self._do(0.005, look)

            look()

        def count_again() -> None:
            fault.end = now()
            self._busy.difference_update(f"server {which}" for which in chosen)

        self._do(self._rest(), start)
        return True

    # Networks

    def cut_off_from_some(self, holding: Since | None) -> bool:
        """Cut one process off from some of the servers."""
        if (place := self._pick(holding)) is None:
            return False
        [number] = self.dice.choices(*CUT_OFF_AT_A_TIME)
        network = self.arena.networks[place]
        self._begin(f"partition from {number}", place, network.heal, self._rest())
        direction = self.dice.choice(DIRECTIONS)
        for proxy in self.dice.sample(network.proxies, number):
            proxy.black_hole(direction)
        return True

    def cut_off_far_away(self) -> bool:
        """Cut off a holder whose replies all came late. The validity of its lock must not count from the replies."""
        if (place := self._pick(None)) is None:
            return False
        helper, network = self.helpers[place], self.arena.networks[place]
        self._busy.add(place)
        network.delay(self.dice.uniform(*FAR), "down")
        since = now()
        self._far.append(far := FaultPeriod("far away", helper.pid, since))

        def look() -> None:
            if any(each.pid == helper.pid and each.began > since for each in self._holding(FOR_A_WHILE)):
                self._begin("cut off far away", place, network.heal, self._rest(always_long=True))
                network.black_hole("up")
                far.end = now()
            elif now() > since + FAR_FOR:
                network.heal()
                self._busy.discard(place)
                far.end = now()
            else:
                self._do(0.005, look)

        look()
        return True

    def divide(self) -> bool:
        """Cut several processes off from the same servers."""
        free = [place for place in self.helpers if place not in self._busy]
        together = self.dice.randint(*TOGETHER)
        if len(free) < together:
            return False
        places = self.dice.sample(free, together)
        networks = [self.arena.networks[place] for place in places]
        [number] = self.dice.choices(*CUT_OFF_AT_A_TIME)

        def heal() -> None:
            for network in networks:
                network.heal()

        self._strike(f"some divided from {number}", places, heal, self._rest())
        for which in self.dice.sample(range(SERVERS), number):
            for network in networks:
                network.proxies[which].black_hole()
        return True

    # ---- further checks

    def feed(self, pid: int, line: str) -> None:
        super().feed(pid, line)
        self.waits.feed(pid, line)
        match line.split(" "):
            case ["undone", at, id]:
                self.undone.setdefault(id, float(at))

    def collect(self) -> None:
        super().collect()
        if (at := now()) >= self._look_at:
            self._look_at = at + LOOK_EVERY
            for which, what, owner in self.arena.found():
                self._found[owner.partition("@")[0], which, what] = at

    def stood_still(self, since: float) -> float:
        """Return the seconds in which the network did not run, plus those in which the slowest contender did not run.

        The servers may have handed a name to the slowest contender. At most `MOST_STALLED` seconds count, so that a run
        ends if nobody can ever get a name.
        """
        at = now()
        of_contenders = max((within(those, since, at) for those in self.record.stalls.values()), default=0.0)
        return min(MOST_STALLED, within(self._of_network.those, since, at) + of_contenders)

    def standstills(self) -> Iterator[FaultPeriod]:
        """Yield pauses of an overloaded machine, and times of slow networks, as faults.

        Replies come too late if the network pauses. A contender that pauses looks like one that was stopped just as it
        was handed a lock. While the network of a contender is slow, a new fault is yielded for each ttl, because the
        contender may have to reconnect and then learns of a grant too late.
        """
        for start, end in itertools.chain(self._of_network.those, *self.record.stalls.values()):
            if end - start > LEAST_LIMIT:
                yield FaultPeriod("stood still", None, start, end)
        for far in self._far:
            for times in range(math.ceil((min(far.end, now()) - far.start) / self.arena.ttl)):
                yield FaultPeriod(far.kind, far.pid, far.start + times * self.arena.ttl, far.end)

    def seen(self) -> Iterator[str]:
        for (id, which, what), at in self._found.items():
            if at > self.undone.get(id, math.inf):
                yield f"O7: server {which} has {what} for {id}, {at - self.undone[id]:.3f} s after that was undone"

    def judged(self) -> Iterator[str]:
        yield from self.waits.starved()

    def told(self) -> list[str]:
        return [self.waits.told("x"), f"{len(self.undone)} claims undone"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    ours = [name for name, defect in DEFECTS.items() if defect.arena == RedlockArena.scheme]
    parser.add_argument("--defect", choices=ours, default="")
    parser.add_argument("--must-be-seen", action="store_true", help="fail where the oracles of the defect see nothing")
    given = parser.parse_args()
    print(f"seed {given.seed}")
    report = run(RedlockArena, given.seconds, seed=given.seed, defect=given.defect, kind=Majority)
    report.show()
    if given.must_be_seen:
        return not any(violation.startswith(DEFECTS[given.defect].oracles) for violation in report.violations)
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
