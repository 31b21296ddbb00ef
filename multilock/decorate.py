"""``@client.locked(…)``: run a function while a lock is held. One decorator for the blocking and the asyncio API."""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Callable, Iterator, Mapping
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from multilock.errors import ConfigurationError
from multilock.kernel.callbacks import runs
from multilock.names import check_timeout

__all__ = ["decorator", "lock_for"]


def lock_for(client: Any, name: str, *, shared: bool = False, permits: int | None = None, **options: Any) -> Any:
    """Return the lock that the options of ``locked()`` ask for: a mutex, a reader's lock or a semaphore."""
    if not isinstance(shared, bool):
        raise TypeError(f"shared must be True or False, not {shared!r:.60}")
    if shared and permits is not None:
        raise TypeError("a function runs as a reader (shared=True) or with a permit (permits=n), not with both")
    if shared:
        return client.read_write_lock(name, **options).reader()
    return client.lock(name, **options) if permits is None else client.semaphore(name, permits, **options)


def decorator(
    make_lock: Callable[..., Any],
    template: str,
    timeout: float | None,
    skip: bool,
    options: Mapping[str, Any],
    *,
    asynchronous: bool,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for the lock names that ``template`` describes. Wrong options raise an error here, not when
    the decorated function is called."""
    check_timeout(timeout)
    make_lock(template, **options)  # raises if an option is wrong
    used = _parameters_of(template)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_kind(function, asynchronous)
        name_of = _namer(template, used, function)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            lock = make_lock(name_of(args, kwargs), **options)
            return lock.try_acquire(timeout or 0) if skip else lock.acquire(timeout)

        if asynchronous:

            @functools.wraps(function)
            async def guarded_async(*args: Any, **kwargs: Any) -> Any:
                if (lease := await begin(args, kwargs)) is None:
                    return None
                async with lease:
                    return _ended(function, await function(*args, **kwargs))

            return guarded_async

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if (lease := begin(args, kwargs)) is None:
                return None
            with lease:
                return _ended(function, function(*args, **kwargs))

        return guarded

    return decorate


def _check_kind(function: Callable[..., Any], asynchronous: bool) -> None:
    if not callable(function):
        raise TypeError(f"locked() decorates a function, not {function!r:.60}")
    name = _shown(function)
    if runs(inspect.isgeneratorfunction, function) or runs(inspect.isasyncgenfunction, function):
        raise TypeError(f"{name} is a generator: its body would run after the lock was released; lock inside it")
    if runs(inspect.iscoroutinefunction, function):
        if not asynchronous:
            raise TypeError(f"{name} is a coroutine function: decorate it with an AsyncClient's locked()")
    elif asynchronous:
        raise TypeError(f"{name} is not a coroutine function: decorate it with a blocking Client's locked()")


def _ended(function: Callable[..., Any], result: Any) -> Any:
    """Return ``result``, unless it is a coroutine or generator, whose body would run after the lock was released."""
    if isinstance(result, (CoroutineType, GeneratorType, AsyncGeneratorType)):
        if isinstance(result, CoroutineType):
            result.close()
        raise TypeError(
            f"{_shown(function)} returned a {type(result).__name__}: its body would run after the lock was released; "
            "lock inside it"
        )
    return result


def _shown(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _parameters_of(template: str) -> list[str]:
    """Return the parameters whose values become part of the name."""
    try:
        return list(_roots(template))
    except ValueError as error:
        raise ConfigurationError(
            f"the lock name {template!r} is not a valid template: {error} (write {{{{ for a brace)"
        ) from None


def _roots(template: str) -> Iterator[str]:
    for _, field, form, _ in string.Formatter().parse(template):
        if field is not None:
            root = field.partition(".")[0].partition("[")[0]
            if not root.isidentifier():
                raise ValueError(f"{{{field}}} is not the name of a parameter")
            yield root
            yield from _roots(form or "")  # {number:0{width}d}


def _namer(
    template: str, used: list[str], function: Callable[..., Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """Return the function that makes the lock's name from the arguments of a call."""
    if not used:
        name = template.format()
        return lambda args, kwargs: name
    signature = inspect.signature(function)
    catch_all = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    unknown = [root for root in used if root not in signature.parameters]
    if unknown and not catch_all:
        raise ConfigurationError(
            f"the lock name {template!r} uses {{{unknown[0]}}}, but {_shown(function)} has no such parameter: it "
            f"has {', '.join(signature.parameters) or 'none'} (write {{{{ for a brace)"
        )

    def name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        if catch_all:
            values = {**values[catch_all], **values}
        for root in unknown:
            if root not in values:
                raise TypeError(
                    f"{_shown(function)}() needs the argument {root!r}, which the lock name {template!r} uses"
                )
        return template.format(**values)

    return name_of
