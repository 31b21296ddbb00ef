"""Random tests of the kernel on the memory backend with many faults. The test moves the clock.

Several clients take, keep and release a few names. Requests and replies are lost, late or executed long after their
callers gave up, requests are refused, and whole processes are stopped. An operator releases locks by force.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from multilock import (
    BackendRejected,
    BackendUnavailable,
    Client,
    Lease,
    LeaseState,
    LockInfo,
    LockTimeout,
    Loss,
    LossReason,
)
from multilock.backend import Held, Notices
from multilock.model import Busy, Claim, Finding, Granted, Returned
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from multilock_memory import MemoryBackend
from tests.unit.kit import client_on

NAMES = ("a", "b")
TTLS = (1.0, 4.0)
CLIENTS = 3
FAULTS = ("lost request", "lost reply", "not sent", "refused", "late", "too late", "stopped", "stuck")
STUCK_FOR = 50.0  # seconds; less than a minute, because a request that is later may leave an orphaned lock for a ttl
_stores = itertools.count()


class Deaf:
    """A `Notices` that drops every report of a loss."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notices, name)


class Faulty:
    """A memory backend behind a bad network."""

    scheme = "memory"
    spi_version = 1

    def __init__(self, world: World, inner: MemoryBackend, deaf: bool) -> None:
        self.deaf = deaf
        self.world = world
        self.inner = inner
        self.capabilities = inner.capabilities
        self.faults: list[str] = []
        self.always: str | None = None

    def open(self, notices: Notices) -> None:
        self.inner.open(Deaf(notices) if self.deaf else notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._send(within, lambda: self.inner.attempt(claim, join, within))  # type: ignore[no-any-return]

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        return self._send(within, lambda: self.inner.release(claim, granted, unsure, within))  # type: ignore[no-any-return]

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        return self._send(within, lambda: self.inner.renew(group, held, within))  # type: ignore[no-any-return]

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self._send(within, lambda: self.inner.watch(group, held, within))

    def follow(self, names: frozenset[str], within: float) -> bool:
        return self.inner.follow(names, within)

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self.inner.inspect(name, within)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self.inner.inspect_all(prefix, within)

    def force_release(self, name: str, within: float) -> bool:
        return self.inner.force_release(name, within)

    def diagnose(self, within: float) -> list[Finding]:
        return []

    def ping(self, within: float) -> None: ...

    def close(self) -> None:
        self.inner.close()

    def _send(self, within: float, execute: Callable[[], Any]) -> Any:
        fault = self.faults.pop(0) if self.faults else self.always
        if fault is None:
            return execute()
        if fault == "refused":
            raise BackendRejected("refused")
        if fault == "not sent":
            raise BackendUnavailable("connection refused", unknown=False)
        if fault in ("late", "too late", "stopped"):
            answer = execute()
            if fault == "stopped":
                self.world.stop_everything(within * 2)
            else:
                self.world.pass_time(within * (0.95 if fault == "late" else 1.5))
            return answer
        if fault == "lost reply":
            execute()
        elif fault == "stuck":
            self.world.stuck.append((self.world.runtime.now(), execute))
        self.world.pass_time(within)
        raise BackendUnavailable("no answer")


class Watched:
    """A lease, and what was observed of it."""

    def __init__(self, client: Client, lease: Lease) -> None:
        self.client = client
        self.lease = lease
        self.states = [LeaseState.HELD]
        self.losses: list[tuple[float, Loss]] = []
        self.taken = False  # the lock was released by force, and the holder may not be notified yet
        self.paused = False  # the process was stopped while it held the lease
        self.given_back = False  # release() began while the lock was held, so only the reply can still report a loss


NEXT = {
    LeaseState.HELD: {LeaseState.HELD, LeaseState.AT_RISK, LeaseState.LOST, LeaseState.RELEASED},
    LeaseState.AT_RISK: {LeaseState.HELD, LeaseState.AT_RISK, LeaseState.LOST, LeaseState.RELEASED},
    LeaseState.LOST: {LeaseState.LOST},
    LeaseState.RELEASED: {LeaseState.RELEASED},
}


class World(RuleBasedStateMachine):
    leases: Bundle[Watched] = Bundle("leases")

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.runtime = HandRuntime(start=1000.0, seed=seed)
        store = f"state-machine-{next(_stores)}"
        self.backends = [
            Faulty(self, MemoryBackend(store, prefix="", ttl=TTLS[-1]), deaf) for deaf in (True, True, False)
        ]
        self.clients = [
            client_on(backend, self.runtime, outage_timeout=3.0, request_timeout=patience)
            for backend, patience in zip(self.backends, (None, 1.0, 2.5), strict=True)
        ]
        self.stuck: list[tuple[float, Callable[[], Any]]] = []
        self.watched: list[Watched] = []
        self.tokens: dict[str, int] = {}

    def pass_time(self, seconds: float) -> None:
        self.runtime.event().wait(seconds)

    def stop_everything(self, seconds: float) -> None:
        for watched in self.watched:
            watched.paused = True
        self.runtime.jump(seconds)

    @rule(
        target=leases,
        client=st.integers(0, CLIENTS - 1),
        name=st.sampled_from(NAMES),
        ttl=st.sampled_from(TTLS),
        timeout=st.sampled_from([0, 0, 0.5, 2.0, 6.0]),
        renew=st.sampled_from([True, True, True, False]),
        fair=st.booleans(),
    )
    def acquire(self, client: int, name: str, ttl: float, timeout: float, renew: bool, fair: bool) -> Any:
        watched = self.take(client, name, timeout, ttl=ttl, renew=renew, fair=fair)
        return watched if watched else multiple()

    @rule(
        target=leases,
        client=st.integers(0, CLIENTS - 1),
        name=st.sampled_from(NAMES),
        ttl=st.sampled_from(TTLS),
        stopped=st.booleans(),
    )
    def somebody_is_greedy(self, client: int, name: str, ttl: float, stopped: bool) -> Any:
        """Repeat requests, and get the lock at the first moment at which the server allows it."""
        self.backends[client].always = None
        self.backends[client].faults.clear()
        for _ in range(200):
            if mine := self.take(client, name, 0, ttl=ttl):
                return mine
            if stopped:
                self.stop_everything(0.05)
            else:
                self.runtime.advance(0.02)
            self.believers()
        return multiple()

    @rule(
        target=leases,
        pair=st.permutations(range(CLIENTS)),
        name=st.sampled_from(NAMES),
        ttl=st.sampled_from(TTLS),
        first=st.sampled_from((None, *FAULTS)),
        later=st.lists(st.sampled_from(FAULTS), max_size=3),
        then=st.sampled_from(FAULTS),
        stopped=st.booleans(),
    )
    def a_holder_is_cut_off(
        self, pair: list[int], name: str, ttl: float, first: str | None, later: list[str], then: str, stopped: bool
    ) -> Any:
        cut_off, greedy, _ = pair
        self.backends[cut_off].always = None
        self.backends[cut_off].faults[:] = [first] if first else []
        mine = self.take(cut_off, name, 0, ttl=ttl)
        self.backends[cut_off].faults[:] = later
        self.backends[cut_off].always = then
        others = self.somebody_is_greedy(client=greedy, name=name, ttl=ttl, stopped=stopped)
        return multiple(*([mine] if mine else []), *([others] if isinstance(others, Watched) else []))

    def take(self, client: int, name: str, timeout: float, **options: Any) -> Watched | None:
        holder = self.clients[client]
        heard: list[tuple[float, Loss]] = []
        lock = holder.lock(name, on_lost=lambda loss: heard.append((self.runtime.now(), loss)), **options)
        try:
            lease = lock.acquire(timeout)
        except (LockTimeout, BackendUnavailable, BackendRejected):
            return None
        watched = Watched(holder, lease)
        watched.losses = heard
        self.watched.append(watched)
        assert lease.is_held(), "what acquire() returns is held"
        assert lease.token is not None
        assert lease.token > self.tokens.get(name, 0), "tokens grow"
        self.tokens[name] = lease.token
        for former in self.watched[:-1]:
            if former.lease.name == name and former.losses and not (former.losses[0][1].confirmed or former.taken):
                assert self.runtime.now() >= former.losses[0][1].valid_until, "the time of its callback is its own"
        self.believers()
        return watched

    @rule(watched=consumes(leases))
    def release(self, watched: Watched) -> None:
        held = watched.lease.is_held()
        watched.given_back |= held
        losses = len(watched.losses)
        ours = watched.lease.release()
        assert held or not ours
        assert watched.lease.release() is False
        if ours:
            assert len(watched.losses) == losses == 0
        else:
            assert watched.lease.wait_lost(0) is not None

    @rule(watched=leases)
    def renew(self, watched: Watched) -> None:
        before = watched.lease.remaining()
        try:
            watched.lease.renew()
        except Exception:
            return
        assert watched.lease.is_held()
        assert before > 0

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.runtime.advance(0.05)
            self.believers()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]), settle=st.booleans())
    def everything_is_stopped(self, seconds: float, settle: bool) -> None:
        self.stop_everything(seconds)
        if settle:
            self.runtime.settle()

    @rule(client=st.integers(0, CLIENTS - 1), fault=st.sampled_from(FAULTS))
    def the_network_stays_bad(self, client: int, fault: str) -> None:
        self.backends[client].always = fault

    @rule(client=st.integers(0, CLIENTS - 1), faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=5))
    def the_network_goes_bad(self, client: int, faults: list[str]) -> None:
        self.backends[client].faults += faults

    @rule()
    def the_network_heals(self) -> None:
        for backend in self.backends:
            backend.faults.clear()
            backend.always = None

    @precondition(lambda self: self.stuck)
    @rule()
    def a_stuck_request_is_executed(self) -> None:
        since, execute = self.stuck.pop(0)
        if self.runtime.now() < since + STUCK_FOR:
            execute()

    @rule(name=st.sampled_from(NAMES))
    def an_operator_takes_it(self, name: str) -> None:
        self.backends[0].inner.force_release(name, 1.0)
        for watched in self.watched:
            watched.taken |= watched.lease.name == name

    @rule(client=st.integers(0, CLIENTS - 1))
    def carriers_hang_for_a_while(self, client: int) -> None:
        self.runtime.hold_jobs()
        self.time_passes(1.0)
        self.runtime.release_jobs()

    # Invariants

    @invariant()
    def believers(self) -> None:
        for name in NAMES:
            believers = [
                each for each in self.watched if each.lease.name == name and each.lease.is_held() and not each.taken
            ]
            assert len(believers) <= 1, f"{len(believers)} believe that they hold {name!r}"

    @invariant()
    def states_only_move_forward(self) -> None:
        for watched in self.watched:
            state = watched.lease.state
            assert state in NEXT[watched.states[-1]], f"{watched.states[-1]} became {state}"
            watched.states.append(state)

    @invariant()
    def callbacks_come_once_and_in_time(self) -> None:
        for watched in self.watched:
            state = watched.lease.state
            assert len(watched.losses) == (state is LeaseState.LOST), f"{len(watched.losses)} callbacks when {state}"
            for called_at, loss in watched.losses:
                assert called_at == loss.detected_at
                if watched.given_back:
                    assert (loss.reason, loss.confirmed) == (LossReason.TAKEN, True)
                elif not watched.paused:
                    assert called_at <= inner(watched.lease).lost_at + 1e-6

    @invariant()
    def only_what_is_held_is_looked_after(self) -> None:
        for client in self.clients:
            looked_after = set(client._kernel.held.values())
            believed = {inner(each.lease) for each in self.watched if each.client is client and each.lease.is_held()}
            assert believed == looked_after

    @invariant()
    def everything_held_is_known_to_somebody(self) -> None:
        known: set[str] = set()
        for client in self.clients:
            known |= client._kernel.held.keys()
            known |= {cancel.claim.id for cancel in client._kernel.cancels._open}
        for name, entry in self.backends[0].inner._store.names.items():
            for id_, holder in entry.holders.items():
                if holder.until > self.runtime.now():
                    assert id_ in known, f"{name!r} is held by a claim that nobody will release"

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        self.the_network_heals()
        for watched in self.watched:
            watched.lease.release()
        while self.stuck:
            self.a_stuck_request_is_executed()
            self.everything_held_is_known_to_somebody()
        self.runtime.advance(200)
        store = self.backends[0].inner._store
        # The store removes expired entries only at the next request of a client.
        for name in list(store.names):
            store.look(name, self.runtime.now())
        assert store.names == {}, "nothing is left behind"
        for client in self.clients:
            kernel = client._kernel
            assert kernel.cancels.take() == []
            assert kernel.gate._lines == {}
            assert kernel.monitor.waiting == {}
            assert kernel.held == {}
            assert len(kernel.watchdog._heap) <= 130
            assert kernel.timers._heap == []
            client.close()
        self.callbacks_come_once_and_in_time()


TestWorld = pytest.mark.timeout(180)(World.TestCase)  # five seconds of computing on an idle machine
TestWorld.settings = settings(
    max_examples=75,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
