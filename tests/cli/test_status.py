"""`multilock status`, `force-release` and `doctor`, the commands for an operator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import pytest
import redis

import multilock
from multilock.cli.status import show
from tests.cli.conftest import TTL, WITHIN, Run, Start, environment, line_of
from tests.servers import RedisServer, free_port


def test_status_as_json_is_an_array_of_all_fields(run: Run, url: str, client: multilock.Client) -> None:
    with client.lock("app/b"), client.lock("app/a") as lease, client.lock("other"):
        held = json.loads(run("status", "app/", "--json", "--url", url).stdout)
    assert [info["name"] for info in held] == ["app/a", "app/b"]
    first = held[0]
    assert set(first) == {"name", "kind", "owner", "identity", "host", "pid", "token", "ttl", "since", "waiting",
                          "resting_until", "remaining", "holders", "permits", "others"}  # fmt: skip
    assert 0 < first["remaining"] <= TTL
    assert (first["kind"], first["token"], first["ttl"]) == ("lock", lease.token, TTL)
    assert datetime.fromisoformat(first["since"]).tzinfo is not None


def test_status_without_any_lock_is_an_empty_array(run: Run, url: str) -> None:
    assert json.loads(run("status", "--json", "--url", url).stdout) == []


def test_status_without_a_terminal_prints_one_line_of_fields_for_each_lock(
    run: Run, url: str, client: multilock.Client
) -> None:
    with client.lock("b"), client.lock("a") as lease:
        lines = run("status", "--url", url).stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["a", "b"]
    assert lines[0].split("\t")[1] == "lock"
    assert lines[0].split("\t")[3] == str(lease.token)


def test_status_on_a_terminal_without_rich_prints_one_line_for_each_lock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    with multilock.connect("memory://without-rich") as client, client.lock("job") as lease:
        show(client, "", False)
    name, kind, holder, token, *_ = capsys.readouterr().out.split("\t")
    assert (name, kind, token) == ("job", "lock", str(lease.token))
    assert holder.endswith(str(os.getpid()))


def test_watch_without_a_terminal_prints_each_change(start: Start, url: str, client: multilock.Client) -> None:
    process = start("status", "--watch", "--url", url)
    with client.lock("job"):
        assert line_of(process).split("\t")[1:4] == ["+", "job", "lock"]
    assert line_of(process).split("\t")[1:4] == ["-", "job", "lock"]


def test_watch_as_json_prints_an_array_after_each_change(start: Start, url: str, client: multilock.Client) -> None:
    process = start("status", "--watch", "--json", "--url", url)
    assert json.loads(line_of(process)) == []
    with client.lock("job"):
        assert json.loads(line_of(process))[0]["name"] == "job"
    assert json.loads(line_of(process)) == []


def test_an_interrupt_ends_watch_with_130_and_without_a_traceback(start: Start, sqlite_url: str) -> None:
    process = start("status", "--watch", "--json", "--url", sqlite_url)
    assert line_of(process) == "[]"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("command", [["status"], ["force-release", "job", "--yes"], ["doctor"], ["demo"]])
def test_a_silent_backend_returns_69_and_a_reason(run: Run, command: list[str]) -> None:
    ended = run(*command, "--url", f"redis://u:hunter2@127.0.0.1:{free_port()}?request_timeout=0.5")
    assert ended.returncode == 69
    assert ended.stderr + ended.stdout
    assert "hunter2" not in ended.stderr + ended.stdout


def test_force_release_takes_the_lock_and_notifies_its_holder(run: Run, url: str, client: multilock.Client) -> None:
    lease = client.lock("job").acquire()
    ended = run("force-release", "job", "--yes", "--url", url)
    assert (ended.returncode, ended.stdout) == (0, f"job was taken from {os.uname().nodename}:{os.getpid()}\n")
    loss = lease.wait_lost(WITHIN)
    assert loss is not None
    assert loss.reason is multilock.LossReason.TAKEN


def test_force_release_without_yes_takes_nothing_and_shows_the_holder(
    run: Run, url: str, client: multilock.Client
) -> None:
    with client.lock("job"):
        ended = run("force-release", "job", "--url", url)
        assert ended.returncode == 64
        assert "--yes" in ended.stderr
        assert f":{os.getpid()}" in ended.stderr


def test_force_release_of_a_free_lock_reports_that_it_was_free(run: Run, url: str) -> None:
    ended = run("force-release", "job", "--yes", "--url", url)
    assert (ended.returncode, ended.stdout) == (1, "nobody held job\n")
    ended = run("force-release", "job", "--url", url)
    assert (ended.returncode, ended.stderr) == (
        64,
        "multilock: nobody holds 'job' now: add --yes to take the lock away\n",
    )


def test_a_name_that_the_terminal_cannot_show_ends_no_command_early(
    run: Run, url: str, client: multilock.Client
) -> None:
    poor = {"PYTHONIOENCODING": "ascii"}
    lease = client.lock("naïve").acquire()
    assert run("status", "--url", url, env=poor).stdout.startswith("na\\xefve\t")
    ended = run("force-release", "naïve", "--yes", "--url", url, env=poor)
    assert (ended.returncode, ended.stdout.partition(" was ")[0]) == (0, "na\\xefve")
    assert lease.wait_lost(WITHIN)


def test_an_output_that_cannot_be_written_is_reported(url: str, run: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "multilock", "status", "--json", "--url", url]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path, check=False
        )
    assert (ended.returncode, ended.stderr) == (70, "multilock: [Errno 28] No space left on device\n")


def test_doctor_as_json_shows_backends_url_capabilities_and_findings(run: Run, url: str) -> None:
    ended = run("doctor", "--json", "--url", url)
    report = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert set(report) == {"backends", "url", "capabilities", "findings"}
    installed = {backend["scheme"] for backend in report["backends"] if backend["installed"]}
    assert installed >= {"memory", "sqlite", "redis"}
    assert report["capabilities"]["fencing"] is True
    assert all(set(finding) == {"code", "level", "message", "remedy"} for finding in report["findings"])


def test_doctor_can_check_a_deployment_by_its_exit_code(run: Run, sqlite_url: str, tmp_path: Path) -> None:
    assert run("doctor", "--url", sqlite_url).returncode == 0
    (tmp_path / "plain.db").write_text("no database" * 1000)
    ended = run("doctor", "--url", f"sqlite://{tmp_path}/plain.db")
    assert (ended.returncode, "error: " in ended.stdout) == (1, True)


@pytest.mark.parametrize("rights", ["", "+info +ping +hello +client"])
def test_doctor_reports_a_server_on_which_no_lock_can_be_acquired(run: Run, rights: str) -> None:
    with RedisServer() as server, redis.Redis(port=server.port) as operator:
        url = server.url
        if rights:
            operator.execute_command("ACL", "SETUSER", "watcher", "on", ">secret", *rights.split())
            url = url.replace("redis://", "redis://watcher:secret@")
        else:
            operator.config_set("requirepass", "secret")
        ended = run("doctor", "--url", url)
    assert (ended.returncode, "error: no lock can be taken: " in ended.stdout) == (1, True), ended.stdout


@pytest.mark.oracle
def test_doctor_leaves_no_lock_behind(run: Run, url: str, client: multilock.Client) -> None:
    assert run("doctor", "--url", url).returncode == 0
    assert list(client.inspect_all()) == []


def test_doctor_prints_its_findings_first(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.db").write_text("no database" * 1000)
    lines = run("doctor", "--url", f"sqlite://{tmp_path}/plain.db").stdout.splitlines()
    assert [lines[0], lines[1].partition(":")[0]] == [f"sqlite://{tmp_path}/plain.db", "error"]


def test_strict_doctor_fails_on_a_warning(run: Run) -> None:
    # multilock warns that a file in this folder, and with it the last token, is lost at the next boot.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        url = f"sqlite://{folder}/locks.db"
        assert run("doctor", "--url", url).returncode == 0
        ended = run("doctor", "--strict", "--url", url)
    assert (ended.returncode, "warning: " in ended.stdout) == (1, True)


def test_doctor_shows_only_existing_capabilities_in_80_columns(run: Run, redis_url: str) -> None:
    lines = run("doctor", "--url", redis_url).stdout.splitlines()
    assert [line for line in lines if "None" in line or not line or len(line) > 80] == []


def test_doctor_shows_the_url_without_its_secrets(run: Run) -> None:
    url = f"redis://user:hunter2@127.0.0.1:{free_port()}/0?password=hunter2&request_timeout=0.5"
    for arguments in (["--json"], []):
        ended = run("doctor", *arguments, "--url", url)
        assert "hunter2" not in ended.stdout + ended.stderr
        assert "redis://***@127.0.0.1" in ended.stdout


def test_doctor_of_a_silent_backend_still_shows_what_it_has(run: Run) -> None:
    ended = run("doctor", "--json", "--url", f"redis://127.0.0.1:{free_port()}?request_timeout=0.5")
    report = json.loads(ended.stdout)
    assert ended.returncode == 69
    assert report["capabilities"]["cross_host"] is True
    assert [finding["code"] for finding in report["findings"]] == ["unreachable"]


def test_doctor_without_a_url_lists_the_backends_and_how_to_choose_one(run: Run) -> None:
    ended = run("doctor", "--json")
    assert ended.returncode == 64
    assert json.loads(ended.stdout)["backends"]
    assert "$MULTILOCK_URL" in ended.stderr


@pytest.mark.parametrize("command", [["status", "--json"], ["doctor"], ["doctor", "--json"]])
def test_a_pipe_that_closes_early_is_not_reported_as_an_error(
    start: Start, sqlite_url: str, command: list[str]
) -> None:
    process = start(*command, "--url", sqlite_url)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(WITHIN) in (0, 1)
