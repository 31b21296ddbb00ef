"""Row 4, the three conditions: one holder at a time; freed when the client dies; released only by its holder.

    MULTILOCK_URL=redis://127.0.0.1:6379/0 python docs/examples/systems/row04_three_conditions.py

You should see each of the three, on whatever backend the URL names.
"""

import subprocess
import sys
import time

import multilock

DIES = """
import os, multilock
multilock.connect().lock("stock", ttl=2.0).acquire(timeout=30)
print("held", flush=True)
os._exit(1)  # nothing is given back
"""

with multilock.connect() as client, multilock.connect() as other:
    first = client.lock("stock", ttl=2.0).acquire()
    assert other.lock("stock").try_acquire() is None
    print("1: one holder at a time")

    assert first.release()
    second = other.lock("stock", ttl=2.0).acquire()
    assert first.release() is False  # again, and late: harmless; check and act are one step on the server
    assert second.is_held()
    assert client.lock("stock").try_acquire() is None
    assert second.release()
    print("2: released only by its holder, and as often as you like")

    subprocess.run([sys.executable, "-c", DIES], check=False)
    since = time.monotonic()
    with client.lock("stock").acquire(timeout=60):
        print(f"3: freed {time.monotonic() - since:.1f} s after its holder died")
