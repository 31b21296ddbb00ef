"""`multilock run` on a terminal: the command gets the terminal, and returns it at the end."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import WITHIN, environment, gone

Open = Callable[[str], "Terminal"]
MULTILOCK = f"{sys.executable} -m multilock"


class Terminal:
    """A pseudo-terminal with a program in its own session. The test types and reads as a user would."""

    def __init__(self, script: str, folder: Path) -> None:
        self.seen = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:  # in the child: a shell without job control, whose group is the terminal's foreground
            os.chdir(folder)
            os.execvpe("sh", ["sh", "-c", script], environment())

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + WITHIN
        while text not in self.seen:
            assert self._read(deadline), f"{text!r} never came, but: {self.seen!r}"

    def wait(self) -> int:
        """Wait until every process has left the terminal, and return the exit code of the script."""
        deadline = time.monotonic() + WITHIN
        while self._read(deadline):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more came after {self.seen!r}"
        try:
            data = os.read(self._fd, 4096)
        except OSError:  # on Linux: no process has the terminal open
            return False
        self.seen += data.decode()
        return bool(data)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        with contextlib.suppress(OSError):
            os.close(self._fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def open_(script: str) -> Terminal:
            opened = Terminal(script, tmp_path)
            stack.callback(opened.close)
            return opened

        yield open_


def test_the_command_reads_the_terminal_and_the_shell_gets_it_back(terminal: Open, sqlite_url: str) -> None:
    script = f"{MULTILOCK} run job --url {sqlite_url} -- sh -c 'read x; echo command $x'; read y; echo shell $y"
    shell = terminal(script)
    shell.type("one\n")
    shell.wait_for("command one")
    shell.type("two\n")
    shell.wait_for("shell two")
    assert shell.wait() == 0


def test_ctrl_c_reaches_the_command_and_the_lock_is_released(terminal: Open, sqlite_url: str) -> None:
    script = f"trap : INT; {MULTILOCK} run job --url {sqlite_url} -- sh -c \"trap 'exit 7' INT; echo ready; read x\""
    shell = terminal(f"{script}; echo code $?; {MULTILOCK} status --json --url {sqlite_url}")
    shell.wait_for("ready")
    shell.type("\x03")
    shell.wait_for("code")
    shell.wait()
    assert "code 7" in shell.seen
    assert "[]" in shell.seen


def test_ctrl_c_ends_the_wait_for_a_lock(terminal: Open, sqlite_url: str) -> None:
    held = f"{MULTILOCK} run job --url {sqlite_url} -- sh -c 'touch held; sleep 60' </dev/null & trap : INT;"
    until_held = "while [ ! -e held ]; do sleep 0.05; done;"
    shell = terminal(f"{held} {until_held} {MULTILOCK} run job --url {sqlite_url} -- true; echo code $?; kill $!")
    shell.wait_for("waiting for 'job'")
    shell.type("\x03")
    shell.wait_for("code 130")


def test_ctrl_z_does_not_suspend_a_command_that_holds_a_lock(terminal: Open, sqlite_url: str) -> None:
    shell = terminal(f"{MULTILOCK} run job --url {sqlite_url} -- sh -c 'echo ready; read x; echo got $x'")
    shell.wait_for("ready")
    shell.type("\x1a")
    shell.type("still here\n")
    shell.wait_for("got still here")
    assert shell.wait() == 0


def test_a_command_in_a_pipeline_gets_the_terminal_when_it_reads(terminal: Open, sqlite_url: str) -> None:
    shell = terminal(f"{MULTILOCK} run job --url {sqlite_url} -- sh -c 'read x; echo got $x' | cat")
    shell.type("asked\n")
    shell.wait_for("got asked")
    assert shell.wait() == 0


def test_a_closed_terminal_ends_the_command(terminal: Open, sqlite_url: str, tmp_path: Path) -> None:
    shell = terminal(f"{MULTILOCK} run job --url {sqlite_url} -- sh -c 'echo $$ > pid; echo ready; exec sleep 60'")
    shell.wait_for("ready")
    pid = int((tmp_path / "pid").read_text())
    shell.close()
    deadline = time.monotonic() + WITHIN
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_output_fits_80_columns(terminal: Open, sqlite_url: str, command: str) -> None:
    name = "n" * 100
    status = f"{MULTILOCK} {command} --url {sqlite_url}"
    shell = terminal(f"stty cols 80; {MULTILOCK} run {name} --url {sqlite_url} -- {status}")
    shell.wait()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shell.seen).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
