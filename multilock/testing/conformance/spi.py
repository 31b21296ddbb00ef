"""Tests of the methods of a backend, without the kernel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator

import pytest

from multilock import LossReason, now
from multilock.backend import AttemptsMany, Backend, Rests
from multilock.model import Busy, Claim, Granted, Returned, owner_text
from multilock.testing.conformance.base import NAME, SOON, Conformance
from multilock.testing.conformance.faces import FACES, Face
from multilock.testing.conformance.places import Place

__all__ = ["BackendConformance", "Ear"]

WITHIN = 2.0


class Ear:
    """A `multilock.backend.Notices` that records all reports."""

    def __init__(self) -> None:
        self.client = os.urandom(8).hex()
        self.wakes: list[str | None] = []
        self.pushed: dict[str, Granted] = {}
        self.losses: list[tuple[str, LossReason]] = []
        self.down: dict[str, str] = {}  # push connections that are down, with the reason
        self.changes: list[str | None] = []
        self.sessions: list[Hashable] = []
        self._changed = threading.Condition()

    def now(self) -> float:
        """Return the clock."""
        return now()

    def wake(self, claim_id: str | None) -> None:
        """Record a wake-up."""
        self._tell(lambda: self.wakes.append(claim_id))

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        """Record a loss."""
        self._tell(lambda: self.losses.append((claim_id, reason)))

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        """Record a session."""
        self._tell(lambda: self.sessions.append(group))

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        """Ignore it."""

    def group_gone(self, group: Hashable, message: str) -> None:
        """Forget a session."""
        self._tell(lambda: self.sessions.remove(group))

    def silent(self, group: Hashable) -> None:
        """Ignore it."""

    def granted(self, claim_id: str, granted: Granted) -> None:
        """Record a pushed grant. Record a wake-up as well, because a client may ignore the grant."""
        self.pushed[claim_id] = granted
        self.wake(claim_id)

    def changed(self, name: str | None) -> None:
        """Record a change of holder."""
        self._tell(lambda: self.changes.append(name))

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        """Record whether a push connection is down."""
        self._tell(
            lambda: self.down.pop(connection, None) if trouble is None else self.down.update({connection: trouble})
        )

    def wait(self, ready: object, within: float = SOON) -> bool:
        """Wait until ``ready()`` is true, and check it after each report. Return whether it is true."""
        assert callable(ready)
        with self._changed:
            return bool(self._changed.wait_for(ready, within))

    def claim(self, name: str = NAME, *, ttl: float = 10.0, fair: bool = False, renew: bool = True) -> Claim:
        """Return a new claim."""
        claim_id = f"{self.client}.{os.urandom(16).hex()}"
        owner = owner_text(claim_id, "lock", "host", os.getpid(), "conformance", ttl)
        return Claim(name, "lock", claim_id, owner, ttl, renew, fair, "conformance")

    def _tell(self, act: object) -> None:
        assert callable(act)
        with self._changed:
            act()
            self._changed.notify_all()


class BackendConformance(Conformance):
    """Tests of the methods of a backend."""

    @pytest.fixture(params=["blocking"])
    def face(self, request: pytest.FixtureRequest) -> Face:
        """These tests use neither the blocking nor the asyncio API, so they run only once."""
        return FACES[request.param]()

    @pytest.fixture
    def ear(self) -> Ear:
        """The recorder of reports."""
        return Ear()

    @pytest.fixture
    def backend_(self, place: Place, ear: Ear) -> Iterator[Backend]:
        """The backend under test, opened."""
        backend = place.backend()
        backend.open(ear)
        yield backend
        backend.close()

    @pytest.fixture
    def ttl(self, backend_: Backend, place: Place) -> float:
        """A short ttl that the backend grants."""
        can = backend_.capabilities
        return max(place.quick_ttl, can.ttl_min if can.ttl_floor is None else can.ttl_floor)

    def test_the_validity_of_a_grant_counts_from_the_sending_of_its_request(self, backend_: Backend, ear: Ear) -> None:
        before = now()
        granted = take(backend_, ear.claim())
        assert before <= granted.sent_at <= now()
        assert 0 < granted.valid_for <= granted.ttl
        assert 0 < granted.renew_every < granted.valid_for
        assert granted.ttl >= 10

    def test_the_validity_counts_from_the_sending_even_if_replies_are_late(self, place: Place, ear: Ear) -> None:
        late = 0.3
        slow = place.slow_answers(late)
        if slow is None:
            pytest.skip("the replies of this backend cannot be late")
        with slow as backend:
            backend.open(ear)
            try:
                claim = ear.claim()
                granted = backend.attempt(claim, False, 20 * late)
                assert isinstance(granted, Granted)
                assert granted.sent_at <= now() - late
                [renewed] = backend.renew(granted.group, [(claim, granted)], 20 * late)
                assert isinstance(renewed, Granted)
                assert granted.sent_at <= renewed.sent_at <= now() - late
                backend.release(claim, renewed, False, 20 * late)
            finally:
                backend.close()

    def test_a_taken_name_returns_busy(self, backend_: Backend, ear: Ear) -> None:
        take(backend_, ear.claim())
        busy = backend_.attempt(ear.claim(), False, WITHIN)
        assert isinstance(busy, Busy)
        assert busy.heartbeat > 0

    def test_a_repeated_attempt_with_the_same_id_is_the_same_attempt(self, backend_: Backend, ear: Ear) -> None:
        claim = ear.claim()
        first, again = take(backend_, claim), take(backend_, claim)
        assert again.token == first.token
        assert backend_.release(claim, again, False, WITHIN).ours is True
        assert isinstance(backend_.attempt(ear.claim(), False, WITHIN), Granted)

    def test_a_refused_attempt_that_does_not_join_the_queue_leaves_nothing(
        self, backend_: Backend, ear: Ear, place: Place
    ) -> None:
        holder = ear.claim()
        granted = take(backend_, holder)
        refused = ear.claim()
        answer = backend_.attempt(refused, False, WITHIN)
        assert isinstance(answer, Busy)
        if answer.spent:  # the claim left something at the server, which must be cancelled
            give_back(backend_, refused, None, unsure=True)
        give_back(backend_, holder, granted, unsure=False)
        assert backend_.inspect(NAME, WITHIN) is None
        assert place.leftovers() == []

    def test_release_affects_no_other_claim(self, backend_: Backend, ear: Ear) -> None:
        holder, stranger = ear.claim(), ear.claim()
        granted = take(backend_, holder)
        for unsure in (False, True):
            assert backend_.release(stranger, None, unsure, WITHIN).ours is False
        info = backend_.inspect(NAME, WITHIN)
        assert info is not None
        assert info.owner == holder.owner
        [renewed] = backend_.renew(granted.group, [(holder, granted)], WITHIN)
        assert isinstance(renewed, Granted)

    def test_a_repeated_release_reports_that_the_claim_was_not_held(self, backend_: Backend, ear: Ear) -> None:
        claim = ear.claim()
        granted = take(backend_, claim)
        assert until_told(lambda: backend_.release(claim, granted, False, WITHIN)) is True
        assert until_told(lambda: backend_.release(claim, granted, False, WITHIN)) is False

    def test_a_resting_name_is_neither_revived_nor_extended(self, backend_: Backend, ear: Ear, place: Place) -> None:
        if not backend_.capabilities.hold_at_least:
            pytest.skip("declared: names cannot rest")
        assert isinstance(backend_, Rests)
        claim = ear.claim()
        granted = take(backend_, claim)
        assert until_told(lambda: backend_.rest(claim, granted, True, place.rest, WITHIN)) is True
        until = now() + place.rest_at_most
        # sent again, as if the reply to the first request were lost; this must not prolong the rest
        late = until_told(lambda: backend_.rest(claim, granted, True, 60.0, WITHIN))
        assert late is True
        assert backend_.renew(granted.group, [(claim, granted)], WITHIN) == [None]
        assert isinstance(backend_.attempt(claim, True, WITHIN), Busy)
        assert backend_.rest(ear.claim(), granted, False, 0.01, WITHIN).ours is False
        assert backend_.release(claim, granted, False, WITHIN).ours is False
        info = backend_.inspect(NAME, WITHIN)
        assert info is not None
        assert info.resting_until is not None
        while isinstance(backend_.attempt(ear.claim(), False, WITHIN), Busy):
            assert now() < until + SOON
            time.sleep(0.02)

    def test_a_claim_that_is_no_longer_held_does_not_rest(self, backend_: Backend, ear: Ear, place: Place) -> None:
        if not backend_.capabilities.hold_at_least:
            pytest.skip("declared: names cannot rest")
        assert isinstance(backend_, Rests)
        claim = ear.claim()
        granted = take(backend_, claim)
        place.delete(NAME)
        assert backend_.rest(claim, granted, False, 60.0, WITHIN).ours is False
        assert backend_.inspect(NAME, WITHIN) is None

    def test_attempts_that_are_sent_together_are_answered_one_by_one(self, backend_: Backend, ear: Ear) -> None:
        if not isinstance(backend_, AttemptsMany):
            pytest.skip("this backend sends each attempt by itself")
        first, second, cancelled = (ear.claim() for _ in range(3))
        elsewhere = ear.claim(f"{NAME}-2")
        backend_.release(cancelled, None, True, WITHIN)
        for _ in range(2):  # the second attempts are heartbeats, or confirm a grant
            answers = backend_.attempt_all([first, second, cancelled, elsewhere], WITHIN)
            assert [type(answer) for answer in answers] == [Granted, Busy, Busy, Granted]
        held = answers[0]
        assert isinstance(held, Granted)
        backend_.release(first, held, False, WITHIN)
        assert ear.wait(lambda: second.id in ear.wakes)
        assert isinstance(backend_.attempt_all([second], WITHIN)[0], Granted)

    def test_a_cancel_also_stops_a_request_that_arrives_later(self, backend_: Backend, ear: Ear) -> None:
        claim = ear.claim()
        backend_.release(claim, None, True, WITHIN)
        assert isinstance(backend_.attempt(claim, True, WITHIN), Busy)
        assert isinstance(backend_.attempt(ear.claim(), False, WITHIN), Granted)

    def test_a_cancelled_waiter_never_gets_the_lock(self, backend_: Backend, ear: Ear) -> None:
        holder, waiter = ear.claim(), ear.claim()
        granted = take(backend_, holder)
        backend_.attempt(waiter, True, WITHIN)
        backend_.release(waiter, None, False, WITHIN)
        backend_.release(holder, granted, False, WITHIN)
        assert backend_.inspect(NAME, WITHIN) is None

    def test_only_a_reply_or_a_push_with_the_same_id_makes_a_waiter_the_holder(
        self, backend_: Backend, ear: Ear
    ) -> None:
        holder, waiter = ear.claim(), ear.claim()
        begun = now()
        granted = take(backend_, holder)
        asked = now()
        assert isinstance(backend_.attempt(waiter, True, WITHIN), Busy)
        answered = now()
        backend_.release(holder, granted, False, WITHIN)
        if backend_.capabilities.push_wait:
            assert ear.wait(lambda: ear.wakes)
            assert set(ear.wakes) <= {waiter.id, None}
        pushed = ear.pushed.get(waiter.id)
        if pushed:
            # The validity never counts from the arrival of the push. If both claims have one session, the session may
            # have been renewed before the waiter's request.
            assert (begun if ear.sessions else asked) - 0.001 <= pushed.sent_at <= answered
            assert pushed.valid_for <= waiter.ttl
            [renewed] = backend_.renew(pushed.group, [(waiter, pushed)], WITHIN)
            assert isinstance(renewed, Granted)
            assert renewed.token == pushed.token
            since = renewed.sent_at
        else:
            since = now()
        granted = take(backend_, waiter)
        # For a session the last renewal counts. For a short grant one of several servers may reply to a request that it
        # received before the renewal.
        assert granted.sent_at >= (asked if granted.short else since) - 0.001 or ear.sessions
        if pushed:
            assert (granted.token, granted.key) == (pushed.token, pushed.key)

    def test_fair_waiters_are_served_in_order_of_arrival(self, backend_: Backend, ear: Ear) -> None:
        if not backend_.capabilities.fair:
            pytest.skip("declared: no order")
        holder = ear.claim()
        granted = take(backend_, holder)
        waiters = [ear.claim(fair=True) for _ in range(3)]
        for waiter in waiters:
            assert isinstance(backend_.attempt(waiter, True, WITHIN), Busy)
        for waiter in waiters:
            backend_.release(holder, granted, False, WITHIN)
            for other in waiters[waiters.index(waiter) + 1 :]:
                assert isinstance(backend_.attempt(other, True, WITHIN), Busy)
            holder, granted = waiter, take(backend_, waiter)

    def test_renew_returns_one_result_for_each_claim_in_order(self, backend_: Backend, ear: Ear, place: Place) -> None:
        claims = [ear.claim(name) for name in ("a", "b", "c")]
        held = [(claim, take(backend_, claim)) for claim in claims]
        place.delete("b")
        before = now()
        answers = [
            answer
            for group in dict.fromkeys(granted.group for _, granted in held)
            for answer in backend_.renew(group, [pair for pair in held if pair[1].group == group], WITHIN)
        ]
        assert [answer is not None for answer in answers] == [True, False, True]
        assert all(answer.sent_at >= before for answer in answers if isinstance(answer, Granted))

    def test_renew_never_acquires_a_lost_name(self, backend_: Backend, ear: Ear, place: Place) -> None:
        claim = ear.claim()
        granted = take(backend_, claim)
        place.delete(NAME)
        next_claim = ear.claim()
        take(backend_, next_claim)
        assert list(backend_.renew(granted.group, [(claim, granted)], WITHIN)) == [None]
        assert backend_.release(claim, granted, False, WITHIN).ours is False
        info = backend_.inspect(NAME, WITHIN)
        assert info is not None
        assert info.owner == next_claim.owner

    def test_a_claim_that_is_not_renewed_ends_by_itself(self, backend_: Backend, ear: Ear, ttl: float) -> None:
        claim = ear.claim(ttl=ttl, renew=False)
        granted = take(backend_, claim)
        next_claim = ear.claim()
        until = now() + backend_.capabilities.takeover_bound + granted.ttl
        while isinstance(backend_.attempt(next_claim, False, WITHIN), Busy):
            assert now() < until
            time.sleep(0.01)
        assert now() >= granted.sent_at + granted.valid_for
        assert list(backend_.renew(granted.group, [(claim, granted)], WITHIN)) == [None]

    def test_a_lost_claim_is_reported_if_the_backend_pushes_losses(
        self, backend_: Backend, ear: Ear, place: Place
    ) -> None:
        if not backend_.capabilities.push_loss:
            pytest.skip("declared: only the next renewal notices a loss")
        claim, early = ear.claim(), ear.claim("early")
        granted, early_granted = take(backend_, claim), take(backend_, early)
        place.delete("early")
        backend_.watch(granted.group, [(claim, granted)], WITHIN)
        backend_.watch(early_granted.group, [(early, early_granted)], WITHIN)
        assert ear.wait(lambda: early.id in dict(ear.losses))
        place.delete(NAME)
        assert ear.wait(lambda: claim.id in dict(ear.losses))

    def test_a_released_claim_is_never_reported_lost(self, backend_: Backend, ear: Ear) -> None:
        claim = ear.claim()
        granted = take(backend_, claim)
        backend_.watch(granted.group, [(claim, granted)], WITHIN)
        backend_.release(claim, granted, False, WITHIN)
        take(backend_, ear.claim())
        assert not ear.wait(lambda: ear.losses, 0.2)

    def test_a_followed_name_is_reported_when_its_holder_changes(
        self, backend_: Backend, ear: Ear, place: Place
    ) -> None:
        if not backend_.follow(frozenset({NAME}), WITHIN):
            return  # the kernel polls
        ear.changes.clear()  # forget reports about the present holder
        claim = ear.claim()
        granted = take(backend_, claim)
        assert ear.wait(lambda: ear.changes)
        assert set(ear.changes) <= {NAME, None}
        ear.changes.clear()
        backend_.release(claim, granted, False, WITHIN)
        assert ear.wait(lambda: ear.changes)

    def test_force_release_takes_the_name_from_each_holder(self, backend_: Backend, ear: Ear) -> None:
        assert backend_.force_release(NAME, WITHIN) is False
        claim = ear.claim()
        granted = take(backend_, claim)
        assert backend_.force_release(NAME, WITHIN) is True
        assert list(backend_.renew(granted.group, [(claim, granted)], WITHIN)) == [None]

    def test_tokens_grow_with_every_grant(self, backend_: Backend, ear: Ear) -> None:
        tokens: list[int] = []
        for _ in range(5):
            claim = ear.claim()
            granted = take(backend_, claim)
            assert (granted.token is not None) == backend_.capabilities.fencing
            tokens.append(granted.token or len(tokens))
            backend_.release(claim, granted, False, WITHIN)
        assert tokens == sorted(set(tokens))

    def test_a_backend_can_be_opened_again(self, backend_: Backend, ear: Ear) -> None:
        """A forked child opens its backend again."""
        take(backend_, ear.claim())
        child = Ear()
        backend_.open(child)
        assert isinstance(backend_.attempt(child.claim(), False, WITHIN), Busy)
        take(backend_, child.claim("another"))
        backend_.ping(WITHIN)

    def test_closing_twice_is_harmless_and_the_capabilities_stay(self, place: Place, ear: Ear) -> None:
        backend = place.backend()
        backend.open(ear)
        facts = backend.scheme, backend.capabilities
        backend.close()
        backend.close()
        assert (backend.scheme, backend.capabilities) == facts


def give_back(backend: Backend, claim: Claim, granted: Granted | None, *, unsure: bool) -> None:
    """Release as the kernel does: repeatedly, until no server has any part of the claim."""
    while backend.release(claim, granted, unsure, WITHIN).again:
        unsure = True
        time.sleep(0.01)


def until_told(tell: Callable[[], Returned]) -> bool:
    """Call ``tell`` until no server has any part of the claim, as the kernel does.

    Returns whether the claim held the name when it was released.
    """
    deadline = now() + WITHIN
    while (returned := tell()).again:
        assert now() < deadline
        time.sleep(0.01)
    return returned.ours


def take(backend: Backend, claim: Claim) -> Granted:
    """Attempt until the claim holds its name."""
    granted = backend.attempt(claim, False, WITHIN)
    if isinstance(granted, Busy):  # the claim may be granted a moment later
        granted = backend.attempt(claim, True, WITHIN)
    assert isinstance(granted, Granted), granted
    return granted
