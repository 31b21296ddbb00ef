"""``make compare``: run ``multilock compare`` over all six backends, on servers of its own. Its arguments are passed
on.

It gets the process ids of the servers, so that it can stop them too.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack

import pytest

from multilock.cli import main
from tests.servers import RedisServer
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer
from tests.servers_zookeeper import ZooKeeperServer

__all__ = ["compare_all"]


def compare_all(words: list[str]) -> int:
    with ExitStack() as stack:
        kinds = (RedisServer, EtcdServer, ConsulServer, ZooKeeperServer)
        servers = [stack.enter_context(kind()) for kind in kinds]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = ["memory://", f"sqlite://{folder}/locks.db", *(server.url for server in servers)]
        pids = [word for server in servers for word in ("--server-pid", f"{server.url}={server.pid}")]
        sys.argv = ["multilock", "compare", *urls, *pids, *words]
        return main()


if __name__ == "__main__":
    try:
        sys.exit(compare_all(sys.argv[1:]))
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:
        sys.exit(str(missing))
