"""Metrics as an SDK of OpenTelemetry collects them, and as its exporter shows them to Prometheus."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

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
    """A provider of metrics, and their present values."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def __call__(self, name: str, /, **attributes: str) -> Any:
        """Return the present value (of a histogram: the number of its values), or None if there is no such series."""
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
    """Both receive all events. The exporter adds what it calls scope and target."""
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
    """Return name, labels and value of each sample. The time when a series began is left out, since the exporter sets
    it."""
    return {
        (sample.name, *sorted((key, value) for key, value in sample.labels.items() if value), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
