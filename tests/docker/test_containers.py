"""The servers of `multilock.testing.containers` have the right images, work, and leave nothing behind."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace

import pytest

import multilock
from multilock.testing import containers
from multilock.testing.containers import LABEL, ContainerError, ServerContainer, container
from tests.docker.project import COMPOSE, docker, need_engine
from tests.docker.smoke import Holder

pytestmark = pytest.mark.timeout(300)


def images(file: str) -> list[tuple[str, str]]:
    """Return the name and image of each service that has an image, in the order of the file."""
    text = (COMPOSE / file).read_text(encoding="utf-8")
    return re.findall(r"^(?:  |x-)(\w+):(?: &\w+)?\n +image: (\S+)", text, re.MULTILINE)


@pytest.fixture
def engine() -> None:
    need_engine()


@pytest.fixture(params=containers.SERVERS)
def server(request: pytest.FixtureRequest, engine: None) -> ServerContainer:
    """Return the server of the plugin's fixture."""
    server: ServerContainer = request.getfixturevalue(f"{request.param}_container")
    return server


@pytest.mark.parametrize("file", ["compose.yaml", "cluster.yaml"])
def test_the_images_are_those_of_the_compose_files(file: str) -> None:
    named = dict(images(file))
    wanted = {kind: server.image for kind, server in containers.SERVERS.items()}
    if file == "cluster.yaml":
        assert named.pop("shard") == named["redis"]
        del wanted["postgresql"]  # cluster.yaml has no PostgreSQL
    assert named == wanted


def test_an_unknown_kind_is_refused_with_a_list_of_the_known_kinds() -> None:
    with pytest.raises(ValueError, match="consul, postgresql, not 'mysql'"), container("mysql"):  # type: ignore[arg-type]
        pass


def test_a_missing_container_engine_gives_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ContainerError, match=r"no Docker engine answers at tcp://127.0.0.1:1"), container("redis"):
        pass


def test_a_missing_docker_package_gives_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ContainerError, match=r"pip install 'multilock\[docker\]'"), container("redis"):
        pass


def test_a_missing_image_gives_a_clear_error_and_leaves_nothing(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(containers.SERVERS["redis"], image="multilock-absent:1")
    monkeypatch.setattr(containers, "SERVERS", {"redis": absent})
    before = ours()
    with pytest.raises(ContainerError, match=r"docker pull multilock-absent:1"), container("redis"):
        pass
    assert ours() == before


def test_a_server_that_ends_gives_a_clear_error_and_leaves_nothing(
    engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(containers.SERVERS["redis"], command=["redis-server", "--no-such-option", "1"])
    monkeypatch.setattr(containers, "SERVERS", {"redis": wrong})
    before = ours()
    with pytest.raises(ContainerError, match=r"redis does not answer \(container exited\)"), container("redis"):
        pass
    assert ours() == before


@pytest.mark.slow
def test_locks_in_a_container_exclude_and_a_pause_is_reported_in_time(server: ServerContainer) -> None:
    with Holder(server.url, 3.0) as holder:
        with multilock.connect(server.url, ttl=3.0) as other:
            assert other.lock(holder.name).try_acquire() is None
        with server.paused():
            holder.hears_in_time()
        holder.has_a_successor(server.url)


@pytest.mark.slow
def test_each_container_is_a_separate_local_server_and_is_removed(engine: None) -> None:
    before = ours()
    with container("redis") as one, container("redis") as two:
        assert ours() - before == {one.id, two.id}
        with multilock.connect(one.url) as first, multilock.connect(two.url) as second:
            assert first.lock("n").try_acquire() is not None
            assert second.lock("n").try_acquire() is not None
        assert docker("port", one.id, "6379").startswith("127.0.0.1:")
    assert ours() == before


@pytest.mark.slow
def test_several_containers_form_a_redlock_that_survives_the_loss_of_one(engine: None) -> None:
    with container("redis") as one, container("redis") as two, container("redis") as three:
        hosts = ",".join(each.url.removeprefix("redis://") for each in (one, two, three))
        with multilock.connect(f"redlock://{hosts}?restart_guard=0") as client, client.lock("n").acquire() as lease:
            with two.paused():
                lease.renew()
            assert client.inspect("n") is not None


@pytest.mark.slow
def test_an_error_in_the_block_removes_the_container(engine: None) -> None:
    before = ours()
    with pytest.raises(KeyboardInterrupt), container("redis"):
        raise KeyboardInterrupt
    assert ours() == before


def ours() -> set[str]:
    """Return the containers that this process started and has not removed."""
    said = docker("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={os.getpid()}")
    return set(said.split())
