"""Leadership is released when its work, on_elected and on_lost have all ended, or when the grace is over."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multilock import AsyncClient, AsyncLeadership, Client, Leadership, Loss, LossReason
from multilock.election import Election
from multilock.kernel.runtime import Threads
from multilock.kernel.term import Term
from multilock.testing import HandRuntime
from tests.unit.kit import Scripted, client_on, ctrl_c, eventually
from tests.unit.test_election import run, take, until
from tests.unit.test_kernel_fork_exit import in_child


@pytest.fixture
def client(client_in_threads: Client) -> Client:
    return client_in_threads


class Job:
    """Work or a callback of an election that ignores all requests to end, and runs until the test ends it."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self, argument: Leadership | Loss) -> None:
        self.begun.set()
        self.go.wait(20)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.go.set()


class Aside:
    """A call that runs in its own thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.took = math.inf
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        self.result = self._call()
        self.took = time.monotonic() - began

    def runs(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.result


def leads(election: Election, job: Job) -> Aside:
    """Start ``run()`` with ``job`` as its work in another thread, and wait until the job has begun."""
    running = Aside(lambda: election.run(job))
    assert job.begun.wait(5)
    return running


# The time for which an election waits for its work and callbacks


PARTS = ["work", "on_elected", "on_lost"]
NAMES = {"work": "its work", "on_elected": "on_elected", "on_lost": "on_lost"}


def with_job(client: Client, part: str, job: Any, **options: Any) -> tuple[Election, Aside | None]:
    """Return an election that leads, and whose ``part`` (its work or a callback) runs until the test ends it."""
    if part == "work":
        election = client.election("e", **options)
        return election, leads(election, job)
    election = client.election("e", **{part: job, **options})
    election.campaign()
    return election, None


@pytest.mark.parametrize("part", PARTS)
def test_the_lease_is_kept_while_the_work_or_a_callback_runs(
    client: Client, server: Scripted, job: Job, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    election, running = with_job(client, part, job, grace=math.inf)
    resigning = Aside(election.resign)
    assert job.begun.wait(5)
    eventually(lambda: not election.is_leader())
    time.sleep(0.1)
    assert server.holders
    assert resigning.runs()
    job.go.set()
    assert resigning.join() is True
    if running:
        election.stop()
        running.join()
    assert not caplog.records


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("grace", [None, 100.0])
def test_the_lease_is_renewed_until_the_grace_is_over_and_remaining_parts_are_named(
    job: Job, part: str, grace: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = HandRuntime(start=1000.0, threads=True)
    server = Scripted(runtime)
    client = client_on(server, runtime, ttl=30.0)
    election, running = with_job(client, part, job, grace=grace)
    stopping = Aside(election.stop)
    assert job.begun.wait(5)
    eventually(lambda: not election.is_leader() and len(election._office.condition._bells) > 0)
    seconds = grace or 30.0
    while runtime.now() < 1000.0 + seconds - 1.0:
        runtime.advance(0.5)
    time.sleep(0.05)
    assert stopping.runs()
    assert server.holders
    assert len(server.called("renew")) >= seconds / 10 - 2
    assert not caplog.records
    runtime.advance(1.5)
    stopping.join()
    assert server.holders == {}
    eventually(lambda: caplog.records)
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage().endswith(f"while another node may lead: {NAMES[part]}")
    job.go.set()
    if running:
        assert running.join() is None


def test_every_part_that_still_runs_is_named(client: Client, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    election = client.election("e", on_elected=lambda _: job.go.wait(20), on_lost=lambda _: job.go.wait(20))
    running = leads(election, job)
    election.stop(grace=0.05)
    eventually(lambda: "while another node may lead: its work, on_elected, on_lost" in caplog.text)
    job.go.set()
    running.join()


def test_work_that_waits_for_a_loss_is_notified_of_a_resignation(client: Client) -> None:
    election = client.election("e", grace=math.inf)
    terms: list[Leadership] = []

    def work(leadership: Leadership) -> Loss | None:
        terms.append(leadership)
        return leadership.wait_lost()

    running = Aside(lambda: election.run(work))
    # one hook of the election itself, and one of wait_lost()
    eventually(lambda: terms and len(terms[0]._hooks or ()) == 2)
    election.stop()
    assert running.join() is None
    assert terms[0].wait_lost() is None


def test_without_grace_the_lease_is_released_at_once_after_the_notification(
    client: Client, server: Scripted, job: Job
) -> None:
    told: list[LossReason] = []
    election = client.election("e", on_lost=lambda loss: told.append(loss.reason), grace=0)
    running = leads(election, job)
    began = time.monotonic()
    election.stop()
    assert time.monotonic() - began < 3, "it waited for a request timeout, 5 s"
    assert server.holders == {}
    eventually(lambda: told == [LossReason.RESIGNED])
    job.go.set()
    assert running.join() is None


def test_of_several_graces_the_one_that_ends_first_counts(client: Client, server: Scripted, job: Job) -> None:
    election = client.election("e", grace=math.inf)
    running = leads(election, job)
    patient = Aside(election.resign)
    eventually(lambda: not election.is_leader())
    later = Aside(lambda: election.resign(grace=60))
    time.sleep(0.1)
    assert patient.runs()
    assert server.holders
    election.stop(grace=0)
    assert patient.join() is True
    assert later.join() is False
    assert server.holders == {}
    job.go.set()
    assert running.join() is None


def test_a_second_stop_waits_as_the_first_does(client: Client, server: Scripted, job: Job) -> None:
    election = client.election("e")
    running = leads(election, job)
    stops = [Aside(election.stop) for _ in range(3)]
    time.sleep(0.1)
    assert all(stop.runs() for stop in stops)
    job.go.set()
    for stop in stops:
        stop.join()
        assert server.holders == {}
    assert running.join() is None
    assert len(server.called("release")) == 1


@pytest.mark.parametrize("grace", [True, "5", math.nan, -1])
def test_a_negative_grace_is_refused_before_anything_happens(client: Client, server: Scripted, grace: Any) -> None:
    error = ValueError if isinstance(grace, (int, float)) and not isinstance(grace, bool) else TypeError
    with pytest.raises(error, match="grace"):
        client.election("e", grace=grace)
    election = client.election("e")
    leadership = election.campaign()
    for end in (election.stop, election.resign):
        with pytest.raises(error, match="grace"):
            end(grace=grace)
    assert leadership.is_held()
    leadership.release()


@pytest.mark.oracle
def test_run_ends_after_on_lost_and_the_release_even_if_the_work_stopped_itself(
    client: Client, server: Scripted
) -> None:
    order: list[str] = []

    def lost(loss: Loss) -> None:
        time.sleep(0.1)
        order.append("on_lost")

    election = client.election("e", on_lost=lost)
    assert election.run(lambda _: election.stop()) is None
    assert order == ["on_lost"]
    assert server.holders == {}


def test_a_resignation_before_the_work_begins_prevents_the_work(
    client: Client, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    election = client.election("e", on_lost=job)
    begins = Term.work_begins
    resigning: list[Aside] = []

    def late(term: Term[Leadership]) -> bool:
        if not resigning:
            resigning.append(Aside(election.resign))
            assert job.begun.wait(5)
        begun = begins(term)
        job.go.set()
        return begun

    monkeypatch.setattr(Term, "work_begins", late)
    terms: list[int | None] = []
    election.run(lambda leadership: terms.append(leadership.term))
    assert terms == [2]
    assert resigning[0].join() is True


# The work and the callbacks for which an election waits


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", ["stop", "resign", "release", "close"])
def test_awaited_work_does_not_wait_for_itself(client: Client, server: Scripted, part: str, how: str) -> None:
    took: list[float] = []
    kept: list[bool] = []
    election: Election

    def end(argument: Any) -> None:
        began = time.monotonic()
        leadership = argument if isinstance(argument, Leadership) else argument.lease
        getattr({"release": leadership, "close": client}.get(how, election), how)()
        took.append(time.monotonic() - began)
        time.sleep(0.1)
        kept.append("e" in server.holders)

    if part == "work":
        election = client.election("e")

        def work(leadership: Leadership) -> None:
            end(leadership)
            election.stop()

        assert election.run(work) is None
    else:
        callback: dict[str, Any] = {part: end}
        election = client.election("e", **callback)
        election.start()
        if part == "on_lost":
            eventually(election.is_leader)
            election.resign()
    eventually(lambda: kept)
    assert took[0] < 3, "it waited for a request timeout, 5 s, or its ttl, 25 s"
    assert kept[0]
    if how in ("stop", "close"):
        eventually(lambda: server.holders == {})
    election.stop()


def test_on_lost_called_for_a_loss_stops_without_waiting_for_the_work(
    client: Client, server: Scripted, job: Job
) -> None:
    took: list[float] = []

    def lost(loss: Loss) -> None:
        began = time.monotonic()
        election.stop()
        took.append(time.monotonic() - began)

    election = client.election("e", on_lost=lost)
    running = leads(election, job)
    take(server)
    eventually(lambda: took)
    assert took[0] < 3
    job.go.set()
    assert running.join() is None


# Events during the wait


def test_a_loss_during_the_grace_is_reported_once_and_ends_the_grace_with_a_warning(
    client: Client, server: Scripted, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[LossReason] = []
    election = client.election("e", on_lost=lambda loss: told.append(loss.reason), grace=math.inf)
    running = leads(election, job)
    resigning = Aside(election.resign)
    eventually(lambda: told)
    stopping = Aside(election.stop)
    take(server)
    assert resigning.join() is False, "it did not lead until the end"
    eventually(lambda: "before its orderly end. Still running while another node may lead: its work" in caplog.text)
    assert stopping.runs(), "there is nothing to release, but the work is waited for"
    job.go.set()
    stopping.join()
    assert running.join() is None
    assert told == [LossReason.RESIGNED]


def test_the_end_of_the_watchdog_ends_the_grace(client: Client, job: Job) -> None:
    told: list[LossReason] = []
    election = client.election("e", on_lost=lambda loss: told.append(loss.reason), grace=math.inf)
    running = leads(election, job)
    resigning = Aside(election.resign)
    eventually(lambda: told)
    client._kernel._watchdog_died(ZeroDivisionError())
    assert resigning.join() is False
    job.go.set()
    election.stop()
    running.join()
    assert told == [LossReason.RESIGNED]


def test_close_ends_a_resignation_after_the_grace_of_the_election(job: Job) -> None:
    server = Scripted()
    client = client_on(server, Threads(), ttl=25.0)
    election = client.election("e", grace=0.3)
    running = leads(election, job)
    resigning = Aside(lambda: election.resign(grace=math.inf))
    eventually(lambda: not election.is_leader())
    began = time.monotonic()
    client.close()
    assert 0.25 <= time.monotonic() - began < 4
    assert server.holders == {}
    assert resigning.join() is True
    job.go.set()
    assert running.join() is None


def test_close_waits_for_the_work_and_keeps_its_lease_renewed(client: Client, server: Scripted, job: Job) -> None:
    election = client.election("e", ttl=2.0, grace=math.inf)
    other = client.lock("other").acquire()
    running = leads(election, job)
    closing = Aside(client.close)
    eventually(lambda: not election.is_leader())
    eventually(lambda: "other" not in server.holders)
    assert not other.is_held()
    before = len(server.called("renew"))
    eventually(lambda: len(server.called("renew")) > before + 1)
    assert "e" in server.holders
    job.go.set()
    closing.join()
    assert server.holders == {}
    assert server.closed == 1
    assert running.join() is None


def test_stopping_a_leadership_inside_its_block_resigns(client: Client, server: Scripted, job: Job) -> None:
    def elected(leadership: Leadership) -> None:
        eventually(lambda: election._office.condition._bells)  # wait until the thread of start() waits
        election.stop()

    election = client.election("e", on_elected=elected, on_lost=job)
    election.start()
    assert job.begun.wait(5)
    eventually(lambda: election._stop is None)
    closing = Aside(client.close)
    time.sleep(0.1)
    assert closing.runs()
    assert "e" in server.holders
    job.go.set()
    closing.join()
    assert server.holders == {}


def test_stop_during_a_grant_waits_until_on_elected_has_ended(client: Client, server: Scripted, job: Job) -> None:
    election = client.election("e", on_elected=job)
    asked, answer = threading.Event(), threading.Event()

    def slow(backend: Scripted, call: Any) -> Any:
        granted = call.execute()
        asked.set()
        answer.wait(5)
        return granted

    server.script("attempt", slow)
    election.start()
    assert asked.wait(5)
    stopping = Aside(election.stop)
    eventually(lambda: election._stop is None or election._stop.called())
    answer.set()
    assert job.begun.wait(5)
    time.sleep(0.1)
    assert stopping.runs()
    assert server.holders
    job.go.set()
    stopping.join()
    assert server.holders == {}


@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("Candidacy._end", None),
        ("Candidacy._call_off", None),
        ("Term.resign", None),
        ("Term.renounce", None),
        ("Term.renounce", "min"),
        ("Term.give_back", None),
        ("Condition.wait_for", None),
        ("Office.inside", None),
    ],
)
def test_an_interrupted_stop_releases_the_lease_when_the_work_has_ended(
    client: Client, server: Scripted, job: Job, function: str, after: str | None
) -> None:
    told: list[LossReason] = []
    election = client.election("e", on_lost=lambda loss: told.append(loss.reason), grace=math.inf)
    running = leads(election, job)
    with ctrl_c(function, after):
        election.stop()
    eventually(lambda: told)
    time.sleep(0.05)
    assert server.holders
    assert not election.is_leader()
    job.go.set()
    assert running.join() is None
    assert server.holders == {}
    assert told == [LossReason.RESIGNED]


@pytest.mark.parametrize(
    ("function", "after"),
    [("Term.part_ended", None), ("ThreadTerm.do_work", None), ("inside", None), ("Term.work_begins", None)],
)
def test_work_interrupted_at_its_beginning_or_end_counts_as_ended(
    client: Client, server: Scripted, function: str, after: str | None
) -> None:
    election = client.election("e", grace=math.inf)
    with ctrl_c(function, after):
        election.run(lambda _: None)
    eventually(lambda: server.holders == {})
    assert election.run(lambda leadership: leadership.is_held()) is True


def test_a_child_forked_during_the_grace_waits_for_nothing(client: Client, server: Scripted, job: Job) -> None:
    election = client.election("e", on_lost=job, grace=math.inf)

    def in_the_child(leadership: Leadership) -> list[bool]:
        election.stop()
        client.close()
        return [election.is_leader(), leadership.is_held()]

    def work(leadership: Leadership) -> None:
        resigning = Aside(election.resign)
        assert job.begun.wait(5)
        answer = in_child(lambda: in_the_child(leadership))
        assert resigning.runs()
        assert server.holders
        job.go.set()
        seen.append(answer)

    seen: list[object] = []
    running = Aside(lambda: election.run(work))
    eventually(lambda: seen)
    assert seen == [[False, False]]
    election.stop()
    running.join()


# asyncio


def async_job(ends: list[str], go: asyncio.Event | None = None, *, seconds: float = 0.2) -> Any:
    """Return a job that runs forever, and cleans up when it is cancelled."""

    async def job(leadership: AsyncLeadership) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await (go.wait() if go else asyncio.sleep(seconds))
            ends.append("job")

    return job


@pytest.mark.parametrize("how", ["stop()", "nothing"])
def test_an_async_clean_up_is_not_cut_off_by_the_end_of_its_loop(server: Scripted, how: str) -> None:
    ends: list[str] = []

    async def lost(loss: Loss) -> None:
        await asyncio.sleep(0.3)
        ends.append("on_lost" if server.holders else "too late")

    async def main() -> None:
        election = AsyncClient(server, ttl=25.0).election("e", on_elected=async_job(ends), on_lost=lost)
        election.start()
        await until(election.is_leader)
        await asyncio.sleep(0.05)
        if how == "stop()":
            await election.stop()
            assert server.holders == {}

    run(main)
    assert ends == ["job", "on_lost"]
    eventually(lambda: server.holders == {})


def test_a_cancelled_async_run_stops_leading_at_once_and_ends_when_all_parts_have(server: Scripted) -> None:
    ends: list[str] = []

    async def lost(loss: Loss) -> None:
        ends.append("on_lost begins")
        await asyncio.sleep(0.3)
        ends.append("on_lost")

    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            election = client.election("e", on_lost=lost)
            running = asyncio.create_task(election.run(async_job(ends)))
            await until(election.is_leader)
            await asyncio.sleep(0.05)
            running.cancel()
            await until(lambda: ends)
            assert ends == ["on_lost begins"]
            assert not election.is_leader()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert ends == ["on_lost begins", "job", "on_lost"]

    run(main)


def test_an_async_run_cancelled_repeatedly_releases_the_lease_after_its_work(
    server: Scripted,
) -> None:
    ends: list[str] = []

    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            go = asyncio.Event()
            election = client.election("e", grace=math.inf)
            running = asyncio.create_task(election.run(async_job(ends, go)))
            await until(election.is_leader)
            await asyncio.sleep(0.05)
            while not running.done():
                running.cancel()
                await asyncio.sleep(0.02)
            assert server.holders
            go.set()
            await until(lambda: server.holders == {})
            assert ends == ["job"]

    run(main)


@pytest.mark.parametrize("how", ["itself", "by wait_for", "in a task", "close()"])
def test_async_work_that_stops_its_own_election_does_not_wait_for_itself(server: Scripted, how: str) -> None:
    took: list[float] = []

    async def main() -> None:
        async with AsyncClient(server, ttl=25.0) as client:
            election = client.election("e")

            async def work(leadership: AsyncLeadership) -> None:
                began = time.monotonic()
                if how == "itself":
                    await election.stop()
                elif how == "by wait_for":
                    await asyncio.wait_for(election.stop(), 20)
                elif how == "in a task":
                    await asyncio.shield(asyncio.create_task(election.stop()))
                else:
                    await asyncio.shield(asyncio.create_task(client.close()))
                took.append(time.monotonic() - began)
                await asyncio.sleep(0.1)

            await election.run(work)
            await until(lambda: server.holders == {})

    began = time.monotonic()
    run(main)
    assert time.monotonic() - began < 4
    assert not took or took[0] < 3


@pytest.mark.parametrize("how", ["stop", "close"])
def test_an_async_on_lost_that_ends_the_other_parts_does_not_wait_for_itself(server: Scripted, how: str) -> None:
    kept: list[bool] = []

    async def main() -> None:
        client = AsyncClient(server, ttl=25.0)

        async def lost(loss: Loss) -> None:
            await (client.close() if how == "close" else election.stop())
            await asyncio.sleep(0.1)
            kept.append("e" in server.holders)

        election = client.election("e", on_lost=lost)
        election.start()
        await until(election.is_leader)
        await election.resign()
        await election.stop()
        await until(lambda: server.holders == {})
        await client.close()

    began = time.monotonic()
    run(main)
    assert time.monotonic() - began < 4, "it waited for a request timeout, 5 s, or its ttl, 25 s"
    assert kept[0]


def test_work_of_a_loop_that_has_ended_is_not_waited_for(server: Scripted) -> None:
    async def main() -> AsyncClient:
        client = AsyncClient(server, ttl=25.0)
        await client.election("e", on_lost=lambda _: None).campaign()
        return client

    client = run(main)
    assert server.holders
    began = time.monotonic()
    run(client.close)
    assert time.monotonic() - began < 3
    assert server.holders == {}
