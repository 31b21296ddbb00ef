"""A KeyboardInterrupt at any moment of the caller's work on push connections costs the client no push."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType, ModuleType

import pytest

from multilock.model import LossReason
from multilock_redis import notices, transport
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, connected, eventually


def interrupted(call: Callable[[], object], moment: int, *modules: ModuleType) -> bool:
    """Call the function with an interrupt at one moment of notices.py, or of the modules given.

    CPython looks for signals where a Python function begins, or where a call of a C function returns. Returns False if
    the call has fewer such moments.
    """
    left = moment
    files = {module.__file__ for module in modules or (notices,)}

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        frames = (frame, frame.f_back) if event == "call" else (frame,) if event == "c_return" else ()
        if any(frame and frame.f_code.co_filename in files for frame in frames):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


def test_an_interrupt_at_any_moment_of_subscribing_leaves_a_client_that_can_wait(
    us: Ours, connect: Connect, bare: Bare
) -> None:
    us.take()
    moment, more = 0, True
    while more:
        moment += 1
        them = connect()
        first, second = them.claim(), them.claim()
        more = interrupted(lambda ours=them, claim=first: ours.attempt(claim, join=True), moment)  # type: ignore[misc]
        them.wait(second)
        bare.publish(f"multilock:wake:{them.ear.client}", second.id)
        them.ear.hears("wake", second.id)
        them.close()
    assert moment > 10


@pytest.mark.parametrize("join", [False, True], ids=["asking", "waiting"])
def test_a_client_that_was_interrupted_and_closed_has_no_connection_any_more(
    us: Ours, connect: Connect, bare: Bare, join: bool
) -> None:
    us.take()
    before = connected(bare)
    moment, more = 0, True
    gc.disable()
    try:
        while more:
            moment += 1
            them = connect()
            claim = them.claim()
            more = interrupted(
                lambda ours=them, claim=claim: ours.attempt(claim, join=join),  # type: ignore[misc]
                moment,
                *(notices, transport),
            )
            them.close()
        eventually(lambda: connected(bare) <= before)
    finally:
        gc.enable()
    assert moment > 10


def renewing(us: Ours) -> Callable[[], object]:
    held = us.take(us.claim("kept"))
    us.watch(held)
    return lambda: us.renew(held)


def watching(us: Ours) -> Callable[[], object]:
    held = us.take(us.claim("kept"))
    return lambda: us.watch(held)


@pytest.mark.parametrize("doing", [renewing, watching])
def test_an_interrupt_at_any_moment_of_a_request_on_the_tracked_connection_leaves_it_to_the_next(
    us: Ours, bare: Bare, doing: Callable[[Ours], Callable[[], object]]
) -> None:
    call = doing(us)
    moment = 1
    while interrupted(call, moment):
        held = us.take(us.claim(f"n{moment}"))
        us.watch(held)
        bare.delete(f"multilock/n{moment}")
        us.ear.hears("gone", held[0].id, LossReason.TAKEN)
        moment += 1
    assert moment > 10
