"""A comparison on real servers: correct locks get good verdicts, each defect is found, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from multilock import ConfigurationError, now
from multilock.testing import Helper, compare, say
from multilock.testing.compare.runner import interrupted_once
from tests.servers import RedisServer

BROKEN = "tests.compare.broken"
SOUND = ["Sound", "Chatty"]
STRANGE = ["NoControl", "Raising", "Liar", "Dying", "Boundless", "Endless"]
DEFECTS = ["FromReceipt", "Cached", "PlainDelete", "LateCallback", "NoCallback", "RepeatedToken"]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare") / "new" / "report"


@pytest.fixture(scope="module")
def report(server: RedisServer, folder: Path) -> compare.Report:
    """Return the report of one run for all tests: our lock, its controls, the locks of `broken`, and a server that is
    away."""
    adapters = [f"{BROKEN}:{name}={server.url}" for name in (*SOUND, *DEFECTS, *STRANGE)]
    return compare.run(
        [server.url, "memory://", "redis://127.0.0.1:1"],
        compare.Options(
            adapters=adapters, scenarios=["pause", "late-answer"], cycles=2, ttl=1.0, seed=1, at_once=10, out=folder
        ),
    )


pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]
SEEN_IN = {"FromReceipt": "late-answer"}  # all other defects fail in the scenario "pause"


@pytest.mark.parametrize("name", ["redis", *SOUND])
def test_a_sound_lock_is_never_reported_as_broken(report: compare.Report, name: str) -> None:
    assert [report.cells[name, scenario]["violations"] for scenario in ("pause", "late-answer")] == [[], []]
    assert [line for line in report.violations if line.startswith(f"{name},")] == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_seeded_defect_fails_its_own_cell(report: compare.Report, defect: str) -> None:
    assert report.cells[defect, SEEN_IN.get(defect, "pause")]["verdict"] == "broken"
    assert report.exit_code == 1


def test_the_weak_control_fails(report: compare.Report) -> None:
    assert report.cells["naive", "pause"]["verdict"] == "broken"
    assert not [line for line in report.violations if line.startswith("naive")]


def test_a_control_that_does_not_fail_makes_the_run_void(report: compare.Report) -> None:
    assert [line for line in report.void if "NoControl" in line and "pause" in line]


@pytest.mark.parametrize(("name", "why"), [("Raising", "it is broken"), ("Liar", "True or False"), ("Dying", "-9")])
def test_an_adapter_that_raises_lies_or_dies_is_undecided_and_has_a_reason(
    report: compare.Report, name: str, why: str
) -> None:
    cell = report.cells[name, "pause"]
    assert (cell["verdict"], cell["decided"]) == ("undecided", 0)
    assert why in cell["not_decided"][0]["why"][0]


@pytest.mark.parametrize(("name", "why"), [("Boundless", "does not know"), ("Endless", "at most")])
def test_an_adapter_with_an_invalid_bound_is_reported_and_takes_no_part(
    report: compare.Report, name: str, why: str
) -> None:
    [column] = [each for each in report.data["columns"] if each["name"] == name]
    assert why in column["gone"]
    assert (name, "pause") not in report.cells


def test_an_adapter_that_hangs_is_undecided_and_its_processes_end(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock.testing.compare.cycle.PATIENCE", 5.0)
    found = compare.run(
        [], compare.Options(adapters=[f"{BROKEN}:Hanging={server.url}"], scenarios=["kill"], cycles=1, controls=False)
    )
    assert "A did not come to" in found.cells["Hanging", "kill"]["not_decided"][0]["why"][0]
    assert found.exit_code == 3


def test_contention_starves_no_waiter_and_counts_the_requests(server: RedisServer) -> None:
    found = compare.run([server.url], compare.Options(scenarios=["contention"], controls=False, all_of_controls=False))
    rows = found.data["loads"]
    assert [row["deadlocks"] for row in rows] == [0, 0]
    [counted] = [row["sends_per_grant"] for row in rows if row["sends_per_grant"] is not None]
    assert 1 <= counted <= 10
    assert found.exit_code == 0, found.violations


def test_an_absent_server_is_a_column_with_the_reason(report: compare.Report, server: RedisServer) -> None:
    columns = {column["name"]: column for column in report.data["columns"]}
    assert "BackendUnavailable" in columns["redis-2"]["gone"]
    assert columns["redis"]["gone"] is None
    assert "pause" in columns["memory"]["not_applicable"]
    with redis.Redis(port=server.port) as operator:
        said = operator.info("server")["redis_version"]
    assert columns["redis"]["versions"] == {"server": f"redis {said}", "client library": f"redis {redis.__version__}"}


def test_the_history_gives_the_same_verdicts(report: compare.Report, folder: Path) -> None:
    assert compare.verify(folder) == []
    assert compare.read_report(folder).data == report.data
    assert compare.against(report, report) == []


def test_a_changed_verdict_is_detected(report: compare.Report, folder: Path, tmp_path: Path) -> None:
    data = json.loads(json.dumps(report.data))
    cells = compare.Report(data).cells
    cells["Cached", "pause"]["verdict"] = "kept"
    (tmp_path / "report.json").write_text(json.dumps(data))
    (tmp_path / "history.jsonl").write_bytes((folder / "history.jsonl").read_bytes())
    assert [line for line in compare.verify(tmp_path) if line.startswith("Cached")] != []
    assert compare.against(report, compare.Report(data)) == ["Cached, pause: broken → kept"]


def test_the_report_follows_its_schema(report: compare.Report) -> None:
    path = Path(compare.__file__).with_name("report.schema.json")
    assert list(unfit(report.data, json.loads(path.read_text()))) == []
    assert list(unfit({**report.data, "cells": [{}]}, json.loads(path.read_text()))) != []


def unfit(value: Any, schema: dict[str, Any], where: str = "report") -> Iterator[str]:
    """Yield each place at which the value does not fit the schema. Supports only the parts of JSON Schema that our
    schema uses."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "number": (int, float),
        "integer": int,
        "boolean": bool,
    }
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    fits = [value is None if kind == "null" else isinstance(value, kinds[kind]) for kind in types]
    if types and not any(fits):
        yield f"{where} is {value!r:.40}, no {types}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r:.40}, none of {schema['enum']}"
    elif isinstance(value, dict):
        yield from (f"{where} has no {key}" for key in schema.get("required", []) if key not in value)
        for key, its in schema.get("properties", {}).items():
            if key in value:
                yield from unfit(value[key], its, f"{where}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from unfit(each, schema.get("items", {}), f"{where}[{number}]")


def compare_for_long(url: str, folder: str) -> None:
    report = compare.run(
        [url],
        compare.Options(cycles=100, scenarios=["pause"], out=Path(folder)),
        progress=lambda at: say("progress", len(at.running)),
    )
    say("ended", report.data["partial"], report.exit_code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_leaves_only_a_partial_report(
    server: RedisServer, tmp_path: Path, number: signal.Signals
) -> None:
    with Helper("tests.compare.test_run:compare_for_long", server.url, tmp_path) as helper:
        while helper.wait_for("progress", within=30)[1] == "0":
            pass
        while not children(helper.pid):
            pass
        processes = children(helper.pid)
        helper.signal(number)
        assert helper.wait_for("ended", within=45)[1] == "interrupted"
        assert helper.wait(within=20) == 0
    until = now() + 20  # the worker processes end soon after the helper
    while (left := [pid for pid in processes if runs(pid)]) and now() < until:
        pass
    assert left == []
    assert compare.read_report(tmp_path).data["partial"] == "interrupted"
    assert compare.verify(tmp_path) == []
    with redis.Redis(port=server.port) as operator:
        until = now() + 10
        while (keys := [key for key in operator.scan_iter() if held(key)]) and now() < until:
            pass
        assert keys == []


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def held(key: bytes) -> bool:
    return b"compare-" in key and b"token" not in key and not key.startswith(b"{")


@pytest.mark.parametrize(
    "wrong",
    [
        {"urls": ["nowhere://x"]},
        {"urls": []},
        {"urls": ["memory://"], "scenarios": ["earthquake"]},
        {"urls": ["memory://"], "cycles": 0},
        {"urls": [], "adapters": ["tests.compare.broken:Nobody=redis://x"]},
        {"urls": [], "adapters": ["no.such.module:Name=redis://x"]},
        {"urls": [], "adapters": ["tests.compare.broken:Sound"]},
        {"urls": [], "adapters": ["json:dumps=redis://x"]},
        {"urls": [], "adapters": ["tests.compare.unimportable:Name=redis://x"]},
        {"urls": ["memory://"], "within": 0.0},
        {"urls": ["memory://"], "out": Path("/proc/nowhere")},
    ],
)
def test_a_misspelled_option_is_reported_before_anything_runs(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        compare.run(wrong.pop("urls"), compare.Options(**wrong))


def test_a_report_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"schema": 99}')
    with pytest.raises(ConfigurationError, match="99"):
        compare.read_report(tmp_path)


def test_an_interrupt_swallowed_by_a_finalizer_is_raised_later() -> None:
    with interrupted_once() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            check()


def test_options_may_be_given_by_their_names() -> None:
    with pytest.raises(ConfigurationError, match="unknown scenario 'nothing'"):
        compare.run(["memory://"], scenarios=["nothing"])
    with pytest.raises(TypeError, match="scenes"):
        compare.run(["memory://"], scenes=["pause"])
