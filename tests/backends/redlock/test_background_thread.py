"""The clerk (the background thread) repeats unconfirmed releases: how many it sends at once, and when."""

from __future__ import annotations

import pytest

from multilock.backend import Claim
from multilock.timing import LONGEST_PAUSE
from multilock_redis.redlock.background_thread import BATCH, REPEAT_AFTER, Unconfirmed
from multilock_redis.redlock.restarts import Guarded
from multilock_redis.redlock.votes import Evidence


def releases(count: int) -> list[Evidence]:
    claims = (Claim("a", "lock", f"id{n}", "owner", 10.0, True, True, "me", 0, 0) for n in range(count))
    servers = [Guarded("redis://h", None, {})] * 3  # type: ignore[arg-type]
    return [Evidence(claim, servers) for claim in claims]


def test_a_server_that_confirms_nothing_gets_one_batch_in_each_pause() -> None:
    unconfirmed, all_of_them = Unconfirmed(), releases(BATCH + 10)
    assert [unconfirmed.failed(each) for each in all_of_them] == [REPEAT_AFTER] + [None] * (BATCH + 9)
    pauses = []
    for _ in range(8):
        batch = unconfirmed.batch()
        assert len(batch) == BATCH
        assert unconfirmed.batch() == []
        pauses += [pause for each in batch if (pause := unconfirmed.failed(each)) is not None]
    assert pauses == pytest.approx([min(LONGEST_PAUSE, REPEAT_AFTER * 2**n) for n in range(1, 9)])


def test_a_confirmed_release_is_neither_repeated_nor_kept() -> None:
    unconfirmed, (first, second) = Unconfirmed(), releases(2)
    unconfirmed.failed(first)
    unconfirmed.failed(second)
    assert not unconfirmed.done(second)
    assert unconfirmed.batch() == [first]
    assert not unconfirmed.done(first)
    assert unconfirmed.all() == []


def test_the_first_reply_of_a_batch_makes_room_for_the_next_batch() -> None:
    unconfirmed, all_of_them = Unconfirmed(), releases(BATCH + 1)
    for each in all_of_them:
        unconfirmed.failed(each)
    first, *_ = unconfirmed.batch()
    assert unconfirmed.done(first)
    assert unconfirmed.batch() == all_of_them[-1:]
    assert unconfirmed.failed(all_of_them[-1]) == REPEAT_AFTER
