"""``multilock doctor``: what is installed, and what the chosen backend promises and lacks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import multilock
from multilock import BackendRejected, BackendUnavailable, Capabilities, Finding
from multilock.cli.exits import UNREACHABLE
from multilock.config import resolve
from multilock.registry import OURS, schemes
from multilock.urls import redact

__all__ = ["doctor"]

STYLES: Mapping[str, str] = {"info": "cyan", "warning": "yellow", "error": "red"}


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
    return 0


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
    console = Console(highlight=False)
    console.print("backends", style="bold")
    how = {b.scheme: b.library or "ready" if b.installed else f"missing: {b.install}" for b in report.backends}
    console.print(_columns({f"{scheme}://": text for scheme, text in how.items()}))
    if report.url is not None:
        console.print(Text(report.url, style="bold"))
    if report.capabilities is None:
        return
    console.print(_columns(_capabilities(report.capabilities)))
    for finding in report.findings:
        console.print(Text(f"{finding.level}: {finding.message}", style=STYLES[finding.level]))
        console.print(Padding(Text(finding.remedy), (0, 0, 0, 2)))
    if not report.findings:
        console.print("nothing found that weakens the lock", style="green")


def _capabilities(capabilities: Capabilities) -> dict[str, str]:
    """A bound that the backend does not have is none of its promises."""
    return {name: _shown(value) for name, value in dataclasses.asdict(capabilities).items() if value is not None}


def _columns(rows: Mapping[str, str]) -> Padding:
    table = Table.grid(padding=(0, 2))
    for left, right in rows.items():
        table.add_row(Text(left), Text(right))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.15g} s" if isinstance(value, float) else str(value)
