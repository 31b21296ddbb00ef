"""For backends: how they read their options and their URL, and what they say of a URL that led elsewhere.

An option comes as text where it was written in a URL or the environment, and as any object where a program or a file
gave it. What is wrong raises ConfigurationError, with the remedy and without a secret. No I/O, but for `tls_context`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from multilock.config import COMMON, unknown_option
from multilock.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl

__all__ = [
    "LOGIN",
    "NO_TLS",
    "TLS_FILES",
    "belong_together",
    "client_alone",
    "host_list",
    "number",
    "prefix_of",
    "reject_unknown",
    "text",
    "texts",
    "tls_context",
    "tls_only",
    "ttl_of",
    "user_info",
    "who_answered",
    "yes_or_no",
]

Number = TypeVar("Number", int, float)

TLS_FILES = ("ca", "cert", "key")
LOGIN = ("username", "password")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/@\[\]]+)(?::(\d+))?")
_YES_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def reject_unknown(options: Mapping[str, object], known: Iterable[str], scheme: str) -> None:
    """Raises ConfigurationError, which lists the known ones, if ``options`` has one that is neither in ``known`` nor
    common to all backends. ``client`` is known only where ``known`` has it."""
    everything = [*COMMON, *known]
    for name in options:
        if name not in everything:
            raise unknown_option(name, everything, f"{scheme}://")


# ---- values


def prefix_of(options: Mapping[str, object]) -> str:
    return cast("str", options.get("prefix", "multilock/"))


def ttl_of(options: Mapping[str, object]) -> float:
    return cast("float", options.get("ttl", 30.0))


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be text, not {type(value).__name__}")
    return value


def texts(options: Mapping[str, object], names: Iterable[str]) -> dict[str, str]:
    """Those of these options that are given."""
    return {name: text(name, options[name]) for name in names if name in options}


def number(kind: type[Number], value: object) -> Number | None:
    """None: it says no number of this kind."""
    if not isinstance(value, (kind, int, str)) or isinstance(value, bool):
        return None
    try:
        return kind(value)
    except (ValueError, OverflowError):
        return None


def yes_or_no(name: str, value: object) -> bool:
    said = _YES_NO.get(value.lower(), value) if isinstance(value, str) else value
    if not isinstance(said, bool):
        raise ConfigurationError(f"{name} must be true or false, not {said!r:.60}")
    return said


def belong_together(given: Mapping[str, str], one: str, other: str) -> None:
    if (one in given) != (other in given):
        raise ConfigurationError(f"{one}= and {other}= belong together: give both")


def client_alone(options: Mapping[str, object], names: Iterable[str]) -> None:
    """A client handed over knows these itself."""
    if given := [name for name in names if name in options]:
        raise ConfigurationError(f"{', '.join(given)}: client= has its own, give one or the other")


# ---- the URL


def user_info(login: str) -> dict[str, str]:
    """``username`` and ``password`` of what stands before the ``@`` of a URL."""
    from urllib.parse import unquote

    user, _, password = login.partition(":")
    return {"username": unquote(user), "password": unquote(password)} if login else {}


def host_list(hosts: str, port: int, called: str) -> list[str]:
    """``h1:1,h2`` with a port for each; ``called`` says what each is: "host of an etcd URL"."""
    return [_host(host, port, called) for host in hosts.split(",")]


def _host(host: str, port: int, called: str) -> str:
    found = _HOST.fullmatch(host)
    if found is None or not 0 < int(found[2] or port) < 65536:
        # Where the '@' and the host are missing, a password stands after the colon.
        shown = host if host.startswith("[") else "".join(host.partition(":")[:2]) + "…" * (":" in host)
        raise ConfigurationError(f"{shown!r} is not a {called}: write host:port, or [::1]:{port} for IPv6")
    return f"{found[1]}:{found[2] or port}"


# ---- TLS


def tls_only(options: Mapping[str, object], scheme: str, secure: str) -> dict[str, str]:
    """``ca``, ``cert`` and ``key`` as far as they are given, which only the scheme ``secure`` takes."""
    files = texts(options, TLS_FILES)
    if files and scheme != secure:
        raise ConfigurationError(f"{', '.join(files)}: for {secure}:// only")
    return files


def tls_context(files: Mapping[str, str | None], *, folder: str | None = None, verify: bool = True) -> ssl.SSLContext:
    """Reads these files now: at the first connection, a missing one would pass for a server that is away. ``folder``
    is one of certificates, beside or instead of ``ca``."""
    import ssl

    try:
        context = ssl.create_default_context(cafile=files.get("ca"), capath=folder)
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if cert := files.get("cert"):
            context.load_cert_chain(cert, files.get("key"), password=lambda: "")  # else OpenSSL asks the terminal
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(f"ca=, cert= and key= must be PEM files that can be read: {error}") from error
    return context


# ---- where a URL led

NO_TLS = "WRONG_VERSION_NUMBER"  # what OpenSSL says of a first answer that is none of TLS


def who_answered(said: bytes) -> str | None:
    """What answers where a backend was expected, for messages: out of its first bytes. None: they do not tell."""
    if said[:1] in (b"\x15", b"\x16") and said[1:2] == b"\x03":
        return "what listens there speaks TLS"
    if said.startswith(b"HTTP/"):
        return "an HTTP server listens there"
    if said.startswith((b"-ERR", b"-NOAUTH", b"-DENIED", b"+PONG")):
        return "a Redis listens there"
    if said[3:4] == b"\x04" and said[5:9] == b"\x00\x00\x00\x00":
        return "an HTTP/2 server listens there, as etcd is one"
    return None
