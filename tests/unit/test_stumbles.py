"""Mistakes of new users are reported at once, with the remedy."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import threading
from collections.abc import Callable

import pytest

import multilock
from multilock import BackendUnavailable, Client, LockTimeout
from multilock.testing import HandRuntime
from tests.unit.kit import Scripted, client_on, eventually, refused


def test_waiting_for_a_lock_that_the_same_thread_holds_is_reported_at_once(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    lease = client.lock("n").acquire()
    with pytest.raises(LockTimeout, match=r"this thread holds it itself: .* reentrant=True"):
        client.lock("n").acquire(timeout=1)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in told if "waits for the lock 'n', which it holds" in text and "reentrant=True" in text]
    lease.release()


def test_waiting_for_another_holder_or_a_single_try_reports_nothing(
    client: Client, backend: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    with client.lock("n"):
        assert client.lock("n").try_acquire() is None
        with client.lock("m").acquire(timeout=1):
            pass
    backend.holders["n"] = "somebody"
    with pytest.raises(
        LockTimeout,
        match=r"still taken after 1 s: wait longer\. inspect\(\) shows who holds it, or until when it rests",
    ):
        client.lock("n").acquire(timeout=1)
    assert "which it holds" not in caplog.text


def test_a_failed_single_try_does_not_advise_to_wait_longer(client: Client, backend: Scripted) -> None:
    backend.holders["n"] = "somebody"
    with pytest.raises(LockTimeout, match=r"lock 'n' is taken: inspect\(\) shows who holds it") as caught:
        client.lock("n").acquire(timeout=0)
    assert "longer" not in str(caught.value)


def test_a_blocking_acquire_on_an_event_loop_is_reported_once(
    client: Client, backend: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        for _ in range(2):
            assert client.lock("n").try_acquire(timeout=1) is None

    backend.holders["n"] = "somebody"
    assert client.lock("n").try_acquire(timeout=1) is None, "outside of a loop nothing is told"
    assert "event loop" not in caplog.text
    asyncio.run(main())
    assert caplog.text.count("in a thread that runs an event loop") == 1


@pytest.mark.parametrize("timeout", [0, 3.0, None])
def test_the_exception_of_redis_py_is_the_cause_of_the_error_after_silence(
    backend: Scripted, runtime: HandRuntime, timeout: float | None
) -> None:
    theirs = OSError("the library's own")
    silence = BackendUnavailable("no answer", unknown=False)
    silence.__cause__ = theirs
    backend.always("attempt", refused(silence))
    client = client_on(backend, runtime, outage_timeout=5.0)
    with pytest.raises(BackendUnavailable) as caught:
        client.lock("n").acquire(timeout=timeout)
    assert caught.value.__cause__ is theirs
    client.close()


def test_a_changed_ttl_is_reported_once_with_both_numbers(
    runtime: HandRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_on(Scripted(runtime, ttl_min=10.0), runtime)
    for name in ("a", "b"):
        client.lock(name, ttl=3).acquire()
    eventually(lambda: "got a ttl of 10 s instead of the requested 3 s" in caplog.text)
    assert caplog.text.count("instead of the requested") == 1
    client.close()


def test_a_ttl_granted_as_requested_is_not_reported(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    client.lock("n", ttl=7.3).acquire()
    assert "instead of the requested" not in caplog.text


@pytest.mark.parametrize("seconds", [threading.TIMEOUT_MAX + 1, float("inf")])
def test_a_timeout_that_threading_refuses_is_refused_in_the_same_way(client: Client, seconds: float) -> None:
    with pytest.raises(OverflowError):
        threading.Lock().acquire(timeout=seconds)
    adapter = client.lock("n").as_threading_lock()
    with pytest.raises(OverflowError):
        adapter.acquire(timeout=seconds)
    assert not adapter.locked()


@pytest.mark.parametrize(
    "made",
    [
        lambda client: client,
        lambda client: client.lock("n"),
        lambda client: client.lock("n").acquire(),
        lambda client: client.lock("n").as_threading_lock(),
        lambda client: client.election("n"),
        lambda client: multilock.connect_async("memory://pickle"),
        lambda client: multilock.connect_async("memory://pickle").lock("n"),
        lambda client: multilock.connect_async("memory://pickle").election("n"),
    ],
)
def test_objects_bound_to_this_process_explain_why_they_cannot_be_pickled(
    client: Client, made: Callable[[Client], object]
) -> None:
    thing = made(client)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"cannot be pickled: it belongs to its process. Connect in the child"):
            pickle.dumps(thing, protocol)


@pytest.mark.parametrize("acquire", ["acquire", "try_acquire"])
def test_an_attribute_of_the_lease_without_await_says_to_await(acquire: str) -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://") as client:
            lease = getattr(client.lock("n"), acquire)()
            with pytest.raises(AttributeError, match=r"no attribute 'is_held': await it to get the lease"):
                lease.is_held()
            assert not hasattr(lease, "is_held")
            assert asyncio.iscoroutine(lease)
            with pytest.raises(TypeError, match="cannot pickle"):
                pickle.dumps(lease)
            assert (await asyncio.create_task(lease)).is_held()

    asyncio.run(main())


def test_copying_an_object_that_refers_to_a_lease_keeps_the_same_lease(client: Client) -> None:
    lease = client.lock("n").acquire()
    assert copy.copy(lease) is lease
    assert copy.deepcopy([lease]) == [lease]
