"""One run: processes that use multilock's own code, simulated servers, faults and oracles.

A worker is a thread or task that acquires and releases locks. Its code is one coroutine for both the blocking API and
asyncio: `answer` awaits a result if needed.
"""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import multilock
from multilock.config import settings_for
from tests.simulation import backends, faults
from tests.simulation.loop import Loop
from tests.simulation.network import Network, Socket
from tests.simulation.oracles import Held, Oracles
from tests.simulation.plan import Fault, Operation, Plan, ProcessPlan
from tests.simulation.scheduler import START, Process, Simulation
from tests.simulation.server import PREFIX, Server
from tests.simulation.threads import EPOCH

__all__ = ["Run", "World", "run"]

LOOK_EVERY = 0.25  # seconds between two calls of `Oracle.passing`
CLOSES_WITHIN = 40.0  # seconds
LATE = 35.0  # seconds after which no request can still be under way
FORGOTTEN = 70.0  # seconds after which all remaining keys have expired

S = TypeVar("S", bound=Server)


@dataclass(slots=True)
class Waiting:
    """A worker that waits for an acquire."""

    worker: str
    process: Process
    operation: Operation
    since: float


@dataclass(slots=True)
class ClientOf:
    """The client of one process."""

    process: Process
    client: Any
    kernel: Any
    closing: bool = False
    left: int = 0  # number of workers that have not ended
    loop: Loop | None = None
    closed: asyncio.Event | None = None  # set when an asyncio client was closed


async def answer(value: Any) -> Any:
    """Return a result of the blocking API, or await a result of the asyncio API."""
    return await value if hasattr(value, "__await__") else value


class World:
    """One run, with all its processes, servers and oracles."""

    def __init__(self, plan: Plan, *, trace: bool = False, halts: bool = False) -> None:
        self.plan = plan
        self.sim = Simulation(plan.seed, jitter=plan.jitter, p_switch=plan.p_switch, p_long=plan.p_long, trace=trace)
        self.network = Network(self.sim, plan.seed, plan.weather)
        self.network.on_sent = self._sent
        self.network.on_connect = partial(self.event, "connects")
        self.network.on_arrived = self._arrived
        self.network.on_read = self._read
        self.simulated = each = backends.simulated(plan.backend)
        self.servers: list[Server] = [self.new_server(each.server, f"server{number}") for number in range(each.servers)]
        self.group = each.server.group(self)
        self.oracles = Oracles(self, halts)
        self.waiting: dict[str, Waiting] = {}
        self.clients: dict[Process, ClientOf] = {}
        self.kinds = {name: each.kind.replace("set", "lock") for each in plan.operations for name in each.names}
        self.permits = next((each.permits for each in plan.operations), 2)
        self.forcing: Counter[str] = Counter()  # name -> calls of force_release that may be under way
        self.begun: Counter[str] = Counter()  # worker -> the number of its operations
        self.can: Any = None  # the capabilities of the backend
        self.is_calm = False  # whether the faults have ended
        self.struck: list[Fault] = []
        self._tasks: set[Any] = set()  # keeps the tasks alive, because a loop itself has only weak references to them
        self._events: Counter[str] = Counter()
        self._requests: Counter[object] = Counter()
        self._after: dict[tuple[str, int], list[Fault]] = {}
        for fault in plan.faults:
            self._after.setdefault((fault.after, fault.nth), []).append(fault)

    def new_server(self, kind: type[S], name: str) -> S:
        """Return a simulated server that reports to this world."""
        server = kind(name, self.sim, lambda: int((EPOCH + self.sim.time) * 1e6), self.plan.seed)
        server.on_step = partial(self._step, server)
        server.on_expiry = self._expired
        return server

    # Reports from the servers and the network

    def _step(self, server: Server, key: str, sender: str, kind: str) -> Callable[[], None]:
        """Record the state before a step that may give a name to a claim. The caller calls the returned function after
        the step.

        ``kind`` is the action of the sender: it requests the name, requests it without regard to the queue (barge),
        leaves, or is an operator (force).
        """
        keeper = self.group.keeper(name := key.removeprefix(PREFIX))
        if kind == "force":
            for each in [server] if keeper else self.servers:
                for held in each.holders(key):
                    self.oracles.forced.setdefault(held, self.sim.time)
                    self.event_of("forced", held)
            self.oracles.excuse(name)
        if server is not keeper:
            return lambda: None
        before, waiting = server.holder(key), server.waiters(key, sender)
        if kind not in ("ask", "barge") and sender in waiting:
            waiting.remove(sender)

        def executed() -> None:
            owner = server.holder(key)
            if owner and owner != before:
                own = owner == sender
                if not own or kind != "barge":
                    self.oracles.tell("given", key, owner, waiting, own)
                if not own:
                    self.event_of("handed", owner)

        return executed

    def _expired(self, key: str) -> None:
        if key.startswith(PREFIX):
            self.event("expired", self._process(self._events["expired"]))

    def _sent(self, sock: Socket, data: bytes) -> None:
        self.event("sent", sock.process)
        kind = sock.server.request(data)
        number = self._requests[kind] = self._requests[kind] + 1
        if not number & (number - 1):  # 1, 2, 4, 8 and so on, so that rare requests get as many faults as frequent ones
            self.event("rare", sock.process)

    def _arrived(self, sock: Socket, data: bytes) -> None:
        if sock.server.pushed(data):
            self.event("pushed", sock.process)

    def _read(self, sock: Socket, data: bytes) -> None:
        # `pushed` returns the claim id for a hint. For a grant, it returns the claim id and further words.
        if self.oracles.forced and (claim := sock.server.pushed(data)) in self.oracles.forced:
            self.oracles.told.setdefault(claim, self.sim.time)

    def event(self, kind: str, process: Process) -> None:
        """Count an event, and plan the faults that follow it."""
        self._events[kind] += 1
        for fault in self._after.get((kind, self._events[kind]), ()):
            if self.sim.time >= START + self.plan.seconds:
                return
            victim = process if fault.process < 0 else self._process(fault.process)
            if fault.kind == "late_request" and kind in ("sent", "rare"):
                faults.strike(self, fault, victim)  # at once, so that the fault hits the request that is being sent
            else:
                self.sim.after(fault.at, faults.strike, self, fault, victim)

    def event_of(self, kind: str, claim: str) -> None:
        """Count an event of the process to which a claim belongs."""
        for each in self.clients.values():
            if claim.startswith(each.kernel.client):
                self.event(kind, each.process)

    def _process(self, number: int) -> Process:
        return self.sim.processes[number % len(self.sim.processes)]

    def server(self, fault: Fault) -> Server:
        """Return the server that a fault has chosen."""
        return self.servers[fault.choice % len(self.servers)]

    def key(self, name: str) -> str:
        """Return the key of a lock at the server."""
        return PREFIX + name

    def is_idle(self, name: str) -> bool:
        """Return whether the name is free at the simulated server, or was handed to a claim that was not notified yet.

        The second case counts only in the profile ``cuts``, because in other profiles a stopped process may notice the
        handover late.
        """
        server, key = self.group.keeper(name), self.key(name)
        if server is None or not server.up or server.paused:
            return False
        if server.is_free(key) or self.plan.profile != "cuts":
            return server.is_free(key)
        return any(server.holder(key) in each.kernel.monitor.waiting for each in self.clients.values())

    # Processes

    def start(self) -> None:
        """Start all processes, and plan the faults."""
        for each in self.plan.processes:
            process = self.sim.process()
            process.offset, process.rate = each.offset, each.rate
            self.sim.spawn(process, partial(self._main, process, each), "main")
        for fault in self._after.get(("", 0), ()):
            self.sim.at(START + fault.at, faults.strike, self, fault, self._process(fault.process))
        self.sim.after(LOOK_EVERY, self._look)

    def _look(self) -> None:
        if any(each.left for each in self.clients.values()) or not self.clients:
            self.oracles.tell("passing")
            self.sim.after(LOOK_EVERY, self._look)

    def _main(self, process: Process, plan: ProcessPlan) -> None:
        settings = settings_for("redis", {"ttl": plan.ttl, "outage_timeout": plan.outage})
        backend = self.simulated.opens(self, plan.ttl)
        self.can = backend.capabilities
        face: Any = multilock.AsyncClient if self.plan.face == "asyncio" else multilock.Client
        client = face._of(backend, settings)
        mine = self.clients[process] = ClientOf(process, client, client._kernel)
        if self.plan.face == "asyncio":
            mine.loop = Loop(self.sim)
            mine.loop.run(self._begin_all(mine, plan))
        else:
            _drive(partial(self._begin_all, mine, plan))

    async def _begin_all(self, mine: ClientOf, plan: ProcessPlan) -> None:
        for number, operations in enumerate(plan.workers):
            self.begin(mine.process, operations, f"w{number}")
        if mine.loop:
            mine.closed = asyncio.Event()
            await mine.closed.wait()

    def begin(self, process: Process, operations: list[Operation], name: str) -> None:
        """Start a worker that executes these operations one after the other."""
        mine = self.clients.get(process)
        if mine is None or mine.closing or not process.alive:
            return
        mine.left += 1
        self._in_process(mine, partial(self._work, mine, f"{process}/{name}", operations), name)

    def _in_process(self, mine: ClientOf, work: Callable[[], Any], name: str) -> None:
        """Run the coroutine that ``work`` returns: on the event loop of the process, or in a new thread if there is
        none."""
        if mine.loop is None:
            self.sim.spawn(mine.process, partial(_drive, work), name)
        else:
            mine.loop.call_soon_threadsafe(lambda: self._tasks.add(mine.loop and mine.loop.create_task(work())))

    async def _sleep(self, seconds: float) -> None:
        if self.plan.face == "asyncio":
            await asyncio.sleep(seconds)
        else:
            self.sim.block(seconds, "sleep")

    # Workers

    async def _work(self, mine: ClientOf, worker: str, operations: list[Operation]) -> None:
        try:
            for operation in operations:
                calm = self.is_calm
                await self._sleep(operation.think)
                if mine.closing:
                    break
                await self._do(mine, worker, operation)
                if calm:  # one operation after the end of the faults is enough
                    break
        except Exception as error:
            if mine.process.alive and not self.sim.over:
                self.oracles.bad("Left", f"{worker} ended: {type(error).__name__}: {error}")
        finally:
            mine.left -= 1

    async def _do(self, mine: ClientOf, worker: str, operation: Operation) -> None:
        self.begun[worker] += 1
        sim, process = self.sim, mine.process
        got: list[Held] = []
        early: list[Any] = []

        def on_lost(loss: Any) -> None:
            if loss.reason.value == "resigned":
                return
            sim.note(process, f"on_lost {operation.names}: {loss.reason.value}: {loss.message}")
            if got:
                self.oracles.lost(got[0], loss)
            else:
                early.append(loss)

        began = sim.time
        sim.note(process, f"{worker} acquires {operation}")
        self.waiting[worker] = Waiting(worker, process, operation, began)
        self.event("asked", process)
        error = lease = None
        try:
            lease = await self._acquire(mine.client, operation, on_lost)
        except multilock.MultilockError as raised:
            error = None if isinstance(raised, multilock.LockTimeout) else raised
        except asyncio.CancelledError:
            sim.note(process, f"{worker} was cancelled")
            self.waiting.pop(worker, None)
            return
        if lease is None:
            sim.note(process, f"{worker} did not get {operation.names}: {error}")
            self.waiting.pop(worker, None)
            self.oracles.tell("gave_up", worker, operation, error, began)
            if isinstance(error, multilock.BackendUnavailable) and operation.timeout is None:
                await self._sleep(0.5)
            return
        held = Held(self, process, worker, operation, lease)
        sim.note(process, f"{worker} HOLDS {operation.names} {[each.token for each in held.beliefs]}")
        self.oracles.granted(held)
        self.waiting.pop(worker, None)
        got.append(held)
        for loss in early:
            self.oracles.lost(held, loss)
        self.event("granted", process)
        if operation.hold >= operation.ttl / 2:
            self.event("long", process)
        sim.after(max(0.0, lease.leases[0].valid_until / process.rate - process.offset - sim.time), self._ending, held)
        await self._hold(held)
        await self._release(held)

    def _ending(self, held: Held) -> None:
        if held.until == float("inf") or held.how == "lost":
            self.event("ending", held.process)

    async def _acquire(self, client: Any, operation: Operation, on_lost: Callable[[Any], None]) -> Any:
        can, [name, *_] = self.can, operation.names
        ttl, rest = min(operation.ttl, can.ttl_max), operation.rest if can.hold_at_least else 0.0
        common: dict[str, Any] = {"ttl": ttl, "on_lost": on_lost}
        if operation.kind == "lead":
            election = client.election(name, ttl=ttl, on_lost=on_lost, grace=1.0)
            acquired = election.campaign(operation.timeout)
        else:
            common.update(renew=operation.renew, reentrant=operation.reentrant)
            if operation.kind in ("read", "write"):
                both = client.read_write_lock(name, **common)
                lock = both.reader() if operation.kind == "read" else both.writer()
            elif operation.kind == "permit":
                lock = client.semaphore(name, operation.permits, **common)
            elif operation.kind == "set":
                lock = client.lock_all(operation.names, **common)
            else:
                lock = client.lock(name, fair=operation.fair and self.can.fair, hold_at_least=rest, **common)
            acquired = lock.acquire() if operation.timeout is None else lock.try_acquire(operation.timeout)
        if operation.cancel is None:
            return await answer(acquired)
        task = asyncio.ensure_future(answer(acquired))
        asyncio.get_running_loop().call_later(operation.cancel, task.cancel)
        return await task

    async def _hold(self, held: Held) -> None:
        sim, operation, lease = self.sim, held.operation, held.lease
        end = sim.time + operation.hold
        while (rest := end - sim.time) > 0:
            await self._sleep(min(rest, operation.step))
            if not lease.is_held():
                held.end("lost")
                return
            self.oracles.sampled(held)
        await self._sleep(0)

    async def _release(self, held: Held) -> None:
        still = held.until == float("inf")
        held.end("released")
        held.lets_go = True
        self.sim.note(held.process, f"{held.worker} releases {held.operation.names}")
        self.event("released", held.process)
        ours = await answer(held.lease.release())
        self.sim.note(held.process, f"{held.worker} has released {held.operation.names}: {ours}")
        self.oracles.released(held, ours, still)

    # Operators

    def force(self, process: Process, name: str) -> None:
        """Let an operator take a lock away, through the client of this process."""
        mine = self.clients.get(process)
        if mine and not mine.closing and process.alive:
            self._in_process(mine, partial(self._force, mine, name), "operator")

    async def _force(self, mine: ClientOf, name: str) -> None:
        # With a simulated server, `_step` excuses the holders when the server executes the request. Without a simulated
        # server it is unknown when the request is executed, so the holders before and after the call are excused.
        if not self.servers:
            self.oracles.excuse(name)
            self.forcing[name] += 1
        with suppress(multilock.MultilockError):
            done = await answer(mine.client.force_release(name))
            self.sim.note(mine.process, f"force_release({name}): {done}")
        if not self.servers:
            self.oracles.excuse(name)
            self.forcing[name] -= 1

    def close(self, process: Process) -> None:
        mine = self.clients.get(process)
        if mine and not mine.closing and process.alive:
            mine.closing = True
            self._in_process(mine, partial(self._close, mine), "close")

    async def _close(self, mine: ClientOf) -> None:
        for name in self.kinds:
            for belief in self.oracles.of(name):
                if belief.held.process is mine.process and belief.held.until == float("inf"):
                    belief.excused = True
        self.sim.note(mine.process, "close()")
        began = self.sim.time
        await answer(mine.client.close())
        self.sim.note(mine.process, f"closed after {self.sim.time - began:.3f} s")
        if mine.closed:
            mine.closed.set()

    # The end

    def run(self) -> None:
        """Execute the plan, then end the run."""
        try:
            self.start()
            self.sim.run(START + self.plan.seconds)
            if not self.sim.halted:
                self._end()
        finally:
            self.sim.finish()
            self.group.end()

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        """Let virtual time pass until ``done()`` is true, for at most ``seconds``."""
        until = self.sim.time + seconds
        while self.sim.time < until and not self.sim.halted and not done():
            self.sim.run(self.sim.time + LOOK_EVERY)

    def _end(self) -> None:
        sim = self.sim
        sim.note(None, "the faults are over")
        self.is_calm = True
        for process in sim.processes:
            sim.resume(process)
        self.group.calm()
        self.network.calm()
        alive = [each for each in self.clients.values() if each.process.alive]
        self._wait(self.plan.patience, lambda: all(each.left == 0 for each in alive))
        for each in alive:
            self.close(each.process)
        self._wait(CLOSES_WITHIN, lambda: not any(each.process.tasks for each in alive))
        sim.run(sim.time + LATE)
        if not sim.halted:
            sim.run(sim.time + FORGOTTEN)
            self.oracles.tell("ended")


def _drive(work: Callable[[], Any]) -> None:
    """Run a coroutine of the blocking API, which never waits for an event loop."""
    try:
        work().send(None)
    except StopIteration:
        return
    raise AssertionError("a coroutine of the blocking face awaits a loop")


@dataclass(slots=True)
class Run:
    plan: Plan
    violations: list[tuple[str, str]]
    hash: int
    grants: int
    trace: list[str]
    begun: Counter[str]  # worker -> how many of its operations have begun
    struck: list[Fault]  # the faults that have happened


def run(plan: Plan, *, trace: bool = False, halts: bool = False) -> Run:
    """Run a plan, and return the result. The plan is not changed. With ``halts`` the first violation ends the run."""
    world = World(plan, trace=trace, halts=halts)
    try:
        world.run()
    except Exception:
        world.oracles.bad("Crash", traceback.format_exc())
    sim, oracles = world.sim, world.oracles
    found = Run(plan, oracles.violations, sim.hash, oracles.grants, sim.trace or [], world.begun, world.struck)
    del world, oracles
    sim.processes.clear()  # so that no object of this run is finalized during the next one
    backends.forget_everything(plan.backend)
    gc.collect()
    return found
