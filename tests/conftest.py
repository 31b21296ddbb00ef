"""What all tests share: the servers."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
from _pytest.logging import LogCaptureHandler

from multilock import telling
from tests.oracles import is_of_conformance, no_thread_is_missing_or_dead, threads_may_die
from tests.servers import RedisServer, address

__all__ = ["no_thread_is_missing_or_dead", "threads_may_die"]


def pytest_configure() -> None:
    """What runs the tests in the background ignores these signals, and so would every process that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # The other tests' servers have the processor too: an example that takes long is no finding.
    hypothesis.settings.register_profile(
        "beside servers",
        parent=hypothesis.settings(),
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("beside servers")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, else one worker has it left when the others have ended."""
    for item in items:
        if is_of_conformance(item):
            item.add_marker(pytest.mark.oracle)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


class _Told(pytest.LogCaptureFixture):  # type: ignore[misc]
    """Whoever looks has first all told that was said before: handlers are called by a thread of their own."""

    @property
    def handler(self) -> LogCaptureHandler:
        telling.flush(10)
        return super().handler


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    telling.flush(10)  # what other tests said is none of this one's
    caplog.__class__ = _Told
    return caplog


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis shared by all tests: talk to it under names of your own, never stop, pause or empty it."""
    with address("redis") as url:
        yield url


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this test's own, to be paused, killed and emptied at will."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()
