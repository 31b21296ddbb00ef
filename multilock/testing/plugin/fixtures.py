"""The fixtures of the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from multilock.testing.plugin.matrix import AWAY, LACKS
from multilock.testing.plugin.sites import SITES, Site, Sites

if TYPE_CHECKING:
    from multilock import AsyncClient, Client
    from multilock.testing import Network
    from multilock.testing.beliefs import Believers
    from multilock.testing.containers import Kind, ServerContainer

__all__ = [
    "BELIEVERS",
    "SITE",
    "consul_container",
    "etcd_container",
    "multilock_async_client",
    "multilock_believers",
    "multilock_client",
    "multilock_faults",
    "multilock_url",
    "postgresql_container",
    "redis_container",
    "wanted",
    "zookeeper_container",
]

# Stored with each test by pytest.
SITE = pytest.StashKey[tuple[Site, str]]()  # the backend, and why the test does not run there: "lacks", "away" or ""
BELIEVERS = pytest.StashKey["Believers"]()
_NETWORK = pytest.StashKey["Network"]()
_CLIENTS = pytest.StashKey["list[Client | AsyncClient]"]()


@pytest.fixture
def multilock_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the backend on which the test runs, with a prefix of its own for each test run and xdist worker.

    A URL that has a prefix keeps it, and ``memory://`` needs none.

    A test that pytest cannot repeat runs on the first URL: one of ``unittest.TestCase``, or one that gets its fixtures
    with ``request.getfixturevalue``.
    """
    sites = request.config.stash[SITES]
    site = getattr(request, "param", sites.all[0])
    if not isinstance(site, Site):  # the test itself gives the URL, by indirect parametrization
        site = Site(-1, "", str(site))
    url = _place(site, sites, request.node)
    if "multilock_faults" not in request.fixturenames:
        yield url
        return
    from multilock.testing.network import Network, why_no_network

    if why := why_no_network(url):
        pytest.skip(why)
    network = request.node.stash[_NETWORK] = Network(url)
    try:
        yield type(url)(network.url)
    finally:
        network.close()


def _place(site: Site, sites: Sites, test: pytest.Item) -> str:
    """Return the URL if the test can run on this backend. Otherwise skip the test, or let it fail."""
    from multilock import MultilockError

    test.stash[SITE] = site, ""
    wrong = away = ""
    lacking: list[str] = []
    try:
        capabilities = sites.capabilities(site)
        lacking = [name for name in sorted(wanted(test)) if not getattr(capabilities, name)]
        away = "" if lacking else sites.away(site)
    except (MultilockError, pytest.Collector.CollectError) as error:
        wrong = f"{site.shown}: {sites.scrub(str(error))}"
    if wrong:
        pytest.fail(wrong, pytrace=False)
    if lacking:
        test.stash[SITE] = site, LACKS
        pytest.skip(f"{site.shown} lacks {', '.join(lacking)}")
    if away:
        test.stash[SITE] = site, AWAY
        said = f"{site.shown} does not answer ({away})"
        if test.config.getoption("multilock_missing") == "skip":
            pytest.skip(said)
        remedy = "Start this server, correct --multilock-url, or skip its tests with --multilock-missing=skip."
        pytest.fail(f"{said}\n{remedy}", pytrace=False)
    return site.with_prefix(sites.prefix)


def wanted(test: pytest.Item) -> frozenset[str]:
    """Return the capabilities that the marks of a test name. Raises CollectError for an unknown one."""
    from multilock import ConfigurationError
    from multilock.config import resolve

    names: frozenset[str] = frozenset()
    for mark in test.iter_markers("multilock"):
        wrong = ""
        try:
            if mark.args or mark.kwargs.keys() != {"requires"}:
                wrong = 'write it as @pytest.mark.multilock(requires={"fencing"})'
            else:
                names |= resolve("memory://", requires=mark.kwargs["requires"]).requires
        except (ConfigurationError, TypeError) as error:
            wrong = str(error)
        if wrong:
            raise pytest.Collector.CollectError(f"{test.name} has a wrong mark multilock: {wrong}")
    return names


@pytest.fixture
def multilock_client(request: pytest.FixtureRequest, multilock_url: str) -> Iterator[Client]:
    """A blocking client of the backend at `multilock_url`.

    After the test it is closed, which releases every lease that it still holds.
    """
    import multilock

    with multilock.connect(multilock_url) as client:
        _watch(request, client)
        yield client
        _heal(request)  # end all faults, so that the close reaches the server


@pytest.fixture
def multilock_async_client(request: pytest.FixtureRequest, multilock_url: str) -> Iterator[AsyncClient]:
    """An asyncio client of the backend at `multilock_url`, for the loop that uses it first. It is closed after the
    test.

    The client is made without I/O, and so works under every asyncio plugin. If the test's loop ends before the test
    closes the client, its leases are released without a loop, and their callbacks are not called.
    """
    import multilock
    from multilock.aio.requests import LoopFace

    client = multilock.connect_async(multilock_url)
    _watch(request, client)
    yield client
    _heal(request)
    kernel = client._kernel
    assert isinstance(kernel.face, LoopFace)
    loop = kernel.face.its_loop()
    if loop is None or loop.is_closed() or loop.is_running():
        kernel.end.close()
    else:  # close() waits for callbacks, which only this loop can run
        loop.run_until_complete(client.close())


@pytest.fixture
def multilock_faults(request: pytest.FixtureRequest, multilock_url: str) -> Network:
    """The network between this test and its backend. Its methods cause faults: ``cut()``, ``black_hole()``,
    ``delay(seconds)``, ``drop_reply_after(requests)``. ``heal()`` ends them.

    ``multilock_url`` and the clients use this network, whatever the number of hosts in the URL. The network heals at
    the end of the test. The test is skipped if the backend uses no network (``memory://``, ``sqlite://``, ``unix://``),
    or if clients would bypass a proxy (Sentinel, Cluster).
    """
    network: Network | None = request.node.stash.get(_NETWORK, None)
    if network is None:
        pytest.fail(
            "multilock_faults was set up after multilock_url: name it among the arguments of the test or of a fixture. "
            "multilock_url must be its own fixture or an indirect parameter",
            pytrace=False,
        )
    return network


@pytest.fixture
def multilock_believers(request: pytest.FixtureRequest) -> Iterator[Believers]:
    """A record of when clients believed that they held a lock (`multilock.testing.beliefs.Believers`).

    The record covers ``multilock_client``, ``multilock_async_client``, and every client that is given to
    ``watch(client)``, here or in another process. The test fails if two clients believed at the same time that they
    held one name, or if no client held a lock. If the records cannot decide this, the test is skipped as undecided.
    """
    from multilock.testing.beliefs import Believers

    believers = request.node.stash[BELIEVERS] = Believers()
    try:
        for client in request.node.stash.get(_CLIENTS, []):
            believers.watch(client)
        yield believers
        late = believers.judge().broken if request.node.stash.get(BELIEVERS, None) else ()
    finally:
        believers.close()
    if late:
        pytest.fail("; ".join(late), pytrace=False)


def _watch(request: pytest.FixtureRequest, client: Client | AsyncClient) -> None:
    request.node.stash.setdefault(_CLIENTS, []).append(client)
    if (believers := request.node.stash.get(BELIEVERS, None)) is not None:
        believers.watch(client)


def _heal(request: pytest.FixtureRequest) -> None:
    if (network := request.node.stash.get(_NETWORK, None)) is not None:
        network.heal()


@pytest.fixture(scope="session")
def redis_container() -> Iterator[ServerContainer]:
    """A Redis server in Docker."""
    yield from _container("redis")


@pytest.fixture(scope="session")
def etcd_container() -> Iterator[ServerContainer]:
    """An etcd server in Docker."""
    yield from _container("etcd")


@pytest.fixture(scope="session")
def zookeeper_container() -> Iterator[ServerContainer]:
    """A ZooKeeper server in Docker."""
    yield from _container("zookeeper")


@pytest.fixture(scope="session")
def consul_container() -> Iterator[ServerContainer]:
    """A Consul agent in Docker, which is its own server."""
    yield from _container("consul")


@pytest.fixture(scope="session")
def postgresql_container() -> Iterator[ServerContainer]:
    """A PostgreSQL server in Docker."""
    yield from _container("postgresql")


def _container(kind: Kind) -> Iterator[ServerContainer]:
    from multilock.testing.containers import container

    with container(kind) as server:
        yield server
