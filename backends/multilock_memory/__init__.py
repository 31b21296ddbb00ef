"""Locks that live in this process, and the reference for the behaviour of every backend.

``memory://name`` is one store for all clients of the process that use this name, both blocking and asyncio. A store
lives as long as the process. A forked child starts with empty stores: it does not have the locks of its parent, and its
parent does not see the child's. Use ``sqlite://`` between the processes of one host.

`acquire_release` is the algorithm and the store itself. `notices` notifies the clients.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from multilock.backend import (
    Busy,
    Capabilities,
    Claim,
    Finding,
    Granted,
    Held,
    LockInfo,
    LossReason,
    Notices,
    Returned,
)
from multilock.names import escape, unescape
from multilock.options import prefix_of, reject_unknown, ttl_of
from multilock.timing import LIVENESS_MIN, RENEWALS
from multilock_memory.acquire_release import Store

__all__ = ["MemoryBackend", "open_backend"]

GROUP = "memory"


def open_backend(url: str, options: Mapping[str, object]) -> MemoryBackend:
    """Return the backend for the store ``memory://`` or ``memory://name``. The store has no options besides the common
    ones."""
    reject_unknown(options, (), "memory")
    return MemoryBackend(
        url.partition("://")[2],
        prefix=prefix_of(options),
        ttl=ttl_of(options),
    )


class MemoryBackend:
    """One client's view of a store. The store uses the client's clock, notices and prefix."""

    scheme = "memory"
    spi_version = 1
    answers_at_once: Literal[True] = True

    def __init__(self, store: str, *, prefix: str, ttl: float) -> None:
        self._name = store
        self._prefix = prefix
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope="the life of the process",
            fair=True,
            push_wait=True,
            push_loss=True,
            cross_host=False,
            survives_failover=False,
            ttl_min=0.1,
            ttl_max=365 * 86400.0,
            ttl_step=0.001,
            takeover_bound=max(ttl, LIVENESS_MIN),
            hold_at_least=True,
            read_write=True,
            semaphore=True,
        )

    def open(self, notices: Notices) -> None:
        self._notices = notices
        if (store := _stores.get(self._name)) and store.pid != os.getpid():
            # This store is the parent's. A child must not renew the parent's locks, and a thread of the parent may have
            # held the mutex at the fork.
            del _stores[self._name]
        self._store = _stores.setdefault(self._name, Store())

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        now = self._notices.now()
        with self._store.mutex:
            answer = self._store.attempt(self._key(claim.name), claim, join, self._notices, now)
        self._store.outbox.deliver()
        return answer if isinstance(answer, Busy) else self._granted(claim, answer, now)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        now = self._notices.now()
        with self._store.mutex:
            if unsure:
                self._store.cancel(claim.id, now)
            was_held = self._store.leave(self._key(claim.name), claim.id, now)
        self._store.outbox.deliver()
        return Returned(was_held)

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        now = self._notices.now()
        with self._store.mutex:
            if unsure:
                self._store.cancel(claim.id, now)
            was_held = self._store.rest(self._key(claim.name), claim.id, now + seconds, now)
        self._store.outbox.deliver()
        return Returned(was_held)

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        now = self._notices.now()
        with self._store.mutex:
            tokens = [self._store.renew(self._key(claim.name), claim, now) for claim, _ in held]
        self._store.outbox.deliver()
        return [
            None if token is None else self._granted(claim, token, now)
            for (claim, _), token in zip(held, tokens, strict=True)
        ]

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        # Every holder is notified when its lock is taken away. But a lock may be lost before the kernel has the lease,
        # so such a loss is reported here.
        now = self._notices.now()
        with self._store.mutex:
            lost = [claim for claim, _ in held if not self._store.look(self._key(claim.name), now).held_by(claim.id)]
        self._store.outbox.deliver()
        for claim in lost:
            self._notices.gone(claim.id, LossReason.TAKEN, "the name was taken from it")

    def follow(self, names: frozenset[str], within: float) -> bool:
        with self._store.mutex:
            self._store.outbox.follow(self._notices, {self._key(name): name for name in names})
        return False  # the end of a lease is not reported, so the kernel must poll

    def inspect(self, name: str, within: float) -> LockInfo | None:
        with self._store.mutex:
            info = self._store.inspect(self._key(name), self._notices.now())
        self._store.outbox.deliver()
        return replace(info, name=name, others=tuple(replace(i, name=name) for i in info.others)) if info else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        with self._store.mutex:
            keys = [key for key in self._store.names if key.startswith(self._prefix)]
        names = (unescape(key.removeprefix(self._prefix)) for key in keys)
        for name in sorted(name for name in names if name is not None and name.startswith(prefix)):
            if info := self.inspect(name, within):
                yield replace(info, others=())

    def force_release(self, name: str, within: float) -> bool:
        with self._store.mutex:
            was_held = self._store.force(self._key(name), self._notices.now())
        self._store.outbox.deliver()
        return was_held

    def diagnose(self, within: float) -> list[Finding]:
        return []

    def ping(self, within: float) -> None:
        """Do nothing: there is no server that could fail to reply."""

    def close(self) -> None:
        with self._store.mutex:
            self._store.forget(self._notices)
        self._store.outbox.deliver()

    def _key(self, name: str) -> str:
        return self._prefix + escape(name)

    def _granted(self, claim: Claim, token: int, now: float) -> Granted:
        return Granted(token, claim.ttl, now, claim.ttl, claim.ttl / RENEWALS, GROUP)


_stores: dict[str, Store] = {}
