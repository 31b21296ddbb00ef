"""A server that was stopped for a comparison runs again afterwards, even if the processes that stopped it die."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multilock import ConfigurationError, now
from multilock.testing import Helper, compare, hear, say
from multilock.testing.compare.columns import Column
from multilock.testing.compare.contestants import ASYNCIO, BLOCKING, close_kazoo
from multilock.testing.compare.cycle import Plan, _Scene
from multilock.testing.compare.keeper import family, states
from multilock.testing.compare.scenarios import SCENARIOS
from multilock.testing.compare.servers import ServerFault, ServerProcess, each_of, given
from tests.compare.test_many_at_once import worker_that_said
from tests.open_files import over_a_thousand
from tests.servers import RedisServer
from tests.servers_redlock import RedisServers


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that the test can stop. Like PostgreSQL, it has a child."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        both = family(process.pid)
        assert len(both) == 2
        yield process
        for pid in both:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def keepers() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"keeper.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def stop_and(pid: int, within: float, act: Callable[[], object]) -> None:
    with ServerProcess(pid=pid).stopped(within):
        act()


def stands_still(pid: int) -> bool:
    return all_states(pid) <= set("tT")


def runs(pid: int) -> bool:
    return not all_states(pid) & set("tT")


def all_states(pid: int) -> set[str]:
    return set("".join(map(states, family(pid))))


def eventually(condition: Callable[[int], bool], pid: int) -> bool:
    until = now() + 20
    while not condition(pid) and now() < until:
        time.sleep(0.01)
    return condition(pid)


def test_a_process_is_stopped_with_its_children_and_resumed(sleeper: subprocess.Popen[bytes]) -> None:
    server = ServerProcess(pid=sleeper.pid)
    with server.stopped(60.0):
        assert stands_still(sleeper.pid)
    assert runs(sleeper.pid)


def test_a_process_with_thousands_of_open_files_can_stop_the_server_too(sleeper: subprocess.Popen[bytes]) -> None:
    with over_a_thousand(), ServerProcess(pid=sleeper.pid).stopped(60.0):
        assert stands_still(sleeper.pid)


def test_a_stopped_server_is_resumed_after_an_error(sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(KeyboardInterrupt), ServerProcess(pid=sleeper.pid).stopped(60.0):
        raise KeyboardInterrupt
    assert runs(sleeper.pid)


def test_a_stopped_server_is_resumed_although_its_keeper_process_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ServerFault, match="keeper was killed"):
        stop_and(sleeper.pid, 60.0, lambda: os.kill(keepers()[0], signal.SIGKILL))
    assert runs(sleeper.pid)


def test_a_process_that_hangs_does_not_keep_the_server_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    def hang() -> None:
        assert eventually(runs, sleeper.pid)
        while keepers():
            time.sleep(0.01)

    with pytest.raises(ServerFault, match="too early"):
        stop_and(sleeper.pid, 1.0, hang)


def stop_it(pid: str) -> None:
    with ServerProcess(pid=int(pid)).stopped(600.0):
        say("stopped")
        hear()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_stopped_server_is_resumed_although_its_stopper_dies(
    sleeper: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    with Helper("tests.compare.test_servers:stop_it", sleeper.pid) as helper:
        helper.wait_for("stopped", within=30)
        assert stands_still(sleeper.pid)
        helper.signal(number)
        helper.wait(within=30)
        assert eventually(runs, sleeper.pid)


def test_a_signal_to_the_keeper_process_resumes_the_server(sleeper: subprocess.Popen[bytes]) -> None:
    def tell() -> None:
        os.kill(keepers()[0], signal.SIGTERM)
        assert eventually(runs, sleeper.pid)
        while keepers():
            time.sleep(0.01)

    with pytest.raises(ServerFault, match="too early"):
        stop_and(sleeper.pid, 60.0, tell)


def test_a_stopped_server_grants_the_lock_only_after_the_first_holder_noticed(
    server: RedisServer, tmp_path: Path
) -> None:
    found = compare.run(
        [server.url],
        compare.Options(
            scenarios=["server-stop"], cycles=1, ttl=2.0, controls=False, server_pids=[str(server.pid)], out=tmp_path
        ),
    )
    cell = found.cells["redis", "server-stop"]
    assert (cell["violations"], cell["broken"], cell["no_fault"]) == ([], 0, 0), cell
    assert runs(server.pid)
    assert found.data["columns"][0]["server"] == f"process {server.pid}"
    assert compare.verify(tmp_path) == []


def test_a_process_that_is_not_the_server_cannot_be_a_fault(
    server: RedisServer, sleeper: subprocess.Popen[bytes]
) -> None:
    found = compare.run(
        [server.url],
        compare.Options(
            scenarios=["server-stop"], cycles=1, ttl=1.0, controls=False, server_pids=[f"redis={sleeper.pid}"]
        ),
    )
    assert ("redis", "server-stop") in found.cells, found.data["columns"]
    assert found.cells["redis", "server-stop"]["kept"] == 0
    assert "met nothing" in found.cells["redis", "server-stop"]["not_decided"][0]["why"][0]


@pytest.mark.parametrize(
    ("pids", "containers", "why"),
    [
        (["redis=x"], [], "URL=PID"),
        (["1"], [], "this command"),
        ([f"redis={os.getpid()}"], [], "this command"),
        ([f"redis={2**22 + 1}"], [], "does not exist"),
        (["redis="], [], "URL=PID"),
        ([], ["redis=--help"], "URL=NAME"),
    ],
)
def test_a_misspelled_or_missing_server_is_reported_before_anything_runs(
    pids: list[str], containers: list[str], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        given(pids, containers)


def test_only_a_compared_server_can_be_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    for urls, which in ((["memory://"], ""), (["memory://"], "etcd="), (["redis://127.0.0.1:1"], "redis://elsewhere=")):
        with pytest.raises(ConfigurationError, match=r"which URL does|not one of the compared"):
            compare.run(urls, compare.Options(server_pids=[f"{which}{sleeper.pid}"]))
    with pytest.raises(ConfigurationError, match="given before"):
        given([str(sleeper.pid), str(sleeper.pid)], [])


ENGINE = """#!{python} -I
import os, signal, subprocess, sys
pid = int(open({pid!r}).read())
match sys.argv[1]:
    case "inspect": print("true")
    case "pause": os.kill(pid, signal.SIGSTOP)
    case "unpause": os.kill(pid, signal.SIGCONT)
    case "kill": os.kill(pid, signal.SIGKILL)
    case "stop": os.kill(pid, signal.SIGTERM)
    case "start": open({again!r}, "a").write("again\\n")
    case _: sys.exit("no such command")
"""


def test_the_container_engine_kills_and_restarts_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    """Checks the commands that are sent to the engine."""
    (tmp_path / "pid").write_text(str(sleeper.pid))
    engine, again = tmp_path / "docker", tmp_path / "again"
    engine.write_text(ENGINE.format(python=sys.executable, pid=str(tmp_path / "pid"), again=str(again)))
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    server = given([], ["redis=box"])["redis"]
    with server.stopped(60.0):
        # The process handles the signal a moment after it was sent. Its child is not stopped.
        assert eventually(lambda pid: set(states(pid)) <= set("tT"), sleeper.pid)
    assert eventually(runs, sleeper.pid)
    with server.killed(60.0):
        assert sleeper.wait(20) == -signal.SIGKILL
        assert not again.exists()
    assert again.read_text() == "again\n"
    # the process died above, so it cannot be shut down
    with pytest.raises(ServerFault, match="taken down"), server.ended(60.0):
        pass
    assert again.read_text() == "again\nagain\n"


STANDS_STILL = """#!{python} -I
import os, signal, sys
command, box = sys.argv[1], os.path.join({folder!r}, sys.argv[-1])
pid = int(open(box).read())
match command:
    case "inspect": print("true" if "Running" in sys.argv[3] else os.path.getmtime(box))
    case "stop": os.kill(pid, signal.SIGSTOP)
    case "start":
        os.kill(pid, signal.SIGCONT)
        if not box.endswith("paused"): os.utime(box, (0, os.path.getmtime(box) + 1))
"""


def test_a_restart_counts_only_if_the_server_was_absent_and_its_container_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    with RedisServers() as servers:
        mine, paused, unlike = servers.members
        for box, pid in (("mine", mine.pid), ("paused", paused.pid), ("of-another", sleeper.pid)):
            (tmp_path / box).write_text(str(pid))
        engine = tmp_path / "docker"
        engine.write_text(STANDS_STILL.format(python=sys.executable, folder=str(tmp_path)))
        engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))
        found = compare.run(
            [mine.url, paused.url, unlike.url],
            compare.Options(
                scenarios=["server-restart"],
                cycles=1,
                ttl=1.0,
                controls=False,
                server_containers=[f"{mine.url}=mine", f"{paused.url}=paused", f"{unlike.url}=of-another"],
            ),
        )
    no_fault = {name: cell["no_fault"] for (name, _), cell in found.cells.items()}
    assert no_fault == {"redis": 0, "redis-2": 1, "redis-3": 1}, found.cells
    assert found.violations == []


def scene_of(url: str) -> _Scene:
    plan = Plan(1, "x", BLOCKING, url, SCENARIOS["server-stop"], "n", 1.0, 1.0, "1")
    scene = _Scene(plan, worker_that_said(), worker_that_said(), threading.Event())
    scene.look()
    return scene


def test_a_fault_is_seen_at_its_own_server_only(sleeper: subprocess.Popen[bytes]) -> None:
    with RedisServers() as servers:
        scene = scene_of(servers.url)
        assert not scene.is_silent()
        for pid, silent in ((servers.members[1].pid, True), (sleeper.pid, False)):
            with ServerProcess(pid=pid).stopped(60.0):
                assert scene.is_silent() is silent


def test_a_server_that_cannot_be_asked_is_never_reported_as_silent(sleeper: subprocess.Popen[bytes]) -> None:
    scene = scene_of("postgres://127.0.0.1:1/x")
    with ServerProcess(pid=sleeper.pid).stopped(60.0):
        assert not scene.is_silent()


@pytest.mark.parametrize(
    ("url", "each"),
    [
        ("redis://h1/0?ttl=3", []),
        ("etcd://me:pw@h1,h2:1?ttl=3", ["etcd://me:pw@h1?ttl=3", "etcd://me:pw@h2:1?ttl=3"]),
        ("zookeeper://h1,[::1]:9/root", ["zookeeper://h1/root", "zookeeper://[::1]:9/root"]),
        ("redlocks://a:b@h1,c:d@h2/3?restart_guard=9&ttl=3", ["rediss://a:b@h1/3?ttl=3", "rediss://c:d@h2/3?ttl=3"]),
    ],
)
def test_the_servers_of_a_url_are_asked_one_by_one_and_together(url: str, each: list[str]) -> None:
    assert each_of(url) == [url, *each]


@pytest.mark.parametrize(
    ("numbers", "ended"),
    [([7, 8], True), ([7, 7, None, 8], True), ([8], False), ([7] * 20, False)],
    ids=["at once", "its owner took it back", "it had ended before", "its owner never lets go"],
)
def test_a_session_has_ended_only_when_the_server_creates_another(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int | None], ended: bool
) -> None:
    class Client:
        client_id, hosts, _session_timeout = (7, b"password"), [("127.0.0.1", 1)], 2000

    given_out = iter(numbers)
    monkeypatch.setattr("multilock.testing.compare.contestants._close", lambda *_: next(given_out))
    assert close_kazoo(Client()) is ended


# ---- the network of a container


@pytest.mark.parametrize("scheme", ["redis", "redlock", "redis+sentinel", "redis+cluster", "sqlite"])
def test_a_network_fault_applies_only_if_it_is_between_client_and_server(scheme: str) -> None:
    column = Column("ours", f"{scheme}://127.0.0.1:1/name", [BLOCKING, ASYNCIO], 1.0)
    faults = [each for each in SCENARIOS.values() if "network" in each.needs]
    assert [bool(column.faces(each)) for each in faults] == [scheme in ("redis", "redlock")] * len(faults)
