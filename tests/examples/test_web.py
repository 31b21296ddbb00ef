"""FastAPI under uvicorn, and Flask under gunicorn: real servers that are ended with SIGTERM."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.conftest import EXAMPLES, Programs, http, until
from tests.servers import free_port

pytestmark = pytest.mark.timeout(180)
ROUNDS = 2


class Service:
    """One server of the FastAPI example."""

    def __init__(self, programs: Programs, workers: int = 1) -> None:
        self.port = free_port()
        self.process = programs.python("fastapi_leader.py", "--port", self.port, "--workers", workers)

    def get(self, path: str) -> tuple[int, Any]:
        return http(f"http://127.0.0.1:{self.port}{path}")

    def leads(self) -> bool:
        status, body = self.get("/leader")
        return status == 200 and bool(body["me"])


def follow_each_other(lines: list[str]) -> bool:
    """Assert that the terms do not overlap, and that each term has all three steps."""
    terms = [re.findall(r"term (\d+): (.*)", line)[0] for line in lines]
    by_term = {term: [what for its, what in terms if its == term] for term, _ in terms}
    *ended, _ = by_term.values()
    whole = all(what[0] == "begins" and what[-1] == "cleaned up" for what in ended)
    return whole and [int(term) for term, _ in terms] == sorted(int(term) for term, _ in terms)


@pytest.mark.parametrize(
    "place",
    ["sqlite", *(pytest.param(each, marks=pytest.mark.rare) for each in ("redis", "etcd"))],
    indirect=True,
)
def test_with_fastapi_a_new_leader_begins_after_the_old_ones_work_ended(programs: Programs) -> None:
    services = [Service(programs), Service(programs)]
    for _ in range(ROUNDS):
        [leader] = until(lambda: [each for each in services if each.leads()], why=programs.said)
        until(lambda: all(each.get("/healthz")[0] == 200 for each in services))
        began = len(programs.lines("begins"))
        programs.terminate(leader.process)
        programs.wait_for("begins", times=began + 1)
        services.remove(leader)
        services.append(Service(programs))
    for each in services:
        programs.terminate(each.process)
    lines = programs.lines("pid", "term")
    assert len([line for line in lines if "cleaned up" in line]) >= ROUNDS
    assert follow_each_other(lines), programs.said()


def test_one_of_two_uvicorn_workers_leads(programs: Programs) -> None:
    service = Service(programs, workers=2)
    programs.wait_for("Application startup complete", times=2)
    programs.wait_for("works")
    status, body = service.get("/leader")
    assert (status, body["term"] is not None) == (200, True)
    assert service.get("/healthz") == (200, {"healthy": True})
    assert len(programs.lines("begins")) == 1
    programs.terminate(service.process)
    # The supervisor signals both workers at once, but the second worker may lead before it receives its signal.
    lines = programs.lines("pid", "term")
    assert follow_each_other(lines), programs.said()
    assert len([line for line in lines if "cleaned up" in line]) == len([line for line in lines if "begins" in line])


def test_the_kubernetes_deployment_gives_the_leader_the_time_it_needs() -> None:
    deployment = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    program = (EXAMPLES / container["command"][1]).read_text(encoding="utf-8")
    grace = float(re.findall(r"^GRACE = ([\d.]+)", program, re.MULTILINE)[0])
    connections = float(re.findall(r"^CONNECTIONS = ([\d.]+)", program, re.MULTILINE)[0])
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    request_timeout = 5.0  # the default request timeout for the default ttl
    assert pod["terminationGracePeriodSeconds"] > float(seconds) + connections + grace + request_timeout
    for probe in (container["livenessProbe"], container["readinessProbe"]):
        assert probe["httpGet"] == {"path": "/healthz", "port": 8000}
    assert '@app.get("/healthz")' in program
    assert container["command"][2:] == ["--host", "0.0.0.0", "--port", "8000"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_flask_under_gunicorn_has_one_leader_and_makes_one_report_at_a_time(programs: Programs) -> None:
    def serve() -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        folder = EXAMPLES / "gunicorn_flask"
        process = programs.start("gunicorn", "--bind", f"127.0.0.1:{port}", "app:app", cwd=folder)
        return process, f"http://127.0.0.1:{port}"

    first, at = serve()
    programs.wait_for("leads")
    answers = [until(lambda: http(f"{at}/leader")[1], why=programs.said) for _ in range(4)]
    assert {answer["leader"] for answer in answers} == {answers[0]["leader"]}
    assert answers[0]["leader"]
    assert all(answer["healthy"] for answer in answers)

    asked = [subprocess.Popen([*CURL, f"{at}/report"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate(timeout=30)[0] for process in asked) == ["200", "409"]

    second, _ = serve()
    programs.wait_for("Booting worker", times=4)
    assert programs.terminate(first) == 0
    programs.wait_for("leads", times=2)
    assert programs.terminate(second) == 0
    told = programs.lines("pid", "term")
    assert [line.rpartition(": ")[2] for line in told] == ["leads", "cleaned up"] * (len(told) // 2), told


CURL = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-X", "POST"]


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = EXAMPLES / "leader.service"
    settings = dict(
        line.split("=", 1) for line in unit.read_text(encoding="utf-8").splitlines() if "=" in line and line[0] != "#"
    )
    grace = float(re.findall(r"--grace (\S+)", settings["ExecStart"])[0])
    assert float(settings["TimeoutStopSec"]) > grace + 5.0  # the default request_timeout
    assert settings["KillMode"] == "mixed"
    # systemd-analyze checks that the programs and the user of the unit exist, so replace them by existing ones.
    here = (
        unit.read_text(encoding="utf-8").replace("/opt/app/bin/multilock", "/bin/true").replace("User=app", "User=root")
    )
    (tmp_path / "leader.service").write_text(here, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "leader.service")],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "SYSTEMD_LOG_LEVEL": "warning"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
