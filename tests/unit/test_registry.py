"""The backend that a scheme opens, and the error if the scheme has no backend."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType
from typing import Any

import pytest

import multilock
from multilock import registry
from multilock.backend import SPI_VERSION, Backend
from multilock.config import resolve
from multilock.errors import ConfigurationError
from multilock.registry import OURS, open_backend, register_backend


@pytest.fixture(autouse=True)
def _own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


class Opened:
    """Replaces a backend, and records how it was opened."""

    spi_version = SPI_VERSION

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = url
        self.options = options


def opener(url: str, options: Mapping[str, object]) -> Backend:
    return Opened(url, options)  # type: ignore[return-value]


def _installed(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: EntryPoints(points).select(group=group))


def test_a_registered_scheme_opens_a_backend_with_url_and_options() -> None:
    register_backend("mine", opener)
    backend = open_backend("mine", "mine://x", {"ttl": 3.0})
    assert isinstance(backend, Opened)
    assert (backend.url, backend.options) == ("mine://x", {"ttl": 3.0})


def test_the_last_registration_also_replaces_a_built_in_scheme() -> None:
    register_backend("memory", opener)
    assert isinstance(open_backend("memory", "memory://", {}), Opened)


def test_a_built_in_scheme_opens_its_module() -> None:
    options = {"ttl": 3.0, "prefix": "", "identity": "me", "request_timeout": None}
    assert open_backend("memory", "memory://", options).scheme == "memory"


def test_an_installed_package_adds_a_scheme_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("theirs")
    module.open_backend = opener  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "theirs", module)
    _installed(monkeypatch, EntryPoint("theirs", "theirs:open_backend", registry.GROUP))
    assert isinstance(open_backend("theirs", "theirs://", {}), Opened)
    assert "theirs" in registry.schemes()


@pytest.mark.parametrize("value", ["no_such_module:open_backend", "json:no_such_function"])
def test_an_installed_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    _installed(monkeypatch, EntryPoint("theirs", value, registry.GROUP))
    with pytest.raises(ConfigurationError, match=f"theirs:// \\({value}\\) cannot be loaded"):
        open_backend("theirs", "theirs://", {})


@pytest.mark.parametrize(("typed", "meant"), [("reddis", "redis"), ("sqlite3", "sqlite"), ("memroy", "memory")])
def test_an_unknown_scheme_lists_the_nearest_and_all_known_schemes(typed: str, meant: str) -> None:
    register_backend("mine", opener)
    with pytest.raises(ConfigurationError, match=f"{typed!r}: did you mean {meant}://") as caught:
        open_backend(typed, f"{typed}://", {})
    for known in ("mine", *OURS):
        assert known in str(caught.value)


def test_an_unknown_scheme_without_a_similar_one_gets_no_suggestion() -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_backend("qqqqqq", "qqqqqq://", {})
    assert "did you mean" not in str(caught.value)


def _fails_to_import(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.parametrize("scheme", [scheme for scheme, ours in OURS.items() if ours.library])
def test_a_missing_client_library_is_reported_with_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    _fails_to_import(monkeypatch, str(OURS[scheme].library))
    with pytest.raises(ConfigurationError) as caught:
        open_backend(scheme, f"{scheme}://", {})
    assert f"pip install 'multilock[{OURS[scheme].extra}]'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("missing", ["redis.something_of_theirs", "multilock_redis.acquire_release", "multilock_redis"])
def test_an_import_error_of_multilock_itself_never_suggests_pip_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    _fails_to_import(monkeypatch, missing)
    with pytest.raises(ModuleNotFoundError) as caught:
        open_backend("redis", "redis://", {})
    assert caught.value.name == missing


@pytest.mark.parametrize("scheme", ["", "Redis", "a b", "1a", "a://", "ü"])
def test_text_that_cannot_begin_a_url_is_not_registered(scheme: str) -> None:
    with pytest.raises(ConfigurationError, match="scheme"):
        register_backend(scheme, opener)


def test_registering_an_object_that_cannot_be_called_raises_type_error() -> None:
    with pytest.raises(TypeError):
        register_backend("mine", "mine:open")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        register_backend(3, opener)  # type: ignore[arg-type]


@pytest.mark.parametrize("ours", list(dict.fromkeys(OURS.values())), ids=lambda ours: ours.module)
def test_every_module_of_the_table_opens_a_backend(ours: registry.Ours) -> None:
    assert callable(importlib.import_module(ours.module).open_backend)


@pytest.mark.parametrize("scheme", ["memory", "sqlite", "redis", "rediss", "unix", "etcd", "consul", "zookeeper"])
def test_each_backend_gets_its_url_and_its_options(scheme: str) -> None:
    place = "/tmp/x" if scheme in ("sqlite", "unix") else "h"
    settings = resolve(f"{scheme}://{place}")
    backend = open_backend(scheme, settings.url, settings.backend_options())
    assert backend.scheme == scheme
    assert backend.spi_version == SPI_VERSION


class Undeclared:
    """A backend that declares no version."""


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (None, "does not say for which version .*: give it the attribute spi_version"),
        (SPI_VERSION - 1, f"version {SPI_VERSION - 1} .* a newer release of that backend, or an older multilock"),
        (SPI_VERSION + 1, f"version {SPI_VERSION + 1} .* a newer multilock, or an older release of that backend"),
        ("2", "version '2' .* a newer release of that backend"),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_a_backend_with_another_version_of_the_interface_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, version: object, remedy: str, installed: bool
) -> None:
    def open_theirs(url: str, options: Mapping[str, object]) -> Any:
        backend = Undeclared()
        if version is not None:
            backend.spi_version = version  # type: ignore[attr-defined]
        return backend

    if installed:
        module = ModuleType("theirs")
        module.open_backend = open_theirs  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "theirs", module)
        _installed(monkeypatch, EntryPoint("theirs", "theirs:open_backend", registry.GROUP))
    else:
        register_backend("theirs", open_theirs)
    with pytest.raises(ConfigurationError, match=remedy) as caught:
        multilock.connect("theirs://")
    assert f"his multilock has version {SPI_VERSION}" in str(caught.value)
    assert caught.value.backend == "theirs"


def test_a_frozen_program_is_advised_to_rebuild_and_not_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setitem(sys.modules, "multilock_redis", None)
    with pytest.raises(ConfigurationError, match="--hidden-import multilock_redis --hidden-import redis ") as caught:
        multilock.connect("redis://127.0.0.1")
    assert "pip install" not in str(caught.value)
