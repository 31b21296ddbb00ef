"""``hold_at_least``: a name that is released early rests, which means that it stays taken for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from multilock import CapabilityMissing, Client, Leadership, LeaseState, NotHeld, now
from multilock.testing.conformance.base import NAME, SOON, Conformance, Recorder, eventually, inner
from multilock.testing.conformance.faces import Face, background
from multilock.testing.conformance.places import Place

__all__ = ["RestConformance"]

GRAIN = 0.01  # seconds by which this process's clock and the server's may differ over a rest


class RestConformance(Conformance):
    """Tests for a server that can keep a released name taken by its own clock. Other backends must refuse
    ``hold_at_least`` before any I/O."""

    @pytest.fixture(autouse=True)
    def _can(self, client: Client) -> None:
        if not client.capabilities.hold_at_least:
            with pytest.raises(CapabilityMissing, match="cannot keep a released name taken"):
                client.lock(NAME, hold_at_least=1.0)
            pytest.skip("declared: only a living client could do it")

    def rests_until(self, client: Client, place: Place, seconds: float) -> float:
        """Acquire the name and release it at once. Returns the time until which nobody else may have the name."""
        lease = client.lock(NAME, hold_at_least=seconds, ttl=place.quick_ttl).acquire()
        assert lease.release()
        return inner(lease.leases[0]).granted_at + seconds - GRAIN

    def stays_taken(self, other: Client, until: float) -> None:
        """Check that the name stays taken until that time."""
        while now() < until:
            got = other.lock(NAME).try_acquire()
            assert got is None or now() >= until
            if got:
                got.release()
            time.sleep(0.05)

    def test_an_early_release_leaves_the_name_taken_until_hold_at_least_is_over(
        self, client: Client, other: Client, place: Place
    ) -> None:
        seconds = place.rest + 1.0  # so that the whole test runs while the name rests
        before = datetime.now(UTC)
        lease = client.lock(NAME, hold_at_least=seconds).acquire()
        until = inner(lease.leases[0]).granted_at + seconds - GRAIN
        assert lease.release()
        assert lease.state is LeaseState.RELEASED
        with pytest.raises(NotHeld):
            lease.renew()
        assert other.lock(NAME).try_acquire() is None
        assert client.lock(NAME).try_acquire() is None
        info = other.inspect(NAME)
        assert info is not None
        assert info.resting_until is not None
        assert info.resting_until >= before + timedelta(seconds=seconds - 0.1)
        assert info.owner == lease.owner
        assert NAME in [one.name for one in other.inspect_all() if one.resting_until]
        next_one = other.lock(NAME).acquire(timeout=place.rest_at_most + 2.0 + SOON)
        assert now() >= until
        assert next_one.token is None or next_one.token > (lease.token or 0)
        assert next_one.release()
        eventually(lambda: client.inspect(NAME) is None and place.leftovers() == [])

    def test_hold_at_least_may_be_longer_than_the_ttl(self, client: Client, other: Client, place: Place) -> None:
        until = self.rests_until(client, place, place.quick_ttl + place.rest)
        self.stays_taken(other, until)
        assert other.lock(NAME).try_acquire(timeout=2 * place.rest_at_most + SOON) is not None

    def test_a_release_after_hold_at_least_frees_the_name_at_once(self, client: Client, other: Client) -> None:
        lease = client.lock(NAME, hold_at_least=0.05).acquire()
        acquired_at = now()  # in a set of locks, the grant of the last lock counts
        eventually(lambda: now() >= acquired_at + 0.05)
        assert lease.release()
        info = other.inspect(NAME)
        assert info is None or info.resting_until is None
        assert other.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_a_waiter_gets_the_lock_when_hold_at_least_is_over(
        self, client: Client, other: Client, place: Place
    ) -> None:
        lease = client.lock(NAME, hold_at_least=place.rest).acquire()
        until = inner(lease.leases[0]).granted_at + place.rest - GRAIN
        waiting = background(lambda: other.lock(NAME).acquire(timeout=place.rest_at_most + 2 * SOON))
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        assert lease.release()
        assert waiting.result(place.rest_at_most + 2 * SOON).is_held()
        assert until <= now() <= until + place.rest_at_most - place.rest + SOON

    def test_a_released_name_rests_even_if_its_client_ends(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        first = make()
        until = self.rests_until(first, place, place.rest)
        first.close()
        self.stays_taken(other, until)

    def test_closing_the_client_of_a_held_lock_lets_the_name_rest(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        first = make()
        lease = first.lock(NAME, hold_at_least=place.rest).acquire()
        first.close()
        self.stays_taken(other, inner(lease.leases[0]).granted_at + place.rest - GRAIN)

    def test_a_force_release_ends_a_rest_and_reports_no_loss(self, client: Client, other: Client) -> None:
        losses = Recorder[object]()
        with client.lock(NAME, hold_at_least=60, on_lost=losses):
            pass
        waiting = background(lambda: other.lock(NAME).acquire(timeout=2 * SOON))
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        assert other.force_release(NAME)
        assert waiting.result(2 * SOON).is_held()
        assert losses.stays_at(0)

    def test_a_release_whose_reply_is_lost_still_lets_the_name_rest(
        self, client: Client, other: Client, place: Place
    ) -> None:
        mishap = place.drop_reply("release")
        until = self.rests_until(client, place, place.rest)
        mishap.wait(SOON)
        self.stays_taken(other, until)
        other.lock(NAME).acquire(timeout=2 * place.rest_at_most + SOON).release()
        eventually(lambda: place.leftovers() == [])

    def test_a_release_that_arrives_late_counts_the_rest_from_its_arrival(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        client = make(request_timeout=0.3)
        lease = client.lock(NAME, hold_at_least=place.rest + 2.0).acquire()
        until = inner(lease.leases[0]).granted_at + place.rest + 2.0 - GRAIN
        with place.silence():
            assert lease.release()
        self.stays_taken(other, until)
        assert other.lock(NAME).try_acquire(timeout=2 * place.rest_at_most + SOON + 4.0) is not None

    def test_a_lost_lease_leaves_no_rest(self, client: Client, other: Client, place: Place) -> None:
        losses = Recorder[object]()
        lease = client.lock(NAME, hold_at_least=60, on_lost=losses).acquire()
        place.delete(NAME)
        losses.wait(1, SOON + lease.ttl)
        assert not lease.release()
        assert other.lock(NAME).try_acquire(timeout=client.capabilities.lock_delay + SOON) is not None

    def test_no_candidate_is_elected_while_the_name_of_the_last_leader_rests(
        self, client: Client, other: Client, face: Face, place: Place
    ) -> None:
        begun: list[float] = []

        def work(leadership: Leadership) -> str:
            begun.append(leadership.granted_at)
            return "done"

        for each in (client, other):
            election = each.election("nightly", hold_at_least=place.rest)
            assert election.run(face.function(work)) == "done"
            assert election.leader() is None
        first, second = begun
        assert second >= first + place.rest - GRAIN

    def test_a_stopped_leader_leaves_no_rest(self, client: Client, other: Client) -> None:
        with client.election("nightly", hold_at_least=60) as election:
            eventually(election.is_leader)
        leadership = other.election("nightly").campaign(timeout=SOON + client.capabilities.lock_delay)
        assert leadership.is_held()

    def test_a_wrong_hold_at_least_raises_before_any_request(self, client: Client) -> None:
        for wrong in (-1.0, float("nan"), float("inf"), client.capabilities.ttl_max * 2):
            with pytest.raises(ValueError, match="hold_at_least"):
                client.lock(NAME, hold_at_least=wrong)
            with pytest.raises(ValueError, match="hold_at_least"):
                client.election(NAME, hold_at_least=wrong)
        with pytest.raises(TypeError, match="hold_at_least"):
            client.lock(NAME, hold_at_least=True)
        client.lock(NAME, hold_at_least=0)
