"""Metrics as the SDK of OpenTelemetry collects them, and as its exporter passes them to Prometheus."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

import multilock
from multilock import Client, LockTimeout
from multilock.contrib import prometheus
from multilock.contrib.opentelemetry import instrument
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import eventually
from tests.unit.kit import Scripted, client_on, silence

Figure = Callable[..., Any]


@pytest.fixture
def client() -> Iterator[Client]:
    with multilock.connect("memory://metrics") as client:
        yield client


class Telemetry:
    """A provider of metrics. A test calls this object to read the present value of a metric."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def __call__(self, name: str, /, **attributes: str) -> Any:
        """Return the present value of a series, or for a histogram the number of its values. Returns None if the series
        does not exist."""
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        for metric in (metric for scope in scopes for metric in scope.metrics if metric.name == name):
            for point in metric.data.data_points:
                if attributes == {key: value for key, value in (point.attributes or {}).items() if key in attributes}:
                    return point.count if hasattr(point, "count") else point.value
        return None


@pytest.fixture
def figure() -> Iterator[Telemetry]:
    telemetry = Telemetry()
    yield telemetry
    telemetry.provider.shutdown()


def test_a_lock_appears_in_every_metric(client: Client, figure: Telemetry) -> None:
    instrument(client, meter_provider=figure.provider)
    with client.lock("n"):
        assert figure("multilock.held", backend="memory") == 1
        with pytest.raises(LockTimeout):
            client.lock("n").acquire(timeout=0)
    assert figure("multilock.held", backend="memory") == 0
    assert figure("multilock.waiting", backend="memory") == 0
    eventually(lambda: figure("multilock.held.seconds", backend="memory") == 1)
    assert figure("multilock.acquires", result="acquired", backend="memory") == 1
    assert figure("multilock.acquires", result="taken") == 1
    assert figure("multilock.acquire.wait") == 1
    eventually(lambda: figure("multilock.watchdog.late", backend="memory") == 0)  # the watchdog may just be waking up


@pytest.mark.parametrize(
    ("name_label", "label"),
    [(True, "invoices/42"), (lambda name: name.split("/")[0], "invoices"), (lambda name: 1 / 0, "error")],
)
def test_the_user_chooses_the_value_of_the_name_attribute(
    client: Client, figure: Telemetry, name_label: bool | Callable[[str], str], label: str
) -> None:
    instrument(client, meter_provider=figure.provider, name_label=name_label)
    with client.lock("invoices/42"):
        assert figure("multilock.held", name=label) == 1
        eventually(lambda: figure("multilock.acquires", name=label) == 1)


def test_renewals_silence_and_losses_are_counted(figure: Telemetry) -> None:
    runtime = HandRuntime()
    backend = Scripted(runtime)
    client = client_on(backend, runtime, ttl=30.0)
    instrument(client, meter_provider=figure.provider)
    client.lock("n").acquire()
    runtime.advance(12)
    assert figure("multilock.renew") == 1
    assert figure("multilock.renew.slack.ratio") == 1
    backend.always("renew", silence())
    runtime.advance(40)
    assert figure("multilock.renew.failures") >= 1
    assert figure("multilock.losses", reason="expired") == 1
    assert figure("multilock.losses", reason="taken") == 0
    assert figure("multilock.held.seconds") == 1
    client.close()


def test_the_leader_is_exported(client: Client, figure: Telemetry) -> None:
    instrument(client, meter_provider=figure.provider)
    with multilock.connect("memory://metrics") as other:
        leadership = other.election("e").campaign()
        with client.election("e") as election:
            assert figure("leader_election_master_status", name="e") == 0
            leadership.release()
            eventually(election.is_leader)
            assert figure("leader_election_master_status", name="e") == 1


def test_an_asyncio_client_is_measured_too(figure: Telemetry) -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://metrics") as client:
            instrument(client, meter_provider=figure.provider)
            async with client.lock("n").acquire():
                assert figure("multilock.held", backend="memory") == 1
            await asyncio.to_thread(eventually, lambda: figure("multilock.held.seconds") == 1)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_several_clients_share_a_provider_and_each_is_instrumented_once(client: Client, figure: Telemetry) -> None:
    with multilock.connect("memory://metrics") as other:
        instrument(client, meter_provider=figure.provider)
        instrument(client, meter_provider=figure.provider)
        stop = instrument(other, meter_provider=figure.provider)
        with client.lock("a"), other.lock("b"):
            assert figure("multilock.held", backend="memory") == 2
        eventually(lambda: figure("multilock.acquires", result="acquired") == 2)
        stop()
        with client.lock("a"), other.lock("b"):
            assert figure("multilock.held", backend="memory") == 1
    eventually(lambda: figure("multilock.held.seconds") == 3)
    assert figure("multilock.acquires", result="acquired") == 3


def test_metrics_do_not_keep_an_abandoned_client_alive(figure: Telemetry) -> None:
    client = multilock.connect("memory://metrics")
    instrument(client, meter_provider=figure.provider)
    client.close()
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None


class Spans:
    """The spans that an exporter has received, and a tracer for spans of the program."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("program")

    def ended(self, *names: str) -> list[ReadableSpan]:
        """Wait until multilock's spans with these names have ended, and return them."""

        def ours() -> list[ReadableSpan]:
            return [span for span in self.exporter.get_finished_spans() if span.name.startswith("multilock.")]

        eventually(lambda: [span.name.removeprefix("multilock.") for span in ours()] == [*names], within=10)
        return ours()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_wait_and_a_hold_are_spans_under_that_of_the_caller(client: Client, figure: Telemetry) -> None:
    spans = Spans()
    instrument(client, meter_provider=figure.provider, tracer_provider=spans.provider)
    with spans.tracer.start_as_current_span("request") as request:
        lease = client.lock("invoices/42").acquire()
        assert client.lock("invoices/42").try_acquire() is None
    lease.release()
    acquire, refused, hold = spans.ended("acquire", "acquire", "hold")
    for span in (acquire, refused, hold):
        assert span.parent is not None
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.attributes is not None
        assert (span.attributes["multilock.name"], span.attributes["multilock.backend"]) == ("invoices/42", "memory")
    assert acquire.attributes == {
        **(hold.attributes or {}),
        "multilock.result": "acquired",
        "multilock.token": lease.token,
    }
    assert (refused.attributes or {})["multilock.result"] == "taken"
    assert acquire.end_time is not None
    assert hold.start_time is not None
    assert abs(hold.start_time - acquire.end_time) < 5e9
    assert abs(time.time_ns() - acquire.end_time) < 60e9
    assert {span.status.status_code for span in (acquire, refused, hold)} == {StatusCode.UNSET}


def test_a_loss_and_a_silent_backend_are_spans_with_errors(figure: Telemetry) -> None:
    spans, runtime = Spans(), HandRuntime()
    backend = Scripted(runtime)
    losing = client_on(backend, runtime, ttl=30.0, outage_timeout=0.0)
    instrument(losing, meter_provider=figure.provider, tracer_provider=spans.provider)
    began = runtime.now()
    lease = losing.lock("n").acquire()
    backend.always("renew", silence())
    runtime.advance(40)
    acquire, hold = spans.ended("acquire", "hold")
    loss = lease.wait_lost(0)
    assert loss is not None
    assert (acquire.parent, hold.parent) == (None, None)
    assert seconds(hold) == pytest.approx(loss.detected_at - began, abs=0.01)
    assert hold.status.status_code is StatusCode.ERROR
    assert (hold.attributes or {})["multilock.result"] == "expired"
    losing.close()


def test_tasks_of_one_loop_have_their_own_parents(figure: Telemetry) -> None:
    spans = Spans()

    async def request(client: multilock.AsyncClient, name: str) -> None:
        with spans.tracer.start_as_current_span(name):
            async with client.lock(name).acquire():
                await asyncio.sleep(0)

    async def main() -> None:
        async with multilock.connect_async("memory://spans") as client:
            instrument(client, meter_provider=figure.provider, tracer_provider=spans.provider)
            await asyncio.gather(request(client, "a"), request(client, "b"))
            await asyncio.to_thread(eventually, lambda: len(spans.exporter.get_finished_spans()) == 6)

    asyncio.run(asyncio.wait_for(main(), 20))
    ended = spans.exporter.get_finished_spans()
    parents = {span.context.span_id: span.name for span in ended if span.context and not span.parent}
    ours = [span for span in ended if span.parent]
    assert len(ours) == 4
    assert all(
        parents[span.parent.span_id] == (span.attributes or {})["multilock.name"] for span in ours if span.parent
    )


def test_an_exemplar_of_prometheus_leads_to_the_trace(client: Client) -> None:
    spans, registry = Spans(), CollectorRegistry()
    prometheus.instrument(client, registry=registry)

    def shown() -> str:
        return str(generate_latest(registry).decode())  # type: ignore[no-untyped-call]

    with client.lock("untraced"):
        pass
    eventually(lambda: re.search(r"multilock_held_seconds_count.* 1\.0", shown()), within=10)
    assert "trace_id" not in shown()
    with spans.tracer.start_as_current_span("request") as request, client.lock("n"):
        pass
    trace = f'trace_id="{request.get_span_context().trace_id:032x}"'
    eventually(lambda: sum(trace in line for line in shown().splitlines()) == 2, within=10)


GLOBAL = """
import multilock
from multilock.contrib.opentelemetry import instrument
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

before, after, reader = multilock.connect("memory://m"), multilock.connect("memory://m"), InMemoryMetricReader()
instrument(before)
metrics.set_meter_provider(MeterProvider([reader]))
instrument(after)
with before.lock("a"), after.lock("b"):
    [scope] = reader.get_metrics_data().resource_metrics[0].scope_metrics
    [held] = [metric for metric in scope.metrics if metric.name == "multilock.held"]
    print(scope.scope.name, [point.value for point in held.data.data_points])
before.close()
after.close()
"""


def test_the_global_provider_may_be_set_before_or_after() -> None:
    done = subprocess.run([sys.executable, "-c", GLOBAL], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("multilock [2]\n", "")


def test_metrics_exported_to_prometheus_have_the_names_that_alerts_and_dashboard_use(
    client: Client,
) -> None:
    """Both exporters receive all events. OpenTelemetry's exporter adds metrics of its own, called scope and target."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(True, scope_info_enabled=False, registry=theirs)])
    runtime = HandRuntime()
    backend = Scripted(runtime)
    losing = client_on(backend, runtime, ttl=30.0)
    for each in (client, losing):
        prometheus.instrument(each, registry=ours)
        instrument(each, meter_provider=provider)
    losing.lock("n").acquire()
    runtime.advance(12)
    backend.always("renew", silence())
    runtime.advance(40)
    with client.election("e") as election:
        eventually(election.is_leader)
        eventually(lambda: samples(theirs) == samples(ours), within=10)
        named = {name for name, *_ in samples(ours)}
    assert {"multilock_losses_total", "multilock_renew_slack_ratio_bucket", "leader_election_master_status"} <= named
    losing.close()
    provider.shutdown()


def samples(registry: CollectorRegistry) -> set[tuple[object, ...]]:
    """Return name, labels and value of each sample. The start times of series are left out, because the exporter sets
    them."""
    return {
        (sample.name, *sorted((key, value) for key, value in sample.labels.items() if value), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
