"""If one thread of a process cannot be started, whichever it is, the process is still notified of a loss and of a
handover in time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from multilock import Lease, Loss, now, system
from multilock.testing.conformance import Place
from multilock.testing.conformance.base import SOON
from multilock.testing.conformance.faces import FACES
from tests.conformance.consul import Consul
from tests.conformance.etcd import Etcd
from tests.conformance.places import Memory, Redis, Sqlite
from tests.conformance.postgresql import Postgresql
from tests.conformance.redlock import Redlock
from tests.conformance.zookeeper import ZooKeeper

TTL = 30.0  # seconds; renewals are 10 s apart, so an earlier notice must be a push


def refuse(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Make the process refuse the n-th start of a multilock thread from now on, once."""
    real, starts = threading.Thread, [0]

    class Refusing(real):  # type: ignore[valid-type, misc]
        def start(self) -> None:
            starts[0] += 1
            if starts[0] == nth:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(system, "Thread", Refusing)


# For each backend, how many threads two clients start in all.
STARTS = {Memory: 6, Sqlite: 7, Redis: 12, Redlock: 12, Consul: 12, Etcd: 8, ZooKeeper: 9, Postgresql: 12}


@pytest.mark.parametrize(
    ("make", "nth"),
    [(make, nth) for make, starts in STARTS.items() for nth in range(1, starts + 1)],
    ids=lambda value: getattr(value, "scheme", None),
)
def test_a_loss_and_a_handover_are_reported_although_a_thread_is_refused(
    make: Callable[[], Place], nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make()
    face = FACES["blocking"]()
    try:
        with place.bystander(face, ttl=TTL) as holder, place.bystander(face, ttl=TTL) as other:
            refuse(monkeypatch, nth)
            told: list[Loss[Lease]] = []
            heard = threading.Event()

            def lose(loss: Loss[Lease]) -> None:
                told.append(loss)
                heard.set()

            lease = holder.lock("lost", on_lost=lose).acquire(timeout=SOON)
            if holder.capabilities.push_loss:
                place.delete("lost")
                assert heard.wait(SOON), "told by the next renewal, perhaps, and not by the server"
                assert not lease.is_held()
            kept = holder.lock("handed over").acquire(timeout=SOON)
            granted: list[float] = []

            def wait() -> None:
                other.lock("handed over").acquire(timeout=20)
                granted.append(now())

            waiter = threading.Thread(target=wait)
            waiter.start()
            kept_until = now() + 0.3
            while now() < kept_until:
                assert kept.is_held()
                waiter.join(0.05)
            kept.release()
            waiter.join(20)
            [at] = granted
            assert at < kept_until + SOON
            assert len(told) == int(holder.capabilities.push_loss)
    finally:
        place.close()
