"""The lock on one Redis primary: what is asked of its scripts, and what their answers mean.

A lock is a string key with an end (`SET key owner NX PX ttl`, as in the pattern that Redis documents, so that plain
clients and redis-py's Lock exclude us and we them), with what that pattern lacks: a fencing token, a queue in order of
arrival in which the releaser itself makes the next one the holder, and a cancel that is final. Each step is one script
in ``scripts/``, atomic and safe to send again; the invariant stands on top of each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from multilock.backend import Held
from multilock.errors import BackendUnavailable
from multilock.model import Busy, Claim, Granted, LockInfo, parse_owner
from multilock.names import escape, unescape
from multilock_redis.transport import Answer, Connections, ScriptMissing, bulks, pack

__all__ = ["Exchange", "Keyspace", "Recipe", "liveness"]

Exchange = Callable[[Sequence[bytes], float], list[Answer]]

TOMBSTONE = 60_000  # ms; longer than any request can lie in a buffer of a connection that was closed
RESTS = b"#multilock:rest:"  # before the owner of a name that was released and rests: no claim is called so
RENEWED_AT_ONCE = 500  # locks; one script keeps the server for about 1 ms
SCANNED_AT_ONCE = 1000  # keys looked at by one SCAN
EPOCH = datetime.fromtimestamp(0, UTC)


def liveness(ttl: float) -> float:
    """Seconds for which one request keeps a waiter's place. Three heartbeats: two may be late.

    Long enough that a thousand waiters are no load, short enough that a dead one delays the next by no more than this.
    """
    return min(max(ttl, 1.0), 6.0)


class Script:
    """One Lua script, called by its hash."""

    def __init__(self, *files: str, words: int, keys: int) -> None:
        text = "\n".join((Path(__file__).parent / "scripts" / file).read_text(encoding="utf-8") for file in files)
        self.load = pack("SCRIPT", "LOAD", text)
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.head = self.head_for(words, keys)

    def head_for(self, words: int, keys: int) -> bytes:
        """The beginning of a call with so many keys, and so many words in keys and arguments together."""
        return b"*%d\r\n%b" % (3 + words, bulks(b"EVALSHA", self._sha.encode(), b"%d" % keys))


ACQUIRE = Script("pass.lua", "acquire.lua", words=9, keys=5)
RELEASE = Script("pass.lua", "release.lua", words=7, keys=5)
REST = Script("pass.lua", "rest.lua", words=9, keys=5)
FORCE = Script("pass.lua", "force.lua", words=4, keys=4)
INSPECT = Script("inspect.lua", words=4, keys=4)
RENEW = Script("renew.lua", words=0, keys=0)


_LAST, _ORDINARY = bulks(b"%d" % TOMBSTONE), bulks(b"0")


@lru_cache(maxsize=256)
def _how(ttl: float, join: bool, fair: bool) -> bytes:
    """Packed: ttl, liveness, whether a free lock may be taken past the queue."""
    wait = round(liveness(ttl) * 1000) if join else 0
    return bulks(b"%d" % round(ttl * 1000), b"%d" % wait, b"%d" % (not join and not fair))


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one name, as they go over the wire."""

    first_four: bytes  # packed: lock, queue, live, token
    gone: bytes  # what the key of a tombstone begins with

    def own(self, claim: Claim) -> bytes:
        """Packed: the claim's tombstone, its owner text."""
        gone = self.gone + claim.id.encode()
        owner = claim.owner.encode()
        return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(gone), gone, len(owner), owner)


class Keyspace:
    """Names and keys. ``{lock}:x`` is in the lock's slot of a cluster, and no lock can be called so: no escaped name
    and no prefix has a brace."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        # For names that are taken again and again; a renewal of thousands, each once in a while, would only flush it.
        self.of = lru_cache(maxsize=1024)(self._keys)

    def lock(self, name: str) -> bytes:
        return (self.prefix + escape(name)).encode()

    def name(self, key: bytes) -> str | None:
        """The lock whose key this is; None for any other key."""
        text = key.decode(errors="replace")
        return unescape(text.removeprefix(self.prefix)) if text.startswith(self.prefix) else None

    def _keys(self, name: str) -> Keys:
        lock = self.lock(name)
        queue, live, gone = (b"{%b}:%b" % (lock, part) for part in (b"queue", b"live", b"gone:"))
        return Keys(bulks(lock, queue, live, token_of(lock)), gone)


def token_of(lock: bytes) -> bytes:
    return b"{%b}:token" % lock


class Recipe:
    def __init__(self, keys: Keyspace, connections: Connections, group: str, now: Callable[[], float]) -> None:
        self._keys = keys
        self._connections = connections
        self._group = group
        self._now = now

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Take it, or take and keep a place in the queue. Who joins is served in order of arrival, fair or not; an
        unfair one that does not join takes a free lock whoever waits."""
        return self.attempted(claim, *self._run(ACQUIRE, self.to_attempt(claim, join), within))

    def to_attempt(self, claim: Claim, join: bool) -> bytes:
        keys = self._keys.of(claim.name)
        return b"".join((ACQUIRE.head, keys.first_four, keys.own(claim), _how(claim.ttl, join, claim.fair)))

    def attempted(self, claim: Claim, answer: Any, sent_at: float) -> Granted | Busy:
        ttl = claim.ttl
        if isinstance(answer, int):
            return Granted(answer, ttl, sent_at, ttl, ttl / 3, self._group)
        left, rank = answer
        # A key that ends by itself is worth a look just then, for those whose turn it may be: one after the other.
        # Its own end is pushed late, or never.
        expires_in = left / 1000 + 0.002 + 0.020 * rank if left >= 0 and 0 <= rank < 3 else None
        return Busy(liveness(ttl) / 3, expires_in)

    def release(self, claim: Claim, unsure: bool, within: float) -> bool:
        answer, _ = self._run(RELEASE, self.to_release(claim, unsure), within)
        return bool(answer)

    def to_release(self, claim: Claim, unsure: bool) -> bytes:
        keys = self._keys.of(claim.name)
        return b"".join((RELEASE.head, keys.first_four, keys.own(claim), _LAST if unsure else _ORDINARY))

    def rest(self, claim: Claim, unsure: bool, seconds: float, within: float) -> bool:
        keys = self._keys.of(claim.name)
        how = bulks(b"%d" % max(1, math.ceil(seconds * 1000)), RESTS)
        last = _LAST if unsure else _ORDINARY
        answer, _ = self._run(REST, b"".join((REST.head, keys.first_four, keys.own(claim), last, how)), within)
        return bool(answer)

    def renew(self, held: Sequence[Held], exchange: Exchange, within: float) -> list[Granted | None]:
        chunks = [held[start : start + RENEWED_AT_ONCE] for start in range(0, len(held), RENEWED_AT_ONCE)]
        answers = self._run_all(RENEW, [self._renewal(chunk) for chunk in chunks], exchange, within)
        return [
            Granted(granted.token, claim.ttl, sent_at, claim.ttl, claim.ttl / 3, self._group) if ours else None
            for chunk, (flags, sent_at) in zip(chunks, answers, strict=True)
            for (claim, granted), ours in zip(chunk, flags, strict=True)
        ]

    def _renewal(self, held: Sequence[Held]) -> bytes:
        keys: list[bytes] = []
        values: list[bytes] = []
        for claim, _ in held:
            lock = self._keys.lock(claim.name)
            keys += (lock, token_of(lock))
            values += (claim.owner.encode(), b"%d" % round(claim.ttl * 1000))
        return RENEW.head_for(2 * len(keys), len(keys)) + bulks(*keys, *values)

    def force(self, name: str, within: float) -> bool:
        owner, _ = self._run(FORCE, FORCE.head + self._keys.of(name).first_four, within)
        return owner is not None

    def inspect(self, name: str, within: float) -> LockInfo | None:
        answer, _ = self._run(INSPECT, self._inspection(name), within)
        return None if answer is None else _info(name, *answer)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        seen = set()  # SCAN may show a key twice
        # A name that is all dots is escaped otherwise than the beginning of a longer one.
        pattern = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix)) + "*"
        cursor = b"0"
        while True:
            scan = pack("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED_AT_ONCE, "TYPE", "string")
            (cursor, found), _ = self._connections.call(scan, within)
            # With an empty prefix the pattern meets our other keys too.
            listed = dict.fromkeys(self._keys.name(key) for key in found if not key.startswith(b"{"))
            names = [name for name in listed if name is not None and name.startswith(prefix) and name not in seen]
            seen.update(names)
            requests = [self._inspection(name) for name in names]
            answers = self._run_all(INSPECT, requests, self._connections.exchange, within)
            for name, (answer, _) in zip(names, answers, strict=True):
                if answer is not None:
                    yield _info(name, *answer)
            if cursor == b"0":
                return

    def _inspection(self, name: str) -> bytes:
        return INSPECT.head + self._keys.of(name).first_four

    def _run(self, script: Script, request: bytes, within: float) -> Answer:
        deadline = self._now() + within
        try:
            return self._connections.call(request, within)
        except ScriptMissing:
            return self._load_and_run(script, [request], self._connections.exchange, deadline)[0]

    def _run_all(self, script: Script, requests: Sequence[bytes], exchange: Exchange, within: float) -> list[Answer]:
        deadline = self._now() + within
        answers = exchange(requests, within)
        if any(isinstance(answer, ScriptMissing) for answer, _ in answers):
            return self._load_and_run(script, requests, exchange, deadline)
        return _checked(answers)

    def _load_and_run(
        self, script: Script, requests: Sequence[bytes], exchange: Exchange, deadline: float
    ) -> list[Answer]:
        """In one round trip. It is the same request again, so it has its own time of sending."""
        return _checked(exchange([script.load, *requests], deadline - self._now()))[1:]


def _checked(answers: list[Answer]) -> list[Answer]:
    for answer, _ in answers:
        if isinstance(answer, ScriptMissing):  # again: somebody flushes the scripts in a loop
            raise BackendUnavailable("the server forgot the script that it had just loaded", unknown=False)
        if isinstance(answer, Exception):
            raise answer
    return answers


def _info(name: str, owner: bytes, token: bytes | None, waiting: int, left: int) -> LockInfo:
    rests = owner.startswith(RESTS)
    info = parse_owner(owner.removeprefix(RESTS).decode(errors="replace"))
    remaining = left / 1000 if left >= 0 else None  # below: a plain client's key that never ends
    if info.kind is None:
        return replace(
            info, name=name, waiting=waiting, remaining=remaining
        )  # a plain client's: the token is that of another holder
    micros = None if token is None else int(token)
    since = None if micros is None else EPOCH + timedelta(microseconds=micros)
    until = datetime.now(UTC) + timedelta(milliseconds=max(0, left)) if rests else None
    return replace(
        info, name=name, token=micros, since=since, waiting=waiting, resting_until=until, remaining=remaining
    )
