"""Fixtures that all tests share: the servers, and log capture."""

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

    A shell that runs the tests in the background makes them ignore these signals, and every process they start would
    inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # The servers of other tests use the processor too, so a slow example is not a finding.
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
    keeps a core busy, while the tests of the other workers wait most of the time. The servers of a folder start in few
    workers, and different workers run different folders at a time.
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
    """Exempt the collected tests from the garbage collector, which would stop all threads while it visits them. It does
    not run during the collection, in which hardly anything becomes garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _Told(pytest.LogCaptureFixture):  # type: ignore[misc]
    """Log capture that first waits for every earlier log line: a separate thread calls the handlers."""

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
    """A Redis that all tests share. Use names of your own, and never stop, pause or empty it."""
    with address("redis") as url:
        yield url


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this test's own. The test may pause, kill and empty it."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()
