"""What the answers of several servers amount to."""

from __future__ import annotations

import itertools

import pytest

from multilock.backend import Granted
from multilock_redis.redlock.quorum import Quorum, Verdict


def vote(sent_at: float, valid_for: float = 10.0, token: int = 1) -> Granted:
    return Granted(token, valid_for, sent_at, valid_for, valid_for / 3, "n")


@pytest.mark.parametrize(("nodes", "needed"), [(2, 2), (3, 2), (4, 3), (5, 3), (7, 4)])
def test_a_majority_is_more_than_half(nodes: int, needed: int) -> None:
    assert Quorum(nodes).needed == needed
    assert Quorum(nodes).spare == nodes - needed


@pytest.mark.parametrize("nodes", range(2, 8))
def test_two_majorities_have_a_server_in_common_and_one_outlives_the_loss_of_the_spare_ones(nodes: int) -> None:
    quorum = Quorum(nodes)
    assert 2 * quorum.needed > nodes
    assert nodes - quorum.spare == quorum.needed


def answered(nodes: int) -> list[tuple[int, int, int]]:
    counts = range(nodes + 1)
    return [each for each in itertools.product(counts, counts, counts) if sum(each) <= nodes]


@pytest.mark.parametrize("nodes", range(2, 8))
def test_what_is_asked_is_decided_as_soon_as_nothing_can_change_it_and_not_before(nodes: int) -> None:
    quorum = Quorum(nodes)
    for yes, no, silent in answered(nodes):
        pending = nodes - yes - no - silent
        ends = {
            quorum.asked(yes + a, no + b, silent + pending - a - b)
            for a in range(pending + 1)
            for b in range(pending + 1 - a)
        }
        assert quorum.asked(yes, no, silent) in (ends if len(ends) == 1 else {Verdict.OPEN})


@pytest.mark.parametrize("nodes", range(2, 8))
def test_what_was_kept_is_gone_only_where_no_majority_can_have_it(nodes: int) -> None:
    quorum = Quorum(nodes)
    for yes, no, silent in answered(nodes):
        verdict = quorum.kept(yes, no, silent)
        assert (verdict is Verdict.YES) == (yes >= quorum.needed)
        assert (verdict is Verdict.NO) == (nodes - no < quorum.needed) == quorum.lost(no)
        assert (verdict is Verdict.OPEN) == (
            yes < quorum.needed and nodes - no >= quorum.needed and yes + no + silent < nodes
        )


def test_silence_is_no_refusal() -> None:
    assert Quorum(3).asked(1, 0, 2) is Verdict.SILENCE
    assert Quorum(3).asked(0, 2, 1) is Verdict.NO
    assert Quorum(5).kept(2, 2, 1) is Verdict.SILENCE


def test_a_majority_of_votes_proves_until_the_first_of_the_best_ones_ends() -> None:
    votes = [vote(5.0), vote(1.0), vote(3.0)]
    proof = Quorum(3).proof(votes)
    assert proof is not None
    assert proof.sent_at == 3.0
    assert Quorum(5).proof(votes) == vote(1.0)
    assert Quorum(5).proof(votes[:2]) is None


def test_a_vote_sent_earlier_may_end_later() -> None:
    assert Quorum(2).proof([vote(0.0, 30.0), vote(5.0, 2.0)]) == vote(5.0, 2.0)


def test_the_soonest_of_a_majority() -> None:
    assert Quorum(3).soonest([3.0, None, 1.0]) == 3.0
    assert Quorum(3).soonest([3.0, None, None]) is None
    assert Quorum(5).soonest([1.0, 2.0]) is None


def test_what_a_majority_says() -> None:
    assert Quorum(3).named(["a", "b", "a"]) == "a"
    assert Quorum(3).named(["a", "b"]) is None
    assert Quorum(4).named(["a", "a", "b", "b"]) is None
    assert Quorum(3).named([]) is None
