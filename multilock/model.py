"""The words of multilock: frozen values that pass between user, kernel and backend. No behaviour beyond their text."""

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

    # ``Loss`` alone is a loss on either face; a default is what Python before 3.13 does not know when it runs.
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
    """HELD → AT_RISK (a renewal failed or is late; still valid) → LOST. RELEASED: given back by its holder."""

    HELD = "held"
    AT_RISK = "at_risk"
    LOST = "lost"
    RELEASED = "released"


class LossReason(enum.Enum):
    """Why a lease ended without being released."""

    EXPIRED = "expired"  #: no acknowledged renewal in time
    TAKEN = "taken"  #: another holder, or the key was deleted
    SESSION_LOST = "session_lost"  #: the session or lease it lived in ended
    PAUSED = "paused"  #: this process did not run for longer than the lease allows
    WATCHDOG_DIED = "watchdog_died"  #: the renewing thread ended
    CLOSED = "closed"  #: the client was closed while it was held
    RESIGNED = "resigned"  #: elections only: this node stepped down


class Claim(NamedTuple):
    """One attempt to hold one name. Never used again after it was cancelled, released or lost.

    ``id`` is ``<client>.<32 hex digits>``, fresh for each acquisition and kept across the re-sends of that one attempt.
    ``owner`` is ``id`` and who asks, as one word (see `owner_text`). ``ttl`` is seconds, already rounded to what the
    backend grants. ``permits``, of kind "permit": how many may hold the name together. ``arrived`` is the time of the
    call of acquire(), in µs of the wall clock, the same for all its ids; it orders, and decides nothing else.
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
        """What excludes it: only equal modes hold a name together, ``"x"`` with none, ``"p<n>"`` at most n of them."""
        if self.kind == "permit":
            return f"p{self.permits}"
        return "r" if self.kind == "read" else "x"


class Granted(NamedTuple):
    """A backend's proof that a claim holds its name.

    ``sent_at`` is `multilock.now()` read immediately before the bytes left of the request that keeps the claim alive;
    ``valid_for`` seconds count from it (ZooKeeper: two thirds of the ttl). The kernel alone turns them into a deadline.
    ``ttl`` is what the server granted, ``renew_every`` the period of renewals in seconds. ``group`` is what is renewed
    in one request (a server, a session); ``key`` is the backend's own handle (revision, index, path). ``short``: this
    one was handed over for less than the ttl that was asked for, which the first renewal brings.
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
    """Somebody else holds the name. Look again after a wake-up, or after ``heartbeat`` seconds (the kernel adds
    jitter), or after ``expires_in`` (exact; when the present holder ends by itself), whichever is first. ``spent``: the
    id must not be sent again; the claim is cancelled, and the call goes on with another."""

    heartbeat: float
    expires_in: float | None = None
    spent: bool = False


class Returned(NamedTuple):
    """A backend's answer to a release. ``ours``: it was this claim's until now. ``again``: something of the claim may
    still be at one of several servers; it is released again in the background, with ``unsure``, until this is False."""

    ours: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend promises with its options; known without I/O.

    What a particular server takes away from it is a finding of ``client.diagnose()``.
    """

    fencing: bool  #: every acquisition gets a token greater than all before it
    fencing_scope: str  #: as long as what the tokens of one name keep growing
    fair: bool  #: ``fair=True`` is served in order of arrival
    push_wait: bool  #: a waiter is woken by the backend; False: it polls
    push_loss: bool  #: a deleted key or ended session is reported at once; False: by the next renewal
    cross_host: bool  #: excludes processes of different hosts
    survives_failover: bool  #: a lock outlives the failure of one server
    ttl_min: float  #: seconds; a smaller ttl is rounded up to it
    ttl_max: float  #: seconds; a greater ttl is a ValueError
    ttl_step: float  #: seconds; a ttl is rounded up to a multiple
    takeover_bound: float  #: seconds until another can hold the lock of a killed holder, with the client's ttl
    lock_delay: float = 0.0  #: seconds the server itself waits after a holder's session ended
    ttl_floor: float | None = None  #: seconds; where ``ttl_min`` is a server's default: what less may be asked of it
    hold_at_least: bool = False  #: the server itself can keep a released name taken for a while
    read_write: bool = False  #: many readers, or one writer, can hold a name
    semaphore: bool = False  #: a given number can hold a name
    why_one: str = ""  #: why one alone can hold a name, where that cannot be otherwise
    why_ttl_max: str = ""  #: why ``ttl_max`` is no more, where that is an option of the user's


def at_most(can: Capabilities) -> str:
    """The end of a message that says what is too long."""
    why = f", since {can.why_ttl_max}" if can.why_ttl_max else " with these options"
    return f"{can.ttl_max:.10g} s at most{why}"


@dataclass(frozen=True, slots=True)
class LockInfo:
    """Who holds a name, as the backend tells it. Fields it does not know are None. For display, never for decisions."""

    name: str
    kind: str | None = None
    owner: str | None = None
    identity: str | None = None
    host: str | None = None
    pid: int | None = None
    token: int | None = None
    ttl: float | None = None  #: seconds granted
    since: datetime | None = None
    waiting: int | None = None  #: upper bound
    resting_until: datetime | None = None  #: released, and kept taken until then (``hold_at_least``)
    #: seconds until the server ends it, unless it is renewed before
    remaining: float | None = field(default=None, compare=False)
    holders: int | None = None  #: how many hold it together; None for what one alone can hold
    permits: int | None = None  #: … and how many may
    others: tuple[LockInfo, ...] = ()  #: the other holders, where one name was asked for; the first 99 of them


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

    A type checker knows ``loss.lease`` as a lease of either face; of ``Loss[Lease]`` as one of the blocking face, of
    ``Loss[AsyncLease]`` as one whose ``release()`` is awaited.

    ``confirmed``: the backend said so; False: there was no proof of the contrary in time. ``detected_at`` and
    ``valid_until`` are on the clock `multilock.now()`; ``time_left`` is the seconds between them, never negative: for
    that long the backend lets nobody else in (0.0 for a confirmed loss).
    """

    lease: L_co
    reason: LossReason
    confirmed: bool
    message: str
    detected_at: float
    valid_until: float

    @property
    def time_left(self) -> float:
        return 0.0 if self.confirmed else max(0.0, self.valid_until - self.detected_at)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the server or its settings that weakens the lock, and what to do about it."""

    code: str
    level: str  #: "info", "warning" or "error"
    message: str
    remedy: str


_ENCODE = {ord(c): f"%{ord(c):02X}" for c in "%:@ "}
OWNER_BYTES = 512


def owner_text(claim_id: str, kind: str, host: str, pid: int, identity: str, ttl: float) -> str:
    """``<id>@kind:host:pid:identity:ttl`` in at most 512 bytes of UTF-8, without a space; the host is cut to fit."""
    return claim_id + _who(len(claim_id), kind, host, pid, identity, ttl)


@lru_cache(maxsize=1024)  # the same for every acquisition through one lock object
def _who(after: int, kind: str, host: str, pid: int, identity: str, ttl: float) -> str:
    head = f"@{kind}:"
    tail = f":{pid}:{identity.translate(_ENCODE)}:{ttl:g}"
    room = OWNER_BYTES - after - len(head) - len(tail.encode())
    host = host.translate(_ENCODE).encode()[:room].decode(errors="ignore")
    return head + host + tail


def parse_owner(owner: str) -> LockInfo:
    """What `owner_text` wrote, as a LockInfo without a name; text of another program is shown as its ``identity``."""
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
