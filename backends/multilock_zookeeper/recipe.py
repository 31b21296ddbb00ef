"""The lock on ZooKeeper: ephemeral sequential nodes, the lowest of which holds; each waits for the one before it.

The recipe is ZooKeeper's own ("Recipes: Locks" in its documentation), in the layout of kazoo's Lock or of Curator's
InterProcessMutex, whose clients stand in the same queue. What is done here beyond it:

* create and listing are sent back to back, so an uncontended acquire takes one round trip; the creating transaction is
  the fencing token;
* a create without an answer is looked for, after a ``sync``, in the same session, whose requests run in order: so that
  look is conclusive. What is found is kept only if it belongs to the present session, else deleted;
* a delete is repeated until it was answered, or the session has ended. Ids are unique, so a late one hits nobody;
* validity is that of the session (`multilock_zookeeper.session`), moved by acknowledged writes only.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from multilock.backend import Held, Notices
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.model import Busy, Claim, Granted, LockInfo, LossReason
from multilock.names import escape, unescape
from multilock.values import decode_value, encode_value
from multilock_zookeeper.notices import AT_ONCE, ENDED, Watcher
from multilock_zookeeper.session import Session
from multilock_zookeeper.transport import EPHEMERAL_SEQUENTIAL, Answer, NodeExists, NodeMissing, Transport

__all__ = ["STYLES", "Nodes", "Recipe"]

STYLES = {"kazoo": "curator", "curator": "kazoo"}  # each, and the one that does not see it
SAFETY_TIMER = 5.0  # seconds, or the session timeout if that is more: a waiter looks again although no watch fired
UNWATCHED = 1.0  # seconds until a waiter whose watches were not answered looks again
END_WITHIN, END_AGAIN = 1.0, 1.0  # seconds for deleting what is over, and until that is tried again
REMEMBERED = 600.0  # seconds for which a cancelled id is refused
LISTED_AT_ONCE = 100  # names asked about at once when all locks are listed
_CONTENDER = re.compile(r"(__lock__|-lock-)(\d{10}|-\d{9,10})$")
LAST_NUMBER = 2**31 - 1  # a server that has come there gives it to everybody from then on
_MARKS = {"__lock__": "kazoo", "-lock-": "curator"}


class Nodes:
    """Names and nodes."""

    def __init__(self, prefix: str, style: str) -> None:
        self._base = "/" + prefix.lstrip("/")
        self.style = style
        self.directory = self._base[: self._base.rindex("/")] or "/"
        self._begin = self._base[self._base.rindex("/") + 1 :]

    def parent(self, name: str) -> str:
        """Of the nodes that contend for this name."""
        return self._base + escape(name)

    def name(self, child: str) -> str | None:
        """The lock that this child of `directory` is the parent of."""
        if not child.startswith(self._begin) or child[len(self._begin) :].startswith("!"):
            return None
        return unescape(child[len(self._begin) :])

    def begin(self, claim: Claim) -> str:
        """What the claim's own node is called, before the server puts a number to it."""
        if self.style == "kazoo":
            return f"{claim.id}__lock__"
        digits = claim.id[-32:]
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        return f"_c_{uuid}-lock-"

    def queue(self, children: Sequence[str]) -> list[str]:
        """The contenders in their order, whatever their style: by number, which is no text when it gets negative."""
        numbered = [(int(found[2]), child) for child in children if (found := _CONTENDER.search(child))]
        return [child for _, child in sorted(numbered)]

    def is_last(self, child: str) -> bool:
        """Whether its number is the one that all who come later get as well: no order is left among them."""
        found = _CONTENDER.search(child)
        return found is not None and int(found[2]) == LAST_NUMBER

    def stranger(self, children: Sequence[str]) -> str | None:
        """A contender of the style that ours does not exclude."""
        for child in children:
            if (found := _CONTENDER.search(child)) and _MARKS[found[1]] != self.style:
                return child
        return None


class _Place:
    """Where a claim stands. ``unsure``: a create was sent, and whether its node exists is not known."""

    __slots__ = ("cancelled", "end", "first_at", "listed_at", "path", "session", "token", "unsure", "value")

    def __init__(self) -> None:
        self.path: str | None = None
        self.session: int | None = None  # that owns the node at the path
        self.token: int | None = None
        self.listed_at = 0.0  # sending of the newest listing …
        self.first_at: float | None = None  # … and of the one that showed us first
        self.end: int | None = None  # the deletion that is planned then
        self.value = b""
        self.unsure = False
        self.cancelled = False


class Recipe:
    def __init__(self, nodes: Nodes, transport: Transport, watcher: Watcher, notices: Notices) -> None:
        self._nodes = nodes
        self._transport = transport
        self._watcher = watcher
        self._notices = notices
        self._now = notices.now
        self._places: dict[str, _Place] = {}
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten; in that order
        self._lock = threading.Lock()

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self._now() + within
        with self._lock:
            if claim.id in self._cancelled:  # this very call comes late
                return self._busy(claim)
            place = self._places.setdefault(claim.id, _Place())
        answer: Granted | Busy | None = None
        try:
            while answer is None:
                answer = self._step(claim, place, join, deadline)
        finally:
            if not place.path and not place.unsure:
                self._forget(claim, place)
        return answer

    def _step(self, claim: Claim, place: _Place, join: bool, deadline: float) -> Granted | Busy | None:
        """Ask once. None: the node or its session vanished, or the parent was missing; ask again."""
        session = self._transport.session(deadline)
        if place.unsure:
            self._find(claim, place, session, deadline)
        if place.path is not None and place.session != session.number:
            place.path = None  # it went with its session; nothing is taken over from there
        known = place.path is not None
        children = self._list(place, deadline) if known else self._join(claim, place, session, deadline)
        if place.cancelled:
            return self._busy(claim)
        return None if children is None else self._judge(claim, place, session, children, join, deadline)

    def _join(self, claim: Claim, place: _Place, session: Session, deadline: float) -> Sequence[str] | None:
        """Create our node, and list it with the others."""
        parent = self._nodes.parent(claim.name)
        place.value = encode_value(claim)
        with self._lock:
            if place.cancelled:  # meanwhile: no request that names the claim has been sent, nor will be
                return None
            place.unsure = True
            node = f"{parent}/{self._nodes.begin(claim)}"
            created = self._transport.create(node, place.value, EPHEMERAL_SEQUENTIAL)
            listed = self._transport.children(parent)
        place.listed_at = listed.sent_at
        try:
            path, stat = self._transport.wait(created, deadline)
        except NodeMissing:
            place.unsure = False
            self._make_parents(parent, deadline)
            return None
        except (BackendUnavailable, BackendRejected) as error:
            place.unsure = bool(getattr(error, "unknown", False))
            raise
        self._settle(place, self._transport.stripped(path), stat)
        if stat.ephemeralOwner != session.number:
            return None  # kazoo had opened another session by then
        session.prove(created.sent_at)
        return self._children(listed, deadline)

    def _settle(self, place: _Place, path: str, stat: Any) -> None:
        with self._lock:
            place.path, place.session, place.token, place.unsure = path, stat.ephemeralOwner, stat.czxid, False

    def _find(self, claim: Claim, place: _Place, session: Session, deadline: float) -> None:
        """What became of a create without an answer? What is ours now is proved to be by a write."""
        for path in self._own_nodes(claim, deadline):
            try:
                _, stat = self._transport.wait(self._transport.get(path), deadline)
            except NodeMissing:
                continue
            if stat.ephemeralOwner == session.number and place.path is None:
                self._settle(place, path, stat)
            else:
                self._delete(path, deadline)
        place.unsure = False
        if place.path is not None:
            proof = self._transport.put(place.path, place.value)
            try:
                self._transport.wait(proof, deadline)
            except NodeMissing:
                place.path = None
            if not session.over:
                session.prove(proof.sent_at)

    def _own_nodes(self, claim: Claim, deadline: float) -> list[str]:
        """Those of this claim, whichever session they are of. What was sent before has been executed when this is
        answered: the sync sees to it that the server which lists is not behind the one that created."""
        parent, begin = self._nodes.parent(claim.name), self._nodes.begin(claim)
        synced, listed = self._transport.sync(parent), self._transport.children(parent)
        self._transport.wait(synced, deadline)
        children = self._children(listed, deadline) or ()
        return [f"{parent}/{child}" for child in children if child.startswith(begin)]

    def _list(self, place: _Place, deadline: float) -> Sequence[str] | None:
        assert place.path is not None
        listed = self._transport.children(place.path.rpartition("/")[0])
        place.listed_at = listed.sent_at
        return self._children(listed, deadline) or ()

    def _children(self, listed: Answer, deadline: float) -> Sequence[str] | None:
        try:
            children: Sequence[str] = self._transport.wait(listed, deadline)
        except NodeMissing:
            return None
        return children

    def _judge(
        self, claim: Claim, place: _Place, session: Session, children: Sequence[str], join: bool, deadline: float
    ) -> Granted | Busy | None:
        """Whom do we stand behind?"""
        assert place.path is not None
        parent, _, own = place.path.rpartition("/")
        if stranger := self._nodes.stranger(children):
            self._withdraw(claim, place, deadline)
            raise self._refusal(claim.name, stranger)
        if self._nodes.is_last(own):
            self._withdraw(claim, place, deadline)
            raise BackendRejected(
                f"{parent} has counted to {LAST_NUMBER} and cannot tell any more who came first: "
                "delete that node while nobody holds or awaits the lock"
            )
        queue = self._nodes.queue(children)
        if own not in queue:
            place.path = None
            return None
        position = queue.index(own)
        if position == 0:
            self._watcher.stop(claim.id)
            return self._granted(claim, place, session)
        if not join:
            self._withdraw(claim, place, deadline)
            return self._busy(claim)
        ahead = f"{parent}/{queue[position - 1]}"
        try:
            watched = self._watcher.wait(claim.id, ahead, place.path, deadline)
        except BackendUnavailable:
            return Busy(UNWATCHED)  # that it is taken was answered
        return self._busy(claim) if watched else None

    def _granted(self, claim: Claim, place: _Place, session: Session) -> Granted:
        if not claim.renew:
            if place.first_at is None:
                place.first_at = place.listed_at
                self._plan_end(claim, place, place.first_at + min(claim.ttl, session.ttl))
            return self._granted_once(claim, place.first_at, place.token, place.path, session)
        proof = session.validity()
        return Granted(
            place.token, proof.ttl, proof.sent_at, proof.valid_for, proof.renew_every, session.number, place.path
        )

    def _granted_once(
        self, claim: Claim, first_at: float, token: int | None, path: Hashable, session: Session
    ) -> Granted:
        """For ``renew=False``: its own ttl from when it was first, not from when it came; and within the session's."""
        proof = session.validity()
        ttl = min(claim.ttl, proof.ttl)
        left = min(ttl, proof.until - first_at)
        return Granted(token, ttl, first_at, left, proof.renew_every, session.number, path)

    def _plan_end(self, claim: Claim, place: _Place, when: float) -> None:
        """No server ends it before the session: we do, unless it is released before."""
        with self._lock:
            if not place.cancelled:
                place.end = self._watcher.at(when, partial(self._end, claim, place))

    def _end(self, claim: Claim, place: _Place) -> None:
        if place.cancelled or place.path is None or not self._is_present(place.session):
            return
        try:
            self._delete(place.path, self._now() + END_WITHIN)
        except BackendUnavailable:
            self._plan_end(claim, place, self._now() + END_AGAIN)

    def _busy(self, claim: Claim) -> Busy:
        return Busy(max(SAFETY_TIMER, claim.ttl))

    def _withdraw(self, claim: Claim, place: _Place, deadline: float) -> None:
        """Leave the queue again."""
        assert place.path is not None
        self._watcher.stop(claim.id)
        self._delete(place.path, deadline)
        place.path = None

    def _refusal(self, name: str, stranger: str) -> BackendRejected:
        other = STYLES[self._nodes.style]
        tool = "Curator's recipes" if other == "curator" else "kazoo, or multilock without node_style=curator"
        return BackendRejected(
            f"{self._nodes.parent(name)} is used by {tool} (node {stranger!r}), whose order differs from ours: "
            f"set node_style={other}"
        )

    def _make_parents(self, parent: str, deadline: float) -> None:
        """The directories stay; the parent of the contenders is a container, which the server removes when it has been
        empty for a while."""
        parts = self._transport.full(parent).strip("/").split("/")
        paths = ["/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        answers = [self._transport.create_parent(path, container=path == paths[-1]) for path in paths]
        for path, answer in zip(paths, answers, strict=True):
            try:
                self._transport.wait(answer, deadline)
            except NodeExists:
                continue
            except BackendRejected:
                if path == paths[-1]:  # above we may not write, and need not: what matters is the last one
                    raise
            except NodeMissing:
                raise BackendRejected(f"{path} cannot be created: make its parents, or see prefix=") from None

    # ---- release

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> bool:
        deadline = self._now() + within
        with self._lock:
            place = self._places.get(claim.id) or _Place()
            place.cancelled = True  # an attempt that runs now in another thread sends nothing more
            if unsure:
                self._cancel_here(claim.id)
            path, look, end = place.path, place.unsure, place.end
        if end is not None:
            self._watcher.not_at(end)
        self._watcher.stop(claim.id, path)
        deleted = False
        if look:
            self._transport.session(deadline)
            for found in self._own_nodes(claim, deadline):
                deleted |= self._delete(found, deadline)
        elif path is not None and self._is_present(place.session):
            self._transport.connect(deadline)
            deleted = self._delete(path, deadline)
        with self._lock:
            place.unsure = False
            self._places.pop(claim.id, None)
        return deleted

    def _is_present(self, number: int | None) -> bool:
        session = self._transport.present()
        return session is not None and session.number == number

    def _delete(self, path: str, deadline: float) -> bool:
        try:
            self._transport.wait(self._transport.delete(path), deadline)
        except NodeMissing:
            return False
        return True

    def _cancel_here(self, claim_id: str) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            del self._cancelled[next(iter(self._cancelled))]
        self._cancelled[claim_id] = now + REMEMBERED

    def _forget(self, claim: Claim, place: _Place) -> None:
        with self._lock:
            if self._places.get(claim.id) is place and not place.cancelled:
                del self._places[claim.id]

    # ---- renew

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        """One write for all, to one of their nodes. Nodes that no watch covers are looked at as well."""
        deadline = self._now() + within
        session = self._transport.present()
        if session is None or session.number != group:
            return self._all_lost(group, held)
        self._transport.connect(deadline)
        path = str(held[0][1].key) if held else self._nodes.directory.rstrip("/") + "/!alive"
        value = encode_value(held[0][0]) if held else b""
        written = self._transport.put(path, value)
        uncovered = (str(granted.key) for _, granted in held[1:] if not self._watcher.covers(str(granted.key)))
        doubtful = [(key, self._transport.exists(key)) for key in islice(uncovered, AT_ONCE)]
        missing = set()
        try:
            self._transport.wait(written, deadline)
        except NodeMissing:  # a write that failed so was ordered by the leader like any other
            missing.add(path)
        if session.over:  # it was executed in the next one
            return self._all_lost(group, held)
        session.prove(written.sent_at)
        missing |= {key for key, answer in doubtful if self._is_missing(answer, deadline)}
        return [None if granted.key in missing else self._renewed(claim, granted, session) for claim, granted in held]

    def _is_missing(self, answer: Answer, deadline: float) -> bool:
        """What was not looked at in time is not lost: the session is proved by itself, and its watch tells."""
        try:
            return self._transport.wait(answer, deadline) is None
        except BackendUnavailable:
            return False

    def _renewed(self, claim: Claim, granted: Granted, session: Session) -> Granted:
        if not claim.renew:
            return self._granted_once(claim, granted.sent_at, granted.token, granted.key, session)
        proof = session.validity()
        return granted._replace(
            ttl=proof.ttl, sent_at=proof.sent_at, valid_for=proof.valid_for, renew_every=proof.renew_every
        )

    def _all_lost(self, group: Hashable, held: Sequence[Held]) -> Sequence[None]:
        self._notices.group_gone(group, ENDED)
        for claim, _ in held:
            self._notices.gone(claim.id, LossReason.SESSION_LOST, ENDED)
        return [None] * len(held)

    def watch(self, held: Sequence[Held], within: float) -> None:
        own = {str(granted.key): claim.id for claim, granted in held if self._is_present_group(granted)}
        self._watcher.hold(own, self._now() + within)

    def _is_present_group(self, granted: Granted) -> bool:
        session = self._transport.present()
        return session is not None and session.number == granted.group

    # ---- looking

    def inspect(self, name: str, within: float) -> LockInfo | None:
        deadline = self._now() + within
        self._transport.session(deadline)
        return self._look([name], deadline).get(name)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        deadline = self._now() + within
        self._transport.session(deadline)
        children = self._children(self._transport.children(self._nodes.directory), deadline) or ()
        found = (self._nodes.name(child) for child in children)
        names = sorted(name for name in found if name is not None and name.startswith(prefix))
        for start in range(0, len(names), LISTED_AT_ONCE):
            yield from self._look(names[start : start + LISTED_AT_ONCE], self._now() + within).values()

    def _look(self, names: Sequence[str], deadline: float) -> Mapping[str, LockInfo]:
        """Who holds each of these names; those that are free are left out."""
        infos: dict[str, LockInfo] = {}
        open_names = list(names)
        while open_names:
            listed = [(name, self._transport.children(self._nodes.parent(name))) for name in open_names]
            queues = {name: self._nodes.queue(self._children(answer, deadline) or ()) for name, answer in listed}
            asked = [
                (name, self._transport.get(f"{self._nodes.parent(name)}/{queue[0]}"))
                for name, queue in queues.items()
                if queue
            ]
            open_names = []
            for name, answer in asked:
                try:
                    value, stat = self._transport.wait(answer, deadline)
                except NodeMissing:  # it was released meanwhile
                    open_names.append(name)
                    continue
                waiting = len(queues[name]) - 1
                infos[name] = replace(decode_value(value or b""), name=name, token=stat.czxid, waiting=waiting)
        return infos

    def force(self, name: str, within: float) -> bool:
        deadline = self._now() + within
        self._transport.session(deadline)
        parent = self._nodes.parent(name)
        while queue := self._nodes.queue(self._children(self._transport.children(parent), deadline) or ()):
            if self._delete(f"{parent}/{queue[0]}", deadline):
                return True
        return False

    def follow(self, names: frozenset[str], within: float) -> None:
        deadline = self._now() + within
        if names:
            self._transport.session(deadline)
        self._watcher.follow({self._nodes.parent(name): name for name in names}, deadline)
