"""A server sends GOAWAY and then closes: no lock is lost, no handover is delayed, and no error of gRPC reaches the
caller."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from multilock import LeaseState, Loss, LossReason
from multilock.testing.conformance.base import Recorder, answers, eventually, queued, until_renewed
from multilock.testing.conformance.faces import background
from tests.backends.etcd.conftest import Connect
from tests.backends.etcd.goaway import ENHANCE_YOUR_CALM, GoawayProxy
from tests.backends.etcd.test_faults import keys
from tests.servers_etcd import EtcdCluster, EtcdServer, etcdctl

Goodbye = Callable[[GoawayProxy], int]

WAYS: dict[str, Goodbye] = {
    "it drains": lambda proxy: proxy.say_goodbye(),
    "it drains and ends": lambda proxy: proxy.say_goodbye(close=True),
    "it was pinged too often": lambda proxy: proxy.say_goodbye(ENHANCE_YOUR_CALM, b"too_many_pings", close=True),
    "it has taken no request": lambda proxy: proxy.say_goodbye(last_stream=0, close=True),
}


@pytest.fixture(params=WAYS)
def say_goodbye(request: pytest.FixtureRequest) -> Goodbye:
    return WAYS[request.param]


@pytest.fixture
def polite(server: EtcdServer) -> Iterator[GoawayProxy]:
    with GoawayProxy(server.endpoint) as proxy:
        yield proxy


def test_a_held_lock_moves_to_a_new_connection_and_its_loss_is_still_pushed(
    server: EtcdServer, polite: GoawayProxy, connect: Connect, say_goodbye: Goodbye
) -> None:
    lost = Recorder[Loss]()
    client = connect(polite.url, ttl=4)
    lease = client.lock("kept", on_lost=lost).acquire()
    # With this ttl the loss is not found by a renewal.
    pushed = client.lock("job", ttl=60, on_lost=lost).acquire()
    time.sleep(0.5)  # the client creates the watch 0.25 s after the grant
    made = polite.made
    assert say_goodbye(polite) > 0
    until_renewed(lease, within=4)
    assert polite.made > made
    eventually(lambda: lease.state is pushed.state is LeaseState.HELD)
    assert lost.calls == []
    etcdctl(server.endpoint, "del", "--prefix", "multilock/job/")
    assert lost.wait().reason is LossReason.TAKEN
    with client.lock("job").acquire(timeout=5) as again:
        assert again.is_held()
    assert lease.release()
    eventually(lambda: keys(server) == [])


def test_a_waiter_is_woken_although_the_member_asks_its_clients_to_leave(
    server: EtcdServer, polite: GoawayProxy, connect: Connect, say_goodbye: Goodbye
) -> None:
    theirs, ours = connect(server.url, ttl=20), connect(polite.url, ttl=20)
    holder = theirs.lock("job").acquire()
    waits = background(lambda: (ours.lock("job").acquire(timeout=30), time.monotonic())[1])
    eventually(lambda: queued(theirs, "job") == 1)
    made = polite.made
    assert say_goodbye(polite) > 0
    eventually(lambda: answers(ours) and polite.made > made)
    begun = time.monotonic()
    assert holder.release()
    assert waits.result(20) - begun < 8  # without the watch, a safety timer would wake the waiter after 20 s


def test_locks_work_while_a_member_keeps_asking_its_clients_to_leave(
    server: EtcdServer, polite: GoawayProxy, connect: Connect, say_goodbye: Goodbye
) -> None:
    client = connect(polite.url, ttl=6)
    over = threading.Event()
    inside = dict.fromkeys(("red", "green"), 0)
    taken = dict.fromkeys(inside, 0)

    def come_and_go(name: str) -> None:
        while not over.is_set():
            with client.lock(name).acquire(timeout=20):
                inside[name] += 1
                assert inside[name] == 1
                taken[name] += 1
                inside[name] -= 1

    lease = client.lock("kept").acquire()
    crews = [background(lambda name=name: come_and_go(name)) for name in inside for _ in range(2)]  # type: ignore[misc]
    for _ in range(10):
        before = dict(taken)
        eventually(lambda: all(taken[name] > before[name] for name in taken))  # noqa: B023
        eventually(lambda: say_goodbye(polite) > 0)
    over.set()
    for crew in crews:
        crew.result(20)
    lease.check()
    assert lease.release()
    eventually(lambda: keys(server) == [])


@pytest.mark.timeout(150)
def test_shutting_a_member_down_costs_neither_a_lock_nor_a_place_in_the_queue(
    cluster: EtcdCluster, connect: Connect
) -> None:
    first, *rest = cluster.members
    url = "etcd://" + ",".join(member.endpoint for member in (first, *rest))
    lost = Recorder[Loss]()
    lease = connect(url, ttl=15).lock("held", on_lost=lost).acquire()
    theirs = connect(f"etcd://{rest[0].endpoint},{rest[1].endpoint}", ttl=20).lock("job").acquire(timeout=10)
    waiter = connect(url, ttl=20)
    waits = background(lambda: waiter.lock("job").acquire(timeout=30))
    eventually(lambda: queued(waiter, "job") == 1)
    os.kill(first.pid, signal.SIGTERM)
    eventually(lambda: not first.alive, within=10)
    until_renewed(lease, within=15)
    assert lease.state is LeaseState.HELD
    eventually(lambda: answers(waiter), within=10)
    assert theirs.release()
    begun = time.monotonic()
    assert waits.result(20).is_held()
    assert time.monotonic() - begun < 8
    assert lost.calls == []
