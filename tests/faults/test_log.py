"""While log handlers block or raise, no lock is lost, and a loss is reported in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

TTL = 2.0

HOLDER = """
import json, logging, os, sys, threading, time
import multilock

class Raising(logging.Handler):
    def emit(self, record):
        raise ValueError("a handler's bug")

url, handler, name, ttl = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
if handler == "blocks":
    logging.basicConfig()  # to stderr, a pipe that nobody empties
else:
    logging.getLogger("multilock").addHandler(Raising())
client, operator = multilock.connect(url, ttl=ttl), multilock.connect(url, ttl=ttl)
lost, reasons = threading.Event(), []
def on_lost(loss):
    reasons.append(loss.reason.value)
    lost.set()
kept = client.lock(name + "/kept", on_lost=on_lost).acquire()
over = client.lock(name + "/over", ttl=ttl / 2, renew=False, on_lost=lambda loss: reasons.append(loss.reason.value))
over.acquire()
time.sleep(1.3 * ttl)
held = kept.is_held() and operator.lock(name + "/kept").try_acquire() is None
operator.force_release(name + "/kept")
lost.wait(2 * ttl)
print(json.dumps([held, reasons, kept.is_held(), client.is_healthy()]), flush=True)
os._exit(0)  # what `logging` does at exit waits for a handler that hangs
"""


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Return the writing end of a full pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, b"x" * 4096):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize("handler", ["blocks", "raises"])
@pytest.mark.parametrize("backend", ["memory", "redis"])
def test_a_handler_that_blocks_or_raises_costs_no_lock_and_delays_no_callback(
    backend: str, handler: str, full_pipe: int, request: pytest.FixtureRequest
) -> None:
    url = "memory://" if backend == "memory" else request.getfixturevalue("redis_url")
    done = subprocess.run(
        [sys.executable, "-c", HOLDER, url, handler, f"log-{handler}-{os.getpid()}", str(TTL)],
        stdout=subprocess.PIPE,
        stderr=full_pipe,
        text=True,
        timeout=30,
        check=False,
    )
    held, reasons, still_held, healthy = json.loads(done.stdout)
    # The first reason depends on whether the machine paused.
    assert reasons in (["expired", "taken"], ["paused", "taken"])
    assert (held, still_held, healthy) == (True, False, True)
