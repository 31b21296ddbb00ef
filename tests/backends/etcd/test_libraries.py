"""The client works with each supported version of protobuf, beside other etcd packages, and with an etcd3 client that
is passed to connect()."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import multilock
from multilock import Client
from tests.servers_etcd import EtcdServer

# The tested versions of protobuf, besides the installed one.
PROTOBUFS = ["3.20.3", *(pytest.param(each, marks=pytest.mark.rare) for each in ("4.25.8", "5.29.5")), "6.33.0"]

LOCK = """
import sys, multilock
assert not [name for name in sys.modules if name.startswith(("grpc", "google.protobuf"))], "imported too early"
with multilock.connect(sys.argv[1]) as client, client.lock("job") as lease:
    assert client.lock("job").try_acquire() is None
import google.protobuf
print(google.protobuf.__version__)
"""

ETCD3 = """
import sys
host, port = sys.argv[1].removeprefix("etcd://").split(":")
if sys.argv[2] == "first":
    import etcd3, multilock
else:
    import multilock
    multilock.connect(sys.argv[1]).ping()
    import etcd3
theirs = etcd3.client(host=host, port=int(port))
with multilock.connect("etcd://", client=theirs) as client:
    with client.lock("job") as lease:
        assert theirs.get("multilock/job/" + lease.owner.partition("@")[0])[0].startswith(b'{"v":1')
    theirs.put("other", "value")
assert theirs.status().version, "the client was closed"
print("ok")
"""


def install(folder: Path, *packages: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *packages],
        check=True,
        capture_output=True,
    )


def run(program: str, folder: Path, *arguments: str) -> str:
    """Run ``program`` in a separate process, which finds the packages of ``folder`` before the installed ones."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("version", PROTOBUFS)
def test_the_messages_work_with_any_version_of_protobuf(version: str, shared: EtcdServer, tmp_path: Path) -> None:
    install(tmp_path, "--no-deps", f"protobuf=={version}")
    assert run(LOCK, tmp_path, shared.url) == version


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("order", ["first", "last"])
def test_an_etcd3_client_is_used_through_its_channel_and_stays_open(
    order: str, shared: EtcdServer, tmp_path: Path
) -> None:
    install(tmp_path, "protobuf==3.20.3", "etcd3==0.12.0")
    assert run(ETCD3, tmp_path, shared.url, order) == "ok"


class Theirs:
    """The attributes of an etcd3 client that multilock uses."""

    def __init__(self, server: EtcdServer, metadata: object) -> None:
        import grpc

        self.channel = grpc.insecure_channel(server.endpoint)
        self.metadata = metadata


@pytest.mark.parametrize("metadata", [None, [("who", "them")]])
def test_a_client_object_passed_to_connect_is_not_closed(shared: EtcdServer, metadata: object) -> None:
    theirs = Theirs(shared, metadata)
    for _ in range(2):
        client: Client = multilock.connect("etcd://", client=theirs, prefix="handed/")
        with client.lock("job"):
            assert client.lock("job").try_acquire() is None
        client.close()
    theirs.channel.close()


def test_the_messages_are_not_registered_in_the_shared_pool_of_protobuf() -> None:
    from google.protobuf import descriptor_pool

    from multilock_etcd import wire

    mine = wire.TxnRequest.DESCRIPTOR.file
    assert mine.pool is not descriptor_pool.Default()
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName(mine.name)
