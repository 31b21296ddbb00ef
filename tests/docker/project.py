"""A compose file whose services are started under a project name that no other run uses."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docker.smoke import WELL_WITHIN
from tests.servers import unavailable

__all__ = ["COMPOSE", "Project", "docker", "need_engine", "running"]

COMPOSE = Path(__file__).parents[2] / "compose"
UP_WITHIN = 240.0  # seconds to wait at most until all services work; the cluster takes 13 s on an idle machine
COMMAND_WITHIN = 60.0


def docker(*arguments: str, within: float = COMMAND_WITHIN) -> str:
    """Run ``docker …`` and return its output. If the command fails, the test fails and shows its stderr."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=within, check=False)
    if done.returncode:
        pytest.fail(f"docker {' '.join(arguments)}: {done.stderr.strip()}", pytrace=False)
    return done.stdout.strip()


def need_engine() -> None:
    """Skip with a message if the engine is missing, or fail if ``MULTILOCK_REQUIRE`` names docker."""
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_WITHIN, check=False)
            why = done.stderr.strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            unavailable("docker", f"compose/ and the containers are not tested: {why}")


class Project:
    """The services of one compose file, with methods that start, check and disturb them."""

    def __init__(self, file: str, *profiles: str) -> None:
        # `make docker` sets the name, so that it can remove the containers of a killed run.
        base = os.environ.get("MULTILOCK_DOCKER_PROJECT", f"multilock-test-{os.getpid()}")
        self.name = f"{base}-{file.partition('.')[0]}"
        chosen = (part for profile in profiles or ("all",) for part in ("--profile", profile))
        self._compose = ("compose", "--project-name", self.name, "--file", str(COMPOSE / file), *chosen)

    def compose(self, *arguments: str, within: float = COMMAND_WITHIN) -> str:
        return docker(*self._compose, *arguments, within=within)

    def services(self) -> dict[str, Any]:
        services: dict[str, Any] = json.loads(self.compose("config", "--format", "json"))["services"]
        return services

    def up(self) -> None:
        # If every image is on this machine, no registry is needed. The machine may reach none.
        images = {service["image"] for service in self.services().values()}
        pull = "never" if all(map(_is_local, images)) else "missing"
        self.compose("up", "--detach", "--wait", "--pull", pull, within=UP_WITHIN)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "1")

    def containers(self, *services: str) -> list[dict[str, Any]]:
        """Return what the engine reports about these services, or about all."""
        said = self.compose("ps", "--all", "--format", "json", *services)
        return [json.loads(line) for line in said.splitlines()]

    def is_well(self, *services: str) -> None:
        """Assert that these services become healthy soon. Without names, all services are checked.

        After a pause of the machine, the engine reports a service as unhealthy until the next check, and ``up --wait``
        fails. So this method waits until the services are healthy.
        """
        until = time.monotonic() + WELL_WITHIN
        while states := [
            f"{each['Service']} is {each['State']}, {each['Health']}"
            for each in self.containers(*services)
            if (each["State"], each["Health"]) != ("running", "healthy")
        ]:
            assert time.monotonic() < until, "; ".join(states)
            time.sleep(0.1)

    def is_healthy_and_local(self) -> None:
        """Assert that every service of the file is healthy, with ports on 127.0.0.1 only."""
        self.is_well()
        containers = self.containers()
        assert sorted(each["Service"] for each in containers) == sorted(self.services())
        open_to = {port["URL"] for each in containers for port in each["Publishers"] if port["PublishedPort"]}
        assert open_to == {"127.0.0.1"}

    @contextlib.contextmanager
    def paused(self, *services: str) -> Iterator[None]:
        """Freeze the services inside this context: they accept connections, but do not answer."""
        self.compose("pause", *services)
        try:
            yield
        finally:
            self.compose("unpause", *services)
        self.is_well(*services)

    @contextlib.contextmanager
    def killed(self, *services: str) -> Iterator[None]:
        """Kill the services with all their data, and start them again at the end of this context."""
        self.compose("kill", *services)
        try:
            yield
        finally:
            self.compose("up", "--detach", "--wait", "--pull", "never", *services, within=UP_WITHIN)

    @contextlib.contextmanager
    def disconnected(self, service: str, network: str = "default") -> Iterator[None]:
        """Disconnect a service from ``network`` inside this context. Its published port stays only if the service has
        another network."""
        where = (f"{self.name}_{network}", f"{self.name}-{service}-1")
        docker("network", "disconnect", *where)
        try:
            yield
        finally:
            docker("network", "connect", *where)
        self.is_well(service)


@contextlib.contextmanager
def running(file: str, *profiles: str) -> Iterator[Project]:
    """Start all services of this file, or only those of these profiles, and wait until they are healthy. They are
    removed at the end, also after an error."""
    need_engine()
    project = Project(file, *profiles)
    ports = [int(port["published"]) for service in project.services().values() for port in service["ports"]]
    if taken := sorted(filter(_is_taken, ports)):
        unavailable("docker", f"compose/{file} is not tested: ports {taken} of 127.0.0.1 are taken")
    try:
        project.up()
        yield project
    finally:
        project.down()


def _is_local(image: str) -> bool:
    done = subprocess.run(
        ["docker", "image", "inspect", image], capture_output=True, timeout=COMMAND_WITHIN, check=False
    )
    return done.returncode == 0


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
