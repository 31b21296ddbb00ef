"""Redisson's lock: tryLock(wait, lease) with a fixed lease time, and with a watchdog if no lease time is given.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row08_redisson.py

You should see the fixed lease expire and a waiter get the lock, and the renewed lease live longer than its ttl.
"""

import time

import multilock

with multilock.connect() as client, multilock.connect() as other:
    fixed = client.lock("fixed", ttl=2.0, renew=False)  # leaseTime
    lease = fixed.try_acquire(timeout=1.0)  # waitTime; the server notifies the waiter if it can
    assert lease is not None
    print(f"fixed: {lease.remaining():.1f} s left, never renewed")
    with other.lock("fixed").acquire(timeout=60):
        assert not lease.is_held()
        print("another got it when its time was over")

    with client.lock("watched", ttl=3.0) as watched:  # the default ttl is 30, renewed every 10
        time.sleep(4)
        print("watched: held", watched.is_held())
