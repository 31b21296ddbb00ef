"""Find the backend of a scheme. No backend or client library is imported before a URL needs it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from multilock.backend import SPI_VERSION, Backend, OpenBackend
from multilock.errors import ConfigurationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["OURS", "Ours", "is_scheme", "open_backend", "register_backend", "schemes"]

GROUP = "multilock.backends"


class Ours(NamedTuple):
    """A backend of this distribution: its module, the client library that it imports, and the extra that installs the
    library."""

    module: str
    extra: str | None = None
    library: str | None = None


_REDIS = Ours("multilock_redis", "redis", "redis")
# Our backends are entry points too, but reading entry points takes 25 ms, and fails in a clone that is not installed.
OURS: Mapping[str, Ours] = {
    "memory": Ours("multilock_memory"),
    "sqlite": Ours("multilock_sqlite"),
    **{
        f"{server}{kind}": _REDIS
        for server in ("redis", "rediss", "valkey", "valkeys")
        for kind in ("", "+cluster", "+sentinel")
    },
    "unix": _REDIS,
    "redlock": _REDIS,
    "redlocks": _REDIS,
    "etcd": Ours("multilock_etcd", "etcd", "grpc"),
    "etcds": Ours("multilock_etcd", "etcd", "grpc"),
    "consul": Ours("multilock_consul", "consul", "consul"),
    "consuls": Ours("multilock_consul", "consul", "consul"),
    "zookeeper": Ours("multilock_zookeeper", "zookeeper", "kazoo"),
    "zk": Ours("multilock_zookeeper", "zookeeper", "kazoo"),
    "postgresql": Ours("multilock_postgresql", "postgresql", "psycopg"),
    "postgres": Ours("multilock_postgresql", "postgresql", "psycopg"),
}

_registered: dict[str, OpenBackend] = {}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def is_scheme(text: str) -> bool:
    """Return whether ``text`` can be the scheme of a URL, in lower case."""
    return _SCHEME.fullmatch(text) is not None


def register_backend(scheme: str, open: OpenBackend) -> None:
    """Make ``open(url, options)`` the function that opens ``scheme://`` URLs in this process.

    The last registration of a scheme wins, also over one of multilock's own. An installed package does not need this
    call: it names its function in the entry-point group ``multilock.backends``.
    Raises ConfigurationError if ``scheme`` cannot be a URL's scheme, and TypeError if ``open`` is not callable.
    """
    if not isinstance(scheme, str):
        raise TypeError(f"scheme must be a str, not {type(scheme).__name__}")
    if not is_scheme(scheme):
        raise ConfigurationError(f"{scheme!r} cannot be a URL's scheme: lower-case letters, digits and '+.-' only")
    if not callable(open):
        raise TypeError(f"open must be callable as open(url, options), not {type(open).__name__}")
    _registered[scheme] = open


def open_backend(scheme: str, url: str, options: dict[str, Any]) -> Backend:
    """Return the backend of ``url``. Imports the modules it needs, does no I/O.

    Raises ConfigurationError if the scheme is unknown, its client library is not installed, the backend does not know
    an option, or the backend was written for another version of the interface.
    """
    try:
        if scheme in _registered:
            return _checked(_registered[scheme](url, options), scheme)
        if scheme in OURS:
            return _open_ours(OURS[scheme], scheme, url, options)
        points = _entry_points()
        if scheme in points:
            return _checked(_load(points[scheme])(url, options), scheme)
    except ConfigurationError as error:
        error.backend = error.backend or scheme
        raise
    raise _unknown(scheme, sorted({*_registered, *OURS, *points}))


def schemes() -> list[str]:
    """Return every scheme that has a backend: multilock's own, registered schemes, and those of installed packages."""
    return sorted({*_registered, *OURS, *_entry_points()})


def _open_ours(ours: Ours, scheme: str, url: str, options: dict[str, Any]) -> Backend:
    try:
        opener: OpenBackend = importlib.import_module(ours.module).open_backend
        return opener(url, options)
    except ModuleNotFoundError as error:
        if getattr(sys, "frozen", False) and error.name in (ours.module, ours.library):
            raise _not_frozen(ours, scheme) from error
        # "pip install" is the right remedy only for a missing library, not for a mistake of multilock.
        if ours.library is None or not _is_missing(ours.library):
            raise
        raise ConfigurationError(
            f"{scheme}:// needs the package {ours.library!r}: pip install 'multilock[{ours.extra}]'", backend=scheme
        ) from error


def _not_frozen(ours: Ours, scheme: str) -> ConfigurationError:
    """Return the error for a frozen program (PyInstaller or similar) that was built without the backend.

    Such a tool packs the modules that the program imports, but multilock imports a backend only when a URL needs it.
    """
    modules = [module for module in (ours.module, ours.library) if module]
    options = " ".join(f"--hidden-import {module}" for module in modules)
    return ConfigurationError(
        f"{scheme}:// needs {' and '.join(modules)}, which were not put into this frozen program: build it with "
        f"{options} (PyInstaller), or import them in your program",
        backend=scheme,
    )


def _checked(backend: Backend, scheme: str) -> Backend:
    """Return ``backend`` if it was written for this version of the interface. A backend for another version would fail
    later."""
    version = getattr(backend, "spi_version", None)
    if version == SPI_VERSION:
        return backend
    if version is None:
        raise ConfigurationError(
            f"the backend of {scheme}:// does not say for which version of the backend interface it was written: give "
            f"it the attribute spi_version. This multilock has version {SPI_VERSION}",
            backend=scheme,
        )
    remedy = "a newer release of that backend, or an older multilock"
    if isinstance(version, int) and version > SPI_VERSION:
        remedy = "a newer multilock, or an older release of that backend"
    raise ConfigurationError(
        f"the backend of {scheme}:// was written for version {version!r} of the backend interface, and this multilock "
        f"has version {SPI_VERSION}: install {remedy}",
        backend=scheme,
    )


def _is_missing(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        return error.name == library
    return False


def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # takes 25 ms when cold, and only a foreign scheme needs it

    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> OpenBackend:
    try:
        opener: OpenBackend = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the backend of {point.name}:// ({point.value}) cannot be loaded: {error}", backend=point.name
        ) from error
    if not callable(opener):
        raise ConfigurationError(
            f"the backend of {point.name}:// ({point.value}) is not a function: name open(url, options), as in "
            f"{point.module}:open",
            backend=point.name,
        )
    return opener


def _unknown(scheme: str, known: list[str]) -> ConfigurationError:
    from difflib import get_close_matches

    near = get_close_matches(scheme, known, 1)
    hint = f"did you mean {near[0]}://? The" if near else "the"
    return ConfigurationError(f"unknown scheme {scheme!r}: {hint} known schemes are {', '.join(known)}")
