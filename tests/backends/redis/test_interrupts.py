"""If a KeyboardInterrupt comes while a caller uses a connection for notifications, no notification is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from multilock import dialling, now
from multilock.kernel import worker
from multilock.model import LossReason
from multilock_redis import notices, transport
from tests.backends.kit import interrupted
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, connected, eventually


def test_an_interrupt_during_a_subscription_leaves_a_client_that_can_wait(
    us: Ours, connect: Connect, bare: Bare
) -> None:
    us.take()
    moment, more = 0, True
    while more:
        moment += 1
        them = connect()
        first, second = them.claim(), them.claim()
        more = interrupted(lambda ours=them, claim=first: ours.attempt(claim, join=True), moment, notices)  # type: ignore[misc]
        them.wait(second)
        bare.publish(f"multilock:wake:{them.ear.client}", second.id)
        them.ear.hears("wake", second.id)
        them.close()
    assert moment > 10


@pytest.mark.parametrize("join", [False, True], ids=["asking", "waiting"])
def test_an_interrupted_client_that_is_closed_has_no_connections(
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
def test_an_interrupt_leaves_the_tracked_connection_to_the_next_request(
    us: Ours, bare: Bare, doing: Callable[[Ours], Callable[[], object]]
) -> None:
    call = doing(us)
    moment = 1
    while interrupted(call, moment, notices):
        held = us.take(us.claim(f"n{moment}"))
        us.watch(held)
        bare.delete(f"multilock/n{moment}")
        us.ear.hears("gone", held[0].id, LossReason.TAKEN)
        moment += 1
    assert moment > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
# An interrupted connection is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupt_while_connecting_releases_the_reserved_connection(us: Ours) -> None:
    endpoint = us.backend._endpoint
    moment = 1
    while interrupted(lambda: endpoint.connect(10.0, now).close(), moment, transport, dialling, worker):
        eventually(lambda: endpoint._dialling.permits.qsize() == transport.CONNECTING_AT_ONCE)
        moment += 1
    assert moment > 10
