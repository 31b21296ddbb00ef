"""Locks of multilock and of Consul's own tools (``consul lock`` and its Go client) on the same name: each waits for the
other."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import quote

import consul
import pytest

import multilock
from multilock import BackendRejected, now
from multilock.testing.conformance.faces import background
from multilock_consul.keys import LOCK_FLAGS, SEMAPHORE_FLAGS
from tests.servers_consul import ConsulServer, program

Connect = Callable[..., multilock.Client]
Start = Callable[..., subprocess.Popen[str]]
WITHIN = 10.0


@pytest.fixture
def name() -> str:
    return f"jobs-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(shared: ConsulServer) -> Iterator[Start]:
    """Return a function that runs ``consul lock …`` in the background. The command that it runs prints "held"."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [program(), "lock", "-pass-stdin", *words, "echo held; read end"],
            env=shared.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        process.stdout.close()


def says_held(process: subprocess.Popen[str]) -> bool:
    assert process.stdout
    return process.stdout.readline() == "held\n"


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def try_official(server: ConsulServer, *words: str) -> int:
    """Return the exit code of ``consul lock``: 0 if it got the lock."""
    return subprocess.run(
        [program(), "lock", *words, "true"], env=server.environment, capture_output=True, check=False, timeout=30
    ).returncode


def test_consul_lock_excludes_us_and_admits_us_when_it_ends(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    client = connect(shared.url)
    official = start(f"multilock/{name}")
    assert says_held(official)
    assert client.lock(name).try_acquire() is None
    assert client.lock(name).is_locked()
    end(official)
    with client.lock(name).acquire(timeout=WITHIN) as lease:
        assert lease.token


def test_we_exclude_consul_lock_and_admit_it_when_we_release(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    lease = connect(shared.url).lock(name).acquire()
    assert try_official(shared, "-timeout=1s", f"multilock/{name}") != 0
    official = start(f"multilock/{name}")
    time.sleep(0.2)
    lease.release()
    assert says_held(official)


def test_consul_lock_uses_the_same_lock_for_a_quoted_name(shared: ConsulServer, connect: Connect, name: str) -> None:
    with connect(shared.url).lock(f"a/{name} é"):
        assert try_official(shared, "-timeout=1s", f"multilock/a%2F{name}%20%C3%A9") != 0


def test_ending_consul_lock_admits_us_at_once(shared: ConsulServer, connect: Connect, start: Start, name: str) -> None:
    client = connect(shared.url)
    official = start(f"multilock/{name}")
    assert says_held(official)
    official.send_signal(signal.SIGTERM)
    begun = now()
    with client.lock(name).acquire(timeout=WITHIN):
        assert now() - begun < 5
        official.wait(WITHIN)
        assert client.lock(name).is_locked(), "its clean-up spares our key"


@pytest.mark.rare  # this test takes 45 seconds, until the session of `consul lock` has ended
@pytest.mark.timeout(90)
def test_killing_consul_lock_admits_us_after_its_session_and_its_lock_delay(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    official = start(f"multilock/{name}")
    assert says_held(official)
    official.kill()
    begun = now()
    with connect(shared.url).lock(name).acquire(timeout=55):
        assert 40 < now() - begun < 50  # the sum of twice the ttl of 15 s, and 15 s of lock delay


# ---- readers and permits


def takers(client: multilock.Client, name: str) -> dict[str, multilock.DistributedLock]:
    both = client.read_write_lock(name)
    return {"lock": client.lock(name), "writer": both.writer(), "reader": both.reader()}


def test_consul_lock_n_shares_permits_with_multilock_and_excludes_other_modes(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    client = connect(shared.url)
    official = start("-n=2", f"multilock/{name}")
    assert says_held(official)
    before = shared.key(f"multilock/{name}/.lock")
    assert [kind for kind, lock in takers(client, name).items() if lock.try_acquire()] == []
    with pytest.raises(BackendRejected, match="has 2 permits here, but 3 were requested"):
        client.semaphore(name, 3).acquire()
    with pytest.raises(BackendRejected, match="has 2 permits here, but 1 were requested"):
        client.semaphore(name, 1).acquire()
    assert shared.key(f"multilock/{name}/.lock") == before
    second = client.semaphore(name, 2).acquire(timeout=0)
    assert client.semaphore(name, 2).try_acquire() is None
    info = client.inspect(name)
    assert info is not None
    assert (info.kind, info.holders, info.permits) == ("permit", 2, 2)
    end(official)
    third = client.semaphore(name, 2).acquire(timeout=WITHIN)
    assert second.release()
    assert third.release()
    with client.lock(name):
        pass


def test_consul_lock_n_enters_beside_our_permits_and_waits_for_them(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    semaphore = connect(shared.url).semaphore(name, 2)
    first = semaphore.acquire()
    beside = start("-n=2", f"multilock/{name}")
    assert says_held(beside)
    end(beside)
    second = semaphore.acquire(timeout=WITHIN)
    assert try_official(shared, "-n=2", "-try=200ms", f"multilock/{name}") != 0
    waits = start("-n=2", f"multilock/{name}")
    assert second.release()
    assert says_held(waits)
    assert first.release()
    end(waits)


def test_the_end_of_consul_lock_n_wakes_its_waiters(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    clients = {kind: connect(shared.url) for kind in ("lock", "writer", "reader")}
    official = start("-n=2", f"multilock/{name}")
    assert says_held(official)

    def enter(kind: str) -> bool:
        return takers(clients[kind], name)[kind].acquire(timeout=2 * WITHIN).release()

    waiting = [background(lambda kind=kind: enter(kind)) for kind in clients]  # type: ignore[misc]
    end(official)
    assert all(each.result(2 * WITHIN) for each in waiting)


def test_consul_lock_with_a_different_number_or_none_is_refused_beside_our_permits(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    client = connect(shared.url)
    with client.semaphore(name, 2) as lease:
        for words in (["-n=3"], []):
            assert try_official(shared, *words, f"multilock/{name}") != 0
        assert lease.is_held()
        lease.renew()
    with client.lock(name):
        assert try_official(shared, "-n=2", f"multilock/{name}") != 0


def test_consul_lock_excludes_our_readers_and_permits(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    client = connect(shared.url)
    official = start(f"multilock/{name}")
    assert says_held(official)
    assert client.read_write_lock(name).reader().try_acquire() is None
    assert client.semaphore(name, 2).try_acquire() is None
    end(official)
    with client.read_write_lock(name).reader().acquire(timeout=WITHIN):
        pass
    with client.semaphore(name, 2).acquire(timeout=WITHIN):
        pass


def test_known_limit_consul_lock_does_not_see_readers_and_enters_beside_them(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    client = connect(shared.url)
    for words in ([], ["-n=2"]):
        with client.read_write_lock(name).reader() as lease:
            official = start(*words, f"multilock/{name}")
            assert says_held(official)
            assert lease.is_held()
            assert client.read_write_lock(name).reader().try_acquire() is None
            end(official)
            official.wait(WITHIN)


@pytest.mark.parametrize("holders", [{}, {"5d0ee1fc-6d44-4f12-8d6e-0d3a9f1b2c3d": True}])
@pytest.mark.parametrize("kind", ["lock", "writer", "reader", "permit"])
def test_the_remains_of_a_semaphore_without_living_holders_are_replaced(
    shared: ConsulServer, connect: Connect, name: str, holders: dict[str, bool], kind: str
) -> None:
    """`consul lock -n` leaves its key `.lock` behind if it is killed, and also when its last holder leaves."""
    left = json.dumps({"Limit": 3, "Holders": holders}).encode()
    shared.ask("PUT", f"kv/multilock/{name}/.lock?flags={SEMAPHORE_FLAGS}", left)
    client = connect(shared.url)
    lock = takers(client, name).get(kind) or client.semaphore(name, 2)
    with lock.acquire(timeout=WITHIN):
        info = client.inspect(name)
        assert info is not None
    assert shared.key(f"multilock/{name}/.lock") is None


def test_a_dead_holder_of_another_program_counts_until_its_lock_delay_is_over(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    session = shared.ask("PUT", "session/create", {"TTL": "10s", "LockDelay": "2s", "Behavior": "delete"})["ID"]
    held = f"multilock/{name}/{session}"
    shared.ask("PUT", f"kv/{held}?acquire={session}&flags={SEMAPHORE_FLAGS}", b"")
    left = json.dumps({"Limit": 2, "Holders": {session: True}}).encode()
    shared.ask("PUT", f"kv/multilock/{name}/.lock?flags={SEMAPHORE_FLAGS}", left)
    client = connect(shared.url)
    ended = now()
    shared.ask("PUT", f"session/destroy/{session}")
    with client.semaphore(name, 2), client.semaphore(name, 2).acquire(timeout=WITHIN):
        assert now() - ended > 1.9, "there was room for one beside it, and for two when its time was over"


def test_our_lock_waits_for_the_one_permit_of_another_programs_semaphore(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    session = shared.ask("PUT", "session/create", {"TTL": "10s", "LockDelay": "0s", "Behavior": "delete"})["ID"]
    shared.ask("PUT", f"kv/multilock/{name}/{session}?acquire={session}&flags={SEMAPHORE_FLAGS}", b"")
    held = json.dumps({"Limit": 1, "Holders": {session: True}}).encode()
    shared.ask("PUT", f"kv/multilock/{name}/.lock?flags={SEMAPHORE_FLAGS}", held)
    client = connect(shared.url)
    assert client.semaphore(name, 1).try_acquire() is None
    with pytest.raises(BackendRejected, match="has 1 permits here, but 2 were requested"):
        client.semaphore(name, 2).try_acquire()
    waiting = background(lambda: client.semaphore(name, 1).acquire(timeout=WITHIN))
    shared.ask("PUT", f"session/destroy/{session}")
    assert waiting.result(2 * WITHIN).release()


def test_a_key_with_unknown_contents_is_refused_and_never_overwritten(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    shared.ask("PUT", f"kv/multilock/{name}/.lock", b"precious")
    before = shared.key(f"multilock/{name}/.lock")
    with pytest.raises(BackendRejected, match="in use by another program"):
        connect(shared.url).lock(name).try_acquire()
    assert shared.key(f"multilock/{name}/.lock") == before


def test_a_free_key_that_the_go_client_left_behind_can_be_acquired(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    shared.ask("PUT", f"kv/multilock/{name}/.lock?flags={LOCK_FLAGS}", b"")
    client = connect(shared.url)
    with client.lock(name) as lease:
        entry = shared.key(f"multilock/{name}/.lock")
        assert entry is not None
        assert entry["Session"]
        assert lease.token == entry["ModifyIndex"]
        assert client.lock(name).try_acquire() is None
    assert shared.key(f"multilock/{name}/.lock") is None


def test_inspect_shows_a_holder_of_another_program(shared: ConsulServer, connect: Connect, name: str) -> None:
    session = shared.ask("PUT", "session/create", {"TTL": "10s"})["ID"]
    shared.ask("PUT", f"kv/multilock/{name}/.lock?acquire={session}&flags={LOCK_FLAGS}", b"10.0.0.7")
    info = connect(shared.url).inspect(name)
    assert info is not None
    assert (info.identity, info.owner) == ("10.0.0.7", f"session {session}")
    shared.ask("PUT", f"session/destroy/{session}")


def test_a_holder_of_another_program_can_be_force_released(shared: ConsulServer, connect: Connect, name: str) -> None:
    session = shared.ask("PUT", "session/create", {"TTL": "10s"})["ID"]
    shared.ask("PUT", f"kv/multilock/{name}/.lock?acquire={session}&flags={LOCK_FLAGS}", b"")
    client = connect(shared.url)
    assert client.force_release(name)
    assert not client.force_release(name)
    with client.lock(name).acquire(timeout=WITHIN):
        pass
    shared.ask("PUT", f"session/destroy/{session}")


def test_the_value_names_the_holder_and_the_time_as_one_line_of_json(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    client = consul.Consul(port=shared.port)
    with connect(shared.url, ttl=20, identity="node-7").lock(name) as lease:
        _, entry = client.kv.get(f"multilock/{quote(name)}/.lock")
        said = json.loads(entry["Value"])
        assert (said["v"], said["who"], said["ttl"]) == (1, "node-7", 20.0)
        assert lease.owner.startswith(said["id"])
        assert entry["Session"]


def test_the_clients_own_py_consul_object_is_used_but_never_closed(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    theirs = consul.Consul(port=shared.port)
    client = connect("consul://", client=theirs)
    with client.lock(name):
        assert connect(shared.url).lock(name).try_acquire() is None
    client.close()
    assert theirs.status.leader()


def test_requests_through_a_py_consul_client_to_a_dead_agent_end_in_time(connect: Connect) -> None:
    client = connect("consul://", client=consul.Consul(port=1), request_timeout=0.5)
    begun = now()
    with pytest.raises(multilock.BackendUnavailable):
        client.lock("any").try_acquire()
    assert now() - begun < 2
