"""The count of keys ahead of a waiter, without a server: which deletions reduce it, and when it proves nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from multilock.backend import Claim
from multilock.model import owner_text
from multilock_etcd import counting
from multilock_etcd.counting import Countdown, Deletion, Outcome, Standing, Verdict
from multilock_etcd.keys import Keyspace
from multilock_etcd.places import Place
from multilock_etcd.sessions import Session

KEYS = Keyspace("p/")
ID = "f" * 32
FIRST, LOOK, GONE = Outcome.FIRST, Outcome.LOOK, Outcome.GONE


def standing(
    kind: str = "lock", *others: str, like: Sequence[str] = (), permits: int = 0, revision: int = 10, at: int = 10
) -> Standing:
    """Make a waiter behind these keys, or behind ``one``."""
    claim_id = f"{os.urandom(8).hex()}.{ID}"
    owner = owner_text(claim_id, kind, "host", os.getpid(), "me", 60.0)
    place = Place(claim := Claim("job", kind, claim_id, owner, 60.0, True, True, "me", permits))
    place.revision, place.session = revision, Session(1, 60.0, 0.0)
    ahead = others or ("one",)
    return Standing(claim, place, KEYS.own(claim), map(key, ahead), map(key, like), max(1, permits), at)


def key(of: str) -> bytes:
    return b"p/job/" + of.encode()


def gone(revision: int, of: str = "one") -> Deletion:
    return Deletion(key(of), revision)


def told(verdicts: Sequence[Verdict]) -> list[tuple[Standing, Outcome]]:
    return [(verdict.standing, verdict.outcome) for verdict in verdicts]


@pytest.fixture
def countdown() -> Countdown:
    """Return the countdown of a watch that begins after revision 10."""
    countdown = Countdown(KEYS.queue("job"))
    countdown.begins(10)
    return countdown


def test_a_waiter_is_told_once_when_nobody_is_ahead(countdown: Countdown) -> None:
    waiting = standing("lock", "one", "two")
    assert countdown.enter(waiting) == []
    assert countdown.hear([gone(11)]) == []
    assert told(countdown.hear([gone(12, "two")])) == [(waiting, FIRST)]
    assert countdown.hear([gone(13)]) == []


def test_what_is_told_again_lets_nobody_in_and_hides_nobody(countdown: Countdown) -> None:
    waiting = standing("lock", "one", "two", "three")
    countdown.enter(waiting)
    first, second = gone(11), gone(12, "two")
    assert countdown.hear([first]) == []
    assert countdown.hear([first, second]) == []
    assert countdown.hear([first]) == []
    assert told(countdown.hear([second, gone(13, "three")])) == [(waiting, FIRST)]


def test_a_repeated_notification_is_not_counted_for_later_waiters(countdown: Countdown) -> None:
    countdown.hear([gone(11), gone(12, "two")])
    countdown.hear([gone(11), gone(12, "two")])
    late = standing("lock", "two", "three", revision=11, at=11)
    assert countdown.enter(late) == []
    assert countdown.hear([gone(11), gone(12, "two")]) == []
    assert told(countdown.hear([gone(13, "three")])) == [(late, FIRST)]


def test_what_is_told_again_makes_the_memory_no_longer(countdown: Countdown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "REMEMBERED", 2)
    countdown.hear([gone(11), gone(12), gone(13), gone(14)])
    countdown.hear([gone(11), gone(12), gone(13)])
    late = standing(at=11)
    assert told(countdown.enter(late)) == [(late, LOOK)]


def test_a_later_waiter_is_never_counted(countdown: Countdown) -> None:
    countdown.enter(standing())
    assert countdown.hear([gone(12, "newcomer")]) == []


def test_all_waiters_are_told_by_the_one_watch(countdown: Countdown) -> None:
    first, second = standing(), standing("lock", "one", "first", revision=11, at=11)
    countdown.enter(first)
    countdown.enter(second)
    assert told(countdown.hear([gone(12)])) == [(first, FIRST)]
    assert told(countdown.hear([gone(13, "first")])) == [(second, FIRST)]


def test_a_later_waiter_gets_only_the_watch_events_since_its_count(
    countdown: Countdown,
) -> None:
    countdown.hear([gone(11), gone(13, "two")])
    late = standing("lock", "one", "two", revision=12, at=12)  # the holder of key one has joined again
    assert countdown.enter(late) == []
    in_time = standing("lock", "two", revision=12, at=12)
    assert told(countdown.enter(in_time)) == [(in_time, FIRST)]
    assert told(countdown.hear([gone(14)])) == [(late, FIRST)]


def test_a_member_that_is_behind_tells_what_was_not_there_when_it_counted_and_that_does_not_count() -> None:
    countdown = Countdown(KEYS.queue("job"))
    countdown.enter(standing(revision=12, at=12))
    assert countdown.begins(8) == []
    assert countdown.hear([gone(9)]) == []
    assert countdown.hear([gone(12), gone(13, "newcomer")]) == []
    [verdict] = countdown.hear([gone(14)])
    assert verdict.outcome is FIRST


def test_a_waiter_that_counted_before_the_watch_began_must_look() -> None:
    countdown = Countdown(KEYS.queue("job"))
    early, in_time = standing(at=10), standing(revision=11, at=11)
    countdown.enter(early)
    countdown.enter(in_time)
    assert told(countdown.begins(11)) == [(early, LOOK)]
    assert told(countdown.enter(again := standing(at=10))) == [(again, LOOK)]
    assert told(countdown.hear([gone(12)])) == [(in_time, FIRST)]


def test_a_waiter_that_counted_before_the_remembered_events_must_look(
    countdown: Countdown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "REMEMBERED", 2)
    for revision, of in (11, "one"), (12, "two"), (13, "three"):
        countdown.hear([gone(revision, of)])
    late, in_time = standing(at=10), standing("lock", "two", "three", "four", at=11)
    assert told(countdown.enter(late)) == [(late, LOOK)]
    assert countdown.enter(in_time) == []
    assert told(countdown.hear([gone(14, "four")])) == [(in_time, FIRST)]


@pytest.mark.parametrize("together", [11, 12])
def test_whose_own_key_was_deleted_is_not_first_whoever_went_in_the_same_revision_or_answer(
    countdown: Countdown, together: int
) -> None:
    waiting = standing()
    countdown.enter(waiting)
    own = Deletion(waiting.own, together)
    assert told(countdown.hear([gone(11), own])) == [(waiting, LOOK)]


def test_the_own_key_of_a_claim_that_was_first_is_listened_to(countdown: Countdown) -> None:
    waiting = standing()
    countdown.enter(waiting)
    assert told(countdown.hear([gone(11)])) == [(waiting, FIRST)]
    assert countdown
    [verdict] = countdown.hear([Deletion(waiting.own, 12)])
    assert verdict == (waiting, GONE, 12)
    assert not countdown


def test_a_claim_that_was_first_is_no_longer_listened_to_once_it_leaves(countdown: Countdown) -> None:
    waiting = standing()
    countdown.enter(waiting)
    countdown.hear([gone(11)])
    countdown.leave(waiting.claim.id)
    assert countdown.hear([Deletion(waiting.own, 12)]) == []
    assert not countdown


def test_a_waiter_that_asks_or_gave_up_is_told_nothing(countdown: Countdown) -> None:
    waiting = standing()
    countdown.enter(waiting)
    countdown.leave(waiting.claim.id)
    assert countdown.hear([gone(11)]) == []


def test_answers_are_unheeded_only_while_nobody_waits(countdown: Countdown) -> None:
    countdown.enter(waiting := standing())
    countdown.hear([gone(11, "another")])
    assert countdown.unheeded == 0
    countdown.leave(waiting.claim.id)
    countdown.hear([gone(12, "another")])
    assert countdown.unheeded == 1


def test_a_permit_waits_for_strangers_and_for_permits_beyond_the_number(
    countdown: Countdown,
) -> None:
    like = ["permit/2/one", "permit/2/two", "permit/2/three"]
    permit = standing("permit", "permit/3/other", like=like, permits=2)
    assert permit.to_go == 3
    countdown.enter(permit)
    assert countdown.hear([gone(11, like[0]), gone(12, like[1])]) == []
    assert told(countdown.hear([gone(13, "permit/3/other")])) == [(permit, FIRST)]
    assert permit.to_go == 0
