"""Stop and kill processes of fifty readers and five writers, or kill holders in a crowd that competes for three
permits.

All checks of `chaos` apply. Also, no waiter may be starved or overtaken, and the permits of killed processes must be in
use again in time.

python -m tests.faults.crowd                              a minute of readers and writers, on a Redis of its own
python -m tests.faults.crowd --backend etcd --seconds 20  or memory, sqlite, consul, zookeeper
python -m tests.faults.crowd --permits                    a minute of permits
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import multilock
from multilock.testing import Helper
from multilock.testing.beliefs import Belief, FaultPeriod, LedgerServer, Record
from multilock.testing.beliefs.oracles import within
from tests.faults.chaos import ARENAS, FOR_A_WHILE, PROCESS_PACE, Arena, Chaos, Happening, Stream, run
from tests.faults.crowd_member import NAME
from tests.faults.waits import Waits

__all__ = ["PERMITS", "PLACES", "Crowd", "MemoryArena", "Permits", "in_use_again"]

READERS, WRITERS = 50, 5
PERMITS, WANT_ONE = 3, 20
PROCESSES = 4
HOLDING = (0.0, math.inf)  # the least and the greatest age of a lock, in seconds, that counts as held
LATE = 0.5  # seconds of delay that are tolerated, because the machine may pause


class MemoryArena(Arena):
    """One process with the store in its memory. The process is stopped, but not killed, because the store would be
    lost."""

    scheme = "memory"
    url = "memory://crowd"

    def leftovers(self) -> Iterator[str]:
        return iter(())


PLACES: dict[str, type[Arena]] = {"memory": MemoryArena, **{k: v for k, v in ARENAS.items() if v.scheme == k}}


def in_use_again(record: Record, killed: Sequence[FaultPeriod], permits: int) -> Iterator[tuple[int, float]]:
    """Yield two numbers for each killed process: the permits it held, and the seconds until other processes held all
    permits.

    Time in which the process that took the last permit did not run does not count. The seconds are infinite if other
    processes never held all permits.
    """
    ended = {fault.pid: fault.start for fault in killed}

    def end(one: Belief) -> float:
        """Return the end of this belief. The belief of a killed process ends with its death, even if the process
        recorded nothing after the acquire."""
        return one.release or one.over or ended.get(one.pid, one.until)

    for fault in killed:
        taken = len(record.held_at(fault.pid, fault.start))
        others = [each for each in record.beliefs.values() if each.confirmed and each.pid != fault.pid]
        changes = [(each.began, 1, each.pid) for each in others]
        changes += [(end(each), -1, each.pid) for each in others]
        holders, back = 0, math.inf
        for at, change, pid in sorted(changes):
            holders += change
            if holders == permits and change == 1 and at > fault.start:
                back = at - fault.start - within(record.stalls[pid], fault.start, at)
                break
        yield taken, back


# ---- the crowds


class Crowd(Chaos):
    """A crowd of readers and writers, of which at most two processes at a time are stopped or killed."""

    names = (NAME,)
    at_once = 2
    permits = 0

    def __init__(
        self, arena: Arena, ledger: LedgerServer, seed: int, habits: Sequence[str], defect: str, mixed: bool
    ) -> None:
        super().__init__(arena, ledger, seed, habits, defect, mixed)
        self.processes = 1 if arena.scheme == "memory" else PROCESSES
        self.waits = Waits(self.record)
        with multilock.connect(arena.url, ttl=arena.ttl) as client:
            self.can = client.capabilities

    def start(self, place: int) -> None:
        wanted = (WANT_ONE, 0) if self.permits else (READERS, WRITERS)
        share = [total // self.processes + (place < total % self.processes) for total in wanted]
        self.helpers[place] = Helper(
            "tests.faults.crowd_member:attend",
            self.arena.url, self.arena.ttl, *share, self.permits, self.ledger.path, f"{self.seed}.{next(self.starts)}",
        )  # fmt: skip
        self._busy.add(place)
        self._await_start(place, self.helpers[place])

    def _await_start(self, place: int, helper: Helper) -> None:
        """Cause no fault in a new process until one of its contenders has sent a request. Until then it counts as
        faulty, so that at most one other process has a fault and somebody always waits."""
        if any(line.startswith("asks ") for line in helper.lines):
            self._busy.discard(place)
        else:
            self._do(0.02, partial(self._await_start, place, helper))

    def feed(self, pid: int, line: str) -> None:
        super().feed(pid, line)
        self.waits.feed(pid, line)

    def streams(self) -> list[Stream]:
        kinds: dict[Happening, float] = {partial(self.freeze, HOLDING): 8, partial(self.freeze, None): 2}
        if self.processes > 1:
            kinds |= {partial(self.kill, HOLDING): 4, partial(self.kill, None): 2}
        return [Stream(self.dice, kinds, self.arena.ttl / 2)]

    def judged(self) -> Iterator[str]:
        yield from self.waits.starved()
        for wait, other in self.waits.overtaken() if self.can.fair else ():
            later = f"{other.who} ({other.mode}), who asked {other.asked - wait.queued:.2f} s after it was queued"
            yield f"O9 {wait.who} ({wait.mode}) was overtaken by {later}"

    def told(self) -> list[str]:
        return [self.waits.told(mode) for mode in sorted({wait.mode for wait in self.waits.all})]


class Permits(Crowd):
    """Kill processes that hold permits, one after another. Each kill waits until the permits of the previous process
    are in use again."""

    permits = PERMITS

    def streams(self) -> list[Stream]:
        return [Stream(self.dice, {self.kill_holders: 1}, PROCESS_PACE)]

    def kill_holders(self) -> bool:
        alive = {helper.pid: place for place, helper in self.helpers.items() if place not in self._busy}
        held = [belief.pid for belief in self._holding(FOR_A_WHILE) if belief.pid in alive]
        if len(held) < self.permits or len(self._busy) > 1:
            return False
        self.kill_at(alive[self.dice.choice(held)])
        return True

    def judged(self) -> Iterator[str]:
        yield from super().judged()
        for taken, seconds in in_use_again(self.record, self.faults, self.permits):
            if seconds > self.can.takeover_bound + LATE:
                yield f"O10: {taken} permits of a killed process were in use again after {seconds:.2f} s"

    def told(self) -> list[str]:
        back = list(in_use_again(self.record, self.faults, self.permits))
        times = sorted(seconds for _, seconds in back) or [math.nan]
        return [
            *super().told(),
            f"{sum(taken for taken, _ in back)} permits of {len(back)} killed processes; all in use again after "
            f"{statistics.median(times):.2f} s in the median, {times[-1]:.2f} s at most "
            f"(takeover_bound {self.can.takeover_bound:.2f} s)",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=PLACES, default="redis")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--permits", action="store_true", help="not on memory, where all would be killed at once")
    given = parser.parse_args()
    print(f"seed {given.seed}")
    kind = Permits if given.permits else Crowd
    report = run(PLACES[given.backend], given.seconds, seed=given.seed, kind=kind)
    report.show()
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
