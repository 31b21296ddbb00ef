"""Fault tolerance: the server falls silent, and the holder is notified before another process can hold the lock.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row09_fault_tolerance.py

You should see the lease lost with time to spare, and the next holder after that. If an unanswered request took the lock
during the outage, multilock releases it. With several independent servers (`redlock://`) a lock survives the silence of
one server.
"""

import os

import multilock
from multilock.testing import FaultProxy

with (
    FaultProxy.before(os.environ["MULTILOCK_URL"]) as proxy,
    multilock.connect(proxy.url, ttl=4.0, outage_timeout=1.5) as client,
    multilock.connect() as other,
):
    lease = client.lock("stock").acquire()
    proxy.black_hole()  # from now on no byte arrives, and no connection is closed
    try:
        client.lock("another").acquire()
    except multilock.BackendUnavailable:
        print("no answer: whether it was taken is unknown, so it is being released")
    loss = lease.wait_lost(timeout=30)
    assert loss is not None
    print(f"lost ({loss.reason.value}) {loss.time_left:.2f} s before others can get in")
    with other.lock("stock").acquire(timeout=30):
        print("the next holder")
    proxy.heal()  # the earlier requests arrive now
    with other.lock("another").acquire(timeout=30):
        print("what was half taken is free")
