"""One cycle: three contenders in two processes, one fault, and what the contenders recorded."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from multilock import now
from multilock.testing.compare.contestants import load
from multilock.testing.compare.history import Event
from multilock.testing.compare.pool import LOOK_EVERY, TICK, Late, RunEnded, Trouble, WorkerProcess
from multilock.testing.compare.scenarios import Scenario
from multilock.testing.compare.servers import WHEN, ServerFault, ServerProcess, Together, answers, each_of
from multilock.testing.network import Network

__all__ = ["Cell", "Plan", "play"]

Cell = tuple[str, str]
"""Contestant and scenario."""

PATIENCE = 20.0  # seconds that a step may take; on an idle machine a step takes milliseconds
LATE_RELEASE = 0.3  # share of a ttl for which B keeps the lock after A has released it too late
LONGEST_WAIT = 600.0
SILENT = 0.5  # seconds without a reply after which a stopped server counts as silent
ANSWERS_WITHIN = 5.0  # seconds within which a running server replies, even on a busy machine


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one cycle."""

    number: int
    contestant: str
    adapter: str
    url: str
    scenario: Scenario
    name: str
    ttl: float
    bound: float
    seed: str
    server: ServerProcess | None = None
    ledger: str = ""  #: the address of the ledger that the holders write to
    together: Together | None = None  #: the cycles that run at once and share one fault of the server

    @property
    def cell(self) -> Cell:
        """Contestant and scenario."""
        return self.contestant, self.scenario.name

    @property
    def header(self) -> Event:
        """The first event of the cycle, without the URL, which may contain a secret."""
        return {
            "cycle": self.number, "what": "cycle", "contestant": self.contestant, "adapter": self.adapter,
            "scenario": self.scenario.name, "name": self.name, "ttl": self.ttl, "bound": self.bound,
            "seed": self.seed, "at": now(),
        }  # fmt: skip


def play(plan: Plan, a: WorkerProcess, b: WorkerProcess, stop: threading.Event) -> list[Event]:
    """Play the cycle and return its events. When this returns, the cycle has no running threads and no taken locks."""
    scene = _Scene(plan, a, b, stop)
    header, end = plan.header, {"what": "end", "reached": True, "took_place": False, "why": ""}
    with ExitStack() as stack:
        stack.callback(_clean_up, plan, a, b)
        if plan.together is not None:
            stack.callback(plan.together.leave)
        for worker in (a, b):
            worker.forget()  # drops late events of the previous cycle
        try:
            if "network" in plan.scenario.needs:
                scene.network = Network(plan.url)
                stack.callback(scene.network.close)
            end["took_place"] = scene.play()
        except (Trouble, ServerFault, OSError, ValueError) as trouble:
            end |= {"reached": False, "why": str(trouble), "stopped": isinstance(trouble, RunEnded)}
            a.fit = b.fit = False
        finally:
            with suppress(OSError):
                a.helper.resume()
    end["at"] = now()
    events = [header, *scene.faults, *a.forget(), *b.forget(), end]
    return [{"cycle": plan.number, **event} for event in events]


def _clean_up(plan: Plan, a: WorkerProcess, b: WorkerProcess) -> None:
    """End each process that cannot be used again, and release its locks."""
    ended = [worker for worker in (a, b) if not worker.fit]
    for worker in ended:
        worker.helper.kill()
    if not ended:
        return
    take = getattr(load(plan.adapter), "take", None)
    if take is not None:
        for name in (plan.name, *(f"{plan.name}-{role}" for role in "ABC")):
            with suppress(Exception):  # without the server, the lock is gone or expires
                while take(plan.url, name):  # once for each waiter that received the lock
                    pass


class _Scene:
    def __init__(self, plan: Plan, a: WorkerProcess, b: WorkerProcess, stop: threading.Event) -> None:
        self.plan, self.a, self.b = plan, a, b
        self.ttl, self.bound = plan.ttl, plan.bound
        self.network: Network | None = None
        self.faults: list[Event] = []
        self._stop = stop
        self._dice = random.Random(plan.seed)
        self._waits = False
        self._answered: list[str] = []

    def play(self) -> bool:
        when = self.plan.scenario.when
        self._open()
        if self.plan.scenario.alone:
            self.look()
        if self.plan.together is not None:
            self.plan.together.gather(self._stop)
        if when != "acquire":
            self.acquire_a()
            self.a.wait_for("A", "got", within=PATIENCE)
            self.acquire_b()
            together = self.plan.together
            self.pass_time((self.dice(*WHEN) if together is None else together.share) * self.ttl)
        with self._ends_its_fault():
            took_place = self.plan.scenario.act(self)
        self.acquire_b()
        alive = self.a.fit
        if alive:
            self.a.order("release", "A")  # A releases late if it has lost the lock
        self.b.wait_for("B", "got", within=self.bound + self.ttl + PATIENCE)
        self._acquire(self.b, "C")
        if alive:
            if self.a.said("refused", "A") is None and self.a.said("got", "A") is not None:
                self.a.wait_for("A", "released", within=PATIENCE)
            self.pass_time(LATE_RELEASE * self.ttl)
        self.b.order("release", "B")
        self.b.wait_for("B", "released", within=PATIENCE)
        self.b.wait_for("C", "got", within=self.bound + self.ttl + PATIENCE)
        self._close()
        return took_place

    def _open(self) -> None:
        through = self.plan.url if self.network is None else self.network.url
        roles = [(self.a, "A", through), (self.b, "B", self.plan.url), (self.b, "C", self.plan.url)]
        for worker, role, url in roles:
            worker.order(
                "open", role, adapter=self.plan.adapter, url=url, ttl=self.ttl, name=self.plan.name,
                ledger=self.plan.ledger,
            )  # fmt: skip
        for worker, role, _ in roles:
            worker.wait_for(role, "opened", within=PATIENCE + self.bound)

    def _close(self) -> None:
        roles = [(self.a, "A"), (self.b, "B"), (self.b, "C")]
        for worker, role in roles:
            if worker.fit:
                worker.order("close", role)
        for worker, role in roles:
            if worker.fit:
                try:
                    worker.wait_for(role, "closed", within=PATIENCE + self.bound)
                except Late:  # an error of release does not affect exclusion, but the process is not used again
                    worker.fit = False

    @contextmanager
    def _ends_its_fault(self) -> Iterator[None]:
        """When the context ends, also by an error, record the end of each fault that has not ended."""
        try:
            yield
        finally:
            for fault in self.faults:
                fault.setdefault("until", now())

    # ---- the methods that a scenario calls

    @property
    def net(self) -> Network:
        assert self.network is not None
        return self.network

    @property
    def server(self) -> ServerProcess:
        assert self.plan.server is not None
        return self.plan.server

    @contextmanager
    def server_stopped(self, within: float) -> Iterator[None]:
        together = self.plan.together or Together(1)
        with together.stopped(self.server, within, self.begin, self._stop):
            yield

    def look(self) -> None:
        """Record which servers answer before the fault."""
        self._answered = [url for url in each_of(self.plan.url) if answers(url, ANSWERS_WITHIN)]

    def is_silent(self) -> bool:
        return not all(answers(url, SILENT) for url in self._answered)

    def dice(self, least: float, most: float) -> float:
        return self._dice.uniform(least, most)

    def begin(self) -> None:
        whose = None if self.plan.scenario.alone else self.a.pid
        self.faults.append({"what": "fault", "kind": self.plan.scenario.name, "pid": whose, "at": now()})

    def end(self) -> None:
        self.faults[-1]["until"] = now()

    def pass_time(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise RunEnded("the run was interrupted")

    def until_said(self, worker: WorkerProcess, what: str, role: str, within: float) -> bool:
        ends = now() + within
        while worker.said(what, role) is None:
            if self._stop.is_set():
                raise RunEnded("the run was interrupted")
            if (left := ends - now()) <= 0:
                return False
            worker.listen(min(left, TICK))
        return True

    def until_b_has_it(self) -> None:
        self.until_said(self.b, "got", "B", self.bound + self.ttl)

    def until_a_is_over(self) -> None:
        self.until_said(self.a, "over", "A", self.bound + self.ttl)

    def until(self, look: Callable[[], object], within: float) -> bool:
        ends = now() + within
        while not look():
            if self._stop.is_set():
                raise RunEnded("the run was interrupted")
            if (left := ends - now()) <= 0:
                return False
            time.sleep(min(left, LOOK_EVERY))
        return True

    def acquire_a(self) -> None:
        self._acquire(self.a, "A")

    def acquire_b(self) -> None:
        if not self._waits:
            self._acquire(self.b, "B")
        self._waits = True

    def _acquire(self, worker: WorkerProcess, role: str) -> None:
        worker.order("acquire", role, timeout=min(LONGEST_WAIT, 2 * self.bound + self.ttl + PATIENCE))
        worker.wait_for(role, "asking", within=PATIENCE)

    def take(self) -> bool:
        take = getattr(load(self.plan.adapter), "take", None)
        assert take is not None
        try:
            return bool(take(self.plan.url, self.plan.name))
        except Exception as error:  # an adapter may be written by anybody and may raise anything
            raise Trouble(f"the operator failed: {type(error).__name__}: {error}") from error

    def end_session(self) -> bool:
        self.a.order("end-session", "A")
        return bool(self.a.wait_for("A", "ended", within=PATIENCE)["ours"])
