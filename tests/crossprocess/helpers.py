"""Functions of the helper processes. `multilock.testing.Helper` starts each of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import multilock
from multilock import Client, Lease, LeaseState, Loss, NotHeld
from multilock.aio import AsyncClient
from multilock.testing import hear, say

NAME = "n"


def _say_loss(loss: Loss) -> None:
    say("lost", loss.reason.value)


# ---- a holder that obeys commands


def hold(url: str, ttl: str, ending: str = "told") -> None:
    """Hold the lock until the test sends a command, or end in the given way while the lock is held."""
    client = multilock.connect(url, ttl=float(ttl))
    lease = client.lock(NAME, on_lost=_say_loss).acquire(timeout=20)
    say("held", lease.token)
    if ending == "return":
        return
    if ending == "raise":
        raise RuntimeError("the program ends with an error")
    if ending == "sys.exit":
        sys.exit(3)
    if ending == "os._exit":
        os._exit(4)
    while (word := hear()) is not None:
        if word == "report":
            say("report", lease.is_held(), lease.state.value)
        elif word == "release":
            say("released", lease.release())


def hold_on_loop(url: str, ttl: str, ending: str = "told") -> None:
    asyncio.run(_hold_on_loop(url, float(ttl), ending))


async def _hold_on_loop(url: str, ttl: float, ending: str) -> None:
    client = multilock.connect_async(url, ttl=ttl)
    lease = await client.lock(NAME, on_lost=_say_loss).acquire(timeout=20)
    say("held", lease.token)
    if ending == "return":
        return
    if ending == "raise":
        raise RuntimeError("the program ends with an error")
    if ending == "sys.exit":
        sys.exit(3)
    if ending == "os._exit":
        os._exit(4)
    while (word := await asyncio.to_thread(hear)) is not None:
        if word == "report":
            say("report", lease.is_held(), lease.state.value)
        elif word == "release":
            say("released", await lease.release())


def wait(url: str, ttl: str) -> None:
    """Wait in the queue, hold the lock for a moment, and report the times."""
    client = multilock.connect(url, ttl=float(ttl))
    threading.Thread(target=_tell_when_queued, args=(client,), daemon=True).start()
    with client.lock(NAME, fair=True).acquire(timeout=60) as lease:
        say("got", multilock.now(), lease.token)
    hear()


def _tell_when_queued(client: Client) -> None:
    while (info := client.inspect(NAME)) is not None and not info.waiting:
        time.sleep(0.005)
    say("queued")


# ---- contention


def count(url: str, path: str, rounds: str) -> None:
    """Add one to the number in a file, ``rounds`` times. Without a lock, some increments would be lost."""
    counter = Path(path)
    with multilock.connect(url, ttl=5.0) as client:
        lock = client.lock(NAME)
        for _ in range(int(rounds)):
            with lock as lease:
                number = _read(counter)
                time.sleep(0)
                counter.write_text(str(number + 1))
                say("token", lease.token)
    say("done")


def _read(counter: Path) -> int:
    return int(counter.read_text() or 0)


def count_on_loop(url: str, path: str, rounds: str) -> None:
    asyncio.run(_count_on_loop(url, Path(path), int(rounds)))


async def _count_on_loop(url: str, counter: Path, rounds: int) -> None:
    async with multilock.connect_async(url, ttl=5.0) as client:
        lock, write = client.lock(NAME), counter.write_text

        async def work() -> None:
            for _ in range(rounds // 2):
                async with lock.acquire() as lease:
                    number = _read(counter)
                    await asyncio.sleep(0)
                    write(str(number + 1))
                    say("token", lease.token)

        await asyncio.gather(work(), work())
    say("done")


# ---- forks


def serve(url: str, workers: str) -> None:
    """Fork workers as gunicorn does with a preloaded application. The client is a global variable, has been used, and
    holds a lock."""
    client = multilock.connect(url, ttl=6.0)
    losses: list[Loss] = []
    lease = client.lock("master", on_lost=losses.append).acquire(timeout=20)
    client.lock(NAME).acquire(timeout=20).release()
    children = [_fork(lambda: _work(client, lease, losses)) for _ in range(int(workers))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    from multilock.testing.conformance.base import until_renewed  # imports pytest, which no other process needs

    until_renewed(lease)  # the parent still renews its lease after the children have ended
    say("master", lease.is_held(), lease.release(), len(losses), *codes)


def _work(client: Client, inherited: Lease, losses: list[Loss]) -> None:
    assert inherited.state is LeaseState.RELEASED
    assert not inherited.is_held()
    assert not inherited.release()
    assert client.lock("master").try_acquire() is None
    for _ in range(20):
        with client.lock(NAME).acquire(timeout=20) as lease:
            say("worker", os.getpid(), lease.token)
    assert losses == []
    client.close()


def serve_on_loops(url: str, workers: str) -> None:
    """Fork workers that use the asyncio API. The loop ends before the fork, and each worker uses the client on a loop
    of its own."""
    client = multilock.connect_async(url, ttl=6.0)
    asyncio.run(_use(client))
    children = [_fork(lambda: asyncio.run(_work_on_loop(client))) for _ in range(int(workers))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    asyncio.run(_use(client))
    say("master", *codes)


async def _use(client: AsyncClient) -> None:
    async with client.lock(NAME).acquire(timeout=20):
        pass


async def _work_on_loop(client: AsyncClient) -> None:
    for _ in range(20):
        async with client.lock(NAME).acquire(timeout=20) as lease:
            say("worker", os.getpid(), lease.token)
    await client.close()


def fork_while_waiting(url: str, ending: str) -> None:
    """Fork in one thread while another thread waits for the lock. The child ends in the given way."""
    client = multilock.connect(url, ttl=2.0)
    waiter = threading.Thread(target=lambda: say("waited", client.lock(NAME).acquire(timeout=30).token))
    waiter.start()
    _tell_when_queued(client)

    def child() -> None:
        try:
            client.current_lease()
        except NotHeld:
            say("child", client.lock(NAME).try_acquire() is None, client.lock("other").acquire(timeout=5).is_held())
        if ending == "sys.exit":
            sys.exit(0)

    os.waitpid(_fork(child), 0)
    say("forked")
    hear()
    waiter.join()


def _fork(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()  # type: ignore[operator]
            code = 0
        except SystemExit:  # the interpreter ends, and runs its exit handlers
            raise
        finally:
            if not isinstance(sys.exc_info()[1], SystemExit):
                if error := sys.exc_info()[1]:
                    say("error", repr(error))
                os._exit(code)
    return pid


def die_by_sigterm(url: str, ttl: str) -> None:
    client = multilock.connect(url, ttl=float(ttl))
    say("held", client.lock(NAME).acquire(timeout=20).token)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
