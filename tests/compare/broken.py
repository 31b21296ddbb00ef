"""A correct home-made lock on Redis, and variants of it with one defect each.

The variants take part as ``tests.compare.broken:FromReceipt=redis://…``. A worker process serves many contestants, so
each defect is a class of its own and patches no shared code.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from multilock import now
from multilock.testing.compare.contestants import AdapterClient, AdapterHolding, AdapterLock, Blocking

__all__ = [
    "Boundless",
    "Cached",
    "Chatty",
    "Dying",
    "Endless",
    "FromReceipt",
    "Hanging",
    "LateCallback",
    "Liar",
    "NoCallback",
    "NoControl",
    "PlainDelete",
    "Raising",
    "RepeatedToken",
    "Sound",
]

TAKE = "if redis.call('set', KEYS[1], ARGV[1], 'nx', 'px', ARGV[2]) then return redis.call('incr', KEYS[2]) end"
EXTEND = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end"
GIVE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"
POLL = 0.02
MARGIN = 0.9


class Sound:
    """The correct lock. Its lease counts from the sending of the request, each check reads the clock, a loss calls the
    callback, and a release compares the owner."""

    def __init__(self, url: str, ttl: float) -> None:
        self.ttl = ttl
        self.warm = False
        self.client: Any = redis.Redis.from_url(url, socket_timeout=0.2 * ttl, socket_connect_timeout=0.2 * ttl)

    @classmethod
    def open(cls, url: str, ttl: float) -> Sound:
        return cls(url, ttl)

    @staticmethod
    def take(url: str, name: str) -> bool:
        with redis.Redis.from_url(url) as client:
            return bool(client.delete(name))

    def lock(self, name: str) -> _Lock:
        return _Lock(self, name)

    def close(self) -> None:
        self.client.close()

    # The steps of the lock. Each defect replaces one or more of them.

    def valid_until(self, sent_at: float) -> float:
        return sent_at + MARGIN * self.ttl

    def believes(self, holding: _Holding) -> bool:
        return now() < holding.until

    def token(self, number: int) -> int:
        return number

    def give(self, name: str, owner: str) -> object:
        return self.client.eval(GIVE, 1, name, owner)

    def released(self, holding: _Holding) -> None:
        holding.done.set()


class FromReceipt(Sound):
    def valid_until(self, sent_at: float) -> float:
        return now() + MARGIN * self.ttl


class Cached(Sound):
    def believes(self, holding: _Holding) -> bool:
        return holding.flag


class PlainDelete(Sound):
    def give(self, name: str, owner: str) -> object:
        return self.client.delete(name)


class LateCallback(Sound):
    def released(self, holding: _Holding) -> None:
        holding.done.set()
        holding.tell()


class NoCallback(Blocking):
    """multilock's own lock, except that it never calls the callback."""

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        return _Deaf(Blocking.open(url, ttl))


class _Deaf:
    """A wrapper of a client, a lock or a held lock that does not pass callbacks on."""

    def __init__(self, its: Any) -> None:
        self._its = its

    def __getattr__(self, name: str) -> Any:
        return getattr(self._its, name)

    def lock(self, name: str) -> AdapterLock:
        return _Deaf(self._its.lock(name))

    def acquire(self, timeout: float) -> AdapterHolding | None:
        holding = self._its.acquire(timeout)
        return None if holding is None else _Deaf(holding)

    def on_lost(self, callback: Callable[[], object]) -> None:
        pass


class RepeatedToken(Sound):
    def token(self, number: int) -> int:
        return (number + 1) // 2


class NoControl(Sound):
    """A control that claims to be weak but is correct."""

    control = frozenset({"pause"})


class Raising(Sound):
    def lock(self, name: str) -> _Lock:
        raise OSError("it is broken")


class Hanging(Sound):
    """Hang at each acquire except the first, which only warms up the connection."""

    def valid_until(self, sent_at: float) -> float:
        if self.warm:
            threading.Event().wait()
        self.warm = True
        return super().valid_until(sent_at)


class Dying(Hanging):
    """Die like a process that the kernel kills because it uses too much memory."""

    def valid_until(self, sent_at: float) -> float:
        if self.warm:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().valid_until(sent_at)


class Liar(Sound):
    def believes(self, holding: _Holding) -> bool:
        return "yes"  # type: ignore[return-value]


class Chatty(Sound):
    """Print text, including lines that look like those of a worker."""

    def believes(self, holding: _Holding) -> bool:
        print("held by", self)
        os.write(1, b"over now A\nheld\nlost 1 A\n")
        return super().believes(holding)


class Boundless(Sound):
    @staticmethod
    def bound(url: str, ttl: float) -> float:
        raise OSError("it does not know")


class Endless(Sound):
    @staticmethod
    def bound(url: str, ttl: float) -> float:
        return float("inf")


class _Lock:
    def __init__(self, place: Sound, name: str) -> None:
        self._place, self._name = place, name

    def acquire(self, timeout: float) -> _Holding | None:
        place, owner = self._place, secrets.token_hex(8)
        ends = now() + timeout
        while now() < ends:
            sent_at = now()
            try:
                number = place.client.eval(TAKE, 2, self._name, f"{self._name}:token", owner, int(place.ttl * 1000))
            except redis.RedisError:  # if the server executed the script nevertheless, the lock expires by itself
                owner, number = secrets.token_hex(8), None
            if number and now() < (until := place.valid_until(sent_at)):
                return _Holding(place, self._name, owner, place.token(number), until)
            time.sleep(POLL)
        return None


class _Holding:
    def __init__(self, place: Sound, name: str, owner: str, token: int, until: float) -> None:
        self._place, self._name, self._owner = place, name, owner
        self.token, self.ttl, self.until, self.flag = token, place.ttl, until, True
        self.done = threading.Event()
        self._callback: Callable[[], object] | None = None
        threading.Thread(target=self._renew, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def believes(self) -> bool:
        return self._place.believes(self)

    def on_lost(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def tell(self) -> None:
        if self._callback is not None:
            self._callback()

    def release(self) -> bool:
        lost = now() >= self.until
        self._place.give(self._name, self._owner)
        self._place.released(self)
        return not lost

    def _renew(self) -> None:
        while True:
            for _ in range(40):
                time.sleep(self.ttl / 120)
                if self.done.is_set():
                    return
            sent_at = now()
            try:
                ours = self._place.client.eval(EXTEND, 1, self._name, self._owner, int(self.ttl * 1000))
            except redis.RedisError:
                continue
            if now() >= self.until or not ours:
                self.until, self.flag = min(self.until, now()), False
                return
            self.until = self._place.valid_until(sent_at)

    def _watch(self) -> None:
        while not self.done.wait(POLL / 2):
            if now() >= self.until:
                self.tell()
                return
