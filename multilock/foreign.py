"""For those who come from redis-py, or from the other face: their words are errors that name ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

__all__ = ["ForAsyncWith", "ForWith", "NamesOurs", "refuse"]

_ARGUMENTS = {
    "timeout": "how long the lock outlives a dead holder is ttl=; how long to wait for it is acquire(timeout=…)",
    "blocking_timeout": "how long to wait is acquire(timeout=…)",
    "blocking": "try_acquire() tries once, and returns None where the lock is taken",
    "sleep": "leave it out, the backend sets the pace: most servers wake those that wait",
    "thread_local": "leave it out: a lease is released by whoever has it, in any thread",
    "raise_on_release_error": "leave it out: release() never raises, and the end of `with` raises LockLost",
    "lock_class": "leave it out",
    "token": "leave it out: every acquire makes an id of its own, and lease.token is the fencing token",
}
_MEMBERS = {
    "extend": "a lease is renewed until it is released, for its ttl each time; lease.renew() does it now",
    "reacquire": "a lease is renewed until it is released; lease.renew() does it now",
    "locked": "lock.is_locked() asks the backend whether anybody holds it",
    "owned": "lease.is_held() and lock.is_held() tell whether it is ours",
}


def refuse(function: str, arguments: Mapping[str, object]) -> TypeError:
    """Why this function takes no such keyword arguments."""
    name = next(iter(arguments))
    if remedy := _ARGUMENTS.get(name):
        return TypeError(f"{function}() takes no {name}= (redis-py's): {remedy}")
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class NamesOurs:
    """A lock or a lease that has no ``extend()``, and says what it has."""

    __slots__ = ()

    if not TYPE_CHECKING:  # for a type checker every name would exist

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if remedy := _MEMBERS.get(name):
                text += f" (redis-py's): {remedy}"
            raise AttributeError(text, name=name, obj=self)


class WrongWith(AttributeError, TypeError):
    """TypeError, as Python's own; AttributeError, so that ``hasattr()`` is False."""


class _NotHere:
    """Stands for the first method that a kind of ``with`` looks for. The second is missing, so that nothing passes for
    a context manager of that kind."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> _NotHere:
        if instance is None:
            return self
        raise WrongWith(f"{owner.__name__!r} is for {self._text}()")


class ForWith:
    """What ``async with`` does not enter."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __aenter__ = _NotHere("`with`: a client for `async with` is made by multilock.connect_async")


class ForAsyncWith:
    """What ``with`` does not enter."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __enter__ = _NotHere("`async with`: a client for `with` is made by multilock.connect")
