"""Report what weakens the lock on this etcd cluster, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from multilock import Finding, MultilockError
from multilock_etcd import wire
from multilock_etcd.transport import Cluster, EtcdTransport, NotAcknowledged, calls

__all__ = ["diagnose"]

NOBODYS = 1  # the id of a lease that does not exist: a keep-alive of it changes nothing

Version = tuple[int, int, int]

# Minor version -> its first patch release without the bug, from etcd's changelogs.
_REVOKES_EARLY: dict[tuple[int, int], int] = {(3, 4): 31, (3, 5): 13}
_RENEWS_REVOKED: dict[tuple[int, int], int] = {(3, 4): 38, (3, 5): 23, (3, 6): 5}


def diagnose(transport: EtcdTransport, cluster: Cluster, within: float) -> list[Finding]:
    """Ask every endpoint of the URL, and read the list of members. Raises the first error if no endpoint replies."""
    findings: list[Finding] = []
    silent: list[Exception] = []
    clusters: dict[int, str] = {}  # cluster id -> the first endpoint of that cluster
    for target, said in transport.each(calls.STATUS, wire.StatusRequest(), within / 2):
        if isinstance(said, Exception):
            silent.append(said)
            findings.append(_endpoint_silent(target, said))
        else:
            findings += _about_member(target, said)
            clusters.setdefault(said.header.cluster_id, target)
    for target, said in transport.each(calls.KEEP_ALIVE, wire.LeaseKeepAliveRequest(ID=NOBODYS), within / 2):
        if isinstance(said, NotAcknowledged):
            findings.append(_grpc_proxy(target))
    if len(silent) == len(cluster.targets):
        raise silent[0]
    if len(clusters) > 1:
        findings.append(_several_clusters(list(clusters.values())))
    try:
        members, _ = transport.call(calls.MEMBERS, wire.MemberListRequest(), within)
    except MultilockError:  # with authentication only root may list the members
        return findings
    return findings + list(_about_cluster(len(cluster.targets), members.members))


def _endpoint_silent(target: str, error: Exception) -> Finding:
    return Finding(
        "etcd-endpoint-silent",
        "warning",
        f"the endpoint {target} does not answer: {error}",
        "start this member, or take it out of the URL",
    )


def _several_clusters(targets: list[str]) -> Finding:
    return Finding(
        "etcd-several-clusters",
        "error",
        f"the URL names members of {len(targets)} different clusters ({', '.join(targets)}). If a client fails over to "
        "another cluster, it finds each lock free there",
        "name the members of one cluster",
    )


def _grpc_proxy(target: str) -> Finding:
    return Finding(
        "etcd-grpc-proxy",
        "error",
        f"{target} acknowledges no renewal, as an etcd grpc-proxy does not: no lock can be held through it",
        "name the members of the cluster in the URL",
    )


def _about_member(target: str, status: object) -> Iterator[Finding]:
    version = _version(getattr(status, "version", ""))
    if version and _older(version, _REVOKES_EARLY):
        yield Finding(
            "etcd-revokes-early",
            "error",
            f"{target} is etcd {_text(version)}: after a pause of its leader it may end leases that are still renewed, "
            "so that a second holder gets the lock",
            "upgrade to 3.4.31, 3.5.13 or later",
        )
    if version and _older(version, _RENEWS_REVOKED):
        yield Finding(
            "etcd-renews-revoked",
            "warning",
            f"{target} is etcd {_text(version)}: it may acknowledge the renewal of a lease that was revoked",
            "upgrade to 3.4.38, 3.5.23, 3.6.5 or later",
        )
    for error in getattr(status, "errors", ()):
        yield Finding("etcd-member-error", "error", f"{target} reports: {error}", "see `etcdctl alarm list`")
    if getattr(status, "isLearner", False):
        yield Finding("etcd-learner", "warning", f"{target} is a learner and refuses requests", "promote it")


def _about_cluster(endpoints: int, members: object) -> Iterator[Finding]:
    voters = [member for member in members if not member.isLearner]  # type: ignore[attr-defined]
    if len(voters) == 1:
        yield Finding(
            "etcd-single-member",
            "info",
            "the cluster has one member: no lock can be acquired while it is down, and all are lost with its disk",
            "run three or five members",
        )
    elif len(voters) % 2 == 0:
        yield Finding(
            "etcd-even-members",
            "info",
            f"the cluster has {len(voters)} voting members, which tolerate {len(voters) // 2 - 1} "
            f"failure{'s' * (len(voters) != 4)}, the same as {len(voters) - 1}",
            "run three or five members",
        )
    if endpoints < len(voters):
        yield Finding(
            "etcd-few-endpoints",
            "info",
            f"the URL names {endpoints} of {len(voters)} members: if those fail, the others cannot be reached",
            "name all members: etcd://h1:2379,h2:2379,h3:2379",
        )


def _version(text: str) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _older(version: Version, first_good: dict[tuple[int, int], int]) -> bool:
    line = version[:2]
    return line < min(first_good) or version[2] < first_good.get(line, 0)


def _text(version: Version) -> str:
    return ".".join(map(str, version))
