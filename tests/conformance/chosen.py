"""The tests of the suites that ``make test`` leaves out, each with its reason. ``make conformance`` runs all tests.

A *question* is one test with its backend, its face (blocking or asyncio) and its kind of lock. Each test still runs on
each backend, and on both faces. A question is left out if another one tests the same rule of the same code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multilock.testing.conformance import (
    BackendConformance,
    CancelConformance,
    ClientConformance,
    CloseConformance,
    Conformance,
    DescriptorConformance,
    ElectionConformance,
    LeaseConformance,
    LockAllConformance,
    LockConformance,
    LossConformance,
    OptionConformance,
    OutageConformance,
    ReadWriteConformance,
    RestConformance,
    SemaphoreConformance,
    ThreadingConformance,
    WithConformance,
)
from tests.oracles import CONFORMANCE

__all__ = ["ALL", "LEFT_OUT", "Question", "question_of", "why_left_out"]

ALL = os.environ.get("MULTILOCK_CONFORMANCE") == "all"


@dataclass(frozen=True, slots=True)
class Question:
    """One test of a suite, or all of its tests, with the backend, the face and the kind of lock."""

    file: str
    suite: type
    backend: str  #: the scheme of the backend
    face: str | None  #: None if the suite has only one face
    kind: str | None  #: the kind of lock, in `test_alone`; None elsewhere
    count: int | None  #: how many names a set has, in `test_sets`
    test: str | None  #: the name of the test; None means any test of the suite

    def is_of(self, *suites: type) -> bool:
        return issubclass(self.suite, suites)


def on_threads(it: Question) -> bool:
    files = ("test_consul", "test_etcd", "test_zookeeper", "test_cluster")
    return it.file in files and it.face == "asyncio" and not it.is_of(CancelConformance)


def above_requests(it: Question) -> bool:
    asked = (DescriptorConformance, ElectionConformance, LockAllConformance, OptionConformance, RestConformance)
    return it.file in ("test_redis", "test_sqlite") and it.face == "asyncio" and it.is_of(WithConformance, *asked)


def through_a_driver(it: Question) -> bool:
    asked = (ClientConformance, CloseConformance, SemaphoreConformance)
    more = (ReadWriteConformance,) if it.file == "test_sqlite" else ()
    return it.file in ("test_redis", "test_sqlite") and it.face == "asyncio" and it.is_of(*asked, *more)


def through_a_channel(it: Question) -> bool:
    asked = (CancelConformance, LockConformance, OutageConformance)
    return it.file == "test_postgresql" and it.face == "asyncio" and not it.is_of(*asked)


def the_kernel_elsewhere(it: Question) -> bool:
    asked = (
        ClientConformance, CloseConformance, LeaseConformance, OptionConformance,
        ThreadingConformance, WithConformance,
    )  # fmt: skip
    files = ("test_consul", "test_etcd", "test_zookeeper", "test_postgresql")
    return it.file in files and it.test is not None and it.is_of(*asked) and it.test not in CONFORMANCE


def an_election_elsewhere(it: Question) -> bool:
    files = ("test_sqlite", "test_consul", "test_etcd", "test_zookeeper", "test_postgresql")
    if it.file not in files or it.test is None:
        return False
    told_to_end = "test_the_next_leader_begins_after_the_former_leader_has_ended_its_work"
    return it.test == told_to_end or (it.is_of(ElectionConformance) and it.test not in CONFORMANCE)


def as_in_the_chaos(it: Question) -> bool:
    return it.test == "test_holders_never_overlap_while_processes_are_stopped_and_killed"


def behind_sentinels(it: Question) -> bool:
    return it.file == "test_sentinel" and not it.is_of(BackendConformance, CancelConformance, ClientConformance)


def on_a_cluster(it: Question) -> bool:
    return it.file == "test_cluster" and not it.is_of(BackendConformance, LockAllConformance)


def on_a_majority(it: Question) -> bool:
    asked = (BackendConformance, CancelConformance, LockConformance, OutageConformance)
    return it.file == "test_redlock" and not it.is_of(*asked)


def on_uvloop(it: Question) -> bool:
    return it.file == "test_uvloop" and it.backend not in ("memory", "redis", "sqlite")


def alone_on_a_loop(it: Question) -> bool:
    return it.file == "test_alone" and it.face == "asyncio" and not it.is_of(CancelConformance)


def a_lease_elsewhere(it: Question) -> bool:
    if it.test is None or it.face != "blocking" or it.test in CONFORMANCE:
        return False
    return it.file in ("test_redis", "test_sqlite") and it.is_of(LeaseConformance)


def a_loss_elsewhere(it: Question) -> bool:
    if it.test is None or not it.is_of(LossConformance) or it.test in CONFORMANCE:
        return False
    return it.file == "test_alone" or (it.file == "test_sqlite" and it.face == "blocking")


def alone_on_consul(it: Question) -> bool:
    if it.file != "test_alone" or it.backend != "consul" or it.suite.__name__.startswith("TestSafety"):
        return False
    return it.kind == "writer" or not it.is_of(LockConformance, LossConformance)


def a_set_of_one(it: Question) -> bool:
    return it.count == 1 and (it.face == "asyncio" or not it.is_of(LockConformance))


def a_set_on_a_loop(it: Question) -> bool:
    asked = (CancelConformance, LockConformance, WithConformance)
    return it.count == 3 and it.face == "asyncio" and (it.backend != "memory" or not it.is_of(*asked))


LEFT_OUT: dict[Callable[[Question], bool], str] = {
    on_threads: "The asyncio API calls these backends on threads, exactly as it calls sqlite://, which runs all "
    "tests. On memory:// the event loop makes the calls itself. On redis://, redlock:// and postgresql:// it uses "
    "channels. The tests of cancellation run on every backend, because a request may outlive its caller.",
    above_requests: "These suites test code above the requests, which is the same for every backend. On memory:// "
    "they run with both APIs.",
    through_a_driver: "The asyncio API sends the same requests as the blocking API. On memory:// these suites run "
    "with both. The tests of locks, leases, losses, outages and cancellation run with both APIs on every backend, "
    "and the tests of readers on redis:// too.",
    through_a_channel: "The kernel uses a channel in the same way on redis://, where all suites run. The tests of "
    "locks, outages and cancellation show that this channel sends the same requests as the blocking backend.",
    the_kernel_elsewhere: "These suites test the kernel more than the backend. On memory://, sqlite:// and redis:// "
    "all their tests run. On this backend only the tests whose result an oracle checks run.",
    an_election_elsewhere: "An election uses a lock, and sends no requests of its own. On memory:// all tests run "
    "with both APIs, and on redis:// with the blocking API. On this backend only the tests whose result an oracle "
    "checks run.",
    a_lease_elsewhere: "On memory:// these tests of the kernel run with both APIs, and on this backend with asyncio. "
    "The tests whose result an oracle checks run with the blocking API too.",
    a_loss_elsewhere: "These tests of losses test the kernel, which is the same for every kind of lock. On memory:// "
    "and redis:// all of them run with both APIs. The tests whose result an oracle checks run here too.",
    as_in_the_chaos: "tests/faults/test_chaos.py does the same on each backend, with more faults.",
    behind_sentinels: "Once connected, the backend is the same as for redis://. Only the connecting and the "
    "interrupted requests differ. The failovers are in tests/backends/redis.",
    on_a_cluster: "A single name is on a single node, as on redis://. Only a request for several names differs. The "
    "routing is in tests/backends/redis.",
    on_a_majority: "Only a request that some of the servers executed differs from redis://.",
    on_uvloop: "On memory:// the event loop makes the calls itself. On redis:// it uses channels, in the same way as "
    "on redlock:// and postgresql://. It calls all other backends on threads, in the same way as sqlite://.",
    alone_on_a_loop: "The suites of readers and permits run with the asyncio API. These suites test the backend.",
    alone_on_consul: "On Consul a writer is a mutex with another value. A single permit has a protocol of its own, "
    "which only the tests of acquires and losses use.",
    a_set_of_one: "A set of one name runs the same loop as a set of three names, but once.",
    a_set_on_a_loop: "The asyncio API of sets is one small class, which three suites test on memory://.",
}


def question_of(item: Any) -> Question | None:
    """Return the question of a collected test, or None if it belongs to no suite of this folder."""
    if item.path.parent != Path(__file__).parent or item.cls is None or not issubclass(item.cls, Conformance):
        return None
    given = item.callspec.params if hasattr(item, "callspec") else {}
    place = given.get("place") or item.cls.backend
    more = (getattr(item.cls, "kind", None), getattr(item.cls, "count", None), item.originalname)
    return Question(item.path.stem, item.cls, place.scheme, given.get("face"), *more)


def why_left_out(question: Question) -> str | None:
    """Return why ``make test`` leaves this question out, or None if it runs."""
    return next((why for matches, why in LEFT_OUT.items() if matches(question)), None)
