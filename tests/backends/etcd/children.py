"""Functions that the tests of this folder run in separate processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

import multilock
from multilock.testing import say

__all__ = ["fork_after_use", "fork_under_traffic", "fork_with_a_client_handed_over"]

FORKS = 15


def fork_after_use(url: str) -> None:
    """Fork as gunicorn does, while the client holds a lock, a watch is open, and a thread waits."""
    client = multilock.connect(url, ttl=10)
    lost = threading.Event()
    lease = client.lock("parent", on_lost=lambda _: lost.set()).acquire()
    threading.Thread(target=_wait_for, args=(client, "parent"), daemon=True).start()
    time.sleep(0.6)  # wait until the watches of holder and waiter are open
    children = [_forked(_child, client, lease, str(number)) for number in range(3)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    say("children", codes)
    say("parent", lease.is_held())
    client.force_release("parent")
    say("notice", lost.wait(5))
    client.close()
    say("done")


def _wait_for(client: multilock.Client, name: str) -> None:
    with contextlib.suppress(multilock.ClientClosed):
        client.lock(name).acquire()


def fork_under_traffic(url: str) -> None:
    """Fork repeatedly while other threads acquire and release locks."""
    client = multilock.connect(url, ttl=10)
    over = threading.Event()
    threads = [threading.Thread(target=_traffic, args=(client, f"busy-{number}", over)) for number in range(4)]
    for thread in threads:
        thread.start()
    codes = []
    for number in range(FORKS):
        child = _forked(_brief_child, client, str(number))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        time.sleep(0.02)
    over.set()
    for thread in threads:
        thread.join()
    say("children", codes)
    client.close()
    say("done")


def _traffic(client: multilock.Client, name: str, over: threading.Event) -> None:
    while not over.is_set():
        client.lock(name).acquire().release()


def _brief_child(client: multilock.Client, number: str) -> None:
    with client.lock(f"child-{number}") as lease:
        lease.renew()


def _child(client: multilock.Client, lease: multilock.Lease, number: str) -> None:
    assert lease.state is multilock.LeaseState.RELEASED
    assert not lease.release()
    assert client.lock("parent").try_acquire() is None
    mine = client.lock(f"child-{number}", ttl=4).acquire(timeout=5)
    lost = threading.Event()
    mine.on_lost(lambda _: lost.set())
    time.sleep(2.5)  # wait for two renewals, and until the watch is open
    mine.check()
    client.force_release(f"child-{number}")
    assert lost.wait(5)
    client.close()


def fork_with_a_client_handed_over(url: str) -> None:
    import grpc

    class Theirs:
        channel = grpc.insecure_channel(url.removeprefix("etcd://"))

    client = multilock.connect("etcd://", client=Theirs(), ttl=10)
    lease = client.lock("parent").acquire()
    child = _forked(_handed_over_child, client)
    say("children", [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])
    say("parent", lease.is_held() and lease.release())


def _handed_over_child(client: multilock.Client) -> None:
    try:
        client.lock("child").try_acquire()
    except multilock.ConfigurationError:
        return
    raise AssertionError("a channel of the parent was used")


def _forked(body: Callable[..., None], *arguments: object) -> int:
    child = os.fork()
    if child:
        return child
    try:
        body(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        os._exit(1)
