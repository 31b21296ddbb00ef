"""The oracles: conditions that must be true of every run.

To add one, write a subclass of `Oracle` with some of its hooks. It reports through `Oracle.bad`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from multilock.timing import DRIFT_FIXED, DRIFT_SHARE
from tests.simulation.scheduler import LONG, START, Process

if TYPE_CHECKING:
    from multilock import Loss
    from tests.simulation.plan import Operation
    from tests.simulation.server import Server
    from tests.simulation.world import World

__all__ = ["Belief", "Held", "Oracle", "Oracles"]

PAST = 20.0  # seconds for which an ended belief is kept, longer than any lease and any ``hold_at_least`` of a plan


class Held:
    """One lease of a worker, and every report about it that the worker got."""

    def __init__(self, world: World, process: Process, worker: str, operation: Operation, lease: Any) -> None:
        self.world = world
        self.process, self.worker, self.operation, self.lease = process, worker, operation, lease
        self.since, self.until = world.sim.time, math.inf
        self.how = ""  # how the belief ended: released, lost or killed
        self.told: tuple[float, Loss[Any]] | None = None  # when on_lost was called, and its argument
        self.lets_go = False  # whether the worker has called release()
        self.returned: float | None = None  # when the call of release() returned
        self.ours = False  # the result of that call
        self.beliefs = [Belief(self, part) for part in lease.leases]

    def end(self, how: str) -> None:
        """End the belief, unless it has ended."""
        if self.until == math.inf:
            self.until, self.how = self.world.sim.time, how

    @property
    def is_live(self) -> bool:
        """Whether the process still believes, by its own clock, that it holds the lease."""
        return self.process.alive and self.until == math.inf and self.lease._proved(self.process.now())


class Belief:
    """The belief of a worker that it holds one name. It begins with the grant, and ends with a release, a loss or the
    end of the process."""

    def __init__(self, held: Held, part: Any) -> None:
        self.held, self.part = held, part
        self.name: str = part.name
        self.mode: str = part.claim.mode
        self.token: int | None = part.token
        self.ttl: float = part.granted.ttl  # the ttl at the grant; a server may shorten it later
        self.excused = False  # a force release or a fault ended the lock, so a violation about it does not count

    @property
    def who(self) -> str:
        return f"{self.held.worker} ({self.mode}, token {self.token})"

    @property
    def sent_at(self) -> float:
        """The time at which the request for the lock was sent, on the clock of the simulation."""
        process = self.held.process
        return float(self.part.granted.sent_at / process.rate - process.offset)

    def fits(self, other: Belief) -> bool:
        """Return whether this lease and that of ``other`` may hold the name at the same time."""
        return self.mode != "x" and self.mode == other.mode


class Oracle:
    """The hooks of an oracle. Each hook is called at an event, and must not change anything."""

    def __init__(self, oracles: Oracles) -> None:
        self.world = oracles.world
        self.oracles = oracles

    def bad(self, text: str) -> None:
        self.oracles.bad(type(self).__name__, text)

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        """Called when a worker got a lease. ``others`` are the earlier beliefs about the same name."""

    def sampled(self, belief: Belief) -> None:
        """Called when is_held() has just returned True."""

    def lost(self, held: Held, loss: Loss[Any]) -> None:
        """Called when on_lost was called."""

    def released(self, held: Held, ours: bool, still: bool) -> None:
        """Called when release() has returned ``ours``. ``still`` is True if the worker believed in the lease when the
        call began."""

    def gave_up(self, worker: str, operation: Operation, error: Exception | None, began: float) -> None:
        """Called when an acquire ended without a lease, by an error or by its timeout."""

    def given(self, name: str, owner: str, waiting: list[str], own: bool) -> None:
        """Called when a server made ``owner`` the exclusive holder of a name. ``own`` is True if a request of the owner
        itself caused this. ``waiting`` are the waiters that were alive and subscribed, in order of arrival."""

    def passing(self) -> None:
        """Called every quarter of a virtual second."""

    def ended(self) -> None:
        """Called when all operations are over, all clients are closed, and late requests have arrived."""


class Overlap(Oracle):
    """If a name has several holders at once, their modes allow this (I1, O1), and they use no more permits than the
    name has (I8)."""

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        live = [each for each in others if each.held.is_live]
        for other in live:
            if not other.fits(belief):
                left = other.part.lost_at - other.held.process.now()
                self.bad(f"{belief.who} got {belief.name} while {other.who} believes for {left:.3f} s more")
        if belief.mode[0] == "p" and len(live) >= int(belief.mode[1:]):
            self.bad(f"{belief.who} got {belief.name} as one too many")


class Over(Oracle):
    """No grant makes a lease whose deadline has passed."""

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        late = belief.part.granted_at - belief.part.lost_at
        if late >= 0:
            self.bad(f"{belief.who} got {belief.name} by a grant that was over for {late:.3f} s")


class Early(Oracle):
    """If a lease was not released, nobody gets its name before the lease's validity has ended."""

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        for other in others:
            held = other.held
            silent = not held.lets_go and not (held.told and held.told[1].confirmed)
            if len(held.beliefs) > 1 and held.told:  # a set that lost a lock releases its other locks one ttl later
                silent = silent and self.world.sim.time < held.told[0] + 0.95 * held.lease.ttl
            left = other.part.valid_until - held.process.now()
            if silent and held.process.alive and left > 1e-9 and not other.fits(belief) and not held.is_live:
                self.bad(f"{belief.who} got {belief.name} {left:.3f} s before the validity of {other.who} ends")


class Callback(Oracle):
    """`on_lost` is called before the next grant. If the server did not report the loss, the callback comes a tenth of
    the ttl before the next grant (O4)."""

    def __init__(self, oracles: Oracles) -> None:
        super().__init__(oracles)
        self._lag = 5 * LONG if self.world.plan.p_long else 0.0  # a wake-up may be late

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        now = self.world.sim.time
        for other in others:
            held, ttl = other.held, other.part.granted.ttl
            if held.lets_go or held.is_live or other.fits(belief):
                continue
            if ttl < other.ttl:  # the server shortened the session, so the deadline had already passed
                continue
            if not held.process.ran_since(now - 2 * ttl):
                continue
            late = held.process.now() - held.lease.leases[0].lost_at
            if held.told is None and late > 0.05:
                self.bad(f"{belief.who} got {belief.name} before on_lost of {other.who} was called")
            elif held.told and not held.told[1].confirmed and now - held.told[0] < 0.09 * ttl - self._lag:
                self.bad(f"{belief.who} got {belief.name} {now - held.told[0]:.3f} s after on_lost of {other.who}")


class Rest(Oracle):
    """A name that is released early stays taken for ``hold_at_least``, by the server's clock.

    If a release got no reply, a grant after the end of the lease is not judged, because the release may be late.
    """

    def __init__(self, oracles: Oracles) -> None:
        super().__init__(oracles)
        self._unanswered: set[str] = set()  # claims whose release continued in the background

    def released(self, held: Held, ours: bool, still: bool) -> None:
        self._unanswered |= {each.claim.id for each in self.world.clients[held.process].kernel.cancels._open}

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        for other in others:
            held, until = other.held, other.part.rest_until
            left = until - held.process.now() - DRIFT_SHARE * held.operation.rest - DRIFT_FIXED if until else 0.0
            ended = other.part.claim.id in self._unanswered and held.process.now() >= other.part.valid_until
            if left > 0 and held.ours and held.process.alive and not ended and not other.fits(belief):
                self.bad(f"{belief.who} got {belief.name} {left:.3f} s before the rest of {other.who} ends")


class Stale(Oracle):
    """`is_held()` is False once another worker has got the name."""

    def sampled(self, belief: Belief) -> None:
        if belief.excused:
            return
        for other in reversed(self.oracles.of(belief.name)):
            if other is belief:
                break
            if not other.fits(belief) and not other.excused:
                since = self.world.sim.time - other.held.since
                self.bad(f"is_held() of {belief.who} is True {since:.3f} s after {other.who} got {belief.name}")


class Token(Oracle):
    """Each exclusive grant has a greater token than all earlier grants, and each reader's grant a greater token than
    all earlier writers' (I5, O3).

    A server that forgot its data takes the next token from its clock. If this clock was ever stepped back, an earlier
    token may be greater, so the next token is not judged.
    """

    def __init__(self, oracles: Oracles) -> None:
        super().__init__(oracles)
        # Name and mode -> the greatest token, and the time of its request. The mode "" stands for all modes.
        self.last: dict[tuple[str, str], tuple[int, float]] = {}

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        if belief.token is None:
            self.bad(f"{belief.who} has no token")
            return
        last, when = self.last.get((belief.name, "x" if belief.mode == "r" else ""), (0, 0.0))
        goes_back = any(server.step < 0 or server.went_back for server in self.world.servers)
        excused = belief.excused or (goes_back and self.oracles.forgot.get(None, 0.0) >= when)
        if belief.mode in ("x", "r") and belief.token <= last and not excused:
            self.bad(f"{belief.who} got {belief.name} after the token {last}")
        for mode in ("", belief.mode) if belief.part.claim.id not in self.oracles.doomed else ():
            if belief.token > self.last.get((belief.name, mode), (0, 0.0))[0]:
                self.last[belief.name, mode] = belief.token, belief.sent_at


class Once(Oracle):
    """`on_lost` is called once for each loss, and never after a release that returned True (O6)."""

    def lost(self, held: Held, loss: Loss[Any]) -> None:
        if held.told:
            self.bad(f"on_lost of {held.worker} was called twice")
        if held.ours:
            self.bad(f"on_lost of {held.worker} was called after its release had returned")

    def released(self, held: Held, ours: bool, still: bool) -> None:
        if ours and held.told:
            self.bad(f"on_lost of {held.worker} was called, and then its release returned True")


class Taken(Oracle):
    """`on_lost` gets the reason TAKEN only if the lock was really taken from its holder."""

    def lost(self, held: Held, loss: Loss[Any]) -> None:
        excused = any(belief.excused or self.world.forcing[belief.name] for belief in held.beliefs)
        forgets = self.world.plan.profile in ("forget", "force")
        excused = excused or held.how == "released" or (forgets and self.world.group.keeper("a") is None)
        # A crashed server may have lost the handover to this worker, perhaps before the worker knew of it.
        for server in self.world.servers:
            given = [server.granted_at(belief.token) for belief in held.beliefs if belief.token]
            excused = excused or server.lost >= min(given, default=held.since)
        if loss.reason.value == "taken" and not excused:
            self.bad(f"{held.worker} was told that {held.operation.names} was taken: {loss.message}")


class Released(Oracle):
    """A released lease is no longer held. Without a fault no lease is lost."""

    def released(self, held: Held, ours: bool, still: bool) -> None:
        if held.lease.is_held():
            self.bad(f"{held.worker} holds {held.operation.names} after its release")
        excused = any(belief.excused for belief in held.beliefs)
        quiet = self.oracles.quiet_for(self.world.sim.time - held.since + held.operation.ttl)
        if not ours and still and not excused and held.operation.renew and quiet:
            self.bad(f"{held.worker} lost {held.operation.names} in a quiet time: {held.lease.loss}")


class Refusal(Oracle):
    """An acquire without a grant ends at its timeout, and not earlier. Without a fault, no acquire raises an error."""

    def gave_up(self, worker: str, operation: Operation, error: Exception | None, began: float) -> None:
        took, timeout = self.world.sim.time - began, operation.timeout
        kind = type(error).__name__
        if error is None and timeout and took < timeout * 0.99:
            self.bad(f"{worker} gave up after {took:.3f} of {timeout} s")
        if error is not None and kind not in ("BackendUnavailable", "ClientClosed"):
            self.bad(f"{worker}: {kind}: {error}")
        patient = (timeout is None or timeout > 1) and operation.ttl >= 3
        in_parts = operation.kind == "set" or any(server.in_parts for server in self.world.servers)
        if timeout and took > timeout * 0.99 and in_parts:
            patient = False  # the time was over between two requests of the last attempt
        if kind == "BackendUnavailable" and patient and self.oracles.quiet_for(took + 0.2):
            self.bad(f"{worker}: {error}, in a quiet time")
        if timeout is not None and took > timeout + 0.5 and self.oracles.quiet_for(took):
            self.bad(f"{worker} gave up after {took:.3f} s instead of {timeout} s")


class Order(Oracle):
    """A server gives a name to the first waiter that is alive and subscribed (I4). Unfair requests are not judged."""

    def given(self, name: str, owner: str, waiting: list[str], own: bool) -> None:
        if waiting and waiting[0] != owner:
            self.bad(f"{name} was given to {owner[:24]} before {waiting[0][:24]}")
        if not waiting and not own:
            self.bad(f"{name} was given to {owner[:24]}, which does not listen")


class HandOver(Oracle):
    """Waiters get a name soon after its release (I7, O5), and in order of arrival (I4).

    A set of `lock_all` holds some of its names while it waits for others, so delays of its names are not judged.
    """

    def __init__(self, oracles: Oracles) -> None:
        super().__init__(oracles)
        sets = (each for each in self.world.plan.operations if each.kind == "set")
        self._of_sets = {name for each in sets for name in each.names}
        self._joins_within = max((each.joins_within for each in self.world.servers), default=0.5)

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        if not self.world.plan.is_quiet:
            return
        now, operation = self.world.sim.time, belief.held.operation
        mine = self.world.waiting.get(belief.held.worker)
        if mine is None or operation.timeout == 0 or operation.kind in ("set", "lead"):
            return
        for other in self.world.waiting.values() if self.world.can.fair else ():
            queued = other.operation.fair or other.operation.kind in ("read", "write", "permit")
            queued = queued and other.operation.kind != "set"  # operations that join the queue of their name
            ahead = other.since < mine.since - self._joins_within and belief.name in other.operation.names
            exclusive = other.operation.kind in ("write", "lock") or belief.mode == "x"
            if queued and ahead and exclusive and other.operation.timeout != 0 and other is not mine:
                self.bad(f"{belief.who} has {belief.name} before {other.worker}, which came earlier")
        free = max((other.held.returned or now for other in others), default=0.0)
        if belief.mode == "x" and others and all(other.held.how == "released" for other in others):
            rested = any(other.held.operation.rest for other in others)
            if mine.since < free - 0.3 and now - free > 0.8 and not rested and belief.name not in self._of_sets:
                self.bad(f"{belief.who} got {belief.name} {now - free:.3f} s after its release")


class Progress(Oracle):
    """No name stays free while a worker waits for it, whatever faults happened before (I7)."""

    def __init__(self, oracles: Oracles) -> None:
        super().__init__(oracles)
        self._free_since: dict[str, float] = {}

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        self._free_since.pop(belief.name, None)

    def passing(self) -> None:
        world, now = self.world, self.world.sim.time
        for name in world.kinds:
            if not world.is_idle(name):
                self._free_since.pop(name, None)
                continue
            since = self._free_since.setdefault(name, now)
            for waiting in world.waiting.values():
                if name not in waiting.operation.names or waiting.operation.kind == "set":
                    continue
                bound, calm = self._bound(waiting.process, name)
                begin = max(since, waiting.since, calm)
                if now - begin > bound and waiting.process.ran_since(begin):
                    self.bad(f"{name} is idle for {now - since:.2f} s, and {waiting.worker} waits for it")
                    self._free_since[name] = now + 60.0

    def _bound(self, process: Process, name: str) -> tuple[float, float]:
        """Return the seconds for which a name may be free, and the time from which they count."""
        world, calm = self.world, self.oracles.calm_since(process)
        if world.plan.profile == "cuts":
            owner = world.servers[0].holder(world.key(name))
            handed = [each.process for each in world.clients.values() if owner in each.kernel.monitor.waiting]
            return 0.8 + world.servers[0].unwatched, max([calm, *map(self.oracles.calm_since, handed)])
        if self.world.plan.weather.p_stall or self.world.plan.weather.p_cut:
            # A request without a reply takes longer with a longer ttl.
            return max(20.0, 4 * max(each.ttl for each in self.world.plan.processes)), calm
        return max((each.asks_again for each in self.world.servers), default=5.0), calm + 4.0


class Zombie(Oracle):
    """A belief ends soon after a force release. No belief begins after the client was notified of the force release."""

    def _is_unclear(self) -> bool:
        """Return whether the token leaves open when the server granted the lock."""
        return self.world.group.keeper("a") is None or any(each.kind == "step_clock" for each in self.world.struck)

    def granted(self, belief: Belief, others: list[Belief]) -> None:
        process, now = belief.held.process, self.world.sim.time
        told = self.oracles.told.get(belief.part.claim.id)
        if told is None or self._is_unclear() or belief.token is None or not belief.part.granted.short:
            return  # only pushed grants are judged, because an ordinary reply may come late
        if len(belief.held.beliefs) > 1:
            return  # a set got its other names earlier, and the loss of one may be reported later
        if self.world.servers[0].granted_at(belief.token) < told < now - 0.02 and process.ran_since(told - 0.1):
            self.bad(f"{belief.who} believes in {belief.name} {now - told:.3f} s after it was told to look again")

    def sampled(self, belief: Belief) -> None:
        forced = self.oracles.forced.get(belief.part.claim.id)
        if forced is None or self._is_unclear() or not belief.token:
            return
        if self.world.servers[0].granted_at(belief.token) >= forced:  # the grant is newer than the force release
            return
        since = self.world.sim.time - forced
        calm = self.world.plan.weather.p_stall == 0 and self.world.plan.weather.p_cut == 0
        calm = calm and self.oracles.calm_since(belief.held.process, "force") < forced - 1.0
        if since > (0.5 if calm else belief.part.granted.ttl * 1.02):
            self.bad(f"{belief.who} believes in {belief.name} {since:.3f} s after force_release")


class Ghost(Oracle):
    """A cancelled claim no longer holds or waits at the server (I3)."""

    def __init__(self, oracles: Oracles) -> None:
        super().__init__(oracles)
        self._found: dict[tuple[str, str], float] = {}

    def passing(self) -> None:
        world = self.world
        keepers = {server: None for name in world.kinds if (server := world.group.keeper(name)) and server.up}
        if world.plan.profile == "forget" or any(world.sim.time < each.lost + PAST for each in keepers):
            return
        found = {}
        at_server = [each for server in keepers for each in server.claims()]
        for client in world.clients.values():
            kernel = client.kernel
            if client.closing or not client.process.ran_since(world.sim.time - 1.0):
                continue
            for key, claim in at_server:
                known = claim in kernel.held or claim in kernel.monitor.waiting or claim in self.oracles.doomed
                if known or not claim.startswith(kernel.client):
                    continue
                if all(each.claim.id != claim for each in kernel.cancels._open):
                    found[key, claim] = since = self._found.get((key, claim), world.sim.time)
                    if (late := world.sim.time - since) > self._bound():
                        self.bad(f"{claim[:24]} is still in {key} {late:.1f} s after its client cancelled it")
        self._found = found

    def _bound(self) -> float:
        """Return the seconds within which a cancelled claim must leave the server."""
        plan = self.world.plan
        longest = max((each.ttl for each in plan.operations), default=0.0)
        return 1.2 if plan.is_quiet else 1.2 + self.world.servers[0].late_leave(longest)


class Left(Oracle):
    """At the end of a run no key, thread or connection is left (O7), no thread has failed, and no worker waits."""

    def ended(self) -> None:
        world = self.world
        for waiting in world.waiting.values():
            if waiting.process.alive:
                since = world.sim.time - waiting.since
                self.bad(f"{waiting.worker} still waits for {waiting.operation.names}, for {since:.1f} s")
        for process in world.sim.processes:
            tasks = [f"{task.name}: {task.waits_for}" for task in process.tasks]
            if process.alive and tasks:
                self.bad(f"threads of {process} have not ended: {tasks}")
            if process.alive and process.files:
                self.bad(f"files of {process} are open: {list(process.files.values())}")
        for server in world.servers:
            for key, claim in server.claims() if server.up else ():
                self.bad(f"{claim[:24]} is still in {key} of {server.name}")
        for error in world.sim.errors:
            self.bad(error)


class Oracles:
    """All oracles of one run, and the records that they share."""

    def __init__(self, world: World, halts: bool) -> None:
        """With ``halts`` the first violation ends the run."""
        self.world = world
        self.violations: list[tuple[str, str]] = []
        self.forced: dict[str, float] = {}  # claim id -> the time of its force release
        self.told: dict[str, float] = {}  # claim id -> when its client read the notification of its force release
        # claim -> the server that executed its request, although another server decides about the name
        self.doomed: dict[str, Server] = {}
        self.grants = 0
        self._halts = halts
        self._beliefs: dict[str, list[Belief]] = {}
        self.forgot: dict[str | None, float] = {}  # name, or None for all -> when a server may have forgotten it
        self._disturbed: dict[tuple[Process | None, str], float] = {}  # when the last fault of each kind ends
        self._all = [oracle(self) for oracle in Oracle.__subclasses__()]

    def bad(self, oracle: str, text: str) -> None:
        sim = self.world.sim
        self.violations.append((oracle, f"{sim.time - START:.6f} {text}"))
        sim.halted = sim.halted or self._halts
        sim.note(None, f"*** {oracle}: {text}")

    def of(self, name: str) -> list[Belief]:
        """Return the beliefs about a name, including those that ended less than `PAST` seconds ago."""
        return self._beliefs.get(name, [])

    # Events

    def granted(self, held: Held) -> None:
        self.grants += 1
        for belief in held.beliefs:
            # If the process was stopped before acquire() returned, the deadline may have passed: is_held() is False.
            belief.excused = self.forgotten(belief) or belief.part.claim.id in self.doomed or not held.is_live
            before = self._beliefs.setdefault(belief.name, [])
            before[:] = [each for each in before if each.held.until > self.world.sim.time - PAST]
            for each in before:
                if not each.held.process.alive:
                    each.held.end("killed")
            others = [] if belief.excused else [each for each in before if not each.excused]
            self.tell("granted", belief, others)
            before.append(belief)
            # close() will end the lease at once; a force release that is under way may end it
            belief.excused |= self.world.clients[held.process].closing or self.world.forcing[belief.name] > 0

    def sampled(self, held: Held) -> None:
        for belief in held.beliefs:
            self.tell("sampled", belief)

    def lost(self, held: Held, loss: Loss[Any]) -> None:
        self.tell("lost", held, loss)
        held.told = held.told or (self.world.sim.time, loss)
        held.end("lost")

    def released(self, held: Held, ours: bool, still: bool) -> None:
        held.returned, held.ours = self.world.sim.time, ours
        self.tell("released", held, ours, still)

    def tell(self, what: str, *about: Any) -> None:
        """Call the hook ``what`` of all oracles."""
        for each in self._all:
            getattr(each, what)(*about)

    # Excuses

    def excuse(self, name: str | None) -> None:
        """Stop judging the present holders of this name, or of all names, because the server forgets them now or an
        operator ends them."""
        self.forgot[name] = self.world.sim.time
        for each, beliefs in self._beliefs.items():
            if name in (None, each):
                for belief in beliefs:
                    over = belief.held.how == "released" and not belief.part.rest_until
                    belief.excused = belief.excused or not over

    def doom(self, claim: str, server: Server) -> None:
        """Do not judge the grants of this claim until the server that decides executes a request of the claim."""
        self.doomed[claim] = server
        for beliefs in self._beliefs.values():
            for belief in beliefs:
                belief.excused = belief.excused or belief.part.claim.id == claim

    def forgotten(self, belief: Belief) -> bool:
        """Return whether the server has forgotten the grant before its holder got it."""
        sent_at, servers = belief.sent_at, self.world.servers
        if belief.part.granted.group is not None and belief.token and len(servers) == 1:
            # ``sent_at`` may be the time of a later renewal of the session, but the token shows when the lock was
            # granted.
            sent_at = min(sent_at, servers[0].granted_at(belief.token))
        return sent_at <= max(self.forgot.get(name, -math.inf) for name in (belief.name, None))

    def disturb(self, process: Process | None, seconds: float, kind: str) -> None:
        """Record a fault that disturbs one process, or all, for ``seconds``."""
        key = process, kind
        self._disturbed[key] = max(self._disturbed.get(key, 0.0), self.world.sim.time + seconds)

    def calm_since(self, process: Process, *but: str) -> float:
        """Return the end of the last fault that disturbed this process. Faults of the kinds ``but`` do not count."""
        ends = (end for (who, kind), end in self._disturbed.items() if who in (None, process) and kind not in but)
        return max(ends, default=0.0)

    def quiet_for(self, seconds: float) -> bool:
        """Return whether the run has no faults, and no client was closed in the last ``seconds``."""
        last = max(self._disturbed.values(), default=0.0)
        return self.world.plan.is_quiet and self.world.sim.time - last > seconds
