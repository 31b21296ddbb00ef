"""The SQLite backend, called directly: its decisions on a clock that the test sets, and its transactions."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import multilock_sqlite
from multilock import BackendUnavailable, now
from multilock.model import Busy, Granted
from multilock.testing import Helper
from multilock.timing import heartbeat
from multilock_sqlite.acquire_release import Recipe
from multilock_sqlite.host import Process
from tests.backends.memory.askers import WITHIN, Asker, Clock
from tests.backends.memory.shared_rules import SharedRules


class TestSqlite(SharedRules):
    scheme = "sqlite"
    open_backend = staticmethod(multilock_sqlite.open_backend)

    @pytest.fixture
    def url(self, path: Path) -> str:
        return f"sqlite://{path}"

    def leftovers(self, asker: Asker) -> list[str]:
        assert isinstance(asker.backend, multilock_sqlite.SqliteBackend)
        with asker.backend._database.request(WITHIN) as sql:
            return [id_ for (id_,) in sql.execute("SELECT id FROM locks UNION ALL SELECT id FROM queue")]

    def test_waiter_looks_less_often_the_longer_it_waits(self, one: Asker, two: Asker, clock: Clock) -> None:
        one.hold(one.claim())
        waiting = two.claim()
        periods = []
        for _ in range(5):
            periods.append(two.wait(waiting).heartbeat)
            clock.advance(0.1)
        assert periods == [0.01, pytest.approx(0.0125), pytest.approx(0.025), pytest.approx(0.0375), 0.04]

    def test_waiter_between_heartbeats_only_reads(self, one: Asker, two: Asker, path: Path) -> None:
        one.hold(one.claim())
        waiting = two.claim()
        two.wait(waiting)
        with writer(path):
            two.wait(waiting)

    def test_attempt_on_a_held_name_only_reads(self, one: Asker, two: Asker, path: Path) -> None:
        one.hold(one.claim())
        with writer(path):
            two.attempt(two.claim(), join=False)

    def test_waiter_that_lost_its_place_joins_again_by_its_heartbeat(
        self, one: Asker, two: Asker, clock: Clock
    ) -> None:
        early, late = one.claim(fair=True), two.claim(fair=True)
        held = one.claim()
        granted = one.hold(held)
        one.wait(early)
        clock.advance(6)
        two.wait(late)
        one.release(held, granted)
        granted = two.hold(late)
        one.wait(early)
        assert self.leftovers(one) == [late.id, early.id]
        two.release(late, granted)
        one.hold(early)

    @pytest.mark.parametrize("stopped", [True, False])
    def test_places_end_after_their_liveness_if_nobody_can_write(
        self, one: Asker, two: Asker, path: Path, clock: Clock, stopped: bool
    ) -> None:
        """If a process is stopped in a transaction, no waiter can send its heartbeat, so places expire."""
        early, late, held = one.claim(fair=True), two.claim(fair=True), one.claim()
        granted = one.hold(held)
        one.wait(early)
        with writer(path) if stopped else contextlib.nullcontext():
            for _ in range(3):
                clock.advance(heartbeat(early.ttl))
                with pytest.raises(BackendUnavailable) if stopped else contextlib.nullcontext():
                    one.backend.attempt(early, True, 0.05)
        one.release(held, granted)
        assert isinstance(two.attempt(late), Granted) is stopped
        assert isinstance(one.attempt(early), Busy) is stopped

    @pytest.mark.oracle
    def test_tokens_grow_over_the_end_of_a_reserved_block(
        self, one: Asker, two: Asker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(multilock_sqlite.acquire_release, "RESERVE", 2)
        tokens = []
        for asker in (one, two) * 4:
            claim = asker.claim()
            granted = asker.hold(claim)
            tokens.append(granted.token)
            asker.release(claim, granted)
        assert tokens == list(range(1, 9))

    def test_old_rows_are_deleted_when_tokens_are_reserved(
        self, one: Asker, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(multilock_sqlite.acquire_release, "RESERVE", 0)
        for name in "abc":
            one.hold(one.claim(name, ttl=30))
        clock.advance(30)
        last = one.claim()
        one.hold(last)
        assert self.leftovers(one) == [last.id]

    # ---- several holders of one name, whose rows the test puts by hand

    def test_several_holders_keep_a_name_until_the_last_has_left(
        self, one: Asker, two: Asker, path: Path, clock: Clock
    ) -> None:
        one.backend.ping(WITHIN)
        for id_, until, process in (("a", 50, GONE), ("b", 20, NOBODYS), ("c", 10, NOBODYS), ("d", 60, GONE)):
            put(path, id_, clock.now + until, process)
        assert isinstance(two.attempt(two.claim(), join=False), Busy)
        clock.advance(19.999)
        assert isinstance(two.attempt(two.claim(), join=False), Busy)
        clock.advance(0.001)
        last = two.claim()
        two.hold(last)
        assert self.leftovers(one) == [last.id], "a holder that another pid namespace would believe in"

    def test_release_keeps_other_holders_of_the_name(self, one: Asker, path: Path, clock: Clock) -> None:
        claim = one.claim()
        granted = one.hold(claim)
        put(path, "other", clock.now + 20, NOBODYS)
        assert one.renew((claim, granted)) == [granted]
        assert one.release(claim, granted) is True
        assert self.leftovers(one) == ["other"]

    def test_rest_keeps_the_row_of_another_holder(self, one: Asker, path: Path, clock: Clock) -> None:
        claim = one.claim()
        granted = one.hold(claim)
        put(path, "other", clock.now + 20, NOBODYS)
        assert one.backend.rest(claim, granted, False, 5, WITHIN)  # type: ignore[attr-defined]
        assert sorted(self.leftovers(one)) == [f"!rests:{claim.id}", "other"]

    def test_force_release_removes_all_holders_of_a_name(self, one: Asker, path: Path, clock: Clock) -> None:
        one.backend.ping(WITHIN)
        for id_, process in (("a", GONE), ("b", NOBODYS), ("c", NOBODYS)):
            put(path, id_, clock.now + 20, process)
        assert [info.token for info in one.backend.inspect_all("", WITHIN)] == [0]
        assert one.backend.force_release("n", WITHIN) is True
        assert self.leftovers(one) == []

    def test_force_release_of_only_dead_holders_returns_false(self, one: Asker, path: Path, clock: Clock) -> None:
        one.backend.ping(WITHIN)
        put(path, "a", clock.now + 20, GONE)
        assert one.backend.force_release("n", WITHIN) is False
        assert self.leftovers(one) == []

    def test_permits_of_dead_processes_do_not_count(self, one: Asker, two: Asker, path: Path, clock: Clock) -> None:
        one.backend.ping(WITHIN)
        put(path, "a", clock.now + 50, GONE, "p2")
        put(path, "b", clock.now + 50, NOBODYS, "p2")
        one.hold(one.permit(2))
        late = two.permit(2)
        assert two.wait(late).expires_in == pytest.approx(30)
        info = two.backend.inspect("n", WITHIN)
        assert info is not None
        assert (info.holders, len(info.others)) == (2, 1)

    @pytest.mark.parametrize("permits", [1, 3])
    def test_permit_released_between_two_reads_of_one_look_is_free(
        self, one: Asker, two: Asker, monkeypatch: pytest.MonkeyPatch, permits: int
    ) -> None:
        """A waiter reads the file twice without a transaction. The first read may find that all permits are taken, and
        the second read that no permit is taken."""
        held = [one.permit(permits) for _ in range(permits)]
        granted = [one.hold(claim) for claim in held]
        waiting = two.permit(permits)
        two.wait(waiting)
        is_full = Recipe._is_full

        def given_back_meanwhile(self: Recipe, *args: Any) -> bool:
            full = is_full(self, *args)
            while held:
                one.release(held.pop(), granted.pop())
            return full

        monkeypatch.setattr(Recipe, "_is_full", given_back_meanwhile)
        two.hold(waiting)

    def test_permit_of_a_dead_process_is_free_although_others_wait_for_it(
        self, one: Asker, two: Asker, path: Path, clock: Clock
    ) -> None:
        one.backend.ping(WITHIN)
        one.hold(one.permit(3))
        first, second = one.permit(3), two.permit(3)
        held = [(claim, one.hold(claim)) for claim in (one.permit(3), one.permit(3))]
        one.wait(first)
        two.wait(second)
        for claim, granted in held:
            one.release(claim, granted)
        for id_ in ("a", "b"):
            put(path, id_, clock.now + 50, GONE, "p3")
        two.hold(second)
        one.hold(first)

    def test_mode_of_dead_holders_does_not_count(self, one: Asker, two: Asker, path: Path, clock: Clock) -> None:
        one.backend.ping(WITHIN)
        put(path, "a", clock.now + 50, GONE, "p3")
        one.hold(one.reader())
        two.hold(two.reader())
        assert "a" not in self.leftovers(one)

    def test_reader_costs_no_more_beside_thousands_of_readers(
        self, one: Asker, two: Asker, path: Path, clock: Clock
    ) -> None:
        def steps() -> int:
            """Return how many instructions of SQLite's virtual machine (in tens) an attempt and a release of a reader
            take."""
            database = one.backend._database  # type: ignore[attr-defined]
            count = 0

            def step() -> None:
                nonlocal count
                count += 1

            reader = one.reader()
            with database.request(WITHIN) as sql:
                sql.set_progress_handler(step, 10)
            granted = one.hold(reader)
            one.renew((reader, granted))
            assert one.release(reader, granted)
            with database.request(WITHIN) as sql:
                sql.set_progress_handler(None, 0)
            return count

        two.hold(two.reader(ttl=300))
        alone = steps()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as sql:
            sql.execute("BEGIN")
            sql.executemany(
                "INSERT INTO locks VALUES ('multilock/n', ?, 'r', 'o', 0, 0, 60, ?, NULL, NULL, NULL, NULL)",
                ((f"id{number}", clock.now + 60) for number in range(5000)),
            )
            sql.execute("COMMIT")
        assert 0 < steps() <= 2 * alone


ME = Process.current()
assert ME is not None
GONE = (ME.space, ME.pid, ME.start - 1)  # a process that had the same pid earlier, and has ended
NOBODYS = (None, None, None)


def put(
    path: Path, id_: str, until: float, process: tuple[str | None, int | None, int | None], mode: str = "r"
) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as sql:
        sql.execute(
            "INSERT INTO locks VALUES ('multilock/n', ?, ?, ?, 0, 0, 60, ?, NULL, ?, ?, ?)",
            (id_, mode, f"{id_}@read:host:1:me:60", until, *process),
        )


@contextlib.contextmanager
def writer(path: Path) -> Iterator[None]:
    """Hold the write lock of the file, over another connection, inside the block."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as sql:
        sql.execute("BEGIN IMMEDIATE")
        yield


@pytest.fixture
def asker(url: str) -> Iterator[Asker]:
    asker = Asker(multilock_sqlite.open_backend(url, {}), now)
    yield asker
    asker.backend.close()


def test_a_file_locked_for_longer_than_a_request_counts_as_silence(asker: Asker, path: Path) -> None:
    asker.backend.ping(WITHIN)
    with writer(path):
        started = time.monotonic()
        with pytest.raises(BackendUnavailable, match=r"locked by another program for more than 0\.2 s") as caught:
            asker.backend.attempt(asker.claim(), True, 0.2)
        assert 0.15 < time.monotonic() - started < 2
    assert caught.value.unknown is False
    asker.hold(asker.claim())


def test_an_error_without_time_to_wait_names_no_tiny_number(asker: Asker, path: Path) -> None:
    asker.backend.ping(WITHIN)
    with writer(path), pytest.raises(BackendUnavailable, match="program and less than 1 ms was left to wait: find"):
        asker.backend.attempt(asker.claim(), True, 5.32e-06)


def test_file_locked_for_less_time_is_waited_for(asker: Asker, path: Path) -> None:
    asker.backend.ping(WITHIN)
    began = threading.Event()

    def write() -> None:
        with writer(path):
            began.set()
            time.sleep(0.2)

    other = threading.Thread(target=write)
    other.start()
    began.wait(WITHIN)
    asker.hold(asker.claim())
    other.join()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupted_request_is_rolled_back_and_blocks_no_other(
    asker: Asker, url: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = asker.claim()
    granted = asker.hold(claim)
    release = Recipe.release

    def interrupted(*arguments: object) -> bool:
        release(*arguments)  # type: ignore[arg-type]
        raise error

    monkeypatch.setattr(Recipe, "release", interrupted)
    with pytest.raises(error):
        asker.release(claim, granted)
    monkeypatch.undo()
    other = Asker(multilock_sqlite.open_backend(url, {}), now)
    assert other.backend.force_release("n", 0.5) is True, "the release was half done"
    other.backend.close()


def test_keyboard_interrupts_at_any_point_leave_no_lock_behind(asker: Asker, url: str) -> None:
    with Helper("tests.backends.sqlite.helpers:interrupt_often", url, 200) as helper:
        helper.wait_for("struck", within=30)
        claim = asker.claim()
        assert isinstance(asker.backend.attempt(claim, True, 0.5), Granted)


def test_request_beyond_the_limit_of_connections_times_out(asker: Asker) -> None:
    database = asker.backend._database  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for _ in range(multilock_sqlite.transport.CONNECTIONS):
            stack.enter_context(database.request(WITHIN))
        with pytest.raises(
            BackendUnavailable, match=r"other requests .* all of its 8 connections to .* for 0\.1 s"
        ) as caught:
            asker.backend.ping(0.1)
        assert not caught.value.unknown
    asker.backend.ping(WITHIN)


def test_threads_of_one_client_share_few_connections(asker: Asker) -> None:
    def work(name: str) -> None:
        for _ in range(20):
            claim = asker.claim(name)
            asker.release(claim, asker.hold(claim))

    threads = [threading.Thread(target=work, args=(f"n{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    database = asker.backend._database  # type: ignore[attr-defined]
    assert 1 <= len(database._idle) <= multilock_sqlite.transport.CONNECTIONS
    asker.backend.close()
    assert not database._idle


def test_closed_backend_has_no_open_connection(url: str) -> None:
    asker = Asker(multilock_sqlite.open_backend(url, {}), now)
    asker.backend.ping(WITHIN)
    before = len(multilock_sqlite.transport._live)
    asker.backend.close()
    assert len(multilock_sqlite.transport._live) == before - 1
