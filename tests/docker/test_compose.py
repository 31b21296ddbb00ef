"""compose/compose.yaml on a real engine: healthy services serve locks, and holders are notified if a service is
frozen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docker.project import Project, running
from tests.docker.smoke import Holder, Service, Smoke

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

URLS = {
    "redis": "redis://127.0.0.1:6379",
    "etcd": "etcd://127.0.0.1:2379",
    "zookeeper": "zookeeper://127.0.0.1:2181",
    "consul": "consul://127.0.0.1:8500",
    "postgresql": "postgresql://postgres@127.0.0.1:5432/postgres",
}
TTL = 3.0


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    with running("compose.yaml") as project:
        yield project


def test_every_service_is_healthy_and_reachable_only_from_this_machine(project: Project) -> None:
    project.is_healthy_and_local()


class TestSmoke(Smoke):
    @pytest.fixture(params=URLS)
    def place(self, request: pytest.FixtureRequest, project: Project) -> Service:
        return Service(URLS[request.param])


def test_a_paused_service_is_healthy_again_for_the_next_test(project: Project) -> None:
    with project.paused("redis"):
        pass
    [again] = project.containers("redis")
    assert again["Health"] == "healthy"


@pytest.mark.parametrize("service", URLS)
def test_a_holder_is_notified_in_time_of_a_paused_server(project: Project, service: str) -> None:
    with Holder(URLS[service], TTL) as holder:
        with project.paused(service):
            holder.hears_in_time()
        holder.has_a_successor(URLS[service])


@pytest.mark.parametrize("service", URLS)
def test_a_holder_is_notified_in_time_of_a_server_without_network(project: Project, service: str) -> None:
    with Holder(URLS[service], TTL) as holder:
        with project.disconnected(service):
            holder.hears_in_time()
        holder.has_a_successor(URLS[service])
