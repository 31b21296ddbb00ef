"""``multilock doctor``: check the installation and the chosen backend, and show its promises and problems."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import multilock
from multilock import (
    BackendRejected,
    BackendUnavailable,
    Capabilities,
    Client,
    ConfigurationError,
    Finding,
    MultilockError,
)
from multilock.backend import Guards
from multilock.cli.exits import UNREACHABLE
from multilock.config import resolve
from multilock.kernel.messages import ADVICE
from multilock.registry import OURS, schemes
from multilock.urls import redact

__all__ = ["doctor"]


@dataclass(frozen=True, slots=True)
class _Installed:
    scheme: str
    installed: bool
    library: str | None  #: the client library that the backend needs, with its version
    install: str | None  #: the command that installs a missing library


@dataclass(slots=True)
class _Report:
    backends: list[_Installed]
    url: str | None = None  #: the URL without its secrets
    capabilities: Capabilities | None = None
    findings: list[Finding] = field(default_factory=list)


def doctor(url: str | None, profile: str | None, config: str | None, as_json: bool, strict: bool, sql: bool) -> int:
    """Print what could be found out, then raise the error if the configuration is wrong.

    If ``sql`` is True, send no request and print only the SQL statements with which an owner of the database makes the
    tables. Returns the exit code: 69 if the backend does not reply, 1 if it has a finding of level error (with
    ``strict`` also of level warning), else 0.
    """
    if sql:
        return _print_sql(url, profile, config)
    report = _Report([_installed(scheme) for scheme in schemes()])
    try:
        code = _examine(report, url, profile, config)
        levels = ("error", "warning") if strict else ("error",)
        return code or int(any(finding.level in levels for finding in report.findings))
    finally:
        if as_json:
            print(json.dumps(dataclasses.asdict(report), indent=2))
        else:
            _print(report)


def _print_sql(url: str | None, profile: str | None, config: str | None) -> int:
    with multilock.connect(url, profile=profile, config=config) as client:
        backend = client._kernel.backend
        if not isinstance(backend, Guards):
            raise ConfigurationError(f"{backend.scheme}:// needs no SQL: give --sql with a postgresql:// URL")
        print(backend.sql(), end="")
    return 0


def _examine(report: _Report, url: str | None, profile: str | None, config: str | None) -> int:
    report.url = redact(resolve(url, profile=profile, config=config).url)
    with multilock.connect(url, profile=profile, config=config) as client:
        report.capabilities = client.capabilities
        try:
            report.findings = client.diagnose()
        except (BackendUnavailable, BackendRejected) as error:
            code = "unreachable" if isinstance(error, BackendUnavailable) else "rejected"
            wrong, remedy = str(error).replace(ADVICE, ""), "check the address, the server and the credentials"
            report.findings = [Finding(code, "error", wrong, remedy)]
            return UNREACHABLE
        return _try_a_lock(report, client)


def _try_a_lock(report: _Report, client: Client) -> int:
    """Acquire and release a lock that no other program uses: a server may reply to every other request, but not to
    these two."""
    name = f"doctor-{secrets.token_hex(4)}"
    try:
        lease = client.lock(name).try_acquire()
        if lease is not None and lease.release():
            return 0
        wrong, code = f"{name!r} was taken, or was taken away, although nobody else uses it", 0
    except MultilockError as error:
        wrong, code = str(error), UNREACHABLE if isinstance(error, BackendUnavailable) else 0
    remedy = "check the server and the permissions of these credentials: a lock needs more of them than a read"
    report.findings = [Finding("no-lock", "error", f"no lock can be taken: {wrong}", remedy), *report.findings]
    return code


def _installed(scheme: str) -> _Installed:
    from importlib.metadata import version
    from importlib.util import find_spec

    ours = OURS.get(scheme)
    if ours is None or ours.library is None:
        return _Installed(scheme, True, None, None)
    if find_spec(ours.library) is None:
        return _Installed(scheme, False, ours.library, f"pip install 'multilock[{ours.extra}]'")
    names = _distributions().get(ours.library, [])  # empty if the library is on the path without being installed
    return _Installed(scheme, True, " ".join([ours.library, *map(version, names[:1])]), None)


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return, for each import package, the distributions that contain it. Reading them takes a fifth of a second."""
    from importlib.metadata import packages_distributions

    return packages_distributions()


def _print(report: _Report) -> None:
    """Print findings first: an operator must act on them."""
    if report.url is not None:
        _print_wrapped(report.url)
    for finding in report.findings:
        _print_wrapped(f"{finding.level}: {finding.message}")
        _print_wrapped(finding.remedy, "  remedy: ", "    ")
    if report.capabilities is not None:
        if not report.findings:
            print("found nothing that weakens the lock")
        _print_columns(_capabilities(report.capabilities))
    print("backends")
    how = {b.scheme: b.library or "ready" if b.installed else f"missing: {b.install}" for b in report.backends}
    _print_columns({f"{scheme}://": text for scheme, text in how.items()})


def _capabilities(capabilities: Capabilities) -> dict[str, str]:
    """Return the capabilities as text, without bounds and reasons that the backend does not have."""
    return {name: _shown(value) for name, value in dataclasses.asdict(capabilities).items() if value not in (None, "")}


def _print_columns(rows: Mapping[str, str]) -> None:
    left = max(map(len, rows)) + 4
    for name, text in rows.items():
        _print_wrapped(text, f"  {name}".ljust(left), " " * left)


def _print_wrapped(text: str, first: str = "", rest: str = "  ") -> None:
    """Wrap at the width of the terminal. Without a terminal, wrap at 80 columns, but break no long word such as a
    URL."""
    width, whole = shutil.get_terminal_size().columns, not sys.stdout.isatty()
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=not whole
    )
    print("\n".join(lines))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.15g} s" if isinstance(value, float) else str(value)
