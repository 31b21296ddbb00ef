"""A cache that is filled once, however many processes need an entry at the moment when it expires.

    pip install 'multilock[redis]' redis
    export MULTILOCK_URL=redis://127.0.0.1:6379/0 CACHE_URL=redis://127.0.0.1:6379/1
    python cached_once.py & python cached_once.py & python cached_once.py; wait

You should see "computed" once, and the same value from every process. The other processes wait for the one that
computes.
"""

from __future__ import annotations

import os
import time

import redis

import multilock

client = multilock.connect()  # $MULTILOCK_URL
cache = redis.Redis.from_url(os.environ.get("CACHE_URL", "redis://127.0.0.1:6379/1"), decode_responses=True)


def compute() -> str:
    time.sleep(1.0)  # a slow query
    print("computed by pid", os.getpid(), flush=True)
    return f"made at {time.time():.3f}"


def front_page() -> str:
    """Return the cached page. If the backend does not answer, compute the page without a lock, which is better than no
    page."""
    if found := cache.get("front-page"):
        return str(found)
    try:
        with client.lock("cache/front-page").acquire(timeout=10):
            if found := cache.get("front-page"):  # filled while we waited
                return str(found)
            page = compute()
            cache.set("front-page", page, ex=60)
            return page
    except (multilock.LockTimeout, multilock.LockLost, multilock.BackendUnavailable):
        return compute()


if __name__ == "__main__":
    with client, cache:
        print("page", front_page(), flush=True)
