"""Every process records what its clients hold, and `Believers` judges the records."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import multilock
from multilock.testing import Helper, hear, kill, pause, say
from multilock.testing.beliefs import Believers

HOLD = f"{__name__}:hold"
WITHIN = 20.0


def hold(url: str, path: str) -> None:
    """Hold the lock, and wait for commands."""
    with multilock.connect(url) as client:
        Believers(path).watch(client)
        lease = client.lock("n").acquire(WITHIN)
        say("held")
        while order := hear():
            if order == "release":
                lease.release()
            elif order == "lost":
                assert lease.wait_lost(WITHIN)
            say("done", order)


@pytest.fixture
def believers() -> Iterator[Believers]:
    believers = Believers()
    yield believers
    believers.close()
    assert not Path(believers.path).exists()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/locks.db?ttl=1"


@pytest.fixture
def client(url: str, believers: Believers) -> Iterator[multilock.Client]:
    with multilock.connect(url) as client:
        believers.watch(client)
        yield client


def test_threads_that_hold_in_turn_do_not_overlap(believers: Believers) -> None:
    def work() -> None:
        with multilock.connect("memory://turns", ttl=10.0) as client:
            believers.watch(client)
            for _ in range(20):
                with client.lock("n"):
                    pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    verdict = believers.judge()
    assert (verdict.broken, verdict.undecided, verdict.kept, verdict.beliefs) == ((), (), 79, 80)


def test_a_frozen_holder_believes_nothing_while_it_is_frozen(
    believers: Believers, client: multilock.Client, url: str
) -> None:
    with Helper(HOLD, url, believers.path) as helper:
        helper.wait_for("held", WITHIN)
        with pause(helper):
            with client.lock("n").acquire(WITHIN):
                pass
            # The process has recorded nothing since it was frozen, so it may still believe that it holds the lock.
            assert "the end of the first holder's belief was not seen" in believers.judge().undecided[0]
        helper.tell("lost")
        helper.wait_for("done", WITHIN)
        verdict = believers.judge()
    assert (verdict.broken, verdict.undecided, verdict.kept) == ((), (), 1)


def test_a_dead_process_believes_nothing(believers: Believers, client: multilock.Client, url: str) -> None:
    with Helper(HOLD, url, believers.path) as helper:
        helper.wait_for("held", WITHIN)
        kill(helper)
        client.lock("n").acquire(WITHIN).release()
    verdict = believers.judge()
    assert (verdict.broken, verdict.undecided, verdict.kept) == ((), (), 1)


def test_a_handover_between_processes_is_seen_on_both_sides(
    believers: Believers, client: multilock.Client, url: str
) -> None:
    with Helper(HOLD, url, believers.path) as helper:
        helper.wait_for("held", WITHIN)
        helper.tell("release")
        client.lock("n").acquire(WITHIN).release()
        helper.wait_for("done", WITHIN)
        verdict = believers.judge()
    assert (verdict.broken, verdict.undecided, verdict.kept) == ((), (), 1)


def test_two_simultaneous_believers_are_reported(
    believers: Believers, client: multilock.Client, tmp_path: Path
) -> None:
    # Only scheme, prefix and name are compared, so locks in two files count as one name, which both processes hold.
    with Helper(HOLD, f"sqlite://{tmp_path}/other.db", believers.path) as helper:
        helper.wait_for("held", WITHIN)
        with client.lock("n"):
            until = multilock.now() + WITHIN
            while not any(each.startswith("O1 ") for each in believers.judge().broken):
                assert multilock.now() < until
                time.sleep(0.01)
    assert believers.judge().broken[0].startswith("O1 sqlite:multilock/n: two holders for ")


def test_simultaneous_readers_are_not_an_overlap(believers: Believers) -> None:
    with multilock.connect("memory://readers") as client:
        believers.watch(client)
        lock = client.read_write_lock("n")
        with lock.reader(), lock.reader():
            pass
        with lock.writer():
            pass
    verdict = believers.judge()
    assert (verdict.broken, verdict.undecided, verdict.kept) == ((), (), 2)


def test_the_same_name_at_another_server_is_a_different_lock(believers: Believers) -> None:
    with multilock.connect("memory://") as one, multilock.connect("memory://?prefix=other/") as other:
        believers.watch(one)
        believers.watch(other)
        with one.lock("a name, with spaces"), other.lock("a name, with spaces"):
            pass
    assert believers.judge().broken == ()


def test_an_asyncio_client_is_recorded_in_the_same_way(believers: Believers) -> None:
    async def use() -> None:
        async with multilock.connect_async("memory://loop") as client:
            believers.watch(client)
            believers.watch(client)
            for _ in range(3):
                async with client.lock("n"):
                    pass

    asyncio.run(use())
    assert believers.judge().kept == 2


def test_a_forked_child_writes_its_own_record_and_ends_no_belief_of_its_parent(believers: Believers, url: str) -> None:
    with multilock.connect(url) as client:
        believers.watch(client)
        if not (child := os.fork()):
            client.lock("n").acquire(WITHIN)
            believers.close()  # as a fixture would do if it ended in the child
            os._exit(0)
        os.waitpid(child, 0)
        believers.judge()  # this records the death of the child before the lock has another holder
        with client.lock("n").acquire(WITHIN):
            pass
        verdict = believers.judge()
    assert (verdict.broken, verdict.undecided, verdict.beliefs) == ((), (), 2)


def test_the_recorder_can_be_an_argument_of_another_process(believers: Believers) -> None:
    other = pickle.loads(pickle.dumps(believers))  # here both copies are in one process and use one file
    with multilock.connect("memory://pickled") as client:
        other.watch(client)
        with client.lock("n"):
            pass
    other.close()
    assert believers.judge().beliefs == 1


def test_subscribers_of_a_recorded_client_still_receive_their_events(believers: Believers) -> None:
    told: list[multilock.Event] = []
    some = threading.Event()

    def heard(event: multilock.Event) -> None:
        told.append(event)
        some.set()

    with multilock.connect("memory://told") as client:
        client.events.subscribe(lambda event: None)()
        believers.watch(client)
        unsubscribe = client.events.subscribe(heard)
        with client.lock("n"):
            assert some.wait(WITHIN)
        unsubscribe()
        with client.lock("n"):
            pass
    assert isinstance(told[0], multilock.Acquired)
    assert believers.judge().kept == 1


def test_a_client_may_outlive_the_test_that_recorded_it() -> None:
    with multilock.connect("memory://later") as client:
        believers = Believers()
        believers.watch(client)
        held = client.lock("m").acquire()
        believers.close()
        believers.close()
        with client.lock("n"):
            held.release()
