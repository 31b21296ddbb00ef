"""Metrics of locks and elections for Prometheus: ``pip install 'multilock[prometheus]'``.

`Client.events` feeds the counters and histograms, on its callback thread (asyncio: in the loop). Gauges are read from
the clients when Prometheus scrapes: like ``is_held()``, they come from the clock and not from a flag. A figure of a
lock has an exemplar, the trace of the acquire(), if OpenTelemetry samples that trace. Prometheus shows exemplars if it
scrapes in the OpenMetrics format. ``leader_election_master_status`` has the name and the meaning of the metric of
Kubernetes' client-go, so that dashboards and alerts made for client-go fit.
"""

from __future__ import annotations

import sys
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
    """Count and measure what ``client`` does, until the returned function is called.

    ``name_label`` decides the label ``name`` of all metrics except ``leader_election_master_status``, where the
    label is always the name of the election. With False the label is empty, and there is one series for each metric and
    backend. With True the label is the name of the lock, so there are as many series as names, and the server keeps all
    of them in memory. With a function the label is the function's result for the name (``invoices/42`` → ``invoices``).
    The function must be quick. If the function raises, the label is ``error``.

    Several clients may share a registry: their figures are added. If a client is instrumented again in the same
    registry, the new call replaces the earlier one. Counting the events of one acquire and release costs the callback
    thread about as much CPU as that acquire and release cost on ``memory://``.
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
        self.renew_failures = counter("multilock_renew_failures", "Renewals that had no reply, or were refused.")
        self.wait = histogram("multilock_acquire_wait_seconds", "From the call of acquire() to the grant.", WAITS)
        self.held = histogram("multilock_held_seconds", "From the grant to the release, or to the loss.", HELD)
        self.renew = histogram("multilock_renew_seconds", "From the request of a renewal to its reply.", WAITS)
        self.slack = histogram(
            "multilock_renew_slack_ratio",
            "Share of the ttl that was left when a renewal was acknowledged. 0 means that the lease was nearly lost.",
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
                self.wait.labels(*labels).observe(event.waited, _exemplar(event))
            case events.NotAcquired():
                self.acquires.labels(*labels, event.result).inc()
            case events.Renewed():
                self.renew.labels(*labels).observe(event.took)
                self.slack.labels(*labels).observe(event.slack / event.ttl)
            case events.RenewFailed():
                self.renew_failures.labels(*labels).inc()
            case events.Released():
                self.held.labels(*labels).observe(event.held_for, _exemplar(event))
            case events.Lost():
                self.losses.labels(*labels, event.loss.reason.value).inc(1, _exemplar(event))
                self.held.labels(*labels).observe(event.held_for, _exemplar(event))


def _exemplar(event: events.Event) -> dict[str, str] | None:
    """Return the trace in which acquire() was called, or None if the program does not trace or sample it."""
    opentelemetry, context = sys.modules.get("opentelemetry.trace"), event.context
    if opentelemetry is None or context is None:
        return None
    its = context.run(opentelemetry.get_current_span).get_span_context()
    if not (its.is_valid and its.trace_flags.sampled):
        return None
    return {"trace_id": f"{its.trace_id:032x}", "span_id": f"{its.span_id:016x}"}


class _Gauges:
    """The gauges, computed at the moment of a scrape."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def describe(self) -> list[Metric]:
        """Return what `collect` returns, but without values. A registry calls this method when the collector is
        registered."""
        return [family() for family in (_held, _waiting, _late, _status)]

    def collect(self) -> list[Metric]:
        return [
            _filled(_held(), self._clients.held().items()),
            _filled(_waiting(), self._clients.waiting().items()),
            _filled(_late(), (((scheme,), seconds) for scheme, seconds in self._clients.late().items())),
            _filled(_status(), self._clients.leads().items()),
        ]


_held = partial(
    GaugeMetricFamily, "multilock_held", "Leases that this process holds, as proven by the clock.", labels=LABELS
)
_waiting = partial(GaugeMetricFamily, "multilock_waiting", "Calls of acquire() that wait.", labels=LABELS)
_late = partial(
    GaugeMetricFamily,
    "multilock_watchdog_late_seconds",
    "How late the thread that renews is. +Inf means that it died, and every lease with it.",
    labels=("backend",),
)
_status = partial(
    GaugeMetricFamily,
    "leader_election_master_status",
    "1 if this process leads the election, 0 if it is only a candidate.",
    labels=("prefix", "name"),
)


def _filled(family: GaugeMetricFamily, values: Iterable[tuple[Sequence[str], float]]) -> GaugeMetricFamily:
    for labels, value in values:
        family.add_metric(labels, value)
    return family
