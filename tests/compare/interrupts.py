"""``make interrupts``: interrupt a comparison at random moments, many times. Nothing may be left behind.

Each run of ``multilock compare`` uses a Redis, an etcd, a Consul, a ZooKeeper, a PostgreSQL and a file of SQLite. A
signal, SIGINT or SIGTERM, interrupts the run, once or twice. The run must then end in time. The comparison must leave
no process, key, session, lease, node, advisory lock, listening socket or temporary file. The report, judged again, must
have the same verdicts. Some runs are ended by SIGKILL: then the processes that hold locks must die with the run, and
their locks must expire. All this holds for the controls too, whose keys and nodes multilock does not list.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import redis
from kazoo.client import KazooClient

import multilock
from multilock import now
from multilock.testing import compare
from tests.servers import RedisServer
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer, etcdctl
from tests.servers_postgresql import PostgresqlServer
from tests.servers_zookeeper import ZooKeeperServer

TTL = 2.0
ENDS_WITHIN = 60.0  # seconds after the first signal, on an overloaded machine
GONE_WITHIN = 30.0  # seconds until the locks of killed processes have ended too
MARK = "MULTILOCK_INTERRUPTED_RUN"


def main(times: int, within: float, seed: int) -> int:
    dice, bad = random.Random(seed), 0
    with ExitStack() as stack:
        etcd, consul = stack.enter_context(EtcdServer()), stack.enter_context(ConsulServer())
        zookeeper = stack.enter_context(ZooKeeperServer(java=["-Dznode.container.checkIntervalMs=1000"]))
        postgresql = stack.enter_context(PostgresqlServer(max_connections="300"))
        urls = [stack.enter_context(RedisServer()).url, etcd.url, consul.url, zookeeper.url, postgresql.url]
        for number in range(times):
            with tempfile.TemporaryDirectory() as folder:
                after = dice.uniform(0.0, within)
                signals = dice.choice([[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT] * 2, [signal.SIGKILL]])
                wrong = list(once([*urls, f"sqlite://{folder}/locks.db"], Path(folder), after, signals, dice))
            bad += bool(wrong)
            names = " ".join(each.name for each in signals)
            print(
                f"{number + 1} of {times}: {names} after {after:.2f} s: {'; '.join(wrong) or 'nothing left'}",
                flush=True,
            )
        until = now() + GONE_WITHIN
        while (sessions := sessions_of(etcd, consul, zookeeper)) and now() < until:
            time.sleep(0.1)
    if sessions:
        bad += 1
        print(f"sessions and leases are left: {sessions}")
    print(f"{times} interrupted, {bad} left something behind (seed {seed})")
    return bool(bad)


def once(
    urls: list[str], folder: Path, after: float, signals: list[signal.Signals], dice: random.Random
) -> Iterator[str]:
    mark, out, temporary = f"{os.getpid()}.{now()}", folder / "report", folder / "tmp"
    temporary.mkdir()
    words = [*urls, "--cycles", "50", "--ttl", str(TTL), "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "multilock", "compare", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, MARK: mark, "TMPDIR": str(temporary)},
        start_new_session=True,
    ) as process:  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after)
        for number in signals:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0.0, 1.0))
        try:
            _, errors = process.communicate(timeout=ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            yield "it did not end"
            process.kill()
            return
    killed = signals == [signal.SIGKILL]
    if b"Traceback" in errors:
        yield f"it said {errors.decode()[-300:]!r}"
    elif process.returncode not in ((-signal.SIGKILL,) if killed else (130, -signal.SIGINT, -signal.SIGTERM)):
        yield f"it ended with {process.returncode}"
    yield from left_of(mark, temporary)
    for url in urls:
        yield from held_at(url)
    if (out / "report.json").exists():
        yield from compare.verify(out)


def left_of(mark: str, temporary: Path) -> Iterator[str]:
    until = now() + GONE_WITHIN
    while (left := marked(mark)) and now() < until:
        time.sleep(0.05)
    if left:
        yield f"processes {left}"
    if files := list(temporary.iterdir()):
        yield f"files {[file.name for file in files]}"


def marked(mark: str) -> list[int]:
    """Return the processes that the run started, and their children. The sockets of a process end with the process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def held_at(url: str) -> Iterator[str]:
    until = now() + GONE_WITHIN
    left = ["it does not answer"]
    with multilock.connect(url, ttl=TTL) as client:
        while left and now() < until:
            with contextlib.suppress(multilock.BackendUnavailable):
                left = [info.name for info in client.inspect_all("compare-")]
            time.sleep(0.05)
    look = {"redis": keys_at, "zookeeper": nodes_at, "postgresql": rows_at}.get(url.partition(":")[0])
    while look is not None and (left := look(url)) and now() < until:
        time.sleep(0.1)
    if left:
        yield f"{url}: {left}"


def keys_at(url: str) -> list[str]:
    """Return the keys that are left, except those that only remember the last token of a name."""
    with redis.Redis.from_url(url) as operator:
        return sorted(key.decode() for key in operator.scan_iter("*compare-*") if not key.startswith(b"{"))


def rows_at(url: str) -> list[str]:
    """Return the advisory locks and waiters that are left."""
    with psycopg.connect(url) as operator:
        waiters = operator.execute("SELECT key FROM multilock.queue WHERE until > clock_timestamp()").fetchall()
        locks = operator.execute("SELECT * FROM pg_locks WHERE locktype = 'advisory'").fetchall()
    return [*map(str, waiters), *map(str, locks)]


def nodes_at(url: str) -> list[str]:
    client = KazooClient(url.partition("://")[2])
    client.start(GONE_WITHIN)
    try:
        return nodes_below(client, "/")
    finally:
        client.stop()
        client.close()


def nodes_below(client: KazooClient, path: str) -> list[str]:
    """Return the nodes of locks that are left below ``path``. Directories are not returned, because no lock could be
    taken without them."""
    found = [f"{path.rstrip('/')}/{child}" for child in client.get_children(path) if child != "zookeeper"]
    below = [node for child in found for node in nodes_below(client, child)]
    return [*(node for node in found if "compare-" in node), *below]


def sessions_of(etcd: EtcdServer, consul: ConsulServer, zookeeper: ZooKeeperServer) -> list[object]:
    leases = etcdctl(etcd.endpoint, "lease", "list").split()[3:]
    return [*leases, *consul.sessions(), *["ZooKeeper"] * zookeeper.metric("zk_global_sessions")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--within", type=float, default=12.0, help="seconds in which the first signal comes")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    told = parser.parse_args()
    sys.exit(main(told.times, told.within, told.seed))
