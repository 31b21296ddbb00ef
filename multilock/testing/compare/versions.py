"""The versions of the servers and client libraries of a comparison, for information only."""

from __future__ import annotations

import re
import sqlite3
from importlib.metadata import packages_distributions, version
from typing import Any

import multilock
from multilock.backend import Backend
from multilock.registry import OURS

__all__ = ["versions_of"]


def versions_of(client: multilock.Client, within: float) -> dict[str, str]:
    """Return the versions that are known, for the report."""
    backend = client._kernel.backend
    found = {"server": server} if (server := _server(backend, within)) else {}
    return found | _library(backend.scheme)


def _library(scheme: str) -> dict[str, str]:
    library = OURS[scheme].library if scheme in OURS else None
    if library is not None:
        names = packages_distributions().get(library, ())
        return {"client library": ", ".join(f"{name} {version(name)}" for name in sorted(set(names)))}
    return {"client library": f"sqlite {sqlite3.sqlite_version}"} if scheme == "sqlite" else {}


def _server(backend: Backend, within: float) -> str:
    """Return the versions of the servers of a URL. Empty if there is none, or if this user may not see it."""
    try:
        return ", ".join(dict.fromkeys(_told(backend, within)))
    except Exception:  # somebody else's backend, or a user without the permission: it is only information
        return ""


def _told(backend: Backend, within: float) -> list[str]:
    its: Any = backend
    match backend.scheme:
        case "redis" | "rediss" | "unix":
            from multilock_redis.wire import pack

            [(info, _)] = its._node.connections.exchange([pack("INFO", "server")], within)
            found = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
            kind = "valkey" if "valkey_version" in found else "redis"
            return [f"{kind} {found[f'{kind}_version']}"]
        case "etcd" | "etcds":
            from multilock_etcd.transport import calls
            from multilock_etcd.wire import StatusRequest

            said = [each for _, each in its._requests.each(calls.STATUS, StatusRequest(), within)]
            return [f"etcd {each.version}" for each in said if not isinstance(each, Exception)]
        case "consul" | "consuls":
            return [f"consul {its._agents.api(within).agent.self()['Config']['Version']}"]
        case "zookeeper" | "zk":
            [number] = re.findall(r"version: ([\d.]+)", its._transport.command(b"srvr", within))
            return [f"zookeeper {number}"]
    return []
