"""Mistakes in the use of the decorator ``locked``, and when they are reported. See also test_locks and test_aio."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from multilock import AsyncClient, Client, ConfigurationError
from tests.unit.kit import Scripted


class AsyncCallable:
    def __init__(self, client: AsyncClient | None = None) -> None:
        self.client = client

    async def __call__(self) -> str:
        assert self.client
        return self.client.current_lease().name

    @staticmethod
    async def static() -> None: ...


class GeneratorCallable:
    def __call__(self) -> Iterator[int]:
        yield 1


class AsyncGeneratorCallable:
    async def __call__(self) -> AsyncIterator[int]:
        yield 1


def blocking(a: int, width: int = 3) -> None: ...


COROUTINE_FUNCTIONS = [
    AsyncCallable(),
    AsyncCallable().__call__,
    functools.partial(AsyncCallable()),
    AsyncCallable.__dict__["static"],
]


@pytest.mark.parametrize("function", COROUTINE_FUNCTIONS, ids=["object", "method", "partial", "static"])
def test_each_callable_that_returns_a_coroutine_counts_as_a_coroutine_function(
    client: Client, backend: Scripted, function: Any
) -> None:
    with pytest.raises(TypeError, match="is a coroutine function"):
        client.locked("n")(function)
    assert inspect.iscoroutinefunction(AsyncClient(backend).locked("n")(function))


@pytest.mark.parametrize("function", [GeneratorCallable(), functools.partial(AsyncGeneratorCallable())])
def test_each_callable_that_returns_a_generator_counts_as_a_generator_function(
    client: Client, backend: Scripted, function: Any
) -> None:
    for decorate in (client.locked("n"), AsyncClient(backend).locked("n")):
        with pytest.raises(TypeError, match="is a generator"):
            decorate(function)


def test_an_object_with_an_async_call_runs_while_the_lock_is_held() -> None:
    async def main() -> None:
        async with AsyncClient(Scripted()) as client:
            assert await client.locked("n")(AsyncCallable(client))() == "n"

    asyncio.run(main())


def test_a_decorated_class_is_called_and_its_objects_are_not(client: Client) -> None:
    assert isinstance(client.locked("n")(AsyncCallable)(), AsyncCallable)


@pytest.mark.parametrize("name", ["z/{", "z/}", "z/{a", "{a[}", "{a:{}"])
def test_a_name_that_is_not_a_valid_template_is_refused_at_once(client: Client, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write \{\{ for a brace"):
        client.locked(name)


@pytest.mark.parametrize("name", ["z/{}", "z/{0}", "z/{a:{}}", "z/{.a}"])
def test_a_field_of_the_name_refers_to_a_parameter(client: Client, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not the name of a parameter"):
        client.locked(name)


def test_a_name_must_be_text(client: Client) -> None:
    number: Any = 5
    with pytest.raises(TypeError, match="must be a str"):
        client.locked(number)


@pytest.mark.parametrize("name", ["z/{nope}", "z/{a:>{nope}}", "z/{nope.name[0]}"])
@pytest.mark.parametrize("function", [blocking, functools.partial(blocking)], ids=["function", "partial"])
def test_a_field_that_is_not_a_parameter_is_refused_at_decoration(client: Client, function: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"\{nope.*blocking.* has no such parameter: it has a, width"):
        client.locked(name)(function)


def test_a_field_may_be_formatted_by_another_parameter(client: Client) -> None:
    def name(a: int, width: int = 3) -> str:
        return client.current_lease().name

    assert client.locked("z/{a:0{width}d}")(functools.partial(name, width=4))(7) == "z/0007"


def test_a_field_whose_keyword_is_missing_raises_a_missing_argument(client: Client) -> None:
    @client.locked("z/{x}")
    def name(**options: int) -> str:
        return client.current_lease().name

    assert name(x=1) == "z/1"
    with pytest.raises(TypeError, match=r"name\(\) needs the argument 'x'.*z/\{x\}"):
        name(y=1)


def test_a_parameter_comes_before_a_keyword_of_the_same_name(client: Client) -> None:
    def name(x: int, /, **options: int) -> str:
        return client.current_lease().name

    assert client.locked("z/{x}")(name)(1, x=2) == "z/1"


async def a_coroutine() -> None: ...


def a_generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("begin", [a_coroutine, a_generator])
def test_a_function_that_only_begins_its_work_under_the_lock_is_refused(
    client: Client, backend: Scripted, begin: Callable[[], Any]
) -> None:
    with pytest.raises(TypeError, match="its body would run after the lock was released"):
        client.locked("n")(lambda: begin())()
    assert backend.holders == {}


def test_skip_without_a_timeout_tries_once(client: Client, backend: Scripted) -> None:
    backend.holders["n"] = "another"
    assert client.locked("n", skip=True)(lambda: 1)() is None
