"""A Redis lock with a watchdog: a ttl, an owner id, renewal every ttl/3, and use as a threading.Lock.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row01_watchdog.py

You should see the lock held for longer than its ttl, refused to another client meanwhile, and used by a Condition.
"""

import threading
import time

import multilock

with multilock.connect() as client, multilock.connect() as other:
    lock = client.lock("stock", ttl=3.0)
    with lock.acquire(timeout=5) as lease:
        time.sleep(4)  # longer than the ttl, but the watchdog renews
        assert lease.is_held()
        assert other.lock("stock").try_acquire() is None
        print(f"held by {lease.owner} for longer than its ttl, and refused to another")
    assert lease.release() is False  # `with` has released it already

    # `as_threading_lock()` returns an object with the methods of a threading.Lock, such as
    # `acquire(blocking=True, timeout=-1)`.
    condition = threading.Condition(lock.as_threading_lock())  # type: ignore[arg-type]  # typeshed names the classes
    with condition:
        condition.notify_all()
    print("works as a threading.Lock")
