"""Every exception a user of multilock can meet.

A client library's own exceptions never leave a backend: they appear only as the ``__cause__`` of one of these.
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

    ``name`` is the lock concerned and ``backend`` the scheme it lives in, each None where the error has none.
    """

    def __init__(self, message: str, *, name: str | None = None, backend: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.backend = backend


def behind(error: BaseException) -> BaseException:
    """The exception of a client's library that led to ``error``; the first of ours where none did."""
    while isinstance(error, MultilockError) and (cause := error.__cause__) is not None and cause is not error:
        error = cause
    return error


class LockTimeout(MultilockError, TimeoutError):
    """The backend answered, and somebody else still held the lock when ``timeout`` was over."""


class LockLost(MultilockError):
    """The lease ended while its holder still relied on it. ``loss`` tells why and when.

    Pickled, as by a pool of processes, it goes without the ``loss``, whose lease belongs to its process.
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
    """No answer that counts. What may have been taken is being given back in the background.

    ``unknown`` is False when the request certainly was not executed, so that nothing need be undone.
    """

    def __init__(
        self, message: str, *, unknown: bool = True, name: str | None = None, backend: str | None = None
    ) -> None:
        super().__init__(message, name=name, backend=backend)
        self.unknown = unknown


class BackendRejected(MultilockError):
    """The backend refused for a reason that asking again does not change: authentication, permission, bad request.

    The request was not executed. ``unknown`` is True where another request of the same call may have left something,
    which is being given back in the background.
    """

    unknown = False


class ConfigurationError(MultilockError, ValueError):
    """A scheme, option, profile, capability or file that cannot be used; the message lists what can."""


class CapabilityMissing(MultilockError):
    """This backend cannot do what was asked, whatever its options."""
