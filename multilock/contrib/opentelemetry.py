"""Metrics and spans of locks and elections for OpenTelemetry: ``pip install 'multilock[opentelemetry]'``.

The metrics are those of `multilock.contrib.prometheus`. An exporter to Prometheus turns each name of this module into
the name that `multilock.contrib.prometheus` uses (``multilock.acquire.wait`` in seconds →
``multilock_acquire_wait_seconds``). So the alerts and the dashboard of that module also fit here. `Client.events`
feeds the counters, histograms and spans, on its callback thread (asyncio: in the loop). Gauges are read from the
clients when the SDK collects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

try:
    from opentelemetry.context import Context, get_current
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation, get_meter
    from opentelemetry.trace import Status, StatusCode, Tracer, TracerProvider, get_tracer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "opentelemetry":
        raise
    text = "multilock.contrib.opentelemetry needs a library: pip install 'multilock[opentelemetry]'"
    raise ModuleNotFoundError(text, name=error.name) from error

from multilock import __version__, events, now, system
from multilock.contrib.figures import HELD, REASONS, SLACK, WAITS, Clients, NameLabel

if TYPE_CHECKING:
    from multilock.aio import AsyncClient
    from multilock.client import Client

__all__ = ["instrument"]


def instrument(
    client: Client | AsyncClient,
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    name_label: NameLabel = False,
) -> Callable[[], None]:
    """Count, measure and trace what ``client`` does, until the returned function is called.

    Each acquire() becomes a span ``multilock.acquire``, from the call to its end, and each lease a span
    ``multilock.hold``, from the grant to the release or the loss. Both spans are children of the span that was current
    at the call of acquire(). A span is created only at its end, so a process that is killed leaves no span of the
    leases that it held.

    ``meter_provider``, ``tracer_provider``: by default the global ones, which the program may set before or after this
    call. A provider that is not set records nothing.

    ``name_label`` decides the attribute ``name`` of all metrics except ``leader_election_master_status``, where the
    attribute is always the name of the election. With False there is no such attribute, and one series for each metric
    and backend. With True the attribute is the name of the lock, so there are as many series as names. With a function
    it is the function's result for the name (``invoices/42`` → ``invoices``). The function must be quick. If the
    function raises, the attribute is ``error``.

    Several clients may share a provider: their figures are added. If a client is instrumented again for the same
    provider, the new call replaces the earlier one. The buckets of the histograms are only advice, which your view may
    override.
    """
    tracer = get_tracer("multilock", __version__, tracer_provider)
    return _metrics_of(meter_provider).clients.add(client, name_label, partial(_trace, tracer, client._kernel.scheme))


_all: weakref.WeakKeyDictionary[MeterProvider, _Instruments] = weakref.WeakKeyDictionary()
_lock = system.Lock()


def _metrics_of(provider: MeterProvider | None) -> _Instruments:
    with _lock:
        if provider is None:
            return _of_the_global_provider()
        metrics = _all.get(provider)
        if metrics is None:
            metrics = _all[provider] = _Instruments(provider.get_meter("multilock", __version__))
        return metrics


@cache
def _of_the_global_provider() -> _Instruments:
    return _Instruments(get_meter("multilock", __version__))


class _Instruments:
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
            "multilock.renew.failures", "{renewal}", "Renewals that had no reply, or were refused."
        )
        self.wait = histogram("multilock.acquire.wait", "s", "From the call of acquire() to the grant.", WAITS)
        # The unit is part of this name, because "multilock.held" is already the number of held leases.
        self.held = histogram("multilock.held.seconds", "s", "From the grant to the release, or to the loss.", HELD)
        self.renew = histogram("multilock.renew", "s", "From the request of a renewal to its reply.", WAITS)
        self.slack = histogram(
            "multilock.renew.slack.ratio",
            "1",
            "Share of the ttl that was left when a renewal was acknowledged. 0 means that the lease was nearly lost.",
            SLACK,
        )
        meter.create_observable_up_down_counter(
            "multilock.held", [self._held], "{lease}", "Leases that this process holds, as proven by the clock."
        )
        meter.create_observable_up_down_counter(
            "multilock.waiting", [self._waiting], "{call}", "Calls of acquire() that wait."
        )
        meter.create_observable_gauge(
            "multilock.watchdog.late",
            [self._late],
            "s",
            "How late the thread that renews is. Infinite means that it died, and every lease with it.",
        )
        meter.create_observable_gauge(
            "leader_election_master_status",
            [self._status],
            "{election}",
            "1 if this process leads the election, 0 if it is only a candidate.",
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


def _trace(tracer: Tracer, backend: str, event: events.Event) -> None:
    """Make the span that ends with this event, if one does."""
    match event:
        case events.Acquired():
            what, seconds, result = "acquire", event.waited, "acquired"
        case events.NotAcquired():
            what, seconds, result = "acquire", event.waited, event.result
        case events.Released():
            what, seconds, result = "hold", event.held_for, "released"
        case events.Lost():
            what, seconds, result = "hold", event.held_for, event.loss.reason.value
        case _:
            return
    attributes: dict[str, str | int] = {
        "multilock.backend": backend,
        "multilock.name": event.name,
        "multilock.result": result,
    }
    if event.owner:
        attributes["multilock.owner"] = event.owner
    if isinstance(event, events.Acquired) and event.token is not None:
        attributes["multilock.token"] = event.token
    ended = system.wall() * 1000 - round((now() - event.at) * 1e9)
    context = event.context
    span = tracer.start_span(
        f"multilock.{what}",
        context.run(get_current) if context else Context(),  # the event's context, not that of this thread
        attributes=attributes,
        start_time=ended - round(seconds * 1e9),
    )
    if isinstance(event, events.Lost):
        span.set_status(Status(StatusCode.ERROR, event.loss.message))
    elif result in ("unavailable", "rejected"):
        span.set_status(Status(StatusCode.ERROR, result))
    span.end(ended)


def _attributes(backend: str, name: str = "") -> Mapping[str, str]:
    return {"backend": backend, "name": name} if name else {"backend": backend}
