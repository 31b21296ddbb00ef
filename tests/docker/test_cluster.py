"""compose/cluster.yaml on a real engine: clusters serve locks, survive the loss of one server, and need a majority."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import multilock
from tests.docker.project import Project, running
from tests.docker.smoke import Holder, Service, Smoke, each_grants, each_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLUSTERS = {
    "etcd": "etcd://127.0.0.1:23791,127.0.0.1:23792,127.0.0.1:23793",
    "zookeeper": "zookeeper://127.0.0.1:21811,127.0.0.1:21812,127.0.0.1:21813",
    "consul": "consul://127.0.0.1:8510,127.0.0.1:8520,127.0.0.1:8530",
}
FIRST = {service: each_of(url)[0] for service, url in CLUSTERS.items()}
# A session of Consul belongs to the agent that created it. If this agent is a server and dies, Consul removes its node
# and the session (SESSION_LOST). So a lock on Consul survives only the loss of servers that did not create its session.
OUTLIVES = ["etcd", "zookeeper"]
TTL = 6.0
# seconds; used if the paused server may be the leader, because an election takes seconds on an overloaded machine
LONGER = 15.0


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    with running("cluster.yaml", *CLUSTERS) as project:
        for url in CLUSTERS.values():
            each_grants(url)
        yield project


def test_every_service_is_healthy_and_reachable_only_from_this_machine(project: Project) -> None:
    project.is_healthy_and_local()


class TestSmoke(Smoke):
    @pytest.fixture(params=CLUSTERS)
    def place(self, request: pytest.FixtureRequest, project: Project) -> Service:
        return Service(CLUSTERS[request.param])


@pytest.mark.parametrize("service", CLUSTERS)
def test_all_servers_of_a_cluster_serve_the_same_locks(project: Project, service: str) -> None:
    with Holder(FIRST[service], TTL) as holder:
        for url in each_of(CLUSTERS[service]):
            with multilock.connect(url, ttl=TTL) as other:
                assert other.lock(holder.name).try_acquire() is None


@pytest.mark.parametrize("service", CLUSTERS)
def test_a_holder_is_notified_in_time_of_a_lost_majority(project: Project, service: str) -> None:
    with Holder(CLUSTERS[service], TTL) as holder:
        with project.paused(f"{service}2", f"{service}3"):
            holder.hears_in_time()
        holder.has_a_successor(CLUSTERS[service])


@pytest.mark.parametrize("service", OUTLIVES)
def test_a_lock_survives_a_paused_server(project: Project, service: str) -> None:
    with Holder(CLUSTERS[service], LONGER) as holder:
        with project.paused(f"{service}1"):
            holder.keeps_it()
        assert holder.lease.release()
        holder.has_a_successor(CLUSTERS[service])


@pytest.mark.parametrize("service", CLUSTERS)
def test_a_holder_is_notified_in_time_if_its_server_is_isolated_from_clients(project: Project, service: str) -> None:
    with Holder(FIRST[service], TTL) as holder:
        with project.disconnected(f"{service}1", "clients"):
            holder.hears_in_time()
        holder.has_a_successor(CLUSTERS[service])
