"""A fan (one connection to each server) for an event loop: one acquire or release at a time, without a thread."""

from __future__ import annotations

from multilock import BackendRejected, BackendUnavailable
from multilock.backend import Busy, Claim, Granted, Returned
from multilock_redis.redlock.acquire_release import Joins, Round, Rounds, RoundState
from multilock_redis.redlock.connections import Fan
from multilock_redis.redlock.servers import limit
from multilock_redis.redlock.votes import Evidence

__all__ = ["Channel"]


class Channel:
    """The channel to all servers: see `multilock.backend.Channel` and `multilock.backend.Lingers`."""

    def __init__(self, rounds: Rounds, fan: Fan, descriptor: int) -> None:
        self._rounds = rounds
        self._fan = fan
        self._descriptor = descriptor
        self._evidence: Evidence | None = None
        self._waiting: set[int] | None = None  # during a release, the servers whose replies are missing
        self._join = False
        self._joins = Joins.NO
        self._round: Round | None = None  # the requests of an attempt
        self._end = 0.0  # the time at which a release ends, even if replies are missing

    def fileno(self) -> int:
        return self._descriptor

    def attempt(self, claim: Claim, join: bool) -> bool:
        rounds, fan = self._rounds, self._fan
        fan.refresh(rounds.now())
        evidence = rounds.enter(claim)
        if evidence is None or evidence.spent() or fan.connected() < rounds.need:
            return False
        self._evidence, self._waiting, self._join = evidence, None, join
        self._joins = Joins.YES if join and rounds.servers.listening() else Joins.NO
        until = rounds.now() + limit(claim, 3600.0)
        rounds.begin(evidence, fan, join, self._joins)
        self._round = Round(rounds, evidence, fan, until)
        return True

    def release(self, claim: Claim, granted: Granted | None, unsure: bool) -> bool:
        now = self._rounds.now()
        self._fan.refresh(now)
        if self._fan.connected() < self._rounds.need:
            return False
        self._waiting = set()
        self._end = now + limit(claim, 3600.0)
        self._evidence = self._rounds.begin_release(claim, unsure, self._fan, self._waiting)
        return True

    def answer(self) -> Granted | Busy | Returned | None:
        self._fan.used = now = self._rounds.now()
        self._fan.look(0)
        self._fan.expire(now)
        evidence = self._evidence
        assert evidence is not None
        if self._waiting is not None:
            if evidence.was_ours() is None and self._waiting and now < self._end:
                raise BlockingIOError
            self._evidence = None
            return self._rounds.returned(evidence)
        try:
            return self._attempted(evidence)
        except (BackendUnavailable, BackendRejected) as error:
            self._evidence = None
            self._rounds.failed(evidence, error)
            raise

    def _attempted(self, evidence: Evidence) -> Granted | Busy | None:
        rounds = self._rounds
        assert self._round is not None
        if (said := self._round.said()) is None:
            raise BlockingIOError
        evidence.asking = False
        self._evidence = None
        if self._join:
            rounds.servers.listen()
        if said is RoundState.BUSY and (self._joins is not Joins.YES if self._join else rounds.is_split(evidence)):
            # the kernel then uses a thread, which can subscribe, and can repeat the requests of a split vote
            return None
        return rounds.outcome(evidence, said, self._join)

    # Methods of `Lingers`: replies may arrive after their request has ended

    def idle(self) -> bool:
        """Read replies, and end each connection whose reply is late. Returns False if too few servers are connected."""
        self._fan.look(0)
        self._fan.expire(self._rounds.now())
        return self._fan.connected() >= self._rounds.need

    def look_in(self) -> float | None:
        """Return the seconds after which the loop must call `answer` although no reply came, or None if a call is not
        needed."""
        now = self._rounds.now()
        late = self._fan.late_in(now)
        if self._evidence is None:
            return late
        left = self._round.left(now) if self._round and self._waiting is None else max(0.0, self._end - now)
        return left if late is None else min(left, late)

    def close(self) -> None:
        if self._evidence is not None:
            self._evidence.asking = False
        self._fan.close()
