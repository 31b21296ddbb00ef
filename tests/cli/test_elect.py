"""`multilock elect`: a command runs on one node at a time, and `multilock demo` shows it."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest

import multilock
from tests.cli.conftest import WITHIN, Run, RunEach, Start, gone, line_of, until
from tests.servers import RedisServer, free_port
from tests.servers_redlock import RedisServers

STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
INTERRUPTED = "trap 'echo still here' INT; echo ready; while :; do sleep 0.05; done"
LEAD = "trap 'exit 5' TERM INT; echo $MULTILOCK_TOKEN; while :; do sleep 0.05; done"


def test_a_command_that_ends_by_itself_resigns_and_returns_its_exit_code(
    run: Run, url: str, client: multilock.Client
) -> None:
    assert run("elect", "lead", "--url", url, "--", "sh", "-c", "exit 4").returncode == 4
    assert client.inspect("lead") is None


def test_the_leader_is_shown_by_its_identity(start: Start, url: str, client: multilock.Client) -> None:
    process = start("elect", "lead", "--identity", "node-1", "--url", url, "--", "sh", "-c", LEAD)
    token = int(line_of(process))
    leader = client.election("lead").leader()
    assert leader is not None
    assert (leader.identity, leader.term) == ("node-1", token)


def test_when_the_leader_is_asked_to_stop_another_leads_without_waiting_for_a_ttl(start: Start, url: str) -> None:
    first = start("elect", "lead", "--ttl", "60", "--url", url, "--", "sh", "-c", LEAD)
    term = int(line_of(first))
    second = start("elect", "lead", "--ttl", "60", "--url", url, "--", "sh", "-c", LEAD)
    first.terminate()
    assert first.wait(WITHIN) == 5
    assert int(line_of(second)) > term


GROUP = """sh -c 'trap "sleep 1; echo last >> log; exit" TERM; echo ready; while :; do sleep 0.05; done' & wait"""


def test_the_next_command_begins_after_every_process_of_the_old_one_ended(
    start: Start, url: str, tmp_path: Path
) -> None:
    first = start("elect", "lead", "--ttl", "60", "--url", url, "--", "sh", "-c", GROUP)
    assert line_of(first) == "ready"
    second = start("elect", "lead", "--ttl", "60", "--url", url, "--", "sh", "-c", "echo first >> log; echo leads")
    first.terminate()
    assert line_of(second) == "leads"
    assert (tmp_path / "log").read_text() == "last\nfirst\n"
    assert first.wait(WITHIN) == 128 + signal.SIGTERM


REAPS_NOBODY = """
import ctypes, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
child = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
sys.exit(child.wait())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the zombies of a group")
def test_zombies_do_not_use_up_the_grace(start: Start, sqlite_url: str) -> None:
    orphan = "(trap exit TERM; echo ready; while :; do sleep 0.05; done) & wait"
    arguments = ("elect", "lead", "--ttl", "60", "--grace", "300", "--url", sqlite_url, "--", "sh", "-c", orphan)
    process = start(*arguments, through=(sys.executable, "-c", REAPS_NOBODY))
    assert line_of(process) == "ready"
    process.terminate()
    assert process.wait(WITHIN) == 128 + signal.SIGTERM


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_before_another_leads(
    start: Start, url: str, client: multilock.Client
) -> None:
    stubborn = f"echo $$; {STUBBORN}"
    process = start("elect", "lead", "--ttl", "60", "--grace", "1.5", "--url", url, "--", "sh", "-c", stubborn)
    pid = int(line_of(process))
    assert line_of(process) == "ready"
    began = time.monotonic()
    process.terminate()
    lease = client.lock("lead").acquire(timeout=WITHIN)
    assert gone(pid)
    assert time.monotonic() - began >= 1.4
    lease.release()
    assert process.wait(WITHIN) == 128 + signal.SIGKILL
    assert process.stderr is not None
    assert "had not ended 1.5 s after SIGTERM" in process.stderr.read()


def test_only_sigterm_gives_the_command_a_grace(start: Start, url: str, client: multilock.Client) -> None:
    process = start("elect", "lead", "--grace", "0", "--url", url, "--", "sh", "-c", "trap '' TERM; " + INTERRUPTED)
    assert line_of(process) == "ready"
    process.send_signal(signal.SIGINT)
    assert line_of(process) == "still here"
    process.terminate()
    assert process.wait(WITHIN) == 128 + signal.SIGKILL


def test_a_negative_grace_is_a_usage_error(run_each: RunEach, sqlite_url: str) -> None:
    for ended in run_each(
        *(["elect", "lead", "--grace", each, "--url", sqlite_url, "--", "true"] for each in ("-1", "nan"))
    ):
        assert ended.returncode == 64
        assert "grace" in ended.stderr


def test_when_the_leader_is_killed_its_command_dies_and_another_leads(start: Start, url: str) -> None:
    lead = f"echo $$; {LEAD}"
    first = start("elect", "lead", "--ttl", "2", "--url", url, "--", "sh", "-c", lead)
    pid, term = int(line_of(first)), int(line_of(first))
    second = start("elect", "lead", "--ttl", "2", "--url", url, "--", "sh", "-c", LEAD)
    first.kill()
    assert int(line_of(second)) > term
    until(lambda: gone(pid))


def test_a_lost_leadership_ends_the_command_and_the_node_campaigns_again(
    start: Start, url: str, client: multilock.Client
) -> None:
    process = start("elect", "lead", "--ttl", "2", "--url", url, "--", "sh", "-c", f"echo $$; {LEAD}")
    pid, term = int(line_of(process)), int(line_of(process))
    assert client.force_release("lead")
    again, next_term = int(line_of(process)), int(line_of(process))
    assert gone(pid)
    assert again != pid
    assert next_term > term
    process.terminate()
    assert process.wait(WITHIN) == 5


def test_a_node_that_led_for_too_long_campaigns_again(start: Start, sqlite_url: str) -> None:
    process = start("elect", "lead", "--ttl", "2", "--max-hold", "0.3", "--url", sqlite_url, "--", "sh", "-c", LEAD)
    assert int(line_of(process)) < int(line_of(process))


def test_after_a_reload_by_sighup_the_node_campaigns_again(start: Start, url: str, client: multilock.Client) -> None:
    reloads = "trap 'echo reloaded' HUP; echo $MULTILOCK_TOKEN; while :; do sleep 0.05; done"
    process = start("elect", "lead", "--ttl", "2", "--url", url, "--", "sh", "-c", reloads)
    term = int(line_of(process))
    process.send_signal(signal.SIGHUP)
    assert line_of(process) == "reloaded"
    assert client.force_release("lead")
    assert int(line_of(process)) > term


def test_a_signal_during_the_end_of_a_lost_leadership_is_obeyed(
    start: Start, url: str, client: multilock.Client
) -> None:
    process = start("elect", "lead", "--ttl", "2", "--url", url, "--", "sh", "-c", STUBBORN)
    assert line_of(process) == "ready"
    assert client.force_release("lead")
    assert process.stderr is not None
    while "ending sh" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    assert process.wait(WITHIN) == 128 + signal.SIGTERM


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_candidacy(start: Start, url: str, client: multilock.Client, signum: signal.Signals) -> None:
    with client.lock("lead"):
        process = start("elect", "lead", "--url", url, "--", "true")
        until(lambda: (info := client.inspect("lead")) is not None and info.waiting)
        process.send_signal(signum)
        assert process.wait(WITHIN) == 128 + signum
    until(lambda: client.inspect("lead") is None)


def test_a_candidacy_continues_through_any_outage(start: Start) -> None:
    server = RedisServer()
    server.port = free_port()
    url = f"redis://127.0.0.1:{server.port}?outage_timeout=0.1"
    process = start("elect", "lead", "--url", url, "--", "echo", "leads")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("multilock: ")
    with pytest.raises(TimeoutError):
        until(lambda: process.poll() is not None, within=1)
    with server:
        assert line_of(process) == "leads"
        assert process.wait(WITHIN) == 0


# ---- the demonstration


def _terms(shown: str) -> list[int]:
    return [int(term) for term in re.findall(r"term (\d+)", shown)]


def _processes_in(folder: Path) -> list[int]:
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder and not gone(int(entry.name)):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


@pytest.mark.oracle
@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_the_demo_shows_growing_terms_and_leaves_nothing(run: Run, tmp_path: Path, temporary: Path, nodes: int) -> None:
    ended = run("demo", "--nodes", str(nodes), env={"TMPDIR": str(temporary)})
    assert (ended.returncode, ended.stderr) == (0, "")
    terms = _terms(ended.stdout)
    assert len(terms) == min(nodes, 3)
    assert terms == sorted(set(terms))
    assert re.search(r"leads, term \d+: \d+\.\d{3} s after the kill", ended.stdout)
    assert list(temporary.iterdir()) == []
    assert _processes_in(tmp_path) == []


def test_the_demo_runs_at_the_given_url(run: Run, url: str, client: multilock.Client) -> None:
    ended = run("demo", "--url", url)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(client.inspect_all()) == []


def test_the_demo_runs_on_several_servers_that_need_a_majority(run: Run) -> None:
    with RedisServers(3) as servers:
        ended = run("demo", "--nodes", "2", "--url", servers.url)
    assert ended.returncode == 0
    assert _terms(ended.stdout) == sorted(set(_terms(ended.stdout)))


def test_the_demo_reads_the_environment_like_every_command(run: Run, sqlite_url: str, temporary: Path) -> None:
    ended = run("demo", "--nodes", "2", env={"MULTILOCK_URL": sqlite_url, "TMPDIR": str(temporary)})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"at {sqlite_url}" in ended.stdout


@pytest.mark.oracle
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(
    start: Start, tmp_path: Path, temporary: Path, signum: signal.Signals
) -> None:
    process = start("demo", env={"TMPDIR": str(temporary)})
    line_of(process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, err) == (128 + signum, "")
    assert list(temporary.iterdir()) == []
    assert _processes_in(tmp_path) == []


def test_the_processes_of_a_killed_demo_end_by_themselves(start: Start, tmp_path: Path, temporary: Path) -> None:
    process = start("demo", env={"TMPDIR": str(temporary)})
    until(lambda: len(_processes_in(tmp_path)) == 4)
    process.kill()
    until(lambda: _processes_in(tmp_path) == [])
