"""Locks on a cluster of three members whose leader dies or freezes, whose majority fails and returns, or whose
endpoints are down or cut off."""

from __future__ import annotations

import time

import pytest

from multilock import BackendRejected, BackendUnavailable, LeaseState, Loss
from multilock.testing.conformance.base import Pulse, Recorder, by_the_clock, eventually, queued, until_renewed
from multilock.testing.conformance.faces import background
from tests.backends.etcd.conftest import Connect
from tests.servers_etcd import EtcdCluster, EtcdProxy, EtcdServer, learner

pytestmark = pytest.mark.timeout(150)


def url_of(*members: EtcdServer) -> str:
    return "etcd://" + ",".join(member.endpoint for member in members)


def leader_first(cluster: EtcdCluster) -> str:
    leader = cluster.leader()
    return url_of(leader, *(member for member in cluster.members if member is not leader))


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_lock_survives_the_loss_of_the_leading_member(cluster: EtcdCluster, connect: Connect, how: str) -> None:
    client = connect(leader_first(cluster), ttl=15)  # an election takes seconds on an overloaded machine
    other = connect(url_of(*cluster.followers()), ttl=6)
    lost = Recorder[Loss]()
    lease = client.lock("job", on_lost=lost).acquire()
    leader = cluster.leader()
    getattr(leader, how)()
    until_renewed(lease, within=15)
    assert lease.state is LeaseState.HELD
    assert other.lock("job").try_acquire(timeout=2) is None
    token = lease.fence()
    waits = background(lambda: other.lock("job").acquire(timeout=10))
    assert lease.release()
    assert waits.result(10).fence() > token
    assert lost.calls == []
    if how == "pause":
        leader.resume()


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_waiter_is_woken_by_a_release_although_its_watched_member_has_gone(
    cluster: EtcdCluster, connect: Connect, how: str
) -> None:
    first, *rest = cluster.followers()
    waiter = connect(url_of(first, *rest, cluster.leader()), ttl=20)
    holder = connect(url_of(cluster.leader()), ttl=20).lock("job").acquire()
    waits = background(lambda: waiter.lock("job").acquire(timeout=30))
    eventually(lambda: queued(waiter, "job") == 1)
    getattr(first, how)()
    eventually(lambda: _silent_seen(waiter), within=10)
    holder.release()
    begun = time.monotonic()
    assert waits.result(20).is_held()
    assert time.monotonic() - begun < 8  # without the watch, a safety timer would wake the waiter after 20 s
    if how == "pause":
        first.resume()


def _silent_seen(client: object) -> bool:
    try:
        client.ping()  # type: ignore[attr-defined]
    except BackendUnavailable:
        return False
    return True


def test_without_a_quorum_the_lock_is_lost_and_with_one_it_can_be_acquired_again(
    cluster: EtcdCluster, connect: Connect
) -> None:
    client = connect(cluster.url, ttl=3)
    lost = Recorder[Loss]()
    with Pulse() as pulse:
        lease = client.lock("job", on_lost=lost).acquire()
        token = lease.fence()
        for member in cluster.followers():
            member.pause()
        loss = lost.wait(within=5)
        assert by_the_clock(loss)
        assert loss.detected_at <= loss.valid_until + pulse.stopped()
    with pytest.raises(BackendUnavailable):
        client.lock("job").try_acquire()
    for member in cluster.members:
        member.resume()
    assert client.lock("job").acquire(timeout=15).fence() > token


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_dead_first_endpoint_costs_no_try(cluster: EtcdCluster, connect: Connect, how: str) -> None:
    first, *rest = cluster.members
    getattr(first, how)()
    cluster_without = EtcdCluster()
    cluster_without.members = rest
    cluster_without.leader()  # wait until the other members have elected a leader
    lease = connect(url_of(first, *rest), ttl=20).lock("job").try_acquire()
    assert lease is not None
    if how == "pause":
        first.resume()


def test_the_client_leaves_a_member_without_a_leader(cluster: EtcdCluster, connect: Connect) -> None:
    """The endpoints belong to two clusters. The member that is asked first has lost its peers, and reports that it has
    no leader."""
    with EtcdCluster() as island:
        alone, *gone = island.members
        for member in gone:
            member.kill()
        client = connect(url_of(alone, *cluster.members), ttl=6)
        assert client.lock("job").acquire(timeout=5).is_held()


def test_diagnose_names_the_silent_endpoint_and_the_members_missing_from_the_url(
    cluster: EtcdCluster, connect: Connect
) -> None:
    first, second, _ = cluster.members
    client = connect(url_of(first, second), ttl=20)
    assert "etcd-few-endpoints" in {finding.code for finding in client.diagnose()}
    second.kill()
    [silent] = [finding for finding in client.diagnose() if finding.code == "etcd-endpoint-silent"]
    assert second.endpoint in silent.message


def test_the_client_leaves_a_learner_for_a_voting_member(server: EtcdServer, connect: Connect) -> None:
    with learner(server) as new:
        connect(url_of(new, server)).ping()
        assert connect(url_of(new, server)).lock("job").try_acquire() is not None
        alone = connect(url_of(new))
        with pytest.raises(BackendUnavailable, match="learner") as caught:
            alone.lock("job").try_acquire()
        assert not caught.value.unknown, "nothing was executed"
        assert "etcd-learner" in {finding.code for finding in alone.diagnose()}


def test_a_grpc_proxy_that_confirms_no_renewal_is_refused_before_any_acquire(
    server: EtcdServer, connect: Connect
) -> None:
    with EtcdProxy(server) as proxy:
        client = connect(proxy.url)
        for lock in (client.lock("job"), client.lock("job", renew=False)):
            with pytest.raises(BackendRejected, match="grpc-proxy"):
                lock.acquire(timeout=5)
        assert client.inspect("job") is None
        assert "etcd-grpc-proxy" in {finding.code for finding in client.diagnose()}
    assert "etcd-grpc-proxy" not in {finding.code for finding in connect(server.url).diagnose()}


def test_diagnose_reports_endpoints_of_several_clusters(server: EtcdServer, connect: Connect) -> None:
    with EtcdServer() as stranger:
        both = connect(f"{server.url},{stranger.endpoint}")
        [finding] = [finding for finding in both.diagnose() if finding.code == "etcd-several-clusters"]
        assert stranger.endpoint in finding.message
    assert "etcd-several-clusters" not in {finding.code for finding in connect(server.url).diagnose()}
