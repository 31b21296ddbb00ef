"""Classic defects of lock clients, which can be built into a running contender. The chaos harness must find each
defect.

A defect imports the module it changes only when it is built in, because a contender needs the module of one backend
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from multilock import now
from multilock.kernel.holding import HELD, AnyHeld, Holding
from multilock.model import Busy, Claim, Granted
from tests.faults.habits import ELSEWHERE

__all__ = ["DEFECTS", "Defect"]


@dataclass(frozen=True, slots=True)
class Defect:
    """``seed`` builds the defect into this process. ``arena`` and ``habits`` are the conditions under which the defect
    does harm. At least one of ``oracles`` must report the defect."""

    seed: Callable[[], None]
    arena: str = "redis"
    habits: tuple[str, ...] = ()
    oracles: tuple[str, ...] = ("O1", "O3")


def deadline_from_receipt() -> None:
    """Count the validity of a lease from the reply to its request instead of from the sending."""
    import multilock_redis.acquire_release as recipe

    class Received(Granted):
        def __new__(cls, token: int | None, ttl: float, sent_at: float, *rest: Any) -> Received:
            return super().__new__(cls, token, ttl, now(), *rest)

    vars(recipe)["Granted"] = Received


def plain_del() -> None:
    """On release, delete the key even if another process holds the name."""
    from multilock_redis.acquire_release import Recipe
    from multilock_redis.wire import pack

    def release(self: Recipe, claim: Claim, unsure: bool, within: float) -> bool:
        answer, _ = self._transactions.connections.call(pack("DEL", self._keys.lock(claim.name)), within)
        return bool(answer)

    Recipe.release = release  # type: ignore[method-assign]


def cached_is_held() -> None:
    """Return the stored state from ``is_held()`` without reading the clock."""

    def is_held(self: AnyHeld) -> bool:
        return self.stage == HELD

    Holding.is_held = is_held  # type: ignore[method-assign]


def validity_from_the_acquire() -> None:
    """Count a lock's validity from its own request, although that request does not renew the session that keeps the
    lock."""
    import multilock_etcd.transactions as transactions
    from multilock_etcd.acquire_release import EtcdRecipe

    vars(transactions)["NEAR"] = 0  # with this change only a request grants a lock, never the watch
    proven = EtcdRecipe.attempt

    def attempt(self: EtcdRecipe, claim: Claim, join: bool, within: float) -> Granted | Busy:
        sent_at = now()
        answer = proven(self, claim, join, within)
        if isinstance(answer, Busy):
            return answer
        its = answer
        return Granted(its.token, its.ttl, sent_at, its.valid_for, its.renew_every, its.group, its.key)

    EtcdRecipe.attempt = attempt  # type: ignore[method-assign]


def end_the_newest() -> None:
    """Release the newest lease at the end of a ``with`` whose beginning is unknown, although another task holds
    that lease."""
    from multilock.kernel.scopes import Entered

    proven = Entered.ending

    def ending(self: Entered[Any], frame: Any, scope: object) -> Any:
        found = proven(self, frame, scope)
        if found is None or found.frame is frame or found.lease._scope is scope:
            return found
        return next(entry for entry in self._entries[::-1] if entry.is_open())

    Entered.ending = ending  # type: ignore[method-assign]


def two_of_five() -> None:
    """Count two votes of five as a majority."""
    from multilock_redis.redlock.servers import Servers
    from multilock_redis.redlock.votes import Evidence

    proven, proven_servers = Evidence.__init__, Servers.__init__

    def __init__(self: Evidence, *args: Any, **options: Any) -> None:
        proven(self, *args, **options)
        self.need = 2

    def init_servers(self: Servers, *args: Any) -> None:
        proven_servers(self, *args)
        self.need = 2

    Evidence.__init__ = __init__  # type: ignore[method-assign]
    Servers.__init__ = init_servers  # type: ignore[method-assign,assignment]


def validity_from_the_last_reply() -> None:
    """Count each vote from its reply, and let the newest vote decide for the whole majority."""
    import multilock_redis.redlock.renewal as renewal
    from multilock_redis.redlock.votes import Evidence, Proof, Statement

    class Received(Granted):
        def __new__(cls, token: int | None, ttl: float, sent_at: float, *rest: Any) -> Received:
            return super().__new__(cls, token, ttl, now(), *rest)

    vars(renewal)["Granted"] = Received
    answered, pushed, proof = Evidence.answered, Evidence.pushed, Evidence.proof

    def counts_from_the_reply(self: Evidence, which: int, at: int, answer: Any, now: int, **how: bool) -> None:
        answered(self, which, at, answer, now, **how)
        view = self.views[which]
        if view.state is Statement.VOTES and view.at == (at, 0):
            view.at, view.until = (now, 0), now + self.ttl

    def counts_from_the_push(self: Evidence, which: int, at: int, valid_for: int, stamp: int) -> bool:
        told = pushed(self, which, at, valid_for, stamp)
        if told:
            view = self.views[which]
            heard = int(now() * 1e6)
            view.at, view.until = (heard, 1), heard + valid_for
        return told

    def last(self: Evidence, now: int) -> Proof | None:
        if (proven := proof(self, now)) is None:
            return None
        newest = max(self.votes(now), key=lambda vote: vote.until)
        return Proof(proven.token, newest.at[0], newest.until - newest.at[0])

    Evidence.answered = counts_from_the_reply  # type: ignore[method-assign]
    Evidence.pushed = counts_from_the_push  # type: ignore[method-assign]
    Evidence.proof = last  # type: ignore[method-assign]


def undone_where_acknowledged() -> None:
    """Undo a claim only at servers that have acknowledged it."""
    from multilock_redis.redlock.acquire_release import Rounds
    from multilock_redis.redlock.votes import Evidence, Statement

    proven = Rounds._leave

    def leave(self: Rounds, claim: Claim, unsure: bool) -> Evidence:
        if (evidence := self.claims.get(claim.id)) and not evidence.leaving:
            with evidence.lock:
                for view in evidence.views:
                    if view.state is not Statement.VOTES:
                        view.kept = view.unsure = False
                        view.pending = 0
        return proven(self, claim, unsure)

    Rounds._leave = leave  # type: ignore[method-assign]


def grant_by_wake_up() -> None:
    """Treat a message that only wakes a waiter of SQLite as a grant."""
    from multilock_sqlite.notices import Mailbox

    def deliver(self: Mailbox, messages: Iterable[bytes]) -> None:
        notices: Any = self._notices
        for claim_id in map(bytes.decode, messages):
            if one := notices.waiting.get(claim_id):
                ttl = one.claim.ttl
                notices.granted(claim_id, Granted(1, ttl, now(), ttl, ttl / 3, "sqlite"))

    Mailbox._deliver = deliver  # type: ignore[method-assign]


DEFECTS: dict[str, Defect] = {
    "deadline from receipt": Defect(deadline_from_receipt),
    "plain DEL": Defect(plain_del),
    "cached is_held": Defect(cached_is_held),
    # The holder of the deleted lock is not notified, but the former holder's release returns True (O6).
    "with ends the newest": Defect(end_the_newest, habits=(ELSEWHERE,), oracles=("O6",)),
    # Other backends with sessions do not show this defect. Consul ends a session only after twice its ttl. In ZooKeeper
    # the create itself renews the session, and a read extends the validity wrongly only at a follower without its
    # leader.
    "validity from the acquire": Defect(validity_from_the_acquire, "etcd-late"),
    "grant by wake-up": Defect(grant_by_wake_up, "sqlite"),
    "2 of 5 is enough": Defect(two_of_five, "redlock"),
    "validity from the last reply": Defect(validity_from_the_last_reply, "redlock"),
    "undo only where acknowledged": Defect(undone_where_acknowledged, "redlock", oracles=("O7",)),
}
