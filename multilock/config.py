"""Combine URL, mapping, file and environment into one `Settings`. Reads the configuration file, does no other I/O.

A setting is looked up in this order: keyword, the URL's query, the profile, the top level of the file. A URL passed to
connect() overrides the profile's URL, as any keyword does. If a profile is named too, its other settings still apply.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from multilock.errors import CapabilityMissing, ConfigurationError, MultilockError
from multilock.identity import check_identity, default_identity
from multilock.model import Capabilities, at_most
from multilock.names import check_prefix, check_seconds
from multilock.registry import open_backend
from multilock.urls import redact, split_url

if TYPE_CHECKING:
    from multilock.backend import Backend

__all__ = [
    "COMMON",
    "NothingConfigured",
    "Settings",
    "open_configured",
    "resolve",
    "settings_for",
    "unknown_option",
]

DEFAULT_FILE = "multilock.toml"
LONGEST_REQUEST = 1e9  # seconds; the longest request_timeout, because a socket refuses a timeout of a few hundred years
PROJECT_FILE = "pyproject.toml"
_VARIABLE = re.compile(r"\$(?:\$|\{([^}]*)(\}?))")
CAPABILITIES = tuple(sorted(f.name for f in fields(Capabilities) if f.type in (bool, "bool")))
# Arguments of connect(): no setting may have one of these names.
_ARGUMENTS = ("url", "profile", "config", "client", "requires")


class UnknownOption(ConfigurationError):
    """The program or file gave an option that the backend does not have."""

    option = ""


class NothingConfigured(ConfigurationError):
    """No argument, environment variable or file names a backend."""


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """The settings of a client. Its repr shows no credentials, and none of the backend's own options."""

    scheme: str
    url: str  #: the URL without its query
    ttl: float = 30.0  #: seconds
    prefix: str = "multilock/"
    identity: str | None = None  #: None means `default_identity()` of the present process
    outage_timeout: float | None = 30.0  #: seconds, or None for no limit
    request_timeout: float | None = None  #: seconds, or None for ttl/5, at most 5 s
    options: Mapping[str, object] = field(
        default_factory=dict
    )  #: the backend's own options; values from a URL are text
    requires: frozenset[str] = frozenset()  #: capabilities the backend must have
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  #: source of each option, except keywords
    #: the source of each capability in ``requires`` that no argument gave
    required_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    files: tuple[str, ...] = field(default=(), compare=False)  #: the files and profiles that have some of the settings
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)  #: values that no error may show

    def __repr__(self) -> str:
        return (
            f"Settings({redact(self.url)!r}, ttl={self.ttl:g}, prefix={self.prefix!r}, identity={self.identity!r}, "
            f"outage_timeout={self.outage_timeout!r}, request_timeout={self.request_timeout!r}, "
            f"requires={sorted(self.requires)!r})"
        )

    def backend_options(self) -> dict[str, object]:
        """Return the options for `OpenBackend`."""
        return {
            **self.options,
            "ttl": self.ttl,
            "prefix": self.prefix,
            "identity": self.identity or default_identity(),
            "request_timeout": self.request_timeout,
        }


def resolve(
    url: str | Mapping[str, object] | None = None,
    *,
    profile: str | None = None,
    config: str | os.PathLike[str] | None = None,
    client: object = None,
    requires: Iterable[str] = (),
    options: Mapping[str, object] | None = None,
) -> Settings:
    """Return the settings that ``connect(url, profile=…, config=…, client=…, requires=…, **options)`` would use.

    Raises ConfigurationError (a ValueError), whose message names the place of the mistake and how to fix it. Raises
    TypeError if an argument has the wrong Python type.
    """
    given = _given({"profile": profile, "config": config, "client": client, **(options or {})})
    wanted = _capabilities(requires)
    if isinstance(url, Mapping):
        given = _given(url) | given
        wanted |= _capabilities(given.pop("requires", ()))
    else:
        given["url"] = url
    variables: dict[str, str] = {}
    try:
        return _resolve(
            _url(given.pop("url", None)),
            _profile(given.pop("profile", None)),
            _File.read(_path(given.pop("config", None))),
            wanted,
            given,
            variables,
        )
    except ConfigurationError as error:
        raise _without(variables, error) from error.__cause__


def _resolve(
    url: str | None,
    profile: str | None,
    file: _File,
    requires: frozenset[str],
    keywords: Mapping[str, object],
    variables: dict[str, str],
) -> Settings:
    source = "the URL"
    if url is None and profile is None:
        if url := os.environ.get("MULTILOCK_URL"):
            source = "$MULTILOCK_URL"
        else:
            profile = os.environ.get("MULTILOCK_PROFILE") or file.default
    layers = file.layers(profile, variables)
    required_by = dict.fromkeys(_required_by_environment(), "$MULTILOCK_REQUIRES")
    used = [layer.where for layer in layers if layer.values]
    for layer in layers:
        if not url and layer.url:
            url, source = layer.url, f"the url in {layer.where}"
            used.append(layer.where)
        required_by |= dict.fromkeys(layer.requires, f"requires in {layer.where}")
    required_by = {name: where for name, where in required_by.items() if name not in requires}
    if not url:
        raise _nothing_configured(file, profile)

    scheme, bare, query = split_url(url, source)
    found: dict[str, _Found] = {}
    for layer in reversed(layers):
        found |= {name: (value, layer.where) for name, value in layer.values.items()}
    found |= {_setting(name, source): (value, source) for name, value in query.items()}
    found |= {name: (value, None) for name, value in keywords.items()}
    settings = _settings(scheme, bare, found, requires | required_by.keys())
    files = tuple(dict.fromkeys(used))
    return replace(settings, required_by=required_by, files=files, variables=variables)


def settings_for(scheme: str, options: Mapping[str, object]) -> Settings:
    """Return the settings of a client made from a backend object, which has its own prefix and options already."""
    known = [name for name in COMMON if name != "prefix"]
    for name in options:
        if name not in known:
            raise unknown_option(name, known, f"Client({scheme})")
    found: dict[str, _Found] = {name: (value, None) for name, value in _given(options).items()}
    return _settings(scheme, f"{scheme}://", found, frozenset())


def open_configured(settings: Settings) -> Backend:
    """Return the backend of these settings, not yet connected.

    Raises ConfigurationError as `multilock.registry.open_backend` does, and CapabilityMissing if the backend lacks a
    capability that ``requires`` names.
    """
    try:
        return _open(settings)
    except (ConfigurationError, CapabilityMissing) as error:
        if isinstance(error, UnknownOption):
            if error.option in settings.sources:
                error.args = (f"{settings.sources[error.option]}: {error}",)
        elif settings.files:
            error.args = (f"{error} (settings are from {' and '.join(settings.files)})",)
        raise _without(settings.variables, error) from error.__cause__


def _open(settings: Settings) -> Backend:
    backend = open_backend(settings.scheme, settings.url, settings.backend_options())
    lacking = [name for name in sorted(settings.requires) if not getattr(backend.capabilities, name)]
    if lacking:
        whose = " and ".join(dict.fromkeys(settings.required_by.get(name, "requires=") for name in lacking))
        raise CapabilityMissing(
            f"{settings.scheme}:// with these options lacks {', '.join(lacking)}: "
            f"choose another backend, or remove it from {whose}",
            backend=settings.scheme,
        )
    if settings.ttl > backend.capabilities.ttl_max:
        raise ConfigurationError(
            f"ttl is {settings.ttl:g} s: {settings.scheme}:// grants {at_most(backend.capabilities)}",
            backend=settings.scheme,
        )
    return backend


# ---- where settings come from


class _Layer(NamedTuple):
    where: str
    url: str | None
    requires: frozenset[str]
    values: Mapping[str, object]

    @classmethod
    def of(cls, where: str, table: Mapping[str, object], variables: dict[str, str]) -> _Layer:
        """Return the settings of a table. Adds the environment variables that the table names to ``variables``."""
        values = {name: _filled(value, f"{name} in {where}", variables) for name, value in table.items()}
        url = values.pop("url", None)
        if url is not None and not isinstance(url, str):
            raise ConfigurationError(f"{where}: url must be text, not {type(url).__name__}")
        try:
            requires = _capabilities(values.pop("requires", ()))
        except (TypeError, ConfigurationError) as error:
            raise ConfigurationError(f"{where}: {error}") from None
        for name, value in values.items():
            if isinstance(value, dict):
                raise ConfigurationError(f"{where}: [{name}] is not a setting; a profile's table is [profiles.{name}]")
            _setting(name, where)
        return cls(where, url, requires, values)


class _File(NamedTuple):
    path: str | None
    top: Mapping[str, object] = MappingProxyType({})
    profiles: Mapping[str, object] = MappingProxyType({})
    default: str | None = None

    @classmethod
    def read(cls, config: str | None) -> _File:
        """Return the configuration file, or an empty one if there is none and the program asked for none."""
        if asked := config if config is not None else os.environ.get("MULTILOCK_CONFIG"):
            if (text := _text_of(asked)) is not None:
                return cls._parse(asked, text)
            origin = "config=" if config is not None else "$MULTILOCK_CONFIG"
            raise ConfigurationError(f"the configuration file {asked!r} ({origin}) does not exist")
        if (text := _text_of(DEFAULT_FILE)) is not None:
            return cls._parse(DEFAULT_FILE, text)
        if "multilock" in (text := _text_of(PROJECT_FILE) or ""):
            return cls._parse(PROJECT_FILE, text, optional=True)
        return cls(None)

    @classmethod
    def _parse(cls, path: str, text: str, *, optional: bool = False) -> _File:
        import tomllib  # imported late: most programs give a URL and have no file

        try:
            top: Any = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"at line (\d+)", str(error))
            line = int(at[1]) if at else text.count("\n") + 1
            raise ConfigurationError(f"{path}, line {line}: not valid TOML: {error}") from error
        if os.path.basename(path) == PROJECT_FILE:
            if not isinstance(tool := top.get("tool", {}), dict):
                raise ConfigurationError(f"{path}: tool must be a table, such as [tool.multilock], not {tool!r:.60}")
            top = tool.get("multilock")
            path = f"[tool.multilock] of {path}"
            if top is None and optional:
                return cls(None)
            if not isinstance(top, dict):
                raise ConfigurationError(f"{path} is not there: add this table, or name another configuration file")
        profiles, default = top.pop("profiles", {}), top.pop("default", None)
        if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
            raise ConfigurationError(f"{path}: profiles must be tables, each written [profiles.NAME]")
        if default is not None and not isinstance(default, str):
            raise ConfigurationError(f"{path}: default must be the name of a profile, not {default!r:.60}")
        return cls(path, top, profiles, default)

    def layers(self, profile: str | None, variables: dict[str, str]) -> list[_Layer]:
        """Return the profile, if one is chosen, and the top level. A setting of the profile overrides that of the top
        level."""
        if self.path is None:
            if profile is None:
                return []
            raise ConfigurationError(
                f"profile {profile!r} needs a configuration file: {DEFAULT_FILE} in the working directory, config=, "
                f"$MULTILOCK_CONFIG, or [tool.multilock] of {PROJECT_FILE}"
            )
        layers = [_Layer.of(self.path, self.top, variables)]
        if profile is not None:
            table = self.profiles.get(profile)
            if not isinstance(table, dict):
                known = ", ".join(sorted(self.profiles)) or "none"
                raise ConfigurationError(f"unknown profile {profile!r}: {self.path} has {known}")
            layers.insert(0, _Layer.of(f"profile {profile!r} of {self.path}", table, variables))
        return layers


def _text_of(path: str) -> str | None:
    """Return the content of a file, or None if it does not exist."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        # A file in a directory that this process may not read counts as missing.
        if isinstance(error, PermissionError) and not os.path.exists(path):
            return None
        raise ConfigurationError(f"the configuration file {path!r} cannot be read: {error}") from error


def _filled(value: object, where: str, variables: dict[str, str]) -> object:
    """Return a value of the file with each ``${NAME}`` replaced by that environment variable, and ``$$`` by a dollar.

    Adds each variable that was used to ``variables``.
    """
    if isinstance(value, list):
        return [_filled(each, where, variables) for each in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, closed = match[1], match[2]
        if name is None:
            return "$"
        if not closed or not name.isidentifier():
            raise ConfigurationError(f"{where}: after '${{' the name of an environment variable and '}}' must follow")
        if name not in os.environ:
            raise ConfigurationError(
                f"{where}: the environment has no variable {name}: set it (for a plain '${{' write '$${{')"
            )
        variables[name] = os.environ[name]
        return variables[name]

    return _VARIABLE.sub(fill, value)


SHOWN_AT_MOST = 40  # characters; a message that cuts a long value still shows this many
SHORT = 3  # characters; a value of at most this length is no secret, and its removal would garble the message


def _without(variables: Mapping[str, str], error: MultilockError) -> MultilockError:
    """Return the error, whose message no longer shows the values of these environment variables."""
    text = str(error)
    for name, value in sorted(variables.items(), key=lambda item: -len(item[1])):
        for shown in (value, value[:SHOWN_AT_MOST]):  # messages cut long values
            if len(shown) > SHORT:
                text = text.replace(shown, f"${{{name}}}")
    error.args = (text,)
    return error


def _required_by_environment() -> frozenset[str]:
    names = os.environ.get("MULTILOCK_REQUIRES", "").split(",")
    try:
        return _capabilities([name.strip() for name in names if name.strip()])
    except ConfigurationError as error:
        raise ConfigurationError(f"$MULTILOCK_REQUIRES: {error}") from None


def _nothing_configured(file: _File, profile: str | None) -> ConfigurationError:
    if profile is not None:
        return ConfigurationError(f'profile {profile!r} of {file.path} has no url: add url = "redis://…"')
    if file.profiles:
        known = ", ".join(sorted(file.profiles))
        return ConfigurationError(
            f"{file.path} has profiles ({known}), and none is chosen: pass profile=, set $MULTILOCK_PROFILE, or write "
            'default = "NAME" at its top'
        )
    return NothingConfigured(
        "no backend is configured: pass a URL (on the command line --url) such as redis://localhost:6379/0 or "
        f'sqlite:////var/lib/app/locks.db, set $MULTILOCK_URL, or write url = "…" in {DEFAULT_FILE}'
    )


# ---- values

_Found = tuple[object, str | None]  # a value and its source; the source is None for a keyword of the program


def _outage_timeout(value: object) -> float | None:
    if value is None or value == float("inf"):
        return None
    return 0.0 if value == 0 and not isinstance(value, bool) else check_seconds(value, "outage_timeout")


def _request_timeout(value: object) -> float | None:
    return None if value is None else min(check_seconds(value, "request_timeout"), LONGEST_REQUEST)


_CHECKS: dict[str, Callable[[object], object]] = {
    "ttl": lambda value: check_seconds(value, "ttl"),
    "prefix": check_prefix,
    "identity": check_identity,
    "outage_timeout": _outage_timeout,
    "request_timeout": _request_timeout,
}
COMMON = tuple(_CHECKS)
"""The settings that every backend has."""

_MAY_BE_NONE = ("outage_timeout", "request_timeout")
_TEXTS = ("prefix", "identity")


def _settings(scheme: str, url: str, found: Mapping[str, _Found], requires: frozenset[str]) -> Settings:
    common: dict[str, object] = {name: _check(name, *found[name]) for name in COMMON if name in found}
    own = {name: value for name, (value, _) in found.items() if name not in COMMON}
    sources = {name: where for name, (_, where) in found.items() if name in own and where}
    return Settings(scheme, url, options=own, requires=requires, sources=sources, **common)  # type: ignore[arg-type]


def _check(name: str, value: object, where: str | None) -> object:
    try:
        if where is not None and isinstance(value, str) and name not in _TEXTS:
            value = _seconds_from_text(name, value)
        return _CHECKS[name](value)
    except TypeError as error:
        if where is None:
            raise
        raise ConfigurationError(f"{where}: {error}") from None
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}" if where else str(error)) from None


def _seconds_from_text(name: str, text: str) -> float | None:
    if text.lower() == "none" and name in _MAY_BE_NONE:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r:.60}: give a number of seconds") from None


def _capabilities(names: object) -> frozenset[str]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"requires must be a collection of names, such as {{'fencing'}}, not {names!r:.60}")
    wanted = frozenset(names)
    for name in wanted:
        if name not in CAPABILITIES:
            raise ConfigurationError(
                f"unknown capability {name!r:.60} in requires: known are {', '.join(CAPABILITIES)}"
            )
    return wanted


def _given(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that were given: None means "not given", except for settings that may be None."""
    for name in arguments:
        if not isinstance(name, str):
            raise TypeError(f"the keys of a configuration mapping must be str, not {type(name).__name__}")
    return {name: value for name, value in arguments.items() if value is not None or name in _MAY_BE_NONE}


def _url(url: object) -> str | None:
    if url is not None and not isinstance(url, str):
        raise TypeError(f"url must be a str or a mapping, not {type(url).__name__}")
    if url == "":
        raise ConfigurationError("the URL is empty: pass one such as redis://localhost:6379/0, or None for the default")
    return url


def _profile(profile: object) -> str | None:
    if profile is not None and not isinstance(profile, str):
        raise TypeError(f"profile must be a str, not {type(profile).__name__}")
    return profile


def _path(config: object) -> str | None:
    if config is None:
        return None
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config must be a path, not {type(config).__name__}")
    return os.fsdecode(config)


def _setting(name: str, where: str) -> str:
    if name in _ARGUMENTS:
        raise ConfigurationError(f"{where}: {name!r} cannot be set here, it is an argument of connect()")
    return name


def unknown_option(name: str, known: Iterable[str], whose: str) -> ConfigurationError:
    """Return the error for an option that is not known. `open_configured` adds where the option was written."""
    error = UnknownOption(f"unknown option {name!r:.60} for {whose}: known are {', '.join(sorted(known))}")
    error.option = name
    return error
