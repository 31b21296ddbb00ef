"""Holders in other processes that end, or are killed or stopped."""

from __future__ import annotations

import signal
import time

import pytest

from multilock import Client, now
from multilock.testing import Helper
from tests.crossprocess.conftest import Start

START = 20.0  # seconds for a process to start on a busy machine
SOON = 5.0
LATE = 1.5  # seconds of delay that are tolerated on a machine that pauses at times
FACES = pytest.mark.parametrize("hold", ["hold", "hold_on_loop"])
# At the end of its process a client does the same on every backend, so one backend is enough here.
ON_ONE = pytest.mark.parametrize("url", ["sqlite", pytest.param("redis", marks=pytest.mark.rare)], indirect=True)


@FACES
def test_the_lock_of_a_killed_holder_is_free_within_its_ttl(client: Client, start: Start, hold: str) -> None:
    holder = start(hold, 1.0)
    token = int(holder.wait_for("held", START)[1])
    holder.kill()
    killed = now()
    with client.lock("n").acquire(timeout=START) as lease:
        assert now() - killed <= client.capabilities.takeover_bound + LATE
        assert lease.fence() > token


# Only a backend on the same host can see that a process has ended.
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_killed_holder_on_the_same_host_costs_no_ttl(client: Client, start: Start) -> None:
    holder = start("hold", 30.0)
    holder.wait_for("held", START)
    holder.kill()
    killed = now()
    with client.lock("n").acquire(timeout=START):
        assert now() - killed < SOON


@FACES
def test_a_holder_frozen_beyond_its_ttl_notices_it_when_it_resumes(client: Client, start: Start, hold: str) -> None:
    holder = start(hold, 0.8)
    holder.wait_for("held", START)
    with holder.paused():
        following = client.lock("n", ttl=10.0).acquire(timeout=START)
        time.sleep(0.2)  # let the holder notice its deadline more than a tenth of a ttl late, which counts as a pause
    holder.tell("report")
    assert holder.wait_for("report", SOON)[1:] == ["False", "lost"]
    assert holder.wait_for("lost", SOON)[1:] == ["paused"]
    holder.tell("release")
    assert holder.wait_for("released", SOON)[1:] == ["False"]
    following.renew()  # the release of the former holder did not touch this lock
    assert [line for line in holder.lines if line.startswith("lost")] == ["lost paused"]


@ON_ONE
@FACES
def test_a_holder_frozen_for_less_than_its_ttl_keeps_its_lock(client: Client, start: Start, hold: str) -> None:
    holder = start(hold, 3.0)
    holder.wait_for("held", START)
    with holder.paused():
        time.sleep(0.5)
    holder.tell("report")
    assert holder.wait_for("report", SOON)[1] == "True"
    assert client.lock("n").try_acquire() is None
    holder.tell("release")
    assert holder.wait_for("released", SOON)[1:] == ["True"]


@ON_ONE
@FACES
@pytest.mark.parametrize("ending", ["return", "raise", "sys.exit"])
def test_a_program_that_ends_releases_its_locks(client: Client, start: Start, hold: str, ending: str) -> None:
    holder = start(hold, 30.0, ending)
    holder.wait_for("held", START)
    holder.wait(START)
    assert client.lock("n").try_acquire() is not None
    assert not [line for line in holder.lines if line.startswith("lost")]


@pytest.mark.parametrize(("function", "arguments"), [("hold", ["os._exit"]), ("die_by_sigterm", [])])
def test_a_program_that_ends_abruptly_costs_at_most_the_ttl(
    client: Client, start: Start, function: str, arguments: list[str]
) -> None:
    holder = start(function, 1.0, *arguments)
    holder.wait_for("held", START)
    assert holder.wait(START) in (4, -signal.SIGTERM)
    ended = now()
    with client.lock("n").acquire(timeout=START):
        assert now() - ended <= client.capabilities.takeover_bound + LATE


def test_a_killed_waiter_delays_no_other(client: Client, start: Start) -> None:
    lease = client.lock("n").acquire(timeout=SOON)
    first, second = _queued(start, 6.0), _queued(start, 6.0)  # a dead waiter keeps its place for 6 s
    first.kill()
    released = now()
    lease.release()
    assert float(second.wait_for("got", START)[1]) - released < LATE


def test_a_frozen_waiter_delays_the_next_at_most_by_its_own_liveness(client: Client, start: Start) -> None:
    lease = client.lock("n").acquire(timeout=SOON)
    first, second = _queued(start, 1.0), _queued(start, 1.0)
    with first.paused():
        released = now()
        lease.release()
        got = float(second.wait_for("got", START)[1])
        assert got - released <= client.capabilities.takeover_bound + LATE
    first.wait_for("got", START)  # the frozen waiter has lost its turn but still gets the lock


def _queued(start: Start, ttl: float) -> Helper:
    helper = start("wait", ttl)
    helper.wait_for("queued", START)
    return helper
