"""Metrics as Prometheus receives them from a real endpoint."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

import multilock
from multilock import Client, LockTimeout
from multilock.contrib.prometheus import instrument
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import eventually
from multilock.testing.conformance.faces import background
from tests.unit.kit import Scripted, client_on, silence

PAGES = Path(__file__).parents[2] / "docs" / "monitoring"
Scrape = Callable[..., float | None]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=True)  # a registry like the one that most programs use


@pytest.fixture
def scrape(registry: CollectorRegistry) -> Iterator[Scrape]:
    """Scrape the registry. Yields a function that returns the present value of a sample, or None if it does not
    exist."""
    server, thread = start_http_server(0, "127.0.0.1", registry=registry)

    def scrape(name: str, /, **labels: str) -> float | None:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None

    yield scrape
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client() -> Iterator[Client]:
    with multilock.connect("memory://metrics") as client:
        yield client


def test_a_lock_appears_in_every_metric(client: Client, registry: CollectorRegistry, scrape: Scrape) -> None:
    instrument(client, registry=registry)
    with client.lock("n"):
        assert scrape("multilock_held", backend="memory") == 1
        with pytest.raises(LockTimeout):
            client.lock("n").acquire(timeout=0)
        with pytest.raises(LockTimeout):
            client.lock("n").acquire(timeout=0.01)
    assert scrape("multilock_held", backend="memory") == 0
    eventually(lambda: scrape("multilock_held_seconds_count", backend="memory") == 1)
    assert scrape("multilock_acquires_total", result="acquired", backend="memory", name="") == 1
    assert scrape("multilock_acquires_total", result="taken") == 2
    assert scrape("multilock_acquire_wait_seconds_count") == 1
    # The watchdog may just be waking up.
    eventually(lambda: scrape("multilock_watchdog_late_seconds", backend="memory") == 0)


def test_waiters_at_the_server_and_inside_the_client_are_counted(
    client: Client, registry: CollectorRegistry, scrape: Scrape
) -> None:
    instrument(client, registry=registry)
    with multilock.connect("memory://metrics") as other:
        held = other.lock("n").acquire()
        waiting = [background(lambda: client.lock("n").acquire(timeout=20).release()) for _ in range(3)]
        eventually(lambda: scrape("multilock_waiting", backend="memory") == 3)
        held.release()
        assert [one.result(20) for one in waiting] == [True] * 3
    assert scrape("multilock_waiting", backend="memory") == 0
    eventually(lambda: scrape("multilock_acquires_total", result="acquired") == 3)


@pytest.mark.parametrize(
    ("name_label", "label"),
    [(False, ""), (True, "invoices/42"), (lambda name: name.split("/")[0], "invoices"), (lambda name: 1 / 0, "error")],
)
def test_the_user_chooses_the_value_of_the_name_label(
    client: Client, registry: CollectorRegistry, scrape: Scrape, name_label: bool | Callable[[str], str], label: str
) -> None:
    instrument(client, registry=registry, name_label=name_label)
    with client.lock("invoices/42"):
        assert scrape("multilock_held", name=label) == 1
        eventually(lambda: scrape("multilock_acquires_total", name=label) == 1)


def test_a_renewal_exports_its_round_trip_and_the_remaining_time(registry: CollectorRegistry, scrape: Scrape) -> None:
    runtime = HandRuntime()
    client = client_on(Scripted(runtime), runtime, ttl=30.0)
    instrument(client, registry=registry)
    client.lock("n").acquire()
    runtime.advance(12)
    assert scrape("multilock_renew_seconds_count") == 1
    assert scrape("multilock_renew_slack_ratio_bucket", le="0.7") == 1
    assert scrape("multilock_renew_slack_ratio_bucket", le="0.333") == 0
    client.close()


def test_silence_and_loss_are_counted_by_their_reasons(registry: CollectorRegistry, scrape: Scrape) -> None:
    runtime = HandRuntime()
    backend = Scripted(runtime)
    client = client_on(backend, runtime, ttl=30.0)
    instrument(client, registry=registry)
    client.lock("n").acquire()
    backend.always("renew", silence())
    backend.always("attempt", silence())
    runtime.advance(40)
    with pytest.raises(multilock.BackendUnavailable):
        client.lock("m").acquire(timeout=0)
    assert (scrape("multilock_renew_failures_total") or 0) >= 1
    assert scrape("multilock_losses_total", reason="expired") == 1
    assert scrape("multilock_held_seconds_count") == 1
    assert scrape("multilock_acquires_total", result="unavailable") == 1
    client.close()
    with pytest.raises(multilock.ClientClosed):
        client.lock("m")


def test_the_leader_is_exported_as_by_kubernetes(client: Client, registry: CollectorRegistry, scrape: Scrape) -> None:
    instrument(client, registry=registry)
    with multilock.connect("memory://metrics") as other:
        leadership = other.election("e").campaign()
        with client.election("e") as election:
            assert scrape("leader_election_master_status", name="e") == 0
            leadership.release()
            eventually(election.is_leader)
            assert scrape("leader_election_master_status", name="e") == 1
        assert scrape("leader_election_master_status", name="e") is None


def test_an_asyncio_client_is_measured_too(registry: CollectorRegistry, scrape: Scrape) -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://metrics") as client:
            instrument(client, registry=registry)
            holder = await client.lock("n").acquire()
            waiting = asyncio.create_task(client.lock("n").acquire())
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
            await holder.release()
            await asyncio.to_thread(eventually, lambda: scrape("multilock_held_seconds_count") == 1)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert scrape("multilock_acquires_total", result="cancelled", backend="memory") == 1


def test_several_clients_share_a_registry_and_each_is_instrumented_once(
    client: Client, registry: CollectorRegistry, scrape: Scrape
) -> None:
    with multilock.connect("memory://metrics") as other:
        instrument(client, registry=registry)
        instrument(client, registry=registry)
        stop = instrument(other, registry=registry)
        with client.lock("a"), other.lock("b"):
            assert scrape("multilock_held", backend="memory") == 2
        eventually(lambda: scrape("multilock_acquires_total", result="acquired") == 2)
        stop()
        with client.lock("a"), other.lock("b"):
            assert scrape("multilock_held", backend="memory") == 1
    eventually(lambda: scrape("multilock_held_seconds_count") == 3)
    assert scrape("multilock_acquires_total", result="acquired") == 3


def test_metrics_do_not_keep_an_abandoned_client_alive(registry: CollectorRegistry) -> None:
    client = multilock.connect("memory://metrics")
    instrument(client, registry=registry)
    client.close()
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None


def test_the_series_of_losses_exists_before_the_first_loss(registry: CollectorRegistry, scrape: Scrape) -> None:
    runtime = HandRuntime()
    backend = Scripted(runtime)
    client = client_on(backend, runtime, ttl=30.0)
    instrument(client, registry=registry, name_label=True)
    assert scrape("multilock_losses_total", name="", reason="taken") == 0
    client.lock("n").acquire()
    for reason in multilock.LossReason:
        assert scrape("multilock_losses_total", name="n", reason=reason.value) == 0
    backend.always("renew", silence())
    runtime.advance(40)
    assert scrape("multilock_losses_total", name="n", reason="expired") == 1
    client.close()


def test_elections_of_two_prefixes_have_two_series(registry: CollectorRegistry, scrape: Scrape) -> None:
    with (
        multilock.connect("memory://metrics", prefix="blue/") as blue,
        multilock.connect("memory://metrics", prefix="green/") as green,
        multilock.connect("memory://metrics", prefix="green/") as other,
    ):
        instrument(blue, registry=registry)
        instrument(green, registry=registry)
        leadership, elsewhere = blue.election("e").campaign(), other.election("e").campaign()
        with green.election("e"):
            assert scrape("leader_election_master_status", name="e", prefix="blue/") == 1
            assert scrape("leader_election_master_status", name="e", prefix="green/") == 0
        leadership.release()
        elsewhere.release()


class Halting:
    """A client that pauses a scrape in the middle of its figures."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.entered, self.leave = threading.Event(), threading.Event()
        self.events = client.events
        self.halts = False

    @property
    def _kernel(self) -> Any:
        if self.halts:
            self.entered.set()
            self.leave.wait(20)
        return self._client._kernel


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_during_a_scrape_can_be_scraped(client: Client, registry: CollectorRegistry) -> None:
    halting: Any = Halting(client)
    instrument(halting, registry=registry)
    halting.halts = True
    scraping = background(lambda: list(registry.collect()))
    assert halting.entered.wait(10)
    pid = os.fork()
    if pid == 0:
        halting.halts = False
        child = threading.Thread(target=lambda: list(registry.collect()), daemon=True)
        child.start()
        child.join(10)
        os._exit(7 if child.is_alive() else 0)
    halting.leave.set()
    assert scraping.result(20)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_missing_leader_is_exported_even_if_no_process_exports_any_more(
    client: Client, registry: CollectorRegistry, scrape: Scrape
) -> None:
    instrument(client, registry=registry)
    assert scrape("leader_election_master_status") is None
    assert "expr: absent(leader_election_master_status)\n" in (PAGES / "alerts.yaml").read_text(encoding="utf-8")


def names_in(text: str) -> set[str]:
    """Return the metrics that a page, a rule or a dashboard names, without the suffixes of their series, such as
    ``_total``."""
    found = re.findall(r"\b(multilock_[a-z_]+[a-z]|leader_election_[a-z_]+)\b(?=[\s{(\[`)\"\\,]|$)", text)
    return {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in found}


@pytest.mark.parametrize("page", ["alerts.yaml", "dashboard.json", "../monitoring.md"])
def test_alerts_dashboard_and_page_name_metrics_that_exist(
    client: Client, registry: CollectorRegistry, page: str
) -> None:
    instrument(client, registry=registry)
    there = {family.name for family in registry.collect()}
    spoken_of = names_in((PAGES / page).read_text(encoding="utf-8"))
    assert spoken_of - there == set()
    if page.endswith(".md"):
        assert spoken_of == there


def test_promtool_has_tests_for_when_each_alert_fires() -> None:
    rules = re.findall(r"- alert: (\w+)", (PAGES / "alerts.yaml").read_text(encoding="utf-8"))
    text = (PAGES / "alerts-test.yaml").read_text(encoding="utf-8")
    silent = re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts: \[\]", text)
    firing = re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:\n", text)
    assert set(rules) == set(silent) == set(firing)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_confirms_that_each_alert_fires_when_it_should() -> None:
    command = ["promtool", "test", "rules", "alerts-test.yaml"]
    ended = subprocess.run(command, cwd=PAGES, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_dashboard_is_json_that_grafana_accepts() -> None:
    dashboard = json.loads((PAGES / "dashboard.json").read_text(encoding="utf-8"))
    assert {panel["type"] for panel in dashboard["panels"]} == {"timeseries"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
