"""The service-provider interface: what a backend is, and what the kernel offers to it. Version 2.

A backend is plain blocking code. It never waits for a lock, never retries, never judges validity and starts no renewal:
it turns one call into one server's answer. Retries, waits, jitter, deadlines and states are the kernel's.
Any method may be called from several threads at once. A backend takes locks, clocks and chance from `multilock.system`,
and starts its threads by `start_worker`, as the kernel does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from multilock.errors import BackendRejected, BackendUnavailable
from multilock.kernel.worker import Worker, start_worker
from multilock.model import (
    Busy,
    Capabilities,
    Claim,
    Finding,
    Granted,
    LockInfo,
    LossReason,
    Returned,
    parse_owner,
)

__all__ = [
    "SPI_VERSION",
    "Backend",
    "Busy",
    "Capabilities",
    "Channel",
    "Claim",
    "Finding",
    "Granted",
    "Held",
    "Lingers",
    "LockInfo",
    "LossReason",
    "Notices",
    "OpenBackend",
    "OpensChannels",
    "Rests",
    "Returned",
    "Worker",
    "other_number",
    "parse_owner",
    "start_worker",
]

SPI_VERSION = 2

Held = tuple[Claim, Granted]
"""A claim and the newest grant of it."""


class Notices(Protocol):
    """The kernel's ear. Every method may be called from any thread, returns at once and never raises.

    ``client`` is 16 hex digits, new for each open() and so for each process; every ``Claim.id`` begins with it.
    """

    @property
    def client(self) -> str: ...

    def now(self) -> float:
        """Seconds on the clock of every deadline (`multilock.now()`); the one to read for ``Granted.sent_at``."""

    def wake(self, claim_id: str | None) -> None:
        """Look again: a hint that the name of this waiting claim may be free, or was taken back from it. None:
        everybody, after a reconnect."""

    def granted(self, claim_id: str, granted: Granted) -> None:
        """The server has handed the name to this waiting claim. As `wake`, and ``granted`` may be taken for the answer
        to an `attempt`: so ``sent_at`` is the sending of the very request from whose execution the server counts the
        end of the hand-over; not that of the newest one, nor when the push came. It may be lost, late, or told twice.
        The kernel drops it, and asks, if before it is looked at an answer to the claim comes, or a `wake`; if the claim
        is not renewed, or half of its time is over. A backend without such a push never calls it."""

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        """The server said that this claim no longer holds its name (TAKEN), or its session ended (SESSION_LOST)."""

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        """A session was made. From now on all claims granted with this ``group`` are renewed together, by one
        ``renew`` call every ``renew_every`` seconds, also while it holds no claim, until `group_gone` or close.
        A backend that never calls this has its claims renewed one by one, batched per group."""

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        """The server has cut the ttl of that session, whose newest proof is good until ``valid_until`` now
        (``sent_at + valid_for``): no claim in it is held for longer, and one granted with a longer ``renew_every`` was
        granted before the cut. It is called before a request is sent that could be acknowledged under the new ttl."""

    def group_gone(self, group: Hashable, message: str) -> None:
        """That session ended: every claim in it is lost (SESSION_LOST) and every waiter looks again."""

    def silent(self, group: Hashable) -> None:
        """The connection that keeps this group alive broke: its leases are at risk, and are renewed at once."""

    def changed(self, name: str | None) -> None:
        """The holder of a followed name may have changed. None: of any of them, after a reconnect."""

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        """Report the state of a push connection: a subscription, a watch, a blocking query.

        ``connection``: a short name of it for people, the same each time (``"subscription to 127.0.0.1:6379"``).
        ``trouble``: what is wrong while nothing is pushed over it; None: it is up, or not needed any more.
        ``refused``: the server said no, so that waiting helps little: the user is warned at once.

        The kernel warns once when it is down for longer than a moment, says when it is back, and has a finding
        meanwhile. The backend tries again for ever, with growing pauses, and until then looks at what is held with
        each renewal.
        """


class Backend(Protocol):
    """One place where locks live.

    Each call ends within ``within`` seconds (connecting included) with an answer, or raises

    * `BackendUnavailable`: no answer that counts; ``unknown=False`` only if the request certainly was not executed;
    * `BackendRejected`: refused, not executed, asking again cannot help.
    """

    @property
    def scheme(self) -> str:
        """The scheme it is known by, for messages: ``"redis"``."""

    @property
    def spi_version(self) -> int:
        """The `SPI_VERSION` that it was written for, as a number of its own; a backend that does not say speaks 1. No
        other than this multilock's is opened."""

    @property
    def capabilities(self) -> Capabilities: ...

    def open(self, notices: Notices) -> None:
        """Before first use, and again in a forked child (then nothing inherited may be used or closed). No I/O."""

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Take the name if it is free. Idempotent on ``claim.id``. A refused claim takes its place in the queue if
        ``join``, else leaves nothing behind. For a claim already queued it is heartbeat and confirmation: its answer
        makes a holder, or what `Notices.granted` brings.

        What excludes what is told by ``claim.mode`` and ``claim.fair``, never by its kind."""

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        """Give back, or leave the queue, whichever applies; touches nothing of another claim.

        ``granted`` None: it was never confirmed. ``unsure``: some request of this id was never answered and may still
        be executed later; the cancel must then be final (a tombstone, the end of the session …).
        Idempotent: re-sent until answered.
        """

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """Extend all of them in as few requests as possible; one answer each, in order. None: the server said that it
        is not this claim's any more. An exception, which is not raised: no answer that counts, for this one. ``held``
        is empty for a session that holds nothing."""

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        """From now on report by `Notices.gone` when one of these stops holding its name, also if that happened
        already. Called once per lease, 0.25 s after its grant. A backend without push does nothing. `release` ends
        it, for that claim: several claims of one client may hold one name."""

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Report by `Notices.changed` each change of holder of exactly these names from now on (replaces the former
        set). False: no push, the kernel polls."""

    def inspect(self, name: str, within: float) -> LockInfo | None: ...

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        """All held names that begin with ``prefix``; each request of the iteration has ``within`` seconds."""

    def force_release(self, name: str, within: float) -> bool:
        """Take the name from all who hold it; True if somebody did. Each holder hears of it (TAKEN)."""

    def diagnose(self, within: float) -> list[Finding]: ...

    def ping(self, within: float) -> None: ...

    def close(self) -> None:
        """End connections and threads; no claim is held any more. Never raises, does not wait for a server."""


class Channel(Protocol):
    """One connection for one event loop, which sends on it and reads from it without ever blocking.

    One request at a time: `attempt` or `release`, then `answer` when the connection can be read. A channel is closed
    when its request failed, was cancelled, or was not answered in time; what was sent may still be executed then. It
    never closes itself: the loop that watches it must let go of the descriptor first.
    """

    def fileno(self) -> int: ...

    def attempt(self, claim: Claim, join: bool) -> bool:
        """Send what `Backend.attempt` asks. False: it did not leave whole, and so cannot be executed."""

    def release(self, claim: Claim, granted: Granted | None, unsure: bool) -> bool:
        """Send what `Backend.release` asks. False: it did not leave whole, and so cannot be executed."""

    def answer(self) -> Granted | Busy | Returned | None:
        """What the request under way is answered, or its exception; BlockingIOError while it is not there whole.

        None: nothing was done, and `Backend` is to be asked (on a thread, which may block).
        """

    def close(self) -> None: ...


@runtime_checkable
class Lingers(Protocol):
    """What a `Channel` to several servers may offer besides: some of them answer when nobody waits for it any more."""

    def idle(self) -> bool:
        """Read what came while nobody asked. False: the channel is of no use any longer."""

    def look_in(self) -> float | None:
        """In how many seconds to call `answer`, or `idle` while nobody asks, though nothing came; None: not at all."""


@runtime_checkable
class OpensChannels(Protocol):
    """What a `Backend` may offer besides, if its requests are small writes to a socket: asyncio then needs no thread
    to carry them."""

    def channel(self, within: float) -> Channel | None:
        """A new one, connected; None: not to this server. Raises as every method of `Backend`."""


@runtime_checkable
class Rests(Protocol):
    """What a `Backend` with the capability ``hold_at_least`` offers besides."""

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        """Instead of `Backend.release`: keep the name taken for ``seconds`` from now, by the server's own clock and
        whatever becomes of this process; then it is free as after a release.

        Nobody can renew it, and only `Backend.force_release` ends it earlier; `Backend.inspect` tells
        ``resting_until``. Who waits is woken once, and so learns when to come again. Otherwise as `release`:
        idempotent, with what is then left of the time.
        """


def other_number(claim: Claim, permits: int, scheme: str) -> BackendRejected:
    """What `Backend.attempt` raises where the name is held with ``permits``, and the claim asks for another number."""
    return BackendRejected(
        f"{claim.name!r} has {permits} permits here, {claim.permits} were asked for: let all name the same number, or "
        "wait until nobody holds one",
        name=claim.name,
        backend=scheme,
    )


class OpenBackend(Protocol):
    """What the entry-point group ``multilock.backends`` and `multilock.register_backend` take. No I/O.

    ``options`` holds ``ttl`` (float seconds: the client's default), ``prefix``, ``identity``, ``request_timeout``
    (float seconds or None) and, as given (text from a URL, or any object), the backend's own; ``client`` is a client
    object of the field, if one was handed over. Raises ConfigurationError for an option it does not know.
    """

    def __call__(self, url: str, options: dict[str, Any]) -> Backend: ...
