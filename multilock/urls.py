"""What a URL of a backend may look like, how it is taken apart, and how it is shown without its secrets."""

from __future__ import annotations

import re

from multilock.errors import ConfigurationError
from multilock.registry import is_scheme

__all__ = ["redact", "split_url"]

SHOWN = ("ttl", "prefix", "identity", "outage_timeout", "request_timeout")  # any other value may be a secret
_BAD_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")
_NO_AUTHORITY = re.compile(r"[a-z][a-z0-9+.-]*:///", re.IGNORECASE)
# u:ab/cd@h, u:ab?cd@h; but neither h1:1,h2?name=a@b nor [::1]?name=a@b
_CUT_PASSWORD = re.compile(r"[^/]*://[^/?@]*:(?![0-9]*[/?])[^/?@:\],]*(?:/[^?]*@|(?:/[^?]*)?\?[^=&]*@)", re.DOTALL)
_USER_INFO = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)  # to the last @: it may lack escapes


def redact(url: str) -> str:
    """``url`` fit to be shown: without user info, and with no value of a query but those of the common options.

    A URL too broken to tell where its user info ends loses more than that, never less.
    """
    shown = url if _NO_AUTHORITY.match(url) else _USER_INFO.sub(r"\1***@", url)
    shown, has_fragment, _ = shown.partition("#")
    shown, has_query, query = shown.partition("?")
    return shown + has_query + "&".join(map(_redact_pair, query.split("&"))) + ("#***" if has_fragment else "")


def _redact_pair(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    return pair if name in SHOWN or not pair else f"{name}=***" if equals else "***"


def split_url(url: str, source: str) -> tuple[str, str, dict[str, str]]:
    """Scheme (in lower case, in the URL too), the URL without its query, and the query decoded. ``source`` says where
    the URL came from.

    Raises ConfigurationError; its text has no secret of the URL.
    """
    from urllib.parse import urlsplit  # 5 ms at import

    def wrong(what: str) -> ConfigurationError:
        return ConfigurationError(f"{source} {redact(url)!r} {what}")

    scheme, separator, _ = url.partition("://")
    if any(char.isspace() or not char.isprintable() for char in url):
        raise wrong("contains white space or a control character: remove it, or write a space as %20")
    if not separator or not is_scheme(scheme.lower()):
        raise wrong("is not a URL: it must begin with a scheme, such as redis:// or sqlite:////")
    if "#" in url:
        raise wrong("has a '#': write %23 where it belongs to a value, else remove what begins with it")
    if _BAD_PERCENT.search(url):
        raise wrong("has a '%' without two hexadecimal digits: write %25 for the character itself")
    try:
        urlsplit(url)
    except ValueError:
        raise wrong("has a malformed host: an IPv6 address is written [::1]") from None
    bare, _, query = url.partition("?")
    if _CUT_PASSWORD.match(url):
        raise wrong("has a port that is not a number: in a password, write %2F for a '/' and %3F for a '?'")
    # Backends look at the scheme again: REDISS:// must not pass for one without TLS.
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
    if not (name and equals):  # not shown: it may be the end of a password
        raise ConfigurationError(f"{source} has an entry after '?' that is not name=value: write %26 for a '&' itself")
    try:
        return unquote_plus(name, errors="strict"), unquote_plus(value, errors="strict")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{source} has percent-encoded bytes after '?' that are not UTF-8") from None
