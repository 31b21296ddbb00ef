"""What Prometheus and OpenTelemetry are told alike: the buckets, the label of a name, and what is true just now."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multilock.aio import AsyncClient
    from multilock.client import Client

__all__ = ["HELD", "SLACK", "WAITS", "Label", "NameLabel", "Reading", "labeller", "read"]

# A lock on the same host takes 50 µs; who waits for another waits for as long as that one works.
WAITS = (
    0.0001,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
HELD = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
# Of the ttl, since ttls differ: a healthy client renews with about two thirds of it left.
SLACK = (0.0, 0.05, 0.1, 0.2, 0.3, 0.333, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

NameLabel = bool | Callable[[str], str]
Label = Callable[[str], str]


def labeller(name_label: NameLabel) -> Label:
    """What stands for a lock's name; ``""`` for none."""
    if not callable(name_label):
        return str if name_label else lambda name: ""

    def label(name: str) -> str:
        try:
            return str(name_label(name))
        except Exception:  # the user's function: a metric that is missing would be worse than one with this label
            return "error"

    return label


@dataclass
class Reading:
    """Of several clients at one moment, by the clock and not from a flag."""

    held: Tally[tuple[str, str]] = field(default_factory=Tally)  #: leases, by backend and label
    waiting: Tally[tuple[str, str]] = field(default_factory=Tally)  #: calls of acquire(), likewise
    late: dict[str, float] = field(default_factory=dict)  #: seconds by which who renews is behind, by backend
    leads: dict[str, bool] = field(default_factory=dict)  #: by the name of an election that is stood for


def read(clients: Iterable[tuple[Client | AsyncClient, Label]]) -> Reading:
    """Of these clients, each with what its names are called."""
    reading = Reading()
    for client, label in clients:
        kernel = client._kernel
        for values, names in ((reading.held, kernel.held_names()), (reading.waiting, kernel.waiting_names())):
            values.update((kernel.scheme, label(name)) for name in names)
            values[kernel.scheme, ""] += 0  # so that a graph shows a zero, and no gap
        reading.late[kernel.scheme] = max(reading.late.get(kernel.scheme, 0.0), kernel.watchdog_late())
        for name, leading in kernel.candidacies():
            reading.leads[name] = reading.leads.get(name, False) or leading
    return reading
