"""Functions that the tests of this folder run in separate processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from kazoo.client import KazooClient

import multilock
from multilock.testing import say

__all__ = ["fork_after_use", "fork_with_a_client_handed_over"]


def fork_after_use(url: str) -> None:
    """Fork as gunicorn does, while the client holds a lock, a watch is open, and a thread waits."""
    client = multilock.connect(url, ttl=10)
    lost = threading.Event()
    lease = client.lock("parent", on_lost=lambda _: lost.set()).acquire()
    threading.Thread(target=_wait_for, args=(client, "parent"), daemon=True).start()
    time.sleep(0.6)  # wait until both watches are set
    children = [_forked(_child, client, lease, str(number)) for number in range(3)]
    say("children", [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    say("parent", lease.is_held())
    client.force_release("parent")
    say("notice", lost.wait(5))
    client.close()
    say("done")


def fork_with_a_client_handed_over(url: str) -> None:
    theirs = KazooClient(url.partition("://")[2], timeout=10)
    theirs.start()
    client = multilock.connect("zookeeper://", client=theirs, ttl=10)
    lease = client.lock("parent").acquire()
    child = _forked(_child, client, lease, "0")
    say("children", [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])
    say("parent", lease.is_held() and theirs.connected)
    client.close()
    theirs.stop()


def _wait_for(client: multilock.Client, name: str) -> None:
    with contextlib.suppress(multilock.ClientClosed):
        client.lock(name).acquire()


def _child(client: multilock.Client, lease: multilock.Lease, name: str) -> None:
    assert not lease.is_held()
    assert client.lock("parent").try_acquire() is None
    with client.lock(f"child-{name}") as own:
        assert own.is_held()
    client.close()


def _forked(body: Callable[..., None], *arguments: object) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        body(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)
