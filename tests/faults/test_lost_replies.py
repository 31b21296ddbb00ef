"""The server executed a request, but its reply was lost. The conformance suite loses the replies of renewals."""

from __future__ import annotations

from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Recorder, eventually
from tests.faults.conftest import Connect, Operator

KEY = "multilock/n"


def test_after_an_acquire_with_a_lost_reply_one_release_frees_the_lock(
    connect: Connect, proxy: FaultProxy, operator: Operator
) -> None:
    client = connect(proxy.url)
    lost = proxy.drop_reply(b"EVALSHA")
    lease = client.lock("n").acquire(timeout=5)
    lost.wait(5)
    assert operator.get(KEY).decode() == lease.owner
    assert lease.release()
    assert operator.get(KEY) is None
    [tombstone] = operator.keys("*:gone:*")  # if the attempt arrives late, the server refuses it because of this key
    assert 0 < operator.ttl(tombstone) <= 60


def test_a_release_whose_reply_is_lost_never_frees_the_next_holders_lock(
    connect: Connect, proxy: FaultProxy, operator: Operator
) -> None:
    client, other = connect(proxy.url), connect()
    lease = client.lock("n", renew=False).acquire(timeout=5)
    lost = proxy.drop_reply(b"EVALSHA")
    assert lease.release()
    lost.wait(5)
    following = other.lock("n").acquire(timeout=5)
    eventually(lambda: operator.keys("*:gone:*"))  # the request was sent again, and executed
    assert operator.get(KEY).decode() == following.owner
    assert following.fence() > (lease.token or 0)
    following.renew()


def test_a_late_release_after_max_hold_never_frees_the_next_holders_lock(
    connect: Connect, proxy: FaultProxy, operator: Operator
) -> None:
    losses: Recorder[object] = Recorder()
    client, other = connect(proxy.url), connect()
    lease = client.lock("n", ttl=12, renew=False, max_hold=1.2, on_lost=losses).acquire(timeout=5)
    assert losses.wait(1, within=20)
    assert operator.get(KEY).decode() == lease.owner  # the lock stays taken, because its holder may still work
    lost = proxy.drop_reply(b"EVALSHA")
    assert not lease.release()
    lost.wait(5)
    following = other.lock("n").acquire(timeout=5)
    eventually(lambda: operator.keys("*:gone:*"))  # the request was sent again, and executed
    assert operator.get(KEY).decode() == following.owner
    following.renew()
