"""The common part of the metrics for Prometheus and OpenTelemetry: buckets, the label of a name, current values."""

from __future__ import annotations

import weakref
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from multilock import events
from multilock.kernel.client import Kernel
from multilock.model import LossReason

if TYPE_CHECKING:
    from multilock.aio import AsyncClient
    from multilock.client import Client

__all__ = ["HELD", "REASONS", "SLACK", "WAITS", "Clients", "NameLabel"]

REASONS = tuple(reason.value for reason in LossReason)

# Bounds in seconds. Acquiring a free lock of a server on the same host takes 50 µs. A waiter waits for as long as the
# holder works.
# fmt: off
WAITS = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0
)
# fmt: on
HELD = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
# Shares of the ttl, since ttls differ: a healthy client renews when about two thirds of it are left.
SLACK = (0.0, 0.05, 0.1, 0.2, 0.3, 0.333, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

NameLabel = bool | Callable[[str], str]
Label = Callable[[str], str]


def _labeller(name_label: NameLabel) -> Label:
    """Return the function that turns a lock's name into its label. ``""`` means no label."""
    if not callable(name_label):
        return str if name_label else lambda name: ""

    def label(name: str) -> str:
        try:
            return str(name_label(name))
        except Exception:  # the user's function failed: a missing metric would be worse than one with this label
            return "error"

    return label


class Clients:
    """The instrumented clients.

    Each event of these clients is passed to ``hear``, with the backend and the label of the name. The numbers of
    holders and waiters are computed from the clock when they are read. ``begin`` is called once for each backend and
    label, before their first event: Prometheus sees no increase in a series that starts at 1.

    This class uses no mutex: at a fork during a scrape, a thread could hold the mutex, which would then stay taken
    forever in the child.
    """

    def __init__(self, hear: Callable[[str, str, events.Event], None], begin: Callable[[str, str], None]) -> None:
        self._hear = hear
        self._begin = begin
        self._begun: set[tuple[str, str]] = set()
        self._all: dict[weakref.ref[Client | AsyncClient], _Instrumented] = {}

    def add(
        self, client: Client | AsyncClient, name_label: NameLabel, also: Callable[[events.Event], None] | None = None
    ) -> Callable[[], None]:
        """Instrument a client until the returned function is called. A second call for a client replaces the first.

        ``also`` gets each event of this client after ``hear`` did.
        """
        key: weakref.ref[Client | AsyncClient] = weakref.ref(client, lambda gone: self._all.pop(gone, None))
        if before := self._all.get(key):
            before.unsubscribe()
        instrumented = self._all[key] = _Instrumented(self.tell, client, name_label, also)
        self.begin(client._kernel.scheme, "")

        def remove() -> None:
            instrumented.unsubscribe()
            if self._all.get(key) is instrumented:
                self._all.pop(key, None)

        return remove

    def begin(self, backend: str, label: str) -> None:
        """Announce a backend and label, unless that was done before."""
        if (backend, label) not in self._begun:
            self._begin(backend, label)
            self._begun.add((backend, label))

    def tell(self, backend: str, label: str, event: events.Event) -> None:
        """Pass an event on."""
        self.begin(backend, label)
        self._hear(backend, label, event)

    def held(self) -> Tally[tuple[str, str]]:
        """Return the number of leases, by backend and label."""
        return self._tally(Kernel.held_names)

    def waiting(self) -> Tally[tuple[str, str]]:
        """Return the number of acquire() calls that wait, by backend and label."""
        return self._tally(Kernel.waiting_names)

    def late(self) -> dict[str, float]:
        """Return by how many seconds the thread that renews is late, by backend."""
        late: dict[str, float] = {}
        for kernel, _ in self._kernels():
            late[kernel.scheme] = max(late.get(kernel.scheme, 0.0), kernel.watchdog_late())
        return late

    def leads(self) -> dict[tuple[str, str], bool]:
        """Return whether this process leads, for each election in which it is a candidate. The keys are the prefix and
        the name of the election."""
        leads: dict[tuple[str, str], bool] = {}
        for kernel, _ in self._kernels():
            for name, leading in kernel.candidacies():
                key = kernel.settings.prefix, name
                leads[key] = leads.get(key, False) or leading
        return leads

    def _tally(self, names: Callable[[Kernel], Iterable[str]]) -> Tally[tuple[str, str]]:
        tally: Tally[tuple[str, str]] = Tally()
        for kernel, label in self._kernels():
            tally.update((kernel.scheme, label(name)) for name in names(kernel))
            tally[kernel.scheme, ""] += 0  # so that a graph shows a zero instead of a gap
        return tally

    def _kernels(self) -> list[tuple[Kernel, Label]]:
        clients = [(reference(), instrumented) for reference, instrumented in list(self._all.items())]
        return [(client._kernel, instrumented.label) for client, instrumented in clients if client is not None]


class _Instrumented:
    """One instrumented client."""

    def __init__(
        self,
        hear: Callable[[str, str, events.Event], None],
        client: Client | AsyncClient,
        name_label: NameLabel,
        also: Callable[[events.Event], None] | None,
    ) -> None:
        self._hear = hear
        self._also = also
        self._backend = client._kernel.scheme
        self.label = _labeller(name_label)
        self.unsubscribe = client.events.subscribe(self._tell)

    def _tell(self, event: events.Event) -> None:
        self._hear(self._backend, self.label(event.name), event)
        if self._also:
            self._also(event)
