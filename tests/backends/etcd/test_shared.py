"""Readers and permits: which clients hold a name together, which of them wait, which losses are reported, and how many
requests are sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from multilock import BackendRejected, BackendUnavailable
from multilock.backend import Busy, Claim
from multilock.testing.conformance.base import eventually
from multilock_etcd.transactions import NEAR, WATCHED, EtcdTransactions
from multilock_etcd.transport import EtcdTransport, Method, calls
from tests.backends.etcd.kit import WITHIN, Mishap, Ours
from tests.backends.etcd.test_faults import keys
from tests.servers_etcd import EtcdServer, etcdctl

Make = Callable[[Ours], Claim]

each = pytest.mark.parametrize(
    "make", [Ours.reader, lambda ours: ours.permit(2), Ours.writer], ids=["reader", "permit", "writer"]
)
joining = pytest.mark.parametrize("join", [True, False], ids=["joins", "tries"])


@pytest.fixture
def standing(shared: EtcdServer, prefix: str) -> Callable[[], list[str]]:
    """Return a function that returns the keys below the name."""
    return lambda: [key.removeprefix(f"{prefix}job/") for key in keys(shared, f"{prefix}job/")]


Standing = Callable[[], list[str]]


# ---- the places of claims in the queue, and which claims may hold together


def test_each_mode_has_its_keys_where_the_recipes_of_etcd_have_them(us: Ours, standing: Standing) -> None:
    for claim, key in (
        (us.claim(), "{}"),
        (us.claim("leader"), "{}"),
        (us.writer(), "write/{}"),
        (us.reader(), "read/{}"),
        (us.permit(3), "permit/3/{}"),
    ):
        us.take(claim)
        assert standing() == [key.format(claim.id)]
        us.release(claim)
        assert standing() == []


@joining
def test_only_readers_or_permits_of_one_number_hold_a_name_together(us: Ours, them: Ours, join: bool) -> None:
    kinds: dict[str, Make] = {
        "lock": Ours.claim,
        "write": Ours.writer,
        "read": Ours.reader,
        "permit": lambda ours: ours.permit(3),
    }
    for first, make in kinds.items():
        for second, make_another in kinds.items():
            held, asking = make(us), make_another(them)
            us.take(held)
            together = not isinstance(them.attempt(asking, join=join), Busy)
            assert together == (first == second and first in ("read", "permit")), (first, second)
            us.release(held)
            them.release(asking)


def test_a_waiting_writer_is_not_overtaken_and_does_not_overtake_readers(us: Ours, them: Ours) -> None:
    reading = us.reader()
    us.take(reading)
    writer = them.wait(them.writer())
    assert isinstance(us.attempt(us.reader()), Busy)
    behind = [(us, us.wait(us.reader())), (them, them.wait(them.reader()))]
    last = them.wait(them.claim())
    assert us.release(reading)
    them.take(writer)
    assert all(isinstance(client.attempt(claim, join=True), Busy) for client, claim in behind)
    them.release(writer)
    for client, claim in behind:
        client.take(claim)
    assert isinstance(them.attempt(last, join=True), Busy)


def test_permits_do_not_overtake_each_other(us: Ours, them: Ours) -> None:
    held = [us.permit(2), us.permit(2)]
    for claim in held:
        us.take(claim)
    first = them.wait(them.permit(2))
    us.release(held[0])
    assert isinstance(us.attempt(us.permit(2)), Busy)
    them.take(first)
    us.release(held[1])
    us.take(us.permit(2))


@joining
def test_a_claim_refused_for_its_permit_count_leaves_no_key_in_the_queue(
    us: Ours, them: Ours, standing: Standing, monkeypatch: pytest.MonkeyPatch, join: bool
) -> None:
    """The key is never put, so it cannot remain if the client fails."""
    held = us.permit(3)
    us.take(held)

    def silent(*_: object) -> None:
        raise BackendUnavailable("no time", unknown=False)

    with monkeypatch.context() as patched:
        patched.setattr(EtcdTransactions, "delete", silent)
        with pytest.raises(BackendRejected, match="has 3 permits here, but 5 were requested"):
            them.attempt(them.permit(5), join=join)
    assert standing() == [f"permit/3/{held.id}"]
    us.release(held)
    us.take(us.permit(3))


@joining
def test_data_of_an_application_is_not_taken_for_a_permit(
    us: Ours, shared: EtcdServer, prefix: str, standing: Standing, join: bool
) -> None:
    key = f"{prefix}job/permit/5/data"
    etcdctl(shared.endpoint, "put", key, "mine")
    claim = us.permit(3)
    assert isinstance(us.attempt(claim, join=join), Busy)
    assert standing() == ["permit/5/data"]
    etcdctl(shared.endpoint, "del", key)
    us.take(claim)


@pytest.mark.parametrize("between", ["lock", "read", "write"])
@joining
def test_a_different_number_of_permits_is_refused_even_behind_a_waiting_writer(
    us: Ours, them: Ours, standing: Standing, between: str, join: bool
) -> None:
    us.take(us.permit(3))
    them.wait(them.claim(between))
    before = standing()
    for number in (2, 5):
        with pytest.raises(BackendRejected, match=f"has 3 permits here, but {number} were requested"):
            them.attempt(them.permit(number), join=join)
    assert standing() == before


def test_a_later_claim_for_a_different_number_of_permits_is_refused_at_once(us: Ours, them: Ours) -> None:
    alone = us.claim()
    us.take(alone)
    first = us.wait(us.permit(3))
    with pytest.raises(BackendRejected, match="has 3 permits"):
        them.attempt(them.permit(5), join=True)
    us.release(alone)
    us.take(first)


def test_a_refused_permit_that_could_not_be_undone_reports_an_unknown_outcome(
    us: Ours, them: Ours, standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    us.take(us.permit(1))

    def no_time(*_: object) -> bool:
        raise BackendUnavailable("no time was left to ask etcd", unknown=False)

    claim = them.permit(1)
    with monkeypatch.context() as patched:
        patched.setattr(EtcdTransactions, "delete", no_time)
        with pytest.raises(BackendUnavailable) as silence:
            them.attempt(claim)
    assert silence.value.unknown
    assert len(standing()) == 2
    assert them.release(claim, unsure=True)
    assert len(standing()) == 1


# ---- which waiter is woken


@pytest.mark.parametrize("near", [0, NEAR])
@pytest.mark.parametrize("permits", [1, 3, WATCHED + 4])
def test_waiters_enter_in_any_order_of_releases(
    us: Ours, them: Ours, permits: int, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timers of waiters are longer than this test, so each waiter must be woken by a notification."""
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", near)
    order = random.Random(8)
    holding: list[Claim] = []
    waiting: dict[str, Claim] = {}
    for claim in [us.permit(permits) for _ in range(permits + 30)]:
        if isinstance(us.attempt(claim, join=True), Busy):
            waiting[claim.id] = claim
        else:
            holding.append(claim)
    while holding:
        us.release(holding.pop(order.randrange(len(holding))))
        while len(holding) < min(permits, len(holding) + len(waiting)):
            assert us.ear.wait(lambda: us.ear.wakes, WITHIN), "they sleep on"
            for claim_id in us.woken() & waiting.keys():
                if not isinstance(us.attempt(waiting[claim_id], join=True), Busy):
                    holding.append(waiting.pop(claim_id))
        assert len(holding) <= permits
    assert not waiting


def test_releasing_a_permit_wakes_as_many_distant_waiters_as_there_are_permits(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", 0)
    held = [us.permit(2) for _ in range(2)]
    for claim in held:
        us.take(claim)
    waiting = [them.wait(them.permit(2)) for _ in range(6)]
    us.release(held[1])
    for claim in waiting[:2]:
        them.hears_a_wake_for(claim)
    them.take(waiting[0])
    assert isinstance(them.attempt(waiting[1], join=True), Busy)
    assert them.woken() == {claim.id for claim in waiting[:2]}


def test_readers_enter_when_the_last_writer_before_them_gives_up(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", 0)
    us.take(us.reader())
    older, newer = them.wait(them.writer()), them.wait(them.claim())
    behind = us.wait(us.reader())
    for leaving, answer in ((newer, Busy), (older, object)):
        us.woken()
        them.release(leaving)
        us.hears_a_wake_for(behind)
        assert isinstance(us.attempt(behind, join=True), answer)
    us.take(behind)


def test_a_waiter_keeps_only_the_watches_that_it_still_needs(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_etcd.transactions.NEAR", 0)
    held = [us.permit(3) for _ in range(3)]
    for claim in held:
        us.take(claim)
    *_, last = (them.wait(them.permit(3)) for _ in range(3))

    def watched() -> dict[bytes, int]:
        return {watch.what[0]: watch.id for watch in them.backend._watcher._waiting[last.id]}

    before = watched()
    us.release(held[2])
    them.hears_a_wake_for(last)
    assert isinstance(them.attempt(last, join=True), Busy)
    kept = before.items() & watched().items()
    assert len(kept) == 3  # these are the two keys directly ahead of the waiter, and its own key
    assert len(watched()) == 4


# ---- lost replies and late requests


@pytest.mark.oracle
@each
@joining
def test_a_request_whose_reply_is_lost_is_found_again_with_its_token(
    us: Ours, standing: Standing, monkeypatch: pytest.MonkeyPatch, make: Make, join: bool
) -> None:
    claim = make(us)
    with monkeypatch.context() as patched:
        Mishap(patched, calls.TXN, claim.id.encode())
        with pytest.raises(BackendUnavailable):
            us.attempt(claim, join=join)
    granted = us.take(claim, join=join)
    assert us.take(claim, join=join).token == granted.token
    assert us.renew((claim, granted)) == [True]
    assert len(standing()) == 1
    assert us.release(claim)


@pytest.mark.oracle
def test_a_repeated_try_for_a_permit_is_refused_and_leaves_nothing(
    us: Ours, them: Ours, standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    us.take(us.permit(1))
    claim = them.permit(1)
    with monkeypatch.context() as patched:
        Mishap(patched, calls.TXN, claim.id.encode())
        with pytest.raises(BackendUnavailable):
            them.attempt(claim)
    assert len(standing()) == 2
    assert isinstance(them.attempt(claim), Busy)
    assert len(standing()) == 1


@each
@joining
def test_a_request_executed_after_its_cancel_acquires_nothing(
    us: Ours, standing: Standing, monkeypatch: pytest.MonkeyPatch, make: Make, join: bool
) -> None:
    claim = make(us)
    with monkeypatch.context() as patched:
        late = Mishap(patched, calls.TXN, claim.id.encode(), executed=False)
        with pytest.raises(BackendUnavailable):
            us.attempt(claim, join=join)
    assert us.release(claim, unsure=True) is False
    assert not late.send().succeeded
    assert standing() == []


def test_a_waiting_permit_whose_key_was_deleted_joins_again(
    us: Ours, them: Ours, shared: EtcdServer, prefix: str
) -> None:
    held = us.permit(1)
    us.take(held)
    waiting = them.wait(them.permit(1))
    etcdctl(shared.endpoint, "del", f"{prefix}job/permit/1/{waiting.id}")
    us.release(held)
    them.hears_a_wake_for(waiting)
    granted = them.take(waiting, join=True)
    assert them.renew((waiting, granted)) == [True]


# ---- losses and force releases


def test_the_end_of_one_reader_is_not_reported_to_other_clients(
    us: Ours, them: Ours, shared: EtcdServer, prefix: str
) -> None:
    claims = [us.reader(), us.reader(), them.reader()]
    lost, *kept = [(claim, ours.take(claim)) for claim, ours in zip(claims, (us, us, them), strict=True)]
    us.watch(lost, kept[0])
    them.watch(kept[1])
    etcdctl(shared.endpoint, "del", f"{prefix}job/read/{lost[0].id}")
    us.hears_of_the_loss_of(lost[0])
    assert us.renew(lost, kept[0]) == [False, True]
    assert them.renew(kept[1]) == [True]
    assert (len(us.ear.losses), them.ear.losses) == (1, [])


def test_force_release_removes_every_holder_and_no_waiter(us: Ours, them: Ours, standing: Standing) -> None:
    """Removing 130 holders takes more than one transaction."""
    held = [(claim, us.take(claim)) for claim in [us.reader() for _ in range(130)]]
    us.watch(*held)
    writer = them.wait(them.writer())
    behind = us.wait(us.reader())
    assert them.backend.force_release("job", WITHIN) is True
    for claim, _ in held:
        us.hears_of_the_loss_of(claim)
    assert sorted(standing()) == sorted([f"write/{writer.id}", f"read/{behind.id}"])
    them.hears_a_wake_for(writer)
    them.take(writer)


def test_force_release_removes_the_remaining_holders_if_some_leave_meanwhile(
    us: Ours, them: Ours, standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, staying = us.reader(), us.reader()
    for claim in (leaving, staying):
        us.take(claim)
    execute = EtcdTransactions.execute

    def leave_first(self: EtcdTransactions, *asked: Any) -> Any:
        if leaving.id in str(asked):
            us.release(leaving)
            us.take(us.reader())
        return execute(self, *asked)

    with monkeypatch.context() as patched:
        patched.setattr(EtcdTransactions, "execute", leave_first)
        assert them.backend.force_release("job", WITHIN) is True
    assert staying.id not in str(standing())
    # The claim that joined after the holders were listed is still there.
    assert len(standing()) == 1


def test_inspect_shows_the_oldest_holder_the_count_and_a_hundred_holders(us: Ours, them: Ours) -> None:
    held = [us.reader() for _ in range(120)]
    tokens = [us.take(claim).token for claim in held]
    them.wait(them.writer())
    us.wait(us.reader())
    info = us.backend.inspect("job", WITHIN)
    assert info is not None
    assert (info.kind, info.owner, info.token, info.holders, info.waiting) == ("read", held[0].owner, tokens[0], 120, 2)
    assert [other.token for other in info.others] == tokens[1:100]
    assert {other.name for other in info.others} == {"job"}
    [listed] = us.backend.inspect_all("", WITHIN)
    assert (listed.owner, listed.holders, listed.waiting, listed.others) == (held[0].owner, 120, 2, ())


def test_inspect_counts_holders_up_to_the_number_of_permits_and_the_rest_as_waiters(us: Ours) -> None:
    held = [us.permit(2) for _ in range(2)]
    for claim in held:
        us.take(claim)
    us.wait(us.permit(2))
    info = us.backend.inspect("job", WITHIN)
    assert info is not None
    assert (info.kind, info.permits, info.holders, info.waiting) == ("permit", 2, 2, 1)
    assert [other.owner for other in info.others] == [held[1].owner]


def test_a_resting_permit_counts_until_a_force_release_ends_the_rest(us: Ours, them: Ours, standing: Standing) -> None:
    claim, other = us.permit(2), us.permit(2)
    held, kept = (claim, us.take(claim)), (other, us.take(other))
    assert us.backend.rest(*held, False, 60.0, WITHIN).ours
    assert us.renew(held, kept) == [False, True]
    assert us.release(claim) is False
    assert isinstance(them.attempt(them.permit(2)), Busy)
    info = them.backend.inspect("job", WITHIN)
    assert info is not None
    assert (info.holders, info.resting_until is None, info.others[0].resting_until) == (2, False, None)
    assert them.backend.force_release("job", WITHIN)
    assert standing() == []
    assert us.backend.rest(*held, True, 60.0, WITHIN).ours is False


# ---- many


def test_a_reader_sends_and_reads_as_much_beside_a_thousand_readers_as_beside_one(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    really = EtcdTransport.call

    def count(transport: EtcdTransport, method: Method, request: Any, within: float) -> Any:
        said = really(transport, method, request, within)
        asked.append((request.ByteSize(), sum(len(r.response_range.kvs) for r in getattr(said[0], "responses", ()))))
        return said

    def cost() -> list[tuple[int, int]]:
        asked.clear()
        for join in (True, False):
            claim = them.reader()
            held = claim, them.take(claim, join=join)
            assert them.renew(held) == [True]
            them.release(claim)
        return list(asked)

    us.take(us.reader())
    cost()  # this acquire creates the session
    monkeypatch.setattr(EtcdTransport, "call", count)
    beside_one = cost()
    for _ in range(1000):
        us.take(us.reader())
    beside_thousand = cost()
    assert [rows for _, rows in beside_thousand] == [rows for _, rows in beside_one]
    # Only the revision numbers in the replies may be longer.
    assert max(size for size, _ in beside_thousand) <= max(size for size, _ in beside_one) + 8


def test_one_request_renews_thousands_of_readers_of_a_client(us: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [(claim, us.take(claim)) for claim in [us.reader() for _ in range(300)]]
    us.watch(*held)
    eventually(lambda: all(us.backend._watcher.covers(claim.id) for claim, _ in held), 30)
    asked: list[Method] = []
    really = EtcdTransport.call

    def count(transport: EtcdTransport, method: Method, request: Any, within: float) -> Any:
        asked.append(method)
        return really(transport, method, request, within)

    monkeypatch.setattr(EtcdTransport, "call", count)
    assert us.renew(*held) == [True] * 300
    assert asked == [calls.KEEP_ALIVE]
