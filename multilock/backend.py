"""The service-provider interface: the methods of a backend, and the reports that it makes to the kernel.

A backend is plain blocking code. A backend never waits for a lock, never retries, never judges validity and starts no
renewal: it turns one call into one server's reply. The kernel does the retries, the waiting, the jitter, the deadlines
and the states. Several threads may call any method at the same time. A backend takes locks, clocks and random numbers
from `multilock.system`, and the periods that it shares with the kernel from `multilock.timing`. It starts its threads
with `start_worker`, as the kernel does.

A claim is the demand of one caller for one name. A grant is the reply that makes the claim the holder. A session is a
set of claims that the server keeps alive together. A group is what one request renews: a session, or the claims at one
server. A push is a message that the server sends without a request.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from multilock import system
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.kernel.inside_backend import call_inside
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
    "AnswersAtOnce",
    "AttemptsMany",
    "Backend",
    "Busy",
    "Capabilities",
    "Channel",
    "Claim",
    "Finding",
    "FindsTheDead",
    "Granted",
    "Guards",
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
    "call_inside",
    "one_attempt",
    "other_number",
    "parse_owner",
    "start_worker",
]

SPI_VERSION = 1

Held = tuple[Claim, Granted]
"""A claim and the newest grant of it."""


class Notices(Protocol):
    """The reports of a backend to the kernel. Any thread may call any method, which returns at once and never raises.

    ``client`` is 16 hex digits, new for each open() and so for each process; every ``Claim.id`` begins with it.
    """

    @property
    def client(self) -> str:
        """The first part of every ``Claim.id``."""

    def now(self) -> float:
        """Return the seconds on the clock of every deadline (`multilock.now()`), for ``Granted.sent_at``."""

    def wake(self, claim_id: str | None) -> None:
        """Wake this waiting claim: its name may be free now, or the server revoked a grant.

        The call is only a hint. If ``claim_id`` is None, all waiters are woken, for example after a reconnect.
        """

    def granted(self, claim_id: str, granted: Granted) -> None:
        """Report that the server handed the name to this waiting claim.

        Like `wake`, it wakes the waiter. The kernel may also use ``granted`` as the reply to an `attempt`. The server
        counts the time of this grant from the execution of one particular request of the claim. ``sent_at`` is the time
        at which that request was sent, not the time of the newest request or of the push.

        The report may be lost, late or repeated. The kernel sends an `attempt` instead if a `wake` comes before the
        report is read, if the claim is not renewed, or if half of the time of the grant is over. The kernel also
        ignores a ``short`` grant if the server has refused a request of the claim that was sent after ``sent_at``. A
        backend without such a push never calls this method.
        """

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        """Report that the server ended this claim's hold (TAKEN), or that its session ended (SESSION_LOST)."""

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        """Report a new session. All claims granted with this ``group`` are then renewed together.

        The kernel calls ``renew`` once every ``renew_every`` seconds until `group_gone` or close, even while the
        session holds no claim. If a backend never calls this method, each claim is renewed at a time of its own, and
        claims of one group that are due together share a request.
        """

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        """Report that the server has cut the ttl of a session, whose newest proof now ends at ``valid_until``.

        ``valid_until`` is ``sent_at + valid_for`` with the new ttl. A grant with a longer ``renew_every`` was made
        before the cut. The backend calls this method before it sends a request that could be acknowledged under the new
        ttl.
        """

    def group_gone(self, group: Hashable, message: str) -> None:
        """Report the end of a session: every claim in it is lost (SESSION_LOST), and every waiter asks again."""

    def silent(self, group: Hashable) -> None:
        """Report that the connection that keeps this group alive is broken. The kernel renews the leases of the group
        at once."""

    def changed(self, name: str | None) -> None:
        """Report that the holder of a followed name may have changed. None means any followed name, for example after a
        reconnect."""

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        """Report the state of a push connection, over which the server reports changes: a subscription, a watch, a
        blocking query.

        ``connection`` is a short name for people, such as ``"subscription to 127.0.0.1:6379"``. A connection has the
        same name in each call. ``trouble`` says why the server pushes nothing over this connection at present. None
        means that the connection works, or is not needed any longer. ``refused`` is True if the server refused the
        connection. Then waiting helps little, so the user is warned at once.

        If the connection is down for longer than a moment, the kernel warns once, and reports when it works again.
        Until then `diagnose()` has a finding. The backend retries forever, with growing pauses. Until it succeeds, each
        renewal also checks that the locks are still held.
        """


class Backend(Protocol):
    """One server, or several that decide together, which store locks.

    Each call ends within ``within`` seconds, connecting included. It returns a reply or raises one of these:

    * `BackendUnavailable`, if no usable reply came. ``unknown=False`` is allowed only if the request certainly was not
      executed.
    * `BackendRejected`, if the request was refused and not executed, and another attempt cannot help. ``unknown`` is
      True if another request of this attempt may have taken the lock. The attempt itself must not release it, because
      a later attempt of the claim may hold it.
    """

    @property
    def scheme(self) -> str:
        """The scheme of the backend, for messages: ``"redis"``."""

    @property
    def spi_version(self) -> int:
        """The `SPI_VERSION` that the backend was written for, as a number in its own source.

        multilock opens a backend only if this number equals multilock's `SPI_VERSION`.
        """

    @property
    def capabilities(self) -> Capabilities:
        """The promises of the backend with its options."""

    def open(self, notices: Notices) -> None:
        """Prepare for use. Does no I/O.

        The kernel calls this before the first use, and again in a forked child. In the child, the backend must neither
        use nor close anything that it inherited from the parent.
        """

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Take the name if it is free. Idempotent on ``claim.id``.

        A refused claim takes its place in the queue if ``join`` is True. If ``join`` is False, a refused claim leaves
        nothing at the server. For a claim that is already queued, this call is its heartbeat. Only a `Granted`,
        returned here or brought by `Notices.granted`, makes the claim a holder.

        Only ``claim.mode`` and ``claim.fair`` decide which claims exclude each other, never the kind.
        """

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        """Release the name or leave the queue, whichever applies. Other claims are not touched.

        ``granted`` is None if the claim was never confirmed. ``unsure`` is True if some request of this id had no reply
        and may still be executed later. The cancellation must then be final (a tombstone, the end of the session …).
        Idempotent: the kernel repeats the call until there is a reply.
        """

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """Extend all of ``held`` in as few requests as possible. Return one result for each, in the same order.

        None means that the server says the claim no longer holds its name. A `BackendUnavailable`, returned and not
        raised, means that no usable reply came for this claim. ``held`` is empty for a session that holds nothing.
        """

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        """Start to report, by `Notices.gone`, when one of these claims stops holding its name, or has stopped already.

        The kernel calls this once for each lease, 0.25 s after its grant. A backend without push does nothing.
        `release` ends the watch for its own claim only: several claims of one client may hold one name.
        """

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Report by `Notices.changed` from now on when the holder of one of these names changes, and stop reporting
        all other names.

        ``names`` replaces the former set. Returns False if the backend has no push; the kernel then polls.
        """

    def inspect(self, name: str, within: float) -> LockInfo | None:
        """Return the holder of the name, or None if nobody holds it."""

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        """Return all held names that begin with ``prefix``. Each request of the iteration has ``within`` seconds."""

    def force_release(self, name: str, within: float) -> bool:
        """Take the name from every holder. Returns True if there was a holder. Each holder is notified of its loss
        (TAKEN)."""

    def diagnose(self, within: float) -> list[Finding]:
        """Return a finding for each thing at this server that weakens the lock, with a remedy."""

    def ping(self, within: float) -> None:
        """Send a request, and return when the server has replied."""

    def close(self) -> None:
        """End connections and threads. The kernel calls this when it holds no claim. Never raises, and does not wait
        for a server."""


class Channel(Protocol):
    """One connection for one event loop, which writes to it and reads from it without ever blocking.

    A channel carries one request at a time: call `attempt` or `release`, then `answer` when the connection is readable.
    The loop closes the channel if its request failed, was cancelled, or had no reply in time. The server may still
    execute a request that was sent. A channel never closes itself: the loop that watches its descriptor must forget the
    descriptor first.
    """

    def fileno(self) -> int:
        """Return the descriptor that the loop watches."""

    def attempt(self, claim: Claim, join: bool) -> bool:
        """Send the request of `Backend.attempt`. Returns False if it was not sent whole: then it cannot be executed."""

    def release(self, claim: Claim, granted: Granted | None, unsure: bool) -> bool:
        """Send the request of `Backend.release`. Returns False if it was not sent whole: then it cannot be executed."""

    def answer(self) -> Granted | Busy | Returned | None:
        """Return the reply to the request under way, or raise its exception.

        Raises BlockingIOError while the reply is incomplete. Returns None if nothing was executed. The caller must then
        use `Backend` instead (on a thread, because it may block).
        """

    def close(self) -> None:
        """Close the connection."""


@runtime_checkable
class Lingers(Protocol):
    """Optional methods of a `Channel` to several servers, some of which reply after the request has ended."""

    def idle(self) -> bool:
        """Read the replies that came between two requests. Returns False if the channel is not usable any longer."""

    def look_in(self) -> float | None:
        """Return after how many seconds to call `answer` (between requests: `idle`) even if no data has arrived.
        Returns None if there is no need."""


@runtime_checkable
class OpensChannels(Protocol):
    """Optional method of a `Backend` whose requests are small writes to a socket: asyncio then needs no thread."""

    def channel(self, within: float) -> Channel | None:
        """Return a new, connected channel; None if this server cannot have one. Raises the errors of `Backend`."""


@runtime_checkable
class AttemptsMany(Protocol):
    """Optional method of a `Backend` that can send the attempts of many claims in one round trip.

    Without it, thousands of waiters of one asyncio client take turns, because the client sends only a few requests at a
    time.
    """

    def attempt_all(self, claims: Sequence[Claim], within: float) -> Sequence[Granted | Busy | Exception]:
        """Call `Backend.attempt` with ``join=True`` for all these claims. Return one result for each, in the same
        order.

        An exception of one claim is returned and not raised. An exception of the whole call is raised, and counts for
        each claim.
        """


@runtime_checkable
class AnswersAtOnce(Protocol):
    """Declared by a `Backend` whose calls never wait, except for a mutex that is held for microseconds.

    asyncio calls such a backend on the event loop.
    """

    answers_at_once: Literal[True]


@runtime_checkable
class Rests(Protocol):
    """Optional method of a `Backend`, required with the capability ``hold_at_least``."""

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        """Release, but keep the name taken for ``seconds`` from now. Called instead of `Backend.release`.

        The server's own clock counts the seconds, whatever happens to this process. When they are over, the name is
        free, as after a release. Meanwhile no claim can take or renew the name, and only `Backend.force_release` frees
        it earlier. `Backend.inspect` reports ``resting_until``. Waiters are woken once, and their next attempt shows
        them when the name will be free.

        In all other respects this is like `release`. A repeated call does not start the time again.
        """


@runtime_checkable
class Guards(Protocol):
    """Optional methods of a `Backend` whose locks are rows of a PostgreSQL database, beside the user's own tables."""

    def sql(self) -> str:
        """Return the statements by which an owner of the database makes the tables. Does no I/O."""

    def guard(self, name: str) -> tuple[str, str]:
        """Return a statement, with ``%s`` for a key and for a token, and the key of ``name``. Does no I/O.

        In a transaction of the user's own, the statement locks the row of the lock until that transaction ends. If the
        name is not held with the token, it raises SQLSTATE ``ML001``.
        """


@runtime_checkable
class FindsTheDead(Protocol):
    """Optional method of a `Backend` that frees the names of a process as soon as that process has ended."""

    def works_in_children(self) -> None:
        """Free the names of this process from now on only when their ttl ends, not when the process ends. Called if
        other processes work under the leases of this process, because those processes may outlive this one for a
        moment."""


def one_attempt(attempting: Any, within: float) -> system.Taking:
    """Hold ``attempting``, the lock of one claim, during an attempt: ``with one_attempt(attempting, within):``.

    A caller may have given up an earlier attempt that still runs in another thread. Raises `BackendUnavailable` with
    ``unknown=True`` if that attempt does not end within ``within`` seconds.
    """
    return system.Taking(attempting, within, _under_way)


def _under_way() -> BackendUnavailable:
    return BackendUnavailable("an earlier request for this lock is still under way", unknown=True)


def other_number(claim: Claim, permits: int, scheme: str) -> BackendRejected:
    """Return the error of `Backend.attempt` for a claim that asked for a different number of permits than the name has.

    ``permits``: The number of permits that the name has.
    """
    return BackendRejected(
        f"{claim.name!r} has {permits} permits here, but {claim.permits} were requested: use the same number in every "
        "program, or wait until nobody holds one",
        name=claim.name,
        backend=scheme,
    )


class OpenBackend(Protocol):
    """The function that opens a backend, from the entry-point group ``multilock.backends`` or `register_backend`. No
    I/O.

    ``options`` has ``ttl`` (float seconds: the client's default), ``prefix``, ``identity`` and ``request_timeout``
    (float seconds or None). ``options`` also has the backend's own options, as given: text from a URL, or any object.
    ``client`` is the client object of a library such as redis-py, if the program passed one. Raises ConfigurationError
    for an option that the backend does not know.
    """

    def __call__(self, url: str, options: dict[str, Any]) -> Backend: ...
