"""Receive what the server pushes: handovers and wake-ups for waiters, and changes of names that are held or followed.

A client has one connection that listens, and a thread that reads it. Both start with the first waiter, or with the
first lock that is held for a quarter of a second. The notification of a handover is a grant (`Recipe.pushed`). Every
other notification is a hint: a waiter is woken, and for a holder the thread asks the server whether its claim has lost
the name. A client *follows* a name if it reports the changes of its holder.

The connection also holds a shared advisory lock on the client's number. If nobody holds that lock, the client's process
has ended, so the server skips its waiters. Behind a pooler that changes server processes between transactions, no
notification arrives, and the advisory lock would outlive the client. So the client first tests whether a notification
comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Held, Notices, start_worker
from multilock.log_thread import logger
from multilock.timing import retry_pause
from multilock_postgresql.acquire_release import Recipe
from multilock_postgresql.keys import LockKeys
from multilock_postgresql.transactions import Transactions
from multilock_postgresql.transport import PgEndpoint, PgWire
from multilock_postgresql.wire import Row, array, seconds, text

__all__ = ["Listener"]

CHANGES = "multilock_changes"  # the channel of followed names
# Seconds between two pings of the listening connection. If not even a reply arrives from one ping to the next, the
# connection counts as dead.
TEND_EVERY = 2.0
RECONNECT_WITHIN = 2.0
LOOK_WITHIN = 1.0  # seconds for which a missing reply may delay the wake-ups
TEST_WITHIN = 1.0  # seconds that a notification through a pooler may take
REFUSED_AGAIN = 60.0  # seconds until the next test of a connection that returned no notification
FOLLOWED_FOR = 90.0  # seconds for which one request subscribes to the changes of a name
FOLLOW_EVERY = 30.0  # seconds between two requests that renew these subscriptions
NO_PUSH = (
    "a pooler between this client and the server drops notifications: give listen=host:port, the server's own address. "
    "Until then waiters ask by timer"
)
ELSEWHERE = (
    "notifications do not arrive at the address in listen=: give the host:port of the server that the URL leads to, "
    "with the same database. Until then waiters ask by timer"
)


@dataclass(slots=True)
class Followed:
    """The holder of a followed name, according to the last reply."""

    holder: bytes | None
    ends_at: float | None  #: when the lease ends by our clock, or None if unknown


class Listener:
    """The listening connection of one client, and the thread that reads it."""

    def __init__(
        self,
        endpoint: PgEndpoint,
        direct: PgEndpoint | None,
        transactions: Transactions,
        keys: LockKeys,
        recipe: Recipe,
        notices: Notices,
    ) -> None:
        """``direct`` is the address that reaches the server without a pooler, if the user gave one."""
        self._direct = direct
        self._endpoint = direct or endpoint
        self._transactions = transactions
        self._keys = keys
        self._recipe = recipe
        self._notices = notices
        self._now = notices.now
        self._channel = f"multilock_{notices.client}"
        self._closed = system.Event()
        self.listening = False  #: whether claims may wait: the client listens, or has found that no push can arrive
        self._starting = system.Lock()
        self._wire: PgWire | None = None
        self._watched: dict[str, str] = {}  # claim id -> name; used without a lock, since its methods are atomic
        self._doubted: set[str] = set()  # ids of claims that may have lost their names; for the thread only
        self._followed: dict[str, Followed] = {}
        self._follow_at = 0.0  # when the subscription to the followed names must be renewed
        self._connection = f"listening connection to {self._endpoint.name}"

    def listen(self, within: float) -> None:
        """Begin to listen, unless this client listens already. Raises BackendUnavailable if there is no reply."""
        deadline = self._now() + within
        with system.Taking(self._starting, within, lambda: self._silence("listening takes too long to begin")):
            if not self.listening and not self._closed.is_set():
                wire = self._subscribe(deadline - self._now())
                start_worker(lambda: self._run(wire), "multilock-postgresql-notices")
                self.listening = True

    def watch(self, held: Sequence[Held], within: float) -> None:
        """Report when one of these claims is lost, or was already lost."""
        deadline = self._now() + within
        for claim, _ in held:
            self._watched[claim.id] = claim.name
        self.listen(within)
        self._look([claim.id for claim, _ in held], deadline - self._now())

    def unwatch(self, claim_id: str) -> None:
        """Stop watching this claim."""
        self._watched.pop(claim_id, None)

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Report when the holder of one of these names changes, and stop reporting all other names. Returns False if no
        push can arrive."""
        deadline = self._now() + within
        self._followed = {name: known for name, known in self._followed.items() if name in names}
        if not names:
            return True
        self.listen(within)
        if not self._recipe.told:
            return False
        self._follow(names, deadline - self._now())
        return True

    def close(self) -> None:
        self._closed.set()
        if (wire := self._wire) is not None:
            wire.interrupt()

    # ---- the connection

    def _subscribe(self, within: float) -> PgWire | None:
        """Return a connection that listens, or None if no notification arrives there."""
        deadline = self._now() + within
        wire = self._endpoint.connect(within, self._now)
        try:
            wire.script(f'LISTEN "{self._channel}"; LISTEN {CHANGES}'.encode(), deadline - self._now())
            if (wire.pooled or self._direct) and not self._comes_back(wire, deadline):
                # The session would continue to listen for the pooler's next client. The pooler uses the newest session
                # first, so this request most likely reaches it.
                with suppress(MultilockError):
                    wire.script(f'UNLISTEN "{self._channel}"; UNLISTEN {CHANGES}'.encode(), deadline - self._now())
                wire.close()
                self._notices.pushes(self._connection, ELSEWHERE if self._direct else NO_PUSH, refused=True)
                return None
            number = int(self._notices.client, 16)
            signed = number - (1 << 64) if number >> 63 else number
            wire.script(b"SELECT pg_advisory_lock_shared(%d)" % signed, deadline - self._now())
        except BaseException:
            wire.close()
            raise
        self._wire = wire
        if self._closed.is_set():
            wire.interrupt()
        self._recipe.told = True
        self._notices.pushes(self._connection, None)
        return wire

    def _comes_back(self, wire: PgWire, deadline: float) -> bool:
        """Return whether a notification from another connection arrives on ``wire`` although nothing is sent there."""
        notify = f"SELECT pg_notify('{self._channel}', '')".encode()
        self._transactions.run(notify, [], deadline - self._now(), limited=False)
        until = min(self._now() + TEST_WITHIN, deadline)
        while (told := wire.receive(until - self._now())) is not None:
            if any(channel == self._channel for channel, _ in told):  # a change from another client does not count
                return True
        return False

    def _run(self, wire: PgWire | None) -> None:
        """Read the connection until the client is closed. Make a new connection whenever it breaks. The thread runs
        this."""
        self.listening = True  # an interrupt may have ended listen() before it could set this
        while not self._closed.is_set():
            if wire is None:
                self._closed.wait(REFUSED_AGAIN)
            else:
                try:
                    self._read(wire)
                except Exception as error:
                    known = isinstance(error, MultilockError)
                    level = logging.DEBUG if known else logging.ERROR
                    logger.log(level, "not listening: %s", error, exc_info=not known)
                    if not self._closed.is_set():
                        self._notices.pushes(self._connection, str(error))
                wire.close()
            self._recipe.told = False
            wire = self._subscribe_again()
            if wire is not None:  # all notifications since the connection broke are lost
                self._notices.wake(None)
                self._follow_at = 0.0
                self._notices.changed(None)
                self._look_again(list(self._watched))
        if wire is not None:
            wire.close()
        self._notices.pushes(self._connection, None)  # the connection is no longer needed

    def _subscribe_again(self) -> PgWire | None:
        """Try to connect until that succeeds. Returns None if no push can arrive, or the client was closed."""
        failures = 0
        while not self._closed.wait(retry_pause(failures) * system.uniform(0.5, 1.5)):
            try:
                return self._subscribe(RECONNECT_WITHIN)
            except MultilockError as error:
                logger.debug("not listening again yet: %s", error)
                self._notices.pushes(self._connection, str(error), refused=isinstance(error, BackendRejected))
            failures += 1
        return None

    def _read(self, wire: PgWire) -> None:
        """Read until the connection breaks or the client is closed."""
        tend_at = self._now() + TEND_EVERY
        heard = True
        while not self._closed.is_set():
            told = wire.receive(max(0.0, tend_at - self._now()))
            heard = heard or told is not None
            self._understand(told or [])
            if self._now() >= tend_at:
                if not heard:
                    raise self._silence("the listening connection is dead")
                heard = False
                wire.ping()
                self._look_again()
                self._tend_followed()
                tend_at = self._now() + TEND_EVERY

    def _understand(self, told: list[tuple[str, str]]) -> None:
        doubted: list[str] = []
        changed: set[str] = set()
        for channel, payload in told:
            if channel == CHANGES:
                name = self._keys.name(payload)
                if name is not None and name in self._followed:
                    changed.add(name)
                continue
            claim_id, granted = self._recipe.pushed(payload)
            if granted:
                self._notices.granted(claim_id, granted)
            elif claim_id in self._watched:
                doubted.append(claim_id)
            else:
                self._notices.wake(claim_id)
        for name in changed:
            self._notices.changed(name)
        if changed:
            self._look_at_followed(changed)
        self._look_again(doubted)

    # ---- losses

    def _look_again(self, claim_ids: Iterable[str] = ()) -> None:
        """Ask the server which of these claims, and of those in `_doubted`, have lost their names.

        The thread runs this.
        """
        self._doubted.update(claim_ids)
        try:
            self._look(list(self._doubted), LOOK_WITHIN)
        # The claims stay in `_doubted`, so that the server is asked again within seconds.
        except MultilockError as error:
            logger.debug("it is unknown for the moment which locks are held: %s", error)
        else:
            self._doubted.clear()

    def _look(self, claim_ids: Sequence[str], within: float) -> None:
        """Report the claims that do not hold their names."""
        named = [(claim_id, name) for claim_id in claim_ids if (name := self._watched.get(claim_id)) is not None]
        if not named:
            return
        keys = array(self._keys.of(name).decode() for _, name in named)
        ids = array(claim_id for claim_id, _ in named)
        rows, _ = self._transactions.run(self._transactions.steps.lost, [keys, ids], within, limited=False)
        for row in rows:
            # A release removes the claim here before it sends its request, so a released lock is not reported as lost.
            claim_id = text(row[0])
            if self._watched.pop(claim_id, None) is not None:
                self._notices.gone(claim_id, LossReason.TAKEN, "its row was deleted, or has another holder")

    # ---- followed names

    def _follow(self, names: frozenset[str] | set[str], within: float) -> None:
        keys = array(self._keys.of(name).decode() for name in sorted(names))
        arguments = [keys, b"%d" % round(FOLLOWED_FOR * 1000)]
        rows, _ = self._transactions.run(self._transactions.steps.follow, arguments, within)
        self._follow_at = self._now() + FOLLOW_EVERY
        self._learn(rows, names)

    def _learn(self, rows: list[Row], names: frozenset[str] | set[str]) -> None:
        """Record the holders of followed names. Report those that changed."""
        followed = dict(self._followed)
        now = self._now()
        for key, holder, left in rows:
            name = self._keys.name(text(key))
            if name is None or name not in names:
                continue
            ends_in = seconds(left)
            if ends_in is not None and ends_in <= 0:
                holder = None
            known = followed.get(name)
            followed[name] = Followed(holder, None if ends_in is None or holder is None else now + ends_in)
            if known is not None and known.holder != holder:
                self._notices.changed(name)
        self._followed = followed

    def _tend_followed(self) -> None:
        """Renew the subscription to the followed names in time, and ask for the names whose lease should have ended.

        The server sends no notification when a lease expires.
        """
        now = self._now()
        if now >= self._follow_at and self._followed:
            with suppress(MultilockError):
                self._follow(set(self._followed), LOOK_WITHIN)
        ended = {name for name, known in self._followed.items() if known.ends_at is not None and known.ends_at <= now}
        self._look_at_followed(ended)

    def _look_at_followed(self, names: set[str]) -> None:
        if not names:
            return
        keys = array(self._keys.of(name).decode() for name in sorted(names))
        with suppress(MultilockError):
            rows, _ = self._transactions.run(self._transactions.steps.holder, [keys], LOOK_WITHIN, limited=False)
            self._learn(rows, names)
            if len(rows) < len(names):  # an operator has deleted a row, and our subscription in it
                self._follow(set(self._followed), LOOK_WITHIN)

    def _silence(self, what: str) -> BackendUnavailable:
        return BackendUnavailable(f"{self._endpoint.name}: {what}", unknown=False, backend="postgresql")
