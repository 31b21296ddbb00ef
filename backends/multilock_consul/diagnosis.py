"""Report which versions and settings of the agents weaken a lock."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from multilock import BackendRejected, Finding
from multilock.options import tls_findings
from multilock_consul.sessions import REMOVED_AFTER
from multilock_consul.transport import Agents

__all__ = ["diagnose"]

# Connections that an agent should accept from one address; a client may open 64 queries and 64 requests.
CONNECTIONS = 150


def diagnose(agents: Agents, ttl: float, lock_delay: float, within: float) -> list[Finding]:
    """Ask the agent for its settings, and the servers for their peers. Raises the errors of a request."""
    until = agents.now() + within
    findings = _library() + tls_findings(agents.tls)
    try:
        about = agents.api(within).agent.self()
    except BackendRejected as refused:
        findings.append(
            Finding("not-told", "info", f"the agent does not show its settings: {refused}", "give the token agent:read")
        )
        return findings
    findings += _settings(about.get("DebugConfig") or {}, ttl)
    peers = agents.api(until - agents.now()).status.peers()
    if len(peers) < 3:
        findings.append(
            Finding(
                "few-servers",
                "warning",
                f"the cluster has {len(peers)} server(s): if one fails, no lock can be renewed",
                "run 3 or 5 servers",
            )
        )
    if len(peers) > 1 and lock_delay < ttl - REMOVED_AFTER and (about.get("Config") or {}).get("Server"):
        findings += _removal(agents, ttl, lock_delay, until - agents.now())
    return findings


def _removal(agents: Agents, ttl: float, lock_delay: float, within: float) -> list[Finding]:
    """Report that the servers remove a frozen server, and with it every session that was made on it.

    A holder that is connected to the frozen server is not notified of this removal.
    """
    try:
        response, _ = agents.call("GET", agents.target("/v1/operator/autopilot/configuration"), within)
        cleans_up = response.status != 200 or response.json().get("CleanupDeadServers", True)
    except BackendRejected:  # the token may not read this setting, and by default Consul removes dead servers
        cleans_up = True
    if not cleans_up:
        return []
    return [
        Finding(
            "server-agent",
            "warning",
            "this agent is a server: if it freezes, the others remove it after about ten seconds, together with its "
            f"sessions. A holder of such a session may still believe in its lock (ttl {ttl:g} s) when the lock delay "
            f"({lock_delay:g} s) is over",
            "talk to client agents, or leave lock_delay= out with a ttl of 65 s at most, or set autopilot's "
            "cleanup_dead_servers to false",
        )
    ]


def _settings(debug: dict[str, Any], ttl: float) -> list[Finding]:
    findings = []
    if debug.get("DevMode"):
        findings.append(
            Finding(
                "dev-mode",
                "warning",
                "a dev server forgets all locks and tokens when it ends",
                "run it with a data directory",
            )
        )
    taken = (debug.get("HTTPMaxConnsPerClient"), debug.get("Limits", {}).get("HTTPMaxConnsPerClient"))
    limit = next((number for number in taken if isinstance(number, int)), 200)
    if 0 < limit < CONNECTIONS:
        findings.append(
            Finding(
                "few-connections",
                "warning",
                f"the agent accepts {limit} connections from one address, for all clients of a host together",
                "raise limits.http_max_conns_per_client, or run an agent on each host",
            )
        )
    least = _seconds(debug.get("SessionTTLMin")) or 10.0
    if ttl < least:
        findings.append(
            Finding(
                "ttl-raised",
                "info",
                f"the server grants a ttl of at least {least:g} s: these locks have that ttl, not {ttl:g} s",
                "lower session_ttl_min on the servers, or accept the longer ttl",
            )
        )
    return findings


def _library() -> list[Finding]:
    try:
        version = metadata.version("python-consul")
    except metadata.PackageNotFoundError:
        return []
    return [
        Finding(
            "python-consul",
            "warning",
            f"python-consul {version} is installed: it is not maintained, and py-consul overwrites parts of it",
            "pip uninstall python-consul py-consul; pip install py-consul",
        )
    ]


def _seconds(duration: object) -> float | None:
    """Parse a duration as Go writes it, such as ``1m30s``."""
    parts = re.findall(r"([0-9.]+)(ms|h|m|s)", str(duration))
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
    return sum(float(number) * units[unit] for number, unit in parts) or None
