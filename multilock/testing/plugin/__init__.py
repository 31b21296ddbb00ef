"""The pytest plugin: run a test on every given backend, and show the results side by side.

    pytest --multilock-url redis://localhost:6379/0 --multilock-url sqlite:////var/tmp/locks.db --multilock-compare

All locks of a run have their own prefix, so that tests never affect anything else on the servers. The URLs come from
the option ``--multilock-url``, else from the ini value ``multilock_urls`` (one URL a line). The default is
``memory://``.

The fixtures ``redis_container``, ``etcd_container``, ``zookeeper_container``, ``consul_container`` and
``postgresql_container`` are servers in Docker (`multilock.testing.containers`). Each server is started when a test
first asks for it, and all tests of the run share it, so each test should use its own lock names. A fixture whose server
cannot be started raises `ContainerError`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from multilock.testing.plugin.fixtures import (
    BELIEVERS,
    SITE,
    consul_container,
    etcd_container,
    multilock_async_client,
    multilock_believers,
    multilock_client,
    multilock_faults,
    multilock_url,
    postgresql_container,
    redis_container,
    wanted,
    zookeeper_container,
)
from multilock.testing.plugin.matrix import UNDECIDED
from multilock.testing.plugin.sites import SITES, Site, Sites, new_run

if TYPE_CHECKING:
    from multilock.testing.beliefs import Believers

pytest.register_assert_rewrite("multilock.testing.conformance")

__all__ = [
    "consul_container",
    "etcd_container",
    "multilock_async_client",
    "multilock_believers",
    "multilock_client",
    "multilock_faults",
    "multilock_url",
    "postgresql_container",
    "redis_container",
    "zookeeper_container",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("multilock")
    group.addoption(
        "--multilock-url",
        action="append",
        default=[],
        metavar="URL",
        dest="multilock_urls",
        help="run tests with multilock_url, multilock_client or multilock_async_client on this backend (repeatable)",
    )
    group.addoption(
        "--multilock-compare",
        action="store_true",
        help="show a matrix at the end: the result of each test on each backend, and the differences",
    )
    group.addoption(
        "--multilock-report",
        metavar="DIR",
        help="write this matrix as matrix.json and matrix.html into DIR",
    )
    group.addoption(
        "--multilock-missing",
        choices=["fail", "skip"],
        default="fail",
        help="fail or skip the tests of a backend that does not answer (default: fail)",
    )
    parser.addini("multilock_urls", "URLs of the backends to test on, one a line", type="linelist", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Read the URLs, and register the mark and the results."""
    config.addinivalue_line(
        "markers",
        'multilock(requires={"fencing"}): run this test on backends with these capabilities, skip it on others',
    )
    urls = config.getoption("multilock_urls") or config.getini("multilock_urls")
    _check(urls)
    worker = getattr(config, "workerinput", None)  # None except in an xdist worker
    run = worker["multilock_run"] if worker else new_run()
    config.stash[SITES] = Sites(urls or ["memory://"], run, worker["workerid"] if worker else "main")
    if worker is None:
        from multilock.testing.plugin.results import Results

        config.pluginmanager.register(Results(config, run), "multilock-results")


def _check(urls: list[str]) -> None:
    """Check the URLs as far as that is possible without a client library. Raises UsageError."""
    if urls:
        from multilock import ConfigurationError
        from multilock.config import resolve

        try:
            for url in urls:
                resolve(url)
        except ConfigurationError as error:
            raise pytest.UsageError(f"--multilock-url, multilock_urls: {error}") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with ``multilock_url`` once for each backend."""
    wanted(metafunc.definition)  # reports a wrong mark before any test runs
    if "multilock_url" in metafunc.fixturenames and "multilock_url" not in _parametrized_by(metafunc.definition):
        sites = metafunc.config.stash[SITES].all
        metafunc.parametrize("multilock_url", sites, ids=[site.label for site in sites], indirect=True)


def _parametrized_by(test: pytest.Item) -> set[str]:
    """Return the arguments to which the test itself gives values."""
    named: set[str] = set()
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        named.update(names.replace(",", " ").split() if isinstance(names, str) else names)
    return named


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge a test that uses ``multilock_believers`` before it counts as passed."""
    try:
        result = yield
    except BaseException:
        if (believers := item.stash.get(BELIEVERS, None)) and (broken := believers.judge().broken):
            item.add_report_section("call", "multilock", "\n".join(broken))
            del item.stash[BELIEVERS]  # reported now
        raise
    if (believers := item.stash.get(BELIEVERS, None)) is not None:
        _judge(believers, item)
    return result


def _judge(believers: Believers, item: pytest.Item) -> None:
    verdict = believers.judge()
    if verdict.broken:
        del item.stash[BELIEVERS]  # reported now
        pytest.fail("; ".join(verdict.broken), pytrace=False)
    if not verdict.beliefs:
        pytest.fail(
            "multilock_believers did not see a held lock: use multilock_client, or watch(client) in every process that "
            "holds one",
            pytrace=False,
        )
    if verdict.undecided:
        pytest.skip(f"{UNDECIDED}: {'; '.join(verdict.undecided)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let frozen processes continue, because a fixture that waits for their end would wait forever."""
    if (pausing := sys.modules.get("multilock.testing.pausing")) is not None:
        pausing.resume_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the backend of the test to the report, which an xdist worker sends to the controller."""
    report = yield
    site, why = item.stash.get(SITE, (None, ""))
    if site is None and (callspec := getattr(item, "callspec", None)) is not None:
        site = callspec.params.get("multilock_url")
    if isinstance(site, Site) and site.number >= 0:
        if call.when == "call" and report.skipped and call.excinfo is not None:
            why = UNDECIDED if str(call.excinfo.value).startswith(UNDECIDED) else why
        reason = item.config.stash[SITES].scrub(_reason(report)) if report.outcome != "passed" else ""
        report.multilock = {"number": site.number, "why": why, "reason": reason}  # type: ignore[attr-defined]
    return report


def _reason(report: pytest.TestReport) -> str:
    """Return why the test failed or was skipped, in one line."""
    told: Any = report.longrepr
    if isinstance(told, tuple):  # a skipped test: place and reason
        text = str(told[2]).removeprefix("Skipped: ")
    else:
        crash = getattr(told, "reprcrash", None)
        text = crash.message if crash is not None else str(told or "")
    text = getattr(report, "wasxfail", "") or text
    return next((line.strip() for line in text.removeprefix("Failed: ").splitlines() if line.strip()), "")
