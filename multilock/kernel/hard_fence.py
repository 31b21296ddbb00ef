"""``hard_fence``: the operating system kills this process when the validity of a lease passes.

A POSIX timer of the process sends SIGKILL (timer_create(2)). Each reply of the backend that extends the lease sets the
timer again. The timer needs neither the interpreter nor a thread, so it also kills a process that is stopped, swapped
out, or stuck in an extension. The timer uses the clock of all deadlines, which continues while the machine sleeps.
"""

from __future__ import annotations

import heapq
import math
import os
import struct
import sys
from typing import TYPE_CHECKING, Protocol

from multilock.errors import CapabilityMissing

if TYPE_CHECKING:
    from ctypes import PyDLL

__all__ = ["Fence", "Killer", "KillingTimer"]

SIGKILL = 9
SIGEV_SIGNAL, TIMER_ABSTIME = 0, 1  # <signal.h>, <time.h>
SIGEVENT = struct.Struct("Pii48x")  # sigev_value, sigev_signo, sigev_notify
ITIMERSPEC = struct.Struct("llll")  # the period and the time, each in seconds and nanoseconds
NEVER = ITIMERSPEC.pack(0, 0, 0, 0)
STALE_AT_LEAST = 64  # the heap is rebuilt only if it has at least this many outdated entries


class Killer(Protocol):
    """A timer that kills this process at a given time, on the runtime's clock."""

    def at(self, when: float) -> None:
        """Set the time of the kill, which replaces an earlier time. ``math.inf`` means never."""

    def close(self) -> None:
        """Delete the timer."""


class KillingTimer:
    """A `Killer` with a POSIX timer. A forked child does not inherit its parent's timers."""

    def __init__(self, clock: int) -> None:
        """Make the timer. Raises CapabilityMissing if this system has no such timer, or if the timer would not kill
        this process."""
        if not sys.platform.startswith("linux"):
            raise CapabilityMissing("hard_fence=True needs Linux: leave it out, and check lease.is_held() instead")
        if os.getpid() == 1:
            raise CapabilityMissing(
                "hard_fence=True has no effect in process 1 of a container, which its own timer cannot kill: start the "
                "container with an init (docker run --init), or leave it out"
            )
        try:
            import ctypes  # imported late, because few programs need ctypes

            self._libc = _with_timers()
        except (ImportError, OSError) as error:
            raise CapabilityMissing(
                f"hard_fence=True needs a POSIX timer, which this Python cannot use ({error}): leave it out"
            ) from error
        self._timer = ctypes.c_void_p()
        event = SIGEVENT.pack(0, SIGKILL, SIGEV_SIGNAL)
        if self._libc.timer_create(clock, event, ctypes.byref(self._timer)):
            why = os.strerror(ctypes.get_errno())
            raise CapabilityMissing(
                f"hard_fence=True cannot work, because the operating system gives this process no timer ({why}): leave "
                "it out, or raise the limit"
            )

    def at(self, when: float) -> None:
        times = NEVER
        if when < math.inf:
            part, seconds = math.modf(when)
            times = ITIMERSPEC.pack(0, 0, int(seconds), int(part * 1e9))
        self._libc.timer_settime(self._timer, TIMER_ABSTIME, times, None)

    def close(self) -> None:
        self._libc.timer_delete(self._timer)


def _with_timers() -> PyDLL:
    """Return the C library, loaded so that its calls do not release the interpreter's lock.

    The calls take a microsecond. Releasing the interpreter's lock and getting it back could take five milliseconds.
    """
    import ctypes

    library = ctypes.PyDLL(None, use_errno=True)
    if not hasattr(library, "timer_create"):  # glibc before 2.34
        library = ctypes.PyDLL("librt.so.1", use_errno=True)
    return library


class Fence:
    """The hard fence of one client: it kills the process as soon as the validity of one of its leases ends.

    The caller holds the kernel's lock. A signal handler or a finalizer may run between any two lines, and call `lift`.
    An interrupt may end `keep` or `lift` halfway. The interrupted caller then calls `lift` for the same lease.
    """

    def __init__(self, killer: Killer) -> None:
        self._killer = killer
        self._until: dict[str, float] = {}  # end of the validity, by claim id
        # Times and claim ids, the earliest time first. An entry counts only if `_until` has the same time for its
        # claim. The fence of any other entry was extended or lifted.
        self._heap: list[tuple[float, str]] = []
        self._set_to = math.inf

    def keep(self, claim_id: str, until: float) -> None:
        """Record that the lease of the claim ``claim_id`` is now valid until the time ``until``."""
        self._until[claim_id] = until
        heapq.heappush(self._heap, (until, claim_id))
        if len(self._heap) > STALE_AT_LEAST + 2 * len(self._until):
            self._drop_stale()
        self._set()

    def lift(self, claim_id: str) -> None:
        """Remove the lease of the claim ``claim_id``, because its holder has ended its work.

        If a call is interrupted, the caller repeats it, because the interrupt may have come before the timer was set.
        """
        self._until.pop(claim_id, None)
        self._set()

    def close(self) -> None:
        """Remove all leases, and delete the timer."""
        self._until.clear()
        self._heap.clear()
        self._killer.close()

    def _set(self) -> None:
        while (at := self._first()) != self._set_to:
            # NaN equals nothing. So if an interrupt comes before the last line, the next call sets the timer again.
            self._set_to = math.nan
            self._killer.at(at)
            self._set_to = at

    def _first(self) -> float:
        """Return when the validity of the first lease ends, or inf."""
        heap = self._heap
        while heap:
            entry = until, claim_id = heap[0]
            if self._until.get(claim_id) == until:
                return until
            dropped = heapq.heappop(heap)
            if dropped is not entry:  # a signal handler ran just before, and dropped ``entry`` itself
                heapq.heappush(heap, dropped)
        return math.inf

    def _drop_stale(self) -> None:
        """Rebuild the heap without outdated entries, and once more if a signal handler changed something meanwhile."""
        seen: dict[str, float] | None = None
        while seen != self._until:
            seen = self._until.copy()
            heap = [(until, claim_id) for claim_id, until in seen.items()]
            heapq.heapify(heap)
            self._heap[:] = heap
