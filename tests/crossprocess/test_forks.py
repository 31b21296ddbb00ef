"""A process forks while its client is idle, holds a lock, or waits for one."""

from __future__ import annotations

import pytest

from multilock import Client
from tests.crossprocess.conftest import Start

START = 20.0
WORKERS = 3


def test_a_preloaded_client_works_in_every_worker_and_in_the_master(start: Start) -> None:
    master = start("serve", WORKERS)
    held, released, losses, *codes = master.wait_for("master", 2 * START)[1:]
    assert codes == ["0"] * WORKERS, master.lines
    assert (held, released, losses) == ("True", "True", "0")
    turns = [line.split()[1:] for line in master.lines if line.startswith("worker")]
    assert len(turns) == 20 * WORKERS
    assert len({token for _, token in turns}) == 20 * WORKERS


def test_a_preloaded_asyncio_client_works_on_the_loops_of_all_workers(start: Start) -> None:
    master = start("serve_on_loops", WORKERS)
    assert master.wait_for("master", 2 * START)[1:] == ["0"] * WORKERS, master.lines


@pytest.mark.parametrize("ending", ["os._exit", "sys.exit"])
def test_a_fork_does_not_disturb_a_waiting_thread_of_the_parent(client: Client, start: Start, ending: str) -> None:
    lease = client.lock("n").acquire(timeout=START)
    token = lease.fence()
    parent = start("fork_while_waiting", ending)
    parent.wait_for("forked", START)
    assert parent.wait_for("child", START)[1:] == ["True", "True"]
    assert client.lock("n").try_acquire() is None
    lease.release()
    assert int(parent.wait_for("waited", 5)[1]) > token
