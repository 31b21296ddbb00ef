"""ZooKeeper numbers the nodes below a parent with 32 bits. After the greatest number, nodes have no order, so claims
are refused."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from multilock import BackendRejected
from multilock_zookeeper.queue import LAST_NUMBER, contenders, is_last
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.servers_zookeeper import ZooKeeperServer

SEAL = struct.pack("!i", 1) + b"/"


@pytest.mark.parametrize("style", ["kazoo", "curator"])
def test_the_last_sequence_number_is_not_a_place_in_the_queue(style: str) -> None:
    mark = {"kazoo": "__lock__", "curator": "-lock-"}[style]
    assert is_last(f"a{mark}2147483647")
    assert not is_last(f"a{mark}2147483646")
    assert not is_last(f"a{mark}-2147483648")
    assert not is_last("another node")


def test_another_programs_node_with_an_invalid_number_of_permits_counts_as_a_lock() -> None:
    [foreign] = contenders([f"x!p{'9' * 5000}__lock__0000000001"])
    assert (foreign.mode, foreign.permits) == ("x", 0)


def count_to(server: ZooKeeperServer, path: str, number: int) -> None:
    """Set the counter of the node at ``path`` in the newest snapshot of a stopped server."""
    assert server._folder is not None
    data = Path(server._folder.name, "data", "version-2")
    snapshot = max(data.glob("snapshot.*"), key=lambda file: int(file.suffix[1:], 16))
    content = bytearray(snapshot.read_bytes())
    name = path.encode()
    begin = content.index(struct.pack("!i", len(name)) + name) + 4 + len(name)
    length = struct.unpack_from("!i", content, begin)[0]
    counter = begin + 4 + max(length, 0) + 8 + 4 * 8 + 4  # data, ACL, two numbers, two times, the version
    struct.pack_into("!i", content, counter, number)
    at = 0
    while (at := content.find(SEAL, at + 1)) > 0:  # each checksum covers all bytes before it
        if at >= 8 and struct.unpack_from("!q", content, at - 8)[0] >> 32 == 0 and at > counter:
            struct.pack_into("!q", content, at - 8, zlib.adler32(bytes(content[: at - 8])))
    snapshot.write_bytes(bytes(content))


@pytest.mark.oracle
def test_a_sequence_number_at_its_maximum_causes_no_second_holder(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    by = operator(server.endpoint)
    by.ensure_path("/multilock/job")
    by.stop()
    server.restart()  # the server writes a snapshot when it starts
    server.kill()
    count_to(server, "/multilock/job", LAST_NUMBER - 1)
    server.start()
    first, second = connect(server.url), connect(server.url)
    lease = first.lock("job").acquire(timeout=10)
    with pytest.raises(BackendRejected, match=r"counted to 2147483647.*delete that node"):
        second.lock("job").try_acquire()
    assert lease.release()
    for client in (first, second):
        with pytest.raises(BackendRejected, match="counted to 2147483647"):
            client.lock("job").acquire(timeout=5)
    by.start()
    assert by.get_children("/multilock/job") == []
    by.delete("/multilock/job")
    assert first.lock("job").try_acquire() is not None
