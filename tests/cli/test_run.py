"""`multilock run`: a command runs only while its lock is held, and each way in which it can end has its exit code."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import multilock
from multilock.testing.conformance.base import Pulse
from tests.cli.conftest import WITHIN, Run, RunEach, Start, environment, gone, line_of, until
from tests.servers import RedisServer, free_port

TTL = "2"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
OBEDIENT = "trap 'exit 5' TERM INT HUP; echo ready; while :; do sleep 0.05; done"


# ---- the command and its exit code


def test_the_command_receives_name_token_and_owner(run: Run, url: str) -> None:
    show = 'echo "$MULTILOCK_NAME|$MULTILOCK_TOKEN|$MULTILOCK_OWNER"'
    name, token, owner = run("run", "a b", "--url", url, "--", "sh", "-c", show).stdout.strip().split("|")
    assert name == "a b"
    assert owner
    again = run("run", "a b", "--url", url, "--", "sh", "-c", show).stdout.strip().split("|")
    assert int(again[1]) > int(token)
    assert again[2] != owner


def test_the_lock_is_held_while_the_command_runs_and_free_afterwards(
    start: Start, url: str, client: multilock.Client
) -> None:
    process = start("run", "job", "--url", url, "--", "sh", "-c", OBEDIENT)
    assert line_of(process) == "ready"
    assert client.lock("job").try_acquire() is None
    process.terminate()
    process.wait(WITHIN)
    lease = client.lock("job").try_acquire()
    assert lease is not None
    lease.release()


@pytest.mark.parametrize("code", [0, 64, 255])
def test_the_exit_code_is_that_of_the_command(run: Run, sqlite_url: str, code: int) -> None:
    assert run("run", "job", "--url", sqlite_url, "--", "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_command_killed_by_a_signal_returns_128_plus_the_signal(run: Run, sqlite_url: str, signum: int) -> None:
    assert run("run", "job", "--url", sqlite_url, "--", "sh", "-c", f"kill -{signum:d} $$").returncode == 128 + signum


def test_a_command_that_does_not_exist_returns_127_and_frees_the_lock(run: Run, sqlite_url: str) -> None:
    ended = run("run", "job", "--url", sqlite_url, "--", "no-such-command")
    assert (ended.returncode, ended.stderr) == (127, "multilock: no-such-command: No such file or directory\n")
    assert run("status", "--json", "--url", sqlite_url).stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["run", "elect"])
def test_an_empty_command_is_a_usage_error_and_acquires_nothing(run: Run, sqlite_url: str, command: str) -> None:
    # The lock is taken: a command that requested it would wait forever.
    with multilock.connect(sqlite_url) as client, client.lock("job"):
        ended = run(command, "job", "--url", sqlite_url, "--", "")
    assert (ended.returncode, ended.stderr) == (64, "multilock: CMD is empty: name the program to run after --\n")


def test_a_command_that_cannot_be_executed_returns_126(run: Run, sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    ended = run("run", "job", "--url", sqlite_url, "--", str(tmp_path / "plain"))
    assert (ended.returncode, ended.stderr.count("\n")) == (126, 1)


def test_options_after_the_two_dashes_belong_to_the_command(run: Run, sqlite_url: str) -> None:
    ended = run("run", "job", "--url", sqlite_url, "--", "echo", "--url", "-E", "--help")
    assert ended.stdout == "--url -E --help\n"


def test_the_url_may_come_from_the_environment_or_a_profile(run: Run, sqlite_url: str, tmp_path: Path) -> None:
    assert run("run", "job", "--", "true", env={"MULTILOCK_URL": sqlite_url}).returncode == 0
    (tmp_path / "mine.toml").write_text(f'[profiles.here]\nurl = "{sqlite_url}"')
    assert run("run", "job", "--profile", "here", "--config", "mine.toml", "--", "true").returncode == 0


@pytest.mark.parametrize("command", ["run", "elect"])
def test_the_command_gets_the_descriptors_that_the_caller_opened(sqlite_url: str, tmp_path: Path, command: str) -> None:
    held = f"{sys.executable} -m multilock {command} job --url {sqlite_url} --"
    for script, printed in (
        (f"{held} diff <(echo a) <(echo a) && echo same", "same\n"),
        (f"{held} sh -c 'echo written >&3' 3> f; cat f", "written\n"),
    ):
        ended = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=WITHIN
        )
        assert (ended.stdout, ended.stderr) == (printed, "")


def test_no_other_descriptor_is_open_in_the_command(run: Run, sqlite_url: str) -> None:
    # The last entry is left out, because it is the descriptor of the listing itself.
    program = "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:-1])"
    assert run("run", "job", "--url", sqlite_url, "--", sys.executable, "-c", program).stdout == "['0', '1', '2']\n"


def test_systemd_sockets_are_passed_on_with_the_pid_of_the_command(sqlite_url: str, tmp_path: Path) -> None:
    held = f"LISTEN_PID=$$ exec {sys.executable} -m multilock run job --url {sqlite_url} --"
    script = f"{held} sh -c '[ $LISTEN_PID = $$ ] && echo ours'"
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=WITHIN
    )
    assert ended.stdout == "ours\n"


@pytest.mark.parametrize("command", ["run", "elect"])
def test_a_command_with_options_but_without_two_dashes_is_a_usage_error(
    run: Run, sqlite_url: str, command: str
) -> None:
    ended = run(command, "job", "--url", sqlite_url, "sh", "-c", "true")
    assert ended.returncode == 64
    assert ended.stderr.endswith(
        f"multilock: unrecognized arguments: -c true: write CMD after -- (see multilock {command} --help)\n"
    )


# ---- a lock that is held already


def test_a_taken_lock_returns_75_at_the_timeout(run: Run, url: str, client: multilock.Client) -> None:
    with client.lock("job"):
        for timeout, taken in (("0", "is taken"), ("1.5", "is still taken after 1.5 s")):
            ended = run("run", "job", "--url", url, "--timeout", timeout, "--", "echo", "ran")
            assert (ended.returncode, ended.stdout) == (75, "")
            assert f"'job' {taken}: " in ended.stderr
            assert "multilock status" in ended.stderr


def test_the_code_for_a_taken_lock_can_be_chosen(run: Run, url: str, client: multilock.Client) -> None:
    with client.lock("job"):
        assert run("run", "job", "--url", url, "--timeout", "0", "-E", "9", "--", "true").returncode == 9


def test_quiet_prints_nothing_about_a_taken_lock(run: Run, url: str, client: multilock.Client) -> None:
    with client.lock("job"):
        ended = run("run", "job", "--url", url, "--timeout", "0", "-E", "0", "--quiet", "--", "echo", "ran")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("url", ["sqlite", "redis"], indirect=True)
def test_a_short_job_does_not_run_again_before_hold_at_least_is_over(run: Run, url: str) -> None:
    job = ("run", "job", "--hold-at-least", "600", "--timeout", "0", "--url", url, "--", "echo", "ran")
    assert run(*job).stdout == "ran\n"
    again = run(*job)
    assert (again.returncode, again.stdout) == (75, "")
    name, kind, *_, resting, left = run("status", "--url", url).stdout.rstrip("\n").split("\t")
    assert (name, kind) == ("job", "lock")
    assert 500 < float(left) <= 600
    assert 500 < (datetime.fromisoformat(resting) - datetime.now(UTC)).total_seconds() <= 601
    assert run("force-release", "job", "--yes", "--url", url).returncode == 0
    assert run(*job).stdout == "ran\n"


def test_a_command_that_cannot_be_started_leaves_no_rest(run: Run, url: str) -> None:
    job = ("run", "job", "--hold-at-least", "600", "--timeout", "0", "--url", url, "--")
    assert run(*job, "no-such-command").returncode == 127
    assert run(*job, "/").returncode == 126
    assert run(*job, "echo", "ran").stdout == "ran\n"


def test_a_command_waits_until_the_other_has_ended(run: Run, start: Start, url: str) -> None:
    first = start("run", "job", "--url", url, "--", "sh", "-c", OBEDIENT)
    assert line_of(first) == "ready"
    second = start("run", "job", "--url", url, "--", "echo", "second")
    assert run("run", "job", "--url", url, "--timeout", "1.5", "--", "true").returncode == 75
    first.terminate()
    assert line_of(second) == "second"
    assert second.wait(WITHIN) == 0


# ---- a backend that cannot be reached


def test_a_silent_backend_is_reported_at_once_and_waited_for(start: Start) -> None:
    began = time.monotonic()
    process = start("run", "job", "--url", f"redis://127.0.0.1:{free_port()}?outage_timeout=2", "--", "true")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("multilock: ")
    said = time.monotonic()
    assert process.poll() is None
    assert process.wait(WITHIN) == 69
    assert time.monotonic() - began >= 2
    assert time.monotonic() - said < 10
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("url", ["redis://u:hunter2@127.0.0.1:{}", "zk://127.0.0.1:{}?request_timeout=1"])
def test_one_try_at_a_silent_backend_returns_69_and_one_line(run: Run, url: str) -> None:
    ended = run("run", "job", "--url", url.format(free_port()), "--timeout", "0", "--", "true")
    assert ended.returncode == 69
    assert "hunter2" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_wrong_password_returns_69_at_once_and_is_not_shown(run: Run) -> None:
    with RedisServer("--requirepass", "right") as server:
        url = server.url.replace("redis://", "redis://:hunter2@")
        ended = run("run", "job", "--url", url, "--", "true")
    assert ended.returncode == 69
    assert ended.stderr
    assert "hunter2" not in ended.stderr


# ---- usage


MISTAKES = [
    (),
    ("nonsense",),
    ("run",),
    ("run", "job"),
    ("run", "job", "--url", "memory://"),
    ("run", "job", "--", "true"),
    ("run", "job", "--nonsense", "--", "true"),
    ("run", "", "--url", "memory://", "--", "true"),
    ("run", "a\nb", "--url", "memory://", "--", "true"),
    ("run", "job", "--url", "nonsense://", "--", "true"),
    ("run", "job", "--url", "memory://?nonsense=1", "--", "true"),
    ("run", "job", "--url", "memory://", "--timeout", "-1", "--", "true"),
    ("run", "job", "--url", "memory://", "--timeout", "nan", "--", "true"),
    ("run", "job", "--url", "memory://", "--timeout", "soon", "--", "true"),
    ("run", "job", "--url", "memory://", "--ttl", "0", "--", "true"),
    ("run", "job", "--url", "memory://", "--ttl", "inf", "--", "true"),
    ("run", "job", "--url", "memory://", "-E", "256", "--", "true"),
    ("run", "job", "--profile", "nonsense", "--", "true"),
    ("run", "job", "--config", "nonsense.toml", "--", "true"),
    ("elect", "job", "--url", "memory://", "--identity", "", "--", "true"),
    ("status", "--url", "nonsense"),
    ("force-release", "job", "--url", "memory://"),
    ("doctor", "--url", "memory://user:hunter2@h?ttl=0"),
    ("demo", "--nodes", "1"),
    ("demo", "--url", "memory://"),
]


def test_every_mistake_in_usage_or_configuration_returns_64_and_a_reason(run_each: RunEach) -> None:
    for ended in run_each(*MISTAKES):
        assert ended.returncode == 64, ended
        assert ended.stderr or not ended.args
        assert "hunter2" not in ended.stderr + ended.stdout
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", ["run", "elect"])
def test_a_url_that_excludes_no_other_process_is_refused(run: Run, command: str) -> None:
    ended = run(command, "job", "--", "echo", "ran", env={"MULTILOCK_URL": "memory://"})
    assert (ended.returncode, ended.stdout) == (64, "")
    assert "memory:// works only inside one process" in ended.stderr


# ---- signals


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_exit_code_is_the_commands(
    start: Start, url: str, signum: signal.Signals
) -> None:
    process = start("run", "job", "--url", url, "--", "sh", "-c", OBEDIENT)
    assert line_of(process) == "ready"
    process.send_signal(signum)
    assert process.wait(WITHIN) == 5


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_dies_of_a_signal_returns_128_plus_the_signal(
    start: Start, sqlite_url: str, signum: signal.Signals
) -> None:
    process = start("run", "job", "--url", sqlite_url, "--", "sh", "-c", "echo ready; exec sleep 60")
    assert line_of(process) == "ready"
    process.send_signal(signum)
    assert process.wait(WITHIN) == 128 + signum


def test_a_command_that_ignores_the_signal_keeps_the_lock(start: Start, url: str, client: multilock.Client) -> None:
    process = start("run", "job", "--url", url, "--", "sh", "-c", STUBBORN)
    assert line_of(process) == "ready"
    process.terminate()
    with pytest.raises(multilock.LockTimeout):
        client.lock("job").acquire(timeout=2)
    assert process.poll() is None


@pytest.mark.oracle
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_the_lock_and_leaves_nothing(
    start: Start, url: str, client: multilock.Client, signum: signal.Signals
) -> None:
    with client.lock("job"):
        process = start("run", "job", "--url", url, "--", "true")
        until(lambda: _waiting(client, "job"))
        process.send_signal(signum)
        assert process.wait(WITHIN) == 128 + signum
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    until(lambda: client.inspect("job") is None)


def _waiting(client: multilock.Client, name: str) -> bool:
    info = client.inspect(name)
    return info is not None and bool(info.waiting)


def test_an_ignored_signal_stays_ignored_in_the_command(start: Start, sqlite_url: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("run", "job", "--url", sqlite_url, "--", "sh", "-c", "echo ready; sleep 0.5; exit 3")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert line_of(process) == "ready"
    process.send_signal(signal.SIGHUP)
    assert process.wait(WITHIN) == 3


def _python_with(code: str, folder: Path) -> dict[str, str]:
    """Return an environment in which the multilock process first runs ``code``. The launcher of that process and the
    test do not run ``code``."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{environment()['PYTHONPATH']}"}


def test_the_lock_is_released_although_signals_arrive_at_the_worst_moments(
    start: Start, sqlite_url: str, tmp_path: Path
) -> None:
    """The first signal arrives as the lock is granted, the second signal as the client is about to close."""
    code = """
import os, signal
from multilock.client import Client
from multilock.kernel.client import Kernel

def after(method, before=lambda: None):
    def call(*args, **more):
        before()
        result = method(*args, **more)
        os.kill(os.getpid(), signal.SIGTERM)
        return result
    return call

Kernel.adopt = after(Kernel.adopt)
Client.close = after(Client.close, lambda: os.kill(os.getpid(), signal.SIGTERM))
"""
    env = _python_with(code, tmp_path)
    process = start("run", "job", "--ttl", "600", "--url", sqlite_url, "--", "echo", "ran", env=env)
    assert process.wait(WITHIN) == 128 + signal.SIGTERM
    with multilock.connect(sqlite_url) as client:
        assert client.inspect("job") is None


# ---- a lock that is lost


@pytest.mark.parametrize("end", ["signal", "loss"])
def test_a_command_whose_launcher_is_frozen_never_starts_after_a_signal_or_a_loss(
    start: Start, sqlite_url: str, tmp_path: Path, end: str
) -> None:
    process = start("run", "job", "--ttl", TTL, "--url", sqlite_url, "--", "touch", str(tmp_path / "ran"))
    found: list[int] = []

    def launcher() -> bool:
        found.extend(pid for pid in _children(process.pid) if "launch.py" in _words(pid))
        return bool(found)

    until(launcher)
    os.kill(found[0], signal.SIGSTOP)
    if "launch.py" not in _words(found[0]):
        os.kill(found[0], signal.SIGCONT)
        pytest.skip("the command ran before its launcher could be stopped")
    with multilock.connect(sqlite_url) as client:
        if end == "signal":
            process.terminate()
        else:
            client.force_release("job")
        assert process.wait(WITHIN) == (128 + signal.SIGTERM if end == "signal" else 76)
        assert gone(found[0])
        client.lock("job").acquire(timeout=WITHIN).release()
    assert not (tmp_path / "ran").exists()


def _children(parent: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_lost_lock_ends_the_command_although_no_thread_can_start(
    start: Start, sqlite_url: str, tmp_path: Path
) -> None:
    """No thread can start once the command has used up the limit of processes."""
    code = """
import _thread, os

def refusing(start):
    def call(*args, **more):
        if os.path.exists("refuse"):
            raise RuntimeError("can't start new thread")
        return start(*args, **more)
    return call

for name in ("start_new_thread", "start_joinable_thread"):
    if hasattr(_thread, name):
        setattr(_thread, name, refusing(getattr(_thread, name)))
"""
    env = _python_with(code, tmp_path)
    script = f"touch refuse; echo $$; {STUBBORN}"
    process = start("run", "job", "--ttl", TTL, "--url", sqlite_url, "--", "sh", "-c", script, env=env)
    pid = int(line_of(process))
    with multilock.connect(sqlite_url) as client:
        client.force_release("job")
    assert process.wait(WITHIN) == 76
    assert gone(pid)
    assert process.stderr is not None
    said = process.stderr.read()
    assert "lost the lock 'job'" in said
    assert "ending sh" in said


@pytest.mark.parametrize("end", ["loss", "kill"])
def test_a_command_that_timeout_moved_to_another_group_still_ends_with_the_lock(
    start: Start, sqlite_url: str, end: str
) -> None:
    moved = f"timeout 600 sh -c {shlex.quote(f'echo $$; {STUBBORN}')}; true"
    process = start("run", "job", "--ttl", TTL, "--url", sqlite_url, "--", "sh", "-c", moved)
    pid = int(line_of(process))
    assert line_of(process) == "ready"
    try:
        if end == "kill":
            process.kill()
        else:
            with multilock.connect(sqlite_url) as client:
                client.force_release("job")
            assert process.wait(WITHIN) == 76
        until(lambda: gone(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("url", ["sqlite", "redis"], indirect=True)
def test_a_lost_lock_ends_the_command_and_returns_76(start: Start, url: str, client: multilock.Client) -> None:
    process = start("run", "job", "--ttl", TTL, "--url", url, "--", "sh", "-c", "echo ready; exec sleep 60")
    assert line_of(process) == "ready"
    assert client.force_release("job")
    assert process.wait(WITHIN) == 76
    assert process.stderr is not None
    said = process.stderr.read()
    assert "lost the lock 'job' (taken)" in said
    assert "ending sh" in said


def test_a_command_that_runs_too_long_ends_before_the_lock_is_released(
    start: Start, sqlite_url: str, tmp_path: Path
) -> None:
    slow = "trap 'sleep 0.4; echo last >> log; exit' TERM; echo ready; while :; do sleep 0.05; done"
    first = start("run", "job", "--ttl", "5", "--max-hold", "0.5", "--url", sqlite_url, "--", "sh", "-c", slow)
    assert line_of(first) == "ready"
    second = start("run", "job", "--url", sqlite_url, "--", "sh", "-c", "echo next >> log")
    assert second.wait(WITHIN) == 0
    assert (tmp_path / "log").read_text() == "last\nnext\n"
    assert first.wait(WITHIN) == 76


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has such timers")
@pytest.mark.parametrize("command", ["run", "elect"])
def test_a_frozen_multilock_with_a_hard_fence_is_killed_with_its_command(
    start: Start, sqlite_url: str, command: str
) -> None:
    script = f"echo $$; {STUBBORN}"
    process = start(command, "job", "--ttl", TTL, "--hard-fence", "--url", sqlite_url, "--", "sh", "-c", script)
    child = int(line_of(process))
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(WITHIN) == -signal.SIGKILL
    until(lambda: gone(child))


def test_a_command_that_exits_with_zero_after_the_loss_returns_76_too(
    start: Start, url: str, client: multilock.Client
) -> None:
    process = start("run", "job", "--ttl", TTL, "--url", url, "--", "sh", "-c", OBEDIENT)
    assert line_of(process) == "ready"
    assert client.force_release("job")
    assert process.wait(WITHIN) == 76


@pytest.mark.parametrize("url", ["sqlite", "redis"], indirect=True)
def test_a_command_that_ignores_sigterm_is_killed_before_the_validity_ends(
    start: Start, url: str, client: multilock.Client
) -> None:
    process = start("run", "job", "--ttl", TTL, "--url", url, "--", "sh", "-c", f"echo $$; {STUBBORN}")
    pid = int(line_of(process))
    assert line_of(process) == "ready"
    assert client.force_release("job")
    forced_at = multilock.now()
    until(lambda: gone(pid))
    assert multilock.now() - forced_at < float(TTL) + 1
    assert process.wait(WITHIN) == 76


@pytest.mark.parametrize("first", [":", "trap '' TERM"])
def test_the_whole_process_group_of_the_command_ends_with_the_lock(
    start: Start, url: str, client: multilock.Client, first: str
) -> None:
    child = f"{first}; echo \\$\\$; while :; do sleep 0.05; done"
    parent = f"trap 'exit 0' TERM; sh -c \"{child}\" & wait"
    process = start("run", "job", "--ttl", TTL, "--url", url, "--", "sh", "-c", parent)
    pid = int(line_of(process))
    assert client.force_release("job")
    assert process.wait(WITHIN) == 76
    until(lambda: gone(pid))


def test_a_suspended_command_ends_with_the_lock(start: Start, url: str, client: multilock.Client) -> None:
    process = start("run", "job", "--ttl", TTL, "--url", url, "--", "sh", "-c", "echo $$; exec sleep 60")
    os.kill(int(line_of(process)), signal.SIGSTOP)
    assert client.force_release("job")
    assert process.wait(WITHIN) == 76


def test_a_silent_backend_ends_the_command_before_another_can_hold_the_lock(
    start: Start, redis_server: RedisServer
) -> None:
    process = start("run", "job", "--ttl", TTL, "--url", redis_server.url, "--", "sh", "-c", f"echo $$; {STUBBORN}")
    pid = int(line_of(process))
    assert line_of(process) == "ready"
    with redis_server.paused(), Pulse() as pulse:
        paused_at = multilock.now()
        until(lambda: gone(pid))
        assert multilock.now() - paused_at < float(TTL) + pulse.stopped()
        assert process.wait(WITHIN) == 76


def _full_pipe() -> tuple[int, int]:
    """Return the two ends of a pipe that is full, so that a write to it blocks."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, bytes(4096)):
            pass
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"."):
            pass
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.parametrize("command", ["run", "elect"])
def test_a_lost_lock_ends_the_command_although_nobody_reads_stderr(
    start: Start, url: str, client: multilock.Client, command: str
) -> None:
    reader, writer = _full_pipe()
    quiet = f"exec 2>/dev/null; echo $$; {OBEDIENT}"  # the shell would print "Terminated" to the full pipe, and block
    process = start(command, "job", "--ttl", "6", "--url", url, "--", "sh", "-c", quiet, stderr=writer)
    os.close(writer)
    pid = int(line_of(process))
    assert line_of(process) == "ready"
    assert client.force_release("job")
    until(lambda: gone(pid), within=6)  # if a backend does not push losses, multilock queries it every third of the ttl
    if command == "run":
        assert process.wait(WITHIN) == 76
    else:
        assert line_of(process) != str(pid), "it campaigns again"
        assert line_of(process) == "ready"
        process.terminate()
        assert process.wait(WITHIN) == 5
    os.close(reader)


def test_a_message_to_a_full_stderr_is_delivered_once_it_is_read(start: Start, sqlite_url: str) -> None:
    reader, writer = _full_pipe()
    process = start("run", "job", "--ttl", TTL, "--url", sqlite_url, "--", "sh", "-c", STUBBORN, stderr=writer)
    os.close(writer)
    assert line_of(process) == "ready"
    with multilock.connect(sqlite_url) as other:
        assert other.force_release("job")
    with os.fdopen(reader, "rb") as read:
        said = read.read().strip(b"\0.").decode()
    assert process.wait(WITHIN) == 76
    assert "multilock: ending sh\n" in said


@pytest.mark.parametrize("command", ["run", "elect"])
def test_after_multilock_is_killed_the_name_stays_taken_while_its_command_may_live(
    start: Start, sqlite_url: str, command: str
) -> None:
    process = start(command, "job", "--ttl", "6", "--url", sqlite_url, "--", "sh", "-c", "echo $$; sleep 60")
    pid = int(line_of(process))
    with multilock.connect(sqlite_url) as client:
        process.kill()
        killed_at = multilock.now()
        process.wait(WITHIN)
        until(lambda: gone(pid))
        with Pulse() as pulse:
            taken = client.lock("job").try_acquire()
            # The lock must stay taken until its ttl ends. On an overloaded machine the ttl may end before this try.
            assert taken is None or multilock.now() - killed_at + pulse.stopped() > 3
        client.lock("job").acquire(timeout=WITHIN).release()


# Without the capability ``kill``, multilock as root cannot kill a process of another user. A user who starts a command
# with `sudo` has the same problem.
UNPRIVILEGED = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill"]
ANOTHER_USER = ["setpriv", "--reuid", "65534", "--clear-groups", "sh", "-c", "echo $$; exec sleep 60"]
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start something as another user")


@only_root
@pytest.mark.parametrize("shell", [False, True], ids=["itself", "child-of-a-shell"])
@pytest.mark.parametrize("command", ["run", "elect"])
def test_a_command_that_may_not_be_killed_is_reported_at_once_and_ends_multilock_in_time(
    start: Start, url: str, client: multilock.Client, command: str, shell: bool
) -> None:
    ttl = 6.0
    words = ["sh", "-c", f"{shlex.join(ANOTHER_USER)}; true"] if shell else ANOTHER_USER
    process = start(command, "job", "--ttl", f"{ttl:g}", "--url", url, "--", *words, through=UNPRIVILEGED)
    pid = int(line_of(process))
    try:
        with Pulse() as pulse:
            assert client.force_release("job")
            forced_at = multilock.now()
            assert process.stderr is not None
            while "cannot be ended" not in process.stderr.readline():
                assert process.poll() is None
            assert multilock.now() - forced_at < ttl / 2 + pulse.stopped()
            assert process.wait(WITHIN) == 76
            assert multilock.now() - forced_at < ttl + pulse.stopped()
        while "still runs, without the lock" not in process.stderr.readline():
            pass  # skip the line with the reason of the loss
        assert not gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


@only_root
def test_a_signal_that_may_not_be_passed_on_is_reported(start: Start, sqlite_url: str) -> None:
    process = start("run", "job", "--url", sqlite_url, "--", *ANOTHER_USER, through=UNPRIVILEGED)
    pid = int(line_of(process))
    process.terminate()
    assert process.stderr is not None
    assert "SIGTERM cannot be passed on" in process.stderr.readline()
    os.kill(pid, signal.SIGKILL)
    assert process.wait(WITHIN) == 128 + signal.SIGKILL


# ---- the death of multilock itself


def test_the_command_dies_with_multilock(start: Start, url: str) -> None:
    process = start("run", "job", "--ttl", TTL, "--url", url, "--", "sh", "-c", f"echo $$; {STUBBORN}")
    pid = int(line_of(process))
    assert line_of(process) == "ready"
    process.kill()
    until(lambda: gone(pid))


@pytest.mark.parametrize(
    "script",
    [
        "{0} & wait",
        "({0} &) ; sleep 60",
        "trap '' TERM HUP; {0} & wait",
        "({0} &) ; sleep 0.3; exec <&- >&- 2>&-; sleep 60",
    ],
    ids=["child", "double-fork", "stubborn", "closed-streams"],
)
def test_the_whole_process_group_of_the_command_dies_with_multilock(start: Start, url: str, script: str) -> None:
    """Cron starts each command with a shell that leads a process group."""
    child = "sh -c 'echo $$; exec sleep 60'"
    process = start("run", "job", "--ttl", TTL, "--url", url, "--", "sh", "-c", script.format(child))
    pid = int(line_of(process))
    process.kill()
    until(lambda: gone(pid))


def test_a_process_outside_the_group_survives_as_the_docs_say(start: Start, sqlite_url: str) -> None:
    script = "setsid sh -c 'echo $$; exec sleep 60' & echo $$; wait"
    process = start("run", "job", "--url", sqlite_url, "--", "sh", "-c", script)
    pids = {int(line_of(process)), int(line_of(process))}
    process.kill()
    until(lambda: any(gone(pid) for pid in pids))
    (escaped,) = [pid for pid in pids if not gone(pid)]
    os.kill(escaped, signal.SIGKILL)


def test_a_background_process_of_the_command_outlives_multilock_and_holds_no_lock(
    run: Run, sqlite_url: str, tmp_path: Path
) -> None:
    left = "sh -c 'echo $$ > pid; exec sleep 60' >/dev/null 2>&1 &"
    ended = run("run", "job", "--url", sqlite_url, "--", "sh", "-c", f"{left} while [ ! -s pid ]; do sleep 0.05; done")
    pid = int((tmp_path / "pid").read_text())
    assert ended.returncode == 0
    with multilock.connect(sqlite_url) as client, client.lock("job").acquire(timeout=0), pytest.raises(TimeoutError):
        until(lambda: gone(pid), within=0.5)
    os.kill(pid, signal.SIGKILL)


def test_no_process_of_multilock_is_left_when_it_ends(start: Start, sqlite_url: str, tmp_path: Path) -> None:
    mark = f"MARK={tmp_path}"
    process = start("run", "job", "--url", sqlite_url, "--", "sh", "-c", OBEDIENT, env={"MARK": str(tmp_path)})
    assert line_of(process) == "ready"
    assert len(_processes_with(mark)) > 2, "a watcher among them"
    process.terminate()
    assert process.wait(WITHIN) == 5
    until(lambda: not _processes_with(mark))


def _processes_with(variable: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def test_the_command_has_a_process_group_of_its_own(start: Start, sqlite_url: str) -> None:
    show = "import os; print(os.getpid(), os.getpgrp(), os.getsid(0))"
    process = start("run", "job", "--url", sqlite_url, "--", sys.executable, "-c", show)
    pid, group, session = map(int, line_of(process).split())
    assert pid == group
    assert session == os.getsid(0)


def test_the_command_has_the_signal_handling_that_a_shell_would_set(run: Run, sqlite_url: str) -> None:
    show = r"grep -E '^Sig(Ign|Blk):' /proc/self/status"
    without = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True).stdout
    assert run("run", "job", "--url", sqlite_url, "--", "sh", "-c", show).stdout == without


def test_closed_standard_streams_are_not_reused_for_other_files(sqlite_url: str, tmp_path: Path) -> None:
    show = "ls -l /proc/self/fd > seen; exit 3"
    script = f"{sys.executable} -m multilock run job --url {sqlite_url} -- sh -c '{show}' <&- >&- 2>&-"
    ended = subprocess.run(["sh", "-c", script], env=environment(), cwd=tmp_path, check=False, timeout=WITHIN)
    assert ended.returncode == 3
    assert (tmp_path / "seen").read_text().count("/dev/null") == 2


def test_the_end_of_a_command_is_noticed_although_sigchld_is_blocked(start: Start, sqlite_url: str) -> None:
    block = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD]); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = start("run", "job", "--url", sqlite_url, "--", "true", through=[sys.executable, "-c", block])
    assert process.wait(WITHIN) == 0
