"""Tests of leader election: terms, the order of callbacks, resignation, and what other clients see."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from multilock import Client, LeaderInfo, LockTimeout, Loss, LossReason, now
from multilock.events import Waiting
from multilock.testing.conformance.base import SOON, Conformance, Pulse, Recorder, eventually, refused
from multilock.testing.conformance.faces import AsyncioFace, Face, background
from multilock.testing.conformance.places import Place

__all__ = ["ElectionConformance"]

NAME = "scheduler"


class Diary:
    """The calls of an election's callbacks, in order."""

    def __init__(self, face: Face) -> None:
        self._face = face
        self.entries = Recorder[tuple[str, Any]]()

    def on_elected(self, leadership: Any) -> None:
        """Record the callback."""
        self.entries(("elected", leadership.term))

    def on_lost(self, loss: Loss) -> None:
        """Record the callback."""
        self.entries(("lost", loss.reason))

    @property
    def words(self) -> list[str]:
        """Return the names of the callbacks so far."""
        return [word for word, _ in self.entries.calls]

    def callbacks(self) -> dict[str, Any]:
        """Return the callbacks as options of an election."""
        return {"on_elected": self.on_elected, "on_lost": self.on_lost}


class Shift:
    """The work of a leader, as ``work`` or as ``on_elected``. The work runs until ``go_home`` is set, cleans up, and
    ends."""

    def __init__(self, face: Face, name: str, lines: Recorder[str]) -> None:
        self._name = name
        self._lines = lines
        self.go_home = threading.Event()
        self.work: Callable[[Any], Any] = self._async_work if isinstance(face, AsyncioFace) else self._work

    def _work(self, leadership: Any) -> None:
        self._lines(f"{self._name} begins")
        while leadership.is_held():
            time.sleep(0.01)
        self.go_home.wait(2 * SOON)
        self._lines(f"{self._name} ends")

    async def _async_work(self, leadership: Any) -> None:
        self._lines(f"{self._name} begins")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.to_thread(self.go_home.wait, 2 * SOON)
            self._lines(f"{self._name} ends")


IN_ORDER = ["first begins", "first ends", "second begins"]
CLEAN_UP = 0.4  # seconds, long enough for another node to take a lease that was released too early


class ElectionConformance(Conformance):
    """Tests of leader election."""

    @pytest.fixture
    def diary(self, face: Face) -> Diary:
        """A record of the election's callbacks."""
        return Diary(face)

    def test_campaign_elects_one_leader(self, client: Client, other: Client) -> None:
        first = client.election(NAME, identity="node-1")
        assert first.is_leader() is False
        leadership = first.campaign()
        assert leadership.is_held()
        assert first.is_leader()
        assert (leadership.identity, leadership.term) == ("node-1", leadership.token)
        second = other.election(NAME, identity="node-2")
        with pytest.raises(LockTimeout):
            refused(lambda seconds: second.campaign(timeout=seconds))
        assert not second.is_leader()
        leadership.release()

    def test_each_later_term_is_greater(self, client: Client, other: Client) -> None:
        terms: list[int] = []
        for each in (client, other, client):
            leadership = each.election(NAME).campaign(timeout=SOON)
            terms.append(leadership.term or 0)
            leadership.release()
        if client.capabilities.fencing:
            assert terms == sorted(set(terms))

    def test_every_client_sees_the_leader(self, client: Client, other: Client) -> None:
        longest = "https://node-1:8443" + 76 * "/"  # 255 bytes in percent-encoding
        seen = other.election(NAME)
        assert seen.leader() is None
        leadership = client.election(NAME, identity=longest).campaign()
        leader = seen.leader()
        assert leader is not None
        assert (leader.identity, leader.term) == (longest, leadership.term)
        leadership.release()
        assert seen.leader() is None

    def test_an_election_is_a_contest_for_the_lock_of_that_name(self, client: Client, other: Client) -> None:
        leadership = client.election(NAME).campaign()
        assert other.lock(NAME).try_acquire() is None
        info = other.inspect(NAME)
        assert info is not None
        assert info.kind == "leader"
        leadership.release()
        with other.lock(NAME), pytest.raises(LockTimeout):
            refused(lambda seconds: client.election(NAME).campaign(timeout=seconds))

    @pytest.mark.parametrize("kind", ["reader", "permit"])
    def test_a_leader_excludes_readers_and_permits_of_that_name(self, client: Client, other: Client, kind: str) -> None:
        can = client.capabilities
        if not (can.read_write if kind == "reader" else can.semaphore):
            pytest.skip(f"declared: it has no {kind}s")
        lock = other.read_write_lock(NAME).reader() if kind == "reader" else other.semaphore(NAME, 2)
        election = client.election(NAME)
        held = lock.acquire()
        with pytest.raises(LockTimeout):
            election.campaign(timeout=0)
        waiting = background(lambda: election.campaign(timeout=SOON))
        # ``waiting`` is None if the backend has no queue.
        eventually(lambda: (info := other.inspect(NAME)) and info.waiting != 0)
        assert not waiting.done()
        assert held.release()
        leadership = waiting.result(SOON)
        assert lock.try_acquire() is None
        assert leadership.release()
        assert lock.acquire(timeout=SOON).release()

    def test_each_on_elected_of_a_campaign_is_followed_by_one_on_lost(self, client: Client, diary: Diary) -> None:
        election = client.election(NAME, **diary.callbacks())
        leadership = election.campaign()
        assert diary.entries.wait(1) == ("elected", leadership.term)
        assert election.resign() is True
        assert diary.entries.wait(2) == ("lost", LossReason.RESIGNED)
        assert not leadership.is_held()
        assert diary.entries.stays_at(2, 0.1)
        assert election.resign() is False

    def test_releasing_a_leadership_resigns_it(self, client: Client, diary: Diary) -> None:
        election = client.election(NAME, **diary.callbacks())
        leadership = election.campaign()
        own = Recorder[Loss]()
        leadership.on_lost(own)
        assert leadership.release() is True
        assert diary.entries.wait(2) == ("lost", LossReason.RESIGNED)
        assert own.stays_at(0, 0.1)

    def test_on_lost_is_called_before_the_lease_is_released(
        self, client: Client, other: Client, face: Face, place: Place
    ) -> None:
        taken: list[bool] = []

        def on_lost(loss: Loss) -> None:
            time.sleep(1.1 * place.quick_ttl)  # the lease is renewed meanwhile
            taken.append(other.lock(NAME).try_acquire() is None)

        # The lease is kept for at most one ttl. So the callback takes less than that, but more than a renewal period.
        ttl = 3 * place.quick_ttl
        election = client.election(NAME, ttl=ttl, on_lost=face.function(on_lost, blocks=True))
        election.campaign()
        election.resign()
        assert taken == [True]
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_an_on_lost_that_hangs_delays_the_release_by_one_ttl_at_most(
        self, client: Client, other: Client, face: Face, place: Place, pulse: Pulse
    ) -> None:
        end = threading.Event()
        ttl = place.quick_ttl
        election = client.election(NAME, ttl=ttl, on_lost=face.function(lambda loss: end.wait(10), blocks=True))
        election.campaign()
        begun = now()
        election.resign()
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None
        assert ttl * 0.9 <= now() - begun < 2 * ttl + 1.0 + pulse.stopped()
        end.set()

    def test_after_a_resignation_the_next_candidate_leads_without_waiting_for_a_ttl(
        self, client: Client, other: Client, pulse: Pulse
    ) -> None:
        election = client.election(NAME, ttl=30)
        election.campaign()
        waiting = background(lambda: other.election(NAME, ttl=30).campaign(timeout=SOON))
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        begun = now()
        election.resign()
        assert waiting.result(SOON).is_held()
        assert now() - begun < 2.0 + pulse.stopped()

    def test_a_lost_leadership_is_reported_before_another_candidate_leads(
        self, client: Client, other: Client, place: Place, diary: Diary, pulse: Pulse
    ) -> None:
        election = client.election(NAME, ttl=place.calm_ttl, **diary.callbacks())
        election.campaign()
        with place.silence():
            waiting = background(lambda: (other.election(NAME).campaign(timeout=20), now()))
            diary.entries.wait(2)
            assert not election.is_leader()
            _, next_at = waiting.result(20)
        assert diary.entries.times[1] <= next_at + pulse.stopped()
        # A process that was paused may notice that another node leads before it notices that its own term has expired.
        assert diary.entries.calls[1] == ("lost", LossReason.EXPIRED) or pulse.stopped()

    def test_start_campaigns_in_the_background_and_stop_resigns(
        self, client: Client, other: Client, diary: Diary
    ) -> None:
        election = client.election(NAME, **diary.callbacks())
        election.start()
        diary.entries.wait(1)
        assert election.is_leader()
        election.start()
        election.stop()
        assert diary.entries.wait(2) == ("lost", LossReason.RESIGNED)
        assert not election.is_leader()
        assert other.inspect(NAME) is None
        assert diary.entries.stays_at(2, 0.2)

    def test_stop_leaves_no_leader_behind_even_if_it_meets_the_grant(self, client: Client, other: Client) -> None:
        for _ in range(5):
            election = client.election(NAME)
            election.start()
            eventually(lambda: other.inspect(NAME) is not None)
            election.stop()
            eventually(lambda: other.inspect(NAME) is None, 1.0)
            assert not election.is_leader()

    def test_an_election_is_a_context_manager(self, client: Client, diary: Diary) -> None:
        with client.election(NAME, **diary.callbacks()) as election:
            diary.entries.wait(1)
            assert election.is_leader()
        assert diary.words == ["elected", "lost"]

    def test_after_a_loss_a_started_node_campaigns_again_and_its_callbacks_stay_paired(
        self, client: Client, place: Place, diary: Diary
    ) -> None:
        with client.election(NAME, ttl=2, **diary.callbacks()) as election:
            diary.entries.wait(1)
            time.sleep(0.3)
            place.delete(NAME)
            diary.entries.wait(3)
            assert election.is_leader()
        assert diary.words == ["elected", "lost", "elected", "lost"]
        terms = [value for word, value in diary.entries.calls if word == "elected"]
        assert terms[0] != terms[1] or not client.capabilities.fencing

    def test_a_node_that_resigned_queues_behind_the_other_candidates(
        self, client: Client, other: Client, diary: Diary
    ) -> None:
        elected, waiting = Recorder[str](), Recorder[Waiting]()
        for each in (client, other):
            each.events.subscribe(lambda event: waiting(event) if isinstance(event, Waiting) else None)
        first = client.election(NAME, on_elected=lambda _: elected("first"))
        second = other.election(NAME, on_elected=lambda _: elected("second"))
        first.start()
        elected.wait(1)
        second.start()
        waiting.wait(1)
        assert first.resign()
        assert elected.wait(2) == "second"
        waiting.wait(2)
        second.resign()
        assert elected.wait(3) == "first"
        first.stop()
        second.stop()

    def test_a_running_on_elected_never_delays_on_lost_and_the_node_waits_for_both(
        self, client: Client, place: Place, face: Face
    ) -> None:
        end = threading.Event()
        diary = Recorder[str]()
        numbers = itertools.count(1)

        def on_elected(leadership: Any) -> None:
            number = next(numbers)
            diary(f"elected {number}")
            if number == 1:
                end.wait(10)
                diary("ended")

        def on_lost(loss: Loss) -> None:
            diary("lost")

        # Under asyncio a running on_elected is cancelled, but not the thread that it waits for.
        election = client.election(
            NAME, ttl=2, on_elected=on_elected if face.name == "blocking" else None, on_lost=on_lost
        )
        election.start()
        eventually(election.is_leader)
        time.sleep(0.3)
        place.delete(NAME)
        if face.name == "blocking":
            assert diary.wait(2) == "lost"
            assert diary.stays_at(2, 0.3)
            end.set()
            assert [diary.wait(3), diary.wait(4)] == ["ended", "elected 2"]
        else:
            assert diary.wait(1) == "lost"
            eventually(election.is_leader)
        election.stop()

    def test_an_on_elected_that_raises_ends_the_leadership(self, client: Client, face: Face) -> None:
        lost = Recorder[Loss]()

        def on_elected(leadership: Any) -> None:
            raise ValueError("not today")

        election = client.election(NAME, on_elected=on_elected, on_lost=lost)
        leadership = election.campaign()
        assert lost.wait().reason is LossReason.RESIGNED
        eventually(lambda: not leadership.is_held() and client.inspect(NAME) is None)

    def test_run_returns_the_result_of_work_that_ends_by_itself(
        self, client: Client, other: Client, face: Face, diary: Diary
    ) -> None:
        election = client.election(NAME, **diary.callbacks())
        assert election.run(face.function(lambda leadership: ("done", leadership.is_held()))) == ("done", True)
        assert diary.words == ["elected", "lost"]
        assert other.inspect(NAME) is None

    def test_run_raises_the_exception_of_its_work(self, client: Client, other: Client, face: Face) -> None:
        def work(leadership: Any) -> None:
            raise KeyError("broken")

        with pytest.raises(KeyError, match="broken"):
            client.election(NAME).run(face.function(work))
        assert other.inspect(NAME) is None

    def test_run_campaigns_again_after_a_loss(self, client: Client, place: Place, face: Face) -> None:
        rounds = Recorder[int]()

        def work(leadership: Any) -> str | None:
            rounds(len(rounds.calls))
            if len(rounds.calls) == 1:
                while leadership.is_held():
                    time.sleep(0.01)
                return None
            return "second"

        election = client.election(NAME, ttl=2)
        running = background(lambda: election.run(face.function(work, blocks=True)))
        rounds.wait(1)
        time.sleep(0.3)
        place.delete(NAME)
        assert running.result(SOON) == "second"

    def test_asynchronous_work_is_cancelled_on_loss(self, client: Client, place: Place, face: Face) -> None:
        if not isinstance(face, AsyncioFace):
            return  # another test has blocking work, which must check is_held() itself
        rounds = Recorder[str]()

        async def work(leadership: Any) -> str:
            rounds("begun")
            if len(rounds.calls) > 1:
                return "second"
            try:
                await asyncio.sleep(SOON)
            except asyncio.CancelledError:
                rounds("cancelled")
                raise
            return "never"

        election = client.election(NAME, ttl=2)
        running: Future[Any] = background(lambda: election.run(work))
        rounds.wait(1)
        time.sleep(0.3)
        place.delete(NAME)
        assert running.result(SOON) == "second"
        assert rounds.calls == ["begun", "cancelled", "begun"]

    def test_stop_makes_run_return_none(self, client: Client, face: Face, diary: Diary) -> None:
        election = client.election(NAME, **diary.callbacks())

        def work(leadership: Any) -> None:
            while leadership.is_held():
                time.sleep(0.01)

        running = background(lambda: election.run(face.function(work, blocks=True)))
        diary.entries.wait(1)
        election.stop()
        assert running.result(SOON) is None
        assert diary.words == ["elected", "lost"]

    def test_stop_ends_run_even_if_the_node_never_led(self, client: Client, other: Client, face: Face) -> None:
        other.lock(NAME).acquire()
        election = client.election(NAME)
        running = background(lambda: election.run(face.function(lambda leadership: "led")))
        eventually(lambda: (info := other.inspect(NAME)) and info.waiting != 0)
        election.stop()
        assert running.result(SOON) is None

    def test_closing_the_client_resigns_its_leaderships(self, client: Client, other: Client, diary: Diary) -> None:
        election = client.election(NAME, **diary.callbacks())
        election.start()
        diary.entries.wait(1)
        client.close()
        assert diary.entries.wait(2) == ("lost", LossReason.RESIGNED)
        assert other.inspect(NAME) is None
        assert diary.entries.stays_at(2, 0.05)

    # An orderly end

    @pytest.fixture
    def lines(self) -> Recorder[str]:
        """The lines of both leaders."""
        return Recorder[str]()

    @pytest.fixture
    def first(self, face: Face, lines: Recorder[str]) -> Shift:
        """The work of the first leader."""
        return Shift(face, "first", lines)

    @pytest.fixture
    def second(self, face: Face, lines: Recorder[str]) -> Shift:
        """The work of the second leader."""
        second = Shift(face, "second", lines)
        second.go_home.set()
        return second

    @pytest.mark.parametrize("how", ["stop", "resign", "release", "close"])
    def test_new_work_begins_after_the_work_of_the_former_leader_has_ended(
        self, client: Client, other: Client, face: Face, lines: Recorder[str], first: Shift, second: Shift, how: str
    ) -> None:
        leaderships = Recorder[Any]()
        election, rival = client.election(NAME, on_elected=leaderships), other.election(NAME)
        running = background(lambda: election.run(first.work))
        lines.wait(1)
        led = background(lambda: rival.run(second.work))
        eventually(lambda: (info := other.inspect(NAME)) and info.waiting != 0)
        leadership = face.wrap(leaderships.wait(1))
        ended = background(getattr({"close": client, "release": leadership}.get(how, election), how))
        eventually(lambda: not election.is_leader())
        assert not leadership.is_held()
        assert lines.stays_at(1, CLEAN_UP)
        assert not ended.done(), "run() returned before the work had ended"
        first.go_home.set()
        ended.result(SOON)
        lines.wait(3)
        assert lines.calls == IN_ORDER
        if how in ("resign", "release"):
            election.stop()
        assert running.result(SOON) is None
        rival.stop()
        assert led.result(SOON) is None

    @pytest.mark.parametrize("how", ["stop", "resign", "close", "with"])
    def test_a_new_on_elected_begins_after_that_of_the_former_leader_has_ended(
        self, client: Client, other: Client, face: Face, lines: Recorder[str], first: Shift, second: Shift, how: str
    ) -> None:
        election = client.election(NAME, on_elected=first.work)
        rival = other.election(NAME, on_elected=second.work)

        def serve() -> None:
            with election:
                lines.wait(1)
                rival.start()
                eventually(lambda: (info := other.inspect(NAME)) and info.waiting != 0)
                if how != "with":
                    getattr(client if how == "close" else election, how)()

        served = background(serve)
        lines.wait(1)
        eventually(lambda: not election.is_leader())
        assert lines.stays_at(1, CLEAN_UP)
        assert not served.done()
        first.go_home.set()
        lines.wait(3)
        served.result(SOON)
        rival.stop()
        assert lines.calls[:3] == IN_ORDER

    def test_if_on_elected_raises_the_lease_is_released_after_the_work_has_ended(
        self, client: Client, other: Client, face: Face, lines: Recorder[str], first: Shift, second: Shift
    ) -> None:
        def fails(leadership: Any) -> None:
            lines.wait(1)
            raise ValueError("not today")

        election = client.election(NAME, on_elected=face.function(fails, blocks=True))
        rival = other.election(NAME, on_elected=second.work)
        running = background(lambda: election.run(first.work))
        lines.wait(1)
        rival.start()
        assert lines.stays_at(1, CLEAN_UP)
        assert not election.is_leader()
        first.go_home.set()
        lines.wait(3)
        assert lines.calls == IN_ORDER
        election.stop()
        assert running.result(SOON) is None
        rival.stop()

    def test_a_cancelled_run_releases_the_lease_after_its_work_and_on_lost(
        self, client: Client, other: Client, face: Face, lines: Recorder[str], first: Shift, second: Shift
    ) -> None:
        if not isinstance(face, AsyncioFace):
            return  # a thread cannot be cancelled
        tasks = Recorder[Any]()

        async def on_lost(loss: Loss) -> None:
            await asyncio.to_thread(first.go_home.wait, 2 * SOON)
            await asyncio.sleep(CLEAN_UP)
            lines("on_lost ends")

        election: Any = client.election(NAME, on_lost=on_lost)
        rival = other.election(NAME, on_elected=second.work)

        async def run() -> None:
            tasks(asyncio.current_task())
            try:
                await election._target.run(first.work)
            finally:
                lines("run ends")

        background(lambda: face.run(run()))
        lines.wait(1)
        rival.start()
        eventually(lambda: (info := other.inspect(NAME)) and info.waiting != 0)
        face.loop.call_soon_threadsafe(tasks.wait(1).cancel)
        eventually(lambda: not election.is_leader())
        assert lines.stays_at(1, CLEAN_UP)
        first.go_home.set()
        lines.wait(5)
        assert lines.calls[:3] == ["first begins", "first ends", "on_lost ends"]
        assert sorted(lines.calls[3:5]) == ["run ends", "second begins"]
        rival.stop()

    def test_work_that_does_not_end_keeps_the_lease_for_the_grace_and_is_named(
        self, client: Client, other: Client, face: Face, caplog: pytest.LogCaptureFixture
    ) -> None:
        begun, end = threading.Event(), threading.Event()

        def work(leadership: Any) -> None:
            begun.set()
            end.wait(20)

        async def async_work(leadership: Any) -> None:
            begun.set()
            while not end.is_set():
                with contextlib.suppress(asyncio.CancelledError):  # this callback ignores its cancellation
                    await asyncio.sleep(0.01)

        election = client.election(NAME, grace=30)
        running = background(lambda: election.run(async_work if face.name == "asyncio" else work))
        assert begun.wait(SOON)
        began = now()
        election.stop(grace=0.7)
        assert 0.65 <= now() - began < 0.7 + SOON
        eventually(lambda: "Still running while another node may lead: its work" in caplog.text)
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None
        end.set()
        assert running.result(SOON) is None

    def test_work_that_stops_its_own_election_is_not_waited_for_and_keeps_the_lease(
        self, client: Client, other: Client, face: Face, pulse: Pulse
    ) -> None:
        looks = Recorder[tuple[float, bool]]()
        election: Any = client.election(NAME)
        rival = other.lock(NAME)

        def work(leadership: Any) -> None:
            began = now()
            election.stop()
            took = now() - began
            time.sleep(0.3)
            looks((took, rival.try_acquire() is None))

        async def async_work(leadership: Any) -> None:
            began = now()
            await election._target.stop()
            took = now() - began
            try:
                await asyncio.sleep(60)
            finally:
                looks((took, await asyncio.to_thread(rival.try_acquire) is None))

        assert election.run(async_work if face.name == "asyncio" else work) is None
        took, kept = looks.wait(1)
        assert took < 1.0 + pulse.stopped()
        assert kept
        assert rival.try_acquire(timeout=SOON) is not None

    def test_elections_never_give_up_during_an_outage(
        self, make: Callable[..., Client], place: Place, diary: Diary
    ) -> None:
        client = make(outage_timeout=0.2, request_timeout=0.3)
        election = client.election(NAME, **diary.callbacks())
        with place.silence():
            election.start()
            time.sleep(0.8)
        diary.entries.wait(1, 3 * SOON)
        election.stop()

    def test_observe_yields_the_present_leader_and_then_each_change(
        self, client: Client, other: Client, pulse: Pulse
    ) -> None:
        seen = Recorder[LeaderInfo | None]()

        def observe() -> None:
            for leader in other.election(NAME).observe():
                seen(leader)

        background(observe)
        assert seen.wait(1) is None
        leadership = client.election(NAME, identity="node-1", ttl=30).campaign()
        begun = now()
        leader = seen.wait(2)
        assert leader is not None
        assert (leader.identity, leader.term) == ("node-1", leadership.term)
        assert now() - begun < 1.5 + pulse.stopped()
        leadership.release()
        assert seen.wait(3) is None

    def test_observe_yields_the_leadership_of_its_own_client(self, client: Client, pulse: Pulse) -> None:
        seen = Recorder[LeaderInfo | None]()

        def observe() -> None:
            for leader in client.election(NAME).observe():
                seen(leader)

        background(observe)
        assert seen.wait(1) is None
        leadership = client.election(NAME, ttl=30).campaign()
        begun = now()
        assert seen.wait(2) is not None
        assert now() - begun < 1.5 + pulse.stopped()
        leadership.release()
        assert seen.wait(3) is None

    def test_observe_yields_nothing_during_an_outage(
        self, client: Client, make: Callable[..., Client], place: Place
    ) -> None:
        watcher = make(request_timeout=0.1)
        leadership = make(bystander=True).election(NAME, identity="node-1", ttl=30).campaign()
        seen = Recorder[LeaderInfo | None]()

        def observe() -> None:
            for leader in watcher.election(NAME).observe():
                seen(leader)

        background(observe)
        seen.wait(1)
        with place.silence():
            assert seen.stays_at(1, 0.5)
        assert seen.stays_at(1, 0.5)
        leadership.release()
        assert seen.wait(2, 15.0) is None

    def test_on_leader_changed_receives_the_new_leader(self, client: Client, other: Client) -> None:
        seen = Recorder[LeaderInfo | None]()
        with client.election(NAME, identity="node-1", on_leader_changed=seen):
            leader = seen.wait(1)
            assert leader is not None
            assert leader.identity == "node-1"

    def test_is_leader_is_false_as_soon_as_the_deadline_has_passed(self, client: Client, place: Place) -> None:
        election = client.election(NAME, ttl=place.quick_ttl)
        leadership = election.campaign()
        with place.silence():
            eventually(lambda: not election.is_leader())
            assert not leadership.is_held()
