"""Metrics of locks and elections for OpenTelemetry: ``pip install 'multilock[opentelemetry]'``.

The same figures as `multilock.contrib.prometheus` has, with the names that an exporter to Prometheus turns into those
(``multilock.acquire.wait`` in seconds → ``multilock_acquire_wait_seconds``), so that its alerts and dashboard fit.
Counters and histograms are fed by `Client.events`, on its callback thread (asyncio: on the loop). Gauges are read from
the clients when the SDK collects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

try:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation, get_meter
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "opentelemetry":
        raise
    text = "multilock.contrib.opentelemetry needs a library: pip install 'multilock[opentelemetry]'"
    raise ModuleNotFoundError(text, name=error.name) from error

from multilock import __version__, events, system
from multilock.contrib.figures import HELD, REASONS, SLACK, WAITS, Clients, NameLabel

if TYPE_CHECKING:
    from multilock.aio import AsyncClient
    from multilock.client import Client

__all__ = ["instrument"]


def instrument(
    client: Client | AsyncClient, *, meter_provider: MeterProvider | None = None, name_label: NameLabel = False
) -> Callable[[], None]:
    """Count and measure what ``client`` does, until the function returned is called.

    ``meter_provider``: default is the global one, which may be set before or after.

    ``name_label``: what the attribute ``name`` holds, except that of ``leader_election_master_status``, which is always
    the election's name. False: there is none, one series per metric and backend. True: the lock's name, so as many
    series as you have names. A function: what it makes of the name (``invoices/42`` → ``invoices``); it must be quick,
    and where it raises, the attribute says ``error``.

    Several clients may share a provider: their figures are added. Instrumenting a client a second time for one provider
    replaces what was asked first. The buckets of the histograms are an advice, which a view of yours may overrule.
    """
    return _metrics_of(meter_provider).clients.add(client, name_label)


_all: weakref.WeakKeyDictionary[MeterProvider, _Metrics] = weakref.WeakKeyDictionary()
_lock = system.Lock()


def _metrics_of(provider: MeterProvider | None) -> _Metrics:
    with _lock:
        if provider is None:
            return _of_the_global_provider()
        metrics = _all.get(provider)
        if metrics is None:
            metrics = _all[provider] = _Metrics(provider.get_meter("multilock", __version__))
        return metrics


@cache
def _of_the_global_provider() -> _Metrics:
    return _Metrics(get_meter("multilock", __version__))


class _Metrics:
    """All instruments of one provider, for all clients that are instrumented there."""

    def __init__(self, meter: Meter) -> None:
        self.clients = Clients(self._hear, self._begin)

        def histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=buckets)

        self.acquires = meter.create_counter(
            "multilock.acquires", "{call}", "Calls of acquire() and try_acquire() that ended, by their result."
        )
        self.losses = meter.create_counter(
            "multilock.losses", "{lease}", "Leases that ended without being released, by reason."
        )
        self.renew_failures = meter.create_counter(
            "multilock.renew.failures", "{renewal}", "Renewals that were not answered, or refused."
        )
        self.wait = histogram("multilock.acquire.wait", "s", "From the call of acquire() to the grant.", WAITS)
        # Not multilock.held in seconds: that is the name of a gauge.
        self.held = histogram("multilock.held.seconds", "s", "From the grant to the release, or to the loss.", HELD)
        self.renew = histogram("multilock.renew", "s", "From the send of a renewal to its answer.", WAITS)
        self.slack = histogram(
            "multilock.renew.slack.ratio",
            "1",
            "What was left of a lease when its renewal was acknowledged, as a share of its ttl. 0: it was nearly lost.",
            SLACK,
        )
        meter.create_observable_up_down_counter(
            "multilock.held", [self._held], "{lease}", "Leases held, and proven to be, by this process."
        )
        meter.create_observable_up_down_counter(
            "multilock.waiting", [self._waiting], "{call}", "Calls of acquire() that wait."
        )
        meter.create_observable_gauge(
            "multilock.watchdog.late",
            [self._late],
            "s",
            "By how much the thread that renews is behind its time. Infinite: it died, and every lease with it.",
        )
        meter.create_observable_gauge(
            "leader_election_master_status",
            [self._status],
            "{election}",
            "Whether this process leads the election (1) or stands for it (0).",
        )

    def _held(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(number, _attributes(*key)) for key, number in self.clients.held().items()]

    def _waiting(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(number, _attributes(*key)) for key, number in self.clients.waiting().items()]

    def _late(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(seconds, _attributes(scheme)) for scheme, seconds in self.clients.late().items()]

    def _status(self, options: CallbackOptions) -> Iterable[Observation]:
        leads = self.clients.leads().items()
        return [Observation(int(leading), {"prefix": prefix, "name": name}) for (prefix, name), leading in leads]

    def _begin(self, backend: str, name: str) -> None:
        for reason in REASONS:
            self.losses.add(0, {**_attributes(backend, name), "reason": reason})

    def _hear(self, backend: str, name: str, event: events.Event) -> None:
        attributes = _attributes(backend, name)
        match event:
            case events.Acquired():
                self.acquires.add(1, {**attributes, "result": "acquired"})
                self.wait.record(event.waited, attributes)
            case events.NotAcquired():
                self.acquires.add(1, {**attributes, "result": event.result})
            case events.Renewed():
                self.renew.record(event.took, attributes)
                self.slack.record(event.slack / event.ttl, attributes)
            case events.RenewFailed():
                self.renew_failures.add(1, attributes)
            case events.Released():
                self.held.record(event.held_for, attributes)
            case events.Lost():
                self.losses.add(1, {**attributes, "reason": event.loss.reason.value})
                self.held.record(event.held_for, attributes)


def _attributes(backend: str, name: str = "") -> Mapping[str, str]:
    return {"backend": backend, "name": name} if name else {"backend": backend}
