"""Row 9, fault tolerance: the server falls silent, and the holder is told before anybody else can get in.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row09_fault_tolerance.py

You should see the lease at risk, then lost with time to spare, and the next holder later than that. What was half taken
during the outage is given back. With several independent servers (`redlock://`) the lock outlives the silence of one.
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
    proxy.black_hole()  # nothing passes any more, and no connection ends
    try:
        client.lock("another").acquire()
    except multilock.BackendUnavailable:
        print("no answer: whether it was taken is unknown, so it is being given back")
    loss = lease.wait_lost(timeout=30)
    assert loss is not None
    print(f"lost ({loss.reason.value}) {loss.time_left:.2f} s before others can get in")
    with other.lock("stock").acquire(timeout=30):
        print("the next holder")
    proxy.heal()  # the requests of before arrive now, late
    with other.lock("another").acquire(timeout=30):
        print("what was half taken is free")
