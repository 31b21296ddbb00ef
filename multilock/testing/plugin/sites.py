"""The backends of a test run: their names, the prefix that isolates its locks, whether they are there."""

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

PROBE_WITHIN = 3.0  # seconds for the one request that asks whether a server is there
SECRET = 4  # characters; shorter ones are in every text
FOLDER = "multilock-test/"
_LOGIN = re.compile(r"(?<=://)[^\s/@'\"]*@")


class URLText(str):
    """A URL whose repr shows no password: pytest prints that of the arguments of a test that fails."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(redact(self))


@dataclass(frozen=True, slots=True)
class Site:
    """One backend of the run. Two may have the same URL, or URLs that differ in what nobody may see."""

    number: int
    label: str
    url: str = field(repr=False)  #: as given

    @property
    def shown(self) -> str:
        return redact(self.url)

    @property
    def isolated(self) -> bool:
        """Whether it gets a prefix of the run's own."""
        bare, _, query = self.url.partition("?")
        named = any(pair.startswith("prefix=") for pair in query.split("&"))
        return bare.partition(":")[0].lower() != "memory" and not named

    def with_prefix(self, prefix: str) -> URLText:
        if not self.isolated:
            return URLText(self.url)
        return URLText(f"{self.url}{'&' if '?' in self.url else '?'}prefix={prefix}")


class Sites:
    """What one process of the run knows of them. ``run`` is the same in all its processes, ``worker`` is not."""

    def __init__(self, urls: list[str], run: str, worker: str) -> None:
        schemes = [url.partition(":")[0] for url in urls]
        # Numbers and schemes, because the name of a test is printed and a URL may hold a password.
        labels = [f"{number}-{scheme}" for number, scheme in enumerate(schemes)] if len(urls) > 1 else schemes
        self.all = [Site(number, labels[number], url) for number, url in enumerate(urls)]
        self.run_prefix = f"{FOLDER}{run}-"
        # It ends with no slash: in ZooKeeper that would be a node for each run, for good.
        self.prefix = f"{self.run_prefix}{worker}-"
        self._capabilities: dict[str, Capabilities] = {}
        self._away: dict[str, str] = {}

    def capabilities(self, site: Site) -> Capabilities:
        """Of this URL; without I/O. Raises ConfigurationError."""
        import multilock  # not before a test asks: the plugin is loaded into every pytest run

        if site.url not in self._capabilities:
            with multilock.connect(site.url) as client:
                self._capabilities[site.url] = client.capabilities
        return self._capabilities[site.url]

    def away(self, site: Site) -> str:
        """Why it does not answer; empty: it does. It is asked once in each process. Raises whatever waiting for it
        would not change: ConfigurationError, BackendRejected."""
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
        """Without the secrets of these URLs."""
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
    """An id for all processes of one test run."""
    return os.urandom(4).hex()
