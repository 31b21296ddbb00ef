"""The pytest plugin: one test, run on every backend that is named.

    pytest --multilock-url redis://localhost:6379/0 --multilock-url sqlite:////var/tmp/locks.db

All locks of a run have a prefix of their own, so that tests never meet what else uses the servers. Without the option
the ini value ``multilock_urls`` (one URL a line) counts, and without that ``memory://``.

The fixtures ``redis_container``, ``etcd_container``, ``zookeeper_container`` and ``consul_container`` are servers in
Docker (`multilock.testing.containers`), each started when a test first asks for it and shared by all tests of the run:
use names of your own. Where none can be started they raise `ContainerError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from multilock import AsyncClient, Client
    from multilock.testing.containers import Kind, ServerContainer

pytest.register_assert_rewrite("multilock.testing.conformance")

__all__ = [
    "consul_container",
    "etcd_container",
    "multilock_async_client",
    "multilock_client",
    "multilock_url",
    "redis_container",
    "zookeeper_container",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("multilock").addoption(
        "--multilock-url",
        action="append",
        default=[],
        metavar="URL",
        dest="multilock_urls",
        help="run what uses multilock_url, multilock_client or multilock_async_client on this backend (repeatable)",
    )
    parser.addini("multilock_urls", "URLs of the backends to test on, one a line", type="linelist", default=[])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "multilock_url" in metafunc.fixturenames and "multilock_url" not in _parametrized_by(metafunc.definition):
        urls = _urls(metafunc.config)
        # Numbers and schemes, because a test's id is printed and a URL may hold a password.
        ids = [f"{number}-{url.partition(':')[0]}" for number, url in enumerate(urls)] if len(urls) > 1 else None
        metafunc.parametrize("multilock_url", urls, ids=ids or [urls[0].partition(":")[0]], indirect=True)


def _urls(config: pytest.Config) -> list[str]:
    return config.getoption("multilock_urls") or config.getini("multilock_urls") or ["memory://"]


_run = pytest.StashKey[str]()


def _isolated(url: str, config: pytest.Config) -> str:
    bare, _, query = url.partition("?")
    if bare.partition(":")[0].lower() == "memory" or any(pair.startswith("prefix=") for pair in query.split("&")):
        return url
    worker = getattr(config, "workerinput", {"workerid": "main"})
    if _run not in config.stash:
        config.stash[_run] = str(worker.get("testrunuid", os.urandom(4).hex()))[:8]
    prefix = f"prefix=multilock-test/{config.stash[_run]}-{worker['workerid']}/"
    return f"{bare}?{query}&{prefix}" if query else f"{bare}?{prefix}"


def _parametrized_by(test: pytest.Item) -> set[str]:
    """The arguments that the test itself gives values."""
    named: set[str] = set()
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        named.update(names.replace(",", " ").split() if isinstance(names, str) else names)
    return named


@pytest.fixture
def multilock_url(request: pytest.FixtureRequest) -> str:
    """The URL of the backend this run of the test is for, with a prefix of this test run and xdist worker: its locks
    meet nobody else's. A URL that names a prefix keeps it, and ``memory://`` needs none.

    A test that pytest cannot repeat runs on the first URL: one of ``unittest.TestCase``, or one that asks for its
    fixtures with ``request.getfixturevalue``.
    """
    url: str = request.param if hasattr(request, "param") else _urls(request.config)[0]
    return _isolated(url, request.config)


@pytest.fixture
def multilock_client(multilock_url: str) -> Iterator[Client]:
    """A blocking client of that backend; closed after the test, and so is every lease it still holds."""
    import multilock  # not before a test asks: the plugin is loaded into every pytest run

    with multilock.connect(multilock_url) as client:
        yield client


@pytest.fixture
def multilock_async_client(multilock_url: str) -> Iterator[AsyncClient]:
    """An asyncio client of that backend, for the loop that uses it first; closed after the test.

    It is made without I/O and so works under every asyncio plugin. Where the test's loop has ended before it closed
    the client itself, what it still holds is given back without one, and no callback hears of it.
    """
    import multilock
    from multilock.aio.face import LoopFace

    client = multilock.connect_async(multilock_url)
    yield client
    kernel = client._kernel
    assert isinstance(kernel.face, LoopFace)
    loop = kernel.face.its_loop()
    if loop is None or loop.is_closed() or loop.is_running():
        kernel.end.close()
    else:  # nothing else would run the callbacks that close() waits for
        loop.run_until_complete(client.close())


@pytest.fixture(scope="session")
def redis_container() -> Iterator[ServerContainer]:
    """A Redis in Docker."""
    yield from _container("redis")


@pytest.fixture(scope="session")
def etcd_container() -> Iterator[ServerContainer]:
    """An etcd in Docker."""
    yield from _container("etcd")


@pytest.fixture(scope="session")
def zookeeper_container() -> Iterator[ServerContainer]:
    """A ZooKeeper in Docker."""
    yield from _container("zookeeper")


@pytest.fixture(scope="session")
def consul_container() -> Iterator[ServerContainer]:
    """A Consul agent in Docker that is a server of its own."""
    yield from _container("consul")


def _container(kind: Kind) -> Iterator[ServerContainer]:
    from multilock.testing.containers import container

    with container(kind) as server:
        yield server
