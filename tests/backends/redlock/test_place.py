"""The meaning of each reply and notification for one claim. The tests need neither servers nor a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from multilock import BackendRejected, BackendUnavailable
from multilock.backend import Claim
from multilock_redis.redlock.votes import Evidence, Proof

TTL = 10_000_000  # µs
LOST = BackendUnavailable("no answer", unknown=True)
NOT_SENT = BackendUnavailable("not connected", unknown=False)
WINDOW = 1_000_000


@dataclass
class Server:
    counts_from: float


class Told(Evidence):
    """The record of one claim on several servers. The test reports replies to it."""

    def __init__(self, servers: int = 3, *, deaf: Sequence[int] = ()) -> None:
        claim = Claim("a", "lock", "id", "owner", TTL / 1e6, True, True, "me", 0, 0)
        super().__init__(claim, [Server(math.inf if which in deaf else 0.0) for which in range(servers)])

    def ask(self, which: int, at: int, answer: int | Sequence[int] | Exception, *, gives_way: bool = False) -> None:
        self.asks(which, at, None, gives_way=gives_way)
        self.answered(which, at, answer, at + 1, gives_way=gives_way, joins=True)

    def states(self) -> list[str]:
        return [view.state.value for view in self.views]


TAKEN = (5000, 0, 8)


def test_a_majority_of_votes_with_one_stamp_is_a_grant() -> None:
    told = Told()
    told.ask(0, 100, 7)
    assert told.proof(110) is None
    told.ask(1, 105, 7)
    assert told.proof(110) == Proof(7, 100, TTL)


def test_votes_with_two_stamps_give_no_token() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.ask(1, 100, 8)
    assert len(told.votes(110)) == 2
    assert told.proof(110) is None
    told.ask(2, 100, 8)
    assert told.proof(110) == Proof(8, 100, TTL)


def test_a_lease_ends_when_its_first_vote_of_a_bare_majority_ends() -> None:
    told = Told()
    for which, at in enumerate((100, 300, 200)):
        told.ask(which, at, 7)
    assert told.proof(400) == Proof(7, 200, TTL)
    assert told.proof(200 + TTL) is None


def test_a_restarted_server_does_not_count() -> None:
    told = Told(deaf=[0])
    told.ask(0, 100, 7)
    told.ask(1, 100, 7)
    assert told.proof(110) is None
    assert told.answers(110) == 1


def test_a_request_under_way_cannot_lose_a_vote() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.asks(0, 200, None, gives_way=False)
    assert told.states()[0] == "votes"
    told.answered(0, 200, LOST, 201, gives_way=False, joins=True)
    assert told.states()[0] == "votes"
    assert told.views[0].unsure
    assert told.spent()


def test_a_request_that_was_not_sent_changes_nothing() -> None:
    told = Told()
    told.ask(0, 100, 7)
    before = told.asks(0, 200, None, gives_way=True)
    assert told.states()[0] == "yields"
    told.unasked(0, before, NOT_SENT)
    assert told.states()[0] == "votes"
    assert told.views[0].silent is NOT_SENT
    assert not told.views[0].unsure


def test_a_push_older_than_a_refusal_is_dropped() -> None:
    told = Told()
    told.ask(0, 100, TAKEN)
    assert told.pushed(0, 100, 6_000_000, 7)
    told.ask(0, 200, LOST)
    assert told.votes(300)
    told.ask(0, 300, TAKEN)
    assert not told.votes(310)
    assert not told.pushed(0, 100, 6_000_000, 7)
    assert not told.votes(310)


def test_a_push_waits_for_the_reply_to_the_request_that_it_names() -> None:
    told = Told()
    told.asks(0, 100, None, gives_way=False)
    assert told.pushed(0, 100, 6_000_000, 9)
    told.answered(0, 100, TAKEN, 101, gives_way=False, joins=True)
    assert told.votes(110)


def test_a_push_from_before_a_give_way_is_dropped() -> None:
    told = Told()
    told.ask(0, 100, 5)
    told.asks(0, 200, None, gives_way=True)
    assert not told.votes(210)
    assert not told.pushed(0, 100, 6_000_000, 5)
    told.answered(0, 200, TAKEN, 210, gives_way=True, joins=True)
    assert not told.pushed(0, 100, 6_000_000, 5)
    assert told.pushed(0, 200, 6_000_000, 9)
    assert told.votes(300)


def test_after_a_give_way_without_a_reply_no_vote_counts() -> None:
    told = Told()
    told.ask(0, 100, 5)
    told.ask(0, 200, LOST, gives_way=True)
    assert told.states()[0] == "yields"
    assert told.spent()
    told.ask(0, 300, 5)
    assert told.renewed(0, 400, True) is False
    assert not told.votes(410)


def test_a_refused_give_way_was_not_executed() -> None:
    told = Told()
    told.ask(0, 100, 5)
    told.ask(0, 200, BackendRejected("no right"), gives_way=True)
    assert told.states()[0] == "out"
    assert not told.spent()


def test_a_raise_without_a_reply_proves_no_token() -> None:
    told = Told()
    for which, stamp in enumerate((7, 8, 9)):
        told.ask(which, 100, stamp)
    told.ask(0, 200, 10)
    told.ask(1, 200, LOST)
    told.ask(2, 200, LOST)
    assert [view.stamp for view in told.views] == [10, 8, 9]
    assert told.proof(210) is None
    assert told.spent()
    told.ask(1, 300, 10)
    assert told.proof(310) == Proof(10, 200, TTL)


def test_a_top_up_without_a_reply_is_no_spare_vote_but_is_released() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.ask(1, 100, 7)
    told.ask(2, 200, LOST)
    assert told.states() == ["votes", "votes", "out"]
    assert not told.spent()
    told.gone(1, 210)
    assert told.lacks_majority(210, WINDOW)
    assert told.stays(2, 220)
    assert told.renewed(2, 300, True)
    assert told.states()[2] == "votes"


def test_a_push_that_promises_more_than_the_ttl_is_dropped() -> None:
    told = Told()
    told.ask(0, 100, TAKEN)
    assert not told.pushed(0, 100, TTL + 1, 7)


def test_a_push_of_a_server_that_was_never_asked_is_dropped() -> None:
    assert not Told().pushed(0, 100, 6_000_000, 7)


def test_a_hint_cancels_the_vote_of_its_server() -> None:
    told = Told()
    for which in range(3):
        told.ask(which, 100, TAKEN)
        told.pushed(which, 100, 6_000_000, 7)
    assert told.proof(110)
    told.hinted(0)
    told.hinted(1)
    assert told.proof(110) is None


def test_a_reply_older_than_a_hint_leads_to_another_request() -> None:
    told = Told()
    told.asks(0, 100, None, gives_way=False)
    told.hinted(0)
    told.answered(0, 100, 7, 110, gives_way=False, joins=True)
    assert not told.votes(120)
    assert told.look


def test_one_server_that_lost_its_data_ends_a_bare_majority() -> None:
    told = Told(5)
    for which in range(3):
        told.ask(which, 100, 7)
    assert not told.lacks_majority(110, WINDOW)
    told.gone(1, 110)
    assert told.lacks_majority(110, WINDOW)


def test_a_hint_that_arrives_late_is_no_loss() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.ask(1, 100, 7)
    told.hinted(0)
    told.gone(2, 200)
    assert told.proof(210) is None
    assert not told.lacks_majority(210, WINDOW)
    told.ask(0, 220, TAKEN)
    assert told.lacks_majority(230, WINDOW)


def test_a_report_after_a_hint_is_a_loss_until_the_server_votes_again() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.ask(1, 100, 7)
    told.hinted(0)
    told.gone(0, 200)
    assert told.lacks_majority(210 + WINDOW, WINDOW)
    told.renews(0, 300 + WINDOW)
    assert told.renewed(0, 300 + WINDOW, ours=True)
    assert not told.lacks_majority(310 + WINDOW, WINDOW)


def test_a_server_whose_vote_has_ended_counts_as_missing() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.ask(1, 100, 7)
    assert told.renewed(0, TTL // 2, True)
    assert told.lacks_majority(100 + TTL, WINDOW)


def test_after_a_force_release_the_server_counts_as_taken_for_a_while() -> None:
    told = Told()
    for which in range(3):
        told.ask(which, 100, 7)
    told.gone(0, 200)
    told.ask(0, 300, 7)
    assert not told.lacks_majority(310, WINDOW)
    told.gone(1, 400)
    assert told.lacks_majority(410, WINDOW)
    told.ask(1, 500, 7)
    assert not told.lacks_majority(400 + WINDOW, WINDOW)


def test_a_confirmed_renewal_extends_a_vote_and_a_denied_one_ends_it() -> None:
    told = Told()
    told.ask(0, 100, 7)
    assert told.renewed(0, 500, True)
    assert told.views[0].until == 500 + TTL
    assert not told.renewed(0, 400, False)  # this reply is older than the one before
    assert told.states()[0] == "votes"
    assert not told.renewed(0, 600, False)
    assert told.states()[0] == "out"


def test_a_renewal_followed_by_a_newer_vote_keeps_the_vote() -> None:
    told = Told()
    told.ask(0, 600, 7)
    assert told.renewed(0, 500, True)
    assert told.views[0].until == 600 + TTL
    assert not told.renewed(0, 500, False)
    assert told.states()[0] == "votes"


def test_a_renewal_followed_by_a_newer_refusal_is_not_a_vote() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.ask(0, 600, TAKEN)
    assert not told.renewed(0, 500, True)
    assert told.pushed(0, 600, 1_000_000, 8)
    # The late renewal would extend the vote, but the notification has shown that the vote ended.
    assert not told.renewed(0, 500, True)


def test_a_majority_of_refusals_with_one_stamp_means_one_holder() -> None:
    told = Told()
    told.ask(0, 100, 5)
    told.ask(1, 100, (5000, 0, 8))
    told.ask(2, 100, (5000, 0, 9))
    assert not told.taken()
    told.ask(2, 200, (5000, 0, 8))
    assert told.taken()


def test_a_release_is_sent_to_each_server_that_may_have_a_vote() -> None:
    told = Told()
    told.ask(0, 100, 7)
    told.ask(1, 100, LOST)
    told.asks(2, 100, None, gives_way=False)
    assert [told.stays(which, 200) for which in range(3)] == [True, True, True]
    told.answered(2, 100, (5000, -1, 8), 210, gives_way=False, joins=False)
    assert [told.stays(which, 220) for which in range(3)] == [True, True, False]
    told.views[0].released = True
    assert not told.stays(0, 220)


@pytest.mark.parametrize(("seconds", "stays"), [(50, [False, True]), (119, [False, True]), (121, [False, False])])
def test_a_request_without_a_reply_is_undone_for_longer_than_a_lease(seconds: int, stays: list[bool]) -> None:
    told = Told()
    told.ask(0, 0, 7)
    told.ask(1, 0, LOST)
    assert [told.stays(which, seconds * 1_000_000) for which in range(2)] == stays


@pytest.mark.parametrize(
    ("released", "ours"),
    [
        ([True, True, None], True),
        ([True, None, None], None),
        ([False, False, None], False),
        ([True, False, None], None),
    ],
)
def test_a_majority_decides_whether_a_release_ended_a_lease(released: list[bool | None], ours: bool | None) -> None:
    told = Told()
    for which, each in enumerate(released):
        told.ask(which, 100, 7)
        told.views[which].released = each
    assert told.was_ours() is ours


def test_a_renewed_claim_is_kept_until_its_release_is_confirmed() -> None:
    told = Told()
    for which in range(3):
        told.ask(which, 100, 7)
    later = 100 + 5 * TTL
    assert not told.stays(0, later)
    for which in range(3):
        told.renews(which, later)
    told.renewed(0, later, ours=True)
    assert [told.stays(which, later + TTL) for which in range(3)] == [True] * 3


def test_a_repeated_release_that_finds_nothing_proves_nothing() -> None:
    told = Told()
    for which in range(3):
        told.ask(which, 100, 7)
        told.views[which].released = which == 2
        # An earlier release, whose reply was lost, may have ended the lease at this server.
        told.views[which].lost_release = which < 2
    assert told.was_ours() is None
