"""Our locks and those of kazoo and Curator on the same name wait for each other in one queue.

Some locks of these libraries ignore some of ours, or some of their own, which is tested too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from multilock import BackendRejected, Client, DistributedLock
from multilock.testing.conformance.base import eventually
from multilock.testing.conformance.faces import background
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.backends.zookeeper.curator import Curator
from tests.servers_zookeeper import ZooKeeperServer

WITHIN = 10.0


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.originalname}/"


@pytest.fixture
def client(connect: Connect, shared: ZooKeeperServer, prefix: str) -> Client:
    return connect(shared.url, prefix=prefix, ttl=10)


@pytest.fixture
def curator_style(connect: Connect, shared: ZooKeeperServer, prefix: str) -> Client:
    return connect(shared.url, prefix=prefix, ttl=10, node_style="curator")


@pytest.fixture
def kazoo(operator: Operator, shared: ZooKeeperServer, prefix: str) -> Callable[..., Any]:
    """Make a kazoo.Lock or another recipe of kazoo for a name, in a separate session."""
    return lambda name, recipe="Lock", **words: getattr(operator(shared.endpoint), recipe)(f"/{prefix}{name}", **words)


@pytest.fixture
def curator(shared: ZooKeeperServer, prefix: str) -> Iterator[Callable[[str], Curator]]:
    started: list[Curator] = []

    def start(name: str) -> Curator:
        started.append(Curator(shared, f"/{prefix}{name}"))
        return started[-1]

    yield start
    for each in started:
        each.close()


def waiting(client: Client, name: str) -> int:
    info = client.inspect(name)
    return info.waiting or 0 if info else 0


def test_our_lock_waits_for_kazoo(client: Client, kazoo: Callable[..., Any]) -> None:
    theirs = kazoo("job", identifier="node-7")
    theirs.acquire()
    assert client.lock("job").try_acquire() is None
    info = client.inspect("job")
    assert info is not None
    assert info.identity == "node-7"
    ours = background(lambda: client.lock("job").acquire(timeout=WITHIN))
    eventually(lambda: waiting(client, "job") == 1)
    assert not ours.done()
    theirs.release()
    lease = ours.result(WITHIN)
    assert info.token is not None
    assert lease.fence() > info.token


def test_kazoo_waits_for_our_lock(client: Client, kazoo: Callable[..., Any]) -> None:
    lease = client.lock("job").acquire()
    theirs = kazoo("job")
    assert not theirs.acquire(blocking=False)
    assert lease.owner.partition("@")[0] in theirs.contenders()[0]
    taken = background(theirs.acquire)
    eventually(lambda: waiting(client, "job") == 1)
    assert not taken.done()
    assert lease.release()
    assert taken.result(WITHIN)
    assert client.lock("job").try_acquire() is None


def test_kazoo_and_multilock_share_one_queue_in_order_of_arrival(client: Client, kazoo: Callable[..., Any]) -> None:
    holder = client.lock("job").acquire()
    theirs = kazoo("job")
    taken = background(theirs.acquire)
    eventually(lambda: waiting(client, "job") == 1)
    ours = background(lambda: client.lock("job", fair=True).acquire(timeout=WITHIN))
    eventually(lambda: waiting(client, "job") == 2)
    holder.release()
    assert taken.result(WITHIN)
    assert not ours.done()
    theirs.release()
    assert ours.result(WITHIN).is_held()


def test_our_lock_waits_for_curator(curator_style: Client, curator: Callable[[str], Curator]) -> None:
    theirs = curator("job")
    assert theirs.tell("acquire").result(WITHIN) == "held"
    assert curator_style.lock("job").try_acquire() is None
    ours = background(lambda: curator_style.lock("job").acquire(timeout=WITHIN))
    eventually(lambda: waiting(curator_style, "job") == 1)
    assert not ours.done()
    theirs.tell("release").result(WITHIN)
    assert ours.result(WITHIN).is_held()


def test_curator_waits_for_our_lock(curator_style: Client, curator: Callable[[str], Curator]) -> None:
    theirs = curator("job")
    lease = curator_style.lock("job").acquire()
    assert theirs.tell("try").result(WITHIN) == "taken"
    taken = theirs.tell("acquire")
    eventually(lambda: waiting(curator_style, "job") == 1)
    assert not taken.done()
    lease.release()
    assert taken.result(WITHIN) == "held"
    assert curator_style.lock("job").try_acquire() is None


def test_the_other_node_style_is_refused_and_leaves_no_node(
    client: Client, curator_style: Client, kazoo: Callable[..., Any]
) -> None:
    theirs = kazoo("job")
    theirs.acquire()
    with pytest.raises(BackendRejected, match="node_style=kazoo"):
        curator_style.lock("job").acquire(timeout=WITHIN)
    assert waiting(client, "job") == 0
    theirs.release()
    held = curator_style.lock("job").acquire()
    with pytest.raises(BackendRejected, match="node_style=curator"):
        client.lock("job").acquire(timeout=WITHIN)
    assert held.is_held()
    assert waiting(client, "job") == 0


def test_a_name_with_a_slash_is_one_escaped_name(client: Client, kazoo: Callable[..., Any]) -> None:
    with client.lock("a/b"):
        assert kazoo("a/b").acquire(blocking=False)  # kazoo does not escape names, so this is another lock
        assert not kazoo("a%2Fb").acquire(blocking=False)


# ---- readers, writers and permits beside kazoo's


OURS: dict[str, Callable[[Client], DistributedLock]] = {
    "lock": lambda client: client.lock("job", fair=True),
    "reader": lambda client: client.read_write_lock("job").reader(),
    "writer": lambda client: client.read_write_lock("job").writer(),
    "permit": lambda client: client.semaphore("job", 3),
}
TOGETHER = {("reader", "ReadLock")}
BLIND = {("reader", "Lock")}  # kazoo's Lock ignores readers, even its own


@pytest.mark.parametrize("theirs", ["Lock", "ReadLock", "WriteLock"])
@pytest.mark.parametrize("ours", OURS)
def test_kazoos_locks_and_our_locks_of_each_mode_exclude_each_other(
    client: Client, kazoo: Callable[..., Any], ours: str, theirs: str
) -> None:
    """The exceptions are two readers, and kazoo's Lock, which ignores readers (kazoo's WriteLock does not)."""
    mine, their = OURS[ours](client), kazoo("job", theirs)
    with mine:
        assert their.acquire(blocking=False) is ((ours, theirs) in TOGETHER | BLIND)
        their.release()
        if (ours, theirs) not in TOGETHER | BLIND:
            waits = background(their.acquire)
            eventually(lambda: waiting(client, "job") == 1)
            assert not waits.done()
    if (ours, theirs) in TOGETHER | BLIND:
        their.acquire()
    else:
        assert waits.result(WITHIN)
    assert (mine.try_acquire() is not None) is ((ours, theirs) in TOGETHER)
    if (ours, theirs) not in TOGETHER:
        lease = background(lambda: mine.acquire(timeout=WITHIN))
        eventually(lambda: waiting(client, "job") == 1)
        assert not lease.done()
        their.release()
        assert lease.result(WITHIN).is_held()


def test_known_limit_kazoos_lock_enters_beside_its_own_reader(kazoo: Callable[..., Any]) -> None:
    assert kazoo("job", "ReadLock").acquire()
    assert kazoo("job", "Lock").acquire(blocking=False)


def test_a_waiting_writer_of_kazoo_blocks_our_readers_and_ours_blocks_its_readers(
    client: Client, kazoo: Callable[..., Any]
) -> None:
    first = OURS["reader"](client).acquire()
    writing = kazoo("job", "WriteLock")
    taken = background(writing.acquire)
    eventually(lambda: waiting(client, "job") == 1)
    assert OURS["reader"](client).try_acquire() is None
    first.release()
    assert taken.result(WITHIN)
    ours = background(lambda: OURS["writer"](client).acquire(timeout=WITHIN))
    eventually(lambda: waiting(client, "job") == 1)
    assert not kazoo("job", "ReadLock").acquire(blocking=False)
    writing.release()
    assert ours.result(WITHIN).is_held()


@pytest.mark.parametrize("ours", OURS)
def test_kazoos_semaphore_and_our_locks_never_share_a_name(
    client: Client, kazoo: Callable[..., Any], ours: str
) -> None:
    """kazoo's Semaphore would count any node of ours as its own."""
    with OURS[ours](client):
        pass
    with pytest.raises(ValueError, match="Inconsistent max leases: 0, expected: 3"):
        kazoo("job", "Semaphore", max_leases=3).acquire(blocking=False)
    theirs = kazoo("another", "Semaphore", max_leases=3)
    assert theirs.acquire()
    lock = client.semaphore("another", 3) if ours == "permit" else client.lock("another")
    with pytest.raises(BackendRejected, match="semaphore of kazoo or of Curator"):
        lock.acquire(timeout=WITHIN)
    assert len(theirs.lease_holders()) == 1
    theirs.release()
    with lock:
        assert theirs.lease_holders() != []


# ---- readers, writers and permits beside Curator's


def test_curators_read_write_lock_and_ours_exclude_each_other(
    curator_style: Client, curator: Callable[[str], Curator]
) -> None:
    theirs = curator("job")
    for ours, kind in product(("reader", "writer"), ("read", "write")):
        mine, together = OURS[ours](curator_style), (ours, kind) == ("reader", "read")
        with mine:
            assert theirs.tell("try", kind).result(WITHIN) == ("held" if together else "taken")
            if together:
                theirs.tell("release", kind).result(WITHIN)
            held = theirs.tell("acquire", kind)
            if not together:
                eventually(lambda: waiting(curator_style, "job") == 1)
                assert not held.done()
        assert held.result(WITHIN) == "held"
        lease = background(lambda lock=mine: lock.acquire(timeout=WITHIN))  # type: ignore[misc]
        if not together:
            eventually(lambda: waiting(curator_style, "job") == 1)
            assert not lease.done()
            theirs.tell("release", kind).result(WITHIN)
        assert lease.result(WITHIN).release()
        if together:
            theirs.tell("release", kind).result(WITHIN)


def test_known_limit_curators_mutex_ignores_read_write_locks_but_waits_for_our_permits(
    curator_style: Client, curator: Callable[[str], Curator]
) -> None:
    """Curator's mutex ignores Curator's own read-write locks too. multilock waits for both kinds."""
    theirs, permit = curator("job"), OURS["permit"](curator_style)
    with permit:
        assert theirs.tell("try").result(WITHIN) == "taken"
    blind = [("reader", "mutex"), ("writer", "mutex"), *product(("lock", "permit"), ("read", "write"))]
    for ours, kind in blind:
        with OURS[ours](curator_style):
            assert theirs.tell("try", kind).result(WITHIN) == "held"
        assert OURS[ours](curator_style).try_acquire() is None
        assert permit.try_acquire() is None
        if kind != "mutex":
            assert theirs.tell("try", "mutex").result(WITHIN) == "held"
            theirs.tell("release", "mutex").result(WITHIN)
        theirs.tell("release", kind).result(WITHIN)


def test_a_semaphore_of_curator_is_refused_and_leaves_no_node(
    curator_style: Client, shared: ZooKeeperServer, operator: Operator, prefix: str
) -> None:
    """A semaphore of Curator has two folders below its path."""
    by = operator(shared.endpoint)
    by.ensure_path(f"/{prefix}job/leases")
    with pytest.raises(BackendRejected, match="semaphore of kazoo or of Curator"):
        OURS["permit"](curator_style).acquire(timeout=WITHIN)
    assert by.get_children(f"/{prefix}job") == ["leases"]
