"""Tests of the client: inspection, the operator's methods, names, events, and ``close()``."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from multilock import (
    Acquired,
    AtRisk,
    Capabilities,
    Client,
    ClientClosed,
    Event,
    Finding,
    LeaderInfo,
    LeaseState,
    LockTimeout,
    Loss,
    LossReason,
    Lost,
    Released,
    Renewed,
    RenewFailed,
    Waiting,
    log_thread,
    now,
)
from multilock.testing.conformance.base import NAME, SOON, Conformance, Pulse, Recorder, eventually, refused
from multilock.testing.conformance.faces import Face, background
from multilock.testing.conformance.places import Place

__all__ = ["ClientConformance", "CloseConformance"]


class ClientConformance(Conformance):
    """Tests of a client while nothing fails."""

    def test_inspect_shows_the_holder_of_a_name(self, make: Callable[..., Client]) -> None:
        client, other = make(identity="node-7"), make()
        assert client.inspect(NAME) is None
        with client.lock(NAME, ttl=20) as lease:
            info = other.inspect(NAME)
            assert info is not None
            assert (info.name, info.kind, info.owner, info.token) == (NAME, "lock", lease.owner, lease.token)
            assert info.identity == "node-7"
            assert info.ttl in (None, lease.ttl)
            assert info.waiting in (None, 0)
            assert info.since is None or abs(datetime.now(UTC) - info.since) < timedelta(seconds=10)
            again = other.inspect(NAME)
            assert again is not None
            assert again.since == info.since
        assert other.inspect(NAME) is None

    def test_inspect_all_returns_the_held_names_without_the_prefix(self, client: Client, other: Client) -> None:
        names = {"app/a", "app/b", "app%2Fc", "apple", "other"}
        leases = [client.lock(name).acquire() for name in names]
        assert {info.name for info in other.inspect_all()} == names
        assert {info.name for info in other.inspect_all("app/")} == {"app/a", "app/b"}
        for lease in leases:
            lease.release()
        assert list(other.inspect_all()) == []

    def test_force_release_frees_a_name_and_says_whether_it_was_held(self, client: Client, other: Client) -> None:
        assert other.force_release(NAME) is False
        client.lock(NAME).acquire()
        assert other.force_release(NAME) is True
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_force_release_lets_a_waiter_in(self, client: Client, other: Client) -> None:
        client.lock(NAME, ttl=30).acquire()
        waiting = background(lambda: other.lock(NAME).acquire(timeout=SOON))
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        client.force_release(NAME)
        assert waiting.result(SOON).is_held()

    def test_capabilities_are_immutable_and_known_without_a_request(self, client: Client, place: Place) -> None:
        with place.down():
            facts = client.capabilities
        assert isinstance(facts, Capabilities)
        with pytest.raises(dataclasses.FrozenInstanceError):
            facts.fencing = not facts.fencing  # type: ignore[misc]
        assert 0 < facts.ttl_min < facts.ttl_max
        assert facts.takeover_bound > 0

    def test_diagnose_returns_findings_with_remedies(self, client: Client) -> None:
        for finding in client.diagnose():
            assert isinstance(finding, Finding)
            assert finding.level in ("info", "warning", "error")
            assert finding.message
            assert finding.remedy

    def test_ping_returns_the_time_of_one_round_trip(self, client: Client) -> None:
        assert 0 <= client.ping() < SOON

    def test_a_client_with_an_idle_watchdog_is_healthy(self, client: Client, place: Place) -> None:
        eventually(client.is_healthy)
        with client.lock(NAME, ttl=place.quick_ttl):
            eventually(client.is_healthy)

    def test_events_report_the_life_of_a_lock_in_order(self, client: Client, other: Client, place: Place) -> None:
        seen = Recorder[Event]()
        # Leave out the events of a late reply, because on a busy machine a renewal may be late.
        unsubscribe = client.events.subscribe(
            lambda event: None if isinstance(event, (AtRisk, RenewFailed)) else seen(event)
        )
        held = other.lock(NAME).acquire()
        waiting = background(lambda: client.lock(NAME, ttl=place.quick_ttl).acquire(timeout=SOON))
        assert isinstance(seen.wait(1), Waiting)
        held.release()
        lease = waiting.result(SOON)
        acquired = seen.wait(2)
        assert isinstance(acquired, Acquired)
        assert (acquired.name, acquired.owner, acquired.token) == (NAME, lease.owner, lease.token)
        assert isinstance(seen.wait(3), Renewed)
        lease.release()
        eventually(lambda: any(isinstance(event, Released) for event in seen.calls))
        lease = client.lock(NAME, ttl=place.quick_ttl, renew=False).acquire()
        lease.wait_lost(SOON)
        eventually(lambda: any(isinstance(event, Lost) for event in seen.calls))
        unsubscribe()
        count = len(seen.calls)
        client.lock("unheard").acquire().release()
        assert seen.stays_at(count, 0.1)

    def test_a_subscriber_that_raises_affects_nothing_else(self, client: Client) -> None:
        bad, good = Recorder[Event](raises=True), Recorder[Event]()
        client.events.subscribe(bad)
        client.events.subscribe(good)
        for _ in range(2):
            client.lock(NAME).acquire().release()
        good.wait(4)
        bad.wait(4)


class CloseConformance(Conformance):
    """Tests of the end of a client, ``close()``."""

    def test_close_reports_each_held_lease_as_lost_before_it_releases_it(
        self, client: Client, other: Client, face: Face
    ) -> None:
        still_taken: list[bool] = []
        told = threading.Event()

        def on_lost(loss: Loss) -> None:
            losses.append(loss)
            still_taken.append(other.lock(NAME).try_acquire() is None)
            told.set()

        losses: list[Loss] = []
        lease = client.lock(NAME, ttl=30, on_lost=face.function(on_lost, blocks=True)).acquire()
        client.close()
        assert told.is_set()
        assert [loss.reason for loss in losses] == [LossReason.CLOSED]
        assert still_taken == [True]
        assert lease.state is LeaseState.LOST
        assert not lease.is_held()
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_close_makes_each_waiter_raise_client_closed_and_leaves_nothing(
        self, client: Client, other: Client, place: Place
    ) -> None:
        held = other.lock(NAME).acquire()
        waiting = [background(lambda: client.lock(NAME).acquire()) for _ in range(3)]
        eventually(lambda: (info := other.inspect(NAME)) and info.waiting != 0)
        client.close()
        for each in waiting:
            with pytest.raises(ClientClosed):
                each.result(SOON)
        held.release()
        eventually(lambda: place.leftovers() == [])

    def test_a_lock_granted_while_the_client_closes_is_released(
        self, client: Client, other: Client, place: Place
    ) -> None:
        lost = Recorder[Loss]()
        lock = client.lock(NAME, ttl=30, on_lost=lost)
        granted = place.delay_reply("attempt")
        acquiring = background(lock.acquire)
        granted.wait(SOON)
        closing = background(client.close)
        eventually(lambda: not client.is_healthy())
        granted.release()
        with pytest.raises(ClientClosed):
            acquiring.result(SOON)
        assert not lock.is_held()
        closing.result(SOON)
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None
        assert lost.calls == []

    def test_a_call_after_close_raises_client_closed(self, client: Client) -> None:
        lock = client.lock(NAME)
        election = client.election(NAME)
        client.close()
        for use in (
            lambda: client.lock(NAME),
            lock.acquire,
            lock.try_acquire,
            lock.is_locked,
            lambda: client.inspect(NAME),
            lambda: list(client.inspect_all()),
            lambda: client.force_release(NAME),
            client.diagnose,
            client.ping,
            lambda: client.election(NAME),
            lambda: election.campaign(timeout=0),
            election.start,
        ):
            with pytest.raises(ClientClosed):
                use()
        assert lock.is_held() is False
        assert client.is_healthy() is False

    def test_closing_twice_is_harmless(self, client: Client) -> None:
        client.lock(NAME).acquire()
        client.close()
        client.close()

    def test_a_client_is_a_context_manager(self, make: Callable[..., Client], other: Client) -> None:
        with make() as client:
            client.lock(NAME).acquire()
        with pytest.raises(ClientClosed):
            client.lock(NAME)
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_close_ends_despite_a_callback_that_hangs_and_a_backend_without_replies(
        self, make: Callable[..., Client], place: Place, face: Face, pulse: Pulse
    ) -> None:
        client = make(request_timeout=0.2)
        end = threading.Event()
        client.lock(NAME, ttl=30, on_lost=face.function(lambda loss: end.wait(20), blocks=True)).acquire()
        begun = now()
        with place.silence():
            client.close()
        assert now() - begun < 2.0 + pulse.stopped()
        end.set()

    def test_close_ends_observe(self, client: Client) -> None:
        seen = Recorder[LeaderInfo | None]()

        def observe() -> None:
            for leader in client.election(NAME).observe():
                seen(leader)

        observing = background(observe)
        assert seen.wait(1) is None
        assert not observing.done()
        client.close()
        observing.result(SOON)
        assert seen.calls == [None]

    def test_a_closed_client_leaves_no_thread_behind(self, place: Place, face: Face) -> None:
        before = set(threading.enumerate())
        client = place.connect(face)
        with client.lock(NAME), pytest.raises(LockTimeout):
            refused(lambda seconds: client.lock(NAME).acquire(timeout=seconds))
        client.close()

        def left() -> list[str]:
            names = [each.name for each in set(threading.enumerate()) - before]
            # One thread of the process logs for all clients.
            return [name for name in names if name != log_thread.THREAD]

        eventually(lambda: not left())
