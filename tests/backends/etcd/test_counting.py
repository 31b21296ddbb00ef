"""The count of who is ahead, without a server: which deletions leave it, and when it proves nothing."""

from __future__ import annotations

import os

import pytest

from multilock.backend import Claim
from multilock.model import owner_text
from multilock_etcd import counting
from multilock_etcd.counting import Deletion, Line, Standing
from multilock_etcd.keys import Keyspace
from multilock_etcd.places import Place

KEYS = Keyspace("p/")
ID = "f" * 32


def standing(
    kind: str = "lock", *, others: int = 1, like: int = 0, permits: int = 0, revision: int = 10, at: int = 10
) -> Standing:
    claim_id = f"{os.urandom(8).hex()}.{ID}"
    owner = owner_text(claim_id, kind, "host", os.getpid(), "me", 60.0)
    claim = Claim("job", kind, claim_id, owner, 60.0, True, True, "me", permits)
    return Standing(claim, Place(claim), KEYS.own(claim), KEYS.ahead(claim), others, like, revision, at)


def gone(revision: int, born: int | None = 5, key: str = "somebody") -> Deletion:
    return Deletion(f"p/job/{key}".encode(), revision, born)


@pytest.fixture
def line() -> Line:
    """Of a watch that begins after revision 10."""
    line = Line(KEYS.queue("job"))
    line.begins(10)
    return line


def test_who_was_ahead_leaves_the_count_and_at_nobody_it_is_first_and_told_once(line: Line) -> None:
    waiting = standing(others=2)
    assert line.enter(waiting) == []
    assert line.hear([gone(11)]) == []
    assert line.hear([gone(12)]) == [(waiting, True)]
    assert not line
    assert line.hear([gone(13)]) == []


def test_who_came_later_was_never_in_the_count(line: Line) -> None:
    line.enter(standing())
    assert line.hear([gone(12, born=11)]) == []


def test_all_waiters_are_told_by_the_one_watch(line: Line) -> None:
    first, second = standing(), standing(others=2, revision=11, at=11)
    line.enter(first)
    line.enter(second)
    assert line.hear([gone(12)]) == [(first, True)]
    assert line.hear([gone(13, born=10)]) == [(second, True)]


def test_who_comes_later_is_told_what_the_watch_told_since_it_counted_and_nothing_from_before(line: Line) -> None:
    line.hear([gone(11), gone(13)])
    late = standing(others=2, revision=12, at=12)
    assert line.enter(late) == []
    assert late.others == 1
    in_time = standing(revision=12, at=12)
    assert line.enter(in_time) == [(in_time, True)]
    assert line.hear([gone(14)]) == [(late, True)]


def test_a_member_that_is_behind_tells_what_was_not_there_when_it_counted_and_that_does_not_count() -> None:
    line = Line(KEYS.queue("job"))
    line.enter(standing(revision=12, at=12))
    assert line.begins(8) == []
    assert line.hear([gone(9)]) == []
    assert line.hear([gone(12), gone(13, born=12)]) == []
    [(_, first)] = line.hear([gone(14)])
    assert first


def test_who_counted_before_the_watch_begins_has_to_look() -> None:
    line = Line(KEYS.queue("job"))
    early, in_time = standing(at=10), standing(revision=11, at=11)
    line.enter(early)
    line.enter(in_time)
    assert line.begins(11) == [(early, False)]
    assert line.enter(again := standing(at=10)) == [(again, False)]
    assert line.hear([gone(12)]) == [(in_time, True)]


def test_who_counted_before_what_is_remembered_has_to_look(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "REMEMBERED", 2)
    for revision in (11, 12, 13):
        line.hear([gone(revision)])
    late, in_time = standing(at=10), standing(others=3, at=11)
    assert line.enter(late) == [(late, False)]
    assert line.enter(in_time) == []
    assert in_time.others == 1


@pytest.mark.parametrize("together", [11, 12])
def test_whose_own_key_was_deleted_is_not_first_whoever_went_in_the_same_revision_or_answer(
    line: Line, together: int
) -> None:
    waiting = standing()
    line.enter(waiting)
    own = Deletion(waiting.own, together, 10)
    assert line.hear([gone(11), own]) == [(waiting, False)]


def test_after_a_deletion_whose_past_is_not_known_it_has_to_look(line: Line) -> None:
    waiting = standing(others=2)
    line.enter(waiting)
    assert line.hear([gone(11, born=None)]) == [(waiting, False)]


def test_who_asks_or_was_given_up_is_told_nothing(line: Line) -> None:
    waiting = standing()
    line.enter(waiting)
    line.leave(waiting.claim.id)
    assert line.hear([gone(11)]) == []


def test_a_reader_waits_for_nobody_who_reads(line: Line) -> None:
    reader = standing("read")
    line.enter(reader)
    assert line.hear([gone(11, key="read/somebody")]) == []
    assert line.hear([gone(12, key="write/somebody")]) == [(reader, True)]


def test_a_writer_waits_for_each_of_them(line: Line) -> None:
    writer = standing("write", others=3)
    line.enter(writer)
    assert line.hear([gone(11, key="read/one"), gone(12, key="permit/3/two")]) == []
    assert line.hear([gone(13, key="read/three")]) == [(writer, True)]


def test_a_permit_waits_for_all_who_do_not_fit_and_for_as_many_of_its_like_as_there_is_no_room_for(line: Line) -> None:
    permit = standing("permit", permits=2, others=1, like=3)
    assert permit.to_go == 3
    line.enter(permit)
    assert line.hear([gone(11, key="permit/2/one"), gone(12, key="permit/2/two")]) == []
    assert line.hear([gone(13, key="permit/3/other")]) == [(permit, True)]
    assert permit.to_go == 0
