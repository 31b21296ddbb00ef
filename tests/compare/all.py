"""``make compare``: start servers, and run ``multilock compare`` on all seven backends. Arguments are passed on to
``multilock compare``.

The command gets the process ids of the servers, so that it can stop them too.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from functools import partial

import pytest

from multilock.cli import main
from tests.servers import RedisServer
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer
from tests.servers_postgresql import PostgresqlServer
from tests.servers_zookeeper import ZooKeeperServer

__all__ = ["compare_all"]


def compare_all(words: list[str]) -> int:
    with ExitStack() as stack:
        # enough for as many cycles at once as on the other backends
        postgresql = partial(PostgresqlServer, max_connections="500")
        kinds = (RedisServer, EtcdServer, ConsulServer, ZooKeeperServer, postgresql)
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
