"""The three conditions of a distributed lock: one holder at a time; free after its holder died; released only by its
holder.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row04_three_conditions.py

You should see each of the three conditions hold, on any backend.
"""

import subprocess
import sys
import time

import multilock

DIES = """
import os, multilock
multilock.connect().lock("stock", ttl=2.0).acquire(timeout=30)
print("held", flush=True)
os._exit(1)  # exits without a release
"""

with multilock.connect() as client, multilock.connect() as other:
    first = client.lock("stock", ttl=2.0).acquire()
    assert other.lock("stock").try_acquire() is None
    print("1: one holder at a time")

    assert first.release()
    second = other.lock("stock", ttl=2.0).acquire()
    assert first.release() is False  # a repeated, late release is harmless: the server checks and deletes in one step
    assert second.is_held()
    assert client.lock("stock").try_acquire() is None
    assert second.release()
    print("2: released only by its holder, and as often as you like")

    subprocess.run([sys.executable, "-c", DIES], check=False)
    since = time.monotonic()
    with client.lock("stock").acquire(timeout=60):
        print(f"3: freed {time.monotonic() - since:.1f} s after its holder died")
