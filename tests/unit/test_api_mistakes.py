"""If a user writes redis-py's name of a method or option, the error names that of multilock."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import pytest

import multilock
from multilock.kernel.holding import Holding

ARGUMENTS = [
    ("timeout", 10, "ttl="),
    ("blocking_timeout", 5, r"acquire\(timeout=…\)"),
    ("blocking", False, r"try_acquire\(\)"),
    ("sleep", 0.1, "leave it out"),
    ("thread_local", False, "leave it out"),
]
MEMBERS = [
    ("extend", r"lease\.renew\(\)"),
    ("reacquire", r"lease\.renew\(\)"),
    ("locked", r"lock\.is_locked\(\)"),
    ("owned", r"lease\.is_held\(\)"),
]


@pytest.fixture(params=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "blocking":
        with multilock.connect("memory://foreign") as client:
            yield client
    else:
        on_loop = multilock.connect_async("memory://foreign")
        yield on_loop
        asyncio.run(on_loop.close())


@pytest.mark.parametrize(("name", "value", "ours"), ARGUMENTS)
def test_an_option_of_another_lock_library_raises_and_names_our_option(
    client: Any, name: str, value: object, ours: str
) -> None:
    with pytest.raises(TypeError, match=rf"lock\(\) takes no {name}= .*{ours}"):
        client.lock("n", **{name: value})


@pytest.mark.parametrize("function", ["acquire", "try_acquire"])
@pytest.mark.parametrize(("name", "value", "ours"), ARGUMENTS[1:4])
def test_an_acquire_option_of_another_library_raises_and_names_our_option(
    client: Any, function: str, name: str, value: object, ours: str
) -> None:
    with pytest.raises(TypeError, match=rf"{function}\(\) takes no {name}= .*{ours}"):
        getattr(client.lock("n"), function)(**{name: value})


def test_a_decorator_option_of_another_library_raises_and_names_our_option(client: Any) -> None:
    with pytest.raises(TypeError, match="takes no blocking_timeout="):
        client.locked("n", blocking_timeout=5)


def test_any_other_argument_is_reported_as_unknown(client: Any) -> None:
    with pytest.raises(TypeError, match=r"lock\(\) got an unexpected keyword argument 'colour'"):
        client.lock("n", colour="red")


@pytest.mark.parametrize(("name", "ours"), MEMBERS)
def test_a_lock_method_of_another_library_raises_and_names_our_method(client: Any, name: str, ours: str) -> None:
    lock = client.lock("n")
    with pytest.raises(AttributeError, match=rf"no attribute '{name}' \(redis-py's\): .*{ours}"):
        getattr(lock, name)
    assert not hasattr(lock, name)
    with pytest.raises(AttributeError, match=r"no attribute 'colour'$"):
        _ = lock.colour


@pytest.mark.parametrize(("name", "ours"), MEMBERS)
def test_a_lease_method_of_another_library_raises_and_names_our_method(name: str, ours: str) -> None:
    def look(lease: object) -> None:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}' \(redis-py's\): .*{ours}"):
            getattr(lease, name)

    async def on_a_loop() -> None:
        async with multilock.connect_async("memory://foreign") as client, client.lock("n") as lease:
            look(lease)

    with multilock.connect("memory://foreign") as client, client.lock("n") as lease:
        look(lease)
    asyncio.run(on_a_loop())


def test_advice_about_names_of_another_library_slows_no_attribute(client: Any) -> None:
    """CPython 3.11 reads every attribute of an object more slowly if its class has ``__getattr__``."""
    for kind in (type(client.lock("n")), type(client.lock_all(["a", "b"])), Holding):
        assert not hasattr(kind, "__getattr__")


def test_methods_of_another_library_are_not_offered_by_dir(client: Any) -> None:
    assert {name for name, _ in MEMBERS}.isdisjoint(dir(client.lock("n")))


def test_the_error_about_with_or_async_with_names_the_client_that_has_it(client: Any) -> None:
    asynchronous = isinstance(client, multilock.AsyncClient)
    wanted = r"multilock\.connect\(\)" if asynchronous else r"multilock\.connect_async\(\)"

    async def enter(what: Any) -> None:
        assert not hasattr(what, "__enter__" if asynchronous else "__aenter__")
        with pytest.raises(TypeError, match=wanted):  # noqa: PT012
            if asynchronous:
                with what:
                    pass
            else:
                async with what:
                    pass

    async def enter_each() -> None:
        lock = client.lock("n")
        lease = await lock.acquire() if asynchronous else lock.acquire()
        for what in (client, lock, client.election("e"), client.lock_all(["a", "b"]), lease):
            await enter(what)
        if asynchronous:
            acquiring = lock.acquire()
            await enter(acquiring)
            acquiring.close()
            await lease.release()
            await client.close()
        else:
            lease.release()

    asyncio.run(enter_each())


def test_a_blocking_lock_is_not_an_instance_of_the_asyncio_lock(client: Any) -> None:
    asynchronous = isinstance(client, multilock.AsyncClient)
    lock = client.lock("n")
    assert isinstance(lock, AbstractAsyncContextManager) is asynchronous
    assert isinstance(lock, AbstractContextManager) is not asynchronous
    assert isinstance(lock, multilock.AsyncDistributedLock) is asynchronous
    assert isinstance(lock, multilock.DistributedLock) is not asynchronous


@pytest.mark.parametrize("function", ["acquire", "try_acquire"])
def test_an_acquire_that_was_not_awaited_has_no_truth_value(function: str) -> None:
    async def main() -> None:
        async with multilock.connect_async("memory://foreign") as client:
            call = getattr(client.lock("n"), function)
            with pytest.raises(TypeError, match="await it"):
                bool(call())
            acquiring = call()
            assert isinstance(acquiring, Coroutine)
            lease = await asyncio.create_task(acquiring)
            await lease.release()
            assert await client.inspect("n") is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("module", "library"), [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")]
)
def test_a_module_with_a_missing_library_names_the_extra(module: str, library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; import multilock.contrib.{module}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert f"ModuleNotFoundError: multilock.contrib.{module} needs" in ended.stderr
    assert f"pip install 'multilock[{module}]'" in ended.stderr
