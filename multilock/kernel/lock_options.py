"""`Want`: the checked options of a lock object. A wrong option raises an error here, before any request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multilock.errors import CapabilityMissing
from multilock.identity import check_identity
from multilock.model import Claim, Granted, Loss, at_most
from multilock.names import check_name, check_seconds, check_timeout

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.kernel.client import Kernel
    from multilock.kernel.holding import Holding
    from multilock.model import Capabilities

__all__ = ["SHARED", "Make", "Want", "check_hold_at_least", "want"]

# The kinds of which several holders can share a name. Waiters of these kinds do not use the local gate
# (`multilock.kernel.local_queue`). Behind the gate they would join the server's queue one by one, and a writer of
# another process could get between two of them each time.
SHARED = frozenset({"read", "permit"})
NEEDS = {
    "read": ("read_write", "readers and writers"),
    "write": ("read_write", "readers and writers"),
    "permit": ("semaphore", "semaphores"),
}
PERMITS_MAX = 1_000_000

Make = Callable[["Kernel", "Want", Claim, Granted, bool], "Holding"]
"""The function by which a face makes a lease from a grant. The last argument is `Holding.unsure`."""


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """The options of one lock object. Two wants are equal only if they are the same object."""

    name: str
    kind: str
    ttl: float  #: seconds, as the user gave it
    grant: float  #: the ttl, rounded up to a ttl that the backend grants
    renew: bool
    reentrant: bool
    fair: bool  #: whether the claims ask the backend for the order of arrival
    queues: bool  #: whether each waiter joins the backend's own queue, so that none uses the local gate
    hold_at_least: float  #: seconds from the grant; a name released earlier stays taken until then
    max_hold: float  #: seconds from the grant after which the lease is lost, or inf
    on_lost: Callable[[Loss[Any]], object] | None
    hard_fence: bool  #: whether the operating system kills the process when the validity of a lease passes
    identity: str | None
    outage_timeout: float
    request_timeout: float
    make: Make
    permits: int  #: for the kind "permit": how many may hold the name together
    parts: tuple[Want, ...] = ()  #: for the kind "set": one want for each name, in the order of acquiring

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts of a lock of several names, otherwise the lock's own name."""
        return tuple(part.name for part in self.parts) or (self.name,)


def want(
    kernel: Kernel,
    name: str,
    make: Make,
    *,
    kind: str = "lock",
    permits: int = 0,
    ttl: float | None = None,
    renew: bool = True,
    reentrant: bool = False,
    fair: bool | None = False,
    hold_at_least: float = 0.0,
    max_hold: float | None = None,
    on_lost: Callable[[Loss[Any]], object] | None = None,
    hard_fence: bool = False,
    identity: str | None = None,
    patient: bool = False,
) -> Want:
    """Check the options of a lock, and return its `Want`. If ``patient`` is True, no outage ends a wait, however long
    the outage lasts.

    Readers, writers and permits accept ``fair=None``, because they are served in order of arrival whenever the backend
    can do that. Raises ValueError, TypeError, CapabilityMissing, ClientClosed.
    """
    kernel.check_open()
    backend, settings = kernel.backend, kernel.settings
    check_name(name)
    if needs := NEEDS.get(kind):
        if kind == "permit":
            _check_permits(permits)
        _check_kind(backend, name, *needs)
        fair = backend.capabilities.fair if fair is None else fair
    seconds = settings.ttl if ttl is None else check_seconds(ttl, "ttl")
    booleans = {"renew": renew, "reentrant": reentrant, "fair": fair, "hard_fence": hard_fence}
    for option, value in booleans.items():
        if not isinstance(value, bool):
            raise TypeError(f"{option} must be True or False, not {value!r:.60}")
    kernel.check_callback("on_lost", on_lost)
    assert fair is not None
    if fair and not backend.capabilities.fair:
        raise CapabilityMissing(
            f"{backend.scheme} keeps no order of arrival: use fair=False or another backend",
            name=name,
            backend=backend.scheme,
        )
    rest = check_hold_at_least(backend, hold_at_least, name)
    longest = _check_max_hold(max_hold, seconds)
    if identity is not None:
        check_identity(identity)
    if hard_fence:
        kernel.hard_fence()
    patience = check_timeout(settings.outage_timeout)
    grant = _grantable(seconds, backend.capabilities, backend.scheme)
    return Want(
        name,
        kind,
        seconds,
        grant,
        renew,
        reentrant,
        fair or (needs is not None and backend.capabilities.fair),
        fair or kind in SHARED,
        rest,
        longest,
        on_lost,
        hard_fence,
        identity,
        math.inf if patient or patience is None else patience,
        kernel.request_timeout(grant),
        make,
        permits,
    )


def _check_permits(permits: int) -> None:
    if not isinstance(permits, int) or isinstance(permits, bool):
        raise TypeError(f"permits must be a whole number, not {permits!r:.60}")
    if not 1 <= permits <= PERMITS_MAX:
        raise ValueError(f"permits is {permits}: it must be 1 to {PERMITS_MAX:,}")


def _check_kind(backend: Backend, name: str, capability: str, what: str) -> None:
    can = backend.capabilities
    if not getattr(can, capability):
        why = f", since {can.why_one}" if can.why_one else " with these options"
        raise CapabilityMissing(
            f"{backend.scheme} has no {what}{why}: use another backend, or a lock",
            name=name,
            backend=backend.scheme,
        )


def check_hold_at_least(backend: Backend, seconds: float, name: str) -> float:
    """Return ``hold_at_least`` in seconds, 0.0 if it is not used.

    Raises CapabilityMissing if the backend could do that only while the client lives. Raises ValueError, TypeError.
    """
    if seconds == 0 and not isinstance(seconds, bool):
        return 0.0
    checked = check_seconds(seconds, "hold_at_least")
    can = backend.capabilities
    if not can.hold_at_least:
        raise CapabilityMissing(
            f"{backend.scheme} cannot keep a released name taken by its own clock: use another backend, or let the "
            "holder wait before it releases",
            name=name,
            backend=backend.scheme,
        )
    if checked > can.ttl_max:
        raise ValueError(f"hold_at_least is {checked:g} s: {backend.scheme} keeps a name for {at_most(can)}")
    return checked


def _check_max_hold(max_hold: float | None, ttl: float) -> float:
    """Return ``max_hold`` in seconds, inf for None. Raises ValueError, TypeError."""
    if max_hold is None:
        return math.inf
    checked = check_seconds(max_hold, "max_hold")
    if checked < ttl / 10:  # not `0.1 * ttl`: for a ttl of 6 that is more than 0.6, because of rounding
        raise ValueError(
            f"max_hold is {checked:g} s, less than a tenth of the ttl ({ttl:g} s): use a longer one, or a shorter ttl"
        )
    return checked


def _grantable(ttl: float, can: Capabilities, scheme: str) -> float:
    """Return the ttl rounded up to what the backend grants. Raises ValueError if it is too long."""
    granted = max(ttl, can.ttl_min if can.ttl_floor is None else can.ttl_floor)
    steps = granted / can.ttl_step
    if abs(steps - round(steps)) > 1e-6:  # 0.3 is 300 steps of 0.001 in spite of rounding errors
        granted = math.ceil(steps) * can.ttl_step
    if granted > can.ttl_max:
        raise ValueError(f"ttl is {ttl:g} s: {scheme} grants {at_most(can)}")
    return granted
