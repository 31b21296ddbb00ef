"""Fixtures that all tests share: servers, and log capture."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from _pytest.logging import LogCaptureHandler

from multilock import log_thread
from tests.oracles import is_of_conformance, no_thread_is_missing_or_dead, threads_may_die
from tests.servers import RedisServer, address

__all__ = ["no_thread_is_missing_or_dead", "threads_may_die"]


def pytest_configure() -> None:
    """Restore the default signals and load the hypothesis profile.

    If a shell runs the tests in the background, they ignore these signals, and every process that they start would
    ignore them too.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # A slow example is not a fault, because other tests use the processor too.
    hypothesis.settings.register_profile(
        "beside servers",
        parent=hypothesis.settings(),
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("beside servers")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the first worker begin with all slow modules, and keep the modules of a folder together.

    With ``--dist worksteal`` each worker begins with an equal share of the list. When its share has run, it takes tests
    from the end of another worker's share. So only the first worker runs slow modules, one after another. A slow module
    keeps a core busy, while the tests of the other workers wait most of the time. Because modules of a folder stay
    together, few workers must start the servers of a folder.
    """
    modules: dict[Path, list[pytest.Item]] = {}
    slow: set[Path] = set()
    for item in items:
        if is_of_conformance(item):
            item.add_marker(pytest.mark.oracle)
        modules.setdefault(item.path, []).append(item)
        if item.get_closest_marker("slow"):
            slow.add(item.path)
    folders = {path.parent: place for place, path in reversed(list(enumerate(modules)))}
    order = sorted(modules, key=lambda path: (path not in slow, folders[path.parent]))
    items[:] = [item for path in order for item in modules[path]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the collected tests from the garbage collector, which would stop all threads while it visits them. Disable
    the collector while pytest collects the tests, which makes hardly any garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _Told(pytest.LogCaptureFixture):  # type: ignore[misc]
    """Log capture that first waits until the log thread has handled every earlier log line."""

    @property
    def handler(self) -> LogCaptureHandler:
        log_thread.flush(10)
        return super().handler


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    log_thread.flush(10)  # drop the log lines of earlier tests
    caplog.__class__ = _Told
    return caplog


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis server that all tests share. A test must use its own names, and never stop, pause or empty the server."""
    with address("redis") as url:
        yield url


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis server for this test alone, which the test may pause, kill and empty."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()
