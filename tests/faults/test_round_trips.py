"""A client far from its server keeps a thousand locks, and reports their losses in time.

`make chaos` also runs it over a shorter distance: ``MULTILOCK_ROUND_TRIPS`` lists the round trips in seconds,
separated by commas.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest

from multilock import now
from multilock.testing import Helper
from multilock.testing.beliefs import Record
from multilock.testing.conformance.base import eventually
from tests.faults.chaos import ConsulArena, EtcdArena, RedisArena, ServerArena, ZooKeeperArena

pytestmark = pytest.mark.slow

LOCKS = 1_000
WANTED = 10  # the number of locks that a second process, near the server, acquires afterwards
TTL = 6.0
ROUND_TRIPS = [float(each) for each in os.environ.get("MULTILOCK_ROUND_TRIPS", "0.1").split(",")]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize(
    "arena",
    [RedisArena, EtcdArena, *(pytest.param(each, marks=pytest.mark.rare) for each in (ConsulArena, ZooKeeperArena))],
    ids=lambda arena: arena.scheme,
)
def test_a_thousand_locks_far_from_the_server_are_kept_and_losses_are_reported_in_time(
    arena: type[ServerArena], round_trip: float
) -> None:
    with ExitStack() as stack:

        def keep(url: str, locks: int) -> Helper:
            return stack.enter_context(Helper("tests.faults.contender:keep", url, TTL, "n", 0, locks))

        place = arena(stack)
        way = place.networks[0]
        way.delay(round_trip / 2)
        keeper = keep(way.url, LOCKS)
        ready = float(keeper.wait_for("ready", within=60)[1])
        time.sleep(max(0.0, ready + 2 * TTL - now()))
        record = recorded(keeper)
        assert len(record.beliefs) == LOCKS
        assert [belief for belief in record.beliefs.values() if belief.losses or belief.over] == []

        rival = keep(place.url, WANTED)
        way.black_hole()
        eventually(lambda: sum(line.startswith("lost") for line in keeper.lines) == LOCKS, within=3 * TTL)
        rival.wait_for("ready", within=4 * TTL)
        way.heal()
        for helper in (keeper, rival):
            helper.tell("stop")
        for helper in (keeper, rival):
            helper.wait_for("end", within=20)
        record = recorded(keeper, rival)
        # A thousand callbacks at once start slowly, but each starts before the next holder has the lock.
        assert [*record.late_callbacks(slack=TTL / 5)] == []
        assert [*record.overlaps(), *record.token_regressions(), *record.wrong] == []
        assert [*record.miscounted_callbacks({keeper.pid})] == []


def recorded(*helpers: Helper) -> Record:
    record = Record()
    for helper in helpers:
        for line in helper.lines.copy():
            record.feed(helper.pid, line)
    return record
