"""Readers and permits: which clients hold a name together, which of them wait, and which nodes remain."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from multilock import BackendRejected, BackendUnavailable, LossReason
from multilock.backend import Claim
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import SOON, eventually
from multilock_zookeeper.acquire_release import Recipe
from multilock_zookeeper.inspection import DELETED_AT_ONCE, SHOWN
from tests.backends.kit import NAME, WITHIN
from tests.backends.zookeeper.conftest import Operator
from tests.backends.zookeeper.kit import Ours
from tests.servers_zookeeper import ZooKeeperServer

LONG = 30.0  # seconds to wait at most for a wake-up
QUICK = 6.0  # a ttl in seconds; the client replaces a connection without replies after a sixth of it
MODES = {"mutex": Ours.mutex, "writer": Ours.writer, "reader": Ours.reader, "permit": Ours.permit}


class Below:
    """The nodes below the parent of the name, read by a plain client."""

    def __init__(self, client: Any, path: str) -> None:
        self.client = client
        self.path = path

    def nodes(self) -> list[str]:
        found: list[str] = self.client.get_children(self.path) if self.client.exists(self.path) else []
        return sorted(found, key=lambda node: node[-10:])

    def stand(self, node: str) -> str:
        """Join the queue as another program would."""
        path: str = self.client.create(f"{self.path}/{node}", b"", ephemeral=True, sequence=True, makepath=True)
        return path

    def empty(self) -> bool:
        return self.nodes() == []


@pytest.fixture
def prefix() -> str:
    return f"shared-{uuid.uuid4().hex[:8]}/"


@pytest.fixture
def below(shared: ZooKeeperServer, operator: Operator, prefix: str) -> Below:
    return Below(operator(shared.endpoint), f"/{prefix}{NAME}")


@pytest.fixture
def open_ours(shared: ZooKeeperServer, prefix: str) -> Iterator[Callable[..., Ours]]:
    opened: list[Ours] = []

    def make(style: str = "kazoo") -> Ours:
        opened.append(Ours(shared.url, prefix, style))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def us(open_ours: Callable[..., Ours]) -> Ours:
    return open_ours()


@pytest.fixture
def them(open_ours: Callable[..., Ours]) -> Ours:
    return open_ours()


# ---- which claims may hold a name together


@pytest.mark.parametrize("style", ["kazoo", "curator"])
def test_only_equal_modes_hold_together_and_every_other_pair_excludes(
    open_ours: Callable[..., Ours], below: Below, style: str
) -> None:
    us, them = open_ours(style), open_ours(style)
    for first, second in product(MODES, MODES):
        held, other = us.take(MODES[first](us)), MODES[second](them)
        together = first == second and first in ("reader", "permit")
        assert them.holds(other) is together, (first, second)
        assert len(below.nodes()) == 1 + together
        them.release(other)
        assert us.release(held)
    assert below.empty()


@pytest.mark.parametrize("style", ["kazoo", "curator"])
def test_there_are_never_more_holders_than_permits(open_ours: Callable[..., Ours], style: str) -> None:
    us, them = open_ours(style), open_ours(style)
    first, *_ = us.take(us.permit()), them.take(them.permit()), us.take(us.permit())
    assert not them.holds(them.permit())
    assert us.release(first)
    them.take(them.permit())


def test_a_client_that_created_its_node_reports_an_unknown_outcome(
    us: Ours, them: Ours, below: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    us.take(us.mutex())
    claim = them.mutex()

    def broken(*_: object) -> None:
        raise BackendUnavailable("the connection broke", unknown=False)

    with monkeypatch.context() as patched:
        patched.setattr(Recipe, "_stand_behind", broken)
        with pytest.raises(BackendUnavailable) as silence:
            them.attempt(claim, join=True)
    assert silence.value.unknown
    assert len(below.nodes()) == 2
    them.release(claim)
    eventually(lambda: len(below.nodes()) == 1)


@pytest.mark.oracle
def test_a_different_number_of_permits_is_refused_at_once_and_leaves_nothing(
    us: Ours, them: Ours, below: Below
) -> None:
    held = us.take(us.permit(3))
    for join in (False, True):
        with pytest.raises(BackendRejected, match="has 3 permits here, but 5 were requested"):
            them.attempt(them.permit(5), join)
        assert len(below.nodes()) == 1
    us.release(held)
    them.take(them.permit(5))


def test_a_different_number_of_permits_is_refused_even_behind_a_waiter(us: Ours, them: Ours) -> None:
    us.take(us.mutex())
    us.wait(us.permit(3))
    with pytest.raises(BackendRejected, match="has 3 permits here"):
        them.attempt(them.permit(5), join=True)


def test_a_client_about_to_be_refused_for_its_number_refuses_no_other_client(
    us: Ours, them: Ours, below: Below
) -> None:
    us.take(us.permit(3))
    leaving = below.stand("other!p5__lock__")
    behind = them.wait(them.permit(3))
    below.client.delete(leaving)
    assert them.woken(behind)
    assert them.holds(behind)


# ---- which claim waits for which


def test_neither_a_reader_nor_a_single_try_overtakes_a_waiting_writer(us: Ours, them: Ours) -> None:
    reading = us.take(us.reader())
    writing = them.wait(them.writer())
    asking = us.wait(us.reader())
    assert not us.holds(us.reader())
    us.release(reading)
    assert them.woken(writing)
    assert not us.holds(asking, join=True)
    assert them.holds(writing)


def test_a_writer_waits_for_the_last_of_the_readers_ahead(us: Ours, them: Ours) -> None:
    first, second = us.take(us.reader()), us.take(us.reader())
    writing = them.wait(them.writer())
    us.release(second)
    assert them.woken(writing)
    assert not them.holds(writing, join=True)
    us.release(first)
    assert them.woken(writing, 2)
    assert them.holds(writing)


def test_only_the_end_of_the_writer_ahead_wakes_the_readers_behind_it(us: Ours, them: Ours) -> None:
    writing = us.take(us.writer())
    readers = [them.wait(them.reader()) for _ in range(5)]
    us.release(writing)
    assert all(them.woken(reader) for reader in readers)
    assert all(them.holds(reader) for reader in readers)
    for reader in readers:
        assert them.release(reader)
    assert len(them.ear.wakes) == len(readers)


def test_readers_behind_a_writer_that_leaves_the_queue_enter_at_once(us: Ours, them: Ours) -> None:
    us.take(us.reader())
    writing = them.wait(them.writer())
    behind = [us.wait(us.reader()) for _ in range(3)]
    them.release(writing)
    assert all(us.woken(reader) for reader in behind)
    assert all(us.holds(reader) for reader in behind)


def test_a_permit_released_by_any_holder_is_granted_again(us: Ours, them: Ours) -> None:
    """Any holder that leaves wakes the waiter, not only the one just ahead."""
    for leaver in range(3):
        holders = [us.take(us.permit()) for _ in range(3)]
        waiting = them.wait(them.permit())
        us.release(holders.pop(leaver))
        assert them.woken(waiting), leaver
        assert them.holds(waiting)
        assert all(us.release(holder) for holder in holders)
        assert them.release(waiting)


def test_permits_wait_for_a_writer_ahead_and_then_for_a_free_permit(us: Ours, them: Ours) -> None:
    first = us.take(us.permit(1))
    writing, waiting = them.wait(them.writer()), us.wait(us.permit(1))
    us.release(first)
    assert them.woken(writing)
    assert them.holds(writing)
    them.release(writing)
    assert us.woken(waiting)
    assert us.holds(waiting)


@pytest.mark.parametrize("permits", [3, 20])
def test_forty_waiters_are_served_in_any_order_of_releases_without_a_timer(
    open_ours: Callable[..., Ours], below: Below, permits: int
) -> None:
    clients = [open_ours() for _ in range(4)]
    heard = dict.fromkeys(clients, 0)
    waiting: dict[str, tuple[Ours, Claim]] = {}
    holding: list[tuple[Ours, Claim]] = []
    woken = 0

    def come(client: Ours, claim: Claim) -> None:
        if client.holds(claim, join=True):
            holding.append((client, claim))
            waiting.pop(claim.id, None)
        else:
            waiting[claim.id] = client, claim

    def hear() -> int:
        """Let every waiter that was notified since the last call ask again. Returns the number of notifications."""
        told = 0
        for client in clients:
            for claim_id in client.ear.wakes[heard[client] :]:
                heard[client] += 1
                # after a reconnect, None is reported, which stands for every waiter
                for waiter in [claim_id] if claim_id else list(waiting):
                    if waiter in waiting:
                        told += claim_id is not None
                        come(*waiting[waiter])
        return told

    for number in range(permits + 40):
        client = clients[number % 4]
        come(client, client.permit(permits))
    assert (len(holding), len(waiting)) == (permits, 40)
    while holding:
        client, claim = holding.pop(random.randrange(len(holding)))
        client.release(claim)
        room = min(permits, len(holding) + len(waiting))
        while len(holding) < room:
            eventually(lambda: any(len(each.ear.wakes) > heard[each] for each in clients), LONG)
            woken += hear()
        assert len(holding) <= permits
    assert waiting == {}
    assert below.empty()
    if permits == 3:
        assert woken <= 40 * permits


# ---- tokens


@pytest.mark.oracle
def test_tokens_grow_although_the_parent_node_is_recreated_with_low_numbers(us: Ours, them: Ours, below: Below) -> None:
    """The token of a writer is greater than those of all earlier readers, and less than those of all later ones."""
    tokens = []
    for make in (Ours.writer, Ours.reader, Ours.permit, Ours.writer):
        for ours in (us, them) if make is Ours.reader else (us,):
            held = ours.take(make(ours))
            tokens.append(ours.token(held))
            ours.release(held)
        below.client.delete(below.path)
    assert tokens == sorted(set(tokens))


# ---- losses, and force releases


def test_a_reader_whose_node_is_deleted_is_notified_and_the_others_are_renewed(
    us: Ours, them: Ours, below: Below
) -> None:
    claims = [us.take(us.reader()), us.take(us.reader())]
    other = them.take(them.reader())
    held = [(claim, us.grant(claim)) for claim in claims]
    us.backend.watch(held[1][1].group, held[1:], WITHIN)
    below.client.delete(f"{below.path}/{below.nodes()[1]}")
    assert us.ear.wait(lambda: us.ear.losses == [(claims[1].id, LossReason.TAKEN)])
    assert [answer is not None for answer in us.backend.renew(held[0][1].group, held, WITHIN)] == [True, False]
    assert them.backend.renew(them.grant(other).group, [(other, them.grant(other))], WITHIN) != [None]
    assert them.ear.losses == []


def test_force_release_takes_the_name_from_all_holders_and_from_no_waiter(us: Ours, them: Ours, below: Below) -> None:
    for claim in [us.reader(), us.reader()]:
        us.take(claim)
    writing, behind = them.wait(them.writer()), them.wait(them.reader())
    assert them.backend.force_release(NAME, WITHIN) is True
    assert len(below.nodes()) == 2
    assert them.woken(writing)
    assert them.holds(writing)
    assert not them.holds(behind, join=True)
    assert them.backend.force_release(NAME, WITHIN) is True
    assert them.woken(behind)
    assert them.holds(behind)
    assert them.backend.force_release(NAME, WITHIN) is True
    assert them.backend.force_release(NAME, WITHIN) is False
    assert below.empty()


def test_inspect_distinguishes_holders_from_waiters_of_every_mode(us: Ours, them: Ours, below: Below) -> None:
    first, second = us.take(us.reader()), them.take(them.reader())
    below.stand("kazoo__rlock__")
    them.wait(them.writer())
    them.wait(them.reader())
    info = us.backend.inspect(NAME, WITHIN)
    assert info is not None
    assert (info.kind, info.token, (info.owner or "").partition("@")[0]) == ("read", us.token(first), first.id)
    assert (info.holders, info.waiting, info.permits) == (3, 2, None)
    assert [(one.kind, one.owner and one.token) for one in info.others] == [
        ("read", them.token(second)),
        ("read", None),
    ]
    [listed] = us.backend.inspect_all("", WITHIN)
    assert (listed.holders, listed.waiting, listed.others) == (3, 2, ())


def test_inspect_shows_how_many_permits_there_are(us: Ours, below: Below) -> None:
    below.stand("other!p2__lock__")
    us.take(us.permit(2))
    us.wait(us.permit(2))
    info = us.backend.inspect(NAME, WITHIN)
    assert info is not None
    assert (info.kind, info.permits, info.holders, info.waiting) == ("permit", 2, 2, 1)
    assert [(one.kind, one.permits) for one in info.others] == [("permit", 2)]


def test_of_hundreds_of_holders_inspect_shows_some_and_force_release_removes_all(us: Ours, below: Below) -> None:
    many = DELETED_AT_ONCE + 20
    below.client.ensure_path(below.path)
    made = [
        below.client.create_async(f"{below.path}/{number}__rlock__", b"", ephemeral=True, sequence=True)
        for number in range(many)
    ]
    for each in made:
        each.get(SOON)
    info = us.backend.inspect(NAME, WITHIN)
    assert info is not None
    assert (info.holders, len(info.others)) == (many, SHOWN - 1)
    assert us.backend.force_release(NAME, WITHIN) is True
    assert below.empty()


# ---- lost replies


@pytest.fixture
def proxy(shared: ZooKeeperServer) -> Iterator[FaultProxy]:
    with FaultProxy.before(shared.url, shared.port) as proxy:
        yield proxy


@pytest.fixture
def quick(proxy: FaultProxy, prefix: str) -> Iterator[Ours]:
    ours = Ours(proxy.url, prefix, ttl=QUICK)
    yield ours
    ours.close()


def answered(ours: Ours, claim: Claim) -> bool:
    """Return whether the claim holds the name. Returns False if the request gets no reply, because the client may still
    use the old connection."""
    try:
        return ours.holds(claim, join=True)
    except BackendUnavailable:
        return False


@pytest.mark.oracle
@pytest.mark.parametrize("then", ["cut", "hold"])
@pytest.mark.parametrize(("mode", "request_"), [("reader", b"__rlock__"), ("permit", b"!p3__lock__")])
def test_an_acquire_whose_reply_is_lost_leaves_one_node_and_its_token(
    quick: Ours, proxy: FaultProxy, below: Below, mode: str, request_: bytes, then: Any
) -> None:
    first, claim = quick.take(MODES[mode](quick)), MODES[mode](quick)
    lost = proxy.drop_reply(request_, then=then)
    with pytest.raises(BackendUnavailable):
        quick.backend.attempt(claim, True, QUICK / 3)
    lost.wait(SOON)
    eventually(lambda: answered(quick, claim))
    assert quick.token(claim) > quick.token(first)
    assert len(below.nodes()) == 2
    assert quick.release(claim)
    assert len(below.nodes()) == 1


@pytest.mark.parametrize(("mode", "request_"), [("reader", b"__rlock__"), ("permit", b"!p3__lock__")])
def test_a_cancel_also_stops_a_request_that_is_executed_later(
    quick: Ours, proxy: FaultProxy, below: Below, mode: str, request_: bytes
) -> None:
    kept, claim = quick.take(MODES[mode](quick)), MODES[mode](quick)
    held = proxy.hold_request(request_)
    with pytest.raises(BackendUnavailable):
        quick.backend.attempt(claim, True, 0.5)
    held.wait(SOON)
    held.release()
    quick.backend.release(claim, None, True, WITHIN)
    assert len(below.nodes()) == 1
    assert not quick.holds(claim, join=True)
    assert quick.release(kept)
    assert below.empty()
