"""A test for each defect that users or reviewers found."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any
from uuid import uuid4

import pytest

import multilock
from multilock import registry
from multilock.kernel.runtime import now
from multilock.testing.conformance.base import inner
from tests.unit.kit import START_OF_A_THREAD, ctrl_c, eventually, our_threads


@pytest.fixture
def url() -> str:
    return f"memory://{uuid4().hex}"


@pytest.fixture
def client(url: str) -> Iterator[multilock.Client]:
    with multilock.connect(url) as client:
        yield client


class InterruptedOnce:
    """Pass each call on to ``call``. Raise KeyboardInterrupt before or after the first call."""

    def __init__(self, call: Callable[..., Any], *, after: bool) -> None:
        self.call = call
        self.after = after
        self.interrupted = False

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        first, self.interrupted = not self.interrupted, True
        if first and not self.after:
            raise KeyboardInterrupt
        result = self.call(*args, **keywords)
        if first:
            raise KeyboardInterrupt
        return result


def interrupt(monkeypatch: pytest.MonkeyPatch, place: object, method: str, *, after: bool) -> InterruptedOnce:
    once = InterruptedOnce(getattr(place, method), after=after)
    monkeypatch.setattr(place, method, once)
    return once


def free_for_everybody(client: multilock.Client, url: str) -> bool:
    """Return whether both another thread of this client and another client get the lock soon."""
    taken: list[bool] = []

    def take() -> None:
        if lease := client.lock("a").try_acquire(timeout=5):
            lease.release()
        taken.append(lease is not None)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(10)
    with multilock.connect(url) as other:
        lease = other.lock("a").try_acquire(timeout=5)
        return taken == [True] and lease is not None


@pytest.mark.oracle
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_as_an_acquire_leaves_the_queue_of_its_client_leaves_nothing_behind(
    client: multilock.Client, url: str, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    interrupt(monkeypatch, client._kernel.gate, "leave", after=after)
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    assert free_for_everybody(client, url)


@pytest.mark.oracle
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_after_the_grant_leaves_nothing_behind(
    client: multilock.Client, url: str, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    class Waiting(dict[str, Any]):
        pop: Any = None

    waiting = Waiting()
    waiting.pop = InterruptedOnce(lambda *args: dict.pop(waiting, *args), after=after)
    monkeypatch.setattr(client._kernel.monitor, "waiting", waiting)
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    assert not waiting
    assert free_for_everybody(client, url)


@pytest.mark.oracle
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_before_the_lease_is_returned_leaves_nothing_behind(
    client: multilock.Client, url: str, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    interrupt(monkeypatch, client._scope(), "push", after=after)
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    assert free_for_everybody(client, url)


def test_an_interrupt_at_the_end_of_a_with_block_still_releases_the_lock(
    client: multilock.Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), client.lock("a"):
        interrupt(monkeypatch, client._kernel.releases, "release", after=False)
    assert free_for_everybody(client, url)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("Releases._finish", None),
        ("Releases._released", None),
        ("Releases._part_released", None),
        ("Releases._part_released", "pop"),
    ],
)
def test_an_interrupt_after_the_reply_to_a_release_leaves_no_thread_waiting(
    client: multilock.Client, function: str, after: str | None
) -> None:
    lease = client.lock("a").acquire()
    waiter = threading.Thread(target=lease.wait_lost)
    waiter.start()
    eventually(lambda: inner(lease)._hooks)
    with ctrl_c(function, after):
        lease.release()
    waiter.join(5)
    assert not waiter.is_alive()
    assert client._kernel.held == {}
    assert lease.state is multilock.LeaseState.RELEASED


@pytest.mark.parametrize(
    ("function", "after"),
    [("Losses._tell", None), ("ThreadCallbacks.start", None), ("ThreadCallbacks._relieve", None)],
)
def test_an_interrupt_while_a_loss_is_reported_loses_no_report(
    client: multilock.Client, function: str, after: str | None
) -> None:
    told: list[multilock.Loss] = []
    lease = client.lock("a", ttl=1.5, renew=False, on_lost=told.append).acquire()
    client._kernel.ticker.close()  # type: ignore[union-attr]  # without it, only the calls of this test find the loss
    waiter = threading.Thread(target=lease.wait_lost)
    waiter.start()
    eventually(lambda: inner(lease)._hooks)
    time.sleep(1.6)
    with ctrl_c(function, after):
        lease.is_held()
    waiter.join(5)
    assert not waiter.is_alive()
    eventually(lambda: told)
    time.sleep(0.3)  # a second thread would have started by now
    assert len(told) == 1
    assert client._kernel.held == {}


@pytest.mark.parametrize("after", [None, START_OF_A_THREAD])
def test_a_client_whose_first_acquire_was_interrupted_leaves_nothing_to_the_next_client(
    url: str, after: str | None
) -> None:
    before = our_threads()
    with multilock.connect(url) as client:
        with ctrl_c("Thread.start", after):
            client.lock("a").acquire()
        with client.lock("a"):
            pass
    eventually(lambda: our_threads() <= before)


def test_a_task_planned_after_the_end_of_a_client_starts_no_thread(url: str) -> None:
    client = multilock.connect(url)
    client.close()
    client._kernel.timers.at(now(), lambda: None)
    assert client._kernel.ticker is None


@pytest.mark.oracle
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_as_the_threading_adapter_acquires_leaves_nothing_behind(
    client: multilock.Client, url: str, after: bool, reentrant: bool
) -> None:
    class Taken(dict[Any, Any]):
        __setitem__ = InterruptedOnce(lambda *entry: dict.__setitem__(taken, *entry), after=after)

    lock = client.lock("a", reentrant=reentrant).as_threading_lock()
    lock._taken = taken = Taken()
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    with pytest.raises(multilock.NotHeld):
        lock.release()
    assert free_for_everybody(client, url)


def test_a_blocking_election_refuses_asynchronous_work(client: multilock.Client) -> None:
    async def work(leadership: multilock.Leadership) -> None:
        raise AssertionError("never awaited")

    with pytest.raises(TypeError, match="connect_async"):
        client.election("a").run(work)


def test_a_client_created_from_a_url_is_refused_with_the_right_call() -> None:
    for kind in (multilock.Client, multilock.AsyncClient):
        with pytest.raises(TypeError, match="connect"):
            kind("memory://")  # type: ignore[arg-type]


def test_a_client_library_that_cannot_be_imported_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] in ("redis", "multilock_redis")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(multilock.ConfigurationError, match=r"pip install 'multilock\[redis\]'"):
        multilock.connect("redis://localhost")


def test_an_entry_point_that_names_a_module_is_refused_with_the_right_form(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("third", "json", registry.GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"third": point})
    with pytest.raises(multilock.ConfigurationError, match="json:open"):
        multilock.connect("third://x")


class Unheard:
    async def __call__(self, _: object) -> None: ...


async def unheard_function(_: object) -> None: ...


@pytest.mark.parametrize("unheard", [unheard_function, Unheard()], ids=["function", "object"])
def test_a_blocking_client_refuses_asynchronous_callbacks(unheard: Any) -> None:
    with multilock.connect("memory://") as client:
        with pytest.raises(TypeError, match="coroutine function"):
            client.lock("n", on_lost=unheard)
        for name in ("on_elected", "on_lost", "on_leader_changed"):
            callback: dict[str, Any] = {name: unheard}
            with pytest.raises(TypeError, match=name):
                client.election("e", **callback)
        with client.lock("n") as lease, pytest.raises(TypeError, match="coroutine function"):
            lease.on_lost(unheard)
        with pytest.raises(TypeError, match="subscribe got a coroutine function"):
            client.events.subscribe(unheard)


def test_the_threading_adapter_reports_locked_while_another_client_holds_the_lock() -> None:
    with multilock.connect("memory://") as one, multilock.connect("memory://") as other:
        lock = one.lock("shared").as_threading_lock()
        with other.lock("shared"):
            assert lock.locked()
        assert not lock.locked()
