"""One connection to each server, without servers: who handles what, and when."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from multilock import BackendUnavailable
from multilock_redis.redlock.fan import Fan, Lane, Link, Owed, Pool
from multilock_redis.redlock.guard import Guarded
from multilock_redis.transport import Wire
from multilock_redis.wire import ScriptMissing


class Broken:
    """A connection that takes nothing any more."""

    alive = True
    used = 0.0
    unread = False

    def put(self, request: bytes, patience: float) -> bool:
        return False

    def close(self) -> None: ...

    def fileno(self) -> int:
        return -1


def lane_of(wire: Any, now: Callable[[], float]) -> tuple[Fan, Lane]:
    endpoint = Guarded("redis://h", None, {})  # type: ignore[arg-type]
    fan = Fan([Link(endpoint, now, lambda: None)])
    fan.lanes[0].wire = wire
    return fan, fan.lanes[0]


def test_a_send_handles_no_answer() -> None:
    """Its caller holds the lock of a claim, and the answers of others need theirs."""
    wire: Wire | Broken = Broken()
    fan, lane = lane_of(wire, lambda: 0.0)
    handled: list[Any] = []
    lane.owed.append(Owed(handled.append, 1.0))
    assert not lane.send(b"x", [], 0.0)
    assert not handled
    assert fan.owes()
    fan.look(0)
    assert isinstance(handled[0], BackendUnavailable)
    assert not fan.owes()
    fan.close()


def test_a_spare_connection_that_has_ended_is_not_taken() -> None:
    class Spare(Broken):
        def __init__(self, *, ended: bool) -> None:
            self.ended = ended

        def stale(self) -> bool:
            return self.ended

        def close(self) -> None:
            self.alive = False

    fan, lane = lane_of(None, lambda: 0.0)
    spares: list[Any] = [Spare(ended=True), Spare(ended=False)]
    lane.link._spares.extend(spares)
    assert lane.link.take() is spares[1]
    assert not spares[0].alive
    fan.close()


def test_a_late_answer_ends_its_connection_and_marks_the_server_down() -> None:
    class Silent(Broken):
        def finish(self) -> Any:
            raise BlockingIOError

    fan, lane = lane_of(Silent(), lambda: 2.0)
    handled: list[Any] = []
    lane.owed.append(Owed(handled.append, 1.0))
    assert fan.late_in(0.5) == 0.5
    fan.expire(0.9)
    assert not handled
    fan.expire(1.1)
    assert handled[0].unknown
    assert lane.link.down
    assert lane.wire is None
    fan.close()


def test_a_pool_that_closes_sends_again_what_a_server_had_forgotten() -> None:
    ours, server = socket.socketpair()
    sent: list[bytes] = []
    answers: list[Any] = [ScriptMissing("no such script"), 1, 1]

    class Forgetful(Broken):
        def put(self, request: bytes, patience: float) -> bool:
            sent.append(request)
            return True

        def finish(self) -> Any:
            return answers.pop(0)

        def fileno(self) -> int:
            return ours.fileno()

    clock = iter(range(10**6))
    endpoint = Guarded("redis://h", None, {})  # type: ignore[arg-type]
    pool = Pool([Link(endpoint, lambda: 0.0, lambda: None)], lambda: next(clock) / 10**4)
    fan = pool.take()
    lane = fan.lanes[0]
    lane.wire = Forgetful()  # type: ignore[assignment]
    fan.watch(lane, lane.wire)  # type: ignore[arg-type]
    handled: list[Any] = []
    lane.send(b"release", [Owed(handled.append, 9.0, lambda: b"load and release")], 0.0)
    pool.give(fan)
    server.send(b"!")
    pool.close()
    assert sent == [b"release", b"load and release"]
    assert handled == [1]
    ours.close()
    server.close()
