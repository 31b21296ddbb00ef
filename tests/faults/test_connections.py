"""Connections that are made late, break, or are cut by the server."""

from __future__ import annotations

import threading

import pytest
from redis.connection import Connection

from multilock import BackendUnavailable, LeaseState, Loss, now
from multilock.testing.conformance.base import Recorder, eventually, queued
from multilock.testing.conformance.faces import background
from multilock_redis.transport import Endpoint
from tests.faults.conftest import Connect, Operator


def test_a_connection_that_is_made_too_late_is_closed(redis_url: str) -> None:
    go_on = threading.Event()
    made: list[Connection] = []
    dials: list[threading.Thread] = []

    class Slow(Connection):
        def connect(self) -> None:
            dials.append(threading.current_thread())
            assert go_on.wait(30)
            super().connect()  # type: ignore[no-untyped-call]
            made.append(self)

    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(BackendUnavailable, match="within"):
        Endpoint("redis", Slow, {"port": port}).connect(0.05, now)
    go_on.set()
    dials[0].join(30)
    assert made[0]._sock is None


def test_a_holder_and_its_waiter_survive_the_end_of_every_connection(connect: Connect, operator: Operator) -> None:
    losses: Recorder[Loss] = Recorder()
    client, other = connect(ttl=3.0), connect(ttl=3.0)
    lease = client.lock("n", on_lost=losses).acquire(timeout=5)
    waiting = background(lambda: other.lock("n").acquire(timeout=20))
    eventually(lambda: queued(client, "n") == 1)
    until = now() + 3.5
    while now() < until:
        _cut(operator)
        eventually(lambda: lease.state is LeaseState.HELD)
    assert losses.calls == []
    assert lease.release()
    assert waiting.result(5).is_held()


def test_twenty_waiters_whose_subscription_is_cut_are_all_served_at_once(connect: Connect, operator: Operator) -> None:
    client, other = connect(), connect()
    lease = client.lock("n").acquire(timeout=5)
    served: Recorder[int] = Recorder()

    def wait() -> None:
        with other.lock("n", fair=True).acquire(timeout=20) as its:
            served(its.fence())

    waiting = [background(wait) for _ in range(20)]
    eventually(lambda: (info := client.inspect("n")) and info.waiting == 20)
    operator.client_kill_filter(_type="pubsub")
    assert lease.release()
    served.wait(20, within=10)  # with heartbeats alone this would take 20 times 2 s
    assert served.calls == sorted(served.calls)
    for one in waiting:
        one.result(5)
    eventually(lambda: operator.zcard("{multilock/n}:queue") == 0)


def _cut(operator: Operator) -> None:
    me = operator.client_id()
    for each in operator.client_list():
        if int(each["id"]) != me:
            operator.client_kill_filter(_id=each["id"])
