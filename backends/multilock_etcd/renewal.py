"""The renewal of held locks: keep their lease alive, and read the keys that no watch covers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from multilock import LossReason
from multilock.backend import Granted, Held, Notices
from multilock_etcd.keys import EtcdKeyspace
from multilock_etcd.notices import EtcdWatcher
from multilock_etcd.sessions import ENDED, EtcdSessions
from multilock_etcd.sweep import EtcdSweep

__all__ = ["EtcdRenewal"]


class EtcdRenewal:
    """The renewals of one client's locks."""

    def __init__(
        self,
        keys: EtcdKeyspace,
        sessions: EtcdSessions,
        watcher: EtcdWatcher,
        sweep: EtcdSweep,
        notices: Notices,
    ) -> None:
        self._keys = keys
        self._sessions = sessions
        self._watcher = watcher
        self._sweep = sweep
        self._notices = notices
        self._now = notices.now

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        """Send one keep-alive, whose reply is the proof for all these claims. Then read the keys that no watch
        covers."""
        deadline = self._now() + within
        session = self._sessions.keep_alive(group, within)
        one = len(held) == 1  # this may be a `Lease.renew()`, whose caller wants to know whether the lock is still held
        doubtful = [pair for pair in held if one or not self._watcher.covers(pair[0].id)]
        gone, at = self._sweep.missing(session, doubtful, deadline, within) if session else (set(), 0)
        if session is None or (gone and self._sessions.look(group, at, deadline - self._now())):
            for claim, _ in held:
                self._notices.gone(claim.id, LossReason.SESSION_LOST, ENDED)
            return [None] * len(held)
        self._sweep.forget_tombstones(deadline)
        return [None if self._keys.own(claim) in gone else session.granted(granted.token) for claim, granted in held]
