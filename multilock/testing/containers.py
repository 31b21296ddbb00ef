"""One server of each kind in its own container, on any Docker engine. Needs ``multilock[docker]``.

    with container("etcd") as server, multilock.connect(server.url) as client:
        ...

For ``redlock://``, start several ``redis`` containers and set ``restart_guard=0``: Redlock does not count a server that
has just been started. Sentinels and a Redis Cluster are in compose/cluster.yaml, since their servers must know each
other.

In pytest the fixtures ``redis_container``, ``etcd_container``, ``zookeeper_container``, ``consul_container`` and
``postgresql_container`` give such servers. Each is started once in a run, when a test first uses it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import multilock

__all__ = ["LABEL", "SERVERS", "ContainerError", "Kind", "Server", "ServerContainer", "container"]

Kind = Literal["redis", "etcd", "zookeeper", "consul", "postgresql"]

# Label of each container: the process that started it, so that a leftover can be traced.
LABEL = "multilock.testing.pid"
START_WITHIN = 60.0  # seconds until a new server must reply; on an idle machine a ZooKeeper takes 2 s
REQUEST_WITHIN = 2.0
ENGINE_WITHIN = 30  # seconds that one request to the engine may take


class ContainerError(RuntimeError):
    """The container cannot be used: no engine, no image, or no reply. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """The way to start a server of one kind. Image and settings are those of compose/compose.yaml."""

    image: str
    port: int
    memory: str
    command: Sequence[str] | None = None  #: None means the image's own command
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""  #: the part of the URL before the host


SERVERS: Mapping[str, Server] = MappingProxyType(
    {
        "redis": Server(
            "redis:8.2",
            6379,
            "128m",
            [
                *("redis-server", "--save", "", "--appendonly", "no"),
                *("--maxmemory", "64mb", "--maxmemory-policy", "noeviction"),
            ],
        ),
        "etcd": Server(
            "quay.io/coreos/etcd:v3.6.5",
            2379,
            "256m",
            [
                "/usr/local/bin/etcd",
                "--data-dir=/tmp/etcd",
                "--listen-client-urls=http://0.0.0.0:2379",
                "--advertise-client-urls=http://127.0.0.1:2379",
            ],
        ),
        "zookeeper": Server(
            "zookeeper:3.9.4",
            2181,
            "384m",
            environment={
                "ZOO_TICK_TIME": "500",
                "ZOO_4LW_COMMANDS_WHITELIST": "srvr",
                "ZOO_ADMINSERVER_ENABLED": "false",
                "JVMFLAGS": "-Xms32m -Xmx128m",
            },
        ),
        "consul": Server(
            "hashicorp/consul:1.21",
            8500,
            "256m",
            ["agent", "-dev", "-client", "0.0.0.0"],
            {"CONSUL_LOCAL_CONFIG": '{"session_ttl_min": "1s", "disable_update_check": true}'},
        ),
        "postgresql": Server(
            "postgres:17",
            5432,
            "256m",
            ["postgres", "-c", "fsync=off", "-c", "max_connections=300"],
            {"POSTGRES_HOST_AUTH_METHOD": "trust"},
            user="postgres@",
        ),
    }
)


class ServerContainer:
    """A running server, as `container` yields it."""

    def __init__(self, kind: Kind, handle: Any, port: int) -> None:
        self.kind = kind
        self.url = f"{kind}://{SERVERS[kind].user}127.0.0.1:{port}"
        self._handle = handle

    @property
    def id(self) -> str:
        """The container's id at the engine."""
        identity: str = self._handle.id
        return identity

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Freeze the server inside this context: it accepts connections, but sends no reply."""
        self._handle.pause()
        try:
            yield
        finally:
            self._handle.unpause()

    def __repr__(self) -> str:
        return f"<ServerContainer {self.url} {self.id[:12]}>"


@contextlib.contextmanager
def container(kind: Kind) -> Iterator[ServerContainer]:
    """Yield a fresh server in a container, once it replies to requests of multilock.

    The server listens on a free port of 127.0.0.1, so the Docker engine must be on this machine. The engine is found
    through ``DOCKER_HOST`` or the default socket. Nothing is downloaded: pull the image before. At the end, also after
    an error, the container and its data are removed, and nothing else. If this process is killed, the container stays,
    and its label `LABEL` holds the pid of this process. Raises ContainerError.
    """
    if kind not in SERVERS:
        raise ValueError(f"kind must be one of {', '.join(SERVERS)}, not {kind!r}")
    with _engine() as engine, _created(engine, SERVERS[kind]) as handle:
        handle.start()
        server = ServerContainer(kind, handle, _published_port(kind, handle))
        _wait_until_it_answers(server, handle)
        yield server


@contextlib.contextmanager
def _engine() -> Iterator[Any]:
    try:
        import docker  # imported late, so that SERVERS can be read without it
    except ModuleNotFoundError as missing:
        if missing.name != "docker":
            raise
        raise ContainerError("containers need the docker package: pip install 'multilock[docker]'") from missing
    try:
        engine = docker.from_env(timeout=ENGINE_WITHIN)
    except docker.errors.DockerException as error:
        where = os.environ.get("DOCKER_HOST", "the default socket")
        raise ContainerError(
            f"no Docker engine answers at {where}: start one, or give its address in DOCKER_HOST ({error})"
        ) from error
    with contextlib.closing(engine):
        yield engine


@contextlib.contextmanager
def _created(engine: Any, server: Server) -> Iterator[Any]:
    import docker

    try:
        handle = engine.containers.create(
            server.image,
            server.command,
            environment=dict(server.environment),
            labels={LABEL: str(os.getpid())},
            mem_limit=server.memory,
            ports={f"{server.port}/tcp": ("127.0.0.1", None)},
        )
    except docker.errors.ImageNotFound as error:
        raise ContainerError(
            f"the engine does not have the image {server.image}: run docker pull {server.image}"
        ) from error
    try:
        yield handle
    finally:
        with contextlib.suppress(docker.errors.NotFound):  # somebody removed the container by hand
            handle.remove(force=True, v=True)


def _published_port(kind: Kind, handle: Any) -> int:
    handle.reload()
    bindings = handle.ports.get(f"{SERVERS[kind].port}/tcp")
    if not bindings:  # the server ended as soon as it was started
        raise _silent(kind, handle)
    return int(bindings[0]["HostPort"])


def _wait_until_it_answers(server: ServerContainer, handle: Any) -> None:
    until = time.monotonic() + START_WITHIN
    with multilock.connect(server.url, request_timeout=REQUEST_WITHIN) as client:
        while True:
            try:
                client.ping()
                return
            except multilock.BackendUnavailable as error:
                handle.reload()
                if handle.status != "running" or time.monotonic() > until:
                    raise _silent(server.kind, handle) from error
            time.sleep(0.05)


def _silent(kind: Kind, handle: Any) -> ContainerError:
    said = handle.logs(tail=20).decode(errors="replace")
    return ContainerError(f"{kind} does not answer (container {handle.status}). Its last output: {said}")
