"""A comparison under bad conditions: servers that go away, full disks, clocks that jump. The comparison reports such
conditions, and bases no verdict on them."""

from __future__ import annotations

import errno
import json
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest
import redis

from multilock import ConfigurationError
from multilock.testing import FaultProxy, Helper, compare, say
from multilock.testing.compare import runner
from multilock.testing.compare.columns import columns_for
from multilock.testing.compare.history import Event, event_of, write_cycle
from multilock.testing.compare.report import write_whole
from multilock.testing.compare.runner import _Runner
from multilock.testing.compare.verdicts import judge_cycle
from tests.compare.test_verdicts import HELD, LAST, NEXT, cycle
from tests.faults.clock import compiled, preloaded
from tests.servers import RedisServer
from tests.servers_consul import ConsulServer

ROOT_TOKEN = "6b4f6a52-0000-4000-8000-a0c1d8f3e111"
GUARDED = {"enabled": True, "default_policy": "deny", "tokens": {"master": ROOT_TOKEN, "agent": ROOT_TOKEN}}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def test_a_url_that_is_named_twice_gets_two_columns(server: RedisServer) -> None:
    names = [column.name for column in columns_for([server.url, server.url], [], 2.0)]
    assert names == ["redis", "naive", "redis-py", "redis-2", "naive-2", "redis-py-2"]
    found = compare.run(
        [server.url, server.url], compare.Options(scenarios=["lost-release"], cycles=1, ttl=1.0, controls=False)
    )
    assert {name for name, _ in found.cells} == {"redis", "redis-2"}
    assert found.violations == []


def test_a_users_own_lock_has_a_control_beside_it(server: RedisServer) -> None:
    adapter = f"tests.compare.broken:Sound={server.url}"
    assert [column.name for column in columns_for([], [adapter], 2.0)] == ["Sound", "naive", "redis-py"]
    assert [column.name for column in columns_for([server.url], [adapter], 2.0)] == [
        "redis", "naive", "redis-py", "Sound",
    ]  # fmt: skip
    strange = "tests.compare.broken:Sound=mysql://x"
    assert [column.name for column in columns_for([], [strange], 2.0)] == ["Sound"]


def test_a_url_without_permission_for_sessions_is_a_column_with_the_reason(
    server: RedisServer,
) -> None:
    with redis.Redis(port=server.port) as operator:
        operator.acl_setuser("reader", enabled=True, passwords=["+pw"], commands=["+ping", "+info"], keys=["*"])
    with ConsulServer(token=ROOT_TOKEN, acl=GUARDED) as consul:
        consul.ask("PUT", "acl/policy", {"Name": "keys", "Rules": 'key_prefix "" { policy = "write" }'})
        token = consul.ask("PUT", "acl/token", {"Policies": [{"Name": "keys"}]})["SecretID"]
        urls = [f"redis://reader:pw@127.0.0.1:{server.port}", f"{consul.url}?token={token}"]
        columns = columns_for(urls, [], 2.0)
    assert [column.name for column in columns if not column.control] == ["redis", "consul"]
    assert all(column.gone for column in columns), [(column.name, column.gone) for column in columns]
    said = json.dumps([column.data for column in columns])
    assert "pw@" not in said
    assert token not in said


def test_a_full_disk_is_reported_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").symlink_to("/dev/full")
    with pytest.raises(ConfigurationError, match="No space left"):
        compare.run(["memory://"], compare.Options(out=tmp_path))


def test_a_disk_that_becomes_full_during_a_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multilock.testing.compare.runner.write_cycle", write)
    with pytest.raises(OSError, match=r"the history cannot be continued: No space"):
        compare.run(
            [f"sqlite://{tmp_path}/locks.db"], compare.Options(scenarios=["kill"], cycles=3, ttl=1.0, out=tmp_path)
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"urls": ["nowhere://x"]},
        {"urls": ["redis://127.0.0.1:1?databse=3"]},
        {"urls": ["memory://"], "adapters": ["no.such.module:Name=redis://x"]},
        {"urls": ["redis://127.0.0.1:1"], "server_pids": ["redis=x"]},
        {"urls": ["redis://127.0.0.1:1"], "server_pids": [f"redis={2**22 + 1}"]},
        {"urls": ["memory://"], "scenarios": ["earthquake"]},
        {"urls": []},
    ],
)
def test_a_usage_mistake_keeps_the_old_report(tmp_path: Path, wrong: dict[str, Any]) -> None:
    for name in ("history.jsonl", "report.json"):
        (tmp_path / name).write_text(f"the {name} of an hour\n")
    its = {"scenarios": ["kill"], "out": tmp_path, **wrong}
    with pytest.raises(ConfigurationError):
        compare.run(its.pop("urls"), compare.Options(**its))
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {name: f"the {name} of an hour\n" for name in ("history.jsonl", "report.json")}


def test_a_disk_that_becomes_full_leaves_a_report_of_the_finished_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def write(file: IO[bytes], events: list[Event]) -> None:
        nonlocal written
        written += 1
        write_cycle(file if written == 1 else cast("IO[bytes]", Full(file)), events)

    monkeypatch.setattr("multilock.testing.compare.runner.write_cycle", write)
    with pytest.raises(OSError, match="No space"):
        compare.run(
            [f"sqlite://{tmp_path}/locks.db"],
            compare.Options(scenarios=["taken"], cycles=3, ttl=1.0, out=tmp_path, at_once=1),
        )
    kept = compare.read_report(tmp_path)
    assert "No space left on device" in kept.data["partial"]
    assert sum(cell["cycles"] for cell in kept.data["cells"]) == 1
    assert compare.verify(tmp_path) == []


class Full:
    """A file on a disk that has room for ten more bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, 10

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        if not self._left:
            raise OSError(errno.ENOSPC, "No space left on device")
        done, self._left = self._file.write(data[: self._left]), 0
        return done


def test_a_report_file_is_complete_even_if_its_writing_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.json").write_text("before")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "report.json", "after")
    monkeypatch.undo()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.json", "before")]
    write_whole(tmp_path / "report.json", "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.json", "after")]


@pytest.mark.parametrize("what", ["_end", "_find_leftovers", "_content"])
def test_an_interrupt_after_the_last_cycle_still_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    where = _Runner if what == "_end" else runner
    its = getattr(where, what)
    calls = 0

    def once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            signal.raise_signal(signal.SIGTERM)
        return its(*arguments)

    monkeypatch.setattr(where, what, once)
    found = compare.run(["memory://"], compare.Options(scenarios=["kill"], out=tmp_path))
    assert (calls, compare.read_report(tmp_path).data) == (2, found.data)
    assert found.data["partial"] == (None if what == "_content" else "interrupted")


def test_a_signal_during_the_first_requests_ends_the_run_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("multilock.testing.compare.columns._probe", ask)
    (tmp_path / "history.jsonl").write_text("of an hour")
    with pytest.raises(KeyboardInterrupt):
        compare.run(["memory://"], compare.Options(scenarios=["kill"], out=tmp_path))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("history.jsonl", "of an hour")]


def test_a_server_that_dies_leaves_a_column_that_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock.testing.compare.cycle.PATIENCE", 2.0)
    with RedisServer() as dying:

        def end(at: compare.Progress) -> None:
            if at.done and dying.alive:
                dying.kill()

        found = compare.run(
            [dying.url, f"sqlite://{tmp_path}/locks.db"],
            compare.Options(scenarios=["kill"], cycles=4, ttl=1.0, at_once=2, out=tmp_path, controls=False),
            progress=end,
        )
    columns = {column["name"]: column for column in found.data["columns"]}
    assert "BackendUnavailable" in columns["redis"]["gone"]
    assert columns["sqlite"]["gone"] is None
    assert found.violations == []
    its = [cell for (name, _), cell in found.cells.items() if name == "redis"]
    assert sum(cell["cycles"] for cell in its) < 4
    assert sum(cell["cycles"] for (name, _), cell in found.cells.items() if name == "sqlite") == 4
    assert compare.verify(tmp_path) == []


def compare_while_the_clock_jumps(url: str, offset: str, folder: str) -> None:
    steps = iter(range(10**6))

    def step(_: compare.Progress) -> None:
        with Path(offset).open("r+b") as file:
            file.write(struct.pack("q", (-1) ** next(steps) * 3600 * 10**6))

    found = compare.run([url], compare.Options(scenarios=["pause"], cycles=1, ttl=2.0, out=Path(folder)), progress=step)
    say("found", found.exit_code, len(found.violations), len(found.void))


def test_a_stepped_clock_changes_no_verdict(tmp_path: Path) -> None:
    """The clocks of the runner and of all its workers jump by an hour, forward and back, ten times a second."""
    shim, offset = compiled(tmp_path), tmp_path / "offset"
    offset.write_bytes(bytes(8))
    with Helper(
        "tests.compare.test_bad_luck:compare_while_the_clock_jumps", f"sqlite://{tmp_path}/locks.db", offset, tmp_path,
        env=preloaded(shim, offset),
    ) as helper:  # fmt: skip
        assert helper.wait_for("found", within=90)[2] == "0"
    assert compare.read_report(tmp_path).cells["sqlite-flag", "pause"]["verdict"] == "broken"
    assert compare.verify(tmp_path) == []


@pytest.mark.parametrize("line", ["held", "held x A", "got 1 n A", "over now A", "lost 1 A", "wrong A {", "anything"])
def test_the_output_of_a_compared_library_is_not_taken_for_events(line: str) -> None:
    assert event_of(1, line) is None


def test_a_history_may_be_compressed_and_damage_is_reported(tmp_path: Path) -> None:
    compare.run(
        [f"sqlite://{tmp_path}/locks.db"], compare.Options(scenarios=["kill"], cycles=1, controls=False, out=tmp_path)
    )
    subprocess.run(["gzip", tmp_path / "history.jsonl"], check=True)
    assert compare.verify(tmp_path) == []
    packed = (tmp_path / "history.jsonl.gz").read_bytes()
    (tmp_path / "history.jsonl.gz").write_bytes(packed[:-20])
    assert "cannot be judged" in compare.verify(tmp_path)[0]
    (tmp_path / "history.jsonl.gz").write_bytes(packed)
    told: dict[str, Any] = {"schema": 1, "cells": 7}
    (tmp_path / "report.json").write_text(json.dumps(told))
    assert "cannot be judged" in compare.verify(tmp_path)[0]


def test_a_callback_that_is_only_a_moment_late_leaves_its_cycle_undecided() -> None:
    """The reason may be a freeze of less than 25 ms, which is not recorded."""
    late = [*HELD[:3], "1 lost 12.33 A lost 12.33", *NEXT, *LAST]
    assert judge_cycle(cycle("partition", *late)).outcome == "undecided"


def test_a_server_that_is_slow_at_the_beginning_takes_part(server: RedisServer) -> None:
    """The server replies too slowly for a lock with this ttl. An overloaded machine may be the reason, so the column
    must stay."""
    with FaultProxy.before(server.url) as proxy:
        proxy.black_hole("down")
        waiting = threading.Thread(target=heal_after, args=(proxy, 2.0))
        waiting.start()
        [column] = columns_for([proxy.url], [], 4.0, controls=False)
        waiting.join()
    assert column.gone == ""


def heal_after(proxy: FaultProxy, seconds: float) -> None:
    """Heal the proxy ``seconds`` after it has received a first request, which gets no reply until then."""
    while not proxy.traffic.up_in:
        time.sleep(0.01)
    time.sleep(seconds)
    proxy.heal()


def test_the_kept_example_report_has_the_verdicts_that_it_states() -> None:
    folder = Path(__file__).parents[2] / "docs" / "comparison"
    assert compare.verify(folder) == []
    kept = compare.read_report(folder)
    assert (kept.exit_code, kept.data["partial"]) == (0, None)
    assert {path.name for path in folder.iterdir()} == {"history.jsonl.gz", "report.html", "report.json"}
