"""Elections in which an event happens at the worst moment, between two steps of loops or threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multilock import (
    AsyncClient,
    AsyncLeadership,
    Client,
    ClientClosed,
    Leadership,
    LockTimeout,
    Loss,
    LossReason,
    MultilockError,
    NotHeld,
    connect,
)
from multilock.kernel.inside_backend import call_inside
from multilock.kernel.runtime import Threads
from multilock.lock import Waits
from multilock.testing import HandRuntime
from tests.unit.kit import PRODUCT, Call, Scripted, client_on, eventually, interrupted_at, refuse_threads
from tests.unit.test_crossings import on_closed_loop
from tests.unit.test_election import Diary, run, take, until


@pytest.fixture
def client(client_in_threads: Client) -> Client:
    return client_in_threads


def in_time(call: Callable[[], object]) -> None:
    """Check that ``call()`` does not hang."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


# A task that is cancelled before its first step never begins, and its coroutine is not notified


async def unbegun_besides(known: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Return the new tasks, before any of them takes its first step."""
    while True:
        if new := asyncio.all_tasks() - known:
            return new
        await asyncio.sleep(0)


@pytest.mark.parametrize("begun", [False, True])
def test_an_async_start_continues_when_a_program_cancels_all_tasks(server: Scripted, begun: bool) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            election = client.election("e")
            election.start()
            if begun:
                await until(election.is_leader)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await until(lambda: not election.is_leader())
            await until(election.is_leader)
            await election.stop()
            assert client._kernel.candidacies() == []

    run(main)


def test_an_async_start_that_was_cancelled_can_be_stopped_before_it_continues(server: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            election = client.election("e")
            election.start()
            assert election._background
            election._background.cancel()
            await asyncio.sleep(0)
            await election.stop()
            assert client._kernel.candidacies() == []
            assert server.holders == {}

    run(main)


def test_leader_changes_are_reported_after_a_program_cancelled_all_tasks(server: Scripted) -> None:
    told: list[str] = []

    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            election = client.election("e", on_leader_changed=lambda leader: told.append(repr(leader)))
            election.start()
            await until(lambda: told)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await until(lambda: len(told) >= 2)
            await election.stop()

    run(main)


def cancelled_result(*_: object) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


def test_events_are_reported_after_cancelled_tasks_and_callbacks_that_raise(server: Scripted) -> None:
    told: list[str] = []

    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:

            async def slow(event: object) -> None:
                told.append(type(event).__name__)
                await asyncio.sleep(0.01)

            client.events.subscribe(cancelled_result)
            client.events.subscribe(slow)
            async with client.lock("n"):
                await until(lambda: told)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await asyncio.sleep(0)
            await until(lambda: "Released" in told)

    run(main)


def test_a_callback_that_raises_cancelled_error_delays_no_close(server: Scripted) -> None:
    async def main() -> None:
        client = AsyncClient(server, ttl=25.0, request_timeout=20.0)
        lease: Any = await client.lock("n", on_lost=cancelled_result).acquire()
        client._kernel.monitor.gone(lease.claim.id, LossReason.TAKEN, "an operator took it")
        await asyncio.wait_for(client.close(), 10)

    run(main)


def test_an_async_callback_that_closes_the_client_does_not_wait_for_itself(server: Scripted) -> None:
    async def main() -> None:
        client = AsyncClient(server, ttl=25.0, request_timeout=20.0)
        closed = asyncio.Event()

        async def close(loss: object) -> None:
            await client.close()
            closed.set()

        lease: Any = await client.lock("n", on_lost=close).acquire()
        client._kernel.monitor.gone(lease.claim.id, LossReason.TAKEN, "an operator took it")
        await asyncio.wait_for(closed.wait(), 10)

    run(main)


@pytest.mark.oracle
def test_an_on_elected_cancelled_before_it_began_is_neither_awaited_nor_followed_by_on_lost(
    server: Scripted,
) -> None:
    diary = Diary()

    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            election = client.election("e", on_elected=diary.elected, on_lost=diary.lost, grace=math.inf)
            election.start()
            background = election._background
            assert background
            await asyncio.sleep(0)
            known = asyncio.all_tasks()
            for task in {background, *await unbegun_besides(known)}:
                task.cancel()
            await asyncio.wait_for(asyncio.wait([background]), 5)
            assert server.holders == {}
            assert diary.entries == []
            election.start()
            await until(lambda: diary.entries)
            await election.stop()
            assert diary.entries == ["elected 2", "lost 2 resigned"]

    run(main)


@pytest.mark.oracle
def test_an_on_lost_cancelled_before_it_began_is_still_called(server: Scripted) -> None:
    diary = Diary()

    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            election = client.election("e", on_elected=diary.elected, on_lost=diary.lost, grace=math.inf)
            await election.campaign()
            await until(lambda: diary.entries and len(asyncio.all_tasks()) == 1)
            resigning = asyncio.create_task(election.resign())
            await asyncio.sleep(0)
            for task in await unbegun_besides(asyncio.all_tasks()):
                task.cancel()
            assert await asyncio.wait_for(resigning, 5) is True
            assert diary.entries == ["elected 1", "lost 1 resigned"]

    run(main)


# Between two loops


@pytest.fixture(autouse=True)
def unwound() -> Iterator[None]:
    """Collect the objects of a closed loop at the end of the test, so that no later test is disturbed."""
    yield
    gc.collect()


@pytest.mark.parametrize("how", ["start", "campaign"])
def test_a_leadership_lost_between_two_loops_is_reported_on_the_next_loop(server: Scripted, how: str) -> None:
    lost: list[LossReason] = []
    elected: list[AsyncLeadership] = []

    async def lead(client: AsyncClient) -> Any:
        election = client.election("e", on_elected=elected.append, on_lost=lambda loss: lost.append(loss.reason))
        if how == "start":
            election.start()
        else:
            await election.campaign()
        await until(lambda: elected)
        return election

    client, election = on_closed_loop(server, lead, ttl=25.0)
    take(server)
    eventually(lambda: not election.is_leader())

    async def next_loop() -> None:
        election.start()
        await until(lambda: len(elected) == 2)
        assert lost == [LossReason.TAKEN]
        await election.stop()
        await client.close()

    run(next_loop)
    assert lost == [LossReason.TAKEN, LossReason.RESIGNED]


@pytest.mark.parametrize("led", [True, False], ids=["led", "waited"])
def test_a_candidacy_of_a_closed_loop_that_ends_late_affects_no_later_one(server: Scripted, led: bool) -> None:
    elected: list[AsyncLeadership] = []
    standing: list[asyncio.Task[Any] | None] = []  # keeps the task until the test drops it
    if not led:
        server.holders["e"] = "other"

    async def stand(client: AsyncClient) -> Any:
        election = client.election("e", on_elected=elected.append, on_leader_changed=lambda _: None)
        election.start()
        standing.append(election._background)
        await until(lambda: elected or (not led and server.queues["e"]))
        return election

    client, election = on_closed_loop(server, stand, ttl=25.0)
    if not led:
        del server.holders["e"]

    async def next_loop() -> None:
        election.start()
        await until(lambda: len(elected) == 1 + led)
        standing.clear()
        gc.collect()
        await asyncio.sleep(0.05)
        assert election.is_leader()
        assert len(elected) == 1 + led, "it resigned, and leads again"
        assert election._reporter._observer
        await election.stop()
        await client.close()

    run(next_loop)


# A finalizer that runs inside our code


@pytest.mark.parametrize("how", ["stop", "resign", "release"])
def test_a_finalizer_that_resigns_inside_its_own_election_does_not_wait(server: Scripted, how: str) -> None:
    client = client_on(server, Threads(), ttl=25.0)
    go_on = threading.Event()
    election = client.election("e", on_lost=lambda _: go_on.wait(10), grace=math.inf)
    leadership = election.campaign()

    def finalize() -> None:
        with election._office.lock:  # a garbage collection may run while this lock is held
            getattr(leadership if how == "release" else election, how)()

    in_time(finalize)
    assert server.holders
    go_on.set()
    eventually(lambda: server.holders == {})
    client.close()


@pytest.mark.parametrize("how", ["stop", "resign", "release", "with"])
def test_a_finalizer_that_resigns_does_not_wait_for_a_lock_of_another_thread(server: Scripted, how: str) -> None:
    """The other thread may be inside a finalizer too, and wait for a lock that this thread holds."""
    client = client_on(server, Threads(), ttl=25.0)
    losses: list[Loss[Any]] = []
    election = client.election("e", on_lost=losses.append)
    leadership = election.campaign()
    block = contextlib.ExitStack()
    if how == "with":
        block.enter_context(leadership)
    calls: dict[str, Callable[[], object]] = {
        "stop": election.stop,
        "resign": election.resign,
        "release": leadership.release,
        "with": block.close,
    }
    with client._kernel.lock:
        in_time(lambda: call_inside(calls[how]))
    eventually(lambda: server.holders == {})
    assert [loss.reason for loss in losses] == [LossReason.RESIGNED]
    client.close()


# Several threads


def test_of_two_simultaneous_starts_one_campaigns_and_the_other_does_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    election = client.election("e")
    both = threading.Barrier(2)  # passed by both threads at the start, and again if both reach the critical section
    check_open = client._kernel.check_open

    def checked_together() -> None:
        check_open()
        if election._stop is None:  # only one thread should get here; if both do, they continue together
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)

    monkeypatch.setattr(client._kernel, "check_open", checked_together)
    errors: list[Exception] = []

    def start() -> None:
        try:
            election.start()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert errors == []
    eventually(election.is_leader)
    election.stop()


def test_elections_may_be_created_while_another_thread_lists_the_candidacies(client: Client) -> None:
    ended = threading.Event()
    errors: list[Exception] = []

    def ask() -> None:
        while not ended.is_set():
            try:
                client._kernel.candidacies()
            except Exception as error:
                errors.append(error)
                return

    asking = threading.Thread(target=ask)
    asking.start()
    elections = [client.election(f"e{number}") for number in range(20000)]
    ended.set()
    asking.join(10)
    assert errors == []
    assert len(elections) == 20000


# The process cannot start more threads


def test_an_election_whose_thread_is_refused_campaigns_once_a_thread_can_start(
    client: Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch)["multilock-election"] = 3
    election = client.election("e")
    election.start()
    eventually(election.is_leader)
    election.stop()
    assert server.holders == {}


def test_an_async_close_whose_thread_is_refused_continues_once_a_thread_can_start(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = refuse_threads(monkeypatch)

    async def main() -> None:
        client = AsyncClient(server, ttl=25.0)
        lease = await client.lock("n").acquire()
        refusals["multilock-close"] = 3
        await asyncio.wait_for(client.close(), 5)
        assert refusals["multilock-close"] == 0
        assert not lease.is_held()
        assert server.holders == {}
        assert server.closed == 1

    run(main)


def test_a_close_by_a_finalizer_continues_once_a_thread_can_start(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_on(server, Threads(), ttl=25.0)
    lease = client.lock("n").acquire()
    refuse_threads(monkeypatch)["multilock-close"] = 3
    with client._kernel.lock:
        client.close()
    assert not lease.is_held()
    eventually(lambda: server.holders == {})
    eventually(lambda: server.closed == 1)


# Unused elections


def test_an_abandoned_observer_keeps_no_client_alive(client: Client) -> None:
    leaders: Any = client.election("e").observe()
    assert client._kernel.followers.wanted()
    del leaders
    gc.collect()
    assert not client._kernel.followers.wanted()


# ---- interrupts


def run_once(client: Client, **callbacks: Any) -> None:
    client.election("n", **callbacks).run(lambda leadership: 1)


def campaign_and_release(client: Client, **callbacks: Any) -> None:
    with client.election("n", **callbacks).campaign(timeout=5):
        pass


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
@pytest.mark.parametrize(
    ("use", "function"),
    [
        (run_once, "Election.run"),
        (campaign_and_release, "Election.campaign"),
    ],
)
def test_an_interrupt_anywhere_leaves_no_leader(use: Callable[..., None], function: str) -> None:
    led, unpaired = [], []
    step = 0
    while True:
        runtime = HandRuntime()
        backend = Scripted(runtime)
        client = client_on(backend, runtime)
        told: list[str] = []
        callbacks: dict[str, Any] = {
            "on_elected": lambda leadership, told=told: told.append("elected"),
            "on_lost": lambda loss, told=told: told.append("lost"),
        }
        with interrupted_at(step, function) as where, contextlib.suppress(KeyboardInterrupt, MultilockError):
            use(client, **callbacks)
        if not where:
            break
        runtime.advance(120)
        step += 1
        # If the interrupt comes as __enter__ or __exit__ itself begins, none of our code runs. So the candidate stays
        # leader, and on_lost is not called.
        if where[0].split(":")[0].endswith(("__exit__", "Waits.__enter__", "Leadership.__enter__")):
            continue
        if backend.holders:
            led.append((step, where))
        if told not in ([], ["elected", "lost"]):
            unpaired.append((step, where, told))
    assert step > 50
    assert led == []
    assert unpaired == []


def test_a_start_interrupted_after_its_thread_won_resigns(
    client: Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    election = client.election(
        "n", on_elected=lambda leadership: told.append("elected"), on_lost=lambda loss: told.append("lost")
    )
    spawn = client._kernel.runtime.spawn

    def interrupted(run: Callable[[], None], name: str) -> None:
        spawn(run, name)
        if name == "multilock-election":
            eventually(election.is_leader)
            raise KeyboardInterrupt

    monkeypatch.setattr(client._kernel.runtime, "spawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        election.start()
    eventually(lambda: not server.holders)
    eventually(lambda: told == ["elected", "lost"])
    assert not election._stands()


# ---- campaign() beside a loss, and beside stop()


@pytest.mark.oracle
def test_a_campaign_waits_for_the_callbacks_of_the_term_before(client: Client, server: Scripted) -> None:
    told: list[str] = []
    go_on = threading.Event()

    def elected(leadership: Leadership) -> None:
        told.append(f"elected {leadership.term}")

    def lost(loss: Loss[Leadership]) -> None:
        go_on.wait(10)
        told.append(f"lost {loss.lease.term}")

    election = client.election("n", on_elected=elected, on_lost=lost)
    first = election.campaign()
    eventually(lambda: told == ["elected 1"])
    server.holders.clear()
    server.notices.gone(first.owner.partition("@")[0], LossReason.TAKEN, "an operator took it")
    with pytest.raises(LockTimeout, match="callbacks of the last leadership"):
        election.campaign(timeout=0)
    go_on.set()
    second = election.campaign(timeout=10)
    eventually(lambda: told == ["elected 1", "lost 1", "elected 2"])
    second.release()


def test_stop_ends_a_campaign_that_waits(client: Client, server: Scripted) -> None:
    server.holders["n"] = "another"
    election = client.election("n")
    errors: list[BaseException] = []

    def campaign() -> None:
        try:
            election.campaign(timeout=30)
        except LockTimeout as error:
            errors.append(error)

    thread = threading.Thread(target=campaign, daemon=True)
    thread.start()
    eventually(lambda: server.called("attempt"))
    in_time(election.stop)
    thread.join(5)
    assert "before stop() was called" in str(errors)


def test_close_ends_a_campaign_that_waits_for_callbacks(client: Client, server: Scripted) -> None:
    go_on = threading.Event()
    election = client.election("n", on_lost=lambda loss: go_on.wait(10))
    election.campaign()
    server.holders.clear()
    client._kernel.losses.lose_all(LossReason.TAKEN, "all are gone")
    raised: list[type[BaseException]] = []

    def campaign() -> None:
        try:
            election.campaign()
        except ClientClosed as error:
            raised.append(type(error))

    thread = threading.Thread(target=campaign, daemon=True)
    thread.start()
    eventually(lambda: election._campaigns)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    thread.join(5)
    go_on.set()
    closing.join(10)
    assert raised == [ClientClosed]


def test_a_forked_child_that_returns_from_the_work_does_not_campaign_again() -> None:
    with connect("memory://work-forks") as client:
        election = client.election("n")

        parent = os.getpid()

        def forks(leadership: Leadership) -> int:
            pid = os.fork()
            if pid:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            signal.alarm(10)
            return -1

        result = election.run(forks)
        if os.getpid() != parent:
            os._exit(3 if result == -1 and not election._stands() else 4)
        assert result == 3


# ---- a campaign() beside a run() of the same election


def test_the_end_of_a_waiting_run_ends_no_body_of_a_campaign(client: Client, server: Scripted) -> None:
    election = client.election("n", grace=60)
    with election.campaign() as leadership:
        waiting = threading.Thread(target=election.run, args=[lambda _: None], daemon=True)
        waiting.start()
        eventually(lambda: election._stop is not None)
        stopping = threading.Thread(target=election.stop, daemon=True)
        stopping.start()
        eventually(lambda: not leadership.is_held())
        waiting.join(5)
        assert not waiting.is_alive()
        stopping.join(0.2)
        assert stopping.is_alive()
        assert not server.called("release")
    stopping.join(5)
    assert not stopping.is_alive()
    assert server.holders == {}


@pytest.mark.parametrize("step", range(6))
def test_a_with_body_entered_while_run_ends_its_work_keeps_the_lease(
    client: Client, server: Scripted, step: int
) -> None:
    election = client.election("n", grace=60)
    working, asked = threading.Event(), threading.Event()

    def body(leadership: Leadership) -> None:
        with contextlib.suppress(NotHeld), leadership:
            working.set()
            eventually(lambda: not leadership.is_held())
            asked.wait(0.05)  # a premature release would come within this time
            working.clear()

    def release(backend: Scripted, call: Call) -> Any:
        early = working.is_set()
        asked.set()
        assert not early, "the lease was released under a body"
        return call.execute()

    def work(leadership: Leadership) -> None:
        threads.append(threading.Thread(target=body, args=[leadership], daemon=True))

    def meanwhile() -> None:
        threads[0].start()
        working.wait(0.02)  # limited, because the body may wait for a lock of this thread

    threads: list[threading.Thread] = []
    server.always("release", release)
    with interrupted_at(step, "Term.work_ended", PRODUCT, interrupt=meanwhile) as where:
        election.run(work)
    assert where
    threads[0].join(5)
    assert server.holders == {}


@pytest.mark.parametrize("how", ["begins", "ends"])
def test_a_second_body_of_a_leadership_does_not_end_the_first(client: Client, server: Scripted, how: str) -> None:
    election = client.election("n", grace=60)
    with election.campaign() as leadership:
        if how == "ends":
            with leadership:
                pass
            assert leadership.is_held()
        stopping = threading.Thread(target=election.stop, daemon=True)
        stopping.start()
        eventually(lambda: not leadership.is_held())
        if how == "begins":
            with pytest.raises(NotHeld):
                leadership.__enter__()
        stopping.join(0.2)
        assert stopping.is_alive()
        assert not server.called("release")
    stopping.join(5)
    assert server.holders == {}


def test_two_bodies_that_end_at_once_release_the_leadership(
    client: Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    leadership = client.election("n", grace=60).campaign()
    began, both, ends = threading.Barrier(2), threading.Barrier(2), Waits.__exit__

    def at_once(*args: Any) -> None:
        both.wait(5)
        ends(*args)

    def body() -> None:
        with leadership:
            began.wait(5)

    monkeypatch.setattr(Waits, "__exit__", at_once)
    for _ in range(2):
        threading.Thread(target=body, daemon=True).start()
    eventually(lambda: server.holders == {})


def test_a_second_body_that_resigns_does_not_wait(client: Client, server: Scripted) -> None:
    def second() -> None:
        with leadership:
            assert leadership.release()
            assert server.holders

    with client.election("n", grace=60).campaign() as leadership:
        in_time(second)
        assert not leadership.is_held()
        assert server.holders
    eventually(lambda: server.holders == {})


def test_a_cancelled_async_run_does_not_wait_for_a_simultaneous_campaign(server: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(server) as client:
            election = client.election("n")
            leadership = await election.campaign()

            async def work(_: AsyncLeadership) -> None:
                raise AssertionError("the other one leads")

            running = asyncio.create_task(election.run(work))
            await until(lambda: election._stop is not None)
            running.cancel()
            await asyncio.wait([running], timeout=5)
            assert running.cancelled()
            assert leadership.is_held()

    run(main)


def test_two_simultaneous_campaigns_lead_one_after_the_other(client: Client, server: Scripted) -> None:
    told: list[str] = []
    terms: list[Leadership] = []
    go_on = threading.Event()

    def lost(loss: Loss[Leadership]) -> None:
        told.append("lost")
        go_on.wait(10)

    election = client.election("n", on_elected=lambda leadership: told.append("elected"), on_lost=lost)
    server.holders["n"] = "another"
    for _ in range(2):
        threading.Thread(target=lambda: terms.append(election.campaign()), daemon=True).start()
    eventually(lambda: len(election._campaigns) == 2)
    with pytest.raises(LockTimeout, match="another call already campaigns in this election"):
        election.campaign(timeout=0)
    server.holders.clear()
    server.notices.wake(None)
    eventually(lambda: told == ["elected"] and len(terms) == 1)  # on_elected begins before the campaign returns
    server.holders.clear()
    server.notices.gone(terms[0].owner.partition("@")[0], LossReason.TAKEN, "an operator took it")
    eventually(lambda: told == ["elected", "lost"])
    threading.Event().wait(0.1)
    assert told == ["elected", "lost"]
    go_on.set()
    eventually(lambda: told == ["elected", "lost", "elected"])
    eventually(lambda: len(terms) == 2)
