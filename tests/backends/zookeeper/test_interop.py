"""Our lock and those of kazoo and of Curator on the same name: each waits for the other, in one queue."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from multilock import BackendRejected, Client
from multilock.testing.conformance.base import eventually
from multilock.testing.conformance.faces import background
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.servers_zookeeper import ZooKeeperServer

WITHIN = 10.0


class Curator:
    """An InterProcessMutex of the real Curator, in a process of its own."""

    def __init__(self, server: ZooKeeperServer, path: str) -> None:
        jars = "/usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-nop.jar"
        program = Path(__file__).parent / "Contender.java"
        self._process = subprocess.Popen(
            ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", jars, str(program), server.endpoint, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert background(self._line).result(30) == "ready"

    def tell(self, word: str) -> Future[str]:
        """What it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return background(self._line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.originalname}/"


@pytest.fixture
def client(connect: Connect, shared: ZooKeeperServer, prefix: str) -> Client:
    return connect(shared.url, prefix=prefix, ttl=10)


@pytest.fixture
def curator_style(connect: Connect, shared: ZooKeeperServer, prefix: str) -> Client:
    return connect(shared.url, prefix=prefix, ttl=10, node_style="curator")


@pytest.fixture
def kazoo(operator: Operator, shared: ZooKeeperServer, prefix: str) -> Callable[..., Any]:
    """Makes a kazoo.Lock for a name, on a session of its own."""
    return lambda name, **words: operator(shared.endpoint).Lock(f"/{prefix}{name}", **words)


@pytest.fixture
def curator(shared: ZooKeeperServer, prefix: str) -> Iterator[Callable[[str], Curator]]:
    started: list[Curator] = []

    def start(name: str) -> Curator:
        started.append(Curator(shared, f"/{prefix}{name}"))
        return started[-1]

    yield start
    for each in started:
        each.close()


def waiting(client: Client, name: str) -> int:
    info = client.inspect(name)
    return info.waiting or 0 if info else 0


def test_we_wait_for_kazoo(client: Client, kazoo: Callable[..., Any]) -> None:
    theirs = kazoo("job", identifier="node-7")
    theirs.acquire()
    assert client.lock("job").try_acquire() is None
    info = client.inspect("job")
    assert info is not None
    assert info.identity == "node-7"
    ours = background(lambda: client.lock("job").acquire(timeout=WITHIN))
    eventually(lambda: waiting(client, "job") == 1)
    assert not ours.done()
    theirs.release()
    lease = ours.result(WITHIN)
    assert info.token is not None
    assert lease.fence() > info.token


def test_kazoo_waits_for_us(client: Client, kazoo: Callable[..., Any]) -> None:
    lease = client.lock("job").acquire()
    theirs = kazoo("job")
    assert not theirs.acquire(blocking=False)
    assert lease.owner.partition("@")[0] in theirs.contenders()[0]
    taken = background(theirs.acquire)
    eventually(lambda: waiting(client, "job") == 1)
    assert not taken.done()
    assert lease.release()
    assert taken.result(WITHIN)
    assert client.lock("job").try_acquire() is None


def test_kazoo_and_we_stand_in_one_queue_in_order_of_arrival(client: Client, kazoo: Callable[..., Any]) -> None:
    holder = client.lock("job").acquire()
    theirs = kazoo("job")
    taken = background(theirs.acquire)
    eventually(lambda: waiting(client, "job") == 1)
    ours = background(lambda: client.lock("job", fair=True).acquire(timeout=WITHIN))
    eventually(lambda: waiting(client, "job") == 2)
    holder.release()
    assert taken.result(WITHIN)
    assert not ours.done()
    theirs.release()
    assert ours.result(WITHIN).is_held()


def test_we_wait_for_curator(curator_style: Client, curator: Callable[[str], Curator]) -> None:
    theirs = curator("job")
    assert theirs.tell("acquire").result(WITHIN) == "held"
    assert curator_style.lock("job").try_acquire() is None
    ours = background(lambda: curator_style.lock("job").acquire(timeout=WITHIN))
    eventually(lambda: waiting(curator_style, "job") == 1)
    assert not ours.done()
    theirs.tell("release").result(WITHIN)
    assert ours.result(WITHIN).is_held()


def test_curator_waits_for_us(curator_style: Client, curator: Callable[[str], Curator]) -> None:
    theirs = curator("job")
    lease = curator_style.lock("job").acquire()
    assert theirs.tell("try").result(WITHIN) == "taken"
    taken = theirs.tell("acquire")
    eventually(lambda: waiting(curator_style, "job") == 1)
    assert not taken.done()
    lease.release()
    assert taken.result(WITHIN) == "held"
    assert curator_style.lock("job").try_acquire() is None


def test_the_other_style_is_refused_and_nothing_of_us_stays(
    client: Client, curator_style: Client, kazoo: Callable[..., Any]
) -> None:
    theirs = kazoo("job")
    theirs.acquire()
    with pytest.raises(BackendRejected, match="node_style=kazoo"):
        curator_style.lock("job").acquire(timeout=WITHIN)
    assert waiting(client, "job") == 0
    theirs.release()
    held = curator_style.lock("job").acquire()
    with pytest.raises(BackendRejected, match="node_style=curator"):
        client.lock("job").acquire(timeout=WITHIN)
    assert held.is_held()
    assert waiting(client, "job") == 0


def test_a_name_with_a_slash_is_one_escaped_name(client: Client, kazoo: Callable[..., Any]) -> None:
    with client.lock("a/b"):
        assert kazoo("a/b").acquire(blocking=False)  # another lock, by its unescaped name
        assert not kazoo("a%2Fb").acquire(blocking=False)
