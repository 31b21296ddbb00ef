"""Metrics of locks and elections for Prometheus: ``pip install 'multilock[prometheus]'``.

Counters and histograms are fed by `Client.events`, on its callback thread (asyncio: on the loop). Gauges are read from
the clients when Prometheus scrapes, so that, as ``is_held()``, they come from the clock and not from a flag.
``leader_election_master_status`` has the name and the meaning that Kubernetes' client-go gives it, so that its
dashboards and alerts fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily, Metric
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "prometheus_client":
        raise
    text = "multilock.contrib.prometheus needs a library: pip install 'multilock[prometheus]'"
    raise ModuleNotFoundError(text, name=error.name) from error

from multilock import events, system
from multilock.contrib.figures import HELD, REASONS, SLACK, WAITS, Clients, NameLabel

if TYPE_CHECKING:
    from multilock.aio import AsyncClient
    from multilock.client import Client

__all__ = ["instrument"]

LABELS = ("backend", "name")


def instrument(
    client: Client | AsyncClient, *, registry: CollectorRegistry = REGISTRY, name_label: NameLabel = False
) -> Callable[[], None]:
    """Count and measure what ``client`` does, until the function returned is called.

    ``name_label``: what the label ``name`` holds, except that of ``leader_election_master_status``, which is always the
    election's name. False: nothing, one series per metric and backend. True: the lock's name, so as many series as you
    have names, which a server pays for in memory. A function: what it makes of the name (``invoices/42`` →
    ``invoices``); it must be quick, and where it raises, the label says ``error``.

    Several clients may share a registry: their figures are added. Instrumenting a client a second time in one registry
    replaces what was asked first. It costs, on the callback thread, about as much CPU as an acquire and a
    release of ``memory://`` do; in ``acquire()`` itself only the making of an event.
    """
    return _metrics_of(registry).clients.add(client, name_label)


_all: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()
_lock = system.Lock()


def _metrics_of(registry: CollectorRegistry) -> _Metrics:
    with _lock:
        metrics = _all.get(registry)
        if metrics is None:
            metrics = _all[registry] = _Metrics(registry)
        return metrics


class _Metrics:
    """All metrics of one registry, of all clients that are instrumented there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.clients = Clients(self._hear, self._begin)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*LABELS, *more), registry=registry)

        self.acquires = counter(
            "multilock_acquires", "Calls of acquire() and try_acquire() that ended, by their result.", "result"
        )
        self.losses = counter("multilock_losses", "Leases that ended without being released, by reason.", "reason")
        self.renew_failures = counter("multilock_renew_failures", "Renewals that were not answered, or refused.")
        self.wait = histogram("multilock_acquire_wait_seconds", "From the call of acquire() to the grant.", WAITS)
        self.held = histogram("multilock_held_seconds", "From the grant to the release, or to the loss.", HELD)
        self.renew = histogram("multilock_renew_seconds", "From the send of a renewal to its answer.", WAITS)
        self.slack = histogram(
            "multilock_renew_slack_ratio",
            "What was left of a lease when its renewal was acknowledged, as a share of its ttl. 0: it was nearly lost.",
            SLACK,
        )
        registry.register(_Gauges(self.clients))

    def _begin(self, backend: str, name: str) -> None:
        for reason in REASONS:
            self.losses.labels(backend, name, reason)

    def _hear(self, backend: str, name: str, event: events.Event) -> None:
        labels = (backend, name)
        match event:
            case events.Acquired():
                self.acquires.labels(*labels, "acquired").inc()
                self.wait.labels(*labels).observe(event.waited)
            case events.NotAcquired():
                self.acquires.labels(*labels, event.result).inc()
            case events.Renewed():
                self.renew.labels(*labels).observe(event.took)
                self.slack.labels(*labels).observe(event.slack / event.ttl)
            case events.RenewFailed():
                self.renew_failures.labels(*labels).inc()
            case events.Released():
                self.held.labels(*labels).observe(event.held_for)
            case events.Lost():
                self.losses.labels(*labels, event.loss.reason.value).inc()
                self.held.labels(*labels).observe(event.held_for)


class _Gauges:
    """What is true at the moment of a scrape."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def describe(self) -> list[Metric]:
        """What `collect` gives, without values: a registry asks when this is registered."""
        return [family() for family in (_held, _waiting, _late, _status)]

    def collect(self) -> list[Metric]:
        return [
            _filled(_held(), self._clients.held().items()),
            _filled(_waiting(), self._clients.waiting().items()),
            _filled(_late(), (((scheme,), seconds) for scheme, seconds in self._clients.late().items())),
            _filled(_status(), self._clients.leads().items()),
        ]


_held = partial(GaugeMetricFamily, "multilock_held", "Leases held, and proven to be, by this process.", labels=LABELS)
_waiting = partial(GaugeMetricFamily, "multilock_waiting", "Calls of acquire() that wait.", labels=LABELS)
_late = partial(
    GaugeMetricFamily,
    "multilock_watchdog_late_seconds",
    "By how much the thread that renews is behind its time. +Inf: it died, and every lease with it.",
    labels=("backend",),
)
_status = partial(
    GaugeMetricFamily,
    "leader_election_master_status",
    "Whether this process leads the election (1) or stands for it (0).",
    labels=("prefix", "name"),
)


def _filled(family: GaugeMetricFamily, values: Iterable[tuple[Sequence[str], float]]) -> GaugeMetricFamily:
    for labels, value in values:
        family.add_metric(labels, value)
    return family
