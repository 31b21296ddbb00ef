"""Tests of the local backends (memory and SQLite), on a clock that the test sets. Each backend has a subclass of
`Rules`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multilock import ConfigurationError
from multilock.backend import Backend
from multilock.model import Busy, Granted
from tests.backends.memory.askers import WITHIN, Asker, Clock

__all__ = ["Rules"]


class Rules:
    """The tests of one local backend. ``ask`` makes a further client of the store. ``leftovers`` lists the names and
    claims that are still in the store."""

    scheme: str
    open_backend: Callable[..., Backend]

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def ask(self, url: str, clock: Clock, request: pytest.FixtureRequest) -> Callable[..., Asker]:
        def ask(**options: object) -> Asker:
            asker = Asker(type(self).open_backend(url, options), clock)
            request.addfinalizer(asker.backend.close)
            return asker

        return ask

    @pytest.fixture
    def one(self, ask: Callable[..., Asker]) -> Asker:
        return ask()

    @pytest.fixture
    def two(self, ask: Callable[..., Asker]) -> Asker:
        return ask()

    def leftovers(self, asker: Asker) -> list[str]:
        raise NotImplementedError

    def test_second_claim_is_refused_and_notified_when_the_first_lease_ends(
        self, one: Asker, two: Asker, clock: Clock
    ) -> None:
        one.hold(one.claim(ttl=30))
        clock.advance(10)
        assert two.wait(two.claim()).expires_in == pytest.approx(20)

    def test_grant_counts_its_validity_from_its_request(self, one: Asker, clock: Clock) -> None:
        granted = one.hold(one.claim(ttl=30))
        assert (granted.sent_at, granted.valid_for, granted.ttl, granted.renew_every) == (clock.now, 30, 30, 10)

    @pytest.mark.oracle
    def test_repeated_attempt_gets_the_same_token_and_a_new_lease(self, one: Asker, two: Asker, clock: Clock) -> None:
        claim = one.claim(ttl=30)
        token = one.hold(claim).token
        clock.advance(20)
        assert one.hold(claim).token == token
        assert two.wait(two.claim()).expires_in == pytest.approx(30)

    @pytest.mark.oracle
    def test_refused_attempt_that_does_not_join_leaves_nothing(self, one: Asker, two: Asker) -> None:
        held = one.claim()
        granted = one.hold(held)
        assert isinstance(two.attempt(two.claim(fair=True), join=False), Busy)
        one.release(held, granted)
        assert self.leftovers(one) == []

    def test_release_and_cancel_leave_nothing_behind(self, one: Asker, two: Asker) -> None:
        held, waiting = one.claim(), two.claim()
        granted = one.hold(held)
        two.wait(waiting)
        assert one.release(held, granted) is True
        assert two.release(waiting) is False
        assert self.leftovers(one) == []

    def test_a_repeated_release_changes_nothing(self, one: Asker, two: Asker) -> None:
        first, second = one.claim(), two.claim()
        granted = one.hold(first)
        assert one.release(first, granted) is True
        two.hold(second)
        assert one.release(first, granted) is False
        assert isinstance(one.attempt(one.claim(), join=False), Busy)

    def test_ended_lease_is_free_for_others_and_is_not_revived(self, one: Asker, two: Asker, clock: Clock) -> None:
        first = one.claim(ttl=30)
        granted = one.hold(first)
        clock.advance(29.999)
        assert isinstance(two.attempt(two.claim(), join=False), Busy)
        clock.advance(0.001)
        assert one.renew((first, granted)) == [None]
        assert one.release(first, granted) is False
        assert isinstance(two.attempt(two.claim(), join=False), Granted)

    def test_renewal_returns_one_result_for_each_claim_in_order(self, one: Asker, clock: Clock) -> None:
        claims = [one.claim(name, ttl=ttl) for name, ttl in (("a", 30.0), ("b", 5.0), ("c", 30.0))]
        held = [(claim, one.hold(claim)) for claim in claims]
        clock.advance(6)
        first, second, third = one.renew(*held)
        assert (first, second, third) == (
            Granted(held[0][1].token, 30, clock.now, 30, 10, held[0][1].group),
            None,
            Granted(held[2][1].token, 30, clock.now, 30, 10, held[2][1].group),
        )

    @pytest.mark.oracle
    def test_tokens_grow_over_all_names_and_claims(self, one: Asker, two: Asker) -> None:
        tokens = []
        for asker, name in ((one, "a"), (two, "a"), (one, "b"), (two, "a")):
            claim = asker.claim(name)
            granted = asker.hold(claim)
            tokens.append(granted.token or 0)
            asker.release(claim, granted)
        assert tokens == sorted(set(tokens))

    def test_fair_waiters_are_served_in_the_order_of_their_arrival(self, one: Asker, two: Asker) -> None:
        held = one.claim()
        granted = one.hold(held)
        first, second = two.claim(fair=True), one.claim(fair=True)
        two.wait(first)
        one.wait(second)
        one.release(held, granted)
        one.wait(second)
        two.wait(two.claim(fair=True))
        granted = two.hold(first)
        two.release(first, granted)
        one.hold(second)

    def test_unfair_newcomer_does_not_overtake_a_fair_waiter(self, one: Asker, two: Asker) -> None:
        held, waiting = one.claim(), two.claim(fair=True)
        granted = one.hold(held)
        two.wait(waiting)
        one.release(held, granted)
        assert isinstance(one.attempt(one.claim(), join=False), Busy)
        two.hold(waiting)

    def test_unfair_newcomer_takes_a_free_name_before_an_unfair_waiter(self, one: Asker, two: Asker) -> None:
        held = one.claim()
        granted = one.hold(held)
        two.wait(two.claim())
        one.release(held, granted)
        one.hold(one.claim())

    def test_free_name_is_kept_for_a_silent_waiter_for_only_six_seconds(
        self, one: Asker, two: Asker, clock: Clock
    ) -> None:
        held, silent, next_ = one.claim(), two.claim(fair=True), one.claim(fair=True)
        granted = one.hold(held)
        two.wait(silent)
        one.release(held, granted)
        clock.advance(5.9)
        assert one.wait(next_).expires_in == pytest.approx(0.1)
        clock.advance(0.1)
        one.hold(next_)

    def test_heartbeats_keep_the_place_of_a_waiter(self, one: Asker, two: Asker, clock: Clock) -> None:
        held, early, late = one.claim(), two.claim(fair=True), one.claim(fair=True)
        granted = one.hold(held)
        two.wait(early)
        one.wait(late)
        for _ in range(5):
            clock.advance(2)
            two.wait(early)
        one.release(held, granted)
        one.wait(late)
        two.hold(early)

    def test_cancel_of_an_attempt_without_a_reply_is_final(self, one: Asker, clock: Clock) -> None:
        claim = one.claim(ttl=30)
        one.release(claim, unsure=True)
        clock.advance(59)
        assert isinstance(one.attempt(claim), Busy), "the attempt that was on its way took the name after its cancel"
        assert self.leftovers(one) in ([], [claim.id])
        one.hold(one.claim())

    def test_cancel_of_a_grant_without_a_reply_releases_it(self, one: Asker, two: Asker) -> None:
        claim = one.claim()
        one.hold(claim)
        assert one.release(claim, unsure=True) is True
        two.hold(two.claim())

    def test_force_release_takes_a_name_and_the_next_renewal_reports_it(self, one: Asker, two: Asker) -> None:
        claim = one.claim()
        granted = one.hold(claim)
        assert two.backend.force_release("n", WITHIN) is True
        assert two.backend.force_release("n", WITHIN) is False
        two.hold(two.claim())
        assert one.renew((claim, granted)) == [None]

    def test_inspection_shows_the_holder_and_counts_the_waiters(self, one: Asker, two: Asker) -> None:
        claim = one.claim(ttl=12)
        granted = one.hold(claim)
        two.wait(two.claim())
        two.wait(two.claim(fair=True))
        info = two.backend.inspect("n", WITHIN)
        assert info is not None
        assert (info.name, info.kind, info.owner, info.token) == ("n", "lock", claim.owner, granted.token)
        assert (info.identity, info.host, info.pid, info.ttl, info.waiting) == ("me", "host", 1, 12, 2)
        assert info.since is not None
        assert info.since.tzinfo is not None

    def test_ended_lease_is_not_shown(self, one: Asker, clock: Clock) -> None:
        one.hold(one.claim(ttl=30))
        clock.advance(30)
        assert one.backend.inspect("n", WITHIN) is None
        assert list(one.backend.inspect_all("", WITHIN)) == []

    def test_all_held_names_with_a_prefix_are_listed(self, one: Asker) -> None:
        for name in ("b/1", "a/2", "a/1", "a."):
            one.hold(one.claim(name))
        assert [info.name for info in one.backend.inspect_all("a/", WITHIN)] == ["a/1", "a/2"]

    def test_names_under_different_prefixes_are_independent(self, ask: Callable[..., Asker]) -> None:
        outer, inner = ask(prefix=""), ask(prefix="a/")
        outer.hold(outer.claim("a/b"))
        inner.hold(inner.claim("b"))
        assert [info.name for info in inner.backend.inspect_all("", WITHIN)] == ["b"]
        assert [info.name for info in outer.backend.inspect_all("", WITHIN)] == ["a/b"]

    def test_unknown_option_is_refused_with_a_list_of_the_known_options(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=r"tll.*ttl"):
            type(self).open_backend(url, {"tll": 3})
