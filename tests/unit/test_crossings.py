"""Tests of cases in which two rules apply, such as a finalizer inside our code, a closed loop, a fork during close(),
or an interrupt as a thread starts."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

from multilock import AsyncClient, BackendUnavailable, DistributedLock, Loss, LossReason, system
from multilock.backend import Backend
from multilock.kernel.exit import _at_exit
from multilock.kernel.inside_backend import inside
from multilock.kernel.runtime import Threads
from multilock.model import Claim, Granted, Returned
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import Call, Losses, Scripted, client_on, ctrl_c, eventually, late, refuse_threads, refused, silence

# A finalizer, or a signal handler, that runs inside our code


def test_a_loss_during_a_release_by_a_finalizer_ends_the_lease_once() -> None:
    backend = Scripted()
    client = client_on(backend, Threads())
    kernel = client._kernel
    losses = Losses()
    lease = client.lock("n", on_lost=losses).acquire()
    answers: list[bool] = []
    real = kernel.now

    def now() -> float:  # called after the release has found the lease held, but before it has ended the lease
        if threading.current_thread() is threading.main_thread():
            kernel.now = real
            notice = (inner(lease).claim.id, LossReason.TAKEN, "taken")
            loser = threading.Thread(target=kernel.monitor.gone, args=notice)
            loser.start()
            loser.join(0.5)
        return real()

    def collect(backend: Scripted, call: Call) -> Any:
        kernel.now = now
        answers.append(lease.release())
        return call.execute()

    backend.script("attempt", collect)
    client.lock("m").acquire()
    eventually(lambda: losses.calls or backend.released())
    client.close()
    assert (answers, len(losses.calls)) in [([True], 0), ([False], 1)]


def test_a_finalizer_on_the_watchdog_thread_sends_nothing_there() -> None:
    backend = Scripted()
    client = client_on(backend, Threads())
    lease = client.lock("n").acquire()
    senders: list[str] = []

    def send(backend: Scripted, call: Call) -> Any:
        senders.append(threading.current_thread().name)
        return call.execute()

    backend.always("release", send)
    client._kernel.timers.at(client._kernel.now(), lambda: [lease.release()].clear())
    eventually(lambda: senders)
    client.close()
    assert senders == ["multilock-cleanup"]


def test_a_release_by_a_finalizer_does_not_delay_the_watchdog_of_another_client() -> None:
    backend = Scripted()
    client, other = client_on(backend, Threads()), client_on(Scripted(), Threads())
    lease = client.lock("n").acquire()
    go_on = threading.Event()
    answers: list[str] = []

    def answer_late(backend: Scripted, call: Call) -> Any:
        go_on.wait(10)
        answers.append(call.method)
        return call.execute()

    backend.always("release", answer_late)
    with other._kernel.lock:
        assert lease.release()
        assert not lease.is_held()
        assert answers == [], "it waited for the answer"
    go_on.set()
    backend.always("release", None)
    eventually(lambda: backend.holders == {})
    client.close()
    other.close()


def test_finalizers_that_cross_two_clients_wait_for_each_other_only_briefly() -> None:
    backends = Scripted(), Scripted()
    first, second = (client_on(backend, Threads()) for backend in backends)
    leases = first.lock("n").acquire(), second.lock("n").acquire()
    both = threading.Barrier(2)

    def release(within: Any, lease: Any) -> None:
        with within._kernel.lock:
            both.wait(5)
            lease.release()

    threads = [
        threading.Thread(target=release, args=args, daemon=True) for args in [(first, leases[1]), (second, leases[0])]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not any(thread.is_alive() for thread in threads)
    eventually(lambda: not any(backend.holders for backend in backends))
    first.close()
    second.close()


@pytest.mark.parametrize("end", ["release", "stop", "close"])
def test_a_release_by_a_finalizer_waits_for_no_callback(end: str) -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), ttl=20.0)
    told, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def on_lost(loss: Loss) -> None:
        told.set()
        go_on.wait(15)
        over.set()

    election = client.election("n", on_lost=on_lost)
    leadership = election.campaign()
    with client._kernel.lock:
        ends: dict[str, Callable[[], object]]
        ends = {"release": leadership.release, "stop": election.stop, "close": client.close}
        ends[end]()
    assert not over.is_set()
    assert told.wait(5)
    assert backend.holders, "kept until on_lost has ended"
    go_on.set()
    eventually(lambda: backend.holders == {})
    client.close()


def test_a_close_by_a_finalizer_ends_in_the_background() -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), ttl=10.0)
    go_on = threading.Event()
    client.lock("n", on_lost=lambda loss: go_on.wait(10)).acquire()
    with client._kernel.lock:
        client.close()
        assert not backend.closed, "it waited for the callback"
    go_on.set()
    eventually(lambda: backend.closed)
    assert backend.holders == {}


# Interrupts, forks, refused threads


def test_an_interrupt_as_a_request_begins_does_not_count_its_thread_as_inside() -> None:
    client = client_on(Scripted(), Threads())
    with ctrl_c("call_inside", after="add"):
        client.lock("n").acquire()
    left = threading.get_ident() in inside
    inside.discard(threading.get_ident())
    client.close()
    assert not left


@pytest.mark.oracle
def test_a_worker_whose_start_is_interrupted_leaves_no_lock_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = 8  # two releases; each submits its job twice, and each submission starts a thread twice
    real = system.Thread

    class Interrupted(real):  # type: ignore[valid-type, misc]
        def start(self) -> None:
            nonlocal interrupts
            ours = threading.current_thread() is threading.main_thread()  # Python interrupts only the main thread
            if self.name == "multilock-cleanup" and ours and interrupts:
                interrupts -= 1
                raise KeyboardInterrupt
            super().start()

    backend = Scripted()
    client = client_on(backend, Threads())
    leases = [client.lock(f"n{number}").acquire() for number in range(2)]
    monkeypatch.setattr(system, "Thread", Interrupted)
    for lease in leases:
        with pytest.raises(KeyboardInterrupt):
            client._kernel.releases.later(inner(lease))
    eventually(lambda: backend.holders == {}, within=20)
    client.close()


class Resting(Scripted):
    def __init__(self) -> None:
        super().__init__(hold_at_least=True)
        self.rests: list[float] = []

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        self.rests.append(seconds)
        return self.release(claim, granted, unsure, within)


@pytest.mark.parametrize(
    ("take", "where"),
    [
        (lambda lock: lock.acquire(), "Scope.push"),
        (lambda lock: lock.__enter__(), "WithEntry.__init__"),
        (lambda lock: lock.as_threading_lock().acquire(), "WithEntry.__init__"),
    ],
    ids=["acquire", "with", "threading"],
)
def test_a_lock_whose_acquire_was_interrupted_does_not_rest(
    take: Callable[[DistributedLock], object], where: str
) -> None:
    backend = Resting()
    client = client_on(backend, Threads())
    with ctrl_c(where):
        take(client.lock("n", hold_at_least=50))
    eventually(lambda: backend.holders == {})
    client.close()
    assert backend.rests == [], "nothing was done for which it would"


def test_a_child_forked_during_a_close_releases_no_lock_of_its_parent() -> None:
    backend = Scripted()
    client = client_on(backend, Threads(), ttl=2.0)
    client.lock("n").acquire()
    backend.always("release", silence(0.3))
    closing = threading.Thread(target=client.close)
    closing.start()
    eventually(lambda: backend.called("release"))
    if (pid := os.fork()) == 0:
        status = 99
        try:
            before = len(backend.calls)
            _at_exit()
            status = len(backend.calls) - before
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    closing.join(10)


def test_a_renewal_by_hand_without_a_thread_raises_backend_unavailable() -> None:
    backend = Scripted()
    client = client_on(backend, Threads())
    lease = client.lock("n").acquire()
    backend.script("renew", refused(RuntimeError("can't start new thread")))
    with pytest.raises(BackendUnavailable):
        lease.renew()
    assert lease.is_held()
    client.close()


def test_a_first_renewal_without_a_thread_costs_no_acquire() -> None:
    runtime = HandRuntime()
    backend = Scripted(runtime)
    client = client_on(backend, runtime, ttl=10)
    backend.script("attempt", late(5.5))
    backend.script("renew", refused(RuntimeError("can't start new thread")))
    assert client.lock("n").acquire().is_held()


def test_a_node_campaigns_even_if_the_thread_that_reports_leaders_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_on(Scripted(), Threads())
    told: list[object] = []
    election = client.election("n", on_leader_changed=told.append)
    refuse_threads(monkeypatch)["multilock-observer"] = 2
    election.start()
    eventually(election.is_leader, within=20)
    eventually(lambda: told, within=20)
    client.close()


# The server shortens the ttl while the grant is on its way


def test_a_grant_that_ended_by_a_shortened_ttl_becomes_no_lease() -> None:
    runtime = HandRuntime()
    backend = Scripted(runtime, sessions=True)
    client = client_on(backend, runtime, ttl=30)
    losses = Losses(runtime)
    client.lock("a").acquire()

    def cut(backend: Scripted, call: Call) -> Any:
        granted = call.execute()
        runtime.advance(6)
        group: Hashable = granted.group
        backend.notices.shortened(group, 4.0, granted.sent_at + 4.0, 1.0)
        return granted

    backend.script("attempt", cut)
    lock = client.lock("n", on_lost=losses)
    with pytest.raises(BackendUnavailable):
        lock.acquire(timeout=0)
    runtime.advance(10)
    assert (lock.is_held(), losses.calls) == (False, [])


# A loop is closed under an election


@pytest.fixture
def unwound() -> Iterator[None]:
    """Collect the objects of a closed loop at the end of the test, so that no later test is disturbed."""
    yield
    gc.collect()


def on_closed_loop(
    backend: Backend, steps: Callable[[AsyncClient], Any], *, ttl: float = 2.0
) -> tuple[AsyncClient, Any]:
    """Run ``steps(client)`` on a loop, and close the loop with everything that still ran on it. Returns the client
    and the result."""
    client = AsyncClient(backend, ttl=ttl)
    loop = asyncio.new_event_loop()
    try:
        return client, loop.run_until_complete(asyncio.wait_for(steps(client), 10))
    finally:
        loop.close()


async def until(ready: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, ready)


@pytest.mark.oracle
@pytest.mark.usefixtures("unwound")
@pytest.mark.parametrize("used", [True, False], ids=["used-there", "new-there"])
@pytest.mark.parametrize("end", ["resign", "stop", "release", "close"])
def test_on_lost_runs_on_the_next_loop_before_the_lease_is_released(end: str, used: bool) -> None:
    backend = Scripted()
    told: list[tuple[LossReason, bool]] = []
    elected = threading.Event()

    async def on_elected(leadership: Any) -> None:
        elected.set()
        await asyncio.sleep(1000)

    async def on_lost(loss: Loss) -> None:
        await asyncio.sleep(0.2)
        told.append((loss.reason, "n" in backend.holders))

    async def lead(client: AsyncClient) -> Any:
        election = client.election("n", on_elected=on_elected, on_lost=on_lost)
        leadership = await election.campaign()
        await until(elected.is_set)
        return election, leadership

    client, (election, leadership) = on_closed_loop(backend, lead)

    async def next_loop() -> None:
        if used:
            await (await client.lock("other").acquire()).release()
        if end == "close":
            await client.close()
        else:
            await (leadership.release() if end == "release" else getattr(election, end)())
        await until(lambda: told)
        await client.close()

    asyncio.run(asyncio.wait_for(next_loop(), 20))
    assert told == [(LossReason.RESIGNED, True)]
    assert backend.holders == {}


@pytest.mark.usefixtures("unwound")
@pytest.mark.parametrize("led", [True, False], ids=["led", "waited"])
def test_an_election_whose_loop_was_closed_campaigns_again_on_the_next(led: bool) -> None:
    backend = Scripted()
    backend.heartbeat = 0.1
    elected: list[Any] = []
    lost: list[LossReason] = []
    if not led:
        backend.holders["n"] = "other"

    async def stand(client: AsyncClient) -> Any:
        election = client.election("n", on_elected=elected.append, on_lost=lambda loss: lost.append(loss.reason))
        election.start()
        await until(lambda: elected or (not led and backend.called("attempt")))
        return election

    client, election = on_closed_loop(backend, stand)
    if not led:
        del backend.holders["n"]

    async def next_loop() -> None:
        election.start()
        await until(lambda: len(elected) == 1 + led)
        assert election.is_leader()
        await election.stop()
        await client.close()

    asyncio.run(asyncio.wait_for(next_loop(), 20))
    assert lost == [LossReason.RESIGNED] * (1 + led)
    assert backend.holders == {}
