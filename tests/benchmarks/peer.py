"""One of the field's locks on etcd, in a process and an environment of its own: etcd3 needs older libraries than we do.

python tests/benchmarks/peer.py etcd3|etcd3gw PORT      on stdin ``acquire``, ``release``, or a number of cycles; each
                                                        is answered by the seconds it took, a list in JSON
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def lock_of(library: str, port: int) -> Any:
    options = {"etcd3": {}, "etcd3gw": {"api_path": "/v3/"}}[library]
    return importlib.import_module(library).client(port=port, **options).lock("bench", ttl=30)


def main(library: str, port: int) -> None:
    lock = lock_of(library, port)
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
    main(sys.argv[1], int(sys.argv[2]))
