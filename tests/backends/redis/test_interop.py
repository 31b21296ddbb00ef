"""Locks of other programs on the key ``<prefix><name>`` exclude ours, and ours exclude theirs."""

from __future__ import annotations

import time

import pytest
from redis.exceptions import LockNotOwnedError

from multilock.model import Busy, Granted
from tests.backends.redis.kit import Bare, Ours, holder_of


def test_redis_pys_lock_and_ours_exclude_each_other(us: Ours, bare: Bare) -> None:
    theirs = bare.lock("multilock/a", timeout=10)
    assert theirs.acquire(blocking=False)
    assert isinstance(us.attempt(us.claim()), Busy)
    theirs.release()

    claim, _ = us.take()
    assert not theirs.acquire(blocking=False)
    us.release(claim)
    assert theirs.acquire(blocking=False)


def test_neither_redis_pys_lock_nor_ours_can_release_the_other(us: Ours, bare: Bare) -> None:
    theirs = bare.lock("multilock/a", timeout=10)
    theirs.acquire()
    assert us.release(us.claim()) is False
    bare.delete("multilock/a")
    claim, _ = us.take()
    with pytest.raises(LockNotOwnedError):
        theirs.release()
    assert holder_of(bare) == claim.owner


def test_our_lock_and_a_plain_set_nx_exclude_each_other(us: Ours, bare: Bare) -> None:
    claim, _ = us.take()
    assert bare.set("multilock/a", "cron", nx=True, px=100) is None
    us.release(claim)
    assert bare.set("multilock/a", "cron", nx=True, px=2000) is True
    waiter = us.claim()
    answer = us.attempt(waiter, join=True)
    assert isinstance(answer, Busy)
    assert answer.expires_in is not None
    # Wait exactly that long, because nothing reports that another program's lock has ended.
    time.sleep(answer.expires_in)
    assert isinstance(us.attempt(waiter, join=True), Granted)


def test_another_programs_lock_without_an_expiry_is_read_at_each_heartbeat(us: Ours, bare: Bare) -> None:
    bare.set("multilock/a", "for ever")
    answer = us.attempt(us.claim(), join=True)
    assert isinstance(answer, Busy)
    assert answer.expires_in is None


def test_another_programs_lock_can_be_force_released(us: Ours, bare: Bare) -> None:
    bare.set("multilock/a", "stuck")
    assert us.backend.force_release("a", 1) is True
    us.take()
