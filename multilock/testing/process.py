"""Helper processes: a test starts a process, for example one that holds a lock, and can freeze, resume and kill it.

The test names a function, which runs in its own process. The test and the function exchange lines::

    def holder(url: str) -> None:                     # in an importable module
        with multilock.connect(url).lock("n") as lease:
            say("held", lease.token)
            hear()                                    # waits for a line from the test

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
    """Send one line from the helper process to the test. Lines of several threads are not mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def hear() -> str | None:
    """In the helper: return the next line from the test, or None if the test has ended. Waits without limit."""
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


class Helper:
    """A Python process that calls ``function`` (``"package.module:function"``) with text arguments.

    The helper has the same import path as the test. The end of ``with`` kills it. On Linux it also dies with the
    process of the test, if the main thread of the test started it.
    """

    def __init__(self, function: str, *arguments: object, env: dict[str, str] | None = None) -> None:
        if ":" not in function:
            raise ValueError(f"give the function as 'package.module:function', not {function!r}")
        self.function = function
        self.lines: list[str] = []
        self._seen: dict[str, int] = {}  # by word: how many lines wait_for has examined
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
            start_new_session=True,  # so that Ctrl-C reaches only the test
        )
        self._readers = [
            threading.Thread(target=self._read, args=args, name="helper-reader", daemon=True)
            for args in ((self._process.stdout, self.lines), (self._process.stderr, self._errors))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative if a signal ended it, or None while it runs."""
        return self._process.poll()

    @property
    def errors(self) -> str:
        """The output of the helper on stderr so far."""
        return "".join(f"{line}\n" for line in self._errors)

    def wait_for(self, word: str, within: float) -> list[str]:
        """Wait for the helper's next line that begins with ``word`` and return the words of that line. Other lines are
        ignored.

        Raises AssertionError, with all output of the helper, if the helper ends first or ``within`` seconds have
        passed.
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
        """Send one line to the helper. Raises RuntimeError if it has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            raise self._gone()
        try:
            stdin.write(" ".join(map(str, words)) + "\n")
            stdin.flush()
        except BrokenPipeError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the pipes close before the exit code is known
                self._process.wait(END_WITHIN)
            raise self._gone() from None

    def pause(self) -> None:
        """Freeze the helper with SIGSTOP. When this returns, no thread of the helper runs. Raises RuntimeError if it
        has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                stand_still(self.pid)
                return
            self._process.wait()
        raise self._gone()

    def resume(self) -> None:
        """Let a frozen helper continue. This does nothing if the helper is not frozen, or has ended."""
        if self.returncode is None:
            go_on(self.pid)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Freeze the helper inside this context. It may also be killed there."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process. This does nothing if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the helper and its children with SIGKILL, even if frozen, and wait until the helper has ended."""
        if self.returncode is None:
            end(self.pid)
        else:
            with contextlib.suppress(ProcessLookupError):  # the children of the helper
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, within: float) -> int:
        """Wait for the exit code of the helper. Raises subprocess.TimeoutExpired if it still runs after ``within``
        seconds."""
        return self._process.wait(within)

    def close(self) -> None:
        """Kill the helper and close its pipes."""
        self.kill()
        for reader in self._readers:
            reader.join(END_WITHIN)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            # closing a pipe raises if a line for the dead helper is still in its buffer
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, within: float) -> list[str]:
        """Return the lines of the helper since the last call, and forget them. If there are none, wait for ``within``
        seconds."""
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
    """Call ``function`` in the helper process. On Linux the helper is killed when the process ``parent`` dies, unless
    ``parent`` is 0."""
    if int(parent) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # the parent died before prctl()
            sys.exit(1)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
