"""How many requests each operation on a lock costs, as the server itself counts them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import multilock
from multilock import now
from multilock.testing.conformance.base import eventually
from multilock_consul.notices import FREE_EACH
from tests.backends.consul.kit import Ours
from tests.backends.kit import WITHIN
from tests.servers_consul import ConsulServer

Connect = Callable[..., multilock.Client]


@pytest.fixture
def server() -> Iterator[ConsulServer]:
    with ConsulServer(log_level="debug") as server:
        yield server


@contextlib.contextmanager
def counted(server: ConsulServer) -> Iterator[Counter[str]]:
    """Yield a counter. After the block it contains the requests that the server answered inside the block."""
    before = settled(server)
    made: Counter[str] = Counter()
    yield made
    made.update(settled(server) - before)


def settled(server: ConsulServer) -> Counter[str]:
    """Wait until the count stops changing, because the server writes its log after the reply."""
    said, last = server.requests(), Counter[str]()
    while said != last:
        time.sleep(0.2)
        said, last = server.requests(), said
    return said


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the watch of each lock, so that no watch is made during the test."""
    monkeypatch.setattr("multilock.kernel.validity.ARM_AFTER", 60.0)


@pytest.mark.usefixtures("unwatched")
def test_the_first_acquire_makes_a_session_and_each_later_one_sends_one_request(
    server: ConsulServer, connect: Connect
) -> None:
    client = connect(server.url, ttl=30)
    with counted(server) as made, client.lock("first"):
        pass
    assert made == {"PUT session/create": 1, "PUT txn": 2}
    with counted(server) as made:
        for number in range(10):
            with client.lock(f"job-{number}"):
                pass
    assert made == {"PUT txn": 20}


@pytest.mark.oracle
@pytest.mark.usefixtures("unwatched")
def test_a_refused_try_sends_two_requests_and_leaves_nothing(server: ConsulServer, connect: Connect) -> None:
    connect(server.url, ttl=30).lock("job").acquire()
    client = connect(server.url, ttl=30)
    with client.lock("warm-up"):
        pass
    with counted(server) as made:
        assert client.lock("job").try_acquire() is None
    assert sum(made.values()) == 2


@pytest.mark.usefixtures("unwatched")
def test_a_reader_costs_as_much_as_a_lock_however_many_readers_there_are(
    server: ConsulServer, connect: Connect
) -> None:
    client, others = connect(server.url, ttl=60), connect(server.url, ttl=60)
    held = [others.read_write_lock("job").reader().acquire() for _ in range(200)]
    reader = client.read_write_lock("job").reader()
    with reader:
        pass
    with counted(server) as made:
        for _ in range(10):
            with reader:
                pass
    assert made == {"PUT txn": 20}
    with counted(server) as made:
        assert client.read_write_lock("job").writer().try_acquire() is None
    assert sum(made.values()) == 1, "it looks first, and makes no session"
    assert len(held) == 200


@pytest.mark.usefixtures("unwatched")
def test_a_permit_takes_three_requests_its_release_three_and_a_refused_try_one(
    server: ConsulServer, connect: Connect
) -> None:
    client, other = connect(server.url, ttl=60), connect(server.url, ttl=60)
    with counted(server) as made, client.semaphore("job", 2):
        pass
    assert sum(made.values()) == 6
    assert made["PUT session/create"] == made["PUT session/destroy"] == 1
    held = [other.semaphore("job", 2).acquire() for _ in range(2)]
    with counted(server) as made:
        assert client.semaphore("job", 2).try_acquire() is None
    assert sum(made.values()) == 1
    assert all(lease.release() for lease in held)


def test_a_handover_takes_one_push_and_one_request(server: ConsulServer, connect: Connect) -> None:
    holder, waiter = connect(server.url, ttl=30), connect(server.url, ttl=30)
    lease = holder.lock("job").acquire()
    with waiter.lock("warm-up"):
        pass
    waiting, entered = threading.Event(), threading.Event()
    waiter.events.subscribe(lambda event: waiting.set() if isinstance(event, multilock.Waiting) else None)

    def enter() -> None:
        with waiter.lock("job").acquire(timeout=10):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert waiting.wait(5)
    time.sleep(0.3)  # wait until the holder's watch is open too
    with counted(server) as made:
        lease.release()
        assert entered.wait(5)
        thread.join()
    assert made.pop("PUT txn") == 3  # a release, the waiter's acquire, and its release
    # The other requests are the open queries. On an overloaded machine the waiter's first read, or a watch of the
    # briefly held lock, may come in addition.
    assert sum(made.values()) <= 4


def test_waits_that_time_out_share_one_connection_to_the_agent(server: ConsulServer) -> None:
    """An agent accepts 200 connections from one address. If a client abandons a query, its connection still counts
    until the query ends."""
    holder, waiter = Ours(server.url), Ours(server.url)
    holder.take(holder.mutex())
    sockets: list[int] = []
    for _ in range(20):
        claim = waiter.wait(waiter.mutex())
        eventually(lambda: claim.id in waiter.backend._listener._serves)  # noqa: B023
        waiter.release(claim)
        sockets.append(server.sockets())
    assert max(sockets) <= sockets[0] + 2
    waiter.close()
    holder.close()


def test_observing_one_more_name_does_not_restart_the_queries_of_the_others(server: ConsulServer) -> None:
    ours = Ours(server.url)
    names = [f"job-{number}" for number in range(20)]
    for count in range(1, len(names) + 1):
        ours.ear.changes.clear()
        assert ours.backend.follow(frozenset(names[:count]), WITHIN)
        assert ours.ear.wait(lambda: ours.ear.changes)
        assert set(ours.ear.changes) == {names[count - 1]}
    assert server.sockets() <= len(names) + 10
    ours.close()


def test_one_renewal_in_each_period_keeps_a_thousand_locks(server: ConsulServer, connect: Connect) -> None:
    client = connect(server.url, ttl=6)
    for number in range(1000):
        client.lock(f"job-{number}").acquire()
    begun = now()
    with counted(server) as made:
        time.sleep(3.0)
    renewals = sum(count for kind, count in made.items() if kind.startswith("PUT session/renew"))
    assert 1 <= renewals <= (now() - begun) / 1.8 + 1, "a period is 1.8 s at least"
    looks = made.get("PUT txn", 0)
    assert looks <= (renewals + 1) * 16, "64 keys are looked at in one request"
    assert len(server.sessions()) == 1


@pytest.mark.oracle
@pytest.mark.parametrize("renew", [True, False])
def test_a_released_lock_leaves_no_key_and_close_leaves_no_session(
    server: ConsulServer, connect: Connect, renew: bool
) -> None:
    client = connect(server.url)
    for number in range(5):
        client.lock(f"job-{number}", renew=renew).acquire().release()
    # Without any key the server would return no list.
    server.ask("PUT", "kv/any", b"")
    assert server.ask("GET", "kv/?keys") == ["any"]
    assert len(server.sessions()) == int(renew)
    client.close()
    assert server.sessions() == []


def test_a_free_observed_name_costs_little_however_many_other_keys_are_written(
    server: ConsulServer, connect: Connect
) -> None:
    client = connect(server.url, ttl=30)
    leaders = client.election("job").observe()
    assert next(leaders) is None
    with counted(server) as made:
        begun, writes = now(), 0
        while now() < begun + 1.0 or writes <= 30:
            server.ask("PUT", "kv/multilock/job-2/.lock", b"")
            server.ask("DELETE", "kv/multilock/job-2/.lock")
            writes += 1
        took = now() - begun
    assert made["PUT kv/multilock"] > 30
    assert made["GET kv/multilock"] <= 30 * took, "a question and a look each tenth of a second"
    with connect(server.url).lock("job"):
        assert next(leaders) is not None


def test_many_free_observed_names_cost_little_while_another_lock_is_used(
    server: ConsulServer, connect: Connect
) -> None:
    client, other = connect(server.url, ttl=30), connect(server.url, ttl=30)
    observers = [client.election(f"job-{number}").observe() for number in range(50)]
    assert [next(leaders) for leaders in observers] == [None] * 50
    with counted(server) as made:
        begun = now()
        while now() < begun + 3.0:
            with other.lock("other"):
                pass
    assert made["PUT txn"] > 100
    assert made["GET kv/multilock"] <= 3.0 * 2 / FREE_EACH * 1.5 + 100, "a question and a look, for all of them in turn"
    with other.lock("job-7"):
        assert next(observers[7]) is not None
