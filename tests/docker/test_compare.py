"""`multilock compare` takes containers down: who keeps its data comes out well, who comes back empty is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from multilock.testing import compare
from tests.docker.project import Project, docker, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEEPS = "etcd://127.0.0.1:2379"  # its data outlives its process, in the container
FORGETS = "consul://127.0.0.1:8500"  # -dev: in memory only
FAULTS = ["server-stop", "server-kill", "server-restart"]


@dataclass
class Run:
    project: Project
    folder: Path
    report: compare.Report

    def container(self, service: str) -> str:
        return f"{self.project.name}-{service}-1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("compare")
    with running("compose.yaml", "etcd", "consul") as project:
        report = compare.run(
            [KEEPS, FORGETS], scenarios=FAULTS, cycles=2, controls=False, out=folder,
            server_containers=[f"{KEEPS}={project.name}-etcd-1", f"{FORGETS}={project.name}-consul-1"],
        )  # fmt: skip
        yield Run(project, folder, report)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_keeps_its_data_keeps_its_promise(run: Run, fault: str) -> None:
    cell = run.report.cells["etcd", fault]
    assert (cell["verdict"], cell["violations"], cell["no_fault"]) == ("kept", [], 0), cell


@pytest.mark.parametrize("fault", ["server-kill", "server-restart"])
def test_what_comes_back_empty_begins_its_tokens_anew_and_is_found(run: Run, fault: str) -> None:
    cell = run.report.cells["consul", fault]
    assert cell["verdict"] == "broken", cell
    assert any("token" in str(violation) for violation in cell["violations"]), cell
    assert run.report.exit_code == 1


@pytest.mark.parametrize("service", ["etcd", "consul"])
def test_its_container_is_named_and_runs_afterwards(run: Run, service: str) -> None:
    column = next(column for column in run.report.data["columns"] if column["name"] == service)
    assert column["server"] == f"container {run.container(service)}"
    state = json.loads(docker("inspect", "-f", "{{json .State}}", run.container(service)))
    assert (state["Running"], state["Paused"]) == (True, False)


def test_its_history_says_the_same(run: Run) -> None:
    assert compare.verify(run.folder) == []
