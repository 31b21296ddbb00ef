"""Checks of names and times before any I/O, and the conversion of a name into a key and back."""

from __future__ import annotations

import math
import unicodedata
from functools import lru_cache

__all__ = [
    "check_name",
    "check_prefix",
    "check_seconds",
    "check_text",
    "check_timeout",
    "escape",
    "unescape",
]

NAME_MAX = 1000
FOREVER = 1e9  # seconds, 31 years; threading refuses to wait for ten times as long
_FORBIDDEN = {"Cc": "a control character", "Cs": "a lone surrogate"}


def check_text(value: object, what: str, longest: int) -> str:
    """Return ``value`` if it is a text of 1 to ``longest`` characters without control characters.

    Raises TypeError or ValueError. ``what`` is the subject of the message.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}: {value!r:.60}")
    if not value:
        raise ValueError(f"{what} is empty: give it at least one character")
    if len(value) > longest:
        raise ValueError(f"{what} has {len(value)} characters: at most {longest} are allowed")
    if not (value.isascii() and value.isprintable()):
        for char in value:
            if kind := _FORBIDDEN.get(unicodedata.category(char)):
                raise ValueError(f"{what} contains {kind} ({char!r}): remove it")
    return value


def check_name(name: object) -> str:
    """Return a valid name of a lock: a non-empty str of at most 1,000 characters.

    Raises TypeError or ValueError; control characters and lone surrogates are not allowed.
    """
    return check_text(name, "the name of a lock", NAME_MAX)


def check_prefix(prefix: object) -> str:
    """Return a valid prefix for all keys. It may be empty."""
    return check_text(prefix, "prefix", NAME_MAX) if prefix != "" else ""


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be a number of seconds, not {type(value).__name__}: {value!r:.60}")
    try:
        seconds = float(value)
    except OverflowError:  # an int of more than 308 digits
        return math.inf if value > 0 else -math.inf
    if math.isnan(seconds):
        raise ValueError(f"{what} is NaN: give a number of seconds")
    return seconds


def check_seconds(value: object, what: str) -> float:
    """Return ``value`` as a float if it is a positive, finite number of seconds. Raises TypeError or ValueError."""
    seconds = _number(value, what)
    if seconds <= 0 or math.isinf(seconds):
        raise ValueError(f"{what} is {seconds:g}: give a positive, finite number of seconds")
    return seconds


def check_timeout(value: object) -> float | None:
    """Return a timeout in seconds. Returns None (wait forever) for None, inf and anything above 31 years."""
    if value is None:
        return None
    seconds = _number(value, "timeout")
    if seconds < 0:
        raise ValueError(f"timeout is {seconds:g}: give 0 to try once, a positive number, or None to wait forever")
    return None if seconds > FOREVER else seconds


def check_grace(value: object) -> float | None:
    """Return the grace of an election in seconds, or None for the default. inf means as long as it takes."""
    if value is None:
        return None
    seconds = _number(value, "grace")
    if seconds < 0:
        raise ValueError(f"grace is {seconds:g}: give seconds, 0 for none, or math.inf for as long as it takes")
    return seconds


@lru_cache(maxsize=16384)
def escape(name: str) -> str:
    """Return the part of a key that stands for ``name``. The result is readable, and differs for different names.

    Letters, digits and ``-_.~:`` stay. Everything else is percent-encoded UTF-8, also ``/``, so that the keys of the
    lock ``a`` never include those of ``a/b``. ``.`` and ``..`` are encoded completely because ZooKeeper forbids them as
    node names.
    """
    from urllib.parse import quote  # the import takes 5 ms, and many programs never need it

    return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe=":")


def unescape(key: str) -> str | None:
    """Return the name that `escape` turned into ``key``. Returns None if `escape` never returns ``key``, for example
    because the key has a longer prefix."""
    from urllib.parse import unquote

    name = unquote(key)
    return name if name and escape(name) == key else None
