"""Helper processes: one that holds a lock, to be paused, resumed and killed by a test.

The test names a function; it runs in a process of its own, and the two talk in lines::

    def holder(url: str) -> None:                     # in an importable module
        with multilock.connect(url).lock("n") as lease:
            say("held", lease.token)
            hear()                                    # until the test says something

    with Helper("tests.helpers:holder", url) as helper:
        helper.wait_for("held", within=10)
        helper.kill()
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from multilock.testing.pausing import end, go_on, stand_still

__all__ = ["Helper", "hear", "say"]

END_WITHIN = 5.0
PR_SET_PDEATHSIG = 1
BOOT = "import sys; from multilock.testing.process import run_helper; run_helper(*sys.argv[1:])"


def say(*words: object) -> None:
    """In the helper: one line to the test, whole whatever other threads say."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def hear() -> str | None:
    """In the helper: the next line from the test, or None when the test has ended. Blocks without limit."""
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


class Helper:
    """A Python process that calls ``function`` (``"package.module:function"``) with text arguments.

    It sees the same import path as the test. It is killed at the end of ``with``, and (Linux) when the process of the
    test dies, if the main thread made it.
    """

    def __init__(self, function: str, *arguments: object, env: dict[str, str] | None = None) -> None:
        if ":" not in function:
            raise ValueError(f"give the function as 'package.module:function', not {function!r}")
        self.function = function
        self.lines: list[str] = []
        self._seen: dict[str, int] = {}  # by word: lines that wait_for has looked at
        self._errors: list[str] = []
        self._ended = 0
        self._changed = threading.Condition()
        bound = threading.current_thread() is threading.main_thread()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(os.getpid() if bound else 0), function, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
            start_new_session=True,  # Ctrl-C is the test's
        )
        self._readers = [
            threading.Thread(target=self._read, args=args, name="helper-reader", daemon=True)
            for args in ((self._process.stdout, self.lines), (self._process.stderr, self._errors))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def errors(self) -> str:
        """What it wrote to stderr so far."""
        return "".join(f"{line}\n" for line in self._errors)

    def wait_for(self, word: str, within: float) -> list[str]:
        """The words of its next line that begins with ``word``, whatever else it said before or after.

        Raises AssertionError, with what it wrote, if it ends before, or after ``within`` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._find(word) is not None or self._ended == 2, within)
            if (found := self._find(word)) is not None:
                self._seen[word] = found + 1
                return self.lines[found].split()
        raise AssertionError(
            f"{self.function} did not say {word!r} within {within:g} s; it {self._state()}; it said {self.lines}\n"
            f"{self.errors}"
        )

    def tell(self, *words: object) -> None:
        """One line to the helper. Raises RuntimeError if it has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            raise self._gone()
        try:
            stdin.write(" ".join(map(str, words)) + "\n")
            stdin.flush()
        except BrokenPipeError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its pipes are closed before it counts as ended
                self._process.wait(END_WITHIN)
            raise self._gone() from None

    def pause(self) -> None:
        """Freeze it (SIGSTOP); back when all its threads stand still. Raises RuntimeError if it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                stand_still(self.pid)
                return
            self._process.wait()
        raise self._gone()

    def resume(self) -> None:
        """Let it go on; harmless if it was not paused, or has ended."""
        if self.returncode is None:
            go_on(self.pid)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen inside this block, in which it may also be killed."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; harmless if it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it and its own children at once (SIGKILL), paused or not, and wait until it is gone."""
        if self.returncode is None:
            end(self.pid)
        else:
            with contextlib.suppress(ProcessLookupError):  # its children
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, within: float) -> int:
        """Its exit code; subprocess.TimeoutExpired if it still runs after ``within`` seconds."""
        return self._process.wait(within)

    def close(self) -> None:
        self.kill()
        for reader in self._readers:
            reader.join(END_WITHIN)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):  # what was told to a dead helper
                assert stream is not None
                stream.close()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, within: float) -> list[str]:
        """What it said since this was asked before, and is kept no longer; waits so long if it is nothing yet."""
        with self._changed:
            if within and not self.lines:
                self._changed.wait(within)
            taken = self.lines[:]
            self.lines.clear()
            return taken

    def _state(self) -> str:
        return "runs" if self.returncode is None else f"ended with {self.returncode}"

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"{self.function} {self._state()}: it cannot be reached\n{self.errors}")

    def _find(self, word: str) -> int | None:
        hits = (n for n in range(self._seen.get(word, 0), len(self.lines)) if self.lines[n].split()[:1] == [word])
        return next(hits, None)

    def _read(self, stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


def run_helper(parent: str, function: str, *arguments: str) -> None:
    """In the helper: call ``function``; ``parent`` is the process it must not outlive, 0 for none."""
    if int(parent) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before prctl
            sys.exit(1)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
