"""Run another library's lock in its own process and environment, because it needs older libraries than multilock.

etcd3 and etcd3gw use etcd, and mithril-locks uses Redis.

``peer.py LIBRARY PORT`` reads ``acquire``, ``release`` or a number of cycles from each line of stdin, and prints a JSON
list of the seconds that each took.

``peer.py LIBRARY PORT SECONDS [HOLD REST]`` is a process of `tests.benchmarks.crowd`. Each contender holds the lock for
HOLD seconds, and requests it again after REST seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

__all__ = ["PEERS_PYTHON", "versions_of"]

PEERS_PYTHON = Path(sys.prefix, "peers", "bin", "python")
THREADS = 5  # the same as in tests.benchmarks.crowd
# The timeout of a waiter in seconds. A waiter of etcd3 reads the key first and watches it later. If the lock was freed
# in between, the waiter waits until its timeout.
MISSED = 2.0


class Mithril:
    """A client of mithril-locks, with the methods of the clients of etcd3 and etcd3gw. It logs only errors, because
    other log lines would go to stdout, to which this program reports."""

    def __init__(self, port: int) -> None:
        structlog, redis = importlib.import_module("structlog"), importlib.import_module("redis")
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        self._library = importlib.import_module("mithril")
        backends = importlib.import_module("mithril.backends._redis")
        self._backend = backends.RedisBackend(redis.Redis(port=port))

    def lock(self, name: str, ttl: float) -> OneByOne:
        return OneByOne(lambda: self._library.Lock(name, backend=self._backend, ttl=ttl, timeout=60.0))


class OneByOne:
    """A lock of a library whose objects can be acquired only once."""

    def __init__(self, new: Callable[[], Any]) -> None:
        self._new = new
        self._lock: Any = None

    def acquire(self) -> bool:
        self._lock = self._new()
        self._lock.acquire()
        return True

    def release(self) -> bool:
        self._lock.release()
        return True


def client_of(library: str, port: int) -> Any:
    if library == "mithril-locks":
        return Mithril(port)
    options = {"etcd3": {}, "etcd3gw": {"api_path": "/v3/"}}[library]
    return importlib.import_module(library).client(port=port, **options)


def lets_etcd3_wait() -> None:
    """Repair etcd3's wait function, which does not accept the single argument that tenacity passes since version 6."""
    tenacity: Any = importlib.import_module("tenacity")
    retry = tenacity.retry

    def retry_as_before(*, wait: Any, **how: Any) -> Any:
        return retry(wait=lambda state: wait(state.attempt_number, state.seconds_since_start), **how)

    tenacity.retry = retry_as_before


def crowd(library: str, port: int, seconds: float, hold: float = 0.0, rest: float = 0.0) -> None:
    if library == "etcd3":
        lets_etcd3_wait()
    limit = {"timeout": MISSED} if library == "etcd3" else {}
    client, turns = client_of(library, port), []
    print("ready", flush=True)
    sys.stdin.readline()
    until = _now() + seconds

    def work() -> None:
        while (asked := _now()) < until:
            lock = client.lock("crowd", ttl=30)
            while not lock.acquire(**limit):
                pass
            got = _now()
            time.sleep(hold)
            back = _now()
            lock.release()
            turns.append((got, back, asked))
            time.sleep(rest)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(turns), flush=True)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def versions_of(peers: Collection[str]) -> dict[str, str]:
    """Return the versions of those libraries that have their own environment and are installed there."""
    if not PEERS_PYTHON.exists():
        print(f"{' and '.join(peers)} left out: make bench installs what is missing", file=sys.stderr)
        return {}
    [packages] = PEERS_PYTHON.parents[1].glob("lib/python*/site-packages")
    found = importlib.metadata.distributions(path=[str(packages)])
    return {each.name: each.version for each in found if each.name in peers}


def main(library: str, port: int) -> None:
    lock = client_of(library, port).lock("bench", ttl=30)
    steps = {"acquire": [lock.acquire], "release": [lock.release]}
    print("[]", flush=True)  # ready
    for line in sys.stdin:
        word = line.strip()
        count, calls = (1, steps[word]) if word in steps else (int(word), [lock.acquire, lock.release])
        took = []
        for _ in range(count):
            start = time.perf_counter()
            for call in calls:
                assert call()
            took.append(time.perf_counter() - start)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        crowd(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:]))
    else:
        main(sys.argv[1], int(sys.argv[2]))
