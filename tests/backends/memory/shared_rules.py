"""Tests of readers and permits on the local backends (memory and SQLite), on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multilock import BackendRejected
from multilock.model import Busy, Claim, Granted
from tests.backends.memory.askers import WITHIN, Asker, Clock
from tests.backends.memory.rules import Rules

__all__ = ["SharedRules"]

KINDS: list[Callable[[Asker], Claim]] = [
    Asker.claim,
    Asker.writer,
    Asker.reader,
    lambda asker: asker.permit(2),
    lambda asker: asker.permit(1),
]
NAMES = ["lock", "write", "read", "two permits", "one permit"]
each_kind = pytest.mark.parametrize("make", KINDS, ids=NAMES)


class SharedRules(Rules):
    # Claims that exclude each other

    @pytest.mark.parametrize("first", KINDS, ids=NAMES)
    @pytest.mark.parametrize("second", KINDS, ids=NAMES)
    def test_only_equal_modes_hold_together_and_every_other_pair_excludes(
        self, one: Asker, two: Asker, first: Callable[[Asker], Claim], second: Callable[[Asker], Claim]
    ) -> None:
        held, asked = first(one), second(two)
        one.hold(held)
        if 0 != held.permits != asked.permits != 0:
            with pytest.raises(BackendRejected):
                two.attempt(asked, join=False)
        else:
            together = held.mode == asked.mode and held.mode in ("r", "p2")
            assert isinstance(two.attempt(asked, join=False), Granted if together else Busy)

    def test_there_are_never_more_holders_than_permits(self, one: Asker, two: Asker) -> None:
        claims = [one.permit(3), two.permit(3), one.permit(3)]
        held = [(claim, one.hold(claim)) for claim in claims]
        late = two.permit(3)
        two.wait(late)
        one.release(*held[1])
        two.hold(late)
        assert isinstance(two.attempt(two.permit(3), join=False), Busy)

    def test_released_reader_leaves_the_other_readers(self, one: Asker, two: Asker) -> None:
        leaving, staying = one.reader(), two.reader()
        held, granted = one.hold(leaving), two.hold(staying)
        assert one.release(leaving, held) is True
        assert two.renew((staying, granted)) != [None]
        assert isinstance(one.attempt(one.claim(), join=False), Busy)

    def test_each_holder_has_a_lease_of_its_own(self, one: Asker, two: Asker, clock: Clock) -> None:
        dead, alive = one.reader(ttl=30), two.reader(ttl=30)
        gone, kept = one.hold(dead), two.hold(alive)
        clock.advance(20)
        assert two.renew((alive, kept)) != [None]
        clock.advance(10)
        assert one.renew((dead, gone)) == [None]
        assert one.release(dead, gone) is False
        assert two.renew((alive, kept)) != [None]
        assert isinstance(one.attempt(one.claim(), join=False), Busy)

    def test_writer_is_notified_when_the_last_reader_ends_and_enters_then(
        self, one: Asker, two: Asker, clock: Clock
    ) -> None:
        one.hold(one.reader(ttl=30))
        one.hold(one.reader(ttl=10))
        writer = two.writer()
        assert two.wait(writer).expires_in == pytest.approx(30)
        clock.advance(29.999)
        two.wait(writer)
        clock.advance(0.001)
        two.hold(writer)

    def test_waiter_is_notified_when_the_first_permit_ends_and_enters_then(
        self, one: Asker, two: Asker, clock: Clock
    ) -> None:
        one.hold(one.permit(2, ttl=30))
        one.hold(one.permit(2, ttl=10))
        late = two.permit(2)
        assert two.wait(late).expires_in == pytest.approx(10)
        clock.advance(10)
        two.hold(late)

    @pytest.mark.oracle
    def test_later_grant_of_any_mode_has_a_greater_token(self, one: Asker, two: Asker) -> None:
        tokens = []
        for claims in ([one.reader(), two.reader()], [one.writer()], [one.permit(2), two.permit(2)], [two.claim()]):
            held = [(claim, one.hold(claim)) for claim in claims]
            tokens += [granted.token or 0 for _, granted in held]
            for claim, granted in held:
                one.release(claim, granted)
        assert tokens == sorted(set(tokens))

    @pytest.mark.oracle
    def test_repeated_attempt_of_a_reader_gets_the_same_token_and_no_second_place(self, one: Asker, two: Asker) -> None:
        claim = one.permit(2)
        assert one.hold(claim).token == one.hold(claim).token
        two.hold(two.permit(2))
        assert isinstance(two.attempt(two.permit(2), join=False), Busy)

    # Order

    def test_waiting_writer_is_overtaken_by_no_reader_and_by_no_single_try(self, one: Asker, two: Asker) -> None:
        reader, writer, late = one.reader(), two.writer(), one.reader()
        granted = one.hold(reader)
        two.wait(writer)
        assert isinstance(one.attempt(one.reader(), join=False), Busy)
        one.wait(late)
        one.release(reader, granted)
        one.wait(late)
        granted = two.hold(writer)
        two.release(writer, granted)
        one.hold(late)

    def test_readers_behind_one_writer_enter_together_in_any_order(self, one: Asker, two: Asker) -> None:
        writer, readers = one.writer(), [two.reader() for _ in range(3)]
        granted = one.hold(writer)
        for reader in readers:
            two.wait(reader)
        one.release(writer, granted)
        for reader in reversed(readers):
            two.hold(reader)

    def test_writer_does_not_overtake_a_reader_that_waited_longer(self, one: Asker, two: Asker) -> None:
        first, reader, second = one.writer(), two.reader(), one.writer()
        granted = one.hold(first)
        two.wait(reader)
        one.wait(second)
        one.release(first, granted)
        one.wait(second)
        two.hold(reader)

    def test_unfair_lock_does_not_overtake_a_waiting_reader_but_takes_a_free_name_first(
        self, one: Asker, two: Asker
    ) -> None:
        held, reader = one.writer(), two.reader()
        granted = one.hold(held)
        two.wait(reader)
        one.wait(one.claim())
        one.release(held, granted)
        assert isinstance(one.attempt(one.claim(), join=False), Busy)
        two.hold(reader)

    def test_reader_waits_behind_an_unfair_lock_as_behind_a_fair_one(self, one: Asker, two: Asker) -> None:
        held, mutex, late = one.reader(), two.claim(), one.reader()
        granted = one.hold(held)
        two.wait(mutex)
        one.wait(late)
        one.release(held, granted)
        one.wait(late)
        two.hold(mutex)

    def test_permits_are_kept_for_earlier_waiters(self, one: Asker, two: Asker) -> None:
        held = [(claim, one.hold(claim)) for claim in (one.permit(2), one.permit(2))]
        first, second = two.permit(2), two.permit(2)
        two.wait(first)
        two.wait(second)
        one.release(*held[0])
        assert isinstance(one.attempt(one.permit(2), join=False), Busy)
        two.wait(second)
        two.hold(first)
        one.release(*held[1])
        two.hold(second)

    def test_waiting_writer_that_leaves_or_dies_blocks_no_reader(self, one: Asker, two: Asker, clock: Clock) -> None:
        one.hold(one.reader(ttl=300))
        leaving, first = two.writer(), one.reader()
        two.wait(leaving)
        one.wait(first)
        two.release(leaving)
        one.hold(first)
        dying, second = two.writer(), one.reader()
        two.wait(dying)
        one.wait(second)
        clock.advance(5.9)
        assert one.wait(second).expires_in == pytest.approx(0.1)
        clock.advance(0.1)
        one.hold(second)

    # The number of permits

    @pytest.mark.oracle
    def test_a_different_number_of_permits_is_refused_at_once_and_leaves_nothing(self, one: Asker, two: Asker) -> None:
        held = one.permit(3)
        granted = one.hold(held)
        with pytest.raises(BackendRejected, match="has 3 permits here, but 5 were requested: use the same number"):
            two.attempt(two.permit(5))
        assert one.release(held, granted) is True
        assert self.leftovers(one) == []
        two.hold(two.permit(5))

    def test_a_waiter_refused_for_its_number_of_permits_blocks_no_other(self, one: Asker, two: Asker) -> None:
        held, first, odd, last = one.writer(), one.permit(3), two.permit(5), one.permit(3)
        granted = one.hold(held)
        one.wait(first)
        two.wait(odd)
        one.wait(last)
        one.release(held, granted)
        one.hold(first)
        with pytest.raises(BackendRejected):
            two.attempt(odd)
        one.hold(last)

    def test_a_semaphore_of_one_permit_excludes_and_refuses_a_different_number(self, one: Asker, two: Asker) -> None:
        one.hold(one.permit(1))
        assert isinstance(two.attempt(two.permit(1), join=False), Busy)

    # Cancel, force, inspection

    @each_kind
    def test_cancel_is_final_for_each_mode(self, one: Asker, two: Asker, make: Callable[[Asker], Claim]) -> None:
        claim = make(one)
        one.release(claim, unsure=True)
        assert isinstance(one.attempt(claim), Busy), "the attempt that was on its way took the name after its cancel"
        two.hold(two.claim())

    @each_kind
    def test_release_and_cancel_leave_nothing_for_any_mode(
        self, one: Asker, two: Asker, make: Callable[[Asker], Claim]
    ) -> None:
        held, waiting = make(one), two.writer()
        granted = one.hold(held)
        two.wait(waiting)
        assert one.release(held, granted) is True
        assert one.release(held, granted) is False
        assert two.release(waiting) is False
        assert self.leftovers(one) == []

    def test_force_release_removes_all_holders_and_keeps_the_waiters(self, one: Asker, two: Asker) -> None:
        readers = [one.reader(), one.reader()]
        held = [(reader, one.hold(reader)) for reader in readers]
        writer = two.writer()
        two.wait(writer)
        assert two.backend.force_release("n", WITHIN) is True
        assert one.renew(*held) == [None, None]
        two.hold(writer)

    def test_resting_reader_blocks_a_writer_but_no_reader(self, one: Asker, two: Asker, clock: Clock) -> None:
        reader = one.reader(ttl=30)
        granted = one.hold(reader)
        assert one.backend.rest(reader, granted, False, 40.0, WITHIN).ours is True  # type: ignore[attr-defined]
        assert one.renew((reader, granted)) == [None]
        assert two.wait(two.writer()).expires_in == pytest.approx(40)
        clock.advance(39.9)
        info = two.backend.inspect("n", WITHIN)
        assert info is not None
        assert info.resting_until is not None
        clock.advance(0.1)
        two.hold(two.reader())

    def test_inspection_shows_the_oldest_holder_the_count_and_the_other_holders(
        self, one: Asker, two: Asker, clock: Clock
    ) -> None:
        claims = []
        for _ in range(3):
            claims.append(one.permit(5))
            one.hold(claims[-1])
            clock.advance(1)
        two.wait(two.claim())
        info = two.backend.inspect("n", WITHIN)
        assert info is not None
        assert (info.kind, info.owner, info.holders, info.permits) == ("permit", claims[0].owner, 3, 5)
        assert info.waiting == 1
        assert [other.owner for other in info.others] == [claim.owner for claim in claims[1:]]
        assert {other.name for other in info.others} == {"n"}
        [listed] = two.backend.inspect_all("", WITHIN)
        assert (listed.owner, listed.holders, listed.others) == (info.owner, 3, ())

    def test_inspection_of_many_holders_shows_a_hundred_of_them(self, one: Asker) -> None:
        for _ in range(103):
            one.hold(one.reader())
        info = one.backend.inspect("n", WITHIN)
        assert info is not None
        assert (info.holders, info.permits, len(info.others)) == (103, None, 99)

    def test_inspection_of_a_plain_lock_lists_no_holders(self, one: Asker) -> None:
        one.hold(one.writer())
        info = one.backend.inspect("n", WITHIN)
        assert info is not None
        assert (info.kind, info.holders, info.permits, info.others) == ("write", None, None, ())
