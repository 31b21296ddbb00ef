"""For backends: read options and URLs, and recognise another program that answers in place of the server.

An option is text if it came from a URL or the environment, and any object if it came from a program or a file. A wrong
value raises ConfigurationError, whose message has the remedy and no secret. Only `tls_context` does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from multilock.config import COMMON, unknown_option
from multilock.errors import ConfigurationError
from multilock.model import Finding

if TYPE_CHECKING:
    import ssl

__all__ = [
    "LOGIN",
    "NO_TLS",
    "TLS_FILES",
    "TLS_OPTIONS",
    "belong_together",
    "client_alone",
    "host_list",
    "number",
    "prefix_of",
    "reject_unknown",
    "text",
    "texts",
    "tls_context",
    "tls_findings",
    "tls_only",
    "ttl_of",
    "user_info",
    "verifies",
    "who_answered",
    "yes_or_no",
]

Number = TypeVar("Number", int, float)

TLS_FILES = ("ca", "cert", "key")
TLS_OPTIONS = (*TLS_FILES, "tls_verify")
LOGIN = ("username", "password")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/@\[\]]+)(?::(\d+))?")
_YES_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def reject_unknown(options: Mapping[str, object], known: Iterable[str], scheme: str) -> None:
    """Raise ConfigurationError, which lists the valid names, if ``options`` has a name that is not valid.

    The valid names are those in ``known``, and those common to all backends. ``client`` is valid only if it is in
    ``known``.
    """
    everything = [*COMMON, *known]
    for name in options:
        if name not in everything:
            raise unknown_option(name, everything, f"{scheme}://")


# ---- values


def prefix_of(options: Mapping[str, object]) -> str:
    """Return the prefix of every key."""
    return cast("str", options.get("prefix", "multilock/"))


def ttl_of(options: Mapping[str, object]) -> float:
    """Return the client's default ttl in seconds."""
    return cast("float", options.get("ttl", 30.0))


def text(name: str, value: object) -> str:
    """Return ``value`` if it is a str. Raises ConfigurationError."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be text, not {type(value).__name__}")
    return value


def texts(options: Mapping[str, object], names: Iterable[str]) -> dict[str, str]:
    """Return the text of those options in ``names`` that were given."""
    return {name: text(name, options[name]) for name in names if name in options}


def number(kind: type[Number], value: object) -> Number | None:
    """Return ``value`` as a number of this type, or None if it is not such a number."""
    if not isinstance(value, (kind, int, str)) or isinstance(value, bool):
        return None
    try:
        return kind(value)
    except (ValueError, OverflowError):
        return None


def yes_or_no(name: str, value: object) -> bool:
    """Return the bool that ``value`` stands for. Raises ConfigurationError."""
    said = _YES_NO.get(value.lower(), value) if isinstance(value, str) else value
    if not isinstance(said, bool):
        raise ConfigurationError(f"{name} must be true or false, not {said!r:.60}")
    return said


def belong_together(given: Mapping[str, str], one: str, other: str) -> None:
    """Raise ConfigurationError if only one of the two options was given."""
    if (one in given) != (other in given):
        raise ConfigurationError(f"{one}= and {other}= belong together: give both")


def client_alone(options: Mapping[str, object], names: Iterable[str]) -> None:
    """Raise ConfigurationError if one of these options was given together with ``client=``. The client object has its
    own values for them."""
    if given := [name for name in names if name in options]:
        raise ConfigurationError(f"{', '.join(given)}: the client object of client= has its own, give one or the other")


# ---- the URL


def user_info(login: str) -> dict[str, str]:
    """Return ``username`` and ``password`` from the text before the ``@`` of a URL."""
    from urllib.parse import unquote

    user, _, password = login.partition(":")
    return {"username": unquote(user), "password": unquote(password)} if login else {}


def host_list(hosts: str, port: int, called: str) -> list[str]:
    """Return the hosts of ``h1:1,h2``, each with a port. ``called`` is the name of such a host in messages: "host of an
    etcd URL"."""
    return [_host(host, port, called) for host in hosts.split(",")]


def _host(host: str, port: int, called: str) -> str:
    found = _HOST.fullmatch(host)
    if found is None or not 0 < int(found[2] or port) < 65536:
        # If the '@' and the host are missing, the text after the colon is a password, so it is not shown.
        shown = host if host.startswith("[") else "".join(host.partition(":")[:2]) + "…" * (":" in host)
        raise ConfigurationError(f"{shown!r} is not a {called}: write host:port, or [::1]:{port} for IPv6")
    return f"{found[1]}:{found[2] or port}"


# ---- TLS


def tls_only(options: Mapping[str, object], scheme: str, secure: str) -> dict[str, str]:
    """Return those of ``ca``, ``cert`` and ``key`` that were given. Only the scheme ``secure`` may have options of
    TLS."""
    given = [name for name in TLS_OPTIONS if name in options]
    if given and scheme != secure:
        raise ConfigurationError(f"{', '.join(given)}: only {secure}:// has these, use that scheme or leave them out")
    return texts(options, TLS_FILES)


def verifies(options: Mapping[str, object]) -> bool:
    """Return whether TLS verifies the server: always, unless ``tls_verify`` says no."""
    return yes_or_no("tls_verify", options.get("tls_verify", True))


def tls_context(files: Mapping[str, str | None], *, folder: str | None = None, verify: bool = True) -> ssl.SSLContext:
    """Return the TLS context of these files. ``folder`` is a directory of CA certificates, with or instead of ``ca``.

    The files are read now: at the first connection, a missing file would look like a server that cannot be reached.
    """
    import ssl

    try:
        context = ssl.create_default_context(cafile=files.get("ca"), capath=folder)
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if cert := files.get("cert"):
            # Without a password function, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(cert, files.get("key"), password=lambda: "")
    except OSError as error:  # includes ssl.SSLError
        raise ConfigurationError(f"ca=, cert= and key= must be PEM files that can be read: {error}") from error
    return context


def tls_findings(context: ssl.SSLContext | None) -> list[Finding]:
    """Return a finding if the client does not verify the server's certificate. ``context`` is None without TLS."""
    if context is None or context.check_hostname:
        return []
    accepted = "any certificate" if context.verify_mode == 0 else "the certificate of any host"
    return [
        Finding(
            "tls-verify",
            "warning",
            f"TLS accepts {accepted}: a program in between can read the password, and grant a lock to two processes",
            "give the authority of the server's certificate as ca= and leave out tls_verify=no, or make the client of "
            "client= check certificate and host name",
        )
    ]


# ---- the wrong server

NO_TLS = "WRONG_VERSION_NUMBER"  # OpenSSL's error if the first reply is not TLS


def who_answered(said: bytes) -> str | None:
    """Return the name of the program that replied instead of the backend, for messages, or None if its first bytes do
    not identify it."""
    if said[:1] in (b"\x15", b"\x16") and said[1:2] == b"\x03":
        return "what listens there speaks TLS"
    if said.startswith(b"HTTP/"):
        return "an HTTP server listens there"
    if said.startswith((b"-ERR", b"-NOAUTH", b"-DENIED", b"+PONG")):
        return "a Redis listens there"
    if said[3:4] == b"\x04" and said[5:9] == b"\x00\x00\x00\x00":
        return "an HTTP/2 server listens there, as etcd is one"
    return None
