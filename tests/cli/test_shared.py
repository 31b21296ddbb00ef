"""`multilock run --shared` and `--permits`, and how `status` shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

import multilock
from multilock.cli.status import _held, _kind, _watch_json, _watch_lines
from tests.cli.conftest import WITHIN, Run, Start, line_of

READY = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"


def test_commands_that_read_run_together_and_exclude_one_that_writes(start: Start, run: Run, sqlite_url: str) -> None:
    readers = [start("run", "job", "--shared", "--url", sqlite_url, "--", "sh", "-c", READY) for _ in range(2)]
    assert [line_of(reader) for reader in readers] == ["ready"] * 2
    assert run("run", "job", "--timeout", "0", "--url", sqlite_url, "--", "true").returncode == 75
    line = run("status", "--url", sqlite_url).stdout
    assert line.split("\t")[:2] == ["job", "read ×2"]
    asked = run("force-release", "job", "--url", sqlite_url)
    assert "and 1 more, which may still be at work" in asked.stderr
    for reader in readers:
        reader.terminate()
        assert reader.wait(WITHIN) == 0
    assert run("run", "job", "--timeout", "0", "--url", sqlite_url, "--", "true").returncode == 0


def test_as_many_commands_run_as_there_are_permits(start: Start, run: Run, sqlite_url: str) -> None:
    def attempt(permits: int) -> int:
        return run(
            "run", "gpu", "--permits", str(permits), "--timeout", "0", "--url", sqlite_url, "--", "true"
        ).returncode

    held = [start("run", "gpu", "--permits", "2", "--url", sqlite_url, "--", "sh", "-c", READY) for _ in range(2)]
    assert [line_of(each) for each in held] == ["ready"] * 2
    assert attempt(2) == 75
    assert run("status", "--url", sqlite_url).stdout.split("\t")[:2] == ["gpu", "permit 2 of 2"]
    [info] = json.loads(run("status", "--json", "--url", sqlite_url).stdout)
    assert (info["kind"], info["holders"], info["permits"], info["others"]) == ("permit", 2, 2, [])
    assert attempt(3) == 69
    held[0].terminate()
    assert held[0].wait(WITHIN) == 0
    assert attempt(2) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--permits", "0"], "permits is 0"),
        (["--permits", "two"], "invalid int"),
        (["--shared", "--permits", "2"], "--shared"),
        (["--shared", "--hold-at-least", "3"], "--shared"),
    ],
)
def test_an_impossible_combination_of_options_is_a_usage_error(
    run: Run, sqlite_url: str, arguments: list[str], says: str
) -> None:
    ended = run("run", "job", *arguments, "--url", sqlite_url, "--", "true")
    assert ended.returncode == 64
    assert says in ended.stderr


def test_status_on_a_terminal_shows_how_many_hold_a_name() -> None:
    shown = [
        _kind(multilock.LockInfo("n", kind, holders=holders, permits=permits))
        for kind, holders, permits in (("read", 12, None), ("permit", 2, 3), ("write", None, None))
    ]
    assert shown == ["read ×12", "permit 2 of 3", "write"]


def test_watch_reports_the_number_of_holders_and_not_which_one_is_shown(
    url: str, client: multilock.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    def looks() -> Iterator[list[multilock.LockInfo]]:
        first, second = reads(), reads()
        yield _held(client, "")
        first.renew()  # from now on the second reader's lease on Redis ends before the first one's
        yield _held(client, "")
        third = reads()
        yield _held(client, "")
        for lease in (first, second, third):
            lease.release()
        with client.lock("job"):
            yield _held(client, "")
        with client.lock("job"):
            yield _held(client, "")
        yield _held(client, "")

    def told(watch: Callable[[Iterator[list[multilock.LockInfo]]], None]) -> list[str]:
        watch(looks())
        return capsys.readouterr().out.splitlines()

    reads = client.read_write_lock("job").reader().acquire
    told_as_lines = [line.split("\t")[1:4] for line in told(_watch_lines)]
    assert told_as_lines == [
        ["+", "job", "read ×2"],
        ["-", "job", "read ×2"],
        ["+", "job", "read ×3"],
        ["-", "job", "read ×3"],
        ["+", "job", "lock"],
        ["-", "job", "lock"],
        ["+", "job", "lock"],
        ["-", "job", "lock"],
    ]
    told_as_json = [[info["holders"] for info in json.loads(line)] for line in told(_watch_json)]
    assert told_as_json == [[2], [3], [None], [None], []]


def test_watch_reports_how_many_permits_are_taken(client: multilock.Client, capsys: pytest.CaptureFixture[str]) -> None:
    def looks() -> Iterator[list[multilock.LockInfo]]:
        for _ in range(3):
            client.semaphore("gpu", 3).acquire()
            yield _held(client, "")

    _watch_lines(looks())
    assert [line.split("\t")[1:4] for line in capsys.readouterr().out.splitlines()] == [
        ["+", "gpu", "permit 1 of 3"],
        ["-", "gpu", "permit 1 of 3"],
        ["+", "gpu", "permit 2 of 3"],
        ["-", "gpu", "permit 2 of 3"],
        ["+", "gpu", "permit 3 of 3"],
    ]
