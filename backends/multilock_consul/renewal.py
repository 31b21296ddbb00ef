"""The renewal of held locks: renew their sessions, and read their keys.

A lock lives as long as its session, so the reply to the renewal of a session is the proof for all locks in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

from multilock import BackendUnavailable, MultilockError, system
from multilock.backend import Claim, Granted, Held, start_worker
from multilock_consul.keys import Keys
from multilock_consul.semaphore import Permits
from multilock_consul.sessions import OWN, Session, Sessions
from multilock_consul.sweep import Found, Sweep
from multilock_consul.transactions import Transactions

__all__ = ["Renewal"]

RENEWED_AT_ONCE = 8  # sessions renewed at the same time, each by a thread on a connection


class Renewal:
    """The renewals of one client's locks."""

    def __init__(self, keys: Keys, transactions: Transactions, sessions: Sessions, now: Callable[[], float]) -> None:
        self._keys = keys
        self._sessions = sessions
        self._sweep = Sweep(keys, transactions, sessions, now)
        self._semaphore = Permits(keys, transactions)
        self._now = now

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """Renew the sessions of these claims.

        The keys of the locks are read as well. If that read gets no reply, no lock counts as lost.
        """
        until = self._now() + within
        sessions = [self._sessions.get(granted.key if group == OWN else group) for _, granted in held]
        if group != OWN and not held:  # a session is renewed even if no lock needs it now
            sessions = [self._sessions.get(group)]
        proofs = self._prove([session for session in dict.fromkeys(sessions) if session], until)
        if group != OWN:
            for proof in proofs.values():
                if isinstance(proof, MultilockError):
                    raise proof
        claims: dict[Session, list[Claim]] = {session: [] for session, proof in proofs.items() if proof is True}
        for session, (claim, _) in zip(sessions, held, strict=False):
            if session in claims:
                claims[session].append(claim)
        found, hidden = self._sweep.sweep(claims, until)
        answers: list[Granted | BackendUnavailable | None] = []
        for session, (claim, granted) in zip(sessions, held, strict=False):
            proof = proofs[session] if session else False
            if session is None or proof is False:
                answers.append(None)
                continue
            if isinstance(proof, MultilockError):
                answers.append(_unsure(proof))
                continue
            keys = self._keys.places(claim, session.id)
            if unseen := next((key for key in keys if key in hidden), None):
                answers.append(_hidden(unseen))
            else:
                still = all(self._may_be_held(found, key, claim, session.id) for key in keys)
                answers.append(session.granted(granted.token) if still else None)
        return answers

    def _prove(self, sessions: Sequence[Session], until: float) -> dict[Session, bool | MultilockError]:
        """Renew these sessions, several at a time. On a slow network, renewing the sessions of many permits one by one
        could take longer than their ttl. The calling thread takes part, so that this works even if no thread can
        start."""
        left = deque(sessions)
        answers: system.SimpleQueue[tuple[Session, bool | MultilockError]] = system.SimpleQueue()

        def work() -> None:
            while True:
                try:
                    session = left.popleft()
                except IndexError:
                    return
                try:
                    answers.put((session, self._sessions.renew(session, until - self._now())))
                except MultilockError as error:
                    answers.put((session, error))

        for _ in range(min(RENEWED_AT_ONCE, len(sessions)) - 1):
            start_worker(work, "multilock-consul-renew", once=True)
        work()
        silence = BackendUnavailable("its session was not renewed in time", backend="consul")
        proofs: dict[Session, bool | MultilockError] = dict.fromkeys(sessions, silence)
        with suppress(system.Empty):
            for _ in sessions:
                session, proof = answers.get(timeout=max(until - self._now(), 0.0) + 0.1)
                proofs[session] = proof
        return proofs

    def _may_be_held(self, found: Found, key: str, claim: Claim, session_id: str) -> bool:
        """Return whether the claim may still hold this key. A key that was not read counts as held, because the session
        lives."""
        if key not in found:
            return True
        entry = found[key]
        if key != self._keys.place(claim, session_id):
            return self._semaphore.lists(claim.name, entry, session_id)
        return entry is not None and entry.held_by(claim.id, session_id)


def _hidden(key: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"Consul refuses to show the key {key!r}, so it is unknown whether the lock is still held",
        unknown=False,
        backend="consul",
    )


def _unsure(error: MultilockError) -> BackendUnavailable:
    """Return the error for the locks of a session whose renewal was refused. The refusal does not mean that these locks
    are lost, and it does not affect other sessions."""
    return (
        error
        if isinstance(error, BackendUnavailable)
        else BackendUnavailable(str(error), unknown=False, backend="consul")
    )
