"""Locks on three servers, whose leader dies or freezes, or whose majority is down for a while."""

from __future__ import annotations

import time

import pytest

from multilock import LeaseState, Loss, LossReason, now
from multilock.testing.conformance.base import Recorder, answers, by_the_clock, eventually, until_renewed
from multilock.testing.conformance.faces import background
from tests.backends.zookeeper.conftest import Connect
from tests.servers_zookeeper import ZooKeeperCluster

pytestmark = pytest.mark.timeout(150)


@pytest.mark.oracle
def test_a_lock_survives_the_loss_of_the_leader_and_tokens_grow(cluster: ZooKeeperCluster, connect: Connect) -> None:
    """The lease must outlast the election of a leader, and a server that does not reply for a third of the session
    timeout."""
    client, other = connect(cluster.url, ttl=36), connect(cluster.url, ttl=36)
    lease = client.lock("job").acquire()
    token = lease.fence()
    waits = background(lambda: other.lock("job").acquire(timeout=90))
    eventually(lambda: (info := client.inspect("job")) is not None and info.waiting == 1)
    cluster.leader().kill()
    cluster.leader()  # wait for another leader
    until_renewed(lease, within=36)
    assert not waits.done()
    assert lease.release()
    assert waits.result(40).fence() > token


def test_a_frozen_leader_costs_the_lock_in_time_and_other_clients_continue(
    cluster: ZooKeeperCluster, connect: Connect
) -> None:
    lost = Recorder[Loss]()
    leader = cluster.leader()
    holder = connect(f"zookeeper://{leader.endpoint}", ttl=2).lock("job", on_lost=lost).acquire()
    other = connect("zookeeper://" + ",".join(each.endpoint for each in cluster.followers()), ttl=6)
    eventually(lambda: answers(other), within=15)
    leader.pause()
    next_one = other.lock("job").acquire(timeout=25)
    got_in = now()
    loss = lost.wait()
    assert by_the_clock(loss) or loss.reason is LossReason.SESSION_LOST
    assert lost.times[0] <= got_in
    assert not holder.is_held()
    assert next_one.is_held()
    leader.resume()


def test_without_a_majority_no_client_holds_a_lock_and_with_one_all_continue(
    cluster: ZooKeeperCluster, connect: Connect
) -> None:
    lost = Recorder[Loss]()
    client = connect(cluster.url, ttl=3)
    lease = client.lock("job", on_lost=lost).acquire()
    dead = cluster.followers()
    for member in dead:
        member.kill()
    assert by_the_clock(lost.wait(within=10))
    assert lease.state is LeaseState.LOST
    waits = background(lambda: client.lock("job").acquire(timeout=30))
    time.sleep(0.5)
    assert not waits.done()
    for member in dead:
        member.launch()
    assert waits.result(30).is_held()
    assert lost.stays_at(1)
