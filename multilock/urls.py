"""Check the URL of a backend, split it, and redact its secrets for messages."""

from __future__ import annotations

import re

from multilock.errors import ConfigurationError
from multilock.registry import is_scheme

__all__ = ["redact", "split_url"]

SHOWN = ("ttl", "prefix", "identity", "outage_timeout", "request_timeout")  # every other value may be a secret
_BAD_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")
_NO_AUTHORITY = re.compile(r"[a-z][a-z0-9+.-]*:///", re.IGNORECASE)
# A password with a '/' or '?' that should have been escaped: matches u:ab/cd@h and u:ab?cd@h, but neither
# h1:1,h2?name=a@b nor [::1]?name=a@b.
_CUT_PASSWORD = re.compile(r"[^/]*://[^/?@]*:(?![0-9]*[/?])[^/?@:\],]*(?:/[^?]*@|(?:/[^?]*)?\?[^=&]*@)", re.DOTALL)
# The user info ends at the last @, since a password may contain an @ that should have been escaped.
_USER_INFO = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


def redact(url: str) -> str:
    """Return ``url`` for messages: without user info, and with the query values of the common options only.

    If a URL is so malformed that the end of its user info is unclear, more than the user info is removed, never less.
    """
    shown = url if _NO_AUTHORITY.match(url) else _USER_INFO.sub(r"\1***@", url)
    shown, has_fragment, _ = shown.partition("#")
    shown, has_query, query = shown.partition("?")
    return shown + has_query + "&".join(map(_redact_pair, query.split("&"))) + ("#***" if has_fragment else "")


def _redact_pair(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    return pair if name in SHOWN or not pair else f"{name}=***" if equals else "***"


def split_url(url: str, source: str) -> tuple[str, str, dict[str, str]]:
    """Return the scheme in lower case, the URL without its query (also with that scheme), and the decoded query.

    ``source`` says where the URL came from. Raises ConfigurationError, whose text has no secret of the URL.
    """
    from urllib.parse import urlsplit  # the import takes 5 ms

    def wrong(what: str) -> ConfigurationError:
        return ConfigurationError(f"{source} {redact(url)!r} {what}")

    scheme, separator, _ = url.partition("://")
    if any(char.isspace() or not char.isprintable() for char in url):
        raise wrong("contains white space or a control character: remove it, or write a space as %20")
    if not separator or not is_scheme(scheme.lower()):
        raise wrong("is not a URL: it must begin with a scheme, such as redis:// or sqlite:////")
    if "#" in url:
        raise wrong("has a '#': write %23 if it belongs to a value, or else remove it and the text after it")
    if _BAD_PERCENT.search(url):
        raise wrong("has a '%' without two hexadecimal digits: write %25 for the character itself")
    try:
        urlsplit(url)
    except ValueError:
        raise wrong("has a malformed host: an IPv6 address is written [::1]") from None
    bare, _, query = url.partition("?")
    if _CUT_PASSWORD.match(url):
        raise wrong("has a port that is not a number: in a password, write %2F for a '/' and %3F for a '?'")
    # Backends compare the scheme again: REDISS:// must not be mistaken for a scheme without TLS.
    return scheme.lower(), scheme.lower() + bare.removeprefix(scheme), _split_query(query, source)


def _split_query(query: str, source: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, value = _split_pair(pair, source)
        if name in values:
            raise ConfigurationError(f"{source} has {name!r} twice: remove one")
        if not value and name != "prefix":
            raise ConfigurationError(f"{source} has no value for {name!r}: write {name}=…, or remove it")
        values[name] = value
    return values


def _split_pair(pair: str, source: str) -> tuple[str, str]:
    from urllib.parse import unquote_plus

    name, equals, value = pair.partition("=")
    if not (name and equals):  # not shown: the entry may be the end of a password
        raise ConfigurationError(f"{source} has an entry after '?' that is not name=value: write %26 for a '&' itself")
    try:
        return unquote_plus(name, errors="strict"), unquote_plus(value, errors="strict")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{source} has percent-encoded bytes after '?' that are not UTF-8") from None
