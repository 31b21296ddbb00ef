"""A writer's lock and a semaphore with one permit must pass the suites of the lock, because they must behave like a
mutex.

All suites on every backend take minutes, so only ``make conformance`` runs them. ``make test`` runs the suites on
``memory://``, and some on ``consul://``, where a single permit uses another protocol than a mutex. On the other
backends it runs only the tests that safety needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from multilock import Client
from multilock.testing import conformance
from multilock.testing.conformance import Place
from multilock.testing.conformance.faces import Face
from tests.conformance.chosen import ALL
from tests.conformance.consul import Consul
from tests.conformance.etcd import Etcd
from tests.conformance.places import Memory, Redis, Sqlite
from tests.conformance.postgresql import Postgresql
from tests.conformance.zookeeper import ZooKeeper

OTHERS = [Sqlite, Redis, Consul, Etcd, ZooKeeper, *([Postgresql] if ALL else ())]
WHOLE = [Memory, *(OTHERS if ALL else (Consul,))]


def disguised(client: Client, kind: str) -> Client:
    """Make ``lock()`` of this client return another kind of lock. If the client wraps an asyncio client, change the
    inner one."""
    target: Any = getattr(client, "_target", client)

    def lock(name: str, **options: Any) -> Any:
        if kind == "writer":
            # Unfair by default, like a plain lock: unfair claims first queue inside their client.
            return target.read_write_lock(name, **{"fair": False, **options}).writer()
        return target.semaphore(name, 1, **options)

    target.lock = lock
    return client


def disguise(place: type[Place], kind: str) -> Place:
    class Disguised(place):  # type: ignore[valid-type, misc]
        # On Consul each permit has its own session, which is renewed separately.
        quick_ttl = max(place.quick_ttl, 3.0) if place is Consul else place.quick_ttl

        def connect(self, face: Face, **options: Any) -> Client:
            return disguised(super().connect(face, **options), kind)

        def bystander(self, face: Face, **options: Any) -> Client:
            return disguised(super().bystander(face, **options), kind)

    return Disguised()


class Disguise:
    kind: ClassVar[str]

    @pytest.fixture
    def place(self, request: pytest.FixtureRequest) -> Iterator[Place]:
        place = disguise(request.param, self.kind)
        yield place
        place.close()


on_whole = pytest.mark.parametrize("place", WHOLE, indirect=True, ids=lambda place: place.scheme)
on_others = pytest.mark.parametrize("place", OTHERS, indirect=True, ids=lambda place: place.scheme)


@on_others
class Safety(Disguise, conformance.Conformance):
    test_a_second_caller_is_refused_while_the_first_holds_the_lock = (
        conformance.LockConformance.test_a_second_caller_is_refused_while_the_first_holds_the_lock
    )
    test_holders_never_overlap_under_contention = (
        conformance.LockConformance.test_holders_never_overlap_under_contention
    )
    test_a_release_by_another_client_never_frees_the_lock = (
        conformance.LockConformance.test_a_release_by_another_client_never_frees_the_lock
    )
    test_each_later_token_is_greater = conformance.LeaseConformance.test_each_later_token_is_greater


class TestSafetyByAWriter(Safety):
    kind = "writer"


class TestSafetyByAPermit(Safety):
    kind = "permit"


@on_whole
class TestLockByAWriter(Disguise, conformance.LockConformance):
    kind = "writer"


@on_whole
class TestLossByAWriter(Disguise, conformance.LossConformance):
    kind = "writer"


@on_whole
class TestWithByAWriter(Disguise, conformance.WithConformance):
    kind = "writer"


@on_whole
class TestCancelByAWriter(Disguise, conformance.CancelConformance):
    kind = "writer"


@on_whole
class TestLockByAPermit(Disguise, conformance.LockConformance):
    kind = "permit"

    test_one_unfair_waiter_of_each_client_queues_at_the_backend = None  # type: ignore[assignment]  # each permit waits there


@on_whole
class TestLossByAPermit(Disguise, conformance.LossConformance):
    kind = "permit"


@on_whole
class TestWithByAPermit(Disguise, conformance.WithConformance):
    kind = "permit"


@on_whole
class TestCancelByAPermit(Disguise, conformance.CancelConformance):
    kind = "permit"
