"""Row 1, a Redis lock with a watchdog: a limit, a value of its own, renewal every ttl/3, the standard library's lock.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row01_watchdog.py

You should see the lock held for longer than its ttl, refused to another meanwhile, and a Condition over it.
"""

import threading
import time

import multilock

with multilock.connect() as client, multilock.connect() as other:
    lock = client.lock("stock", ttl=3.0)
    with lock.acquire(timeout=5) as lease:
        time.sleep(4)  # longer than the ttl: the watchdog renews
        assert lease.is_held()
        assert other.lock("stock").try_acquire() is None
        print(f"held by {lease.owner} for longer than its ttl, and refused to another")
    assert lease.release() is False  # released once, by `with`; its renewal has ended too

    # Where a threading.Lock is expected; `acquire(blocking=True, timeout=-1)` as the standard library has it.
    condition = threading.Condition(lock.as_threading_lock())  # type: ignore[arg-type]  # typeshed names the classes
    with condition:
        condition.notify_all()
    print("works as a threading.Lock")
