"""Checks across several processes that run `holders`, on any backend."""

from __future__ import annotations

from multilock import Client, now
from multilock.testing import Helper
from multilock.testing.conformance.base import eventually, queued
from multilock.testing.conformance.faces import background
from tests.backends.holders import NAME

__all__ = ["ORDERS", "together", "writes_and_reads_are_in_order"]

#: For each process, the names in the order in which it passes them to `lock_all`.
ORDERS = [("a", "b", "c"), ("c", "b", "a"), ("b", "c"), ("c", "a", "b")]


def together(counters: list[Helper], within: float) -> None:
    """Wait until all processes that run `count_with_all` are ready, start them together, and wait until all have
    finished."""
    for counter in counters:
        counter.wait_for("ready", within)
    for counter in counters:
        counter.tell("go")
    for counter in counters:
        counter.wait_for("counted", within)


def writes_and_reads_are_in_order(client: Client, readers: list[Helper], within: float) -> None:
    """Check that a writer enters five times among processes that run `stream`.

    The writer must enter before each reader that asks while the writer waits. No read may overlap the write.
    """
    both = client.read_write_lock(NAME)
    for reader in readers:
        reader.wait_for("read", within)
    writes: list[tuple[int, float, float, float]] = []
    for _ in range(5):
        held = both.reader().acquire(timeout=within)
        eventually(lambda: not queued(client, NAME), within)  # wait until no earlier reader waits
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
