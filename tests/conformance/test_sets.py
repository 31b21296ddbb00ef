"""A set of locks must pass the suites of the lock, run on `lock_all` of one name and of three.

All suites on every backend take minutes, so only ``make conformance`` runs them. ``make test`` runs the suites on
``memory://``, and two suites with three names, of locking and of losses, also on ``redis://``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from multilock import CapabilityMissing, Client
from multilock.testing import conformance
from multilock.testing.conformance import Place
from multilock.testing.conformance.base import NAME
from multilock.testing.conformance.faces import Face
from tests.conformance.chosen import ALL
from tests.conformance.consul import Consul
from tests.conformance.etcd import Etcd
from tests.conformance.places import Memory, Redis, Sqlite
from tests.conformance.postgresql import Postgresql
from tests.conformance.zookeeper import ZooKeeper

OTHERS = [Redis, *([Sqlite, Etcd, Consul, ZooKeeper, Postgresql] if ALL else ())]


def with_others(name: str, count: int) -> list[str]:
    """Return ``count`` names in alphabetical order, the first of which is ``name``."""
    return [name, *(f"{name[:990]}~{number}" for number in range(1, count))]


def of_sets(client: Client, count: int) -> Client:
    """Make ``lock()`` of this client return a set of ``count`` names. If the client wraps an asyncio client, change the
    inner one."""
    target: Any = getattr(client, "_target", client)

    def lock(name: str, **options: Any) -> Any:
        return target.lock_all(with_others(name, count), **options)

    target.lock = lock
    return client


class Sets:
    """A suite in which ``lock()`` returns a set of ``count`` names."""

    count: ClassVar[int]

    @pytest.fixture
    def place(self, request: pytest.FixtureRequest) -> Iterator[Place]:
        count = self.count

        class OfSets(request.param):  # type: ignore[misc, name-defined]
            def connect(self, face: Face, **options: Any) -> Client:
                return of_sets(super().connect(face, **options), count)

            def bystander(self, face: Face, **options: Any) -> Client:
                return of_sets(super().bystander(face, **options), count)

        place = OfSets()
        yield place
        place.close()


class OfOne(Sets):
    count = 1


class OfThree(Sets):
    count = 3


def on(*places: type[Place]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", places, indirect=True, ids=lambda place: place.scheme)


on_memory = on(Memory)
on_some = on(Memory, *OTHERS)
on_more = on_some if ALL else on_memory


class LeaseOfASet(conformance.LeaseConformance):
    """The tests of tokens do not apply, because a set has no token."""

    test_a_lease_shows_its_name_ttl_state_and_owner = None  # type: ignore[assignment]
    test_each_later_token_is_greater = None  # type: ignore[assignment]
    test_check_and_fence_do_not_raise_while_the_lease_is_held = None  # type: ignore[assignment]

    def test_check_does_not_raise_while_the_lease_is_held(self, client: Client) -> None:
        with client.lock(NAME) as lease:
            lease.check()
            assert lease.token is None
            with pytest.raises(CapabilityMissing):
                lease.fence()


class RestOfASet(conformance.RestConformance):
    """The tests of elections do not apply, because an election has one name."""

    test_no_candidate_is_elected_while_the_name_of_the_last_leader_rests = None  # type: ignore[assignment]
    test_a_stopped_leader_leaves_no_rest = None  # type: ignore[assignment]


@on_more
class TestLockOfOne(OfOne, conformance.LockConformance): ...


@on_more
class TestThreadingOfOne(OfOne, conformance.ThreadingConformance): ...


@on_more
class TestLeaseOfOne(OfOne, LeaseOfASet): ...


@on_more
class TestLossOfOne(OfOne, conformance.LossConformance): ...


@on_more
class TestWithOfOne(OfOne, conformance.WithConformance): ...


@on_more
class TestCancelOfOne(OfOne, conformance.CancelConformance): ...


@on_more
class TestRestOfOne(OfOne, RestOfASet): ...


@on_more
class TestOutageOfOne(OfOne, conformance.OutageConformance): ...


class LockOfThree(OfThree, conformance.LockConformance):
    """Tests that look for a lease by the name of one lock do not apply."""

    test_a_decorated_function_runs_while_the_lock_is_held = None  # type: ignore[assignment]
    test_current_lease_is_the_innermost_of_this_thread = None  # type: ignore[assignment]


@on_some
class TestLockOfThree(LockOfThree): ...


@on_more
class TestThreadingOfThree(OfThree, conformance.ThreadingConformance): ...


@on_more
class TestLeaseOfThree(OfThree, LeaseOfASet): ...


@on_some
class TestLossOfThree(OfThree, conformance.LossConformance): ...


@on_more
class TestWithOfThree(OfThree, conformance.WithConformance): ...


@on_more
class TestCancelOfThree(OfThree, conformance.CancelConformance): ...


@on_more
class TestRestOfThree(OfThree, RestOfASet):
    test_a_force_release_ends_a_rest_and_reports_no_loss = None  # type: ignore[assignment]  # of one name


@on_more
class TestOutageOfThree(OfThree, conformance.OutageConformance): ...
