"""A client whose process forks or ends, and a client that is closed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from multilock import Client, ClientClosed, LeaseState, LockLost, LossReason, NotHeld, connect
from multilock.kernel.exit import _at_exit, _shares
from multilock.kernel.notices import UngrantedClaim
from multilock.kernel.runtime import Threads, now
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import (
    Call,
    Losses,
    Scripted,
    client_on,
    ctrl_c,
    eventually,
    interrupted_at,
    our_threads,
    silence,
    state_of,
)

ROOT = Path(__file__).parents[2]


def fork_in_c() -> int:
    """Fork as daemon(3) and other C libraries do: Python is not informed, and runs no hook."""
    time.sleep(0.1)  # until other threads are idle: if one of them held the GIL, it would stay locked in the child
    pid: int = ctypes.PyDLL(None).fork()
    return pid


FORKS = pytest.mark.parametrize("fork", [os.fork, fork_in_c])


def in_child(function: Callable[[], Any], fork: Callable[[], int] = os.fork) -> Any:
    """Run ``function()`` in a forked child, and return its result by way of JSON. The child is killed after ten
    seconds."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of a fork beside threads
        pid = fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            os.close(reading)
            os.write(writing, json.dumps({"result": function()}).encode())
        except BaseException as error:
            os.write(writing, json.dumps({"error": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text, "the child died, or hung"
    answer = json.loads(text)
    assert "error" not in answer, answer["error"]
    return answer["result"]


def raises(error: type[BaseException], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False


@pytest.fixture
def real() -> Scripted:
    return Scripted()


@pytest.fixture
def client_in_threads(real: Scripted) -> Client:
    return client_on(real, Threads(), ttl=30.0)


@FORKS
def test_in_a_forked_child_every_lease_reads_released(
    real: Scripted, client_in_threads: Client, fork: Callable[[], int]
) -> None:
    client = client_in_threads
    losses = Losses()
    lock = client.lock("n", on_lost=losses)
    lease = lock.acquire()
    before = len(real.calls)

    def look() -> list[object]:
        return [
            lease.is_held(),
            lease.state.value,
            lease.remaining(),
            lease.release(),
            raises(NotHeld, lease.check),
            raises(NotHeld, lease.fence),
            raises(NotHeld, lease.renew),
            lease.wait_lost(0),
            raises(NotHeld, client.current_lease),
            raises(NotHeld, lock.release),
            lock.is_held(),
            len(real.calls) - before,
            len(losses.calls),
        ]

    assert in_child(look, fork) == [False, "released", 0.0, False, True, True, True, None, True, True, False, 0, 0]
    assert lease.is_held()
    assert lease.release() is True
    client.close()


def test_a_with_block_that_ends_in_a_forked_child_ends_silently(real: Scripted, client_in_threads: Client) -> None:
    lock = client_in_threads.lock("n")
    lock.__enter__()

    def leave() -> list[object]:
        lock.__exit__(None, None, None)
        return [real.called("release"), client_in_threads._kernel.cancels.take()]

    assert in_child(leave) == [[], []]
    lock.__exit__(None, None, None)
    assert len(real.called("release")) == 1
    client_in_threads.close()


def lose(backend: Scripted) -> None:
    backend.notices.gone(backend.called("attempt")[-1].claims[0].id, LossReason.TAKEN, "an operator took it")


@FORKS
def test_in_a_forked_child_a_lost_lease_reads_released_too(
    real: Scripted, client_in_threads: Client, fork: Callable[[], int]
) -> None:
    client = client_in_threads
    lease = client.lock("n").acquire()
    lose(real)
    assert state_of(lease) is LeaseState.LOST
    late = Losses()

    def look() -> list[object]:
        lease.on_lost(late)
        client._kernel.callbacks.wait(5)
        return [
            lease.state.value,
            raises(NotHeld, lease.check),
            lease.release(),
            lease.wait_lost(0),
            len(late.calls),
        ]

    assert in_child(look, fork) == ["released", True, False, None, 0]
    assert state_of(lease) is LeaseState.LOST
    client.close()
    assert in_child(lambda: state_of(lease).value, fork) == "released"


@FORKS
def test_a_child_that_closes_a_client_releases_no_lock_of_its_parent(
    real: Scripted, client_in_threads: Client, fork: Callable[[], int]
) -> None:
    lease = client_in_threads.lock("n").acquire()

    def end() -> int:
        client_in_threads.close()
        _at_exit()
        return len(real.called("release"))

    assert in_child(end, fork) == 0
    assert lease.release() is True
    client_in_threads.close()


@FORKS
@pytest.mark.parametrize("what", ["lock", "lease", "condition"])
@pytest.mark.parametrize("by", ["generator", "stack"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_context_entered_in_the_parent_ends_silently_in_the_child(
    real: Scripted, client_in_threads: Client, what: str, by: str, lost: bool, fork: Callable[[], int]
) -> None:
    lock = client_in_threads.lock("n")
    context: Any = lock
    if what != "lock":
        context = lock.acquire() if what == "lease" else threading.Condition(lock.as_threading_lock())  # type: ignore[arg-type]

    def body() -> Generator[None, None, None]:
        with context:
            yield

    stack, generator = contextlib.ExitStack(), body()
    if by == "stack":
        stack.enter_context(context)
    else:
        next(generator)
    if lost:
        lose(real)

    def end() -> str:
        stack.close()
        next(generator, None)
        return "silently"

    if by == "stack":
        generator.close()
    assert in_child(end, fork) == "silently"
    assert raises(LockLost, end) == lost
    client_in_threads.close()


@FORKS
def test_in_a_forked_child_a_client_opens_new_connections_under_a_new_identity(
    real: Scripted, client_in_threads: Client, fork: Callable[[], int]
) -> None:
    client = client_in_threads
    lease = client.lock("n", ttl=2.0, reentrant=True).acquire()
    name = real.notices.client

    def use() -> list[object]:
        other = client.lock("other", ttl=2.0, reentrant=True).acquire()
        fresh = real.called("attempt")[-1].claims[0]

        def renewed() -> list[str]:
            return [claim.name for call in real.called("renew") for claim in call.claims if claim.id == fresh.id]

        eventually(lambda: len(renewed()) >= 3)  # without renewals the lease would have ended by then
        return [
            real.opened,
            real.notices.client != name,
            fresh.id.startswith(real.notices.client + "."),
            f":{os.getpid()}:" in fresh.owner,
            other.is_held(),
            sorted(set(renewed())),
            client.current_lease().name,
            client.lock("n").try_acquire() is None,
        ]

    assert in_child(use, fork) == [2, True, True, True, True, ["other"], "other", True]
    assert lease.is_held()
    assert lease.release()
    client.close()


@FORKS
def test_in_a_forked_child_old_and_new_clients_share_one_empty_memory(fork: Callable[[], int]) -> None:
    with connect("memory://forked") as client:
        lease = client.lock("n").acquire()

        def use() -> list[object]:
            with connect("memory://forked") as other:
                first = other.lock("n").acquire(0)
                return [client.lock("n").try_acquire() is None, first.release(), client.lock("n").acquire(0).release()]

        assert in_child(use, fork) == [True, True, True]
        assert lease.release() is True


@FORKS
def test_an_election_that_runs_in_the_parent_can_be_started_in_the_child(fork: Callable[[], int]) -> None:
    with connect("memory://forked-election") as client, client.election("e") as election:
        eventually(election.is_leader)

        def stand() -> list[object]:
            before = election.is_leader()
            election.start()
            eventually(election.is_leader)
            election.stop()
            return [before, election.is_leader(), election.leader()]

        assert in_child(stand, fork) == [False, False, None]
        assert election.is_leader()


def test_a_fork_while_other_threads_use_the_client_does_not_hang_the_child(
    real: Scripted, client_in_threads: Client
) -> None:
    client = client_in_threads
    lease = client.lock("n").acquire()
    kernel = client._kernel
    with kernel.lock, kernel.gate._lock, kernel.cancels._lock, kernel.timers._lock, client.events._lock:
        assert in_child(lambda: [lease.is_held(), client.lock("other").acquire().release()]) == [False, True]
    client.close()


def test_a_fork_of_a_closed_client_whose_lock_was_taken_does_not_hang_the_child(
    real: Scripted, client_in_threads: Client
) -> None:
    client = client_in_threads
    lease = client.lock("n").acquire()
    client.close()
    with client._kernel.lock:
        assert in_child(lambda: [lease.release(), lease.is_held()]) == [False, False]


def test_events_are_reported_in_the_child_too(real: Scripted, client_in_threads: Client) -> None:
    heard: list[str] = []
    client_in_threads.events.subscribe(lambda event: heard.append(type(event).__name__))
    client_in_threads.lock("n").acquire().release()
    eventually(lambda: len(heard) == 2)

    def child() -> list[str]:
        heard.clear()
        client_in_threads.lock("other").acquire().release()
        eventually(lambda: len(heard) == 2)
        return heard

    assert in_child(child) == ["Acquired", "Released"]
    client_in_threads.close()


# Exit


PRELUDE = """
import atexit, os, sys, threading, time
began = time.monotonic()
import multilock
def last():
    try:
        client.lock("late").acquire(0)
    except multilock.ClientClosed:
        print("closed")
if "late" in sys.argv:
    from multilock.kernel.exit import _at_exit
    atexit.unregister(_at_exit); atexit.register(last); atexit.register(_at_exit)
from tests.unit.kit import Scripted, client_on, silence
from multilock.kernel.runtime import Threads, now
class Telling(Scripted):
    def release(self, claim, granted, unsure, within):
        print("release", claim.name, threading.current_thread() is threading.main_thread(), flush=True)
        return super().release(claim, granted, unsure, within)
backend = Telling()
client = client_on(backend, Threads(), ttl=10.0)
"""


def run(script: str, *arguments: str) -> tuple[list[str], float, int]:
    """Run the script. Returns the lines it printed, the seconds it took, and its exit code."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}"},
        check=False,
    )
    return done.stdout.splitlines(), time.monotonic() - began, done.returncode


@pytest.mark.oracle
@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "del lease, client"])
def test_at_exit_held_locks_are_released_without_callbacks(ending: str) -> None:
    lines, _, code = run(
        "lease = client.lock('n', on_lost=lambda loss: print('lost')).acquire()\nclient.lock('m').acquire()\n" + ending
    )
    assert sorted(lines) == ["release m True", "release n True"]
    assert code == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_at_exit_a_pending_release_is_finished_by_the_exiting_thread(interrupted: bool) -> None:
    lines, _, code = run(
        "lease = client.lock('n').acquire()\n"
        "backend.script('release', lambda backend, call: time.sleep(60))\n"
        "threading.Thread(target=lease.release, daemon=True).start()\n"
        "while not backend.called('release'): time.sleep(0.001)\n"
        "client.events.subscribe(print)\n" + ("sys.exit(1)" if interrupted else "")
    )
    assert lines == ["release n False", "release n True"]
    assert code == int(interrupted)


def test_an_exception_that_ends_the_program_releases_its_locks() -> None:
    lines, _, code = run("lease = client.lock('n').acquire()\nraise ValueError")
    assert lines == ["release n True"]
    assert code == 1


def test_exit_takes_two_seconds_at_most_even_if_the_backend_is_silent() -> None:
    lines, seconds, code = run(
        "from multilock.kernel.exit import _exit\n"
        "for n in range(5): client.lock(f'n{n}').acquire()\nbackend.always('release', silence())\n"
        "def tell(): print('clock', time.monotonic(), flush=True)\n"
        "atexit.unregister(_exit); atexit.register(tell); atexit.register(_exit); atexit.register(tell)\n"
    )
    before, after = (float(line.split()[1]) for line in lines if line.startswith("clock"))
    assert 1.0 < after - before < 2.0 + 1.5
    assert seconds < 20  # seconds, which include the start and the end of the interpreter
    assert code == 0


def test_an_immediate_exit_leaves_held_locks_to_their_ttl() -> None:
    lines, _, code = run("lease = client.lock('n').acquire()\nos._exit(7)")
    assert (lines, code) == ([], 7)


def test_no_thread_keeps_the_process_alive() -> None:
    lines, seconds, code = run(
        "backend.holders['taken'] = 'somebody'\n"
        "backend.always('renew', lambda backend, call: time.sleep(60))\n"
        "lease = client.lock('n', ttl=0.3, on_lost=lambda loss: time.sleep(60)).acquire()\n"
        "election = client.election('taken'); election.start()\n"
        "threading.Thread(target=client.lock('taken').acquire, daemon=True).start()\n"
        "client.lock('m').acquire()\n"
        "time.sleep(0.5)\n"
    )
    assert "release m True" in lines
    assert seconds < 20  # the work that must not delay the exit takes 60 seconds
    assert code == 0


def test_after_exit_a_client_is_closed() -> None:
    lines, _, _ = run("lease = client.lock('n').acquire()", "late")
    assert lines == ["release n True", "closed"]


# close()


@pytest.mark.oracle
def test_close_reports_each_loss_before_it_releases_the_lock(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    order: list[str] = []
    lease = client.lock("n", on_lost=lambda loss: order.append(loss.reason.value)).acquire()

    def released(backend: Scripted, call: Call) -> Any:
        order.append("release")
        return call.execute()

    backend.always("release", released)
    client.close()
    assert order == ["closed", "release"]
    assert not lease.is_held()
    assert lease.release() is False
    with pytest.raises(LockLost):
        lease.check()
    assert backend.holders == {}
    assert backend.closed == 1


def test_close_twice_is_harmless(client: Client, backend: Scripted) -> None:
    client.close()
    client.close()
    assert backend.closed == 1


def test_a_second_close_waits_for_the_first(real: Scripted, client_in_threads: Client) -> None:
    client, hangs = client_in_threads, threading.Event()
    client.lock("n", on_lost=lambda _: hangs.wait(10)).acquire()
    first = threading.Thread(target=client.close)
    first.start()
    eventually(lambda: client._kernel.closed)
    second = threading.Thread(target=client.close)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    hangs.set()
    second.join(10)
    assert real.holders == {}
    first.join(10)


def test_a_part_that_cannot_be_closed_does_not_block_the_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("a defect")

    client.lock("n").acquire()
    monkeypatch.setattr(client._kernel.backend, "close", broken)
    client.close()
    assert client._kernel.end._ended


def test_after_close_every_call_raises_client_closed(client: Client) -> None:
    lock = client.lock("n")
    client.close()
    calls: list[Callable[[], object]] = [
        lock.acquire,
        lock.try_acquire,
        lock.is_locked,
        client.ping,
        client.diagnose,
        lambda: client.inspect("n"),
        client.inspect_all,
        lambda: client.force_release("n"),
        lambda: client.lock("m"),
        lambda: client.election("e"),
    ]
    for call in calls:
        with pytest.raises(ClientClosed):
            call()
    assert not client.is_healthy()
    assert not lock.is_held()


def test_close_waits_one_request_timeout_for_callbacks_that_hang(real: Scripted) -> None:
    client = client_on(real, Threads(), request_timeout=0.3)
    hang = threading.Event()
    client.lock("n", on_lost=lambda loss: hang.wait(10)).acquire()
    began = time.monotonic()
    client.close()
    assert 0.3 <= time.monotonic() - began < 2
    eventually(lambda: real.holders == {})  # the release may take a further request timeout
    hang.set()


def test_close_waits_one_request_timeout_for_a_silent_backend(real: Scripted) -> None:
    client = client_on(real, Threads(), request_timeout=0.3)
    client.lock("n").acquire()
    real.always("release", silence(5.0))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("waiters", [1, 5])
@pytest.mark.parametrize("fair", [False, True])
def test_close_ends_every_wait(real: Scripted, client_in_threads: Client, waiters: int, fair: bool) -> None:
    client = client_in_threads
    real.holders["n"] = "somebody"
    ends: list[ClientClosed] = []

    def wait() -> None:
        try:
            client.lock("n", fair=fair).acquire()
        except ClientClosed as error:
            ends.append(error)

    threads = [threading.Thread(target=wait) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(real.queues["n"]) == (waiters if fair else 1))
    began = time.monotonic()
    client.close()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - began < 3
    assert [(end.name, end.backend) for end in ends] == [("n", client._kernel.scheme)] * waiters
    assert real.queues["n"] == [], "nobody is left in the queue"


@pytest.mark.oracle
def test_an_acquire_that_runs_during_close_leaves_nothing_behind(real: Scripted, client_in_threads: Client) -> None:
    client = client_in_threads
    asked, answer = threading.Event(), threading.Event()
    ends: list[BaseException] = []

    def slow(backend: Scripted, call: Call) -> Any:
        result = call.execute()
        asked.set()
        answer.wait(10)
        return result

    real.script("attempt", slow)

    def once() -> None:
        try:
            client.lock("n").acquire(0)
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=once)
    thread.start()
    assert asked.wait(5)
    closing = threading.Thread(target=client.close)
    closing.start()
    eventually(lambda: client._kernel.closed)
    answer.set()
    thread.join(5)
    closing.join(5)
    assert [type(end) for end in ends] == [ClientClosed]
    assert real.holders == {}


def test_close_waits_for_a_pending_release_even_if_another_thread_retries_it(
    real: Scripted, client_in_threads: Client
) -> None:
    client = client_in_threads
    lease = client.lock("n").acquire()
    asked, answer = threading.Event(), threading.Event()

    def slow(backend: Scripted, call: Call) -> Any:
        asked.set()
        answer.wait(10)
        assert backend.closed == 0, "the connection was closed under the request"
        return call.execute()

    real.script("release", slow)
    answers: list[bool] = []
    releasing = threading.Thread(target=lambda: answers.append(lease.release()))
    releasing.start()
    assert asked.wait(5)
    assert lease.release() is False
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(0.1)
    answer.set()
    releasing.join(5)
    closing.join(5)
    assert answers == [True]
    assert real.holders == {}


def test_close_ends_the_threads(real: Scripted) -> None:
    before = our_threads()
    client = client_on(real, Threads(), ttl=2.0)
    client.lock("n").acquire()
    eventually(lambda: len(real.called("renew")) > 1)
    client.close()
    eventually(lambda: our_threads() <= before)


def test_the_end_of_a_with_block_closes_its_client(real: Scripted) -> None:
    with client_on(real, Threads()) as client:
        lease = client.lock("n").acquire()
    loss = lease.wait_lost(0)
    assert loss is not None
    assert loss.reason is LossReason.CLOSED
    assert "closed" in repr(client)


def test_close_releases_held_locks_after_the_waiters_have_left() -> None:
    backend = Scripted()
    client = client_on(backend, Threads())
    lease = client.lock("n").acquire()
    kernel = client._kernel
    claim = inner(lease).claim
    kernel.monitor.waiting[claim.id] = UngrantedClaim(claim, Threads().bell())
    assert kernel.end.withdraw(now() + 5)
    assert backend.called("release") == []
    kernel.end.exit(now() + 5)
    assert len(backend.called("release")) == 1
    assert not kernel.end.withdraw(now() + 5)


def test_an_interrupted_close_releases_the_held_locks() -> None:
    backend = Scripted()
    client = client_on(backend, Threads())
    client.lock("n").acquire()
    with ctrl_c("ThreadCallbacks.wait"):
        client.close()
    eventually(lambda: backend.holders == {})
    assert client._kernel.end.withdraw(now() + 5), "what is left of it is done at the exit"
    client._kernel.end.exit(now() + 5)


def test_a_close_interrupted_anywhere_ends_the_client_in_the_background() -> None:
    step = 0
    while True:
        runtime = HandRuntime()
        backend = Scripted(runtime, sessions=True)
        client = client_on(backend, runtime, ttl=3.0)
        client.lock("n").acquire()
        interrupted = False
        with interrupted_at(step, "End.close") as where:
            try:
                client.close()
            except KeyboardInterrupt:
                interrupted = True
        runtime.advance(1)
        if interrupted and not client._kernel.closed:
            client.close()
        runtime.advance(10)
        assert not backend.holders, where
        assert client._kernel.end._ended, where
        if not where:
            break
        step += 1
    assert step > 50


def test_a_client_of_a_silent_server_leaves_exit_time_for_the_others() -> None:
    began = now()
    shares = _shares(2, began + 2)
    assert next(shares) == pytest.approx(began + 1, abs=0.5)
    assert next(shares) == pytest.approx(began + 2, abs=0.01)
