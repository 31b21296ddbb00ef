"""What of this server and its settings weakens the lock, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from multilock import BackendRejected, Finding
from multilock_redis.node import Node
from multilock_redis.slots import SLOTS, Address, SlotTable
from multilock_redis.transport import Connections
from multilock_redis.wire import pack

__all__ = ["diagnose", "diagnose_cluster"]

Facts = Mapping[str, str]

Check = Callable[[Facts], Finding | None]

SETTINGS = ("maxmemory-policy", "appendonly", "appendfsync", "cluster-require-full-coverage")
OLDEST = {"redis": (6, 0), "valkey": (7, 2)}


def diagnose(
    connections: Connections, refused: Iterable[str], within: float, checks: Sequence[Check] | None = None
) -> list[Finding]:
    """Two round trips. ``refused``: what the server has already denied to this client."""
    requests = [pack("INFO"), *(pack("CONFIG", "GET", setting) for setting in SETTINGS)]
    (info, _), *settings = connections.exchange(requests, within)
    if isinstance(info, Exception) and not isinstance(info, BackendRejected):
        raise info
    findings = [
        Finding("refused", "warning", text, "allow this user CLIENT|ID, CLIENT|TRACKING, SUBSCRIBE and the channels")
        for text in refused
    ]
    facts: dict[str, str] = {}
    if isinstance(info, Exception):
        findings.append(_hidden(f"INFO: {info}"))
    else:
        facts |= (line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
    for answer, _ in settings:
        if isinstance(answer, Exception):
            findings.append(_hidden(f"CONFIG GET: {answer}"))
            break
        facts |= [pair for pair in [tuple(word.decode() for word in answer)] if len(pair) == 2]
    return findings + [finding for check in checks or CHECKS if (finding := check(facts))]


def diagnose_cluster(
    table: SlotTable, nodes: Iterable[tuple[Address, Node]], left: Callable[[], float]
) -> Iterator[Finding]:
    """What is to be said of the whole, then what each primary says of itself, once. ``left`` is in seconds."""
    found: dict[Finding, list[str]] = {}
    alone: list[str] = []
    for address, node in nodes:
        for finding in diagnose(node.connections, node.listener.refused.values(), left(), CLUSTER_CHECKS):
            found.setdefault(finding, []).append(str(address))
        if not table.replicas.get(address):
            alone.append(str(address))
    if uncovered := table.uncovered():
        yield Finding(
            "uncovered",
            "error",
            f"{uncovered} of {SLOTS} slots are served by no node: no lock in them can be taken",
            "bring their primary back, or redis-cli --cluster fix",
        )
    if alone:
        yield Finding(
            "alone",
            "warning",
            f"{', '.join(alone)} has no replica: when it ends, its locks can be neither taken nor given back",
            "add a replica to each primary",
        )
    for finding, which in found.items():
        where = "" if len(which) == len(table.primaries) else f" ({', '.join(which)})"
        yield replace(finding, message=f"{finding.message}{where}")


def _hidden(what: str) -> Finding:
    return Finding(
        "hidden",
        "info",
        f"the server's settings cannot be read, so that weak ones stay unnoticed ({what})",
        "allow this user INFO and CONFIG|GET, or check maxmemory-policy and appendfsync by hand",
    )


def _version(facts: Facts) -> Finding | None:
    server = "valkey" if "valkey_version" in facts else "redis"
    version = facts.get(f"{server}_version", "")
    parts = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if not parts or tuple(parts) >= OLDEST[server]:
        return None
    oldest = ".".join(map(str, OLDEST[server]))
    return Finding(
        "version", "error", f"{server} {version} is older than what multilock is tested with", f"use {oldest} or newer"
    )


def _replica(facts: Facts) -> Finding | None:
    if facts.get("role") != "slave":
        return None
    return Finding(
        "replica", "error", "this server is a replica: no lock can be taken here", "give the address of the primary"
    )


def _cluster(facts: Facts) -> Finding | None:
    if facts.get("cluster_enabled") != "1":
        return None
    return Finding(
        "cluster",
        "error",
        "this server is a node of a cluster: keys of other nodes are refused, and so are renewals of several locks",
        "use a server that is not in cluster mode",
    )


def _coverage(facts: Facts) -> Finding | None:
    if facts.get("cluster-require-full-coverage", "no") == "no":
        return None
    return Finding(
        "coverage",
        "info",
        "cluster-require-full-coverage is yes: while one shard is without a primary no lock of any shard can be had",
        "set cluster-require-full-coverage no, so that a shard that is down stops its own locks only",
    )


def _failover(facts: Facts) -> Finding | None:
    if facts.get("connected_slaves", "0") == "0":
        return None
    return Finding(
        "failover",
        "warning",
        "this server has replicas: a failover forgets locks that had not reached the new primary",
        "check the fencing token at the resource, or use a backend with survives_failover",
    )


def _eviction(facts: Facts) -> Finding | None:
    policy = facts.get("maxmemory-policy") or facts.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return None
    limited = facts.get("maxmemory", "0") != "0"
    return Finding(
        "eviction",
        "warning" if limited else "info",
        f"maxmemory-policy is {policy}: the server may drop locks when its memory is full"
        + ("" if limited else " (it has no maxmemory now)"),
        "set maxmemory-policy noeviction, or give locks a server of their own",
    )


def _persistence(facts: Facts) -> Finding | None:
    appends = facts.get("appendonly") or {"0": "no", "1": "yes"}.get(facts.get("aof_enabled", ""), "")
    if appends == "no":
        what = "appendonly is no: a restart forgets all locks"
    elif appends == "yes" and facts.get("appendfsync", "always") != "always":
        what = f"appendfsync is {facts['appendfsync']}: a crash of the machine forgets the newest locks"
    else:
        return None
    return Finding("persistence", "warning", what, "set appendonly yes and appendfsync always")


CHECKS: tuple[Check, ...] = (_version, _replica, _cluster, _failover, _eviction, _persistence)
CLUSTER_CHECKS: tuple[Check, ...] = (_version, _coverage, _failover, _eviction, _persistence)
