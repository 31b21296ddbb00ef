"""The primary that a client chooses, for some orders of events. No servers are needed. The model
tests/models/sentinel.cpp tries all orders."""

from __future__ import annotations

from multilock_redis.followed_primary import COUNTS_FOR, Following, Told
from multilock_redis.slot_table import Address

A, B = Address("a", 1), Address("b", 1)


class Client:
    """A client of three Sentinels, each at its own address, and its clock."""

    def __init__(self, sentinels: int = 3) -> None:
        self.following = Following(sentinels)
        self.time = 100.0

    def hears(
        self,
        sentinel: str,
        epoch: int,
        primary: Address,
        *,
        at: str | None = None,
        number: int = 3,
        quorum: int = 2,
        asked_at: float | None = None,
        others: tuple[Address, ...] = (),
    ) -> bool:
        """Report this primary from one Sentinel. ``at`` is a host name that leads to a different Sentinel at other
        times."""
        self.time += 0.01
        facts = {"num-other-sentinels": str(number - 1), "quorum": str(quorum)}
        place = Address(at or sentinel, 26379)
        told = Told(epoch, primary, facts, sentinel, others, place, self.time if asked_at is None else asked_at)
        return self.following.note(told, at is None, self.time)

    def misses(self, *sentinels: str, for_: float = 0.0) -> None:
        """Let ``for_`` seconds pass in which these Sentinels do not reply."""
        self.time += for_
        for each in sentinels:
            self.following.silent(Address(each, 26379))

    @property
    def follows(self) -> Address:
        assert self.following.told is not None
        return self.following.told.primary


def led(*sentinels: str) -> Client:
    """Return a client to which these Sentinels have reported the failover to B."""
    client = Client()
    for each in sentinels:
        assert client.hears(each, 5, B)
    return client


def test_one_sentinel_that_reports_a_later_failover_is_believed_at_once() -> None:
    client = led("1", "2", "3")
    assert client.hears("2", 6, A)
    assert client.follows == A


def test_one_isolated_sentinel_does_not_lead_back_to_a_former_primary() -> None:
    client = led("1", "2", "3")
    for _ in range(5):
        assert not client.hears("3", 4, A)
    assert client.follows == B


def test_lower_epochs_at_all_sentinels_are_followed_after_one_more_round() -> None:
    client = led("1", "2", "3")
    for each in ("1", "2", "3"):
        assert not client.hears(each, 0, A)
    assert client.following.look_again, "the next round is not asked for at once"
    assert [client.hears(each, 0, A) for each in ("1", "2", "3")] == [False, False, True]
    assert client.follows == A
    assert client.hears("1", 1, B), "a failover of the new Sentinels is not followed"


def test_lower_epochs_at_two_sentinels_are_not_followed_until_the_third_is_asked() -> None:
    client = led("1")
    for _ in range(2):
        for each in ("1", "2"):
            client.hears(each, 0, A)
    assert client.follows == B


def test_a_silent_sentinel_counts_until_the_others_could_have_received_its_news() -> None:
    client = led("1")
    client.misses("1")
    for _ in range(3):
        client.hears("2", 4, A)
        client.hears("3", 4, A)
    assert client.follows == B
    for _ in range(2):
        client.misses("1", for_=COUNTS_FOR)
        client.hears("2", 4, A)
        client.hears("3", 4, A)
    assert client.follows == A


def test_two_new_sentinels_are_followed_although_the_third_is_gone_for_good() -> None:
    client = led("1", "2", "3")
    for seconds in (0.0, COUNTS_FOR, COUNTS_FOR):
        client.misses("1", for_=seconds)
        client.hears("2", 0, A)
        client.hears("3", 0, A)
    assert client.follows == A


def test_a_client_that_reaches_only_one_sentinel_does_not_follow_it_back() -> None:
    client = led("1", "2", "3")
    for _ in range(4):
        client.misses("1", "2", for_=COUNTS_FOR)
        client.hears("3", 4, A)
    assert client.follows == B


def test_a_sentinel_reached_at_two_addresses_counts_once() -> None:
    client = led("1", "2", "3")
    for _ in range(4):
        client.misses("1", "2", for_=COUNTS_FOR)
        client.hears("3", 4, A)
        client.hears("3", 4, A, at="name")
    assert client.follows == B


def test_a_sentinel_at_the_address_of_another_does_not_replace_that_one() -> None:
    client = Client(sentinels=1)
    assert client.hears("1", 5, B, at="name")
    for _ in range(3):
        assert not client.hears("stale", 0, A, at="name", number=1, quorum=1)
    assert client.follows == B


def test_a_late_reply_of_a_sentinel_does_not_count() -> None:
    client = led("1", "2", "3")
    before = client.time
    for _ in range(2):
        for each in ("1", "2", "3"):
            client.hears(each, 0, A)
    assert client.follows == A
    assert not client.hears("1", 5, B, asked_at=before)
    assert client.follows == A


def test_within_one_epoch_a_majority_of_sentinels_decides() -> None:
    client = Client()
    client.hears("1", 0, A)
    for _ in range(2):
        for each in ("2", "3", "1"):
            client.hears(each, 0, A if each == "1" else B)
    assert client.follows == B
    assert not client.hears("1", 0, A)
    assert client.follows == B


def test_a_new_client_is_sure_once_as_many_sentinels_agree_as_a_failover_needs() -> None:
    client = Client()
    client.hears("1", 5, B)
    assert not client.following.is_agreed()
    client.hears("2", 5, B)
    assert client.following.is_agreed()


def test_other_sentinels_stay_known_after_their_source_is_silent() -> None:
    client = Client()
    client.hears("1", 5, B, others=(Address("2", 26379),))
    client.misses("1", for_=2 * COUNTS_FOR)
    client.hears("3", 5, B)
    assert client.following.others() == [Address("2", 26379)]
