"""Another library's lock on etcd, in its own process and environment: etcd3 needs older libraries than we do.

python tests/benchmarks/peer.py etcd3|etcd3gw PORT      on stdin ``acquire``, ``release``, or a number of cycles; each
                                                        is answered by the seconds it took, a list in JSON
python tests/benchmarks/peer.py etcd3|etcd3gw PORT SECONDS    one process of `tests.benchmarks.crowd`
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from typing import Any

THREADS = 5  # the same as in tests.benchmarks.crowd
# Seconds: a waiter of etcd3 looks first and watches later, and sleeps on if the lock was freed in between.
MISSED = 2.0


def client_of(library: str, port: int) -> Any:
    options = {"etcd3": {}, "etcd3gw": {"api_path": "/v3/"}}[library]
    return importlib.import_module(library).client(port=port, **options)


def lets_etcd3_wait() -> None:
    """Make waiting work: etcd3's own wait function does not fit the one argument that tenacity passes since version
    6."""
    tenacity: Any = importlib.import_module("tenacity")
    retry = tenacity.retry

    def retry_as_before(*, wait: Any, **how: Any) -> Any:
        return retry(wait=lambda state: wait(state.attempt_number, state.seconds_since_start), **how)

    tenacity.retry = retry_as_before


def crowd(library: str, port: int, seconds: float) -> None:
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
            lock.release()
            turns.append((got, got, asked))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(turns), flush=True)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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
        crowd(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    else:
        main(sys.argv[1], int(sys.argv[2]))
