"""Helpers for tests that call the backend directly: claims, a recorder of the backend's reports, and a plain client
that reads the server's data."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import pytest
import redis

from multilock import now
from multilock.errors import BackendUnavailable
from multilock.model import Claim, Granted, LossReason, owner_text
from multilock_redis import RedisBackend, open_backend
from multilock_redis.wire import pack
from tests.servers import RedisServer

__all__ = ["Bare", "Ear", "Ours", "busy", "connected", "eventually", "holder_of", "since", "without"]

Bare = Any
"""A `redis.Redis`: its commands are typed for both of its faces at once."""

R = TypeVar("R")

# Seconds to wait for a report; a later one may come from the check of connections, which runs every two seconds.
WITHIN = 2.0


class Ear:
    """`multilock.backend.Notices` that records every call. ``heard`` contains a tuple for each call: the kind of event
    and its subject."""

    def __init__(self) -> None:
        self.client = os.urandom(8).hex()
        self.heard: list[tuple[Any, ...]] = []
        self.pushed: dict[str, Granted] = {}
        self.down: dict[str, str] = {}  # push connections that are down, each with its error
        self.refused = False  # whether a push connection was ever refused
        self._changed = threading.Condition()

    def now(self) -> float:
        return now()

    def wake(self, claim_id: str | None) -> None:
        self._hear("wake", claim_id)

    def granted(self, claim_id: str, granted: Granted) -> None:
        """Record a wake-up, and keep the pushed grant in ``pushed``."""
        self.pushed[claim_id] = granted
        self._hear("wake", claim_id)

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        self._hear("gone", claim_id, reason)

    def changed(self, name: str | None) -> None:
        self._hear("changed", name)

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        self._hear("group", group)

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None: ...

    def group_gone(self, group: Hashable, message: str) -> None:
        self._hear("group_gone", group)

    def silent(self, group: Hashable) -> None:
        self._hear("silent", group)

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        with self._changed:
            if trouble is None:
                self.down.pop(connection, None)
            else:
                self.down[connection] = trouble
                self.refused |= refused

    def hears(self, *what: Any, within: float = WITHIN) -> float:
        """Wait for this event, remove it from ``heard``, and return the present time."""
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.heard, within), f"{what} not in {self.heard}"
            self.heard.remove(what)
            return now()

    def _hear(self, *what: Any) -> None:
        with self._changed:
            self.heard.append(what)
            self._changed.notify_all()


class Ours:
    """One client: its backend and its recorder. A call may take ``within`` seconds."""

    def __init__(self, url: str, within: float = WITHIN, **options: object) -> None:
        self.backend = cast("RedisBackend", open_backend(url, options))
        self.within = within
        self._patient = False
        self.ear = Ear()
        self.backend.open(self.ear)

    def claim(
        self, name: str = "a", ttl: float = 10.0, *, fair: bool = True, kind: str = "lock", permits: int = 0
    ) -> Claim:
        claim_id = f"{self.ear.client}.{os.urandom(16).hex()}"
        owner = owner_text(claim_id, kind, "h", 1, "me", ttl)
        return Claim(name, kind, claim_id, owner, ttl, True, fair, "me", permits)

    def reader(self, name: str = "a", ttl: float = 10.0) -> Claim:
        return self.claim(name, ttl, kind="read")

    def permit(self, permits: int, name: str = "a", ttl: float = 10.0) -> Claim:
        return self.claim(name, ttl, kind="permit", permits=permits)

    def be_patient(self, within: float) -> None:
        """Repeat each later attempt or renewal that gets no reply, as the kernel does.

        A client that learns of another primary closes its connections, so pending requests get no reply.
        """
        self.within = within
        self._patient = True

    def attempt(self, claim: Claim, *, join: bool = False) -> Any:
        return self._ask(lambda: self.backend.attempt(claim, join, self.within))

    def take(self, claim: Claim | None = None) -> tuple[Claim, Granted]:
        claim = claim or self.claim()
        granted = self.attempt(claim)
        assert isinstance(granted, Granted), granted
        return claim, granted

    def wait(self, claim: Claim | None = None) -> Claim:
        """Join the queue of a name that is held."""
        claim = claim or self.claim()
        assert not isinstance(self.attempt(claim, join=True), Granted)
        return claim

    def release(self, claim: Claim, *, unsure: bool = False) -> bool:
        return self.backend.release(claim, None, unsure, self.within).ours

    def renew(self, *held: tuple[Claim, Granted]) -> list[Any]:
        return self._ask(lambda: list(self.backend.renew("group", held, self.within)))

    def watch(self, *held: tuple[Claim, Granted]) -> None:
        self.backend.watch("group", held, self.within)

    def close(self) -> None:
        self.backend.close()

    def _ask(self, call: Callable[[], R]) -> R:
        until = now() + self.within
        while True:
            try:
                return call()
            except BackendUnavailable:
                if not self._patient or now() > until:
                    raise
                threading.Event().wait(0.05)


def connected(bare: Bare) -> set[str]:
    """Return the ids of all connections to the server. Connections of earlier tests may be among them until the garbage
    collector closes them."""
    return {client["id"] for client in bare.client_list()}


def eventually(condition: Callable[[], object], within: float = WITHIN) -> None:
    """Wait until a condition on the server is true. (No event reports it.)"""
    pause = threading.Event()
    until = now() + within
    while not condition():
        assert now() < until, "the condition did not become true"
        pause.wait(0.005)


@contextmanager
def busy(server: RedisServer) -> Iterator[None]:
    """Run a slow script inside the block, so that the server answers -BUSY."""

    def says_so() -> bool:
        try:
            bare.ping()
        except redis.ResponseError as error:
            return str(error).startswith("BUSY")
        return False

    with redis.Redis(port=server.port) as bare, socket.create_connection(("127.0.0.1", server.port)) as it:
        bare.config_set("lua-time-limit", 50)
        it.sendall(pack("EVAL", "while true do end", 0))
        eventually(says_so, within=10)
        try:
            yield
        finally:
            bare.script_kill()
            it.recv(100)


def without(bare: Bare, server: RedisServer, right: str) -> str:
    """Return the URL of a user with all rights except ``right``."""
    bare.execute_command("ACL", "SETUSER", "lacking", "reset", "on", "nopass", "~*", "+@all", f"-{right}")
    with suppress(redis.ResponseError):  # Redis 6.0 has no rights on channels
        bare.execute_command("ACL", "SETUSER", "lacking", "allchannels")
    return server.url.replace("//", "//lacking:x@")


def since(bare: Bare, version: str, what: str) -> None:
    """Skip the test on an older server, which does not have ``what``."""
    present = bare.info("server")["redis_version"]
    if [int(part) for part in present.split(".")] < [int(part) for part in version.split(".")]:
        pytest.skip(f"{present} has no {what}")


def holder_of(bare: Bare, name: str = "a") -> str | None:
    owner = bare.get(f"multilock/{name}")
    return owner.decode() if isinstance(owner, bytes) else None
