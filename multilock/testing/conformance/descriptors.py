"""A process with many open files, such as a big server. The descriptors that multilock opens there are too high for
``select()``."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import multilock
from multilock import Client, LossReason
from multilock.registry import open_backend
from multilock.testing.conformance.base import NAME, Conformance, Recorder
from multilock.testing.conformance.faces import FACES, Face, background
from multilock.testing.conformance.places import Place
from multilock.testing.process import Helper, say
from multilock.urls import split_url

__all__ = ["DescriptorConformance"]

HERE = "multilock.testing.conformance.descriptors"
OPEN = 2000  # files; select() can only use descriptors below 1024
TTL = 10.0
ENDS_WITHIN = 60.0  # seconds that the whole test may take, even on a busy machine


class DescriptorConformance(Conformance):
    """A test in a process with many open files."""

    @pytest.fixture
    def helper(self, face: Face, place: Place) -> Iterator[Helper]:
        """The process with many open files."""
        module = place.registered_in or HERE
        with Helper(f"{HERE}:live", module, face.name, place.clean_url, place.prefix) as helper:
            yield helper

    def test_locks_work_in_a_process_with_two_thousand_open_files(self, helper: Helper) -> None:
        assert int(helper.wait_for("lowest", ENDS_WITHIN)[1]) > 1024
        for step in ("acquired", "renewed", "waited", "lost", "again", "closed"):
            helper.wait_for(step, ENDS_WITHIN)
        assert helper.wait(ENDS_WITHIN) == 0
        assert "Traceback" not in helper.errors


def live(module: str, face_name: str, url: str, prefix: str) -> None:
    """In the helper process: use some locks, with every connection on a descriptor that select() cannot use."""
    import resource  # not every system has this module, but every system with this limit of select() has it

    importlib.import_module(module)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2 * OPEN
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough if hard == resource.RLIM_INFINITY else min(enough, hard), hard))
    with ExitStack() as files:
        for _ in range(OPEN):
            files.enter_context(open(os.devnull, "rb"))
        with open(os.devnull, "rb") as lowest:
            say("lowest", lowest.fileno())
        face = FACES[face_name]()
        clients = [_client(face, url, prefix) for _ in range(2)]
        _hold_wait_and_lose(*clients)
        for client in clients:
            client.close()
        say("closed")
        face.close()


def _client(face: Face, url: str, prefix: str) -> Client:
    shared = {"ttl": TTL, "prefix": prefix, "identity": "conformance", "request_timeout": None}
    scheme, bare, own = split_url(url, "the URL")
    return face.client(open_backend(scheme, bare, {**shared, **own}), ttl=TTL)


def _hold_wait_and_lose(client: Client, other: Client) -> None:
    lost = Recorder[multilock.Loss]()
    first = client.lock(NAME).acquire()
    say("acquired")
    waiting = background(lambda: other.lock(NAME, on_lost=lost).acquire(timeout=ENDS_WITHIN))
    time.sleep(0.5)  # by then the other client waits, the lock is watched, and a kept connection has been idle
    first.renew()
    say("renewed")
    assert first.release()
    second = waiting.result(ENDS_WITHIN)
    time.sleep(0.5)
    say("waited", second.is_held())
    assert client.force_release(NAME)
    assert lost.wait(1, TTL).reason in (LossReason.TAKEN, LossReason.SESSION_LOST)
    say("lost")
    with client.lock(NAME).acquire(timeout=ENDS_WITHIN):
        say("again")
