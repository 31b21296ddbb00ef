"""TryLock, Lock and Unlock: "not obtained" is a result, and "no answer" is an error.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row02_try_lock.py

You should see one refused attempt, a wait that times out, a wait that succeeds, and an error for a silent server.
"""

import threading

import multilock

with multilock.connect() as client, multilock.connect() as other:
    lease = client.lock("stock").acquire()
    print("one attempt:", other.lock("stock").try_acquire())
    try:
        other.lock("stock").acquire(timeout=0.3)
    except multilock.LockTimeout as error:
        print("a wait with a limit:", error)
    threading.Timer(0.2, lease.release).start()
    with other.lock("stock").acquire(timeout=5):
        print("a wait that succeeds")

with multilock.connect("redis://127.0.0.1:1", outage_timeout=0.2) as nowhere:  # no server listens there
    try:
        nowhere.lock("stock").acquire()
    except multilock.BackendUnavailable as error:
        print("no answer:", error)
