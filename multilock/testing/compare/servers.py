"""A server that a comparison may stop: given as the pid of its process, or the name of its container.

Several cycles may share one stop of their server.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import multilock
from multilock import ConfigurationError, MultilockError, now
from multilock.testing.compare.keeper import COMMAND_WITHIN, family, parent_of, states
from multilock.testing.compare.pool import TICK, RunEnded

__all__ = ["WHEN", "Given", "ServerFault", "ServerProcess", "Together", "answers", "each_of", "given"]

KEEPER = str(Path(__file__).with_name("keeper.py"))
DOWN_WITHIN = 30.0  # seconds within which the fault must have happened
ENGINES = ("docker", "podman")
OF_MANY = ("restart_guard",)  # options of redlock:// that a single server does not have


class ServerFault(Exception):
    """A fault that could not be caused or ended."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server, and the faults that it can have.

    A process is stopped and continued, on Linux together with its child processes. It is never killed, since we could
    not start it again. A container can also be killed and restarted.
    """

    pid: int = 0
    container: str = ""
    engine: str = ""

    @property
    def restarts(self) -> bool:
        """Return whether the server can be killed and restarted."""
        return bool(self.container)

    def __str__(self) -> str:
        return f"container {self.container}" if self.container else f"process {self.pid}"

    def check(self) -> None:
        """Raise ConfigurationError if the server does not exist, or if we may not stop it."""
        if self.container:
            said = _engine(self.engine, "inspect", "-f", "{{.State.Running}}", self.container)
            if said != "true":
                raise ConfigurationError(f"the {self} is not running: start it first")
        elif self.pid in _ancestors():
            raise ConfigurationError(f"the {self} is this command, or one that started it: give the pid of the server")
        else:
            try:
                os.kill(self.pid, 0)
            except (ProcessLookupError, OverflowError):
                raise ConfigurationError(f"the {self} does not exist") from None
            except PermissionError:
                raise ConfigurationError(f"the {self} belongs to another user: we may not stop it") from None

    @contextlib.contextmanager
    def stopped(self, within: float) -> Iterator[None]:
        """Stop the server inside this context, for at most ``within`` seconds."""
        order = self._commands(["pause"], ["unpause"]) if self.container else {"pid": self.pid}
        try:
            with _down({**order, "within": within}):
                if self.pid and sys.platform == "linux" and set(states(self.pid) or "ended") - set("tT"):
                    raise ServerFault(f"the {self} is not stopped")
                yield
        finally:
            for pid in family(self.pid) if self.pid else ():  # needed if the keeper itself was killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def killed(self, within: float) -> Iterator[None]:
        """Kill the server. It is started again at the end of this context."""
        with _down({**self._commands(["kill"], ["start"]), "within": within}):
            yield

    @contextlib.contextmanager
    def ended(self, within: float) -> Iterator[None]:
        """Shut the server down normally, as for an update. It is started again at the end of this context."""
        with _down({**self._commands(["stop", "-t", "10"], ["start"]), "within": within}):
            yield

    def started(self) -> str:
        """Return when the container was last started, in the words of its engine, or an empty text for a process."""
        what = "{{.State.StartedAt}} {{.State.Pid}}"
        return _engine(self.engine, "inspect", "-f", what, self.container) if self.container else ""

    def _commands(self, down: Sequence[str], up: Sequence[str]) -> dict[str, Any]:
        return {"down": [self.engine, *down, self.container], "up": [self.engine, *up, self.container]}


Given = dict[str, ServerProcess]
"""Servers by the text before the ``=``: a URL, the name of a column, or "" if the option had no ``=``."""


def given(pids: Sequence[str], containers: Sequence[str]) -> Given:
    """Parse the values of ``--server-pid`` and ``--server-container``, and return their servers. A value has the form
    ``WHICH=WHAT``, where ``WHICH`` is a URL or the name of a column, and ``WHAT`` a pid or a container's name. If there
    is only one URL, ``WHAT`` alone is enough.

    Raises ConfigurationError for anything misspelled, and for a server that does not exist.
    """
    found: Given = {}
    for option, words in (("--server-pid", pids), ("--server-container", containers)):
        for word in words:
            which, _, what = word.rpartition("=")
            if which in found:
                raise ConfigurationError(f"{option} {word}: this server was given before, remove one")
            if option == "--server-pid":
                if not (what.isascii() and what.isdigit()):
                    raise ConfigurationError(f"write {option} URL=PID, such as redis=1234, not {word!r}")
                server = ServerProcess(pid=int(what))
            else:
                if not what or what.startswith("-"):
                    raise ConfigurationError(f"write {option} URL=NAME, not {word!r}")
                server = ServerProcess(container=what, engine=_the_engine())
            server.check()
            found[which] = server
    return found


def each_of(url: str) -> list[str]:
    """Return this URL, and one URL for each of its servers, because a client of the whole URL may reach only one
    server."""
    parts = urlsplit(url)
    if "," not in parts.netloc:
        return [url]
    if parts.scheme.startswith("redlock"):  # each server has its own user info
        own = [(name, value) for name, value in parse_qsl(parts.query) if name not in OF_MANY]
        scheme = parts.scheme.replace("redlock", "redis")
        parts, hosts = parts._replace(scheme=scheme, query=urlencode(own)), parts.netloc.split(",")
    else:
        login, at, them = parts.netloc.rpartition("@")
        hosts = [f"{login}{at}{host}" for host in them.split(",")]
    return [url, *(urlunsplit(parts._replace(netloc=host)) for host in hosts)]


def answers(url: str, within: float) -> bool:
    """Return whether the server of this URL answers. Returns False too if multilock has no backend for the URL."""
    try:
        with multilock.connect(url, request_timeout=within, outage_timeout=within) as client:
            client.ping()
    except (MultilockError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _down(order: dict[str, Any]) -> Iterator[None]:
    keeper = subprocess.Popen(
        [sys.executable, "-I", KEEPER, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,  # unbuffered, so that poll() sees all unread bytes
        start_new_session=True,  # so that Ctrl-C does not reach the keeper
    )
    try:
        said = _hear(keeper, DOWN_WITHIN + (COMMAND_WITHIN if "down" in order else 0.0))
        if said != "down":
            raise ServerFault(f"the server could not be taken down: {said}")
        yield
    finally:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        early = _says_something(keeper, 0.0)
        keeper.stdin.close()
        rest = keeper.stdout.read().decode()
        keeper.stdout.close()
        keeper.wait()
    if rest.strip() != "up":
        raise ServerFault(f"the server could not be started again: {rest.strip() or 'its keeper was killed'}")
    if early and order["within"]:
        raise ServerFault("the server was started again too early")


def _hear(keeper: subprocess.Popen[bytes], within: float) -> str:
    assert keeper.stdout is not None
    if not _says_something(keeper, within):
        return f"its keeper printed nothing in {within:.0f} s"
    return keeper.stdout.readline().decode().strip()


def _says_something(keeper: subprocess.Popen[bytes], within: float) -> bool:
    """Return whether the keeper has printed something, or has ended."""
    # select() cannot use descriptors above 1023, and with 1,000 contenders all lower ones are taken.
    poll = select.poll()
    poll.register(keeper.stdout, select.POLLIN)  # type: ignore[arg-type]
    return bool(poll.poll(within * 1000))


def _ancestors() -> set[int]:
    found, pid = {0, 1}, os.getpid()
    while pid not in found:
        found.add(pid)
        try:
            pid = parent_of(pid)
        except OSError:
            pid = os.getppid() if pid == os.getpid() else 1
    return found


def _the_engine() -> str:
    for name in ENGINES:
        if path := shutil.which(name):
            return path
    raise ConfigurationError("--server-container needs the command docker or podman, which is not on the PATH")


def _engine(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN)
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{words[0]} does not answer") from None
    if done.returncode:
        raise ConfigurationError(f"{' '.join(words[:2])}: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


# ---- cycles that share one stop of their server

WHEN = 0.2, 0.8  # the least and the greatest number of ttls from A's grant to the fault
GATHER_WITHIN = 60.0  # seconds; a cycle that comes later has missed the fault


class Together:
    """A group of ``cycles`` cycles that share one stop of their server. Each calls `gather` and then `stopped` once, or
    only `leave`."""

    def __init__(self, cycles: int, seed: str = "") -> None:
        self.share = random.Random(seed).uniform(*WHEN)  #: time from the grants to the fault, as a share of a ttl
        self._expected = cycles
        self._ready = self._here = 0
        self._led = False
        self._down = self._up = False
        self._why = ""
        self._changed = threading.Condition()

    def gather(self, stop: threading.Event) -> None:
        """Wait for the other cycles. Call this before A holds its lock, because a lock that is not renewed would expire
        meanwhile."""
        with self._changed:
            self._ready += 1
            self._changed.notify_all()
        self._wait(lambda: self._ready >= self._expected, stop, now() + GATHER_WITHIN)

    @contextmanager
    def stopped(
        self, server: ServerProcess, within: float, begin: Callable[[], None], stop: threading.Event
    ) -> Iterator[None]:
        """Stop the server inside this context. ``begin`` is called right before the stop.

        The first cycle stops the server once all cycles have come, and continues it at the end of its context. The
        contexts of the other cycles end only when the server runs again.
        """
        with self._changed:
            if self._down:
                raise ServerFault("the cycle came too late for the fault of its server")
            self._here += 1
            self._changed.notify_all()
            leads, self._led = not self._led, True
        if not leads:
            self._wait(lambda: self._down, stop)
            begin()
            yield
            self._wait(lambda: self._up, stop)
            return
        try:
            self._wait(lambda: self._here >= self._expected, stop, now() + GATHER_WITHIN)
            begin()
            with server.stopped(within):
                self._set(down=True)
                yield
        except BaseException as error:
            self._why = str(error) or type(error).__name__
            raise
        finally:
            self._set(down=True, up=True)

    def leave(self) -> None:
        """Report that a cycle has ended, or will not reach its fault."""
        with self._changed:
            self._expected -= 1
            self._changed.notify_all()

    def _set(self, *, down: bool, up: bool = False) -> None:
        with self._changed:
            self._down, self._up = down, up
            self._changed.notify_all()

    def _wait(self, look: Callable[[], bool], stop: threading.Event, until: float = float("inf")) -> None:
        with self._changed:
            while not look():
                if stop.is_set():
                    raise RunEnded("the run was interrupted")
                if now() > until:
                    return
                self._changed.wait(TICK)
        if self._why:
            raise ServerFault(f"the cycle that stopped the server for this one failed: {self._why}")
