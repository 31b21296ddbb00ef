"""The garbage collector releases a lease or drops a client while code of multilock runs on the same thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import multilock
from multilock import log_thread
from multilock.backend import Returned
from multilock.kernel import living_clients
from multilock.kernel.runtime import Threads
from multilock.testing.conformance.base import inner
from tests.unit.kit import Call, Losses, Scripted, client_on, eventually, our_threads

ROOT = Path(__file__).parents[2]

CYCLES = """
import gc, sys, time, multilock
class Owner:
    def __init__(self, lease):
        self.me, self.lease = self, lease
    def __del__(self):
        self.lease.release()
gc.set_threshold(17, 2, 2)
with multilock.connect(sys.argv[1], ttl=30) as client:
    for number in range(400):
        Owner(client.lock(f"n{number}").acquire(timeout=2))
    began = time.monotonic()
    while list(client.inspect_all()):
        gc.collect()
        assert time.monotonic() - began < 10
        time.sleep(0.01)
"""


class Asks:
    def __init__(self, call: Callable[[], object], raised: list[str]) -> None:
        self.call, self.raised = call, raised

    def __del__(self) -> None:
        try:
            self.call()
        except multilock.BackendUnavailable as error:
            self.raised.append(str(error))


@pytest.mark.parametrize("what", ["acquire", "is_locked"])
def test_a_finalizer_that_sends_a_request_inside_another_call_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[str] = []
    with multilock.connect(f"memory://{what}") as client:
        backend = client._kernel.backend
        look = type(backend._store).look  # type: ignore[attr-defined]

        # the garbage collector may run anywhere, here while the thread holds the mutex of the store
        def collect(*args: Any) -> Any:
            Asks(getattr(client.lock("other"), what), raised)
            return look(*args)

        monkeypatch.setattr(type(backend._store), "look", collect)  # type: ignore[attr-defined]
        asking = threading.Thread(target=client.inspect, args=["n"], daemon=True)
        asking.start()
        asking.join(5)
        assert not asking.is_alive()
        monkeypatch.undo()
    assert ["another thread" in text for text in raised] == [True]


@pytest.mark.parametrize("backend", ["memory", "sqlite"])
def test_a_lease_released_by_the_garbage_collector_delays_no_other_call(backend: str, tmp_path: Path) -> None:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'locks.db'}"}[backend]
    done = subprocess.run(
        [sys.executable, "-c", CYCLES, url],
        capture_output=True,
        text=True,
        timeout=25,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


LOCKS: dict[str, Callable[[multilock.Client], Any]] = {
    "client": lambda client: client._kernel.lock,
    "election": lambda client: client.election("e")._office.lock,
}


@pytest.mark.parametrize("where", LOCKS)
def test_a_release_by_a_finalizer_during_a_request_continues_in_the_background(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Scripted()
    client = client_on(backend, Threads())
    losses = Losses()
    lease = client.lock("n", on_lost=losses).acquire()
    seen: list[object] = []
    released_by: list[int] = []
    release = backend.release

    def collect(backend: Scripted, call: Call) -> Any:
        seen.extend([lease.release(), lease.is_held(), lease.release()])
        return call.execute()

    def release_and_say(*args: Any) -> Returned:
        released_by.append(threading.get_ident())
        return release(*args)

    monkeypatch.setattr(backend, "release", release_and_say)
    backend.script("attempt", collect)
    other = client.lock("m").acquire()
    assert seen == [True, False, False]
    eventually(lambda: backend.released() == {inner(lease).claim.id})
    with LOCKS[where](client):  # a release while this thread holds a lock of multilock
        assert other.release()
    eventually(lambda: backend.holders == {})
    client.close()
    assert threading.get_ident() not in released_by
    assert losses.calls == []


def test_a_release_by_a_finalizer_counts_a_reentrant_lease_down() -> None:
    client = client_on(Scripted(), Threads())
    lock = client.lock("n", reentrant=True)
    lease = lock.acquire()
    lock.acquire()
    with client._kernel.lock:
        assert lease.release()
        assert lease.is_held()
        assert lease.release()
        assert not lease.is_held()
    eventually(lambda: not client._kernel.held)
    client.close()


# Clients that nobody closed


def use(url: str) -> None:
    client = multilock.connect(url)
    lock = client.lock("n")
    lock.acquire().release()


def use_async(url: str) -> None:
    async def main() -> None:
        client = multilock.connect_async(url)
        await (await client.lock("n").acquire()).release()

    asyncio.run(main())


def descriptors(of: str) -> list[str]:
    """Return the open files of this process whose names contain ``of``. Other files may belong to clients of other
    tests."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor used for listing the folder
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [link for link in found if of in link]


@pytest.mark.parametrize("use", [use, use_async])
@pytest.mark.parametrize("backend", ["memory", "sqlite", "redis"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_abandoned_client_leaves_neither_threads_nor_descriptors(
    backend: str, use: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'locks.db'}"}
    url = urls.get(backend) or request.getfixturevalue("redis_url") + "?prefix=dropped/"
    of = {"memory": "anon_inode:", "sqlite": str(tmp_path), "redis": "socket:"}[backend]
    gc.collect()
    threads, open_before = our_threads(), len(descriptors(of))
    for _ in range(10):
        use(url)
    # A thread may first wait until the planned time of a renewal, after a third of the ttl.
    eventually(lambda: (gc.collect(), our_threads() <= threads)[1], within=30)
    eventually(lambda: len(descriptors(of)) <= open_before, within=10)


class Ours(Scripted):
    """A class of its own, to distinguish this test's clients from those of other tests."""

    scheme = "ours"


def warned_of_ours(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [each for each in caught if "a client of ours was dropped" in str(each.message)]


def test_an_abandoned_client_causes_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = Ours()
        client_on(backend, Threads())
        gc.collect()
        eventually(lambda: warned_of_ours(caught))
        eventually(lambda: backend.closed)
    [warned] = warned_of_ours(caught)
    assert str(warned.message) == "a client of ours was dropped without close(): close it, or use it in `with`"
    assert warned.category is ResourceWarning


def test_a_lease_keeps_its_abandoned_client_alive_until_it_ends() -> None:
    backend = Scripted()
    lease = client_on(backend, Threads(), ttl=2.0).lock("n").acquire()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        eventually(lambda: len(backend.called("renew")) >= 3)
        assert lease.is_held()
        assert not backend.closed
        assert lease.release()
        del lease
        # The check for abandoned clients runs every 5 s.
        eventually(lambda: (gc.collect(), backend.closed)[1], within=15)
        log_thread.flush(5)


def test_a_closed_client_may_be_abandoned() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client_on(Ours(), Threads()).close()
        gc.collect()
        assert log_thread.flush(10)
    assert warned_of_ours(caught) == []


def test_the_clients_of_a_process_can_be_listed_while_others_are_created() -> None:
    ended = threading.Event()
    errors: list[BaseException] = []

    class NoEnd:
        def withdraw(self, deadline: float) -> bool:
            return False

        def exit(self, deadline: float) -> None: ...
        def forked(self) -> None: ...

    class Dummy:
        lock = threading.RLock()
        end = NoEnd()

    def make() -> None:
        while not ended.is_set():
            dummies = [Dummy() for _ in range(50)]
            for dummy in dummies:
                living_clients.register(dummy)

    def look() -> None:
        try:
            for _ in range(2000):
                living_clients.living()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        makers = [threading.Thread(target=make, daemon=True) for _ in range(2)]
        for maker in makers:
            maker.start()
        look()
    finally:
        sys.setswitchinterval(interval)
        ended.set()
    for maker in makers:
        maker.join(10)
    assert errors == []
