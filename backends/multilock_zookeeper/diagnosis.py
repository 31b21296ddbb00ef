"""Report what weakens the lock on this ZooKeeper ensemble, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from multilock import Finding, MultilockError, now
from multilock.options import tls_findings
from multilock_zookeeper.transport import NodeMissing, Transport

__all__ = ["diagnose"]


def diagnose(transport: Transport, within: float) -> list[Finding]:
    """Ask the server of this connection. Raises the errors of a request if the server does not reply."""
    deadline = now() + within
    session = transport.session(deadline)
    findings = tls_findings(transport.tls)
    if session.ttl < transport.asked:
        findings.append(
            Finding(
                "zookeeper-short-session",
                "warning",
                f"the server grants sessions of {session.ttl:g} s instead of the requested {transport.asked:g} s: "
                "locks end that much earlier when their holder is silent",
                "set maxSessionTimeout higher on every server, or request a smaller ttl",
            )
        )
    try:
        said = transport.command(b"srvr", deadline)
        config = dict(re.findall(r"(?m)^(\w+)=(.*)$", transport.command(b"conf", deadline)))
    except MultilockError:
        return findings
    findings += _about_server(said, transport.name)
    findings += _about_config(config, session.ttl)
    try:
        members, _ = transport.wait(transport.ensemble_config(), deadline)
    except (MultilockError, NodeMissing):
        return findings
    return findings + list(_about_members(members.decode(errors="replace")))


def _about_server(said: str, name: str) -> Iterator[Finding]:
    version = re.search(r"version: (\d+)\.(\d+)\.(\d+)", said)
    if version and tuple(map(int, version.groups())) < (3, 5, 3):
        yield Finding(
            "zookeeper-old",
            "error",
            f"{name} is ZooKeeper {'.'.join(version.groups())}, which lacks container nodes",
            "upgrade to 3.5.3 or later",
        )
    if "Mode: standalone" in said:
        yield Finding(
            "zookeeper-single",
            "info",
            "this is a single server: no lock can be acquired while it is down, and all locks are lost with its disk",
            "run three or five servers",
        )


def _about_config(config: dict[str, str], ttl: float) -> Iterator[Finding]:
    """Report what the four-letter word ``conf`` shows. By default servers do not answer this word."""
    try:
        tick, limit = int(config["tickTime"]) / 1000, int(config.get("syncLimit", "0"))
    except (KeyError, ValueError):
        return
    if ttl < 1.5 * tick:
        yield Finding(
            "zookeeper-coarse-tick",
            "error",
            f"sessions of {ttl:g} s are too short for ticks of {tick:g} s: the server may end them early",
            f"use a ttl of {2 * tick:g} s or more, or a smaller tickTime",
        )
    if ttl < limit * tick:
        yield Finding(
            "zookeeper-sync-limit",
            "info",
            f"a server that lost its leader answers reads for {limit * tick:g} s, longer than the {ttl:g} s that a "
            "session lives: other clients that trust their connection may believe in a lock that is gone",
            "multilock counts writes only, so it is not affected; for other clients lower syncLimit",
        )


def _about_members(text: str) -> Iterator[Finding]:
    voters = len(re.findall(r"(?m)^server\.\d+=.*:participant", text))
    if voters and voters % 2 == 0:
        yield Finding(
            "zookeeper-even-servers",
            "info",
            f"the ensemble has {voters} voting servers, which tolerate {voters // 2 - 1} "
            f"failure{'s' * (voters != 4)}, the same as {voters - 1}",
            "run three or five servers",
        )
