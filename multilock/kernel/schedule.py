"""The notes of the watchdog about one lease."""

from __future__ import annotations

__all__ = ["Schedule"]


class Schedule:
    """The watchdog's notes about one lease. Times are seconds on the client's clock."""

    __slots__ = ("armed", "at", "due", "failures", "renewing")

    def __init__(self, armed: bool) -> None:
        self.armed = armed  # a watch on the key was asked for, or the backend has none
        self.at: float | None = None  # when to renew; chosen once for each proof, at the first look at the lease
        self.due: float | None = None  # when the watchdog looks at the lease next
        self.failures = 0  # renewals since the last proof that failed or were late
        self.renewing = False  # a renewal is on its way
