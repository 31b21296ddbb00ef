"""The error of a program that pickles a client, a lock, a lease or another object of one process."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["OfThisProcess"]


class OfThisProcess:
    """Base of objects that work only in the process that made them. Pickling one raises TypeError."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it belongs to its process. Connect in the child, and pass it "
            "the URL and the name"
        )
