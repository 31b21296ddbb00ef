"""The frozen values that pass between user, kernel and backend."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime

    from typing_extensions import TypeVar

    from multilock.lease import AnyLease, AsyncLease, Lease

    # A type checker reads a plain ``Loss`` as the loss of a blocking or an asyncio lease. Before Python 3.13, a TypeVar
    # has no default at run time.
    L_co = TypeVar("L_co", bound=AnyLease, default=Lease | AsyncLease, covariant=True)
else:
    from typing import TypeVar

    L_co = TypeVar("L_co", covariant=True)

__all__ = [
    "Busy",
    "Capabilities",
    "Claim",
    "Finding",
    "Granted",
    "LeaderInfo",
    "LeaseState",
    "LockInfo",
    "Loss",
    "LossReason",
    "Returned",
    "at_most",
    "owner_text",
    "parse_owner",
]


class LeaseState(enum.Enum):
    """The state of a lease: HELD, AT_RISK (still held, but a renewal failed or is late), LOST, or RELEASED by its
    holder."""

    HELD = "held"
    AT_RISK = "at_risk"
    LOST = "lost"
    RELEASED = "released"


class LossReason(enum.Enum):
    """The reason why a lease ended without a release."""

    EXPIRED = "expired"  #: no renewal was acknowledged in time
    TAKEN = "taken"  #: another holder has the name, or the key was deleted
    SESSION_LOST = "session_lost"  #: the session (etcd: lease) that kept the lock alive ended
    PAUSED = "paused"  #: this process did not run for longer than the lease allows
    WATCHDOG_DIED = "watchdog_died"  #: the thread that renews ended
    CLOSED = "closed"  #: the client was closed while the lease was held
    RESIGNED = "resigned"  #: elections only: this node stepped down
    HELD_TOO_LONG = "held_too_long"  #: the ``max_hold`` of the lock is over


class Claim(NamedTuple):
    """The demand of one acquisition for one name. A claim is never used again after it was cancelled, released or lost.

    ``id`` is ``<client>.<32 hex digits>``. Each acquisition has a new id, and a request that is sent again has the same
    id. ``owner`` is the id followed by a description of the holder, as one word (see `owner_text`). ``ttl`` is in
    seconds, already rounded to what the backend grants. For the kind "permit", ``permits`` is how many claims may hold
    the name together. ``arrived`` is when acquire() was called, in µs of the wall clock. ``arrived`` is the same for
    all claims of that call, and is used only to order waiters.
    """

    name: str
    kind: str
    id: str
    owner: str
    ttl: float
    renew: bool
    fair: bool
    identity: str
    permits: int = 0
    arrived: int = 0

    @property
    def mode(self) -> str:
        """The mode of the claim. Claims hold a name together only if their modes are equal.

        ``"x"`` shares the name with no other claim, ``"r"`` with every reader, ``"p<n>"`` with at most n in all.
        """
        if self.kind == "permit":
            return f"p{self.permits}"
        return "r" if self.kind == "read" else "x"


class Granted(NamedTuple):
    """A backend's proof that a claim holds its name.

    ``sent_at`` is `multilock.now()`, read immediately before the first byte of the request that keeps the claim alive
    is sent. ``valid_for`` is in seconds from ``sent_at`` (ZooKeeper: two thirds of the ttl). Only the kernel computes a
    deadline from ``sent_at`` and ``valid_for``. ``ttl`` is the ttl that the server granted, and ``renew_every`` the
    seconds between renewals. ``group`` identifies the leases that one request renews together (those of a server or a
    session). ``key`` is the backend's own handle (a revision, an index, a path). ``short`` is True if the name was
    handed over for less than the requested ttl. The first renewal then brings the whole ttl.
    """

    token: int | None
    ttl: float
    sent_at: float
    valid_for: float
    renew_every: float
    group: Hashable
    key: Hashable = None
    short: bool = False


class Busy(NamedTuple):
    """Another claim holds the name. The kernel asks again after a wake-up, after ``heartbeat`` seconds plus jitter, or
    after ``expires_in`` seconds, whichever comes first.

    ``expires_in`` is exact: the present holder's claim ends by itself after that time. If ``spent`` is True, the id
    must not be sent again: the kernel cancels the claim, and the acquire() continues with a new one.
    """

    heartbeat: float
    expires_in: float | None = None
    spent: bool = False


class Returned(NamedTuple):
    """A backend's reply to a release. ``ours`` is True if the claim held the name until now.

    ``again`` is True if one of several servers may still have a vote of the claim, or its place in the queue. The
    kernel then releases the claim again in the background, with ``unsure``, until ``again`` is False.
    """

    ours: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The promises of a backend with its options; known without I/O.

    If a particular server cannot keep one of these promises, ``client.diagnose()`` reports a finding.
    """

    fencing: bool  #: every acquisition gets a token greater than all earlier ones
    fencing_scope: str  #: how long the tokens of one name keep growing
    fair: bool  #: waiters with ``fair=True`` are served in order of arrival
    push_wait: bool  #: the backend wakes a waiter; if not, the waiter polls
    push_loss: bool  #: whether the loss of a key or session is reported at once; if False, the next renewal finds it
    cross_host: bool  #: a lock excludes processes of other hosts too
    survives_failover: bool  #: a lock outlives the failure of one server
    ttl_min: float  #: seconds; a smaller ttl is rounded up to it
    ttl_max: float  #: seconds; a greater ttl is a ValueError
    ttl_step: float  #: seconds; a ttl is rounded up to a multiple of it
    takeover_bound: float  #: seconds until another client can hold the lock of a killed holder, with the client's ttl
    lock_delay: float = 0.0  #: seconds the server itself waits after a holder's session ended
    ttl_floor: float | None = None  #: seconds; the smallest ttl a server may allow, if ``ttl_min`` is only its default
    hold_at_least: bool = False  #: the server itself can keep a released name taken for a while
    read_write: bool = False  #: many readers, or one writer, can hold a name
    semaphore: bool = False  #: a given number of holders can hold a name together
    why_one: str = ""  #: why a name can have only one holder; empty if it can have several
    why_ttl_max: str = ""  #: the user's option that limits ``ttl_max``; empty if none does


def at_most(can: Capabilities) -> str:
    """Return the end of an error message about a ttl that is too long: the longest possible ttl, and what limits it."""
    why = f", since {can.why_ttl_max}" if can.why_ttl_max else " with these options"
    return f"{can.ttl_max:.10g} s at most{why}"


@dataclass(frozen=True, slots=True)
class LockInfo:
    """The holder of a name, as the backend reports it. A field is None if the backend does not know it.

    Use it for display, never for decisions: the holder may have changed by the time this is read.
    """

    name: str
    kind: str | None = None
    owner: str | None = None
    identity: str | None = None
    host: str | None = None
    pid: int | None = None
    token: int | None = None
    ttl: float | None = None  #: seconds granted
    since: datetime | None = None
    waiting: int | None = None  #: how many claims wait; may include claims that have stopped waiting
    resting_until: datetime | None = None  #: the name is released, and kept taken until this time (``hold_at_least``)
    #: seconds until the server ends the lock, unless it is renewed before
    remaining: float | None = field(default=None, compare=False)
    holders: int | None = None  #: how many claims hold the name together; None if only one holder is possible
    permits: int | None = None  #: how many claims may hold the name together
    others: tuple[LockInfo, ...] = ()  #: the other holders, at most the first 99; only from inspect() of one name


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """The present leader of an election. ``term`` is the fencing token of that leadership."""

    identity: str | None
    term: int | None = None
    host: str | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Loss(Generic[L_co]):
    """A lease that ended without being released.

    For a type checker ``loss.lease`` is a blocking or an asyncio lease. With ``Loss[Lease]`` it is a blocking one, with
    ``Loss[AsyncLease]`` an asyncio one.

    ``confirmed`` is True if the backend reported the loss, and False if the proof of the lease ran out. ``detected_at``
    and ``valid_until`` are on the clock `multilock.now()`.
    """

    lease: L_co
    reason: LossReason
    confirmed: bool
    message: str
    detected_at: float
    valid_until: float

    @property
    def time_left(self) -> float:
        """Seconds for which the backend still admits nobody else; 0.0 after a confirmed loss."""
        return 0.0 if self.confirmed else max(0.0, self.valid_until - self.detected_at)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the server or its settings that weakens the lock, with a remedy."""

    code: str
    level: str  #: "info", "warning" or "error"
    message: str
    remedy: str


_ENCODE = {ord(c): f"%{ord(c):02X}" for c in "%:@ "}
OWNER_BYTES = 512


def owner_text(claim_id: str, kind: str, host: str, pid: int, identity: str, ttl: float) -> str:
    """Return ``<id>@kind:host:pid:identity:ttl`` in at most 512 bytes of UTF-8, without a space. A long host is cut."""
    return claim_id + _who(len(claim_id), kind, host, pid, identity, ttl)


@lru_cache(maxsize=1024)  # one value for all acquisitions through one lock object
def _who(after: int, kind: str, host: str, pid: int, identity: str, ttl: float) -> str:
    head = f"@{kind}:"
    tail = f":{pid}:{identity.translate(_ENCODE)}:{ttl:g}"
    room = OWNER_BYTES - after - len(head) - len(tail.encode())
    host = host.translate(_ENCODE).encode()[:room].decode(errors="ignore")
    return head + host + tail


def parse_owner(owner: str) -> LockInfo:
    """Return what `owner_text` wrote, as a LockInfo without a name. Any other text becomes its ``identity``."""
    claim_id, _, rest = owner.partition("@")
    parts = rest.split(":")
    if len(parts) != 5 or not claim_id:
        return LockInfo("", owner=owner, identity=owner)
    kind, host, pid, identity, ttl = (_decode(part) for part in parts)
    try:
        return LockInfo("", kind, owner, identity, host, int(pid), None, float(ttl))
    except ValueError:
        return LockInfo("", owner=owner, identity=owner)


def _decode(part: str) -> str:
    for char in ":@ %":
        part = part.replace(f"%{ord(char):02X}", char)
    return part
