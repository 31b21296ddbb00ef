"""In an election, on both faces, callbacks come in pairs and in order, and at most one candidate leads."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from multilock import (
    AsyncClient,
    AsyncLeadership,
    BackendRejected,
    Client,
    Elected,
    Event,
    LeaderChanged,
    LeaderInfo,
    Leadership,
    LockLost,
    LockTimeout,
    Loss,
    LossReason,
    NotHeld,
    connect,
)
from multilock.election import HEAD_START, ThreadTerm
from multilock.kernel.runtime import Threads
from multilock.testing import HandRuntime
from tests.unit.kit import Answer, Call, Scripted, client_on, ctrl_c, eventually, refused, silence


@pytest.fixture
def client(server: Scripted) -> Iterator[Client]:
    client = client_on(server, Threads(), ttl=5.0)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def a_long_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let on_lost wait long for the start of on_elected, because the thread of on_elected may be delayed."""
    monkeypatch.setattr("multilock.election.HEAD_START", 50 * HEAD_START)


class Diary:
    """The arguments with which the callbacks of one candidate were called, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def elected(self, leadership: Leadership | AsyncLeadership) -> None:
        self.entries.append(f"elected {leadership.term}")

    def lost(self, loss: Loss) -> None:
        self.entries.append(f"lost {loss.lease.token} {loss.reason.value}")

    def reaches(self, *entries: str) -> None:
        eventually(lambda: len(self.entries) >= len(entries))
        assert self.entries == list(entries)


class Kept:
    """An on_lost that takes some time, and records whether the lock stays taken meanwhile."""

    def __init__(self, server: Scripted) -> None:
        self.server = server
        self.looks: list[bool] = []

    def lost(self, loss: Loss) -> None:
        for _ in range(5):
            self.looks.append("e" in self.server.holders)
            time.sleep(0.02)

    async def lost_on_loop(self, loss: Loss) -> None:
        for _ in range(5):
            self.looks.append("e" in self.server.holders)
            await asyncio.sleep(0.02)


def take(server: Scripted) -> None:
    """Release the lock of the present leader by force, without a new holder."""
    claim_id = server.holders.pop("e")
    server.notices.gone(claim_id, LossReason.TAKEN, "an operator took it")


# campaign()


@pytest.mark.oracle
def test_a_campaign_is_one_leadership_with_its_callbacks(client: Client, server: Scripted) -> None:
    diary = Diary()
    election = client.election("e", identity="me", on_elected=diary.elected, on_lost=diary.lost)
    assert not election.is_leader()
    leadership = election.campaign()
    assert election.is_leader()
    assert leadership.is_held()
    assert (leadership.term, leadership.identity, leadership.name) == (1, "me", "e")
    diary.reaches("elected 1")
    assert leadership.release() is True
    assert not election.is_leader()
    assert leadership.release() is False
    diary.reaches("elected 1", "lost 1 resigned")
    assert server.holders == {}
    assert election.resign() is False


def test_a_leadership_is_the_current_lease_of_the_leader(client: Client, server: Scripted) -> None:
    election = client.election("e")
    with election.campaign() as leadership, client.lock("inner") as inner:
        assert client.current_lease() is inner
        assert client.current_lease("e") is leadership
    with pytest.raises(NotHeld):
        client.current_lease()
    assert election.run(lambda leadership: client.current_lease() is leadership) is True
    seen = []

    def lose(leadership: Leadership) -> None:
        if leadership.term == 4:
            take(server)
        seen.append(client.current_lease() is leadership)
        if leadership.term != 4:
            election.stop()

    assert election.run(lose) is None
    assert seen == [True, True]
    with pytest.raises(NotHeld):
        client.current_lease()


@pytest.mark.parametrize("how", ["stop", "resign", "close"])
def test_the_body_of_a_campaign_ends_before_its_leadership_is_released(
    client: Client, server: Scripted, how: str
) -> None:
    election = client.election("e")
    end: dict[str, Callable[[], object]] = {"stop": election.stop, "resign": election.resign, "close": client.close}
    ending = threading.Thread(target=end[how])
    with election.campaign() as leadership:
        ending.start()
        eventually(lambda: not leadership.is_held())
        ending.join(0.2)
        assert ending.is_alive()
        assert not server.called("release")
    ending.join(10)
    assert not ending.is_alive()
    assert server.holders == {}


def test_a_with_block_inside_the_work_of_run_does_not_end_that_work(client: Client, server: Scripted) -> None:
    kept: list[bool] = []

    def work(leadership: Leadership) -> str:
        if not kept:
            with leadership:
                pass
            kept.append("e" in server.holders)
        return "done"

    assert client.election("e").run(work) == "done"
    assert kept == [True]
    assert server.holders == {}


def test_run_waits_for_a_body_that_its_work_has_left_open(client: Client, server: Scripted) -> None:
    kept: list[bool] = []
    entered, leave = threading.Event(), threading.Event()

    def beside(leadership: Leadership) -> None:
        with leadership:
            entered.set()
            assert leave.wait(10)
            kept.append("e" in server.holders)

    def work(leadership: Leadership) -> None:
        threading.Thread(target=beside, args=(leadership,)).start()
        assert entered.wait(10)

    running = threading.Thread(target=client.election("e").run, args=(work,))
    running.start()
    assert entered.wait(10)
    running.join(0.2)
    assert running.is_alive()
    leave.set()
    running.join(10)
    assert kept == [True]
    assert server.holders == {}


def test_a_with_block_inside_on_elected_does_not_end_the_work_of_run(
    client: Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, working = threading.Event(), threading.Event()

    def on_elected(leadership: Leadership) -> None:
        with leadership:
            entered.set()
            assert working.wait(10)

    start_elected = ThreadTerm.start_elected

    def first(term: ThreadTerm) -> None:  # on_elected begins before run() continues
        start_elected(term)
        assert entered.wait(10)

    monkeypatch.setattr(ThreadTerm, "start_elected", first)
    election = client.election("e", on_elected=on_elected)

    def work(leadership: Leadership) -> None:
        working.set()
        eventually(leadership._term.callbacks_ended)
        assert not leadership._term.all_ended()
        assert "e" in server.holders
        election.stop()

    election.run(work)
    assert server.holders == {}


def test_bodies_may_end_in_another_order_than_they_began(client: Client, server: Scripted) -> None:
    first, second = client.election("e"), client.election("f")
    body = first.campaign()
    body.__enter__()
    with second.campaign():
        body.__exit__(None, None, None)
        assert second.resign()  # called inside the body of the same election, so it does not wait
        assert "f" in server.holders
    eventually(lambda: server.holders == {})


def test_an_interrupt_as_a_body_begins_leaves_no_leadership(client: Client, server: Scripted) -> None:
    election = client.election("e", grace=60)
    leadership = election.campaign()
    with ctrl_c("Term.work_begins"):
        leadership.__enter__()
    eventually(lambda: server.holders == {})
    leadership = election.campaign()
    with ctrl_c("mark"):
        leadership.__enter__()
    eventually(lambda: server.holders == {})


def test_a_body_that_resigns_does_not_wait(client: Client, server: Scripted) -> None:
    election = client.election("e")
    with election.campaign() as leadership:
        assert election.resign()
        assert not leadership.is_held()
        assert server.holders
    eventually(lambda: server.holders == {})


def test_a_campaign_may_have_a_timeout(client: Client, server: Scripted) -> None:
    server.holders["e"] = "another"
    with pytest.raises(LockTimeout, match="another node leads"):
        client.election("e").campaign(0.05)
    with pytest.raises(LockTimeout):
        client.election("e").campaign(0)


def test_a_campaign_continues_through_every_outage(server: Scripted) -> None:
    runtime = HandRuntime(start=1000.0)
    server.runtime = runtime
    client = client_on(server, runtime, outage_timeout=3.0)
    server.always("attempt", silence())
    client._kernel.timers.at(1500.0, lambda: server.always("attempt", None))
    assert client.election("e").campaign().is_held()
    assert runtime.now() > 1500


def test_is_leader_follows_the_clock(server: Scripted) -> None:
    runtime = HandRuntime(start=1000.0)
    server.runtime = runtime
    diary = Diary()
    client = client_on(server, runtime)
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    leadership = election.campaign()
    runtime.jump(100)
    assert not election.is_leader()
    assert not leadership.is_held()
    assert diary.entries == ["elected 1", "lost 1 paused"]


@pytest.mark.oracle
def test_on_lost_is_never_called_before_on_elected(client: Client, server: Scripted) -> None:
    order: list[str] = []
    start = threading.Event()

    def elected(leadership: Leadership) -> None:
        order.append("elected")
        start.set()

    for _ in range(50):
        order.clear()
        start.clear()
        election = client.election("e", on_elected=elected, on_lost=lambda loss: order.append("lost"))
        election.campaign()
        take(server)
        eventually(lambda: len(order) == 2)
        assert order == ["elected", "lost"]


@pytest.mark.oracle
def test_on_lost_waits_for_on_elected_even_if_its_thread_starts_late(
    client: Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary()
    threads: list[Callable[[], object]] = []
    monkeypatch.setattr(
        client._kernel.callbacks, "start", lambda callback, *args: threads.append(lambda: callback(*args))
    )
    client.election("e", on_elected=diary.elected, on_lost=diary.lost).campaign()
    take(server)
    while threads:
        threads.pop()()  # the thread started last runs first
    assert diary.entries == ["elected 1", "lost 1 taken"]


@pytest.mark.oracle
def test_an_on_elected_that_still_runs_does_not_delay_on_lost(client: Client, server: Scripted) -> None:
    inside, hang, lost = threading.Event(), threading.Event(), threading.Event()

    def elected(leadership: Leadership) -> None:
        inside.set()
        hang.wait(10)

    client.election("e", on_elected=elected, on_lost=lambda loss: lost.set()).campaign()
    assert inside.wait(5)
    take(server)
    assert lost.wait(5)
    hang.set()


# resign()


@pytest.mark.oracle
def test_the_lease_is_renewed_until_on_lost_has_ended(server: Scripted) -> None:
    client = client_on(server, Threads(), ttl=3.0)
    held_during: list[bool] = []

    def lost(loss: Loss) -> None:
        before = len(server.called("renew"))
        eventually(lambda: len(server.called("renew")) > before, within=2.5)
        held_during.append("e" in server.holders and not election.is_leader() and not leadership.is_held())

    election = client.election("e", on_lost=lost)
    leadership = election.campaign()
    assert election.resign() is True
    assert held_during == [True]
    assert server.holders == {}
    client.close()


@pytest.mark.oracle
def test_an_on_lost_that_hangs_delays_the_release_by_one_ttl_at_most(server: Scripted) -> None:
    client = client_on(server, Threads(), ttl=1.5)
    hang = threading.Event()
    election = client.election("e", on_lost=lambda loss: hang.wait(10))
    election.campaign()
    began = time.monotonic()
    assert election.resign() is True
    assert 1.4 <= time.monotonic() - began < 3.5
    assert server.holders == {}
    hang.set()
    client.close()


@pytest.mark.oracle
def test_lost_callbacks_of_the_leadership_are_not_called_at_a_resignation(client: Client, server: Scripted) -> None:
    heard: list[Loss] = []
    election = client.election("e")
    leadership = election.campaign()
    leadership.on_lost(heard.append)
    election.resign()
    assert heard == []
    leadership = election.campaign()
    leadership.on_lost(heard.append)
    take(server)
    eventually(lambda: len(heard) == 1)


def test_two_simultaneous_resignations_count_as_one(client: Client) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    election.campaign()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(election.resign())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(answers) == [False, False, False, True]
    diary.reaches("elected 1", "lost 1 resigned")


# run() and start()


def test_run_resigns_when_work_ends_and_returns_its_result(client: Client, server: Scripted) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    assert election.run(lambda leadership: leadership.fence() + 41) == 42
    diary.reaches("elected 1", "lost 1 resigned")
    assert server.holders == {}


def test_run_resigns_when_work_raises_and_raises_the_same_exception(client: Client, server: Scripted) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)

    def work(leadership: Leadership) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        election.run(work)
    diary.reaches("elected 1", "lost 1 resigned")
    assert server.holders == {}


@pytest.mark.oracle
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted_work_leaves_nothing_behind(client: Client, server: Scripted, error: type[BaseException]) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)

    def work(leadership: Leadership) -> None:
        raise error

    with pytest.raises(error):
        election.run(work)
    eventually(lambda: server.holders == {})
    diary.reaches("elected 1", "lost 1 resigned")
    assert not election.is_leader()


@pytest.mark.oracle
def test_after_a_loss_the_node_campaigns_again_once_work_and_callbacks_have_ended(
    client: Client, server: Scripted
) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    terms: list[int | None] = []

    def work(leadership: Leadership) -> str:
        terms.append(leadership.term)
        if len(terms) < 3:
            take(server)
            assert not leadership.is_held()
            return "of no use"
        return "done"

    assert election.run(work) == "done"
    assert terms == [1, 2, 3]
    diary.reaches("elected 1", "lost 1 taken", "elected 2", "lost 2 taken", "elected 3", "lost 3 resigned")


@pytest.mark.oracle
def test_a_node_campaigns_again_only_when_its_callbacks_have_ended(client: Client, server: Scripted) -> None:
    hang, calls = threading.Event(), []

    def lost(loss: Loss) -> None:
        calls.append(loss)
        hang.wait(10)

    election = client.election("e", on_lost=lost)
    election.start()
    eventually(election.is_leader)
    take(server)
    eventually(lambda: calls)
    time.sleep(0.05)
    assert len(server.called("attempt")) == 1
    hang.set()
    eventually(election.is_leader)
    election.stop()


def test_stop_ends_candidacy_and_leadership(client: Client, server: Scripted) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    with election:
        eventually(election.is_leader)
    diary.reaches("elected 1", "lost 1 resigned")
    assert server.holders == {}
    server.holders["e"] = "another"
    election.start()
    election.start()
    eventually(lambda: server.queues["e"])
    election.stop()
    election.stop()
    eventually(lambda: server.queues["e"] == [])
    assert diary.entries == ["elected 1", "lost 1 resigned"]


def test_stop_makes_run_return_none(client: Client, server: Scripted) -> None:
    server.holders["e"] = "another"
    election = client.election("e")
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(election.run(lambda leadership: "led")))
    thread.start()
    eventually(lambda: server.queues["e"])
    with pytest.raises(RuntimeError, match="running already"):
        election.run(lambda leadership: None)
    election.stop()
    thread.join(5)
    assert results == [None]


@pytest.mark.oracle
def test_a_stop_during_the_grant_leaves_no_leader(client: Client, server: Scripted) -> None:
    election = client.election("e")
    asked, answer = threading.Event(), threading.Event()

    def slow(backend: Scripted, call: Call) -> Any:
        granted = call.execute()
        asked.set()
        answer.wait(5)
        return granted

    server.script("attempt", slow)
    election.start()
    assert asked.wait(5)
    stopping = threading.Thread(target=election.stop)
    stopping.start()
    eventually(lambda: election._stop is None or election._stop.called)
    answer.set()
    stopping.join(5)
    eventually(lambda: server.holders == {})
    assert not election.is_leader()


def test_an_on_elected_that_raises_is_logged_and_resigns(
    client: Client, server: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary()

    def elected(leadership: Leadership) -> None:
        diary.elected(leadership)
        if leadership.term == 1:
            raise ValueError("the user's bug")

    election = client.election("e", on_elected=elected, on_lost=diary.lost)
    with caplog.at_level(logging.ERROR, "multilock"), election:
        eventually(lambda: len(diary.entries) == 3)
    assert diary.entries == ["elected 1", "lost 1 resigned", "elected 2", "lost 2 resigned"]
    assert "the user's bug" in caplog.text


@pytest.mark.parametrize("how", ["start", "run"])
def test_an_on_elected_that_always_raises_is_called_with_pauses(client: Client, how: str) -> None:
    called: list[float] = []

    def elected(leadership: Leadership) -> None:
        called.append(time.monotonic())
        raise ValueError("the user's bug")

    election = client.election("e", on_elected=elected)
    if how == "start":
        election.start()
    else:
        threading.Thread(target=election.run, args=(Leadership.wait_lost,)).start()
    eventually(lambda: len(called) >= 3)
    election.stop()
    assert called[2] - called[0] >= 2.0


def test_an_async_on_elected_that_always_raises_is_called_with_pauses(server: Scripted) -> None:
    called: list[float] = []

    async def elected(leadership: AsyncLeadership) -> None:
        called.append(time.monotonic())
        raise ValueError("the user's bug")

    async def main() -> None:
        async with AsyncClient(server) as client, client.election("e", on_elected=elected):
            await until(lambda: len(called) >= 2)

    run(main)
    assert called[1] - called[0] >= 1.0


def test_a_refused_background_election_tries_again(client: Client, server: Scripted) -> None:
    server.script("attempt", refused(BackendRejected("NOAUTH")))
    election = client.election("e")
    with election:
        eventually(election.is_leader)
    server.script("attempt", refused(BackendRejected("NOAUTH")))
    with pytest.raises(BackendRejected):
        election.run(lambda leadership: None)


@pytest.mark.parametrize("trouble", [silence(0.0), refused(BackendRejected("NOPERM"))])
def test_a_node_that_resigned_campaigns_again_on_a_backend_without_a_queue(
    trouble: Answer,
) -> None:
    server = Scripted(fair=False)
    client = client_on(server, Threads(), ttl=5.0)
    election = client.election("e")
    with election:
        eventually(election.is_leader)
        server.always("inspect", trouble)
        assert election.resign() is True
        eventually(election.is_leader)
    client.close()


@pytest.mark.oracle
def test_close_ends_an_election_callback_first(client: Client, server: Scripted) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    election.start()
    eventually(election.is_leader)
    diary.reaches("elected 1")
    client.close()
    assert server.holders == {}
    eventually(lambda: len(diary.entries) == 2)
    assert diary.entries[1] in ("lost 1 closed", "lost 1 resigned")
    assert not election.is_leader()


@pytest.mark.oracle
def test_work_that_exits_the_program_releases_the_lease_only_after_on_lost(client: Client, server: Scripted) -> None:
    kept = Kept(server)
    with pytest.raises(SystemExit):
        client.election("e", on_lost=kept.lost).run(lambda _: sys.exit(3))
    eventually(lambda: server.holders == {})
    assert kept.looks == [True] * 5


@pytest.mark.oracle
def test_an_interrupted_resignation_releases_the_lease_after_one_ttl_at_most(server: Scripted) -> None:
    hangs = threading.Event()
    with client_on(server, Threads(), ttl=1.0) as client:
        with pytest.raises(SystemExit):
            client.election("e", on_lost=lambda _: hangs.wait(10)).run(lambda _: sys.exit(3))
        since = time.monotonic()
        assert server.holders
        eventually(lambda: server.holders == {})
        assert time.monotonic() - since < 4
        hangs.set()


@pytest.mark.oracle
def test_a_with_block_interrupted_at_its_end_releases_only_after_on_lost(
    client: Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(server)
    election = client.election("e", on_lost=kept.lost)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), election.campaign():
        monkeypatch.setattr(election._office.condition, "wait_for", interrupted)
    eventually(lambda: server.holders == {})
    assert kept.looks == [True] * 5


def test_a_campaign_interrupted_after_the_grant_keeps_nothing(
    client: Client, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    election = client.election("e")
    with monkeypatch.context() as patch:
        patch.setattr(election._office, "push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            election.campaign()
    eventually(lambda: server.holders == {})
    assert election.campaign().is_held()


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("function", "after"), [("Holding._alive", None), ("Term._tell_lost", None), ("ThreadCallbacks.start", None)]
)
def test_a_resignation_interrupted_at_the_start_of_on_lost_still_completes(
    client: Client, server: Scripted, function: str, after: str | None
) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    election.start()
    diary.reaches("elected 1")
    with ctrl_c(function, after):
        election.resign()
    diary.reaches("elected 1", "lost 1 resigned", "elected 2")
    election.stop()


@pytest.mark.oracle
def test_a_term_interrupted_at_the_start_of_on_elected_ends_with_both_callbacks(
    client: Client, server: Scripted
) -> None:
    diary = Diary()
    election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
    with ctrl_c("ThreadCallbacks.start"):
        election.campaign()
    diary.reaches("elected 1", "lost 1 resigned")
    eventually(lambda: server.holders == {})
    election.start()
    diary.reaches("elected 1", "lost 1 resigned", "elected 2")
    election.stop()


@pytest.mark.parametrize("which", ["on_elected", "on_lost", "on_leader_changed"])
def test_a_callback_that_exits_its_thread_ends_no_candidacy(which: str) -> None:
    terms: list[int | None] = []
    called: list[object] = []

    def leaves(argument: object) -> None:
        called.append(argument)
        sys.exit(1)

    callbacks: dict[str, Any] = {"on_elected": lambda leadership: terms.append(leadership.term), which: leaves}
    with connect(f"memory://{which}-leaves") as client, client.election("e", **callbacks) as election:
        eventually(lambda: called or terms)
        if which != "on_elected":  # a candidate whose on_elected raises resigns by itself
            eventually(election.is_leader)
            eventually(lambda: called or which == "on_lost")
            client.force_release("e")
            eventually(lambda: len(terms) == 2)
        eventually(lambda: len(called) >= (1 if which == "on_lost" else 2))


def test_stop_called_in_the_work_does_not_wait_for_the_work(server: Scripted) -> None:
    with client_on(server, Threads(), ttl=25.0) as client:
        election = client.election("e")
        started = time.monotonic()
        assert election.run(lambda _: election.stop()) is None
        assert time.monotonic() - started < 2, "it waited for one request timeout, 5 s"


def test_an_election_that_failed_to_stop_cannot_start_again_unnoticed(server: Scripted) -> None:
    with client_on(server, Threads(), ttl=0.5) as client:
        election = client.election("e")
        begun, ends = threading.Event(), threading.Event()

        def work(leadership: Leadership) -> None:
            begun.set()
            ends.wait(10)

        thread = threading.Thread(target=election.run, args=(work,))
        thread.start()
        assert begun.wait(5)
        election.stop()
        with pytest.raises(RuntimeError, match="still stopping"):
            election.start()
        ends.set()
        thread.join()
        election.start()
        eventually(election.is_leader)


# The leader as other clients see it


def test_observe_yields_the_present_leader_and_then_each_change(client: Client, server: Scripted) -> None:
    server.holders["e"] = "first"
    seen: list[LeaderInfo | None] = []

    def observe() -> None:
        for leader in client.election("e").observe():
            seen.append(leader)

    thread = threading.Thread(target=observe)
    thread.start()

    def who() -> list[str | None]:
        return [leader.identity if leader else None for leader in seen]

    def who_after_a_ring() -> list[str | None]:
        server.notices.changed("e")
        return who()

    eventually(lambda: who() == ["first"])
    server.script("inspect", silence(0.0), silence(0.0))
    server.holders["e"] = "second"
    eventually(lambda: who_after_a_ring() == ["first", "second"])
    del server.holders["e"]
    server.notices.changed("e")
    server.notices.changed("e")
    eventually(lambda: who() == ["first", "second", None])
    client.close()
    thread.join(5)
    assert not thread.is_alive(), "close ends it"
    assert len(seen) == 3


def test_a_change_of_leader_is_reported_once_to_each_callback_and_as_an_event(client: Client, server: Scripted) -> None:
    told: list[str | None] = []
    events: list[Event] = []
    client.events.subscribe(events.append)
    election = client.election(
        "e", identity="me", on_leader_changed=lambda leader: told.append(leader.identity if leader else None)
    )
    election.campaign()
    server.notices.changed("e")
    eventually(lambda: len(told) == 1)
    election.resign()
    server.notices.changed("e")
    eventually(lambda: told[1:] == [None])
    eventually(lambda: len([event for event in events if isinstance(event, LeaderChanged)]) == 2)
    assert [(event.identity, event.term) for event in events if isinstance(event, Elected)] == [("me", 1)]
    assert election.leader() is None


def test_a_change_of_leader_is_an_event_even_without_a_callback(client: Client, server: Scripted) -> None:
    events: list[Event] = []
    client.events.subscribe(events.append)
    client.election("e", identity="me").campaign()
    server.notices.changed("e")
    eventually(lambda: [event for event in events if isinstance(event, LeaderChanged)])


def test_events_without_a_callback_are_observed_only_during_a_campaign(client: Client, server: Scripted) -> None:
    client.events.subscribe(lambda _: None)
    with client.election("e").campaign():
        assert client._kernel.followers._bells
    assert not client._kernel.followers._bells
    server.holders["e"] = "another"
    with pytest.raises(LockTimeout):
        client.election("e").campaign(0)
    assert not client._kernel.followers._bells


def test_a_refused_observer_raises_and_may_try_again(client: Client, server: Scripted) -> None:
    leaders = client.election("e").observe()
    server.script("inspect", refused(BackendRejected("no right")))
    with pytest.raises(BackendRejected):
        next(leaders)
    assert next(leaders) is None


def test_a_refused_look_at_the_leader_is_logged_and_the_callback_still_called(
    client: Client, server: Scripted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock.kernel.leader_changes.REFUSED_PAUSE", 0.02)
    told: list[LeaderInfo | None] = []
    server.script("inspect", refused(BackendRejected("no right")))
    client.election("e", on_leader_changed=told.append).campaign()
    server.notices.changed("e")
    eventually(lambda: told)
    assert "the backend refuses to tell who leads 'e'" in caplog.text


@pytest.mark.oracle
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_an_abandoned_observer_leaves_nothing_behind(client: Client, closed: bool) -> None:
    leaders: Any = client.election("e").observe()
    assert client._kernel.followers._bells
    if closed:
        leaders.close()
        with pytest.raises(StopIteration):
            next(leaders)
    del leaders
    # The finalizer of the iterator cannot always take the mutex. In this case the next call removes the iterator's
    # bell.
    client._kernel.followers.changed(None)
    assert not client._kernel.followers._bells


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"identity": ""}, ValueError),
        ({"identity": "x" * 256}, ValueError),
        ({"on_elected": 3}, TypeError),
        ({"ttl": 0}, ValueError),
    ],
)
def test_invalid_options_are_reported_before_any_request(
    client: Client, server: Scripted, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.election("e", **options)
    assert server.calls == []


# asyncio


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await main()

    return asyncio.run(limited())


async def until(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not ready():
        assert time.monotonic() < end, "the condition did not become true"
        await asyncio.sleep(0.002)


def test_async_work_is_cancelled_on_loss_and_the_node_campaigns_again(server: Scripted) -> None:
    diary = Diary()

    async def main() -> None:
        async with AsyncClient(server, ttl=5.0) as client:
            election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)
            cancelled = 0

            async def work(leadership: AsyncLeadership) -> str:
                nonlocal cancelled
                if leadership.term == 2:
                    return "done"
                try:
                    take(server)
                    await asyncio.sleep(15)
                except asyncio.CancelledError:
                    cancelled += 1
                    raise
                return "never"

            assert await election.run(work) == "done"
            assert cancelled == 1
            await until(lambda: len(diary.entries) == 4)
            assert diary.entries == ["elected 1", "lost 1 taken", "elected 2", "lost 2 resigned"]
            assert server.holders == {}

    run(main)


def test_an_async_on_elected_is_cancelled_by_the_loss(server: Scripted) -> None:
    async def main() -> None:
        order: list[str] = []

        async def elected(leadership: AsyncLeadership) -> None:
            order.append("elected")
            try:
                await asyncio.sleep(15)
            finally:
                order.append("cancelled")

        async def lost(loss: Loss) -> None:
            order.append("lost")

        async with AsyncClient(server, ttl=5.0) as client:
            election = client.election("e", on_elected=elected, on_lost=lost)
            async with election:
                await until(lambda: order == ["elected"])
                take(server)
                await until(lambda: len(order) >= 4)
                assert sorted(order[1:3]) == ["cancelled", "lost"]
                assert order[3] == "elected"

    run(main)


def test_a_cancelled_run_resigns(server: Scripted) -> None:
    diary = Diary()

    async def main() -> None:
        async with AsyncClient(server, ttl=5.0) as client:
            election = client.election("e", on_elected=diary.elected, on_lost=diary.lost)

            async def work(leadership: AsyncLeadership) -> None:
                await asyncio.sleep(15)

            task = asyncio.create_task(election.run(work))
            await until(election.is_leader)
            await until(lambda: diary.entries)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: server.holders == {})
            assert not election.is_leader()
            await until(lambda: len(diary.entries) == 2)
            assert diary.entries == ["elected 1", "lost 1 resigned"]

    run(main)


@pytest.mark.oracle
@pytest.mark.parametrize("way", ["resign()", "release()", "stop()", "in on_elected", "cancelled", "stop() cut short"])
def test_a_cancelled_resignation_releases_the_lease_only_after_on_lost(server: Scripted, way: str) -> None:
    kept = Kept(server)

    async def main() -> None:
        async with AsyncClient(server, ttl=5.0) as client:

            async def elected(leadership: AsyncLeadership) -> None:
                if way == "in on_elected":
                    await election.resign()

            async def work(leadership: AsyncLeadership) -> None:
                if way == "resign()":
                    await election.resign()
                if way == "release()":
                    await leadership.release()
                if way == "stop()":
                    await election.stop()
                await asyncio.sleep(15)

            election = client.election("e", on_elected=elected, on_lost=kept.lost_on_loop)
            running = asyncio.create_task(election.run(work))
            if way in ("cancelled", "stop() cut short"):
                await until(election.is_leader)
                await asyncio.sleep(0.01)
            if way == "stop() cut short":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(election.stop(), 0.03)
            if way == "cancelled":
                running.cancel()
            await until(lambda: len(kept.looks) == 5)
            assert kept.looks == [True] * 5
            await until(lambda: server.called("release"))
            running.cancel()
            await asyncio.wait([running])

    run(main)


@pytest.mark.oracle
def test_async_stop_resigns_and_waits_for_on_lost(server: Scripted) -> None:
    async def main() -> None:
        order: list[str] = []

        async def lost(loss: Loss) -> None:
            await asyncio.sleep(0.02)
            order.append("lost" if "e" in server.holders else "too late")

        async with AsyncClient(server, ttl=5.0) as client:
            election = client.election("e", on_lost=lost)
            election.start()
            election.start()
            await until(election.is_leader)
            await election.stop()
            assert order == ["lost"]
            assert server.holders == {}
            await election.stop()

    run(main)


def test_an_async_observer_receives_each_leader(server: Scripted) -> None:
    async def main() -> None:
        seen: list[str | None] = []
        client = AsyncClient(server, ttl=5.0)

        async def observe() -> None:
            async for leader in client.election("e").observe():
                seen.append(leader.identity if leader else None)

        task = asyncio.create_task(observe())
        await until(lambda: seen == [None])
        server.holders["e"] = "somebody"
        server.notices.changed("e")
        await until(lambda: seen == [None, "somebody"])
        await client.close()
        await asyncio.wait_for(task, 5)

    run(main)


def test_an_async_observer_misses_nothing_after_a_cancelled_wait(server: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=5.0) as client:
            leaders: Any = client.election("e").observe()
            assert await anext(leaders) is None
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(leaders), 0.02)
            server.holders["e"] = "somebody"
            server.notices.changed("e")
            leader = await asyncio.wait_for(anext(leaders), 5)
            assert leader.identity == "somebody"
            await leaders.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(leaders)

    run(main)


def test_an_async_leadership_is_the_current_lease_of_the_leader(server: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=5.0) as client:
            election = client.election("e")
            async with election.campaign() as leadership:
                assert client.current_lease() is leadership

            async def work(leadership: AsyncLeadership) -> bool:
                await asyncio.sleep(0)
                return client.current_lease() is leadership

            assert await election.run(work) is True
            with pytest.raises(NotHeld):
                client.current_lease()

    run(main)


@pytest.mark.parametrize("how", ["stop", "resign", "close"])
def test_the_body_of_an_async_campaign_is_cancelled_when_another_task_resigns(server: Scripted, how: str) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=20.0) as client:
            election = client.election("e")
            end: dict[str, Callable[[], Awaitable[object]]] = {
                "stop": election.stop,
                "resign": election.resign,
                "close": client.close,
            }
            leads = asyncio.Event()

            # `step_down` runs in a task that is made outside the body. If a task that was made inside the body
            # resigned, the resignation would count as the body's own.
            async def step_down() -> None:
                await leads.wait()
                await end[how]()

            async def lead() -> None:
                async with election.campaign():
                    leads.set()
                    try:
                        await asyncio.sleep(10)
                    except asyncio.CancelledError:
                        assert server.holders
                        raise

            ending = asyncio.create_task(step_down())
            with pytest.raises(LockLost, match="resigned"):
                await lead()
            await ending
            assert server.holders == {}

    asyncio.run(main())


def test_the_body_of_an_async_campaign_is_cancelled_once(server: Scripted) -> None:
    async def main() -> None:
        cleaned_up = False
        async with AsyncClient(server, ttl=20.0) as client:
            election = client.election("e")
            leads, cancelled = asyncio.Event(), asyncio.Event()

            async def step_down() -> None:
                await leads.wait()
                first = asyncio.create_task(election.stop())
                await cancelled.wait()
                await asyncio.gather(first, election.resign(), client.close())

            async def lead() -> None:
                nonlocal cleaned_up
                async with election.campaign():
                    leads.set()
                    try:
                        await asyncio.sleep(10)
                    finally:
                        cancelled.set()
                        await asyncio.sleep(0.05)
                        cleaned_up = True

            ending = asyncio.create_task(step_down())
            with pytest.raises(LockLost, match="resigned"):
                await lead()
            await ending
            assert cleaned_up

    asyncio.run(main())


def test_the_body_of_an_async_campaign_that_resigns_itself_continues(server: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=20.0) as client:
            election = client.election("e")
            async with election.campaign() as leadership:
                assert await election.resign()
                await asyncio.sleep(0.05)
                assert not leadership.is_held()
            assert server.holders == {}

    asyncio.run(main())


@pytest.mark.parametrize("resigns", ["work", "task of the body"])
def test_an_async_body_is_cancelled_before_its_leadership_is_given_up(server: Scripted, resigns: str) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=20.0) as client:
            election = client.election("e", grace=0.05)
            tasks: list[asyncio.Task[Any]] = []

            async def body(leadership: AsyncLeadership, entered: asyncio.Event) -> None:
                async with leadership:
                    if resigns != "work":
                        tasks.append(asyncio.create_task(election.stop()))
                    entered.set()
                    await asyncio.sleep(10)

            async def work(leadership: AsyncLeadership) -> None:
                entered = asyncio.Event()
                tasks.append(asyncio.create_task(body(leadership, entered)))
                await entered.wait()
                if resigns == "work":
                    await election.stop()

            await (election.run(work) if resigns == "work" else work(await election.campaign()))
            with pytest.raises(LockLost, match="resigned"):
                await tasks[0]

    asyncio.run(main())


def test_a_failed_inner_with_block_does_not_make_the_outer_one_wait_forever(client: Client, server: Scripted) -> None:
    election = client.election("e", grace=60.0)
    with election.campaign() as leadership:
        resigning = threading.Thread(target=election.resign)
        resigning.start()
        eventually(lambda: not leadership.is_held())
        with pytest.raises(NotHeld), leadership:
            pass
        election.stop()
        assert server.holders
    resigning.join(10)
    assert server.holders == {}


def test_an_async_run_waits_for_a_body_that_its_work_has_left_open(server: Scripted) -> None:
    kept: list[bool] = []

    async def beside(leadership: AsyncLeadership, entered: asyncio.Event) -> None:
        async with leadership:
            entered.set()
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                kept.append("e" in server.holders)

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []

        async def work(leadership: AsyncLeadership) -> str:
            entered = asyncio.Event()
            tasks.append(asyncio.create_task(beside(leadership, entered)))
            await entered.wait()
            return "done"

        async with AsyncClient(server, ttl=20.0) as client:
            assert await client.election("e").run(work) == "done"
            with pytest.raises(LockLost, match="resigned"):
                await tasks[0]
        assert kept == [True]

    asyncio.run(main())


def test_a_resignation_in_one_task_cancels_the_async_with_blocks_of_others(server: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=20.0) as client:
            leadership = await client.election("e").campaign()
            both = asyncio.Barrier(2)

            async def works_on() -> None:
                await both.wait()
                async with leadership:
                    await both.wait()
                    await asyncio.sleep(60)

            other = asyncio.create_task(works_on())
            async with leadership:
                await both.wait()
                await both.wait()
                assert await leadership.release()
            with pytest.raises(LockLost, match="resigned"):
                await asyncio.wait_for(other, 5)
            assert server.holders == {}

    asyncio.run(main())


def test_an_async_campaign_can_be_entered(server: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(server, ttl=5.0) as client:
            election = client.election("e")
            async with election.campaign(timeout=1) as leadership:
                assert election.is_leader()
                assert leadership.term == 1
            assert not election.is_leader()
            assert server.holders == {}
            server.holders["e"] = "another"
            with pytest.raises(LockTimeout):
                await election.campaign(0.5)

    run(main)
