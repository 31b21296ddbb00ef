"""The functions that the helper processes of `multilock.testing.conformance.ProcessConformance` call.

This file is outside the package of the suites, because that package imports pytest, which takes longer than everything
else in the start of a helper.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import multilock
from multilock import BackendUnavailable, Client, Lease, LeaseState, NotHeld, now
from multilock.kernel.holding import Holding
from multilock.testing.process import hear, say

__all__ = ["NAME", "perform"]

NAME = "orders/42"  # the name of the lock in the suites
WITHIN = 5.0  # seconds that a step without a fault may take


def _wait_until(ready: Callable[[], object]) -> None:
    """Wait for state that no event reports. The test ends this process if it waits too long."""
    while not ready():
        time.sleep(0.003)


def perform(module: str, function: str, *arguments: str) -> None:
    """Call one of the functions below, after importing ``module``, which registers the backend."""
    importlib.import_module(module)
    globals()[function](*arguments)


def _client(url: str, prefix: str, ttl: str) -> Client:
    return multilock.connect(url, prefix=prefix, ttl=float(ttl))


def _granted_at(lease: Lease) -> float:
    return cast("Holding", lease).granted_at


def hold(url: str, prefix: str, ttl: str) -> None:
    """Hold the lock, and report its state or release it when the test asks."""
    lease = _client(url, prefix, ttl).lock(NAME, on_lost=lambda loss: say("lost", loss.reason.value)).acquire()
    say("held", lease.token)
    while (line := hear()) is not None:
        if line == "report":
            say("report", lease.is_held())
        elif line == "release":
            say("released", lease.release())


def hold_and_exit(url: str, prefix: str, ttl: str) -> None:
    """Exit while the lock is held."""
    lease = _client(url, prefix, ttl).lock(NAME, on_lost=lambda loss: say("lost")).acquire()
    say("held", lease.token)


def rest(url: str, prefix: str, ttl: str, seconds: str) -> None:
    """Release a lock that has ``hold_at_least``, so that the name stays taken, and wait for the test."""
    lease = _client(url, prefix, ttl).lock(NAME, hold_at_least=float(seconds)).acquire()
    lease.release()
    say("rests", _granted_at(lease) + float(seconds))
    hear()


def hold_resting_and_exit(url: str, prefix: str, ttl: str, seconds: str) -> None:
    """Exit while holding a lock that has ``hold_at_least``."""
    lease = _client(url, prefix, ttl).lock(NAME, hold_at_least=float(seconds)).acquire()
    say("rests", _granted_at(lease) + float(seconds))


def exit_with_a_waiter(url: str, prefix: str, ttl: str) -> None:
    """Exit while a thread waits for the lock."""
    client = _client(url, prefix, ttl)
    client.lock("another").acquire()
    threading.Thread(target=client.lock(NAME).acquire, daemon=True).start()
    _wait_until(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
    say("waiting")


def exit_with_waiters_of_its_own(url: str, prefix: str, ttl: str) -> None:
    """Exit while the lock is held and threads of this process wait for it."""
    clients = [_client(url, prefix, ttl) for _ in range(2)]
    clients[0].lock(NAME).acquire()
    for client in clients:
        threading.Thread(target=client.lock(NAME).acquire, daemon=True).start()
    _wait_until(lambda: (info := clients[0].inspect(NAME)) and info.waiting in (None, 2))
    time.sleep(0.3)  # time in which the threads join the queue, for backends that do not count waiters
    say("waiting")


def fork(url: str, prefix: str, ttl: str) -> None:
    """Fork while the lock is held, and report what the child sees."""
    client = _client(url, prefix, ttl)
    losses: list[Any] = []
    lease = client.lock(NAME, on_lost=losses.append).acquire()
    say("held", lease.token)
    child = os.fork()
    if child == 0:
        say("child", *_what_a_child_sees(client, lease, losses))
        os._exit(0)
    os.waitpid(child, 0)
    lease.renew()
    say("parent", lease.is_held())
    hear()


def _what_a_child_sees(client: Client, lease: Any, losses: list[Any]) -> Iterator[str]:
    yield "released" if lease.state is LeaseState.RELEASED and not lease.is_held() else "held"
    try:
        lease.check()
    except NotHeld:
        yield "NotHeld"
    yield str(lease.release())
    try:
        client.current_lease()
    except NotHeld:
        yield "NotHeld"
    yield "refused" if client.lock(NAME).try_acquire() is None else "taken"
    with client.lock("another").acquire(timeout=WITHIN):
        yield "free"
    yield "callback" if losses else "no-callback"


CLEAN_UP = 0.5  # seconds that a leader's work needs for its clean-up


def serve(url: str, prefix: str, ttl: str) -> None:
    """Work while this node leads, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def work(leadership: multilock.Leadership) -> None:
        say("begins", now())
        while leadership.is_held():
            time.sleep(0.01)
        time.sleep(CLEAN_UP)
        say("ends", now())

    with _client(url, prefix, ttl) as client, client.election(NAME, on_elected=work):
        say("ready")
        threading.Event().wait()


def serve_async(url: str, prefix: str, ttl: str) -> None:
    """Do the same as `serve`, under asyncio."""

    async def work(leadership: multilock.AsyncLeadership) -> None:
        say("begins", now())
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(CLEAN_UP)
            say("ends", now())

    async def main() -> None:
        end = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
        client = multilock.connect_async(url, prefix=prefix, ttl=float(ttl))
        async with client, client.election(NAME, on_elected=work):
            say("ready")
            await end.wait()

    asyncio.run(main())


def believe(url: str, prefix: str, ttl: str) -> None:
    """Acquire and release again and again. At the end, report each interval in which this process believed that it held
    the lock."""
    client = _client(url, prefix, ttl)
    say("ready")
    end = threading.Event()

    def wait_for_the_test() -> None:
        hear()
        end.set()

    threading.Thread(target=wait_for_the_test, daemon=True).start()
    beliefs = []
    while not end.is_set():
        try:
            lease = client.lock(NAME).try_acquire(timeout=0.5)
        except BackendUnavailable:
            continue  # the process was frozen during a request, and its session or the timeout ended
        if lease is None:
            continue
        begun = now()
        last = begun
        while lease.is_held() and now() < begun + float(ttl) / 2:
            last = now() if lease.is_held() else last
            time.sleep(0.002)
        if lease.is_held():
            last = now()
        lease.release()
        beliefs.append((begun, last))
    for begun, last in beliefs:
        say("belief", begun, last)
    say("ended")
    sys.stdout.flush()
