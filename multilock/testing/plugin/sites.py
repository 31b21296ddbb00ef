"""The backends of a test run: their names, the prefix that isolates its locks, and whether they answer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from multilock.urls import SHOWN, redact

if TYPE_CHECKING:
    from multilock import Capabilities

__all__ = ["SITES", "Site", "Sites", "URLText", "new_run"]

PROBE_WITHIN = 3.0  # seconds within which a server must answer the first request, which checks whether it is reachable
SECRET = 4  # characters; a shorter secret is not hidden, since it would occur in every text
FOLDER = "multilock-test/"
_LOGIN = re.compile(r"(?<=://)[^\s/@'\"]*@")


class URLText(str):
    """A URL whose repr shows no password: if a test fails, pytest prints the repr of its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(redact(self))


@dataclass(frozen=True, slots=True)
class Site:
    """One backend of the run. Two sites may have the same URL, or URLs that differ only in a secret."""

    number: int
    label: str
    url: str = field(repr=False)  #: the URL as given, with its secrets

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return redact(self.url)

    @property
    def isolated(self) -> bool:
        """Whether its locks get the prefix of the run."""
        bare, _, query = self.url.partition("?")
        named = any(pair.startswith("prefix=") for pair in query.split("&"))
        return bare.partition(":")[0].lower() != "memory" and not named

    def with_prefix(self, prefix: str) -> URLText:
        """Return the URL. If the site is isolated, this prefix is added to it."""
        if not self.isolated:
            return URLText(self.url)
        return URLText(f"{self.url}{'&' if '?' in self.url else '?'}prefix={prefix}")


class Sites:
    """The backends, in one process of the run. The id ``run`` is the same in all processes, ``worker`` differs."""

    def __init__(self, urls: list[str], run: str, worker: str) -> None:
        schemes = [url.partition(":")[0] for url in urls]
        # Labels are printed in the names of tests. A URL may contain a password, so labels have only its scheme.
        labels = [f"{number}-{scheme}" for number, scheme in enumerate(schemes)] if len(urls) > 1 else schemes
        self.all = [Site(number, labels[number], url) for number, url in enumerate(urls)]
        self.run_prefix = f"{FOLDER}{run}-"
        # The prefix does not end with a slash, because with it each run would leave a node in ZooKeeper forever.
        self.prefix = f"{self.run_prefix}{worker}-"
        self._capabilities: dict[str, Capabilities] = {}
        self._away: dict[str, str] = {}

    def capabilities(self, site: Site) -> Capabilities:
        """Return the capabilities of this URL, without I/O. Raises ConfigurationError."""
        import multilock  # imported only when a test needs it, because the plugin is loaded into every pytest run

        if site.url not in self._capabilities:
            with multilock.connect(site.url) as client:
                self._capabilities[site.url] = client.capabilities
        return self._capabilities[site.url]

    def away(self, site: Site) -> str:
        """Return why the backend does not answer, or an empty text if it does. Each process asks the backend only once.

        Raises ConfigurationError or BackendRejected, which a later try would raise again.
        """
        import multilock

        if site.url not in self._away:
            try:
                with multilock.connect(site.url, request_timeout=PROBE_WITHIN) as client:
                    client.ping()
            except multilock.BackendUnavailable as error:
                self._away[site.url] = self.scrub(str(error))
            else:
                self._away[site.url] = ""
        return self._away[site.url]

    def scrub(self, text: str) -> str:
        """Return the text without the secrets of these URLs."""
        for secret in sorted(set(self._secrets()), key=len, reverse=True):
            text = text.replace(secret, "***")
        return _LOGIN.sub("***@", text)

    def _secrets(self) -> list[str]:
        found: list[str] = []
        for site in self.all:
            parts = urlsplit(site.url)
            login = parts.netloc.rpartition("@")[0]
            values = [value for name, value in parse_qsl(parts.query) if name not in SHOWN]
            found += [login, login.partition(":")[2], unquote(login.partition(":")[2]), *values]
        return [secret for secret in found if len(secret) >= SECRET]


SITES = pytest.StashKey[Sites]()


def new_run() -> str:
    """Return a new id for all processes of one test run."""
    return os.urandom(4).hex()
