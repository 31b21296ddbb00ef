"""Measure a failover by Sentinel: for how long no lock can be acquired, and when and with which reason a holder is
notified of its loss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import redis

import multilock
from multilock import MultilockError, now
from tests.benchmarks.report import publish
from tests.servers import RedisServer
from tests.servers_sentinel import DOWN_AFTER, Guarded

__all__ = ["failovers"]

RUNS = 5
TTL = 30.0
WITHIN = 60.0

Fault = Callable[[Guarded], None]


def failovers() -> dict[str, dict[str, Any]]:
    ways: dict[str, Fault] = {
        "the primary is killed": lambda guarded: guarded.primary().kill(),
        "the primary stands still": lambda guarded: guarded.primary().pause(),
        "an operator asks for it": _ask,
    }
    found = {}
    with Guarded() as guarded:
        for way, fault in ways.items():
            runs = []
            for _ in range(RUNS):
                guarded.heal()
                runs.append(_failover(guarded, fault))
            found[way] = {name: _summed_up([run[name] for run in runs]) for name in runs[0]}
    return found


def _summed_up(values: list[Any]) -> Any:
    """Return the median and the maximum of these seconds. If the values are texts, return each different text once."""
    if isinstance(values[0], str):
        return ", ".join(sorted(set(values)))
    return {"median": round(median(values), 3), "longest": round(max(values), 3)}


def _ask(guarded: Guarded) -> None:
    guarded.ask_for_failover(guarded.guards[0])


def _failover(guarded: Guarded, fault: Fault) -> dict[str, Any]:
    """Make one failover, and return the times of its events, in seconds after the fault."""
    former = guarded.primary()
    lost: list[tuple[float, multilock.Loss[multilock.Lease]]] = []
    told = threading.Event()

    def on_lost(loss: multilock.Loss[multilock.Lease]) -> None:
        lost.append((now(), loss))
        told.set()

    with multilock.connect(guarded.url, ttl=TTL) as holder, _Taking(guarded.url) as taking:
        kept, gone = holder.lock("kept").acquire(), holder.lock("gone", on_lost=on_lost).acquire()
        _forget(guarded, "kept", reached=True)
        _forget(guarded, "gone")
        at = now()
        fault(guarded)
        guarded.await_other(former)
        named = now()
        told.wait(WITHIN)
        taking.goes_on()
        assert kept.is_held()
        assert not gone.is_held()
        [(told_at, loss)] = lost
        return {
            "s until a Sentinel names another": named - at,
            "s in which no free lock was to be had": taking.longest_gap(),
            "s until the holder of a forgotten lock was told": told_at - at,
            "what it was told": f"{loss.reason.name}: {loss.message}",
        }


class _Taking:
    """A client that repeatedly acquires and releases a free lock, each time with a new name.

    The new primary may not have received the last release, and then keeps the released lock until its ttl ends. So each
    acquire needs a new name.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._taken: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Taking:
        self._thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def goes_on(self) -> None:
        """Wait until this client has acquired once more."""
        before, pause = len(self._taken), threading.Event()
        while len(self._taken) == before:
            pause.wait(0.005)

    def longest_gap(self) -> float:
        return max(later - earlier for earlier, later in pairwise(self._taken))

    def _run(self) -> None:
        with multilock.connect(self._url, ttl=TTL) as client:
            while not self._stop.is_set():
                with contextlib.suppress(MultilockError):
                    client.lock(f"free/{len(self._taken)}").acquire(timeout=WITHIN).release()
                    self._taken.append(now())


def _forget(guarded: Guarded, name: str, *, reached: bool = False) -> None:
    """Delete the lock from the replicas, as if it had not reached them before the fault. With ``reached``, only wait
    until the lock has reached them."""
    pause = threading.Event()
    for replica in guarded.replicas():
        with redis.Redis(port=replica.port) as bare:
            while not bare.exists(f"multilock/{name}"):
                pause.wait(0.01)
            if reached:
                continue
            bare.config_set("replica-read-only", "no")
            bare.delete(f"multilock/{name}")
            bare.config_set("replica-read-only", "yes")


def _versions() -> Mapping[str, str]:
    with RedisServer() as server, redis.Redis(port=server.port) as bare:
        facts: Any = bare.info("server")
    return {"Redis": facts["redis_version"], "down-after": f"{DOWN_AFTER:g} s"}


if __name__ == "__main__":
    publish("failover", _versions, {"failovers": failovers})
