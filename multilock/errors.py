"""Every exception that multilock raises.

An exception of a client library never leaves a backend: it appears only as the ``__cause__`` of one of these
exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multilock.model import Loss

__all__ = [
    "BackendRejected",
    "BackendUnavailable",
    "CapabilityMissing",
    "ClientClosed",
    "ConfigurationError",
    "LockLost",
    "LockTimeout",
    "MultilockError",
    "NotHeld",
    "behind",
]


class MultilockError(Exception):
    """Base of all errors of multilock.

    ``name`` is the name of the lock, and ``backend`` the scheme of its backend. Each is None if the error concerns no
    lock, or no backend.
    """

    def __init__(self, message: str, *, name: str | None = None, backend: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.backend = backend


def behind(error: BaseException) -> BaseException:
    """Return the exception of a client library that caused ``error``, or our innermost error if none did."""
    while isinstance(error, MultilockError) and (cause := error.__cause__) is not None and cause is not error:
        error = cause
    return error


class LockTimeout(MultilockError, TimeoutError):
    """The backend answered, but another holder still had the lock when ``timeout`` seconds were over."""


class LockLost(MultilockError):
    """The lease ended while its holder still relied on it. ``loss`` says why and when.

    A pickled LockLost (a pool of processes pickles it) has no ``loss``: the lease belongs to the process that held it.
    """

    def __init__(self, message: str, *, loss: Loss | None = None, name: str | None = None, backend: str | None = None):
        super().__init__(message, name=name, backend=backend)
        self.loss = loss

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**self.__dict__, "loss": None}


class NotHeld(MultilockError, RuntimeError):
    """The call needs a lease, and this lock, thread, task or process has none."""


class ClientClosed(MultilockError, RuntimeError):
    """The client was closed, or the interpreter is exiting."""


class BackendUnavailable(MultilockError, ConnectionError):
    """The backend gave no usable reply in time. If the request took a lock, the lock is released in the background.

    ``unknown`` is False if the request certainly was not executed, so that nothing must be undone.
    """

    def __init__(
        self, message: str, *, unknown: bool = True, name: str | None = None, backend: str | None = None
    ) -> None:
        super().__init__(message, name=name, backend=backend)
        self.unknown = unknown


class BackendRejected(MultilockError):
    """The backend refused, and would refuse again: wrong credentials, a missing permission, a bad request.

    The request was not executed. ``unknown`` is True if another request of the same call may have taken the lock. The
    lock is then released in the background.
    """

    unknown = False


class ConfigurationError(MultilockError, ValueError):
    """A scheme, option, profile, capability or file cannot be used. The message lists the valid ones."""


class CapabilityMissing(MultilockError):
    """This backend cannot do what was requested, whatever its options."""
