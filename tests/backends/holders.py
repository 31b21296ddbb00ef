"""What helper processes do with readers, writers and permits of one name, on any backend: see `Helper`."""

from __future__ import annotations

import multilock
from multilock import Client, now
from multilock.testing import Helper, hear, say
from multilock.testing.conformance.faces import background

__all__ = ["NAME", "hold_permit", "read", "stream", "write", "writes_and_reads_are_in_order"]

NAME = "a"
PERMITS = 3


def read(url: str, prefix: str, ttl: str) -> None:
    with _connect(url, prefix, ttl) as client:
        lease = client.read_write_lock(NAME).reader().acquire()
        say("held")
        while hear() is not None:
            say("state", lease.state.name, lease.release())


def write(url: str, prefix: str, ttl: str) -> None:
    with _connect(url, prefix, ttl) as client:
        say("asks")
        client.read_write_lock(NAME).writer().acquire()
        say("held")
        hear()


def hold_permit(url: str, prefix: str, ttl: str) -> None:
    with _connect(url, prefix, ttl) as client:
        client.semaphore(NAME, PERMITS).acquire()
        say("held")
        hear()


def stream(url: str, prefix: str, ttl: str) -> None:
    """Read all the time, by waiting and by trying; says with which token, and from when to when."""
    with _connect(url, prefix, ttl) as client:
        lock = client.read_write_lock(NAME).reader()
        say("begins")
        ends = background(hear)
        turn = 0
        while not ends.done():
            turn += 1
            lease = lock.acquire() if turn % 2 else lock.try_acquire()
            if lease:
                began = now()
                say("read", lease.fence(), began, now())
                lease.release()


def _connect(url: str, prefix: str, ttl: str) -> Client:
    return multilock.connect(url, prefix=prefix, ttl=float(ttl))


def writes_and_reads_are_in_order(client: Client, readers: list[Helper], within: float) -> None:
    """In the test: a writer is in five times among those who `stream`, and each read that began before it has ended;
    each that asked after it comes later."""
    for reader in readers:
        reader.wait_for("read", within)
    writes: list[tuple[int, float, float]] = []
    for _ in range(5):
        with client.read_write_lock(NAME).writer().acquire(timeout=within) as lease:
            writes.append((lease.fence(), now(), now()))
        readers[0].wait_for("read", within)
    for reader in readers:
        reader.tell("end")
        assert reader.wait(within) == 0
    lines = [line.split() for reader in readers for line in reader.lines if line.startswith("read ")]
    reads = [(int(token), float(began), float(ended)) for _, token, began, ended in lines]
    for number, entered, left in writes:
        assert all(ended <= entered for token, _, ended in reads if token < number)
        assert all(began >= left for token, began, _ in reads if token > number)
