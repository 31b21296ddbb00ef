"""diagnose() finds each weakness of the lock on this server, and names the remedy."""

from __future__ import annotations

import pytest
import redis

from multilock.model import Finding
from multilock_redis.diagnosis import CHECKS
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, eventually
from tests.servers import RedisServer


def found(ours: Ours) -> dict[str, Finding]:
    findings = ours.backend.diagnose(2)
    assert all(finding.message and finding.remedy for finding in findings)
    return {finding.code: finding for finding in findings}


def test_diagnose_finds_nothing_on_a_well_configured_server() -> None:
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        ours = Ours(server.url)
        assert found(ours) == {}
        ours.close()


def test_diagnose_finds_settings_that_weaken_the_lock(us: Ours, bare: Bare) -> None:
    assert found(us).keys() == {"persistence"}
    bare.config_set("maxmemory-policy", "volatile-lru")
    assert found(us)["eviction"].level == "info"
    bare.config_set("maxmemory", 2**30)
    assert found(us)["eviction"].level == "warning"
    bare.config_set("maxmemory", 0)
    bare.config_set("maxmemory-policy", "noeviction")


def test_diagnose_reports_a_node_of_a_cluster() -> None:
    with RedisServer("--cluster-enabled", "yes") as server:
        ours = Ours(server.url)
        assert found(ours)["cluster"].level == "error"
        ours.close()


def test_diagnose_reports_an_append_only_file_written_once_a_second() -> None:
    with RedisServer("--appendonly", "yes") as server:
        ours = Ours(server.url)
        assert "everysec" in found(ours)["persistence"].message
        ours.close()


def test_diagnose_reports_a_replica_and_its_primary(us: Ours, server: RedisServer, redis_server: RedisServer) -> None:
    with redis.Redis(port=server.port) as primary:
        primary.config_set("repl-diskless-sync-delay", 0)
    with redis.Redis(port=redis_server.port) as bare:
        bare.replicaof("127.0.0.1", server.port)
        replica = Ours(redis_server.url)
        assert found(replica)["replica"].level == "error"
        replica.close()
        eventually(lambda: bare.info("replication")["master_link_status"] == "up", within=10)
        assert "failover" in found(us)
        bare.replicaof("NO", "ONE")


def test_settings_that_cannot_be_read_are_a_finding_and_not_an_error(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    bare.acl_setuser("app", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"], reset=True)
    ours = connect(server.url.replace("//", "//app:x@"))
    assert found(ours).keys() == {"hidden", "persistence"}  # INFO reports the persistence even without CONFIG
    bare.acl_setuser("app", enabled=True, nopass=True, keys=["*"], commands=["+ping"], reset=True)
    ours = connect(server.url.replace("//", "//app:x@"))
    assert found(ours).keys() == {"hidden"}


@pytest.mark.parametrize(
    ("facts", "old"),
    [
        ({"redis_version": "5.0.14"}, True),
        ({"redis_version": "6.0.16"}, False),
        ({"redis_version": "8.2.1"}, False),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "7.2.5"}, False),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "7.1.0"}, True),
        ({}, False),
    ],
)
def test_diagnose_reports_a_server_older_than_the_tested_versions(facts: dict[str, str], old: bool) -> None:
    assert any(finding.code == "version" for check in CHECKS if (finding := check(facts))) is old
