"""The clients of this process, and whether this thread is in the middle of a call of one of them."""

from __future__ import annotations

import weakref
from typing import Protocol

from multilock import system
from multilock.kernel.inside_backend import inside

__all__ = ["in_the_middle", "living", "register"]


class EndOfClient(Protocol):
    """The methods of `multilock.kernel.closing.End` that this file calls."""

    def withdraw(self, deadline: float) -> bool:
        """Cancel the claims of waiters until ``deadline``. Returns False if the client had already ended."""

    def exit(self, deadline: float) -> None:
        """Release all held locks, until ``deadline``."""

    def forked(self) -> None:
        """Reset the client in a forked child."""


class OneClient(Protocol):
    """The members of `multilock.kernel.client.Kernel` that this file uses."""

    @property
    def lock(self) -> system.RLock:
        """The lock of the client's state."""

    @property
    def end(self) -> EndOfClient:
        """The object that ends the client (`multilock.kernel.closing.End`)."""


_kernels: dict[weakref.ref[OneClient], None] = {}  # a WeakSet must not change while it is iterated


def register(kernel: OneClient) -> None:
    """Add a client to the clients of this process, for as long as the client lives."""
    _kernels[weakref.ref(kernel, lambda gone: _kernels.pop(gone, None))] = None


def living() -> list[OneClient]:
    """Return the clients of this process that still exist."""
    return [kernel for reference in list(_kernels) if (kernel := reference())]


def in_the_middle() -> bool:
    """Return whether this thread is inside a backend or holds the lock of a client.

    A finalizer or a signal handler that runs at such a moment must not wait. Otherwise it could wait for a lock that
    the same thread holds, or delay the thread that renews leases.
    """
    if system.get_ident() in inside:
        return True
    for reference in list(_kernels):
        kernel = reference()
        if kernel is not None and system.is_owned(kernel.lock):
            return True
    return False
