"""The same lock as Consul's own tools take: ``consul lock`` and the Go client behind it, in both directions."""

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
    """``consul lock …`` in the background; its child says "held" once it runs."""
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
    """The exit code of ``consul lock``: 0 if it got in."""
    return subprocess.run(
        [program(), "lock", *words, "true"], env=server.environment, capture_output=True, check=False, timeout=30
    ).returncode


def test_consul_lock_keeps_us_out_and_lets_us_in(
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


def test_we_keep_consul_lock_out_and_let_it_in(shared: ConsulServer, connect: Connect, start: Start, name: str) -> None:
    lease = connect(shared.url).lock(name).acquire()
    assert try_official(shared, "-timeout=1s", f"multilock/{name}") != 0
    official = start(f"multilock/{name}")
    time.sleep(0.2)
    lease.release()
    assert says_held(official)


def test_a_name_that_is_quoted_is_the_same_lock_for_consul_lock(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    with connect(shared.url).lock(f"a/{name} é"):
        assert try_official(shared, "-timeout=1s", f"multilock/a%2F{name}%20%C3%A9") != 0


def test_consul_lock_that_is_terminated_lets_us_in_at_once(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    client = connect(shared.url)
    official = start(f"multilock/{name}")
    assert says_held(official)
    official.send_signal(signal.SIGTERM)
    begun = now()
    with client.lock(name).acquire(timeout=WITHIN):
        assert now() - begun < 5
        official.wait(WITHIN)
        assert client.lock(name).is_locked(), "its clean-up spares our key"


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_killed_consul_lock_lets_us_in_after_its_session_and_its_delay(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    official = start(f"multilock/{name}")
    assert says_held(official)
    official.kill()
    begun = now()
    with connect(shared.url).lock(name).acquire(timeout=55):
        assert 40 < now() - begun < 50  # twice 15 s, and 15 s of lock delay


def test_a_semaphore_is_refused_and_never_overwritten(
    shared: ConsulServer, connect: Connect, start: Start, name: str
) -> None:
    client = connect(shared.url)
    official = start("-n=2", f"multilock/{name}")
    assert says_held(official)
    before = shared.key(f"multilock/{name}/.lock")
    assert before is not None
    assert before["Flags"] == SEMAPHORE_FLAGS
    for attempt in (client.lock(name).try_acquire, client.lock(name).acquire, client.lock(name, renew=False).acquire):
        with pytest.raises(BackendRejected, match="semaphore"):
            attempt()
    assert shared.key(f"multilock/{name}/.lock") == before


def test_a_key_of_something_else_is_refused_and_never_overwritten(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    shared.ask("PUT", f"kv/multilock/{name}/.lock", b"precious")
    before = shared.key(f"multilock/{name}/.lock")
    with pytest.raises(BackendRejected, match="in use by something else"):
        connect(shared.url).lock(name).try_acquire()
    assert shared.key(f"multilock/{name}/.lock") == before


def test_the_key_of_a_free_lock_that_the_go_client_left_behind_is_taken(
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


def test_a_holder_of_another_program_is_shown(shared: ConsulServer, connect: Connect, name: str) -> None:
    session = shared.ask("PUT", "session/create", {"TTL": "10s"})["ID"]
    shared.ask("PUT", f"kv/multilock/{name}/.lock?acquire={session}&flags={LOCK_FLAGS}", b"10.0.0.7")
    info = connect(shared.url).inspect(name)
    assert info is not None
    assert (info.identity, info.owner) == ("10.0.0.7", f"session {session}")
    shared.ask("PUT", f"session/destroy/{session}")


def test_the_holder_of_another_program_can_be_forced_out(shared: ConsulServer, connect: Connect, name: str) -> None:
    session = shared.ask("PUT", "session/create", {"TTL": "10s"})["ID"]
    shared.ask("PUT", f"kv/multilock/{name}/.lock?acquire={session}&flags={LOCK_FLAGS}", b"")
    client = connect(shared.url)
    assert client.force_release(name)
    assert not client.force_release(name)
    with client.lock(name).acquire(timeout=WITHIN):
        pass
    shared.ask("PUT", f"session/destroy/{session}")


def test_the_value_says_who_holds_since_when_in_one_line_of_json(
    shared: ConsulServer, connect: Connect, name: str
) -> None:
    client = consul.Consul(port=shared.port)
    with connect(shared.url, ttl=20, identity="node-7").lock(name) as lease:
        _, entry = client.kv.get(f"multilock/{quote(name)}/.lock")
        said = json.loads(entry["Value"])
        assert (said["v"], said["who"], said["ttl"]) == (1, "node-7", 20.0)
        assert lease.owner.startswith(said["id"])
        assert entry["Session"]


def test_a_client_of_py_consul_is_used_and_never_closed(shared: ConsulServer, connect: Connect, name: str) -> None:
    theirs = consul.Consul(port=shared.port)
    client = connect("consul://", client=theirs)
    with client.lock(name):
        assert connect(shared.url).lock(name).try_acquire() is None
    client.close()
    assert theirs.status.leader()


def test_a_client_of_py_consul_that_waits_for_a_dead_agent_is_bounded_all_the_same(connect: Connect) -> None:
    client = connect("consul://", client=consul.Consul(port=1), request_timeout=0.5)
    begun = now()
    with pytest.raises(multilock.BackendUnavailable):
        client.lock("any").try_acquire()
    assert now() - begun < 2
