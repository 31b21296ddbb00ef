"""The memory backend: its decisions on a clock that the test sets, and its notifications."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator

import pytest

import multilock_memory
from multilock import LossReason
from multilock.model import Granted
from multilock_memory.acquire_release import Holder, Name
from tests.backends.memory.askers import WITHIN, Asker, Clock
from tests.backends.memory.shared_rules import SharedRules

_stores = itertools.count()


class TestMemory(SharedRules):
    scheme = "memory"
    open_backend = staticmethod(multilock_memory.open_backend)

    @pytest.fixture
    def url(self) -> Iterator[str]:
        name = f"rules-{next(_stores)}"
        yield f"memory://{name}"
        multilock_memory._stores.pop(name, None)

    def leftovers(self, asker: Asker) -> list[str]:
        assert isinstance(asker.backend, multilock_memory.MemoryBackend)
        return sorted(asker.backend._store.names)

    def test_release_wakes_the_first_waiter_only(self, one: Asker, two: Asker) -> None:
        held, first, second = one.claim(), two.claim(), two.claim()
        granted = one.hold(held)
        two.wait(first)
        two.wait(second)
        one.release(held, granted)
        assert two.ear.told == [("wake", first.id)]

    def test_waiter_that_leaves_a_free_name_wakes_the_next_one(self, one: Asker, two: Asker) -> None:
        held, first, second = one.claim(), two.claim(), two.claim()
        granted = one.hold(held)
        two.wait(first)
        two.wait(second)
        one.release(held, granted)
        two.release(first)
        assert two.ear.told[-1] == ("wake", second.id)

    def test_every_admissible_waiter_is_woken_up_to_the_first_that_must_wait(self, one: Asker, two: Asker) -> None:
        held, readers, writer, late = one.writer(), [two.reader(), two.reader()], two.writer(), two.reader()
        granted = one.hold(held)
        for claim in (*readers, writer, late):
            two.wait(claim)
        one.release(held, granted)
        assert two.ear.told == [("wake", reader.id) for reader in readers]

    def test_as_many_waiters_are_woken_as_permits_are_free(self, one: Asker, two: Asker) -> None:
        held = [(claim, one.hold(claim)) for claim in (one.permit(2), one.permit(2))]
        waiting = [two.permit(2) for _ in range(3)]
        for claim in waiting:
            two.wait(claim)
        one.release(*held[1])
        assert two.ear.told == [("wake", waiting[0].id)]

    def test_writer_that_gives_up_wakes_the_readers_behind_it(self, one: Asker, two: Asker) -> None:
        one.hold(one.reader())
        writer, readers = two.writer(), [two.reader(), two.reader()]
        for claim in (writer, *readers):
            two.wait(claim)
        two.release(writer)
        assert two.ear.told == [("wake", reader.id) for reader in readers]

    def test_a_waiter_for_a_different_number_of_permits_is_woken_and_refused(self, one: Asker, two: Asker) -> None:
        held, first, odd = one.writer(), one.permit(3), two.permit(5)
        granted = one.hold(held)
        one.wait(first)
        two.wait(odd)
        one.release(held, granted)
        one.hold(first)
        assert two.ear.told == [("wake", odd.id)]

    def test_loss_of_one_reader_is_reported_to_no_other_reader(self, one: Asker, two: Asker, clock: Clock) -> None:
        dead, alive = one.reader(ttl=10), two.reader(ttl=30)
        one.hold(dead)
        granted = two.hold(alive)
        clock.advance(10)
        two.renew((alive, granted))
        assert (one.ear.told, two.ear.told) == ([("gone", dead.id, LossReason.TAKEN)], [])

    def test_force_release_is_reported_to_each_holder(self, one: Asker, two: Asker) -> None:
        claims = [one.reader(), one.reader()]
        for claim in claims:
            one.hold(claim)
        two.backend.force_release("n", WITHIN)
        assert one.ear.told == [("gone", claim.id, LossReason.TAKEN) for claim in claims]

    def test_look_beside_thousands_of_readers_reads_few_of_them(
        self, one: Asker, two: Asker, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(2000):
            two.hold(two.reader(ttl=300))
        looked = 0
        ended = Name.ended

        def counted(self: Name, now: float) -> list[Holder]:
            nonlocal looked
            looked += now >= self.none_ends_before
            return ended(self, now)

        monkeypatch.setattr(Name, "ended", counted)
        for _ in range(50):
            clock.advance(0.1)
            reader = one.reader()
            granted = one.hold(reader)
            one.renew((reader, granted))
            assert one.release(reader, granted)
        assert looked == 0

    def test_a_closed_client_leaves_the_queue_and_wakes_the_next_waiter(self, one: Asker, two: Asker) -> None:
        held, first, second = one.claim(), two.claim(fair=True), one.claim(fair=True)
        granted = one.hold(held)
        two.wait(first)
        one.wait(second)
        one.release(held, granted)
        two.backend.close()
        assert one.ear.told == [("wake", second.id)]
        one.hold(second)

    def test_force_release_is_reported_to_the_holder_before_the_next_waiter_is_woken(
        self, one: Asker, two: Asker
    ) -> None:
        held, waiting = one.claim(), one.claim()
        one.hold(held)
        one.wait(waiting)
        two.backend.force_release("n", WITHIN)
        assert one.ear.told == [("gone", held.id, LossReason.TAKEN), ("wake", waiting.id)]

    def test_loss_before_the_watch_began_is_reported_by_the_watch(self, one: Asker, two: Asker) -> None:
        claim, kept = one.claim(), one.claim("kept")
        held = [(claim, one.hold(claim)), (kept, one.hold(kept))]
        two.backend.force_release("n", WITHIN)
        one.ear.told.clear()
        one.backend.watch("memory", held, WITHIN)
        assert one.ear.told == [("gone", claim.id, LossReason.TAKEN)]

    def test_observers_are_notified_of_each_change_of_the_holder(self, one: Asker, two: Asker, clock: Clock) -> None:
        two.backend.follow(frozenset({"n", "other"}), WITHIN)
        claim = one.claim(ttl=30)
        granted = one.hold(claim)
        assert two.ear.told == [("changed", "n")]
        one.release(claim, granted)
        assert two.ear.told == [("changed", "n")] * 2
        two.backend.follow(frozenset({"other"}), WITHIN)
        one.hold(one.claim())
        assert two.ear.told == [("changed", "n")] * 2

    def test_notices_are_sent_outside_the_mutex(self, one: Asker, two: Asker) -> None:
        held, waiting = one.claim(), two.claim()
        granted = one.hold(held)
        two.wait(waiting)
        answers: list[object] = []
        two.ear.on_wake = lambda: answers.append(two.attempt(waiting))
        one.release(held, granted)
        assert [type(answer) for answer in answers] == [Granted]

    def test_stores_with_different_names_are_separate(self, url: str, clock: Clock, one: Asker) -> None:
        one.hold(one.claim())
        for other in (f"{url}-2", f"{url}/2", url.upper().replace("MEMORY", "memory")):
            asker = Asker(multilock_memory.open_backend(other, {}), clock)
            asker.hold(asker.claim())
            asker.backend.close()

    def test_forked_child_begins_with_an_empty_store(self, url: str, one: Asker, clock: Clock) -> None:
        one.hold(one.claim())

        def child() -> bool:
            asker = Asker(multilock_memory.open_backend(url, {}), clock)
            asker.hold(asker.claim())
            return asker.backend.inspect("n", WITHIN) is not None

        with one.backend._store.mutex:  # type: ignore[attr-defined]  # another thread of the parent may hold the mutex
            assert in_child(child)

    def test_hundred_threads_lose_no_wake_up(self, ask: Callable[..., Asker]) -> None:
        inside = 0
        most = 0
        done = []

        def work() -> None:
            nonlocal inside, most
            asker = ask()
            rung = threading.Event()
            asker.ear.on_wake = rung.set
            claim = asker.claim(fair=True)
            while not isinstance(answer := asker.attempt(claim), Granted):
                assert rung.wait(20), "a wake-up was lost"
                rung.clear()
            inside += 1
            most = max(most, inside)
            inside -= 1
            done.append(asker.release(claim, answer))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert (done, most) == ([True] * 100, 1)


def in_child(work: Callable[[], bool]) -> bool:
    """Return the result of ``work`` in a forked child, or False if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0
