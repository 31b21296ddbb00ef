"""The fixtures of the pytest plugin that cause faults, and those that record beliefs. They always clean up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import RedisServer

pytest_plugins = ["pytester"]

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:asyncio")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*QUIET, *arguments)


FAULTS = """
import multilock
import pytest

def test_the_client_speaks_through_it(multilock_client, multilock_faults, multilock_url):
    assert multilock_faults.url == multilock_url
    multilock_client.ping()
    assert multilock_faults.connections() > 0
    lost = multilock_faults.drop_reply_after(1, b"PING")
    multilock_client.ping()
    with pytest.raises(multilock.BackendUnavailable):
        multilock_client.ping()
    assert lost.happened
    multilock_faults.cut()
    multilock_faults.delay(0.01)
    multilock_client.lock("n").acquire(10).release()
    multilock_faults.heal()

def test_what_it_holds_is_given_back_though_the_network_is_left_broken(multilock_client, multilock_faults):
    lease = multilock_client.lock("left").acquire(10)
    multilock_faults.black_hole()
    raise RuntimeError("it fails too")

def test_it_is_free_again(multilock_client):
    assert multilock_client.lock("left").try_acquire(10)

def test_asked_for_too_late(multilock_client, request):
    request.getfixturevalue("multilock_faults")

@pytest.mark.parametrize("multilock_url", ["memory://mine"])
def test_without_a_network_of_its_own(multilock_url, multilock_faults):
    pass

@pytest.fixture
def service(multilock_faults, multilock_url):
    with multilock.connect(multilock_url) as client:
        yield client

def test_a_fixture_may_ask_for_it(service, multilock_faults):
    service.ping()
    assert multilock_faults.connections() > 0
"""


def test_the_faults_work_on_a_real_server(pytester: pytest.Pytester, redis_url: str) -> None:
    pytester.makepyfile(FAULTS)
    result = run(pytester, "--multilock-url", redis_url)
    result.assert_outcomes(passed=3, failed=2, errors=1)
    result.stdout.fnmatch_lines(["multilock_faults was set up after multilock_url: name it among the arguments *"])


def test_tests_of_network_faults_are_skipped_without_a_network(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile("def test(multilock_faults, multilock_client): raise RuntimeError")
    urls = ("--multilock-url", "memory://", "--multilock-url", f"sqlite://{tmp_path}/locks.db")
    result = run(pytester, *urls, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines_random(["*memory:// uses no network", "*sqlite:// uses no network*"])


DIES = """
import os, signal

def test_the_server_dies_while_it_holds(multilock_client, multilock_faults, multilock_believers):
    multilock_client.lock("n").acquire(10)
    os.kill({pid}, signal.SIGKILL)

def test_another_one(multilock_client):
    multilock_client.lock("n").acquire(1)
"""


@pytest.mark.timeout(120)
def test_the_end_of_a_test_is_bounded_even_if_its_server_is_dead(
    pytester: pytest.Pytester, redis_server: RedisServer
) -> None:
    pytester.makepyfile(DIES.format(pid=redis_server.pid))
    result = run(pytester, "--multilock-url", redis_server.url, "--multilock-compare")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["redis: locks left under multilock-test/* could not be removed (BackendUnavailable)"])


BELIEVERS = """
import contextlib
import multilock
import pytest

@contextlib.contextmanager
def overlap(believers):
    '''Two stores that are one name for whoever looks at scheme, prefix and name.'''
    with multilock.connect("memory://one") as one, multilock.connect("memory://two") as two:
        believers.watch(one)
        believers.watch(two)
        with one.lock("n"), two.lock("n"):
            while not any(broken.startswith("O1") for broken in believers.judge().broken):
                pass
            yield

def test_apart(multilock_client, multilock_believers):
    for _ in range(2):
        with multilock_client.lock("n"):
            pass
    assert multilock_believers.judge().kept == 1

def test_overlap(multilock_believers):
    with overlap(multilock_believers):
        pass

def test_overlap_of_a_test_that_fails(multilock_believers):
    with overlap(multilock_believers):
        raise RuntimeError("it fails by itself")

@pytest.fixture
def late(multilock_believers):
    yield
    with overlap(multilock_believers):
        pass

def test_overlap_after_the_end(late, multilock_client):
    with multilock_client.lock("other"):
        pass

def test_nobody(multilock_client, multilock_believers):
    pass

def test_asked_for_late(multilock_client, request):
    believers = request.getfixturevalue("multilock_believers")
    with multilock_client.lock("n"):
        pass
    assert believers.judge().beliefs == 1
"""


def test_overlapping_beliefs_fail_the_test_and_missing_beliefs_prove_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_user=BELIEVERS)
    result = run(pytester, "-rA")
    result.assert_outcomes(passed=3, failed=3, errors=1)
    result.stdout.re_match_lines_random(
        [
            r"PASSED test_user.py::test_apart\[memory\]",
            r"FAILED test_user.py::test_overlap\b.*",
            r"O1 memory:multilock/n: two holders for .*",
            r"ERROR test_user.py::test_overlap_after_the_end.*",
            r"FAILED test_user.py::test_overlap_of_a_test_that_fails - RuntimeError: it fai.*",
            r"multilock_believers did not see a held lock: .*",
            r"PASSED test_user.py::test_asked_for_late\[memory\]",
        ]
    )


UNDECIDED = """
import multilock
import pytest
from pathlib import Path
from multilock.testing import Helper, hear, pause, say
from multilock.testing.beliefs import Believers

def hold(url, path):
    with multilock.connect(url, ttl=1.0) as client:
        Believers(path).watch(client)
        client.lock("n").acquire()
        say("held")
        hear()

@pytest.fixture
def helper(multilock_url, multilock_believers):
    with Helper(f"{__name__}:hold", multilock_url, multilock_believers.path) as helper:
        yield helper
        state = Path(f"/proc/{helper.pid}/stat").read_text().rpartition(")")[2].split()[0]
        Path("state").write_text(state)

def test_it(multilock_client, helper):
    helper.wait_for("held", 40)
    pause(helper)  # and nobody says whether it believes in it still when it continues
    multilock_client.lock("n").acquire(40)
"""


@pytest.mark.timeout(120)
def test_an_unknown_result_is_not_a_pass_and_paused_processes_resume(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(test_user=UNDECIDED)
    result = run(pytester, "--multilock-url", f"sqlite://{tmp_path}/locks.db", "--multilock-compare")
    result.assert_outcomes(skipped=1)
    result.stdout.re_match_lines(
        [
            r"test_user.py::test_it\s+undecided \d",
            r"test_user.py::test_it on sqlite is UNDECIDED: .* the end of the first holder's belief was not seen",
        ]
    )
    assert (pytester.path / "state").read_text() != "T"


ANYIO = """
import asyncio
import pytest

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.anyio
async def test_of_anyio(multilock_async_client, multilock_believers):
    async with multilock_async_client.lock("n"):
        pass
    await multilock_async_client.lock("held at the end").acquire()

@pytest.mark.anyio
async def test_again(multilock_async_client):
    assert await multilock_async_client.lock("held at the end").try_acquire()

def test_of_nobody(multilock_async_client, multilock_believers):
    async def use():
        async with multilock_async_client.lock("n"):
            pass
    asyncio.run(use())
"""


def test_asyncio_tests_run_with_and_without_a_plugin_for_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ANYIO)
    run(pytester, "-W", "error").assert_outcomes(passed=3)


PYTEST_ASYNCIO = """
import pytest

@pytest.mark.asyncio
async def test_one_loop(multilock_async_client, multilock_believers):
    async with multilock_async_client.lock("n"):
        pass
    await multilock_async_client.lock("held at the end").acquire()

@pytest.mark.asyncio
async def test_another_loop(multilock_async_client):
    assert await multilock_async_client.lock("held at the end").try_acquire()
"""


def test_asyncio_tests_of_pytest_asyncio_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PYTEST_ASYNCIO)
    scope = "asyncio_default_fixture_loop_scope=function"
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", scope, "-W", "error").assert_outcomes(passed=2)


HYPOTHESIS = """
from hypothesis import HealthCheck, given, settings, strategies

@settings(max_examples=10, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(times=strategies.integers(1, 3))
def test_as_often_as_hypothesis_likes(multilock_client, multilock_believers, times):
    for _ in range(times):
        with multilock_client.lock("n") as lease:
            assert lease.is_held()
"""


def test_a_test_of_hypothesis_has_one_client_for_all_examples(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HYPOTHESIS)
    run(pytester, "--multilock-compare").assert_outcomes(passed=1)
