"""Judge a run from what its contenders recorded. Only what is certain is called a violation.

Nothing here reads a clock or does I/O. A record can be judged repeatedly while lines still arrive, because later lines
never excuse a violation. A stall is a time in which a process did not run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["Belief", "FaultPeriod", "Record", "within"]

CALLBACK_SLACK = 0.05  # seconds after ``lost_at`` within which a callback may still start


@dataclass(slots=True)
class FaultPeriod:
    """A fault of one process or (``pid`` None) of the server, from ``start`` to ``end``."""

    kind: str
    pid: int | None
    start: float
    end: float = math.inf
    stops: bool = False  #: whether the process is frozen during the fault


@dataclass(slots=True)
class Belief:
    """One lease, as the process that acquired it saw it."""

    name: str
    id: str
    token: int | None  #: None if the lock has no tokens
    pid: int
    began: float  #: the time after acquire() returned, and before is_held() was called
    confirmed: bool  #: whether that call of is_held() returned True
    until: float  #: when is_held() was last called and returned True
    over: float | None = None  #: when is_held() was called and returned False
    over_by: float | None = None  #: when that call of is_held() had returned
    release: float | None = None  #: when release() was called
    released: bool | None = None  #: the result of release()
    losses: list[tuple[float, str, float]] = field(default_factory=list)  #: for each callback: begin, reason, lost_at
    mode: str = "x"  #: as in `multilock.model.Claim`: "x" alone; "r" with other readers; "p3" as one of three

    @property
    def ended_well(self) -> bool:
        """Whether release() returned True."""
        return self.released is True

    @property
    def alone(self) -> bool:
        """Whether nobody else may hold the name."""
        return self.mode == "x"

    @property
    def most(self) -> float:
        """The number of holders that a name may have at once in this mode."""
        return 1 if self.alone else int(self.mode[1:] or 0) or math.inf

    def fits(self, other: Belief) -> bool:
        """Return whether the holders of both beliefs may hold a name at the same time, if there are enough permits."""
        return not self.alone and self.mode == other.mode


class Record:
    """The records of all contenders, as lines of `multilock.testing.beliefs.witness`."""

    def __init__(self, taken: Mapping[str, float] | None = None) -> None:
        self.taken = {} if taken is None else taken
        """The sessions that an operator ended, with the time. A holder that cannot be notified that its session ended
        continues until its deadline. Another holder before this deadline breaks no promise (docs/guarantees.md), so it
        is not a violation."""
        self.beliefs: dict[str, Belief] = {}
        self.sessions: dict[str, str] = {}  #: by id of the lease: the session that keeps it alive
        self.renewals: dict[str, float] = {}  #: by id of the lease: the planned time of its first renewal
        self.stalls: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.ends: dict[int, tuple[str, int]] = {}
        self.habits: dict[int, set[str]] = defaultdict(set)
        self.wrong: list[str] = []
        self.judged_callbacks = 0
        self.excused: list[str] = []  #: violations that are excused because the machine stopped processes
        self._early_losses: dict[str, tuple[float, str, float]] = {}

    def feed(self, pid: int, line: str) -> None:
        """Add one line of the process ``pid``. Unknown lines are ignored."""
        what, *words = line.split(" ")
        match what, words:
            case "got", [at, name, id, token, held, *mode]:
                began, yes = float(at), held == "1"
                belief = Belief(
                    name, id, None if token == "-" else int(token), pid, began, yes, began if yes else -math.inf
                )
                belief.mode = mode[0] if mode else "x"
                self.beliefs[id] = belief
                if early := self._early_losses.pop(id, None):
                    belief.losses.append(early)
            case "session", [id, session]:
                self.sessions[id] = session
            case "renewal", [at, id]:
                self.renewals[id] = float(at)
            case "held", [at, id]:
                self.beliefs[id].until = float(at)
            case "over", [at, id, *answered]:
                belief = self.beliefs[id]
                belief.over, belief.over_by = float(at), float(answered[0] if answered else at)
            case "release", [at, id]:
                self.beliefs[id].release = float(at)
            case "released", [_, id, ours]:
                self.beliefs[id].released = ours == "1"
            case "lost", [at, id, reason, lost_at]:
                loss = float(at), reason, float(lost_at)
                if id in self.beliefs:
                    self.beliefs[id].losses.append(loss)
                else:  # the lease was lost before the acquiring thread could record the acquire
                    self._early_losses[id] = loss
            case "stall", [start, end]:
                self.stalls[pid].append((float(start), float(end)))
            case "habit", _:
                self.habits[pid].add(" ".join(words))
            case "end", [threads, sockets]:
                self.ends[pid] = threads, int(sockets)
            case "wrong", _:
                self.wrong.append(f"{pid}: {' '.join(words)}")

    def taken_at(self, belief: Belief) -> float:
        """Return when an operator ended the session of this lease; inf if none did."""
        return self.taken.get(self.sessions.get(belief.id, ""), math.inf)

    def by_name(self) -> Iterator[tuple[str, list[Belief]]]:
        """Yield each name with its confirmed leases, in the order in which they began.

        A lease is left out if it was granted after an operator had ended its session.
        """
        names: dict[str, list[Belief]] = defaultdict(list)
        for belief in self.beliefs.values():
            if belief.confirmed and belief.began < self.taken_at(belief):
                names[belief.name].append(belief)
        for name, beliefs in names.items():
            yield name, sorted(beliefs, key=lambda belief: belief.began)

    def held_at(self, pid: int | None, at: float) -> list[Belief]:
        """Return what this process (None: any process) certainly held at that time."""
        return [
            belief
            for belief in self.beliefs.values()
            if (pid is None or belief.pid == pid)
            and belief.began <= at
            and (belief.release or math.inf) > at
            and (belief.over or math.inf) > at
        ]

    # ---- the checks

    def overlaps(self) -> Iterator[str]:
        """O1: of two holders of one name, the first stops believing before the second begins to believe.

        Exceptions: readers may hold a name together, and a semaphore may have as many holders as permits.
        """
        for name, beliefs in self.by_name():
            believed: list[tuple[float, Belief]] = []
            for belief in beliefs:
                believed = [(until, one) for until, one in believed if until > belief.began]
                strangers = [(until, one.token) for until, one in believed if not one.fits(belief)]
                if strangers:
                    until, token = max(strangers)
                    overlap = (until - belief.began) * 1000
                    yield f"O1 {name}: two holders for {overlap:.0f} ms, tokens {token} and {belief.token}"
                elif len(believed) >= belief.most:
                    yield f"O1 {name}: {len(believed) + 1} holders of {belief.most} permits, the last {belief.token}"
                believed.append((min(belief.until, self.taken_at(belief)), belief))

    def token_regressions(self) -> Iterator[str]:
        """O3: a later holder has a greater token. Holders that may hold together are not compared."""
        for name, beliefs in self.by_name():
            greatest = greatest_alone = -math.inf
            for belief in beliefs:
                if belief.token is None:
                    continue
                before = greatest if belief.alone else greatest_alone
                if belief.token <= before:
                    yield f"O3 {name}: token {belief.token} came after {before}"
                greatest = max(greatest, belief.token)
                if belief.alone:
                    greatest_alone = max(greatest_alone, belief.token)

    def late_callbacks(self, slack: float = CALLBACK_SLACK, faults: Iterable[FaultPeriod] = ()) -> Iterator[str]:
        """O4: a callback starts at ``lost_at`` at the latest, and before any later holder that the lost lease would
        exclude.

        Time in which the process of the callback did not run does not count. The time of a fault that stopped this
        process does not count either, because the process may be killed before it can record its own stall. Time in
        which the busy machine stopped another process does not count either. The machine may then have stopped threads
        of this process too, unnoticed by the one thread that records stalls.
        """
        self.judged_callbacks = 0
        self.excused.clear()
        holders = dict(self.by_name())
        faults = list(faults)
        machine = [stall for _, stall in self._stalls_without(faults)]
        stops = [(fault.pid, (fault.start, fault.end)) for fault in faults if fault.stops]
        for belief in self.beliefs.values():
            for at, reason, lost_at in belief.losses:
                own = [*self.stalls[belief.pid], *(stop for pid, stop in stops if pid == belief.pid)]
                stalled = within(_union(own), lost_at - CALLBACK_SLACK, at)
                late = at - lost_at
                if late > slack + stalled:
                    told = f"O4 {belief.name}: the callback came {late:.3f} s late ({reason}, process {belief.pid})"
                    if late > slack + within(_union([*own, *machine]), lost_at - CALLBACK_SLACK, at):
                        yield told
                    else:
                        self.excused.append(told)
                if stalled or self.taken_at(belief) < math.inf:
                    continue
                self.judged_callbacks += 1
                others = holders.get(belief.name, [])
                after = bisect_right(others, belief.began, key=lambda other: other.began)
                following = next((other for other in others[after:] if not other.fits(belief)), None)
                if following and following.began < at:
                    yield f"O4 {belief.name}: the callback came {at - following.began:.3f} s after the next holder"

    def miscounted_callbacks(self, ended: set[int]) -> Iterator[str]:
        """O6: one callback for a loss, none for a release.

        A missing callback is certain only for processes that ended by themselves.
        """
        for belief in self.beliefs.values():
            if belief.ended_well and belief.losses:
                yield f"O6 {belief.name}: released, but also reported as lost ({belief.losses[0][1]})"
            elif len(belief.losses) > 1:
                yield f"O6 {belief.name}: {len(belief.losses)} callbacks for one loss"
            elif belief.pid in ended and not belief.ended_well and not belief.losses:
                yield f"O6 {belief.name}: lost, and no callback (process {belief.pid})"

    def slow_takeovers(self, faults: Iterable[FaultPeriod], bound: float, ttl: float, until: float) -> Iterator[str]:
        """O5: a name without a holder gets one within the bound. The run must keep a waiter for each name until
        ``until``.

        The time starts from zero when a fault begins or ends, because a server that is down cannot grant a lock. Time
        in which the process of the next holder did not run does not count. Time in which the busy machine stopped
        another process does not count either, since that process may have been first in the queue. But stalls of the
        process that held the name last do count.
        """
        faults = list(faults)
        times = sorted(time for fault in faults for time in (fault.start, fault.end))
        machine = self._stalls_without(faults)
        for name, beliefs in self.by_name():
            together: list[Belief] = []
            for one, other in pairwise(beliefs):
                together = [*together, one] if together and one.fits(together[0]) else [one]
                free_from = max(
                    max(each.until, each.release or 0.0) + (0.0 if each.ended_well else ttl) for each in together
                )
                disturbed = times[: bisect_right(times, other.began)]
                since, end = max([free_from, *disturbed[-1:]]), min(other.began, until)
                if end - since <= bound:
                    continue
                last = {each.pid for each in together}
                stalls = [*self.stalls[other.pid], *(stall for pid, stall in machine if pid not in last)]
                late = end - since - within(_union(stalls), since, end) - bound
                if late > 0:
                    yield f"O5 {name}: no holder for {bound + late:.2f} s, {late:.2f} s more than the bound"
                else:
                    self.excused.append(f"O5 {name}: no holder for {end - since:.2f} s")

    def _stalls_without(self, faults: Iterable[FaultPeriod]) -> list[tuple[int, tuple[float, float]]]:
        """Return the stalls of all processes that no fault explains, each with its process."""
        of_process: dict[int, list[FaultPeriod]] = defaultdict(list)
        for fault in faults:
            if fault.pid is not None:
                of_process[fault.pid].append(fault)
        return [
            (pid, (start, end))
            for pid, stalls in self.stalls.items()
            for start, end in stalls
            if not any(fault.start < end and start < fault.end for fault in of_process[pid])
        ]


def _union(stalls: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge stalls that overlap, and return all in order of time."""
    parts: list[tuple[float, float]] = []
    for start, end in sorted(stalls):
        if parts and start <= parts[-1][1]:
            parts[-1] = parts[-1][0], max(parts[-1][1], end)
        else:
            parts.append((start, end))
    return parts


def within(stalls: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Return how many seconds of these stalls are between the two times."""
    return sum(max(0.0, min(end, stopped) - max(begin, started)) for started, stopped in stalls)
