"""What helper processes do with readers, writers and permits of one name, on any backend: see `Helper`."""

from __future__ import annotations

from pathlib import Path

import multilock
from multilock import Client, now
from multilock.testing import Helper, hear, say
from multilock.testing.conformance.base import eventually, queued
from multilock.testing.conformance.faces import background

__all__ = [
    "NAME",
    "ORDERS",
    "count_with_all",
    "hold_permit",
    "read",
    "stream",
    "together",
    "write",
    "writes_and_reads_are_in_order",
]

NAME = "a"
PERMITS = 3
ORDERS = [("a", "b", "c"), ("c", "b", "a"), ("b", "c"), ("c", "a", "b")]


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
    """Read all the time, by waiting and by trying; says with which token, when it asked, and from when to when."""
    with _connect(url, prefix, ttl) as client:
        lock = client.read_write_lock(NAME).reader()
        say("begins")
        ends = background(hear)
        turn = 0
        while not ends.done():
            turn += 1
            asked = now()
            lease = lock.acquire() if turn % 2 else lock.try_acquire()
            if lease:
                began = now()
                say("read", lease.fence(), asked, began, now())
                lease.release()


def count_with_all(url: str, file: str, rounds: str, *names: str) -> None:
    """When told to, count in the file as often, holding all these names."""
    path = Path(file)
    with multilock.connect(url) as client:
        locks = client.lock_all(names)
        client.ping()
        say("ready")
        hear()
        for _ in range(int(rounds)):
            with locks:
                path.write_text(str(int(path.read_text()) + 1))
    say("counted")


def together(counters: list[Helper], within: float) -> None:
    """In the test: those who `count_with_all` begin when all are ready, and all come to an end."""
    for counter in counters:
        counter.wait_for("ready", within)
    for counter in counters:
        counter.tell("go")
    for counter in counters:
        counter.wait_for("counted", within)


def _connect(url: str, prefix: str, ttl: str) -> Client:
    return multilock.connect(url, prefix=prefix, ttl=float(ttl))


def writes_and_reads_are_in_order(client: Client, readers: list[Helper], within: float) -> None:
    """In the test: a writer is in five times among those who `stream`, before each that asks while it waits; each read
    before it has ended by then, and the others begin later."""
    both = client.read_write_lock(NAME)
    for reader in readers:
        reader.wait_for("read", within)
    writes: list[tuple[int, float, float, float]] = []
    for _ in range(5):
        held = both.reader().acquire(timeout=within)
        eventually(lambda: not queued(client, NAME), within)  # readers of before, who fit
        writing = background(lambda: both.writer().acquire(timeout=within))
        eventually(lambda: queued(client, NAME), within)
        waits = now()
        assert both.reader().try_acquire() is None
        assert held.release()
        with writing.result(within) as lease:
            writes.append((lease.fence(), waits, now(), now()))
        readers[0].wait_for("read", within)
    for reader in readers:
        reader.tell("end")
        assert reader.wait(within) == 0
    lines = [line.split() for reader in readers for line in reader.lines if line.startswith("read ")]
    reads = [(int(token), *map(float, times)) for _, token, *times in lines]
    for number, waits, entered, left in writes:
        assert all(token > number for token, asked, _, _ in reads if asked > waits)
        assert all(ended <= entered for token, _, _, ended in reads if token < number)
        assert all(began >= left for token, _, began, _ in reads if token > number)
