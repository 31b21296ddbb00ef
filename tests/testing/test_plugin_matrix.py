"""The pytest plugin shows its matrix of tests and backends in the terminal and in files. Marks and absent servers are
tested too."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multilock.testing.plugin import matrix as matrix_module
from multilock.testing.plugin.matrix import Cell, Matrix, MatrixColumn, row_of
from multilock.testing.plugin.sites import Sites
from tests.compare.test_run import unfit

pytest_plugins = ["pytester"]

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:asyncio")
TWO = ("--multilock-url", "memory://one", "--multilock-url", "memory://two")
NOBODY = "redis://user:hush-hush@127.0.0.1:{}/0"


@pytest.fixture
def nobody() -> Iterator[str]:
    """Return the URL of an absent server: the port is reserved, and no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield NOBODY.format(taken.getsockname()[1])


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*QUIET, *arguments)


def lines_of(result: pytest.RunResult) -> dict[str, list[str]]:
    """Return the outcomes of each test from the matrix in the terminal."""
    said = [line.split() for line in result.outlines]
    return {words[0]: words[1:] for words in said if words and "::" in words[0]}


def outcomes(folder: Path) -> dict[str, list[str | None]]:
    """Return the outcomes of each test from matrix.json."""
    data = json.loads((folder / "matrix.json").read_text())
    return {
        test["name"].partition("::")[2]: [cell and cell["outcome"] for cell in test["results"]]
        for test in data["tests"]
    }


EVERY = """
import pytest

def where(url):
    return "two" in url

def test_alike(multilock_client):
    pass

def test_fails_on_one(multilock_url):
    assert not where(multilock_url), "not here"

@pytest.mark.parametrize("number", [-1, 1])
def test_parametrised(multilock_client, number):
    if number < 0:
        pytest.skip("nothing below zero")

class TestOfClass:
    @pytest.mark.xfail(reason="known")
    def test_expected(self, multilock_url):
        assert where(multilock_url)

@pytest.fixture
def breaks(multilock_url):
    yield
    assert not where(multilock_url)

def test_breaks_afterwards(breaks):
    pass

def test_elsewhere():
    pass

@pytest.mark.multilock(requires={"cross_host"})
def test_lacks(multilock_client):
    pass
"""

EXPECTED = {
    "test_alike": ["passed", "passed"],
    "test_fails_on_one": ["passed", "failed"],
    "test_parametrised[-1]": ["skipped", "skipped"],
    "test_parametrised[1]": ["passed", "passed"],
    "TestOfClass::test_expected": ["xfailed", "xpassed"],
    "test_breaks_afterwards": ["passed", "error"],
    "test_lacks": ["lacks", "lacks"],
}


def test_the_matrix_shows_each_outcome_on_each_backend_and_marks_differences(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_user=EVERY)
    result = run(pytester, *TWO, "--multilock-compare", "--multilock-report", "out/here")
    folder = pytester.path / "out" / "here"
    assert outcomes(folder) == EXPECTED
    data = json.loads((folder / "matrix.json").read_text())
    schema = json.loads(Path(matrix_module.__file__).with_name("matrix.schema.json").read_text())
    assert list(unfit(data, schema)) == []
    assert {each["test"].partition("::")[2]: each["what"] for each in data["differences"]} == {
        "test_fails_on_one": "passed on 0-memory; failed on 1-memory (AssertionError: not here)",
        "TestOfClass::test_expected": "xfailed on 0-memory (known); xpassed on 1-memory",
        "test_breaks_afterwards": "passed on 0-memory; error on 1-memory (AssertionError: assert not True)",
    }
    result.stdout.re_match_lines(
        [
            r"0-memory: memory://one",
            r"1-memory: memory://two",
            r"test\s+0-memory\s+1-memory",
            r"test_user.py::test_fails_on_one\s+passed \d.\d\ds\s+failed \d.\d\ds",
            r"tests with different results:",
            r"  test_user.py::test_fails_on_one: passed on 0-memory; failed on 1-memory \(AssertionError: not here\)",
            r"written to .*matrix.json and matrix.html",
        ],
    )
    result.stdout.no_fnmatch_line("*PytestUnknownMarkWarning*")
    page = (folder / "matrix.html").read_text()
    assert "lacks" in page
    assert "passed on 0-memory; failed on 1-memory" in page


def test_without_options_the_plugin_prints_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(multilock_client): pass")
    result = run(pytester, "--strict-markers")
    result.stdout.no_fnmatch_line("*multilock:*")


def test_tests_that_were_not_run_have_no_outcome(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_user=EVERY)
    result = run(pytester, *TWO, "--multilock-compare", "-k", "alike and 0-memory or 1-memory and parametrised")
    assert lines_of(result) == {
        "test_user.py::test_alike": ["passed", lines_of(result)["test_user.py::test_alike"][1], "-"],
        "test_user.py::test_parametrised[-1]": ["-", "skipped", *_seconds(result, "test_parametrised[-1]")],
        "test_user.py::test_parametrised[1]": ["-", "passed", *_seconds(result, "test_parametrised[1]")],
    }
    result.stdout.fnmatch_lines(["no test differs between them"])


def _seconds(result: pytest.RunResult, test: str) -> list[str]:
    return lines_of(result)[f"test_user.py::{test}"][2:]


@pytest.mark.parametrize("option", [("--collect-only",), ("-k", "nothing"), ("--markers",), ("--fixtures",)])
def test_a_run_without_tests_prints_and_writes_nothing(pytester: pytest.Pytester, option: tuple[str, ...]) -> None:
    pytester.makepyfile(test_user=EVERY)
    result = run(pytester, *TWO, "--multilock-compare", "--multilock-report", "out", *option)
    result.stdout.no_fnmatch_line("*tests x backends*")
    assert not (pytester.path / "out" / "matrix.json").exists()


def test_the_plugin_needs_no_other_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(multilock_client): pass")
    without = [
        f"no:{name}" for name in ("xdist", "anyio", "skipping", "junitxml", "timeout", "logging", "hypothesispytest")
    ]
    result = run(pytester, "--multilock-compare", *(word for name in without for word in ("-p", name)))
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines([r"test_the_plugin_needs_no_other_plugin.py::test\s+passed"])
    run(pytester, "-p", "no:terminal", "--multilock-compare")


def test_in_a_narrow_terminal_a_long_name_has_a_line_of_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    pytester.makepyfile(test_user=f"def test_{'long_' * 10}(multilock_client): pass")
    result = run(pytester, *TWO, "--multilock-compare")
    result.stdout.re_match_lines([r"test_user.py::test_long_\w+$", r"\s+passed \d.\d\ds\s+passed \d.\d\ds\s*$"])


# ---- marks


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ('requires={"fencng"}', "unknown capability 'fencng' in requires: known are cross_host, fair, fencing"),
        ('requires="fencing"', "requires must be a collection of names"),
        ('"fencing"', "write it as @pytest.mark.multilock(requires="),
        ('require={"fencing"}', "write it as @pytest.mark.multilock(requires="),
        ("", "write it as @pytest.mark.multilock(requires="),
    ],
)
def test_a_misspelled_mark_is_reported_before_anything_runs(pytester: pytest.Pytester, mark: str, says: str) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.multilock({mark})\ndef test(multilock_client): pass\ndef test_other(): pass"
    )
    result = run(pytester)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert f"test has a wrong mark multilock: {says}" in result.stdout.str()


def test_marks_of_class_and_module_are_combined(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import unittest
        pytestmark = pytest.mark.multilock(requires={"fencing"})

        @pytest.mark.multilock(requires={"cross_host"})
        class TestClass:
            def test_skipped(self, multilock_url): pass

        class OfUnittest(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def client(self, multilock_client): pass

            @pytest.mark.multilock(requires={"cross_host"})
            def test_skipped(self): pass

        def test_runs(multilock_url): pass
        """
    )
    result = run(pytester, "-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED * memory:// lacks cross_host"])


# ---- absent servers


def test_a_server_that_is_down_fails_its_tests_at_once_with_a_remedy(pytester: pytest.Pytester, nobody: str) -> None:
    pytester.makepyfile(test_user=EVERY)
    result = run(pytester, "--multilock-url", nobody, "--multilock-compare", "-k", "alike or parametrised")
    result.assert_outcomes(errors=3)
    result.stdout.re_match_lines(
        [
            r"redis://\*\*\*@127.0.0.1:\d+/0 does not answer \(",
            r"Start this server, correct --multilock-url, or skip its tests with --multilock-missing=skip.",
            r"redis: 3 tests did NOT RUN \(",
        ]
    )
    assert "hush" not in result.stdout.str()


def test_omitting_the_option_makes_no_difference(pytester: pytest.Pytester, nobody: str) -> None:
    pytester.makepyfile(test_user=EVERY)
    options = ("--multilock-url", "memory://", "--multilock-url", nobody, "--multilock-missing=skip")
    result = run(pytester, *options, "--multilock-compare", "--multilock-report", "out", "-k", "alike or lacks")
    result.assert_outcomes(passed=1, skipped=3)
    assert outcomes(pytester.path / "out") == {"test_alike": ["passed", "away"], "test_lacks": ["lacks", "away"]}
    result.stdout.fnmatch_lines(["no test differs between them", "1-redis: 2 tests did NOT RUN (*"])


def test_each_server_is_asked_once(pytester: pytest.Pytester, nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import multilock

    asked: list[multilock.Client] = []
    ping = multilock.Client.ping

    def count(client: multilock.Client) -> float:
        asked.append(client)
        return ping(client)

    monkeypatch.setattr(multilock.Client, "ping", count)
    pytester.makepyfile(test_user=EVERY)
    run(pytester, "--multilock-url", nobody)
    assert len(asked) == 1


def test_a_malformed_url_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_user=EVERY)
    result = run(pytester, "--multilock-url", "redis:/user:hush-hush@h")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --multilock-url, multilock_urls: *is not a URL*"])
    assert "hush" not in result.stderr.str() + result.stdout.str()


def test_an_unknown_backend_fails_its_tests_even_if_missing_servers_are_allowed(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("def test(multilock_client): pass")
    result = run(pytester, "--multilock-url", "nosuch://h", "--multilock-missing=skip")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["nosuch://h: unknown scheme 'nosuch': the known schemes are *"])


# ---- secrets


def test_no_password_is_shown_even_if_two_urls_differ_only_in_it(pytester: pytest.Pytester, redis_url: str) -> None:
    address = redis_url.partition("://")[2]
    one, other = (f"redis://:{word}@{address}" for word in ("hush-one", "hush-two"))
    pytester.makepyfile(
        """
        import multilock

        def test(multilock_url):
            assert multilock_url == "other"

        def test_shows(multilock_url):
            raise RuntimeError(f"no luck with {str(multilock_url)}, {multilock_url.partition('@')[0]}")
        """
    )
    # This server has no password. It refuses the password of the URL, and pytest shows its reply.
    options = ("--multilock-url", one, "--multilock-url", other, "--setup-show", "--showlocals")
    result = run(pytester, *options, "--multilock-compare", "--multilock-report", "out", "-k", "not shows")
    folder = pytester.path / "out"
    said = result.stdout.str() + (folder / "matrix.json").read_text() + (folder / "matrix.html").read_text()
    assert "hush" not in said
    data = json.loads((folder / "matrix.json").read_text())
    assert [backend["label"] for backend in data["backends"]] == ["0-redis", "1-redis"]
    assert len({backend["url"] for backend in data["backends"]}) == 1


def test_a_secret_in_the_reason_of_a_failure_is_not_shown() -> None:
    sites = Sites(["redis://user:hush%21pass@h?token=hush-token&ttl=5", "zk://h"], "run", "main")
    said = "as user:hush!pass at redis://user:hush%21pass@h with hush-token; http://somebody:else@h; ttl 5"
    assert sites.scrub(said) == "as user:*** at redis://***@h with ***; http://***@h; ttl 5"


def test_text_from_a_test_is_escaped_on_the_page(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(multilock_url): raise RuntimeError('<script>\\ud800</script>')")
    run(pytester, "--multilock-report", "out")
    assert "<script>" in (pytester.path / "out" / "matrix.json").read_text()
    assert "<script" not in (pytester.path / "out" / "matrix.html").read_text()


# ---- the ways in which a run may end


def test_a_folder_that_cannot_be_written_is_reported_before_anything_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_user="print('imported')")
    (pytester.path / "file").write_text("")
    for folder in ("file", "file/below"):
        result = run(pytester, "--multilock-report", folder)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: --multilock-report: * cannot be written (*"])
        result.stdout.no_fnmatch_line("*imported*")


def test_a_run_that_stopped_early_is_marked_partial(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_first(multilock_client): pass
        def test_interrupted(multilock_client): raise KeyboardInterrupt
        def test_never(multilock_client): pass
        """
    )
    options = (*QUIET, "--multilock-report", "out", "--multilock-compare")
    result = pytester.runpytest_inprocess(*options, no_reraise_ctrlc=True)
    result.stdout.fnmatch_lines(["partial: interrupted"])
    assert json.loads((pytester.path / "out" / "matrix.json").read_text())["partial"] == "interrupted"
    assert outcomes(pytester.path / "out") == {"test_first": ["passed"]}
    pytester.makepyfile(test_user=EVERY)
    run(pytester, *TWO, "-x", "--multilock-report", "out", "test_user.py")
    assert "stopping after 1 failures" in json.loads((pytester.path / "out" / "matrix.json").read_text())["partial"]


XDIST = """
import os
import pytest

@pytest.mark.parametrize("letter", "abcd")
def test_runs(multilock_client, letter):
    with multilock_client.lock("n", ttl=60):
        pass

def test_crashes(multilock_url, multilock_client):
    if "crash" in multilock_url:
        multilock_client.lock("held").acquire()
        os._exit(1)

@pytest.mark.multilock(requires={"cross_host"})
def test_lacks(multilock_client):
    pass
"""


@pytest.mark.timeout(240)
def test_xdist_workers_form_one_run_and_a_crash_is_reported(pytester: pytest.Pytester, redis_url: str) -> None:
    pytester.makepyfile(test_user=XDIST)
    urls = ["memory://", f"{redis_url}?identity=crash"]
    command = [sys.executable, "-m", "pytest", *QUIET, "-n2", "--multilock-compare", "--multilock-report", "out"]
    result = pytester.run(*command, *(word for url in urls for word in ("--multilock-url", url)))
    assert outcomes(pytester.path / "out") == {
        **{f"test_runs[{letter}]": ["passed", "passed"] for letter in "abcd"},
        "test_crashes": ["passed", "crashed"],
        "test_lacks": ["lacks", "passed"],
    }
    result.stdout.re_match_lines([r"  test_user.py::test_crashes: passed on 0-memory; crashed on 1-redis "])
    assert_nothing_left(redis_url)


def assert_nothing_left(url: str) -> None:
    import multilock

    with multilock.connect(url, prefix="multilock-test/") as client:
        assert [info.name for info in client.inspect_all() if info.identity == "crash"] == []


LEAVES = """
import os
import multilock

def test_leaves_what_nobody_gives_back(multilock_url):
    if not (child := os.fork()):
        multilock.connect(multilock_url, identity="crash").lock("left", ttl=60).acquire(10)
        os._exit(0)
    os.waitpid(child, 0)
    with multilock.connect(multilock_url) as client:
        assert client.inspect("left")
"""


def test_locks_left_by_a_run_are_removed_at_its_end(pytester: pytest.Pytester, redis_url: str) -> None:
    pytester.makepyfile(test_user=LEAVES)
    run(pytester, "--multilock-url", redis_url).assert_outcomes(passed=1)
    assert_nothing_left(redis_url)


@pytest.mark.timeout(240)
def test_an_interrupt_leaves_only_a_report(pytester: pytest.Pytester, redis_url: str) -> None:
    pytester.makepyfile(
        test_user="""
        import os, signal, time

        def test_first(multilock_client):
            multilock_client.lock("n").acquire()

        def test_hangs(multilock_client):
            multilock_client.lock("held").acquire()
            open("hangs", "w").close()
            time.sleep(600)
        """
    )
    command = [sys.executable, "-m", "pytest", *QUIET, "--multilock-url", f"{redis_url}?identity=crash"]
    process = subprocess.Popen([*command, "--multilock-report", "out"], cwd=pytester.path, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 100
        while not (pytester.path / "hangs").exists():
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == pytest.ExitCode.INTERRUPTED
    finally:
        process.kill()
        process.wait()
    assert outcomes(pytester.path / "out") == {"test_first": ["passed"]}
    assert_nothing_left(redis_url)


def test_a_test_that_hangs_has_failed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time

        def test_hangs(multilock_client):
            multilock_client.lock("n").acquire()
            time.sleep(600)
        """
    )
    result = run(pytester, "--multilock-compare", "-o", "timeout=2", "-o", "timeout_method=signal")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"\S+::test_hangs\s+failed"])


# ---- the table itself


@pytest.mark.parametrize(
    ("nodeid", "label", "row"),
    [
        ("t.py::test", "redis", "t.py::test"),
        ("t.py::test[redis]", "redis", "t.py::test"),
        ("t.py::test[0-redis-a]", "0-redis", "t.py::test[a]"),
        ("t.py::test[0-redis--1]", "0-redis", "t.py::test[-1]"),
        ("t.py::test[a-0-redis]", "0-redis", "t.py::test[a]"),
        ("t.py::test[a-0-redis-b[1]]", "0-redis", "t.py::test[a-b[1]]"),
        ("t.py::test[10-redis]", "0-redis", "t.py::test[10-redis]"),
        ("t.py::test[0-redis]@group", "0-redis", "t.py::test@group"),
    ],
)
def test_a_row_is_a_test_without_its_backend(nodeid: str, label: str, row: str) -> None:
    assert row_of(nodeid, label) == row


def test_backends_with_equal_results_are_named_together() -> None:
    matrix = Matrix([MatrixColumn(label, "") for label in ("a", "b", "c", "d")])
    for column, outcome in enumerate(("passed", "failed", "passed", "away")):
        matrix.put("t", column, Cell(outcome, "x" if outcome == "failed" else ""))
    assert matrix.differences() == [("t", "passed on a, c; failed on b (x)")]
    assert matrix.counts() == {"passed": 2, "failed": 1, "away": 1}
    data: dict[str, Any] = matrix.data()
    assert data["backends"][3]["away"] is None
