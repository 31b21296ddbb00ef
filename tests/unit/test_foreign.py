"""Who types redis-py's names for a lock is told ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import multilock

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
def test_its_arguments_of_a_lock_name_ours(client: Any, name: str, value: object, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"lock\(\) takes no {name}= .*{ours}"):
        client.lock("n", **{name: value})


@pytest.mark.parametrize("function", ["acquire", "try_acquire"])
@pytest.mark.parametrize(("name", "value", "ours"), ARGUMENTS[1:4])
def test_its_arguments_of_acquire_name_ours(client: Any, function: str, name: str, value: object, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"{function}\(\) takes no {name}= .*{ours}"):
        getattr(client.lock("n"), function)(**{name: value})


def test_its_arguments_of_a_decorator_name_ours(client: Any) -> None:
    with pytest.raises(TypeError, match="takes no blocking_timeout="):
        client.locked("n", blocking_timeout=5)


def test_any_other_argument_is_unknown(client: Any) -> None:
    with pytest.raises(TypeError, match=r"lock\(\) got an unexpected keyword argument 'colour'"):
        client.lock("n", colour="red")


@pytest.mark.parametrize(("name", "ours"), MEMBERS)
def test_its_members_name_ours(client: Any, name: str, ours: str) -> None:
    lock = client.lock("n")
    with pytest.raises(AttributeError, match=rf"no attribute '{name}' \(redis-py's\): .*{ours}"):
        getattr(lock, name)
    assert not hasattr(lock, name)
    with pytest.raises(AttributeError, match=r"no attribute 'colour'$"):
        _ = lock.colour


@pytest.mark.parametrize(("name", "ours"), MEMBERS)
def test_its_members_of_a_lease_name_ours(name: str, ours: str) -> None:
    def look(lease: object) -> None:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}' \(redis-py's\): .*{ours}"):
            getattr(lease, name)

    async def on_a_loop() -> None:
        async with multilock.connect_async("memory://foreign") as client, client.lock("n") as lease:
            look(lease)

    with multilock.connect("memory://foreign") as client, client.lock("n") as lease:
        look(lease)
    asyncio.run(on_a_loop())
