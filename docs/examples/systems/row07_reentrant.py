"""A reentrant lock: its holder may take it again, and it is free after as many releases.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row07_reentrant.py

You should see the lock held in the inner `with`, still held after it, and free at the end.
"""

import multilock

with multilock.connect() as client, multilock.connect() as other:
    lock = client.lock("account/7", reentrant=True)

    def withdraw(amount: int) -> None:
        with lock as lease:  # works with and without the lock held by the caller
            print("withdraws", amount, "with token", lease.fence())

    with lock:
        withdraw(5)
        assert other.lock("account/7").try_acquire() is None
        print("still held after the inner one ended")
    assert not other.lock("account/7").is_locked()
    print("free")
