"""``@client.locked(…)``: a function that runs while a lock is held. One decorator for both faces."""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Callable, Mapping
from typing import Any

from multilock.errors import ConfigurationError
from multilock.names import check_timeout

__all__ = ["decorator"]


def decorator(
    make_lock: Callable[..., Any],
    template: str,
    timeout: float | None,
    skip: bool,
    options: Mapping[str, Any],
    *,
    asynchronous: bool,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    check_timeout(timeout)
    make_lock("check" if not isinstance(template, str) else template, **options)  # bad options are said here

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_kind(function, asynchronous)
        name_of = _namer(template, function)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            lock = make_lock(name_of(args, kwargs), **options)
            return lock.try_acquire(timeout) if skip else lock.acquire(timeout)

        if asynchronous:

            @functools.wraps(function)
            async def guarded_async(*args: Any, **kwargs: Any) -> Any:
                if (lease := await begin(args, kwargs)) is None:
                    return None
                async with lease:
                    return await function(*args, **kwargs)

            return guarded_async

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if (lease := begin(args, kwargs)) is None:
                return None
            with lease:
                return function(*args, **kwargs)

        return guarded

    return decorate


def _check_kind(function: Callable[..., Any], asynchronous: bool) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise TypeError(f"locked() decorates a function, not {function!r:.60}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name} is a generator: its body would run after the lock was given back; lock inside it")
    if inspect.iscoroutinefunction(function) and not asynchronous:
        raise TypeError(f"{name} is a coroutine function: decorate it with an AsyncClient's locked()")
    if asynchronous and not inspect.iscoroutinefunction(function):
        raise TypeError(f"{name} is no coroutine function: decorate it with a blocking Client's locked()")


def _namer(template: str, function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """How a call's arguments become the lock's name."""
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    if not fields:
        name = template.format()
        return lambda args, kwargs: name
    signature = inspect.signature(function)
    catch_all = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    for field in fields:
        root = field.partition(".")[0].partition("[")[0]
        if root not in signature.parameters and not catch_all:
            raise ConfigurationError(
                f"the lock name {template!r} uses {{{field}}}, but {function.__qualname__} has no such parameter: it "
                f"has {', '.join(signature.parameters) or 'none'} (write {{{{ for a brace)"
            )

    def name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        if catch_all:
            values |= values[catch_all]
        return template.format(**values)

    return name_of
