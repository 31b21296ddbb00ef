"""Report what weakens the lock on this server, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from multilock import BackendRejected, Finding, MultilockError
from multilock.options import tls_findings
from multilock_redis.connections import Connections
from multilock_redis.followed_primary import Told
from multilock_redis.node import Node
from multilock_redis.sentinel import SentinelEndpoint
from multilock_redis.slot_table import SLOTS, Address, SlotTable
from multilock_redis.wire import pack, spelled

__all__ = ["diagnose", "diagnose_cluster", "diagnose_sentinels"]

Facts = Mapping[str, str]

Check = Callable[[Facts], Finding | None]

SETTINGS = (
    "maxmemory-policy",
    "appendonly",
    "appendfsync",
    "min-replicas-to-write",
    "cluster-require-full-coverage",
)
OLDEST = {"redis": (6, 0), "valkey": (7, 2)}


def diagnose(
    connections: Connections,
    within: float,
    checks: Sequence[Check] | None = None,
    *,
    replicas: int = 0,
) -> list[Finding]:
    """Read the server's settings in one round trip, and check them.

    ``replicas`` is how many replicas must acknowledge a grant. Raises the same errors as a request.
    """
    requests = [pack("INFO"), *(pack("CONFIG", "GET", setting) for setting in SETTINGS)]
    (info, _), *settings = connections.exchange(requests, within)
    if isinstance(info, Exception) and not isinstance(info, BackendRejected):
        raise info
    findings: list[Finding] = []
    facts: dict[str, str] = {}
    if isinstance(info, Exception):
        findings.append(_hidden(f"INFO: {info}"))
    else:
        facts["replicas="] = str(replicas)
        facts |= (line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
    for answer, _ in settings:
        if isinstance(answer, Exception):
            findings.append(_hidden(f"CONFIG GET: {answer}"))
            break
        facts |= [pair for pair in [tuple(word.decode() for word in answer)] if len(pair) == 2]
    findings += [finding for check in checks or CHECKS if (finding := check(facts))]
    findings += tls_findings(connections.tls)
    return [replace(finding, remedy=spelled(finding.remedy, connections.where)) for finding in findings]


def diagnose_cluster(
    table: SlotTable, nodes: Iterable[tuple[Address, Node]], left: Callable[[], float], replicas: int
) -> Iterator[Finding]:
    """Return the findings about the cluster, then those about each primary, without duplicates. ``left`` returns the
    seconds left."""
    found: dict[Finding, list[str]] = {}
    alone: list[str] = []
    for address, node in nodes:
        for finding in diagnose(node.connections, left(), CLUSTER_CHECKS, replicas=replicas):
            found.setdefault(finding, []).append(str(address))
        if not table.replicas.get(address):
            alone.append(str(address))
    if uncovered := table.uncovered():
        yield Finding(
            "uncovered",
            "error",
            f"{uncovered} of {SLOTS} slots are served by no node: locks in them cannot be acquired",
            "bring their primary back, or redis-cli --cluster fix",
        )
    if alone:
        yield Finding(
            "alone",
            "warning",
            f"{', '.join(alone)} has no replica: if it ends, its locks can be neither acquired nor released",
            "add a replica to each primary",
        )
    for finding, which in found.items():
        where = "" if len(which) == len(table.primaries) else f" ({', '.join(which)})"
        yield replace(finding, message=f"{finding.message}{where}")


def diagnose_sentinels(endpoint: SentinelEndpoint, now: Callable[[], float], within: float) -> list[Finding]:
    """Ask each Sentinel of the URL, then each Sentinel that they have named."""
    deadline = now() + within
    told: list[Told] = []
    findings: list[Finding] = []
    everybody = endpoint.everybody()
    for i, sentinel in enumerate(everybody):
        try:
            told.append(endpoint.ask(sentinel, (deadline - now()) / (len(everybody) - i), now))
        except MultilockError as error:
            remedy = "start it, or take it out of the URL"
            if sentinel.learnt:
                remedy = "let this host reach it; if it is gone for good, run SENTINEL RESET at the others"
            findings.append(Finding("sentinel", "warning", str(error), remedy))
    if not told:
        return findings
    newest = max(told, key=lambda each: each.epoch)
    number, quorum, replicas = newest.number, int(newest.facts.get("quorum", 0)), int(newest.facts.get("num-slaves", 0))
    if len(endpoint.sentinels) == 1:
        findings.append(
            Finding(
                "one-sentinel",
                "warning",
                f"the URL names one address of Sentinels, {endpoint.sentinels[0]}: a client that starts while that "
                "address is unreachable, or while that Sentinel is isolated, has no other to ask",
                "give the addresses of all Sentinels",
            )
        )
    if hidden := sorted({each.hidden for each in told if each.hidden}):
        findings.append(
            Finding(
                "sentinel-hidden",
                "warning",
                f"a Sentinel does not reveal the other Sentinels, or its own id: {hidden[0]}",
                "allow this user SENTINEL|SENTINELS and SENTINEL|MYID (Redis 6.2 or newer)",
            )
        )
    if len({each.primary for each in told}) > 1:
        places = ", ".join(sorted({str(each.primary) for each in told}))
        findings.append(
            Finding(
                "sentinels-differ",
                "error",
                f"the Sentinels name different primaries: {places}; two clients may hold one lock",
                "check that each Sentinel reaches the others; after a failover wait for some seconds, and try again",
            )
        )
    if number < 3 or quorum > number:
        findings.append(
            Finding(
                "quorum",
                "error" if quorum > number or number < 2 else "warning",
                f"{number} Sentinels watch over {endpoint.primary!r}, and {quorum} have to agree that it is down: "
                "a failover needs a majority of them",
                "run three Sentinels or more, on machines that fail independently, with a quorum of a majority",
            )
        )
    if not replicas:
        findings.append(
            Finding(
                "no-replicas",
                "warning",
                f"the Sentinels know no replica of {endpoint.primary!r}, so none can take over",
                spelled("add a replica, or use redis:// for a single server", endpoint.name),
            )
        )
    return findings


def _hidden(what: str) -> Finding:
    return Finding(
        "hidden",
        "info",
        f"the server's settings cannot be read, so weak ones are not found ({what})",
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
        "version",
        "error",
        f"{server} {version} is older than the versions multilock is tested with",
        f"use {oldest} or newer",
    )


def _replica(facts: Facts) -> Finding | None:
    if facts.get("role") != "slave":
        return None
    return Finding(
        "replica", "error", "this server is a replica, and grants no locks", "give the address of the primary"
    )


def _cluster(facts: Facts) -> Finding | None:
    if facts.get("cluster_enabled") != "1":
        return None
    return Finding(
        "cluster",
        "error",
        "this server is a node of a cluster: keys of other nodes are refused, and so are renewals of several locks",
        "give redis+cluster://, or use a server that is not in cluster mode",
    )


def _coverage(facts: Facts) -> Finding | None:
    if facts.get("cluster-require-full-coverage", "no") == "no":
        return None
    return Finding(
        "coverage",
        "info",
        "cluster-require-full-coverage is yes: while one shard has no primary, no lock of any shard can be acquired",
        "set cluster-require-full-coverage no, so that a shard that is down affects its own locks only",
    )


def _failover(facts: Facts) -> Finding | None:
    if facts.get("connected_slaves", "0") == "0":
        return None
    return Finding(
        "failover",
        "warning",
        "this server has replicas: a failover loses locks that had not reached the new primary",
        "check the fencing token at the resource, or use a backend with survives_failover",
    )


def _acknowledged(facts: Facts) -> Finding | None:
    wanted, present = int(facts.get("replicas=", 0)), int(facts.get("connected_slaves", 0))
    if not wanted or wanted == present:
        return None
    if wanted > present:
        what = f"replicas={wanted}, but only {present} are connected: no lock is granted"
        return Finding("replicas", "error", what, "connect as many replicas, or lower replicas=")
    return Finding(
        "replicas",
        "warning",
        f"replicas={wanted} of {present}: a failover to a replica that had not acknowledged a lock loses that lock",
        f"set replicas={present}, but consider that no lock is granted then while one of them is down",
    )


def _cut_off(facts: Facts) -> Finding | None:
    if facts.get("connected_slaves", "0") == "0" or facts.get("min-replicas-to-write", "1") != "0":
        return None
    return Finding(
        "min-replicas-to-write",
        "warning",
        "min-replicas-to-write is 0: a replaced primary that was cut off still grants locks to clients that reach it",
        "set min-replicas-to-write 1 and min-replicas-max-lag to a few seconds",
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
        "set maxmemory-policy noeviction, or use a separate server for locks",
    )


def _persistence(facts: Facts) -> Finding | None:
    appends = facts.get("appendonly") or {"0": "no", "1": "yes"}.get(facts.get("aof_enabled", ""), "")
    if appends == "no":
        what = "appendonly is no: a restart loses all locks"
    elif appends == "yes" and facts.get("appendfsync", "always") != "always":
        what = f"appendfsync is {facts['appendfsync']}: a crash of the machine loses the newest locks"
    else:
        return None
    return Finding("persistence", "warning", what, "set appendonly yes and appendfsync always")


CHECKS: tuple[Check, ...] = (
    _version,
    _replica,
    _cluster,
    _failover,
    _acknowledged,
    _cut_off,
    _eviction,
    _persistence,
)
CLUSTER_CHECKS: tuple[Check, ...] = (
    _version,
    _coverage,
    _failover,
    _acknowledged,
    _cut_off,
    _eviction,
    _persistence,
)
