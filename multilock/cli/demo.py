"""``multilock demo``: processes elect a leader, the leader is killed, and another process takes over. Each step that
is shown is also checked."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import multilock
from multilock import ConfigurationError, system
from multilock.cli.exits import say
from multilock.cli.signals import Signalled, Signals
from multilock.config import NothingConfigured, resolve
from multilock.kernel.worker import start_worker
from multilock.urls import redact

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["demo"]

TTL = 2.0  # seconds: short, since on some backends only the ttl ends a dead leader's term
PAUSE = 1.0  # seconds between two steps, so that a reader can follow
SLACK = 10.0  # seconds more than the backend promises: the machine may be busy, and interpreters start slowly
FAILED = 1


def demo(url: str | None, profile: str | None, config: str | None, count: int) -> int:
    """Run the demo. Returns the exit code, which is 0 only if everything that was shown is true."""
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            place = resolve(url, profile=profile, config=config)
        except NothingConfigured:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="multilock-demo-"))
            url = f"sqlite:///{folder}/demo.db"
            place = resolve(url)
        if place.scheme == "memory":
            raise ConfigurationError(
                "memory:// works only inside one process: choose a backend that several processes can reach"
            )
        client = stack.enter_context(multilock.connect(url, profile=profile, config=config, ttl=TTL))
        try:
            with signals.end_the_wait():
                client.ping()
                name = f"demo-{secrets.token_hex(3)}"
                order = {"url": url, "profile": profile, "config": config, "name": name, "ttl": TTL}
                _play(client, name, order, redact(place.url), count)
        except Signalled as signalled:
            return signalled.code
        except _Failed as failed:
            say(f"the demo failed: {failed}")
            return FAILED
    return 0


def _play(client: multilock.Client, name: str, order: Mapping[str, object], place: str, count: int) -> None:
    show = _Show()
    with _Nodes(order, count, client.capabilities.takeover_bound + SLACK) as nodes:
        show(f"{count} processes are candidates of the election {name!r} at {place}")
        with show.waiting("waiting for a leader"):
            first = nodes.next_leader()
        show(f"{first.node.name} (pid {first.node.pid}) leads, term {first.term}", "green")
        system.sleep(PAUSE)

        show(f"kill -9 {first.node.pid}", "red")
        killed_at = multilock.now()
        nodes.kill(first.node)
        with show.waiting("waiting for the takeover"):
            second = nodes.next_leader(first)
        show(f"{second.node.name} leads, term {second.term}: {second.at - killed_at:.3f} s after the kill", "green")
        system.sleep(PAUSE)

        terms = [first.term, second.term]
        if count > 2:
            show(f"{second.node.name} is asked to stop, and so resigns")
            asked_at = multilock.now()
            nodes.stop(second.node)
            third = nodes.next_leader(second)
            show(f"{third.node.name} leads, term {third.term}: {third.at - asked_at:.3f} s after the request", "green")
            terms.append(third.term)
            system.sleep(PAUSE)
        nodes.stop_all()
    if client.inspect(name) is not None:
        raise _Failed(f"{name!r} is still held after all processes ended")
    show(f"all stopped, nothing is left; the terms rose: {' < '.join(map(str, terms))}")


class _Failed(Exception):
    """A step did not happen as the demo says."""


class _Show:
    """Print what happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._console: Console | None = None
        with contextlib.suppress(ModuleNotFoundError):  # without rich, plain lines are printed
            from rich import console

            self._console = console.Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._began = multilock.now()

    def __call__(self, text: str, style: str = "") -> None:
        line = f"{multilock.now() - self._began:5.2f} s  {text}"
        if self._console is None:
            print(line, flush=True)
        else:
            self._console.print(line, style=style)

    def waiting(self, text: str) -> contextlib.AbstractContextManager[object]:
        if self._console is None or not self._console.is_terminal:
            return contextlib.nullcontext()
        return self._console.status(text)


@dataclass(frozen=True, slots=True)
class _Elected:
    node: _Node
    term: int
    at: float


class _Nodes:
    """The processes of the demo. All of them have ended when the context ends."""

    def __init__(self, order: Mapping[str, object], count: int, patience: float) -> None:
        self._patience = patience  # seconds to wait for an election, or for a node to stop
        self._heard: system.Queue[tuple[_Node, dict[str, float]]] = system.Queue()
        self._running = [_Node(f"node-{n}", order, self._heard) for n in range(1, count + 1)]

    def __enter__(self) -> _Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._running:
            node.kill()

    def next_leader(self, last: _Elected | None = None) -> _Elected:
        """Wait until a node is elected. Raises _Failed unless its term is greater than that of ``last``."""
        elected = next(self._elections())
        if last is not None and not elected.term > last.term:
            raise _Failed(f"term {elected.term} of {elected.node.name} does not follow term {last.term}")
        return elected

    def _elections(self) -> Iterator[_Elected]:
        deadline = multilock.now() + self._patience
        while True:
            try:
                node, event = self._heard.get(timeout=max(0.0, deadline - multilock.now()))
            except system.Empty:
                raise _Failed(f"nobody was elected for {self._patience:g} s") from None
            if "term" in event:
                yield _Elected(node, int(event["term"]), event["at"])
            elif node in self._running:
                raise _Failed(f"{node.name} ended by itself")

    def kill(self, node: _Node) -> None:
        self._running.remove(node)
        node.kill()

    def stop(self, node: _Node) -> None:
        self._running.remove(node)
        node.stop()
        if code := node.wait(self._patience):
            raise _Failed(f"{node.name} did not stop without an error: exit code {code}")

    def stop_all(self) -> None:
        for node in list(self._running):
            self.stop(node)


class _Node:
    """One process that is a candidate (see demo_node.py), and the thread that reads its reports."""

    def __init__(
        self, name: str, order: Mapping[str, object], heard: system.Queue[tuple[_Node, dict[str, float]]]
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "multilock.cli.demo_node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # so that Ctrl-C reaches only the demo, which then ends its processes
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended already; _listen reports it
            self._process.stdin.write(json.dumps({**order, "identity": name}) + "\n")
            self._process.stdin.flush()
        self._listener = start_worker(lambda: self._listen(heard), "multilock-demo", once=True)

    def _listen(self, heard: system.Queue[tuple[_Node, dict[str, float]]]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                heard.put((self, json.loads(line)))
        heard.put((self, {}))

    def kill(self) -> None:
        self._process.kill()
        self.stop()
        self.wait(None)

    def stop(self) -> None:
        """Close the node's stdin, which asks the node to resign and to end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, timeout: float | None) -> int:
        """Wait for the end of the node and return its exit code."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise _Failed(f"{self.name} did not end in {timeout:g} s") from None
        self._listener.join()
        return code
