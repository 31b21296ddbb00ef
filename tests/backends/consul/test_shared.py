"""Readers and permits: which clients hold a name together, which of them wait, and what they leave at the server."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from multilock import BackendRejected, BackendUnavailable, LossReason, now
from multilock.backend import Busy, Claim
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import SOON, eventually
from multilock.testing.conformance.faces import background
from multilock_consul import transactions
from multilock_consul.acquire_release import Recipe
from multilock_consul.inspection import OTHERS_MAX, TAKEN_AT_ONCE
from multilock_consul.keys import LOCK_FLAGS
from multilock_consul.reader_locks import Readers
from multilock_consul.semaphore import Permits, State
from multilock_consul.sessions import Sessions
from multilock_consul.transactions import BURIED_AT_ONCE, BYTES_AT_ONCE, Transactions
from tests.backends.consul.kit import Ours
from tests.backends.kit import NAME, WITHIN
from tests.servers_consul import ConsulServer

DELAY = 3.0  # seconds of lock delay, for the tests about that delay
MODES: dict[str, Callable[[Ours], Claim]] = {
    "mutex": Ours.mutex,
    "writer": Ours.writer,
    "reader": Ours.reader,
    "permit": Ours.permit,
}


class Below:
    """The keys of this name at the server, read by a plain client."""

    def __init__(self, server: ConsulServer, prefix: str) -> None:
        self.server = server
        self.folder = f"{prefix}{NAME}/"

    def left(self) -> list[str]:
        self.server.ask("PUT", "kv/ready", b"")  # the server returns no list if it has no key
        found: list[str] = self.server.ask("GET", "kv/?keys&consistent")
        return [key.removeprefix(self.folder) for key in found if key.startswith(self.folder)]

    def empty(self) -> bool:
        return self.left() == []

    def delete(self, key: str) -> None:
        self.server.ask("DELETE", f"kv/{self.folder}{key}")

    def end(self, session: str) -> float:
        """End a session as an operator does. Returns the time of the request."""
        began = now()
        self.server.ask("PUT", f"session/destroy/{session}")
        return began

    def write(self, *operations: dict[str, Any]) -> None:
        self.server.ask("PUT", "txn", [{"KV": each} for each in operations])


@pytest.fixture
def prefix() -> str:
    return f"shared-{uuid.uuid4().hex[:8]}/"


@pytest.fixture
def below(shared: ConsulServer, prefix: str) -> Below:
    return Below(shared, prefix)


@pytest.fixture
def open_ours(shared: ConsulServer, prefix: str) -> Iterator[Callable[..., Ours]]:
    opened: list[Ours] = []

    def make(url: str = shared.url, **options: object) -> Ours:
        opened.append(Ours(url, prefix, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def us(open_ours: Callable[..., Ours]) -> Ours:
    return open_ours(lock_delay=DELAY)


@pytest.fixture
def them(open_ours: Callable[..., Ours]) -> Ours:
    return open_ours(lock_delay=DELAY)


def come_in(ours: Ours, claim: Claim) -> float:
    """Repeat the attempt until the claim is granted, as a kernel does. Returns the time of the grant."""
    eventually(lambda: ours.holds(claim, join=True), DELAY + SOON)
    return now()


# ---- which claims may hold a name together


def test_only_equal_modes_hold_together_and_every_other_pair_excludes(us: Ours, them: Ours, below: Below) -> None:
    for first, second in product(MODES, MODES):
        held, other = us.take(MODES[first](us)), MODES[second](them)
        before = below.left()
        together = first == second and first in ("reader", "permit")
        assert them.holds(other) is together, (first, second)
        if not together:
            assert below.left() == before, (first, second)
        them.release(other)
        assert us.release(held)
        assert below.empty(), (first, second)


@pytest.mark.parametrize("join", [True, False], ids=["joins", "tries"])
@pytest.mark.parametrize("kind", ["mutex", "writer", "permit"])
def test_a_client_that_created_the_writers_key_reports_an_unknown_outcome(
    us: Ours, them: Ours, below: Below, monkeypatch: pytest.MonkeyPatch, kind: str, join: bool
) -> None:
    """The session of a reader has ended. So the client sends a second request to check the reader's lock delay, and
    this request finds no leader."""
    below.end(us.session(us.take(us.reader())))
    claim = MODES[kind](them)

    def no_leader(*_: object) -> None:
        raise BackendUnavailable("No cluster leader", unknown=False)

    with monkeypatch.context() as patched:
        patched.setattr(Transactions, "bury", no_leader)
        with pytest.raises(BackendUnavailable) as silence:
            them.attempt(claim, join)
    assert silence.value.unknown
    them.release(claim, unsure=True)
    come_in(us, us.writer())


@pytest.mark.parametrize("kind", ["writer", "permit"])
def test_a_refused_try_that_could_not_be_undone_reports_an_unknown_outcome(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The reader enters between the two requests of the try, after the read and before the write."""
    us.take(us.reader())
    claim = MODES[kind](them)

    def no_leader(*_: object) -> None:
        raise BackendUnavailable("No cluster leader", unknown=False)

    with monkeypatch.context() as patched:
        patched.setattr(State, "read", property(lambda _: False))
        patched.setattr(Recipe, "_give_back", no_leader)
        with pytest.raises(BackendUnavailable) as silence:
            them.attempt(claim)
    assert silence.value.unknown


def test_a_client_waiting_for_a_vanished_readers_lock_delay_holds_nothing(us: Ours, them: Ours, below: Below) -> None:
    below.end(us.session(us.take(us.reader())))
    claim = them.wait(them.writer())
    assert us.backend.inspect(NAME, WITHIN) is None
    assert not us.backend.force_release(NAME, WITHIN)
    come_in(them, claim)
    assert us.backend.inspect(NAME, WITHIN) is not None


@pytest.mark.parametrize("kind", ["reader", "permit"])
def test_a_release_repeats_its_search_for_a_late_request_the_next_time(
    us: Ours, below: Below, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The server executes the late request during the release of its claim, before the release ends the session."""
    claim = MODES[kind](us)
    late: list[Callable[[], object]] = []
    execute, destroy, leave = Transactions.execute, Sessions.destroy, Permits.leave

    def unanswered(self: Transactions, steps: Any, until: float) -> Any:
        late.append(lambda: execute(self, steps, now() + WITHIN))
        raise BackendUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Transactions, "execute", unanswered)
        with pytest.raises(BackendUnavailable):
            us.attempt(claim)
    left: list[str] = []

    def executed_before(self: Sessions, session: Any, within: float) -> None:
        while late:
            late.pop()()
        destroy(self, session, within)

    def silent_after_the_first(self: Permits, claim: Claim, session: str, until: float) -> bool:
        left.append(session)
        if len(left) > 1:
            raise BackendUnavailable("no answer")
        return leave(self, claim, session, until)

    def silent(*_: object) -> None:
        raise BackendUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Sessions, "destroy", executed_before)
        patched.setattr(Permits, "leave", silent_after_the_first)
        patched.setattr(Readers, "forget", silent)
        with pytest.raises(BackendUnavailable):
            us.release(claim, unsure=True)
    assert not late
    assert not below.empty()
    us.release(claim, unsure=True)
    assert below.empty()


def test_a_writer_waits_for_one_reader_at_a_time_and_a_single_try_for_none(us: Ours, them: Ours) -> None:
    for _ in range(20):
        us.take(us.reader())
    claim = them.writer()
    for _ in range(20):
        them.wait(claim)
    listener = them.backend._listener
    eventually(lambda: sum(bool(query.waiting) for query in list(listener._queries.values())) == 1)
    them.release(claim)
    assert not them.holds(them.writer())
    eventually(lambda: not any(query.waiting for query in list(listener._queries.values())))


@pytest.mark.parametrize("kind", ["writer", "permit"])
def test_a_single_try_beside_readers_never_creates_the_writers_key(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    us.take(us.reader())
    sent: list[object] = []
    monkeypatch.setattr(Transactions, "execute", lambda *request: sent.append(request))
    assert not them.holds(MODES[kind](them))
    assert sent == []


def test_a_single_try_of_a_writer_whose_reply_was_lost_finds_its_own_key(
    far: Ours, proxy: FaultProxy, below: Below
) -> None:
    claim = far.writer()
    lost = proxy.drop_reply(b'"cas"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim)
    lost.wait(SOON)
    assert far.holds(claim)
    assert far.release(claim)
    assert below.empty()


def test_observers_are_notified_of_a_writer_once_the_readers_have_left(
    us: Ours, them: Ours, open_ours: Callable[..., Ours]
) -> None:
    observer = open_ours()
    reading = us.take(us.reader())
    waiting = them.wait(them.writer())
    assert observer.backend.follow(frozenset({NAME}), WITHIN)
    observer.ear.wait(lambda: NAME in observer.ear.changes)
    observer.ear.changes.clear()
    us.release(reading)
    assert them.holds(waiting, join=True)
    assert observer.ear.wait(lambda: NAME in observer.ear.changes, SOON)
    assert them.token(waiting) > us.token(reading)
    assert them.renewed(waiting) == [True]
    assert them.release(waiting)


def test_a_vanished_reader_is_removed_and_observers_are_notified_of_the_writer(
    us: Ours, them: Ours, open_ours: Callable[..., Ours], below: Below
) -> None:
    observer = open_ours()
    below.end(us.session(us.take(us.reader())))
    waiting = them.wait(them.writer())
    assert observer.backend.follow(frozenset({NAME}), WITHIN)
    observer.ear.wait(lambda: NAME in observer.ear.changes)
    observer.ear.changes.clear()
    come_in(them, waiting)
    assert observer.ear.wait(lambda: NAME in observer.ear.changes, SOON)
    assert them.release(waiting)
    assert below.empty()


# ---- how much a server accepts in one request


@pytest.mark.parametrize("at_once", [BYTES_AT_ONCE, 1 << 21], ids=["asked for less", "refused for its size"])
def test_vanished_readers_of_a_very_long_name_are_removed(
    open_ours: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Each key of this name has 12 kB, and seventy keys are more than a server accepts in one request."""
    monkeypatch.setattr(transactions, "BYTES_AT_ONCE", at_once)
    us, them = open_ours(lock_delay=0), open_ours(lock_delay=0)
    name = "\U0001f512" * 1000
    held = [us.take(us.reader(name=name)) for _ in range(70)]
    assert us.renewed(*held) == [True] * 70
    assert them.backend.force_release(name, WITHIN)
    assert us.renewed(*held) == [False] * 70
    held = [us.take(us.reader(name=name)) for _ in range(70)]
    us.backend._sessions.destroy(us.backend._sessions.get(us.session(held[0])), WITHIN)  # type: ignore[arg-type]
    writing = them.writer(name=name)
    come_in(them, writing)
    assert them.release(writing)


def test_there_are_never_more_holders_than_permits(us: Ours, them: Ours) -> None:
    first, *_ = us.take(us.permit()), them.take(them.permit()), us.take(us.permit())
    assert not them.holds(them.permit())
    assert us.release(first)
    them.take(them.permit())


def test_permits_that_come_and_go_at_once_never_exceed_their_number(
    open_ours: Callable[..., Ours], below: Below
) -> None:
    inside: list[int] = []
    most = []

    def work(me: int) -> None:
        ours = open_ours()
        for _ in range(5):
            claim = ours.permit(2)
            eventually(lambda: ours.holds(claim, join=True), 30)  # noqa: B023
            inside.append(me)
            most.append(len(inside))
            inside.remove(me)
            assert ours.release(claim)

    for done in [background(lambda n=n: work(n)) for n in range(6)]:  # type: ignore[misc]
        done.result(60)
    assert max(most) <= 2
    assert below.empty()


def test_a_semaphore_with_one_permit_excludes_and_checks_its_number(us: Ours, them: Ours, below: Below) -> None:
    held = us.take(us.permit(1))
    assert below.left() == [".lock"]
    with pytest.raises(BackendRejected, match="has 1 permits here, but 5 were requested"):
        them.attempt(them.permit(5))
    us.release(held)
    held = us.take(us.permit(5))
    with pytest.raises(BackendRejected, match="has 5 permits here, but 1 were requested"):
        them.attempt(them.permit(1), join=True)
    us.release(held)
    assert below.empty()


@pytest.mark.oracle
def test_a_different_number_of_permits_is_refused_at_once_and_leaves_nothing(
    us: Ours, them: Ours, below: Below
) -> None:
    held = us.take(us.permit(3))
    before, sessions = below.left(), len(below.server.sessions())
    for join in (False, True):
        with pytest.raises(BackendRejected, match="has 3 permits here, but 5 were requested"):
            them.attempt(them.permit(5), join)
        assert (below.left(), len(below.server.sessions())) == (before, sessions)
    us.release(held)
    them.take(them.permit(5))


def test_a_refused_try_for_a_permit_sends_one_request_and_makes_no_session(us: Ours, them: Ours, below: Below) -> None:
    us.take(us.permit(2))
    us.take(us.permit(2))
    sessions = below.server.sessions()
    for join in (False, True):
        assert not them.holds(them.permit(2), join=join)
    assert below.server.sessions() == sessions


# ---- which claim waits for which


@pytest.mark.parametrize("kind", ["mutex", "writer", "permit"])
@pytest.mark.parametrize("renew", [True, False])
def test_a_writer_blocks_new_readers_and_enters_after_the_last_one(
    us: Ours, them: Ours, below: Below, kind: str, renew: bool
) -> None:
    first, second = us.take(us.reader()), us.take(us.reader())
    waiting = them.wait(MODES[kind](them)._replace(renew=renew))
    assert not us.holds(us.reader())
    behind = us.wait(us.reader())
    info = us.backend.inspect(NAME, WITHIN)
    assert info is not None
    assert (info.kind, info.holders, info.waiting) == ("read", 2, 1)
    us.release(second)
    assert not them.holds(waiting, join=True)
    us.release(first)
    assert them.woken(waiting)
    assert them.holds(waiting)
    assert them.token(waiting) > max(us.token(first), us.token(second))
    assert not us.holds(behind, join=True)
    assert them.release(waiting)
    assert us.woken(behind)
    assert us.holds(behind)
    assert us.token(behind) > them.token(waiting)
    assert us.release(behind)
    assert below.empty()


@pytest.mark.parametrize("kind", ["mutex", "writer", "permit"])
@pytest.mark.parametrize("unsure", [True, False])
def test_readers_behind_a_waiter_that_gives_up_are_woken_and_enter(
    us: Ours, them: Ours, below: Below, kind: str, unsure: bool
) -> None:
    us.take(us.reader())
    waiting = them.wait(MODES[kind](them))
    behind = [us.wait(us.reader()) for _ in range(3)]
    them.release(waiting, unsure=unsure)
    assert all(us.woken(reader) for reader in behind)
    assert all(us.holds(reader) for reader in behind)
    assert them.is_over(waiting)
    assert all("!r/" in key for key in below.left())


@pytest.mark.parametrize("renew", [True, False])
def test_a_refused_try_of_a_writer_blocks_no_reader(us: Ours, them: Ours, below: Below, renew: bool) -> None:
    us.take(us.reader())
    for make in (Ours.mutex, Ours.writer, Ours.permit):
        assert not them.holds(make(them, renew=renew))
        us.take(us.reader())
    assert all("!r/" in key for key in below.left())


def test_a_writer_without_renewal_may_wait_for_readers_longer_than_its_session_lives(
    open_ours: Callable[..., Ours],
) -> None:
    us, them = open_ours(), open_ours()
    reading = us.take(us.reader())
    waiting = them.writer(renew=False, ttl=1.0)
    until = now() + 4.0  # the server ends a session after twice its ttl
    while now() < until:
        busy = them.attempt(waiting, join=True)
        assert isinstance(busy, Busy)
        assert busy.heartbeat < 0.5, "it asks again in time"
        them.ear.wait(lambda: False, 0.3)
    assert not us.holds(us.reader())
    us.release(reading)
    before = now()
    come_in(them, waiting)
    assert them.grant(waiting).sent_at >= before - 0.5


def test_each_holder_that_leaves_admits_one_waiter(us: Ours, them: Ours) -> None:
    for leaver in range(3):
        holders = [us.take(us.permit()) for _ in range(3)]
        waiting = them.wait(them.permit())
        us.release(holders.pop(leaver))
        assert them.woken(waiting), leaver
        assert them.holds(waiting)
        assert not us.holds(us.permit())
        assert all(us.release(holder) for holder in holders)
        assert them.release(waiting)


@pytest.mark.parametrize("kind", ["mutex", "reader"])
def test_the_last_holder_that_leaves_wakes_a_waiter_for_permits(us: Ours, them: Ours, below: Below, kind: str) -> None:
    holders = [us.take(us.permit()) for _ in range(3)]
    waiting = them.wait(MODES[kind](them))
    random.shuffle(holders)
    for number, holder in enumerate(holders):
        assert us.release(holder)
        if number < 2:
            assert not them.holds(waiting, join=True)
    assert them.woken(waiting)
    assert them.holds(waiting)
    assert them.release(waiting)
    assert below.empty()


# ---- holders that vanish


@pytest.mark.parametrize("kind", ["mutex", "writer", "permit"])
def test_a_reader_whose_session_ended_counts_until_its_lock_delay_is_over(
    us: Ours, them: Ours, below: Below, kind: str
) -> None:
    claim = us.take(us.reader())
    ended = below.end(us.session(claim))
    waiting = MODES[kind](them)
    assert not them.holds(waiting), "nobody waited when it vanished"
    assert not them.holds(waiting, join=True)
    assert come_in(them, waiting) >= ended + DELAY
    assert us.renewed(claim) == [False]
    assert them.release(waiting)
    assert below.empty()


def test_after_a_readers_session_ended_a_waiting_writer_waits_for_its_lock_delay(
    us: Ours, them: Ours, below: Below
) -> None:
    claim = us.take(us.reader())
    waiting = them.wait(them.writer())
    ended = below.end(us.session(claim))
    assert them.woken(waiting)
    assert not them.holds(waiting, join=True)
    assert come_in(them, waiting) >= ended + DELAY


def test_a_reader_that_releases_a_lost_lease_blocks_no_writer(us: Ours, them: Ours, below: Below) -> None:
    """The reader has noticed its loss, so a writer need not wait for the lock delay."""
    claim = us.take(us.reader())
    below.end(us.session(claim))
    assert us.release(claim) is False
    assert below.empty()
    them.take(them.writer())


def test_more_dead_readers_than_one_transaction_can_hold_are_all_removed(us: Ours, them: Ours, below: Below) -> None:
    session = ""
    for _ in range(2 * BURIED_AT_ONCE + 3):
        session = us.session(us.take(us.reader()))
    ended = below.end(session)
    waiting = them.wait(them.mutex())
    assert come_in(them, waiting) >= ended + DELAY
    assert below.left() == [".lock"]


@pytest.mark.parametrize("kind", ["mutex", "reader", "permit"])
def test_a_permit_whose_session_ended_counts_until_its_lock_delay_is_over(
    us: Ours, them: Ours, below: Below, kind: str
) -> None:
    dead, kept = us.take(us.permit(2)), us.take(us.permit(2))
    ended = below.end(us.session(dead))
    waiting = them.wait(them.permit(2) if kind == "permit" else MODES[kind](them))
    if kind != "permit":
        assert us.release(kept)
    assert come_in(them, waiting) >= ended + DELAY
    assert us.renewed(dead) == [False]
    if kind == "permit":
        assert us.renewed(kept) == [True]
        assert us.release(kept)
    assert them.release(waiting)
    assert below.empty()


def test_each_dead_holder_of_a_permit_has_its_own_lock_delay(us: Ours, them: Ours, below: Below) -> None:
    holders = [us.take(us.permit(2)) for _ in range(2)]
    waiting = them.wait(them.permit(2))
    first = below.end(us.session(holders[0]))
    assert them.woken(waiting)
    eventually(lambda: now() >= first + DELAY / 2, DELAY)
    second = below.end(us.session(holders[1]))
    entered = come_in(them, waiting)
    assert entered >= first + DELAY
    other = them.permit(2)
    assert come_in(them, other) >= second + DELAY
    assert not us.holds(us.permit(2))


def test_the_lock_delay_of_a_plain_lock_excludes_readers_and_permits_too(us: Ours, them: Ours, below: Below) -> None:
    for make in (Ours.reader, Ours.permit):
        held = us.take(us.writer())
        ended = below.end(us.session(held))
        waiting = make(them)
        assert not them.holds(waiting)
        assert come_in(them, waiting) >= ended + DELAY
        assert them.release(waiting)
        us.release(held)
    assert below.empty()


def test_a_waiting_writer_whose_session_ended_blocks_readers_for_its_lock_delay_only(
    us: Ours, them: Ours, below: Below
) -> None:
    us.take(us.reader())
    waiting = them.wait(them.writer())
    key = below.server.key(f"{below.folder}.lock")
    assert key is not None
    below.end(key["Session"])
    behind = us.reader()
    come_in(us, behind)
    assert not them.holds(waiting, join=True), "it begins again, in another session, and waits for both"
    for claim in (behind,):
        us.release(claim)


# ---- losses, and force releases


def test_a_reader_whose_key_is_deleted_is_notified_and_the_others_are_renewed(
    us: Ours, them: Ours, below: Below
) -> None:
    claims = [us.take(us.reader()), us.take(us.reader())]
    other = them.take(them.reader())
    us.backend.watch(us.grant(claims[1]).group, [(claims[1], us.grant(claims[1]))], WITHIN)
    below.delete(f"!r/{claims[1].id}.{us.session(claims[1])}")
    assert us.ear.wait(lambda: us.ear.losses == [(claims[1].id, LossReason.TAKEN)])
    assert us.renewed(*claims) == [True, False]
    assert them.renewed(other) == [True]
    assert them.ear.losses == []
    assert us.release(claims[1]) is False
    assert us.release(claims[0]) is True


def test_each_permit_expires_separately(us: Ours, below: Below) -> None:
    first, second, third = (us.take(us.permit()) for _ in range(3))
    us.backend.watch(us.grant(first).group, [(each, us.grant(each)) for each in (first, second, third)], WITHIN)
    below.end(us.session(first))
    assert us.ear.wait(lambda: (first.id, LossReason.SESSION_LOST) in us.ear.losses)
    below.delete(us.session(second))
    assert us.ear.wait(lambda: (second.id, LossReason.TAKEN) in us.ear.losses)
    assert us.renewed(first, second, third) == [False, False, True]
    assert [us.release(each) for each in (first, second, third)] == [False, False, True]
    assert below.empty()


def test_deleting_the_list_of_permits_loses_those_permits_but_not_the_permits_of_a_new_list(
    us: Ours, them: Ours, below: Below
) -> None:
    first = us.take(us.permit(2))
    below.delete(".lock")
    second = them.take(them.permit(2))
    assert us.renewed(first) == [False]
    assert them.renewed(second) == [True]
    assert us.release(first) is False
    assert them.renewed(second) == [True]
    assert them.release(second)
    assert below.empty()


def test_a_permit_whose_session_gets_no_reply_affects_no_other_permit(
    shared: ConsulServer, us: Ours, proxy: FaultProxy, open_ours: Callable[..., Ours]
) -> None:
    ours = open_ours(proxy.url)
    claims = [ours.take(ours.permit()) for _ in range(2)]
    proxy.drop_reply(b"session/renew")
    held = [(claim, ours.grant(claim)) for claim in claims]
    first, second = ours.backend.renew(held[0][1].group, held, WITHIN)
    assert isinstance(first, BackendUnavailable)
    assert second is not None
    assert not isinstance(second, BackendUnavailable)


def test_force_release_takes_the_name_from_all_holders_and_from_no_waiter(us: Ours, them: Ours, below: Below) -> None:
    for _ in range(2):
        us.take(us.reader())
    writing, behind = them.wait(them.writer()), us.wait(us.reader())
    assert them.backend.force_release(NAME, WITHIN) is True
    assert below.left() == [".lock"], "that of the writer, who is next"
    assert them.woken(writing)
    assert them.holds(writing)
    assert not us.holds(behind, join=True)
    assert them.backend.force_release(NAME, WITHIN) is True
    assert us.woken(behind)
    assert us.holds(behind)
    assert us.backend.force_release(NAME, WITHIN) is True
    assert us.backend.force_release(NAME, WITHIN) is False
    held = [us.take(us.permit(2)) for _ in range(2)]
    waiting = them.wait(them.permit(2))
    assert them.backend.force_release(NAME, WITHIN) is True
    assert them.woken(waiting)
    assert them.holds(waiting)
    assert us.renewed(*held) == [False, False]
    assert [us.release(claim) for claim in held] == [False, False]
    assert them.renewed(waiting) == [True]
    assert them.release(waiting)
    assert below.empty()


def test_inspect_counts_all_holders_and_shows_some_of_them(us: Ours, below: Below) -> None:
    session = below.server.ask("PUT", "session/create", {"TTL": "60s"})["ID"]
    many = max(TAKEN_AT_ONCE, OTHERS_MAX) + 20
    value = b64encode(b"another program").decode()
    lock = {"Verb": "lock", "Value": value, "Flags": LOCK_FLAGS, "Session": session}
    for begin in range(0, many, 60):
        below.write(*({**lock, "Key": f"{below.folder}!r/{n}"} for n in range(begin, min(begin + 60, many))))
    ours = us.take(us.reader())
    info = us.backend.inspect(NAME, WITHIN)
    assert info is not None
    assert (info.kind, info.identity, info.holders, len(info.others)) == (
        "read",
        "another program",
        many + 1,
        OTHERS_MAX,
    )
    [listed] = us.backend.inspect_all("", WITHIN)
    assert (listed.holders, listed.others) == (many + 1, ())
    assert us.backend.force_release(NAME, WITHIN) is True
    assert below.empty()
    assert us.renewed(ours) == [False]
    below.end(session)


def test_permits_and_readers_refuse_a_key_with_unknown_contents(us: Ours, below: Below) -> None:
    for value, flags in ((b"precious", 0), (b"[]", 0xE0F69A2BAA414DE0), (b'{"Limit":"2"}', 0xE0F69A2BAA414DE0)):
        below.server.ask("PUT", f"kv/{below.folder}.lock?flags={flags}", value)
        for make in MODES.values():
            with pytest.raises(BackendRejected, match="in use by another program"):
                us.attempt(make(us))
        assert us.backend.inspect(NAME, WITHIN) is None
        assert us.backend.force_release(NAME, WITHIN) is False
        assert below.left() == [".lock"]


# ---- rest


def test_one_permit_rests_and_the_others_continue(us: Ours, them: Ours, below: Below) -> None:
    claim, other = us.take(us.permit(2)), us.take(us.permit(2))
    granted = us.grant(claim)
    assert us.backend.rest(claim, granted, False, 1.0, WITHIN).ours is True
    began = now()
    assert us.backend.rest(claim, granted, True, 60.0, WITHIN).ours is True, "asked again, it rests already"
    assert us.backend.release(claim, granted, True, WITHIN).ours is False
    info = them.backend.inspect(NAME, WITHIN)
    assert info is not None
    shown = [info, *info.others]
    assert sorted((one.resting_until is not None) for one in shown) == [False, True]
    waiting = them.wait(them.permit(2))
    assert us.renewed(other) == [True]
    assert come_in(them, waiting) >= began + 0.9
    assert us.backend.rest(claim, granted, False, 60.0, WITHIN).ours is False
    assert us.release(other)
    assert them.release(waiting)
    assert below.empty()


# ---- lost replies, and cancels


@pytest.fixture
def proxy(shared: ConsulServer) -> Iterator[FaultProxy]:
    with FaultProxy.before(shared.url, shared.port) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: FaultProxy, open_ours: Callable[..., Ours]) -> Ours:
    return open_ours(proxy.url, lock_delay=DELAY)


def test_a_reader_whose_session_ended_during_its_acquire_does_not_wait_for_itself(
    far: Ours, us: Ours, proxy: FaultProxy, below: Below
) -> None:
    far.release(far.take(far.reader()))  # after this, the session of the client exists
    claim = far.reader()
    lost = proxy.drop_reply(b'"cas"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim, join=True)
    lost.wait(SOON)
    [left] = below.left()
    below.end(left.rpartition(".")[2])
    assert far.holds(claim, join=True)
    assert far.release(claim)
    assert below.empty()
    us.take(us.writer())


def test_a_permit_whose_session_ended_during_its_acquire_leaves_the_list(
    far: Ours, proxy: FaultProxy, below: Below
) -> None:
    other, claim = far.take(far.permit(2)), far.permit(2)
    lost = proxy.drop_reply(b'"cas"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim, join=True)
    lost.wait(SOON)
    [session] = [key for key in below.left() if key not in (".lock", far.session(other))]
    below.end(session)
    with contextlib.suppress(BackendUnavailable):
        far.attempt(claim, join=True)
    far.release(claim, unsure=True)
    key = below.server.ask("GET", f"kv/{below.folder}.lock?raw")
    assert key == {"Limit": 2, "Holders": {far.session(other): True}}
    assert far.release(other)
    assert below.empty()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["reader", "permit"])
def test_an_acquire_whose_reply_is_lost_leaves_one_key_and_its_token(
    far: Ours, proxy: FaultProxy, below: Below, kind: str
) -> None:
    first, claim = far.take(MODES[kind](far)), MODES[kind](far)
    before = len(below.left())
    lost = proxy.drop_reply(b'"cas"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim, join=True)
    lost.wait(SOON)
    assert far.holds(claim, join=True)
    assert far.token(claim) > far.token(first)
    assert len(below.left()) == before + 1
    assert far.renewed(claim, first) == [True, True]
    assert far.release(claim)
    assert far.release(first)
    assert below.empty()


def test_a_reader_whose_reply_was_lost_holds_the_lock_although_a_writer_now_waits(
    far: Ours, them: Ours, proxy: FaultProxy
) -> None:
    claim = far.reader()
    far.release(far.take(far.reader()))  # after this, the session of the client exists
    lost = proxy.drop_reply(b'"cas"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim, join=True)
    lost.wait(SOON)
    waiting = them.wait(them.writer())
    assert far.holds(claim, join=True)
    assert far.release(claim)
    assert them.holds(waiting, join=True)


@pytest.mark.parametrize("kind", ["mutex", "permit"])
def test_a_writer_whose_reply_was_lost_still_waits_for_the_readers(
    far: Ours, us: Ours, proxy: FaultProxy, below: Below, kind: str
) -> None:
    reading, claim = us.take(us.reader()), MODES[kind](far)
    lost = proxy.drop_reply(b'"get-tree"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim, join=True)
    lost.wait(SOON)
    assert not far.holds(claim, join=True)
    assert us.release(reading)
    assert far.holds(claim, join=True)
    assert far.release(claim)
    assert below.empty()


def test_a_cancel_frees_a_key_that_was_locked_again_in_a_later_session(us: Ours, them: Ours, below: Below) -> None:
    """A writer waits for a reader. Its session is not renewed in time, so it locks the key in a new session. The server
    confirms the end of the first session only after that."""
    reading, claim = us.take(us.reader()), them.wait(them.writer())
    sessions = them.backend._sessions
    first = sessions._holding[claim.id]
    sessions.end(first, "it was not renewed in time")
    eventually(lambda: not them.holds(claim, join=True) and sessions._holding[claim.id] is not first, SOON)
    sessions.destroy(first, WITHIN)
    them.release(claim, unsure=True)
    assert us.release(reading)
    assert below.empty()


def test_a_late_refusal_of_an_earlier_attempt_releases_no_lock(
    us: Ours, them: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has given up the first attempt, which is refused because it has read a number of permits that is no
    longer true. A later attempt of the same claim has been granted."""
    other, claim = us.take(us.permit(2)), them.permit(3)
    has_read, refuses = threading.Event(), threading.Event()

    def late(*about: Any) -> State:
        state = look(*about)
        has_read.set()
        refuses.wait(SOON)
        return state

    with monkeypatch.context() as patched:
        look = Permits.look
        patched.setattr(Permits, "look", late)
        first = background(lambda: them.attempt(claim, join=True))
        assert has_read.wait(SOON)
    assert us.release(other)
    assert them.holds(claim, join=True)
    refuses.set()
    with pytest.raises(BackendRejected, match="permits"):
        first.result(SOON)
    assert them.renewed(claim) == [True]


def test_the_end_of_an_earlier_session_is_no_loss_of_a_lock_in_a_later_one(
    us: Ours, them: Ours, below: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has given up the attempt that finds the end of the first session, and reports that end late."""
    reading, claim = us.take(us.reader()), them.wait(them.writer(renew=False))
    sessions = them.backend._sessions
    first = sessions._holding[claim.id]
    ends = sessions._tell_ended

    def granted_meanwhile(session_id: str) -> None:
        monkeypatch.setattr(sessions, "_tell_ended", ends)
        eventually(lambda: them.holds(claim, join=True), DELAY + SOON)
        ends(session_id)

    monkeypatch.setattr(sessions, "_tell_ended", granted_meanwhile)
    assert us.release(reading)
    sessions.destroy(first, WITHIN)
    assert sessions._holding[claim.id] is not first
    assert them.ear.losses == []


@pytest.mark.parametrize("kind", MODES)
def test_a_late_grant_in_an_earlier_session_takes_no_lock_from_a_later_one(
    us: Ours, them: Ours, below: Below, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The caller has given up the first attempt, which has locked a key, but has not recorded that yet. Its session is
    not renewed in time, and a later attempt of the same claim has been granted in a new session."""
    claim, sessions = MODES[kind](them), them.backend._sessions
    has_locked, goes_on = threading.Event(), threading.Event()

    def late(*about: Any) -> bool:
        has_locked.set()
        goes_on.wait(SOON)
        return hold(*about)

    with monkeypatch.context() as patched:
        hold = sessions.hold
        patched.setattr(sessions, "hold", late)
        first = background(lambda: them.opened.attempt(claim, True, WITHIN))
        assert has_locked.wait(SOON)
    [earlier] = sessions._by_id.values()
    sessions.end(earlier, "it was not renewed in time")
    come_in(them, claim)
    goes_on.set()
    first.result(SOON)
    assert them.renewed(claim) == [True]
    assert not us.holds(us.writer())
    assert them.renewed(claim) == [True]
    assert sessions._holding[claim.id] is not earlier


def test_a_key_of_another_waiter_of_this_client_is_left_alone(
    far: Ours, us: Ours, proxy: FaultProxy, below: Below
) -> None:
    """Both waiters share a session, so the key's session does not show which waiter created the key."""
    reading = us.take(us.reader())
    first, second = far.wait(far.writer()), far.writer()
    held = proxy.hold_request(b'"check-')
    asks = background(lambda: far.holds(first, join=True))
    held.wait(SOON)
    below.delete(".lock")
    far.wait(second)
    assert us.release(reading)
    assert far.holds(second, join=True)
    held.release()
    assert asks.result(SOON) is False
    assert far.renewed(second) == [True]


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("kind", ["reader", "permit", "writer"])
def test_a_cancel_also_stops_a_request_that_is_executed_later(
    far: Ours, us: Ours, proxy: FaultProxy, below: Below, kind: str, others: bool
) -> None:
    """The session is used by other claims, or by none. A reader holds the name, so a writer that joins only blocks new
    readers."""
    reading = us.take(us.reader()) if kind != "permit" else us.take(us.permit())
    kept = far.take(far.reader() if kind != "permit" else far.permit()) if others else None
    if kind == "writer" and others:
        far.take(far.mutex(name="another"))
    before = below.left()
    claim = MODES[kind](far)
    held = proxy.hold_request(b'"cas"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim, join=True, within=3.0)
    held.wait(SOON)
    far.release(claim, unsure=True)
    held.release()

    def clean() -> bool:
        if kept:
            assert far.renewed(kept) == [True]  # this renewal also searches for the late request
        for group in tuple(far.ear.sessions):
            far.backend.renew(group, [], WITHIN)
        return below.left() == before

    eventually(clean)
    assert far.is_over(claim)
    assert us.release(reading)


def test_a_permit_granted_during_its_own_cancel_is_removed_from_the_list(
    far: Ours, proxy: FaultProxy, below: Below
) -> None:
    claim = far.permit(2)
    late = proxy.hold_request(b'"cas"')
    with pytest.raises(BackendUnavailable):
        far.attempt(claim, join=True, within=3.0)
    late.wait(SOON)
    ends = proxy.hold_request(b"session/destroy")
    cancel = background(lambda: far.release(claim, unsure=True))
    ends.wait(SOON)
    late.release()
    eventually(lambda: len(below.left()) == 2)
    ends.release()
    cancel.result(WITHIN)
    eventually(below.empty)


@pytest.mark.parametrize("kind", ["reader", "permit"])
def test_a_release_whose_reply_was_lost_is_repeated(far: Ours, proxy: FaultProxy, below: Below, kind: str) -> None:
    claim, other = far.take(MODES[kind](far)), far.take(MODES[kind](far))
    lost = proxy.drop_reply(b'"check-session"')
    with pytest.raises(BackendUnavailable):
        far.release(claim)
    lost.wait(SOON)
    far.release(claim)
    assert far.renewed(other) == [True]
    assert far.release(other)
    assert below.empty()


def test_releasing_one_of_several_permits_keeps_the_number_in_the_list(us: Ours, below: Below) -> None:
    first, second = us.take(us.permit(2)), us.take(us.permit(2))
    assert us.release(first)
    key = below.server.ask("GET", f"kv/{below.folder}.lock?raw")
    assert key == {"Limit": 2, "Holders": {us.session(second): True}}
    assert json.dumps(key)
    assert len(below.server.sessions()) >= 1
