"""Help for users of redis-py, and for users who mix up the blocking and the asyncio API: a wrong name raises an error
that gives the right one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["ForAsyncWith", "ForWith", "NamesOurs", "Theirs", "hides_foreign", "refuse"]

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS = {
    "timeout": "use ttl= for how long the lock outlives a dead holder, acquire(timeout=…) for how long to wait",
    "blocking_timeout": "use acquire(timeout=…) for how long to wait",
    "blocking": "use try_acquire(), which tries once and returns None if the lock is taken",
    "sleep": "leave it out: the backend decides how often waiters ask, and most servers wake them",
    "thread_local": "leave it out: any thread that has a lease may release it",
    "raise_on_release_error": "leave it out: release() never raises, and the end of `with` raises LockLost",
    "lock_class": "leave it out",
    "token": "leave it out: every acquire has its own id, and lease.token is the fencing token",
}


def hides_foreign(function: F) -> F:
    """Leave ``**theirs`` out of the signature that ``help()`` and editors show. Calls are not affected."""
    signature = inspect.signature(function)
    shown = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def refuse(function: str, arguments: Mapping[str, object]) -> TypeError:
    """Return the error for a keyword argument that this function does not take."""
    name = next(iter(arguments))
    if remedy := _ARGUMENTS.get(name):
        return TypeError(f"{function}() takes no {name}= (redis-py's): {remedy}")
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class Theirs:
    """Stand-in for a method of redis-py. Reading it from an object raises an AttributeError that names our method."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:  # as help() shows it
        return f"missing: {self._remedy}"

    def __get__(self, instance: object, owner: type) -> Theirs:
        if instance is None:
            return self
        text = f"{owner.__name__!r} object has no attribute {self._name!r} (redis-py's): {self._remedy}"
        raise AttributeError(text, name=self._name, obj=instance)


class NamesOurs:
    """Base of locks and leases. The AttributeError for redis-py's ``extend()`` and similar methods gives the name of
    our method.

    There is no ``__getattr__``, because CPython 3.11 reads every attribute more slowly if its class has one.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker would otherwise accept these names
        extend = Theirs("a lease is renewed until it is released, for its ttl each time; lease.renew() does it now")
        reacquire = Theirs("a lease is renewed until it is released; lease.renew() does it now")
        locked = Theirs("lock.is_locked() asks the backend whether anybody holds it")
        owned = Theirs("lease.is_held() and lock.is_held() tell whether it is ours")

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not isinstance(vars(NamesOurs).get(name), Theirs)]


class WrongWith(AttributeError, TypeError):
    """The error for ``with`` where ``async with`` is needed, and for ``async with`` where ``with`` is needed.

    Python itself raises TypeError there. This error is also an AttributeError, so that ``hasattr()`` returns False.
    """


class _NotHere:
    """Stand-in for the first method that a kind of ``with`` looks up, so that the error can say what to use.

    The second method is missing, so that the object is not mistaken for a context manager of that kind.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> _NotHere:
        if instance is None:
            return self
        raise WrongWith(f"{owner.__name__!r} is for {self._text}()")


class ForWith:
    """Base of objects for ``with``. Using such an object in ``async with`` raises an error that names
    `connect_async`."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __aenter__ = _NotHere("`with`: a client for `async with` is made by multilock.connect_async")


class ForAsyncWith:
    """Base of objects for ``async with``. Using such an object in ``with`` raises an error that names `connect`."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __enter__ = _NotHere("`async with`: a client for `with` is made by multilock.connect")
