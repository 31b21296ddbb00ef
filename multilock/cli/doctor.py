"""``multilock doctor``: what is installed, and what the chosen backend promises and lacks."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

import multilock
from multilock import BackendRejected, BackendUnavailable, Capabilities, Client, Finding, MultilockError
from multilock.cli.exits import UNREACHABLE
from multilock.config import resolve
from multilock.registry import OURS, schemes
from multilock.urls import redact

__all__ = ["doctor"]


@dataclass(frozen=True, slots=True)
class _Installed:
    scheme: str
    installed: bool
    library: str | None  #: the client library it needs, with its version
    install: str | None  #: what to type where it is missing


@dataclass(slots=True)
class _Report:
    backends: list[_Installed]
    url: str | None = None  #: without its secrets
    capabilities: Capabilities | None = None
    findings: list[Finding] = field(default_factory=list)


def doctor(url: str | None, profile: str | None, config: str | None, as_json: bool, strict: bool) -> int:
    """Show what can be said, and only then raise what is wrong with the configuration. 69: the backend is silent; 1: it
    has a finding of level error, or, if that is ``strict``, of level warning."""
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


def _examine(report: _Report, url: str | None, profile: str | None, config: str | None) -> int:
    report.url = redact(resolve(url, profile=profile, config=config).url)
    with multilock.connect(url, profile=profile, config=config) as client:
        report.capabilities = client.capabilities
        try:
            report.findings = client.diagnose()
        except (BackendUnavailable, BackendRejected) as error:
            code = "unreachable" if isinstance(error, BackendUnavailable) else "rejected"
            report.findings = [Finding(code, "error", str(error), "check the address, the server and the credentials")]
            return UNREACHABLE
        return _try_a_lock(report, client)


def _try_a_lock(report: _Report, client: Client) -> int:
    """Take and give back a lock that nobody else wants: a server may answer everything but that."""
    name = f"doctor-{secrets.token_hex(4)}"
    try:
        lease = client.lock(name).try_acquire()
        if lease is not None and lease.release():
            return 0
        wrong, code = f"{name!r} was taken, or taken away, though nobody else uses it", 0
    except MultilockError as error:
        wrong, code = str(error), UNREACHABLE if isinstance(error, BackendUnavailable) else 0
    remedy = "check the server, and what these credentials may do: a lock needs more rights than a look"
    report.findings = [Finding("no-lock", "error", f"no lock can be taken: {wrong}", remedy), *report.findings]
    return code


def _installed(scheme: str) -> _Installed:
    from importlib.metadata import packages_distributions, version
    from importlib.util import find_spec

    ours = OURS.get(scheme)
    if ours is None or ours.library is None:
        return _Installed(scheme, True, None, None)
    if find_spec(ours.library) is None:
        return _Installed(scheme, False, ours.library, f"pip install 'multilock[{ours.extra}]'")
    names = packages_distributions().get(ours.library, [])  # none: it is on the path without being installed
    return _Installed(scheme, True, " ".join([ours.library, *map(version, names[:1])]), None)


def _print(report: _Report) -> None:
    """Print findings first: they are what an operator must act on."""
    if report.url is not None:
        _print_wrapped(report.url)
    for finding in report.findings:
        _print_wrapped(f"{finding.level}: {finding.message}")
        _print_wrapped(finding.remedy, "  ")
    if report.capabilities is not None:
        if not report.findings:
            print("nothing found that weakens the lock")
        _print_columns(_capabilities(report.capabilities))
    print("backends")
    how = {b.scheme: b.library or "ready" if b.installed else f"missing: {b.install}" for b in report.backends}
    _print_columns({f"{scheme}://": text for scheme, text in how.items()})


def _capabilities(capabilities: Capabilities) -> dict[str, str]:
    """A bound that the backend does not have is none of its promises."""
    return {name: _shown(value) for name, value in dataclasses.asdict(capabilities).items() if value is not None}


def _print_columns(rows: Mapping[str, str]) -> None:
    left = max(map(len, rows)) + 4
    for name, text in rows.items():
        _print_wrapped(text, f"  {name}".ljust(left), " " * left)


def _print_wrapped(text: str, first: str = "", rest: str = "  ") -> None:
    """Wrap at the width of a terminal; what a program reads stays on one line."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    print(textwrap.fill(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.15g} s" if isinstance(value, float) else str(value)
